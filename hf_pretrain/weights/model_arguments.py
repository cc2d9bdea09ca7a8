"""Command-line arguments that name the model. `weights/models.py` builds it."""

import dataclasses
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from ..model.configuration_minimind import MiniMindConfig, check_fields
from ..model.presets import PRESETS
from ..runtime.config_files import ConfigLoader
from ..runtime.errors import UserError, as_user_errors
from ..runtime.names import check_choices, hint


# Stands for the width of a model whose config is not at hand; the width of minimind2-small.
UNKNOWN_WIDTH = 512


def default_preset() -> str:
    """Return the preset that suits the hardware of this machine."""
    return "minimind2-small" if torch.cuda.is_available() else "tiny"


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
        `ValueError`: if the text has another form, a name is unknown, or a value has the wrong type.
    """
    try:
        # `a=1, b={c: 2}` becomes `{a: 1, b: {c: 2}}`, a mapping in YAML's flow style.
        fields = yaml.load("{" + text.replace("=", ": ") + "}", Loader=_FieldLoader)
    except yaml.YAMLError:
        raise UserError(f"{flag} {text!r} is not of the form name=value,name=value with each name once.") from None
    known = {f.name for f in dataclasses.fields(MiniMindConfig)} | MiniMindConfig.attribute_map.keys()
    for name, value in fields.items():
        if value is None:
            raise UserError(f"{flag}: {name!r} is not of the form name=value.")
        if name not in known and name not in also_known:
            nearest = hint(str(name), {*known, *also_known})
            raise UserError(f"{flag}: {name!r} is not a field of MiniMindConfig{nearest}.")
    with as_user_errors():
        check_fields(fields)
    return fields


@dataclass
class ModelArguments:
    """Model (a preset or a checkpoint), tokenizer and attention implementation."""

    model_preset: str | None = field(
        default=None,
        metadata={
            "help": f"One of {', '.join(PRESETS)}. By default minimind2-small on a GPU, tiny on a CPU.",
            "choices": tuple(PRESETS),
        },
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Start from the weights of this directory or Hub id instead of random weights."},
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Config fields that override the preset: num_hidden_layers=4,hidden_size=128"}
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Tokenizer directory or Hub id. By default the run trains one on the data and saves it."},
    )
    vocab_size: int = field(default=6400, metadata={"help": "Number of entries of the tokenizer that the run trains."})
    attn_implementation: str = field(
        default="auto",
        metadata={
            "help": "auto (the same as packed), packed, eager, sdpa or flex_attention.",
            "choices": ("auto", "packed", "eager", "sdpa", "flex_attention"),
        },
    )

    def __post_init__(self):
        check_choices(self)
        # A shell expands `~` on the command line, but not in a YAML file.
        self.model_name_or_path = self.model_name_or_path and os.path.expanduser(self.model_name_or_path)
        self.tokenizer_name_or_path = self.tokenizer_name_or_path and os.path.expanduser(self.tokenizer_name_or_path)

    @property
    def base_model(self) -> str:
        """Return `model_name_or_path`, for a stage that needs it. Raise `ValueError` if it is not given."""
        if self.model_name_or_path is None:
            raise UserError(
                "This stage starts from a trained model: pass --model_name_or_path with a directory or Hub id."
            )
        return self.model_name_or_path

    @property
    def hidden_size(self) -> int:
        """Width of a model from random weights. With `model_name_or_path`, it is `UNKNOWN_WIDTH`."""
        if self.model_name_or_path:
            return UNKNOWN_WIDTH
        overrides = self.overrides
        preset = PRESETS[self.model_preset or default_preset()]
        return overrides.get("hidden_size") or overrides.get("dim") or preset["hidden_size"]

    @property
    def overrides(self) -> dict[str, Any]:
        """Return `config_overrides` as a dictionary. Raise `ValueError` in the cases of [`parse_fields`]."""
        return parse_fields(self.config_overrides or "", flag="--config_overrides")
