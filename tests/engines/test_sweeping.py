"""Captured sweeps: on a CPU the same code runs uncaptured, so that what goes to and from fixed addresses can be tested."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedloom as fl
from fedloom.batches import in_order
from fedloom.client import Adder, Desk
from fedloom.engines.vectorised import VectorisedEngine, sweeping
from fedloom.engines.vectorised.feed import sweep_shapes
from fedloom.engines.vectorised.graphed import Arenas
from fedloom.engines.vectorised.sweeping import CapturedAdder
from fedloom.slots import Sweep
from fedloom.tasks.builtin import TASKS
from fedloom.types import Batch, Leaves, Seen
from fedloom.view import View
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, run_of, small_cnn

UNEQUAL = federation((1, 7, 64, 65, 200, 300))
EQUAL = federation((140,) * 4)
METHODS = ["fedmap", "fedaims", "fedas", "fedpac", "fedaf(image_steps=2, server_epochs=1)", "peravg"]


def options(**others: Any) -> dict[str, Any]:
    return {"rounds": 6, "epochs": 1, "batch_size": 64, "optimizer": fl.sgd(0.02), "evaluate": {"every": 1}} | others


def swept(engine: VectorisedEngine) -> set[str]:
    """Names of the sweeps of which a graph is kept."""
    return {key[0][1].name for key in engine.grounds.known}  # type: ignore[index]


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
    assert engine.arenas.notes == []


def test_statistics_whose_type_depends_on_the_mask() -> None:
    """In float64 a count of rows is of single precision where nothing is masked: 1 / 3 of it must not be rounded so."""
    found = list[Leaves]()

    def third(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"loss": batch.count() / 3 if batch.mask is None else batch.count() / 3 + 0 * view.loss()}

    method = fl.method("qfedavg")
    steps = [replace(s, fn=third) if isinstance(s, Sweep) else s for s in method.schedule.round]
    method = replace(method, schedule=replace(method.schedule, round=tuple(steps)))
    plain = CapturedAdder.total

    def total(self: CapturedAdder) -> Leaves:
        found.append(plain(self))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedAdder, "total", total)
        data, engine = federation((396, 396, 131)), VectorisedEngine(step="graphed")
        fit(method, bn_mlp(), data, engine=engine, **options(evaluate={"every": 0}))
    sums = [f["loss"] for f in found if "loss" in f and len(f) == 1]
    assert len(sums) == 6
    assert all(torch.equal(s, sums[0]) and s.dtype == sums[0].dtype for s in sums)
    assert swept(engine) == {"qfedavg"}


@pytest.mark.parametrize("method", ["fedmap", "fedas"])
def test_equal_clients_give_the_bits_of_a_mapped_sweep(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for captured in (True, False):
        engine = VectorisedEngine(step="graphed")
        for worth in ("WORTH_OF_SWEEPS", "WORTH_OF_JUDGEMENTS"):
            monkeypatch.setattr(sweeping, worth, 2 if captured else 1000)
        found.append(everything(fit(method, bn_mlp(), EQUAL, engine=engine, **options())))
        assert bool(swept(engine)) is captured
    assert identical(*found)


def test_after_the_second_sweep_and_the_third_judgement_only_graphs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """140 rows are batches of 128 and 12: two graphs for the training rows, one for 46 test rows, each made once."""
    eager, captures, replays = Counter[str](), list[int](), list[int]()
    rounds = list[tuple[dict[str, int], int, int]]()
    plain_add, plain_record = Adder.add, Arenas.record

    def add(self: Adder, packed: dict[str, Any]) -> None:
        eager[self.step.name] += 1
        plain_add(self, packed)

    def record(self: Arenas, body: Any, mutable: Any, touched: set[str], what: str) -> Any:
        found = plain_record(self, body, mutable, touched, what)
        if what.startswith("phase") or found is None:
            return found
        captures.append(1)

        def replay() -> None:
            replays.append(1)
            found()

        return replay

    def after(record: Any) -> None:
        rounds.append((dict(eager), len(captures), len(replays)))
        eager.clear()
        captures.clear()
        replays.clear()

    monkeypatch.setattr(Adder, "add", add)
    monkeypatch.setattr(Arenas, "record", record)
    fit("qfedavg", bn_mlp(), EQUAL, engine=VectorisedEngine(step="graphed"), **options(callbacks=[after]))
    first, second = ({"qfedavg": 2, "test": 1}, 0, 0), ({"qfedavg": 2, "test": 1}, 2, 0)
    assert rounds == [first, second, ({"test": 1}, 1, 2), *[({}, 0, 3)] * 3]


@pytest.mark.parametrize("method", ["fedmap", "fedaims"])
def test_cohorts_of_new_clients_share_the_graphs_of_the_others(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What new clients have is everybody's, what others have is their own: the same graphs serve, made in round 2."""
    made, new, rounds = list[str](), list[bool](), list[int]()
    plain = Arenas.record

    def record(self: Arenas, body: Any, mutable: Any, touched: set[str], what: str) -> Any:
        made.append(what)
        return plain(self, body, mutable, touched, what)

    def after(record: Any) -> None:
        rounds.append(sum(what.startswith("sweep") for what in made))
        made.clear()

    plain_init = CapturedAdder.__init__

    def init(self: CapturedAdder, desk: Desk, *others: Any) -> None:
        new.append(all(p.state.rounds == 0 for p in desk.participants))
        plain_init(self, desk, *others)

    monkeypatch.setattr(Arenas, "record", record)
    monkeypatch.setattr(CapturedAdder, "__init__", init)
    data, how = federation((140,) * 20), options(cohort=3, evaluate={"every": 0})
    b = fit(method, bn_mlp(), data, engine=VectorisedEngine(step="graphed"), callbacks=[after], **how)
    assert True in new[2:6]
    assert False in new[2:6]
    assert rounds == [0, 2, 0, 0, 0, 0]
    assert gap(everything(fit(method, bn_mlp(), data, engine="loop", **how)), everything(b)) < 1e-10


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
    modes, plain = list[_Convolutions](), Desk.judge

    def judge(self: Desk, judgement: Any) -> None:
        with _Convolutions() as mode:
            plain(self, judgement)
        modes.append(mode)

    monkeypatch.setattr(Desk, "judge", judge)
    engine = VectorisedEngine(step=step)
    run = options(batch_size=4, rounds=4, device="cpu")  # elsewhere kernels take the place of convolutions
    found = fit(method, small_cnn(), data, engine=engine, **run)
    assert modes
    assert all({g for _, g in mode.seen} == {groups} for mode in modes)
    same(fit(method, small_cnn(), data, **run), found)


