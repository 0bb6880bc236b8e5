"""Triton kernels for cohorts on CUDA. Torch computes these operations one client at a time, or slowly, under ``vmap``.

:mod:`fedloom.ops.dispatch` loads the package if a network is built for CUDA and triton is installed. No other package imports it.
"""
