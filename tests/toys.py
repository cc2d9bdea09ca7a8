"""Toy models and data that several tests start from."""

import json
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.packed_attention import LEAKY_DEVICES


needs_posix = pytest.mark.skipif(os.name == "nt", reason="Windows lacks fork, limits of files, or /dev/full")
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


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """Refuse to write larger files within the block, as a quota does."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_start_of_workers(loader: Any) -> None:
    """Check that workers which do not fork, as on Windows and macOS, can get what a loader gives them."""
    for part in (loader.base_dataloader.dataset, loader.collate_fn, loader.worker_init_fn):
        pickle.loads(pickle.dumps(part))


@cache
def operators_without_mps() -> frozenset[str]:
    """Return the names of torch's operators that have no kernel for Apple GPUs, from the table in torch's wheel."""
    table = Path(torchgen.__file__).with_name("packaged") / "ATen/native/native_functions.yaml"
    entries = yaml.load(table.read_text(encoding="utf-8"), yaml.CSafeLoader)
    by_name = {entry["func"].partition("(")[0]: entry for entry in entries}

    def has_kernel(name: str) -> bool:
        entry = by_name[name]
        if "structured_delegate" in entry:
            return has_kernel(entry["structured_delegate"])
        # Operators without a table consist of other operators, on every device.
        keys = ", ".join(entry.get("dispatch", ["Composite"]))
        return "MPS" in keys.split(", ") or "Composite" in keys

    # Apple GPUs have an attention kernel of their own.
    return frozenset(name for name in by_name if not has_kernel(name) and "attention_for_cpu" not in name)


class LikeMPS(TorchDispatchMode):
    """
    Run on the CPU as on an Apple GPU: take its branches, and raise an error for what torch lacks there (float64,
    complex128, about 360 operators) or computes wrongly (causal attention without a mask).
    """

    def __enter__(self):
        LEAKY_DEVICES.add("cpu")
        return super().__enter__()

    def __exit__(self, *args):
        LEAKY_DEVICES.remove("cpu")
        super().__exit__(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if name in operators_without_mps():
            raise NotImplementedError(f"{name} has no kernel for MPS")
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            assert not any(args[3:5]) or args[0].shape[2] == 1, f"{name} with dropout or is_causal"
        outputs = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, outputs)):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{func} on {value.dtype}")
        return outputs
