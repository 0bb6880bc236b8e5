"""The vectorised engine: a cohort at once."""

from fedloom.engines.vectorised.engine import VectorisedEngine

__all__ = ["VectorisedEngine"]
