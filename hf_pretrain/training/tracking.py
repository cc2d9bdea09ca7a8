"""The name of a run in its trackers (`--report_to`)."""

import os
import uuid
from pathlib import Path

from ..reports.runs import read_launches
from .arguments import LMTrainingArguments


def name_tracked_run(args: LMTrainingArguments, *, checkpoint: str | None) -> None:
    """
    Set `run_name` if it is not given. A resumed launch takes the name of the launch before it, by which Trackio and
    Weights & Biases continue the same run. Only the main process calls this function, before the run is recorded.
    """
    if args.run_name is None:
        launches = read_launches(args.output_dir) if checkpoint else []
        names = [launch["arguments"]["run_name"] for launch in launches if "arguments" in launch]
        args.run_name = names[-1] if names else f"{Path(args.output_dir).absolute().name}-{uuid.uuid4().hex[:6]}"
    # Weights & Biases continues runs by their ids. The user's own variables stay.
    os.environ.setdefault("WANDB_RUN_ID", args.run_name)
    os.environ.setdefault("WANDB_RESUME", "allow")


__all__ = ["name_tracked_run"]
