"""Operators in plain torch. A device may have faster implementations of some (:mod:`fedloom.ops.dispatch`)."""

from fedloom.ops.dispatch import operator
from fedloom.ops.features import channel_summary, pooled
from fedloom.ops.losses import cross_entropies
from fedloom.ops.mapped import in_autocast_type
from fedloom.ops.products import linear, squared_norm

__all__ = ["channel_summary", "cross_entropies", "in_autocast_type", "linear", "operator", "pooled", "squared_norm"]
