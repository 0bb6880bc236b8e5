"""What the host asks the device in a round: one question, whatever the method, and little to do for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom import reducers, server, tree
from fedloom.engines.vectorised import VectorisedEngine
from tests.engines.test_critical_path import Calls
from tests.helpers import bn_mlp, everything, federation, fit, gap, questions_of_rounds, run_of

DATA = federation((64, 64, 64, 64, 64, 64))
OPTIONS: dict[str, Any] = {"cohort": 4, "epochs": 1, "batch_size": 64, "evaluate": {"every": 0}, "rounds": 6}


def engine() -> VectorisedEngine:
    return VectorisedEngine(step="graphed")


@pytest.mark.parametrize("method", ["fedmap", "fednova", "qfedavg", "fedavg"])
def test_weights_that_clients_send_are_not_asked_for(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay on the device, with the same result; the round waits once."""
    plain = fit(method, bn_mlp(), DATA, engine=engine(), **OPTIONS)
    monkeypatch.setattr(reducers, "_of_the_host", lambda value: False)
    rounds, after = questions_of_rounds(monkeypatch)
    found = fit(method, bn_mlp(), DATA, engine=engine(), **OPTIONS, callbacks=[after])
    assert rounds[1:5] == [["answer"]] * 4
    assert gap(everything(plain), everything(found)) < 1e-12


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_on_the_device_that_add_up_to_nothing_are_an_error(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducers, "_of_the_host", lambda value: False)
    monkeypatch.setattr(reducers, "_uploaded", lambda values: values[0].new_full((len(values),), weight).double())
    with pytest.raises(fl.RunError, match="weights of 'delta' do not add up"):
        fit("fednova", bn_mlp(), DATA, engine=engine(), **OPTIONS)


def test_weights_on_the_device_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logarithms that would underflow, values of two types, and half precision, for which the host is asked."""
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0, dtype=torch.float64)}
    messages = [
        {"e": {k: (i + 1) * v for k, v in values.items()}, "q": {"weight": torch.full(shape, w)}}
        for i, (shape, w) in enumerate([((), -5000.0), ((1,), -5001.0)])
    ]
    reducer = reducers.mean("q", log=True)
    expected = reducer.reduce("e", messages, [1, 1])
    monkeypatch.setattr(reducers, "_of_the_host", lambda value: False)
    found, unsure = reducers.reduced({"e": ("e", reducer)}, messages, [1, 1])
    assert gap(found["e"], expected) < 1e-6
    assert float(found["e"]["b"]) == pytest.approx(float(expected["b"]), rel=1e-15)
    assert [v.dtype for v in found["e"].values()] == [torch.float32, torch.float64]
    (weights,) = unsure.values()
    assert weights.tolist() == pytest.approx(reducer.weights(messages, [1, 1]), rel=1e-15)
    halves = [{**m, "e": {"a": m["e"]["a"].bfloat16()}} for m in messages]
    assert not reducers.reduced({"e": ("e", reducer)}, halves, [1, 1])[1]


def test_entries_with_the_same_weights_are_added_up_together() -> None:
    """To the bit as each by itself, in the order in which they are wanted."""
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
    calls = Calls()
    with calls:
        found, _ = reducers.reduced(wanted, messages, [5, 1, 2, 7])
    assert calls.made["aten._foreach_add_.List"] == 2 * 3
    assert list(found) == list(wanted)
    for name, (entry, reducer) in wanted.items():
        alone = reducer.reduce(entry, messages, [5, 1, 2, 7])
        assert all(torch.equal(found[name][k], v) for k, v in alone.items())


def test_the_host_groups_clients_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAIMS: what it has of clients' bodies is its own."""
    rounds, after = questions_of_rounds(monkeypatch, lambda value: value.shape == (4,))
    fit("fedaims", fl.models.mlp(6, 3, hidden=(8, 8, 8)), DATA, engine=engine(), **OPTIONS, callbacks=[after])
    assert rounds[1:5] == [["answer"]] * 4


