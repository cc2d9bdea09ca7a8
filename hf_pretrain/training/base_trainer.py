"""
`RunTrainer`: a `Trainer` whose runs can be stopped, resumed and pushed, whatever the stage. It connects plain parts
(docs/architecture.md), which work without a Trainer. Its overrides stand where Trainer has neither an event nor an
argument; the comment at each says why.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints import optimizer_state
from ..checkpoints.directory import checkpoint_path, rotate_checkpoints
from ..checkpoints.whole_weights import gather_weights
from ..checkpoints.writer import CheckpointWriter, cast_files, checkpoint_bytes, write_model
from ..loading.adapters import base_model_of
from ..model.decoder_layer import MiniMindDecoderLayer
from ..model.loss import MiniMindLMHead
from ..rows.row_source import RowSource
from ..runtime.command_line import announce
from ..runtime.devices import compile_modules
from ..runtime.errors import UserError
from ..runtime.launchers import launcher
from ..runtime.named import load_named
from ..runtime.ranks import on_main_process
from ..runtime.signals import UserCodeExit, let_workers_survive_one_sigterm, watch_launcher
from .budgets import PARTS_OF_TIME, TimeBudget, space_evaluations
from .callbacks import RunFigures, SaveBest
from .deepspeed_support import gather_from_deepspeed, refusing_mismatches
from .float8 import convert_to_float8
from .launch import check_accumulation
from .optimizers import OPTIMIZERS, complete_schedule, refusing, restore_settings
from .reporting import write_model_card
from .resume_check import check_resume, describe_run, digest_fixed_weights, restore_best
from .resuming import checkpoint_to_resume
from .run import Run, check_callbacks
from .settling import overriding
from .step_loss import FiniteCheck
from .stopping import RunStopped, StopCallback, end_nonfinite_run, end_stopped_run, record_stop, restore_endings
from .trainer_state import keeps_state_on_disk, load_state, load_weights, save_state
from .training_arguments import LMTrainingArguments


class RunTrainer(Trainer):
    """
    A `Trainer` with the behaviour described above. It also compiles each decoder layer and the loss
    (`--torch_compile`), trains with Muon (`--optim_preset muon`, the default of pretraining), and logs
    `tokens_per_second` and `peak_memory_gib`.

    Args:
        run ([`~training.run.Run`], *optional*): the run of a recipe, settled. Without it, the trainer makes a run from
            `args`.
        model, args, kwargs: as for [`~transformers.Trainer`].
    """

    args: LMTrainingArguments

    def __init__(self, model: Any, *, args: TrainingArguments | None = None, run: Run | None = None, **kwargs: Any):
        self.run = run or Run.of_trainer(args, model, kwargs)
        args = self.run.args
        self._checkpoint: str | None = None
        # Whether the parameter groups of a resumed run keep their settings, and only the state is the checkpoint's.
        self._keeps_new_groups = False
        # Digest these weights now: later, they are wrapped or sharded.
        self.run.fixed_weights |= digest_fixed_weights(model, args)
        # NOTE: Trainer's constructor raises if a sharded model would save its optimizer. `trainer_state.py` saves
        # it. Trainer would also create the repository, which `HubPusher` does.
        only_model = args.save_only_model or model.is_distributed_loading_by_transformers
        with overriding(args, save_only_model=only_model, push_to_hub=False):
            super().__init__(model, args=args, **kwargs)
        # NOTE: Trainer sets it in `train` only, and `training_step` divides by it.
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self._connect_parts()
        base_model = base_model_of(self.model)
        if base_model.config.tie_word_embeddings:
            # Files hold a tied head once, as the embedding, and Trainer would warn on resume that it is missing.
            self.model._keys_to_ignore_on_save = list(base_model._tied_weights_keys or ())
        check_accumulation(args, base_model)
        if args.fp8:
            convert_to_float8(base_model.model.layers, emulates=args.fp8_emulate)
        if args.compiles_layers:
            parts = [part for part in base_model.modules() if isinstance(part, MiniMindDecoderLayer | MiniMindLMHead)]
            compile_modules(parts, **args.compile_options)

    def _connect_parts(self) -> None:
        args, run = self.args, self.run
        self.writer = CheckpointWriter(args, lambda: checkpoint_bytes(self.model, args))
        if run.pushes:
            self._create_repository()
        # DeepSpeed's norm is on the host already, and a spike must be known before its update.
        is_late = args.device.type == "cuda" and not self.is_deepspeed_enabled and not args.skip_spikes
        self.finite_check = FiniteCheck(
            run.ranks, is_late=is_late, end=lambda what, step: end_nonfinite_run(self, what, step)
        )
        self.figures = RunFigures(self.finite_check, lambda: self.eval_dataset)
        self.time_budget = TimeBudget(args.max_minutes, run.ranks) if args.max_minutes is not None else None
        # First of all callbacks: the others, such as trackers, see its figures.
        self.callback_handler.callbacks.insert(0, self.figures)
        if self.time_budget is not None:
            self.add_callback(self.time_budget)
        self.add_callback(SaveBest())
        self.add_callback(StopCallback(run.ranks, run.signals, begin=self._begin_training))

    # Devices, optimizer and rows

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        # NOTE: accelerate applies autocast to every model except FSDP2 models. There it relies on the casting policy,
        # which `complete_fsdp_args` turns off.
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def create_optimizer(self, model: Any = None):
        # `optimizer_cls_and_kwargs` gets no names of parameters, and no model that FSDP or DeepSpeed has wrapped.
        build = OPTIMIZERS[self.args.optim_preset].build
        if self.optimizer is None and build is not None and self.optimizer_cls_and_kwargs is None:
            self.optimizer = build(model or self.model, self.args, uses_deepspeed=self.is_deepspeed_enabled)
        with refusing("--optim_args", self.args.optim_args):
            return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        # Only here is the number of steps known.
        budget = self.time_budget
        num_training_steps = num_training_steps if budget is None else PARTS_OF_TIME
        typed, completed = self.args.lr_scheduler_kwargs, complete_schedule(self.args, num_training_steps)
        with overriding(self.args, lr_scheduler_kwargs=completed), refusing("--lr_scheduler_kwargs", typed):
            scheduler = super().create_scheduler(num_training_steps, optimizer)
        # The state of a checkpoint replaces their settings.
        self._new_groups = [dict(group) for group in (optimizer or self.optimizer).param_groups]
        return scheduler if budget is None else budget.follow(scheduler)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different rows. Tensor-parallel ranks share theirs."""
        return self.accelerator.num_processes // self.get_tp_size()

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return the rows that a data loader reads. Subclasses override this method instead of `_get_dataloader`."""
        return RowSource(dataset, batch_size, sampler_fn)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        # NOTE: `get_train_dataloader` builds samplers and workers, too, and TRL's trainers call this method.
        source = self._row_source(dataset, description, batch_size, sampler_fn, is_training)
        # NOTE: Trainer reads the collator from its attribute and takes no argument for it.
        collator = self.data_collator
        self.data_collator = source.collator or collator
        # The flag is about training. An evaluation covers the whole set.
        with overriding(self.args, dataloader_drop_last=self.args.dataloader_drop_last and is_training):
            loader = super()._get_dataloader(
                source.dataset, description, source.batch_size, source.sampler_fn, is_training, **kwargs
            )
        self.data_collator = collator
        # A launcher sends SIGTERM to the whole process group. The run still needs its workers to finish the step.
        # accelerate may have wrapped torch's loader.
        let_workers_survive_one_sigterm(getattr(loader, "base_dataloader", loader))
        return loader

    # A run from its beginning to its end

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any):
        """
        Train as [`~transformers.Trainer.train`] does, and lock `output_dir` against other runs meanwhile. To resume,
        pass a checkpoint directory, or `True` for the newest checkpoint in `output_dir` that verifies. Raise
        `SystemExit` with the exit statuses that docs/checkpoints.md lists.
        """
        # A notebook's launcher forks its ranks after the import of the package.
        watch_launcher(launcher())
        with self.run.signals.listening():
            self._describe_run(resume_from_checkpoint)
            # The run that wrote a checkpoint has evaluated before its first step.
            evaluates = self.args.eval_on_start and self._checkpoint is None
            with self.run.directory.locked(self.args):
                try:
                    # The caller saves the model, and only `push_to_hub` waits for the pushes of checkpoints.
                    with overriding(self.args, eval_on_start=evaluates):
                        return super().train(self._checkpoint, trial, *args, **kwargs)
                except RunStopped as stopped:
                    end_stopped_run(self, stopped.number)
                except (Exception, UserCodeExit) as error:
                    record_stop(self, repr(error))
                    raise

    def _describe_run(self, resume_from_checkpoint: str | bool | None) -> None:
        """Choose the checkpoint, describe the run, and refuse what cannot be resumed exactly, or does not fit."""
        check_callbacks(self)
        self._description = describe_run(self)
        self._checkpoint = str(resume_from_checkpoint) if resume_from_checkpoint else None
        # A recipe has chosen and verified its checkpoint before it loaded data and model.
        if self._checkpoint not in (None, self.run.checkpoint):
            self._checkpoint = checkpoint_to_resume(self.args, self._checkpoint)
        if self._checkpoint is not None:
            check_resume(self._checkpoint, self._description, self.args, self.run.others)
        on_main_process(self.args, self.writer.check_space)

    def _begin_training(self) -> None:
        """Prepare the parts for the first step."""
        space_evaluations(self.args, self.state)
        # Ranks with the same rows share their dropout. Others draw their own, which a checkpoint then restores.
        if rank := self.args.process_index // self.args.tp_size:
            torch.manual_seed(self.args.seed + rank)
        restore_endings(self)
        if self._checkpoint is not None:
            restore_best(self, self._checkpoint)
            for part in self.run.saved_states:
                part.load(self, self._checkpoint)
            if self.args.allow_inexact_resume or self._keeps_new_groups:
                restore_settings(self.optimizer, self.lr_scheduler, self._new_groups)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        if not self.is_in_train:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            # NOTE: Trainer would train a finished run for one more step.
            self.control.should_training_stop = True
            return [], None
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches and self.state.global_step == 0:
            # Trainer only warns.
            raise UserError("Nothing was trained: no rows, or too few for --dataloader_drop_last. See --dataset_name.")
        return batches, num_items

    def _get_grad_norm(self, model: Any, grad_norm: Any = None):
        # NOTE: Trainer has no public hook between the gradient's norm and the update. DeepSpeed has already updated
        # the weights.
        grad_norm, step = super()._get_grad_norm(model, grad_norm), self.state.global_step + 1
        self.finite_check.read()
        if self.accelerator.scaler is not None:
            # The loss scaler of float16 produces infinite gradients by design and skips such steps itself.
            self.finite_check.compare_losses(step)
        elif grad_norm is not None:
            self.finite_check.take_norm(grad_norm, step)
        # The log must not call the norm of updates a norm of gradients.
        return None if self.overwrites_gradients else grad_norm

    @property
    def overwrites_gradients(self) -> bool:
        """Whether the gradients of a step have become updates: DeepSpeed's Muon does so in the backward pass."""
        return self.is_deepspeed_enabled and OPTIMIZERS[self.args.optim_preset].build is not None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: `mfu` counts better, and Trainer's count costs milliseconds in each step."""
        return 0

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # No event comes before an evaluation.
        self.finite_check.read()
        device = self.args.device
        # Restore the random state afterwards: training must not depend on how often it is evaluated.
        restored = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
        with restored, self.figures.throughput.paused():
            return super().evaluate(*args, **kwargs)

    # Checkpoints and models. `on_save` comes after Trainer has written the final directory.

    @property
    def layout(self) -> str:
        """Layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`."""
        if self.is_deepspeed_enabled:
            return f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        return "FSDP" if self.is_fsdp_enabled or self.is_distributed_loading_by_transformers else "one file"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write, push and rotate."""
        self.finite_check.read()
        self.figures.read_tokens(self.state)
        target = checkpoint_path(self.args.output_dir, self.state.global_step)
        with self.figures.throughput.paused():
            with self.writer.writing_checkpoint(target, self._description) as source:
                with overriding(self.args, output_dir=str(source.parent), push_to_hub=False):
                    super()._save_checkpoint(model, trial)
                for part in () if self.args.save_only_model else self.run.saved_states:
                    part.save(self, source)
                # Trainer recorded the path in `.saving/` as the best checkpoint, and wrote it to the state.
                if self.state.best_model_checkpoint == str(source):
                    self.state.best_model_checkpoint = str(target)
                if self.args.should_save:
                    self.state.save_to_json(str(source / TRAINER_STATE_NAME))
            if self.run.pushes and self.is_world_process_zero():
                self.callback_handler.on_push_begin(self.args, self.state, self.control)
                self.pusher.push_checkpoint(target)
            if self.args.should_save:
                rotate_checkpoints(target, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model to `output_dir`, whole or not at all, without a push. All ranks must call this method."""
        if self.writer.directory is not None:
            # Trainer calls this method within `_save_checkpoint`, which renames the files itself.
            self._write_model(output_dir)
            return
        self.finite_check.read()
        with self.writer.writing_model(Path(output_dir or self.args.output_dir)) as source:
            self._write_model(str(source))
            if self.args.save_dtype and self.args.should_save:
                cast_files(source, self.args.save_dtype)

    def _write_model(self, directory: str) -> None:
        """Write the whole model to a directory. All ranks must call this method."""
        model, weights = self.accelerator.unwrap_model(self.model, keep_torch_compile=False), None
        if self.is_deepspeed_enabled:
            model, weights = gather_from_deepspeed(self.accelerator, self.model_wrapped, model)
        elif self.is_fsdp_enabled:
            weights = gather_weights(self.model)
        # With a model that transformers shards, `write_model` is a collective that all ranks must enter.
        if self.args.should_save or self.is_distributed_loading_by_transformers:
            write_model(directory, model, self.processing_class, weights, is_writer=self.args.should_save)

    # The state of a checkpoint is the same under every launcher (`trainer_state.py`). Trainer would write shards under
    # DeepSpeed and FSDP, and refuse models that transformers shards.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if keeps_state_on_disk(self):
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            save_state(self, output_dir)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, checkpoint: str | None):
        # There is no hook between the preparation and the loading.
        is_whole = checkpoint is not None and optimizer_state.is_whole(checkpoint)
        with refusing_mismatches(self.accelerator):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None if is_whole else checkpoint)
        self._keeps_new_groups = is_whole and not load_state(self, checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_distributed_loading_by_transformers:
            load_weights(self, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or self.is_distributed_loading_by_transformers:
            load_weights(self, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    # The Hub

    @cached_property
    def pusher(self) -> Any:
        """The [`~hub.pushing.HubPusher`] of the run."""
        return load_named("hf_pretrain.hub.pushing:HubPusher")(
            self.run.directory.path,
            strategy=self.args.hub_strategy,
            revision=self.args.hub_revision,
            pushes_always=self.args.hub_always_push,
            write_card=self.create_model_card,
            gives_up=lambda: self.run.signals.is_impatient,
        )

    def _create_repository(self) -> None:
        """Create the repository, before training starts. Raise `UserError` if the Hub refuses."""
        if self.is_world_process_zero():
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            create_repository = load_named("hf_pretrain.hub.pushing:create_repository")
            self.hub_model_id = self.pusher.repo_id = create_repository(name, private=self.args.hub_private_repo)

    def create_model_card(self, **kwargs: Any) -> None:
        """Write the card of a run to `output_dir`. TRL's trainers call this method for each checkpoint."""
        if self.is_world_process_zero():
            write_model_card(self)

    def push_to_hub(self, commit_message: str | None = "End of training", *args: Any, **kwargs: Any) -> None:
        """Save the model, and push it with its card; `pusher.report` tells the result. All ranks call this method."""
        if self.hub_model_id is None:
            self._create_repository()
        self.save_model()
        if not self.is_world_process_zero():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        announce("pushing")
        self.create_model_card()
        # Pushes of checkpoints come first, so that the final model is the last commit.
        self.pusher.finish()
        self.pusher.push_model(message=commit_message)
