"""
`MaskedLossTrainer`: a `Trainer` whose loss means the same at any batch size, accumulation and world size.

A step's loss is `sum of w * CE / sum of w + router_aux_loss_coef * sum of aux_d / number of documents`, the sums over
all micro-batches of all ranks (`loss.py`). Each micro-batch is divided by the totals of the whole step, and multiplied
by the number of data-parallel ranks, over which DDP, FSDP and DeepSpeed average the gradients.

An epoch ends with rows of weight zero where the rows do not fill the last global batch, never with repeated ones.
Evaluation is one ratio of sums over the whole set.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..data.collators import DataCollatorForPackedRows
from ..data.padding_rows import PADDING_ROW_COLUMN, ROW_NUMBER_COLUMN, PaddingRowCollator
from ..model.loss import find_documents, prediction_weights
from ..model.modeling_minimind import MiniMindForCausalLM
from ..tokenizer.loading import token_byte_lengths
from ..weights.adapters import base_model_of, is_adapted
from .data_position import DataPosition, PositionTracker
from .deepspeed_support import float32_weights
from .efficiency import PeakRate, flops_per_token
from .meter import Meter
from .optimizers import complete_schedule_kwargs
from .row_source import RowSource, fit_batch_size, pad_rows
from .run_trainer import RunTrainer


logger = logging.get_logger(__name__)


class MaskedLossTrainer(RunTrainer):
    """
    A [`~transformers.Trainer`] for [`MiniMindForCausalLM`] with the masked loss described above, for `labels` with
    -100 and for a float `loss_mask` beside them. Without a `data_collator`, rows are those of
    [`~data.collators.DataCollatorForPackedRows`]: `input_ids` of any lengths are enough. It logs `ce_loss`, `aux_loss`, `tokens_per_second`,
    `model_flops_per_second`, `mfu` (that over the peak of all devices) and `peak_memory_gib` besides, and evaluates
    `eval_loss`, `eval_perplexity` and, given a byte-level tokenizer as `processing_class`, `eval_bits_per_byte`. Everything
    else is Trainer's.
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ):
        data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        super().__init__(model=model, args=args, data_collator=data_collator, **data, **kwargs)
        if data_collator is None:
            pad_token_id = base_model_of(self.model).config.pad_token_id
            self.data_collator: Any = DataCollatorForPackedRows(0 if pad_token_id is None else pad_token_id)
        self._check_arguments()
        self._tracker = PositionTracker()
        self.add_callback(self._tracker)
        self._is_evaluating = self._wants_loss_alone = False
        # Of each batch that was evaluated: the sum of w * CE, of w, and of the bytes.
        self._eval_sums: list[torch.Tensor] = []
        self._meter: Meter | None = None
        # The rows of each micro-batch of the current step, and whether its loss is finite.
        self._step_rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._step_is_finite: list[torch.Tensor] = []

    def _check_arguments(self):
        """Refuses what would train something else than it says."""
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                "--train_sampling_strategy batch_rebalance makes batches of uneven size, which cannot be filled up with "
                "rows of weight zero. Use random, sequential or group_by_length; packed rows are even anyway."
            )
        if self.args.label_smoothing_factor:
            # NOTE: Trainer shifts the labels for it only in models of its own list, and trains others to copy.
            raise ValueError("--label_smoothing_factor is not supported by the masked loss; leave it at 0.")
        if self.get_cp_size() * self.get_sp_size() > 1:
            raise ValueError(
                "Context and sequence parallelism cut rows apart, and the masked loss shifts labels inside a row: not "
                "supported. Use data parallelism, ZeRO or --fsdp_size."
            )

    def create_accelerator_and_postprocess(self):
        if self.args.accelerator_config.dispatch_batches:
            raise ValueError(
                "dispatch_batches would cut the batches of one process into pieces, and their lists of documents with "
                "them. Leave it out of --accelerator_config: each process reads the data itself."
            )
        self.args.accelerator_config.dispatch_batches = False
        super().create_accelerator_and_postprocess()

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different rows."""
        return self.accelerator.num_processes // self.get_tp_size()

    # Rows

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Pad the rows to whole global batches."""
        num_ranks, accumulation = self.data_parallel_size, self.args.gradient_accumulation_steps if is_training else 1
        if not self.args.dataloader_drop_last:
            batch_size = fit_batch_size(dataset, batch_size, num_ranks, accumulation, is_training=is_training)
        if not (is_training and self.args.dataloader_drop_last):
            seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
            multiple = batch_size * num_ranks * accumulation
            # One process evaluates a stream as it is: nothing would take the padding rows from its predictions.
            pads_streams = is_training or num_ranks > 1
            dataset, sampler_fn = pad_rows(
                dataset, sampler_fn, multiple, seed=seed, is_training=is_training, pads_streams=pads_streams
            )
        vocab_size = getattr(self.accelerator.unwrap_model(self.model).config, "vocab_size", None)
        collator = PaddingRowCollator(self.data_collator, is_training=is_training, vocab_size=vocab_size)
        return RowSource(dataset, batch_size, sampler_fn, collator)

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(
            {*self._signature_columns, "seq_lengths", PADDING_ROW_COLUMN, ROW_NUMBER_COLUMN}
        )

    # The position in the data

    def _data_position(self) -> DataPosition:
        num_rows = self._tracker.num_batches * self.args.per_device_train_batch_size * self.data_parallel_size
        return DataPosition(self._tracker.epoch, num_rows, self._evaluation_is_due, self.guard.num_skipped)

    def _read_data_position(self, checkpoint: str, epoch: int, num_batches: int) -> tuple[int, int]:
        """Return the pass, and how many of its micro-batches each rank has had; the given ones for old checkpoints."""
        position = DataPosition.load(checkpoint)
        self.args.eval_on_start = position is not None and position.evaluation_is_due
        if position is not None:
            self.guard.num_skipped = position.num_skipped_steps
        if position is None or self.args.ignore_data_skip:
            return epoch, num_batches
        accumulation = self.args.gradient_accumulation_steps
        rows_a_step = self.args.per_device_train_batch_size * self.data_parallel_size * accumulation
        return position.epoch, position.num_rows // rows_a_step * accumulation

    # Loss

    def get_batch_samples(self, *args, **kwargs):
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._tracker.num_batches += len(batches)
        self._meter.begin_step()
        self._step_rows = [
            (batch.pop(ROW_NUMBER_COLUMN), batch["input_ids"]) for batch in batches if ROW_NUMBER_COLUMN in batch
        ]
        self._step_is_finite = []
        return batches, num_items

    def _skip_step(self):
        super()._skip_step()
        self._meter.skip_step()

    def _describe_step(self) -> list[dict[str, Any]]:
        rows = []
        for (numbers, input_ids), is_finite in zip(self._step_rows, self._step_is_finite, strict=True):
            for number, ids in zip(numbers.tolist(), input_ids.tolist(), strict=True):
                if number >= 0:
                    text = self.processing_class.decode(ids) if self.processing_class is not None else None
                    rows.append({"row_number": number, "is_finite": bool(is_finite), "input_ids": ids, "text": text})
        return rows

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """
        Sums over the micro-batches of a step, and over all ranks, of the weights (returned), the documents and the
        tokens. In evaluation, over this rank's batch alone.
        """
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        columns = zip(*map(self._count, batch_samples), strict=True)
        weights, counts = (torch.stack(column).sum(0).to(device) for column in columns)
        if self._is_evaluating:
            self._eval_weight = weights
            return weights
        if self.accelerator.num_processes > 1:
            weights, counts = self.accelerator.reduce((weights, counts), "sum")
            weights, counts = weights / self.get_tp_size(), counts // self.get_tp_size()
        num_documents, num_tokens = counts.unbind()
        self._meter.count_step(num_tokens)
        # A step without any weight has a sum of zero, and something must divide it.
        self._num_documents = num_documents.clamp(min=1).float()
        return torch.where(weights > 0, weights, 1.0)

    @staticmethod
    def _count(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The sum of the weights of one batch in float32, and its documents and tokens, `torch.LongTensor` of shape `(2,)`.

        NOTE: not in float64, which MPS and some GPUs lack. Sums of a step's weights of 0 and 1 are exact up to 2**24
        tokens, and divide a loss in float32. Tokens are added up over a whole run, so they are integers.
        """
        labels, loss_mask = batch["labels"], batch.get("loss_mask")
        documents = find_documents(
            labels.shape,
            device=labels.device,
            position_ids=batch.get("position_ids"),
            attention_mask=batch.get("attention_mask"),
            labels=labels,
            loss_mask=loss_mask,
        )
        counts = torch.stack([documents.count, documents.token_mask.sum()])
        return prediction_weights(labels, loss_mask).sum(), counts

    def _prepare_input(self, data):
        # NOTE: under DeepSpeed, Trainer casts float inputs to the model's dtype. These are the loss's and keep theirs.
        prepared = super()._prepare_input(data)
        if isinstance(data, Mapping):
            for name in ("loss_mask", "teacher_log_probs"):
                if name in data:
                    prepared[name] = data[name].to(self.args.device)
        return prepared

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.compute_loss_func is not None or num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._is_evaluating:
            outputs = model(**inputs, num_items_in_batch=1.0, skip_logits=self._skips_logits)
            self._check_outputs(outputs)
            self._add_to_evaluation(outputs, inputs)
            loss = outputs.ce_loss / self._eval_weight.clamp(min=torch.finfo(torch.float32).tiny)
            return (loss, outputs) if return_outputs else loss

        outputs = model(
            **inputs,
            num_items_in_batch=num_items_in_batch,
            num_documents_in_batch=self._num_documents,
            skip_logits=self._skips_logits,
        )
        self._check_outputs(outputs)
        loss, parts = self._combine_losses(outputs, inputs, num_items_in_batch)
        self._meter.add_losses(parts)
        # Gradients are averaged over the ranks, so that each brings in its share this many times.
        loss = self._mark_if_not_finite(loss * self.data_parallel_size)
        return (loss, outputs) if return_outputs else loss

    def _mark_if_not_finite(self, loss: torch.Tensor) -> torch.Tensor:
        """
        Sees to it that a loss that is not finite shows in the gradients, and so on every rank, before the update.
        Under DeepSpeed, whose backward pass updates, the ranks have to ask each other before.
        """
        is_finite = loss.detach().isfinite()
        self._step_is_finite.append(is_finite)
        if self.is_deepspeed_enabled:
            if self.accelerator.sync_gradients and self.ranks.largest(int(not self._is_loss_finite())):
                self._meet_nonfinite("The loss is not finite")
            return loss
        return loss * torch.where(is_finite, 1.0, torch.nan)

    def _is_loss_finite(self) -> bool:
        return all(self._step_is_finite)

    @property
    def _skips_logits(self) -> bool:
        """Whether nobody reads the logits, which are then never in memory all at once."""
        return not self._is_evaluating or self._wants_loss_alone

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._wants_loss_alone = prediction_loss_only
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _combine_losses(
        self, outputs: Any, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This micro-batch's share of the loss that is trained, and those of its parts that are logged."""
        parts = {"ce_loss": outputs.ce_loss}
        if outputs.aux_loss is not None:
            parts["aux_loss"] = outputs.aux_loss
        return outputs.loss, parts

    @staticmethod
    def _check_outputs(outputs: Any):
        if "ce_loss" not in outputs:
            raise ValueError(
                f"{type(outputs).__name__} has no `ce_loss`: MaskedLossTrainer trains MiniMindForCausalLM (adapters "
                "around it too). Use transformers' Trainer for other models, or pass compute_loss_func."
            )

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        self.args.lr_scheduler_kwargs = complete_schedule_kwargs(
            str(getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)),
            self.args.lr_scheduler_kwargs,
            num_training_steps=num_training_steps,
        )
        return super().create_scheduler(num_training_steps, optimizer)

    # Logs

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial):
        progress = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        if checkpoint is not None:
            epoch, num_batches = self._read_data_position(checkpoint, *progress)
            # At the end of a pass, Trainer restores random numbers for the next one alone.
            steps_left = num_update_steps_per_epoch - num_batches // self.args.gradient_accumulation_steps
            progress = (epoch, num_batches) if steps_left > 0 else (epoch + 1, 0)
            if self.state.global_step >= max_steps:
                # NOTE: Trainer would train one step more.
                progress = (num_train_epochs, 0)
        self._tracker.start(*progress)
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        self._meter = Meter(
            flops_per_token(base_model_of(self.model)) + self._extra_flops_per_token(),
            PeakRate(self.args.device, dtype),
            num_tokens=self.state.num_input_tokens_seen,
            world_size=self.args.world_size,
        )
        return progress

    def _extra_flops_per_token(self) -> float:
        """Of other models than the one that is trained."""
        return 0.0

    def _track_num_input_tokens(self, inputs):
        """Tokens are counted with the weights, once a step; reading them back waits for the next log or save."""

    def log(self, logs: dict[str, float], start_time: float | None = None):
        if self._meter is not None:
            self.state.num_input_tokens_seen += self._meter.read_tokens()
        if "loss" in logs and self._meter is not None and self._meter.losses is not None:
            losses = self._meter.losses
            if self.accelerator.num_processes > 1:
                losses = self.accelerator.reduce(losses, "sum") / self.get_tp_size()
            logs |= self._meter.measure(losses, self.state.num_input_tokens_seen, self.args.device)
        # Without a start time: Trainer's own throughput counts evaluation and saving as training.
        super().log(logs)

    def _clock_stopped(self) -> AbstractContextManager:
        """Exclude evaluation and saving from `tokens_per_second`."""
        return nullcontext() if self._meter is None else self._meter.paused()

    def _save_checkpoint(self, *args, **kwargs):
        if self._meter is not None:
            self.state.num_input_tokens_seen += self._meter.read_tokens()
        with self._clock_stopped():
            super()._save_checkpoint(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        # Random numbers of training do not depend on whether there was an evaluation.
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with self._clock_stopped(), torch.random.fork_rng(devices):
            return super().evaluate(*args, **kwargs)

    # Saving

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None):
        """Saves float32 weights, also where DeepSpeed trains in bf16 and keeps the float32 ones in its optimizer."""
        half_precision_model = self.model
        base_model = base_model_of(self.model)
        is_half_precision = isinstance(base_model, MiniMindForCausalLM) and base_model.dtype != torch.float32
        weights = None
        if self.is_deepspeed_enabled and is_half_precision:
            weights = float32_weights(self.model, trainable_only=is_adapted(self.model))
        if weights is not None and is_adapted(self.model):
            state_dict = weights
        elif weights is not None and self.args.should_save:
            self.model = type(half_precision_model)(half_precision_model.config)
            self.model.load_state_dict(weights)
            state_dict = None
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = half_precision_model

    # Evaluation

    def _add_to_evaluation(self, outputs: Any, inputs: dict[str, torch.Tensor]):
        labels = inputs["labels"]
        num_bytes = torch.zeros((), device=labels.device)
        if self._token_bytes is not None:
            weights = prediction_weights(labels, inputs.get("loss_mask"))
            num_bytes = (weights * self._token_bytes.to(labels.device)[labels.clamp(min=0)]).sum()
        self._eval_sums.append(torch.stack([outputs.ce_loss.detach(), self._eval_weight, num_bytes]))

    def _add_up(self, sums: list[torch.Tensor]) -> list[float]:
        """The sums of batches over all of them and all ranks, on the host and without rounding."""
        return [math.fsum(column) for column in zip(*self.accelerator.gather(torch.stack(sums)).tolist(), strict=True)]

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs) -> EvalLoopOutput:
        """
        Trainer's loop; the loss is replaced by `sum of w * CE / sum of w` over the whole set, without router loss.

        Raises:
            `FloatingPointError`: if that is not finite; `ValueError`: if the set has nothing to predict.
        """
        is_byte_level = isinstance(self.processing_class, PreTrainedTokenizerBase)
        self._token_bytes = token_byte_lengths(self.processing_class) if is_byte_level else None
        self._eval_sums = []
        self._is_evaluating = True
        try:
            output = super().evaluation_loop(
                dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
        finally:
            self._is_evaluating = False
        if not self._eval_sums:  # No labels, or a loss of the caller's own.
            return output
        ce_sum, weight, num_bytes = self._add_up(self._eval_sums)
        if weight == 0:
            raise ValueError(f"{description}: no token of the set is to be predicted (all labels are -100).")
        loss = ce_sum / weight
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{description}: {metric_key_prefix}_loss is {loss} at step {self.state.global_step}. The weights or "
                "the numerics are broken; go back to an earlier checkpoint, and lower --learning_rate."
            )
        output.metrics[f"{metric_key_prefix}_loss"] = loss
        output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss, 700.0))
        if num_bytes:
            output.metrics[f"{metric_key_prefix}_bits_per_byte"] = ce_sum / math.log(2) / num_bytes
        return output
