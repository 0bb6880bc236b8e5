"""Triton kernels for linear classifiers: the mean over rows of their cross-entropy, to which that of another value may be added.

With z = u W^T + b, p its softmax, m the mask, n = max(1, sum m), and G = a m / n (p - [k = y]), which the way back needs,

    v = (a sum m (log sum exp z - z_y) + l sum m e) / n      du = dv G W      dW = dv G^T u      db = dv sum G      de = dv l m / n

All tensors are of one type, float32 or float64; products are made in it whatever TF32 allows, and sums have an order: they repeat
bit for bit. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.distances import _block, _types

LEAST = 16
"""Fewest rows, classes or channels of a tile: those of a product in Triton."""
ALONE = 64
"""Up to so many rows and channels one program makes a client's value by itself; else programs make parts of it."""


@triton.jit
def _present(mask, i, rows, MASKED: tl.constexpr, WIDE: tl.constexpr):
    if MASKED:
        here = tl.load(mask + i, mask=i < rows, other=0.0).to(WIDE)
    else:
        here = (i < rows).to(WIDE)
    return here


@triton.jit
def _number(mask, rows, MASKED: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr):
    total = tl.zeros((M,), WIDE)
    for first in range(0, rows, M):
        total += _present(mask, first + tl.arange(0, M), rows, MASKED, WIDE)
    return tl.maximum(tl.sum(total, 0), 1.0)


