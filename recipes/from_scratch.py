"""
Train a tokenizer, a model and a chat model within a budget of time, on whatever the machine has.

    hf-pretrain from_scratch --minutes 20
    hf-pretrain from_scratch --hours 2 --output_dir out/mine
    hf-pretrain from_scratch --hours 8 --pretrain_args "--dataset_name my/*.jsonl" --sft_args "--seed 1"

The recipe measures a step, chooses a preset and the minutes of pretraining and of fine-tuning, and runs the stages as
their own commands, which it prints. If it is stopped or killed, the same command goes on. At the end, it writes one
page of all stages, `report.html`, into the output directory.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from hf_pretrain.model.presets import PRESETS
from hf_pretrain.reports.page import write_page
from hf_pretrain.run_directory.directory import REPORT_NAME
from hf_pretrain.run_directory.history import read_runs
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.errors import find_program
from hf_pretrain.runtime.flags import flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.runtime.writing import check_output
from hf_pretrain.stages.from_scratch import CANDIDATES, Budget, split_flags


@dataclass
class BudgetArguments:
    """Time, place and stages."""

    minutes: float = flag(20, "Time of all stages together.", bounds="above 0")
    hours: float | None = flag(None, "The same in hours.", bounds="above 0")
    output_dir: str = flag("out/from-scratch", "Directory of stages, plan and page.")
    preset: str | None = flag(None, "By default the one that fits the time.", choices=tuple(PRESETS))
    pretrain_args: str = flag("", "More flags for pretraining, in quotes.")
    sft_args: str = flag("", "More flags for fine-tuning, in quotes.")


ARGUMENTS = (BudgetArguments,)


def main(args: BudgetArguments) -> None:
    check_output(args.output_dir, "--output_dir")
    # Fine-tuning starts much later, so check its flags now, too.
    pretrain_args, sft_args = split_flags("pretrain", args.pretrain_args), split_flags("sft", args.sft_args)
    budget = Budget(Path(args.output_dir), 60 * args.minutes if args.hours is None else 3600 * args.hours)
    if budget.plan["pace"] is None:
        budget.choose_preset((args.preset,) if args.preset else CANDIDATES, pretrain_args)
    base = budget.train("pretrain", *pretrain_args)
    chat = budget.train("sft", "--model_name_or_path", str(base), *sft_args)

    runs, _ = read_runs([base, chat])
    path, notes = Path(args.output_dir, REPORT_NAME), budget.describe(runs)
    write_page(runs, path, title=f"From scratch: {args.output_dir}", notes=notes)
    print("\n".join(["", *notes, f"Wrote {path}. Open it in a browser. This command chats with your model:"]))
    print(shlex.join([find_program("hf-pretrain"), "chat", "--model_name_or_path", str(chat)]))


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
