"""
`RunTrainer`: a `Trainer` whose runs can be stopped, resumed and pushed, whatever the stage.

The class connects plain parts to the hooks of Trainer. Each part works without a Trainer:

| part | role |
|---|---|
| [`~checkpoints.writer.CheckpointWriter`] | renames checkpoints to their final names when they are complete |
| [`~checkpoints.sharded`] | saves and loads the optimizer of a sharded model |
| [`~runtime.signals.SignalListener`] | records signals, so that the run stops at the end of a step |
| [`~runtime.ranks.Ranks`] | lets the ranks agree, and names the ranks that do not respond |
| [`~training.nonfinite.NonfiniteGuard`] | stops the run or skips the step if a loss or gradient is not finite |
| [`~hub.pusher.HubPusher`] | pushes checkpoints and the model |

How a run ends before its last step:

| event | reaction of the run | exit status |
|---|---|---|
| SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank | all ranks finish the step and save a checkpoint | 128 + signal |
| a second signal, at least two seconds later | the run stops waiting for a push; Ctrl-C ends at once | 128 + signal |
| a non-finite loss or gradient | the run stops before the update and names the rows, or skips the step | 65 |
| a rank that dies or hangs | the others stop after `--ddp_timeout` at the latest, and name it | 1 |
| a disk that is full or read-only | the run ends; existing checkpoints stay | 74 |

128 + signal is 143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1 and 129 for SIGHUP. `--on_nonfinite skip` skips steps.
"""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

import datasets
import torch
from huggingface_hub import CommitInfo
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import logging

from ..checkpoints import sharded
from ..checkpoints.directory import SAVING, newest_checkpoint, rotate_checkpoints
from ..checkpoints.manifest import MANIFEST_NAME, read_manifest
from ..checkpoints.writer import CheckpointWriter
from ..hub.model_card import CARD_NAME, CURVE_NAME, RunFacts, format_run_card
from ..hub.pusher import HubPusher
from ..runtime.locking import hold_output_dir, release_output_dir, watch_launcher
from ..runtime.processes import on_main_process, on_saving_processes
from ..runtime.ranks import Ranks
from ..runtime.signals import SignalListener, let_workers_survive_one_sigterm
from ..tokenizer.loading import save_tokenizer
from ..weights.adapters import base_model_of, is_adapted
from .arguments import LMTrainingArguments
from .data_position import DataPosition
from .deepspeed_support import check_deepspeed_config, repair_universal_checkpoint
from .launch import launcher
from .nonfinite import EXIT_NOT_FINITE, MAX_SKIPPED_STEPS, NonfiniteGuard
from .optimizers import Muon, complete_schedule_kwargs, deepspeed_muon, muon_parameter_groups, optimizer_name
from .reporting import describe_training, resume_command
from .row_source import RowSource
from .run_description import changed_settings, describe_config, describe_data, describe_run, find_obstacles


logger = logging.get_logger(__name__)


class _EvaluationStopped(Exception):
    """Exception that ends an evaluation because a signal arrived."""

    def __init__(self, number: int):
        self.number = number


class _StopEvaluation(TrainerCallback):
    """Raise [`_EvaluationStopped`] in the evaluations of a training run, once any rank has received a signal."""

    def __init__(self, ranks: Ranks, signals: SignalListener):
        self.ranks, self.signals = ranks, signals
        self.is_training = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.is_training = True

    def on_train_end(self, args, state, control, **kwargs):
        self.is_training = False

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.is_training and (number := self.ranks.largest(self.signals.number)):
            raise _EvaluationStopped(number)


