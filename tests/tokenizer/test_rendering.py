"""Answers in templates without marks, beside the marked templates of TRL."""

import json
import re

import numpy as np
import pytest
from jinja2 import TemplateError

from hf_pretrain.data.conversations import read_conversation
from hf_pretrain.rows.encoding import ConversationEncoder, encode_conversation
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.chat_template import add_marks
from hf_pretrain.tokenizer.control_tokens import encode_prompt, find_turn_end
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from tests.tokenizer.kinds import TRL, load, trl_template, with_template


NAMES = sorted(path.name.removesuffix("_training.jinja") for path in TRL.glob("*_training.jinja"))
MARK = re.compile(r"({%-?)\s*(?:end)?generation\s*(-?%})")
# These templates for images take texts as lists of parts only: they drop or refuse other texts.
IN_PARTS = {"idefics3", "llava_next", "smolvlm"}
# The prompt of inference does not begin the text of training: it begins a thought that the conversation never shows.
UNTRAINED = {"deepseek_r1_distill", "deepseekv3"}
# TRL also trains tokens of the generation prompt, which the model never generates, and in gptoss `<|end|>` where a
# model writes `<|return|>`.
LONGER = {"gptoss", "muse_glimmer", "qwen2_5", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"}
LONGER |= {name for name in NAMES if name.startswith("nemotron")}
# TRL also trains earlier answers whose thoughts the template drops. Those of others are in the text that TRL changed.
DROPPED = {"diffusion_gemma", "glm4moe"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CONVERSATIONS = [
    [user("Why?"), assistant("Because it is.")],
    [user("Why?"), assistant("Because it is."), user("And?"), assistant("So what.")],
    [{"role": "system", "content": "Be brief."}, user("Why?"), assistant("Because it is.")],
    [
        user("Why?"),
        assistant("It is.", reasoning_content="Hm."),
        user("So?"),
        assistant("So.", reasoning_content="Ah."),
    ],
    [user("2+2?"), assistant("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "4"}, assistant("4.")],
]


def in_parts(messages):
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def encode(tokenizer, messages):
    """Return ids and numbers of a conversation as data has it."""
    return encode_conversation(tokenizer, json.loads(read_conversation({"messages": messages}))["messages"])


def trained_text(tokenizer, ids, numbers):
    return tokenizer.decode([token for token, number in zip(ids, numbers, strict=True) if number])


def prompt_ends(tokenizer, messages, ids):
    """Return the number of tokens before each answer that the model would generate so; `None` for others."""
    ends = []
    for place in [place for place, message in enumerate(messages) if message["role"] == "assistant"]:
        found = None
        for variables in ({"enable_thinking": False}, {}):
            prompt = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, **variables).input_ids
            through = tokenizer.apply_chat_template(messages[: place + 1]).input_ids
            # Phi-3 writes eos behind the last message.
            through = through[: -1 if through[-1] == tokenizer.eos_token_id else None]
            if ids[: len(prompt)] == prompt and ids[: len(through)] == through:
                found = len(prompt)
        ends.append(found)
    return ends


def compare(tokenizer, messages, marked, fit=list):
    """
    Return our mask, TRL's, and TRL's without what the model does not generate. Return `None` if the texts differ, or
    the template refuses a role or drops a thought. TRL's template gets what `fit` makes of the messages.
    """
    kind = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        theirs = tokenizer.apply_chat_template(fit(messages), chat_template=marked, **kind)
        ids, numbers = encode(tokenizer, messages)
    except (UserError, TemplateError):
        return None
    if ids != theirs["input_ids"]:
        return None
    mask, expected = np.array(numbers) > 0, np.array(theirs["assistant_masks"], bool)
    whole = expected.copy()
    starts = np.flatnonzero(np.diff(expected.astype(int), prepend=0) == 1)
    for start, end in zip(starts, prompt_ends(tokenizer, fit(messages), ids), strict=True):
        stop = start + np.argmin([*expected[start:], False])
        expected[start : stop if end is None else max(end, start)] = False
    return mask.tolist(), whole.tolist(), expected.tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNTRAINED])
@pytest.mark.parametrize("source", ["plain", "marked"])
def test_answers_are_where_trl_marks_them(name, source):
    marked, plain = trl_template(f"{name}_training"), trl_template(name)
    if source == "marked":
        # TRL's own text, without its marks.
        plain = MARK.sub(r"\1 if true \2\1 endif \2", marked)
    tokenizer = with_template(plain)
    if (name, source) == ("qwen3_instruct_2507", "plain"):
        # MiniMind's template has the same places, and gets marks that leave out the line break behind the stop token.
        assert add_marks(plain) != plain
        return
    if (name, source) == ("glm4moe", "plain"):
        # A last answer has no stop token there. TRL's template adds one.
        with pytest.raises(UserError):
            set_template(tokenizer)
        return
    set_template(tokenizer)
    # Gemma 4 ends a call with `<|tool_response>`. We train this stop token, and TRL does not.
    # Qwen3's calls without thoughts have a test of their own.
    messages = CONVERSATIONS[: 4 if name == "diffusion_gemma" or (name, source) == ("qwen3", "plain") else None]
    fit = in_parts if name in IN_PARTS else list
    results = [compare(tokenizer, conversation, marked, fit) for conversation in messages]
    found = [result for result in results if result is not None]
    # Templates for images know no tools and thoughts.
    assert len(found) >= 2 + (name in IN_PARTS)
    assert any(found[0][0])
    for ours, theirs, expected in found:
        assert ours == expected
        assert name in LONGER | DROPPED or ours == theirs
    is_equal = [ours == theirs for ours, theirs, _ in found]
    assert any(is_equal) != (name in LONGER)


@pytest.mark.parametrize("name", sorted(IN_PARTS))
def test_texts_for_templates_that_take_parts_only(name):
    """Prompts are those of transformers, data may have both forms, and a typed stop token stays text."""
    tokenizer = with_template(trl_template(name))
    assert set_template(tokenizer) is None
    prompt = CONVERSATIONS[1][:3]
    expected = tokenizer.apply_chat_template(in_parts(prompt), add_generation_prompt=True).input_ids
    assert encode_prompt(tokenizer, prompt) == encode_prompt(tokenizer, in_parts(prompt)) == expected
    texts = [read_conversation({"messages": form}) for form in (CONVERSATIONS[1], in_parts(CONVERSATIONS[1]))]
    encoded = ConversationEncoder()(texts, tokenizer, max_length=200)
    first, second = encoded["input_ids"]
    assert first == second and first[: len(expected)] == expected
    stop, behind = ("</s>", "") if name == "llava_next" else ("<end_of_utterance>", "\n")
    assert tokenizer.decode(find_turn_end(tokenizer)) == stop
    ids, numbers = encode_conversation(tokenizer, [user("Why?"), assistant(f"a{stop}b")])
    assert trained_text(tokenizer, ids, numbers) == f" a{stop}b{stop}{behind}"
    assert [token for token, number in zip(ids, numbers, strict=True) if number].count(find_turn_end(tokenizer)) == 1


def test_a_template_of_qwen_is_whole_after_loading(tmp_path):
    # Qwen 2.5 has one of two places of a MiniMind template. A single mark would make the template invalid.
    template = trl_template("qwen2_5")
    with_template(template).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == template


SECOND = {"type": "function", "function": {"name": "mul", "arguments": {"b": 3}}}
RESULTS = [{"role": "tool", "name": name, "content": text} for name, text in (("add", "4"), ("mul", "12"))]
CALLS = [
    CONVERSATIONS[4],
    [user("2+2?"), assistant("", tool_calls=[CALL]), RESULTS[0], assistant("", tool_calls=[SECOND]), RESULTS[1]],
    [user("2+2?"), assistant("I add.", reasoning_content="Hm.", tool_calls=[CALL]), RESULTS[0]],
]
CALLS[1:] = [[*calls, assistant("It is.")] for calls in CALLS[1:]]


@pytest.mark.parametrize("calls", CALLS)
def test_calls_of_qwen3_are_trained_as_trl_trains_them(calls):
    tokenizer = with_template(trl_template("qwen3"))
    set_template(tokenizer)
    ours, theirs, _ = compare(tokenizer, calls, trl_template("qwen3_training"))
    assert ours == theirs
    # The first call is what the model generates after the prompt of inference.
    prompt = tokenizer.apply_chat_template(calls[:1], add_generation_prompt=True).input_ids
    generated = tokenizer.apply_chat_template(calls[:2]).input_ids
    ids, numbers = encode(tokenizer, calls)
    assert ids[: len(generated)] == generated and generated[: len(prompt)] == prompt
    assert numbers[: len(generated)] == [0] * len(prompt) + [1] * (len(generated) - len(prompt))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"glm4moe", *UNTRAINED}])
