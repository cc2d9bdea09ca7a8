"""The loader of models: of a new one, or of the native directory of any that a name names."""

import dataclasses
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..model.presets import PRESETS
from ..runtime.devices import default_device_type
from ..runtime.errors import UserError, as_user_errors
from ..runtime.names import may_be_checkpoint
from ..tokenizer.control_tokens import set_stop_tokens
from ..tokenizer.pretrained import check_tokenizer, find_tokenizer
from .adapters import adapter_base, load_adapter
from .model_arguments import MINIMIND_YARN, ModelArguments, choose_preset
from .native import load_native_checkpoint, localize, name_base


logger = logging.get_logger(__name__)
# YaRN as MiniMind computes it.
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}


def with_yarn(config: MiniMindConfig, text: str) -> MiniMindConfig:
    """
    Return a copy of a config with YaRN as MiniMind computes it, and the model's own theta.

    Args:
        config ([`MiniMindConfig`]): the config.
        text (`str`): `length:factor`, such as `2048:16`.
    """
    try:
        length, factor = text.split(":")
        numbers = {"original_max_position_embeddings": int(length), "factor": float(factor)}
        yarn = _YARN | numbers | {"rope_theta": config.rope_parameters["rope_theta"]}
        return MiniMindConfig.from_dict(config.to_dict() | {"rope_parameters": yarn})
    except ValueError as error:
        raise UserError(f"--inference_rope_scaling {text} is not of the form {MINIMIND_YARN}: {error}") from error


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, directory: str | None) -> MiniMindConfig:
    """Return the config that these arguments describe, of the native `directory` or a new one for `tokenizer`."""
    with as_user_errors():
        if directory:
            # `from_pretrained` would set the overrides after the config has checked its fields.
            fields, _ = MiniMindConfig.get_config_dict(directory)
            return MiniMindConfig.from_dict(fields | args.overrides)
        fields = dict(PRESETS[choose_preset(args.model_preset)])
        # The tokenizer defines the special tokens; a preset does not.
        fields |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
        fields["eos_token_id"] = tokenizer.eos_token_id
        if args.tokenizer_name_or_path is None:
            fields["vocab_size"] = args.vocab_size
        return MiniMindConfig(**fields | args.overrides)


@as_user_errors()
def load_model(
    args: ModelArguments, tokenizer: PreTrainedTokenizerBase, *, distributed: DistributedConfig | None = None
) -> MiniMindForCausalLM:
    """
    Return the model that these arguments describe, in float32, sharded as `distributed` describes.

    Another program's weights, such as MiniMind's own, are read from their native copy. An adapter is loaded onto its
    base model. The model stops where the tokenizer's template ends a turn.

    Raises:
        `UserError`: for an unknown config field or a value of the wrong type, a tokenizer whose ids exceed the
            vocabulary, or a checkpoint that cannot be converted.
    """
    base = adapter_base(args.model_name_or_path)
    if base is not None:
        if args.add_tokens:
            raise UserError("--add_tokens trains new rows, which an adapter freezes. Merge it: `hf-pretrain convert`.")
        # The base model may itself be an adapter's or another program's checkpoint.
        model = load_model(dataclasses.replace(args, model_name_or_path=base), tokenizer, distributed=distributed)
        return load_adapter(model, args.model_name_or_path)
    directory = args.model_name_or_path and localize(args.model_name_or_path, config=args.overrides)
    config = load_config(args, tokenizer, directory)
    if args.inference_rope_scaling:
        config = with_yarn(config, args.inference_rope_scaling)
    needed = 1 + max(tokenizer.get_vocab().values())
    vocab_size = max(needed, config.vocab_size) if args.add_tokens else config.vocab_size
    check_tokenizer(tokenizer, vocab_size=vocab_size, name=tokenizer.name_or_path or "of this run")

    if config.router_aux_loss_coef and config.router_aux_loss_level == "batch":
        # DPO loads a second model, its reference.
        logger.warning_once(
            "The router loss of this model is one over each micro-batch (router_aux_loss_level=batch, as in "
            "minimind-3): its size changes what is learnt. Add router_aux_loss_level=sequence to --config_overrides."
        )
    attn_implementation = "packed" if args.attn_implementation == "auto" else args.attn_implementation
    loading: dict[str, Any] = {"config": config, "attn_implementation": attn_implementation, "dtype": torch.float32}
    if config.num_experts and default_device_type(use_cpu=False) in ("cpu", "mps"):
        # NOTE: on a CPU, torch's grouped matrix product takes 1.5 times as long as a loop over the experts. For Apple
        # GPUs torch has no kernel of it.
        # `from_pretrained` takes an argument, the constructor below reads the config.
        loading["experts_implementation"] = config._experts_implementation = "eager"
    if distributed is not None:
        if distributed.ep_size > 1 and not config.num_experts:
            raise UserError(f"--ep_size {distributed.ep_size}: the model has no experts. Use --fsdp_size.")
        loading["distributed_config"] = distributed
    if directory:
        model = load_native_checkpoint(directory, name=args.model_name_or_path, **loading)
    else:
        # Every rank builds the whole model, under ZeRO-3 too, so that the initial weights are bit-identical under
        # every launcher. The constructor reads the attention implementation from the config, not from an argument.
        config._attn_implementation, config.vocab_size = attn_implementation, vocab_size
        model = MiniMindForCausalLM(config)
        if distributed is not None:
            # `from_pretrained` shards weights that are already in memory.
            generation_config = model.generation_config
            model = MiniMindForCausalLM.from_pretrained(None, state_dict=model.state_dict(), **loading)
            model.generation_config = generation_config
            name_base(model, "", half_split=False)
    if args.add_tokens and args.model_name_or_path:
        _resize(model, needed=needed, own=find_tokenizer(args.tokenizer_name(None)))
    set_stop_tokens(model, tokenizer)
    return model


@as_user_errors()
def load_any_model(name: str, *, inference_rope_scaling: str | None = None, **loading: Any) -> PreTrainedModel:
    """
    Load a model of any name but an adapter's. What this package cannot convert stays a model of transformers.

    Args:
        name (`str`): a directory, Hub id, GGUF file or model of the package index.
        inference_rope_scaling (`str`, *optional*): as for [`with_yarn`].
        **loading: for `from_pretrained`.
    """
    try:
        directory = localize(name)
    except UserError as error:
        if not may_be_checkpoint(name) or inference_rope_scaling is not None:
            raise
        logger.warning(f"{name} stays a model of transformers, because it cannot be converted: {error}")
        # NOTE: without a value for `trust_remote_code`, transformers asks on stdin, and a batch job cannot answer.
        return AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, **loading)
    if inference_rope_scaling is not None:
        loading["config"] = with_yarn(MiniMindConfig.from_pretrained(directory), inference_rope_scaling)
    return load_native_checkpoint(directory, **loading)


def _resize(model: MiniMindForCausalLM, *, needed: int, own: PreTrainedTokenizerFast | None) -> None:
    """Make room for the `needed` ids of a tokenizer that has more tokens than the model's `own`."""
    size = model.config.vocab_size
    known = size if own is None else 1 + max(own.get_vocab().values())
    if known < min(needed, size):
        # Nobody has trained the rows above the model's own tokenizer, which all Qwen3 models have.
        model.resize_token_embeddings(known)
    if model.config.vocab_size < needed:
        # The new rows begin at the mean of the old ones.
        model.resize_token_embeddings(max(needed, size))
