"""
The training stages, in the order in which a project needs them.

The command reads this file without importing the package, so it imports only the standard library.
"""

from typing import NamedTuple


class Stage(NamedTuple):
    """
    A training stage, which `recipes/<stage>.py` runs. The recipe's docstring describes it.

    Args:
        start (`str`, *optional*): the stage whose model it trains, by default; `None` for random weights.
        following (`str`, *optional*): the usual next stage.
        extra (`str`, *optional*): the extra of pyproject.toml that it needs.
    """

    start: str | None
    following: str | None = None
    extra: str | None = None


STAGES = {
    "pretrain": Stage(None, following="sft"),
    "sft": Stage("pretrain", following="dpo"),
    "dpo": Stage("sft", following="grpo", extra="trl"),
    "reward": Stage("sft", extra="trl"),
    "distill": Stage("sft", following="dpo"),
    "grpo": Stage("sft", extra="trl"),
}
