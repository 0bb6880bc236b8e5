"""The optional code for CUDA: Triton kernels, captured steps, prefetched batches.

:mod:`fedloom.ops.dispatch` loads the kernels when a network is built for CUDA and triton is
installed. The vectorised engine loads :mod:`fedloom.gpu.captured_steps`. No core package imports
this one.
"""
