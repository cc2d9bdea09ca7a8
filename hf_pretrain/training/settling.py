"""
The values of arguments that depend on the data or the model. Once a run's arguments are parsed and checked, no other
module assigns to one.

[`settle`] fixes them in a visible order, once data and model exist. Where a library must see another value for a
moment, the caller enters [`overriding`].
"""

import atexit
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from datasets import IterableDataset
from transformers import PreTrainedModel

from ..checkpoints.manifest import MANIFEST_NAME, read_manifest
from ..loading.adapters import base_model_of
from ..model.configuration_minimind import MiniMindConfig
from ..rows.collators import DataCollatorForPackedRows
from ..rows.row_source import is_stream
from ..run_directory.directory import now
from ..runtime.devices import can_compile, keep_freed_blocks
from ..runtime.errors import UserError
from ..runtime.ranks import on_main_process
from ..runtime.stages import STAGES
from .budgets import UNKNOWN_STEPS, token_budget
from .callbacks import AddedFigures
from .deepspeed_support import complete_deepspeed_config
from .launch import complete_fsdp_args
from .micro_batch import choose_micro_batch
from .training_arguments import LMTrainingArguments, default_learning_rate


if TYPE_CHECKING:
    from ..rows.preparation import PreparedData
    from .run import Run


class TrainerData(NamedTuple):
    """What [`settle`] reads of the data of a trainer without a recipe, named as in `PreparedData`."""

    train: Any
    eval: Any
    collator: Any
    num_tokens: int | None = None


@contextmanager
def overriding(args: LMTrainingArguments, **values: Any) -> Iterator[None]:
    """
    Let a library see other values of arguments within the block:

    | argument | where | why |
    |---|---|---|
    | `save_only_model` | Trainer's constructor | it refuses to save the optimizer of a sharded model, which we save |
    | `push_to_hub` | Trainer's constructor, `_save_checkpoint` | `HubPusher` creates the repository and pushes |
    | `output_dir` | `_save_checkpoint` | Trainer writes into `.saving/`, and `CheckpointWriter` publishes the files |
    | `eval_on_start` | `train` | a resumed run has evaluated before its first step |
    | `lr_scheduler_kwargs` | `create_scheduler` | transformers has no defaults for some schedules |
    | `dataloader_drop_last` | `_get_dataloader` | the flag is about training, not about evaluations |
    | `per_device_eval_batch_size` | `evaluation/against.py` | a batch of one row gives the sums of this row |
    | `beta`, `sync_ref_model` | constructors of TRL | TRL would load the reference model from a path |
    | `max_completion_length` | constructors of TRL | TRL knows one limit for a turn and for all turns |
    """
    before = {name: vars(args)[name] for name in values}
    args.__dict__.update(values)
    try:
        yield
    finally:
        args.__dict__.update(before)


def check_best_metric(run: "Run", data: "PreparedData") -> None:
    """Raise `UserError` for a figure that no evaluation would have. TRL's trainers and tasks have others."""
    best = (run.args.metric_for_best_model or "loss").removeprefix("eval_")
    known = ["loss", "perplexity", "bits_per_byte", *STAGES[run.facts.recipe].figures]
    if data.conversations is not None:
        known += ["distinct_2", "repeated_4grams", "ended_answers", "answer_tokens"]
    is_own = best in known or best.startswith(tuple(f"{name}_" for name in data.eval_sets if name))
    if run.args.has_masked_loss and not is_own and not any(isinstance(each, AddedFigures) for each in run.callbacks):
        raise UserError(f"--metric_for_best_model {best} is no figure of this run. It has {', '.join(known)}.")


def settle(run: "Run", data: "PreparedData | TrainerData", model: PreTrainedModel) -> None:
    """
    Fix the values of arguments that depend on the data and the model. All ranks must call this function.

    Args:
        run ([`~training.run.Run`]): the run.
        data ([`~rows.preparation.PreparedData`] or [`TrainerData`]): its data.
        model ([`~transformers.PreTrainedModel`]): the model, or an adapted one.

    Raises:
        `UserError`: for a budget of tokens without packed sequences, and for another FSDP version than 2.
    """
    args, config = run.args, base_model_of(model).config
    _settle_steps(args, data, config)
    _settle_micro_batch(run, data, model)
    if args.learning_rate is None:
        args.learning_rate = default_learning_rate(args.optim_preset, config.hidden_size)
    if args.deepspeed:
        complete_deepspeed_config(args)
    if is_stream(data.train):
        # Several workers would divide its files, and each would start again at the end of its own: small files would
        # repeat, and large ones would be left out.
        most = 0 if args.has_default_workers else 1
        args.dataloader_num_workers = min(args.dataloader_num_workers, most)
    if data.eval is None:
        # Our arguments evaluate by default, and Trainer refuses to evaluate without data. The last model is kept.
        args.eval_strategy, args.eval_on_start, args.load_best_model_at_end = "no", False, False
    if data.collator is not None:
        # The collators of packed sequences read columns that `forward` does not name, the trainer counts tokens once
        # per step, and accelerate would cut the lists of documents of a stream.
        args.remove_unused_columns, args.include_num_input_tokens_seen = False, "no"
        args.accelerator_config.dispatch_batches = False
    # NOTE: Trainer sets `config.use_cache` to this value, for the training pass, but the config is saved with the
    # model: all programs that load it would recompute the whole text for each token that they generate.
    args.use_cache = model.config.use_cache
    args.fsdp_plugin_args = complete_fsdp_args(args.fsdp_plugin_args)
    # Batches are copied from pinned memory while the GPU computes.
    args.accelerator_config.non_blocking = args.device.type == "cuda"
    # A run trains on without a compiler, and its record says so.
    args.compiles_layers = args.compiles_layers and can_compile(args.device, **args.compile_options)
    if args.device.type == "cpu":
        keep_freed_blocks()


