"""
Let a resumed run continue in the same run of its tracker (`--report_to`), and send samples to the trackers.

A tracker knows a run by an id, which `run.json` keeps. Each launch passes it on: to Trackio as the name of the run, to
SwanLab as an argument, and to the others in the environment variables that they read.
"""

import contextlib
import io
import os
import uuid
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback
from transformers.utils import logging

from ..reports.runs import read_launches, read_run
from ..runtime.command_line import is_quiet
from ..runtime.errors import UserError
from .arguments import LMTrainingArguments
from .run_record import add_to_record


logger = logging.get_logger(__name__)

# SwanLab's ids have this length.
_ID_LENGTH = 21
_NAMES = {TensorBoardCallback: "tensorboard", TrackioCallback: "trackio", MLflowCallback: "mlflow"}
# The environment variables that the current run of this process has set.
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
    if "mlflow" in args.report_to:
        import mlflow

        # An evaluation after the last step of an earlier run of this process has begun that tracked run again.
        if (active := mlflow.active_run()) is not None and active.info.run_id == _passed.get("MLFLOW_RUN_ID"):
            mlflow.end_run()
    _remove_passed()
    launches = read_launches(args.output_dir) if checkpoint else []
    earlier = {name: value for launch in launches for name, value in launch.items() if value}
    tracking_id = earlier.get("tracking_id") or uuid.uuid4().hex[:_ID_LENGTH]
    if args.run_name is None:
        args.run_name = f"{Path(args.output_dir).absolute().name}-{tracking_id[:6]}"
    variables: dict[str, str] = {}
    for tracker in ("WANDB", "SWANLAB"):
        variables |= {f"{tracker}_RUN_ID": tracking_id, f"{tracker}_RESUME": "allow"}
    if "mlflow_run_id" in earlier:
        # MLflow refuses to change the arguments of a run, such as `resume_from_checkpoint`.
        variables |= {"MLFLOW_RUN_ID": earlier["mlflow_run_id"], "MLFLOW_MAX_LOG_PARAMS": "0"}
    _pass(variables)
    return tracking_id


def _pass(variables: dict[str, str]) -> None:
    """Set environment variables. A user's own values stay."""
    for name, value in variables.items():
        if os.environ.get(name) in (None, _passed.get(name)):
            os.environ[name] = _passed[name] = value


def _remove_passed(prefix: str = "") -> None:
    """Remove the environment variables of a tracker, or of all of them, that a run of this process has set."""
    for name in [name for name in _passed if name.startswith(prefix)]:
        if _passed.pop(name) == os.environ.get(name):
            del os.environ[name]


class Trackers(TrainerCallback):
    """
    What the trackers of a run need beyond their own callbacks.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        callbacks (`list[TrainerCallback]`): the callbacks of the trainer.
        is_resumed (`bool`): whether the run resumes from a checkpoint.
    """

    def __init__(self, args: LMTrainingArguments, callbacks: list[TrainerCallback], *, is_resumed: bool):
        self._names = args.report_to if args.process_index == 0 else []
        self._logged = {name: _find_logged(name, args) if is_resumed else set() for name in self._names}
        self._tensorboard: TensorBoardCallback | None = None
        for callback in callbacks:
            name = _NAMES.get(type(callback))
            if self._logged.get(name):
                _skip(callback, self._logged[name])
            if isinstance(callback, TensorBoardCallback):
                self._tensorboard = callback
                # One directory per run, instead of one per launch.
                if callback.logging_dir is None and args.run_name:
                    callback.logging_dir = str(Path(args.output_dir, "runs", args.run_name))
            if isinstance(callback, TrackioCallback) and is_quiet():
                _hush(callback, f"Tracked by Trackio; `trackio show --project {args.project}` opens the dashboard.")
        if "swanlab" in self._names:
            import swanlab

            # NOTE: transformers 5.23 asks SwanLab 0.10 for the active run, which raises if there is none.
            if not swanlab.has_run():
                names = {"id": os.environ["SWANLAB_RUN_ID"], "resume": os.environ["SWANLAB_RESUME"]}
                swanlab.init(name=args.run_name, project=os.environ.get("SWANLAB_PROJECT"), **names)

    def on_train_begin(self, args, state, control, **kwargs):
        if "mlflow" in self._names:
            import mlflow

            self._mlflow_run_id = mlflow.active_run().info.run_id
            add_to_record(args, mlflow_run_id=self._mlflow_run_id)

    def on_train_end(self, args, state, control, **kwargs):
        if "mlflow" in self._names:
            # NOTE: MLflow has ended the run and would begin another one for an evaluation after the last step.
            _pass({"MLFLOW_RUN_ID": self._mlflow_run_id})

    def log_samples(self, step: int, samples: list[tuple[str, str]]) -> None:
        """
        Send generated texts to the trackers.

        Args:
            step (`int`): the step after which the model generated them.
            samples (`list[tuple[str, str]]`): prompts and texts.
        """
        if not samples:
            return
        new = {name for name in self._names if ("samples", step) not in self._logged[name]}
        text = "\n\n".join(f"**{prompt}**\n\n{answer}" for prompt, answer in samples)
        if "tensorboard" in new and self._tensorboard.tb_writer is not None:
            self._tensorboard.tb_writer.add_text("samples", text, step)
            # The history holds the samples at once, and a resumed run leaves out what the history holds.
            self._tensorboard.tb_writer.flush()
        if "trackio" in new:
            import trackio

            trackio.log({"samples": trackio.Markdown(text), "train/global_step": step})
        if "wandb" in new:
            import wandb

            table = wandb.Table(columns=["prompt", "text"], data=[list(sample) for sample in samples])
            wandb.log({"samples": table, "train/global_step": step})
        if "swanlab" in new:
            import swanlab

            swanlab.log({"samples": [swanlab.Text(answer, caption=prompt) for prompt, answer in samples]}, step=step)
        if "mlflow" in new:
            import mlflow

            mlflow.log_text(text, f"samples/step-{step}.md")


