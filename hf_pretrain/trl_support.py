"""What TRL's trainers need in order to train MiniMind as the other recipes do."""

from typing import Any

import torch
from transformers import Trainer

from .loss import find_documents, router_loss


class RouterLossMixin(Trainer):
    """
    Adds the model's own router loss to the loss of a TRL trainer, with the coefficient of `--router_aux_loss_coef` or of
    the config; logs it as `aux_loss`. It is a mean over the rows of a micro-batch.

    NOTE: TRL computes Mixtral's, which is a product of means over the whole batch, and counts padding differently.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.model.config
        coef = self.args.router_aux_loss_coef
        self._router_coef = config.router_aux_loss_coef if coef is None else coef
        self._router_losses: list[torch.Tensor] = []
        self.aux_loss_enabled = False  # TRL's
        if config.num_experts and self._router_coef:
            self.model.get_decoder().register_forward_hook(self._collect_router_loss, with_kwargs=True)

    def _collect_router_loss(
        self, decoder: torch.nn.Module, args: tuple, inputs: dict[str, Any], outputs: Any
    ) -> None:
        """Of the policy's forward pass; the reference and the generation run without gradients."""
        if not torch.is_grad_enabled() or outputs.router_logits is None:
            return
        documents = find_documents(
            outputs.last_hidden_state.shape[:2],
            device=outputs.last_hidden_state.device,
            attention_mask=inputs.get("attention_mask"),
            position_ids=inputs.get("position_ids"),
        )
        config = self.model.config
        loss = router_loss(
            outputs.router_logits, config.num_experts_per_tok, documents, level=config.router_aux_loss_level
        )
        self._router_losses.append(loss)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not (self.model.config.num_experts and self._router_coef and torch.is_grad_enabled()):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._router_losses.clear()
        loss = super().compute_loss(
            model, {**inputs, "output_router_logits": True}, return_outputs, num_items_in_batch
        )
        aux_loss = torch.stack(self._router_losses).mean()
        self._router_losses.clear()
        self._metrics["train"]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        if return_outputs:
            return loss[0] + self._router_coef * aux_loss, loss[1]
        return loss + self._router_coef * aux_loss


__all__ = ["RouterLossMixin"]
