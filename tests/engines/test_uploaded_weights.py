"""Weights that clients upload: reducers give the same numbers on the device and on the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.spec import reducers
from tests.helpers import bn_mlp, everything, federation, fit, gap

DATA = federation((64, 64, 64, 64, 64, 64))
OPTIONS: dict[str, Any] = {"cohort": 4, "epochs": 1, "batch_size": 64, "evaluate": {"every": 0}, "rounds": 6}


def engine() -> VectorisedEngine:
    return VectorisedEngine(step="graphed")


@pytest.mark.parametrize("method", ["fedmap", "fednova", "qfedavg", "fedavg"])
def test_weights_on_the_device_and_on_the_host(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = fit(method, bn_mlp(), DATA, engine=engine(), **OPTIONS)
    monkeypatch.setattr(reducers, "on_host", lambda value: False)
    on_device = fit(method, bn_mlp(), DATA, engine=engine(), **OPTIONS)
    assert gap(everything(on_host), everything(on_device)) < 1e-12


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_on_the_device_with_a_bad_sum_are_an_error(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If leaves are not finite, the host reads the weights again, so that the error names the cause."""
    monkeypatch.setattr(reducers, "on_host", lambda value: False)
    monkeypatch.setattr(reducers, "_as_vector", lambda values: values[0].new_full((len(values),), weight).double())
    monkeypatch.setattr(reducers.devices, "read_scalars", lambda values: [weight] * len(values))
    with pytest.raises(fl.RunError, match="the weights of the round add up to"):
        fit("fednova", bn_mlp(), DATA, engine=engine(), **OPTIONS)


def test_weights_on_the_device_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithms that would underflow, values of two types, and half precision, whose weights the host reads."""
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0, dtype=torch.float64)}
    messages = [
        {"e": {k: (i + 1) * v for k, v in values.items()}, "q": {"weight": torch.full(shape, w)}}
        for i, (shape, w) in enumerate([((), -5000.0), ((1,), -5001.0)])
    ]
    reducer = reducers.mean("q", log=True)
    expected = reducer.reduce("e", messages, [1, 1])
    monkeypatch.setattr(reducers, "on_host", lambda value: False)
    found = reducers.reduce_entries({"e": ("e", reducer)}, messages, [1, 1])
    assert gap(found["e"], expected) < 1e-6
    assert float(found["e"]["b"]) == pytest.approx(float(expected["b"]), rel=1e-15)
    assert [v.dtype for v in found["e"].values()] == [torch.float32, torch.float64]
    weights = reducer.sum_weights(messages, [1, 1], "e")
    assert weights.tolist() == pytest.approx(reducer.weights(messages, [1, 1]), rel=1e-15)
    halves = [{**m, "e": {"a": m["e"]["a"].bfloat16()}} for m in messages]
    assert isinstance(reducer.sum_weights(halves, [1, 1], "e"), list)
    assert isinstance(reducer.sum_weights(messages, [1, 1], "e", read_weights=True), list)


def test_entries_reduced_together_are_those_reduced_alone() -> None:
    """They are equal bit for bit and in the order of the request."""
    draw = torch.Generator().manual_seed(0)
    messages = [
        {e: {k: torch.randn(3, generator=draw) for k in "ab"} for e in ("delta", "control", "other")}
        | {"counts": {"sum": torch.randn(2, 3, generator=draw), "count": torch.rand(2, generator=draw) * 9}}
        for _ in range(4)
    ]
    wanted = {
        "delta": ("delta", reducers.mean("uniform")),
        "all": ("delta", reducers.stack()),
        "control": ("control", reducers.mean("uniform")),
        "counts": ("counts", reducers.ratio()),
        "other": ("other", reducers.mean()),
    }
    found = reducers.reduce_entries(wanted, messages, [5, 1, 2, 7])
    assert list(found) == list(wanted)
    for name, (entry, reducer) in wanted.items():
        alone = reducer.reduce(entry, messages, [5, 1, 2, 7])
        assert all(torch.equal(found[name][k], v) for k, v in alone.items())
