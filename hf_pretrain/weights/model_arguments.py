"""Command-line arguments that name the model, and the functions that build or load it."""

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from ..model.config_fields import check_fields
from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..model.presets import PRESETS
from ..tokenizer.loading import check_tokenizer
from .adapters import adapter_base, load_adapter
from .loading import is_native_checkpoint, load_native_checkpoint, load_upstream


logger = logging.get_logger(__name__)


def default_preset() -> str:
    """Return the default preset, which suits the hardware of this machine."""
    return "minimind2-small" if torch.cuda.is_available() else "tiny"


class _FieldLoader(yaml.SafeLoader):
    """YAML loader that reads 1e6 as a number. PyYAML reads it as text, because it has no decimal point."""


_FieldLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_fields(text: str, *, flag: str, also_known: Collection[str] = ()) -> dict[str, Any]:
    """
    Parse config fields as users type them: `name=value, name={key: value}`, with values in YAML.

    Args:
        text (`str`): what the user typed.
        flag (`str`): the flag, for messages.
        also_known (`Collection[str]`): names that are accepted besides the fields of the config.

    Raises:
        `ValueError`: if the text has another form, a name is unknown, or a value has the wrong type.
    """
    try:
        # `a=1, b={c: 2}` becomes `{a: 1, b: {c: 2}}`, a mapping in YAML's flow style.
        fields = yaml.load("{" + text.replace("=", ": ") + "}", Loader=_FieldLoader)
    except yaml.YAMLError:
        fields = {text: None}
    known = {f.name for f in dataclasses.fields(MiniMindConfig)} | MiniMindConfig.attribute_map.keys()
    for name, value in fields.items():
        if value is None:
            raise ValueError(f"{flag}: {name!r} is not of the form name=value.")
        if name not in known and name not in also_known:
            raise ValueError(f"{flag}: {name!r} is not a field of MiniMindConfig.")
    check_fields(fields)
    return fields


@dataclass
class ModelArguments:
    """Which model to train."""

    model_preset: str | None = field(
        default=None,
        metadata={"help": f"One of {', '.join(PRESETS)}. By default minimind2-small on a GPU, tiny on a CPU."},
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Start from the weights of this directory or Hub id instead of from scratch."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Config fields on top of the preset: num_hidden_layers=4,hidden_size=128"}
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Tokenizer directory or Hub id. By default the run trains one on the data and saves it."},
    )
    vocab_size: int = field(default=6400, metadata={"help": "Entries of the tokenizer that the run trains."})
    attn_implementation: str = field(
        default="auto", metadata={"help": "auto (packed), eager, sdpa or flex_attention."}
    )

    def __post_init__(self):
        if self.model_preset is not None and self.model_preset not in PRESETS:
            raise ValueError(f"--model_preset {self.model_preset} is unknown; use one of {', '.join(PRESETS)}.")

    @property
    def base_model(self) -> str:
        """Return `model_name_or_path`, for a stage that needs it. Raise `ValueError` if it is not given."""
        if self.model_name_or_path is None:
            raise ValueError(
                "This stage starts from a trained model: pass --model_name_or_path with a directory or Hub id."
            )
        return self.model_name_or_path

    @property
    def overrides(self) -> dict[str, Any]:
        """Return `config_overrides` as a dictionary. Raise `ValueError` as [`parse_fields`] does."""
        return parse_fields(self.config_overrides or "", flag="--config_overrides")

    def load_config(self, tokenizer: PreTrainedTokenizerBase) -> MiniMindConfig:
        """Return the config that these arguments describe, with the special tokens of `tokenizer`."""
        try:
            if self.model_name_or_path:
                return MiniMindConfig.from_pretrained(self.model_name_or_path, **self.overrides)
            fields = dict(PRESETS[self.model_preset or default_preset()])
            fields |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
            if self.tokenizer_name_or_path is None:
                fields["vocab_size"] = self.vocab_size
            return MiniMindConfig(**fields | self.overrides)
        except StrictDataclassError as error:
            raise ValueError(f"--config_overrides {self.config_overrides}: {error}") from error

    def load_model(
        self, tokenizer: PreTrainedTokenizerBase, *, distributed: DistributedConfig | None = None
    ) -> MiniMindForCausalLM:
        """
        Return the model that these arguments describe, in float32, sharded as `distributed` says.

        Weights that MiniMind itself wrote are converted first ([`~weights.loading.load_upstream`]); an adapter is
        loaded onto its base model.

        Raises:
            `ValueError`: for an unknown config field or a value of the wrong type, a tokenizer whose ids exceed the
                vocabulary, or a checkpoint that cannot be converted.
        """
        base = adapter_base(self.model_name_or_path)
        if base is not None:
            # The base model may itself be an adapter's or another program's checkpoint.
            model = dataclasses.replace(self, model_name_or_path=base).load_model(tokenizer, distributed=distributed)
            return load_adapter(model, self.model_name_or_path)
        upstream = None
        if self.model_name_or_path and not is_native_checkpoint(self.model_name_or_path):
            logger.warning(f"{self.model_name_or_path} was not written by hf_pretrain: converting it.")
            upstream = load_upstream(self.model_name_or_path, config=self.overrides)
            try:
                config = MiniMindConfig.from_dict(upstream.config.to_dict() | self.overrides)
            except StrictDataclassError as error:
                raise ValueError(f"--config_overrides {self.config_overrides}: {error}") from error
        else:
            config = self.load_config(tokenizer)
        check_tokenizer(tokenizer, vocab_size=config.vocab_size, name=self.tokenizer_name_or_path or "the trained one")

        attn_implementation = "packed" if self.attn_implementation == "auto" else self.attn_implementation
        loading: dict[str, Any] = {
            "config": config,
            "attn_implementation": attn_implementation,
            "dtype": torch.float32,
        }
        if config.num_experts and not torch.accelerator.is_available():
            # NOTE: on a CPU, torch's grouped matrix product takes 1.5 times as long as a loop over the experts.
            loading["experts_implementation"] = config._experts_implementation = "eager"
        if distributed is not None:
            if distributed.ep_size > 1 and not config.num_experts:
                raise ValueError(f"--ep_size {distributed.ep_size}: the model has no experts. Use --fsdp_size.")
            loading["distributed_config"] = distributed
        # from_pretrained shards the converted weights, which are in memory already.
        if upstream is not None:
            return MiniMindForCausalLM.from_pretrained(None, state_dict=upstream.state_dict(), **loading)
        if self.model_name_or_path:
            return load_native_checkpoint(self.model_name_or_path, **loading)
        # Every rank builds the whole model, under ZeRO-3 too, so that the initial weights are bit-identical under
        # every launcher.
        config._attn_implementation = attn_implementation
        model = MiniMindForCausalLM(config)
        if distributed is not None:
            return MiniMindForCausalLM.from_pretrained(None, state_dict=model.state_dict(), **loading)
        return model


__all__ = ["ModelArguments", "default_preset", "parse_fields"]
