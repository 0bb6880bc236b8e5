"""Kernels for cohorts on CUDA: operations for which torch runs the clients of a ``vmap`` one after another. No other package imports them."""
