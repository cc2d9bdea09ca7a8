"""Results of the default runs of presets, recorded in `recipes/<preset>/expected.json`."""

import json
from pathlib import Path
from typing import Any

from .runs import Run


EXPECTED_NAME = "expected.json"
# Arguments that users change to train another model, on other data or with another loss. A run with another value does
# not show the recorded results.
DECISIVE = (
    *("model_preset", "model_name_or_path", "config_overrides", "use_peft", "max_length", "train_fraction"),
    *("dataset_name", "dataset_kind", "dataset_weights", "learning_rate", "optim_preset"),
    *("algorithm", "beta", "loss_type", "rewards", "num_generations"),
    *("teacher_name_or_path", "temperature", "ce_weight", "kl"),
)


def find_expected(run: Run) -> dict[str, Any] | None:
    """
    Return the recorded results of the default run with the same YAML file, number of steps, rows per step and
    `DECISIVE` arguments; `None` if there are none. The results hold `hardware`, `seconds`, `steps`, `rows_per_step`,
    `arguments`, `metrics`, and `curves`, which are lists of pairs of tokens and value.
    """
    config = run.arguments.get("config")
    path = Path(str(config)).with_name(EXPECTED_NAME)
    # A relative path is relative to the directory in which the run was started.
    directory = run.launches[-1].get("directory") if run.launches else None
    if config is None or directory is None:
        return None
    path = Path(directory) / path
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        found = recorded[Path(str(config)).stem]
        # The learning rate of a run with another number of steps decays elsewhere, and so does its loss.
        is_default = found["steps"] in (run.arguments.get("max_steps"), run.launches[-1].get("steps"))
        is_default &= run.launches[-1].get("rows_per_step") == found["rows_per_step"]
        is_default &= all(run.arguments.get(name) == value for name, value in found["arguments"].items())
        return found if is_default and isinstance(found["curves"], dict) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # There is no such file, or it is another file of the user's.
        return None


__all__ = ["DECISIVE", "EXPECTED_NAME", "find_expected"]
