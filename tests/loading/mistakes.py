"""Mistakes with models and adapters that the command line names."""

import json
from functools import cache

import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PrefixTuningConfig
from safetensors.torch import load_file, save_file

from hf_pretrain import MiniMindConfig
from hf_pretrain.loading.adapters import AdapterArguments, adapter_base, add_adapter, merge_adapter
from hf_pretrain.loading.model import load_model, with_yarn
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights import adapted_model, upstream_lora
from hf_pretrain.weights.adapted_model import AdaptedModel, read_config
from hf_pretrain.weights.upstream_lora import load_merged
from tests.conftest import GENERATIONS
from tests.mistakes import Mistake
from tests.models import saved_model
from tests.toys import toy_model


MOE = {"num_experts": 4}
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@cache
def tokenizer():
    return train_tokenizer(["some words for a tokenizer"] * 20, vocab_size=300)


def override(text):
    """Load a checkpoint with overrides."""

    def make(tmp_path):
        saved_model(tmp_path, **MOE)
        load_model(ModelArguments(model_name_or_path=str(tmp_path), config_overrides=text), tokenizer())

    return make


def extend(text):
    return lambda: with_yarn(MiniMindConfig(), text)


def load_with_fewer_ids(own):
    load_model(ModelArguments(vocab_size=100, model_preset="tiny"), own)


def load_with_a_saved_tokenizer(tmp_path):
    tokenizer().save_pretrained(tmp_path / "own")
    load_with_fewer_ids(load_tokenizer(tmp_path / "own"))


def add_to(generation, **arguments):
    def make(tmp_path, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        add_adapter(saved_model(tmp_path, **GENERATIONS[generation]), AdapterArguments(use_peft=True, **arguments))

    return make


def add_under_zero3(tmp_path, monkeypatch):
    monkeypatch.setattr(adapted_model, "is_deepspeed_zero3_enabled", lambda: True)
    add_to("v1-moe")(tmp_path, monkeypatch)


def save_adapter(path, change=lambda weights: None, *, config=None, **fields):
    """Save an adapter with other weights and other fields of its config, and return its directory."""
    model = saved_model(path / "base")
    arguments = AdapterArguments(use_peft=True, lora_target_modules=["q_proj"])
    adapted = AdaptedModel(model, config) if config else add_adapter(model, arguments)
    adapted.save_pretrained(path / "adapter")
    weights = load_file(path / "adapter/adapter_model.safetensors")
    change(weights)
    save_file(weights, path / "adapter/adapter_model.safetensors")
    file = path / "adapter/adapter_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(path / "base")} | fields)
    )
    return path / "adapter"


def load_with(**fields):
    return lambda tmp_path: load_merged(str(save_adapter(tmp_path, **fields)))


def load_based(base, load=adapter_base):
    return lambda tmp_path: load(save_adapter(tmp_path, base_model_name_or_path=base.format(path=tmp_path)))


def add_tokens_to_an_adapter(tmp_path):
    load_model(ModelArguments(model_name_or_path=str(save_adapter(tmp_path)), add_tokens="words.txt"), tokenizer())


def load_damaged_settings(tmp_path):
    (save_adapter(tmp_path) / "generation_config.json").write_text("{")
    load_merged(str(tmp_path / "adapter"))


def merge_wrongly(tmp_path, monkeypatch):
    def merge(adapted):
        adapted.get_base_model().model.norm.weight.data *= 1.01
        return merge_adapter(adapted)

    monkeypatch.setattr(upstream_lora, "merge_adapter", merge)
    load_merged(str(save_adapter(tmp_path)))


def read(config):
    def make(tmp_path):
        config.save_pretrained(tmp_path)
        read_config(str(tmp_path))

    return make


CAUSAL = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


def lora(**options):
    return LoraConfig(**CAUSAL | options)


