"""Training of tokenizers, and the cache of trained ones."""

import json
import runpy
import sys
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, IterableDataset

from hf_pretrain.tokenizer import training
from hf_pretrain.tokenizer.control_tokens import SPECIAL_TOKENS
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import load_or_train_tokenizer, train_tokenizer


TEXTS = ["the cat sat on the mat\nand the dog looked on", "一只猫坐在垫子上。一只狗看着。", "naïve café 🙂 1234"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=340)


def test_special_tokens_have_their_ids(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(len(SPECIAL_TOKENS)))
    assert len(tokenizer) == 340 == len(set(tokenizer.get_vocab().values()))
    ids = tokenizer("the cat").input_ids
    assert 1 not in ids and 2 not in ids
    # Parsers of thoughts and tool calls need the marks.
    assert tokenizer.decode([1, 7, *ids, 8, 2], skip_special_tokens=True) == "<think>the cat</think>"


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer(iter(TEXTS), vocab_size=340)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_second_run_does_not_train_again(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "HF_HOME", str(tmp_path))
    documents, cached = Dataset.from_dict({"text": TEXTS}), tmp_path / "hf_pretrain/tokenizers"
    first = load_or_train_tokenizer(documents, vocab_size=340)
    with monkeypatch.context() as patch:
        patch.setattr(training, "train_tokenizer", None)
        second = load_or_train_tokenizer(documents, vocab_size=340)
    assert second.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
    assert len(list(cached.iterdir())) == 1
    load_or_train_tokenizer(documents, vocab_size=345)
    load_or_train_tokenizer(Dataset.from_dict({"text": TEXTS[:-1]}), vocab_size=340)
    assert len(list(cached.iterdir())) == 3


def test_training_sees_evenly_spaced_documents(tmp_path, monkeypatch):
    seen = []

    def train(texts, *, vocab_size):
        seen.append(list(texts))
        return train_tokenizer(texts, vocab_size=vocab_size)

    monkeypatch.setattr(training, "train_tokenizer", train)
    texts = [f"document {index:04d}" for index in range(1000)]
    monkeypatch.setattr(training, "MAX_TRAINING_CHARS", 13 * 10)
    monkeypatch.setattr(training, "HF_HOME", str(tmp_path))
    load_or_train_tokenizer(Dataset.from_dict({"text": texts}), vocab_size=300)
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in texts))
    load_or_train_tokenizer(stream, vocab_size=300)
    assert seen[0] == [texts[index] for index in (0, 111, 222, 333, 444, 555, 666, 777, 888, 999)]
    assert seen[1] == texts[:10]


def test_recipe_trains_and_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "home"))
    lines = [json.dumps({"text": f"{text} {index}"}) for index, text in enumerate(TEXTS * 10)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = str(Path(__file__).parents[2] / "recipes" / "tokenizer.py")
    command = f"{recipe} --dataset_name {tmp_path}/data.jsonl --vocab_size 340 --output_dir {tmp_path}/tokenizer"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--validation_fraction", "0.2"])
    runpy.run_path(recipe, run_name="__main__")
    output = capsys.readouterr().out
    assert f"340 entries and is in {tmp_path / 'tokenizer'}" in output
    assert "bytes per token on" in output
    assert len(load_tokenizer(tmp_path / "tokenizer")) == 340
    with pytest.raises(SystemExit):
        runpy.run_path(recipe, run_name="__main__")
    assert "is not empty" in capsys.readouterr().err
