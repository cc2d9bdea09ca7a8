"""
Spikes: steps whose loss or gradient is far larger than those before. Each is reported with the rows of its batch that
have the highest loss. `--skip_spikes` leaves out its update, momentum and weight decay included, at most
`MOST_SKIPPED` times one after another. `--rewind_spikes` goes back to the newest checkpoint and leaves those rows out
from there on, at most `MOST_REWINDS` times from the same checkpoint.

A value is a spike if it is more than `NUM_DEVIATIONS` deviations above the median of the last `WINDOW` steps, and more
than its least ratio times the median. A deviation is 1.4826 times the median distance from the median, as in a normal
distribution; no single step can move it. OLMo-core skips steps by mean and standard deviation
(https://github.com/allenai/OLMo-core, `SkipStepOptimizer`).
"""

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..checkpoints.directory import newest_checkpoint
from ..loading.adapters import base_model_of
from ..model.loss import prediction_weights
from ..reports.run_files import read_entries
from ..runtime.errors import UserError
from ..runtime.ranks import on_main_process
from .callbacks import print_step


if TYPE_CHECKING:
    from .masked_loss_trainer import MaskedLossTrainer
    from .training_arguments import LMTrainingArguments

WINDOW, LEAST_STEPS = 200, 50
NUM_DEVIATIONS = 8.0
# Norms vary more than losses. Of 350 steps of `tiny`, one was 11 deviations above the median, at 1.7 times its value;
# of 350 steps of fine-tuning with two conversations each, three were above twice the median.
LEAST_RATIOS = {"loss": 1.1, "gradient norm": 3.0}
# Updates that are skipped one after another, and times that a run goes back to one checkpoint.
MOST_SKIPPED, MOST_REWINDS = 10, 5
# Rows in the report. They are looked up again only after so many steps without a spike: it takes a forward pass.
NUM_ROWS, QUIET_STEPS = 3, 10
FILE_NAME, STATE_NAME = "spikes.jsonl", "spikes.json"
# What the model reads of a row.
_ROW_FIELDS = ("input_ids", "labels", "position_ids", "attention_mask", "loss_mask")


class Rewound(Exception):
    """Exception that ends the training, so that it goes on from a checkpoint."""

    def __init__(self, checkpoint: str):
        self.checkpoint = checkpoint


def check_spikes(args: "LMTrainingArguments") -> None:
    """Raise `UserError` where an update cannot be left out, or where there would be no checkpoint to go back to."""
    for flag in ("skip_spikes", "rewind_spikes"):
        if getattr(args, flag) and not args.has_masked_loss:
            raise UserError(f"--{flag} works in pretraining, fine-tuning and distillation. Leave it out.")
        if getattr(args, flag) and args.fp16:
            raise UserError(f"--{flag}: in fp16, the loss scaler decides which steps are skipped. Leave it out.")
    if args.skip_spikes and args.deepspeed_plugin is not None:
        raise UserError(
            "--skip_spikes: DeepSpeed updates the weights in the backward pass. Use --rewind_spikes, or torchrun with "
            "--fsdp_size for large models; or leave the flag out, and spikes are only reported."
        )
    if args.rewind_spikes and args.neftune_noise_alpha is not None:
        raise UserError("--rewind_spikes cannot go back with --neftune_noise_alpha. Leave one out.")
    if args.rewind_spikes and (args.skip_spikes or args.save_only_model or args.save_strategy == "no"):
        raise UserError(
            "--rewind_spikes goes back to a checkpoint with the state of the optimizer. Leave out --skip_spikes, "
            "--save_only_model and --save_strategy no."
        )


def row_digest(ids: list[int], pad_token_id: int) -> str:
    """Return a digest of a row of token ids, without the padding at its end, which depends on the batch."""
    # NumPy trims zeros.
    kept = np.trim_zeros(np.asarray(ids, dtype=np.int64) - pad_token_id, "b")
    return xxhash.xxh3_64_hexdigest((kept + pad_token_id).tobytes())


def is_spike(value: float, history: Sequence[float], least_ratio: float) -> bool:
    """Return whether a value lies far above those of the steps before it."""
    if len(history) < LEAST_STEPS:
        return False
    middle = median(history)
    deviation = 1.4826 * median(abs(each - middle) for each in history)
    return value > max(middle + NUM_DEVIATIONS * deviation, middle * least_ratio)


