"""Aggregation that tolerates faulty or hostile clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedloom import tensors
from fedloom.errors import RunError, UserError
from fedloom.spec.method import Method
from fedloom.spec.reducers import stack
from fedloom.spec.registry import plugin
from fedloom.tensors import Leaves


def median(stacked: Leaves) -> Leaves:
    """Coordinate-wise median; of an even number, the mean of the two in the middle."""

    def middle(values: Tensor) -> Tensor:
        ordered, count = values.sort(0)[0], values.shape[0]
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2

    return {name: middle(values) for name, values in stacked.items()}


def trimmed_mean(stacked: Leaves, trim: float) -> Leaves:
    """Coordinate-wise mean without the ``floor(trim M)`` smallest and as many largest of M values."""

    def inner(values: Tensor) -> Tensor:
        count = values.shape[0]
        cut = math.floor(trim * count)
        return values.sort(0)[0][cut : count - cut].mean(0)

    return {name: inner(values) for name, values in stacked.items()}


def krum(stacked: Leaves, bad: int, keep: int | None = 1) -> Leaves:
    """Mean of the ``keep`` updates with the smallest scores; 1 is Krum, more is multi-Krum, None is M - bad.

    ``score_i`` = sum of ``||d_i - d_j||^2`` over the M - bad - 2 nearest j. Scores are compared in float64 rounded to ten
    digits; ties go to the earlier client. A lone update is taken as it is.

    Raises:
        RunError: with fewer than ``bad + 3`` updates, or fewer than ``keep``.
    """
    rows = [dict(zip(stacked, values, strict=True)) for values in zip(*stacked.values(), strict=True)]
    count = len(rows)
    if count == 1:
        return rows[0]
    keep = count - bad if keep is None else keep
    if count < bad + 3 or count < keep:
        raise RunError(f"krum: {count} replies; bad={bad} and keep={keep} need at least {max(bad + 3, keep)}")
    flat = torch.stack([tensors.flat(row).double() for row in rows])
    distance = torch.stack([((flat - row) ** 2).sum(1) for row in flat])
    # The nearest of each is itself, at distance zero.
    scores = [float(f"{float(d.sort()[0][1 : count - bad - 1].sum()):.10g}") for d in distance]
    chosen = sorted(sorted(range(count), key=lambda i: (scores[i], i))[:keep])
    return tensors.weighted_sum([rows[i] for i in chosen], [1.0 / keep] * keep)


@plugin(
    "0 <= trim < 0.5",
    "bad >= 0",
    "keep >= 1",
    paper="Yin et al., Byzantine-Robust Distributed Learning, ICML 2018; Blanchard et al., Machine Learning with Adversaries, 2017",
)
def robust(
    rule: Literal["median", "trimmed_mean", "krum", "multi_krum"] = "median",
    trim: float = 0.1,
    bad: int = 1,
    keep: int | None = None,
) -> Callable[[Method], Method]:
    """Replaces the mean of the clients' updates by a rule that some bad updates cannot move far.

    ``median`` and ``trimmed_mean`` (without the ``floor(trim M)`` smallest and largest) go coordinate by coordinate; ``krum`` takes
    the update with the smallest sum of squared distances to its ``M - bad - 2`` nearest, ``multi_krum`` the mean of the ``keep`` best.
    Clients count alike, whatever their rows. Buffers are plainly averaged, as ever: use a model without running statistics
    where clients cannot be trusted.

    Args:
        rule: the rule.
        trim: share that ``trimmed_mean`` cuts at each end.
        bad: number of bad clients that Krum reckons with.
        keep: updates that ``multi_krum`` averages; None for M - bad.

    Example:
        >>> import fedloom as fl
        >>> str(fl.compose(fl.fedavg(), fl.robust("median")).reducers()["delta"])
        'stack'
    """
    rules: dict[str, Callable[[Leaves], Leaves]] = {
        "median": median,
        "trimmed_mean": partial(trimmed_mean, trim=trim),
        "krum": partial(krum, bad=bad, keep=1),
        "multi_krum": partial(krum, bad=bad, keep=keep),
    }
    if rule not in rules:
        raise UserError(f"robust: rule={rule!r}; expected {', '.join(rules)}")
    return lambda method: method.replacing_reducer("robust", "delta", stack(rules[rule]))