def test_calls_without_thoughts_are_trained(name):
    tokenizer = with_template(trl_template(name))
    set_template(tokenizer)
    for calls in CALLS[:2]:
        try:
            _, numbers = encode(tokenizer, calls)
        except UserError as error:
            # The template knows no tools.
            assert "leaves" in str(error) or "cannot render" in str(error)
        else:
            assert set(numbers) - {0} == {*range(1, 1 + len([m for m in calls if m["role"] == "assistant"]))}


def test_qwen3_trains_answers_to_the_last_question_and_says_so():
    tokenizer = with_template(trl_template("qwen3"))
    assert set_template(tokenizer).startswith("Only answers to the last question of each conversation are trained")
    messages = [user("Why?"), assistant("It is.", reasoning_content="Hm."), user("And?"), assistant("So what.")]
    ids, numbers = encode_conversation(tokenizer, messages)
    assert set(numbers) == {0, 2}
    assert tokenizer.decode(ids).count("It is.") == 1
    assert trained_text(tokenizer, ids, numbers) == "<think>\n\n</think>\n\nSo what.<|im_end|>\n"
    # The weights of messages count, also those of answers that are not trained.
    weighted = read_conversation({"messages": [*messages[:3], {**messages[3], "weight": 0.5}]})
    (_,), (weights,), _ = ConversationEncoder()([weighted], tokenizer, max_length=100).values()
    assert set(weights.tolist()) == {0, 0.5}
    # The thought of a trained answer must not get lost.
    tokenizer.chat_template = tokenizer.chat_template.replace("reasoning_content.strip", "''.strip")
    with pytest.raises(UserError):
        encode_conversation(tokenizer, messages[:2])


@pytest.mark.slow
def test_smollm2():
    tokenizer = load("smollm2")
    assert set_template(tokenizer) is None
    (ids,), (weights,), _ = ConversationEncoder()(
        [read_conversation({"messages": CONVERSATIONS[1]})], tokenizer, max_length=200
    ).values()
    assert trained_text(tokenizer, ids, weights) == "Because it is.<|im_end|>\nSo what.<|im_end|>\n"
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CONVERSATIONS[1], tokenize=False)


@pytest.mark.parametrize("name", ["qwen3", "llama3_2"])
def test_greetings_and_questions_without_answer(name):
    """A conversation may begin with the assistant and end with the user. The answer between them is trained."""
    tokenizer = with_template(trl_template(name))
    messages = [assistant("Hello."), user("Why?"), assistant("Because."), user("And?")]
    ids, numbers = encode_conversation(tokenizer, messages)
    assert "Because." in trained_text(tokenizer, ids, numbers) and set(numbers) <= {0, 2}
    # These templates write results of tools as JSON.
    result = {"role": "tool", "content": '{"temp": 5, "place": "Bergen \u00e9"}'}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}
    _, numbers = encode_conversation(tokenizer, [user("2+2?"), call, result, assistant("4.")])
    assert 2 in numbers
