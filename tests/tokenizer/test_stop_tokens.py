"""A model whose template ends turns with another token than the tokenizer's eos stops there, in every program."""

import json
import sys

import gguf
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.inference.samples import measure_answers
from hf_pretrain.inference.terminal_chat import Chat
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.tokenizer.control_tokens import encode_prompt, find_turn_end, set_stop_tokens
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.invariants.launching import ROOT, start
from tests.rollouts import toy_trainer
from tests.serving import ask, served, texts
from tests.talking import SUM
from tests.toys import toy_model, write_jsonl


# The tokenizer's own eos, and the end of a turn in its template.
EOS, END = 0, 2
# With the spelling of the template's special token in the place of %s.
CHATML = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = [
    (CHATML, END),
    (CHATML.replace("<|im_end|>", "<|endoftext|>"), EOS),
    # As Mistral's, and with the marks of TRL.
    (
        "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }} A{% else %}{% generation %}"
        " {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
        EOS,
    ),
    # The next turn begins with the only special token.
    ("{% for m in messages %}<|im_start|>{{ m.content }}\n{% endfor %}", None),
    # It refuses to render, and it is not there.
    ("{{ raise_exception('no system message') }}", None),
    (None, None),
]


@pytest.fixture(scope="module")
def base(talker, tmp_path_factory) -> str:
    """Return the directory of the talker as a base of Qwen is published: another eos, and nothing about turns."""
    path = tmp_path_factory.mktemp("base")
    model, tokenizer = MiniMindForCausalLM.from_pretrained(talker), load_tokenizer(talker)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(EOS)
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    model.generation_config.do_sample = None
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def loaded(base):
    tokenizer = load_tokenizer(base)
    return load_model(ModelArguments(model_name_or_path=base), tokenizer).eval(), tokenizer


@pytest.mark.parametrize(("template", "end"), TEMPLATES)
def test_the_end_of_a_turn_is_found_in_templates(template, end):
    tokenizer = train_tokenizer(["some words"], vocab_size=300)
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", template
    assert find_turn_end(tokenizer) == end
    model = toy_model(vocab_size=300)
    # A special token that the publisher names stays; the id of a word, such as another vocabulary's eos, does not.
    for known, kept in ((EOS, []), ([1, 50, EOS], [1]), (50, [])):
        model.generation_config.eos_token_id = known
        set_stop_tokens(model, tokenizer)
        tokens = [EOS, *([END] if end == END else []), *kept]
        assert model.generation_config.eos_token_id == (tokens if len(tokens) > 1 else EOS)


@pytest.mark.slow
def test_chat_and_evaluation_stop_at_the_end_of_the_turn(loaded):
    model, tokenizer = loaded
    chat = Chat(model, tokenizer, {"temperature": 0, "max_new_tokens": 60})
    chat.say(SUM[0]["content"])
    assert chat.answer(list)["content"] == "It is four." and not chat.speed.startswith("60 ")
    conversations = Dataset.from_dict({"text": [json.dumps({"messages": SUM})]})
    figures = measure_answers(model, tokenizer, conversations)
    assert figures["eval_ended_answers"] == 1 and figures["eval_answer_tokens"] < 30


@pytest.mark.slow
def test_the_server_says_why_an_answer_ended(base):
    with served(base) as client:
        answer = ask(client, SUM[:1], max_tokens=60)
    assert texts(answer, stream=False) == ("add them", "It is four.") and answer.choices[0].finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["minimind", "llama", "gguf"])
def test_exports_stop_at_the_end_of_the_turn(base, tmp_path, format):
    """`convert` loads the model without its tokenizer."""
    model, tokenizer = MiniMindForCausalLM.from_pretrained(base), load_tokenizer(base)
    export(model, tmp_path / "out", format, tokenizer=tokenizer)
    if format == "gguf":
        fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
        ids = [int(fields[f"tokenizer.ggml.{name}_token_id"].parts[-1][0]) for name in ("eos", "eot")]
        assert ids == [EOS, END]
        return
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert written.generation_config.eos_token_id == [EOS, END] and written.config.eos_token_id == EOS
    prompt = torch.tensor([encode_prompt(tokenizer, SUM[:1])])
    assert written.generate(prompt, max_new_tokens=60, do_sample=False)[0, -1] == END


@pytest.mark.slow
def test_a_run_saves_both_tokens(base, tmp_path):
    data, held_out = (write_jsonl(tmp_path / name, [{"messages": SUM}] * 8) for name in ("a.jsonl", "b.jsonl"))
    words = ["--model_name_or_path", base, "--dataset_name", data, "--eval_dataset_name", held_out]
    words += "--max_length 128 --max_steps 1 --save_steps 1 --bf16 false --learning_rate 1e-5 --output_dir".split()
    result = start([sys.executable, str(ROOT / "recipes/sft.py"), *words, str(tmp_path / "sft")])
    # The sample ends with the answer.
    assert result.returncode == 0 and "It is four.<|im_end|>'\n" in result.stdout, result.stdout[-4000:]
    for path in ("sft", "sft/checkpoint-1"):
        assert GenerationConfig.from_pretrained(tmp_path / path).eos_token_id == [EOS, END]


@pytest.mark.slow
def test_reinforcement_ends_completions_at_the_end_of_the_turn(loaded, tmp_path):
    model, tokenizer = loaded
    tasks = Dataset.from_dict({"prompt": [SUM[:1]] * 4})
    options = {"max_completion_length": 60, "max_steps": 1, "learning_rate": 1e-6, "temperature": 0.1}
    trainer = toy_trainer(tokenizer, tmp_path, model=model, trainer={"train_dataset": tasks}, **options)
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0
