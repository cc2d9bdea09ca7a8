"""Flags and model of the commands that answer: `recipes/chat.py`, `recipes/generate.py` and `recipes/serve.py`."""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

from ..checkpoints.directory import find_newest_run
from ..loading.adapters import adapter_base, is_adapted, merge_adapter
from ..loading.model import load_any_model, load_model
from ..loading.model_arguments import ModelArguments
from ..loading.native import DEFAULT_SAMPLING, own_sampling
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.devices import default_device_type, refuse_unused_gpu
from ..runtime.errors import UserError
from ..runtime.flags import flag, same_flag
from ..tokenizer.control_tokens import set_stop_tokens
from ..tokenizer.pretrained import load_tokenizer
from .engine import Engine, LlamaCppEngine
from .llama_cpp import NUM_SEQUENCES, LlamaCppModel
from .terminal_chat import is_base_model


# Values of `--think`. With `None`, the chat template decides.
THINK = {"on": True, "off": False, None: None}


@dataclass
class AnsweringArguments:
    """Model, and what runs it."""

    model_name_or_path: str | None = flag(
        None, "Directory or Hub id; by default the newest run in out/.", names="model"
    )
    think: str | None = flag(
        None, "Reason before answering; by default the chat template decides.", choices=("on", "off")
    )
    use_cpu: bool = flag(False, "Do not use the accelerator.")
    engine: str | None = flag(
        None,
        "What generates; by default llama.cpp on a CPU for every model that it can run.",
        choices=("llama.cpp", "transformers"),
    )
    inference_rope_scaling: str | None = same_flag(ModelArguments, "inference_rope_scaling")


def _sampling_flag(name: str, text: str, **facts: Any) -> Any:
    return flag(None, f"{text}; by default the model's own, or {DEFAULT_SAMPLING[name]:g}.", **facts)


@dataclass
class SamplingArguments(AnsweringArguments):
    """Model, and how it answers."""

    max_new_tokens: int = flag(512, "Limit of one answer.", bounds="at least 1")
    raw: bool = flag(
        None,
        "Continue the text instead of answering; by default only with base models.",
        action=argparse.BooleanOptionalAction,
    )
    temperature: float | None = _sampling_flag("temperature", "Divisor of the logits; 0 takes the most probable token")
    top_p: float | None = _sampling_flag("top_p", "Sample from the likeliest tokens with this probability in all")
    top_k: int | None = _sampling_flag("top_k", "Sample from this many of the likeliest tokens")
    repetition_penalty: float | None = _sampling_flag("repetition_penalty", "Above 1, tokens repeat less often")
    seed: int = flag(0, "Seed of the sampling.")


def load_for_inference(
    args: SamplingArguments, *, num_sequences: int = 1
) -> tuple[PreTrainedModel | LlamaCppModel, PreTrainedTokenizerFast]:
    """
    Return the model, which gives `num_sequences` answers at once, and the tokenizer that the flags name, and seed the
    sampling. Complete `model_name_or_path`, the newest run by default, `raw`, which is on by default for base models,
    and the settings of the sampling.
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


def sampling_options(args: SamplingArguments) -> dict[str, Any]:
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
        rope_scaling (`str`, *optional*): as for [`~loading.model.with_yarn`].
        engine (`str`, *optional*): as for [`with_engine`].
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"--dtype {dtype} is no dtype of torch. Use auto, float32, float16 or bfloat16.")
    tokenizer = load_tokenizer(name)
    model: Any
    if adapter_base(name) is not None:
        arguments = ModelArguments(model_name_or_path=name, inference_rope_scaling=rope_scaling)
        model = merge_adapter(load_model(arguments, tokenizer))
        model.to(default_device_type(use_cpu=use_cpu), model.dtype if dtype == "auto" else getattr(torch, dtype))
    else:
        loading = {"dtype": dtype, "device_map": "cpu" if use_cpu else "auto"}
        model = load_any_model(name, inference_rope_scaling=rope_scaling, **loading)
    set_stop_tokens(model, tokenizer)
    if isinstance(model, MiniMindForCausalLM):
        model = with_engine(model.eval(), engine, num_sequences=NUM_SEQUENCES)
    elif engine == "llama.cpp":
        raise UserError(f"--engine llama.cpp: {name} cannot be converted. Leave the flag out.")
    return (LlamaCppEngine if isinstance(model, LlamaCppModel) else Engine)(model), tokenizer
