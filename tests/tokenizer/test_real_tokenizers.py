"""What users do with a tokenizer, on published ones: SmolLM2's, MiniMind's and Mistral's."""

import copy
from pathlib import Path

import mistral_common
import pytest
from datasets import Dataset
from transformers import LlamaTokenizer
from transformers.integrations.mistral import convert_tekken_tokenizer

from hf_pretrain.data.conversations import read_conversation
from hf_pretrain.rows.encoding import ConversationEncoder
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.control_tokens import encode_prompt, set_stop_tokens
from hf_pretrain.tokenizer.pretrained import add_words, load_tokenizer, save_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.weights.exporting import export
from tests.toys import toy_model


MISTRAL = Path(mistral_common.__file__).parent / "data"
FIXTURES = Path(__file__).parents[1] / "fixtures/tokenizers"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
TEXTS = [
    "The river runs, 12 people wait.\n\n",
    "def add(a, b):\n    return a + b\n",
    "小河流过桥下。 café 🦦",
    "<|im_end|></s>",
]
MESSAGES = [
    {"role": "user", "content": "Where does the river run?"},
    {"role": "assistant", "content": "Under the bridge,\n\nof course."},
    {"role": "user", "content": "</s> 为什么？"},
    {"role": "assistant", "content": "因为 <|im_end|> it does."},
]


@pytest.fixture(scope="module", params=["smollm2", "v1", "v3", "sentencepiece", "tekken"])
def named(request, tmp_path_factory):
    """Return the name of a published tokenizer and the tokenizer, loaded as users do."""
    name, path = request.param, tmp_path_factory.mktemp("tokenizer")
    if name in ("v1", "v3"):
        return name, load_tokenizer(FIXTURES / name)
    if name == "smollm2":
        return name, load_tokenizer("embedded:smollm2")
    if name == "tekken":
        tokenizer = convert_tekken_tokenizer(str(MISTRAL / "tekken_240718.json"))
    else:
        (path / "tokenizer.model").write_bytes((MISTRAL / "tokenizer.model.v1").read_bytes())
        tokenizer = LlamaTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    save_tokenizer(tokenizer, path / "saved")
    return name, load_tokenizer(path / "saved")


@pytest.mark.slow
def test_texts_and_conversations(named):
    """Documents and answers decode to what they were, and prompts are those of transformers."""
    _, tokenizer = named
    set_template(tokenizer)
    documents = Dataset.from_dict({"text": TEXTS})
    rows, _ = prepare_rows(documents, tokenizer, max_length=256)
    (row,) = rows
    pieces, start = [], 0
    for length in row["seq_lengths"]:
        ids = row["input_ids"][start : start + length]
        assert ids[-1] == tokenizer.eos_token_id
        pieces.append(tokenizer.decode(ids[ids[0] == tokenizer.bos_token_id : -1]))
        start += length
    assert sorted(piece.strip() for piece in pieces) == sorted(text.strip() for text in TEXTS)

    (ids,), (weights,), _ = ConversationEncoder()(
        [read_conversation({"messages": MESSAGES})], tokenizer, max_length=500
    ).values()
    trained = tokenizer.decode([index for index, weight in zip(ids, weights, strict=True) if weight])
    for message in MESSAGES[1::2]:
        assert message["content"] in trained
    assert "river run?" not in trained and "为什么" not in trained
    tame = [{"role": "user", "content": "Where does the river run?"}]
    prompt = encode_prompt(tokenizer, tame)
    assert prompt == tokenizer.apply_chat_template(tame, add_generation_prompt=True).input_ids
    assert ids[: len(prompt)] == prompt

    model = toy_model(vocab_size=len(tokenizer))
    set_stop_tokens(model, tokenizer)
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    last = [index for index, weight in zip(ids, weights, strict=True) if weight and index in tokenizer.all_special_ids]
    # Both answers end with a token at which the model stops; the ones that are typed are no special tokens.
    assert len(last) == 2 and {*last} <= {*stops}


@pytest.mark.slow
@pytest.mark.parametrize("word", ["zymurgical", "日记本子", "Straße"])
def test_words_are_added_or_refused(named, word, tmp_path):
    _, tokenizer = named
    tokenizer = copy.deepcopy(tokenizer)
    (tmp_path / "words.txt").write_text(word + "\n", encoding="utf-8")
    try:
        add_words(tokenizer, str(tmp_path / "words.txt"))
    except UserError as error:
        # A byte-level decoder reads such letters as bytes.
        assert "decodes the word" in str(error) and word != "zymurgical"
        return
    text = f"a {word}, b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids(word) in ids and tokenizer.decode(ids).strip() == text


def test_a_sentencepiece_tokenizer_is_refused_in_gguf(named, tmp_path):
    name, tokenizer = named
    if name == "sentencepiece":
        with pytest.raises(UserError, match="No GGUF with this tokenizer"):
            export(toy_model(vocab_size=len(tokenizer)), tmp_path / "out", "gguf", tokenizer=tokenizer)
