"""
Spikes: steps whose loss or gradient is far larger than those before. Each is reported with the rows of its batch that
have the highest loss, and `--skip_spikes` leaves out its update, momentum and weight decay included.

A value is a spike if it is more than `NUM_DEVIATIONS` deviations above the median of the last `WINDOW` steps, and more
than its least ratio times the median. A deviation is 1.4826 times the median distance from the median, as in a normal
distribution; no single step can move it. OLMo-core skips steps by mean and standard deviation
(https://github.com/allenai/OLMo-core, `SkipStepOptimizer`).
"""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..runtime.errors import UserError
from .callbacks import print_step


if TYPE_CHECKING:
    from .masked_loss_trainer import MaskedLossTrainer
    from .training_arguments import LMTrainingArguments

WINDOW, LEAST_STEPS = 200, 50
NUM_DEVIATIONS = 8.0
# Norms vary more than losses. Of 350 steps of `tiny`, one was 11 deviations above the median, at 1.7 times its value;
# of 350 steps of fine-tuning with two conversations each, three were above twice the median.
LEAST_RATIOS = {"loss": 1.1, "gradient norm": 3.0}
# Rows in the report. They are looked up again only after so many steps without a spike: it takes a forward pass.
NUM_ROWS, QUIET_STEPS = 3, 10
FILE_NAME, STATE_NAME = "spikes.jsonl", "spikes.json"
# What the model reads of a row.
_ROW_FIELDS = ("input_ids", "labels", "position_ids", "attention_mask", "loss_mask")


def check_spikes(args: "LMTrainingArguments") -> None:
    """Raise `UserError` where an update cannot be left out."""
    if not args.skip_spikes:
        return
    if not args.has_masked_loss:
        raise UserError("--skip_spikes works in pretraining, fine-tuning and distillation. Leave it out.")
    if args.deepspeed_plugin is not None:
        raise UserError(
            "--skip_spikes: DeepSpeed updates the weights in the backward pass. Leave the flag out, and spikes are "
            "only reported; or use torchrun, with --fsdp_size for large models."
        )
    if args.fp16:
        raise UserError("--skip_spikes: in fp16, the loss scaler decides which steps are skipped. Leave it out.")


def is_spike(value: float, history: Sequence[float], least_ratio: float) -> bool:
    """Return whether a value lies far above those of the steps before it."""
    if len(history) < LEAST_STEPS:
        return False
    middle = median(history)
    deviation = 1.4826 * median(abs(each - middle) for each in history)
    return value > max(middle + NUM_DEVIATIONS * deviation, middle * least_ratio)


class SpikeWatch(TrainerCallback):
    """
    Report spikes, and skip their updates. Loss and norm are equal on all ranks, so all ranks find the same spikes.

    Args:
        trainer ([`~training.masked_loss_trainer.MaskedLossTrainer`]): the trainer.
    """

    def __init__(self, trainer: "MaskedLossTrainer"):
        self.trainer = trainer
        self.recent = {name: deque[float](maxlen=WINDOW) for name in LEAST_RATIOS}
        # The batches of this step and of the one before, whose values a GPU gives late.
        self._batches: deque[tuple[int, list[dict[str, torch.Tensor]]]] = deque(maxlen=2)
        self._is_spike, self._last_spike = False, -QUIET_STEPS

    def begin_step(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Take the batches of the next step."""
        self._batches.append((self.trainer.state.global_step + 1, batches))

    def add(self, step: int, *values: float) -> None:
        """Take the loss and the norm of the gradients of a step. All ranks call this method."""
        found = {}
        for (name, history), value in zip(self.recent.items(), values, strict=True):
            if is_spike(value, history, LEAST_RATIOS[name]):
                found[name] = {"value": value, "median": median(history)}
            history.append(value)
        self._is_spike = bool(found)
        if found:
            self._report(step, found)
            self._last_spike = step

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self._is_spike and args.skip_spikes:
            # Optimizers leave parameters without gradients alone.
            model.zero_grad(set_to_none=True)

    def _report(self, step: int, found: dict[str, dict[str, float]]) -> None:
        args, state = self.trainer.args, self.trainer.state
        rows: list[dict[str, Any]] = []
        if step - self._last_spike >= QUIET_STEPS:
            rows = sum(self.trainer.run.ranks.gather(self._rank_rows(dict(self._batches)[step])), [])
            rows = sorted(rows, key=lambda row: -row["loss"])[:NUM_ROWS]
        if not args.should_save:
            return
        path = Path(args.output_dir, FILE_NAME)
        with path.open("a", encoding="utf-8") as file:
            entry = {"step": step, "skipped": args.skip_spikes, **found, "rows": rows}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        values = ", ".join(f"{name} {each['value']:.4g} (median {each['median']:.4g})" for name, each in found.items())
        end = "; its update is skipped" if args.skip_spikes else ""
        first = f". The row with the highest loss, {rows[0]['loss']:.4g}: {rows[0]['text']!r:.80}" if rows else ""
        print_step(state, f"spike at step {step}: {values}{end}{first}. More in {path}")

    @torch.no_grad()
    def _rank_rows(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """Return the rows of this rank with the highest loss. All ranks have equally many rows."""
        trainer, rows = self.trainer, []
        trainer.model.eval()
        # A compiled layer would be compiled again for single rows.
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                given = {name: batch[name].to(trainer.args.device) for name in _ROW_FIELDS if name in batch}
                for row in range(len(given["input_ids"])):
                    part = {name: value[row : row + 1] for name, value in given.items()}
                    loss = trainer.model(**part, skip_logits=True, use_cache=False).ce_loss.item()
                    rows.append((loss, part["input_ids"][0].tolist()))
        trainer.model.train()
        rows = sorted(rows, key=lambda row: -row[0])[:NUM_ROWS]
        tokenizer = trainer.processing_class
        decode = tokenizer.decode if isinstance(tokenizer, PreTrainedTokenizerBase) else str
        return [{"loss": loss, "text": decode(ids)} for loss, ids in rows]

    # A state that checkpoints hold: what is skipped depends on the steps before.

    def save(self, trainer: Any, directory: Path) -> None:
        if trainer.args.should_save:
            state = {name: list(history) for name, history in self.recent.items()}
            (directory / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")

    def load(self, trainer: Any, checkpoint: str) -> None:
        path = Path(checkpoint, STATE_NAME)
        if path.exists():
            for name, values in json.loads(path.read_text(encoding="utf-8")).items():
                self.recent[name].extend(values)