def _find_logged(tracker: str, args: LMTrainingArguments) -> set[tuple[str, int]]:
    """
    Return what earlier launches have logged: kinds (`loss`, `eval_loss`, `samples`) and steps.

    Trackers send figures in the background, so a killed launch may have lost some. The history of the run is right
    only for TensorBoard, whose files are written at once. Weights & Biases and SwanLab get repeated steps again.
    """
    if tracker == "tensorboard":
        entries = read_run(args.output_dir).entries
        found = {(kind, entry["step"]) for entry in entries for kind in ("loss", "eval_loss") if kind in entry}
        return found | {("samples", entry["step"]) for entry in entries if entry["kind"] == "samples"}
    if tracker == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        kinds = {"train/loss": "loss", "eval/loss": "eval_loss", "samples": "samples"}
        logs = SQLiteStorage.get_logs(args.project, args.run_name)
        return {(kind, int(log["train/global_step"])) for log in logs for key, kind in kinds.items() if key in log}
    if tracker == "mlflow" and "MLFLOW_RUN_ID" in os.environ:
        import mlflow

        client, run_id = mlflow.MlflowClient(), os.environ["MLFLOW_RUN_ID"]
        try:
            if client.get_run(run_id).info.lifecycle_stage == "deleted":
                raise mlflow.MlflowException("it was deleted")
        except mlflow.MlflowException as error:
            lost = f"The tracked run {run_id} of MLflow at {mlflow.get_tracking_uri()} cannot be continued ({error})."
            if run_id != _passed.get("MLFLOW_RUN_ID"):
                raise UserError(f"{lost} Correct or unset MLFLOW_RUN_ID.") from error
            logger.warning(
                f"{lost} A new tracked run begins. To continue the old one, restore it or correct "
                f"MLFLOW_TRACKING_URI, and resume again with MLFLOW_RUN_ID={run_id}."
            )
            _remove_passed("MLFLOW")
            return set()
        metrics = [client.get_metric_history(run_id, key) for key in ("loss", "eval_loss")]
        return {(metric.key, metric.step) for history in metrics for metric in history}
    return set()


def _skip(callback: TrainerCallback, logged: set[tuple[str, int]]) -> None:
    """Let a tracker's callback leave out what earlier launches have logged."""
    log = callback.on_log

    def on_log(args, state, control, logs=None, **kwargs):
        if not {(name, state.global_step) for name in logs} & logged:
            log(args, state, control, logs=logs, **kwargs)

    callback.on_log = on_log


def _hush(callback: TrackioCallback, line: str) -> None:
    """Let Trackio begin and end a run without its own lines, and print `line` once."""
    setup, end = callback.setup, callback.on_train_end
    has_begun = False

    def quiet_setup(args, state, model, **kwargs):
        nonlocal has_begun
        with contextlib.redirect_stdout(io.StringIO()):
            setup(args, state, model, **kwargs)
        if state.is_world_process_zero and not has_begun:
            print(line, flush=True)
        has_begun = True

    def quiet_end(*args, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()):
            end(*args, **kwargs)

    callback.setup, callback.on_train_end = quiet_setup, quiet_end


__all__ = ["Trackers", "continue_tracking"]
