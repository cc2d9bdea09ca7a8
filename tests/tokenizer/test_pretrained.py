"""Tokenizers are saved, loaded and checked, and count the bytes of their tokens."""

import random

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.pretrained import check_tokenizer, load_tokenizer, save_tokenizer, token_byte_lengths
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.models import FIXTURES


V1 = FIXTURES / "tokenizers/v1"


TEXTS = ["the cat sat on the mat\nand the dog looked on", "一只猫坐在垫子上。一只狗看着。", "naïve café 🙂 1234"] * 3


ODD_TEXTS = [
    " leading and trailing  ",
    "\n\n\ttabs\r\nand\r returns\x0b\x0c",
    "e\u0301 is not é, ﬁ is not fi, Å is not Å",
    "🧑🏽‍🚀 مرحبا हिन्दी 日本語 \u200b\ufeff\U0010ffff\x01\x7f",
    "".join(map(chr, range(1, 0x250))),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=340)


def test_every_byte_round_trips(tokenizer):
    rng = random.Random(0)
    code_points = [*range(1, 0xD800), *range(0xE000, 0x110000)]
    texts = ODD_TEXTS + ["".join(map(chr, rng.choices(code_points, k=200))) for _ in range(20)]
    for text in texts:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert tokenizer.decode(encode_documents([text], tokenizer)[0][1:-1]) == text


def test_saved_tokenizer_loads_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").is_file()
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert loaded.chat_template == tokenizer.chat_template
        assert encode_documents(ODD_TEXTS, loaded) == encode_documents(ODD_TEXTS, tokenizer)


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "weights.pth").touch()
    for path, message in (
        (tmp_path / "weights.pth", "holds weights, but no tokenizer. .*--tokenizer_name_or_path of a stage"),
        (tmp_path, "holds no tokenizer.json"),
        ("./no/such/tokenizer", "no directory ./no/such/tokenizer. Correct the name"),
    ):
        with pytest.raises(UserError, match=message):
            load_tokenizer(path)


def test_tokenizer_that_does_not_fit_the_model_is_refused(tokenizer):
    check_tokenizer(tokenizer, vocab_size=340, name="mine")
    with pytest.raises(UserError, match="tokenizer mine gives ids up to 339.*vocab_size is 339"):
        check_tokenizer(tokenizer, vocab_size=339, name="mine")
    bare = load_tokenizer(V1)
    bare.pad_token = None
    with pytest.raises(UserError, match="tokenizer bare has no pad_token"):
        check_tokenizer(bare, vocab_size=6400, name="bare")


def test_a_tokenizer_without_padding_pads_with_eos(tmp_path):
    bare = load_tokenizer(V1)
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == bare.eos_token


@pytest.mark.parametrize("source", ["trained", "published"])
def test_byte_lengths_sum_to_the_bytes_of_the_text(tokenizer, source):
    tokenizer = tokenizer if source == "trained" else load_tokenizer(V1)
    lengths = token_byte_lengths(tokenizer)
    assert lengths.shape == (len(tokenizer),)
    assert lengths[[0, 1, 2]].tolist() == [0, 0, 0]
    for text, ids in zip(ODD_TEXTS + TEXTS, encode_documents(ODD_TEXTS + TEXTS, tokenizer), strict=True):
        assert lengths[ids].sum() == len(text.encode())


def test_ids_need_not_be_contiguous():
    backend = Tokenizer(models.WordLevel({"one": 0, "three": 5}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="one", pad_token="one")
    check_tokenizer(tokenizer, vocab_size=6, name="sparse")
    assert token_byte_lengths(tokenizer).tolist() == [0, 0, 0, 0, 0, 5]


@pytest.mark.parametrize("name", ["ours", "v1"])
def test_a_padded_batch_generates_like_its_prompts_alone(build_model, tmp_path, name):
    """The configs of MiniMind's own tokenizers ask for padding on the right."""
    ours = train_tokenizer(["some words of a text"], vocab_size=300)
    save_tokenizer(ours if name == "ours" else load_tokenizer(V1), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.padding_side == "left"
    model = build_model(vocab_size=len(tokenizer))
    prompts = ["some words of a", "text"]
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), **settings)[:, -8:]
    alone = [model.generate(**tokenizer(prompt, return_tensors="pt"), **settings)[0, -8:] for prompt in prompts]
    assert torch.equal(together, torch.stack(alone))
