"""The vectorised engine: trains a cohort as stacked tensors."""

from fedloom.engines.vectorised.engine import VectorisedEngine

__all__ = ["VectorisedEngine"]
