"""What clients have sent, side by side (clients x numbers): products of all pairs, and where clients ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fedloom import tree
from fedloom.aggregators import similarity
from fedloom.kernels.cohort import present

FEW = 16
"""Up to this number of clients there is a kernel for the products of all pairs; those of more are a matrix product."""


def gram(updates: Sequence[Tensor]) -> Tensor:
    """``G_uv = <h_u, h_v>`` in float64 of one layer's updates, each M x anything; a matrix product, in pieces of columns."""
    clients = updates[0].shape[0]
    width = max(1, similarity.CHUNK // clients)
    total: Tensor | None = None
    for update in updates:
        flat = update if update.dim() == 2 else update.reshape(clients, -1)
        for piece in (flat,) if flat.shape[1] <= width else flat.split(width, dim=1):
            exact = piece.double()
            total = exact @ exact.T if total is None else total.addmm_(exact, exact.T)
    assert total is not None
    return total


def grams(side: Tensor, widths: Sequence[int]) -> Tensor:
    """The same of layers that lie side by side: layers x M x M.

    Example:
        >>> grams(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), [1, 2])
        tensor([[[ 1.,  4.],
                 [ 4., 16.]],
        <BLANKLINE>
                [[13., 28.],
                 [28., 61.]]], dtype=torch.float64)
    """
    if len(side) <= FEW and _served(side):
        from fedloom.kernels import sides

        return sides.grams(side, _bounds(tuple(widths), side.device))
    return torch.stack([gram([piece]) for piece in side.double().split_with_sizes(list(widths), 1)])


def cosines(products: Tensor) -> Tensor:
    """``cos(h_u, h_v)`` of all pairs from Gram matrices, clamped to [-1, 1] and rounded to 10 digits; 0 for a zero vector."""
    length = products.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = length[..., :, None] * length[..., None, :]
    return (products / scale).nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1).round(decimals=10)


def pairs_below(products: Tensor, xi: float) -> Tensor:
    """Of each Gram matrix how many unordered pairs have a cosine below xi."""
    return (cosines(products) < xi).triu(diagonal=1).sum((-2, -1))


def disagreeing(side: Tensor, widths: Sequence[int], xi: float) -> Tensor:
    """The same of layers that lie side by side.

    Example:
        >>> disagreeing(torch.tensor([[1.0, 2.0, 3.0], [-4.0, 5.0, 6.0]]), [1, 2], 0.0)
        tensor([1, 0])
    """
    if len(side) <= FEW and _served(side):
        from fedloom.kernels import sides

        return sides.conflicts(side, _bounds(tuple(widths), side.device), xi)
    return pairs_below(grams(side, widths), xi)


@lru_cache(maxsize=8)
def _bounds(widths: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # they are for everybody who comes later
        return torch.tensor([0, *widths]).cumsum(0).to(device)


def ended(
    moved: Tensor,
    sent: Tensor,
    own: Sequence[Tensor] | None,
    parts: Sequence[tuple[slice, bool]],
    weights: Sequence[int],
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Where clients ended, each in a tensor of its own, and the sum of how far that is from where the server is, weighted.

    Args:
        moved: how far each client moved from where it began, M x numbers.
        sent: where the server is.
        own: where each was before; None where all began at the server's.
        parts: columns, and whether clients began there with their own; only there the sum means something.
        weights: of the clients.
    """
    if own is not None and _served(moved) and all(t.dtype == moved.dtype for t in (sent, *own)):
        from fedloom.kernels import sides

        runs = [(at.start, at.stop) for at, kept in parts if kept]
        return sides.ended(moved, sent, [t.contiguous() for t in own], runs, weights)
    found = torch.empty_like(moved)
    theirs = None if own is None else torch.stack(list(own))
    for at, kept in parts:
        torch.add(moved[:, at], theirs[:, at] if kept and theirs is not None else sent[at], out=found[:, at])
    values = tree.copies(found.unbind())  # a view would keep what all of them have for as long as one is kept
    if own is None:
        return values, None
    found.sub_(sent)  # before they are added up: a mean of long values would have lost what they differ in
    if set(weights) != {1}:
        torch._foreach_mul_(found.unbind(), [float(n) for n in weights])
    return values, found.sum(0)


def _served(side: Tensor) -> bool:
    kinds = torch.float32, torch.float64
    return side.dtype in kinds and side.is_contiguous() and bool(side.numel()) and present(side)
