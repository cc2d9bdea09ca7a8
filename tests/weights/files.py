"""Models of every shape, and files of weights, that the tests of formats start from."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pretrain import MiniMindForCausalLM
from tests.conftest import TOY
from tests.models import GOLDEN
from tests.toys import toy_model


NAMES = sorted(path.name for path in GOLDEN.iterdir())
MOE = {"num_experts": 4, "num_shared_experts": 1}
YARN = {"rope_type": "yarn", "rope_theta": 3e4, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v1-moe": MOE,
    "v2-moe": {"num_experts": 4, "num_shared_experts": 2, "moe_intermediate_size": 96},
    "no-shared": {"num_experts": 4},
    "top1": MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "v3": {"qk_norm": True, "head_dim": 12},
    "v3-moe": {"qk_norm": True, "num_experts": 4, "num_experts_per_tok": 3},
    "v3-unnormalised": {"qk_norm": True, "num_experts": 4, "norm_topk_prob": False},
    "untied": {"tie_word_embeddings": False},
    "untied-moe": {"tie_word_embeddings": False} | MOE,
    "yarn": {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}},
}
# The shapes of llama.cpp's architectures.
MODELS = {"llama": SHAPES["untied"], "qwen3": {"qk_norm": True, "head_dim": 24}}
MODELS |= {"qwen3moe": SHAPES["v3-moe"], "ernie4_5-moe": SHAPES["v2-moe"]}
SQUARE, LORA_STEM = ("q_proj", "o_proj"), "model.layers.{}.self_attn.{}"


def with_norms(model: MiniMindForCausalLM) -> MiniMindForCausalLM:
    """Give a model norms that are not one, so that a forgotten permutation of them shows."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def build_shape(name: str) -> MiniMindForCausalLM:
    return with_norms(toy_model(**TOY | SHAPES[name]))


def build(**overrides: Any) -> MiniMindForCausalLM:
    """Return a model with the vocabulary size of the published tokenizers."""
    sizes = {"hidden_size": 64, "num_key_value_heads": 2, "initializer_range": 0.15, "max_position_embeddings": 32768}
    return with_norms(toy_model(**sizes | overrides))


def weights_of(name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a recorded model."""
    return torch.load(GOLDEN / name / "weights.pth", weights_only=True)


def write_upstream(path: Path, name: str, changes: dict[str, torch.Tensor | None], **fields: Any) -> Path:
    """Write a recorded model with other tensors and fields. `None` is left out."""
    weights = {key: value for key, value in (weights_of(name) | changes).items() if value is not None}
    torch.save(weights, path / "x.pth")
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


def save_stock(
    path: Path, model_class: type = LlamaForCausalLM, config_class: type = LlamaConfig, **fields: Any
) -> Any:
    """Save a toy of transformers, a Llama by default, and return it."""
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "initializer_range": 0.3, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = model_class(config_class(**sizes | fields)).eval()
    model.save_pretrained(path)
    return model


def save_lora(path: Path, num_layers: int, width: int, stem: str = LORA_STEM, names: tuple[str, ...] = SQUARE) -> dict:
    """Save a random LoRA with the names and shapes that MiniMind's `save_lora` writes, and return its tensors."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name in (stem.format(layer, projection) for layer in range(num_layers) for projection in names):
        tensors[f"{name}.lora.A.weight"] = torch.randn(16, width, generator=generator) * 0.1
        tensors[f"{name}.lora.B.weight"] = torch.randn(width, 16, generator=generator) * 0.1
    torch.save(tensors, path)
    return tensors


def rewrite(source: Path, target: Path, fields: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None):
    """Copy a GGUF file with other fields, and tensors as pairs of values and their type. `None` is left out."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    kept = {name: field for name, field in reader.fields.items() if name.startswith("llama.")}
    for name, field in kept.items():
        if name not in (fields or {}):
            writer.add_key_value(name, field.contents(), field.types[0])
    for name, value in (fields or {}).items():
        if value is not None:
            kind = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}[type(value)]
            writer.add_key_value(name, value, kind)
    own = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, entry in (own | (tensors or {})).items():
        if entry is not None:
            writer.add_tensor(name, entry[0], raw_dtype=entry[1])
    write_all(writer)


def write_all(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
