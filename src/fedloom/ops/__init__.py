"""Operators in plain torch.

:mod:`fedloom.ops.dispatch` looks up faster implementations of some of them.
"""

from fedloom.ops.dispatch import operator
from fedloom.ops.features import channel_summary, pooled
from fedloom.ops.losses import cross_entropies
from fedloom.ops.mapped import in_autocast_type
from fedloom.ops.products import linear, squared_norm

__all__ = ["channel_summary", "cross_entropies", "in_autocast_type", "linear", "operator", "pooled", "squared_norm"]
