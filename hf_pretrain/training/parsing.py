"""
The parser of a recipe's flags: a command line and an optional YAML file become instances of dataclasses.

`--preset` and `--config file.yaml` give defaults, and the command line wins. A key or flag that no dataclass knows is
an error. A value `{bf16: A, float32: B}` depends on the precision of the run.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..loading.model_arguments import choose_preset
from ..model.presets import PRESETS
from ..runtime.command_line import announce
from ..runtime.devices import default_device_type, has_bfloat16_units
from ..runtime.errors import UserError
from ..runtime.parser import RecipeParser, read_config
from ..runtime.stages import STAGES
from .budgets import BUDGETS


# A size that is typed wins over a size that fits the memory.
_MICRO_BATCH_FLAGS = {"per_device_train_batch_size", "gradient_accumulation_steps"}


def parse_args(*dataclass_types: type, stage: str = "pretrain", argv: list[str] | None = None) -> tuple[Any, ...]:
    """
    Parse the command line into instances of dataclasses.

    Args:
        dataclass_types (`type`): the dataclasses whose fields are the flags.
        stage (`str`): without `--config`, the file `recipes/<preset>/<stage>.yaml` beside the running recipe gives
            defaults, as [`read_defaults`] reads it. The preset is `--preset`, or the default for this machine.
        argv (`list[str]`, *optional*): the words after the program's name; `sys.argv[1:]` by default.

    Returns:
        `tuple`: an instance of each dataclass.

    Raises:
        `UserError`: for an unknown YAML key or flag (the message names the nearest one), for a value of the
            wrong type, and for a value that a dataclass refuses.
    """
    # The recipe's own docstring has examples.
    parser = RecipeParser(dataclass_types, description=sys.modules["__main__"].__doc__)
    argv = sys.argv[1:] if argv is None else argv
    if stage == "evaluate" and argv and not argv[0].startswith("-"):
        # `hf-pretrain evaluate out/mine --against out/other`
        argv = ["--model_name_or_path", *argv]
    argv = parser.translate(argv, stage)
    # Parse twice: the first pass finds the YAML file. The second reads its values and then the command line, which
    # wins because it comes last.
    typed, _ = parser.parse_known_args(argv)
    defaults: list[str] = []
    if "config" in typed:
        preset = choose_preset(typed.model_preset, use_cpu=typed.use_cpu)
        config = _find_config(typed, preset, stage)
        given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in argv if word.startswith("--")}
        if config:
            own = typed.dataset_name if "dataset_name" in given else []
            content = read_defaults(Path(config), has_own_data=bool(own))
            if "columns" in given:
                # The user's names of columns fit the user's files alone.
                content.pop("eval_dataset_name", None)
            if given & {"max_steps", "num_train_epochs", *BUDGETS}:
                # The command line says when the run ends. Passes are over all data, not over what those steps need.
                others = {"max_steps", "train_fraction"} if "num_train_epochs" in given else set()
                for name in others.union(BUDGETS) - given:
                    content.pop(name, None)
            is_plain = "dataset_weights" not in given and vars(typed).get("dataset_kind") != "text"
            name, share = content.pop("mixed_in", None) or ("", 0.0)
            if name and own and is_plain and (len(own) > 1 or "columns" in given):
                announce(f"leaving out {Path(name).name}: there are several names in --dataset_name, or --columns")
            elif name and own and is_plain:
                argv = [*argv, "--dataset_name", *own, name, "--dataset_weights", f"{1 - share}", f"{share}"]
            defaults = [*_yaml_to_argv(parser, config, content, typed), "--config", config]
        if "fit_micro_batch" in typed:
            is_typed = bool(_MICRO_BATCH_FLAGS & given)
            defaults.insert(len(defaults) if is_typed else 0, f"--fit_micro_batch={not is_typed}")
        argv = argv if typed.model_preset != "auto" else [*argv, "--preset", preset]
    return parser.parse(defaults + argv)


def _find_config(typed: Namespace, preset: str, stage: str) -> str | None:
    """Return the YAML file that gives the defaults of a run: `--config`, or that of the preset. `None`: no file."""
    # A preset's rates and steps do not fit an arbitrary checkpoint, unless the user names the preset.
    if typed.config or (typed.model_name_or_path and not typed.model_preset):
        return typed.config
    path = Path(sys.argv[0]).parent / preset / f"{stage}.yaml"
    if stage == "evaluate" and typed.model_preset and not path.is_file():
        # Evaluate the pretrained model of the preset on its validation set.
        path = path.with_name("pretrain.yaml")
    return str(path) if path.is_file() or _base_of(path).is_file() else None


def _base_of(path: Path) -> Path:
    return path.parent.parent / "base" / path.name


def read_defaults(path: Path, *, has_own_data: bool = False) -> dict[str, Any]:
    """
    Return the values of a YAML file. Those below its key `example` are left out for other data than its own, and its
    key `mixed_in` names a dataset to mix into them, and its share. A preset needs no file for a stage: without
    `recipes/<preset>/<stage>.yaml`, the values are those of `recipes/base/<stage>.yaml`, with the models and
    directories of this preset.
    """
    preset, stage, base = path.parent.name, path.stem, _base_of(path)
    if path.is_file() or preset not in PRESETS or not base.is_file():
        content = read_config(path)
        example = content.pop("example", {})
        return content if has_own_data else content | example
    start = STAGES[stage].start
    model = {"model_name_or_path": f"out/{start}-{preset}"} if start else {"preset": preset}
    shared = {name: value for name, value in read_config(base).items() if name != "example"}
    return shared | model | {"output_dir": f"out/{stage}-{preset}"}


def _yaml_to_argv(parser: RecipeParser, path: str, content: dict[str, Any], typed: Namespace) -> list[str]:
    """
    Return the values of a YAML file as command-line words, so that the parser checks them like typed ones. `typed`
    holds the arguments of the real command line.
    """
    argv = []
    known_keys = {*vars(typed), "preset"}
    if unknown := [str(key) for key in content if key not in known_keys]:
        raise UserError(
            f"{path}: unknown key {', '.join(f'`{key}`{parser.hint(key, known_keys)}' for key in unknown)}."
        )
    for key, value in content.items():
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


def _trains_in_bf16(typed: Namespace, content: dict[str, Any]) -> bool:
    """Return whether a run trains in bf16, by the command line, the YAML file or the device, in this order."""
    if typed.fp16 or content.get("fp16"):
        return False
    asked = content.get("bf16") if typed.bf16 is None else typed.bf16
    if asked is not None:
        return bool(asked)
    return has_bfloat16_units(default_device_type(use_cpu=typed.use_cpu or content.get("use_cpu", False)))
