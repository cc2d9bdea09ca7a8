"""Divisors, terms, sums of an evaluation and the check for finite values, without a Trainer."""

import math
from types import SimpleNamespace

import pytest
import torch

from hf_pretrain.runtime.ranks import Ranks
from hf_pretrain.training.step_loss import EvaluationSums, FiniteCheck, count_step, loss_parts


# Two documents in the first row, one and padding in the second. The first token of a document is not predicted.
BATCH = {
    "labels": torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, -100, -100]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]),
    "loss_mask": torch.tensor([[0.0, 1.0, 0.5, 0.0, 1.0], [0.0, 2.0, 1.0, 0.0, 0.0]]),
}
CPU = torch.device("cpu")


TERM = SimpleNamespace(name="kl_loss")


def as_outputs(**losses: float) -> SimpleNamespace:
    return SimpleNamespace(**{name: torch.tensor(loss) for name, loss in losses.items()})


def test_the_totals_of_a_step_are_sums_over_its_micro_batches():
    totals = count_step([BATCH, BATCH], device=CPU)
    assert (totals.weights.item(), totals.documents.item(), totals.tokens.item()) == (11.0, 6.0, 20)
    # From 2**24 on, float32 represents only even integers.
    assert totals.tokens.dtype == torch.int64
    twice = count_step([BATCH], device=CPU, add_up=lambda sums: tuple(2 * total for total in sums))
    assert [total.item() for total in twice] == [total.item() for total in totals]


def test_a_step_of_padding_rows_divides_by_one():
    totals = count_step([BATCH | {"labels": torch.full((2, 5), -100)}], device=CPU)
    assert (totals.weights.item(), totals.documents.item()) == (1.0, 1.0)


def test_the_parts_of_a_loss_have_the_names_of_the_log():
    outputs = SimpleNamespace(ce_loss=3.0, aux_loss=None, token_loss=8.0)
    assert loss_parts(outputs) == {"ce_loss": 3.0}
    outputs.aux_loss = 0.25
    assert loss_parts(outputs, TERM) == {"ce_loss": 3.0, "aux_loss": 0.25, "kl_loss": 8.0}


def test_an_evaluation_is_one_ratio_of_sums():
    sums = EvaluationSums(torch.arange(10).float(), TERM)
    # float32 would round the sum 2**24 + 11 to an even number.
    means = [sums.add(as_outputs(ce_loss=ce, token_loss=6.0), BATCH).item() for ce in (11.0, 2.0**24)]
    assert means == pytest.approx([11 / 5.5, 2**24 / 5.5])
    padding = BATCH | {"labels": torch.full((2, 5), -100)}
    assert sums.add(as_outputs(ce_loss=0.0, token_loss=6.0), padding).item() == 0.0
    figures = sums.figures(lambda tensor: tensor, prefix="test", description="a set")
    assert figures["test_loss"] == (2**24 + 11) / 11 and figures["test_kl"] == 18 / 11
    assert figures["test_perplexity"] == math.exp(700.0)
    # The tokens 6, 7, 9 with weights 1, 0.5, 1, and 6, 7 with weights 2, 1: a token has as many bytes as its id.
    num_bytes = 2 * (6 + 3.5 + 9 + 12 + 7)
    assert figures["test_bits_per_byte"] == pytest.approx((2**24 + 11) / math.log(2) / num_bytes)
    assert EvaluationSums().figures(lambda tensor: tensor, prefix="test", description="a set") == {}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_broken_norm_or_loss_ends_the_run(is_late):
    ended: list[tuple[str, int]] = []
    check = FiniteCheck(Ranks(1, 0, timeout_seconds=1), is_late=is_late, end=lambda *what: ended.append(what))
    check.take_norm(torch.tensor(2.0), 1)
    check.read()
    check.take_norm(torch.tensor(math.inf), 2)
    assert ended == ([] if is_late else [("The gradient's norm is inf", 2)])
    check.read()
    check.read()
    assert ended == [("The gradient's norm is inf", 2)]
    check.begin_step()
    # An infinite loss may have zero gradients. The factor makes them NaN.
    assert [check.add_loss(torch.tensor(loss)).item() for loss in (1.0, 2.0)] == [1.0, 1.0]
    check.compare_losses(3)
    assert check.add_loss(torch.tensor(math.inf)).isnan()
    check.compare_losses(3)
    assert ended[1:] == [("The loss is not finite", 3)]
