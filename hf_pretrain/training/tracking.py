"""
Let a resumed run continue in the same run of its tracker (`--report_to`).

A tracker knows a run by an id. `run.json` keeps it, and each launch passes it on: to Trackio as the name of the run,
to the others in the environment variables that they read.
"""

import os
import uuid
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from ..reports.runs import read_launches
from .arguments import LMTrainingArguments


# SwanLab's ids have this length.
_ID_LENGTH = 21
# The environment variables that the last run of this process has set.
_passed: dict[str, str] = {}


def continue_tracking(args: LMTrainingArguments, *, checkpoint: str | None) -> str:
    """
    Choose the id of the tracked run and pass it to the trackers. Only the main process calls this function.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments. `run_name` is set if it is not given.
        checkpoint (`str`, *optional*): the checkpoint that the run resumes from.

    Returns:
        `str`: the id, for `run.json`.
    """
    earlier = [launch["tracking_id"] for launch in read_launches(args.output_dir) if launch.get("tracking_id")]
    tracking_id = earlier[-1] if checkpoint and earlier else uuid.uuid4().hex[:_ID_LENGTH]
    if args.run_name is None:
        args.run_name = f"{Path(args.output_dir).absolute().name}-{tracking_id[:6]}"
    variables: dict[str, str] = {}
    for tracker in ("WANDB", "SWANLAB"):
        variables |= {f"{tracker}_RUN_ID": tracking_id, f"{tracker}_RESUME": "allow"}
    for name, value in variables.items():
        # A user's own value stays; the value of an earlier run in this process does not.
        if os.environ.get(name) in (None, _passed.get(name)):
            os.environ[name] = _passed[name] = value
    return tracking_id


def direct_tensorboard(callbacks: list[TrainerCallback], args: LMTrainingArguments) -> None:
    """Let TensorBoard write into a directory with the name of the run, instead of one per launch."""
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None and args.run_name:
            callback.logging_dir = str(Path(args.output_dir, "runs", args.run_name))


__all__ = ["continue_tracking", "direct_tensorboard"]
