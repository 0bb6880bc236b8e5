"""Engines: where client programs run."""

from fedloom.engines.base import Engine
from fedloom.engines.loop import LoopEngine

__all__ = ["Engine", "LoopEngine"]
