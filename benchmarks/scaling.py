"""
What changes with the number of GPUs: batch, memory, communication, checkpoints and failures, as arithmetic.

    python -m benchmarks.scaling --preset minimind-large --gpus 8 64 1024 --gigabits 400 --flops 989e12

No figure is measured. Each function names its source. FLOPs are counted as the log's `mfu` counts them: without
attention scores.
"""

import argparse
from math import sqrt

import torch

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.training.measurements import flops_per_token


def critical_batch_tokens(loss: float) -> float:
    """Return the critical batch at a loss in nats: 2e8 / loss^(1/0.21) (Kaplan et al., 2020, equation 1.4)."""
    return 2e8 / loss ** (1 / 0.21)


def data_factor(batch_tokens: float, critical_tokens: float) -> float:
    """Return how many times the data a batch needs for the same loss: 1 + B / B_crit (McCandlish et al., 2018)."""
    return 1 + batch_tokens / critical_tokens


def state_bytes(num_parameters: float, num_gpus: int) -> dict[str, float]:
    """
    Return the bytes of weights, gradients and AdamW's moments per GPU, in float32: 4, 4 and 8 per parameter. ZeRO-1
    shards the moments, ZeRO-2 also the gradients, ZeRO-3 and FSDP2 also the weights (Rajbhandari et al., 2020).
    """
    sharded = {"DDP": 0, "ZeRO-1": 8, "ZeRO-2": 12, "ZeRO-3, FSDP2": 16}
    return {name: num_parameters * (16 - part + part / num_gpus) for name, part in sharded.items()}


def all_reduce_bytes(num_parameters: float, num_gpus: int) -> float:
    """Return the bytes that a GPU sends per step: 2 (n - 1) / n float32 gradients (ring; Patarasuk and Yuan, 2009)."""
    return 2 * (num_gpus - 1) / num_gpus * 4 * num_parameters


def checkpoint_interval(save_seconds: float, mean_seconds: float) -> float:
    """
    Return the seconds of work between two checkpoints that lose the least time, if a failure comes every
    `mean_seconds`: Young's sqrt(2 d M) with Daly's terms of higher order (Young, 1974; Daly, 2006).
    """
    if save_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = save_seconds / (2 * mean_seconds)
    return sqrt(2 * save_seconds * mean_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds


def scale(num_gpus: int, num_parameters: float, flops: float, args: argparse.Namespace) -> dict[str, str]:
    """Return the figures of a run on `num_gpus` as text. `flops` are the FLOPs per token."""
    gpu_tokens = args.rows * args.accumulation * args.max_length
    batch = gpu_tokens * num_gpus
    computing = gpu_tokens * flops / (args.flops * args.mfu)
    # The global batch of 8 GPUs, split over all of them.
    shared = computing * 8 / num_gpus
    sending = all_reduce_bytes(num_parameters, num_gpus) / (args.gigabits * 1e9 / 8)
    checkpoint = 12 * num_parameters  # weights and two moments in float32
    saving = checkpoint / (args.disk_gigabytes * 1e9)
    between_failures = args.mtbf_hours * 3600 / num_gpus
    interval = checkpoint_interval(saving, between_failures)
    lost = saving / interval + (interval / 2 + args.restart_seconds) / between_failures  # half an interval is repeated
    memory = state_bytes(num_parameters, num_gpus)
    data = data_factor(batch, critical_batch_tokens(args.loss))
    return {
        "tokens per step": f"{batch:,.0f}",
        "steps per pass over the data": f"{args.tokens / batch:,.1f}",
        "batch / critical batch": f"{batch / critical_batch_tokens(args.loss):,.1f}",
        "data for the same loss, relative to very small batches": f"{data:,.1f} x",
        **{f"states per GPU, {name}": f"{size / 1e9:,.3f} GB" for name, size in memory.items()},
        "sent per GPU and step": f"{all_reduce_bytes(num_parameters, num_gpus) / 1e9:,.2f} GB",
        "computing per step": f"{computing:,.3f} s",
        "communication per step, at least": f"{sending:,.3f} s",
        "step, at least": f"{max(computing, sending):,.3f} s",
        "sequences per GPU, with the global batch of 8 GPUs": f"{args.rows * args.accumulation * 8 / num_gpus:,g}",
        "step with the global batch of 8 GPUs, at least": f"{max(shared, sending):,.3f} s",
        "checkpoint": f"{checkpoint / 1e9:,.2f} GB, {saving:,.1f} s",
        "failures per day": f"{86400 / between_failures:,.3f}",
        "best checkpoint interval": f"{interval / 60:,.1f} min, {interval / max(computing, sending):,.0f} steps",
        "time lost to saves and failures": f"{lost:.2%}",
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="minimind2")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--rows", type=int, default=32, help="rows per GPU and micro-batch")
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--tokens", type=float, default=1e9, help="tokens of the training data")
    parser.add_argument("--loss", type=float, default=3.0, help="loss in nats, for the critical batch")
    parser.add_argument("--flops", type=float, default=312e12, help="peak FLOP/s of a GPU; A100 in bf16: 312e12")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that training reaches")
    parser.add_argument("--gigabits", type=float, default=100, help="network per GPU in Gbit/s, between the machines")
    parser.add_argument("--disk_gigabytes", type=float, default=1, help="GB/s at which a checkpoint is written")
    # 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, 2024, section 3.3.4).
    parser.add_argument("--mtbf_hours", type=float, default=16384 * 54 * 24 / 419, help="hours per failure of one GPU")
    parser.add_argument("--restart_seconds", type=float, default=300)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    with torch.device("meta"):
        model = MiniMindForCausalLM(MiniMindConfig(**PRESETS[args.preset]))
    # `parameters` returns a tied head once.
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    columns = [scale(number, num_parameters, flops_per_token(model), args) for number in args.gpus]
    print(f"{args.preset}, {num_parameters / 1e6:,.1f}M parameters\n")
    print(f"| GPUs | {' | '.join(f'{number:,}' for number in args.gpus)} |\n|---|{'---|' * len(args.gpus)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")


if __name__ == "__main__":
    main(parse_arguments())
