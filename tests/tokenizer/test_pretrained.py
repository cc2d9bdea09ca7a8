"""Tokenizers are saved, loaded and checked, and count the bytes of their tokens."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.pretrained import check_tokenizer, load_tokenizer, save_tokenizer, token_byte_lengths
from tests.tokenizer.kinds import base, load


ODD_TEXTS = [
    " leading and trailing  ",
    "\n\n\ttabs\r\nand\r returns\x0b\x0c",
    "e\u0301 is not é, ﬁ is not fi, Å is not Å",
    "🧑🏽‍🚀 مرحبا हिन्दी 日本語 \u200b\ufeff\U0010ffff\x01\x7f",
    "".join(map(chr, range(1, 0x250))),
]


@pytest.fixture(params=["ours", "v1"])
def tokenizer(request):
    return base() if request.param == "ours" else load("v1")


def test_every_text_round_trips_and_has_the_bytes_of_its_tokens(tokenizer):
    lengths = token_byte_lengths(tokenizer)
    assert lengths.shape == (len(tokenizer),) and not lengths[[0, 1, 2]].any()

    @settings(max_examples=30, derandomize=True, deadline=None)
    @given(text=st.text(min_size=1) | st.sampled_from(ODD_TEXTS))
    def check(text):
        (ids,) = encode_documents([text], tokenizer)
        assert lengths[ids].sum() == len(text.encode())
        assert tokenizer.decode(ids[1:-1]) == tokenizer.decode(tokenizer(text).input_ids) == text

    check()


def test_saved_tokenizer_loads_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").is_file()
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert loaded.chat_template == tokenizer.chat_template
        assert encode_documents(ODD_TEXTS, loaded) == encode_documents(ODD_TEXTS, tokenizer)


def test_a_tokenizer_without_padding_pads_with_eos(tmp_path):
    bare = copy.deepcopy(load("v1"))
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == bare.eos_token


def test_ids_need_not_be_contiguous():
    backend = Tokenizer(models.WordLevel({"one": 0, "three": 5}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="one", pad_token="one")
    check_tokenizer(tokenizer, vocab_size=6, name="sparse")
    assert token_byte_lengths(tokenizer).tolist() == [0, 0, 0, 0, 0, 5]


def test_a_padded_batch_generates_like_its_prompts_alone(tokenizer, build_model, tmp_path):
    """The configs of MiniMind's own tokenizers ask for padding on the right."""
    save_tokenizer(tokenizer, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.padding_side == "left"
    model = build_model(vocab_size=len(tokenizer))
    prompts = ["some words of a", "text"]
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), **settings)[:, -8:]
    alone = [model.generate(**tokenizer(prompt, return_tensors="pt"), **settings)[0, -8:] for prompt in prompts]
    assert torch.equal(together, torch.stack(alone))
