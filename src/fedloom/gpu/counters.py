"""Keys and words of counter-based noise for a whole cohort under ``vmap`` on CUDA: one launch where tensors need dozens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom import rng
from fedloom.gpu.cohort import _Lifted, serves


def fold_one(key: Tensor, number: int | Tensor) -> Tensor | None:
    """As :func:`fedloom.rng.fold_one`, of one client inside ``vmap``; None where no kernel serves."""
    if key.dim() or not serves(key):
        return None
    if not isinstance(number, Tensor):
        number = torch.full_like(key, number)
    if number.dim() or number.dtype != torch.int64 or not serves(number):
        return None
    made: Tensor = _Lifted.apply(_Fold, key, number)  # type: ignore[no-untyped-call]
    return made


def bits(key: Tensor, shape: Sequence[int]) -> Tensor | None:
    """As :func:`fedloom.rng.bits`, of one client inside ``vmap``; None where no kernel serves."""
    if key.dim() or not 0 < math.prod(shape) <= rng._MASK or not serves(key):
        return None
    made: Tensor = _Lifted.apply(_Bits, key, tuple(shape))  # type: ignore[no-untyped-call]
    return made


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, numbers: Tensor) -> Tensor:
        from fedloom.gpu import words

        return words.fold(keys.contiguous(), numbers.contiguous())


class _Bits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, shape: tuple[int, ...]) -> Tensor:
        from fedloom.gpu import words

        return words.bits(keys.contiguous(), math.prod(shape)).view(-1, *shape)
