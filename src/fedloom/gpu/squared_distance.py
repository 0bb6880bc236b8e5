"""Squared norms, squared distances and inner products of a cohort's leaves.

Each gradient is one pass.

    <a - b, x>, 1/2 ||a - b||^2      gradients with respect to x and to a: (a - b) dy

The kernels do not store the difference. They sum blocks, whose sums are added in a fixed order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom import torch_internals
from fedloom.gpu.cohort import apply_to_cohort, contiguous_per_client, is_cohort

BLOCK = 4096
"""Values of one client per program."""
SMALL = 1 << 16
"""Largest leaf that is concatenated with others: its own launch would take longer than its work."""


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
    return _apply(dtype or x[0].dtype, x, anchor)


def difference_inner_product(x: Sequence[Tensor], plus: Sequence[Tensor], minus: Sequence[Tensor]) -> Tensor | None:
    """Return ``sum_l <plus_l - minus_l, x_l>`` of one client inside ``vmap``.

    Plain form: :func:`fedloom.spec.terms.difference_inner_product`.
    """
    if not _is_supported(x, plus, minus):
        return None
    return _apply(x[0].dtype, x, plus, minus)


def _is_supported(x: Sequence[Tensor], *others: Sequence[Tensor]) -> bool:
    """Return whether x belongs to a cohort and the others, which clients may share, are equal in form and without gradient."""
    fixed = [t for tensors in others for t in tensors]
    if not x or x[0].dtype not in (torch.float32, torch.float64) or not is_cohort(*x, shared=fixed):
        return False
    same_type = all(t.dtype == x[0].dtype and t.device == x[0].device and t.numel() for t in (*x, *fixed))
    same_shape = all([t.shape for t in tensors] == [t.shape for t in x] for tensors in others)
    stacks = [torch._C._functorch.get_unwrapped(t) if torch_internals.is_batched(t) else t for t in fixed]
    return same_type and same_shape and not any(t.requires_grad for t in stacks)


def _apply(dtype: torch.dtype, *lists: Sequence[Tensor]) -> Tensor:
    """Apply :class:`_CohortDifference`, computed in a dtype, to lists of one client's tensors."""
    vectors = [_flatten(tensors) for tensors in lists]
    count = len(vectors[0])
    value: Tensor = apply_to_cohort(_CohortDifference, dtype, count, *itertools.chain(*vectors))
    return value


def _flatten(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a client's tensors as vectors: one for all small tensors, one per large tensor."""
    small = [t.reshape(-1) for t in tensors if t.numel() <= SMALL]
    large = [t.reshape(-1) for t in tensors if t.numel() > SMALL]
    return [torch.cat(small), *large] if small else large


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
    """``sum <a - b, x>`` of lists x, a, b, or ``1/2 sum ||x - b||^2`` of lists x, b.

    The lists hold matrices (clients, values). The result, (clients,), has the dtype in which it is
    computed: float32 or float64.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[-2 * count :])
        ctx.count, ctx.tensor_count = count, len(tensors)
        rows = [contiguous_per_client(t) for t in tensors]
        x, a, b = rows[:count], rows[-2 * count :][:count], rows[-count:]
        blocks = [triton.cdiv(t.shape[1], BLOCK) for t in x]
        sums = x[0].new_empty(len(x[0]), sum(blocks), dtype=dtype)
        for factor, plus, minus, block_sums in zip(x, a, b, sums.split(blocks, 1), strict=True):
            strides = [t.stride(0) for t in (plus, minus, factor, sums)]
            _forward_kernel[(block_sums.shape[1], len(sums))](
                plus, minus, factor, block_sums, plus.shape[1], *strides,
                PRODUCT=len(tensors) == 3 * count, B=BLOCK,
            )  # fmt: skip
        return sums.sum(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :], strict=True)
        grads = [_difference_times(a, b, dy) for a, b in pairs]
        return None, None, *grads, *[None] * (ctx.tensor_count - ctx.count)


def _difference_times(a: Tensor, b: Tensor, dy: Tensor) -> Tensor:
    """Return ``(a - b) dy``, computed in the dtype of dy, in the dtype of a.

    Args:
        a: (clients, values).
        b: (clients, values).
        dy: (clients,).
    """
    if torch.is_grad_enabled():  # torch's operations have second derivatives
        return ((a.to(dy.dtype) - b.to(dy.dtype)) * dy[:, None]).to(a.dtype)
    a, b = contiguous_per_client(a), contiguous_per_client(b)
    dx = a.new_empty(a.shape)
    _backward_kernel[(triton.cdiv(a.shape[1], BLOCK), len(a))](
        a, b, dy, dx, a.shape[1], a.stride(0), b.stride(0), dy.stride(0), B=BLOCK
    )
    return dx


@triton.jit
def _forward_kernel(
    a, b, x, sums, size, a_stride, b_stride, x_stride, sums_stride,
    PRODUCT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = block * B + tl.arange(0, B)
    valid = index < size
    a_value = tl.load(a + client * a_stride + index, mask=valid, other=0.0)
    b_value = tl.load(b + client * b_stride + index, mask=valid, other=0.0)
    difference = a_value.to(sums.dtype.element_ty) - b_value.to(sums.dtype.element_ty)
    if PRODUCT:
        x_value = tl.load(x + client * x_stride + index, mask=valid, other=0.0)
        value = difference * x_value.to(sums.dtype.element_ty)
    else:
        value = difference * difference * 0.5
    tl.store(sums + client * sums_stride + block, tl.sum(value, 0))


@triton.jit
def _backward_kernel(a, b, dy, dx, size, a_stride, b_stride, dy_stride, B: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * B + tl.arange(0, B)
    valid = index < size
    factor = tl.load(dy + client * dy_stride)
    a_value = tl.load(a + client * a_stride + index, mask=valid, other=0.0).to(factor.dtype)
    b_value = tl.load(b + client * b_stride + index, mask=valid, other=0.0).to(factor.dtype)
    tl.store(dx + client * size + index, (a_value - b_value) * factor, mask=valid)
