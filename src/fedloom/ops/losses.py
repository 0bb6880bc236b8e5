"""Losses of rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedloom.ops.dispatch import operator

UNUSED = -100
"""Torch's label of rows that do not count."""


@operator
def cross_entropies(logits: Tensor, y: Tensor, ignore_index: int = UNUSED) -> Tensor:
    """``-log p_y`` of each row or pixel, p the softmax over axis 1; 0 where the label is ``ignore_index``."""
    return F.cross_entropy(logits, y, ignore_index=ignore_index, reduction="none")
