"""
Chat with a model in the terminal.

    hf-pretrain chat
    hf-pretrain chat --model_name_or_path out/sft-tiny --system "Be brief." --temperature 0.7
    hf-pretrain chat --prompt "How do you do?" --greedy
    hf-pretrain chat --tools tools.json --think on
    hf-pretrain chat --model_name_or_path out/pretrain-tiny --raw

`/help` lists the commands. Answers appear while the model writes them, with their speed after them, and Ctrl-C ends
one early. After a tool call, the next line that you type is its result. Your input is plain text: `<|im_end|>` in it
is not a control token. A base model continues your text instead of answering it: one whose last run was pretraining,
or whose tokenizer has no chat template. `--raw` and `--no-raw` choose.
"""

import argparse
import io
import shlex
import sys
from functools import partial

from hf_pretrain.checkpoints.directory import find_runs
from hf_pretrain.reports.runs import read_launches, trained_on_text
from hf_pretrain.runtime.command_line import RecipeParser, add_debug_flag, one_line_errors
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.chatting import Chat
from hf_pretrain.stages.continuing import Continuation, is_base_model
from hf_pretrain.stages.generating import Generator
from hf_pretrain.tokenizer.loading import load_tokenizer
from hf_pretrain.weights.model_arguments import ModelArguments
from hf_pretrain.weights.models import load_model


# isort: split
# The package must come first: it answers `--help` before torch is imported.
import torch
from transformers import set_seed


def main(args: argparse.Namespace) -> None:
    runs = [args.model_name_or_path] if args.model_name_or_path else find_runs()
    name = runs[0]
    tokenizer = load_tokenizer(name)
    # load_model also converts MiniMind's own checkpoints and applies adapters.
    model = load_model(ModelArguments(model_name_or_path=name), tokenizer).eval()
    # The loader leaves the model on the CPU, because a trainer would move it.
    if torch.accelerator.is_available() and not args.use_cpu:
        model.to(torch.accelerator.current_accelerator())
    set_seed(args.seed)
    generator = Generator(
        model,
        tokenizer,
        temperature=0 if args.greedy else args.temperature,
        max_new_tokens=args.max_new_tokens,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
    )
    is_raw = is_base_model(name, model, tokenizer) if args.raw is None else args.raw
    if is_raw and (given := [flag for flag in ("system", "tools", "think") if getattr(args, flag)]):
        raise UserError(f"--{given[0]} has no effect on raw continuation. Leave it out, or chat with --no-raw.")
    thinking = {"on": True, "off": False}.get(args.think)
    chat = (
        Continuation(generator)
        if is_raw
        else Chat(generator, system=args.system, enable_thinking=thinking, tools=args.tools)
    )
    write = partial(print, end="", flush=True)
    title = f"{name}{', a base model: it continues your text' if is_raw else ''}"
    if args.prompt is not None:
        if args.model_name_or_path is None:
            # Standard output holds the answer alone.
            print(title, file=sys.stderr)
        if not chat.say(args.prompt):
            raise UserError("--prompt is empty. Give it a text, or leave it out to talk.")
        chat.answer(write)
        print()
        print(generator.speed, file=sys.stderr)
        return

    # `say` refuses a line that is not UTF-8. Without this setting, Python would raise earlier and end the loop.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    print(f"{title}\n/help lists the commands.")
    if is_raw and args.raw is None:
        # The newest model is not always the one that the user means.
        chat_model = next((run for run in runs[1:] if trained_on_text(read_launches(run)) is False), None)
        if chat_model is not None:
            print(f"The newest chat model is {chat_model}: --model_name_or_path {shlex.quote(chat_model)}")
    while True:
        try:
            line = input(chat.prompt)
        except (EOFError, KeyboardInterrupt):
            print()
            break
        if line.strip() in ("/exit", "/quit"):
            break
        try:
            if line.startswith("/"):
                print(chat.run_command(line.strip()))
            elif chat.say(line):
                chat.answer(write)
                print(f"\n[{generator.speed}]")
        except ValueError as error:
            print(error)


if __name__ == "__main__":
    parser = RecipeParser(description=__doc__)
    parser.add_argument("--model_name_or_path", help="directory or Hub id; by default the newest run in out/")
    parser.add_argument("--prompt", help="answer or continue this text, and exit")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--tools", help="JSON file with a list of tool schemas")
    parser.add_argument(
        "--think", choices=("on", "off"), help="reason before answering; by default the chat template decides"
    )
    parser.add_argument("--max_new_tokens", type=int, default=512, help="limit of one answer")
    parser.add_argument(
        "--raw",
        action=argparse.BooleanOptionalAction,
        help="continue the text instead of answering; by default only with base models",
    )
    parser.add_argument("--greedy", action="store_true", help="always take the most probable token, as temperature 0")
    parser.add_argument("--temperature", type=float, default=0.8, help="divisor of the logits")
    parser.add_argument(
        "--top_p", type=float, default=0.9, help="sample from the likeliest tokens that together have this probability"
    )
    parser.add_argument("--top_k", type=int, default=50, help="sample from this many of the likeliest tokens")
    parser.add_argument("--repetition_penalty", type=float, default=1.0, help="above 1, tokens repeat less often")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--use_cpu", action="store_true", help="do not use the accelerator")
    add_debug_flag(parser)
    with one_line_errors():
        main(parser.parse_args())
