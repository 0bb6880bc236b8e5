"""Products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.ops.dispatch import operator
from fedloom.ops.mapped import in_autocast_type


@operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``."""
    return F.linear(*in_autocast_type(x, weight, bias))


@operator
def squared_length(x: Tensor) -> Tensor:
    """``sum x^2``."""
    return (x**2).sum()


@operator
def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *, onto: bool = False) -> Tensor:
    """``a b^T + bias`` of every client, or without a bias that added to what is there.

    Args:
        a: (clients, rows, depth).
        b: (clients, columns, depth).
        bias: (clients, columns), or None.
        out: (clients, rows, columns), each row without gaps, which is overwritten and returned.
        onto: whether ``out`` is added to.
    """
    if onto:
        return out.baddbmm_(a, b.mT)
    return torch.bmm(a, b.mT, out=out) if bias is None else torch.baddbmm(bias[:, None], a, b.mT, out=out)


@operator
def turned(d: Tensor, weight: Tensor) -> Tensor:
    """The ``b`` of ``d weight`` as :func:`product` takes it."""
    return weight.mT


@operator
def crossed(d: Tensor, x: Tensor) -> Tensor:
    """``d^T x`` of every client, what a layer's weights are told: (clients, rows, outputs), (clients, rows, inputs)."""
    return torch.bmm(d.mT, x)
