"""Whole fits with kernels: results equal those of the loop engine, and the expected operators take part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.engines.vectorised import VectorisedEngine
from fedloom.ops import dispatch
from tests.gpu.helpers import DEVICE, kernels
from tests.helpers import everything, federation, fit, gap

USED: dict[str, set[str]] = {
    "fedavg": set(),
    "fedavg + isr": {"channel_summary", "classifier_loss"},
    "fedaims": {"classifier_loss"},
    "fedavg + lag": set(),
    "fedmap(sigma2=2.0)": {"half_squared_distance"},
    "fedprox(mu=0.5)": {"half_squared_distance"},
    "scaffold": {"difference_inner_product"},
}
"""Operators of each method beside those of the network."""
NETWORK = {"batch_norm", "convolution", "fuse_layers", "linear", "mean_cross_entropy", "random_bits", "fold_key"}


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
        for i, o in ((4, 4), (4, 6))
    )
    return nn.Sequential(*blocks, nn.BatchNorm2d(6), nn.Dropout(0.2), nn.Flatten(), nn.Linear(24, 3))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count by operator how often its implementation returned a result."""
    counts: Counter[str] = Counter()

    def counted(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(implementation)
        def call(*args: Any, **named: Any) -> Any:
            result = implementation(*args, **named)
            counts[name] += result is not None or name == "fuse_layers"  # it returns None
            return result

        return call

    for name, implementation in dict(dispatch._faster).items():
        monkeypatch.setitem(dispatch._faster, name, counted(name, implementation))
    return counts


@kernels
@pytest.mark.slow
@pytest.mark.parametrize("method", USED)
def test_methods_equal_the_loop_engine(method: str, results: Counter[str]) -> None:
    data = federation((9, 14, 5), (4, 8, 8), classes=3)
    options = {"rounds": 2, "epochs": 1, "device": DEVICE, "precision": "fp64"}
    loop = everything(fit(method, model, data, engine="loop", **options))
    results.clear()
    vectorised = everything(fit(method, model, data, engine=VectorisedEngine(step="mapped"), **options))
    assert gap(loop, vectorised) < 1e-9
    assert {name for name, count in results.items() if count} >= NETWORK | USED[method]
