"""Triton kernels for what clients have sent, side by side (clients x numbers), leaf behind leaf.

Of layers, pieces of columns, the Gram matrices ``G[l, u, v] = sum_{j in l} x[u, j] x[v, j]`` in float64, and how many pairs are in conflict by them; with s
what all were sent, o what each had of its own in chosen columns, where clients ended and the weighted sum of how far that is from s,

    e[i, j] = x[i, j] + (o[i, j] if j is chosen else s[j])      a[j] = sum_i w_i (e[i, j] - s[j])

in one pass each. Sums are made in a fixed order. What clients have lies anywhere: it is told by its address. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.transfer import onto

COLUMNS = 128
"""Numbers of each client that are read at a time."""
PIECES = 64
"""Programs for four rows of a Gram matrix, a power of two; measured on an H200."""
WHOLE = tl.constexpr(6755399441055744.0)
"""Added to a number of float64 and taken off again, it leaves the nearest whole one."""
BLOCK = 1024
"""Columns of which a program finds where clients ended."""


@triton.jit
def _row(x, i, j, numbers, clients, last):
    return tl.load(x + i * numbers + j, mask=(j < last) & (i < clients), other=0.0).to(tl.float64)[None, :]


@triton.jit
def _block(x, j, u, numbers, clients, last):
    return tl.load(
        x + (u[:, None] * numbers + j[None, :]), mask=(u < clients)[:, None] & (j < last)[None, :], other=0.0
    )


@triton.jit
def _gram(x, bounds, parts, numbers, clients, BM: tl.constexpr, B: tl.constexpr):
    """Four rows of a matrix: products of four clients with all, column by column, which are added up at the end."""
    layer, four = tl.program_id(1), 4 * tl.program_id(2)
    last = tl.load(bounds + layer + 1)
    u = tl.arange(0, BM)
    first_row = tl.zeros((BM, B), tl.float64)
    second_row = tl.zeros((BM, B), tl.float64)
    third_row = tl.zeros((BM, B), tl.float64)
    fourth_row = tl.zeros((BM, B), tl.float64)
    first = tl.load(bounds + layer) + tl.program_id(0) * B
    step = tl.num_programs(0) * B
    ahead = _block(x, first + tl.arange(0, B), u, numbers, clients, last)
    for begin in range(first, last, step):
        j = begin + tl.arange(0, B)
        each = ahead.to(tl.float64)
        ahead = _block(x, j + step, u, numbers, clients, last)  # on its way while this one is multiplied
        first_row += each * _row(x, four, j, numbers, clients, last)
        second_row += each * _row(x, four + 1, j, numbers, clients, last)
        third_row += each * _row(x, four + 2, j, numbers, clients, last)
        fourth_row += each * _row(x, four + 3, j, numbers, clients, last)
    parts += ((layer * tl.num_programs(0) + tl.program_id(0)) * (4 * tl.num_programs(2)) + four) * BM + u
    tl.store(parts, tl.sum(first_row, 1))
    tl.store(parts + BM, tl.sum(second_row, 1))
    tl.store(parts + 2 * BM, tl.sum(third_row, 1))
    tl.store(parts + 3 * BM, tl.sum(fourth_row, 1))


@triton.jit
def _conflicts(parts, found, rows, clients, least, P: tl.constexpr, BM: tl.constexpr):
    """Pairs of a layer whose cosine has fewer tenths of a billionth than the least: :func:`fedloom.aggregators.sides.pairs_below`."""
    u = tl.arange(0, BM)[:, None]
    v = tl.arange(0, BM)[None, :]
    piece = tl.program_id(0) * P + tl.arange(0, P)[:, None, None]
    at = piece * rows * BM + (u * BM + v)[None, :, :]
    total = tl.sum(tl.load(parts + at, mask=(u < rows)[None, :, :], other=0.0), 0)
    own = tl.where(u == v, total, 0.0)
    scale = tl.sqrt(tl.sum(own, 1))[:, None] * tl.sqrt(tl.sum(own, 0))[None, :]
    cosine = total / tl.where(scale > 0.0, scale, 1.0)
    cosine = tl.where((scale > 0.0) & (tl.abs(cosine) < float("inf")), cosine, 0.0)
    cosine = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
    below = (cosine * 1e10 + WHOLE - WHOLE < least) & (u < v) & (v < clients)
    tl.store(found + tl.program_id(0), tl.sum(tl.sum(below.to(tl.int64), 1), 0))


@triton.jit
def _end(
    x, sent, table, away, clients, runs, numbers, WEIGHED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    kind = sent.dtype.element_ty
    j = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = j < numbers
    chosen = tl.zeros((B,), tl.int1)
    for r in range(runs):
        begin = tl.load(table + 3 * clients + 2 * r)
        end = tl.load(table + 3 * clients + 2 * r + 1)
        chosen = chosen | ((j >= begin) & (j < end))
    base = tl.load(sent + j, mask=inside, other=0.0)
    total = tl.zeros((B,), kind)
    for i in range(clients):
        own = tl.load(table + i).to(tl.pointer_type(kind))
        ended = tl.load(table + clients + i).to(tl.pointer_type(kind))
        start = tl.where(chosen, tl.load(own + j, mask=inside & chosen, other=0.0), base)
        value = tl.load(x + j, mask=inside, other=0.0) + start
        tl.store(ended + j, value, mask=inside)
        x += numbers
        gap = value - base
        if WEIGHED:
            gap *= tl.load(table + 2 * clients + i).to(kind)
        total += gap
    tl.store(away + j, tl.where(chosen, total, 0.0), mask=inside)


def grams(x: Tensor, bounds: Tensor) -> Tensor:
    """Gram matrices of layers: layers x clients x clients.

    Args:
        x: clients x numbers without gaps, of a few clients.
        bounds: where the first layer begins, and where each of them ends.
    """
    return _parts(x, bounds).sum(1)[:, : len(x), : len(x)]


def conflicts(x: Tensor, bounds: Tensor, xi: float) -> Tensor:
    """Of each layer how many pairs of clients have a cosine below xi; arguments as for :func:`grams`."""
    parts = _parts(x, bounds)
    layers, _, rows, tall = parts.shape
    found = torch.empty(layers, dtype=torch.int64, device=x.device)
    # Products are rounded before a number is added to them, as torch has them.
    _conflicts[(layers,)](
        parts, found, rows, len(x), _least(xi), P=PIECES, BM=tall, num_warps=8, enable_fp_fusion=False
    )
    return found


def _least(xi: float) -> int:
    """The least whole number n with ``n / 1e10 >= xi``: a number of float64 that is handed to a kernel would be rounded.

    Example:
        >>> _least(-0.1), _least(0.30000000000000004), _least(2.0)
        (-1000000000, 3000000001, 20000000000)
    """
    n = round(xi * 1e10)
    while n / 1e10 < xi:
        n += 1
    while (n - 1) / 1e10 >= xi:
        n -= 1
    return n


def _parts(x: Tensor, bounds: Tensor) -> Tensor:
    """Sums of which Gram matrices are made: layers x pieces x rows, the last ones empty, x clients."""
    (clients, numbers), layers = x.shape, len(bounds) - 1
    tall, fours = max(4, triton.next_power_of_2(clients)), triton.cdiv(clients, 4)
    parts = torch.empty(layers, PIECES, 4 * fours, tall, dtype=torch.float64, device=x.device)
    _gram[(PIECES, layers, fours)](x, bounds, parts, numbers, clients, BM=tall, B=COLUMNS, num_warps=4)
    return parts


def ended(
    x: Tensor, sent: Tensor, own: Sequence[Tensor], runs: Sequence[tuple[int, int]], weights: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Where clients ended, a tensor each, and in the chosen columns the weighted sum of how far that is from what all were sent.

    Args:
        x: clients x numbers without gaps: how far they moved.
        sent: what all were sent.
        own: what each had of its own, of the type of ``sent`` and without gaps.
        runs: the chosen columns: where some begin and end.
        weights: of the clients.
    """
    made = [torch.empty_like(sent) for _ in own]
    places = [t.data_ptr() for t in (*own, *made)]
    table = onto(torch.tensor([*places, *weights, *(bound for run in runs for bound in run)]), x.device)
    away = torch.empty_like(sent)
    _end[(triton.cdiv(len(sent), BLOCK),)](
        x, sent, table, away, len(own), len(runs), len(sent), WEIGHED=set(weights) != {1}, B=BLOCK
    )  # fmt: skip
    return made, away
