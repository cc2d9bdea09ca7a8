"""Import of seven recorded models of three generations, and sources that must be refused instead of guessed."""

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.loading.adapters import adapter_base
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.foreign_configs import write_stock_fields
from hf_pretrain.weights.importing import is_native_checkpoint, load_upstream
from tests.models import FIXTURES, GOLDEN, assert_near, recorded


NAMES = sorted(path.name for path in GOLDEN.iterdir())


def weights_of(name: str) -> dict[str, torch.Tensor]:
    return torch.load(GOLDEN / name / "weights.pth", weights_only=True)


def config_of(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


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


def test_a_bare_file_asks_for_fields_that_weights_do_not_show(tmp_path):
    for name, missing, given in (
        ("A_dense", "rope_theta", {"rope_theta": 1e6, "n_heads": 4}),
        ("B_dense", "num_attention_heads", {"num_attention_heads": 4}),
        ("C_moe", "num_experts_per_tok", {"num_experts_per_tok": 2}),
        ("C_dense", None, {}),
    ):
        path = tmp_path / f"{name}.pth"
        shutil.copy(GOLDEN / name / "weights.pth", path)
        with pytest.raises(UserError, match=missing) if missing else nullcontext():
            load_upstream(path)
        check_logits(load_upstream(path, config=given), name)
    with pytest.raises(UserError, match="number of heads"):
        load_upstream(tmp_path / "A_dense.pth", config={"rope_theta": 1e6})


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
    torch.save(weights, tmp_path / "x.pth")
    (tmp_path / "config.json").write_text(json.dumps(config_of("B_moe") | {"n_shared_experts": num_shared}))
    model = load_upstream(tmp_path)
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
    with pytest.raises(UserError, match="was refused before any code in it ran"):
        load_upstream(tmp_path)
    assert not (tmp_path / "ran").exists()


def drop(key):
    return lambda weights: weights.pop(key)


def put(key, value):
    return lambda weights: weights.__setitem__(key, value)


EMBED, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (drop(NORM), "1 missing: model.layers.1.input_layernorm.weight"),
        (drop("model.layers.0.mlp.experts.3.up_proj.weight"), "1 missing: model.layers.0.mlp.experts.3.up_proj"),
        (drop("model.layers.0.self_attn.q_proj.weight"), "lack the matrix model.layers.0.self_attn.q_proj.weight"),
        (put("model.layers.1.self_attn.q_proj.bias", torch.zeros(32)), "1 unexpected: .*q_proj.bias"),
        (put("model.layers.2.input_layernorm.weight", torch.ones(32)), "num_hidden_layers=2, the weights say 3"),
        (put(EMBED, torch.zeros(160)), "lack the matrix model.embed_tokens.weight"),
        (put(NORM, torch.ones(16)), r"input_layernorm.weight is \(16,\) and should be \(32,\)"),
        (put(NORM, torch.full((32,), math.inf)), "not finite"),
        (put(NORM, torch.ones(32, dtype=torch.int8)), "is no floating-point tensor"),
        (put("lm_head.weight", torch.zeros(160, 32)), "tie_word_embeddings=True, the weights say False"),
        (drop(EMBED), "no generation of MiniMind"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(change, message, tmp_path):
    weights = weights_of("C_moe")
    change(weights)
    torch.save(weights, tmp_path / "x.pth")
    shutil.copy(GOLDEN / "C_moe/config.json", tmp_path)
    with pytest.raises(UserError, match=message):
        load_upstream(tmp_path)


@pytest.mark.parametrize(
    "name, config, message",
    [
        ("A_dense", {"n_layers": 3}, "num_hidden_layers=3, the weights say 2"),
        ("B_dense", {"num_key_value_heads": 4}, "num_key_value_heads=4, the weights say 2"),
        ("B_dense", {"hidden_size": 64}, "hidden_size=64, the weights say 32"),
        ("B_moe", {"scoring_func": "sigmoid"}, "sigmoid"),
        ("B_dense", {"model_type": "gemma"}, "model_type='gemma'"),
        ("B_dense", {"hidden_act": "foo"}, "hidden_act='foo' is not an activation"),
        ("B_dense", {"num_attention_heads": 0}, "num_attention_heads=0; it must be a whole number of at least 1"),
        ("B_dense", {"num_attention_heads": "4"}, "num_attention_heads='4'; it must be a whole number"),
        ("B_dense", {"rms_norm_eps": math.nan}, "rms_norm_eps=nan; it must be a number above 0"),
        ("C_dense", {"rope_scaling": {"factor": "x"}}, "factor='x'; it must be a number above 0"),
        ("C_dense", {"inference_rope_scaling": True}, "pass --inference_rope_scaling to chat"),
        ("A_dense", {"rope_theta": None}, "The base of v1.s rotary table is unknown"),
        ("B_dense", {"bos_token_id": "x"}, "bos_token_id"),
    ],
)
def test_a_config_that_contradicts_or_is_malformed_is_refused(name, config, message):
    with pytest.raises(UserError, match=message):
        load_upstream(GOLDEN / name, config=config)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "it holds none"),
        (["a.pth", "b.pth"], r"several files of weights \(a.pth, b.pth\): name one, such as .*/b.pth"),
        (["a.pth", "model.safetensors"], r"several files of weights \(model.safetensors, a.pth\)"),
        (["rng_state.pth", "model.safetensors"], "damaged"),
    ],
)
def test_ambiguous_directories_are_refused(names, message, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(b"not a tensor in sight")
    with pytest.raises(UserError, match=message):
        load_upstream(tmp_path)


@pytest.mark.parametrize("name", ["./out/x.pth", "nope.pth", "~/x", "/x/y", "out/sft/x", "owner/name.safetensors"])
def test_a_mistyped_path_is_no_hub_id(name, monkeypatch):
    # A request to the Hub fails here.
    monkeypatch.setattr("huggingface_hub.file_download.hf_hub_url", None)
    monkeypatch.setattr("hf_pretrain.weights.weight_files.snapshot_download", None)
    assert adapter_base(name) is None and not is_native_checkpoint(name)
    with pytest.raises(UserError, match=f"{name}: no such file or directory"):
        load_upstream(name)
    with pytest.raises(UserError, match=f"There is no directory {os.path.expanduser(name)}"):
        load_tokenizer(name)


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", b"<!DOCTYPE html>", b"", b"PK\x03\x04"],
)
@pytest.mark.parametrize("name", ["x.pth", "model.safetensors"])
def test_a_file_of_something_else_is_named(content, name, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="is not a file of weights, or is damaged.*`git lfs pull`"):
        load_upstream(tmp_path)


