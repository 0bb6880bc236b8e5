"""Linear layers and squared lengths of a whole cohort, on CUDA under ``vmap``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.kernels.cohort import _Lifted, serves, shortened


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``; of one client inside ``vmap`` on CUDA by batched products of the cohort.

    Torch's own rule multiplies the other way round, so that the gradient of W lies transposed: an optimiser that walks over W
    and its gradient then reads one of them at a fraction of the memory's speed.
    """
    shared = not torch._C._functorch.is_functorch_wrapped_tensor(x)
    if x.dim() < 2 or not x.numel() or not serves(weight, bias, None if shared else x):
        return F.linear(x, weight, bias)
    y: Tensor = _Lifted.apply(_CohortLinear, *shortened(x, weight, bias))  # type: ignore[no-untyped-call]
    return y


def squared_length(x: Tensor) -> Tensor:
    """``sum x^2``; of one client inside ``vmap`` on CUDA with a gradient of one pass instead of three."""
    # Outside of steps, which are captured, the call of a function of our own costs the host more than it spares the device.
    if not x.numel() or not x.dim() or not torch.is_grad_enabled() or not serves(x):
        return (x**2).sum()
    value: Tensor = _Lifted.apply(_CohortSquares, x)  # type: ignore[no-untyped-call]
    return value


class _CohortLinear(torch.autograd.Function):
    """x: (clients, rows..., inputs); weight: (clients, outputs, inputs); bias: (clients, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(len(x), -1, x.shape[-1])
        across = weight.transpose(1, 2)
        y = x.new_empty(*x.shape[:-1], weight.shape[1])  # not a view: a layer behind may work in place
        made = y.view(*flat.shape[:2], -1)
        torch.bmm(flat, across, out=made) if bias is None else torch.baddbmm(bias[:, None], flat, across, out=made)
        ctx.save_for_backward(flat, weight)
        ctx.size = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        d = dy.reshape(*flat.shape[:2], weight.shape[1])
        dx = torch.bmm(d, weight).view(ctx.size) if ctx.needs_input_grad[0] else None
        dw = torch.bmm(d.transpose(1, 2), flat) if ctx.needs_input_grad[1] else None
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
