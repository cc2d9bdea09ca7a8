"""
Chat with a model in the terminal.

    hf-pretrain chat
    hf-pretrain chat --model_name_or_path out/sft-tiny --system "Be brief." --temperature 0.7
    hf-pretrain chat --prompt "How do you do?" --temperature 0
    hf-pretrain chat --auto --inference_rope_scaling
    hf-pretrain chat --tools examples.agent_tools:TOOLS --think on
    hf-pretrain chat --model_name_or_path out/pretrain-tiny --raw

`/help` lists the commands. Answers appear while the model writes them, with their speed after them, and Ctrl-C ends
one early. The chat runs the tools that the model calls. Your input is plain text: `<|im_end|>` in it is not a control
token. A base model continues your text instead of answering it: one whose last run was pretraining, or whose tokenizer
has no chat template. `--raw` and `--no-raw` choose.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_pretrain.inference.inference_arguments import THINK, SamplingArguments, load_for_inference, sampling_options
from hf_pretrain.inference.terminal_chat import AUTO_PROMPTS, Chat
from hf_pretrain.inference.tools import offer_tools
from hf_pretrain.runtime.command_line import one_line_errors, print_result
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.flags import flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.weights.package_models import package_model


@dataclass
class ChatArguments(SamplingArguments):
    """Model, and what it answers."""

    prompt: str | None = flag(None, "Answer or continue this text, and exit.")
    auto: bool = flag(False, "Answer eight questions, and exit.")
    history: int | None = flag(None, "Earlier questions that the model still sees; by default all, with --auto none.")
    system: str | None = flag(None, "The system message.")
    tools: str | None = flag(
        None, "Tools that the chat runs: calculator, a Python file, or module.path:NAME.", names="code"
    )


ARGUMENTS = (ChatArguments,)


def main(args: ChatArguments) -> None:
    model, tokenizer = load_for_inference(args)
    if args.raw and (args.system or args.tools or args.think is not None):
        raise UserError("--system, --tools and --think have no effect on raw continuation: chat with --no-raw.")
    tools, functions = offer_tools(args.tools)
    settings: dict[str, Any] = {"system": args.system, "tools": tools, "functions": functions}
    settings |= {"is_raw": args.raw, "enable_thinking": THINK[args.think]}
    # As in MiniMind, `--auto` asks each question by itself.
    num_turns = 0 if args.auto and args.history is None else args.history
    chat = Chat(model, tokenizer, sampling_options(args), num_turns=num_turns, **settings)
    published = package_model(args.model_name_or_path)
    about = ", a base model: it continues your text" if args.raw else f", {published.about}" if published else ""
    title = f"{args.model_name_or_path}{about}"
    if args.auto:
        for prompt in AUTO_PROMPTS:
            print(f"> {prompt}")
            chat.ask(prompt)
        return
    if args.prompt is None:
        print(f"{title}\n/help lists the commands.")
        chat.talk()
        return
    # Standard output holds the answer alone.
    print(title, file=sys.stderr)
    chat.say(args.prompt)
    chat.respond(partial(print_result, end=""))
    print_result("")
    print(chat.speed, file=sys.stderr)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS, stage="chat"))
