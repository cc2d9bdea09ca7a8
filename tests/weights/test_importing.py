"""Import of recorded models of three generations and of stock models; what does not fit is refused, not guessed."""

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, MistralConfig, MistralForCausalLM

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.loading.adapters import adapter_base
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.foreign_configs import write_stock_fields
from hf_pretrain.weights.importing import is_native_checkpoint, load_upstream
from tests.models import FIXTURES, GOLDEN, TEXT, assert_near, recorded
from tests.weights.files import MOE, NAMES, save_stock, weights_of, write_upstream


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_recorded_values(name, attn_implementation):
    expected = recorded(name)
    model = load_upstream(GOLDEN / name)
    model.set_attn_implementation(attn_implementation)
    ids = expected["input_ids"]
    assert_near(model(ids).logits, expected["logits"])

    outputs = model.train()(ids, labels=ids, loss_mask=expected["loss_mask"])
    assert_near(outputs.logits, expected["train_logits"])
    torch.testing.assert_close(outputs.ce_loss, expected["masked_loss"], rtol=1e-5, atol=0)
    assert ("moe" in name) == (expected["aux_loss"] > 0)
    router_loss = outputs.loss - outputs.ce_loss
    if "moe" in name:
        router_loss = outputs.aux_loss * model.config.router_aux_loss_coef
    torch.testing.assert_close(router_loss, expected["aux_loss"].reshape(()), rtol=1e-5, atol=0)
    outputs.loss.backward()
    grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(grad_norm, expected["grad_norm"].reshape(()), rtol=1e-5, atol=0)

    prompt = expected["greedy"][:, :12]
    generated = model.eval().generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(generated, expected["greedy"])


def check_logits(model: MiniMindForCausalLM, name: str):
    expected = recorded(name)
    assert_near(model(expected["input_ids"]).logits, expected["logits"])


def save_shards(weights: dict[str, torch.Tensor], path: Path, *, name: str, save: Callable):
    shards = {f"part-{number}.{name}": sorted(weights)[number::2] for number in (0, 1)}
    for shard, names in shards.items():
        save({key: weights[key].clone() for key in names}, path / shard)
    weight_map = {key: shard for shard, names in shards.items() for key in names}
    (path / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_beside_another(weights: dict[str, torch.Tensor], path: Path) -> Path:
    torch.save({}, path / "another.pth")
    torch.save(weights, path / "full_sft_32.pth")
    return path / "full_sft_32.pth"


def without_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in weights.items() if key not in ("output.weight", "lm_head.weight")}


WRITERS = {
    # `save_pretrained` leaves out a tied head.
    "safetensors": lambda weights, path: save_file(without_head(weights), path / "model.safetensors"),
    "safetensors-shards": partial(save_shards, name="model.safetensors", save=save_file),
    "bin": lambda weights, path: torch.save(weights, path / "pytorch_model.bin"),
    "bin-shards": partial(save_shards, name="pytorch_model.bin", save=torch.save),
    "beside": save_beside_another,
    "ddp": lambda weights, path: torch.save(
        {f"module._orig_mod.{key}": weights[key] for key in weights}, path / "x.pth"
    ),
    "resume": lambda weights, path: torch.save({"model": weights, "optimizer": {"step": 3}}, path / "x_resume.pth"),
}


@pytest.mark.parametrize("name", ["A_moe", "B_moe", "C_moe_top1"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_kind_of_file(name, write, tmp_path):
    shutil.copy(GOLDEN / name / "config.json", tmp_path)
    check_logits(load_upstream(write(weights_of(name), tmp_path) or tmp_path), name)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("A_dense", {"rope_theta": 1e6, "n_heads": 4}),
        ("B_dense", {"num_attention_heads": 4}),
        ("C_moe", {"num_experts_per_tok": 2}),
        ("C_dense", {}),
    ],
)
def test_a_bare_file_needs_the_fields_that_weights_do_not_show(name, given, tmp_path):
    path = shutil.copy(GOLDEN / name / "weights.pth", tmp_path / "x.pth")
    check_logits(load_upstream(path, config=given), name)
    for field in given:
        with pytest.raises(UserError):
            load_upstream(path, config={key: given[key] for key in given if key != field})


@pytest.mark.parametrize(
    "name, change, fields",
    [
        ("A_moe", {}, (0.1, "sequence", True)),
        ("A_moe", {"seq_aux": False}, (0.1, "batch", True)),
        ("A_moe", {"num_experts_per_tok": 1}, (0.1, "sequence", False)),
        ("B_moe", {"num_experts_per_tok": 1, "aux_loss_alpha": 0.3}, (0.3, "sequence", False)),
        ("C_moe", {}, (0.001, "batch", True)),
        ("C_moe", {"num_experts_per_tok": 3}, (0.0015, "batch", True)),
        ("C_moe_top1", {}, (0.0005, "batch", True)),
    ],
)
def test_router_fields(name, change, fields):
    config = load_upstream(GOLDEN / name, config=change).config
    assert config.router_aux_loss_coef == pytest.approx(fields[0], rel=1e-12)
    assert (config.router_aux_loss_level, config.norm_topk_prob) == fields[1:]


