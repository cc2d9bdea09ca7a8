"""
Check this machine.

    hf-pretrain doctor
    hf-pretrain doctor --remove_copies

The recipe checks versions, devices, memory and disk, compares training steps and generation on each kind of device
with plain attention on the CPU, and runs two processes on each kind of device. If it finds a defect, it prints what to
do, and its exit status is 1. It also shows the size of the native copies that this package keeps of other programs'
models, such as `embedded:smollm2`; `--remove_copies` removes them. To measure the memory of a run, pass `--dry_run` to
the recipe that trains.
"""

from dataclasses import dataclass

from hf_pretrain.doctor.machine_checks import print_findings
from hf_pretrain.doctor.step_check import check_steps
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.flags import flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.weights.localizing import COPIES, copies_bytes, remove_copies


@dataclass
class DoctorArguments:
    """What to do."""

    remove_copies: bool = flag(False, "Only remove the native copies.")


ARGUMENTS = (DoctorArguments,)


def main(args: DoctorArguments) -> None:
    if args.remove_copies:
        size = copies_bytes()
        remove_copies()
        print(f"Removed {size / 1e9:.1f} GB below {COPIES}.")
        return
    raise SystemExit(0 if print_findings(check_steps()) else 1)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
