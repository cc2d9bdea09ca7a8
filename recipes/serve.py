"""
Serve a model under OpenAI's API. By default, only this machine can use it (`--host`).

    hf-pretrain serve
    hf-pretrain serve --model_name_or_path out/sft-tiny --port 8001 --think off
    hf-pretrain serve --web
    hf-pretrain serve --web --tools examples.agent_tools:TOOLS

`--web` also opens a chat page in the browser. Any OpenAI client can use the server:

    OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none").chat.completions.create(
        model="out/sft-tiny", messages=[{"role": "user", "content": "hello"}]
    )

Requests may name any model: the served one answers. If the tokenizer has a response template, as our tokenizers do,
answers contain `reasoning_content` and `tool_calls`. `open_thinking` in a request switches the reasoning, and the
server refuses fields that it cannot honour. It has no authentication. It refuses requests from web pages of other
origins, under host names other than localhost, `--host` and `--allowed_hosts`, and for more tokens than the model has
positions.
"""

from dataclasses import dataclass

from hf_pretrain.checkpoints.directory import find_newest_run
from hf_pretrain.loading.native import DEFAULT_SAMPLING, own_sampling
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.devices import refuse_unused_gpu
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.flags import flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.runtime.texts import LANGUAGES
from hf_pretrain.tokenizer.control_tokens import check_chat_template
from hf_pretrain.tokenizer.pretrained import load_tokenizer


# FastAPI is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.inference.inference_arguments import THINK, AnsweringArguments
    from hf_pretrain.inference.serving import check_ports, serve_model
    from hf_pretrain.inference.tools import offer_tools


@dataclass
class ServingArguments(AnsweringArguments):
    """Model, server and chat page."""

    host: str = flag("127.0.0.1", "0.0.0.0 admits the whole network.")
    allowed_hosts: list[str] = flag([], "More names of this machine.")
    port: int = flag(8000, "TCP port.", bounds="at least 0 and at most 65535")
    web: bool = flag(False, "Open a chat page in the browser.")
    web_port: int = flag(7860, "TCP port of the chat page.", bounds="at least 0 and at most 65535")
    language: str | None = flag(None, "Of the chat page; by default the browser's.", choices=tuple(LANGUAGES))
    tools: str | None = flag(
        None, "Tools that the chat page runs: calculator, a Python file, or module.path:NAME.", names="code"
    )
    dtype: str = flag("auto", "auto takes the dtype of the weights.")
    seed: int | None = flag(None, "Seed of the sampling.")


ARGUMENTS = (ServingArguments,)


def main(args: ServingArguments) -> None:
    if args.tools and not args.web:
        raise UserError("--tools needs the chat page. Add --web.")
    if not args.use_cpu:
        refuse_unused_gpu("--use_cpu")
    if args.web:
        from hf_pretrain.inference.chat_page import open_page
    tools = offer_tools(args.tools)

    name = args.model_name_or_path or find_newest_run(with_adapters=True)
    check_ports(args.host, [args.port, args.web_port] if args.web else [args.port])
    # Report a mistake before the model is loaded.
    tokenizer = load_tokenizer(name)
    if args.web:
        check_chat_template(tokenizer)
    thinking, hosts = THINK[args.think], [args.host, *args.allowed_hosts]
    server = serve_model(
        name,
        host=args.host,
        port=args.port,
        hosts=hosts,
        thinking=thinking,
        seed=args.seed,
        use_cpu=args.use_cpu,
        dtype=args.dtype,
        rope_scaling=args.inference_rope_scaling,
        engine=args.engine,
    )
    if args.web:
        open_page(
            name,
            f"http://{'127.0.0.1' if args.host == '0.0.0.0' else args.host}:{args.port}/v1",
            host=args.host,
            port=args.web_port,
            hosts=hosts,
            language=args.language,
            thinking=thinking is not False,
            sampling=DEFAULT_SAMPLING | own_sampling(server.engine.model.generation_config),
            tools=tools,
        )
    server.wait_for_end()


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS, stage="serve"))