@pytest.mark.parametrize("num_shared", [1, 2, 3])
def test_a_list_of_shared_experts_equals_one_wide_expert(num_shared, tmp_path):
    """Compare with the written-out sum of the experts' outputs."""
    weights, generator = weights_of("B_moe"), torch.Generator().manual_seed(0)
    name = "model.layers.{}.mlp.shared_experts.{}.{}_proj.weight"
    for layer, expert, part in product(range(2), range(num_shared), ("gate", "up", "down")):
        shape = weights[name.format(layer, 0, part)].shape
        weights[name.format(layer, expert, part)] = 0.1 * torch.randn(shape, generator=generator)
    model = load_upstream(write_upstream(tmp_path, "B_moe", weights, n_shared_experts=num_shared))
    assert model.config.num_shared_experts == num_shared
    states, expected = torch.randn(5, 32, generator=generator), torch.zeros(5, 32)
    for expert in range(num_shared):
        gate, up, down = (weights[name.format(1, expert, part)] for part in ("gate", "up", "down"))
        expected += (torch.nn.functional.silu(states @ gate.T) * (states @ up.T)) @ down.T
    assert_near(model.model.layers[1].mlp.shared_experts(states), expected, rel=1e-6)


class Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("save", [lambda content, path: path.write_bytes(pickle.dumps(content)), torch.save])
def test_a_pickle_with_more_than_tensors_is_refused_and_nothing_runs(save, tmp_path):
    shutil.copy(GOLDEN / "C_dense/config.json", tmp_path)
    save({"a": torch.ones(1), "model.embed_tokens.weight": Payload(tmp_path / "ran")}, tmp_path / "x.pth")
    with pytest.raises(UserError):
        load_upstream(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["1 missing", "1 unexpected", "1 of another shape", "not finite"])
@pytest.mark.parametrize("is_ours", [False, True])
@settings(derandomize=True, max_examples=2, deadline=None)
@given(data=st.data())
def test_each_tensor_that_does_not_fit_is_named(build_model, tmp_path_factory, data, kind, is_ours):
    """No missing tensor may get random values, neither here nor at the start of training."""
    path, model = tmp_path_factory.mktemp("changed"), build_model(**MOE)
    weights = model.state_dict() if is_ours else weights_of("C_moe")
    # The sizes of a file are those of its first layer.
    name = data.draw(st.sampled_from([name for name in weights if "layers.1." in name]))
    changes = {
        "1 missing": {name: None},
        "1 unexpected": {f"{name}.bias": torch.ones(2)},
        "1 of another shape": {name: torch.ones(7)},
        "not finite": {name: torch.full_like(weights[name], math.nan)},
    }[kind]
    if is_ours:
        model.save_pretrained(path)
        weights = load_file(path / "model.safetensors") | changes
        assert "lm_head.weight" not in weights
        weights = {key: value for key, value in weights.items() if value is not None}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    else:
        write_upstream(path, "C_moe", changes)
    arguments = ModelArguments(model_name_or_path=str(path))
    for load in (partial(load_upstream, path), partial(load_model, arguments, tokenizer_of_the_toys())):
        with pytest.raises(UserError) as raised:
            load()
        # Our tensors stack the experts.
        assert kind in str(raised.value) and name.partition(".experts.")[0] in str(raised.value)


@pytest.mark.parametrize("name", ["./out/x.pth", "nope.pth", "~/x", "/x/y", "out/sft/x", "owner/name.safetensors"])
def test_a_mistyped_path_is_no_hub_id(name, monkeypatch):
    # A request to the Hub fails here.
    monkeypatch.setattr("huggingface_hub.file_download.hf_hub_url", None)
    monkeypatch.setattr("hf_pretrain.weights.weight_files.snapshot_download", None)
    assert adapter_base(name) is None and not is_native_checkpoint(name)
    for load in (load_upstream, load_tokenizer):
        with pytest.raises(UserError):
            load(name)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.sampled_from([POINTER, b"<!DOCTYPE html>", b"", b"PK\x03\x04"]) | st.binary(max_size=80))
def test_a_file_of_something_else_is_refused(tmp_path_factory, content):
    for name in ("x.pth", "model.safetensors"):
        path = tmp_path_factory.mktemp("else") / name
        path.write_bytes(content)
        with pytest.raises(UserError):
            load_upstream(path.parent)


