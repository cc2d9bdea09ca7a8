"""
Chat with a model in the terminal.

    hf-pretrain chat
    hf-pretrain chat --model_name_or_path out/sft-tiny --system "Be brief." --temperature 0.7
    hf-pretrain chat --prompt "How do you do?" --greedy
    hf-pretrain chat --tools examples.agent_tools:TOOLS
    hf-pretrain chat --tools tools.json --think on
    hf-pretrain chat --model_name_or_path out/pretrain-tiny --raw

`/help` lists the commands. Answers appear while the model writes them, with their speed after them, and Ctrl-C ends
one early. The chat runs the tools that are Python functions. After a call of a tool from a JSON file, the next line
that you type is its result. Your input is plain text: `<|im_end|>` in it
is not a control token. A base model continues your text instead of answering it: one whose last run was pretraining,
or whose tokenizer has no chat template. `--raw` and `--no-raw` choose.
"""

import argparse
import sys
from functools import partial

import torch
from transformers import set_seed

from hf_pretrain.checkpoints.directory import find_newest_run
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.devices import refuse_unused_gpu
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.parser import RecipeParser
from hf_pretrain.stages.terminal_chat import Chat, is_base_model
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.models import ModelArguments, load_model


def main(args: argparse.Namespace) -> None:
    if not args.use_cpu:
        refuse_unused_gpu("--use_cpu")
    name = args.model_name_or_path or find_newest_run()
    tokenizer = load_tokenizer(name)
    # load_model also converts MiniMind's own checkpoints and applies adapters.
    model = load_model(ModelArguments(model_name_or_path=name), tokenizer).eval()
    # The loader leaves the model on the CPU, because a trainer would move it.
    if torch.accelerator.is_available() and not args.use_cpu:
        model.to(torch.accelerator.current_accelerator())
    set_seed(args.seed)
    is_raw = is_base_model(name, model, tokenizer) if args.raw is None else args.raw
    if is_raw and (args.system or args.tools or args.think):
        raise UserError("--system, --tools and --think have no effect on raw continuation: chat with --no-raw.")
    chat = Chat(
        model,
        tokenizer,
        is_raw=is_raw,
        system=args.system,
        enable_thinking={"on": True, "off": False}.get(args.think),
        tools=args.tools,
        temperature=0 if args.greedy else args.temperature,
        max_new_tokens=args.max_new_tokens,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
    )
    title = f"{name}{', a base model: it continues your text' if is_raw else ''}"
    if args.prompt is None:
        print(f"{title}\n/help lists the commands.")
        chat.talk()
        return
    if not chat.say(args.prompt):
        raise UserError("--prompt is empty. Give it a text, or leave it out to talk.")
    if args.model_name_or_path is None:
        # Standard output holds the answer alone.
        print(title, file=sys.stderr)
    chat.respond(partial(print, end="", flush=True))
    print()
    print(chat.speed, file=sys.stderr)


def make_parser() -> RecipeParser:
    parser = RecipeParser(description=__doc__)
    parser.add_argument("--model_name_or_path", help="directory or Hub id; by default the newest run in out/")
    parser.add_argument("--prompt", help="answer or continue this text, and exit")
    parser.add_argument("--system", help="the system message")
    parser.add_argument(
        "--tools",
        help="JSON file of tool schemas, calculator, or module.path:NAME of functions, which the chat runs",
    )
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
    return parser


if __name__ == "__main__":
    with one_line_errors():
        main(make_parser().parse_args())
