"""Triton kernels for cohorts on CUDA. Torch computes these operations one client at a time, or slowly, under ``vmap``.

:func:`fedloom.engines.choose_device.choose_device` loads the package for CUDA, before a network is
built. No other package imports it.
"""