def test_the_evaluation_at_the_end_is_not_captured() -> None:
    engine = VectorisedEngine(step="graphed")
    fit("fedavg", bn_mlp(), federation((900, 900)), engine=engine, **options(rounds=4, evaluate={"every": 0}))
    assert not engine.grounds.known


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


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "KEPT_GRAPHS", 2)
    engine = VectorisedEngine(step="graphed")
    a, b = (fit("fedpac", bn_mlp(), UNEQUAL, engine=e, **options()) for e in ("loop", engine))
    same(a, b)
    assert 0 < sum(len(g.graphs) for g in engine.grounds.known.values()) <= 2


def test_no_memory_for_a_graph_halves_the_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Arenas.capture

    def capture(self: Arenas, body: Any, **where: bool) -> Any:
        if "CapturedAdder" in body.__qualname__ and engine.wave is None:
            raise torch.OutOfMemoryError("no room")
        return plain(self, body, **where)

    monkeypatch.setattr(Arenas, "capture", capture)
    engine = VectorisedEngine(step="graphed")
    a, b = (fit("fedmap", bn_mlp(), UNEQUAL, engine=e, **options(rounds=8)) for e in ("loop", engine))
    same(a, b)
    assert engine.wave == 3
    assert engine.grounds.known


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


def test_sweeps_of_unequal_clients_touch_few_rows_that_are_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (2000, 900, 400, 300, 200, 100, 60, 40, 30, 20)
    touched = []
    plain = sweeping.WaveAdder.add

    def add(self: Any, packed: dict[str, Any]) -> None:
        if isinstance(self.step, Sweep):
            touched.append(packed["y"].numel())
        plain(self, packed)

    monkeypatch.setattr(sweeping.WaveAdder, "add", add)
    fit("fedmap", bn_mlp(), federation(sizes), engine=VectorisedEngine(), rounds=1, epochs=1)
    assert sum(sizes) <= sum(touched) < 1.8 * sum(sizes), "all clients in all batches: five times as many"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_parity_on_cuda(method: str, data: fl.Federation) -> None:
    engine = VectorisedEngine(step="graphed")
    a, b = (fit(method, bn_mlp(), data, engine=e, **options(cohort=4, device="cuda")) for e in ("loop", engine))
    same(a, b, 1e-9)
    assert engine.grounds.known
    assert engine.arenas.notes == []


