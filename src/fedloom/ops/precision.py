"""Torch's switches for short arithmetic, set for a while and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(*, products: bool | None = None, convolutions: bool | None = None) -> Iterator[None]:
    """Whether CUDA may use TF32 in matrix products and in convolutions while it lasts; None leaves a switch as it is."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    if products is not None:
        matmul.allow_tf32 = products
    if convolutions is not None:
        cudnn.allow_tf32 = convolutions
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
