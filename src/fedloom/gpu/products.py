"""Linear layers, squared lengths and inner products of a whole cohort, on CUDA under ``vmap``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedloom import ops
from fedloom.gpu.cohort import _Lifted, clients, present, serves
from fedloom.ops import products

DEEP, LARGE = 64, 1 << 21
"""Fewest summands, and fewest products of a cohort, for which float32 goes through :mod:`fedloom.gpu.threefold`; measured on an H200."""
FEW, MANY = 48, 1 << 13
"""With fewer rows of a client than these that is only faster where a cohort has less than so many columns."""
CROSSED = 1 << 26
"""Fewest products for which the gradient of the weights does, where both factors lie across what is summed over."""
ROWS, MOST = 2048, 1 << 22
"""From this number of rows on, the gradient of the inputs goes that way too, for which the weights are laid out anew; with fewer than these
CUDA's grid has room for their programs."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """:func:`fedloom.ops.linear` of one client inside ``vmap`` by batched products of the cohort.

    Torch's own rule multiplies the other way round, so that the gradient of W lies transposed: an optimiser that walks over W
    and its gradient then reads one of them at a fraction of the memory's speed.
    """
    x, weight, bias = ops.in_autocast_type(x, weight, bias)
    served = x.dim() >= 2 and x.numel() and (serves(weight, bias, shared=[x]) or _serves_shared(x, weight, bias))
    if not served:
        return None
    y: Tensor = _Lifted.apply(_CohortLinear, x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def squared_length(x: Tensor) -> Tensor | None:
    """:func:`fedloom.ops.squared_length` of one client inside ``vmap`` with a gradient of one pass instead of three."""
    # Outside of steps, which are captured, the call of a function of our own costs the host more than it spares the device.
    if not x.numel() or not x.dim() or not torch.is_grad_enabled() or not serves(x):
        return None
    value: Tensor = _Lifted.apply(_CohortSquares, x)  # type: ignore[no-untyped-call]
    return value


def inner_products(x: Sequence[Tensor], plus: Sequence[Tensor], minus: Sequence[Tensor]) -> Tensor | None:
    """``sum_l <plus_l - minus_l, x_l>`` of one client inside ``vmap``, its gradient one pass; None where no kernel serves."""
    if not _pulling(x, plus, minus):
        return None
    value: Tensor = _Lifted.apply(_CohortPull, x[0].dtype, len(x), *x, *plus, *minus)  # type: ignore[no-untyped-call]
    return value


def half_squares(x: Sequence[Tensor], anchor: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor | None:
    """``1/2 sum_l ||x_l - anchor_l||^2`` of one client inside ``vmap``, computed in a type; None where no kernel serves."""
    if not _pulling(x, anchor):
        return None
    value: Tensor = _Lifted.apply(_CohortPull, dtype or x[0].dtype, len(x), *x, *anchor)  # type: ignore[no-untyped-call]
    return value


def _pulling(x: Sequence[Tensor], *others: Sequence[Tensor]) -> bool:
    """Whether x belongs to a cohort, and others, which all clients may share, are alike and have no gradient."""
    fixed = [t for own in others for t in own]
    if not x or not x[0].is_floating_point() or not serves(*x, shared=fixed):
        return False
    alike = all(t.dtype == x[0].dtype and t.device == x[0].device and t.numel() for t in (*x, *fixed))
    shaped = all([t.shape for t in own] == [t.shape for t in x] for own in others)
    moving = any((torch._C._functorch.get_unwrapped(t) if ops.is_batched(t) else t).requires_grad for t in fixed)
    return alike and shaped and not moving


def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *, onto: bool = False) -> Tensor | None:
    """:func:`fedloom.ops.products.product` of float32 as three products of TF32, where that is faster."""
    if not _threefold(a, b, out):
        return None
    from fedloom.gpu import threefold

    return threefold.product(a, b, None if bias is None else bias.contiguous(), out, onto=onto)


def turned(d: Tensor, weight: Tensor) -> Tensor | None:
    """:func:`fedloom.ops.products.turned`: laid out anew where the product of float32 is faster that way."""
    return weight.mT.contiguous() if _threefold(d, weight.mT) else None


def crossed(d: Tensor, x: Tensor) -> Tensor | None:
    """:func:`fedloom.ops.products.crossed` as three products of TF32, where that is faster."""
    out = d.new_empty(len(d), d.shape[2], x.shape[2])
    return product(d.mT, x.mT, None, out) if out.numel() * d.shape[1] >= CROSSED else None


def _serves_shared(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether all clients share a layer that has no gradient and is faster as below; torch multiplies all of their rows at once, too."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    fixed = not torch.is_grad_enabled() and not any(wrapped(t) for t in (weight, bias) if t is not None)
    return fixed and serves(x) and _pays(x, 1, clients(x) * x.shape[:-1].numel(), weight.shape[0])


def _pays(x: Tensor, several: int, rows: int, columns: int) -> bool:
    """Whether several products of float32, over the last axis of x, are faster as three of TF32, where that one alone is not allowed."""
    if x.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 or not present(x) or not _has_tf32(x.device):
        return False
    depth = x.shape[-1]
    few = rows < FEW and several * columns >= MANY
    return depth >= DEEP and several * rows * columns * depth >= LARGE and rows < MOST and not few


def _threefold(a: Tensor, b: Tensor, *others: Tensor) -> bool:
    """The same of factors as they lie; addresses within a client's part of these tensors have 32 bits."""
    far = max([sum((n - 1) * s for n, s in zip(t.shape[1:], t.stride()[1:], strict=True)) for t in (a, b, *others)])
    return far < 1 << 31 and _pays(a, a.shape[0], a.shape[1], b.shape[1])


