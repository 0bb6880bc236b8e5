"""Every method gives the loop engine's numbers in float64 with captured and with compiled steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine, compiled
from tests.golden.cases import NETWORKS, play, tensors_of, texts
from tests.helpers import gap

FAST = {
    ("mlp", "fedmap"),
    ("mlp", "scaffold + lag"),
    ("mlp", "feddbe"),
    ("cnn", "fedaims"),
    ("cnn", "ditto"),
    ("cnn", "fedavg + isr(points=2)"),
    ("gru", "fedavg"),
}
"""Cases of different kinds: carried values, sweeps, several phases, copies of the model, taps."""
OPTIMIZERS = {"mlp": fl.adam(1e-2, weight_decay=1e-3)}
CASES = [
    pytest.param(network, text, marks=[] if (network, text) in FAST else pytest.mark.slow)
    for network in NETWORKS
    for text in texts()
]


def tensors(network: str, text: str, engine: Any) -> dict[str, Tensor]:
    options = {"optimizer": OPTIMIZERS[network]} if network in OPTIMIZERS else {}
    return tensors_of(play(text, network, engine, precision="fp64", **options))


@cache
def expected(network: str, text: str) -> dict[str, Tensor]:
    return tensors(network, text, "loop")


@pytest.mark.parametrize("step", ["graphed", "compiled"])
@pytest.mark.parametrize(("network", "text"), CASES)
def test_parity(network: str, text: str, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps run the traced graph: what the compiler makes of it has tests of its own."""
    monkeypatch.setattr(compiled, "fused", lambda graph, inputs: graph.forward)
    engine = VectorisedEngine(step=step)
    assert gap(expected(network, text), tensors(network, text, engine)) < 1e-9
    assert engine.facts()["events"] == []
