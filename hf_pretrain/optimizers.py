"""
Learning-rate schedules: transformers' own, completed where they need a number that only the run knows.
"""

import math
from typing import Any


def complete_schedule_kwargs(name: str, kwargs: dict[str, Any] | None, *, num_training_steps: int) -> dict[str, Any]:
    """
    Fills in what `warmup_stable_decay` and `cosine_with_min_lr` cannot do without.

    Args:
        name (`str`): of a transformers schedule.
        kwargs (`dict`, *optional*): `lr_scheduler_kwargs` as the user gave them; what they hold stays.
        num_training_steps (`int`): optimizer steps of the whole run.

    Returns:
        `dict`: for WSD, a decay over the last 20 % of the steps; for both, a floor of 10 % of the peak.
    """
    kwargs = dict(kwargs or {})
    if name == "warmup_stable_decay":
        kwargs.setdefault("num_decay_steps", math.ceil(0.2 * num_training_steps))
        kwargs.setdefault("min_lr_ratio", 0.1)
    elif name == "cosine_with_min_lr" and not kwargs.keys() & {"min_lr", "min_lr_rate"}:
        kwargs["min_lr_rate"] = 0.1
    return kwargs
