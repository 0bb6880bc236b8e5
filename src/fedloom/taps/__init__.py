"""Places inside a network: where features can be read, what can be asked of them, what that costs."""

from fedloom.ops import pooled
from fedloom.taps.blocks import blocks
from fedloom.taps.losses import entropy_term, information_term
from fedloom.taps.points import Tap, candidates, choose

__all__ = ["Tap", "blocks", "candidates", "choose", "entropy_term", "information_term", "pooled"]
