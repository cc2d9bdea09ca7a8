"""Command-line arguments that name the model, and how the model is built or loaded from them."""

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
    """The preset that this machine can train in a sitting."""
    return "minimind2-small" if torch.cuda.is_available() else "tiny"


class _FieldLoader(yaml.SafeLoader):
    """YAML in which 1e6 is a number: for PyYAML it is text, because it has no point."""


_FieldLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_fields(text: str, *, flag: str, also_known: Collection[str] = ()) -> dict[str, Any]:
    """
    Config fields as they are typed: `name=value, name={key: value}`, the values in YAML. Raises `ValueError`, naming
    `flag`, for what is not of that form, or neither a field of the config nor `also_known`; and for values of a wrong type.
    """
    try:
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
        default=None, metadata={"help": "Start from this checkpoint directory or Hub id instead of from scratch."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Config fields on top of the preset: num_hidden_layers=4,hidden_size=128"}
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Tokenizer directory or Hub id. Without it, one is trained on the data and kept with the run."
        },
    )
    vocab_size: int = field(default=6400, metadata={"help": "Entries of a tokenizer that is trained here."})
    attn_implementation: str = field(
        default="auto", metadata={"help": "auto (packed), eager, sdpa or flex_attention."}
    )

    def __post_init__(self):
        if self.model_preset is not None and self.model_preset not in PRESETS:
            raise ValueError(f"--model_preset {self.model_preset} is unknown; use one of {', '.join(PRESETS)}.")

    @property
    def base_model(self) -> str:
        """`model_name_or_path`, for a stage that cannot do without; raises `ValueError` if it is not given."""
        if self.model_name_or_path is None:
            raise ValueError("This stage goes on from a model: pass --model_name_or_path with a directory or Hub id.")
        return self.model_name_or_path

    @property
    def overrides(self) -> dict[str, Any]:
        """`config_overrides` as a dictionary; raises `ValueError` as [`parse_fields`] does."""
        return parse_fields(self.config_overrides or "", flag="--config_overrides")

    def load_config(self, tokenizer: PreTrainedTokenizerBase) -> MiniMindConfig:
        """The config that these arguments ask for, with the special tokens of `tokenizer`."""
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
        The model that these arguments ask for, in float32, sharded as `distributed` says. Weights that MiniMind
        itself wrote are converted on the way ([`~weights.loading.load_upstream`]); an adapter is put on its base model.

        Raises:
            `ValueError`: for an unknown config field or a value of the wrong type, a tokenizer whose ids exceed the
                vocabulary, or a checkpoint that cannot be converted.
        """
        base = adapter_base(self.model_name_or_path)
        if base is not None:
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
            # NOTE: on a CPU, torch's grouped product takes half as long again as a loop over the experts.
            loading["experts_implementation"] = config._experts_implementation = "eager"
        if distributed is not None:
            if distributed.ep_size > 1 and not config.num_experts:
                raise ValueError(f"--ep_size {distributed.ep_size}: the model has no experts. Use --fsdp_size.")
            loading["distributed_config"] = distributed
        if upstream is not None:
            return MiniMindForCausalLM.from_pretrained(None, state_dict=upstream.state_dict(), **loading)
        if self.model_name_or_path:
            return load_native_checkpoint(self.model_name_or_path, **loading)
        # Built whole on every rank, also under ZeRO-3: the first weights are then the same bits under every launcher.
        config._attn_implementation = attn_implementation
        model = MiniMindForCausalLM(config)
        if distributed is not None:
            return MiniMindForCausalLM.from_pretrained(None, state_dict=model.state_dict(), **loading)
        return model


__all__ = ["ModelArguments", "default_preset", "parse_fields"]
