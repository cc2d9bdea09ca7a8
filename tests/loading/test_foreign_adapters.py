"""Adapters on models of transformers, in both directions, compared with peft on these models."""

import json
import runpy
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_pretrain.checkpoints.writer import write_model
from hf_pretrain.loading.adapters import AdapterArguments, adapter_base, add_adapter, load_adapter, merge_adapter
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.pretrained import find_tokenizer, load_tokenizer, save_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import adapted_model, upstream_lora
from hf_pretrain.weights.exporting import export
from hf_pretrain.weights.importing import load_upstream
from hf_pretrain.weights.upstream_lora import load_merged
from tests.trainers import make_documents, make_trainer, train


SIZES = {
    **{"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 128},
    # Large weights: each adapter changes the logits by more than a tenth.
    **{"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
BASES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "bf16": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)).bfloat16(),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.arange(3, 51).view(2, 24)


def lora(*modules: str, **options) -> LoraConfig:
    target = modules[0] if modules == ("all-linear",) else list(modules or ATTENTION)
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": target} | options)


KINDS = {
    "q and k": ("qwen3", lora("q_proj", "k_proj")),
    "all-linear": ("llama", lora("all-linear")),
    "rsLoRA": ("tied", lora(*ATTENTION, *MLP, use_rslora=True)),
    "DoRA": ("qwen3", lora(*ATTENTION, *MLP, use_dora=True)),
    "bias": ("llama", lora(bias="all")),
    "norms": ("qwen3", lora("v_proj", modules_to_save=["q_norm", "k_norm", "norm"])),
    "saved q": ("qwen3", lora("v_proj", modules_to_save=["q_proj"])),
    "embedding and head": ("llama", lora(modules_to_save=["embed_tokens", "lm_head"])),
    "embedding and tied head": ("tied", lora(modules_to_save=["embed_tokens", "lm_head"])),
    "embedding beside a tied head": ("tied", lora(modules_to_save=["embed_tokens"])),
    "tokens": ("llama", lora(trainable_token_indices=[3, 7])),
    "tokens of a tied head": ("tied", lora(trainable_token_indices=[3, 7])),
    "LoRA of the embedding": ("llama", lora(*ATTENTION, "embed_tokens", "lm_head")),
    "patterns": ("qwen3", lora(rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.self_attn.k_proj": 32})),
    "a parameter": ("qwen3", lora("v_proj", target_parameters=["q_proj.weight"])),
    "experts": ("qwen3_moe", lora(target_parameters=STACKED)),
    "all-linear with experts": ("qwen3_moe", lora("all-linear")),
    "bfloat16": ("bf16", lora(*ATTENTION, *MLP)),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    path = tmp_path_factory.mktemp("bases")
    for name, build in BASES.items():
        torch.manual_seed(0)
        model = build()
        for parameter in (p for part, p in model.named_parameters() if "norm" in part):
            parameter.data.uniform_(0.5, 1.5)
        model.save_pretrained(path / name)
    return path


def shake(adapted: torch.nn.Module) -> None:
    """Change all trainable weights, so that each tensor of an adapter matters."""
    generator = torch.Generator().manual_seed(1)
    for parameter in (p for p in adapted.parameters() if p.requires_grad):
        parameter.data += (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype)


def write_adapter(base, config, path):
    """Let peft write an adapter on a model of transformers."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    shake(adapted)
    adapted.save_pretrained(path)
    return path


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model.float().eval()(IDS).logits


def in_peft(base, adapter) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base).float(), adapter)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare to 1e-5 of the largest logit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# Theirs here


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_gives_its_logits_here(kind, bases, tmp_path):
    name, config = KINDS[kind]
    adapter = write_adapter(bases / name, config, tmp_path / "adapter")
    expected = logits_of(in_peft(bases / name, adapter))
    plain = logits_of(AutoModelForCausalLM.from_pretrained(bases / name))
    assert (expected - plain).abs().max() > 0.1 * expected.abs().max()
    adapted = load_adapter(load_upstream(bases / name, dtype=torch.float32), adapter)
    assert_same(logits_of(adapted), expected)
    # The adapter alone trains, with its saved modules and tokens.
    assert all(p.requires_grad == (".default" in part) for part, p in adapted.named_parameters())
    # Training it further changes its file, and nothing else.
    write_model(str(tmp_path / "again"), adapted, None, None, is_writer=True)
    theirs, ours = (load_file(path / "adapter_model.safetensors") for path in (adapter, tmp_path / "again"))
    assert ours.keys() <= theirs.keys() and all(torch.equal(theirs[part], ours[part]) for part in ours)
    assert_same(logits_of(in_peft(bases / name, tmp_path / "again")), expected)
    # merged, and exported to the base's own format
    model, report = load_merged(str(adapter), dtype="float32")
    assert_same(logits_of(model), expected)
    assert report.max_difference < 1e-5 * expected.abs().max()
    layout = name if name in ("llama", "qwen3_moe") else "qwen3"
    export(model, tmp_path / "merged", layout)
    assert_same(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_merge_is_computed_in_float32(bases, tmp_path, dtype, capsys, monkeypatch):
    adapter = write_adapter(bases / "bf16", lora(*ATTENTION, *MLP), tmp_path / "adapter")
    words = ["--from", str(adapter), "--to", str(tmp_path / "out"), "--format", "qwen3"]
    monkeypatch.setattr("sys.argv", ["convert.py", *words, *(["--dtype", dtype] if dtype else [])])
    runpy.run_path("recipes/convert.py", run_name="__main__")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = in_peft(bases / "bf16", adapter).merge_and_unload().to(merged.dtype)
    assert merged.dtype == (torch.float32 if dtype else torch.bfloat16)
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, expected.state_dict()[name], rtol=0, atol=1e-6 if dtype else 1e-2)
    printed = capsys.readouterr().out.split("peft's unmerged model ")[1].split()[0]
    assert float(printed) < 1e-5 * logits_of(expected).abs().max()


@pytest.mark.parametrize("base", ["qwen3", "native"])
def test_a_wrong_merge_is_noticed(base, bases, tmp_path, monkeypatch):
    adapter = write_adapter(bases / "qwen3", lora("q_proj", "v_proj"), tmp_path / "adapter")
    if base == "native":
        load_upstream(bases / "qwen3").save_pretrained(tmp_path / "native")
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(tmp_path / "native")
        (adapter / "adapter_config.json").write_text(json.dumps(config))

    def merge_wrongly(adapted):
        merged = merge_adapter(adapted)
        merged.model.layers[0].self_attn.v_proj.weight.data *= 1.01
        return merged

    if base == "native":
        monkeypatch.setattr(upstream_lora, "merge_adapter", merge_wrongly)
    else:
        monkeypatch.setattr(adapted_model, "reorder_rows", lambda weights, model, half_split: weights)
    with pytest.raises(RuntimeError):
        load_merged(str(adapter))


def test_adapters_in_shards_and_pickles_are_read(bases, tmp_path):
    adapter = write_adapter(bases / "llama", lora(), tmp_path / "adapter")
    expected = logits_of(in_peft(bases / "llama", adapter))
    weights = load_file(adapter / "adapter_model.safetensors")
    for name in ("shards", "pickle"):
        (tmp_path / name).mkdir()
        shutil.copy(adapter / "adapter_config.json", tmp_path / name)
    torch.save(weights, tmp_path / "pickle/adapter_model.bin")
    shards = {
        name: f"adapter_model-0000{1 + (number % 2)}-of-00002.safetensors" for number, name in enumerate(weights)
    }
    for shard in set(shards.values()):
        save_file({name: weights[name] for name in weights if shards[name] == shard}, tmp_path / "shards" / shard)
    (tmp_path / "shards/adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in ("shards", "pickle"):
        assert_same(logits_of(load_merged(str(tmp_path / name), dtype="float32")[0]), expected)


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(bases, tmp_path):
    """Stock peft saves none."""
    base = shutil.copytree(bases / "llama", tmp_path / "base")
    trained = train_tokenizer(["some text"] * 4, vocab_size=320)
    save_tokenizer(trained, base)
    adapter = write_adapter(base, lora(), tmp_path / "adapter")
    for tokenizer in (load_tokenizer(adapter), find_tokenizer(adapter)):
        assert tokenizer.get_vocab() == trained.get_vocab()
    # An own one wins.
    own = train_tokenizer(["other words"] * 4, vocab_size=300)
    save_tokenizer(own, adapter)
    for tokenizer in (load_tokenizer(adapter), find_tokenizer(adapter)):
        assert tokenizer.get_vocab() == own.get_vocab()
    for path in (adapter, base):
        (path / "tokenizer.json").unlink()
    assert find_tokenizer(adapter) is None


def test_an_adapter_that_names_itself_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    for load in (load_tokenizer, find_tokenizer):
        with pytest.raises(UserError):
            load(tmp_path)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_the_lora_of_one_of_two_tied_matrices_is_not_merged(bases, tmp_path, module):
    """peft would merge it into the other, too: 0.5 of the largest logit off its own unmerged model."""
    adapter = write_adapter(bases / "tied", lora("q_proj", module), tmp_path / "adapter")
    adapted = load_adapter(load_upstream(bases / "tied"), adapter)
    assert_same(logits_of(adapted), logits_of(in_peft(bases / "tied", adapter)))
    with pytest.raises(UserError):
        merge_adapter(adapted)


# Ours there


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("llama", {}), ("qwen3", {"use_dora": True}), ("tied", {}), ("qwen3_moe", {}), ("bf16", {})),
        ("qwen3_moe", {"use_dora": True, "lora_target_modules": ATTENTION}),
    ],
)
def test_an_adapter_trained_here_gives_its_logits_in_peft(name, options, bases, tmp_path):
    base = str(bases / name)
    adapted = add_adapter(
        load_upstream(base, dtype=torch.float32), AdapterArguments(use_peft=True, lora_r=4, **options)
    )
    shake(adapted)
    write_model(str(tmp_path / "adapter"), adapted, None, None, is_writer=True)
    expected = logits_of(adapted)
    assert_same(logits_of(in_peft(base, tmp_path / "adapter")), expected)
    # It names its base as it was given.
    assert adapter_base(tmp_path / "adapter") == base
    assert_same(
        logits_of(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)), expected
    )
    # vLLM and llama.cpp look for these names and shapes.
    weights, stock = (
        load_file(tmp_path / "adapter/adapter_model.safetensors"),
        AutoModelForCausalLM.from_pretrained(base),
    )
    for part in (part for part in weights if ".lora_" in part and ".experts." not in part):
        module = stock.get_submodule(part.removeprefix("base_model.model.").split(".lora_")[0])
        assert weights[part].shape in {(4, module.in_features), (module.out_features, 4), (module.out_features,)}
    again = load_adapter(load_upstream(base, dtype=torch.float32), tmp_path / "adapter")
    assert torch.equal(logits_of(again), expected)


def test_checkpoints_of_a_published_base_resume_and_load_as_the_best(bases, tmp_path):
    rows = make_documents(weighted=True)
    saving = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 4}

    def build(name, **more):
        torch.manual_seed(3)
        model = load_upstream(bases / "qwen3", dtype=torch.float32)
        adapted = add_adapter(model, AdapterArguments(use_peft=True, lora_r=4, use_dora=True))
        return make_trainer(tmp_path / name, rows, model=adapted, arguments=saving | more, batch=8)

    whole, resumed = build("whole"), build("resumed")
    train(whole)
    checkpoint = tmp_path / "whole/checkpoint-2"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name
    whole.state.best_model_checkpoint = str(checkpoint)
    whole._load_best_model()
    assert_same(logits_of(whole.model), logits_of(in_peft(bases / "qwen3", checkpoint)))


def test_adapters_of_earlier_versions_keep_their_meaning(bases, tmp_path):
    """They have the rows of this package and no mark, and `run.json` or a manifest beside them."""
    adapted = add_adapter(load_upstream(bases / "llama"), AdapterArguments(use_peft=True, lora_r=4))
    shake(adapted)
    PeftModel.save_pretrained(adapted, tmp_path / "adapter", save_embedding_layers=False)
    (tmp_path / "adapter/run.json").write_text("{}")
    assert_same(logits_of(load_merged(str(tmp_path / "adapter"), dtype="float32")[0]), logits_of(adapted))


def test_an_adapter_of_a_gguf_file_fits_the_model_in_transformers(bases, tmp_path):
    export(load_upstream(bases / "llama"), tmp_path / "gguf", "gguf")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    adapted = add_adapter(load_upstream(file), AdapterArguments(use_peft=True, lora_r=4))
    shake(adapted)
    write_model(str(tmp_path / "adapter"), adapted, None, None, is_writer=True)
    assert_same(logits_of(in_peft(bases / "llama", tmp_path / "adapter")), logits_of(adapted))
    assert_same(logits_of(load_merged(str(tmp_path / "adapter"))[0]), logits_of(adapted))
    # Earlier versions of this package alone wrote adapters of GGUF files without a mark, and published no `run.json`.
    PeftModel.save_pretrained(adapted, tmp_path / "old", save_embedding_layers=False)
    assert_same(logits_of(load_merged(str(tmp_path / "old"))[0]), logits_of(adapted))


def test_the_lora_of_minimind_files_is_not_trained_on_unconverted_weights(bases, tmp_path):
    """peft cannot load MiniMind's own files, so an adapter on them would fit no published base."""
    export(load_upstream(bases / "tied"), tmp_path / "upstream", "upstream")
    with pytest.raises(UserError):
        add_adapter(load_upstream(tmp_path / "upstream"), AdapterArguments(use_peft=True))
