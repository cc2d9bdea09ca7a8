"""Build or load the model that the command-line arguments describe."""

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..model.presets import PRESETS
from ..runtime.errors import UserError, as_user_errors
from ..tokenizer.loading import check_tokenizer
from .adapters import adapter_base, load_adapter
from .loading import is_native_checkpoint, load_native_checkpoint, load_upstream
from .model_arguments import ModelArguments, default_preset


logger = logging.get_logger(__name__)


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> MiniMindConfig:
    """Return the config that these arguments describe, with the special tokens of `tokenizer`."""
    with as_user_errors():
        if args.model_name_or_path:
            return MiniMindConfig.from_pretrained(args.model_name_or_path, **args.overrides)
        fields = dict(PRESETS[args.model_preset or default_preset()])
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

    If another program, such as MiniMind itself, wrote the weights, [`~weights.loading.load_upstream`] converts them
    first. An adapter is loaded onto its base model.

    Raises:
        `ValueError`: for an unknown config field or a value of the wrong type, a tokenizer whose ids exceed the
            vocabulary, or a checkpoint that cannot be converted.
    """
    base = adapter_base(args.model_name_or_path)
    if base is not None:
        # The base model may itself be an adapter's or another program's checkpoint.
        model = load_model(dataclasses.replace(args, model_name_or_path=base), tokenizer, distributed=distributed)
        return load_adapter(model, args.model_name_or_path)
    upstream = None
    if args.model_name_or_path and not is_native_checkpoint(args.model_name_or_path):
        logger.warning(f"{args.model_name_or_path} was not written by hf_pretrain: converting it.")
        upstream = load_upstream(args.model_name_or_path, config=args.overrides)
        config = MiniMindConfig.from_dict(upstream.config.to_dict() | args.overrides)
    else:
        config = load_config(args, tokenizer)
    check_tokenizer(tokenizer, vocab_size=config.vocab_size, name=args.tokenizer_name_or_path or "the trained one")

    _warn_about_router_loss(config)
    attn_implementation = "packed" if args.attn_implementation == "auto" else args.attn_implementation
    loading: dict[str, Any] = {"config": config, "attn_implementation": attn_implementation, "dtype": torch.float32}
    if config.num_experts and not torch.accelerator.is_available():
        # NOTE: on a CPU, torch's grouped matrix product takes 1.5 times as long as a loop over the experts.
        # `from_pretrained` takes an argument, the constructor below reads the config.
        loading["experts_implementation"] = config._experts_implementation = "eager"
    if distributed is not None:
        if distributed.ep_size > 1 and not config.num_experts:
            raise UserError(f"--ep_size {distributed.ep_size}: the model has no experts. Use --fsdp_size.")
        loading["distributed_config"] = distributed
    # `from_pretrained` shards the converted weights, which are already in memory.
    if upstream is not None:
        return MiniMindForCausalLM.from_pretrained(None, state_dict=upstream.state_dict(), **loading)
    if args.model_name_or_path:
        return load_native_checkpoint(args.model_name_or_path, **loading)
    # Every rank builds the whole model, under ZeRO-3 too, so that the initial weights are bit-identical under every
    # launcher. The constructor reads the attention implementation from the config, not from an argument.
    config._attn_implementation = attn_implementation
    model = MiniMindForCausalLM(config)
    if distributed is not None:
        return MiniMindForCausalLM.from_pretrained(None, state_dict=model.state_dict(), **loading)
    return model


def _warn_about_router_loss(config: MiniMindConfig) -> None:
    """Warn about a router loss that depends on the batch size."""
    if config.router_aux_loss_coef and config.router_aux_loss_level == "batch":
        # DPO loads a second model, its reference.
        logger.warning_once(
            "The router loss of this model is one over all tokens of a micro-batch (router_aux_loss_level=batch, as "
            "in minimind-3), so batch size, accumulation and number of processes change what is learnt. Add "
            "router_aux_loss_level=sequence to --config_overrides for one per document, which they do not change."
        )
