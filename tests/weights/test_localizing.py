"""Native copies of other programs' models: written once, read as their source is, and removed."""

import json
import os

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.loading.native import ORIGIN_NAME, localize
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import importing, localizing
from hf_pretrain.weights.importing import load_upstream
from tests.weights.files import save_stock


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Return the directory of the copies, which is empty."""
    monkeypatch.setattr(localizing, "COPIES", tmp_path / "copies")
    return tmp_path / "copies"


@pytest.fixture
def llama(tmp_path):
    """Return the directory of a Llama in bfloat16, with a tokenizer and a publisher's sampling."""
    tokenizer = train_tokenizer(["some words of a text"] * 9, vocab_size=300)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    model = save_stock(tmp_path / "llama", vocab_size=320, **ids).to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=0.6)
    model.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def load(path):
    arguments = ModelArguments(model_name_or_path=str(path))
    return load_model(arguments, arguments.load_tokenizer()).eval()


@pytest.mark.parametrize("largest", [localizing.LARGEST_BYTES, 0], ids=["copied", "read in place"])
def test_a_copy_is_the_model(llama, copies, monkeypatch, input_ids, largest):
    monkeypatch.setattr(localizing, "LARGEST_BYTES", largest)
    source, first, second = load_upstream(llama, dtype=torch.float32), load(llama), load(llama)
    (copy,) = (path for path in copies.iterdir() if path.is_dir())
    assert (copy / "model.safetensors").is_file() == (largest > 0) and (copy / "tokenizer.json").is_file()
    for model in (first, second):
        assert model(input_ids).logits.equal(source(input_ids).logits)
        assert model.dtype == torch.float32 and model.generation_config.temperature == 0.6
        # An adapter names the published model, and has its order of rows.
        assert model.name_or_path == str(llama) and model.half_split_adapters


def test_the_second_start_converts_nothing(llama, copies, monkeypatch):
    first = localize(str(llama))
    monkeypatch.setattr(localizing, "load_upstream", None)
    assert localize(str(llama)) == localize(os.path.relpath(llama)) == first
    # A native directory is its own.
    assert localize(first) == first


def test_a_changed_source_replaces_its_copy(llama, copies, input_ids):
    """Also if each file keeps its size and the time of its content, as after `cp --preserve`."""
    before = load(llama)(input_ids).logits
    times = {file: file.stat().st_mtime_ns for file in llama.iterdir()}
    changed = LlamaForCausalLM.from_pretrained(llama)
    torch.nn.init.normal_(changed.lm_head.weight)
    changed.save_pretrained(llama)
    for file, nanoseconds in times.items():
        os.utime(file, ns=(nanoseconds, nanoseconds))
    after = load(llama)(input_ids).logits
    assert after.equal(load_upstream(llama, dtype=torch.float32)(input_ids).logits) and not after.equal(before)
    assert len(list(copies.iterdir())) == 1


def test_a_conversion_that_fails_leaves_nothing(llama, copies, monkeypatch):
    fields = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 3}))
    with pytest.raises(UserError):
        localize(str(llama))
    assert list(copies.iterdir()) == []
    (llama / "config.json").write_text(json.dumps(fields))

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importing.MiniMindForCausalLM, "save_pretrained", fail)
    with pytest.raises(OSError):
        localize(str(llama))
    assert list(copies.iterdir()) == []


def test_fields_that_the_source_lacks_have_a_copy_each(build_model, tmp_path, copies):
    torch.save({name: tensor for name, tensor in build_model().state_dict().items()}, tmp_path / "x.pth")
    with pytest.raises(UserError):
        localize(str(tmp_path / "x.pth"))
    names = {localize(str(tmp_path / "x.pth"), config={"num_attention_heads": heads}) for heads in (2, 4)}
    assert len(names) == 2
    # Files of MiniMind name no base that peft could load.
    assert [json.loads(path.read_text())["is_published"] for path in copies.glob(f"*/{ORIGIN_NAME}")] == [False] * 2


def test_the_doctor_shows_and_removes_copies(llama, copies):
    assert localizing.copies_bytes() == 0
    localize(str(llama))
    assert localizing.copies_bytes() > (llama / "model.safetensors").stat().st_size
    localizing.remove_copies()
    assert localizing.copies_bytes() == 0
