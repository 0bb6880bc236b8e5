"""Triton kernels for the distance of rows to the centres of their classes, and for means over the rows that are real.

    v_i = k_y |z_i - C_y|^2 / D      dz_i = 2 k_y (z_i - C_y) dv_i / D      dC_c = - sum_{i: y_i = c} dz_i

The rows of a class are found by looking at all of them, in their order: sums repeat bit for bit. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 1024
"""Values of a row, or rows, that a program takes at a time."""
ROWS, COLUMNS = 64, 32
"""The piece of a client's rows that a program holds on the way back."""


@triton.jit
def _distance(z, y, centres, known, value, rows, width, by_c, by_k, WIDE: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    client = row // rows
    label = tl.load(y + row)
    total = tl.zeros((B,), WIDE)
    for first in range(0, width, B):
        d = first + tl.arange(0, B)
        gap = tl.load(z + row * width + d, mask=d < width, other=0.0).to(WIDE)
        gap -= tl.load(centres + client * by_c + label * width + d, mask=d < width, other=0.0).to(WIDE)
        total += gap * gap
    there = tl.load(known + client * by_k + label).to(WIDE)
    tl.store(value + row, there * (tl.sum(total, 0) / width))


@triton.jit
def _distance_back(
    z, y, centres, known, dv, dz, dc, rows, width, classes, by_c, by_k,
    TRAINED: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * B + tl.arange(0, B)
    wide = d < width
    for first in range(0, rows, R):
        i = first + tl.arange(0, R)
        label = tl.load(y + client * rows + i, mask=i < rows, other=0)
        slope = tl.load(dv + client * rows + i, mask=i < rows, other=0.0).to(WIDE)
        slope *= tl.load(known + client * by_k + label, mask=i < rows, other=0.0).to(WIDE) * 2 / width
        there = (i < rows)[:, None] & wide[None, :]
        at = (client * rows + i[:, None]) * width + d[None, :]
        gap = tl.load(z + at, mask=there, other=0.0).to(WIDE)
        gap -= tl.load(centres + client * by_c + label[:, None] * width + d[None, :], mask=there, other=0.0).to(WIDE)
        made = gap * slope[:, None]
        tl.store(dz + at, made.to(dz.dtype.element_ty), mask=there)
        if TRAINED:
            for c in range(0, classes):
                mine = (client * classes + c) * width + d
                before = tl.load(dc + mine, mask=wide & (first > 0), other=0.0)
                tl.store(dc + mine, before - tl.sum(tl.where((label == c)[:, None], made, 0.0), 0), mask=wide)


@triton.jit
def _mean(values, mask, mean, count, rows, WIDE: tl.constexpr, B: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    top = tl.zeros((B,), WIDE)
    real = tl.zeros((B,), WIDE)
    for first in range(0, rows, B):
        i = first + tl.arange(0, B)
        here = tl.load(mask + client * rows + i, mask=i < rows, other=0.0).to(WIDE)
        top += here * tl.load(values + client * rows + i, mask=i < rows, other=0.0).to(WIDE)
        real += here
    number = tl.maximum(tl.sum(real, 0), 1.0)
    tl.store(mean + client, tl.sum(top, 0) / number)
    tl.store(count + client, number)


@triton.jit
def _mean_back(mask, count, dm, dv, rows, WIDE: tl.constexpr, B: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * B + tl.arange(0, B)
    here = tl.load(mask + client * rows + i, mask=i < rows, other=0.0).to(WIDE)
    slope = tl.load(dm + client).to(WIDE) / tl.load(count + client)
    tl.store(dv + client * rows + i, (here * slope).to(dv.dtype.element_ty), mask=i < rows)


def distances(z: Tensor, y: Tensor, centres: Tensor, known: Tensor) -> Tensor:
    """v, in float64 where z is of that type, else in float32.

    Args:
        z: (clients, rows, D) without gaps.
        y: (clients, rows) without gaps.
        centres: (clients, classes, D), each client's without gaps; of those that all clients share the stride is 0.
        known: (clients, classes), likewise.
    """
    clients, rows, width = z.shape
    kind, wide = _types(z)
    value = torch.empty(clients, rows, dtype=kind, device=z.device)
    strides = centres.stride(0), known.stride(0)
    _distance[(clients * rows,)](z, y, centres, known, value, rows, width, *strides, WIDE=wide, B=_block(width))
    return value


def distances_back(
    z: Tensor, y: Tensor, centres: Tensor, known: Tensor, dv: Tensor, *, trained: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients with respect to z and, where they are trained, to the centres; ``dv`` lies without gaps."""
    clients, rows, width = z.shape
    kind, wide = _types(z)
    dz = torch.empty_like(z)
    dc = torch.empty(centres.shape if trained else (1,), dtype=kind, device=z.device)
    shape = rows, width, centres.shape[1], centres.stride(0), known.stride(0)
    grid = (clients, triton.cdiv(width, COLUMNS))
    _distance_back[grid](z, y, centres, known, dv, dz, dc, *shape, TRAINED=trained, WIDE=wide, R=ROWS, B=COLUMNS)
    return dz, dc.to(centres.dtype) if trained else None


def means(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``sum m v / max(1, sum m)`` of each client, and that divisor; both arguments (clients, rows) without gaps."""
    clients, rows = values.shape
    kind, wide = _types(values)
    mean, count = (torch.empty(clients, dtype=kind, device=values.device) for _ in range(2))
    _mean[(clients,)](values, mask, mean, count, rows, WIDE=wide, B=_block(rows))
    return mean, count


def means_back(mask: Tensor, count: Tensor, dm: Tensor, kind: torch.dtype) -> Tensor:
    """The gradient with respect to the values, of which the type is given."""
    clients, rows = mask.shape
    dv = torch.empty(clients, rows, dtype=kind, device=mask.device)
    block = _block(rows)
    _mean_back[(triton.cdiv(rows, block), clients)](mask, count, dm, dv, rows, WIDE=_types(count)[1], B=block)
    return dv


def _types(like: Tensor):
    """The type in which sums are made, as torch and as triton call it."""
    return (torch.float64, tl.float64) if like.dtype == torch.float64 else (torch.float32, tl.float32)


def _block(size: int) -> int:
    return int(min(WIDEST, triton.next_power_of_2(size)))
