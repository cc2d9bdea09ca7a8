"""Mistakes with tokenizers, their files and their chat templates."""

from hf_pretrain.rows.encoding import encode_conversation
from hf_pretrain.tokenizer.control_tokens import CHAT_TEMPLATE, encode_prompt, template_errors
from hf_pretrain.tokenizer.pretrained import add_words, check_tokenizer, load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.mistakes import Mistake
from tests.tokenizer.kinds import base, load, trl_template, with_template
from tests.toys import toy_model


USER, BOT = {"role": "user", "content": "hi"}, {"role": "bot", "content": "hi"}
THOUGHT = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
# The template of Qwen3, without thoughts.
THOUGHTLESS = trl_template("qwen3").replace("reasoning_content.strip", "''.strip")


def load_weights(tmp_path):
    (tmp_path / "weights.pth").touch()
    load_tokenizer(tmp_path / "weights.pth")


def check_without_tokens():
    bare = with_template("")
    bare.eos_token = bare.pad_token = None
    check_tokenizer(bare, vocab_size=400, name="bare")


def set_own(template, *words):
    return lambda: set_template(with_template(template), *words)


def render(template, *messages):
    return lambda: encode_prompt(with_template(template), [*messages])


def raise_without_text():
    with template_errors([USER]):
        raise RecursionError


MISTAKES = [
    Mistake("weights.pth holds weights, but no tokenizer. .*--tokenizer_name_or_path of a stage", load_weights),
    Mistake("holds no tokenizer.json. Name one that", lambda tmp_path: load_tokenizer(tmp_path)),
    Mistake("no directory ./no/such/tokenizer. Correct the name", lambda: load_tokenizer("./no/such/tokenizer")),
    Mistake(
        "mine gives ids up to LARGEST, but the model's vocab_size is LARGEST.*vocab_size=SIZE for a new model".replace(
            "LARGEST", str(len(base()) - 1)
        ).replace("SIZE", str(len(base()))),
        lambda: check_tokenizer(base(), vocab_size=len(base()) - 1, name="mine"),
    ),
    Mistake("tokenizer bare has no eos_token, pad_token. Set it in its", check_without_tokens),
    Mistake("vocab_size=200 is too small: .* at least 292", lambda: train_tokenizer(["a"], vocab_size=200)),
    Mistake("--add_tokens absent cannot be read.*Name a text file with a token", lambda: add_words(base(), "absent")),
    Mistake(
        "No GGUF with this tokenizer: only byte-level BPEs",
        lambda tmp_path: export(toy_model(), tmp_path / "out", "gguf", tokenizer=load("LlamaTokenizer")),
    ),
    # Chat templates
    Mistake("--chat_template absent cannot be read: .* Pass a Jinja template, or minimind", set_own("", "absent")),
    Mistake("minimind uses .* which are no tokens of this", lambda: set_template(load("byte-level"), "minimind")),
    Mistake("ends no answer with a special token.*would not stop", set_own(trl_template("glm4moe"))),
    *(
        Mistake(
            f"answers in the tokenizer's chat template cannot be found.*--chat_template|{name}",
            set_own(trl_template(name)),
        )
        for name in ("deepseek_r1_distill", "deepseekv3")
    ),
    Mistake("renders no token. Put one that writes messages", render("{# a comment #}", USER)),
    Mistake("renders no token", render("{% for m in messages %}{{ m.text }}{% endfor %}", USER)),
    Mistake("begins 'hi': .*role \"bot\"; known are system, user, assistant, tool", render(CHAT_TEMPLATE, BOT)),
    Mistake("content of message 1 is not text", render(CHAT_TEMPLATE, {"role": "user", "content": 3})),
    Mistake("begins 'hi': RecursionError. Change the template, or", raise_without_text),
    Mistake(
        "leaves 'Hm.' out, in a message of the assistant. Pass a template that renders tools and thoughts",
        lambda: encode_conversation(with_template(THOUGHTLESS), [USER, THOUGHT]),
    ),
]
