"""What clients have sent, side by side (clients x numbers): products of all pairs, and where clients ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom import tree
from fedloom.aggregators import similarity


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


def cosines(products: Tensor) -> Tensor:
    """``cos(h_u, h_v)`` of all pairs from Gram matrices, clamped to [-1, 1] and rounded to 10 digits; 0 for a zero vector."""
    length = products.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = length[..., :, None] * length[..., None, :]
    return (products / scale).nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1).round(decimals=10)


def pairs_below(products: Tensor, xi: float) -> Tensor:
    """Of each Gram matrix how many unordered pairs have a cosine below xi."""
    return (cosines(products) < xi).triu(diagonal=1).sum((-2, -1))


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
