"""Triton kernels for the negative entropy of the softmax over channels, of maps (rows, channels, positions).

With m the largest channel of a position, ``s = sum exp(z - m)`` and ``t = sum (z - m) exp(z - m)``:

    sum p log p = t / s - log s      its gradient: p (log p - sum p log p)

The forward pass reads z once, the backward pass reads it once and writes the gradient. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(
    z, value, log_sum, channels, cells, WIDE: tl.constexpr, LOW: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    spot = tl.program_id(1) * BP + tl.arange(0, BP)
    inside = spot < cells
    top = tl.full((BP,), LOW, WIDE)
    total = tl.zeros((BP,), WIDE)
    moment = tl.zeros((BP,), WIDE)
    for first in range(0, channels, BC):
        channel = first + tl.arange(0, BC)
        there = (channel < channels)[:, None] & inside[None, :]
        here = tl.load(z + (row * channels + channel[:, None]) * cells + spot[None, :], mask=there, other=LOW).to(WIDE)
        higher = tl.maximum(top, tl.max(here, 0))
        shrunk = tl.exp(top - higher)
        apart = here - higher[None, :]
        weight = tl.where(there, tl.exp(apart), 0.0)
        moment = shrunk * (moment + (top - higher) * total) + tl.sum(tl.where(there, apart * weight, 0.0), 0)
        total = shrunk * total + tl.sum(weight, 0)
        top = higher
    total = tl.where(inside, total, 1.0)
    tl.store(value + row * cells + spot, moment / total - tl.log(total), mask=inside)
    tl.store(log_sum + row * cells + spot, top + tl.log(total), mask=inside)


@triton.jit
def _backward(z, value, log_sum, dy, dz, channels, cells, WIDE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    spot = tl.program_id(1) * BP + tl.arange(0, BP)
    inside = spot < cells
    entropy = tl.load(value + row * cells + spot, mask=inside, other=0.0)
    lse = tl.load(log_sum + row * cells + spot, mask=inside, other=0.0)
    slope = tl.load(dy + row * cells + spot, mask=inside, other=0.0)
    for first in range(0, channels, BC):
        channel = first + tl.arange(0, BC)
        there = (channel < channels)[:, None] & inside[None, :]
        at = (row * channels + channel[:, None]) * cells + spot[None, :]
        log = tl.load(z + at, mask=there, other=0.0).to(WIDE) - lse[None, :]
        tl.store(dz + at, slope[None, :] * tl.exp(log) * (log - entropy[None, :]), mask=there)


def _blocks(channels: int, cells: int) -> tuple[int, int]:
    wide = min(128, triton.next_power_of_2(cells))
    return min(triton.next_power_of_2(channels), max(1, 4096 // wide)), wide


def negative_entropy(z: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_c p_c log p_c`` and ``log sum_c exp z_c`` of each position; z: (rows, channels, positions), contiguous."""
    rows, channels, cells = z.shape
    double = z.dtype == torch.float64
    value = torch.empty(rows, cells, dtype=torch.float64 if double else torch.float32, device=z.device)
    log_sum = torch.empty_like(value)
    tall, wide = _blocks(channels, cells)
    kind, low = (tl.float64, -1e308) if double else (tl.float32, -3e38)
    _forward[(rows, triton.cdiv(cells, wide))](z, value, log_sum, channels, cells, WIDE=kind, LOW=low, BC=tall, BP=wide)
    return value, log_sum


def negative_entropy_back(z: Tensor, value: Tensor, log_sum: Tensor, dy: Tensor) -> Tensor:
    """The gradient with respect to z."""
    rows, channels, cells = z.shape
    dz = torch.empty_like(z)
    tall, wide = _blocks(channels, cells)
    kind = tl.float64 if z.dtype == torch.float64 else tl.float32
    _backward[(rows, triton.cdiv(cells, wide))](z, value, log_sum, dy, dz, channels, cells, WIDE=kind, BC=tall, BP=wide)
    return dz
