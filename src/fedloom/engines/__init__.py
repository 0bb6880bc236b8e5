"""Engines run client programs: one after another, in processes, or as waves."""

from fedloom.engines.base import Engine
from fedloom.engines.loop import LoopEngine

__all__ = ["Engine", "LoopEngine"]
