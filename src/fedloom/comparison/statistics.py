"""Small-sample statistics without a dependency: intervals, paired tests, ranks, Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.comparison.cross_validation import t_quantile


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its interval.

    Args:
        mean: of the values.
        half: half of the interval's width; None with one value.
        std: sample standard deviation; None with one value.
        n: number of values.
    """

    mean: float
    half: float | None
    std: float | None
    n: int


def interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Mean and Student's interval ``t s / sqrt(n)``; None of nothing.

    Example:
        >>> interval([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.484, std=1.0, n=3)
    """
    n = len(values)
    if not n:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Interval(mean, t_quantile((1 + level) / 2, n - 1) * std / math.sqrt(n), std, n)


# Paired tests -----------------------------------------------------------------------------------------------


def paired_t(differences: Sequence[float]) -> float | None:
    """Two-sided p value of the paired t test; None where the differences do not vary, unless all are zero (then 1).

    Example:
        >>> round(paired_t([1.0, 2.0, 4.0]), 6)
        0.118082
    """
    n = len(differences)
    if n < 2:
        return None
    found = interval(differences)
    assert found is not None
    assert found.std is not None
    if found.std <= 1e-12 * abs(found.mean):
        return 1.0 if found.mean == 0 else None
    t = found.mean / (found.std / math.sqrt(n))
    return _beta((n - 1) / 2, 0.5, (n - 1) / (n - 1 + t * t))


def _beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function ``I_x(a, b)`` by its continued fraction."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + numerator * d)
            c = 1.0 + numerator / c
            total *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * total / a


def wilcoxon(differences: Sequence[float]) -> float | None:
    """Exact two-sided p value of Wilcoxon's signed-rank test, with ties; zeros are left out; None where nothing is left.

    Every assignment of signs is equally likely; the distribution of the sum of positive ranks is counted, not approximated
    (above 300 differences it is taken as normal).

    Example:
        >>> wilcoxon([1.0, 2.0, 3.0, -0.5])
        0.25
    """
    kept = np.array([d for d in differences if d != 0])
    n = len(kept)
    if not n:
        return None
    doubled = np.rint(2 * np.array(ranks(list(np.abs(kept))))).astype(np.int64)
    total, above = int(doubled.sum()), int(doubled[kept > 0].sum())
    if n > 300:
        spread = math.sqrt(float((doubled.astype(float) ** 2).sum()) / 4)
        return math.erfc(max(0.0, abs(above - total / 2) - 1) / spread / math.sqrt(2))
    ways = np.zeros(total + 1)
    ways[0] = 1.0
    for rank in doubled:
        moved = np.zeros_like(ways)
        moved[rank:] = ways[: total + 1 - rank]
        ways = (ways + moved) / 2
    low = min(above, total - above)
    return min(1.0, 2 * float(ways[: low + 1].sum()))


def sign_test(wins: int, losses: int) -> float | None:
    """Two-sided p value of so many wins and losses if each were a toss of a coin; ties are left out.

    Example:
        >>> round(sign_test(37, 11), 6)
        0.000223
    """
    n = wins + losses
    if not n:
        return None
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**n))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """The p values corrected by Holm for their number.

    Example:
        >>> holm([0.01, None, 0.04, 0.03])
        [0.03, None, 0.06, 0.06]
    """
    order = sorted((p, i) for i, p in enumerate(values) if p is not None)
    made: list[float | None] = [None] * len(values)
    most = 0.0
    for k, (p, i) in enumerate(order):
        most = max(most, min(1.0, (len(order) - k) * p))
        made[i] = most
    return made


# Orders -----------------------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, smallest first; equal values share the mean of their ranks.

    Example:
        >>> ranks([0.3, 0.1, 0.3])
        [2.5, 1.0, 2.5]
    """
    return [1 + sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


def front(points: Sequence[Sequence[float]]) -> list[bool]:
    """Whether each point is on the Pareto front: no other is at least as good everywhere and better somewhere (larger is better).

    Example:
        >>> front([(0.9, -5.0), (0.8, -5.0), (0.7, -1.0)])
        [True, False, True]
    """
    return [
        not any(all(b >= a for a, b in zip(p, q, strict=True)) and tuple(q) != tuple(p) for q in points) for p in points
    ]
