"""Column statistics over clients from sums, counts and extremes alone.

A part is one client's training rows (n, columns, ...) with NaN where missing; every function sees a client's
rows only through a number that is then summed, or reduced by min or max, over the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def _columns(part: Matrix) -> Matrix:
    """(n, columns, ...) as (columns, everything else)."""
    return np.moveaxis(part, 1, 0).reshape(part.shape[1], -1)


def _seen(parts: Sequence[Matrix], column: int) -> list[Matrix]:
    flat = [_columns(part)[column] for part in parts]
    return [values[np.isfinite(values)] for values in flat]


def _kth(parts: Sequence[Matrix], k: int) -> float:
    """The k-th smallest value over all clients, by bisection on the summed counts of values at most t.

    At most k - 1 values are <= low throughout. The next value above low is the answer as soon as k values are
    at most that; until then low rises, and it cannot rise for ever as the interval is halved.
    """
    parts = [part for part in parts if len(part)]
    low, high = -np.inf, max(float(part.max()) for part in parts)

    def at_most(t: float) -> int:
        return sum(int((part <= t).sum()) for part in parts)

    while True:
        following = min(float(part[part > low].min()) for part in parts if (part > low).any())
        if at_most(following) >= k:
            return following
        low = following
        middle = low + (high - low) / 2
        if at_most(middle) < k:
            low = middle
        else:
            high = middle


def _median(parts: Sequence[Matrix]) -> float:
    n = sum(len(p) for p in parts)
    return (_kth(parts, (n + 1) // 2) + _kth(parts, n // 2 + 1)) / 2


def _mean(parts: Sequence[Matrix]) -> float:
    return sum(float(p.sum()) for p in parts) / sum(len(p) for p in parts)


def _most_frequent(parts: Sequence[Matrix]) -> float:
    counts: dict[float, int] = {}
    for part in parts:
        for value, count in zip(*np.unique(part, return_counts=True), strict=True):
            counts[float(value)] = counts.get(float(value), 0) + int(count)
    return min(counts, key=lambda value: (-counts[value], value))


def _zero(parts: Sequence[Matrix]) -> float:
    return 0.0


IMPUTERS: dict[str, Callable[[Sequence[Matrix]], float]] = {
    "mean": _mean,
    "median": _median,
    "most_frequent": _most_frequent,
    "zero": _zero,
}


def fill_values(parts: Sequence[Matrix], rule: str | None, kinds: Sequence[str]) -> Matrix:
    """What replaces a missing value in each column; categorical columns take their most frequent value.

    A column without a single value is filled with 0.
    """
    fill = np.zeros(len(kinds))
    for i, kind in enumerate(kinds):
        seen = _seen(parts, i)
        if rule is not None and kind != "ignore" and any(len(values) for values in seen):
            fill[i] = IMPUTERS["most_frequent" if kind == "categorical" else rule](seen)
    return fill


def _standard(parts: Sequence[Matrix]) -> tuple[float, float]:
    mean = _mean(parts)
    variance = sum(float(((p - mean) ** 2).sum()) for p in parts) / sum(len(p) for p in parts)
    # A constant column has a variance of rounding errors; it is centred, not blown up.
    spread = float(np.sqrt(variance))
    return mean, spread if spread > 1e-12 * max(1.0, abs(mean)) else 1.0


def _minmax(parts: Sequence[Matrix]) -> tuple[float, float]:
    low = min(float(p.min()) for p in parts if len(p))
    high = max(float(p.max()) for p in parts if len(p))
    return low, high - low or 1.0


SCALERS: dict[str, Callable[[Sequence[Matrix]], tuple[float, float]]] = {
    "minmax": _minmax,
    "standard": _standard,
}


def scale_values(parts: Sequence[Matrix], rule: str | None) -> tuple[Matrix, Matrix]:
    """Centre and spread of each column, for (x - centre)/spread; 0 and 1 where there is nothing to scale."""
    width = parts[0].shape[1]
    centre, spread = np.zeros(width), np.ones(width)
    for i in range(width if rule is not None else 0):
        seen = _seen(parts, i)
        if any(len(values) for values in seen):
            assert rule is not None
            centre[i], spread[i] = SCALERS[rule](seen)
    return centre, spread


def categories(parts: Iterable[Matrix], column: int) -> list[float]:
    """The values of a column at any client, ascending."""
    found: set[float] = set()
    for part in parts:
        found |= {float(v) for v in np.unique(_columns(part)[column]) if np.isfinite(v)}
    return sorted(found)
