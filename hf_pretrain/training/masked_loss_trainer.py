"""
`MaskedLossTrainer`: a `Trainer` whose loss has the same meaning at any batch size, accumulation and world size.

The loss of a step is

    sum(w * CE) / sum(w)  +  router_aux_loss_coef * sum(aux_d) / number of documents

where `w` is the weight of predicting a token, `CE` its cross-entropy in nats and `aux_d` the router loss of a
document. All sums run over all micro-batches of all ranks (`model/loss.py`). DDP, FSDP and DeepSpeed average gradients
over the data-parallel ranks. The trainer therefore divides each micro-batch's sums by the totals of the whole step,
and multiplies its loss by the number of data-parallel ranks. The gradient is then the gradient of one process with one
big batch. The exception are models with `router_aux_loss_level="batch"`, such as imported minimind-3 models with
experts: their router loss is a product of means over a micro-batch, so it depends on the size of the micro-batch.

If the rows do not fill the last global batch of an epoch, padding rows of weight zero fill it; no row is repeated. The
validation loss is one ratio of sums over the whole set.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..data.collators import DataCollatorForPackedRows
from ..data.padding_rows import PaddingRowCollator, RowSource, pad_rows
from ..model.loss import find_documents, prediction_weights
from ..runtime.errors import UserError
from ..tokenizer.pretrained import token_byte_lengths
from ..weights.adapters import base_model_of
from .base_trainer import RunTrainer
from .launch import check_micro_batch
from .measurements import Meter, flops_per_token, known_peak
from .stopping import end_nonfinite_run


class MaskedLossTrainer(RunTrainer):
    """
    A [`~transformers.Trainer`] for [`MiniMindForCausalLM`] with the masked loss described above.

    It also logs `ce_loss`, `aux_loss`, `model_flops_per_second` and, on a known GPU, `mfu`, the share of the peak of
    all devices. Evaluation returns `eval_loss` in nats per token, `eval_perplexity` and, with a byte-level
    tokenizer, `eval_bits_per_byte`.

    Args:
        data_collator (`Callable`, *optional*): [`~data.collators.DataCollatorForPackedRows`] by default, which takes
            rows with `input_ids` of any lengths.
        train_dataset, eval_dataset: rows whose batches hold `input_ids` and `labels` of shape
            `(batch_size, seq_len)`, -100 for tokens that are not predicted, and optionally a float `loss_mask` of
            the same shape with the weights.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): the tokenizer. It is saved with the
            model.
        model, args, kwargs: as for [`~transformers.Trainer`].

    Raises:
        `ValueError`: for arguments that the masked loss does not support.
    """

    # The sums of a whole step divide the loss.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
        **kwargs: Any,
    ):
        if data_collator is None:
            # transformers' default collators do not pad `input_ids` without a tokenizer, and make no labels.
            data_collator = DataCollatorForPackedRows(base_model_of(model).config.pad_token_id or 0)
        super().__init__(model, args=args, data_collator=data_collator, **kwargs)
        self._check_arguments()
        # The collators read columns that `forward` does not name.
        self.args.remove_unused_columns = False
        # The meter counts tokens once per step, on the device, and `log` adds them.
        self.args.include_num_input_tokens_seen = "no"
        # Trainer would count items that `get_batch_samples` counts, and pass them to the model.
        self.model_accepts_loss_kwargs = False
        self._is_evaluating = self._wants_loss_alone = False
        # One tensor (3,) per evaluated batch: the sum of w * CE, the sum of w, and the number of bytes.
        self._eval_sums: list[torch.Tensor] = []
        self._token_bytes: torch.Tensor | None = None
        # Both are `None` outside `train`, where callers may take single steps.
        self._meter: Meter | None = None
        self._num_documents: torch.Tensor | None = None
        # Whether the loss of each micro-batch of the current step is finite.
        self._step_is_finite: list[torch.Tensor] = []

    def _check_arguments(self):
        """Raise `ValueError` for arguments that would silently change what the loss means."""
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise UserError(
                "--train_sampling_strategy batch_rebalance makes batches of different sizes, which padding rows "
                "cannot fill. Use random, sequential or group_by_length."
            )
        if self.args.label_smoothing_factor:
            # NOTE: Trainer's label smoother shifts the labels only for classes in transformers' own list of causal
            # language models. It would train MiniMind to copy its input.
            raise UserError("The masked loss does not support --label_smoothing_factor. Leave it at 0.")
        if self.get_cp_size() * self.get_sp_size() > 1:
            raise UserError(
                "Context and sequence parallelism are not supported: they cut rows apart, and the masked loss shifts "
                "labels within a row. Use data parallelism, ZeRO or --fsdp_size."
            )

    def create_accelerator_and_postprocess(self):
        # NOTE: accelerate dispatches the batches of streams by default, and would cut their lists of documents.
        self.args.accelerator_config.dispatch_batches = False
        super().create_accelerator_and_postprocess()

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different rows. Tensor-parallel ranks share theirs."""
        return self.accelerator.num_processes // self.get_tp_size()

    # Rows

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Pad the rows to whole global batches."""
        num_ranks, accumulation = self.data_parallel_size, self.args.gradient_accumulation_steps if is_training else 1
        drops_last = self.args.dataloader_drop_last
        # With several ranks, accelerate would fill the last batch with repeated rows. A single process evaluates
        # without full batches, so that its loader gives each row once and nothing else.
        if not drops_last if is_training else num_ranks > 1:
            seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
            multiple = batch_size * num_ranks * accumulation
            dataset, sampler_fn = pad_rows(dataset, sampler_fn, multiple, seed=seed, is_training=is_training)
        vocab_size = self.accelerator.unwrap_model(self.model).config.vocab_size
        return RowSource(dataset, batch_size, sampler_fn, PaddingRowCollator(self.data_collator, vocab_size))

    # Loss

    def get_batch_samples(self, *args, **kwargs):
        """Return the batches of a step, and the sum of their weights over all ranks."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        return batches, self._begin_step(batches) if batches else None

    def _begin_step(self, batches: list[dict[str, Any]]) -> torch.Tensor:
        """
        Return the sum of the weights over all micro-batches of a step and all ranks, and keep the number of documents
        and the number of tokens.
        """
        self._step_is_finite = []
        columns = zip(*map(self._count, batches), strict=True)
        weights, counts = (torch.stack(column).sum(0).to(self.args.device) for column in columns)
        if self.accelerator.num_processes > 1:
            weights, counts = self.accelerator.reduce((weights, counts), "sum")
            # Tensor-parallel ranks see the same rows, so the sum counts each row once per such rank.
            weights, counts = weights / self.get_tp_size(), counts // self.get_tp_size()
        num_documents, num_tokens = counts.unbind()
        if self._meter is not None:
            self._meter.count_step(num_tokens)
        # A step of padding rows has weight zero. Dividing its zero loss by 1 instead of 0 gives zero, not NaN.
        self._num_documents = num_documents.clamp(min=1).float()
        return torch.where(weights > 0, weights, 1.0)

    @staticmethod
    def _count(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return the sum of the weights of one batch, a float32 scalar, and its number of documents and tokens, a
        `torch.LongTensor` of shape `(2,)`.

        NOTE: MPS and some GPUs have no float64. In float32, sums of weights 0 and 1 are exact up to 2**24 tokens per
        step. Tokens are summed over a whole run and are therefore integers.
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
        # NOTE: under DeepSpeed, Trainer casts float inputs to the model's dtype. Weights and log-probabilities of the
        # loss must stay float32.
        prepared = super()._prepare_input(data)
        if isinstance(data, Mapping):
            for name in ("loss_mask", "teacher_log_probs"):
                if name in data:
                    prepared[name] = data[name].to(self.args.device)
        return prepared

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._is_evaluating:
            return self._evaluate_batch(model, inputs)
        check_micro_batch(inputs["labels"].numel(), self.args.device.type)
        if num_items_in_batch is None:
            # The caller takes a step of its own, from this batch alone.
            num_items_in_batch = self._begin_step([inputs])
        outputs = model(
            **inputs,
            num_items_in_batch=num_items_in_batch,
            num_documents_in_batch=self._num_documents,
            skip_logits=self._skips_logits,
        )
        loss, parts = self._combine_losses(outputs, inputs, num_items_in_batch)
        if self._meter is not None:
            self._meter.add_losses(parts)
        # DDP, FSDP and DeepSpeed average the gradients over the ranks. The loss is a share of a sum, so undo the mean.
        loss = self._mark_if_not_finite(loss * self.data_parallel_size)
        return (loss, outputs) if return_outputs else loss

    def _evaluate_batch(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the loss of a batch of a validation set, and the outputs of the model."""
        self._eval_weight = self._count(inputs)[0]
        # A divisor of 1 gives the sum over the batch. `evaluation_loop` adds the sums of all batches and divides.
        outputs = model(**inputs, num_items_in_batch=1.0, skip_logits=self._skips_logits)
        self._add_to_evaluation(outputs, inputs)
        # Trainer averages this loss over batches; `evaluation_loop` replaces the average. Without a predicted token,
        # the loss is 0 instead of 0 / 0.
        return outputs.ce_loss / self._eval_weight.clamp(min=torch.finfo(torch.float32).tiny), outputs

    def _mark_if_not_finite(self, loss: torch.Tensor) -> torch.Tensor:
        """
        Turn a non-finite loss into NaN gradients, so that every rank sees it in the norm.

        DeepSpeed updates the weights within the backward pass, so under DeepSpeed the ranks compare their losses here.
        """
        is_finite = loss.detach().isfinite()
        self._step_is_finite.append(is_finite)
        if self.is_deepspeed_enabled:
            # One collective per step suffices: DeepSpeed updates in the backward pass of the last micro-batch.
            if self.accelerator.sync_gradients and self.ranks.largest(int(not self.is_loss_finite())):
                end_nonfinite_run(self, "The loss is not finite", self.state.global_step + 1)
            return loss
        # An infinite loss may have finite or zero gradients. Multiplied by NaN, all of them become NaN.
        return loss * torch.where(is_finite, 1.0, torch.nan)

    def is_loss_finite(self) -> bool:
        return all(self._step_is_finite)

    @property
    def _skips_logits(self) -> bool:
        """True if no caller reads the logits. The model then computes the loss in chunks, without all logits."""
        return not self._is_evaluating or self._wants_loss_alone

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._wants_loss_alone, self._is_evaluating = prediction_loss_only, True
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._is_evaluating = False

    def _combine_losses(
        self, outputs: Any, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        Return this micro-batch's share of the training loss, and the parts to log by name; all are scalars. Subclasses
        such as the distillation trainer add their losses here.
        """
        parts = {"ce_loss": outputs.ce_loss}
        if outputs.aux_loss is not None:
            parts["aux_loss"] = outputs.aux_loss
        return outputs.loss, parts

    # Logs

    def _begin_training(self):
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        self._meter = Meter(
            flops_per_token(base_model_of(self.model)) + self._extra_flops_per_token(),
            known_peak(self.args.device, dtype),
            world_size=self.args.world_size,
        )
        super()._begin_training()

    def _extra_flops_per_token(self) -> float:
        """Return the FLOPs per token of other models than the trained one, such as a teacher."""
        return 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None):
        self._read_tokens()
        logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)

    def _read_tokens(self) -> None:
        if self._meter is not None:
            self.state.num_input_tokens_seen += self._meter.read_tokens()

    def _measure(self) -> dict[str, float]:
        logs = super()._measure()
        if self._meter is None or self._meter.losses is None:
            return logs
        losses = self._meter.losses
        if self.accelerator.num_processes > 1:
            losses = self.accelerator.reduce(losses, "sum") / self.get_tp_size()
        return logs | self._meter.measure(losses, logs.get("tokens_per_second"))

    def _save_checkpoint(self, *args, **kwargs):
        self._read_tokens()
        super()._save_checkpoint(*args, **kwargs)

    # Evaluation

    def _add_to_evaluation(self, outputs: Any, inputs: dict[str, torch.Tensor]):
        """Keep the sums of one evaluated batch: weighted loss, weights, and bytes of the predicted tokens."""
        labels = inputs["labels"]
        num_bytes = torch.zeros((), device=labels.device)
        if self._token_bytes is not None:
            weights = prediction_weights(labels, inputs.get("loss_mask"))
            # A label of -100 cannot be an index; its weight is 0.
            num_bytes = (weights * self._token_bytes.to(labels.device)[labels.clamp(min=0)]).sum()
        self._eval_sums.append(torch.stack([outputs.ce_loss.detach(), self._eval_weight, num_bytes]))

    def _add_up(self, sums: list[torch.Tensor]) -> list[float]:
        """Return the sums over all batches of all ranks. `math.fsum` adds them on the host without rounding."""
        # `gather` needs the same number of batches on all ranks. Padding rows make them equal.
        return [math.fsum(column) for column in zip(*self.accelerator.gather(torch.stack(sums)).tolist(), strict=True)]

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs) -> EvalLoopOutput:
        """
        Evaluate with Trainer's loop, and replace its loss by `sum(w * CE) / sum(w)` over the whole set, without router
        loss.

        Raises:
            `FloatingPointError`: if the loss is not finite.
            `ValueError`: if the set has no token to predict.
        """
        is_byte_level = isinstance(self.processing_class, PreTrainedTokenizerBase)
        self._token_bytes = token_byte_lengths(self.processing_class) if is_byte_level else None
        self._eval_sums = []
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if not self._eval_sums:
            # The batches have no labels, or the caller passed its own `compute_loss_func`.
            return output
        ce_sum, weight, num_bytes = self._add_up(self._eval_sums)
        if weight == 0:
            raise UserError(
                f"{description}: no token of the set is to be predicted, because all labels are -100. Check the "
                "validation data."
            )
        loss = ce_sum / weight
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{description}: {metric_key_prefix}_loss is {loss} at step {self.state.global_step}. The weights are "
                "broken. Resume from an earlier checkpoint with a lower --learning_rate and --allow_inexact_resume."
            )
        output.metrics[f"{metric_key_prefix}_loss"] = loss
        # exp overflows float64 above 709.
        output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss, 700.0))
        if num_bytes:
            output.metrics[f"{metric_key_prefix}_bits_per_byte"] = ce_sum / math.log(2) / num_bytes
        return output