def test_a_flipped_byte_of_a_pth_is_noticed(tmp_path):
    content = bytearray((GOLDEN / "C_dense/weights.pth").read_bytes())
    # The byte is in the middle of the embedding, so the values are finite, of the right shape, and wrong.
    content[10_000] ^= 1
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(UserError, match="is damaged: the checksum of .* is wrong"):
        load_upstream(tmp_path / "x.pth")


def test_a_config_given_to_bare_weights_is_read_as_transformers_reads_it(input_ids, tmp_path):
    """Use the defaults of the architecture, and the spelling of transformers 4."""
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "initializer_range": 0.3, "max_position_embeddings": 256}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16}
    theta = {"rope_theta": 500.0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=scaling | theta)).eval()
    model.save_pretrained(tmp_path)
    bare = tmp_path / "bare/llama.safetensors"
    bare.parent.mkdir()
    shutil.copy(tmp_path / "model.safetensors", bare)
    expected = model(input_ids).logits
    assert_near(load_upstream(tmp_path)(input_ids).logits, expected)
    old = sizes | theta | {"model_type": "llama", "rope_scaling": scaling, "tie_word_embeddings": False}
    assert_near(load_upstream(bare, config=old)(input_ids).logits, expected)
    del old["rope_theta"], old["rope_scaling"]
    assert load_upstream(bare, config=old).config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert load_upstream(bare, config=old).config.rms_norm_eps == LlamaConfig().rms_norm_eps