def test_a_config_given_to_bare_weights_is_read_as_transformers_reads_it(input_ids, tmp_path):
    """Use the defaults of the architecture, and the spelling of transformers 4."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16}
    theta = {"rope_theta": 500.0}
    model = save_stock(tmp_path, rope_parameters=scaling | theta)
    bare = tmp_path / "bare/llama.safetensors"
    bare.parent.mkdir()
    shutil.copy(tmp_path / "model.safetensors", bare)
    expected = model(input_ids).logits
    assert_near(load_upstream(tmp_path)(input_ids).logits, expected)
    old = json.loads((tmp_path / "config.json").read_text()) | theta | {"rope_scaling": scaling}
    del old["rope_parameters"], old["rms_norm_eps"]
    assert_near(load_upstream(bare, config=old)(input_ids).logits, expected)
    del old["rope_theta"], old["rope_scaling"]
    assert load_upstream(bare, config=old).config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert load_upstream(bare, config=old).config.rms_norm_eps == LlamaConfig().rms_norm_eps


def test_a_published_model_keeps_its_sampling_and_its_stop_tokens(tmp_path):
    """Those of transformers, after loading and after an export."""
    own = {"temperature": 0.6, "top_p": 0.85, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    published = save_stock(tmp_path / "published", vocab_size=300)
    published.generation_config.update(eos_token_id=[2, 0], **own)
    published.generation_config.save_pretrained(tmp_path / "published")
    tokenizer = train_tokenizer([TEXT], vocab_size=300)
    model = load_model(ModelArguments(model_name_or_path=str(tmp_path / "published")), tokenizer)
    export(model, tmp_path / "exported", "llama", tokenizer=tokenizer)
    export(model, tmp_path / "gguf", "gguf", tokenizer=tokenizer)
    again = GenerationConfig.from_pretrained(tmp_path / "exported")
    for config in (model.generation_config, again, load_upstream(tmp_path / "gguf/model.gguf").generation_config):
        assert {name: getattr(config, name) for name in own} == own
    assert sorted(model.generation_config.eos_token_id) == sorted(again.eos_token_id) == [0, 2]


@pytest.mark.parametrize(
    ("published", "own"),
    [
        # A model that does not sample would pass for a base model.
        (
            {"do_sample": False, "temperature": 0.6, "num_return_sequences": 2},
            {"do_sample": None, "temperature": None},
        ),
        ({"do_sample": True, "temperature": 0}, {"do_sample": None, "temperature": None}),
        ({"do_sample": True, "temperature": 1, "top_k": -1}, {"do_sample": True, "temperature": 1, "top_k": 0}),
        ({"repetition_penalty": 1.3, "max_new_tokens": 0}, {"do_sample": None, "repetition_penalty": 1.3}),
    ],
)
def test_odd_generation_configs_are_read(published, own, tmp_path):
    save_stock(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    config = load_upstream(tmp_path).generation_config
    assert {name: getattr(config, name) for name in own} == own


@pytest.mark.parametrize("window", [None, 256])
def test_a_mistral_without_a_window_is_a_llama(window, input_ids, tmp_path):
    fields = {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": window}
    stock = save_stock(tmp_path, MistralForCausalLM, MistralConfig, **fields)
    assert_near(load_upstream(tmp_path)(input_ids).logits, stock(input_ids).logits)


def test_a_missing_head_and_an_untied_head(tmp_path):
    weights = without_head(weights_of("C_dense"))
    torch.save(weights, tmp_path / "x.pth")
    assert load_upstream(tmp_path / "x.pth").config.tie_word_embeddings
    # A v3 model may have an untied head.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    torch.save(weights, tmp_path / "x.pth")
    model = load_upstream(tmp_path / "x.pth")
    assert not model.config.tie_word_embeddings and torch.equal(model.lm_head.weight, weights["lm_head.weight"])


@cache
def tokenizer_of_the_toys():
    """Return a tokenizer whose ids fit a vocabulary of 160."""
    tokenizer = load_tokenizer(FIXTURES / "tokenizers/v1")
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer.model)(vocab={"a": 3}, merges=[])
    return tokenizer


def test_training_starts_from_upstream_weights():
    arguments = ModelArguments(model_name_or_path=str(GOLDEN / "B_dense"), config_overrides="dropout=0.1")
    model = load_model(arguments, tokenizer_of_the_toys())
    assert isinstance(model, MiniMindForCausalLM) and model.dtype == torch.float32 and model.config.dropout == 0.1
    check_logits(model.eval(), "B_dense")
    assert model.model.rotary_emb.pos_cis.is_complex()


def test_the_dropout_of_another_program_is_left_out_and_named(tmp_path, caplog):
    save_stock(tmp_path, attention_dropout=0.1)
    assert load_upstream(tmp_path).config.dropout == 0.0
    assert "attention_dropout=0.1 of the config is left out" in caplog.text
    model = load_upstream(tmp_path, config={"dropout": 0.2})
    assert model.config.dropout == 0.2
    assert write_stock_fields(model.config, "llama")["attention_dropout"] == 0.2
