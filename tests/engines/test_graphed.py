"""Captured steps: on a CPU the same code runs uncaptured, so that what goes into and out of an arena can be tested."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom import server
from fedloom.engines.vectorised import VectorisedEngine, captured
from fedloom.engines.vectorised.prefetch import Prefetched
from tests.helpers import bn_mlp, dropout_mlp, everything, federation, fit, gap, mlp, questions_of_rounds

DATA = federation((1, 7, 64, 65, 200))
METHODS = [
    "fedavg",
    "scaffold",
    "fedrep",
    "ditto",
    "pfedme",
    "fedaims",
    "fedmap",
    "feddbe",
    "peravg",
    "fedavg + isr + lag(k=1)",
]


@pytest.mark.parametrize("method", METHODS)
def test_parity(method: str) -> None:
    plain = method.startswith("scaffold")
    for make, optimizer in ((bn_mlp(), fl.sgd(0.05, momentum=0.0 if plain else 0.9)), (dropout_mlp(), fl.adam(1e-2))):
        engine = VectorisedEngine(step="graphed")
        options = {"cohort": 4, "epochs": 1, "batch_size": 64, "optimizer": optimizer}
        a, b = (fit(method, make, DATA, engine=e, **options) for e in ("loop", engine))
        assert gap(everything(a), everything(b)) < 1e-10
        assert engine.captured.known
        assert engine.captured.notes == []


@pytest.mark.parametrize("method", ["fedavg", "fedavg_ft + isr"])
def test_one_client_that_keeps_its_optimiser(method: str) -> None:
    engines = ["loop", *(VectorisedEngine(step=kind) for kind in ("mapped", "graphed"))]
    options = {"mode": "centralised", "epochs": 1, "batch_size": 64, "optimizer": fl.adam(1e-2)}
    a, *others = (everything(fit(method, dropout_mlp(), DATA, engine=e, **options)) for e in engines)
    for b in others:
        assert gap(a, b) < 1e-10


def test_what_clients_keep_does_not_lie_in_the_arena() -> None:
    engine = VectorisedEngine(step="graphed")
    result = fit("fedper", bn_mlp(), DATA, engine=engine, cohort=4, epochs=1, batch_size=64)
    assert result.run is not None
    mine = {t.untyped_storage().data_ptr() for a in engine.captured.known.values() for t in a.mutable()}
    kept = [v for c in result.run.clients.values() for v in c.leaves.values()]
    assert not mine & {v.untyped_storage().data_ptr() for v in [*kept, *result.run.state.leaves.values()]}
    assert kept
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in kept)


@pytest.mark.parametrize("method", ["fedavg", "fedmap", "fedper", "fedavg + lag(k=1)"])
def test_rounds_of_new_clients_and_of_others_use_the_same_arena(method: str) -> None:
    engine = VectorisedEngine(step="graphed")
    data = federation((128,) * 6)
    fit(method, bn_mlp(), data, engine=engine, rounds=6, cohort=3, epochs=1, batch_size=64, evaluate={"every": 0})
    assert len(engine.captured.known) == 1


def test_the_next_round_is_prefetched_before_replies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches laid out ahead are those of the loop engine, and they are used; stragglers and dropouts included."""
    engine, waiting = VectorisedEngine(step="graphed"), list[bool]()
    confirm = server.confirm

    def confirmed(pending: server.PendingRound) -> tuple[server.ServerState, server.Outcome]:
        waiting.append(engine.prefetched._next is not None)
        return confirm(pending)

    monkeypatch.setattr(server, "confirm", confirmed)
    odd = {"dropout": 0.3, "stragglers": 0.5}
    for options in ({}, {"participation": odd}):
        waiting.clear()
        a, b = (
            fit("ditto", bn_mlp(), DATA, engine=e, rounds=4, cohort=3, batch_size=16, **options)
            for e in ("loop", engine)
        )
        assert gap(everything(a), everything(b)) < 1e-10
        assert waiting[4:] == [True, True, True, False]
        assert engine.prefetched._next is None


@pytest.mark.parametrize("method", ["fedavg", "ditto", "scaffold"])
def test_a_round_waits_for_the_device_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the replies (whether they are finite, and their losses) and for the server's leaves; steps do not count."""
    rounds, after = questions_of_rounds(monkeypatch)
    options = {"cohort": 4, "epochs": 1, "batch_size": 64, "evaluate": {"every": 0}, "callbacks": [after]}
    fit(method, bn_mlp(), DATA, engine=VectorisedEngine(step="graphed"), rounds=4, **options)
    assert rounds[1:3] == [["tolist"]] * 2


def test_a_phase_that_cannot_be_captured_goes_on_mapped() -> None:
    engine = VectorisedEngine(step="graphed")
    a, b = (
        fit("fedmap(implicit=True)", bn_mlp(), DATA, engine=e, cohort=4, epochs=1, batch_size=64)
        for e in ("loop", engine)
    )
    assert gap(everything(a), everything(b)) < 1e-10
    assert "mapped, not captured" in engine.captured.notes[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", METHODS)
def test_parity_on_cuda(method: str) -> None:
    options = {"cohort": 4, "epochs": 1, "batch_size": 64, "device": "cuda"}
    a, b = (fit(method, bn_mlp(), DATA, engine=e, **options) for e in ("loop", VectorisedEngine(step="graphed")))
    assert gap(everything(a), everything(b)) < 1e-9


def test_garbage_is_collected_only_after_graphs_were_dropped() -> None:
    steps = captured.CapturedSteps()
    assert steps.dropped, "an earlier run's graphs may still be there"
    steps.dropped = False
    for i in range(captured.KEPT_BUFFERS):
        steps._keep(i, Any)
    assert not steps.dropped
    steps._keep(-1, Any)
    assert steps.dropped
    assert len(steps.known) == captured.KEPT_BUFFERS


def test_no_room_for_the_next_round_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is laid out ahead competes with this round's replies: it is then laid out later."""
    prefetch, tried = Prefetched.prefetch, list[int]()

    def full(self: Prefetched, *args: Any) -> None:
        prefetch(self, *args)
        tried.append(1)
        raise torch.OutOfMemoryError("no room")

    data, options = federation((20, 30, 40)), {"rounds": 3, "epochs": 1, "batch_size": 16}
    a = fit("fedavg", bn_mlp(), data, engine=VectorisedEngine(step="graphed"), **options)
    monkeypatch.setattr(Prefetched, "prefetch", full)
    b = fit("fedavg", bn_mlp(), data, engine=VectorisedEngine(step="graphed"), **options)
    assert tried
    assert gap(everything(a), everything(b)) == 0


@pytest.mark.parametrize("step", ["graphed", "compiled"])
def test_what_a_run_has_told_is_not_taken_for_that_of_a_later_one(step: Any) -> None:
    """Runs are told from each other by addresses, which are given again once a run is gone."""
    engine = VectorisedEngine(step=step)
    for make in (mlp(), bn_mlp(), dropout_mlp()) * 3:
        options = {"rounds": 1, "epochs": 1, "batch_size": 8}
        a, b = (everything(fit("fedavg", make, federation((8, 8)), engine=e, **options)) for e in ("loop", engine))
        gc.collect()
        assert gap(a, b) < 1e-10
