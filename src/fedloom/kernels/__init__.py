"""Kernels for cohorts on CUDA: operations for which torch runs the clients of a ``vmap`` one after another."""

from fedloom.kernels.cohort import convolved, mapped, normalised, pooled, serves, shortened
from fedloom.kernels.counters import drawn, folded
from fedloom.kernels.entropy import negative_entropy
from fedloom.kernels.fusions import acted, chained

__all__ = [
    "acted",
    "chained",
    "convolved",
    "drawn",
    "folded",
    "mapped",
    "negative_entropy",
    "normalised",
    "pooled",
    "serves",
    "shortened",
]
