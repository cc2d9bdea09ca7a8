"""
Train a tokenizer, a model and a chat model within a budget of time, on whatever the machine has.

    hf-pretrain from_scratch --minutes 20
    hf-pretrain from_scratch --hours 2 --output_dir out/mine
    hf-pretrain from_scratch --hours 8 --pretrain_args "--dataset_name my/*.jsonl" --sft_args "--seed 1"

The recipe measures a step, chooses a preset and the minutes of pretraining and of fine-tuning, and runs the stages as
their own commands, which it prints. If it is stopped or killed, the same command goes on. At the end, it writes one
page of all stages, `report.html`, into the output directory.
"""

import argparse
import shlex
from pathlib import Path

from hf_pretrain.model.presets import PRESETS
from hf_pretrain.reports.page import write_page
from hf_pretrain.run_directory.directory import REPORT_NAME
from hf_pretrain.run_directory.history import read_runs
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.errors import find_program
from hf_pretrain.runtime.parser import RecipeParser
from hf_pretrain.runtime.writing import check_output
from hf_pretrain.stages.from_scratch import CANDIDATES, Budget, check_flags


def main(args: argparse.Namespace) -> None:
    check_output(args.output_dir, "--output_dir")
    # Fine-tuning starts much later, so check its flags now, too.
    check_flags("pretrain", args.pretrain_args)
    check_flags("sft", args.sft_args)
    budget = Budget(Path(args.output_dir), 60 * args.minutes if args.hours is None else 3600 * args.hours)
    if budget.plan["pace"] is None:
        budget.choose_preset((args.preset,) if args.preset else CANDIDATES, args.pretrain_args)
    base = budget.train("pretrain", *args.pretrain_args)
    chat = budget.train("sft", "--model_name_or_path", str(base), *args.sft_args)

    runs, _ = read_runs([base, chat])
    path, notes = Path(args.output_dir, REPORT_NAME), budget.describe(runs)
    write_page(runs, path, title=f"From scratch: {args.output_dir}", notes=notes)
    print("\n".join(["", *notes, f"Wrote {path}. Open it in a browser. This command chats with your model:"]))
    print(shlex.join([find_program("hf-pretrain"), "chat", "--model_name_or_path", str(chat)]))


def make_parser() -> RecipeParser:
    parser = RecipeParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="time of all stages together")
    parser.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--output_dir", default="out/from-scratch", help="directory of stages, plan and page")
    parser.add_argument("--preset", choices=PRESETS, help="by default the one that fits the time")
    parser.add_argument("--pretrain_args", type=shlex.split, default="", help="more flags for pretraining, in quotes")
    parser.add_argument("--sft_args", type=shlex.split, default="", help="more flags for fine-tuning, in quotes")
    return parser


if __name__ == "__main__":
    with one_line_errors():
        main(make_parser().parse_args())
