"""Command-line arguments that name the model. [`~loading.model.load_model`] loads it."""

import dataclasses
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from transformers import PreTrainedTokenizerFast

from ..model.configuration_minimind import MiniMindConfig, check_fields
from ..model.presets import PRESETS
from ..runtime.errors import UserError, as_user_errors
from ..runtime.flags import check_flags, content_flag, flag, ignored_flag
from ..runtime.names import hint
from ..runtime.parser import ConfigLoader
from ..tokenizer.pretrained import add_words, load_tokenizer


# The length and the factor of MiniMind's `--inference_rope_scaling`.
MINIMIND_YARN = "2048:16"


def choose_preset(name: str | None, *, use_cpu: bool = False) -> str:
    """Return the preset of this name. `None` and `auto` name the preset that suits this machine."""
    if name not in (None, "auto"):
        return name
    return "minimind2-small" if torch.cuda.is_available() and not use_cpu else "tiny"


class _FieldLoader(ConfigLoader):
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
        also_known (`Collection[str]`): further names to accept, in addition to the fields of the config.

    Raises:
        `UserError`: if the text has another form, a name is unknown, or a value has the wrong type.
    """
    try:
        # `a=1, b={c: 2}` becomes `{a: 1, b: {c: 2}}`, a mapping in YAML's flow style.
        fields = yaml.load("{" + text.replace("=", ": ") + "}", Loader=_FieldLoader)
    except yaml.YAMLError:
        raise UserError(f"{flag} {text!r} is not of the form name=value,name=value with each name once.") from None
    known = {*(f.name for f in dataclasses.fields(MiniMindConfig)), *MiniMindConfig.attribute_map, *also_known}
    for name, value in fields.items():
        if value is None:
            raise UserError(f"{flag}: {name!r} is not of the form name=value.")
        if name not in known:
            raise UserError(f"{flag}: {name!r} is not a field of MiniMindConfig{hint(str(name), known)}.")
    with as_user_errors():
        check_fields(fields)
    return fields


@dataclass
class ModelArguments:
    """Model (a preset or a checkpoint), tokenizer and attention implementation."""

    model_preset: str | None = content_flag(
        None,
        "The model and its YAML file. By default auto: minimind2-small on an NVIDIA GPU, tiny elsewhere.",
        aliases=["--preset"],
        choices=("auto", *PRESETS),
    )
    model_name_or_path: str | None = content_flag(
        None,
        "Start from the weights of this directory, Hub id or GGUF file, or embedded:smollm2.",
        names="model",
        form="What to train: Model to start from",
    )
    config_overrides: str | None = content_flag(
        None, "Config fields that override the preset: num_hidden_layers=4,hidden_size=128"
    )
    tokenizer_name_or_path: str | None = content_flag(
        None, "Tokenizer directory or Hub id. By default the run trains one on the data and saves it.", names="model"
    )
    add_tokens: str | None = content_flag(
        None, "Text file with a token per line, which the run adds to the tokenizer and the model."
    )
    vocab_size: int = content_flag(6400, "Number of entries of the tokenizer that the run trains.")
    attn_implementation: str = ignored_flag(
        "auto",
        "auto (the same as packed), packed, eager, sdpa or flex_attention.",
        choices=("auto", "packed", "eager", "sdpa", "flex_attention"),
    )
    inference_rope_scaling: str | None = flag(
        None,
        f"Extend the positions with YaRN: trained length and factor, by default {MINIMIND_YARN}.",
        nargs="?",
        const=MINIMIND_YARN,
    )

    def __post_init__(self):
        check_flags(self)
        # Name a mistake now, not after the preparation of the data.
        _ = self.overrides
        # A shell expands `~` on the command line, but not in a YAML file.
        self.model_name_or_path = self.model_name_or_path and os.path.expanduser(self.model_name_or_path)
        self.tokenizer_name_or_path = self.tokenizer_name_or_path and os.path.expanduser(self.tokenizer_name_or_path)

    @property
    def base_model(self) -> str:
        """Return `model_name_or_path`, for a stage that needs it. Raise `UserError` if it is not given."""
        if self.model_name_or_path is None:
            raise UserError("This stage starts from a trained model: pass --model_name_or_path, a path or Hub id.")
        return self.model_name_or_path

    def tokenizer_name(self, checkpoint: str | None) -> str | None:
        """Return the directory or Hub id of the tokenizer; `None` if the run has to train one."""
        return self.tokenizer_name_or_path or checkpoint or self.model_name_or_path

    def load_tokenizer(self, checkpoint: str | None = None, *, other: str | None = None) -> PreTrainedTokenizerFast:
        """
        Return the tokenizer that a flag names, or else that of a checkpoint to resume from, of the model, or of the
        model `other`, with the tokens of `add_tokens`.
        """
        tokenizer = load_tokenizer(self.tokenizer_name(checkpoint) or other or self.base_model)
        if self.add_tokens:
            add_words(tokenizer, self.add_tokens)
        return tokenizer

    @property
    def overrides(self) -> dict[str, Any]:
        """Return `config_overrides` as a dictionary. Raise `UserError` in the cases of [`parse_fields`]."""
        return parse_fields(self.config_overrides or "", flag="--config_overrides")
