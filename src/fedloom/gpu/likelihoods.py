"""Triton kernels for the cross-entropy of logits (rows, classes, positions) with labels (rows, positions).

    -log p_y = log sum exp z - z_y      its gradient: p_c - [c = y]

The forward pass reads the logits once, the backward pass reads them once and writes the gradient. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.softmaxes import _blocks


@triton.jit
def _likelihood(
    z,
    y,
    value,
    log_sum,
    classes,
    cells,
    unused,
    WIDE: tl.constexpr,
    LOW: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    spot = tl.program_id(1) * BP + tl.arange(0, BP)
    inside = spot < cells
    label = tl.load(y + row * cells + spot, mask=inside, other=0)
    top = tl.full((BP,), LOW, WIDE)
    total = tl.zeros((BP,), WIDE)
    own = tl.zeros((BP,), WIDE)
    for first in range(0, classes, BC):
        c = first + tl.arange(0, BC)
        there = (c < classes)[:, None] & inside[None, :]
        here = tl.load(z + (row * classes + c[:, None]) * cells + spot[None, :], mask=there, other=LOW).to(WIDE)
        higher = tl.maximum(top, tl.max(here, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.where(there, tl.exp(here - higher[None, :]), 0.0), 0)
        own += tl.sum(tl.where(there & (c[:, None] == label[None, :]), here, 0.0), 0)
        top = higher
    lse = top + tl.log(tl.where(inside, total, 1.0))
    tl.store(value + row * cells + spot, tl.where(label == unused, 0.0, lse - own), mask=inside)
    tl.store(log_sum + row * cells + spot, lse, mask=inside)


@triton.jit
def _likelihood_back(
    z, y, log_sum, dy, dz, classes, cells, unused, WIDE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    spot = tl.program_id(1) * BP + tl.arange(0, BP)
    inside = spot < cells
    label = tl.load(y + row * cells + spot, mask=inside, other=0)
    lse = tl.load(log_sum + row * cells + spot, mask=inside, other=0.0)
    slope = tl.where(label == unused, 0.0, tl.load(dy + row * cells + spot, mask=inside, other=0.0))
    for first in range(0, classes, BC):
        c = first + tl.arange(0, BC)
        there = (c < classes)[:, None] & inside[None, :]
        at = (row * classes + c[:, None]) * cells + spot[None, :]
        p = tl.exp(tl.load(z + at, mask=there, other=0.0).to(WIDE) - lse[None, :])
        tl.store(dz + at, slope[None, :] * (p - tl.where(c[:, None] == label[None, :], 1.0, 0.0)), mask=there)


def negative(z: Tensor, y: Tensor, unused: int) -> tuple[Tensor, Tensor]:
    """``-log p_y``, 0 for the label ``unused``, and ``log sum_c exp z_c`` of each position; both arguments contiguous."""
    rows, classes, cells = z.shape
    double = z.dtype == torch.float64
    value = torch.empty(y.shape, dtype=torch.float64 if double else torch.float32, device=z.device)
    log_sum = torch.empty_like(value)
    tall, wide = _blocks(classes, cells)
    kind, low = (tl.float64, -1e308) if double else (tl.float32, -3e38)
    grid = (rows, triton.cdiv(cells, wide))
    _likelihood[grid](z, y, value, log_sum, classes, cells, unused, WIDE=kind, LOW=low, BC=tall, BP=wide)
    return value, log_sum


def negative_back(z: Tensor, y: Tensor, log_sum: Tensor, dy: Tensor, unused: int) -> Tensor:
    """The gradient with respect to z."""
    rows, classes, cells = z.shape
    dz = torch.empty_like(z)
    tall, wide = _blocks(classes, cells)
    kind, grid = tl.float64 if z.dtype == torch.float64 else tl.float32, (rows, triton.cdiv(cells, wide))
    _likelihood_back[grid](z, y, log_sum, dy, dz, classes, cells, unused, WIDE=kind, BC=tall, BP=wide)
    return dz
