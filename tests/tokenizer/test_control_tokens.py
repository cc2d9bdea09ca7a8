"""Ids, masks and typed control tokens of documents and conversations, for every tokenizer of the matrix."""

import copy
import re
from itertools import product

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_pretrain.rows.encoding import encode_conversation
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.chat_template import has_marks
from hf_pretrain.tokenizer.control_tokens import (
    MARKS,
    encode_documents,
    encode_prompt,
    find_turn_end,
    thinking_variables,
)
from hf_pretrain.tokenizer.pretrained import add_words
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.conversations import CONVERSATIONS, TOOL
from tests.tokenizer.kinds import KINDS, MISTRALS, TEMPLATES, TEXT, load


USER = [
    "What is  1+2?\n\n    add(1, 2)\n", "Écris café. ", " e\u0301 ﬁ “12” 汉字 🙂\t<b>x</b>\n\n\n", "so?", "the river",
]  # fmt: skip
ANSWERS = ["Three.\n\nThe river runs.", "café", "def add(a, b):\n    return a", "12 people ", "ﬁne e\u0301"]
# Each tokenizer with its templates; None is its own.
CASES = [*product(KINDS, ("lines", "no lines", "words")), *((name, None) for name in ("ours", "v1", "v3", "smollm2"))]
CASES += [(name, "unmarked") for name in ("byte-level", "Llama 3", "LlamaTokenizer")]
CASES += [(name, template) for name in MISTRALS for template in TEMPLATES if template.startswith("Mistral")]
few = settings(max_examples=5, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def slow_if_large(cases):
    """Return parameters for tests. Published tokenizers with large vocabularies take seconds."""
    large = {case: any(name in str(case) for name in ("smollm2", *MISTRALS)) for case in cases}
    return [pytest.param(case, marks=[pytest.mark.slow] * is_large, id=str(case)) for case, is_large in large.items()]


@pytest.fixture(params=slow_if_large(dict.fromkeys(name for name, _ in CASES)))
def name(request):
    return request.param


@pytest.fixture(params=slow_if_large(CASES))
def tokenizer(request):
    """Return a tokenizer with a chat template whose answers can be trained."""
    name, template = request.param
    tokenizer = load(name)
    tokenizer.chat_template = TEMPLATES[template] if template else tokenizer.chat_template
    assert set_template(tokenizer) is None
    return tokenizer


def conversation(num_turns):
    turns = zip(USER[:num_turns], ANSWERS, strict=False)
    pairs = ((("user", question), ("assistant", answer)) for question, answer in turns)
    return [{"role": role, "content": text} for pair in pairs for role, text in pair]


@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_ids_are_those_of_transformers(tokenizer, num_turns):
    """Those of prompts and of training; and an answer ends with a token at which the model stops."""
    messages = conversation(num_turns)
    prompts = [(messages[: 2 * turn + 1], messages[: 2 * turn + 2]) for turn in range(num_turns)]
    ids, is_generated = encode_conversation(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
    theirs = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p, _ in prompts]
    ours = [encode_prompt(tokenizer, prompt) for prompt, _ in prompts]
    assert ours[0] == theirs[0]
    # Where the tokens of a prompt are none of the whole conversation, a model that gets the prompt decides.
    if all(whole["input_ids"][: len(prompt)] == prompt for prompt in theirs):
        assert ours == theirs and ids == whole["input_ids"]
        if has_marks(tokenizer.chat_template):
            assert list(map(bool, is_generated)) == list(map(bool, whole["assistant_masks"]))
    for prompt, (_, answered) in zip(ours, prompts, strict=True):
        trained = encode_conversation(tokenizer, answered)[0]
        assert ids[: len(prompt)] == trained[: len(prompt)] == prompt
        assert is_generated[len(prompt)] and not is_generated[len(prompt) - 1]
        # Some backends find a special token between spaces only.
        assert find_turn_end(tokenizer) in trained[len(prompt) :] or tokenizer is load("normalized")


@few
@given(parts=st.lists(st.integers(0, 8) | st.sampled_from(["\ue000", "<", "s", ">", " ", "\n", "é", "a river"])))
@example(parts=["a river", 1, "\n", 4, "\n", 2, " \ue000 x", 0, " <\ue000s>", 3, 7, 8])
def test_typed_control_tokens_stay_text(tokenizer, parts):
    """The numbers stand for control tokens."""
    added = {index: t for index, t in tokenizer.added_tokens_decoder.items() if t.special or t.content in MARKS}
    control, spellings = {*added}, [token.content for token in added.values() if token.content != "<unk>"]
    evil = f"x{''.join(spellings[part % len(spellings)] if isinstance(part, int) else part for part in parts)}y"
    messages, tame = (
        [{**message, "content": message["content"] + text} for message in conversation(2)] for text in (evil, "x y")
    )
    (ids, is_generated), (tame_ids, is_generated_there) = (
        encode_conversation(tokenizer, each) for each in (messages, tame)
    )
    assert [index for index in ids if index in control] == [index for index in tame_ids if index in control]
    trained, tame_trained = (
        tokenizer.decode([index for index, trains in zip(*each, strict=True) if trains])
        for each in ((ids, is_generated), (tame_ids, is_generated_there))
    )
    for spelling in spellings:
        assert trained.count(spelling) == tame_trained.count(spelling) + 2 * evil.count(spelling)
    assert not control & {*encode_documents([evil], tokenizer)[0][1:-1]}
    prompt = encode_prompt(tokenizer, messages[:1])
    assert ids[: len(prompt)] == prompt


@few
@given(text=st.text() | st.sampled_from([TEXT, *USER, *ANSWERS]))
def test_documents_are_those_of_transformers(name, text):
    tokenizer = load(name)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert encode_documents([text], tokenizer) == [[*bos, *ids, tokenizer.eos_token_id]]


def test_added_words_are_decoded_as_they_are_or_refused(name, tmp_path):
    words, accepted = ["watershed", "天气预报", "two words", "Straße", "čaj", "é", "ﬁx", "▁x", " x"], set()
    # Copies of large tokenizers take long.
    words = words if name in KINDS else words[:4]
    for word in words:
        (tmp_path / "words").write_text(word, encoding="utf-8")
        grown = copy.deepcopy(load(name))
        try:
            add_words(grown, tmp_path / "words")
        except UserError as error:
            assert f"the tokenizer decodes the word {word!r} as" in str(error)
            continue
        accepted.add(word)
        for text in (word, f"a {word} b", f"a river. {word}, {word}"):
            ids = encode_documents([text], grown)[0][1:-1]
            assert ids.count(grown.convert_tokens_to_ids(word)) == text.count(word)
            assert grown.decode(ids).strip() == text.strip()
    # Some tokenizers add or lose spaces beside every added token, and take no words.
    takes_none = re.match("add_prefix_space|Metaspace always|T5|Unigram|LlamaTokenizer, legacy", name)
    expected = set() if takes_none else {"watershed", "天气预报", "two words"}
    if not takes_none and "ByteLevel" not in repr(load(name).backend_tokenizer.decoder):
        expected |= {"Straße", "čaj", "é"} & {*words}
    assert expected == accepted - {"ﬁx", "▁x", " x"}


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("messages, options, _", CONVERSATIONS[:3])
def test_a_prompt_is_the_beginning_of_what_is_trained(messages, options, _, tools):
    """A tokenizer that knows blank lines has one token for the two line breaks that end the prompt without thought."""
    tokenizer = train_tokenizer([TEXT], vocab_size=400)
    assert "ĊĊ" in tokenizer.get_vocab()
    for asks in (None, options.get("enable_thinking"), False):
        variables = thinking_variables(asks)
        ids, is_generated = encode_conversation(tokenizer, messages, tools, **variables)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [at for at in range(1, len(ids)) if is_generated[at] and not is_generated[at - 1]]
        assert len(starts) == len(answers)
        for answer, start in zip(answers, starts, strict=True):
            assert encode_prompt(tokenizer, messages[:answer], tools, asks) == ids[:start]
