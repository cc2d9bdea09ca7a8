"""
What takes the memory of a training run on a GPU, as arithmetic. docs/memory.md and docs/weights.md show the tables.

    python -m benchmarks.memory
    python -m benchmarks.memory --rows 8 --max_length 512

No figure is measured; `--dry_run` measures a run. Bytes of trained weights and of activations are those of
`--fit_micro_batch` (`hf_pretrain/training/micro_batch.py`), for bfloat16, AdamW and compiled layers.
"""

import argparse
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hf_pretrain import PRESETS, MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.loss import MAX_LOGITS, MIN_CHUNK
from hf_pretrain.training.micro_batch import _BYTES_PER_PARAMETER, activation_bytes_per_token


GIB = 2**30
# bitsandbytes, NF4 with double quantization: 4 bits, a scale of 8 bits for 64 weights, and one in float32 for 256
# scales.
BYTES_PER_4BIT_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)


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


def trained_bytes(count: float) -> float:
    """Weights, gradients and AdamW's two moments in float32, and the copy of the weights in bfloat16."""
    return _BYTES_PER_PARAMETER * count


def frozen_bytes(count: float) -> float:
    """Weights in float32, and their copies in bfloat16, which the backward pass of an adapter needs."""
    return 6 * count


def reference_bytes(count: float) -> float:
    """Weights in float32. Without a backward pass, the copy of a layer in bfloat16 is freed after the layer."""
    return 4 * count


def activation_bytes(config: MiniMindConfig, tokens: int, *, is_checkpointed: bool = False) -> float:
    """
    What stays between forward and backward. With `--activation_checkpointing`, that is the input of each layer in
    float32, and the activations of the one layer whose backward pass runs.
    """
    kept, ends = activation_bytes_per_token(config), 24 * config.hidden_size
    if not is_checkpointed:
        return tokens * kept
    one_layer = (kept - ends) / config.num_hidden_layers
    return tokens * (ends + one_layer + 4 * config.hidden_size * config.num_hidden_layers)


def logits_bytes(config: MiniMindConfig, tokens: int) -> float:
    """A chunk of logits and its gradient in bfloat16 (`MAX_LOGITS` in `hf_pretrain/model/loss.py`)."""
    return 4 * config.vocab_size * min(tokens, max(MIN_CHUNK, MAX_LOGITS[0] // config.vocab_size))


def head_bytes(config: MiniMindConfig, *, copies: int = 2) -> float:
    """
    The gradient of a trained output head in float32, beside the one that accumulates: computed with the loss, and then
    multiplied by the gradient of the loss. TRL's head has one copy.
    """
    return 4 * copies * config.vocab_size * config.hidden_size


def trl_logits_bytes(config: MiniMindConfig, tokens: int) -> float:
    """TRL's tile of logits in bfloat16, of DPO and GRPO: at most 4,096 tokens and 32,768 logits each."""
    return 2 * min(tokens, 4096) * min(config.vocab_size, 32768)


def cache_bytes(config: MiniMindConfig, tokens: int) -> float:
    """Keys and values of all layers in bfloat16, while GRPO generates."""
    return 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens


def full(model: MiniMindForCausalLM, tokens: int) -> float:
    config = model.config
    head = logits_bytes(config, tokens) + head_bytes(config)
    return trained_bytes(model.num_parameters()) + activation_bytes(config, tokens) + head


def lora(model: MiniMindForCausalLM, tokens: int) -> float:
    config, weights = model.config, frozen_bytes(model.num_parameters()) + trained_bytes(adapter_size(model))
    return weights + activation_bytes(config, tokens) + logits_bytes(config, tokens)


def qlora(model: MiniMindForCausalLM, tokens: int) -> float:
    """As LoRA, with 4 bits instead of 6 bytes for each weight of a linear layer."""
    count = sum(parameter.numel() for parameter in linear_parameters(model))
    return lora(model, tokens) - frozen_bytes(count) + BYTES_PER_4BIT_WEIGHT * count


def dpo(model: MiniMindForCausalLM, tokens: int) -> float:
    """All weights and a reference model. A row is a pair of two sequences."""
    config, count, both = model.config, model.num_parameters(), 2 * tokens
    weights = trained_bytes(count) + reference_bytes(count)
    head = trl_logits_bytes(config, both) + head_bytes(config, copies=1)
    return weights + activation_bytes(config, both) + head


def grpo(model: MiniMindForCausalLM, tokens: int, *, num_generations: int = 8) -> float:
    """All weights and a reference model, and the larger of the micro-batch and the cache of the rollouts."""
    config, count = model.config, model.num_parameters()
    head = trl_logits_bytes(config, tokens) + head_bytes(config, copies=1)
    training = activation_bytes(config, tokens) + head
    weights = trained_bytes(count) + reference_bytes(count)
    return weights + max(training, cache_bytes(config, num_generations * tokens))


def distillation(model: MiniMindForCausalLM, tokens: int) -> float:
    """
    All weights and a teacher of the same size. The chunk holds gradients, logits and log-probabilities of both models
    in float32 as well, and the products of the divergence.
    """
    return full(model, tokens) + reference_bytes(model.num_parameters()) + 7 * logits_bytes(model.config, tokens)


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
    """Return the parts of the memory of one model in bytes, each by the function that computes it."""
    model = build(name)
    config, count = model.config, model.num_parameters()
    return {
        "trained_bytes": trained_bytes(count),
        "frozen_bytes": frozen_bytes(count),
        "reference_bytes": reference_bytes(count),
        "adapter": trained_bytes(adapter_size(model)),
        "activation_bytes": activation_bytes(config, tokens),
        "checkpointed": activation_bytes(config, tokens, is_checkpointed=True),
        "logits_bytes": logits_bytes(config, tokens),
        "head_bytes": head_bytes(config),
        "trl_logits_bytes": trl_logits_bytes(config, tokens),
        "cache_bytes": cache_bytes(config, 8 * tokens),
    }


def remedies(name: str, rows: int, max_length: int) -> dict[str, float]:
    """Return the memory in bytes of a run that trains all weights, and with each remedy."""
    model, tokens = build(name), rows * max_length
    config, count = model.config, model.num_parameters()
    kept = activation_bytes(config, tokens) - activation_bytes(config, tokens, is_checkpointed=True)
    return {
        "none": full(model, tokens),
        "rows": full(model, max_length),
        "--activation_checkpointing": full(model, tokens) - kept,
        "--max_length": full(model, tokens // 2),
        "--use_peft": lora(model, tokens),
        "--load_in_4bit": qlora(model, tokens),
        # DeepSpeed holds weights and gradients in bfloat16; moments and weights in float32 are in the CPU's memory.
        "zero2_offload": full(model, tokens) - trained_bytes(count) + 4 * count,
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
