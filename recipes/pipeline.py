"""
Pretrain a model with its layers spread over processes: pipeline parallelism, alone or with data and tensor
parallelism, in a loop of its own instead of Trainer's.

    torchrun --standalone --nproc_per_node 2 recipes/pipeline.py --preset tiny --pp_size 2
    torchrun --standalone --nproc_per_node 8 recipes/pipeline.py --preset tiny --pp_size 2 --dp_size 2 --tp_size 2

Rows, losses, optimizers, schedules and checkpoints are those of `recipes/pretrain.py`: a run goes on from a checkpoint
of the other in both directions. It evaluates nothing during the run; `hf-pretrain evaluate` does so afterwards.
"""

import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

# What Ctrl-C does is set before other libraries are imported.
import hf_pretrain  # noqa: F401


# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import RandomSampler
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_pretrain.checkpoints.directory import checkpoint_path, rotate_checkpoints
from hf_pretrain.checkpoints.writer import CheckpointWriter, cast_files, checkpoint_bytes, write_model
from hf_pretrain.loading.adapters import AdapterArguments
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.model.modeling_minimind import MiniMindForCausalLM
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.rows.preparation import PreparedData, load_rows
from hf_pretrain.rows.row_source import PaddingRowCollator, is_stream, pad_rows
from hf_pretrain.run_directory.metrics import NATS
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.flags import ignored_flag
from hf_pretrain.runtime.ranks import leave_process_group, on_main_process
from hf_pretrain.tokenizer.training import load_or_train_tokenizer
from hf_pretrain.training.evaluation_arguments import EvalTaskArguments
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.pipeline import Pipeline, bubble_share
from hf_pretrain.training.pipeline_optimizer import PipelineOptimizer
from hf_pretrain.training.reporting import report
from hf_pretrain.training.resume_check import ADAPTIVE, check_resume, describe_run
from hf_pretrain.training.run import Run, begin_run, set_generation_defaults
from hf_pretrain.training.settling import settle
from hf_pretrain.training.step_loss import count_step
from hf_pretrain.training.stopping import end_nonfinite_run, end_stopped_run
from hf_pretrain.training.training_arguments import LMTrainingArguments, values_by_name


STATE_NAMES = (OPTIMIZER_NAME, SCHEDULER_NAME)
# Flags of pretraining that this loop does not read, and that would change the result.
UNREAD = (
    "fp16", "fp8", "deepspeed", "fsdp_size", "dp_replicate_size", "ep_size", "use_liger_kernel", "save_only_model",
    "gradient_checkpointing", "activation_checkpointing", "max_minutes", "early_stopping_patience", "skip_spikes",
    "load_best_model_at_end", "push_to_hub", "dry_run", "preview", "profile", "label_smoothing_factor",
    "neftune_noise_alpha", "dataloader_drop_last", "train_sampling_strategy",
)  # fmt: skip
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


