"""Captured sweeps: on a CPU the same code runs uncaptured, so that what goes to and from fixed addresses can be tested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedloom as fl
from fedloom.batches import in_order
from fedloom.clients.runner import ClientRunner
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.engines.vectorised.captured import CapturedSteps
from fedloom.engines.vectorised.rows import sweep_shapes
from fedloom.slots import Sweep
from fedloom.tasks.builtin import TASKS
from fedloom.types import Batch, Leaves, Seen
from fedloom.view import View
from tests.helpers import bn_mlp, everything, federation, fit, gap, small_cnn

UNEQUAL = federation((1, 7, 64, 65, 200, 300))
EQUAL = federation((140,) * 4)
METHODS = ["fedmap", "fedaims", "fedas", "fedpac", "fedaf(image_steps=2, server_epochs=1)", "peravg"]


def options(**others: Any) -> dict[str, Any]:
    return {"rounds": 6, "epochs": 1, "batch_size": 64, "optimizer": fl.sgd(0.02), "evaluate": {"every": 1}} | others


def swept(engine: VectorisedEngine) -> set[str]:
    """Names of the sweeps of which a graph is kept."""
    return {key[1].name for key, sweep in engine.captured.sweeps.items() if sweep.graphs}  # type: ignore[index]


def same(a: fl.Result, b: fl.Result, tolerance: float = 1e-10) -> None:
    assert gap(everything(a), everything(b)) < tolerance
    for mine, other in zip(a.history, b.history, strict=True):
        assert mine["accuracy"] == pytest.approx(other["accuracy"], abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_parity(method: str) -> None:
    """Clients come and go, their memory is at first everybody's and then their own, and their sizes differ."""
    engine = VectorisedEngine(step="graphed")
    a, b = (fit(method, bn_mlp(), UNEQUAL, engine=e, **options(cohort=4)) for e in ("loop", engine))
    same(a, b)
    names = {s.name for s in a.run.bound.method.schedule.round if isinstance(s, Sweep)} if a.run is not None else set()
    assert swept(engine) == {"test", *names}
    assert engine.captured.notes == []


def test_statistics_whose_type_depends_on_the_mask() -> None:
    """In float64 a count of rows is of single precision where nothing is masked: 1 / 3 of it must not be rounded so."""
    found = list[Leaves]()

    def third(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"loss": batch.count() / 3 if batch.mask is None else batch.count() / 3 + 0 * view.loss()}

    method = fl.method("qfedavg")
    steps = [replace(s, fn=third) if isinstance(s, Sweep) else s for s in method.schedule.round]
    method = replace(method, schedule=replace(method.schedule, round=tuple(steps)))
    plain = CapturedSteps.accumulate

    def total(self: CapturedSteps, *args: Any) -> Leaves:
        found.append(plain(self, *args))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedSteps, "accumulate", total)
        data, engine = federation((396, 396, 131)), VectorisedEngine(step="graphed")
        fit(method, bn_mlp(), data, engine=engine, **options(evaluate={"every": 0}))
    sums = [f["loss"] for f in found if "loss" in f and len(f) == 1]
    assert len(sums) == 6
    assert all(torch.equal(s, sums[0]) and s.dtype == sums[0].dtype for s in sums)
    assert swept(engine) == {"qfedavg"}


class _Convolutions(TorchDispatchMode):
    """Notes the filters of every convolution, and into how many groups they are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[tuple[int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.add((args[1].shape[0], args[8]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", ["mapped", "graphed"])
@pytest.mark.parametrize(("method", "groups"), [("fedavg", 1), ("fedper", 1), ("local", 4)])
def test_layers_that_all_clients_share_take_all_rows_at_once(
    method: str, groups: int, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation of four clients: one convolution with the shared filters, or one with everybody's, in four groups."""
    draw = np.random.default_rng(0)
    sizes = (9, 9, 7, 5)
    rows = [(draw.normal(size=(n, 1, 8, 8)), draw.integers(0, 3, n)) for n in sizes]
    data = fl.Federation.from_arrays([(r, r) for r in rows])
    modes, plain = list[_Convolutions](), ClientRunner.judge

    def judge(self: ClientRunner, judgement: Any) -> None:
        with _Convolutions() as mode:
            plain(self, judgement)
        modes.append(mode)

    monkeypatch.setattr(ClientRunner, "judge", judge)
    engine = VectorisedEngine(step=step)
    run = options(batch_size=4, rounds=4, device="cpu")  # elsewhere kernels take the place of convolutions
    found = fit(method, small_cnn(), data, engine=engine, **run)
    assert modes
    assert all({g for _, g in mode.seen} == {groups} for mode in modes)
    same(fit(method, small_cnn(), data, **run), found)


