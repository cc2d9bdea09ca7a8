"""
The loss of a training step and of an evaluation, without a Trainer: divisors, terms, sums, and the check for finite
values.

The loss of a step is

    sum(w * CE) / sum(w)  +  router_aux_loss_coef * sum(aux_d) / number of documents

where `w` is the weight of predicting a token, `CE` its cross-entropy in nats and `aux_d` the router loss of a
document. All sums run over all micro-batches of all ranks (`model/loss.py`). A [`Term`] replaces a share of the
cross-entropy. DDP, FSDP and DeepSpeed average gradients over the data-parallel ranks. Each micro-batch's sums are
therefore divided by the totals of the whole step, and its loss is multiplied by the number of data-parallel ranks. The
gradient is then the gradient of one process with one big batch. The exception are models with
`router_aux_loss_level="batch"`, such as imported minimind-3 models with experts: their router loss is a product of
means over a micro-batch, so it depends on the size of the micro-batch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor

from ..model.loss import TokenLoss, prediction_weights
from ..model.router_loss import find_documents
from ..runtime.errors import UserError
from ..runtime.ranks import Ranks


class StepTotals(NamedTuple):
    """
    Sums over all micro-batches of all ranks of a step, scalars on the device.

    Args:
        weights (`torch.Tensor`): the sum of the weights, float32. 1 for a step of padding rows, whose loss is zero.
        documents (`torch.Tensor`): the number of documents, at least 1, float32.
        tokens (`torch.LongTensor`): the number of tokens without padding.
    """

    weights: torch.Tensor
    documents: torch.Tensor
    tokens: torch.Tensor


def count_batch(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the sum of the weights of one batch, a float32 scalar, and its number of documents and tokens, a
    `torch.LongTensor` of shape `(2,)`.

    NOTE: MPS and some GPUs have no float64. In float32, sums of weights 0 and 1 are exact up to 2**24 tokens per step.
    Tokens are summed over a whole run and are therefore integers.
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


def count_step(
    batches: Iterable[dict[str, torch.Tensor]],
    *,
    device: torch.device,
    add_up: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] = lambda sums: sums,
) -> StepTotals:
    """
    Return the totals of a step.

    Args:
        batches (`Iterable[dict]`): the micro-batches of this rank.
        device (`torch.device`): the device of the totals.
        add_up (`Callable`): returns the sums of tensors over the ranks that see different rows.
    """
    columns = zip(*map(count_batch, batches), strict=True)
    weights, counts = add_up(tuple(torch.stack(column).sum(0).to(device) for column in columns))
    num_documents, num_tokens = counts.unbind()
    # Dividing the zero loss of padding rows by 1 instead of 0 gives zero, not NaN.
    return StepTotals(torch.where(weights > 0, weights, 1.0), num_documents.clamp(min=1).float(), num_tokens)


class Term(Protocol):
    """
    A loss that replaces a share of the cross-entropy.

    Attributes:
        name (`str`): its name in the log; `eval_<name without _loss>` in an evaluation.
        flops_per_token (`float`): FLOPs of other models than the trained one.
        arguments (dataclass): what a resume compares.
        weights (`dict[str, Sequence[torch.Tensor]]`): weights that training does not change, by their role. A resume
            compares them.
    """

    name: str
    flops_per_token: float
    arguments: Any
    weights: dict[str, Sequence[torch.Tensor]]

    def __call__(self, inputs: dict[str, torch.Tensor]) -> TokenLoss:
        """Return the loss of a micro-batch, for the model to compute."""


def loss_parts(outputs: Any, term: Term | None = None) -> dict[str, torch.Tensor]:
    """
    Return the parts of a loss by their names in the log, scalars.

    Args:
        outputs: the outputs of the model.
        term ([`Term`], *optional*): a further term of the loss, which is `token_loss` of the outputs.
    """
    parts = {"ce_loss": outputs.ce_loss, "aux_loss": outputs.aux_loss}
    if term is not None:
        parts[term.name] = outputs.token_loss
    return {name: part for name, part in parts.items() if part is not None}


class EvaluationSums:
    """
    Sums over the batches of an evaluation. Their ratios do not depend on the size of a batch.

    Args:
        token_bytes (`torch.Tensor` of shape `(vocab_size,)`, *optional*): bytes of each token, for bits per byte.
        term ([`Term`], *optional*): a further term to evaluate.
    """

    def __init__(self, token_bytes: torch.Tensor | None = None, term: Term | None = None):
        self.token_bytes, self.term = token_bytes, term
        # One tensor (3,) or (4,) per batch: the sums of w * CE, of w, of bytes, and of w * the term.
        self.sums: list[torch.Tensor] = []

    def add(self, outputs: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Add a batch, whose `ce_loss` is a sum, and return its mean loss in nats per token: 0 without a token."""
        labels = inputs["labels"]
        weights = prediction_weights(labels, inputs.get("loss_mask"))
        total, num_bytes = weights.sum(), torch.zeros((), device=labels.device)
        if self.token_bytes is not None:
            # A label of -100 cannot be an index; its weight is 0.
            num_bytes = (weights * self.token_bytes.to(labels.device)[labels.clamp(min=0)]).sum()
        values = [outputs.ce_loss, total, num_bytes, *([] if self.term is None else [outputs.token_loss])]
        self.sums.append(torch.stack(values).detach())
        return outputs.ce_loss / total.clamp(min=torch.finfo(torch.float32).tiny)

    def figures(
        self, gather: Callable[[torch.Tensor], torch.Tensor], *, prefix: str, description: str
    ) -> dict[str, float]:
        """
        Return `loss` in nats per token, `perplexity`, `bits_per_byte` and the term; nothing without a batch.

        Args:
            gather (`Callable`): gathers a tensor from all ranks, which have added the same number of batches.
            prefix (`str`): stands before each name, with an underscore.
            description (`str`): the evaluation, for messages.

        Raises:
            `UserError`: if the set has no token to predict.
            `FloatingPointError`: if the loss is not finite.
        """
        if not self.sums:
            return {}
        columns = zip(*gather(torch.stack(self.sums)).tolist(), strict=True)
        # `math.fsum` adds on the host without rounding.
        ce_sum, weight, num_bytes, *others = map(math.fsum, columns)
        if weight == 0:
            raise UserError(
                f"{description}: no token of the set is to be predicted, because all labels are -100. Check the "
                "validation data."
            )
        loss = ce_sum / weight
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{description}: {prefix}_loss is {loss}. The weights are broken. Resume from an earlier checkpoint "
                "with a lower --learning_rate and --allow_inexact_resume."
            )
        # exp overflows float64 above 709.
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if num_bytes:
            figures["bits_per_byte"] = ce_sum / math.log(2) / num_bytes
        if self.term is not None:
            figures[self.term.name.removesuffix("_loss")] = others[0] / weight
        return {f"{prefix}_{name}": value for name, value in figures.items()}


