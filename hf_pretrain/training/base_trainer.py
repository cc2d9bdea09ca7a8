"""
`RunTrainer`: a `Trainer` whose runs can be stopped, resumed and pushed, whatever the stage. It connects plain parts to
the hooks of Trainer (docs/architecture.md). Each part works without a Trainer.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from signal import Signals
from typing import Any, NoReturn

import torch
from transformers import TrainingArguments

from ..checkpoints.directory import checkpoint_path, newest_checkpoint
from ..hub.model_card import RunFacts
from ..runtime.errors import UserError
from ..runtime.ranks import on_main_process
from ..runtime.signals import SignalListener, let_workers_survive_one_sigterm, watch_launcher
from ..weights.adapters import base_model_of, is_adapted
from .efficiency import peak_memory_bytes
from .end_report import write_run_page
from .launch import launcher
from .measurements import RouterLoad, Throughput, to_shares
from .optimizers import build_muon, complete_learning_rate
from .resume_check import RunDescription, digest_fixed_weights
from .row_source import RowSource, is_stream, read_batches
from .run_directory import RunDirectory
from .saving import SavingTrainer
from .stopping import EXIT_NOT_FINITE, RunStopped, StopCallback, end_all_ranks, resume_hint
from .training_arguments import MIN_EVAL_STEPS, LMTrainingArguments, optimizer_name


class RunTrainer(SavingTrainer):
    """
    A `Trainer` with the behaviour described above. It also compiles each decoder layer (`--torch_compile`), trains
    with Muon (`--optim_preset muon`, the default of pretraining), and logs `tokens_per_second` and `peak_memory_gib`.

    Args:
        model ([`~transformers.PreTrainedModel`]), args ([`~transformers.TrainingArguments`]), kwargs: the arguments of
            [`~transformers.Trainer`].
        run_facts ([`~hub.model_card.RunFacts`], *optional*): facts about the data for the model card.
    """

    def __init__(
        self,
        model: Any,
        *,
        args: TrainingArguments | None = None,
        run_facts: RunFacts | None = None,
        **kwargs: Any,
    ):
        args = args or TrainingArguments()
        self.run_facts = run_facts or RunFacts()
        # Plain `TrainingArguments` have none of our flags.
        self.lm_args = args if isinstance(args, LMTrainingArguments) else None
        self.signals = SignalListener()
        self._throughput = Throughput()
        self._weight_decays: list[float] = []
        self._checkpoint: str | None = None
        self._evaluation_is_due = False
        # Digest these weights now: later, they are wrapped or sharded.
        self._fixed_weights = digest_fixed_weights(model, args)
        # NOTE: Trainer sets `config.use_cache` to this value, for the training pass, but the config is saved with the
        # model: all programs that load it would recompute the whole text for each token that they generate.
        args.use_cache = model.config.use_cache
        # NOTE: Trainer's constructor raises if a sharded model would save its optimizer. `checkpoints.sharded` saves
        # it, so the constructor must not see the request.
        save_only_model = args.save_only_model
        args.save_only_model = save_only_model or model.is_distributed_loading_by_transformers
        super().__init__(model, args=args, **kwargs)
        args.save_only_model = save_only_model
        # NOTE: Trainer sets it in `train` only, and `training_step` divides by it.
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self.stop = StopCallback(self.ranks, self.signals, begin=self._begin_training)
        self.add_callback(self.stop)
        if optimizer_name(args) == "muon" and is_adapted(self.model):
            raise UserError("--optim_preset muon is not possible for an adapter. Pass --optim_preset adamw.")
        base_model = base_model_of(self.model)
        complete_learning_rate(args, base_model.config.hidden_size)
        if base_model.config.tie_word_embeddings:
            # Files hold a tied head once, as the embedding, and Trainer would warn on resume that it is missing.
            self.model._keys_to_ignore_on_save = list(base_model._tied_weights_keys or ())
        if self.lm_args is not None and self.lm_args.compiles_layers:
            # Trainer would compile the whole model, again for each length of a batch and for each mode.
            for layer in base_model.model.layers:
                layer.compile(**self.lm_args.compile_options)

    # Parts and devices

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
        if isinstance(optimizer, torch.optim.Optimizer):
            # DeepSpeed's universal checkpoints lose them, and `repair_universal_checkpoint` restores them.
            self._weight_decays = [group["weight_decay"] for group in optimizer.param_groups]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        given = self.args.lr_scheduler_kwargs
        # NOTE: transformers has no defaults. Restore the arguments, because a later resume compares them.
        if self.args.lr_scheduler_type == "warmup_stable_decay":
            own = {"num_decay_steps": math.ceil(0.2 * num_training_steps), "min_lr_ratio": 0.1}
            self.args.lr_scheduler_kwargs = own | (given or {})
        elif self.args.lr_scheduler_type == "cosine_with_min_lr":
            self.args.lr_scheduler_kwargs = given or {"min_lr_rate": 0.1}
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self.args.lr_scheduler_kwargs = given
        return scheduler

    def _other_arguments(self) -> list[Any]:
        """Return the arguments of the run besides `args`. Subclasses that get more override this method."""
        return [] if self.lm_args is None else list(self.lm_args.other_arguments)

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return the rows that a data loader reads. Subclasses override this method instead of `_get_dataloader`."""
        return RowSource(dataset, batch_size, sampler_fn)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        # NOTE: `get_train_dataloader` builds samplers and workers, too, and TRL's trainers call this method.
        source = self._row_source(dataset, description, batch_size, sampler_fn, is_training)
        # NOTE: Trainer reads the collator from its attribute and takes no argument for it.
        collator: Any = self.data_collator
        drops_last = self.args.dataloader_drop_last
        self.data_collator = source.collator or collator
        # The flag is about training. An evaluation covers the whole set.
        self.args.dataloader_drop_last = drops_last and is_training
        loader = super()._get_dataloader(
            source.dataset, description, source.batch_size, source.sampler_fn, is_training, **kwargs
        )
        self.data_collator, self.args.dataloader_drop_last = collator, drops_last
        # A launcher sends SIGTERM to the whole process group. The run still needs its workers to finish the step.
        # accelerate may have wrapped torch's loader.
        let_workers_survive_one_sigterm(getattr(loader, "base_dataloader", loader))
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
                self._describe_run(resume_from_checkpoint)
            with RunDirectory(self.args).locked():
                try:
                    # The page takes seconds, so write it after this block: the other ranks wait for the roll call.
                    with self.ranks.naming_missing():
                        output = super().train(self._checkpoint, trial, *args, **kwargs)
                except RunStopped as stopped:
                    self._stop(stopped.number)
                except Exception as error:
                    self._record_stop(repr(error))
                    raise
                self.pusher.finish()
                return output

    def _describe_run(self, resume_from_checkpoint: str | bool | None) -> None:
        """Choose the checkpoint, describe the run, and refuse what cannot be resumed exactly, or does not fit."""
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
        self._checkpoint = str(resume_from_checkpoint) if resume_from_checkpoint else None
        is_resumed = self._checkpoint is not None
        self._evaluation_is_due = is_resumed and self.description.check_resume(self._checkpoint, self.state)
        on_main_process(self.args, self.writer.check_space)

    def _begin_training(self) -> None:
        """Prepare the parts for the first step, and make up for an evaluation that a signal cut off."""
        self._throughput = Throughput(self.state.num_input_tokens_seen)
        if self.lm_args is not None and self.lm_args.spaces_evaluations:
            # In short runs, a tenth of all steps would be too few. Trainer has just turned the share into steps.
            self.state.eval_steps = max(self.state.eval_steps, MIN_EVAL_STEPS)
        if self._checkpoint is not None:
            # The run that wrote the checkpoint has evaluated before its first step.
            self.args.eval_on_start = False
        if self._evaluation_is_due:
            # NOTE: `eval_on_start` would neither choose the best model nor step schedules that follow the metrics.
            metrics = self._evaluate(None, None)
            if self._determine_best_metric(metrics, None):
                self.state.best_model_checkpoint = self._checkpoint

    # Stopping

    def _stop(self, number: int) -> NoReturn:
        """Save the run if a signal cut off its evaluation, and end all ranks."""
        if self.stop.cut_off_evaluation and self.stop.num_steps:
            self.stop.evaluation_is_due = True
            self._save_checkpoint(self.model, trial=None)
        # Callbacks close their files and trackers here.
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        name, hint = Signals(number).name, "Nothing was trained since the run was started."
        self._record_stop(name)
        if self.stop.num_steps:
            hint = resume_hint(self.args)
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
        if self.state.global_step >= self.state.max_steps:
            # NOTE: Trainer would train a finished run for one more step.
            self.control.should_training_stop = True
            return [], None
        iterator = self._read_batches(epoch_iterator, num_batches)
        self._throughput.begin()
        batches, num_items = super().get_batch_samples(iterator, num_batches, device)
        if not batches and self.state.global_step == 0:
            # Trainer only warns.
            raise UserError("Nothing was trained: the training data gave no rows. Check --dataset_name.")
        return batches, num_items

    def _read_batches(self, iterator: Iterator, num_batches: int) -> Iterator:
        """Return an iterator over the batches of a step. If a stream cannot be read, save, and raise its error."""
        if self.args.world_size > 1 and not is_stream(self.train_dataset):
            # With several ranks, the check below costs one more collective per step. Only streams pay for it.
            return iterator
        batches, error = read_batches(iterator, num_batches)
        if self.ranks.largest(int(error is not None)):
            step = self.state.global_step
            if step and not on_main_process(self.args, checkpoint_path(self.args.output_dir, step).is_dir):
                self._save_checkpoint(self.model, trial=None)
            if step and self.is_world_process_zero():
                message = f"The data could not be read after step {step}. {resume_hint(self.args)}"
                print(message, file=sys.stderr, flush=True)
            raise error or RuntimeError("Another rank could not read its data: see its output.")
        return iter(batches)

    # Non-finite steps

    def _get_grad_norm(self, model: Any, grad_norm: Any = None):
        # NOTE: Trainer has no public hook between the gradient's norm and the update. DeepSpeed has already updated
        # the weights.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if self.accelerator.scaler is None:
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

    def _suspects(self) -> list[tuple[str, bool]]:
        """Return the rows of this rank's step, and whether their losses are finite. Subclasses override it."""
        return []

    def _meet_nonfinite(self, what: str) -> NoReturn:
        """End the run before the update. All ranks call this method."""
        found = [row for part in self.ranks.gather(self._suspects()) for row in part]
        # If only the gradient is not finite, all rows are suspects.
        suspects = [row for row, is_finite in found if not is_finite] or [row for row, _ in found]
        more = f" and {len(suspects) - 8} more" if len(suspects) > 8 else ""
        rows = f" It took the rows {', '.join(suspects[:8])}{more}." if suspects else ""
        message = (
            f"{what} in step {self.state.global_step + 1}.{rows} The run stopped before the update, and the "
            f"checkpoints in {self.args.output_dir} are intact. Look at the rows, or resume with a lower "
            "--learning_rate and --allow_inexact_resume."
        )
        self._record_stop(message)
        self._end(EXIT_NOT_FINITE, message)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs |= self._measure()
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