def test_a_tensor_that_clients_own_and_share_has_two_addresses() -> None:
    """In the next sweep that lies alike, what they own may be another one."""
    one = torch.ones(3).expand(4, 3)
    bound = run_of(fit("fedavg", rounds=1)).bound
    values = ({"received": one}, {"w": one}, {"memory": one})
    ground = sweeping.Ground(values, {}, bound, [False, False, True])
    assert ground.leaves["w"] is ground.common["received"]
    assert ground.private["memory"].data_ptr() != ground.leaves["w"].data_ptr()
    assert ground.private["memory"].stride() == (3, 1)


def test_tensors_are_one_where_one_is_the_other_repeated() -> None:
    """Along whichever axes, in whichever order they come; not where shapes, strides or types of the same bytes differ."""
    one = torch.arange(6.0).reshape(2, 3)
    between, behind = one[:, None].expand(2, 4, 3), one[..., None].expand(2, 3, 5)
    same = [one, one.expand(7, 2, 3), between, behind, one.view(2, 3)]
    others = [one.t(), one.view(6), one.view(torch.int32), one[1:], torch.zeros(1).expand(1)]
    for values, axes in ((same, [(), (0,), (1,), (2,), ()]), (same[::-1], [(), (2,), (1,), (0,), ()])):
        places, found = sweeping.distinct([*values, *others], [False] * 10)
        assert places == [*((0, dims) for dims in axes), *((place, ()) for place in range(1, 6))]
        assert found == [(at, ()) for at in (0, 5, 6, 7, 8, 9)]
    assert all(torch.equal(sweeping.once_of(v, dims), one) for v, dims in zip(values, axes, strict=True))
    places, found = sweeping.distinct([*same, one], [True] * 6)
    assert places == [(0, ()), (1, ()), (2, ()), (3, ()), (4, ()), (0, ())]
    assert found == [(at, ()) for at in range(5)]


def test_what_lies_otherwise_has_another_name() -> None:
    """A leaf of all clients, of each its own, or of others: a graph of one serves none of the others."""
    one, own, twin = torch.ones(3), torch.ones(4, 3), torch.ones(3)
    lists = [[one, one.expand(4, 3)], [one, own], [one, twin.expand(4, 3)], [one, one.expand(5, 3)], [one, one]]
    shared = [sweeping.lying(values, [False, False]) for values in lists]
    assert len(set(shared)) == 5
    assert sweeping.lying([twin, twin.expand(4, 3)], [False, False]) == shared[0]
    mine = [sweeping.lying(values, [False, True]) for values in lists]
    assert mine[0] == mine[1] == mine[2]  # four clients' own, whether or not they have the same
    assert len({*shared, *mine}) == 8
    both = [sweeping.lying(values, [True, True]) for values in ([own, own], [own, own.clone()])]
    assert both[0] != both[1]
    halves = [sweeping.lying([value], [theirs]) for value in (own, own.half(), own.t()) for theirs in (False, True)]
    assert len(set(halves)) == 6
