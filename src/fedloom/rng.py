"""Random numbers that depend on nothing but their names.

Two kinds, both stateless, so that a checkpoint holds no generator and no global one is read or moved:

- on the host, `stream(seed, purpose, *keys)` is a fresh NumPy generator (Philox, keyed by a hash of the
  names);
- on the device, `uniform(key, shape)` is counter-based noise: element i depends only on (key, i). It is made
  of integer arithmetic on tensors, hence equal bit for bit in a plain loop, under `torch.vmap` and in a
  traced graph, and more rows at the end leave the earlier ones as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.ops.dispatch import operator

PURPOSES = frozenset(
    (
        "init",
        "partition",
        "split",
        "sample",
        "availability",
        "batches",
        "noise",
        "adapters",
        "augment",
        "cloud",
    )
)

_SEPARATOR = "\x1f"
_MASK = 0xFFFFFFFF
_BLOCK = 1024
# Multipliers of Wellons' `lowbias32`; the second is written less 2**32, which is the same modulo 2**32 and
# keeps every product of it and a 32-bit word within int64.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)
# Significant bits of each floating type: more would round up to 1.0.
_BITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _digest(size: int, parts: Sequence[object]) -> bytes:
    text = _SEPARATOR.join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


class _Key(np.random.bit_generator.ISeedSequence):
    """A digest as the key of Philox; given as `key`, NumPy would first gather entropy that is then not used."""

    def __init__(self, digest: bytes) -> None:
        self.words = np.frombuffer(digest, "<u8").astype(np.uint64)

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        assert n_words == len(self.words), f"a key of {len(self.words)} words, asked for {n_words}"
        return self.words


_torchs = threading.RLock()


@contextlib.contextmanager
def torch_generator(seed: int | None = None) -> Iterator[None]:
    """Inside, torch's global generator is one thread's alone, seeded if a seed is given; afterwards it is as before.

    Runs that share a process in threads would otherwise make each other's models of each other's noise.
    """
    with _torchs, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def stream(seed: int, purpose: str, *keys: object) -> np.random.Generator:
    """A fresh generator for one purpose: Philox keyed by blake2b of the joined names.

    Args:
        seed: The seed of the run or of the data.
        purpose: One of `PURPOSES`.
        *keys: What else the draw belongs to, such as client id, round and phase.

    Example:
        >>> a, b = stream(0, "batches", "3", 1), stream(0, "batches", "3", 1)
        >>> bool((a.permutation(9) == b.permutation(9)).all())
        True
    """
    assert purpose in PURPOSES, f"unknown purpose {purpose!r}"
    key: Any = _Key(_digest(16, (seed, purpose, *keys)))  # NumPy takes any ISeedSequence, its stubs one of them
    return np.random.Generator(np.random.Philox(key))


def key_of(seed: int, *keys: object) -> int:
    """A key of 63 bits for `uniform` and `fold`, from blake2b of the joined names."""
    return int.from_bytes(_digest(8, (seed, *keys)), "little") >> 1


def _mix(word: Any) -> Any:
    """A bijection of 32-bit words, integers or a tensor of them (Wellons' `lowbias32`)."""
    word = (word ^ (word >> 16)) * _FIRST & _MASK
    word = (word ^ (word >> 15)) * _SECOND & _MASK
    return word ^ (word >> 16)


def _halves(key: Tensor) -> tuple[Tensor, Tensor]:
    return key & _MASK, (key >> 32) & _MASK


def fold(key: Tensor, *numbers: int | Tensor) -> Tensor:
    """The key that belongs to `key` and these numbers, in order; a Python integer and a tensor give the same.

    Args:
        key: int64 tensor of any shape, usually 0-dimensional.
        *numbers: Integers or int64 tensors, such as step and module.

    Example:
        >>> bool(fold(torch.tensor(7), 1, 2) == fold(fold(torch.tensor(7), 1), torch.tensor(2)))
        True
    """
    for number in numbers:
        key = fold_key(key, number)
    return key


@operator
def fold_key(key: Tensor, number: int | Tensor) -> Tensor:
    """Derive a key from a key and one number."""
    low, high = _halves(key)
    low = _mix(low ^ _mix((number + 0x9E3779B9) & _MASK))
    high = _mix((high ^ _mix(((number >> 32) ^ 0x85EBCA6B) & _MASK)) + low & _MASK)
    low = _mix((low + high) & _MASK)
    folded: Tensor = ((high & 0x7FFFFFFF) << 32) | low
    return folded


@operator
def random_bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Return uniform 32-bit words in int64; element i, in row-major order, depends only on (key, i).

    Words come in blocks of `_BLOCK`: each block's start and mid-way key are hashed twice, each word then
    once, which halves the passes over memory.
    """
    count = math.prod(shape)
    assert count <= _MASK, "more elements than the counter can tell apart"
    low, high = _halves(fold(key, 0))
    block = torch.arange(-(-count // _BLOCK), device=key.device, dtype=torch.int64)
    start = _mix(_mix((block + low) & _MASK) ^ high) >> 1
    middle = _mix(_mix((block + high) & _MASK) ^ low)
    word = start[:, None] + torch.arange(_BLOCK, device=key.device, dtype=torch.int64)
    word = (word ^ (word >> 16)) * _FIRST & _MASK ^ middle[:, None]
    word = (word ^ (word >> 15)) * _SECOND & _MASK
    bits: Tensor = (word ^ (word >> 16)).reshape(-1)[:count].reshape(tuple(shape))
    return bits


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1); element i, in row-major order, depends only on (key, i).

    Args:
        key: int64 tensor, 0-dimensional; under `torch.vmap` it may be batched.
        shape: Shape of the result, known without looking at the data.
        dtype: A floating type; the narrower ones see the leading bits of the wider ones.

    Example:
        >>> key = torch.tensor(key_of(0, "noise", "3"))
        >>> bool((uniform(key, (5, 4))[:3] == uniform(key, (3, 4))).all())
        True
    """
    width = _BITS[dtype]
    return (random_bits(key, shape) >> (32 - width)).to(dtype) * 2.0**-width


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by Box and Muller: sqrt(-2 ln(1 - u1)) cos(2 pi u2)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    radius = (-2.0 * torch.log1p(-uniform(fold(key, 1), shape, wide))).sqrt()
    return (radius * torch.cos(2.0 * math.pi * uniform(fold(key, 2), shape, wide))).to(dtype)


_SECRET: ContextVar[bool] = ContextVar("secret", default=False)


@contextlib.contextmanager
def from_system() -> Iterator[None]:
    """Inside, `secret_normal` draws from the operating system: for deployments, where others know the seed."""
    token = _SECRET.set(True)
    try:
        yield
    finally:
        _SECRET.reset(token)


def secret_normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers for privacy: as `normal`, or unpredictable inside `from_system`."""
    if not _SECRET.get():
        return normal(key, shape)
    count = math.prod(shape)
    # 53 bits each, moved off zero by half a step: the logarithm is finite.
    words = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, *shape) >> np.uint64(11)
    first, second = (words.astype(np.float64) + 0.5) / 2.0**53
    return torch.from_numpy(np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * math.pi * second)).to(key.device)
