"""
One rank of the test run of `hf-pretrain doctor`. It prints one line of JSON per check.

    torchrun --standalone --nproc_per_node 2 -m hf_pretrain.runtime.probe cpu
"""

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from .cpu_ranks import leave_process_group, remove_allreduce_buffers
from .errors import UserError


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def check_collective(device: torch.device) -> str:
    """Sum the rank numbers, counted from 1, with an all-reduce, and compare the result with the formula."""
    value = torch.tensor(float(dist.get_rank() + 1), device=device)
    dist.all_reduce(value)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if value.item() != expected:
        raise UserError(f"the sum over the ranks is {value.item()} instead of {expected}")
    return f"a sum over {dist.get_world_size()} ranks"


def check_complex(device: torch.device) -> str:
    """Wrap a module with a complex buffer in DDP, which sends the buffer to all ranks, and compare the buffers."""
    module = nn.Linear(2, 2).to(device)
    table = torch.polar(torch.ones(4, device=device), torch.arange(4.0, device=device))
    module.register_buffer("pos_cis", table * (1 if dist.get_rank() == 0 else 0))
    nn.parallel.DistributedDataParallel(module)(torch.ones(1, 2, device=device)).sum().backward()
    # The forward pass sends the buffers of rank 0 to all ranks.
    if not torch.equal(torch.view_as_real(module.pos_cis), torch.view_as_real(table)):
        raise UserError("the complex buffer arrived with other values")
    return "a complex buffer in DDP"


def check_bfloat16(device: torch.device) -> str:
    """Multiply under bfloat16 autocast, and compare with float32."""
    torch.manual_seed(0)
    left, right = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        product = left @ right
    # Each entry is the sum of 64 products, and bfloat16 has 8 bits of mantissa.
    if product.dtype != torch.bfloat16 or (product.float() - left @ right).abs().max() > 1.0:
        raise UserError("the product under bfloat16 autocast is wrong")
    return "a product in bfloat16"


def check_zero(device: torch.device) -> str:
    """Take a step of AdamW under ZeRO-2, and compare it with the formula: the first update is the learning rate."""
    import deepspeed

    deepspeed.init_distributed(dist_backend=BACKENDS[device.type], verbose=False)
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    before = model.weight.detach().clone().to(device)
    rate = 0.01
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 8, device=device)).sum())
    engine.step()
    if not torch.allclose(before - engine.module.weight, torch.full_like(before, rate), atol=1e-5):
        raise UserError("the first update of AdamW under ZeRO-2 is not the learning rate")
    return "a step of AdamW under ZeRO-2"


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "collective": check_collective,
    "complex buffer": check_complex,
    "bfloat16": check_bfloat16,
    "ZeRO step": check_zero,
}


def checks_on(kind: str) -> dict[str, Callable[[torch.device], str]]:
    """
    Return the checks of a kind of device, in order. DeepSpeed is checked only where it is installed, and on a machine
    with GPUs only there.
    """
    is_installed = importlib.util.find_spec("deepspeed") is not None
    has_deepspeed = is_installed and kind == ("cuda" if torch.cuda.is_available() else "cpu")
    return {name: check for name, check in CHECKS.items() if check is not check_zero or has_deepspeed}


def main() -> None:
    (kind,) = sys.argv[1:]
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[kind])
    for name, check in checks_on(kind).items():
        try:
            result = {"check": name, "is_ok": True, "message": check(device)}
        except Exception as error:
            traceback.print_exc()
            result = {"check": name, "is_ok": False, "message": f"{type(error).__name__}: {error}"}
        if dist.get_rank() == 0:
            # torchrun starts Python unbuffered, so `print` would write the end of the line by itself,
            # and the lines of two ranks could mix.
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
    leave_process_group()
    remove_allreduce_buffers()


if __name__ == "__main__":
    main()
