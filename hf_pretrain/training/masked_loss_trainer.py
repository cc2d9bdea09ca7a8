"""
`MaskedLossTrainer`: a `Trainer` whose loss has the same meaning at any batch size, accumulation and world size
(`step_loss.py`).

If the rows do not fill the last global batch of an epoch, padding rows of weight zero fill it; no row is repeated. The
validation loss is one ratio of sums over the whole set.

The order of calls of one optimizer step, with the file of each:

    get_batch_samples          here            the micro-batches, and their totals over all ranks
      super().get_batch_samples  base_trainer    ends a finished run; Trainer reads the loader (rows/row_source.py)
      count_step                 step_loss       sums of weights, documents and tokens
    for each micro-batch:      transformers    Trainer.training_step
      compute_loss               here
        model(**inputs, totals)    model/          the loss as a share of the step
        loss_parts                 step_loss       names the parts of the loss for the log
        times the number of ranks                  undoes the mean over the ranks below
        finite_check.add_loss      step_loss       a non-finite loss becomes NaN gradients on all ranks
      backward                   accelerate      gradients, averaged over the ranks after the last micro-batch
    _get_grad_norm             base_trainer    finite_check takes the norm; on a GPU it reads it a step later
    optimizer.step             optimizers      Muon, AdamW, or DeepSpeed's
    on_optimizer_step          budgets         the time of `--max_minutes`
    on_step_end                stopping        signals; then logs, evaluations, checkpoints
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..loading.adapters import base_model_of
from ..model.configuration_minimind import MiniMindConfig
from ..rows.collators import DataCollatorForPackedRows
from ..rows.row_source import PaddingRowCollator, RowSource, pad_rows
from ..runtime.errors import UserError
from ..tokenizer.pretrained import token_byte_lengths
from .base_trainer import RunTrainer
from .launch import check_micro_batch
from .measurements import Meter, flops_per_token, known_peak
from .resume_check import digest_weights
from .run import Run
from .spikes import SpikeWatch
from .step_loss import EvaluationSums, StepTotals, Term, count_step, loss_parts


class MaskedLossTrainer(RunTrainer):
    """
    A [`~transformers.Trainer`] for [`MiniMindForCausalLM`] with the masked loss of `training/step_loss.py`.

    It also logs `ce_loss`, `aux_loss`, `model_flops_per_second` and, on a known GPU, `mfu`, the share of the peak of
    all devices. Evaluation returns `eval_loss` in nats per token, `eval_perplexity` and, with a byte-level
    tokenizer, `eval_bits_per_byte`.

    Args:
        data_collator (`Callable`, *optional*): [`~rows.collators.DataCollatorForPackedRows`] by default, which takes
            rows with `input_ids` of any lengths.
        train_dataset, eval_dataset: rows whose batches hold `input_ids` and `labels` of shape
            `(batch_size, seq_len)`, -100 for tokens that are not predicted, and optionally a float `loss_mask` of
            the same shape with the weights.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): the tokenizer. It is saved with the
            model.
        term ([`Term`], *optional*): a further term of the loss, such as [`~stages.distillation.TeacherTerm`].
        run ([`~training.run.Run`], *optional*): the run of a recipe. Without it, the trainer makes one from `args`.
        model, args, kwargs: as for [`~transformers.Trainer`]. The trainer has a copy of the arguments.

    Raises:
        `UserError`: for arguments that the masked loss does not support.
    """

    # The sums of a whole step divide the loss.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
        *,
        term: Term | None = None,
        run: Run | None = None,
        **kwargs: Any,
    ):
        model_type = getattr(getattr(base_model_of(model), "config", None), "model_type", None)
        if model_type != MiniMindConfig.model_type:
            raise UserError(
                f"MaskedLossTrainer trains a MiniMindForCausalLM, not {model_type or type(model).__name__}. "
                "`load_upstream` reads models of the same shapes, such as those of Llama and Qwen3, and there is no "
                "`model_init`."
            )
        if data_collator is None:
            # transformers' default collators do not pad `input_ids` without a tokenizer, and make no labels.
            data_collator = DataCollatorForPackedRows(base_model_of(model).config.pad_token_id or 0)
        run = run or Run.of_trainer(args, model, kwargs, collator=data_collator)
        self.term, self.evaluation = term, EvaluationSums()
        # Whether only the loss of a batch of the evaluation is wanted; `None` outside evaluations.
        self._wants_loss_alone: bool | None = None
        super().__init__(model, run=run, data_collator=data_collator, **kwargs)
        self._check_arguments()
        # Otherwise, Trainer would count items itself and pass their number to the model.
        self.model_accepts_loss_kwargs = False
        if term is not None:
            run.others = (*run.others, term.arguments)
            run.fixed_weights |= {role: digest_weights(weights) for role, weights in term.weights.items()}
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        flops = flops_per_token(base_model_of(self.model)) + (0.0 if term is None else term.flops_per_token)
        peak = known_peak(self.args.device, dtype)
        self.meter = self.figures.meter = Meter(flops, peak, world_size=self.args.world_size, add_up=self._add_up)
        self.spikes = SpikeWatch(self)
        self.finite_check.watch, self.finite_check.over_ranks = self.spikes.add, self._loss_of_ranks
        self.add_callback(self.spikes)
        if self.args.skip_spikes:
            run.saved_states.append(self.spikes)

    def _check_arguments(self):
        """Raise `UserError` for arguments that would silently change what the loss means."""
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise UserError(
                "--train_sampling_strategy batch_rebalance makes batches of different sizes, which padding rows "
                "cannot fill. Use random, sequential or group_by_length."
            )
        if self.args.label_smoothing_factor:
            # NOTE: Trainer's label smoother shifts the labels only for classes in transformers' own list of causal
            # language models. It would train MiniMind to copy its input.
            raise UserError("The masked loss does not support --label_smoothing_factor. Leave it at 0.")

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Pad the rows to whole global batches, or leave out the last ones with `--dataloader_drop_last`."""
        num_ranks, accumulation = self.data_parallel_size, self.args.gradient_accumulation_steps if is_training else 1
        # With several ranks, accelerate would fill the last batch with repeated rows, and --dataloader_drop_last would
        # leave out other rows at another micro-batch. A single process evaluates without full batches, so that its
        # loader gives each row once and nothing else.
        if is_training or num_ranks > 1:
            seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
            pads = not (is_training and self.args.dataloader_drop_last)
            options = {"seed": seed, "is_training": is_training, "pads": pads}
            dataset, sampler_fn = pad_rows(dataset, sampler_fn, batch_size * num_ranks * accumulation, **options)
        vocab_size = self.accelerator.unwrap_model(self.model).config.vocab_size
        return RowSource(dataset, batch_size, sampler_fn, PaddingRowCollator(self.data_collator, vocab_size))

    def _add_up(self, sums: Any) -> Any:
        """Return the sums of tensors over the ranks that see different rows."""
        if self.accelerator.num_processes == 1:
            return sums
        # Tensor-parallel ranks see the same rows, so the sums count each row once per such rank. Counts stay integers.
        size, totals = self.get_tp_size(), self.accelerator.reduce(sums, "sum")
        return tuple(total / size if total.is_floating_point() else total // size for total in totals)

    def _loss_of_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a step from what the micro-batches of a rank add up to."""
        return self._add_up((loss,))[0] / self.data_parallel_size

    def get_batch_samples(self, *args, **kwargs):
        """Return the batches of a step, and its totals."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        if not batches:
            return batches, None
        totals = self._begin_step(batches)
        return batches, totals.weights if self.compute_loss_func is not None else totals

    def _begin_step(self, batches: list[dict[str, Any]]) -> StepTotals:
        self.finite_check.begin_step()
        if any("labels" not in batch for batch in batches):
            raise UserError("The data collator makes no labels. Leave it out, or pass one that does.")
        self.spikes.begin_step(batches)
        totals = count_step(batches, device=self.args.device, add_up=self._add_up)
        self.meter.add_step(totals.tokens)
        return totals

    def _prepare_input(self, data):
        # NOTE: under DeepSpeed, Trainer casts float inputs to the model's dtype. Weights of the loss must stay
        # float32.
        prepared = super()._prepare_input(data)
        if isinstance(data, Mapping) and "loss_mask" in data:
            prepared["loss_mask"] = data["loss_mask"].to(self.args.device)
        return prepared

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        token_loss = {} if self.term is None else {"token_loss": self.term(inputs)}
        if self._wants_loss_alone is not None:
            # A divisor of 1 gives the sum over the batch.
            outputs = model(**inputs, **token_loss, num_items_in_batch=1.0, skip_logits=self._wants_loss_alone)
            return self.evaluation.add(outputs, inputs), outputs
        check_micro_batch(inputs["labels"].numel(), self.args.device.type)
        # Without totals, the caller takes a step of its own, from this batch alone.
        totals: StepTotals = num_items_in_batch or self._begin_step([inputs])
        outputs = model(
            **inputs,
            **token_loss,
            num_items_in_batch=totals.weights,
            num_documents_in_batch=totals.documents,
            # The model then computes the loss in chunks, without all logits.
            skip_logits=True,
        )
        self.meter.add_losses(loss_parts(outputs, self.term))
        # DDP, FSDP and DeepSpeed average the gradients over the ranks. The loss is a share of a sum, so undo the mean.
        loss = outputs.loss * self.data_parallel_size
        factor = self.finite_check.add_loss(loss)
        if not self.is_deepspeed_enabled:
            loss = loss * factor
        elif self.accelerator.sync_gradients:
            # DeepSpeed updates the weights in the backward pass of the last micro-batch.
            self.finite_check.compare_losses(self.state.global_step + 1)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._wants_loss_alone = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._wants_loss_alone = None

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs) -> EvalLoopOutput:
        """
        Evaluate with Trainer's loop, and replace its loss by `sum(w * CE) / sum(w)` over the whole set, without router
        loss. Raise the errors of [`~training.step_loss.EvaluationSums.figures`].
        """
        is_byte_level = isinstance(self.processing_class, PreTrainedTokenizerBase)
        token_bytes = token_byte_lengths(self.processing_class) if is_byte_level else None
        self.evaluation = EvaluationSums(token_bytes, self.term)
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        # Batches without labels, or with the caller's own `compute_loss_func`, have no sums.
        where = f"{description} at step {self.state.global_step}"
        output.metrics.update(
            self.evaluation.figures(self.accelerator.gather, prefix=metric_key_prefix, description=where)
        )
        return output
