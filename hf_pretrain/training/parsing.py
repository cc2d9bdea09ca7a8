"""
The parser of a recipe's flags: a command line and an optional YAML file become instances of dataclasses.

`--config file.yaml` gives defaults, and the command line wins. A key or flag that no dataclass knows is an error. A
value `{bf16: A, float32: B}` depends on the precision of the run.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ..runtime.devices import default_device_type, has_bfloat16_units
from ..runtime.errors import UserError, as_user_errors
from ..runtime.names import hint
from ..runtime.parser import RecipeParser, read_config
from ..weights.models import default_preset
from .minimind_flags import translate_minimind


# A size that is typed wins over a size that fits the memory.
_MICRO_BATCH_FLAGS = {"per_device_train_batch_size", "gradient_accumulation_steps"}


def _yaml_to_argv(path: str, known_keys: list[str], typed: Any) -> list[str]:
    """
    Return a YAML file as command-line words, so that the parser checks its values like typed ones. `typed` holds the
    arguments of the real command line.
    """
    argv = []
    content = read_config(path)
    for key, value in content.items():
        if key not in known_keys:
            raise UserError(f"{path}: unknown key `{key}`{hint(str(key), known_keys)}.")
        if isinstance(value, dict) and value.keys() & {"bf16", "float32"}:
            if value.keys() != {"bf16", "float32"}:
                raise UserError(f"{path}: `{key}` depends on the precision and must have the keys bf16 and float32.")
            value = value["bf16" if _trains_in_bf16(typed, content) else "float32"]
        # `--key=value` also works for values that begin with a dash, such as `max_steps: -1`. A key without a value
        # keeps the default.
        if isinstance(value, list):
            argv += [f"--{key}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return argv


def _trains_in_bf16(typed: Any, content: dict[str, Any]) -> bool:
    """Return whether a run trains in bf16, by the command line, the YAML file or the device, in this order."""
    if typed.fp16 or content.get("fp16"):
        return False
    asked = content.get("bf16") if typed.bf16 is None else typed.bf16
    if asked is not None:
        return bool(asked)
    return has_bfloat16_units(default_device_type(use_cpu=typed.use_cpu or content.get("use_cpu", False)))


def parse_args(*dataclass_types: type, stage: str = "pretrain", argv: list[str] | None = None) -> tuple[Any, ...]:
    """
    Parse the command line into instances of dataclasses.

    Args:
        dataclass_types (`type`): the dataclasses whose fields are the flags.
        stage (`str`): without `--config`, the file `recipes/<preset>/<stage>.yaml` beside the running recipe gives
            defaults. The preset is `--model_preset`, or the default for this machine.
        argv (`list[str]`, *optional*): the words after the program's name; `sys.argv[1:]` by default.

    Returns:
        `tuple`: an instance of each dataclass.

    Raises:
        `UserError`: for an unknown YAML key or flag (the message names the nearest one), for a value of the
            wrong type, and for a value that a dataclass refuses.
    """
    argv = translate_minimind(sys.argv[1:] if argv is None else argv, stage)
    # The recipe's own docstring has examples.
    parser = RecipeParser(dataclass_types, description=sys.modules["__main__"].__doc__)

    known_keys = [field.name for cls in dataclass_types for field in dataclasses.fields(cls) if field.init]
    defaults: list[str] = []
    if "config" in known_keys:
        # Parse twice: the first pass finds the YAML file. The second reads its values and then the command line, which
        # wins because it comes last.
        known, _ = parser.parse_known_args(argv)
        config = known.config or _default_config(known, stage)
        if config:
            defaults = [*_yaml_to_argv(config, known_keys, known), "--config", config]
        if _MICRO_BATCH_FLAGS & {word.partition("=")[0].lstrip("-").replace("-", "_") for word in argv}:
            defaults.append("--fit_micro_batch=false")
    namespace = parser.parse_args(defaults + argv)
    # transformers and TRL refuse values here, too.
    with as_user_errors():
        return parser.parse_dict(vars(namespace), allow_extra_keys=False)


def _default_config(known: Any, stage: str) -> str | None:
    """Return the YAML file of the preset in the repository of the running recipe; `None` if there is none."""
    # A preset's rates and steps do not fit an arbitrary checkpoint.
    if known.model_name_or_path:
        return None
    path = Path(sys.argv[0]).parent / (known.model_preset or default_preset()) / f"{stage}.yaml"
    return str(path) if path.is_file() else None
