"""What is asked of features, whose axis 1 are the channels: means over positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.ops.dispatch import operator


def pooled(z: Tensor, axis: int = 1) -> Tensor:
    """Rows x channels: the mean over all positions (pixels of a map, tokens)."""
    z = z.movedim(axis, 1)
    if z.dim() == 2:
        return z
    flat = z.flatten(2)
    # A mean divides its gradient once it is spread over the map, a pass over memory; sums of 16 bits would lose digits.
    return flat.mean(2) if z.dtype in (torch.float16, torch.bfloat16) else flat.sum(2) / flat.shape[2]


@operator
def channel_summary(z: Tensor) -> tuple[Tensor, Tensor]:
    """Means over positions of z (rows x channels), and of ``sum_c p_c log p_c`` (rows), p the softmax over the channels."""
    logs = F.log_softmax(z, 1)
    return pooled(z), (logs.exp() * logs).sum(1).reshape(z.shape[0], -1).mean(1)
