"""Counter-based noise of a cohort, one launch for each draw: the integer arithmetic of :mod:`fedloom.rng`, word for word."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom import rng

MASK = tl.constexpr(rng._MASK)
FIRST = tl.constexpr(rng._FIRST)
SECOND = tl.constexpr(rng._SECOND)
BLOCK = tl.constexpr(rng._BLOCK)


@triton.jit
def _mix(word):
    word = ((word ^ (word >> 16)) * FIRST) & MASK
    word = ((word ^ (word >> 15)) * SECOND) & MASK
    return word ^ (word >> 16)


@triton.jit
def _folded(key, number):
    low = (key & MASK) ^ _mix((number + 0x9E3779B9) & MASK)
    high = ((key >> 32) & MASK) ^ _mix(((number >> 32) ^ 0x85EBCA6B) & MASK)
    low = _mix(low)
    high = _mix((high + low) & MASK)
    low = _mix((low + high) & MASK)
    return ((high & 0x7FFFFFFF) << 32) | low


@triton.jit
def _fold(keys, numbers, made):
    client = tl.program_id(0)
    tl.store(made + client, _folded(tl.load(keys + client), tl.load(numbers + client)))


@triton.jit
def _bits(keys, made, count, SIZE: tl.constexpr):
    block, client = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    key = tl.load(keys + client)
    key = _folded(key, key * 0)
    low, high = key & MASK, (key >> 32) & MASK
    start = _mix(_mix((block + low) & MASK) ^ high) >> 1
    middle = _mix(_mix((block + high) & MASK) ^ low)
    spot = tl.arange(0, SIZE).to(tl.int64)
    word = start + spot
    word = (((word ^ (word >> 16)) * FIRST) & MASK) ^ middle
    word = ((word ^ (word >> 15)) * SECOND) & MASK
    word = word ^ (word >> 16)
    at = block * BLOCK + spot
    tl.store(made + client * count + at, word, mask=at < count)


def fold(keys: Tensor, numbers: Tensor) -> Tensor:
    """The key that belongs to each key and its number."""
    made = torch.empty_like(keys)
    _fold[(keys.shape[0],)](keys, numbers, made)
    return made


def bits(keys: Tensor, count: int) -> Tensor:
    """So many words of 32 bits for each key, as int64: (keys, count)."""
    made = keys.new_empty(keys.shape[0], count)
    size = min(rng._BLOCK, triton.next_power_of_2(count))
    _bits[(triton.cdiv(count, rng._BLOCK), keys.shape[0])](keys, made, count, SIZE=size)
    return made
