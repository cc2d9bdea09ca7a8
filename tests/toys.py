"""Toy models and data that several tests start from."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM


EXPERTS = {"num_experts": 4, "num_shared_experts": 1, "router_aux_loss_coef": 0.5}


def toy_model(**fields: Any) -> MiniMindForCausalLM:
    """Return a model with two layers of width 32 and four heads, with equal weights in each call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    return MiniMindForCausalLM(MiniMindConfig(**sizes | fields))


def write_jsonl(path: Path, records: Iterable[dict | str]) -> str:
    """Write one line per record, a string as `{"text": string}`, and return `path` as a string."""
    rows = ({"text": record} if isinstance(record, str) else record for record in records)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class WithoutFloat64(TorchDispatchMode):
    """Raise an error for float64 and complex128, as a device without them would, such as MPS."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, outputs)):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{func} on {value.dtype}")
        return outputs
