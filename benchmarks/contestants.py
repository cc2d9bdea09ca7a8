"""
The contestants of `race.py`. Each of them trains a model for a number of steps, and reports its steps to a [`Run`].
"""

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, set_seed

from benchmarks import programs
from benchmarks.programs import Setting, wait_for
from benchmarks.upstream_style import UpstreamStyleModel, UpstreamStyleTrainer, load_checkout, logits_of
from hf_pretrain import MaskedLossTrainer
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.training_arguments import LMTrainingArguments


LOOP = "loop like MiniMind's"
# The contestants that `ours` competes with.
OTHERS = (LOOP, "stock Trainer", "TRL SFTTrainer")
# Seconds of training and validation loss, from before the first step until after the last one.
Curve = list[tuple[float, float]]


@dataclass(kw_only=True)
class RaceSetting(Setting):
    """
    Settings that all contestants share.

    Args:
        recipe (`Path`): YAML file of `recipes/pretrain.py`, from which `ours` takes its settings.
        flags (`dict[str, Any]`): flags of `ours` that differ from the YAML file.
        seconds (`float`): training time of each contestant.
        num_steps (`int`, *optional*): steps of the contestant; by default those that fit into the time.
        validation (`list[list[int]]`): token ids of the validation documents.
        upstream (`Path`, *optional*): checkout of MiniMind.
    """

    recipe: Path
    flags: dict[str, Any]
    seconds: float
    validation: list[list[int]]
    num_steps: int | None = None
    upstream: Path | None = None


def validation_loss(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    documents: list[list[int]],
    *,
    device: torch.device,
    bf16: bool,
    batch_size: int = 16,
) -> float:
    """
    Return the mean loss in nats per token, where each document stands alone in its row.

    Args:
        logits_of (`Callable`): maps ids `(batch_size, seq_len)` to logits `(batch_size, seq_len, vocab_size)`.
        documents (`list[list[int]]`): token ids of each document.
        device (`torch.device`), bf16 (`bool`): device of the model, and whether to compute under bfloat16 autocast.
        batch_size (`int`, defaults to 16): documents per batch.
    """
    # Documents of similar length share a batch and need little padding.
    rows = [torch.tensor(ids) for ids in sorted(documents, key=len)]
    total, num_tokens = 0.0, 0
    for start in range(0, len(rows), batch_size):
        ids = pad_sequence(rows[start : start + batch_size], batch_first=True, padding_value=-100)
        # Few different lengths, because torch.compile compiles again for each.
        ids = F.pad(ids, (0, -ids.shape[1] % 64), value=-100).to(device)
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            # Causal attention: the padding on the right changes no logits of the document.
            logits = logits_of(ids.clamp(min=0))
        labels = ids[:, 1:].flatten()
        total += F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels, reduction="sum").item()
        num_tokens += int((labels != -100).sum())
    return total / num_tokens


class Run:
    """
    Clock of one training run. It records the validation loss over the seconds of training, and ends the run.

    Args:
        setting ([`RaceSetting`]): the settings.
        barrier (`Barrier`): where the contestants wait for each other before the first step.
        num_steps (`int`): length of the run and of its learning rate schedule.
        max_seconds (`float`): end the run earlier, after so much training time.
        num_validations (`int`): evenly spaced validations after the one before the first step; 0 for none at all.
    """

    def __init__(
        self,
        setting: RaceSetting,
        barrier: Barrier | threading.Barrier,
        *,
        num_steps: int,
        max_seconds: float = math.inf,
        num_validations: int = 0,
    ):
        self.setting, self.barrier, self.num_steps, self.max_seconds = setting, barrier, num_steps, max_seconds
        self.due = {round(num_steps * (i + 1) / num_validations) for i in range(num_validations)}
        self.curve: Curve = []
        # The number of steps before each point of the curve.
        self.steps: list[int] = []
        self.seconds, self.num_done, self.resumed = 0.0, 0, 0.0
        # What the contestant chose by itself, for the record.
        self.settings: dict[str, Any] = {}

    def begin(self, model: nn.Module) -> None:
        """Wait for the other contestants. Call it when everything is ready for the first step."""
        if self.due:
            self._validate(model)
        self.barrier.wait()

    def end_step(self, model: nn.Module) -> bool:
        """Count a step, and return whether it was the last one."""
        wait_for(self.setting.device)
        self.num_done += 1
        # The clock starts after the first step, which may compile.
        if self.num_done > 1:
            self.seconds += time.perf_counter() - self.resumed
        if self.num_done in self.due:
            self._validate(model)
        self.resumed = time.perf_counter()
        return self.num_done >= self.num_steps or self.seconds >= self.max_seconds

    def _validate(self, model: nn.Module) -> None:
        model.eval()
        setting = self.setting
        loss = validation_loss(partial(logits_of, model), setting.validation, device=setting.device, bf16=setting.bf16)
        model.train()
        self.curve.append((self.seconds, loss))
        self.steps.append(self.num_done)


