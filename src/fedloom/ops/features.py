"""Means and entropies of features, whose axis 1 contains the channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.ops.dispatch import operator


def pooled(z: Tensor, axis: int = 1) -> Tensor:
    """Return the mean over all positions (pixels of a map, tokens), shape (rows, channels)."""
    z = z.movedim(axis, 1)
    if z.dim() == 2:
        return z
    flat = z.flatten(2)
    # The gradient of a mean takes another pass over the map for its division; 16-bit sums would lose precision.
    return flat.mean(2) if z.dtype in (torch.float16, torch.bfloat16) else flat.sum(2) / flat.shape[2]


@operator
def channel_summary(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means over positions of z and of ``sum_c p_c log p_c``, p the softmax over channels.

    Args:
        z: (rows, channels, positions...).

    Returns:
        (rows, channels) and (rows,).
    """
    logs = F.log_softmax(z, 1)
    return pooled(z), (logs.exp() * logs).sum(1).reshape(z.shape[0], -1).mean(1)
