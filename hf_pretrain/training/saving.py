"""`SavingTrainer`: a `Trainer` that saves whole checkpoints and models, loads them under each layout, and pushes."""

from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints import sharded
from ..checkpoints.directory import checkpoint_path, rotate_checkpoints
from ..checkpoints.writer import CheckpointWriter, checkpoint_bytes, write_model
from ..hub.model_card import RunFacts
from ..hub.pushing import HubPusher, create_repository
from ..runtime.cpu import keep_freed_blocks
from ..runtime.progress import announce
from ..runtime.ranks import Ranks
from ..runtime.signals import SignalListener
from .deepspeed_support import gather_from_deepspeed, repair_universal_checkpoint
from .end_report import write_run_card
from .launch import complete_fsdp_args
from .measurements import Throughput
from .resume_check import RunDescription
from .stopping import StopCallback
from .training_arguments import LMTrainingArguments


class SavingTrainer(Trainer):
    """The part of [`~training.base_trainer.RunTrainer`] that saves, loads and pushes."""

    # `RunTrainer` sets these.
    run_facts: RunFacts
    lm_args: LMTrainingArguments | None
    signals: SignalListener
    stop: StopCallback
    description: RunDescription
    _throughput: Throughput
    _weight_decays: list[float]

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        args.fsdp_plugin_args = complete_fsdp_args(args.fsdp_plugin_args)
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

    @property
    def _layout(self) -> str:
        """Layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`."""
        if self.is_deepspeed_enabled:
            return f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        return "FSDP" if self.is_fsdp_enabled or self.is_distributed_loading_by_transformers else "one file"

    # Checkpoints and models

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.writer.directory or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write, push and rotate."""
        target = checkpoint_path(super()._get_output_dir(trial), self.state.global_step)
        run = self.description.after(self.state, evaluation_is_due=self.stop.evaluation_is_due)

        def add_files(directory: Path) -> None:
            # Trainer wrote the state before the path of the best checkpoint was corrected.
            self.state.save_to_json(str(directory / TRAINER_STATE_NAME))

        with self._throughput.paused():
            with self.writer.writing_checkpoint(target, run, add_files=add_files) as source:
                super()._save_checkpoint(model, trial)
                # Trainer recorded the path in `.saving/` as the best checkpoint.
                if self.state.best_model_checkpoint == str(source):
                    self.state.best_model_checkpoint = str(target)
            if self.args.push_to_hub and self.is_world_process_zero():
                self.callback_handler.on_push_begin(self.args, self.state, self.control)
                self.pusher.push_checkpoint(target)
            if self.args.should_save:
                rotate_checkpoints(target, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the model to `output_dir`. All ranks must call this method. The files get their final names once all of
        them are on the disk, so a crash never leaves half a model. Unlike Trainer's method, it does not push.
        """
        if self.writer.directory is not None:
            # Trainer calls this method within `_save_checkpoint`, which renames the files itself.
            self._write_model(output_dir)
            return
        directory = Path(output_dir or self.args.output_dir)
        with self.writer.writing_model(directory) as source:
            self._write_model(str(source))

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
            return
        if checkpoint is not None and self.is_deepspeed_enabled and self._weight_decays:
            # DeepSpeed has already loaded its optimizer together with the weights.
            repair_universal_checkpoint(self.optimizer, self._weight_decays)
        super()._load_optimizer_and_scheduler(checkpoint)

    # The Hub

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the repository, before training starts. Raise `ValueError` if the Hub refuses."""
        if self.is_world_process_zero():
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            self.hub_model_id = self.pusher.repo_id = create_repository(name, private=self.args.hub_private_repo)

    def create_model_card(self, **kwargs: Any) -> None:
        """Write the card of a run to `output_dir`. With plain `TrainingArguments`, Trainer writes its own."""
        if self.lm_args is None:
            super().create_model_card(**kwargs)
        elif self.is_world_process_zero():
            model = self.accelerator.unwrap_model(self.model)
            repo_id = self.hub_model_id or Path(self.args.output_dir).name
            write_run_card(self.lm_args, model, self.state, self.run_facts, repo_id, self._layout)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: Trainer would push an incomplete checkpoint. `_save_checkpoint` pushes the complete one."""

    def push_to_hub(self, commit_message: str | None = "End of training", *args: Any, **kwargs: Any) -> None:
        """
        Save the model, and push it with its card from `output_dir`. All ranks must call this method. It always waits
        for the upload. `pusher.report` tells whether the push succeeded.
        """
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
