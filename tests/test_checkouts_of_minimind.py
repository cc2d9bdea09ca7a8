"""`make race ARGS="--upstream PATH"` loads model and data set of a checkout of MiniMind, in each of its layouts."""

import itertools
import sys
import threading

import pytest
import torch

from benchmarks import contestants
from benchmarks.upstream_style import load_checkout
from tests.test_benchmarks import make_race_setting


MODEL = """
import torch
from torch import nn

class {config}:
    def __init__(self, {fields}, vocab_size, **kwargs):
        self.sizes = ({fields}, vocab_size)

class {model}(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, _, vocab_size = self.sizes = config.sizes
        self.embedding = nn.Embedding(vocab_size, width)

    def forward(self, input_ids):
        return self.embedding(input_ids) @ self.embedding.weight.T
"""
DATASET = """
import torch
from datasets import load_dataset

class PretrainDataset:
    def __init__(self, path, tokenizer, max_length):
        self.texts = load_dataset("json", data_files=path, split="train")["text"][:]
        self.tokenizer, self.max_length = tokenizer, max_length

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        tokenizer = self.tokenizer
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        text = self.texts[index] if {expects_marks} else bos + self.texts[index] + eos
        ids = tokenizer(text, add_special_tokens=False).input_ids[: self.max_length]
        ids = torch.tensor(ids + [tokenizer.pad_token_id] * (self.max_length - len(ids)))
        return {result}
"""
TRIPLE, PAIR = "ids[:-1], ids[1:], ids[1:] != tokenizer.pad_token_id", "ids, ids.clone()"
NEWER = {"config": "MiniMindConfig", "model": "MiniMindForCausalLM", "fields": "hidden_size, num_hidden_layers"}
# Until April 2025, from May 2025, and from January 2026.
LAYOUTS = {
    "model.py": (
        {"model/LMConfig.py": "config", "model/model.py": "model", "model/dataset.py": "data"},
        {"config": "LMConfig", "model": "MiniMindLM", "fields": "dim, n_layers"},
        {"expects_marks": False, "result": TRIPLE},
    ),
    "text with marks": (
        {"model/model_minimind.py": "model", "dataset/lm_dataset.py": "data"},
        NEWER,
        {"expects_marks": True, "result": TRIPLE},
    ),
    "labels": (
        {"model/model_minimind.py": "model", "dataset/lm_dataset.py": "data"},
        NEWER,
        {"expects_marks": False, "result": PAIR},
    ),
}


@pytest.fixture(params=LAYOUTS)
def checkout(request, tmp_path, monkeypatch):
    files, model, data = LAYOUTS[request.param]
    for name, kind in files.items():
        path = tmp_path / "minimind" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the oldest layout, the config has a file of its own.
        path.write_text(DATASET.format(**data) if kind == "data" else MODEL.format(**model))
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path / "minimind"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("model", "dataset")]:
        del sys.modules[name]


def test_a_checkout_gets_the_shape_and_all_documents(checkout, tmp_path):
    setting = make_race_setting(tmp_path)
    model, rows = load_checkout(
        checkout, setting.config, setting.documents, setting.tokenizer, max_length=32, output_dir=tmp_path
    )
    assert model.sizes == (32, 1, 300)
    assert len(rows) == len(setting.documents)
    # Each row is one document between bos and eos, padded on the right: the rows of the loop like MiniMind's.
    tokenizer, text = setting.tokenizer, setting.documents[0]["text"]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    expected = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    assert rows[0].tolist() == expected + [tokenizer.pad_token_id] * (32 - len(expected))


def test_a_checkout_trains(checkout, tmp_path):
    setting = make_race_setting(tmp_path, upstream=checkout, num_steps=20, batch_size=4)
    run = contestants.Run(setting, threading.Barrier(1), num_steps=20, num_validations=2)
    torch.manual_seed(0)
    contestants.CONTESTANTS["MiniMind"](setting, run)
    losses = [loss for _, loss in run.curve]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
