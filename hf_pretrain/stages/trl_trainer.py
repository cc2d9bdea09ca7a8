"""
`TrlTrainer`: a `RunTrainer` on top of one of TRL's trainers:

    class MyTrainer(TrlTrainer, trl.DPOTrainer): ...

TRL computes Mixtral's load-balancing loss in its fused LM head. [`RouterLoss`] replaces it by
`router_aux_loss_coef * sum of aux_d over documents / number of documents` (`model/loss.py`).
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn
from transformers.trainer_utils import EvalLoopOutput

from ..model.router_loss import find_documents, router_loss
from ..rows.row_source import EvaluationBatches, RowSource, pad_rows
from ..runtime.errors import UserError
from ..training.base_trainer import RunTrainer
from ..training.settling import overriding


REFERENCE_NAME = "reference.safetensors"
# TRL's figures that are no means over pairs or completions: extremes, deviations, and means over tokens or over some
# completions.
NO_MEANS = re.compile(
    r"(completions/)?(min|max)_.*|completions/mean_terminated_length|reward_std|rewards/.*/std|entropy|kl|logits/.*|"
    r"mean_token_accuracy|tools/failure_frequency"
)


class RouterLoss:
    """
    The router loss of the passes of a policy.

    Every forward pass that computes gradients contributes. A document is a row, or a part of a row if positions
    restart. Passes without gradients (a reference model, an evaluation) contribute nothing.

    NOTE: TRL's fused LM head calls the decoder instead of our `forward`, and its DPO passes other arguments. But every
    pass of the policy calls the decoder, so hooks on the decoder compute the loss. They stay in place when DDP,
    DeepSpeed or peft wrap the model.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): the policy.
        coefficient (`float`): the factor of the router loss.
    """

    def __init__(self, model: Any, coefficient: float):
        self.config, self.coefficient = model.config, coefficient
        # The losses since the last call of `take`, scalars.
        self._losses: list[torch.Tensor] = []
        if self.config.num_experts and coefficient:
            decoder = model.get_decoder()
            decoder.register_forward_pre_hook(self._ask_for_router_logits, with_kwargs=True)
            decoder.register_forward_hook(self._keep, with_kwargs=True)

    def take(self) -> torch.Tensor | None:
        """Return the mean of the losses since the last call, a scalar; `None` without one."""
        # A step may run the policy more than once, such as for chosen and rejected answers.
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean() if losses else None

    def _ask_for_router_logits(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Make the decoder return its router logits in passes with gradients."""
        # None leaves the arguments unchanged.
        return (args, kwargs | {"output_router_logits": True}) if torch.is_grad_enabled() else None

    def _keep(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Compute the router loss of one pass."""
        if not torch.is_grad_enabled():
            return
        # Activation checkpointing recomputes single layers, not the decoder, so no pass counts twice.
        hidden_states, config = outputs.last_hidden_state, self.config
        where = {name: kwargs.get(name) for name in ("position_ids", "attention_mask")}
        documents = find_documents(hidden_states.shape[:2], device=hidden_states.device, **where)
        options = {"level": config.router_aux_loss_level}
        self._losses.append(router_loss(outputs.router_logits, config.num_experts_per_tok, documents, **options))


class SavedReference:
    """A reference model that follows the policy (`--sync_ref_model`). Without a sync, it is the model at the start."""

    def save(self, trainer: Any, directory: Path) -> None:
        if trainer.args.should_save:
            save_model(trainer.accelerator.unwrap_model(trainer.ref_model), str(directory / REFERENCE_NAME))

    def load(self, trainer: Any, checkpoint: str) -> None:
        load_model(trainer.accelerator.unwrap_model(trainer.ref_model), f"{checkpoint}/{REFERENCE_NAME}")


class TrlTrainer(RunTrainer):
    """
    A trainer of TRL with our router loss, without padding rows, and with means over items in its evaluations.

    NOTE: TRL logs the mean over batches of each figure of an evaluation. But batches differ in their numbers of items.
    """

    # Consecutive rows for each item of a validation set, if TRL's own samplers repeat the rows.
    rows_per_item: int | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Turn off Mixtral's formula in TRL's own code.
        self.aux_loss_enabled = False
        coefficient = self.args.router_aux_loss_coef
        self.router_loss = RouterLoss(
            self.model, self.model.config.router_aux_loss_coef if coefficient is None else coefficient
        )
        # Shares of the items of the last batch that have a figure, by name. All items have the others.
        self.shares: dict[str, float] = {}
        self._keep_reference()

    def _keep_reference(self) -> None:
        """Let checkpoints hold a reference model that follows the policy."""
        if not self.args.sync_ref_model:
            return
        if self.args.shards_weights:
            raise UserError(
                "--sync_ref_model: checkpoints would lack parts of a reference model that ZeRO-3 or FSDP shards. Use "
                "--deepspeed ds_configs/zero2.json."
            )
        self.run.saved_states.append(SavedReference())

    def _send_telemetry(self, *args: Any) -> None:
        """Do not report every trainer that is created to the Hub."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """
        Add the router loss of all passes within TRL's loss.

        The router loss of a step is the mean over its micro-batches, like TRL's losses. If all micro-batches have the
        same number of rows, neither accumulation nor world size changes it.
        """
        # Forget the passes of a loss that ended in an error, such as for lack of memory.
        self.router_loss.take()
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        aux_loss = self.router_loss.take()
        if aux_loss is None:
            return result
        # TRL logs the mean of each entry of this table. `gather` is a collective, which all ranks enter here: they run
        # the same passes.
        self._metrics["train"]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        # If TRL has already divided its loss by the number of micro-batches, Trainer does not divide again.
        num_micro_batches = self.current_gradient_accumulation_steps if self.loss_is_scaled_for_ga else 1
        router_term = self.router_loss.coefficient * aux_loss / num_micro_batches
        return (result[0] + router_term, result[1]) if return_outputs else result + router_term

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """
        Return the rows that a data loader reads, in an order that depends only on the seed and the epoch. A loss of
        TRL has no row weights, so no row can be padding: an evaluation gets each item once, and an epoch leaves out
        the last rows, which do not fill a global batch.

        Raises:
            `UserError`: if the training rows do not fill a single batch.
        """
        args = self.args
        if not is_training:
            copies = self.rows_per_item or 1
            batches = EvaluationBatches(
                dataset, self.data_collator, batch_size, num_ranks=self.data_parallel_size, copies=copies
            )
            return RowSource(batches, 1, collator=batches.collate)
        # TRL's own samplers, which repeat the rows, give whole global batches.
        multiple = 1 if self.rows_per_item else batch_size * self.data_parallel_size * args.gradient_accumulation_steps
        if len(dataset) < multiple:
            raise UserError(
                f"{description}: {len(dataset)} rows do not fill one batch of {multiple} (devices x batch size x "
                "accumulation). Lower the batch size or add data."
            )
        # The seed decides which rows are left out: different ones in each epoch, but the same ones on every rank.
        seed = args.data_seed if args.data_seed is not None else args.seed
        padded, sampler_fn = pad_rows(dataset, sampler_fn, multiple, seed=seed, is_training=True, pads=False)
        return RowSource(padded, batch_size, sampler_fn)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> tuple:
        """Evaluate one batch, and keep the sums of its figures over its items."""
        metrics, num_items = self._metrics["eval"], next(self.num_items)
        metrics.clear()
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        metrics["loss"].append(self.accelerator.gather(loss).mean().item())
        for name, values in metrics.items():
            weight = num_items * self.shares.get(name, 1.0)
            if weight and not NO_MEANS.fullmatch(name):
                total, count = self.item_sums.get(name, (0.0, 0.0))
                self.item_sums[name] = (total + weight * values[-1], count + weight)
        return loss, logits, labels

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # NOTE: TRL itself logs times and completions to trackio, which refuses them before and after its run.
        trackers = [name for name in self.args.report_to if name != "trackio" or self.is_in_train]
        with overriding(self.args, report_to=trackers):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Evaluate with Trainer's loop, and return means over all items instead of means over batches."""
        num_items = dataloader.dataset.num_items
        self.num_items, self.item_sums = iter(num_items), dict[str, tuple[float, float]]()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        # NOTE: TRL's `log` would add the figures of the last batch.
        self._metrics["eval"].clear()
        means = {f"{metric_key_prefix}_{name}": total / count for name, (total, count) in self.item_sums.items()}
        return EvalLoopOutput(*output[:2], output.metrics | means, num_samples=sum(num_items))
