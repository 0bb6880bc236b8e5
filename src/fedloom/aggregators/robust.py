"""Rules that withstand some bad updates. Each takes stacked updates (axis 0: clients) and gives one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedloom import tree
from fedloom.errors import RunError
from fedloom.types import Leaves


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
    flat = torch.stack([tree.flat(row).double() for row in rows])
    distance = torch.stack([((flat - row) ** 2).sum(1) for row in flat])
    # The nearest of each is itself, at distance zero.
    scores = [float(f"{float(d.sort()[0][1 : count - bad - 1].sum()):.10g}") for d in distance]
    chosen = sorted(sorted(range(count), key=lambda i: (scores[i], i))[:keep])
    return tree.weighted_sum([rows[i] for i in chosen], [1.0 / keep] * keep)
