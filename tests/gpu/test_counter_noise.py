"""Counter noise of a cohort: equal to that of single clients bit for bit."""

from __future__ import annotations

import pytest
import torch

from fedloom import rng
from tests.gpu.helpers import DEVICE, count_calls, kernels

pytest.importorskip("triton")
from fedloom.gpu import counter_noise

KEYS = torch.tensor([rng.key_of(seed, "noise") for seed in range(5)] + [0, 2**63 - 1])


@kernels
@pytest.mark.parametrize("shape", [(8,), (3, 5, 7), (1024,), (2, 1025), (1,)])
def test_random_bits(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, counter_noise._RandomBits)
    bits = torch.vmap(lambda key: rng.random_bits(key, shape))(KEYS.to(DEVICE))
    assert calls
    assert torch.equal(bits.cpu(), torch.stack([rng.random_bits(key, shape) for key in KEYS]))


@kernels
def test_fold() -> None:
    steps = torch.tensor([0, 1, 2, 2**32, 2**40 + 7, 3, 4])
    for number in (0, 1, 2**33 + 1):
        bits = torch.vmap(lambda key, step, n=number: rng.fold(key, n, step))(KEYS.to(DEVICE), steps.to(DEVICE))
        expected = torch.stack([rng.fold(key, number, step) for key, step in zip(KEYS, steps, strict=True)])
        assert torch.equal(bits.cpu(), expected)