class RunTrainer(Trainer):
    """
    A `Trainer` with the behaviour described above. It also compiles each decoder layer (`--torch_compile`) and trains
    with Muon (`--optim_preset muon`).

    Args:
        run_facts ([`~hub.model_card.RunFacts`], *optional*): facts about the data for the model card.
        args, kwargs: the arguments of [`~transformers.Trainer`].
    """

    def __init__(self, *args: Any, run_facts: RunFacts | None = None, **kwargs: Any):
        self.run_facts = run_facts or RunFacts()
        self.signals = SignalListener()
        # The directory that the current save writes into; `None` between saves.
        self._saving: str | None = None
        # True if a signal cut off the evaluation of the current step; true if the run resumed from such a step.
        self._evaluation_is_due = self._resumed_before_evaluation = False
        self._weight_decays: list[float | None] = []
        model, training_args = kwargs.get("model", args[0] if args else None), kwargs.get("args")
        is_sharded = getattr(model, "is_distributed_loading_by_transformers", False)
        # NOTE: Trainer's constructor raises if a sharded model would save its optimizer. `checkpoints.sharded` saves
        # it, so the constructor must not see the request.
        is_resumable = is_sharded and training_args is not None and not training_args.save_only_model
        if is_resumable:
            training_args.save_only_model = True
        super().__init__(*args, **kwargs)
        if is_resumable:
            training_args.save_only_model = False
        self.add_callback(_StopEvaluation(self.ranks, self.signals))
        if self.is_deepspeed_enabled:
            config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
            check_deepspeed_config(config, optimizer_name(self.args), max_grad_norm=self.args.max_grad_norm)
            if self.guard.skips:
                raise ValueError(
                    "--on_nonfinite skip is not possible under DeepSpeed, which updates the weights within its "
                    "backward pass. Leave it out: the run then stops, and its checkpoints stay intact."
                )
        if getattr(self.args, "compiles_layers", False):
            # Trainer would compile the whole model, again for each length of a batch and for each mode.
            for layer in base_model_of(self.model).model.layers:
                layer.compile(**self.args.compile_options)

    # Parts. They are made on first use, because Trainer's constructor already needs some of them.

    @cached_property
    def ranks(self) -> Ranks:
        """Collectives over all ranks. If some ranks do not respond, their error names those ranks."""
        return Ranks(self.args.world_size, self.args.process_index, timeout_seconds=self.args.ddp_timeout)

    @cached_property
    def guard(self) -> NonfiniteGuard:
        """Decision about steps that are not finite (`--on_nonfinite`)."""
        # Plain `TrainingArguments` lack the flag.
        return NonfiniteGuard(self.args.output_dir, skips=getattr(self.args, "on_nonfinite", "stop") == "skip")

    @cached_property
    def writer(self) -> CheckpointWriter:
        """Writer of complete checkpoints and models."""
        return CheckpointWriter(self._checkpoint_bytes, is_writer=self.args.should_save)

    @cached_property
    def pusher(self) -> HubPusher:
        """Pushes of checkpoints and models to the Hub."""
        return HubPusher(
            self.args.output_dir,
            strategy=self.args.hub_strategy,
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            pushes_always=self.args.hub_always_push,
        )

    # Devices

    def create_accelerator_and_postprocess(self) -> None:
        # NOTE: with bf16, accelerate's FSDP2 casts the inputs of every layer: the loss's divisors, its weights and the
        # rotary table. With this policy parameters, inputs and the reduction of gradients stay float32; autocast
        # computes in bf16, as under every other launcher.
        given = self.args.fsdp_plugin_args
        if given is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            self.args.fsdp_plugin_args = (given or {}) | {"mixed_precision_policy": MixedPrecisionPolicy()}
            version = str(self.args.fsdp_plugin_args.get("fsdp_version", os.environ.get("FSDP_VERSION", "1")))
            if version != "2":
                raise ValueError(
                    f"FSDP version {version} is not supported. Write `fsdp_version: 2` into the accelerate config, as "
                    "recipes/accelerate_configs/fsdp2.yaml does."
                )
        super().create_accelerator_and_postprocess()

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        # NOTE: accelerate applies autocast to every model except FSDP2 models. There it relies on the casting policy,
        # which `create_accelerator_and_postprocess` turns off.
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def create_optimizer(self, model: Any = None):
        if self.optimizer is None and optimizer_name(self.args) == "muon":
            optimizer_class = deepspeed_muon if self.is_deepspeed_enabled else Muon
            self.optimizer = optimizer_class(
                muon_parameter_groups(model or self.model, weight_decay=self.args.weight_decay),
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        optimizer = super().create_optimizer(model)
        # Remember the weight decay of each group: DeepSpeed's universal checkpoints lose it, and
        # `repair_universal_checkpoint` restores it. An optimizer from a DeepSpeed config has no groups yet.
        self._weight_decays = [group.get("weight_decay") for group in getattr(optimizer, "param_groups", ())]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        self.args.lr_scheduler_kwargs = complete_schedule_kwargs(
            str(getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)),
            self.args.lr_scheduler_kwargs,
            num_training_steps=num_training_steps,
        )
        return super().create_scheduler(num_training_steps, optimizer)

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return the rows that a data loader reads. Subclasses override this method instead of `_get_dataloader`."""
        return RowSource(dataset, batch_size, sampler_fn)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        # NOTE: Trainer reads the collator from its attribute and takes no argument for it.
        source = self._row_source(dataset, description, batch_size, sampler_fn, is_training)
        collator: Any = self.data_collator
        self.data_collator = source.collator or collator
        try:
            loader = super()._get_dataloader(
                source.dataset, description, source.batch_size, source.sampler_fn, is_training, **kwargs
            )
        finally:
            self.data_collator = collator
        # A launcher sends SIGTERM to the whole process group. The run still needs its workers to finish the step.
        # accelerate's loader wraps the one that starts the workers.
        let_workers_survive_one_sigterm(getattr(loader, "base_dataloader", loader))
        return loader

    # A run from its beginning to its end

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """
        Train, and lock `output_dir` against other runs meanwhile.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): a checkpoint directory, or `True` for the newest
                checkpoint in `output_dir` that verifies.
            args, kwargs: further arguments of [`~transformers.Trainer.train`].

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: steps, mean training loss and speed.

        Raises:
            `ValueError`: if `resume_from_checkpoint` cannot be resumed exactly, or the ranks read different data.
            `SystemExit`: with the exit statuses listed at the top of this module.
        """
        # Ranks whose launcher is gone must stop, or they would write into the directory of the next run.
        watch_launcher(launcher())
        with self.signals.listening(), self.ranks.naming_missing():
            # This caches the digests of the config, which Trainer changes when it starts.
            self._describe_run()
            self._check_same_data()
            if resume_from_checkpoint is True:
                resume_from_checkpoint = on_main_process(self.args, lambda: newest_checkpoint(self.args.output_dir))
            if resume_from_checkpoint and Path(resume_from_checkpoint, MANIFEST_NAME).exists():
                self._check_resume(str(resume_from_checkpoint))
            on_saving_processes(self.args, self._check_space)
            with self._holding_output_dir():
                try:
                    output = super().train(resume_from_checkpoint, *args, **kwargs)
                    self._wait_for_pushes()
                    return output
                except _EvaluationStopped as stopped:
                    # Only the evaluation before the first step ends here; `_maybe_log_save_evaluate` handles signals
                    # in all others.
                    self._stop(stopped.number, "Nothing was trained since the run was started.")

    @contextmanager
    def _holding_output_dir(self) -> Iterator[None]:
        """Lock `output_dir`, unless the caller has locked it already."""
        output_dir = self.args.output_dir
        is_new = self.args.save_strategy != "no" and on_main_process(self.args, lambda: hold_output_dir(output_dir))
        try:
            yield
        finally:
            if is_new:
                release_output_dir(output_dir)

    @cached_property
    def _data_description(self) -> dict[str, Any]:
        return describe_data(self.train_dataset)

    @cached_property
    def _config_digests(self) -> list[str]:
        return describe_config(self.accelerator.unwrap_model(self.model))

    def _describe_run(self) -> dict[str, Any]:
        if self.is_deepspeed_enabled:
            layout = f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        else:
            is_sharded = self.is_fsdp_enabled or self.is_distributed_loading_by_transformers
            layout = "FSDP" if is_sharded else "one file"
        progress = {"step": self.state.global_step, "num_tokens": self.state.num_input_tokens_seen}
        return progress | describe_run(
            self.args,
            layout=layout,
            data=self._data_description,
            is_stream=isinstance(self.train_dataset, datasets.IterableDataset),
            config=self._config_digests,
        )

    def _check_same_data(self) -> None:
        # A collective. Every rank sees all descriptions, so either all ranks raise or none does.
        descriptions = self.ranks.gather(self._data_description)
        if any(description != descriptions[0] for description in descriptions):
            raise ValueError(
                f"The ranks read different data: {descriptions}. A file changed while they read it, or differs "
                "between the machines. Make the files equal, and start again."
            )

    def _check_resume(self, checkpoint: str) -> None:
        now = self._describe_run()
        # Manifests of earlier versions lack some fields. Fill them with the run's own values, which compare as equal.
        then = now | read_manifest(checkpoint)["run"]
        fatal, inexact = find_obstacles(then, now)
        if fatal:
            raise ValueError(
                f"This run cannot resume from {checkpoint}: {'; '.join(fatal)}. Use the settings that it was saved "
                f"with, or start a new run from its weights: --model_name_or_path {checkpoint}."
            )
        if inexact and not getattr(self.args, "allow_inexact_resume", False):
            raise ValueError(
                f"Resuming from {checkpoint} would not be exact: {'; '.join(inexact)}. Restore the earlier settings "
                "and data, or resume nevertheless with --allow_inexact_resume."
            )
        if then["world_size"] != now["world_size"]:
            logger.warning(
                f"{checkpoint} was saved by {then['world_size']} process(es) and {now['world_size']} resume it. Each "
                "step takes the same rows, but random numbers (dropout) differ."
            )
        if inexact:
            logger.warning(f"Resuming from {checkpoint} although {'; '.join(inexact)}.")
        if changed := changed_settings(then, now):
            logger.warning(f"Resuming from {checkpoint} with other settings: {', '.join(changed)}.")

    def _check_space(self) -> None:
        """End the run before its first step if the disk has no room for its checkpoints."""
        if self.args.save_strategy == "no":
            return
        output_dir = Path(self.args.output_dir)
        kept = len(sort_checkpoints(str(output_dir))) if output_dir.is_dir() else 0
        # The run removes an old checkpoint only after the new one is complete, so it needs room for one more than the
        # limit.
        more = max(1, (self.args.save_total_limit or 0) + 1 - kept)
        if self.args.max_steps > 0 and self.args.save_strategy == "steps" and self.args.save_steps >= 1:
            more = min(more, max(1, self.args.max_steps // int(self.args.save_steps)))
        self.writer.check_space(output_dir, num_checkpoints=more)

    def _checkpoint_bytes(self) -> int:
        """Estimate the size of a checkpoint in bytes."""
        # 4 bytes per saved weight, 8 for the two moments of AdamW, and 4 more for DeepSpeed's float32 weights.
        num_saved = get_model_param_count(self.model, trainable_only=is_adapted(self.model))
        trainable = 0 if self.args.save_only_model else get_model_param_count(self.model, trainable_only=True)
        return 4 * num_saved + (12 if self.is_deepspeed_enabled else 8) * trainable

    # Resuming

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial):
        progress = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        self._evaluation_is_due = self._resumed_before_evaluation = False
        if checkpoint is None:
            return progress
        position = DataPosition.load(checkpoint) or DataPosition()
        self.guard.num_skipped = position.num_skipped_steps
        # The run that wrote the checkpoint has evaluated before its first step. Evaluate again only if it was cut off.
        self.args.eval_on_start = self._resumed_before_evaluation = position.evaluation_is_due
        if self.state.global_step >= max_steps:
            # NOTE: Trainer would train a finished run for one more step. If it starts after the last pass, it ends at
            # once.
            return num_train_epochs, 0
        return self._resume_position(position, progress, num_update_steps_per_epoch)

    def _resume_position(
        self, position: DataPosition, progress: tuple[int, int], num_steps_per_epoch: int
    ) -> tuple[int, int]:
        """
        Return the pass over the data to resume in, and the number of its micro-batches that each rank has taken.
        `progress` is the position that Trainer derives from the number of steps. Subclasses that save more override
        this method.
        """
        return progress

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        # NOTE: Trainer ignores the result of an evaluation before the first step. On resume, it may be the evaluation
        # that a signal cut off. Its result counts for the best model and for schedules that read the metrics.
        is_due = skip_scheduler and self._resumed_before_evaluation
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler and not is_due)
        if is_due and self._determine_best_metric(metrics, trial):
            checkpoint = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            if on_main_process(self.args, checkpoint.is_dir):
                self.state.best_model_checkpoint = str(checkpoint)
        return metrics

    # Stopping

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # A collective in every step: a signal may reach only one rank, and all must stop after the same step.
        number = self.ranks.largest(self.signals.number)
        if not number:
            try:
                super()._maybe_log_save_evaluate(*args, **kwargs)
                return
            except _EvaluationStopped as stopped:
                number = stopped.number
                # Trainer logs before it evaluates, so the log is written. The evaluation runs on resume.
                self.control.should_log, self.control.should_evaluate = False, True
        self._evaluation_is_due = self.control.should_evaluate
        self.control.should_save, self.control.should_evaluate = True, False
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # `_stop` raises, so Trainer never reaches its own call. Callbacks close their files and trackers here.
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._stop(number, self._resume_hint())

    def _resume_hint(self) -> str:
        hint = (
            "It has no optimizer state: start a new run from it with --model_name_or_path."
            if self.args.save_only_model
            else "Resume with the same command and `--resume_from_checkpoint auto`."
        )
        return f"Its checkpoint is in {self.args.output_dir}. {hint}"

    def _stop(self, number: int, hint: str) -> NoReturn:
        if self.is_world_process_zero():
            name = Signals(number).name
            print(f"Stopped by {name} after step {self.state.global_step}. {hint}", file=sys.stderr, flush=True)
        self._end(128 + number)

    def _end(self, status: int) -> NoReturn:
        """End all ranks together: launchers kill the remaining ranks as soon as one exits."""
        self._wait_for_pushes()
        # From here on, further signals change nothing.
        self.signals.is_ending = True
        self.accelerator.wait_for_everyone()
        if self.signals.is_impatient:
            # NOTE: an ordinary exit waits for the threads of huggingface_hub that are still uploading.
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(status)
        raise SystemExit(status)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        # A copy, because Trainer adds to this tensor.
        self._loss_before_step = self._tr_loss.clone()
        is_stream = isinstance(self.train_dataset, (torch.utils.data.IterableDataset, datasets.IterableDataset))
        if self.args.world_size > 1 and not is_stream:
            # With several ranks, the check below costs one more collective per step. Only streams pay for it.
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        # Reading can fail in the middle of a run: a streamed file changes, or the kernel kills a worker of the loader.
        # Read all batches before raising, so that all ranks can save a checkpoint together.
        batches, error = [], None
        try:
            for batch in islice(epoch_iterator, num_batches):
                batches.append(batch)
        except Exception as raised:
            error = raised
        if self.ranks.largest(int(error is not None)):
            self._save_before_failing()
            raise error or RuntimeError("Another rank could not read its data: see its output.")
        return super().get_batch_samples(iter(batches), num_batches, device)

    def _save_before_failing(self) -> None:
        """Save a checkpoint of the steps before the data became unreadable. All ranks call it."""
        step = self.state.global_step
        path = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if step > 0 and not on_main_process(self.args, path.is_dir):
            self._save_checkpoint(self.model, trial=None)
        if step > 0 and self.is_world_process_zero():
            print(f"The data could not be read after step {step}. {self._resume_hint()}", file=sys.stderr, flush=True)

    # Non-finite steps

    def _get_grad_norm(self, model: Any, grad_norm: Any = None):
        # NOTE: Trainer has no public hook between the gradient's norm and the update. DeepSpeed has already updated
        # the weights.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if grad_norm is None:
            return grad_norm
        if getattr(self.accelerator, "scaler", None) is not None:
            # The loss scaler of float16 produces infinite gradients by design and skips such steps itself.
            if self.ranks.largest(int(not self._is_loss_finite())):
                self._meet_nonfinite("The loss is not finite")
            return grad_norm
        if not torch.as_tensor(grad_norm).isfinite().all():
            self._meet_nonfinite(f"The gradient's norm is {float(grad_norm)}")
        return grad_norm

    def _is_loss_finite(self) -> bool:
        """Return whether the losses of this rank's step are finite. Subclasses that see them override this method."""
        return True

    def _describe_step(self) -> list[dict[str, Any]]:
        """Return this rank's rows of the step, each with `is_finite` for its micro-batch. Subclasses override it."""
        return []

    def _meet_nonfinite(self, what: str) -> None:
        """Stop the run, or skip this step's update. All ranks call it."""
        step = self.state.global_step + 1
        rows = [row for part in self.ranks.gather(self._describe_step()) for row in part]
        suspects = [row for row in rows if not row["is_finite"]] or rows
        on_main_process(self.args, lambda: self.guard.write_report(step, what, suspects))
        message = self.guard.describe(step, what, suspects)
        if self.guard.may_skip():
            if self.is_world_process_zero():
                num_skipped = self.guard.num_skipped
                logger.warning(f"{message} The run skips the step ({num_skipped} of {MAX_SKIPPED_STEPS}).")
            self._skip_step()
            return
        if self.is_world_process_zero():
            print(
                f"{message} The run stopped before the update and wrote no checkpoint; the checkpoints in "
                f"{self.args.output_dir} are intact. Look at the rows, lower --learning_rate, or skip such steps with "
                "--on_nonfinite skip.",
                file=sys.stderr,
                flush=True,
            )
        self._end(EXIT_NOT_FINITE)

    def _skip_step(self) -> None:
        """Exclude the current step from the weights and from the logged means."""
        self.model_wrapped.zero_grad(set_to_none=True)
        self._tr_loss.copy_(self._loss_before_step)
        # Trainer divides the sum of the losses by the number of steps since this one.
        self._globalstep_last_logged += 1

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.guard.num_skipped:
            logs["skipped_steps"] = self.guard.num_skipped
        super().log(logs, *args, **kwargs)

    # Saving

    def _get_output_dir(self, trial: Any) -> str:
        return self._saving or super()._get_output_dir(trial)

    def _data_position(self) -> DataPosition:
        """Return the position to save with a checkpoint."""
        return DataPosition(evaluation_is_due=self._evaluation_is_due, num_skipped_steps=self.guard.num_skipped)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output_dir = Path(super()._get_output_dir(trial))
        target = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        source = output_dir / SAVING / target.name
        # Create and lock the directory again: a user may have renamed or deleted it during the run.
        on_main_process(self.args, lambda: hold_output_dir(output_dir))
        on_saving_processes(self.args, lambda: self.writer.make_room(source, target))
        # Trainer asks `_get_output_dir`, and so writes into `.saving/`.
        self._saving = str(output_dir / SAVING)
        try:
            with self.writer.reporting_full_disks(target):
                super()._save_checkpoint(model, trial)
        finally:
            self._saving = None
        # Every rank must have written its shards before one of them renames the directory.
        self.accelerator.wait_for_everyone()
        # Trainer recorded the path in `.saving/` as the best checkpoint.
        if is_best := self.state.best_model_checkpoint == str(source):
            self.state.best_model_checkpoint = str(target)
        on_saving_processes(self.args, lambda: self._publish_checkpoint(source, target, is_best=is_best))
        if self.args.push_to_hub and self.is_world_process_zero() and self.pusher.takes(target):
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.pusher.push_checkpoint(target, write_card=self.create_model_card)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(target, limit=self.args.save_total_limit, best=Path(best) if best else None)

    def _publish_checkpoint(self, source: Path, target: Path, *, is_best: bool) -> None:
        with self.writer.reporting_full_disks(target):
            if is_best:
                # Trainer wrote the state before the path of the best checkpoint was corrected.
                self.state.save_to_json(str(source / TRAINER_STATE_NAME))
            if not self.args.save_only_model:
                self._data_position().save(source)
        self.writer.publish_checkpoint(source, target, self._describe_run())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the model to `output_dir`. All ranks must call this method. The files get their final names once all of
        them are on the disk, so a crash never leaves half a model. Unlike Trainer's method, it does not push.
        """
        if self._saving is not None:
            # Trainer calls this method within `_save_checkpoint`, which renames the files itself.
            super().save_model(output_dir, _internal_call=True)
            return
        target = Path(output_dir or self.args.output_dir)
        source = target / SAVING / "model"
        on_saving_processes(self.args, lambda: self.writer.make_room(source, target / "config.json"))
        with self.writer.reporting_full_disks(target / "config.json"):
            super().save_model(str(source), _internal_call=True)
        self.accelerator.wait_for_everyone()
        on_saving_processes(self.args, lambda: self.writer.publish_model(source, target))

    def save_state(self) -> None:
        with self.writer.reporting_full_disks(Path(self.args.output_dir, TRAINER_STATE_NAME)):
            super().save_state()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save weights, config, code and tokenizer. Do not save pickled arguments: they may hold a Hub token."""
        # With a sharded model, `save_pretrained` is a collective that all ranks must enter.
        if not self.args.should_save and not self.is_distributed_loading_by_transformers:
            return
        output_dir = output_dir or self.args.output_dir
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model.save_pretrained(output_dir, state_dict=state_dict, is_main_process=self.args.should_save)
        if self.args.should_save and is_adapted(model):
            # peft writes a model card whose fields are all blank. `create_model_card` writes the real one.
            Path(output_dir, CARD_NAME).unlink()
        if self.args.should_save and self.processing_class is not None:
            save_tokenizer(self.processing_class, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer, is_writer = self.optimizer.optimizer, self.args.should_save
        sharded.save_optimizer(output_dir, self.model, optimizer, self.lr_scheduler, is_writer=is_writer)

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_distributed_loading_by_transformers:
            sharded.load_weights(resume_from_checkpoint, self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.is_distributed_loading_by_transformers:
            sharded.load_weights(self.state.best_model_checkpoint, self.model)
        else:
            super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # NOTE: safetensors files hold a tied head once, as the embedding. Trainer would warn that the head is missing.
        model = base_model_of(self.model)
        tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.is_distributed_loading_by_transformers:
            sharded.load_optimizer(checkpoint, self.model, self.optimizer.optimizer, self.lr_scheduler)
            return
        if checkpoint is not None and self.is_deepspeed_enabled and self._weight_decays:
            # DeepSpeed has already loaded its optimizer together with the weights.
            repair_universal_checkpoint(self.optimizer, self._weight_decays)
        super()._load_optimizer_and_scheduler(checkpoint)

    # The Hub

    @property
    def push_report(self) -> str | None:
        """One line about the result of the last push; `None` without `--push_to_hub`."""
        return self.pusher.report if self.args.push_to_hub else None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        Create the repository, before training starts.

        Raises:
            `ValueError`: if the Hub refuses.
        """
        if self.is_world_process_zero():
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            private = self.args.hub_private_repo if private is None else private
            self.hub_model_id = self.pusher.create_repository(name, private=private, token=token)

    def create_model_card(self, **kwargs: Any) -> None:
        """Write the card of a run to `output_dir`. With plain `TrainingArguments`, Trainer writes its own."""
        if not isinstance(self.args, LMTrainingArguments):
            super().create_model_card(**kwargs)
            return
        if not self.is_world_process_zero():
            return
        repo_id = self.hub_model_id or Path(self.args.output_dir).name
        card = format_run_card(
            self.accelerator.unwrap_model(self.model),
            self.state,
            self.run_facts,
            repo_id=repo_id,
            training=describe_training(self.args, self.state, self._describe_sharding()),
            command=resume_command(self.args, self.run_facts.recipe, repo_id),
            language=self.args.hub_language,
            license=self.args.hub_license,
            has_curve=Path(self.args.output_dir, CURVE_NAME).is_file(),
        )
        Path(self.args.output_dir, CARD_NAME).write_text(card, encoding="utf-8")

    def _describe_sharding(self) -> str:
        if self.is_deepspeed_enabled:
            return f"DeepSpeed ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        if self.is_fsdp_enabled or self.is_distributed_loading_by_transformers:
            return "FSDP2"
        return "DDP" if self.args.world_size > 1 else "one process"

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: Trainer would push an incomplete checkpoint. `_save_checkpoint` pushes the complete one."""

    def _wait_for_pushes(self) -> None:
        if self.args.push_to_hub:
            self.pusher.finish(write_card=self.create_model_card, gives_up=lambda: self.signals.is_impatient)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | None:
        """
        Save the model, and push it with its card from `output_dir`. All ranks must call this method. It always waits
        for the upload.

        Returns:
            [`~huggingface_hub.CommitInfo`], or `None` on other ranks and if the push failed; see `push_report`.
        """
        if token is not None:
            self.pusher.use_token(token)
        if self.hub_model_id is None:
            self.init_hf_repo(private=private)
        self.save_model()
        if not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.create_model_card(**kwargs)
        # Pushes of checkpoints come first, so that the final model is the last commit.
        self._wait_for_pushes()
        self.pusher.repo_id = self.hub_model_id
        return self.pusher.push_model(message=commit_message, revision=revision)


__all__ = ["RunTrainer"]
