"""Linear layers of a cohort as batched matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom import ops
from fedloom.gpu.cohort import apply_to_cohort, client_count, is_cohort
from fedloom.gpu.tf32x3 import is_faster
from fedloom.ops.products import matmul_transposed, transpose_weight, weight_gradient

MIN_ROWS = 2048
"""From this number of rows on, the gradient of the inputs copies the transposed weight for a faster product."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Compute ``x W^T + b`` for one client inside ``vmap``. Plain form: :func:`fedloom.ops.products.linear`.

    Torch's rule for ``vmap`` multiplies in the other order and returns a transposed gradient of W. An optimiser that reads W and its
    gradient together then reads one of them at a fraction of the memory's bandwidth.

    Args:
        x: (rows..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,) or None.
    """
    x, weight, bias = ops.in_autocast_type(x, weight, bias)
    supported = x.dim() >= 2 and x.numel() and (is_cohort(weight, bias, shared=[x]) or _is_shared(x, weight, bias))
    if not supported:
        return None
    y: Tensor = apply_to_cohort(_CohortLinear, x, weight, bias)
    return y


def _is_shared(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether all clients share a layer without gradient for which :mod:`fedloom.gpu.tf32x3` is faster."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    fixed = not torch.is_grad_enabled() and not any(is_wrapped(t) for t in (weight, bias) if t is not None)
    return fixed and is_cohort(x) and is_faster(x, 1, client_count(x) * x.shape[:-1].numel(), weight.shape[0])


class _CohortLinear(torch.autograd.Function):
    """x: (clients, rows..., inputs); weight: (clients, outputs, inputs); bias: (clients, outputs).

    Without a gradient, weight and bias that all clients share are not copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not any(ctx.needs_input_grad) and not any(t.stride(0) for t in (weight, bias) if t is not None):
            weight, bias = weight[:1], None if bias is None else bias[:1]
        flat = x.reshape(len(weight), -1, x.shape[-1])
        y = x.new_empty(*x.shape[:-1], weight.shape[1])  # not a view: the next layer may work in place
        matmul_transposed(flat, weight, bias, y.view(*flat.shape[:2], -1))
        ctx.save_for_backward(flat, weight)
        ctx.size = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        d = dy.reshape(*flat.shape[:2], weight.shape[1]).contiguous()
        dx = dw = None
        differentiable = torch.is_grad_enabled()  # torch's products have second derivatives
        if ctx.needs_input_grad[0]:
            if flat.shape[1] >= MIN_ROWS and not differentiable:
                dx = matmul_transposed(d, transpose_weight(d, weight), None, d.new_empty(flat.shape))
            else:
                dx = torch.bmm(d, weight)
            dx = dx.view(ctx.size)
        if ctx.needs_input_grad[1]:
            dw = torch.bmm(d.mT, flat) if differentiable else weight_gradient(d, flat)
        return dx, dw, d.sum(1) if ctx.needs_input_grad[2] else None
