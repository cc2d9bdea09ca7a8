"""
Inspect data before training, or clean them.

    python recipes/data.py inspect my/*.jsonl
    python recipes/data.py inspect jingyaogong/minimind_dataset:sft_mini_512.jsonl --tokenizer out/pretrain-tiny
    python recipes/data.py clean my/*.jsonl --output clean.jsonl
    python recipes/data.py clean my/*.jsonl --output clean.jsonl --held_out validation.jsonl --min_chars 100

`inspect` prints the number of records and bad lines, the lengths in tokens, the shares of duplicates and languages,
some records as the model sees them, and the tokens per parameter for each model preset.

`clean` drops bad lines, short and repetitive records, exact and near duplicates, and records that share 60 characters
in a row with `--held_out` data. It writes the other records as JSONL. `<output>.dropped.jsonl` lists each dropped
record with its line and the reason. `<output>.report.json` holds the number of records per reason.
"""

import argparse
import dataclasses
import json
import random
from pathlib import Path

from hf_pretrain.data.cleaning import CleaningRules, OverlapFinder, plain_text, write_cleaned
from hf_pretrain.data.inspection import describe, render, survey_records
from hf_pretrain.data.records import read_records
from hf_pretrain.runtime.command_line import RecipeParser, add_debug_flag, one_line_errors
from hf_pretrain.tokenizer.loading import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer


def inspect(args: argparse.Namespace) -> None:
    survey = survey_records(read_records(args.names, text_column=args.text_column))
    if not survey.sample:
        reasons = "; ".join(survey.reasons) or "there are none"
        raise ValueError(f"No record of {', '.join(args.names)} can be trained on: {reasons}. Correct the data.")
    if args.tokenizer is None:
        tokenizer = train_tokenizer([plain_text(record) for record in survey.sample])
    else:
        tokenizer = load_tokenizer(args.tokenizer)
    for label, text in describe(survey, tokenizer, max_length=args.max_length):
        print(f"{label:20} {text}")
    print(f"\n{min(args.show, len(survey.sample))} records as the model sees them:")
    for record in random.Random(args.seed).sample(survey.sample, min(args.show, len(survey.sample))):
        shown = tokenizer.decode(render(record, tokenizer))
        print(f"\n--- {record.source}:{record.line}\n{shown[: args.chars]}{' …' if len(shown) > args.chars else ''}")


def clean(args: argparse.Namespace) -> None:
    if args.output.exists() and not args.overwrite:
        raise ValueError(f"{args.output} exists. Choose another --output, or replace it with --overwrite.")
    similarity = args.near_duplicates if args.near_duplicates > 0 else None
    rules = CleaningRules(args.min_chars, args.max_repeated_lines, args.min_letters, similarity)
    held_out = OverlapFinder(plain_text(record) for record in read_records(args.held_out or []))
    records = read_records(args.names, text_column=args.text_column)
    report = write_cleaned(records, args.output, rules, held_out)
    content = {"sources": args.names, "rules": dataclasses.asdict(rules), **vars(report)}
    path = args.output.with_name(f"{args.output.name}.report.json")
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{report}\nWrote {args.output}, {args.output.name}.dropped.jsonl and {path.name}.")


def make_parser() -> RecipeParser:
    parser = RecipeParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("inspect", "clean"))
    parser.add_argument("names", nargs="+", help="embedded[:part], files, globs, directories, or files on the Hub")
    parser.add_argument("--text_column", default="text", help="column that holds the text")
    look = parser.add_argument_group("inspect")
    look.add_argument(
        "--tokenizer", help="directory or Hub id; by default, the command trains a tokenizer on the data"
    )
    look.add_argument("--max_length", type=int, default=512, help="tokens per packed sequence")
    look.add_argument("--show", type=int, default=20, help="number of records to print")
    look.add_argument("--chars", type=int, default=400, help="number of characters to print of each record")
    look.add_argument("--seed", type=int, default=0, help="seed that selects the records to print")
    rules = parser.add_argument_group("clean")
    default = CleaningRules()
    rules.add_argument("--output", type=Path, default=Path("clean.jsonl"), help="JSONL file to write")
    rules.add_argument("--overwrite", action="store_true", help="replace the file --output if it exists")
    rules.add_argument("--held_out", nargs="+", help="validation set or evaluation questions to keep out")
    rules.add_argument("--min_chars", type=int, default=default.min_chars, help="least number of characters")
    rules.add_argument(
        "--max_repeated_lines",
        type=float,
        default=default.max_repeated_lines,
        help="largest share of characters in lines that repeat an earlier line",
    )
    rules.add_argument(
        "--min_letters", type=float, default=default.min_letters, help="least share of letters in visible characters"
    )
    rules.add_argument(
        "--near_duplicates",
        type=float,
        default=default.near_duplicates,
        help="least similarity (Jaccard index) of near duplicates; 0 keeps them",
    )
    add_debug_flag(parser)
    return parser


if __name__ == "__main__":
    parser = make_parser()
    with one_line_errors():
        args = parser.parse_args()
        (inspect if args.action == "inspect" else clean)(args)
