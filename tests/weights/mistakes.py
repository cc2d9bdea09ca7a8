"""Mistakes with files of weights: what cannot be read, and what a format cannot hold."""

import math
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import normalizers

from hf_pretrain import MiniMindConfig
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import browser, package_models
from hf_pretrain.weights.comparing import compare
from hf_pretrain.weights.exporting import choose_format, export
from hf_pretrain.weights.gguf import FILE_NAME
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.package_models import PackageModel, find_gguf
from hf_pretrain.weights.upstream_lora import load_merged, merge_upstream_lora, write_upstream_lora
from tests.mistakes import Mistake
from tests.models import GOLDEN, saved_model
from tests.toys import limited_file_size, toy_model
from tests.weights.files import MOE, SHAPES, build, rewrite, save_lora, write_all, write_upstream


EMBED, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def find_the_engine(kept=None):
    """Look for the engine of a page without a registry, or with something else in the cache."""

    def make(tmp_path, monkeypatch):
        monkeypatch.setattr(browser, "HF_HOME", tmp_path)
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
        directory = tmp_path / "hf_pretrain/engines"
        directory.mkdir(parents=True)
        if kept is not None:
            (directory / f"wllama-{browser.VERSION}.tgz").write_bytes(kept)
        browser.find_engine("wllama")

    return make


def changed(name, *change, **fields):
    """Load a recorded model with another tensor, if `change` is its name and value, or with other fields."""
    return lambda tmp_path: load_upstream(write_upstream(tmp_path, name, dict([change] if change else ()), **fields))


def bare(name, **config):
    return lambda tmp_path: load_upstream(
        shutil.copy(GOLDEN / name / "weights.pth", tmp_path / "x.pth"), config=config
    )


def load_files(*names, content=b"not a tensor in sight", named=""):
    def make(tmp_path):
        for name in names:
            (tmp_path / name).write_bytes(content)
        load_upstream(tmp_path / named)

    return make


def load_a_damaged_checkpoint(tmp_path):
    toy_model().config.save_pretrained(tmp_path)
    load_files("model.safetensors")(tmp_path)


# The byte is in the middle of the embedding, so the values are finite, of the right shape, and wrong.
FLIPPED = bytearray((GOLDEN / "C_dense/weights.pth").read_bytes())
FLIPPED[10_000] ^= 1


def fit(format, dtype="float32", **overrides):
    config = MiniMindConfig(hidden_size=32, num_attention_heads=4, **overrides)
    return lambda: choose_format(config, format, dtype=dtype)


def export_to(format, dtype=None, *, norm=1.0, name="out", **overrides):
    def make(tmp_path):
        (tmp_path / "full/kept").mkdir(parents=True)
        model = toy_model(vocab_size=160, **overrides)
        model.model.norm.weight.data.fill_(norm)
        export(model, tmp_path / name, format, dtype=dtype)

    return make


def compare_with_another_model():
    names = {"path": "out", "format": "llama", "dtype": "float32"}
    compare(toy_model(), toy_model(hidden_act="gelu"), **names, is_exact=True)


def export_on_a_full_disk(tmp_path):
    with limited_file_size(4096):
        export(toy_model(), tmp_path / "out", "llama")


def export_with_another_normalizer(tmp_path):
    tokenizer = train_tokenizer(["a b"], vocab_size=330)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    export(toy_model(), tmp_path / "out", "gguf", tokenizer=tokenizer)


# GGUF files of others


@cache
def llama_in_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        export(build(vocab_size=300), f"{directory}/out", "gguf")
        return Path(directory, "out", FILE_NAME).read_bytes()


def changed_gguf(fields=None, tensors=None):
    def make(tmp_path):
        (tmp_path / "a.gguf").write_bytes(llama_in_gguf())
        rewrite(tmp_path / "a.gguf", tmp_path / "broken.gguf", fields, tensors)
        load_upstream(tmp_path / "broken.gguf")

    return make


