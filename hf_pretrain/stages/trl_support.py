"""
What TRL's trainers need to train MiniMind as our own do: our pushing and saving, and our router loss.

TRL computes Mixtral's load-balancing loss in its fused LM head. [`RouterLossMixin`] switches that off and adds
`router_aux_loss_coef * sum of aux_d over documents / number of documents` (`loss.py`) to the loss instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..model.loss import find_documents, router_loss
from ..training.run_trainer import RunTrainer


class RouterLossMixin(RunTrainer):
    """
    Put before a trainer of TRL: `class MyTrainer(RouterLossMixin, trl.GRPOTrainer)`. It adds the router loss of every
    pass of the policy through its decoder that is trained on, a document being a row, or less where positions restart.
    Passes without gradients (a reference model, evaluation) have none.

    A step's micro-batches count alike: the router loss is the mean over them, as TRL's losses are. With equally many
    rows in each, neither accumulation nor world size changes it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Mixtral's formula, in TRL's own code.
        self.aux_loss_enabled = False
        self._adds_router_loss = bool(self.model.config.num_experts) and self.router_aux_loss_coef != 0.0
        self._captured: list[torch.Tensor] | None = None
        if self._adds_router_loss:
            decoder = self.model.get_decoder()
            decoder.register_forward_pre_hook(self._ask_for_router_logits, with_kwargs=True)
            decoder.register_forward_hook(self._keep_router_loss, with_kwargs=True)

    def _send_telemetry(self) -> None:
        """TRL reports every trainer that is made to the Hub. Ours do not."""

    # NOTE: TRL's fused LM head calls the decoder itself and never our `forward`, and its DPO passes on what arguments
    # it likes: the decoder is the one place that every policy pass goes through.

    def _ask_for_router_logits(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
        if self._captured is not None and torch.is_grad_enabled():
            return args, kwargs | {"output_router_logits": True}
        return None

    def _keep_router_loss(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        if self._captured is None or not torch.is_grad_enabled():
            return
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

    @contextmanager
    def _capturing(self) -> Iterator[list[torch.Tensor]]:
        captured: list[torch.Tensor] = []
        self._captured = captured
        try:
            yield captured
        finally:
            self._captured = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with self._capturing() as captured:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not captured or not self._adds_router_loss:
            return result
        aux_loss = torch.stack(captured).mean()
        self._metrics["train"]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        # Where TRL divides its loss by the micro-batches of the step, Trainer does not do it again.
        num_micro_batches = self.current_gradient_accumulation_steps if self.loss_is_scaled_for_ga else 1
        router_term = self.router_aux_loss_coef * aux_loss / num_micro_batches
        if return_outputs:
            return result[0] + router_term, result[1]
        return result + router_term


__all__ = ["RouterLossMixin"]
