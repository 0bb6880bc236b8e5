"""Inner products and cosines of the updates of all pairs of clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.ops import similarity


def gram(updates: Sequence[Tensor]) -> Tensor:
    """``G_uv = <h_u, h_v>`` in float64, where the leaves of a layer, each clients x anything, make up ``h``.

    Columns are converted to float64 piece by piece, which bounds the memory.

    Example:
        >>> gram([torch.tensor([[1.0], [4.0]]), torch.tensor([[2.0, 3.0], [5.0, 6.0]])])
        tensor([[14., 32.],
                [32., 77.]], dtype=torch.float64)
    """
    clients = updates[0].shape[0]
    width = max(1, similarity.CHUNK // clients)
    total = torch.zeros(clients, clients, dtype=torch.float64, device=updates[0].device)
    for update in updates:
        for piece in update.reshape(clients, -1).split(width, dim=1):
            exact = piece.double()
            total.addmm_(exact, exact.T)
    return total


def cosines(products: Tensor) -> Tensor:
    """Return ``cos(h_u, h_v)`` of all pairs, clamped to [-1, 1] and rounded to 10 digits; 0 for a zero vector.

    Args:
        products: Gram matrices, shape ``(..., clients, clients)``.
    """
    length = products.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = length[..., :, None] * length[..., None, :]
    return (products / scale).nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1).round(decimals=10)
