"""
What takes the memory of a training run on a GPU, as arithmetic. docs/memory.md and docs/weights.md show the tables.

    python -m benchmarks.memory
    python -m benchmarks.memory --rows 8 --max_length 512

No figure is measured; `--dry_run` measures a run. The arithmetic is the estimate of `--fit_micro_batch`
(`hf_pretrain/training/micro_batch.py`), for bfloat16, AdamW and compiled layers.
"""

import argparse
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hf_pretrain import PRESETS, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.training.micro_batch import Weights, activation_bytes, cache_bytes, loss_bytes, needed_bytes


GIB = 2**30


def shape(
    layers: int, hidden: int, heads: int, keys: int, width: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return dict(zip(names, (layers, hidden, heads, keys, width), strict=True)) | {"vocab_size": vocabulary} | others


_QWEN, _UNTIED = {"head_dim": 128, "qk_norm": True}, {"tie_word_embeddings": False}
MODELS = {
    "minimind2-small": PRESETS["minimind2-small"],
    "minimind2": PRESETS["minimind2"],
    "SmolLM2-135M": shape(30, 576, 9, 3, 1536, 49152),
    "SmolLM2-360M": shape(32, 960, 15, 5, 2560, 49152),
    "Qwen3-0.6B": shape(28, 1024, 16, 8, 3072, 151936, **_QWEN),
    "TinyLlama-1.1B": shape(22, 2048, 32, 4, 5632, 32000, **_UNTIED),
    "Llama-3.2-1B": shape(16, 2048, 32, 8, 8192, 128256),
    "SmolLM2-1.7B": shape(24, 2048, 32, 32, 8192, 49152),
    "Qwen3-1.7B": shape(28, 2048, 16, 8, 6144, 151936, **_QWEN),
    "Qwen3-4B": shape(36, 2560, 32, 8, 9728, 151936, **_QWEN),
    "Mistral-7B-v0.3": shape(32, 4096, 32, 8, 14336, 32768, **_UNTIED),
}


@cache
def build(name: str) -> MiniMindForCausalLM:
    with torch.device("meta"):
        return MiniMindForCausalLM(MiniMindConfig(**MODELS[name]))


def linear_parameters(model: MiniMindForCausalLM) -> list[torch.nn.Parameter]:
    """Return the matrices of the layers, which an adapter adapts and `--load_in_4bit` quantizes."""
    return [parameter for name, parameter in model.named_parameters() if "_proj" in name]


def adapter_size(model: MiniMindForCausalLM, rank: int = 16) -> int:
    """Return the number of parameters of a LoRA adapter on all linear layers: `rank` rows and columns for each."""
    return sum(rank * sum(parameter.shape) for parameter in linear_parameters(model))


def frozen(model: MiniMindForCausalLM, *, in_4bit: bool = False) -> Weights:
    """Return the weights of a model with an adapter."""
    quantized = sum(parameter.numel() for parameter in linear_parameters(model)) if in_4bit else 0
    return Weights(adapter_size(model), model.num_parameters() - quantized, quantized)


def with_reference(model: MiniMindForCausalLM) -> Weights:
    """Return all weights, trained, and those of a reference model or a teacher of the same size."""
    return Weights(model.num_parameters(), reference=model.num_parameters())


def full(model: MiniMindForCausalLM, tokens: int) -> float:
    return needed_bytes(model.config, Weights(model.num_parameters()), tokens)


def lora(model: MiniMindForCausalLM, tokens: int) -> float:
    return needed_bytes(model.config, frozen(model), tokens)


def qlora(model: MiniMindForCausalLM, tokens: int) -> float:
    return needed_bytes(model.config, frozen(model, in_4bit=True), tokens)


def dpo(model: MiniMindForCausalLM, tokens: int) -> float:
    """A row is a pair of two sequences."""
    return needed_bytes(model.config, with_reference(model), 2 * tokens, head="trl", mask_length=1024)


def grpo(model: MiniMindForCausalLM, tokens: int, *, num_generations: int = 8) -> float:
    cached_tokens, weights = num_generations * tokens, with_reference(model)
    return needed_bytes(model.config, weights, tokens, head="trl", mask_length=1024, cached_tokens=cached_tokens)


def distillation(model: MiniMindForCausalLM, tokens: int) -> float:
    return needed_bytes(model.config, with_reference(model), tokens, head="teacher")


METHODS: dict[str, Callable[[MiniMindForCausalLM, int], float]] = {
    "all weights": full,
    "LoRA": lora,
    "QLoRA": qlora,
    "DPO": dpo,
    "GRPO": grpo,
    "distillation": distillation,
}
SHOWN = {
    **{"26M": "minimind2-small", "104M": "minimind2", "135M": "SmolLM2-135M"},
    **{"0.6B": "Qwen3-0.6B", "1.7B": "Qwen3-1.7B"},
}


def methods_table(tokens: int) -> list[str]:
    """Return the rows of the table of all methods, in GiB: model by model."""
    return [
        f"| {name} | {' | '.join(f'{method(build(key), tokens) / GIB:.1f}' for method in METHODS.values())} |"
        for name, key in SHOWN.items()
    ]


def parts(name: str, tokens: int) -> dict[str, float]:
    """Return the parts of the memory of one model in bytes, by the rows of the table in docs/memory.md."""
    model = build(name)
    config, count = model.config, model.num_parameters()
    alone = {head: loss_bytes(config, tokens, head, trains_head=False) for head in ("own", "teacher", "trl")}
    return {
        "trained": 18 * count,
        "frozen": 6 * count,
        "adapter": 18 * adapter_size(model),
        "reference": 4 * count,
        "activations": activation_bytes(config, tokens),
        "masked": activation_bytes(config, tokens, mask_length=1024),
        "recomputed": activation_bytes(config, tokens, recomputes=True),
        "logits": alone["own"],
        "gradient": 4 * config.vocab_size * config.hidden_size,
        "tile": alone["trl"],
        "teacher": alone["teacher"],
        "cache": cache_bytes(config, 8 * tokens),
    }


def remedies(name: str, rows: int, max_length: int) -> dict[str, float]:
    """Return the memory in bytes of a run that trains all weights, and with each remedy."""
    model, tokens = build(name), rows * max_length
    config, count = model.config, model.num_parameters()
    return {
        "none": full(model, tokens),
        "rows": full(model, max_length),
        "--activation_checkpointing": needed_bytes(config, Weights(count), tokens, recomputes=True),
        "--max_length": full(model, tokens // 2),
        "--use_peft": lora(model, tokens),
        "--load_in_4bit": qlora(model, tokens),
        # DeepSpeed holds weights and gradients in bfloat16; moments and weights in float32 are in the CPU's memory.
        "zero2_offload": full(model, tokens) - 14 * count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1, help="sequences, or pairs of DPO, per micro-batch")
    parser.add_argument("--max_length", type=int, default=1024, help="tokens per sequence")
    args = parser.parse_args()
    print(f"| GiB | {' | '.join(METHODS)} |\n|---{'|---' * len(METHODS)}|")
    print("\n".join(methods_table(args.rows * args.max_length)))
    for name in ("SmolLM2-135M", "Qwen3-0.6B"):
        print(name, {part: round(size / GIB, 2) for part, size in parts(name, args.rows * args.max_length).items()})
        print(name, {flag: round(size / GIB, 1) for flag, size in remedies(name, 8, args.max_length).items()})
    print({name: [round(method(build(name), 1024) / GIB, 1) for method in (full, lora, qlora)] for name in MODELS})


if __name__ == "__main__":
    main()
