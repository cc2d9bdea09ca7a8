"""
Chat with a model in the terminal.

    python recipes/chat.py
    python recipes/chat.py --model_name_or_path out/sft-tiny --system "Be brief." --temperature 0.7
    python recipes/chat.py --prompt "How do you do?" --greedy
    python recipes/chat.py --tools tools.json --think on

`/help` lists the commands. Answers appear while the model writes them, and Ctrl-C ends one early. After a tool call,
the next line that you type is its result. Your input is plain text: `<|im_end|>` in it is not a control token.
"""

import argparse
import io
import sys
from functools import partial

from hf_pretrain.checkpoints.directory import find_newest_run
from hf_pretrain.runtime.command_line import RecipeParser, add_debug_flag, one_line_errors
from hf_pretrain.stages.chatting import Chat
from hf_pretrain.tokenizer.loading import load_tokenizer
from hf_pretrain.weights.model_arguments import ModelArguments
from hf_pretrain.weights.models import load_model


# isort: split
# The package must come first: it answers `--help` before torch is imported.
import torch
from transformers import set_seed


def main(args: argparse.Namespace) -> None:
    name = args.model_name_or_path or find_newest_run()
    tokenizer = load_tokenizer(name)
    # load_model also converts MiniMind's own checkpoints and applies adapters.
    model = load_model(ModelArguments(model_name_or_path=name), tokenizer).eval()
    # The loader leaves the model on the CPU, because a trainer would move it.
    if torch.accelerator.is_available() and not args.use_cpu:
        model.to(torch.accelerator.current_accelerator())
    set_seed(args.seed)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    chat = Chat(
        model,
        tokenizer,
        system=args.system,
        enable_thinking={"on": True, "off": False}.get(args.think),
        tools=args.tools,
        max_new_tokens=args.max_new_tokens,
        repetition_penalty=args.repetition_penalty,
        do_sample=not args.greedy,
        **({} if args.greedy else sampling),
    )
    write = partial(print, end="", flush=True)
    if args.prompt is not None:
        chat.say(args.prompt)
        chat.answer(write)
        print()
        return

    # Chat.say refuses a line that is not UTF-8. Without this setting, Python would raise earlier and end the loop.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    print(f"{name}\n/help lists the commands.")
    while True:
        try:
            line = input(chat.prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            break
        if line in ("/exit", "/quit"):
            break
        try:
            if line.startswith("/"):
                print(chat.run_command(line))
            elif line:
                chat.say(line)
                # The model answers only after the results of all its tool calls.
                if not chat.pending_calls:
                    chat.answer(write)
                    print()
        except ValueError as error:
            print(error)


if __name__ == "__main__":
    parser = RecipeParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="directory or Hub id; by default the newest run in out/")
    parser.add_argument("--prompt", help="answer this message and exit")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--tools", help="JSON file with a list of tool schemas")
    parser.add_argument(
        "--think", choices=("on", "off"), help="reason before answering; by default the chat template decides"
    )
    parser.add_argument("--max_new_tokens", type=int, default=512, help="limit of one answer")
    parser.add_argument("--greedy", action="store_true", help="always take the most probable token")
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