@pytest.mark.parametrize(
    ("method", "most"), [("fedavg", 12), ("scaffold", 14), ("fedavg + lag(k=1)", 120), ("fedaims", 79), ("fedmap", 22)]
)
def test_few_operations_are_made_of_the_replies(method: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the replies of a round to the server after it, the answer included."""
    found = list[int]()
    begin, aggregate = server.Sorting.__init__, server.Sorting.aggregate
    now = list[Calls]()

    def begun(self: server.Sorting, *args: Any) -> None:
        now.append(Calls())
        now[0].__enter__()
        begin(self, *args)

    def done(self: server.Sorting, *args: Any) -> server.ServerState:
        made = aggregate(self, *args)
        now[0].__exit__(None, None, None)
        found.append(now.pop().made.total())
        return made

    monkeypatch.setattr(server.Sorting, "__init__", begun)
    monkeypatch.setattr(server.Sorting, "aggregate", done)
    monkeypatch.setattr(VectorisedEngine, "foresee", lambda *args: None)
    monkeypatch.setattr(server, "foresee", lambda *args: None)
    model = fl.models.mlp(6, 3, hidden=(8, 8, 8))
    options = {**OPTIONS, "cohort": 5, "rounds": 8, "engine": engine(), "precision": "fp32", "device": "cpu"}
    fit(method, model, federation((64,) * 8), **options)
    assert max(found[3:7]) <= most


def test_replies_of_several_waves_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wave's largest size is asked for once; a client that is not finite spoils no other of its wave, nor another wave."""
    plain = server.Sorting.__init__

    def spoilt(self: server.Sorting, bound: Any, state: Any, replies: Any) -> None:
        name = next(iter(replies[4].message["delta"]))
        replies[4].message["delta"][name].fill_(math.nan)
        replies[4].size.fill_(math.nan)
        plain(self, bound, state, replies)

    monkeypatch.setattr(server.Sorting, "__init__", spoilt)
    made = VectorisedEngine(step="graphed", wave=2)
    result = fit("fedavg", bn_mlp(), DATA, engine=made, **{**OPTIONS, "cohort": 6, "rounds": 2})
    rejected = [[r["client"] for r in record["rejected"]] for record in result.history]
    assert rejected == [[run_of(result).roster.ids[4]]] * 2


def test_one_reply_of_a_wave_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies side by side is alike: its names and shapes, and the bytes it takes."""
    looked, counted = list[str](), list[int]()
    fault, size = server._fault, tree.size_in_bytes

    def looking(bound: Any, reply: Any, expected: Any) -> str | None:
        looked.append(reply.id)
        return fault(bound, reply, expected)

    def counting(values: Any) -> int:
        counted.append(1)
        return size(values)

    monkeypatch.setattr(server, "_fault", looking)
    options = {**OPTIONS, "cohort": 6, "rounds": 1}
    alone = fit("scaffold", bn_mlp(), DATA, **options)
    monkeypatch.setattr(tree, "size_in_bytes", counting)
    looked.clear()
    waves = fit("scaffold", bn_mlp(), DATA, engine=VectorisedEngine(step="graphed", wave=2), **options)
    assert looked == ["0", "2", "4"]
    assert len(counted) < 6 * 3
    for field in ("bytes_up_by_kind", "bytes_down_by_kind"):
        assert alone.history[0][field] == waves.history[0][field]


def test_no_bar_no_bar_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.progress.Progress.update", lambda *args, **more: pytest.fail("nobody sees it"))
    fit("fedavg", bn_mlp(), DATA, engine=engine(), **OPTIONS)


def test_gates_of_a_device_are_made_once_a_set() -> None:
    names, cpu = ("a", "b"), torch.device("cpu")
    first, again, other = (
        server._gates_on(cpu, torch.float32, names, frozenset(off)) for off in (("b",), ("b",), ("a",))
    )
    assert {n: float(v) for n, v in first.items()} == {"a": 1.0, "b": 0.0}
    assert {n: float(v) for n, v in other.items()} == {"a": 0.0, "b": 1.0}
    assert all(again[n] is v for n, v in first.items())
    assert first["a"].data_ptr() != first["b"].data_ptr()  # captured sweeps tell tensors by where they lie
