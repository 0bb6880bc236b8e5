"""Captured sweeps. On a CPU each replay runs eagerly, which tests all but the capture itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedloom as fl
from fedloom.clients.batches import in_order
from fedloom.clients.runner import ClientRunner
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.engines.vectorised.rows import sweep_shapes
from fedloom.gpu.captured_steps import CapturedSteps, SweepBuffers
from fedloom.spec.method import Method
from fedloom.spec.parts import Sweep
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tasks.builtin import TASKS
from fedloom.tensors import Leaves
from tests.helpers import bn_mlp, everything, federation, fit, gap, small_cnn

UNEQUAL = federation((1, 7, 64, 65, 200, 300))
EQUAL = federation((140,) * 4)
METHODS = ["fedmap", "fedaims", "fedas", "fedpac", "fedaf(image_steps=2, server_epochs=1)", "peravg"]


def options(**others: Any) -> dict[str, Any]:
    return {"rounds": 6, "epochs": 1, "batch_size": 64, "optimizer": fl.sgd(0.02), "evaluate": {"every": 1}} | others


class Engine(VectorisedEngine):
    """An engine with captured steps on every device, whose captured sweeps tests may read."""

    captured: CapturedSteps

    def __init__(self) -> None:
        super().__init__(step="graphed")
        self.captured = CapturedSteps(self.rows)

    def sweeps(self, *, captured: bool = True) -> list[str]:
        """Names of the sweeps whose tensors are kept, or of which a graph is kept, once a layout."""
        kept = [(key, b) for key, b in self.captured.buffers.items() if isinstance(b, SweepBuffers)]
        return [key[1].name for key, b in kept if b.graphs or not captured]  # type: ignore[index]


def swept(engine: Engine) -> set[str]:
    return set(engine.sweeps())


def same(a: fl.Result, b: fl.Result, tolerance: float = 1e-10) -> None:
    assert gap(everything(a), everything(b)) < tolerance
    for mine, other in zip(a.history, b.history, strict=True):
        assert mine["accuracy"] == pytest.approx(other["accuracy"], abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_parity(method: str) -> None:
    """Cohorts, sizes and the memory of clients differ from round to round."""
    engine = Engine()
    a, b = (fit(method, bn_mlp(), UNEQUAL, engine=e, **options(cohort=4)) for e in ("loop", engine))
    same(a, b)
    names = {s.name for s in a.run.bound.method.schedule.round if isinstance(s, Sweep)} if a.run is not None else set()
    assert swept(engine) == {"test", *names}
    assert engine.captured.notes == []


def with_statistic(fn: Any) -> Method:
    """A method whose only sweep adds up ``fn``."""
    method = fl.method("qfedavg")
    steps = [replace(s, fn=fn) if isinstance(s, Sweep) else s for s in method.schedule.round]
    return replace(method, schedule=replace(method.schedule, round=tuple(steps)))


def _third(view: View, batch: Batch, seen: Seen) -> Leaves:
    """In float64: of single precision without a mask, whose third must not be rounded so with one."""
    return {"loss": batch.count() / 3 if batch.mask is None else batch.count() / 3 + 0 * view.loss()}


def _hits(view: View, batch: Batch, seen: Seen) -> Leaves:
    """An integer without a mask, a float with one."""
    hits = batch.y == view.output.argmax(1)
    return {"loss": 1 + (hits.sum() if batch.mask is None else (hits * batch.mask).sum())}


@pytest.mark.parametrize("fn", [_third, _hits])
@pytest.mark.parametrize("sizes", [(396, 396, 131), (64, 64, 64, 50, 40)], ids=["mixed sweeps", "mixed waves"])
def test_statistics_whose_type_depends_on_the_mask(fn: Any, sizes: tuple[int, ...]) -> None:
    """Sums have the type that eager ones have, whatever waves came before."""
    engine, data = Engine(), federation(sizes)
    run = options(rounds=12, cohort=2 if len(sizes) > 3 else 3, evaluate={"every": 0})
    a, b = (fit(with_statistic(fn), bn_mlp(), data, engine=e, **run) for e in (VectorisedEngine(step="mapped"), engine))
    assert gap(everything(a), everything(b)) < 1e-6
    assert swept(engine) == {"qfedavg"}
    assert engine.captured.notes == []
    masked = [b for key, b in engine.captured.buffers.items() if isinstance(b, SweepBuffers) and True in key[3]]  # type: ignore[index]
    assert {b.sums["loss"].dtype for b in masked} == {torch.float64}


class _Convolutions(TorchDispatchMode):
    """Records the filters of every convolution, and into how many groups they are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[tuple[int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.add((args[1].shape[0], args[8]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", ["mapped", "graphed"])
@pytest.mark.parametrize(("method", "groups"), [("fedavg", 1), ("fedper", 1), ("local", 4)])
def test_a_layer_that_all_clients_share_is_computed_once_for_all_rows(
    method: str, groups: int, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation of four clients: one convolution with shared filters, or one of four groups."""
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
    run = options(batch_size=4, rounds=4, device="cpu")  # kernels replace convolutions elsewhere
    result = fit(method, small_cnn(), data, engine=engine, **run)
    assert modes
    assert all({g for _, g in mode.seen} == {groups} for mode in modes)
    same(fit(method, small_cnn(), data, **run), result)


def test_a_number_that_changes_from_round_to_round_is_not_baked_in() -> None:
    def by_round(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"loss": view.loss() * batch.count() * seen.round}

    engine = Engine()
    a, b = (fit(with_statistic(by_round), bn_mlp(), UNEQUAL, engine=e, **options()) for e in ("loop", engine))
    same(a, b)
    assert swept(engine) == {"test"}
    (note,) = engine.facts()["events"]
    assert note.startswith("sweep 'qfedavg' is mapped, not captured: client code reads round")
    assert [n for record in b.history for n in record.get("plainer_steps", [])] == [note]


def test_another_model_with_the_same_shapes_has_its_own_graphs() -> None:
    """One engine for two runs: a graph of the first would give its activation to the second."""
    engine = Engine()
    for activation in (torch.nn.Tanh, torch.nn.ReLU):
        make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), activation(), torch.nn.Linear(5, 3))  # noqa: B023, E731
        a, b = (fit("fedmap", make, EQUAL, engine=e, **options()) for e in ("loop", engine))
        same(a, b)


def test_outputs_without_those_of_padding() -> None:
    """A task without statistics needs the output of every row; batches are widened by padding."""
    engine = Engine()
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


def test_clients_without_further_rows_are_left_out() -> None:
    def clients(*sizes: int) -> list[int]:
        return [found[0] for found in sweep_shapes([in_order(n, 10) for n in sizes], 10, narrow=True)]

    assert clients(40, 30, 20, 10, 5) == [5, 3, 2, 1]
    assert clients(40, 5, 5, 5, 30) == [5, 5, 5, 1], "a client before one with rows stays"
    assert clients(5, 40) == [2, 2, 2, 2]
    assert clients(40) == [1] * 4


def test_when_a_sweep_is_captured() -> None:
    """A sweep of the method the second time, an evaluation the third time."""
    for rounds, names in ((1, set()), (2, {"qfedavg"}), (3, {"qfedavg", "test"})):
        engine = Engine()
        fit("qfedavg", bn_mlp(), EQUAL, engine=engine, **options(rounds=rounds))
        assert swept(engine) == names


def test_the_evaluation_at_the_end_of_a_run_is_not_captured() -> None:
    engine = Engine()
    fit("qfedavg", bn_mlp(), EQUAL, engine=engine, **options(evaluate={"every": 0}))
    assert engine.sweeps(captured=False) == ["qfedavg"]


@pytest.mark.parametrize("method", ["fedmap", "fedaims", "fedas"])
def test_new_clients_and_others_share_graphs(method: str) -> None:
    """New clients begin with one memory and one set of leaves; they have one layout with others."""
    engine, data = Engine(), federation((128,) * 6)
    fit(method, bn_mlp(), data, engine=engine, **options(cohort=3, evaluate={"every": 0}))
    names = engine.sweeps(captured=False)
    assert names
    assert len(names) == len(set(names))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_parity_on_cuda(method: str, data: fl.Federation) -> None:
    engine = Engine()
    a, b = (fit(method, bn_mlp(), data, engine=e, **options(cohort=4, device="cuda")) for e in ("loop", engine))
    same(a, b, 1e-9)
    assert engine.sweeps()
    assert engine.captured.notes == []
