"""
Check this machine, or estimate the memory of a run.

    hf-pretrain doctor
    hf-pretrain doctor --json
    hf-pretrain doctor --model_preset minimind2 --max_length 2048 --strategy zero2 --world_size 8 --memory_gib 80

Without flags, the recipe checks versions, devices, memory, disk, compiler, port and Hub login, and runs two processes
on each kind of device that is present. If it finds a defect, it prints what to do, and its exit status is 1.

With the flags of a run, the recipe prints the memory that a process needs, and the largest batch that fits into the
memory of this machine or into `--memory_gib`. It runs no forward pass, so one machine can estimate for another.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.health import print_findings
from hf_pretrain.training.efficiency import STRATEGIES, available_memory_bytes, estimate_memory, num_active_parameters
from hf_pretrain.training.optimizers import OPTIM_PRESETS
from hf_pretrain.training.parsing import parse_args, read_config
from hf_pretrain.weights.model_arguments import default_preset


# isort: split
# The package must come first: it answers `--help` before torch is imported.
import torch


@dataclass
class DoctorArguments:
    """The run whose memory the doctor estimates. Without these flags, the doctor checks this machine."""

    json: bool = field(default=False, metadata={"help": "Print the findings about the machine as JSON."})
    estimate: bool = field(default=False, metadata={"help": "Estimate the memory of the default preset."})
    model_preset: str | None = field(
        default=None,
        metadata={
            "help": f"One of auto, {', '.join(PRESETS)}.",
            "aliases": ["--preset"],
            "choices": ("auto", *PRESETS),
        },
    )
    max_length: int = field(default=512, metadata={"help": "Tokens per packed sequence."})
    strategy: str = field(
        default="ddp", metadata={"help": f"One of {', '.join(STRATEGIES)}.", "choices": tuple(STRATEGIES)}
    )
    world_size: int = field(default=1, metadata={"help": "Number of processes."})
    optim_preset: str | None = field(
        default=None,
        metadata={
            "help": "adamw or muon. By default muon, as in pretraining; adamw for minimind-large.",
            "choices": OPTIM_PRESETS,
        },
    )
    bf16: bool = field(default=True, metadata={"help": "Compute in bfloat16 (autocast)."})
    memory_gib: float | None = field(
        default=None, metadata={"help": "Memory of a device in GiB; by default this machine's."}
    )
    device: str | None = field(
        default=None,
        metadata={
            "help": "cuda or cpu; by default this machine's, or cuda with --memory_gib.",
            "choices": ("cuda", "cpu"),
        },
    )


def main(args: DoctorArguments):
    if args == DoctorArguments(json=args.json):
        raise SystemExit(0 if print_findings(as_json=args.json) else 1)
    if args.json:
        raise UserError("--json is for the findings about the machine. Leave it out to estimate the memory of a run.")
    preset = default_preset() if args.model_preset in (None, "auto") else args.model_preset
    recipe = read_config(Path(__file__).parent / preset / "pretrain.yaml")
    optim_preset = args.optim_preset or recipe.get("optim_preset", "muon")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() or args.memory_gib else "cpu"))
    config = MiniMindConfig(**PRESETS[preset])
    # The meta device gives sizes without memory, for a preset of any size.
    with torch.device("meta"):
        model = MiniMindForCausalLM(config)
    estimate = estimate_memory(
        model,
        max_length=args.max_length,
        strategy=args.strategy,
        world_size=args.world_size,
        optimizer=optim_preset,
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
        device_type=device.type,
    )
    memory = 2**30 * args.memory_gib if args.memory_gib else available_memory_bytes(device)
    if device.type == "cpu" and not args.memory_gib:
        # All processes on a CPU share the memory of the machine.
        memory /= args.world_size

    processes = f"{args.world_size} process(es) on {device.type}"
    print(
        f"{preset}, {optim_preset}, {args.strategy}, {processes}, sequences of {args.max_length} tokens, per process:"
    )
    print(f"  {'parameters active per token':30} {num_active_parameters(model) / 1e6:10.2f} M")
    for name in ("parameters", "optimizer", "gradients", "workspace"):
        print(f"  {name:30} {getattr(estimate, name) / 2**20:10,.0f} MiB")
    print(f"  {'activations per sequence':30} {estimate.activations_per_row / 2**20:10,.0f} MiB")
    batch_size = estimate.largest_batch(memory)
    print(
        f"  the largest batch in {memory / 2**30:.1f} GiB: {batch_size} sequences "
        f"({batch_size * args.max_length:,} tokens)"
    )


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(DoctorArguments))