def test_what_changes_from_round_to_round_is_not_baked_in() -> None:
    def by_round(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"loss": view.loss() * batch.count() * seen.round}

    method = fl.method("qfedavg")
    steps = [replace(s, fn=by_round) if isinstance(s, Sweep) else s for s in method.schedule.round]
    method = replace(method, schedule=replace(method.schedule, round=tuple(steps)))
    engine = VectorisedEngine(step="graphed")
    a, b = (fit(method, bn_mlp(), UNEQUAL, engine=e, **options()) for e in ("loop", engine))
    same(a, b)
    assert swept(engine) == {"test"}
    (note,) = engine.facts()["events"]
    assert note.startswith("sweep 'qfedavg' is mapped, not captured: client code reads round")


def test_another_model_with_the_same_shapes_has_its_own_graphs() -> None:
    """One engine for two runs: a graph of the first would give its activation to the second."""
    engine = VectorisedEngine(step="graphed")
    for activation in (torch.nn.Tanh, torch.nn.ReLU):
        make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), activation(), torch.nn.Linear(5, 3))  # noqa: B023, E731
        a, b = (fit("fedmap", make, EQUAL, engine=e, **options()) for e in ("loop", engine))
        same(a, b)


def test_kept_outputs_are_found_in_widened_batches() -> None:
    """A task without statistics keeps outputs row by row; those of padding are left out."""
    engine = VectorisedEngine(step="graphed")
    task = replace(TASKS["classification"], statistics=None, summarise=None, metrics=_share)
    a, b = (fit("fedavg", bn_mlp(), UNEQUAL, engine=e, task=task, **options(rounds=3)) for e in ("loop", engine))
    same(a, b)


def _share(output: torch.Tensor, y: torch.Tensor) -> dict[str, float | None]:
    return {"accuracy": float((output.argmax(-1) == y).double().mean())}


def test_widths() -> None:
    def widths(*sizes: int, size: int | str = 128, grain: int = 32) -> list[tuple[int, bool]]:
        found = sweep_shapes([in_order(n, size) for n in sizes], size, grain)
        assert all(clients == len(sizes) for clients, _, _ in found)
        return [(width, padded) for _, width, padded in found]

    assert widths(130, 130) == [(128, False), (2, False)]
    assert widths(170, 20) == [(128, True), (64, True)]
    assert widths(129, 40) == [(129, True)]
    assert widths(20, 9, size=16) == [(16, True), (16, True)]
    assert widths(300, 9, size="full") == [(300, True)]
    assert widths(170, 20, grain=1) == [(128, True), (42, True)]


def test_clients_whose_rows_are_over_are_left_out() -> None:
    def clients(*sizes: int) -> list[int]:
        return [found[0] for found in sweep_shapes([in_order(n, 10) for n in sizes], 10, narrow=True)]

    assert clients(40, 30, 20, 10, 5) == [5, 3, 2, 1]
    assert clients(40, 5, 5, 5, 30) == [5, 5, 5, 1], "nobody in front of one who has rows is left out"
    assert clients(5, 40) == [2, 2, 2, 2]
    assert clients(40) == [1] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_parity_on_cuda(method: str, data: fl.Federation) -> None:
    engine = VectorisedEngine(step="graphed")
    a, b = (fit(method, bn_mlp(), data, engine=e, **options(cohort=4, device="cuda")) for e in ("loop", engine))
    same(a, b, 1e-9)
    assert engine.captured.sweeps
    assert engine.captured.notes == []
