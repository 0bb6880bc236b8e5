"""Triton kernels for terms whose gradient is a difference ``a - b``: inner products with it, and half its squared length.

    <a - b, x>, 1/2 ||a - b||^2      their gradients with respect to x and to a: (a - b) dy

The difference is never stored. Sums are made in pieces, joined in a fixed order. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Values of one client that a program takes."""


@triton.jit
def _pull(a, b, x, parts, size, first, pieces, by_a, by_b, by_x, AT: tl.constexpr, WIDE: tl.constexpr, B: tl.constexpr):
    part, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spot = part * B + tl.arange(0, B)
    inside = spot < size
    gap = tl.load(a + client * by_a + spot, mask=inside, other=0.0).to(WIDE)
    gap -= tl.load(b + client * by_b + spot, mask=inside, other=0.0).to(WIDE)
    if AT:
        value = gap * tl.load(x + client * by_x + spot, mask=inside, other=0.0).to(WIDE)
    else:
        value = gap * gap * 0.5
    tl.store(parts + client * pieces + first + part, tl.sum(value, 0))


@triton.jit
def _pull_back(a, b, dy, onto, made, size, by_a, by_b, by_dy, ONTO: tl.constexpr, WIDE: tl.constexpr, B: tl.constexpr):
    part, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spot = part * B + tl.arange(0, B)
    inside = spot < size
    gap = tl.load(a + client * by_a + spot, mask=inside, other=0.0).to(WIDE)
    gap -= tl.load(b + client * by_b + spot, mask=inside, other=0.0).to(WIDE)
    value = gap * tl.load(dy + client * by_dy).to(WIDE)
    if ONTO:
        value += tl.load(onto + client * size + spot, mask=inside, other=0.0).to(WIDE)
    tl.store(made + client * size + spot, value, mask=inside)


def pulled(a: Sequence[Tensor], b: Sequence[Tensor], x: Sequence[Tensor] | None, dtype: torch.dtype) -> Tensor:
    """``sum <a - b, x>`` of each client, without x ``sum 1/2 ||a - b||^2``, computed in a type.

    Args:
        a: matrices (clients, values) without gaps in a row; of rows that all clients share the stride is 0.
        b: the same.
        x: the same, or None.
        dtype: float32 or float64.
    """
    clients, counts = a[0].shape[0], [math.ceil(t.shape[1] / BLOCK) for t in a]
    parts = torch.empty(clients, sum(counts), dtype=dtype, device=a[0].device)
    first = 0
    for plus, minus, at, count in zip(a, b, a if x is None else x, counts, strict=True):
        size, steps = plus.shape[1], [t.stride(0) for t in (plus, minus, at)]
        sizes = {"WIDE": _wide(dtype), "B": _block(size)}
        _pull[(count, clients)](plus, minus, at, parts, size, first, sum(counts), *steps, AT=x is not None, **sizes)
        first += count
    return parts.sum(1)


def pulled_back(
    a: Tensor, b: Tensor, dy: Tensor, dtype: torch.dtype, kind: torch.dtype, onto: Tensor | None = None
) -> Tensor:
    """``(a - b) dy`` of each client, computed in one type and returned in another; with a matrix without gaps, added to that."""
    clients, size = a.shape
    made = torch.empty(clients, size, dtype=kind, device=a.device)
    steps = [t.stride(0) for t in (a, b, dy)]
    grid = (math.ceil(size / BLOCK), clients)
    sizes = {"WIDE": _wide(dtype), "B": _block(size)}
    _pull_back[grid](a, b, dy, made if onto is None else onto, made, size, *steps, ONTO=onto is not None, **sizes)
    return made


def _block(size: int) -> int:
    return int(min(BLOCK, triton.next_power_of_2(size)))


def _wide(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32