@triton.jit
def _classify(
    u, weight, bias, y, mask, extra, residual, parts, rows, width, classes, unused,
    by_u, by_w, by_b, by_y, by_m, by_e, scale: tl.float64, share: tl.float64,
    MASKED: tl.constexpr, EXTRA: tl.constexpr, WIDE: tl.constexpr, LOW: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, B: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * R + tl.arange(0, R)
    k = tl.arange(0, K)
    z = tl.zeros((R, K), WIDE)
    for first in range(0, width, B):
        c = first + tl.arange(0, B)
        own = (i < rows)[:, None] & (c < width)[None, :]
        here = tl.load(u + client * by_u + i[:, None] * width + c[None, :], mask=own, other=0.0)
        own = (c < width)[:, None] & (k < classes)[None, :]
        w = tl.load(weight + client * by_w + k[None, :] * width + c[:, None], mask=own, other=0.0)
        z = tl.dot(here, w, z, input_precision="ieee", out_dtype=WIDE)
    there = (k < classes)[None, :]
    z += tl.load(bias + client * by_b + k, mask=k < classes, other=0.0)[None, :]
    top = tl.max(tl.where(there, z, LOW), 1)
    lse = top + tl.log(tl.sum(tl.where(there, tl.exp(z - top[:, None]), 0.0), 1))
    label = tl.load(y + client * by_y + i, mask=i < rows, other=0).to(tl.int64)
    hot = k[None, :] == label[:, None]
    loss = tl.where(label == unused, 0.0, lse - tl.sum(tl.where(hot & there, z, 0.0), 1))
    number = _number(mask + client * by_m, rows, MASKED, WIDE, M)
    here = _present(mask + client * by_m, i, rows, MASKED, WIDE)
    total = (scale * tl.sum(here * loss, 0)).to(WIDE)
    if EXTRA:
        e = tl.load(extra + client * by_e + i, mask=i < rows, other=0.0).to(WIDE)
        total += (share * tl.sum(here * e, 0)).to(WIDE)
    tl.store(parts + client * tl.num_programs(1) + tl.program_id(1), total / number)
    slope = tl.where(label == unused, 0.0, here * (scale / number).to(WIDE))
    made = slope[:, None] * (tl.exp(z - lse[:, None]) - tl.where(hot, 1.0, 0.0))
    at = (client * rows + i[:, None]) * classes + k[None, :]
    tl.store(residual + at, made, mask=(i < rows)[:, None] & there)


@triton.jit
def _to_parameters(
    u, residual, slope, dw, db, c, rows, width, classes,
    WIDE: tl.constexpr, R: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, K)
    product = tl.zeros((K, B), WIDE)
    sums = tl.zeros((K, R), WIDE)
    for first in range(0, rows, R):
        i = first + tl.arange(0, R)
        own = (k < classes)[:, None] & (i < rows)[None, :]
        g = tl.load(residual + i[None, :] * classes + k[:, None], mask=own, other=0.0)
        own = (i < rows)[:, None] & (c < width)[None, :]
        here = tl.load(u + i[:, None] * width + c[None, :], mask=own, other=0.0)
        product = tl.dot(g, here, product, input_precision="ieee", out_dtype=WIDE)
        sums += g
    own = (k < classes)[:, None] & (c < width)[None, :]
    tl.store(dw + k[:, None] * width + c[None, :], slope * product, mask=own)
    if tl.program_id(1) == 0:
        tl.store(db + k, slope * tl.sum(sums, 1), mask=k < classes)


@triton.jit
def _to_features(weight, residual, slope, du, i, c, rows, width, classes, WIDE: tl.constexpr, K: tl.constexpr):
    k = tl.arange(0, K)
    own = (i < rows)[:, None] & (k < classes)[None, :]
    g = tl.load(residual + i[:, None] * classes + k[None, :], mask=own, other=0.0)
    own = (k < classes)[:, None] & (c < width)[None, :]
    w = tl.load(weight + k[:, None] * width + c[None, :], mask=own, other=0.0)
    product = tl.dot(g, w, input_precision="ieee", out_dtype=WIDE)
    own = (i < rows)[:, None] & (c < width)[None, :]
    tl.store(du + i[:, None] * width + c[None, :], slope * product, mask=own)


@triton.jit
def _to_extra(mask, level, de, rows, MASKED: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr):
    slope = (level / _number(mask, rows, MASKED, WIDE, M)).to(WIDE)
    for first in range(0, rows, M):
        i = first + tl.arange(0, M)
        made = slope * _present(mask, i, rows, MASKED, WIDE)
        tl.store(de + i, made.to(de.dtype.element_ty), mask=i < rows)


@triton.jit
def _classify_back(
    u, weight, residual, mask, dv, du, dw, db, de, rows, width, classes,
    by_u, by_w, by_m, by_dv, share: tl.float64,
    MASKED: tl.constexpr, EXTRA: tl.constexpr, WIDE: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, B: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    piece = tl.program_id(2)  # the first makes what all rows add to, the others some rows of du each
    slope = tl.load(dv + client * by_dv).to(WIDE)
    residual += client * rows * classes
    if piece == 0:
        dw += client * classes * width
        _to_parameters(
            u + client * by_u, residual, slope, dw, db + client * classes, c, rows, width, classes, WIDE, R, K, B
        )
        if EXTRA:  # noqa: SIM102 (known when the kernel is compiled)
            if tl.program_id(1) == 0:
                _to_extra(mask + client * by_m, share * slope, de + client * rows, rows, MASKED, WIDE, M)
    else:
        i = (piece - 1) * R + tl.arange(0, R)
        du += client * rows * width
        _to_features(weight + client * by_w, residual, slope, du, i, c, rows, width, classes, WIDE, K)


def classified(
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    y: Tensor,
    mask: Tensor | None,
    extra: Tensor | None,
    scale: float,
    share: float,
    unused: int,
) -> tuple[Tensor, Tensor]:
    """Each client's v, and G.

    Args:
        u: (clients, rows, channels), each client's without gaps, as of all tensors; of what clients share the stride is 0.
        weight: (clients, classes, channels).
        bias: (clients, classes).
        y: (clients, rows).
        mask: (clients, rows); None where all rows are real.
        extra: e, (clients, rows), or None.
        scale: a.
        share: l.
        unused: the label of rows of which the cross-entropy counts as 0.
    """
    clients, rows, width = u.shape
    classes = weight.shape[1]
    tall, deep, across = _forward_tile(rows, width, classes)
    pieces = triton.cdiv(rows, tall)
    residual, parts = u.new_empty(clients, rows, classes), u.new_empty(clients, pieces)
    given = [bias if t is None else t for t in (mask, extra)]  # a kernel takes a tensor, though it may not read it
    strides = [t.stride(0) for t in (u, weight, bias, y, *given)]
    _classify[(clients, pieces)](
        u, weight, bias, y, *given, residual, parts, rows, width, classes, unused, *strides, scale, share,
        MASKED=mask is not None, EXTRA=extra is not None, WIDE=_types(u)[1], LOW=-1e308 if u.dtype == torch.float64 else -3e38,
        R=tall, K=deep, B=across, M=_block(rows), num_warps=8,
    )  # fmt: skip
    return parts[:, 0] if pieces == 1 else parts.sum(1), residual


def classified_back(
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    mask: Tensor | None,
    extra: torch.dtype | None,
    dv: Tensor,
    share: float,
    *,
    inner: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """The gradients with respect to u (where it is wanted, ``inner``), weight, bias, and e (where there is one, of a type)."""
    clients, rows, width = u.shape
    classes = weight.shape[1]
    tall, deep, across = _backward_tile(rows, width, classes)
    du, dw, db = (t.new_empty(t.shape) for t in (u, weight, bias))
    de = u.new_empty(clients, rows, dtype=extra or u.dtype)
    flags = bias if mask is None else mask  # likewise
    strides = [t.stride(0) for t in (u, weight, flags, dv)]
    grid = (clients, triton.cdiv(width, across), 1 + (triton.cdiv(rows, tall) if inner else 0))
    _classify_back[grid](
        u, weight, residual, flags, dv, du, dw, db, de, rows, width, classes, *strides, share,
        MASKED=mask is not None, EXTRA=extra is not None, WIDE=_types(u)[1],
        R=tall, K=deep, B=across, M=_block(rows), num_warps=4,
    )  # fmt: skip
    return du if inner else None, dw, db, None if extra is None else de


def _forward_tile(rows: int, width: int, classes: int) -> tuple[int, int, int]:
    tall, deep, across = _sides(rows, classes, width)
    if rows <= ALONE and width <= ALONE:
        return tall, deep, min(across, 32)
    return LEAST, deep, min(across, 64 if deep <= LEAST else 32)


def _backward_tile(rows: int, width: int, classes: int) -> tuple[int, int, int]:
    tall, deep, across = _sides(rows, classes, width)
    return min(tall, 32), deep, min(across, 32)


def _sides(*sizes: int) -> tuple[int, ...]:
    return tuple(max(LEAST, triton.next_power_of_2(size)) for size in sizes)
