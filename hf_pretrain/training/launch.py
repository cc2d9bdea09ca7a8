"""
The launch of a run: its device, checks of the launch command, and the process group of CPU ranks.

The constructor of `TrainingArguments` chooses the device and starts the process group of GPU ranks.
`check_launch` and `start_cpu_ranks` run before it, `check_device` runs after it, and `complete_fsdp_args` when Trainer
sets up accelerate. `args` stands for [`~training.training_arguments.LMTrainingArguments`], whose constructor calls
these functions.
"""

import atexit
import os
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.cpp_extension import get_default_build_root
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import logging

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.ranks import leave_process_group, remove_allreduce_buffers


logger = logging.get_logger(__name__)


def launchers_precision(args: Any) -> tuple[bool | None, bool, bool]:
    """
    Return `bf16`, `fp16` and `fp8` as `accelerate launch --mixed_precision` asks, if the user names no precision to
    the recipe. `no` decides nothing, because the launcher passes it by default, too. Raise `UserError` for another
    precision than the recipe's.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    given = args.bf16, args.fp16, args.fp8
    if asked == "no":
        return given
    if args.bf16 is None and not args.fp16:
        given = asked in ("bf16", "fp8"), asked == "fp16", args.fp8 or asked == "fp8"
    if not dict(zip(("bf16", "fp16", "fp8"), given, strict=True)).get(asked):
        raise UserError(
            f"accelerate launch --mixed_precision {asked} is not the precision of the recipe. Leave it out, and pass "
            "--bf16 or --fp16 to the recipe."
        )
    return given


def check_launch(args: Any) -> None:
    """
    Raise `UserError` for mistakes in the launch command, before the ranks wait for each other in a process group.
    """
    names = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
    for name in names:
        # Trainer would ignore the setting, or follow it by halves.
        if os.environ.get(name, "no").lower() not in ("no", "false"):
            raise UserError(
                f"accelerate launch sets {name}, which is not supported. Leave its setting out, and pass "
                "--torch_compile_backend or --fsdp_size to the recipe instead."
            )
    sizes = args.parallelism_config
    if sizes is not None and sizes.cp_size * sizes.sp_size > 1:
        raise UserError(
            "Context and sequence parallelism are not supported: they cut rows apart, and the masked loss shifts "
            "labels within a row. Use data parallelism, ZeRO or --fsdp_size."
        )
    # `args.world_size` is not known yet: transformers sets it when it starts the process group.
    _check_layout(args, int(os.environ.get("WORLD_SIZE", 1)))
    if args.deepspeed and "RANK" not in os.environ:
        # Without the environment variables of a launcher, DeepSpeed would look for MPI.
        raise UserError(
            "--deepspeed needs a launcher, even for one process. Replace `python` before "
            f"{sys.argv[0]} by `deepspeed --include localhost:0` or `torchrun --standalone`."
        )


def _check_layout(args: Any, world_size: int) -> None:
    """Raise `UserError` for parallel sizes that do not fit together, or that Trainer does not support."""
    num_ranks = args.fsdp_size * args.tp_size * args.dp_replicate_size
    if num_ranks not in (1, world_size):
        raise UserError(
            f"--fsdp_size {args.fsdp_size} x --tp_size {args.tp_size} x --dp_replicate_size "
            f"{args.dp_replicate_size} needs {num_ranks} processes, and {world_size} run. Launch with "
            f"torchrun --standalone --nproc_per_node {num_ranks} {' '.join(sys.argv)}"
        )
    if args.fsdp_size * args.tp_size % args.ep_size:
        raise UserError(
            f"--ep_size {args.ep_size} must divide --fsdp_size x --tp_size, whose ranks share the experts."
        )
    if args.distributed_config is not None and args.deepspeed:
        raise UserError(
            "--deepspeed and transformers' own sharding (--fsdp_size, --tp_size, --ep_size) exclude each other. "
            "Leave one of them out."
        )
    if args.save_on_each_node:
        raise UserError(
            "--save_on_each_node is not supported. Put --output_dir on a disk that all machines share, or push the "
            "checkpoints with --push_to_hub --hub_strategy checkpoint and download them before a resume."
        )


def check_device(args: Any) -> None:
    """Raise `UserError` for arguments that do not fit the device that transformers has chosen."""
    if args.fp16 and args.device.type == "cpu":
        raise UserError("--fp16 on a CPU would silently train in float32. Use --bf16, or leave both out.")
    if args.tp_size > 1 and args.device.type == "cpu":
        raise UserError(f"--tp_size {args.tp_size} needs GPUs. On a CPU, shard with --fsdp_size instead.")
    if args.n_gpu > 1:
        raise UserError(
            f"One process sees {args.n_gpu} GPUs and would use nn.DataParallel, which breaks the complex rotary "
            f"table. Launch one process per GPU: torchrun --standalone --nproc_per_node {args.n_gpu} "
            f"{' '.join(sys.argv)}"
        )
    if args.device.type == "cpu" and (args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"):
        raise UserError(
            "accelerate turns FSDP on CPU processes into DDP without a message. On a CPU, launch with torchrun "
            "and pass --fsdp_size N, which shards through transformers."
        )


def check_accumulation(args: TrainingArguments, model: PreTrainedModel) -> None:
    """
    Raise `UserError` if tensor parallelism would add up the gradients of accumulated micro-batches several times.

    NOTE: transformers' `replicated_with_grad_allreduce` adds up the gradient of a norm over the ranks after each
    micro-batch, and with it the sums of the earlier ones.
    """
    is_split = (model.tp_size or 1) > 1 and model.config.qk_norm
    if is_split and args.gradient_accumulation_steps > 1:
        raise UserError(
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps} with --tp_size {model.tp_size} would "
            "train the norms of queries and keys with wrong gradients. Use --gradient_accumulation_steps 1 and a "
            "larger --per_device_train_batch_size, or shard with --fsdp_size."
        )


def has_right_gradient(num_tokens: int, device_type: str) -> bool:
    """Return whether the gradient of a matrix on a device sums over all of its tokens."""
    # Column n holds n times 1, n times -1, and so on. Its sums are small, and thus exact in every precision, and terms
    # that are left out change the sum of a column. shape: (num_tokens, 64)
    signs = 1 - 2 * (torch.arange(num_tokens)[:, None] // torch.arange(1, 65) % 2).float()
    matrix = torch.zeros(64, 64, device=device_type, requires_grad=True)
    F.linear(signs.to(device_type), matrix).sum().backward()
    return torch.equal(matrix.grad.cpu(), signs.sum(0).expand(64, 64))


@cache
def check_micro_batch(num_tokens: int, device_type: str) -> None:
    """
    Raise `UserError` if an Apple GPU computes a wrong gradient from a micro-batch of this size.

    NOTE: torch's matrix products on Apple GPUs may leave terms out if there are many, without an error; how many
    depends on torch and the GPU (https://github.com/pytorch/pytorch/issues/193487, 195163). The gradient of a matrix
    sums over the tokens of a micro-batch.
    """
    if device_type == "mps" and not has_right_gradient(num_tokens, "mps"):
        raise UserError(
            f"A micro-batch of {num_tokens:,} tokens is too large: with torch {torch.__version__}, this GPU computes "
            "a wrong gradient from it. Lower --per_device_train_batch_size and raise --gradient_accumulation_steps, "
            "or install a newer torch."
        )


def complete_fsdp_args(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """
    Return `fsdp_plugin_args` with a policy that casts nothing, or `None` for a run without accelerate's FSDP.

    NOTE: with bf16, accelerate's FSDP2 casts the inputs of every layer: the loss's divisors, its weights and the
    rotary table. With this policy parameters, inputs and the reduction of gradients stay float32; autocast computes in
    bf16, as under every other launcher.

    Raises:
        `UserError`: for FSDP version 1.
    """
    if config is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    completed = (config or {}) | {"mixed_precision_policy": MixedPrecisionPolicy()}
    version = str(completed.get("fsdp_version", os.environ.get("FSDP_VERSION", "1")))
    if version != "2":
        raise UserError(
            f"FSDP version {version} is not supported. Write `fsdp_version: 2` into the accelerate config, as "
            "recipes/accelerate_configs/fsdp2.yaml does."
        )
    return completed


def start_cpu_ranks(args: Any) -> None:
    """
    Start the process group of CPU ranks. Do nothing for one process, on GPUs, and if the group exists.

    NOTE: transformers ignores `--ddp_timeout` on CPUs. Also, torchrun's agents keep one store across restarts, and the
    ranks of the next attempt would find the addresses of dead ranks in it. A prefix per attempt separates the
    attempts. A store that rank 0 opens is new in each attempt, and needs no prefix: the agent of a machine that came
    back counts its attempts from 0, so that the prefixes of two machines would differ.
    """
    if not args.use_cpu or int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    timeout = timedelta(seconds=args.ddp_timeout)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    # Unlike NCCL, gloo lets a rank leave alone, as after an exception.
    atexit.register(leave_process_group)


def announce_first_message(args: Any) -> None:
    """Say what to do if the ranks hang when they first exchange data, as on some machines with consumer cards."""
    if args.world_size > 1 and args.device.type == "cuda":
        announce(f"connecting {args.world_size} GPUs (if nothing follows, stop, and export NCCL_P2P_DISABLE=1)")


def name_compile_locks() -> None:
    """Name the lock files of torch's extensions: a killed compile leaves one, and torch waits for its end."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for path in Path(root).rglob("lock"):
        logger.warning(f"Waiting for {path}. If no process compiles (c++, ninja), delete it: a kill left it.")


def start_deepspeed_cpu_ranks() -> None:
    """
    Start DeepSpeed's own process group on a CPU.

    NOTE: ZeRO-3's zero.Init counts ranks through that group, which Trainer sets up only on GPUs.
    """
    import deepspeed

    # DeepSpeed compiles an operator here.
    name_compile_locks()
    deepspeed.init_distributed(dist_backend="gloo")
    # A rank whose arguments are refused removes its shared memory, and a slower rank that opens it then would crash.
    dist.barrier()
    atexit.register(remove_allreduce_buffers)
