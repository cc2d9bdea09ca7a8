"""
Answer a file of prompts, in batches.

    hf-pretrain generate --input prompts.jsonl --output answers.jsonl
    hf-pretrain generate --model_name_or_path out/sft-tiny --input my/test.jsonl --output answers.jsonl --temperature 0
    hf-pretrain generate --model_name_or_path out/pretrain-tiny --input texts.csv --output texts.jsonl

A record has the field `prompt`, a text or a list of messages, or the field `messages`. Its line in the output has all
its fields, and the answer in the field `generated`. After an interruption, the same command answers the rest. A base
model continues the text of `prompt`; `--raw` and `--no-raw` choose.
"""

import argparse
from pathlib import Path

from hf_pretrain.inference.batch_answers import read_prompts, write_answers
from hf_pretrain.inference.inference_arguments import load_for_inference, make_inference_parser, sampling_options
from hf_pretrain.inference.llama_cpp import NUM_SEQUENCES
from hf_pretrain.inference.terminal_chat import settle_sampling
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.parser import RecipeParser


def main(args: argparse.Namespace) -> None:
    model, tokenizer = load_for_inference(args, num_sequences=NUM_SEQUENCES)
    room = model.config.max_position_embeddings - args.max_new_tokens
    how = {"encoding": args.encoding, "is_raw": args.raw, "enable_thinking": args.think, "max_tokens": room}
    prompts = read_prompts(Path(args.input), tokenizer, **how)
    sampling = settle_sampling(tokenizer, **sampling_options(args))
    options = {"batch_size": args.batch_size, "seed": args.seed}
    num_old = write_answers(prompts, Path(args.output), model, tokenizer, **options, **sampling)
    print(f"{args.output}: {len(prompts)} answers of {args.model_name_or_path}, {num_old} of them from before")


def make_parser() -> RecipeParser:
    parser = make_inference_parser(__doc__)
    parser.add_argument("--input", required=True, help="file of prompts: .jsonl, .json, .csv or .parquet")
    parser.add_argument("--encoding", default="utf-8", help="encoding of the input, e.g. gb18030")
    parser.add_argument("--output", required=True, help="JSONL file to write or to complete")
    parser.add_argument("--batch_size", type=int, default=16, help="prompts at once")
    return parser


if __name__ == "__main__":
    with one_line_errors():
        main(make_parser().parse_args())
