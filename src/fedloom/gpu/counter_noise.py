"""Counter-based random bits of a cohort in one launch. Plain form: :mod:`fedloom.rng`, equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom import rng
from fedloom.gpu.cohort import apply_to_cohort, is_cohort

MASK = tl.constexpr(rng._MASK)
FIRST = tl.constexpr(rng._FIRST)
SECOND = tl.constexpr(rng._SECOND)
BLOCK = tl.constexpr(rng._BLOCK)


def fold_key(key: Tensor, number: int | Tensor) -> Tensor | None:
    """Derive a key from a key (int64, no axes) and a number. Plain form: :func:`fedloom.rng.fold_key`."""
    if key.dim() or not is_cohort(key):
        return None
    if not isinstance(number, Tensor):
        number = torch.full_like(key, number)
    if number.dim() or number.dtype != torch.int64 or not is_cohort(number):
        return None
    folded: Tensor = apply_to_cohort(_FoldKey, key, number)
    return folded


def random_bits(key: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return 32 random bits per element of a shape, int64. Plain form: :func:`fedloom.rng.random_bits`."""
    if key.dim() or not 0 < math.prod(shape) <= rng._MASK or not is_cohort(key):
        return None
    bits: Tensor = apply_to_cohort(_RandomBits, key, tuple(shape))
    return bits


class _FoldKey(torch.autograd.Function):
    """keys, numbers: (clients,), int64."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, numbers: Tensor) -> Tensor:
        folded = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
        _fold_kernel[(len(keys),)](keys.contiguous(), numbers.contiguous(), folded)
        return folded


class _RandomBits(torch.autograd.Function):
    """keys: (clients,), int64; returns (clients, *shape)."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        bits = keys.new_empty(keys.shape[0], count)
        size = min(rng._BLOCK, triton.next_power_of_2(count))
        _bits_kernel[(triton.cdiv(count, rng._BLOCK), keys.shape[0])](keys.contiguous(), bits, count, SIZE=size)
        return bits.view(-1, *shape)


@triton.jit
def _mix(word):
    word = ((word ^ (word >> 16)) * FIRST) & MASK
    word = ((word ^ (word >> 15)) * SECOND) & MASK
    return word ^ (word >> 16)


@triton.jit
def _fold(key, number):
    low = (key & MASK) ^ _mix((number + 0x9E3779B9) & MASK)
    high = ((key >> 32) & MASK) ^ _mix(((number >> 32) ^ 0x85EBCA6B) & MASK)
    low = _mix(low)
    high = _mix((high + low) & MASK)
    low = _mix((low + high) & MASK)
    return ((high & 0x7FFFFFFF) << 32) | low


@triton.jit
def _fold_kernel(keys, numbers, folded):
    client = tl.program_id(0)
    tl.store(folded + client, _fold(tl.load(keys + client), tl.load(numbers + client)))


@triton.jit
def _bits_kernel(keys, bits, count, SIZE: tl.constexpr):
    block, client = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    key = tl.load(keys + client)
    key = _fold(key, key * 0)
    low, high = key & MASK, (key >> 32) & MASK
    start = _mix(_mix((block + low) & MASK) ^ high) >> 1
    middle = _mix(_mix((block + high) & MASK) ^ low)
    index = tl.arange(0, SIZE).to(tl.int64)
    word = start + index
    word = (((word ^ (word >> 16)) * FIRST) & MASK) ^ middle
    word = ((word ^ (word >> 15)) * SECOND) & MASK
    word = word ^ (word >> 16)
    element = block * BLOCK + index
    tl.store(bits + client * count + element, word, mask=element < count)
