"""Noise and entropies of a cohort on CUDA: noise word for word that of one client after another, entropies as torch has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import kernels, rng
from tests.engines.test_kernels import DEVICE, compare, cuda, random

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


@cuda
@pytest.mark.parametrize("shape", [(3, 4, 5, 7, 6), (2, 2, 70, 129), (1, 2, 1, 3), (2, 3, 4200, 2)])
def test_negative_entropy(shape: tuple[int, ...]) -> None:
    z = (random(*shape) * 30).detach().requires_grad_()  # some positions are all but decided

    def ours(z: Tensor) -> Tensor:
        value = kernels.negative_entropy(z)
        assert value is not None
        return value

    logs = F.log_softmax(z, 2)
    compare(torch.vmap(ours)(z), (logs.exp() * logs).sum(2), [z])


@cuda
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 11, 6, 7), (2, 2, 70, 129), (1, 2, 1, 3), (2, 3, 4200)])
@pytest.mark.parametrize("unused", [-100, 2])
def test_cross_entropies(shape: tuple[int, ...], unused: int) -> None:
    z = (random(*shape) * 30).detach().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(0, shape[2], (*shape[:2], *shape[3:]), generator=draw).to(DEVICE)
    y.view(-1)[0] = unused
    expected = F.cross_entropy(z.flatten(0, 1), y.flatten(0, 1), ignore_index=unused, reduction="none").view(y.shape)
    launched = torch.vmap(lambda z, y: kernels.cross_entropies(z, y, unused))(z, y)
    assert "CohortCrossEntropy" in type(launched.grad_fn).__name__
    compare(launched, expected, [z])


@cuda
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    x, w, b = random(3, *shape), random(3, 4, 5), random(3, 4) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    found = torch.vmap(lambda *each: kernels.linear(each[0], each[1], each[2] if bias else None))(*inputs)
    assert "CohortLinear" in type(found.grad_fn).__name__
    expected = torch.stack([F.linear(x[i], w[i], None if b is None else b[i]) for i in range(3)])
    (gradient,) = torch.autograd.grad(found.sum(), [w], retain_graph=True)
    compare(found, expected, inputs)
    assert gradient.is_contiguous(), "optimisers read it beside the weights"


def _noting(launched: list[int], apply):  # type: ignore[no-untyped-def]
    def noted(*args):  # type: ignore[no-untyped-def]
        launched.append(1)
        return apply(*args)

    return noted