class SpikeWatch(TrainerCallback):
    """
    Report spikes, and skip their updates or go back. Loss and norm are equal on all ranks, so all ranks find the same
    spikes.

    Args:
        trainer ([`~training.masked_loss_trainer.MaskedLossTrainer`]): the trainer.
    """

    def __init__(self, trainer: "MaskedLossTrainer"):
        self.trainer = trainer
        # The collator pads with it.
        self._pad_token_id = base_model_of(trainer.model).config.pad_token_id or 0
        self._forget()

    def _forget(self) -> None:
        # DeepSpeed's Muon gives no norm of the gradients.
        names = ["loss"] if self.trainer.overwrites_gradients else list(LEAST_RATIOS)
        self.recent = {name: deque[float](maxlen=WINDOW) for name in names}
        self._num_skipped, self._last_spike = 0, -QUIET_STEPS
        # The batches of the last steps, by their number. A GPU gives the values of a step in the one after it.
        self._batches: deque[tuple[int, list[dict[str, torch.Tensor]]]] = deque(maxlen=3)
        # The spike to report: its step, its values, and whether its update is skipped.
        self._found: tuple[int, dict[str, dict[str, float]], bool] | None = None
        # The digests of the rows that are left out, and the step after which they are.
        self.left_out: dict[str, int] = {}

    def begin_step(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Take the batches of the next step, and remove the labels of rows that are left out."""
        done = self.trainer.state.global_step
        if left_out := {row for row, since in self.left_out.items() if done >= since}:
            for batch in batches:
                is_out = [row_digest(ids, self._pad_token_id) in left_out for ids in batch["input_ids"].tolist()]
                batch["labels"][torch.tensor(is_out)] = -100
        self._batches.append((done + 1, batches))

    def add(self, step: int, *values: float) -> None:
        """Take the loss and the norm of the gradients of a step. All ranks call this method."""
        found = {}
        for (name, history), value in zip(self.recent.items(), values, strict=False):
            if is_spike(value, history, LEAST_RATIOS[name]):
                found[name] = {"value": value, "median": median(history)}
            history.append(value)
        # A loss that stays high is no spike, and only updates can lower it.
        skips = bool(found) and self.trainer.args.skip_spikes and self._num_skipped < MOST_SKIPPED
        self._num_skipped = self._num_skipped + 1 if skips else 0
        if found:
            self._found = step, found, skips

    def on_train_begin(self, args, state, control, **kwargs):
        # The file of an earlier run, whose checkpoints are gone.
        if state.global_step == 0 and args.should_save:
            with suppress(OSError):
                Path(args.output_dir, FILE_NAME).unlink()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self._found is not None and self._found[2]:
            # Optimizers leave parameters without gradients alone.
            model.zero_grad(set_to_none=True)

    # A report needs forward passes. Between backward and update, they would disturb FSDP's sharding. A step that the
    # run goes back from leaves no log and no checkpoint.

    def on_step_end(self, args, state, control, **kwargs):
        if self._found is None:
            return
        (step, found, skips), self._found = self._found, None
        rows: list[dict[str, Any]] = []
        if step - self._last_spike >= QUIET_STEPS:
            rows = sum(self.trainer.run.ranks.gather(self._rank_rows(dict(self._batches)[step])), [])
            rows = sorted(rows, key=lambda row: -row["loss"])[:NUM_ROWS]
        self._last_spike = step
        entry = {"step": step, "skipped": skips, **found, "rows": rows}
        checkpoint = on_main_process(args, lambda: self._record(entry, found))
        if checkpoint is not None:
            raise Rewound(checkpoint)

    # A GPU gives the values of the last step at the end.
    on_train_end = on_step_end

    def _record(self, entry: dict[str, Any], found: dict[str, dict[str, float]]) -> str | None:
        """Write and print a spike. Return the checkpoint to go back to, if any. Only the main process calls it."""
        args, rows = self.trainer.args, entry["rows"]
        checkpoint, why = self._find_checkpoint() if args.rewind_spikes and rows else (None, "")
        values = ", ".join(f"{name} {each['value']:.4g} (median {each['median']:.4g})" for name, each in found.items())
        text = f"spike at step {entry['step']}: {values}{'; its update was skipped' if entry['skipped'] else ''}{why}"
        if rows:
            text += f". The row with the highest loss, {rows[0]['loss']:.4g}: {rows[0]['text']!r:.80}"
        path = Path(args.output_dir, FILE_NAME)
        try:
            with path.open("a", encoding="utf-8") as file:
                if checkpoint is not None:
                    entry["rewound_to"] = int(checkpoint.rpartition("-")[2])
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            text += f". More in {path}" if rows else ""
        except OSError as error:
            # A report is no reason to end a run. A row that no file names could not be left out after a resume.
            text += f". {path} could not be written: {error}"
            checkpoint = None
        if checkpoint is not None:
            text += f". The run goes back to {checkpoint} and leaves out the {len(rows)} rows with the highest loss"
            self.trainer.run.directory.record(rewound=_read_rewinds(path))
        print_step(self.trainer.state, text)
        return checkpoint

    def _find_checkpoint(self) -> tuple[str | None, str]:
        """Return the checkpoint to go back to, or `None` and the reason."""
        args = self.trainer.args
        try:
            checkpoint = newest_checkpoint(args.output_dir, unverified=args.allow_inexact_resume)
        except UserError as error:
            return None, f"; {error}"
        if checkpoint is None:
            return None, "; there is no checkpoint to go back to"
        step = int(checkpoint.rpartition("-")[2])
        rewinds = [each for each in _read_rewinds(Path(args.output_dir, FILE_NAME)) if each["rewound_to"] == step]
        if len(rewinds) >= MOST_REWINDS:
            return None, f"; the run went back to {checkpoint} {MOST_REWINDS} times already and goes on"
        return checkpoint, ""

    @torch.no_grad()
    def _rank_rows(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """
        Return the rows of this rank with the highest loss, by the weights of now. All ranks have equally many rows.
        """
        trainer, rows = self.trainer, []
        trainer.model.eval()
        # A compiled layer would be compiled again for single rows.
        with torch.compiler.set_stance("force_eager"), trainer.accelerator.autocast():
            for batch in batches:
                given = {name: batch[name].to(trainer.args.device) for name in _ROW_FIELDS if name in batch}
                weights = prediction_weights(given["labels"], given.get("loss_mask")).sum(1).tolist()
                for row, weight in enumerate(weights):
                    part = {name: value[row : row + 1] for name, value in given.items()}
                    loss = trainer.model(**part, skip_logits=True, use_cache=False).ce_loss.item()
                    # Padding rows, which repeat a row of the data, and rows that are left out have no weight.
                    if weight > 0:
                        rows.append((loss, part["input_ids"][0].tolist()))
        trainer.model.train()
        if trainer.args.process_index % trainer.args.tp_size:
            # Tensor-parallel ranks have the same rows.
            return []
        rows = sorted(rows, key=lambda row: -row[0])[:NUM_ROWS]
        tokenizer = trainer.processing_class
        decode = tokenizer.decode if isinstance(tokenizer, PreTrainedTokenizerBase) else str
        return [
            {"loss": loss, "digest": row_digest(ids, self._pad_token_id), "text": decode(ids)} for loss, ids in rows
        ]

    # A state that checkpoints hold: what is skipped or left out depends on the steps before.

    def save(self, trainer: Any, directory: Path) -> None:
        if trainer.args.should_save:
            recent = {name: list(history) for name, history in self.recent.items()}
            state = {"recent": recent, "num_skipped": self._num_skipped, "left_out": self.left_out}
            (directory / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")

    def load(self, trainer: Any, checkpoint: str) -> None:
        self._forget()
        path = Path(checkpoint, STATE_NAME)
        if path.exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            self._num_skipped = state["num_skipped"]
            self.left_out = state.get("left_out", {})
            for name, values in state["recent"].items():
                self.recent[name].extend(values)
        # The run that went back may have ended before its next checkpoint.
        path = Path(trainer.args.output_dir, FILE_NAME)
        for rewind in on_main_process(trainer.args, lambda: _read_rewinds(path)):
            for row in rewind["rows"]:
                self.left_out.setdefault(row, rewind["rewound_to"])


def _read_rewinds(path: Path) -> list[dict[str, Any]]:
    """Return the step, the checkpoint's step and the digests of the rows for each time that the run went back."""
    return [
        {"step": spike["step"], "rewound_to": spike["rewound_to"], "rows": [row["digest"] for row in spike["rows"]]}
        for spike in read_entries(path)
        if "rewound_to" in spike
    ]