@dataclass
class PipelineArguments(LMTrainingArguments):
    """Training arguments with the sizes of the mesh of processes."""

    pp_size: int = ignored_flag(1, "Spread the layers over this many processes.", bounds="at least 1")
    dp_size: int = ignored_flag(1, "Copies of the pipeline, which see different rows.", bounds="at least 1")
    pp_schedule: str = ignored_flag(
        "1f1b", "Order of the micro-batches: gpipe, 1f1b, or interleaved with two stages per process.",
        choices=tuple(SCHEDULES),
    )  # fmt: skip

    def __post_init__(self):
        defaults = {each.name: each.default for each in fields(self)}
        for name in UNREAD:
            if vars(self)[name] != defaults[name]:
                raise UserError(f"--{name} {vars(self)[name]} has no effect in a pipeline. Leave it out.")
        if self.lr_scheduler_type in ADAPTIVE:
            raise UserError(f"--lr_scheduler_type {self.lr_scheduler_type} evaluates, and a pipeline does not.")
        if self.save_strategy not in ("no", "steps"):
            raise UserError("A pipeline saves by steps. Pass --save_strategy steps or no.")
        self._settle_micro_batches()
        # transformers would split the model that it loads over all processes.
        sizes = self.mesh_sizes = self.pp_size, self.dp_size, self.tp_size
        self.tp_size = 1
        super().__post_init__()
        # The choice for older GPUs, whose loss scaling this loop does not have.
        self.fp16 = False
        if math.prod(sizes) != self.world_size or "RANK" not in os.environ:
            raise UserError(
                f"--pp_size {sizes[0]} x --dp_size {sizes[1]} x --tp_size {sizes[2]} needs {math.prod(sizes)} "
                f"processes, and {self.world_size} run. Launch with torchrun --standalone --nproc_per_node "
                f"{math.prod(sizes)} recipes/pipeline.py ..."
            )

    def _settle_micro_batches(self) -> None:
        """Cut the rows of a step into enough micro-batches, unless the user has named their size."""
        rows, enough = self.per_device_train_batch_size * self.gradient_accumulation_steps, 4 * self.pp_size
        if self.fit_micro_batch and self.gradient_accumulation_steps < enough and rows % enough == 0:
            self.per_device_train_batch_size, self.gradient_accumulation_steps = rows // enough, enough
        self.fit_micro_batch = False
        rest = self.gradient_accumulation_steps % self.pp_size if self.pp_schedule == "interleaved" else 0
        if self.gradient_accumulation_steps < self.pp_size or rest:
            raise UserError(
                f"--pp_size {self.pp_size} with --pp_schedule {self.pp_schedule} needs as many micro-batches or more, "
                f"interleaved a multiple, and --gradient_accumulation_steps is {self.gradient_accumulation_steps}."
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step: only the copies of the pipeline see different ones."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.dp_size


class Order:
    """The rows of each step, in the order of MaskedLossTrainer, as batches for one copy of the pipeline."""

    def __init__(self, rows: PreparedData, args: PipelineArguments, vocab_size: int, copy: int):
        seed = args.seed if args.data_seed is None else args.data_seed
        self.args, self.copy, self.collate = args, copy, PaddingRowCollator(rows.collator, vocab_size)
        options = {"seed": seed, "is_training": True}
        self.padded, make_sampler = pad_rows(rows.train, RandomSampler, args.rows_per_step, **options)
        self.sampler = make_sampler(rows.train)
        self.steps_per_epoch = len(self.sampler) // args.rows_per_step

    def batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield a batch with all micro-batches of this copy for each step, from `step` on, without an end."""
        for epoch in itertools.count(step // self.steps_per_epoch):
            self.padded.set_epoch(epoch)
            order, size = list(self.sampler), self.args.per_device_train_batch_size
            skipped = step % self.steps_per_epoch if epoch == step // self.steps_per_epoch else 0
            for start in range(skipped * self.args.rows_per_step, len(order), self.args.rows_per_step):
                # As accelerate's loaders do: micro-batch n of a copy is number n * copies + copy of the step.
                micro_batches = np.array(order[start : start + self.args.rows_per_step]).reshape(-1, size)
                own = micro_batches[self.copy :: self.args.dp_size].flatten().tolist()
                yield self.collate(self.padded.__getitems__(own))


ARGUMENTS = (ModelArguments, DataArguments, PipelineArguments)


def prepare(
    model_args: ModelArguments, data_args: DataArguments, args: PipelineArguments
) -> tuple[Run, PreparedData, MiniMindForCausalLM]:
    """Return the run, its rows and its model, as pretraining prepares them."""
    # A resume compares all arguments of pretraining.
    run = begin_run("pretrain", args, model_args, AdapterArguments(), data_args, EvalTaskArguments())
    is_named = model_args.tokenizer_name(run.checkpoint) or model_args.add_tokens
    train_tokenizer = partial(load_or_train_tokenizer, vocab_size=model_args.vocab_size)
    rows = load_rows(data_args, args, model_args.load_tokenizer(run.checkpoint) if is_named else train_tokenizer)
    if is_stream(rows.train):
        raise UserError("A pipeline reads no stream. Leave --streaming out.")
    source = model_args if run.checkpoint is None else replace(model_args, model_name_or_path=run.checkpoint)
    model = load_model(source, rows.tokenizer)
    run.facts.datasets, run.facts.data, run.facts.data_kind = rows.names, rows.report, rows.kind
    if model.config.dropout:
        raise UserError("A pipeline has no dropout. Pass --config_overrides dropout=0.")
    settle(run, rows, model)
    # torch's stages need batches of one shape.
    rows.collator.max_length = data_args.max_length
    return run, rows, model


def main(model_args: ModelArguments, data_args: DataArguments, args: PipelineArguments):
    run, rows, model = prepare(model_args, data_args, args)
    mesh = init_device_mesh(args.device.type, args.mesh_sizes, mesh_dim_names=("pp", "dp", "tp"))
    optimizer, per_rank = PipelineOptimizer(model, args), 2 if args.pp_schedule == "interleaved" else 1
    shape = (args.per_device_train_batch_size, data_args.max_length)
    pipeline = Pipeline(model, mesh, shape, per_rank, device=args.device)
    make_schedule = partial(SCHEDULES[args.pp_schedule], loss_fn=lambda loss, _: loss, scale_grads=False)
    schedule = make_schedule(pipeline.stages if per_rank > 1 else pipeline.stages[0], args.gradient_accumulation_steps)

    order = Order(rows, args, model.config.vocab_size, mesh["dp"].get_local_rank())
    num_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * order.steps_per_epoch)
    optimizer.build(pipeline, num_steps)
    saved = Saved(run, rows, pipeline, optimizer, num_steps, checkpoint_bytes(model, args))
    # The layers of other ranks are of no more use.
    del model
    first, seconds = saved.load(), 0.0
    with run.signals.listening():
        for batch in itertools.islice(order.batches(first), max(0, num_steps - first)):
            start = time.perf_counter()
            losses, num_tokens = take_step(pipeline, schedule, batch, args)
            seconds += time.perf_counter() - start
            norm, step = pipeline.clip_gradients(args.max_grad_norm), saved.state.global_step + 1
            if not math.isfinite(losses["loss"] + norm):
                end_nonfinite_run(saved.trainer, f"The loss is {losses['loss']}, the gradient's norm {norm}", step)
            optimizer.step()
            saved.count(losses, norm, num_tokens, epoch=step / order.steps_per_epoch)
            stopped = run.ranks.largest(run.signals.number)
            if stopped or saved.is_due():
                saved.write()
            if stopped:
                end_stopped_run(saved.trainer, stopped)
    saved.write_model()
    meter = describe_meter(pipeline, seconds, args, per_rank) if seconds else "The run had ended before"
    if args.process_index == 0:
        print(meter)
    report(saved.trainer, {}, [])
    leave_process_group()


def take_step(
    pipeline: Pipeline, schedule: Any, batch: dict[str, Any], args: PipelineArguments
) -> tuple[dict[str, float], int]:
    """
    Compute the gradients of a step, added up over the mesh, and return the parts of its loss and its number of tokens.
    All ranks call this function.
    """
    group = pipeline.mesh.get_group("dp")

    def add_up(sums: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        for each in sums:
            dist.all_reduce(each, group=group)
        return sums

    names = [name for name in ("input_ids", "position_ids", "labels", "loss_mask") if name in batch]
    batch = {name: batch[name].to(args.device) for name in names}
    totals = count_step([batch], device=args.device, add_up=add_up)
    for module in pipeline.modules:
        module.totals, module.parts = totals, torch.zeros(2, device=args.device)
        module.zero_grad()
    is_first, is_last = pipeline.modules[0].is_first, pipeline.modules[-1].is_last
    losses: list[torch.Tensor] = []
    inputs = batch.pop("input_ids")
    ends = {"target": batch["labels"], "losses": losses} if is_last else {}
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
        schedule.step(*([inputs] if is_first else []), **ends, return_outputs=False, **batch)
    pipeline.add_up_gradients()
    # Only the last stage knows the loss.
    loss = torch.stack(losses).sum().detach() if is_last else torch.zeros((), device=args.device)
    parts = torch.cat([loss.reshape(1), pipeline.modules[-1].parts])
    for name in ("pp", "dp"):
        dist.all_reduce(parts, group=pipeline.mesh.get_group(name))
    values = dict(zip(("loss", "ce_loss", "aux_loss"), parts.tolist(), strict=True))
    if not pipeline.modules[-1].config.num_experts:
        del values["aux_loss"]
    for stage in pipeline.stages:
        stage.end_step()
    return values, int(totals.tokens)


def describe_meter(pipeline: Pipeline, seconds: float, args: PipelineArguments, per_rank: int) -> str:
    """Return what the ranks waited and sent, beside the formulas. All ranks call this function."""
    busy = sum(stage.busy_seconds for stage in pipeline.stages)
    sent = sum(stage.bytes_sent for stage in pipeline.stages)
    means = torch.tensor([1 - busy / seconds, sent, pipeline.bytes_of_gradients], device=args.device)
    dist.all_reduce(means)
    idle, activations, gradients = (means / args.world_size).tolist()
    share = bubble_share(args.pp_size, args.gradient_accumulation_steps, per_rank)
    return (
        f"A process spent {idle:.0%} of the steps outside of its stages (bubble of {args.pp_schedule}: {share:.0%}), "
        f"and sent {activations / 1e6:,.1f} MB between stages and {gradients / 1e6:,.1f} MB of gradients"
    )


class Saved:
    """The steps, the log and the checkpoints of a run, as `recipes/pretrain.py` reads and writes them."""

    def __init__(
        self,
        run: Run,
        rows: PreparedData,
        pipeline: Pipeline,
        optimizer: PipelineOptimizer,
        num_steps: int,
        num_bytes: int,
    ):
        self.run, self.args, self.pipeline, self.optimizer = run, run.args, pipeline, optimizer
        self.writer = CheckpointWriter(run.args, lambda: num_bytes)
        # What the parts of the package read of a trainer.
        names = {"run": run, "args": run.args, "model": pipeline.modules[0].shell, "layout": "one file"}
        is_main, no_callbacks = run.args.process_index == 0, SimpleNamespace(on_train_end=lambda *_: None)
        names |= {"callback_handler": no_callbacks, "control": None, "is_world_process_zero": lambda: is_main}
        self.trainer = cast(Any, SimpleNamespace(**names))
        self.trainer.processing_class, self.trainer.train_dataset = rows.tokenizer, rows.train
        self.trainer.eval_dataset, self.trainer.state = rows.eval, TrainerState(max_steps=num_steps)
        self.unlogged: list[dict[str, float]] = []
        self.trainer.accelerator = SimpleNamespace(unwrap_model=lambda each: each)
        self.description = describe_run(self.trainer)
        set_generation_defaults(self.trainer)

    @property
    def state(self) -> TrainerState:
        return self.trainer.state

    def load(self) -> int:
        """Take the states of the checkpoint, if there is one, and return the number of its step."""
        if checkpoint := self.run.checkpoint:
            check_resume(checkpoint, self.description, self.args, self.run.others)
            self.optimizer.load(checkpoint)
            max_steps = self.state.max_steps
            self.trainer.state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
            self.state.max_steps = max_steps
        self.state.compute_steps(self.args, self.state.max_steps)
        on_main_process(self.args, self.writer.check_space)
        if self.args.process_index == 0:
            self.run.directory.write_log(self.state.log_history, anew=True)
            data = {"names": self.run.facts.datasets, "counts": self.run.facts.data}
            values = values_by_name(self.args, self.run.others)
            self.run.directory.record(arguments=values, recipe="pretrain", data=data, loss_unit=NATS)
        return self.state.global_step

    def count(self, losses: dict[str, float], norm: float, num_tokens: int, *, epoch: float) -> None:
        """Count a step, and log the means since the last entry."""
        state = self.state
        state.global_step, state.epoch = state.global_step + 1, epoch
        state.num_input_tokens_seen += num_tokens
        self.unlogged.append(losses)
        if state.global_step % state.logging_steps:
            return
        entry = {name: sum(each[name] for each in self.unlogged) / len(self.unlogged) for name in losses}
        entry |= {"grad_norm": norm, "learning_rate": self.optimizer.last_rate, "epoch": epoch}
        entry |= {"num_input_tokens_seen": state.num_input_tokens_seen, "step": state.global_step}
        self.unlogged.clear()
        state.log_history.append(entry)
        if self.args.process_index == 0:
            self.run.directory.write_log([entry | {"max_steps": state.max_steps}])
            print(f"step {state.global_step}/{state.max_steps}: loss {entry['loss']:.4f}", flush=True)

    def is_due(self) -> bool:
        """Return whether a checkpoint follows this step."""
        is_last = self.state.global_step == self.state.max_steps
        return self.args.save_strategy == "steps" and (is_last or self.state.global_step % self.state.save_steps == 0)

    def write(self) -> None:
        """Write a checkpoint. All ranks call this method."""
        target = checkpoint_path(self.args.output_dir, self.state.global_step)
        with self.writer.writing_checkpoint(target, self.description) as source:
            self._write_weights(source)
            states = self.optimizer.state()
            if self.args.process_index == 0:
                for name, state in zip(STATE_NAMES, states, strict=True):
                    torch.save(state, source / name)
                self.state.save_to_json(str(source / TRAINER_STATE_NAME))
        if self.args.process_index == 0:
            rotate_checkpoints(target, limit=self.args.save_total_limit, best=None)

    def write_model(self) -> None:
        """Write the model into the directory of the run. All ranks call this method."""
        with self.writer.writing_model(Path(self.args.output_dir)) as source:
            self._write_weights(source)
            if self.args.process_index == 0:
                self.state.save_to_json(str(source / TRAINER_STATE_NAME))
                if self.args.save_dtype:
                    cast_files(source, self.args.save_dtype)

    def _write_weights(self, directory: Path) -> None:
        weights = self.pipeline.gather(dict(self.pipeline.weights))
        if self.args.process_index == 0:
            write_model(str(directory), self.trainer.model, self.trainer.processing_class, weights, is_writer=True)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(*ARGUMENTS))