MISTAKES = [
    # Models
    Mistake('"sequnce" is unknown; use "sequence" or "batch"', override("router_aux_loss_level=sequnce")),
    Mistake("num_experts_per_tok=9 must lie between 1 and num_experts=4", override("num_experts_per_tok=9")),
    Mistake("hidden_act='slu' is not an activation", override("hidden_act=slu")),
    Mistake(
        r"The tokenizer \S+/own gives ids up to 299, but the model's vocab_size is 100", load_with_a_saved_tokenizer
    ),
    Mistake("The tokenizer of this run gives ids up to 299", lambda: load_with_fewer_ids(tokenizer())),
    Mistake("--inference_rope_scaling 16 is not of the form 2048:16", extend("16")),
    Mistake("--inference_rope_scaling 2048:x is not of the form 2048:16", extend("2048:x")),
    Mistake("--inference_rope_scaling 0:4 is not of the form 2048:16", extend("0:4")),
    Mistake("--inference_rope_scaling 2048:16:2 is not of the form 2048:16", extend("2048:16:2")),
    # New adapters
    Mistake("lm_head: this model lacks it. It has q_proj", add_to("v1", lora_target_modules=["q_proj", "lm_head"])),
    Mistake("gate_up_proj: this model lacks it", add_to("v1", lora_target_modules=["gate_up_proj"])),
    Mistake("stacked experts neither with", add_to("v1-moe", use_dora=True)),
    Mistake("adapt the rest with --lora_target_modules q_proj k_proj v_proj o", add_to("v3-moe", lora_dropout=0.1)),
    Mistake("nor under ZeRO-3", add_under_zero3),
    Mistake("--load_in_4bit needs CUDA", add_to("v1", load_in_4bit=True)),
    Mistake("positive", add_to("v1", lora_r=0)),
    Mistake("add --use_peft", lambda: AdapterArguments(load_in_4bit=True)),
    Mistake(
        "--use_peft needs --model_name_or_path.*Convert weights of another program first",
        lambda: add_adapter(toy_model(), AdapterArguments(use_peft=True)),
    ),
    # Adapters that are there
    Mistake("--add_tokens trains new rows, which an adapter freezes", add_tokens_to_an_adapter),
    Mistake("does not name its base: set base_model_name_or_path", load_based("None")),
    Mistake("names itself as its base model", load_based("{path}/adapter")),
    Mistake("base holds no tokenizer.json", load_based("{path}/base", load=load_tokenizer)),
    Mistake("generation_config.json", load_damaged_settings, OSError),
    Mistake("merge of .*adapter was written wrongly", merge_wrongly, RuntimeError),
    Mistake("1 tensors are missing or unexpected", load_with(change=lambda weights: weights.pop(QUERY))),
    Mistake(
        "unexpected: .*layers.7.self_attn",
        load_with(change=lambda weights: weights.update({QUERY.replace(".0.", ".7."): weights[QUERY] + 0})),
    ),
    Mistake("does not fit", load_with(change=lambda weights: weights.update({QUERY: torch.ones(3, 4)}))),
    Mistake("peft_type IA3", read(IA3Config(**CAUSAL, feedforward_modules=[]))),
    Mistake("peft_type LOHA", read(LoHaConfig(**CAUSAL))),
    Mistake("peft_type PREFIX_TUNING", read(PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))),
    Mistake("task_type SEQ_CLS", read(lora(task_type="SEQ_CLS"))),
    Mistake(r"alora_invocation_tokens \[5, 6\]", read(lora(alora_invocation_tokens=[5, 6]))),
    Mistake("layer_replication", read(lora(layer_replication=[[0, 2], [1, 2]]))),
    Mistake("init_lora_weights pissa. Only LoRA.* use the merged model", load_with(init_lora_weights="pissa")),
    Mistake("cannot be merged: .*lora_bias", load_with(config=lora(lora_bias=True))),
    Mistake("cannot be merged if they share", load_with(config=lora(target_modules=["q_proj", "embed_tokens"]))),
]
