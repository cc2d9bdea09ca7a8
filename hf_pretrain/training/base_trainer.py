"""
`RunTrainer`: a `Trainer` whose runs can be stopped, resumed and pushed, whatever the stage. Its hooks connect plain
parts (docs/architecture.md). Each part works without a Trainer.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import REPOCARD_NAME
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints import sharded
from ..checkpoints.directory import checkpoint_path, newest_checkpoint, rotate_checkpoints
from ..checkpoints.writer import CheckpointWriter, cast_files, checkpoint_bytes, write_model
from ..data.padding_rows import RowSource, is_stream
from ..hub.model_card import RunFacts, format_run_card
from ..hub.pushing import HubPusher, create_repository
from ..runtime.command_line import announce
from ..runtime.devices import compile_layers, keep_freed_blocks
from ..runtime.errors import UserError
from ..runtime.metrics import first_figures
from ..runtime.ranks import Ranks, on_main_process
from ..runtime.signals import SignalListener, let_workers_survive_one_sigterm, watch_launcher
from ..weights.adapters import base_model_of
from .budgets import PARTS_OF_TIME, TimeBudget, space_evaluations
from .deepspeed_support import gather_from_deepspeed
from .end_report import describe_training
from .float8 import convert_to_float8
from .launch import check_accumulation, complete_fsdp_args, launcher
from .measurements import Throughput, peak_memory_bytes
from .optimizers import build_muon, complete_schedule
from .resume_check import check_resume, describe_run, digest_fixed_weights
from .run_directory import RunDirectory
from .stopping import GradientCheck, RunStopped, StopCallback, end_stopped_run, record_stop, restore_endings
from .training_arguments import LMTrainingArguments, complete_learning_rate, optimizer_name


class RunTrainer(Trainer):
    """
    A `Trainer` with the behaviour described above. It also compiles each decoder layer (`--torch_compile`), trains
    with Muon (`--optim_preset muon`, the default of pretraining), and logs `tokens_per_second` and `peak_memory_gib`.
    `run_facts` holds facts about the data for the model card; all other arguments are Trainer's.
    """

    args: LMTrainingArguments

    def __init__(
        self, model: Any, *, args: TrainingArguments | None = None, run_facts: RunFacts | None = None, **kwargs: Any
    ):
        args = args if isinstance(args, LMTrainingArguments) else LMTrainingArguments.of(args or TrainingArguments())
        self.run_facts = run_facts or RunFacts()
        if kwargs.get("eval_dataset") is None:
            # Our arguments evaluate by default, and Trainer refuses to evaluate without data. The last model is kept.
            args.eval_strategy, args.eval_on_start, args.load_best_model_at_end = "no", False, False
        self.signals, self._throughput = SignalListener(), Throughput()
        self._checkpoint: str | None = None
        # Digest these weights now: later, they are wrapped or sharded.
        self._fixed_weights = digest_fixed_weights(model, args)
        # NOTE: Trainer sets `config.use_cache` to this value, for the training pass, but the config is saved with the
        # model: all programs that load it would recompute the whole text for each token that they generate.
        args.use_cache = model.config.use_cache
        # NOTE: Trainer's constructor raises if a sharded model would save its optimizer. `checkpoints.sharded` saves
        # it, so the constructor must not see the request.
        save_only_model = args.save_only_model
        args.save_only_model = save_only_model or model.is_distributed_loading_by_transformers
        if args.has_default_workers and is_stream(kwargs.get("train_dataset")):
            # The order of a stream depends on the number of its readers.
            args.dataloader_num_workers = 0
        super().__init__(model, args=args, **kwargs)
        args.save_only_model = save_only_model
        # NOTE: Trainer sets it in `train` only, and `training_step` divides by it.
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        # DeepSpeed's norm is on the host already.
        is_late = self.args.device.type == "cuda" and not self.is_deepspeed_enabled
        self.gradient_check = GradientCheck(self, is_late=is_late)
        self.time_budget = TimeBudget(args.max_minutes, self.ranks) if args.max_minutes is not None else None
        if self.time_budget is not None:
            self.add_callback(self.time_budget)
        self.add_callback(StopCallback(self.ranks, self.signals, begin=self._begin_training))
        self._prepare_model(base_model_of(self.model))

    def _prepare_model(self, base_model: Any) -> None:
        """Complete the learning rate, and convert and compile the layers."""
        args = self.args
        complete_learning_rate(args, base_model.config.hidden_size)
        if base_model.config.tie_word_embeddings:
            # Files hold a tied head once, as the embedding, and Trainer would warn on resume that it is missing.
            self.model._keys_to_ignore_on_save = list(base_model._tied_weights_keys or ())
        check_accumulation(args, base_model)
        if args.fp8:
            convert_to_float8(base_model.model.layers, emulates=args.fp8_emulate)
        if args.compiles_layers:
            compile_layers(base_model.model.layers, args.device, **args.compile_options)

    # Devices, optimizer and rows

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        args.fsdp_plugin_args = complete_fsdp_args(args.fsdp_plugin_args)
        # Batches are copied from pinned memory while the GPU computes.
        args.accelerator_config.non_blocking = args.device.type == "cuda"
        super().create_accelerator_and_postprocess()
        if args.device.type == "cpu":
            keep_freed_blocks()
        # Make the parts here: the rest of Trainer's constructor already needs some of them.
        self.ranks = Ranks(args.world_size, args.process_index, timeout_seconds=args.ddp_timeout)
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

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        # NOTE: accelerate applies autocast to every model except FSDP2 models. There it relies on the casting policy,
        # which `create_accelerator_and_postprocess` turns off.
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def create_optimizer(self, model: Any = None):
        if self.optimizer is None and optimizer_name(self.args) == "muon":
            self.optimizer = build_muon(model or self.model, self.args, uses_deepspeed=self.is_deepspeed_enabled)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        budget = self.time_budget
        num_training_steps = num_training_steps if budget is None else PARTS_OF_TIME
        with complete_schedule(self.args, num_training_steps):
            scheduler = super().create_scheduler(num_training_steps, optimizer)
        return scheduler if budget is None else budget.follow(scheduler)

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return the rows that a data loader reads. Subclasses override this method instead of `_get_dataloader`."""
        return RowSource(dataset, batch_size, sampler_fn)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        # NOTE: `get_train_dataloader` builds samplers and workers, too, and TRL's trainers call this method.
        source = self._row_source(dataset, description, batch_size, sampler_fn, is_training)
        # NOTE: Trainer reads the collator from its attribute and takes no argument for it.
        collator, drops_last = self.data_collator, self.args.dataloader_drop_last
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
        Train as [`~transformers.Trainer.train`] does, and lock `output_dir` against other runs meanwhile. To resume,
        pass a checkpoint directory, or `True` for the newest checkpoint in `output_dir` that verifies. Raise
        `SystemExit` with the exit statuses that docs/checkpoints.md lists.
        """
        # Ranks whose launcher is gone must stop, or they would write into the directory of the next run.
        watch_launcher(launcher())
        with self.signals.listening():
            self._describe_run(resume_from_checkpoint)
            with RunDirectory(self.args).locked():
                try:
                    output = super().train(self._checkpoint, trial, *args, **kwargs)
                except RunStopped as stopped:
                    end_stopped_run(self, stopped.number)
                except Exception as error:
                    record_stop(self, repr(error))
                    raise
                self.pusher.finish()
                return output

    def _describe_run(self, resume_from_checkpoint: str | bool | None) -> None:
        """Choose the checkpoint, describe the run, and refuse what cannot be resumed exactly, or does not fit."""
        self._description = describe_run(self, self._fixed_weights)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = on_main_process(
                self.args, lambda: newest_checkpoint(self.args.output_dir, unverified=self.args.allow_inexact_resume)
            )
        self._checkpoint = str(resume_from_checkpoint) if resume_from_checkpoint else None
        if self._checkpoint is not None:
            check_resume(self._checkpoint, self._description, self.args)
        on_main_process(self.args, self.writer.check_space)

    def _begin_training(self) -> None:
        """Prepare the parts for the first step."""
        self._throughput = Throughput(self.state.num_input_tokens_seen)
        space_evaluations(self.args, self.state)
        if self._checkpoint is not None:
            # The run that wrote the checkpoint has evaluated before its first step.
            self.args.eval_on_start = False
        restore_endings(self)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        if not self.is_in_train:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            # NOTE: Trainer would train a finished run for one more step.
            self.control.should_training_stop = True
            return [], None
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._throughput.begin()
        if not batches and self.state.global_step == 0:
            # Trainer only warns.
            raise UserError("Nothing was trained: the training data gave no rows. Check --dataset_name.")
        return batches, num_items

    def _get_grad_norm(self, model: Any, grad_norm: Any = None):
        # NOTE: Trainer has no public hook between the gradient's norm and the update. DeepSpeed has already updated
        # the weights.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self.gradient_check.take(grad_norm)
        # NOTE: by now DeepSpeed has overwritten the gradients with Muon's updates. The log must not call the norm of
        # these a norm of gradients.
        is_of_updates = self.is_deepspeed_enabled and optimizer_name(self.args) == "muon"
        return None if is_of_updates else grad_norm

    def is_loss_finite(self) -> bool:
        """Return whether the losses of this rank's step are finite. Subclasses that see them override this method."""
        return True

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: `mfu` counts better, and Trainer's count costs milliseconds in each step."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.gradient_check.read()
        if "loss" in logs:
            logs |= self._measure()
        logs |= first_figures(logs, self.eval_dataset)
        super().log(logs, *args, **kwargs)

    def _measure(self) -> dict[str, float]:
        """Return the figures of the steps since the last log. All ranks call it. Subclasses add theirs."""
        memory = {"peak_memory_gib": peak_memory_bytes(self.args.device) / 2**30}
        return self._throughput.measure(self.state.num_input_tokens_seen) | memory

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.gradient_check.read()
        device = self.args.device
        # Restore the random state afterwards: training must not depend on how often it is evaluated.
        restored = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
        with restored, self._throughput.paused():
            return super().evaluate(*args, **kwargs)

    # Checkpoints and models

    @property
    def layout(self) -> str:
        """Layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`."""
        if self.is_deepspeed_enabled:
            return f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        return "FSDP" if self.is_fsdp_enabled or self.is_distributed_loading_by_transformers else "one file"

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.writer.directory or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write, push and rotate."""
        self.gradient_check.read()
        target = checkpoint_path(super()._get_output_dir(trial), self.state.global_step)
        with self._throughput.paused():
            with self.writer.writing_checkpoint(target, self._description) as source:
                super()._save_checkpoint(model, trial)
                # Trainer recorded the path in `.saving/` as the best checkpoint, and wrote it to the state.
                if self.state.best_model_checkpoint == str(source):
                    self.state.best_model_checkpoint = str(target)
                if self.args.should_save:
                    self.state.save_to_json(str(source / TRAINER_STATE_NAME))
            if self.args.push_to_hub and self.is_world_process_zero():
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
        self.gradient_check.read()
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
            weights = self.accelerator.get_state_dict(self.model)
        # With a model that transformers shards, `write_model` is a collective that all ranks must enter.
        if self.args.should_save or self.is_distributed_loading_by_transformers:
            write_model(directory, model, self.processing_class, weights, is_writer=self.args.should_save)

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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.is_distributed_loading_by_transformers:
            sharded.load_optimizer(checkpoint, self.model, self.optimizer.optimizer, self.lr_scheduler)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    # The Hub

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the repository, before training starts. Raise `ValueError` if the Hub refuses."""
        if self.is_world_process_zero():
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            self.hub_model_id = self.pusher.repo_id = create_repository(name, private=self.args.hub_private_repo)

    def create_model_card(self, **kwargs: Any) -> None:
        """Write the card of a run to `output_dir`."""
        if self.is_world_process_zero():
            model = self.accelerator.unwrap_model(self.model)
            directory = Path(self.args.output_dir)
            card = format_run_card(
                model,
                self.state,
                self.run_facts,
                repo_id=self.hub_model_id or directory.name,
                training=describe_training(self.args, self.state, self.layout),
                language=self.args.hub_language,
                license=self.args.hub_license,
            )
            (directory / REPOCARD_NAME).write_text(card, encoding="utf-8")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: Trainer would push an incomplete checkpoint. `_save_checkpoint` pushes the complete one."""

    def push_to_hub(self, commit_message: str | None = "End of training", *args: Any, **kwargs: Any) -> None:
        """Save the model, and push it with its card; `pusher.report` tells the result. All ranks call this method."""
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model()
        if not self.is_world_process_zero():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        announce("pushing")
        self.create_model_card()
        # Pushes of checkpoints come first, so that the final model is the last commit.
        self.pusher.finish()
        self.pusher.push_model(message=commit_message)
