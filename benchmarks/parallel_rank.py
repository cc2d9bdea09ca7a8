"""
Run a recipe as one rank of `benchmarks/parallel.py`, and write what the rank held and sent: `parallel-<rank>.json` in
its `--output_dir`.

NOTE: accelerate, and so this package, refuses tensor parallelism on CPUs. Here both checks are off, and torch computes
it over gloo.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pretrain.training import training_arguments
from hf_pretrain.training.parsing import parse_args


# The operations that send what stands first, and those that send what stands second, behind their result.
FIRST = ("allreduce_", "broadcast_", "reduce_", "send", "allreduce_coalesced_")
SECOND: tuple[str, ...] = ("allgather_", "gather_", "reduce_scatter_", "scatter_", "alltoall_", "_allgather_base_")
SECOND += ("_reduce_scatter_base_", "alltoall_base_", "allgather_into_tensor_coalesced_")


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank hands to collectives and messages, by the names of the operations."""

    def __init__(self):
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        library, name = function.namespace, function._schema.name.partition("::")[2]
        place = {"c10d": {**dict.fromkeys(FIRST, 0), **dict.fromkeys(SECOND, 1)}.get(name)}.get(library)
        if library == "_c10d_functional" and name != "wait_tensor":
            place = 0
        if place is not None:
            sent = sum(each.nbytes for each in tree_leaves(args[place]) if isinstance(each, torch.Tensor))
            self.bytes[name] = self.bytes.get(name, 0) + sent
        return function(*args, **(kwargs or {}))


def held_bytes() -> int:
    """Return the bytes of all tensors that this process holds."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}
    return sum(storages.values())


def main() -> None:
    # The launcher of DeepSpeed puts its own argument before.
    recipe = sys.argv.pop(next(i for i, word in enumerate(sys.argv) if i and not word.startswith("--")))
    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
    module = __import__(recipe)
    ParallelismConfig._validate_accelerator = lambda *_: None
    training_arguments.check_device = lambda args: None
    arguments = parse_args(*module.ARGUMENTS)
    held = [0]
    register_optimizer_step_post_hook(lambda *_: held.append(held_bytes()))
    with Traffic() as traffic:
        module.main(*arguments)
    record = {"held_bytes": max(held), "sent_bytes": traffic.bytes}
    path = Path(arguments[-1].output_dir, f"parallel-{os.environ.get('RANK', 0)}.json")
    path.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
