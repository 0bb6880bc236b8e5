"""The optional code for CUDA: Triton kernels, captured steps, prefetched batches.

:func:`fedloom.engines.choose_device.choose_device` loads the package for CUDA, before a network is
built. No other package imports it.
"""
