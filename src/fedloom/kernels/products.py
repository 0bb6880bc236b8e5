"""The linear layer of a whole cohort, on CUDA under ``vmap``: its gradients lie as its parameters do."""

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
    if x.dim() < 2 or not x.numel() or not serves(x, weight, bias):
        return F.linear(x, weight, bias)
    y: Tensor = _Lifted.apply(_CohortLinear, *shortened(x, weight, bias))  # type: ignore[no-untyped-call]
    return y


class _CohortLinear(torch.autograd.Function):
    """x: (clients, rows..., inputs); weight: (clients, outputs, inputs); bias: (clients, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(len(x), -1, x.shape[-1])
        across = weight.transpose(1, 2)
        made = torch.bmm(flat, across) if bias is None else torch.baddbmm(bias[:, None], flat, across)
        ctx.save_for_backward(flat, weight)
        ctx.size = x.shape
        return made.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        d = dy.reshape(*flat.shape[:2], weight.shape[1])
        dx = torch.bmm(d, weight).view(ctx.size) if ctx.needs_input_grad[0] else None
        dw = torch.bmm(d.transpose(1, 2), flat) if ctx.needs_input_grad[1] else None
        return dx, dw, d.sum(1) if ctx.needs_input_grad[2] else None
