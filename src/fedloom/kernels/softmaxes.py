"""Triton kernels for what is asked of maps (rows, channels, positions): their mean and the negative entropy over channels.

With m the largest channel of a position, ``s = sum exp(z - m)`` and ``t = sum (z - m) exp(z - m)``, of n positions

    u = sum_n z / n      v = sum p log p = t / s - log s      e = sum_n v / n      dz = (p (log p - v) de + du) / n

The forward pass reads z once, the backward pass reads it once and writes the gradient. Where z is what a ReLU returns that is pooled
behind it, the backward pass joins the gradient of the pooled map and goes through the ReLU: ``dx = (dz + dy_w [p = argmax]) [z > 0]``, and z may be
what the ReLU is given. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.norms import either, rectified, shut

MANY = 256
"""From this number of rows on, a program takes more positions of one row: rows alone fill a device."""


PAIRED = 256
"""Most windows of two columns that a program takes at a time."""


@triton.jit
def _forward(
    z, value, log_sum, mean, entropy, channels, cells,
    RELU: tl.constexpr, SIX: tl.constexpr, WIDE: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
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
        if RELU:
            here = tl.where(there, rectified(here, SIX), LOW)
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
    z, value, log_sum, d_mean, d_entropy, dy, place, dz, channels, cells,
    W: tl.constexpr, OW: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    POOL: tl.constexpr, SIX: tl.constexpr, WIDE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    spot = tl.program_id(1) * BP + tl.arange(0, BP)
    inside = spot < cells
    entropy = tl.load(value + row * cells + spot, mask=inside, other=0.0)
    lse = tl.load(log_sum + row * cells + spot, mask=inside, other=0.0)
    slope = tl.load(d_entropy + row).to(WIDE) / cells
    window = (spot // W // R) * OW + spot % W // S
    slot = (spot // W % R) * S + spot % W % S
    for first in range(0, channels, BC):
        channel = first + tl.arange(0, BC)
        there = (channel < channels)[:, None] & inside[None, :]
        at = (row * channels + channel[:, None]) * cells + spot[None, :]
        here = tl.load(z + at, mask=there, other=0.0).to(WIDE)
        if POOL:
            here = rectified(here, SIX)
        level = tl.load(d_mean + row * channels + channel, mask=channel < channels, other=0.0).to(WIDE) / cells
        made = _gradient(here, lse[None, :], entropy[None, :], slope, level[:, None])
        if POOL:
            where = (row * channels + channel[:, None]) * OUT + window[None, :]
            arrived = tl.load(dy + where, mask=there, other=0.0).to(WIDE)
            made += tl.where(tl.load(place + where, mask=there, other=255) == slot[None, :], arrived, 0.0)
            made = tl.where(shut(here, SIX), 0.0, made)
        tl.store(dz + at, made.to(dz.dtype.element_ty), mask=there)


@triton.jit
def _backward_paired(
    z, value, log_sum, d_mean, d_entropy, dy, place, dz, channels, cells,
    W: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, SIX: tl.constexpr, WIDE: tl.constexpr,
    BC: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """As :func:`_backward` with windows that are two columns wide: what belongs to a window is read once for all of its places."""
    row = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    p = tl.program_id(1) * (2 * BQ) + tl.arange(0, 2 * BQ)
    inside = p < 2 * OUT
    slope = tl.load(d_entropy + row).to(WIDE) / cells
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    known = channel < channels
    window = (row * channels + channel[:, None]) * OUT + q[None, :]
    there = known[:, None] & (q < OUT)[None, :]
    arrived = tl.load(dy + window, mask=there, other=0.0).to(WIDE)
    chosen = tl.load(place + window, mask=there, other=255)
    level = tl.load(d_mean + row * channels + channel, mask=known, other=0.0).to(WIDE) / cells
    both = known[:, None] & inside[None, :]
    for r in tl.static_range(R):
        spot = (p // W) * (R * W) + r * W + p % W
        entropy = tl.load(value + row * cells + spot, mask=inside, other=0.0)
        lse = tl.load(log_sum + row * cells + spot, mask=inside, other=0.0)
        at = (row * channels + channel[:, None]) * cells + spot[None, :]
        here = rectified(tl.load(z + at, mask=both, other=0.0).to(WIDE), SIX)
        left = tl.where(chosen == 2 * r, arrived, 0.0)
        right = tl.where(chosen == 2 * r + 1, arrived, 0.0)
        made = _gradient(here, lse[None, :], entropy[None, :], slope, level[:, None])
        made += tl.reshape(tl.join(left, right), (BC, 2 * BQ))
        made = tl.where(shut(here, SIX), 0.0, made)
        tl.store(dz + at, made.to(dz.dtype.element_ty), mask=both)


def _blocks(channels: int, cells: int, rows: int = 0) -> tuple[int, int]:
    wide = min(1024 if rows >= MANY else 128, triton.next_power_of_2(cells))
    return min(triton.next_power_of_2(channels), max(1, 4096 // wide)), wide


def summed_up(z: Tensor, *, relu: bool = False, six: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean of each channel and mean negative entropy of each row; for the way back each position's own, and ``log sum_c exp z_c``.

    Args:
        z: (rows, channels, positions), contiguous.
        relu: whether z is what a ReLU is given.
        six: whether that one ends at 6.
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
        z, value, log_sum, mean, entropy, channels, cells, RELU=relu, SIX=six, WIDE=kind, LOW=low, BC=tall, BP=wide,
        num_warps=8 if wide >= 1024 else 4,
    )  # fmt: skip
    if pieces == 1:
        return mean[:, 0], entropy[:, 0], value, log_sum
    return mean.sum(1), entropy.sum(1), value, log_sum


def summed_up_back(
    z: Tensor,
    value: Tensor,
    log_sum: Tensor,
    d_mean: Tensor,
    d_entropy: Tensor,
    pooled: tuple[Tensor, Tensor, int, tuple[int, int]] | None = None,
    *,
    six: bool = False,
) -> Tensor:
    """The gradient with respect to z; of a ReLU's input if its output, or input, is z and is pooled behind it.

    Args:
        z: as in :func:`summed_up`.
        value: from there, as is ``log_sum``.
        log_sum: likewise.
        d_mean: gradient of the means.
        d_entropy: gradient of the entropies.
        pooled: gradient of the pooled map (rows, channels, height, width), the place of each window's maximum, the width of z and the window, which fills it.
        six: whether the ReLU ends at 6.
    """
    rows, channels, cells = z.shape
    dz = torch.empty_like(z)
    dy, place, width, window = (None, None, 1, (1, 1)) if pooled is None else pooled
    out = (1, 1) if dy is None else dy.shape[2:]
    kind = tl.float64 if z.dtype == torch.float64 else tl.float32
    given = z, value, log_sum, d_mean, d_entropy, either(dy, z), either(place, z), dz, channels, cells
    if window[1] == 2:
        area = out[0] * out[1]
        wide = min(PAIRED, triton.next_power_of_2(area))
        tall = min(triton.next_power_of_2(channels), max(1, 512 // wide))
        _backward_paired[(rows, triton.cdiv(area, wide), triton.cdiv(channels, tall))](
            *given, W=width, OUT=area, R=window[0], SIX=six, WIDE=kind, BC=tall, BQ=wide
        )  # fmt: skip
        return dz
    tall, wide = _blocks(channels, cells, rows)
    _backward[(rows, triton.cdiv(cells, wide))](
        *given, W=width, OW=out[1], OUT=out[0] * out[1], R=window[0], S=window[1],
        POOL=pooled is not None, SIX=six, WIDE=kind, BC=tall, BP=wide,
    )  # fmt: skip
    return dz
