"""Which rows make up each step of a phase: decided on the host, the same for every engine."""

from __future__ import annotations

import math

import numpy as np

from fedloom.spec.parts import Phase

Indices = np.ndarray
Steps = list[tuple[Indices, ...]]

SWEEP_BATCH = 128
SWEEP_CELLS = 1 << 21
"""Most numbers of input in a batch of a sweep; 128 rows of 3 x 64 x 64 pixels are 1.6 million."""


def plan(
    phase: Phase,
    labels: np.ndarray,
    generator: np.random.Generator,
    *,
    epochs: int,
    batch_size: int | str,
    skip_single: bool,
    share: float = 1.0,
) -> Steps:
    """Row indices of every step of a phase.

    Args:
        phase: the phase.
        labels: labels of the client's rows; only their number matters to most samplers.
        generator: the stream of this client, round and phase.
        epochs: passes, where the phase says nothing else.
        batch_size: rows of a batch, or ``"full"``.
        skip_single: leave out batches of one row (batch normalisation cannot train on them).
        share: a straggler makes this share of the steps, rounded up.

    Example:
        >>> steps = plan(Phase(), np.zeros(5), np.random.default_rng(0), epochs=1, batch_size=2, skip_single=True)
        >>> [len(rows) for (rows,) in steps]
        [2, 2]
    """
    sampler = phase.sampler
    pool = np.arange(len(labels))
    if sampler.fraction < 1.0:
        pool = generator.permutation(pool)[: max(1, math.ceil(sampler.fraction * len(pool)))]
    asked = phase.batch_size if phase.batch_size is not None else batch_size
    size = len(pool) if asked == "full" else int(asked)
    epochs = epochs if phase.epochs is None else phase.epochs
    steps: Steps = []
    passes = 0
    while len(steps) < phase.steps if phase.steps is not None else passes < epochs:
        order = generator.permutation(pool) if sampler.order is None else pool[sampler.order(generator, labels[pool])]
        chunks = [order[i : i + size] for i in range(0, len(order), size)]
        made = _paired(chunks) if sampler.group == 2 else [(c,) for c in chunks]
        if skip_single:
            made = [group for group in made if all(len(c) > 1 for c in group)]
        if not made:
            break
        steps += made
        passes += 1
    if phase.steps is not None:
        steps = steps[: phase.steps]
    return steps if share >= 1.0 else steps[: math.ceil(share * len(steps))]


def _paired(chunks: list[Indices]) -> Steps:
    if len(chunks) == 1:
        half = len(chunks[0]) // 2
        return [(chunks[0][:half], chunks[0][half:])] if half else []
    return [(chunks[i], chunks[i + 1]) for i in range(0, len(chunks) - 1, 2)]


def sweep_rows(cells: int) -> int:
    """Rows of a batch of a sweep: 128, fewer where a row is a large picture, so that memory stays bounded.

    Args:
        cells: numbers of input in a row.

    Example:
        >>> sweep_rows(3 * 32 * 32), sweep_rows(3 * 180 * 240), sweep_rows(3 * 1024 * 2048)
        (128, 16, 1)
    """
    return max(1, min(SWEEP_BATCH, SWEEP_CELLS // max(cells, 1)))


def in_order(n: int, size: int | str = SWEEP_BATCH) -> list[tuple[int, int]]:
    """Bounds of the batches of a sweep: rows in data order; a last batch of one row joins the one before.

    Example:
        >>> in_order(257)
        [(0, 128), (128, 257)]
    """
    step = max(n, 1) if size == "full" else int(size)
    bounds = [(i, min(i + step, n)) for i in range(0, n, step)]
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] == 1:
        bounds[-2:] = [(bounds[-2][0], n)]
    return bounds
