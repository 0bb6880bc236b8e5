"""Losses per row."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedloom.ops.dispatch import operator

UNUSED = -100
"""Torch's label of rows without a loss."""


@operator
def cross_entropies(logits: Tensor, y: Tensor, ignore_index: int = UNUSED) -> Tensor:
    """Return ``-log p_y`` per row or pixel, p the softmax over axis 1; 0 for the label ``ignore_index``."""
    return F.cross_entropy(logits, y, ignore_index=ignore_index, reduction="none")
