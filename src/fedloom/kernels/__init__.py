"""Kernels for cohorts on CUDA: operations for which torch runs the clients of a ``vmap`` one after another."""

from fedloom.kernels.classifiers import classified
from fedloom.kernels.cohort import convolved, mapped, normalised, pooled, serves, shortened
from fedloom.kernels.counters import drawn, folded
from fedloom.kernels.crossentropies import cross_entropies
from fedloom.kernels.depthwise import filtered
from fedloom.kernels.entropy import summarised
from fedloom.kernels.fusions import (
    acted,
    acted_apart,
    acted_last,
    acted_summed,
    chained,
    chained_apart,
    chained_summed,
    opened,
    opened_summed,
)
from fedloom.kernels.products import (
    completed,
    half_squares,
    half_squares_of_all,
    inner_products,
    linear,
    put_off,
    squared_length,
)
from fedloom.kernels.rows import class_distances, masked_mean

__all__ = [
    "acted",
    "acted_apart",
    "acted_last",
    "acted_summed",
    "chained",
    "chained_apart",
    "chained_summed",
    "class_distances",
    "classified",
    "completed",
    "convolved",
    "cross_entropies",
    "drawn",
    "filtered",
    "folded",
    "half_squares",
    "half_squares_of_all",
    "inner_products",
    "linear",
    "mapped",
    "masked_mean",
    "normalised",
    "opened",
    "opened_summed",
    "pooled",
    "put_off",
    "serves",
    "shortened",
    "squared_length",
    "summarised",
]
