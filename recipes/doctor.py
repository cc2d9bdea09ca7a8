"""
Check this machine.

    hf-pretrain doctor

The recipe checks versions, devices, memory and disk, compares training steps and generation on each kind of device
with plain attention on the CPU, and runs two processes on each kind of device. If it finds a defect, it prints what to
do, and its exit status is 1. To measure the memory of a run, pass `--dry_run` to the recipe that trains.
"""

from hf_pretrain.doctor.machine_checks import print_findings
from hf_pretrain.doctor.step_check import check_steps
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.parser import parse_flags


ARGUMENTS = ()


def main() -> None:
    raise SystemExit(0 if print_findings(check_steps()) else 1)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
