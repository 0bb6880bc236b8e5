"""Kernels for cohorts on CUDA: operations for which torch runs the clients of a ``vmap`` one after another."""

from fedloom.kernels.cohort import convolved, normalised, pooled, serves

__all__ = ["convolved", "normalised", "pooled", "serves"]