def _settle_steps(args: LMTrainingArguments, data: "PreparedData | TrainerData", config: MiniMindConfig) -> None:
    """
    Replace epochs and steps by those of a budget. They end with the step that reaches the budget. Tokens count as in
    the log, without padding; for a stream, whose fill is unknown, each row counts in full.
    """
    if args.max_minutes is not None:
        # Trainer's number of steps shall not end the run.
        args.max_steps = UNKNOWN_STEPS
    tokens = token_budget(args, config)
    if tokens is None:
        return
    length = data.collator.max_length if isinstance(data.collator, DataCollatorForPackedRows) else None
    if data.num_tokens is not None:
        num_rows, share = len(data.train), 1.0
        if args.dataloader_drop_last:
            # A pass leaves out the rows that fill no step. Without a whole one, the trainer raises.
            share = 1 - num_rows % args.rows_per_step / num_rows or 1.0
        args.num_train_epochs, args.max_steps = tokens / (data.num_tokens * share), -1
    elif isinstance(data.train, IterableDataset) and length is not None:
        args.max_steps = math.ceil(tokens / (args.rows_per_step * length))
    else:
        raise UserError(
            "--max_tokens and --tokens_per_parameter need packed sequences that a recipe has counted. Pass "
            "--max_steps, --num_train_epochs or --max_minutes."
        )


def _settle_micro_batch(run: "Run", data: "PreparedData | TrainerData", model: PreTrainedModel) -> None:
    """Replace rows per micro-batch and their number by what fits into the GPUs, with the same rows per step."""
    args = run.args
    chosen = choose_micro_batch(run, model, data)
    if chosen is None:
        return
    size, accumulation, free = chosen
    args.per_device_train_batch_size, args.gradient_accumulation_steps = size, accumulation
    if "steps_per_generation" in vars(args):
        # The completions of a step are generated at once.
        args.steps_per_generation = accumulation

    def record() -> None:
        text = f"{size} rows per micro-batch, {accumulation} micro-batches per step and process"
        print(f"{text}, for {free / 2**30:.1f} GiB of free memory")
        run.directory.record(micro_batch={"rows": size, "accumulation": accumulation, "free_bytes": free})

    on_main_process(args, record)


def settle_dry_run(args: LMTrainingArguments) -> None:
    """
    Turn off saving, evaluation, pushes and trackers, and replace `output_dir` by a temporary directory. All ranks must
    call this function.
    """
    args.__dict__.update(save_strategy="no", eval_strategy="no", eval_on_start=False, load_best_model_at_end=False)
    args.__dict__.update(push_to_hub=False, report_to=[])
    args.output_dir = on_main_process(args, lambda: tempfile.mkdtemp(prefix="hf_pretrain-dry-run-"))
    # Another machine has no such directory yet.
    os.makedirs(args.output_dir, exist_ok=True)
    atexit.register(shutil.rmtree, args.output_dir, ignore_errors=True)


def settle_date(args: LMTrainingArguments, checkpoint: str | None) -> None:
    """
    Set the date that chat templates write to the start of the run, also when it resumes on another day. All ranks must
    call this function.
    """

    def find() -> str:
        run = read_manifest(checkpoint)["run"] if checkpoint and Path(checkpoint, MANIFEST_NAME).exists() else {}
        return run.get("contents", {}).get("date", {}).get("date") or now()

    args.date = on_main_process(args, find)


def settle_name(args: LMTrainingArguments, earlier: list[dict[str, Any]]) -> None:
    """
    Set `run_name` if it is not given. A resumed launch takes the name of the launch before it, by which Trackio and
    Weights & Biases continue the same run.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        earlier (`list[dict]`): the launches of the run before this one.
    """
    if args.run_name is None:
        new_name = f"{Path(args.output_dir).absolute().name}-{uuid.uuid4().hex[:6]}"
        # A launch that died before its training has recorded no arguments.
        names = [launch["arguments"]["run_name"] for launch in earlier if "arguments" in launch]
        args.run_name = names[-1] if names else new_name
    # Weights & Biases continues runs by their ids. The user's own variables stay.
    os.environ.setdefault("WANDB_RUN_ID", args.run_name)
    os.environ.setdefault("WANDB_RESUME", "allow")
