"""Every registered method and plug-in gives the loop engine's numbers on the vectorised engine.

A new method is covered as soon as it is registered; ``CASES`` holds only those that need arguments of their own.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.clients import states
from fedloom.clients.stop import StopRule
from fedloom.rounds import server
from fedloom.spec import text_form
from fedloom.spec.method import Method
from tests.helpers import AWKWARD, bn_mlp, dropout_mlp, everything, federation, fit, gap, shared, small_cnn

METHOD_ARGUMENTS = {"fedaf": "(image_steps=4, image_lr=0.1, server_epochs=2)"}
"""Arguments for methods whose defaults ask for very many steps, in which rounding grows."""

PLUGIN_ARGUMENTS: dict[str, str] = {}
"""Arguments for plug-ins that have no defaults, or whose defaults do nothing on a tiny network."""


PLUGIN_BASES = {"account": "fedavg + clip(1.0) + noise(0.1)"}
"""What a plug-in that cannot stand on fedavg alone follows."""


def texts() -> list[str]:
    found = [name + METHOD_ARGUMENTS.get(name, "") for name in fl.list_methods()]
    for name in fl.list_plugins():
        entry = fl.describe(name)
        arguments = PLUGIN_ARGUMENTS.get(name, "()")
        if arguments != "()" or all(d is not inspect.Parameter.empty for d in entry.parameters.values()):
            found.append(f"{PLUGIN_BASES.get(name, 'fedavg')} + {name}{arguments}")
    return found


@pytest.fixture(autouse=True)
def stages_are_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is aggregated again where a reply turns out to be bad: stages must leave alone what they are given."""
    once = server.aggregate

    def twice(*args: Any, **options: Any) -> states.ServerState:
        first, second = once(*args, **options), once(*args, **options)
        pairs = [(first.leaves, second.leaves), *((first.memory[o], m) for o, m in second.memory.items())]
        for before, after in pairs:
            assert list(before) == list(after)
            assert all(torch.equal(before[k], after[k]) for k in after)
        return second

    monkeypatch.setattr(server, "aggregate", twice)


def compare(method: str | Method, model: Any, data: fl.Federation, tolerance: float, **options: Any) -> None:
    try:
        a = fit(method, model, data, engine="loop", **options)
    except fl.UserError as error:
        pytest.skip(f"refused: {error}")
    b = fit(method, model, data, engine="vectorised", **options)
    left, right = everything(a), everything(b)
    assert set(left) == set(right)
    assert gap(left, right) <= tolerance
    for mine, theirs in zip(a.history, b.history, strict=True):
        assert mine["skipped"] == theirs["skipped"]
        assert mine["bytes_up"] == theirs["bytes_up"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=max(tolerance * 100, 1e-9), nan_ok=True)


@pytest.mark.parametrize("method", texts())
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_awkward_cohort_with_batch_norm(method: str, optimizer: str) -> None:
    chosen = fl.sgd(0.05, momentum=0.9, weight_decay=1e-3) if optimizer == "sgd" else fl.adam(1e-2)
    data = federation(AWKWARD, one_class=2)
    compare(method, bn_mlp(), data, 1e-10, cohort=4, epochs=1, batch_size=64, optimizer=chosen)


@pytest.mark.parametrize("method", texts())
def test_dropout(method: str) -> None:
    compare(method, dropout_mlp(), federation((7, 12, 3)), 1e-10, epochs=2, batch_size=4)


@pytest.mark.parametrize("method", texts())
def test_one_client(method: str) -> None:
    compare(method, bn_mlp(track=False), federation((11,)), 1e-10, epochs=1, batch_size=4)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedrep", "ditto"])
def test_pictures_with_in_place_activation(method: str) -> None:
    compare(method, small_cnn(), federation((6, 9, 2), (1, 6, 6)), 1e-10, batch_size=4)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto"])
def test_float32(method: str) -> None:
    compare(method, bn_mlp(), federation(AWKWARD), 1e-4, precision="fp32", epochs=1, batch_size=64)


def test_bad_client_leaves_the_others_alone() -> None:
    data = federation((8, 8, 8))
    poisoned = torch.full_like(data[1].train.x, 1e38)  # type: ignore[arg-type]
    bad = fl.Federation.from_arrays(
        [((c.train.x if c.id != "1" else poisoned, c.train.y), (c.test.x, c.test.y)) for c in data if c.test]
    )
    options = {"rounds": 1, "epochs": 1, "batch_size": 4, "precision": "fp32", "optimizer": fl.sgd(10.0)}
    for engine in ("loop", "vectorised"):
        good, hurt = (
            fit("local", lambda: nn.Sequential(nn.Linear(6, 3)), d, engine=engine, **options) for d in (data, bad)
        )
        assert [r["client"] for r in hurt.history[0]["rejected"]] == ["1"]
        left, right = everything(good), everything(hurt)
        for name in right:
            if not name.startswith("1 "):
                assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_phase_that_ends_by_itself_where_the_device_is_asked_now_and_then(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: nobody moves who has stopped, and a client alone is asked at every step."""
    options: dict[str, Any] = {"rounds": 3, "cohort": 2, "epochs": 1}
    plain = fit("fedala", bn_mlp(), federation((9, 14, 5)), engine="loop", **options)
    monkeypatch.setattr(StopRule, "may_stop", lambda self: self.step_count % 16 == 0)
    found = fit("fedala", bn_mlp(), federation((9, 14, 5)), engine=engine, **options)
    assert gap(everything(plain), everything(found)) < 1e-10


@pytest.mark.parametrize("first", ["ditto", "fedavg + isr", "fedaims", "fedala", "scaffold"])
def test_a_method_that_hands_over_to_one_with_fewer_leaves(first: str) -> None:
    """The second one finds its own leaves and no others."""
    method, data = replace(text_form.method(first), then=(2, fl.fedavg())), federation((6, 9, 5), (1, 6, 6))
    compare(method, small_cnn(), data, 1e-10, rounds=4, batch_size=4)
    found, plain = (fit(m, small_cnn(), data, rounds=4, batch_size=4) for m in (method, "fedavg"))
    assert shared(found).keys() == shared(plain).keys()
