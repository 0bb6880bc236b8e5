"""Splits: which of a client's rows are for training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedloom.data.partition import Generator, Index, Labels, largest_remainder
from fedloom.errors import UserError

SPLITS = ("matched", "per_client", "shared")


def cut(labels: Labels, fraction: float, generator: Generator) -> tuple[Index, Index]:
    """Positions kept and positions cut off: round(fraction*n) rows, stratified where a class has two rows.

    At least one row is cut off (where the fraction is not zero) and at least one is kept; a single row is
    kept. Classes with one row are one stratum together.

    Args:
        labels: The labels of the rows.
        fraction: Share to cut off, in [0, 1).
        generator: Source of the random choices.
    """
    n = len(labels)
    if fraction == 0 or n < 2:
        return np.arange(n), np.empty(0, np.int64)
    total = min(max(int(np.floor(fraction * n + 0.5)), 1), n - 1)
    names, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    stratum = np.where(counts[inverse] > 1, inverse, len(names))
    groups = [generator.permutation(np.flatnonzero(stratum == s)) for s in np.unique(stratum)]
    taken = largest_remainder(total, np.array([len(g) for g in groups], np.float64), generator)
    off = np.concatenate([g[:t] for g, t in zip(groups, taken, strict=True)])
    return np.setdiff1d(np.arange(n), off), np.sort(off)


def three_way(labels: Labels, test: float, val: float, generator: Generator) -> tuple[Index, Index, Index]:
    """Positions for training, test and validation: `test` of all rows, then `val` of the training rows."""
    train, tested = cut(labels, test, generator)
    kept, off = cut(labels[train], val, generator)
    return train[kept], tested, train[off]


def check_share(name: str, value: object) -> None:
    """A share to cut off is at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UserError(f"{name} = {value!r}; expected a share of at least 0 and below 1.")


def matched(train: Sequence[Labels], test: Labels, generator: Generator) -> list[Index]:
    """Deal every test row once, each class in proportion to the clients' training rows of that class.

    Rows of a class that no client trains on are dealt in proportion to the clients' sizes.

    Args:
        train: The training labels of each client.
        test: The labels of the test rows.
        generator: Source of the random order and of ties.
    """
    dealt: list[list[Index]] = [[np.empty(0, np.int64)] for _ in train]
    sizes = np.array([len(labels) for labels in train], np.float64)
    for c in np.unique(test):
        rows = generator.permutation(np.flatnonzero(test == c))
        weights = np.array([np.count_nonzero(labels == c) for labels in train], np.float64)
        taken = largest_remainder(len(rows), weights if weights.any() else sizes, generator)
        for mine, piece in zip(dealt, np.split(rows, np.cumsum(taken)[:-1]), strict=True):
            mine.append(piece)
    return [np.sort(np.concatenate(mine)) for mine in dealt]