class FiniteCheck:
    """
    End a run before anything of a step with a non-finite loss or gradient leaves the device.

    On a GPU, the host does not wait for the norm of the gradients: it reads the norm one step later, and before a log,
    an evaluation, a checkpoint or the model is written.

    Args:
        ranks ([`~runtime.ranks.Ranks`]): the ranks that end together.
        is_late (`bool`): whether to read a step later.
        end (`Callable`): ends the run. Its arguments are what is not finite, and the number of the step.
    """

    def __init__(self, ranks: Ranks, *, is_late: bool, end: Callable[[str, int], NoReturn]):
        self.ranks, self.is_late, self.end = ranks, is_late, end
        # `MaskedLossTrainer` sets both: a function that takes the number, the loss and the norm of each step, and one
        # that returns the loss of all ranks from that of one, a scalar.
        self.watch: Callable[..., None] | None = None
        self.over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
        # The loss of each micro-batch of the current step.
        self._losses: list[torch.Tensor] = []
        # The step, loss and norm on the host, and the event after which they are there.
        self._pending: tuple[int, torch.Tensor, Any] | None = None

    def begin_step(self) -> None:
        """Forget the losses of the last step."""
        self._losses = []

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a factor that turns the gradients of a non-finite loss into NaN, so that each rank sees it."""
        self._losses.append(loss.detach())
        # An infinite loss may have finite or zero gradients. Multiplied by NaN, all of them become NaN.
        return torch.where(self._losses[-1].isfinite(), 1.0, torch.nan)

    def compare_losses(self, step: int) -> None:
        """End the run if a loss of any rank is not finite. All ranks call this method."""
        if self.ranks.largest(int(not all(loss.isfinite() for loss in self._losses))):
            self.end("The loss is not finite", step)

    def take_norm(self, norm: torch.Tensor | float, step: int) -> None:
        """Take the norm of the gradients of a step, a scalar. All ranks call this method."""
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        values = norm.detach().float().reshape(1)
        # A trainer with a loss of its own may add none.
        if self.over_ranks is not None and self._losses:
            values = torch.stack([self.over_ranks(sum(self._losses)).float(), values[0].to(self._losses[0].device)])
        host, copied = values.to("cpu", non_blocking=self.is_late), None
        if values.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._pending = step, host, copied
        if not self.is_late:
            self.read()

    def read(self) -> None:
        """Check the norm of the last step, if it has not been read yet."""
        if self._pending is not None:
            (step, host, copied), self._pending = self._pending, None
            if copied is not None:
                copied.synchronize()
            *loss, norm = host.tolist()
            if not math.isfinite(norm):
                self.end(f"The gradient's norm is {norm}", step)
            if self.watch is not None and loss:
                self.watch(step, *loss, norm)
