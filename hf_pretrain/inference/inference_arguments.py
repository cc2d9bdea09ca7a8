"""Flags and model of the commands that answer: `recipes/chat.py`, `recipes/generate.py` and `recipes/serve.py`."""

import argparse
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from ..checkpoints.directory import find_newest_run
from ..loading.adapters import adapter_base, is_adapted, merge_adapter
from ..loading.model_arguments import ModelArguments, load_model, with_yarn
from ..loading.native import DEFAULT_SAMPLING, is_native_checkpoint, load_native_checkpoint, own_sampling
from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.devices import default_device_type, refuse_unused_gpu
from ..runtime.errors import UserError
from ..runtime.names import is_gguf
from ..runtime.parser import RecipeParser
from ..tokenizer.control_tokens import set_stop_tokens
from ..tokenizer.pretrained import load_tokenizer
from .engine import Engine, LlamaCppEngine
from .llama_cpp import NUM_SEQUENCES, LlamaCppModel
from .terminal_chat import is_base_model


# What the settings of the sampling do.
_SAMPLING = {
    "temperature": "divisor of the logits; 0 takes the most probable token",
    "top_p": "sample from the likeliest tokens with this probability in all",
    "top_k": "sample from this many of the likeliest tokens",
    "repetition_penalty": "above 1, tokens repeat less often",
}
# Values of `--think`. With `None`, the chat template decides.
THINK = {"on": True, "off": False, None: None}


def add_model_flags(parser: RecipeParser) -> None:
    """Add the flags that choose the model, and whether it reasons."""
    parser.add_argument("--model_name_or_path", help="directory or Hub id; by default the newest run in out/")
    parser.add_argument(
        "--think", choices=("on", "off"), help="reason before answering; by default the chat template decides"
    )
    parser.add_argument("--use_cpu", action="store_true", help="do not use the accelerator")
    parser.add_argument(
        "--engine",
        choices=("llama.cpp", "transformers"),
        help="what generates; by default llama.cpp on a CPU for every model that it can run",
    )
    # As the other recipes have it.
    metadata = ModelArguments.__dataclass_fields__["inference_rope_scaling"].metadata
    parser.add_argument("--inference_rope_scaling", metavar="LENGTH:FACTOR", **metadata)


def make_inference_parser(description: str) -> RecipeParser:
    """Return a parser of the flags that choose the model and how it samples."""
    parser = RecipeParser(description=description)
    add_model_flags(parser)
    parser.add_argument("--max_new_tokens", type=int, default=512, help="limit of one answer")
    parser.add_argument(
        "--raw",
        action=argparse.BooleanOptionalAction,
        help="continue the text instead of answering; by default only with base models",
    )
    for name, value in DEFAULT_SAMPLING.items():
        text = f"{_SAMPLING[name]}; by default the model's own, or {value:g}"
        parser.add_argument(f"--{name}", type=type(value), help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    return parser


def load_for_inference(
    args: argparse.Namespace, *, num_sequences: int = 1
) -> tuple[PreTrainedModel | LlamaCppModel, PreTrainedTokenizerFast]:
    """
    Return the model, which gives `num_sequences` answers at once, and the tokenizer that the flags name, and seed the
    sampling. Complete `model_name_or_path`, the newest run by default, `raw`, which is on by default for base models,
    and the settings of the sampling. Turn `think` into a boolean or `None`.
    """
    if not args.use_cpu:
        refuse_unused_gpu("--use_cpu")
    args.model_name_or_path = name = args.model_name_or_path or find_newest_run(with_adapters=True)
    tokenizer = load_tokenizer(name)
    # load_model also converts MiniMind's own checkpoints and applies adapters.
    model_args = ModelArguments(model_name_or_path=name, inference_rope_scaling=args.inference_rope_scaling)
    model = load_model(model_args, tokenizer).eval()
    # The loader leaves the model on the CPU, because a trainer would move it.
    if torch.accelerator.is_available() and not args.use_cpu:
        model.to(torch.accelerator.current_accelerator())
    for setting, value in (DEFAULT_SAMPLING | own_sampling(model.generation_config)).items():
        if vars(args)[setting] is None:
            setattr(args, setting, value)
    args.think = THINK[args.think]
    args.raw = is_base_model(name, model, tokenizer) if args.raw is None else args.raw
    answering = with_engine(model, args.engine, num_sequences=num_sequences)
    set_seed(args.seed)
    return answering, tokenizer


def with_engine(model: Any, engine: str | None, *, num_sequences: int = 1) -> Any:
    """
    Return the model in llama.cpp if `engine` says so, or by default if it is on a CPU and llama.cpp can run it. It
    gives `num_sequences` answers at once.

    Raises:
        `UserError`: if `engine` is `"llama.cpp"`, and it cannot run the model.
    """
    if engine == "transformers" or engine is None and model.device.type != "cpu":
        return model
    try:
        model = merge_adapter(model) if is_adapted(model) else model
        answering = LlamaCppModel(model, num_sequences=num_sequences)
    except (UserError, OSError) as error:
        if engine is not None:
            raise
        print(f"transformers generates, which is slower: {error}", file=sys.stderr)
        return model
    room, positions = answering.config.max_position_embeddings, model.config.max_position_embeddings
    if room < positions:
        advice = "--engine transformers has all."
        print(f"llama.cpp has room for {room:,} of {positions:,} positions; {advice}", file=sys.stderr)
    return answering


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the sampling, as [`~inference.terminal_chat.settle_sampling`] takes them."""
    return {name: vars(args)[name] for name in ("max_new_tokens", *DEFAULT_SAMPLING)}


def load_engine(
    name: str,
    *,
    use_cpu: bool = False,
    dtype: str = "auto",
    rope_scaling: str | None = None,
    engine: str | None = None,
) -> tuple[Engine, PreTrainedTokenizerFast]:
    """
    Return the engine of a server, and the tokenizer of its model.

    Args:
        name (`str`): a directory or Hub id, of an adapter, too; a GGUF file; a model of the package index.
        use_cpu (`bool`): do not use the accelerator.
        dtype (`str`): a dtype of torch; `auto` takes that of the weights.
        rope_scaling (`str`, *optional*): as for [`~loading.model_arguments.with_yarn`].
        engine (`str`, *optional*): as for [`with_engine`].
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"--dtype {dtype} is no dtype of torch. Use auto, float32, float16 or bfloat16.")
    tokenizer = load_tokenizer(name)
    loading: dict[str, Any] = {"dtype": dtype, "device_map": "cpu" if use_cpu else "auto"}
    if adapter_base(name) is not None or is_gguf(name):
        arguments = ModelArguments(model_name_or_path=name, inference_rope_scaling=rope_scaling)
        adapted: Any = load_model(arguments, tokenizer).eval()
        model = merge_adapter(adapted) if is_adapted(adapted) else adapted
        model.to(default_device_type(use_cpu=use_cpu), model.dtype if dtype == "auto" else getattr(torch, dtype))
    elif is_native_checkpoint(name):
        if rope_scaling is not None:
            loading["config"] = with_yarn(MiniMindConfig.from_pretrained(name), rope_scaling)
        model = load_native_checkpoint(name, **loading)
    else:
        # Other architectures of transformers, which this package cannot convert.
        model = AutoModelForCausalLM.from_pretrained(name, **loading)
    set_stop_tokens(model, tokenizer)
    if isinstance(model, MiniMindForCausalLM):
        model = with_engine(model.eval(), engine, num_sequences=NUM_SEQUENCES)
    return (LlamaCppEngine if isinstance(model, LlamaCppModel) else Engine)(model), tokenizer
