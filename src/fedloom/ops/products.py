"""Products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.ops.dispatch import operator
from fedloom.ops.mapped import in_autocast_type


@operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x W^T + b``."""
    return F.linear(*in_autocast_type(x, weight, bias))


@operator
def squared_norm(x: Tensor) -> Tensor:
    """Return ``sum x^2``."""
    return (x**2).sum()


@operator
def matmul_transposed(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *, accumulate: bool = False) -> Tensor:
    """Compute ``a b^T + bias`` per client, or add ``a b^T`` to ``out``.

    Args:
        a: (clients, rows, depth).
        b: (clients, columns, depth).
        bias: (clients, columns), or None.
        out: (clients, rows, columns), with contiguous rows; overwritten and returned.
        accumulate: whether to add to ``out``; the bias is None then.
    """
    if accumulate:
        return out.baddbmm_(a, b.mT)
    return torch.bmm(a, b.mT, out=out) if bias is None else torch.baddbmm(bias[:, None], a, b.mT, out=out)


@operator
def transpose_weight(d: Tensor, weight: Tensor) -> Tensor:
    """Return the factor ``b`` with which :func:`matmul_transposed` computes ``d weight``.

    Args:
        d: (clients, rows, outputs).
        weight: (clients, outputs, inputs).
    """
    return weight.mT


@operator
def weight_gradient(d: Tensor, x: Tensor) -> Tensor:
    """Return ``d^T x`` per client, the gradient of a layer's weights.

    Args:
        d: gradient of the outputs, (clients, rows, outputs).
        x: (clients, rows, inputs).
    """
    return torch.bmm(d.mT, x)