def test_a_published_model_keeps_its_sampling_and_its_stop_tokens(tmp_path):
    """Those of transformers, after loading and after an export."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    published = LlamaForCausalLM(LlamaConfig(vocab_size=49152, num_key_value_heads=2, **sizes))
    own = {"temperature": 0.6, "top_p": 0.85, "top_k": 20, "repetition_penalty": 1.05}
    published.generation_config.update(do_sample=True, eos_token_id=[2, 0], **own)
    published.save_pretrained(tmp_path / "published")
    tokenizer = load_tokenizer("embedded:smollm2")
    model = load_model(ModelArguments(model_name_or_path=str(tmp_path / "published")), tokenizer)
    export(model, tmp_path / "exported", "llama", tokenizer=tokenizer)
    again = GenerationConfig.from_pretrained(tmp_path / "exported")
    for config in (model.generation_config, again):
        assert {name: getattr(config, name) for name in own} == own and config.do_sample
        assert sorted(config.eos_token_id) == [0, 2]
    export(model, tmp_path / "gguf", "gguf", tokenizer=tokenizer)
    config = load_upstream(tmp_path / "gguf/model.gguf").generation_config
    assert {name: getattr(config, name) for name in own} == own and config.do_sample


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
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=6400, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    config = load_upstream(tmp_path).generation_config
    assert {name: getattr(config, name) for name in own} == own


@pytest.mark.parametrize(("window", "is_read"), [(None, True), (128, True), (64, False)])
def test_a_mistral_without_a_window_is_a_llama(window, is_read, input_ids, tmp_path):
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    stock = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=window)).eval()
    stock.save_pretrained(tmp_path)
    if is_read:
        assert_near(load_upstream(tmp_path)(input_ids).logits, stock(input_ids).logits)
    else:
        with pytest.raises(UserError, match="sliding_window=64 in the config of a Mistral"):
            load_upstream(tmp_path)


def test_a_missing_head_and_an_untied_head(tmp_path):
    weights = without_head(weights_of("C_dense"))
    torch.save(weights, tmp_path / "x.pth")
    assert load_upstream(tmp_path / "x.pth").config.tie_word_embeddings
    # A v3 model may have an untied head.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    torch.save(weights, tmp_path / "x.pth")
    model = load_upstream(tmp_path / "x.pth")
    assert not model.config.tie_word_embeddings and torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def tokenizer_of_the_toys():
    """Return a tokenizer whose ids fit a vocabulary of 160."""
    tokenizer = load_tokenizer(FIXTURES / "tokenizers/v1")
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer.model)(vocab={"a": 3}, merges=[])
    return tokenizer


def test_training_starts_from_upstream_weights():
    arguments = ModelArguments(model_name_or_path=str(GOLDEN / "B_dense"), config_overrides="dropout=0.1")
    with pytest.raises(UserError, match="vocab_size is 160"):
        load_model(arguments, load_tokenizer(FIXTURES / "tokenizers/v1"))
    model = load_model(arguments, tokenizer_of_the_toys())
    assert isinstance(model, MiniMindForCausalLM) and model.dtype == torch.float32 and model.config.dropout == 0.1
    check_logits(model.eval(), "B_dense")
    assert model.model.rotary_emb.pos_cis.is_complex()


def test_the_dropout_of_another_program_is_left_out_and_named(tmp_path, caplog):
    config = LlamaConfig(
        vocab_size=160, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, attention_dropout=0.1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert load_upstream(tmp_path).config.dropout == 0.0
    assert "attention_dropout=0.1 of the config is left out" in caplog.text
    model = load_upstream(tmp_path, config={"dropout": 0.2})
    assert model.config.dropout == 0.2
    assert write_stock_fields(model.config, "llama")["attention_dropout"] == 0.2


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (drop(QUERY), f"1 missing: {QUERY}"),
        (put("model.layers.1.mlp.lora.weight", torch.ones(2)), "1 unexpected: model.layers.1.mlp.lora.weight"),
        (put(QUERY, torch.ones(7)), rf"{QUERY} is \(7,\) and should be \(32, 32\)"),
        (put(QUERY, torch.full((32, 32), math.nan)), f"{QUERY} holds values that are not finite"),
        (None, "no readable weights"),
    ],
)
def test_a_damaged_checkpoint_of_ours_is_refused(change, message, build_model, tmp_path):
    """No missing tensor may get random values, neither here nor at the start of training."""
    build_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    arguments, tokenizer = ModelArguments(model_name_or_path=str(tmp_path)), tokenizer_of_the_toys()
    loaders = [partial(load_upstream, tmp_path), partial(load_model, arguments, tokenizer)]
    for load in loaders:
        assert torch.equal(load().get_parameter(QUERY), weights[QUERY])
    if change is None:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})
    for load in loaders:
        with pytest.raises(UserError, match=message):
            load()
