"""Triton kernels for what is asked of maps (rows, channels, positions): their mean and the negative entropy over channels.

With m the largest channel of a position, ``s = sum exp(z - m)`` and ``t = sum (z - m) exp(z - m)``, of n positions

    u = sum_n z / n      v = sum p log p = t / s - log s      e = sum_n v / n      dz = (p (log p - v) de + du) / n

The forward pass reads z once, the backward pass reads it once and writes the gradient. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY = 256
"""From this number of rows on, a program takes more positions of one row: rows alone fill a device."""


@triton.jit
def _forward(
    z, value, log_sum, mean, entropy, channels, cells,
    WIDE: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = row * tl.num_programs(1) + tl.program_id(1)
    spot = tl.program_id(1) * BP + tl.arange(0, BP)
    inside = spot < cells
    top = tl.full((BP,), LOW, WIDE)
    total = tl.zeros((BP,), WIDE)
    moment = tl.zeros((BP,), WIDE)
    for first in range(0, channels, BC):
        channel = first + tl.arange(0, BC)
        there = (channel < channels)[:, None] & inside[None, :]
        here = tl.load(z + (row * channels + channel[:, None]) * cells + spot[None, :], mask=there, other=LOW).to(WIDE)
        share = tl.sum(tl.where(there, here, 0.0), 1) / cells
        tl.store(mean + piece * channels + channel, share, mask=channel < channels)
        higher = tl.maximum(top, tl.max(here, 0))
        shrunk = tl.exp(top - higher)
        apart = here - higher[None, :]
        weight = tl.where(there, tl.exp(apart), 0.0)
        moment = shrunk * (moment + (top - higher) * total) + tl.sum(tl.where(there, apart * weight, 0.0), 0)
        total = shrunk * total + tl.sum(weight, 0)
        top = higher
    total = tl.where(inside, total, 1.0)
    found = moment / total - tl.log(total)
    tl.store(value + row * cells + spot, found, mask=inside)
    tl.store(log_sum + row * cells + spot, top + tl.log(total), mask=inside)
    tl.store(entropy + piece, tl.sum(tl.where(inside, found, 0.0), 0) / cells)


@triton.jit
def _gradient(here, lse, entropy, slope, level):
    """Dz of a block of channels and positions: ``p (log p - v) de + du``, shares of both given."""
    log = here - lse
    return slope * tl.exp(log) * (log - entropy) + level


@triton.jit
def _backward(
    z, value, log_sum, d_mean, d_entropy, dz, channels, cells, WIDE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    spot = tl.program_id(1) * BP + tl.arange(0, BP)
    inside = spot < cells
    entropy = tl.load(value + row * cells + spot, mask=inside, other=0.0)
    lse = tl.load(log_sum + row * cells + spot, mask=inside, other=0.0)
    slope = tl.load(d_entropy + row).to(WIDE) / cells
    for first in range(0, channels, BC):
        channel = first + tl.arange(0, BC)
        there = (channel < channels)[:, None] & inside[None, :]
        at = (row * channels + channel[:, None]) * cells + spot[None, :]
        here = tl.load(z + at, mask=there, other=0.0).to(WIDE)
        level = tl.load(d_mean + row * channels + channel, mask=channel < channels, other=0.0).to(WIDE) / cells
        made = _gradient(here, lse[None, :], entropy[None, :], slope, level[:, None])
        tl.store(dz + at, made.to(dz.dtype.element_ty), mask=there)


def _blocks(channels: int, cells: int, rows: int = 0) -> tuple[int, int]:
    wide = min(1024 if rows >= MANY else 128, triton.next_power_of_2(cells))
    return min(triton.next_power_of_2(channels), max(1, 4096 // wide)), wide


def summed_up(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean of each channel and mean negative entropy of each row; for the way back each position's own, and ``log sum_c exp z_c``.

    Args:
        z: (rows, channels, positions), contiguous.
    """
    rows, channels, cells = z.shape
    double = z.dtype == torch.float64
    tall, wide = _blocks(channels, cells, rows)
    pieces = triton.cdiv(cells, wide)
    shapes = (rows, cells), (rows, cells), (rows, pieces, channels), (rows, pieces)
    value, log_sum, mean, entropy = (
        torch.empty(shape, dtype=torch.float64 if double else torch.float32, device=z.device) for shape in shapes
    )
    kind, low = (tl.float64, -1e308) if double else (tl.float32, -3e38)
    _forward[(rows, pieces)](
        z, value, log_sum, mean, entropy, channels, cells, WIDE=kind, LOW=low, BC=tall, BP=wide,
        num_warps=8 if wide >= 1024 else 4,
    )  # fmt: skip
    if pieces == 1:
        return mean[:, 0], entropy[:, 0], value, log_sum
    return mean.sum(1), entropy.sum(1), value, log_sum


def summed_up_back(z: Tensor, value: Tensor, log_sum: Tensor, d_mean: Tensor, d_entropy: Tensor) -> Tensor:
    """The gradient with respect to z.

    Args:
        z: as in :func:`summed_up`.
        value: from there, as is ``log_sum``.
        log_sum: likewise.
        d_mean: gradient of the means.
        d_entropy: gradient of the entropies.
    """
    rows, channels, cells = z.shape
    dz = torch.empty_like(z)
    kind = tl.float64 if z.dtype == torch.float64 else tl.float32
    tall, wide = _blocks(channels, cells, rows)
    _backward[(rows, triton.cdiv(cells, wide))](
        z, value, log_sum, d_mean, d_entropy, dz, channels, cells, WIDE=kind, BC=tall, BP=wide
    )
    return dz
