"""
Mixin that adds our saving, pushing and router loss to TRL's trainers.

TRL computes Mixtral's load-balancing loss in its fused LM head. [`RouterLossMixin`] turns that off and adds
`router_aux_loss_coef * sum of aux_d over documents / number of documents` (`model/loss.py`) to the loss.
"""

from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..data.padding_rows import EpochSampler, PaddedDataset, RowSource
from ..model.loss import find_documents, router_loss
from ..runtime.errors import UserError
from ..runtime.metrics import evaluated_set, first_figures
from ..training.base_trainer import RunTrainer


logger = logging.get_logger(__name__)


class RouterLossMixin(RunTrainer):
    """
    Add our router loss to a trainer of TRL: `class MyTrainer(RouterLossMixin, trl.GRPOTrainer)`.

    Every forward pass of the policy that computes gradients contributes. A document is a row, or a part of a row if
    positions restart. Passes without gradients (a reference model, an evaluation) contribute nothing.

    The router loss of a step is the mean over its micro-batches, like TRL's losses. If all micro-batches have the same
    number of rows, neither accumulation nor world size changes it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Turn off Mixtral's formula in TRL's own code.
        self.aux_loss_enabled = False
        self._captured: list[torch.Tensor] | None = None
        if self.model.config.num_experts and self.router_aux_loss_coef != 0.0:
            decoder = self.model.get_decoder()
            # Hooks on the decoder itself stay in place when DDP, DeepSpeed or peft wrap the model.
            decoder.register_forward_pre_hook(self._ask_for_router_logits, with_kwargs=True)
            decoder.register_forward_hook(self._keep_router_loss, with_kwargs=True)

    def _send_telemetry(self) -> None:
        """Do nothing: TRL reports every trainer that is created to the Hub."""

    # NOTE: TRL's fused LM head calls the decoder instead of our `forward`, and its DPO passes other arguments. But
    # every pass of the policy calls the decoder, so hooks on the decoder compute the loss.

    def _ask_for_router_logits(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Make the decoder return its router logits in passes with gradients within `compute_loss`."""
        if self._captured is not None and torch.is_grad_enabled():
            return args, kwargs | {"output_router_logits": True}
        # None leaves the arguments unchanged.
        return None

    def _keep_router_loss(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Compute the router loss of one pass and keep it for `compute_loss`."""
        if self._captured is None or not torch.is_grad_enabled():
            return
        # Activation checkpointing recomputes single layers, not the decoder, so no pass counts twice.
        hidden_states = outputs.last_hidden_state
        documents = find_documents(
            hidden_states.shape[:2],
            device=hidden_states.device,
            position_ids=kwargs.get("position_ids"),
            attention_mask=kwargs.get("attention_mask"),
        )
        config = self.model.config
        loss = router_loss(
            outputs.router_logits, config.num_experts_per_tok, documents, level=config.router_aux_loss_level
        )
        self._captured.append(loss)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return TRL's loss plus the router loss."""
        # Collect the router losses of all passes.
        captured = self._captured = []
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._captured = None
        if not captured:
            return result
        # A step may run the policy more than once, such as for chosen and rejected answers.
        aux_loss = torch.stack(captured).mean()
        # TRL logs the mean of each entry of this table. `gather` is a collective, which all ranks enter here: they run
        # the same passes.
        self._metrics["train"]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        # If TRL has already divided its loss by the number of micro-batches, Trainer does not divide again.
        num_micro_batches = self.current_gradient_accumulation_steps if self.loss_is_scaled_for_ga else 1
        router_term = self.router_aux_loss_coef * aux_loss / num_micro_batches
        if return_outputs:
            return result[0] + router_term, result[1]
        return result + router_term

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        name = evaluated_set(logs, self.eval_dataset)
        if name is not None and not first_figures(logs, self.eval_dataset):
            # NOTE: TRL gives its figures of every validation set the same names.
            for key in list(self._metrics["eval"]):
                self._metrics["eval"][f"{name}_{key}"] = self._metrics["eval"].pop(key)
        super().log(logs, *args, **kwargs)


class WholeBatchesMixin(RouterLossMixin):
    """A trainer of TRL whose batches are complete: a preference loss has no row weights, so no row can be padding."""

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """
        Return the pairs that a data loader reads, without the last ones of an epoch, or of an evaluation, that do not
        fill a global batch. An evaluation warns about the rows that it leaves out, and uses smaller batches for a
        small validation set.

        Raises:
            `UserError`: if the rows do not fill a single batch.
        """
        num_processes = self.accelerator.num_processes
        if not is_training:
            # A small validation set would otherwise fill no batch and give no figures.
            batch_size = max(1, min(batch_size, len(dataset) // num_processes))
        multiple = batch_size * num_processes
        if is_training:
            multiple *= self.args.gradient_accumulation_steps
        elif len(dataset) % multiple:
            left_out = len(dataset) % multiple
            logger.warning_once(
                f"{description}: {left_out} of {len(dataset)} rows do not fill a batch. The run leaves them out."
            )
        if len(dataset) < multiple:
            raise UserError(
                f"{description}: {len(dataset)} rows do not fill one batch of {multiple} (devices x batch size"
                f"{' x accumulation' if is_training else ''}). Lower the batch size or add data."
            )
        # The seed decides which rows are left out: different ones in each epoch, but the same ones on every rank.
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed

        def sampler_of_whole_batches(_):
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            rows = sampler if sampler is not None else range(len(dataset))
            # Trainer calls this function later, when `reachable` below exists.
            reachable.sampler = EpochSampler(rows, seed=seed, multiple=multiple, pads=False)
            return reachable.sampler

        # NOTE: after a resume on several ranks, accelerate calls `set_epoch` only on the dataset, not on the sampler.
        reachable = PaddedDataset(dataset)
        return RowSource(reachable, batch_size, sampler_of_whole_batches)
