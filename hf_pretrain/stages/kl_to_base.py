"""
Fine-tuning of an adapter that keeps what its base model knows (`--kl_to_base`).

Let `w[t]` be the weight of predicting token `t`, and let `p` and `q` be the distributions of the base model, which is
the model without its adapter, and of the model over the next token. Then, with the share `s`,

    loss = (1 - s) * sum of w * CE / sum of w
         + s * sum of max(1 - w, 0) * KL(p || q) / sum of w
         + router_aux_loss_coef * router loss

with sums over all micro-batches of all ranks, as in `training/step_loss.py`. So the labels teach the answers, and the
base model teaches the tokens of the prompts and those of answers with a small weight. A conversation of which no token
has a weight is left out, as in every fine-tuning.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..loading.adapters import KeepingArguments, base_model_of, is_adapted
from ..model.loss import TokenLoss, prediction_weights, weighted_tokens
from ..model.router_loss import find_documents
from ..runtime.errors import UserError
from ..training.measurements import num_active_parameters
from ..training.training_arguments import LMTrainingArguments
from .distillation import ask, divergence_loss


class BaseTerm:
    """
    The KL term of the loss described above ([`~training.step_loss.Term`]). Its log is `kl_loss`. In an evaluation,
    which trains nothing, `eval_kl` is the divergence of the weighted tokens: how far the answers have moved.

    Args:
        model ([`~peft.PeftModel`]): the model that is trained.
        arguments ([`KeepingArguments`]): the share of the term.
        args ([`LMTrainingArguments`]): gives the precision.

    Raises:
        `UserError`: for a model without an adapter.
    """

    name = "kl_loss"

    def __init__(self, model: nn.Module, arguments: KeepingArguments, args: LMTrainingArguments):
        if not is_adapted(model):
            raise UserError("--kl_to_base compares with the base of an adapter: pass --use_peft, or --kl_to_base 0.")
        self.model, self.arguments = model, arguments
        # 2 per parameter, for a forward pass.
        self.flops_per_token = 2 * num_active_parameters(base_model_of(model))
        # The manifest of a run with an adapter has the digest of its base model anyway.
        self.weights: dict[str, list[torch.Tensor]] = {}
        # As the model's own forward pass.
        self.dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32

    def __call__(self, inputs: dict[str, torch.Tensor]) -> TokenLoss:
        """Return the divergence from the base model in one micro-batch."""
        named = {name: inputs.get(name) for name in ("position_ids", "attention_mask", "labels", "loss_mask")}
        documents = find_documents(named["labels"].shape, device=named["labels"].device, **named)
        trained = prediction_weights(named["labels"], named["loss_mask"]).flatten()
        kept = (1 - trained).clamp(min=0) * documents.token_mask if self.model.training else trained
        # Logits at t predict token t + 1 of the same document: shift the weights left by one, (batch_size * seq_len,).
        is_inside = documents.index[1:] == documents.index[:-1]
        trained, kept = (F.pad(weights[1:] * is_inside, (0, 1)) for weights in (trained, kept))
        # The head computes the cross-entropy of the same tokens.
        tokens = weighted_tokens(trained + kept)
        with self.model.disable_adapter():
            logits = ask(base_model_of(self.model), inputs, tokens, self.dtype)
        return divergence_loss(tokens, kept[tokens], logits, share=self.arguments.kl_to_base)
