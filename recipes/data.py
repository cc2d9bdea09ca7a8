"""
Inspect data before training, or clean them.

    hf-pretrain data inspect my/*.jsonl
    hf-pretrain data inspect jingyaogong/minimind_dataset:sft_mini_512.jsonl --tokenizer out/pretrain-tiny
    hf-pretrain data inspect my/chats.jsonl --tokenizer embedded:smollm2 --page audit.html
    hf-pretrain data inspect roneneldan/TinyStories
    hf-pretrain data clean my/*.jsonl --output clean.jsonl
    hf-pretrain data clean my/*.jsonl --output clean.jsonl --held_out validation.jsonl --min_chars 100
    hf-pretrain data clean my/*.jsonl --output clean.jsonl --held_out_tasks minimind

Names are those of `--dataset_name`: embedded[:part], files, globs, directories, files on the Hub, and whole datasets
owner/name[:config][@revision] on the Hub. The command reads the split `train` of a Hub dataset, as training does.

`inspect` prints the number of records and bad lines, the lengths in tokens, the share of duplicates,
some records as the model sees them, and the size of the model that the data suffice for. With `--tokenizer`, it also
audits conversations: what is trained and cut, and where training and inference differ.

`clean` drops bad lines, short and repetitive records, exact and near duplicates, and records that share 60 characters
in a row with `--held_out` data or with the examples of `--held_out_tasks`. It writes the other records as JSONL.
`<output>.dropped` lists each dropped record with its line or row and the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hf_pretrain.data.cleaning import NEAR_DUPLICATES, clean_data
from hf_pretrain.data.inspection import inspect_data
from hf_pretrain.evaluation.evaluation import expand_tasks
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.command_line import one_line_errors, print_result
from hf_pretrain.runtime.flags import flag, same_flag
from hf_pretrain.runtime.parser import parse_flags


@dataclass
class SourceArguments:
    """What to do, and with which data."""

    action: str = flag(help="What to do.", choices=("inspect", "clean"), spelled="action")
    names: list[str] = flag(
        help="embedded[:part], files, globs, directories, or names on the Hub.", names="dataset", spelled="names"
    )
    text_column: str = same_flag(DataArguments, "text_column")
    encoding: str = same_flag(DataArguments, "encoding")
    columns: list[str] | None = same_flag(DataArguments, "columns")
    whole_files: bool = same_flag(DataArguments, "whole_files")


@dataclass
class InspectionArguments:
    """inspect."""

    tokenizer: str | None = flag(
        None, "Directory or Hub id; by default, the command trains one on the data.", names="model"
    )
    max_length: int = same_flag(DataArguments, "max_length")
    page: str | None = flag(None, "HTML file for the audit of conversations, with the trained tokens in colour.")
    show: int = flag(20, "Number of records to print.")


@dataclass
class CleaningArguments:
    """clean."""

    output: str = flag("clean.jsonl", "JSONL file to write.")
    held_out: list[str] | None = flag(None, "Validation set or evaluation questions to keep out.", names="dataset")
    held_out_tasks: str | None = flag(
        None,
        "Evaluation tasks whose examples to keep out: tasks of lm-eval, minimind or small, separated by commas.",
    )
    min_chars: int = flag(20, "Least number of characters.")
    near_duplicates: float = flag(
        NEAR_DUPLICATES,
        "Least similarity (Jaccard index) of near duplicates; 0 keeps them.",
        bounds="at least 0 and at most 1",
    )


ARGUMENTS = (SourceArguments, InspectionArguments, CleaningArguments)


def main(source: SourceArguments, look: InspectionArguments, args: CleaningArguments) -> None:
    names = ("text_column", "encoding", "whole_files", "columns")
    # The fields of each record tell its kind.
    reading = Reading(kind=None, **{name: vars(source)[name] for name in names})
    if source.action == "inspect":
        shown: dict[str, Any] = {"max_length": look.max_length, "num_shown": look.show, "page": look.page}
        print_result(inspect_data(source.names, reading, tokenizer_name=look.tokenizer, **shown))
        return
    questions: Iterable[str] = ()
    if args.held_out_tasks:
        # lm-eval is an extra, and its import is slow.
        from hf_pretrain.evaluation.lm_eval_tasks import read_questions

        questions = read_questions(expand_tasks(args.held_out_tasks))
    rules: dict[str, Any] = {"min_chars": args.min_chars, "near_duplicates": args.near_duplicates}
    rules |= {"held_out": args.held_out or (), "more_held_out": questions}
    counts = clean_data(source.names, args.output, reading, **rules)
    print(f"{counts}\nWrote {args.output}, and beside it the list of the dropped records.")


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
