"""
`RunTrainer`: a `Trainer` whose runs can be stopped, resumed and pushed, whatever the stage. It connects plain parts to
the hooks of Trainer (docs/architecture.md). Each part works without a Trainer.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

import torch
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..checkpoints import sharded
from ..checkpoints.directory import checkpoint_path, newest_checkpoint, rotate_checkpoints
from ..checkpoints.writer import CheckpointWriter, checkpoint_bytes, write_model
from ..hub.model_card import RunFacts
from ..hub.repository import HubPusher, create_repository
from ..runtime.activity import announce
from ..runtime.allocation import keep_freed_blocks
from ..runtime.errors import UserError
from ..runtime.ranks import Ranks, on_main_process
from ..runtime.signals import SignalListener, let_workers_survive_one_sigterm, watch_launcher
from ..weights.adapters import base_model_of, is_adapted
from .arguments import LMTrainingArguments
from .data_position import DataPosition
from .deepspeed_support import check_deepspeed_config, let_muon_train, repair_universal_checkpoint
from .efficiency import peak_memory_bytes
from .launch import complete_fsdp_args, launcher
from .meter import Throughput
from .nonfinite import EXIT_NOT_FINITE, NonfiniteGuard, find_suspects
from .optimizer_choice import use_adamw_for_adapter
from .optimizers import build_muon, complete_schedule_kwargs, optimizer_name
from .reporting import write_run_card, write_run_page
from .router_load import RouterLoad, to_shares
from .row_source import RowSource, inner_loader, is_stream, read_batches
from .run_description import RunDescription, digest_weights
from .run_directory import RunDirectory
from .stopping import EvaluationStopped, StopEvaluationCallback, end_all_ranks, resume_hint


logger = logging.get_logger(__name__)


class RunTrainer(Trainer):
    """
    A `Trainer` with the behaviour described above. It also compiles each decoder layer (`--torch_compile`), trains
    with Muon (`--optim_preset muon`, the default of pretraining), and logs `tokens_per_second` and `peak_memory_gib`.

    Args:
        run_facts ([`~hub.model_card.RunFacts`], *optional*): facts about the data for the model card.
        args, kwargs: the arguments of [`~transformers.Trainer`].
    """

    def __init__(self, *args: Any, run_facts: RunFacts | None = None, **kwargs: Any):
        self.run_facts = run_facts or RunFacts()
        self.signals = SignalListener()
        # True if a signal cut off the evaluation of the current step; true if the run resumed from such a step.
        self._evaluation_is_due = self._resumed_before_evaluation = False
        self._weight_decays: list[float | None] = []
        self._throughput = Throughput()
        model, training_args = kwargs.get("model", args[0] if args else None), kwargs.get("args")
        # Digests of weights that change the updates but are in no checkpoint, by role. Compute them now: later, these
        # weights are wrapped or sharded.
        self._fixed_weights: dict[str, str] = {}
        if is_adapted(model):
            # The base model is also the reference.
            frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
            self._fixed_weights["base model"] = digest_weights(frozen)
        # Plain `TrainingArguments` lack the attribute.
        elif getattr(training_args, "has_reference", False) and isinstance(model, torch.nn.Module):
            self._fixed_weights["reference model"] = digest_weights(model.parameters())
        is_sharded = getattr(model, "is_distributed_loading_by_transformers", False)
        # NOTE: Trainer's constructor raises if a sharded model would save its optimizer. `checkpoints.sharded` saves
        # it, so the constructor must not see the request.
        is_resumable = is_sharded and training_args is not None and not training_args.save_only_model
        if is_resumable:
            training_args.save_only_model = True
        # Without a model, there is a function that builds one.
        config = getattr(model, "config", None)
        use_cache = True if config is None else getattr(config, "use_cache", None)
        super().__init__(*args, **kwargs)
        if use_cache is not None:
            # NOTE: Trainer overwrites it with `args.use_cache`, for the training pass, but it is saved with the model:
            # all programs that load the model would recompute the whole text for each token that they generate.
            self.model.config.use_cache = use_cache
        if is_resumable:
            training_args.save_only_model = False
        # NOTE: Trainer sets it in `train` only, and `training_step` divides by it.
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.add_callback(StopEvaluationCallback(self.ranks, self.signals))
        if isinstance(self.args, LMTrainingArguments) and is_adapted(self.model):
            # A recipe has done this before it wrote its record. In a notebook, the model comes first here.
            use_adamw_for_adapter(self.args)
        if self.is_deepspeed_enabled:
            config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
            check_deepspeed_config(config, self.args)
            if optimizer_name(self.args) == "muon":
                let_muon_train(config)
        if getattr(self.args, "compiles_layers", False):
            # Trainer would compile the whole model, again for each length of a batch and for each mode.
            for layer in base_model_of(self.model).model.layers:
                layer.compile(**self.args.compile_options)

    # Parts and devices

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        args.fsdp_plugin_args = complete_fsdp_args(args.fsdp_plugin_args)
        super().create_accelerator_and_postprocess()
        if args.device.type == "cpu":
            keep_freed_blocks()
        # Make the parts here: the rest of Trainer's constructor already needs some of them.
        self.ranks = Ranks(args.world_size, args.process_index, timeout_seconds=args.ddp_timeout)
        # Plain `TrainingArguments` lack the flag.
        self.guard = NonfiniteGuard(args.output_dir, skips=getattr(args, "on_nonfinite", "stop") == "skip")
        self.writer = CheckpointWriter(
            args, lambda: checkpoint_bytes(self.model, args, uses_deepspeed=self.is_deepspeed_enabled)
        )
        self.pusher = HubPusher(
            args.output_dir,
            strategy=args.hub_strategy,
            revision=args.hub_revision,
            pushes_always=args.hub_always_push,
            write_card=self.create_model_card,
            gives_up=lambda: self.signals.is_impatient,
        )

    @property
    def _layout(self) -> str:
        """Layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`."""
        if self.is_deepspeed_enabled:
            return f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        return "FSDP" if self.is_fsdp_enabled or self.is_distributed_loading_by_transformers else "one file"

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        # NOTE: accelerate applies autocast to every model except FSDP2 models. There it relies on the casting policy,
        # which `create_accelerator_and_postprocess` turns off.
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def create_optimizer(self, model: Any = None):
        if self.optimizer is None and optimizer_name(self.args) == "muon":
            self.optimizer = build_muon(model or self.model, self.args, uses_deepspeed=self.is_deepspeed_enabled)
        optimizer = super().create_optimizer(model)
        # Remember the weight decay of each group: DeepSpeed's universal checkpoints lose it, and
        # `repair_universal_checkpoint` restores it. An optimizer from a DeepSpeed config has no groups yet.
        self._weight_decays = [group.get("weight_decay") for group in getattr(optimizer, "param_groups", ())]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        given = self.args.lr_scheduler_kwargs
        # NOTE: Trainer reads them from the arguments. Restore them, because a later resume compares them.
        self.args.lr_scheduler_kwargs = complete_schedule_kwargs(self.args, num_training_steps)
        try:
            return super().create_scheduler(num_training_steps, optimizer)
        finally:
            self.args.lr_scheduler_kwargs = given

    def _other_arguments(self) -> list[Any]:
        """Return the arguments of the run besides `args`. Subclasses that get more override this method."""
        # Plain `TrainingArguments` lack the attribute.
        return list(getattr(self.args, "other_arguments", ()))

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return the rows that a data loader reads. Subclasses override this method instead of `_get_dataloader`."""
        return RowSource(dataset, batch_size, sampler_fn)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        # NOTE: Trainer reads the collator from its attribute and takes no argument for it.
        source = self._row_source(dataset, description, batch_size, sampler_fn, is_training)
        collator: Any = self.data_collator
        drops_last = self.args.dataloader_drop_last
        self.data_collator = source.collator or collator
        # The flag is about training. An evaluation covers the whole set.
        self.args.dataloader_drop_last = drops_last and is_training
        try:
            loader = super()._get_dataloader(
                source.dataset, description, source.batch_size, source.sampler_fn, is_training, **kwargs
            )
        finally:
            self.data_collator, self.args.dataloader_drop_last = collator, drops_last
        # A launcher sends SIGTERM to the whole process group. The run still needs its workers to finish the step.
        let_workers_survive_one_sigterm(inner_loader(loader))
        return loader

    # A run from its beginning to its end

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any):
        """
        Train as [`~transformers.Trainer.train`] does, and lock `output_dir` against other runs meanwhile.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): a checkpoint directory, or `True` for the newest
                checkpoint in `output_dir` that verifies.
            trial, args, kwargs: as for [`~transformers.Trainer.train`].

        Raises:
            `ValueError`: if `resume_from_checkpoint` cannot be resumed exactly, the ranks read different data, or the
                data are an empty stream.
            `SystemExit`: with the exit statuses that docs/checkpoints.md lists.
        """
        # Ranks whose launcher is gone must stop, or they would write into the directory of the next run.
        watch_launcher(launcher())
        with self.signals.listening():
            with self.ranks.naming_missing():
                if self.model_init is not None:
                    # NOTE: a search deletes the model of each trial, and Trainer builds the next one later.
                    self.model = self.call_model_init(trial)
                self.description = RunDescription(
                    self.args,
                    self._layout,
                    self.train_dataset,
                    self.accelerator.unwrap_model(self.model),
                    tokenizer=self.processing_class,
                    others=self._other_arguments(),
                    # Under ZeRO-3, each rank has digested its own shards.
                    fixed_weights=self.ranks.gather(self._fixed_weights)[0],
                )
                self.description.check_same_data(self.ranks)
                if resume_from_checkpoint is True:
                    output_dir = self.args.output_dir
                    resume_from_checkpoint = on_main_process(self.args, lambda: newest_checkpoint(output_dir))
                if resume_from_checkpoint:
                    self.description.check_resume(str(resume_from_checkpoint), self.state)
                on_main_process(self.args, self.writer.check_space)
            with RunDirectory(self.args).locked():
                try:
                    # The page takes seconds, so write it after this block: the other ranks wait for the roll call.
                    with self.ranks.naming_missing():
                        output = super().train(resume_from_checkpoint, trial, *args, **kwargs)
                    if self.state.global_step == 0:
                        # Trainer only warns.
                        raise UserError("Nothing was trained: the training data gave no rows. Check --dataset_name.")
                    self.pusher.finish()
                    return output
                except EvaluationStopped as stopped:
                    # `_maybe_log_save_evaluate` handles all evaluations except the one before the first step.
                    self._stop(stopped.number, "Nothing was trained since the run was started.")
                except (Exception, SystemExit) as error:
                    if not self.signals.is_ending:
                        # Nothing else has recorded why the run ends. The writer of checkpoints raises `SystemExit`.
                        what = "a checkpoint could not be saved" if isinstance(error, SystemExit) else repr(error)
                        self._record_stop(what)
                    raise

    # Resuming and stopping

    def _init_training_state(self, max_steps, num_steps_per_epoch, num_epochs, checkpoint, trial):
        progress = super()._init_training_state(max_steps, num_steps_per_epoch, num_epochs, checkpoint, trial)
        self._evaluation_is_due = self._resumed_before_evaluation = False
        self._throughput = Throughput(self.state.num_input_tokens_seen)
        if checkpoint is None:
            return progress
        position = DataPosition.load(checkpoint) or DataPosition()
        self.guard.num_skipped = position.num_skipped_steps
        # The run that wrote the checkpoint has evaluated before its first step. Evaluate again only if it was cut off.
        self.args.eval_on_start = self._resumed_before_evaluation = position.evaluation_is_due
        if self.state.global_step >= max_steps:
            # NOTE: Trainer would train a finished run for one more step. If it starts after the last pass, it ends at
            # once.
            return num_epochs, 0
        return self._resume_position(position, progress, num_steps_per_epoch)

    def _resume_position(self, position: DataPosition, progress, num_steps_per_epoch) -> tuple[int, int]:
        """
        Return the pass over the data to resume in, and the number of its micro-batches that each rank has taken.
        Trainer derives `progress` from the number of steps. Subclasses that save more override this method.
        """
        return progress

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        # NOTE: Trainer ignores the result of an evaluation before the first step. On resume, it may be the evaluation
        # that a signal cut off. Its result counts for the best model and for schedules that read the metrics.
        is_due = skip_scheduler and self._resumed_before_evaluation
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler and not is_due)
        if is_due and self._determine_best_metric(metrics, trial):
            checkpoint = checkpoint_path(self.args.output_dir, self.state.global_step)
            if on_main_process(self.args, checkpoint.is_dir):
                self.state.best_model_checkpoint = str(checkpoint)
        return metrics

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # A collective in every step: a signal may reach only one rank, and all must stop after the same step.
        number = self.ranks.largest(self.signals.number)
        if not number:
            try:
                super()._maybe_log_save_evaluate(*args, **kwargs)
                return
            except EvaluationStopped as stopped:
                number = stopped.number
                # Trainer logs before it evaluates, so the log is written. The evaluation runs on resume.
                self.control.should_log, self.control.should_evaluate = False, True
        self._evaluation_is_due = self.control.should_evaluate
        self.control.should_save, self.control.should_evaluate = True, False
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # `_stop` raises, so Trainer never reaches its own call. Callbacks close their files and trackers here.
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._stop(number, resume_hint(self.args))

    def _stop(self, number: int, hint: str) -> NoReturn:
        name = Signals(number).name
        self._record_stop(name)
        self._end(128 + number, f"Stopped by {name} after step {self.state.global_step}. {hint}")

    def _record_stop(self, why: str) -> None:
        """Record the reason, and write the page, which shows how to resume."""
        if self.is_world_process_zero():
            write_run_page(self.args, self.state, stopped=why)

    def _end(self, status: int, message: str) -> NoReturn:
        """Print the reason, wait for the pushes, and end all ranks together."""
        if self.is_world_process_zero():
            print(message, file=sys.stderr, flush=True)
        self.pusher.finish()
        end_all_ranks(status, self.signals)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        if not self.is_in_train:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = self._read_step(epoch_iterator, num_batches, device)
        self._throughput.begin()
        return batches

    def _read_step(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """Return the batches of a step. If a stream cannot be read, save a checkpoint and raise its error."""
        # A copy, because Trainer adds to this tensor.
        self._loss_before_step = self._tr_loss.clone()
        if self.args.world_size > 1 and not is_stream(self.train_dataset):
            # With several ranks, the check below costs one more collective per step. Only streams pay for it.
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches, error = read_batches(epoch_iterator, num_batches)
        if self.ranks.largest(int(error is not None)):
            step = self.state.global_step
            if step and not on_main_process(self.args, checkpoint_path(self.args.output_dir, step).is_dir):
                self._save_checkpoint(self.model, trial=None)
            if step and self.is_world_process_zero():
                message = f"The data could not be read after step {step}. {resume_hint(self.args)}"
                print(message, file=sys.stderr, flush=True)
            raise error or RuntimeError("Another rank could not read its data: see its output.")
        return super().get_batch_samples(iter(batches), num_batches, device)

    def _plan_lines(self) -> list[tuple[str, str]]:
        """Return further lines of a dry run's plan, each with its label. Subclasses override it."""
        return []

    # Non-finite steps

    def _get_grad_norm(self, model: Any, grad_norm: Any = None):
        # NOTE: Trainer has no public hook between the gradient's norm and the update. DeepSpeed has already updated
        # the weights.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if getattr(self.accelerator, "scaler", None) is None:
            if grad_norm is not None and not torch.as_tensor(grad_norm).isfinite().all():
                self._meet_nonfinite(f"The gradient's norm is {float(grad_norm)}")
        # The loss scaler of float16 produces infinite gradients by design and skips such steps itself.
        elif self.ranks.largest(int(not self._is_loss_finite())):
            self._meet_nonfinite("The loss is not finite")
        # NOTE: by now DeepSpeed has overwritten the gradients with Muon's updates. The log must not call the norm of
        # these a norm of gradients.
        is_of_updates = self.is_deepspeed_enabled and optimizer_name(self.args) == "muon"
        return None if is_of_updates else grad_norm

    def _is_loss_finite(self) -> bool:
        """Return whether the losses of this rank's step are finite. Subclasses that see them override this method."""
        return True

    def _describe_step(self) -> list[dict[str, Any]]:
        """Return this rank's rows of the step, each with `is_finite` for its micro-batch. Subclasses override it."""
        return []

    def _meet_nonfinite(self, what: str) -> None:
        """Stop the run, or skip this step's update. All ranks call it."""
        step = self.state.global_step + 1
        rows = find_suspects([row for part in self.ranks.gather(self._describe_step()) for row in part])
        on_main_process(self.args, lambda: self.guard.write_report(step, what, rows))
        is_skipped, message = self.guard.decide(step, what, rows)
        if not is_skipped:
            self._record_stop(message)
            self._end(EXIT_NOT_FINITE, message)
        if self.is_world_process_zero():
            logger.warning(message)
        self._skip_step()

    def _skip_step(self) -> None:
        """Exclude the current step from the weights and from the logged means."""
        self.model_wrapped.zero_grad(set_to_none=True)
        self._tr_loss.copy_(self._loss_before_step)
        # Trainer divides the sum of the losses by the number of steps since this one.
        self._globalstep_last_logged += 1

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs |= self._measure()
        if self.guard.num_skipped:
            logs["skipped_steps"] = self.guard.num_skipped
        super().log(logs, *args, **kwargs)

    def _measure(self) -> dict[str, float]:
        """Return the figures of the steps since the last log. All ranks call it. Subclasses add theirs."""
        memory = {"peak_memory_gib": peak_memory_bytes(self.args.device) / 2**30}
        return self._throughput.measure(self.state.num_input_tokens_seen) | memory

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._throughput.paused():
            return super().evaluate(*args, **kwargs)

    def _record_router_load(self, load: RouterLoad) -> None:
        """Add the counts of all ranks to the log. All ranks call it."""
        if load.counts is not None:
            counts = self.accelerator.reduce(load.counts, "sum")
            self.state.log_history.append({"router_load": to_shares(counts), "step": self.state.global_step})

    # Saving and loading

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.writer.directory or super()._get_output_dir(trial))

    def _data_position(self) -> DataPosition:
        """Return the position to save with a checkpoint."""
        return DataPosition(evaluation_is_due=self._evaluation_is_due, num_skipped_steps=self.guard.num_skipped)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._throughput.paused():
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        """Write, push and rotate."""
        target = checkpoint_path(super()._get_output_dir(trial), self.state.global_step)
        run = self.description.after(self.state)
        with self.writer.writing_checkpoint(target, run, add_files=self._add_files) as source:
            super()._save_checkpoint(model, trial)
            # Trainer recorded the path in `.saving/` as the best checkpoint.
            if self.state.best_model_checkpoint == str(source):
                self.state.best_model_checkpoint = str(target)
        if self.args.push_to_hub and self.is_world_process_zero():
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.pusher.push_checkpoint(target)
        if self.args.should_save:
            rotate_checkpoints(target, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def _add_files(self, directory: Path) -> None:
        """Write the files of a checkpoint that Trainer does not write, or not correctly."""
        # Trainer wrote the state before the path of the best checkpoint was corrected.
        self.state.save_to_json(str(directory / TRAINER_STATE_NAME))
        if not self.args.save_only_model:
            self._data_position().save(directory)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the model to `output_dir`. All ranks must call this method. The files get their final names once all of
        them are on the disk, so a crash never leaves half a model. Unlike Trainer's method, it does not push.
        """
        if self.writer.directory is not None:
            # Trainer calls this method within `_save_checkpoint`, which renames the files itself.
            super().save_model(output_dir, _internal_call=True)
            return
        directory = Path(output_dir or self.args.output_dir)
        with self.writer.writing_model(directory) as source:
            super().save_model(str(source), _internal_call=True)

    def save_state(self) -> None:
        with self.writer.reporting_full_disks(Path(self.args.output_dir, TRAINER_STATE_NAME)):
            super().save_state()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # With a sharded model, `write_model` is a collective that all ranks must enter.
        if not self.args.should_save and not self.is_distributed_loading_by_transformers:
            return
        directory = output_dir or self.args.output_dir
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        write_model(directory, model, self.processing_class, state_dict, is_writer=self.args.should_save)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer, is_writer = self.optimizer.optimizer, self.args.should_save
        sharded.save_optimizer(output_dir, self.model, optimizer, self.lr_scheduler, is_writer=is_writer)

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

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, before training starts. Raise `ValueError` if the Hub refuses."""
        if self.is_world_process_zero():
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            private = self.args.hub_private_repo if private is None else private
            self.hub_model_id = self.pusher.repo_id = create_repository(name, private=private)

    def create_model_card(self, **kwargs: Any) -> None:
        """Write the card of a run to `output_dir`. With plain `TrainingArguments`, Trainer writes its own."""
        if not isinstance(self.args, LMTrainingArguments):
            super().create_model_card(**kwargs)
        elif self.is_world_process_zero():
            model = self.accelerator.unwrap_model(self.model)
            repo_id = self.hub_model_id or Path(self.args.output_dir).name
            write_run_card(self.args, model, self.state, self.run_facts, repo_id, self._layout)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: Trainer would push an incomplete checkpoint. `_save_checkpoint` pushes the complete one."""

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Save the model, and push it with its card from `output_dir`. All ranks must call this method. It always waits
        for the upload. `pusher.report` tells whether the push succeeded.
        """
        if token is not None:
            raise UserError("Log in with `hf auth login` or set HF_TOKEN instead of passing a token.")
        if self.hub_model_id is None:
            self.init_hf_repo(private=private)
        self.save_model()
        if not self.is_world_process_zero():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        announce("pushing")
        self.create_model_card(**kwargs)
        # Pushes of checkpoints come first, so that the final model is the last commit.
        self.pusher.finish()
        self.pusher.push_model(message=commit_message, revision=revision)


__all__ = ["RunTrainer"]
