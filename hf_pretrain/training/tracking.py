"""
Let a resumed run continue in the same run of its tracker (`--report_to`).

A tracker knows a run by an id. `run.json` keeps it, and each launch passes it on: to Trackio as the name of the run, to
the others in the environment variables that they read.
"""

import os
import uuid
from pathlib import Path

from ..reports.runs import read_launches
from .arguments import LMTrainingArguments


# SwanLab's ids have this length.
_ID_LENGTH = 21


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
    directory = Path(args.output_dir)
    if args.run_name is None:
        args.run_name = f"{directory.absolute().name}-{tracking_id[:6]}"
    # A user's own values come first.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(directory / "runs" / args.run_name))
    for tracker in ("WANDB", "SWANLAB"):
        os.environ.setdefault(f"{tracker}_RUN_ID", tracking_id)
        os.environ.setdefault(f"{tracker}_RESUME", "allow")
    return tracking_id


__all__ = ["continue_tracking"]
