"""Noise and entropies of a cohort on CUDA: noise word for word that of one client after another, entropies as torch has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import rng
from fedloom.gpu import counters, entropy
from fedloom.taps.losses import both_terms
from fedloom.types import Batch
from tests.engines.test_kernels import DEVICE, compare, cuda, random

KEYS = torch.tensor([rng.key_of(seed, "noise") for seed in range(5)] + [0, 2**63 - 1])


@cuda
@pytest.mark.parametrize("shape", [(8,), (3, 5, 7), (1024,), (2, 1025), (1,)])
def test_words(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(counters._Bits, "apply", _noting(launched, counters._Bits.apply))
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
@pytest.mark.parametrize("many", [1, 256], ids=["many rows", "few rows"])
@pytest.mark.parametrize("shape", [(3, 4, 5, 7, 6), (2, 2, 70, 129), (1, 2, 1, 3), (2, 3, 4200, 2), (1, 1, 3, 1100)])
def test_means_and_negative_entropies(shape: tuple[int, ...], many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.gpu import softmaxes

    monkeypatch.setattr(softmaxes, "MANY", many)
    z = (random(*shape) * 30).detach().requires_grad_()  # some positions are all but decided

    def ours(z: Tensor) -> Tensor:
        found = entropy.channel_summary(z)
        assert found is not None
        return torch.cat([found[0], found[1][:, None]], 1)

    for part in (slice(None), slice(0, shape[2]), slice(shape[2], None)):  # both, or a gradient of one of them alone
        logs = F.log_softmax(z, 2)
        spread = (logs.exp() * logs).sum(2).flatten(2).mean(2)
        theirs = torch.cat([z.flatten(3).mean(3), spread[..., None]], 2)
        compare(torch.vmap(ours)(z)[..., part], theirs[..., part], [z])


@cuda
def test_both_terms_of_a_feature_share_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    z, weight, bias = random(2, 4, 3, 5, 6), random(2, 7, 3), random(2, 7)
    y, mask = torch.arange(8, device=DEVICE).view(2, 4) % 7, torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]], device=DEVICE)
    launched: list[int] = []
    monkeypatch.setattr(entropy._CohortSummary, "apply", _noting(launched, entropy._CohortSummary.apply))

    def terms(task: str, z: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        batch = Batch(y, y, mask)
        view: Any = SimpleNamespace(
            structure=SimpleNamespace(task=task),
            batch=batch,
            loss=lambda output: batch.mean(F.cross_entropy(output, y, reduction="none")),
        )
        return torch.stack(both_terms(view, z, weight, bias, batch))

    inputs = [z, weight, bias]
    theirs = torch.stack([terms("classification", *(t[i] for t in (*inputs, y, mask))) for i in range(2)])
    assert not launched
    compare(torch.vmap(lambda *a: terms("classification", *a))(*inputs, y, mask), theirs, inputs)
    assert len(launched) == 1


def _noting(launched: list[int], apply):  # type: ignore[no-untyped-def]
    def noted(*args):  # type: ignore[no-untyped-def]
        launched.append(1)
        return apply(*args)

    return noted
