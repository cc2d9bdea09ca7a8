"""
The paired difference of two models on the same examples, and the two noises that it has to exceed.

The interval shows how far other examples of the same kind would move the difference. Another seed of the training
moves it, too, and no interval over examples shows that: `seed_noise.json` holds the final validation losses of runs
that differ only in their seed.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist, stdev
from typing import Any, NamedTuple

import numpy as np

from ..model.presets import PRESETS


# Rounding moves the figure of an example by less.
ROUNDING = 1e-4
# Five examples that all favour one model do so by chance in 1 of 16 cases, six in 1 of 32.
MIN_DIFFERENT = 6
_SEED_NOISE = Path(__file__).with_name("seed_noise.json")


class Difference(NamedTuple):
    """
    The figures of two models, and the 95 % interval of their difference, the first minus the second.

    Args:
        first, second (`float`): the figures, each a ratio of two sums over the examples.
        low, high (`float`): the interval.
        num_examples (`int`): number of examples.
        num_different (`int`): number of examples whose figures differ by more than rounding.
    """

    first: float
    second: float
    low: float
    high: float
    num_examples: int
    num_different: int


def paired_difference(totals: np.ndarray, weights: np.ndarray) -> Difference:
    """
    Return the difference of the ratios `sum of totals / sum of weights` of two models, with its interval by the delta
    method: with `n` the weights of both, `d` the differences of the totals and `D` that of the ratios,

        variance = sum of (d - D * n)^2 / (sum of n)^2 * m / (m - 1)

    Args:
        totals (`np.ndarray` of shape `(2, num_examples)`): such as sums of the cross-entropy over the tokens.
        weights (`np.ndarray` of shape `(2, num_examples)`): such as numbers of tokens. The models may differ in them.
    """
    num_examples = totals.shape[1]
    sums = weights.sum(axis=1, keepdims=True)
    ratios = totals.sum(axis=1, keepdims=True) / sums
    # (num_examples,): how far each example moves the difference
    moves = np.subtract(*((totals - ratios * weights) / sums))
    half = student_t(num_examples - 1) * math.sqrt((moves**2).sum() * num_examples / (num_examples - 1))
    first, second = ratios[:, 0].tolist()
    num_different = int((np.abs(np.subtract(*(totals / weights))) > ROUNDING).sum())
    return Difference(first, second, first - second - half, first - second + half, num_examples, num_different)


def student_t(degrees: int) -> float:
    """
    Return the 97.5 % quantile of Student's distribution, by the expansion of Abramowitz and Stegun, 26.7.5: 0.1 % too
    small at 5 degrees of freedom, and 3 % at 2.
    """
    z = NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def seed_noise(configs: Iterable[Any], kind: str) -> tuple[float, str] | None:
    """
    Return how far the validation losses of two runs of a preset with different seeds are apart in 95 of 100 cases, in
    nats per token, and what was measured; `None` if nobody has measured models of these shapes on such data.

    Args:
        configs (`Iterable` of [`~transformers.PreTrainedConfig`]): the configs of the models.
        kind (`str`): the kind of the validation set, such as `text`.
    """
    shapes = [{"num_experts": 0} | config.to_dict() for config in configs]
    for preset, record in json.loads(_SEED_NOISE.read_text(encoding="utf-8")).items():
        shape = record.get("shape") or PRESETS[preset]
        if kind == record["kind"] and all(shape.items() <= fields.items() for fields in shapes):
            losses = record["losses"]
            about = f"{len(losses)} runs of {preset} on {record['data']}"
            return student_t(len(losses) - 1) * math.sqrt(2) * stdev(losses.values()), about
    return None


def judge(difference: Difference, *, lower_is_better: bool, seeds: tuple[float, str] | None) -> str:
    """
    Say whether the difference of model A and model B is more than chance, and which noise it exceeds.

    Args:
        difference ([`Difference`]): the figures of A and B.
        lower_is_better (`bool`): whether the better model has the lower figure.
        seeds (`tuple`, *optional*): the [`seed_noise`] of both models' preset, if it is known for this figure.
    """
    if not difference.num_different:
        return "Equal: A and B differ on no example by more than rounding."
    if difference.num_different < MIN_DIFFERENT:
        text = f"Too few to tell: A and B differ on {difference.num_different} examples"
        return f"{text}, and fewer than {MIN_DIFFERENT} may differ by chance. Add examples."
    if difference.low <= 0 <= difference.high:
        return "No more than chance: with other examples of this kind, the other model may be the better one."
    better = "A" if (difference.first < difference.second) == lower_is_better else "B"
    text = f"{better} is better, by more than the chance of the examples"
    if seeds is None:
        return f"{text}. Nobody has measured how much the seed of the training changes this figure of such a model."
    bound, about = seeds
    if abs(difference.first - difference.second) <= bound:
        return f"{text}, but not of the seed: two seeds of one recipe differ by up to {bound:.4f} ({about})."
    return f"{text}, and of the seed: two seeds of one recipe differ by up to {bound:.4f} ({about})."
