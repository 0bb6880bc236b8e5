"""Whole numbers from proportions, and rows moved until everyone has enough."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
Labels = NDArray[np.int64]
Shares = NDArray[np.float64]
Generator = np.random.Generator


def simplex(alpha: float, size: int, generator: Generator) -> Shares:
    """A draw of Dirichlet(alpha, ..., alpha), in logarithms so that no alpha, however small, gives 0/0."""
    if np.isinf(alpha):
        return np.full(size, 1.0 / size)
    # Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha)
    logs = np.log(generator.standard_gamma(alpha + 1.0, size)) + np.log1p(-generator.random(size)) / alpha
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum(), np.float64)


def apportion(total: int, shares: Shares) -> Index:
    """Whole numbers that sum to total, each within one of total*share: cuts at the cumulative shares."""
    edges = np.floor(np.cumsum(shares) / np.sum(shares) * total + 0.5).astype(np.int64)
    edges[-1] = total
    return np.diff(np.minimum(edges, total), prepend=0)


def largest_remainder(total: int, weights: Shares, generator: Generator) -> Index:
    """Whole numbers that sum to total: quotas rounded down, the rest to the largest remainders."""
    quota = total * weights / weights.sum()
    # A quota that is whole but for rounding counts as whole: no remainder is decided by the last bit.
    whole = np.floor(quota + 1e-9)
    order = np.lexsort((generator.random(len(weights)), whole - quota))
    taken: Index = whole.astype(np.int64)
    taken[order[: total - int(taken.sum())]] += 1
    return taken


def repair(parts: Sequence[list[int]], least: int) -> None:
    """Move rows, in place, from the largest client to those below `least`, in order, until all have enough.

    There are at least clients*least rows: while one client has fewer, the largest has more than `least`, so
    each move brings the end nearer.
    """
    heap = [(-len(part), k) for k, part in enumerate(parts)]
    heapq.heapify(heap)
    for part in parts:
        while len(part) < least:
            _, k = heap[0]
            part.append(parts[k].pop())
            heapq.heapreplace(heap, (-len(parts[k]), k))


def top_up(parts: Sequence[list[int]], rows: int, least: int, generator: Generator) -> None:
    """Fill clients below `least`, in place, from all rows they do not have; for clients that share rows."""
    for part in parts:
        if len(part) < least:
            others = np.setdiff1d(np.arange(rows), part)
            part.extend(generator.choice(others, least - len(part), replace=False).tolist())
