"""Means and negative entropies of a cohort's features against torch's, in float64."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.spec.tap_losses import both_terms
from fedloom.tasks import TASKS
from fedloom.tasks.base import classifier_loss
from fedloom.tasks.batch import Batch
from tests.gpu.helpers import DEVICE, compare, count_calls, kernels, random

pytest.importorskip("triton")
from fedloom.gpu import tap_summary


@kernels
@pytest.mark.parametrize("many", [1, 256], ids=["many rows", "few rows"])
@pytest.mark.parametrize("shape", [(3, 4, 5, 7, 6), (2, 2, 70, 129), (1, 2, 1, 3), (2, 3, 4200, 2), (1, 1, 3, 1100)])
def test_means_and_negative_entropies(shape: tuple[int, ...], many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap_summary, "MANY_ROWS", many)
    z = (random(*shape) * 30).detach().requires_grad_()  # some probabilities are almost 1

    def ours(z: Tensor) -> Tensor:
        summary = tap_summary.channel_summary(z)
        assert summary is not None
        return torch.cat([summary[0], summary[1][:, None]], 1)

    for part in (slice(None), slice(0, shape[2]), slice(shape[2], None)):  # both outputs, or one
        logs = F.log_softmax(z, 2)
        entropy = (logs.exp() * logs).sum(2).flatten(2).mean(2)
        theirs = torch.cat([z.flatten(3).mean(3), entropy[..., None]], 2)
        compare(torch.vmap(ours)(z)[..., part], theirs[..., part], [z])


@kernels
def test_both_terms_of_a_feature_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    z, weight, bias = random(2, 4, 3, 5, 6), random(2, 7, 3), random(2, 7)
    y, mask = torch.arange(8, device=DEVICE).view(2, 4) % 7, torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]], device=DEVICE)
    calls = count_calls(monkeypatch, tap_summary._CohortSummary)

    def terms(task: str, z: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        batch = Batch(y, y, mask)
        view: Any = SimpleNamespace(
            structure=SimpleNamespace(task=task),
            batch=batch,
            classifier_loss=partial(classifier_loss, TASKS["classification"], batch),
        )
        return torch.stack(both_terms(view, z, weight, bias))

    inputs = [z, weight, bias]
    theirs = torch.stack([terms("classification", *(t[i] for t in (*inputs, y, mask))) for i in range(2)])
    assert not calls
    compare(torch.vmap(lambda *a: terms("classification", *a))(*inputs, y, mask), theirs, inputs)
    assert len(calls) == 1
