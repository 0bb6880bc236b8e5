"""Squared norms, squared distances and inner products of a cohort's leaves, each with a gradient of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom import torch_internals
from fedloom.gpu.cohort import apply_to_cohort, is_cohort


def squared_norm(x: Tensor) -> Tensor | None:
    """Return ``sum x^2`` of one client inside ``vmap``. Plain form: :func:`fedloom.ops.products.squared_norm`."""
    # Without gradients no step is captured, and the call of this function costs the host more time than the device saves.
    if not x.numel() or not x.dim() or not torch.is_grad_enabled() or not is_cohort(x):
        return None
    value: Tensor = apply_to_cohort(_CohortSquaredNorm, x)
    return value


def half_squared_distance(
    x: Sequence[Tensor], anchor: Sequence[Tensor], dtype: torch.dtype | None = None
) -> Tensor | None:
    """Return ``1/2 sum_l ||x_l - anchor_l||^2`` of one client inside ``vmap``, computed in a dtype.

    Plain form: :func:`fedloom.spec.terms.half_squared_distance`.
    """
    if not _is_supported(x, anchor):
        return None
    value: Tensor = apply_to_cohort(_CohortDifference, dtype or x[0].dtype, len(x), *x, *anchor)
    return value


def difference_inner_product(x: Sequence[Tensor], plus: Sequence[Tensor], minus: Sequence[Tensor]) -> Tensor | None:
    """Return ``sum_l <plus_l - minus_l, x_l>`` of one client inside ``vmap``.

    Plain form: :func:`fedloom.spec.terms.difference_inner_product`.
    """
    if not _is_supported(x, plus, minus):
        return None
    value: Tensor = apply_to_cohort(_CohortDifference, x[0].dtype, len(x), *x, *plus, *minus)
    return value


def _is_supported(x: Sequence[Tensor], *others: Sequence[Tensor]) -> bool:
    """Return whether x belongs to a cohort and the others, which clients may share, are equal in form and without gradient."""
    fixed = [t for tensors in others for t in tensors]
    if not x or not x[0].is_floating_point() or not is_cohort(*x, shared=fixed):
        return False
    same_type = all(t.dtype == x[0].dtype and t.device == x[0].device and t.numel() for t in (*x, *fixed))
    same_shape = all([t.shape for t in tensors] == [t.shape for t in x] for tensors in others)
    stacks = [torch._C._functorch.get_unwrapped(t) if torch_internals.is_batched(t) else t for t in fixed]
    return same_type and same_shape and not any(t.requires_grad for t in stacks)


class _CohortSquaredNorm(torch.autograd.Function):
    """x: (clients, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        norm: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
        return norm**2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return x * (2 * dy).view(-1, *[1] * (x.dim() - 1))


class _CohortDifference(torch.autograd.Function):
    """``sum <a - b, x>`` of lists x, a, b of tensors (clients, ...), or ``1/2 sum ||x - b||^2`` of lists x, b.

    The backward pass computes the differences again; they are not saved.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, count: int, *tensors: Tensor) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        x, (a, b) = tensors[:count], (tensors[-2 * count : -count], tensors[-count:])
        ctx.save_for_backward(*a, *b)
        ctx.count, ctx.tensor_count, ctx.wide, ctx.dtype = count, len(tensors), wide, x[0].dtype
        factor, factors = (0.5, [None] * count) if len(tensors) == 2 * count else (1.0, x)
        sums = []
        for plus, minus, other in zip(a, b, factors, strict=True):
            difference = plus.to(wide) - minus.to(wide)
            product = difference * (difference if other is None else other.to(wide))
            sums.append(product.reshape(len(product), -1).sum(1))
        return (factor * torch.stack(sums).sum(0)).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :], strict=True)
        dy = dy.to(ctx.wide)
        grads = [(a.to(ctx.wide) - b.to(ctx.wide)) * dy.view(-1, *[1] * (a.dim() - 1)) for a, b in pairs]
        return None, None, *(d.to(ctx.dtype) for d in grads), *[None] * (ctx.tensor_count - ctx.count)
