"""
Inspect data before training, or clean them.

    hf-pretrain data inspect my/*.jsonl
    hf-pretrain data inspect jingyaogong/minimind_dataset:sft_mini_512.jsonl --tokenizer out/pretrain-tiny
    hf-pretrain data inspect roneneldan/TinyStories
    hf-pretrain data clean my/*.jsonl --output clean.jsonl
    hf-pretrain data clean my/*.jsonl --output clean.jsonl --held_out validation.jsonl --min_chars 100
    hf-pretrain data clean my/*.jsonl --output clean.jsonl --held_out_tasks minimind

Names are those of `--dataset_name`: embedded[:part], files, globs, directories, files on the Hub, and whole datasets
owner/name[:config][@revision] on the Hub. The command reads the split `train` of a Hub dataset, as training does.

`inspect` prints the number of records and bad lines, the lengths in tokens, the shares of duplicates and languages,
some records as the model sees them, and the tokens per parameter for each model preset.

`clean` drops bad lines, short and repetitive records, exact and near duplicates, and records that share 60 characters
in a row with `--held_out` data or with the examples of `--held_out_tasks`. It writes the other records as JSONL.
`<output>.dropped` lists each dropped record with its line or row and the reason. `<output>.report.json` holds the
number of records per reason.
"""

import argparse
import dataclasses
import itertools
import json
import random
from functools import partial
from pathlib import Path

from hf_pretrain.data.cleaning import (
    OVERLAP_CHARS,
    CleaningRules,
    OverlapFinder,
    check_sources,
    held_out_texts,
    output_files,
    replaced_files,
    write_cleaned,
)
from hf_pretrain.data.inspection import describe, render, survey_records
from hf_pretrain.data.records import list_sources, plain_text, read_records
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.parser import RecipeParser
from hf_pretrain.runtime.progress import announce
from hf_pretrain.runtime.writing import written_whole
from hf_pretrain.stages.evaluation import expand_tasks
from hf_pretrain.tokenizer.chat_template import mark_template
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer


def inspect(args: argparse.Namespace) -> None:
    if args.max_length < 2:
        raise UserError(f"--max_length {args.max_length} must be at least 2.")
    sources = list_sources(args.names)
    survey = survey_records(read_records(sources, text_column=args.text_column))
    if not survey.sample:
        reasons = "; ".join(survey.reasons) or "there are none"
        raise UserError(f"No record of {', '.join(args.names)} can be trained on: {reasons}. Correct the data.")
    if args.tokenizer is None:
        tokenizer = train_tokenizer([plain_text(record) for record in survey.sample])
    else:
        tokenizer = load_tokenizer(args.tokenizer)
        if any(record.schema != "text" for record in survey.sample):
            mark_template(tokenizer)
    announce("counting tokens and languages")
    findings = describe(survey, tokenizer, max_length=args.max_length)
    lines = [f"{label:20} {text}" for label, text in findings]
    shown_records = random.Random(0).sample(survey.sample, min(args.show, len(survey.sample)))
    lines.append(f"\n{len(shown_records)} records as the model sees them:")
    for record in shown_records:
        shown = tokenizer.decode(render(record, tokenizer))
        lines += [f"\n--- {record.source}:{record.line}", shown[:400] + " …" * (len(shown) > 400)]
    print("\n".join(lines))


def clean(args: argparse.Namespace) -> None:
    find_replaced = partial(replaced_files, args.output, overwrite=args.overwrite)
    find_replaced()
    output, dropped, report_path = output_files(Path(args.output))
    rules = CleaningRules(args.min_chars, args.max_repeated_lines, args.min_letters, args.near_duplicates or None)
    sources, held_out_sources = list_sources(args.names), list_sources(args.held_out or [])
    check_sources(sources + held_out_sources, output)
    texts = held_out_texts(read_records(held_out_sources, text_column=args.held_out_column))
    if args.held_out_tasks:
        # lm-eval is an extra, and its import is slow.
        from hf_pretrain.stages.lm_eval_tasks import read_questions

        texts = itertools.chain(texts, read_questions(expand_tasks(args.held_out_tasks)))
    held_out = OverlapFinder(texts)
    if held_out.short:
        print(
            f"Held-out texts with less than {OVERLAP_CHARS} characters: {len(held_out.short):,}. "
            "The command drops only records that equal one of them."
        )
    with written_whole(output.parent, lock=f".{output.name}.lock", replaces=find_replaced) as scratch:
        records = read_records(sources, text_column=args.text_column)
        report = write_cleaned(records, scratch / output.name, rules, held_out)
        content = {"sources": args.names, "rules": dataclasses.asdict(rules), **vars(report)}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (scratch / report_path.name).write_text(text, encoding="utf-8")
    print(f"{report}\nWrote {output}, {dropped.name} and {report_path.name}.")


def make_parser() -> RecipeParser:
    parser = RecipeParser(description=__doc__)
    parser.add_argument("action", choices=("inspect", "clean"), help="what to do")
    parser.add_argument(
        "names", nargs="+", help="embedded[:part], files, globs, directories, or files and datasets on the Hub"
    )
    parser.add_argument("--text_column", default="text", help="column that holds the text")
    look = parser.add_argument_group("inspect")
    look.add_argument(
        "--tokenizer", help="directory or Hub id; by default, the command trains a tokenizer on the data"
    )
    look.add_argument("--max_length", type=int, default=512, help="tokens per packed sequence")
    look.add_argument("--show", type=int, default=20, help="number of records to print")
    rules = parser.add_argument_group("clean")
    default = CleaningRules()
    rules.add_argument("--output", default="clean.jsonl", help="JSONL file to write")
    rules.add_argument("--overwrite", action="store_true", help="replace --output and the two files beside it")
    rules.add_argument("--held_out", nargs="+", help="validation set or evaluation questions to keep out")
    rules.add_argument(
        "--held_out_tasks",
        help="evaluation tasks whose examples to keep out: tasks of lm-eval, minimind or small, separated by commas",
    )
    rules.add_argument("--held_out_column", default="text", help="column that holds the held-out text")
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
    return parser


if __name__ == "__main__":
    with one_line_errors():
        args = make_parser().parse_args()
        (inspect if args.action == "inspect" else clean)(args)
