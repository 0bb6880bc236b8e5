"""Intervals over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean: ``t_{0.975, n-1} s / sqrt(n)``; None for fewer than two values.

    Example:
        >>> round(half_width([0.5, 0.7]), 3)
        1.271
    """
    n = len(values)
    return None if n < 2 else quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)


def quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t, by bisection of its distribution function (Abramowitz and Stegun 26.7.3 and 26.7.4).

    Example:
        >>> [round(quantile(n), 3) for n in (1, 4, 30)]
        [12.706, 2.776, 2.042]
    """
    low, high = 1.9, 13.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _inside(t: float, freedom: int) -> float:
    """The probability that ``|T| < t``."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, total = math.cos(angle), 0.0
    term = cosine if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
