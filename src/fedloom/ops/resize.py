"""Maps and sequences in another size, linear between pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

MODES = {1: "linear", 2: "bilinear"}


def resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """Linear interpolation of [B, C, length] or [B, C, height, width] to a size, corners not aligned.

    On CUDA it is one product with a matrix for each axis: torch's own gradient adds many pixels up at one address, which is slow (two
    fifths of a step of TopFormer with supervised taps) and comes out a little different every time.

    Example:
        >>> resized(torch.tensor([[[0.0, 4.0]]]), (4,))
        tensor([[[0., 1., 3., 4.]]])
    """
    size = tuple(size)
    if not x.is_cuda:
        return F.interpolate(x, size=size, mode=MODES[len(size)], align_corners=False)
    with torch.autocast("cuda", enabled=False):
        return by_products(x if x.dtype == torch.float64 else x.float(), size).to(x.dtype)


def by_products(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """The same as products with :func:`weights`, the last axis first."""
    if x.shape[-1] != size[-1]:
        x = x @ weights(x.shape[-1], size[-1], x.dtype, x.device).T
    if len(size) == 2 and x.shape[-2] != size[0]:
        x = weights(x.shape[-2], size[0], x.dtype, x.device) @ x
    return x


@cache
def weights(there: int, wanted: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row i: what each of ``there`` pixels counts for pixel i of ``wanted``; torch's own numbers."""
    unit = torch.eye(there, dtype=dtype)[None]
    return F.interpolate(unit, size=wanted, mode="linear", align_corners=False)[0].T.contiguous().to(device)