class RunCallback(TrainerCallback):
    """Connect a `Trainer` to a [`Run`]."""

    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.run.begin(model)

    def on_step_end(self, args, state, control, model, **kwargs):
        control.should_training_stop = self.run.end_step(model)


def train(trainer: Trainer, run: Run) -> None:
    trainer.add_callback(RunCallback(run))
    # Four contestants would print their logs at once.
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def ours(setting: RaceSetting, run: Run) -> None:
    """Train as `recipes/pretrain.py` does with the YAML file of the preset."""
    flags = {"config": setting.recipe, "seed": setting.seed, "bf16": setting.bf16, "max_steps": run.num_steps}
    flags |= {"output_dir": setting.output_dir, "eval_strategy": "no", "save_strategy": "no", "report_to": "none"}
    argv = [f"--{name}={value}" for name, value in (flags | setting.flags).items()] + ["--disable_tqdm=true"]
    model_args, data_args, args = parse_args(ModelArguments, DataArguments, LMTrainingArguments, argv=argv)
    set_seed(args.seed)
    model = load_model(model_args, setting.tokenizer)
    trainer = MaskedLossTrainer(
        model=model,
        args=args,
        data_collator=data_args.make_collator(setting.tokenizer),
        train_dataset=data_args.pack(setting.documents, setting.tokenizer)[0],
        processing_class=setting.tokenizer,
    )
    # The trainer has settled the learning rate.
    names = ("optim_preset", "learning_rate", "per_device_train_batch_size", "lr_scheduler_type", "warmup_steps")
    run.settings = {name: str(getattr(args, name)) for name in names}
    run.settings["initializer_range"] = str(model.config.initializer_range)
    train(trainer, run)


def minimind(setting: RaceSetting, run: Run) -> None:
    """Train in a loop like MiniMind's, with the classes of its checkout if there is one."""
    torch.manual_seed(setting.seed)
    model: nn.Module
    if setting.upstream is None:
        model, rows = UpstreamStyleModel(setting.config), setting.padded_rows
    else:
        model, rows = load_checkout(
            setting.upstream,
            setting.config,
            setting.documents,
            setting.tokenizer,
            max_length=setting.max_length,
            output_dir=setting.output_dir,
        )
    step = UpstreamStyleTrainer(model, setting.device, setting.tokenizer.pad_token_id, bf16=setting.bf16)
    loader = DataLoader(rows, batch_size=setting.batch_size, shuffle=True, drop_last=True)
    run.begin(model)
    for number, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
        # The schedule of MiniMind's `get_lr`: a cosine to 10 %, without warmup.
        share = 0.1 + 0.45 * (1 + math.cos(math.pi * number / run.num_steps))
        for group in step.optimizer.param_groups:
            group["lr"] = share * setting.learning_rate
        step(batch)
        if run.end_step(model):
            break


def schedule(run: Run) -> dict[str, Any]:
    """Return arguments of Trainer for the length of a run and a cosine to 10 %."""
    cosine = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    return cosine | {"warmup_steps": 0.02, "max_steps": run.num_steps}


CONTESTANTS: dict[str, Callable[[RaceSetting, Run], None]] = {
    "ours": ours,
    LOOP: minimind,
    "MiniMind": minimind,
    "stock Trainer": lambda setting, run: train(programs.stock_trainer(setting, **schedule(run)).trainer, run),
    "TRL SFTTrainer": lambda setting, run: train(programs.trl_sft(setting, **schedule(run)).trainer, run),
}
