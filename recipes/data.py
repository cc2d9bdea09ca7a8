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

import argparse
from collections.abc import Iterable

from hf_pretrain.data.cleaning import NEAR_DUPLICATES, clean_data
from hf_pretrain.data.inspection import inspect_data
from hf_pretrain.evaluation.evaluation import expand_tasks
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.command_line import one_line_errors, print_result
from hf_pretrain.runtime.parser import RecipeParser


def main(args: argparse.Namespace) -> None:
    names = ("text_column", "encoding", "whole_files", "columns")
    # The fields of each record tell its kind.
    reading = Reading(kind=None, **{name: vars(args)[name] for name in names})
    if args.action == "inspect":
        shown = {"max_length": args.max_length, "num_shown": args.show, "page": args.page}
        print_result(inspect_data(args.names, reading, tokenizer_name=args.tokenizer, **shown))
        return
    questions: Iterable[str] = ()
    if args.held_out_tasks:
        # lm-eval is an extra, and its import is slow.
        from hf_pretrain.evaluation.lm_eval_tasks import read_questions

        questions = read_questions(expand_tasks(args.held_out_tasks))
    rules = {"min_chars": args.min_chars, "near_duplicates": args.near_duplicates}
    rules |= {"held_out": args.held_out or (), "more_held_out": questions}
    counts = clean_data(args.names, args.output, reading, **rules)
    print(f"{counts}\nWrote {args.output}, and beside it the list of the dropped records.")


def make_parser() -> RecipeParser:
    parser = RecipeParser(description=__doc__)
    parser.add_argument("action", choices=("inspect", "clean"), help="what to do")
    parser.add_argument("names", nargs="+", help="embedded[:part], files, globs, directories, or names on the Hub")
    parser.add_argument("--text_column", default="text", help="column that holds the text")
    parser.add_argument("--encoding", default="utf-8", help="encoding of the files, e.g. gb18030")
    parser.add_argument("--columns", nargs="+", help="names of columns, OUR=THEIRS, e.g. prompt=question")
    parser.add_argument("--whole_files", action="store_true", help="a .txt file is one document, as a .md file is")
    look = parser.add_argument_group("inspect")
    look.add_argument("--tokenizer", help="directory or Hub id; by default, the command trains one on the data")
    look.add_argument("--max_length", type=int, default=512, help="tokens per packed sequence")
    look.add_argument("--page", help="HTML file for the audit of conversations, with the trained tokens in colour")
    look.add_argument("--show", type=int, default=20, help="number of records to print")
    rules = parser.add_argument_group("clean")
    rules.add_argument("--output", default="clean.jsonl", help="JSONL file to write")
    rules.add_argument("--held_out", nargs="+", help="validation set or evaluation questions to keep out")
    tasks = "evaluation tasks whose examples to keep out: tasks of lm-eval, minimind or small, separated by commas"
    rules.add_argument("--held_out_tasks", help=tasks)
    rules.add_argument("--min_chars", type=int, default=20, help="least number of characters")
    near = "least similarity (Jaccard index) of near duplicates; 0 keeps them"
    rules.add_argument("--near_duplicates", type=float, default=NEAR_DUPLICATES, help=near)
    return parser


if __name__ == "__main__":
    with one_line_errors():
        main(make_parser().parse_args())
