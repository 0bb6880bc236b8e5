"""Noise of a cohort on CUDA: word for word that of one client after another."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from fedloom import kernels, rng

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
cuda = pytest.mark.skipif(
    DEVICE == "cpu" and not (kernels.cohort.INTERPRETED and find_spec("triton")),
    reason="needs a CUDA device, or TRITON_INTERPRET=1 and triton",
)
KEYS = torch.tensor([rng.key_of(seed, "noise") for seed in range(5)] + [0, 2**63 - 1])


@cuda
@pytest.mark.parametrize("shape", [(8,), (3, 5, 7), (1024,), (2, 1025), (1,)])
def test_words(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(kernels.counters._Bits, "apply", _noting(launched, kernels.counters._Bits.apply))
    found = torch.vmap(lambda key: rng.bits(key, shape))(KEYS.to(DEVICE))
    assert launched
    assert torch.equal(found.cpu(), torch.stack([rng.bits(key, shape) for key in KEYS]))


@cuda
def test_keys() -> None:
    steps = torch.tensor([0, 1, 2, 2**32, 2**40 + 7, 3, 4])
    for number in (0, 1, 2**33 + 1):
        found = torch.vmap(lambda key, step, n=number: rng.fold(key, n, step))(KEYS.to(DEVICE), steps.to(DEVICE))
        expected = torch.stack([rng.fold(key, number, step) for key, step in zip(KEYS, steps, strict=True)])
        assert torch.equal(found.cpu(), expected)


def _noting(launched: list[int], apply):  # type: ignore[no-untyped-def]
    def noted(*args):  # type: ignore[no-untyped-def]
        launched.append(1)
        return apply(*args)

    return noted
