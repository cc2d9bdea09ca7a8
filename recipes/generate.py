"""
Answer a file of prompts, in batches.

    hf-pretrain generate --input prompts.jsonl --output answers.jsonl
    hf-pretrain generate --model_name_or_path out/sft-tiny --input my/test.jsonl --output answers.jsonl --temperature 0
    hf-pretrain generate --model_name_or_path out/pretrain-tiny --input texts.csv --output texts.jsonl

A record has the field `prompt`, a text or a list of messages, or the field `messages`. Its line in the output has all
its fields, and the answer in the field `generated`. After an interruption, the same command answers the rest. A base
model continues the text of `prompt`; `--raw` and `--no-raw` choose.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_pretrain.inference.batch_answers import read_prompts, write_answers
from hf_pretrain.inference.inference_arguments import THINK, SamplingArguments, load_for_inference, sampling_options
from hf_pretrain.inference.llama_cpp import NUM_SEQUENCES
from hf_pretrain.inference.terminal_chat import settle_sampling
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.flags import flag, same_flag
from hf_pretrain.runtime.parser import parse_flags


@dataclass
class GenerationArguments(SamplingArguments):
    """Model, prompts and answers."""

    input: str = flag(help="File of prompts: .jsonl, .json, .csv or .parquet.")
    encoding: str = same_flag(DataArguments, "encoding")
    output: str = flag(help="JSONL file to write or to complete.")
    batch_size: int = flag(16, "Prompts at once.", bounds="at least 1")


ARGUMENTS = (GenerationArguments,)


def main(args: GenerationArguments) -> None:
    model, tokenizer = load_for_inference(args, num_sequences=NUM_SEQUENCES)
    room = model.config.max_position_embeddings - args.max_new_tokens
    reading: dict[str, Any] = {"encoding": args.encoding, "is_raw": args.raw, "max_tokens": room}
    prompts = read_prompts(Path(args.input), tokenizer, enable_thinking=THINK[args.think], **reading)
    sampling = settle_sampling(tokenizer, **sampling_options(args))
    options = {"batch_size": args.batch_size, "seed": args.seed}
    num_old = write_answers(prompts, Path(args.output), model, tokenizer, **options, **sampling)
    print(f"{args.output}: {len(prompts)} answers of {args.model_name_or_path}, {num_old} of them from before")


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