@cache
def _has_tf32(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


class _CohortLinear(torch.autograd.Function):
    """x: (clients, rows..., inputs); weight: (clients, outputs, inputs); bias: (clients, outputs); without a gradient all may share these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not any(ctx.needs_input_grad) and not any(t.stride(0) for t in (weight, bias) if t is not None):
            weight, bias = weight[:1], None if bias is None else bias[:1]
        flat = x.reshape(len(weight), -1, x.shape[-1])
        y = x.new_empty(*x.shape[:-1], weight.shape[1])  # not a view: a layer behind may work in place
        products.product(flat, weight, bias, y.view(*flat.shape[:2], -1))
        ctx.save_for_backward(flat, weight)
        ctx.size = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        d = dy.reshape(*flat.shape[:2], weight.shape[1]).contiguous()
        dx = dw = None
        again = torch.is_grad_enabled()  # a gradient that is to have one itself is torch's
        if ctx.needs_input_grad[0]:
            if flat.shape[1] >= ROWS and not again:
                dx = products.product(d, products.turned(d, weight), None, d.new_empty(flat.shape))
            else:
                dx = torch.bmm(d, weight)
            dx = dx.view(ctx.size)
        if ctx.needs_input_grad[1]:
            dw = torch.bmm(d.mT, flat) if again else products.crossed(d, flat)
        return dx, dw, d.sum(1) if ctx.needs_input_grad[2] else None


class _CohortSquares(torch.autograd.Function):
    """x: (clients, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        length: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
        return length**2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return x * (2 * dy).view(-1, *[1] * (x.dim() - 1))


class _CohortPull(torch.autograd.Function):
    """``sum <a - b, x>`` of lists x, a, b of tensors (clients, ...), or ``1/2 sum ||x - b||^2`` of lists x, b: differences are not kept."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, count: int, *tensors: Tensor) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        x, (a, b) = tensors[:count], (tensors[-2 * count : -count], tensors[-count:])
        ctx.save_for_backward(*a, *b)
        ctx.count, ctx.given, ctx.wide, ctx.kind = count, len(tensors), wide, x[0].dtype
        share, others = (0.5, [None] * count) if len(tensors) == 2 * count else (1.0, x)
        parts = []
        for plus, minus, other in zip(a, b, others, strict=True):
            gap = plus.to(wide) - minus.to(wide)
            parts.append((gap * (gap if other is None else other.to(wide))).reshape(len(gap), -1).sum(1))
        return (share * torch.stack(parts).sum(0)).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :], strict=True)
        each = [(a.to(ctx.wide) - b.to(ctx.wide)) * dy.to(ctx.wide).view(-1, *[1] * (a.dim() - 1)) for a, b in pairs]
        return None, None, *(d.to(ctx.kind) for d in each), *[None] * (ctx.given - ctx.count)