def written_gguf(read, architecture="llama", **ids):
    """Read a file with a tensor, and with two tokens if `ids` names special ones."""

    def make(tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", architecture)
        writer.add_tensor("a", np.ones(1, np.float32))
        if ids:
            writer.add_token_list(["a", "b"])
        for name, index in ids.items():
            writer.add_key_value(f"tokenizer.ggml.{name}_token_id", index, gguf.GGUFValueType.UINT32)
        write_all(writer)
        read(tmp_path / "a.gguf")

    return make


F32, I8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.I8
NORM_OF_GGUF = "output_norm.weight"
ROPE = {"rope_freqs.weight": (np.arange(1, 9, dtype=np.float32), F32)}


# Wheels of the package index


def find_tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(package_models, "HF_HOME", str(tmp_path))
    PackageModel("tiny-gguf", "1.0", "tiny_gguf/model.gguf", "", "me/tiny", "it is tiny", 1.0, 1.0).find()


def find_without_an_index(tmp_path, monkeypatch):
    done = SimpleNamespace(returncode=1, stderr="Looking in links\nERROR: No matching distribution found")
    monkeypatch.setattr(package_models.subprocess, "run", lambda *_, **__: done)
    find_tiny(tmp_path, monkeypatch)


def find_another_wheel(tmp_path, monkeypatch):
    (tmp_path / "hf_pretrain/models").mkdir(parents=True)
    (tmp_path / "hf_pretrain/models/tiny_gguf-1.0-py3-none-any.whl").touch()
    find_tiny(tmp_path, monkeypatch)


# MiniMind's LoRA


def merge(num_rows=32, stem="model.layers.{}.self_attn.{}", read=merge_upstream_lora):
    def make(tmp_path):
        save_lora(tmp_path / "lora_x.pth", 1, num_rows, stem)
        read(toy_model(vocab_size=160, qk_norm=True), tmp_path / "lora_x.pth")

    return make


def merge_another_file(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    merge_upstream_lora(toy_model(), tmp_path / "x.safetensors")


def write_lora(**changes):
    def make(tmp_path):
        arguments = {"use_peft": True, "lora_target_modules": ["q_proj", "o_proj"]} | changes
        add_adapter(saved_model(tmp_path / "base"), AdapterArguments(**arguments)).save_pretrained(
            tmp_path / "adapter"
        )
        write_upstream_lora(tmp_path / "adapter", tmp_path / "out")

    return make


def merge_with_a_config(tmp_path):
    add_adapter(saved_model(tmp_path / "base"), AdapterArguments(use_peft=True)).save_pretrained(tmp_path / "adapter")
    load_merged(str(tmp_path / "adapter"), config={"dropout": 0.5})


MISTAKES = [
    # Places
    Mistake("nope.pth: no such file or directory. A Hub id is owner/name", lambda: load_upstream("nope.pth")),
    Mistake("There is no directory nope.pth", lambda: load_tokenizer("nope.pth")),
    Mistake("it holds none", load_files()),
    Mistake(r"several files of weights \(a.pth, b.pth\): name one, such as .*/b.pth", load_files("a.pth", "b.pth")),
    Mistake(r"\(model.safetensors, a.pth\)", load_files("a.pth", "model.safetensors")),
    Mistake("damaged, and was refused before any code in it ran.*`git lfs pull`", load_files("x.pth")),
    # The state of a random number generator is no weights.
    Mistake("model.safetensors is not a file of weights", load_files("rng_state.pth", "model.safetensors")),
    Mistake("is damaged: the checksum of .* is wrong", load_files("x.pth", content=FLIPPED)),
    Mistake("no readable weights", load_a_damaged_checkpoint),
    # Tensors
    Mistake("lack the matrix model.layers.0.self_attn.q_proj.weight", changed("C_moe", QUERY, None)),
    Mistake("no generation of MiniMind has these names", changed("C_moe", EMBED, None)),
    Mistake("lack the matrix model.embed_tokens.weight", changed("C_moe", EMBED, torch.zeros(160))),
    Mistake("num_hidden_layers=2, the weights say 3", changed("C_moe", NORM.replace("1", "2"), torch.ones(32))),
    Mistake(r"norm.weight is \(16,\) and should be \(32,\)", changed("C_moe", NORM, torch.ones(16))),
    Mistake("norm.weight holds values that are not finite", changed("C_moe", NORM, torch.full((32,), math.inf))),
    Mistake("norm.weight is no floating-point tensor", changed("C_moe", NORM, torch.ones(32, dtype=torch.int8))),
    Mistake("embeddings=True, the weights say False", changed("C_moe", "lm_head.weight", torch.zeros(160, 32))),
    # Configs
    Mistake("base of v1's rotary table is unknown: give rope_theta", bare("A_dense", n_heads=4)),
    Mistake("give num_attention_heads", bare("B_dense")),
    Mistake("do not show the number of heads", bare("A_dense", rope_theta=1e6)),
    Mistake("give num_experts_per_tok", bare("C_moe")),
    Mistake("num_hidden_layers=3, the weights say 2", changed("A_dense", n_layers=3)),
    Mistake("num_key_value_heads=4, the weights say 2", changed("B_dense", num_key_value_heads=4)),
    Mistake("hidden_size=64, the weights say 32", changed("B_dense", hidden_size=64)),
    Mistake("no such feature: scoring_func=sigmoid", changed("B_moe", scoring_func="sigmoid")),
    Mistake("model_type='gemma'", changed("B_dense", model_type="gemma")),
    Mistake("hidden_act='foo' is not an activation", changed("B_dense", hidden_act="foo")),
    Mistake("heads=0; it must be a whole number of at least 1", changed("B_dense", num_attention_heads=0)),
    Mistake("heads='4'; it must be a whole number", changed("B_dense", num_attention_heads="4")),
    Mistake("rms_norm_eps=nan; it must be a number above 0", changed("B_dense", rms_norm_eps=math.nan)),
    Mistake("factor='x'; it must be a number above 0", changed("C_dense", rope_scaling={"factor": "x"})),
    Mistake("pass --inference_rope_scaling to chat", changed("C_dense", inference_rope_scaling=True)),
    Mistake("bos_token_id", changed("B_dense", bos_token_id="x")),
    Mistake("sliding_window=64 in .* a Mistral", changed("C_dense", model_type="mistral", sliding_window=64)),
    # Formats
    Mistake(r"llama cannot hold q/k norms.*: minimind, upstream, qwen3, gguf, web\.$", fit("llama", qk_norm=True)),
    Mistake(r"attention without q/k norms.*: minimind, upstream, llama, gguf, web\.$", fit("qwen3")),
    Mistake(r"llama .*experts.*: minimind, upstream, ernie4_5_moe, gguf, web\.$", fit("llama", num_experts=4)),
    Mistake(r"hold shared experts. .*model: minimind\.$", fit("qwen3_moe", **MOE, qk_norm=True)),
    Mistake(r"v2 .* an untied .*: minimind, llama, gguf, web\.$", fit("upstream", tie_word_embeddings=False)),
    Mistake(r"a head_dim other than .*: minimind, llama, gguf, web\.$", fit("upstream", head_dim=16)),
    Mistake(
        "normalised top-1 routing. .*: minimind, ernie4_5_moe, gguf", fit("upstream", **MOE, num_experts_per_tok=1)
    ),
    # llama.cpp would compute these differently.
    Mistake("not normalised. .*ernie4_5_moe", fit("gguf", **SHAPES["top1"])),
    Mistake("the activation gelu", fit("gguf", hidden_act="gelu")),
    Mistake("scaled rotary positions", fit("gguf", **SHAPES["yarn"])),
    Mistake("gguf cannot hold shared experts", fit("gguf", **MOE, qk_norm=True)),
    Mistake(
        "No GGUF with this tokenizer: only byte-level BPEs that split text as gpt-2, sm",
        export_with_another_normalizer,
    ),
    Mistake("full is not empty. Choose another directory", export_to("llama", name="full")),
    Mistake("'ollama' is unknown; use one of minimind, upstream", export_to("ollama")),
    Mistake("--dtype q8_0 is not possible for llama; use float32", export_to("llama", "q8_0")),
    Mistake(
        "--dtype float16: model.norm.weight holds values that are not finite", export_to("llama", "float16", norm=1e5)
    ),
    Mistake("overflow float16; use bfloat16", export_to("gguf", "q8_0", intermediate_size=72, initializer_range=1e5)),
    Mistake("out was written wrongly: it is not the same model", compare_with_another_model, RuntimeError),
    Mistake("out could not be written, and nothing was kept", export_on_a_full_disk, OSError),
    # GGUF files of others
    Mistake(
        r"a\.gguf is no GGUF file of version", load_files("a.gguf", named="a.gguf", content=b"GGUF\1" + bytes(40))
    ),
    Mistake("a.gguf is damaged, or no GGUF file", load_files("a.gguf", named="a.gguf")),
    Mistake("architecture gemma3. Those that are read: llama, qwen3, qwen3moe", written_gguf(load_upstream, "gemma3")),
    Mistake("holds no tokenizer", written_gguf(load_tokenizer)),
    Mistake(r"a\.gguf is damaged: .*eos_token_id is 2, and there are 2 tokens", written_gguf(load_tokenizer, eos=2)),
    Mistake("padding_token_id is 4294967295, and", written_gguf(load_upstream, padding=2**32 - 1)),
    Mistake(r"broken\.gguf.*a sliding window", changed_gguf({"llama.attention.sliding_window": 64})),
    Mistake(r"broken\.gguf.*with experts", changed_gguf({"llama.expert_count": 8})),
    Mistake(r"broken\.gguf.*with scaled rotary positions", changed_gguf({"llama.rope.scaling.type": "yarn"})),
    Mistake(r"broken\.gguf.*a partly rotated head", changed_gguf({"llama.rope.dimension_count": 8})),
    Mistake(r"broken\.gguf does not tell num_hidden_layers", changed_gguf({"llama.block_count": None})),
    Mistake(r"=4294967295; it must be at most 16777216", changed_gguf({"llama.context_length": 2**32 - 1})),
    Mistake(r"holds .* tensors for 4000000000 layers", changed_gguf({"llama.block_count": 4_000_000_000})),
    Mistake("config says vocab_size=7, the weights say 300", changed_gguf({"llama.vocab_size": 7})),
    Mistake("config says intermediate_size=7, the weights say", changed_gguf({"llama.feed_forward_length": 7})),
    Mistake("1 missing: model.layers.1.mlp.up_proj.weight", changed_gguf(tensors={"blk.1.ffn_up.weight": None})),
    Mistake("1 unexpected: blk.0.attn_q.bias", changed_gguf(tensors={"blk.0.attn_q.bias": (np.float32([1]), F32)})),
    Mistake(
        "model.norm.weight is .1,. and should be .64,", changed_gguf(tensors={NORM_OF_GGUF: (np.float32([1]), F32)})
    ),
    Mistake(
        "tensor output_norm.weight cannot be read", changed_gguf(tensors={NORM_OF_GGUF: (np.ones(64, np.int8), I8)})
    ),
    Mistake("rope_freqs.weight is not that of Llama 3", changed_gguf(tensors=ROPE)),
    # Models of the package index
    Mistake(
        "embedded:nope is unknown. Models of the package index: embedded:smollm2", lambda: find_gguf("embedded:nope")
    ),
    Mistake("distribution found. Put the file tiny_gguf-1.* into .*/hf_pretrain/models", find_without_an_index),
    Mistake("1.0-py3-none-any.whl is not the wheel of me/tiny", find_another_wheel),
    # The engine of a page
    Mistake("wllama-3.* cannot be downloaded: .*Put the file into .*engines", find_the_engine()),
    Mistake("is deleted. Try again", find_the_engine(b"<html>not found")),
    # MiniMind's LoRA
    Mistake("adapts a matrix 48 x 48, and the base has .32, 32.. Name the base", merge(48)),
    Mistake("model.layers.70.self_attn.q_proj adapts a matrix", merge(stem="model.layers.7{}.self_attn.{}")),
    Mistake("convert it with --base", merge(read=lambda base, path: load_upstream(path))),
    Mistake("is no LoRA file of MiniMind: it holds a", merge_another_file),
    Mistake(
        "--lora_r 16 --lora_target_modules q_proj o_proj. and", write_lora(lora_target_modules=["q_proj", "up_proj"])
    ),
    Mistake("`--lora_r 16 --lora_target", write_lora(lora_r=8)),
    Mistake("without --use_dora", write_lora(use_dora=True)),
    Mistake("base was written by hf_pretrain.*leave the config out", merge_with_a_config),
]
