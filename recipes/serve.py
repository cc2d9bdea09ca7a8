"""
Serves a model through transformers' own OpenAI-compatible server, to this machine alone unless `--host` says more.

    python recipes/serve.py
    python recipes/serve.py --model_name_or_path out/sft-tiny --port 8001 --reasoning off
    python recipes/serve.py --continuous_batching

and then, from any OpenAI client,

    OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none").chat.completions.create(
        model="out/sft-tiny", messages=[{"role": "user", "content": "hello"}]
    )

The model's name is the one that it was started with. Reasoning comes as `reasoning_content` and tool calls as
`tool_calls`, where the tokenizer carries a response template, as ours do; `chat_template_kwargs` of a request go to the
chat template, `{"enable_thinking": false}` among them. There is no authentication. Requests for other models, from web
pages of other origins, or longer than the model's positions are refused.
"""

import argparse

from transformers.cli.serve import ReasoningMode, Serve

from hf_pretrain.checkpoints.directory import find_newest_run
from hf_pretrain.runtime.command_line import RecipeParser, add_debug_flag, one_line_errors
from hf_pretrain.stages.serving import adapt_server
from hf_pretrain.tokenizer.loading import load_tokenizer


def main(args: argparse.Namespace) -> None:
    name = args.model_name_or_path or find_newest_run()
    # A name that leads nowhere is met here, not in the server.
    load_tokenizer(name)
    adapt_server(name)
    print(f"Serving {name} at http://{args.host}:{args.port}/v1", flush=True)
    Serve(
        name,
        host=args.host,
        port=args.port,
        device=args.device,
        dtype=args.dtype,
        continuous_batching=args.continuous_batching,
        reasoning=ReasoningMode(args.reasoning),
        chat_template_kwargs=args.chat_template_kwargs,
        default_seed=args.seed,
        log_level=args.log_level,
    )


if __name__ == "__main__":
    parser = RecipeParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="directory or Hub id; by default the newest run in out/")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets the whole network in")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ...")
    parser.add_argument("--dtype", default="auto", help="auto is that of the weights")
    parser.add_argument(
        "--continuous_batching", action="store_true", help="many requests at once, with paged attention"
    )
    parser.add_argument("--reasoning", choices=[mode.value for mode in ReasoningMode], default="auto")
    parser.add_argument("--chat_template_kwargs", help="JSON; what a request says goes before it")
    parser.add_argument("--seed", type=int, help="of sampling")
    parser.add_argument("--log_level", choices=("debug", "info", "warning", "error"), default="warning")
    add_debug_flag(parser)
    with one_line_errors():
        main(parser.parse_args())
