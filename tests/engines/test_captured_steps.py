"""Captured steps. On a CPU each replay runs eagerly, which tests all but the capture itself."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.clients import states
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.runner import ClientRunner
from fedloom.clients.step import PhaseStart, ScheduleOf, Step, StepRunner, StepState, start_eager
from fedloom.engines.vectorised import VectorisedEngine, compiled
from fedloom.engines.vectorised.arrangement import ManyClients
from fedloom.engines.vectorised.rows import RowCache
from fedloom.engines.vectorised.traced import Traces
from fedloom.gpu import captured_steps
from fedloom.gpu.captured_steps import CapturedSteps, FixedInputs, StepBuffers, SweepBuffers
from fedloom.rounds import server
from fedloom.spec.method import Method
from fedloom.spec.optimizer import OptState
from fedloom.spec.parts import Phase, Term
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, flatten, map_nested
from tests.helpers import bn_mlp, dropout_mlp, everything, federation, fit, gap, mlp, run_of

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
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Engine(VectorisedEngine):
    """An engine with captured steps on every device, whose captured steps tests may read."""

    captured: CapturedSteps

    def __init__(self, captured: CapturedSteps | None = None) -> None:
        super().__init__(step="graphed")
        self.captured = CapturedSteps(self.rows) if captured is None else captured

    def layouts(self, kind: type) -> list[Any]:
        return [b for b in self.captured.buffers.values() if isinstance(b, kind)]


@pytest.mark.parametrize("method", METHODS)
def test_parity(method: str) -> None:
    momentum = 0.0 if method.startswith("scaffold") else 0.9
    for make, optimizer in ((bn_mlp(), fl.sgd(0.05, momentum=momentum)), (dropout_mlp(), fl.adam(1e-2))):
        engine = Engine()
        options = {"cohort": 4, "epochs": 1, "batch_size": 64, "optimizer": optimizer}
        a, b = (fit(method, make, DATA, engine=e, **options) for e in ("loop", engine))
        assert gap(everything(a), everything(b)) < 1e-10
        assert engine.layouts(StepBuffers)
        assert engine.captured.notes == []


@needs_cuda
@pytest.mark.parametrize("method", METHODS)
def test_parity_on_cuda(method: str) -> None:
    options = {"cohort": 4, "epochs": 1, "batch_size": 64, "device": "cuda"}
    engine = Engine()
    a, b = (fit(method, bn_mlp(), DATA, engine=e, **options) for e in ("loop", engine))
    assert gap(everything(a), everything(b)) < 1e-9
    assert engine.captured.notes == []


@pytest.mark.parametrize("method", ["fedavg", "fedavg_ft + isr"])
def test_one_client_that_keeps_its_optimiser(method: str) -> None:
    engines = ["loop", *(VectorisedEngine(step=kind) for kind in ("mapped", "graphed"))]
    options = {"mode": "centralised", "epochs": 1, "batch_size": 64, "optimizer": fl.adam(1e-2)}
    a, *others = (everything(fit(method, dropout_mlp(), DATA, engine=e, **options)) for e in engines)
    for b in others:
        assert gap(a, b) < 1e-10


def test_kept_leaves_do_not_share_memory_with_buffers() -> None:
    engine = Engine()
    run = run_of(fit("fedper", bn_mlp(), DATA, engine=engine, cohort=4, epochs=1, batch_size=64))
    memory = {t.untyped_storage().data_ptr() for b in engine.layouts(StepBuffers) for t in b.mutable()}
    kept = [v for c in run.clients.values() for v in c.leaves.values()]
    assert memory
    assert kept
    assert not memory & {v.untyped_storage().data_ptr() for v in [*kept, *run.state.leaves.values()]}
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in kept)


@pytest.mark.parametrize("method", ["fedavg", "fedmap", "fedper", "scaffold", "fedavg + lag(k=1)"])
@pytest.mark.parametrize("cohort", [1, 3])
def test_new_clients_and_others_share_graphs(method: str, cohort: int) -> None:
    """New clients all begin with one zero memory and one set of leaves; the key of a graph ignores that."""
    engine, data = Engine(), federation((128,) * 6)
    options = {"rounds": 6, "cohort": cohort, "epochs": 1, "batch_size": 64, "evaluate": {"every": 0}}
    fit(method, bn_mlp(), data, engine=engine, **options)
    assert len(engine.layouts(StepBuffers)) == 1
    assert len(engine.layouts(SweepBuffers)) == (1 if method == "fedmap" else 0)


def test_fixed_tensors_are_owned_or_shared() -> None:
    """Owned tensors get memory of their own. Tensors that are shared lie at one address."""
    run = run_of(fit("fedper", bn_mlp(), federation((8, 8, 8)), rounds=1))
    one = torch.ones(4)
    own = {"memory": {"a": {"x": one.expand(2, 4), "y": one.expand(2, 4)}}, "n": torch.ones(2)}
    kept = next(n for n, s in run.bound.specs.items() if s.kept)
    shared = next(n for n, s in run.bound.specs.items() if not s.kept)
    received = {shared: torch.arange(3.0)}
    leaves = {shared: received[shared].expand(2, 3), kept: torch.ones(5).expand(2, 5)}
    inputs = ClientInputs(own | {"start": leaves}, {"received": received}, {})
    parts = CapturedSteps(RowCache()).wave().flatten(run.bound, leaves, inputs)
    fixed = FixedInputs(leaves, inputs, parts)
    fixed.load(parts)
    memory = fixed.own["memory"]["a"]
    assert torch.equal(memory["x"], own["memory"]["a"]["x"])
    assert memory["x"].data_ptr() != memory["y"].data_ptr()
    assert memory["x"].is_contiguous()
    assert fixed.leaves[kept].is_contiguous()
    assert fixed.leaves[kept].data_ptr() == fixed.own["start"][kept].data_ptr()
    boxes = (fixed.leaves, fixed.own["start"], fixed.common["received"])
    assert len({box[shared].data_ptr() for box in boxes}) == 1
    assert fixed.leaves[shared].stride() == (0, 1)
    assert fixed.leaves[shared].data_ptr() != received[shared].data_ptr()


def method_with_everything() -> Method:
    """FedAvg with a carried state, two gradient steps a batch, a projection, and a change behind it."""
    method, zero = fl.method("fedavg"), torch.zeros((), dtype=torch.float64)
    start = {"count": zero, "loss": zero}  # one object for both, and the same in every round

    def fn(view: View, batch: Batch, seen: Seen, carry: Leaves) -> tuple[Tensor, Leaves]:
        value = 0.1 * view.loss() * (1 + carry["loss"])
        return value, {"loss": value, "count": carry["count"] + 1}  # in another order

    def shrink(leaves: Leaves, seen: Seen) -> Leaves:
        return {n: 0.99 * v for n, v in leaves.items() if n.endswith("weight")}

    def shift(leaves: Leaves, seen: Seen) -> Leaves:
        return {n: v + 0.001 * seen.n for n, v in leaves.items() if n.endswith("bias")}

    phase = Phase(repeat=2, project=shrink, after=shift)
    program = tuple([phase if isinstance(s, Phase) else s for s in method.schedule.round])
    objective = (*method.objective, Term(owner="carried", fn=fn, carry=lambda structure: start))
    return replace(method, objective=objective, schedule=replace(method.schedule, round=program))


def fields_of(state: StepState) -> dict[str, Any]:
    """All that a step changes. A new field of the state must be compared here, too."""
    names = {f.name for f in dataclasses.fields(StepState)}
    assert names == {"leaves", "written", "carry", "total", "number", "groups", "moments", "clients", "whole"}
    assert state.groups is not None
    return {
        "leaves": state.leaves,
        "carry": state.carry,
        "total": state.total,
        "slots": [g.state.slots for g in state.groups],
        "facts": (
            sorted(state.written),
            float(state.number),
            [(g.names, float(g.rate), float(g.state.step)) for g in state.groups],
        ),
    }


def same_fields(a: StepState, b: StepState) -> None:
    left, right = fields_of(a), fields_of(b)
    for name, value in left.items():
        if name == "facts":
            assert value == right[name]
            continue
        for x, y in zip(flatten(value), flatten(right[name]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("saved", [False, True], ids=["fresh moments", "saved moments"])
@pytest.mark.parametrize("model", [dropout_mlp(), bn_mlp()], ids=["dropout", "batch norm"])
def test_all_kinds_of_steps_change_the_same_fields(
    model: Callable[[], Any], saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps from a random state: every field of the state is equal, also after an undone dry run."""
    monkeypatch.setattr(compiled, "fused", lambda graph, inputs: graph.forward)
    optimizer = fl.adam(1e-2, weight_decay=1e-3)
    data = federation((8, 8, 7))
    run = run_of(fit(method_with_everything(), model, data, rounds=1, epochs=1, optimizer=optimizer))
    client = run.desk(next(iter(run.sites)))
    draw = torch.Generator().manual_seed(0)
    kinds = list[str]()

    def random(value: Tensor) -> Tensor:
        moved = torch.rand(value.shape, generator=draw, dtype=torch.float64).to(value)
        return value + moved if value.is_floating_point() else value

    def start_all(step: Step, start: PhaseStart, inputs: ClientInputs, schedule: ScheduleOf) -> StepRunner:
        leaves = {n: random(v.clone()) for n, v in start.leaves.items()}
        moments = None
        if saved:
            trained = [leaves[n] for n in step.phase.trained]
            slots = {k: [random(m) for m in v] for k, v in step.groups[0][1].init(trained).slots.items()}
            moments = [OptState(slots, 3)]

        def fresh() -> PhaseStart:
            tensors = map_nested(Tensor.clone, (leaves, start.carry, start.total))
            return PhaseStart(*tensors, moments, start.clients)

        captured = CapturedSteps(RowCache())
        first = captured.wave().start(step, fresh(), inputs, schedule)
        runners: dict[str, Any] = {"captured": lambda: captured.wave().start(step, fresh(), inputs, schedule)}
        for slot in first.schedule.slots[:2]:
            first.run(slot)
        expected = first.finish()
        (reached,) = captured.reached.values()
        traces = Traces(1, True)
        runners["captured again"] = runners["captured"]
        runners["compiled"] = lambda: compiled.start_compiled(step, fresh(), inputs, schedule("fixed"), reached, traces)
        for kind, make in runners.items():
            runner = make()
            for slot in runner.schedule.slots[:2]:
                runner.run(slot)
            same_fields(expected, runner.finish())
            kinds.append(kind)
        assert captured.notes == traces.notes == []
        return start_eager(step, start, inputs, schedule)

    people = [run.participant(name) for name in run.sites]
    clients = ClientRunner(client.bound, client.work, client.post, people, ManyClients(RowCache()), start_all)
    clients.run(client.bound.method.schedule.round)
    assert kinds == ["captured", "captured again", "compiled"]


def test_a_method_with_everything() -> None:
    options = {"cohort": 4, "batch_size": 16, "rounds": 4, "optimizer": fl.adam(1e-2)}
    engine = Engine()
    a, b = (fit(method_with_everything(), dropout_mlp(), DATA, engine=e, **options) for e in ("loop", engine))
    assert gap(everything(a), everything(b)) < 1e-10
    assert engine.captured.notes == []


def test_a_projection_that_writes_another_leaf_later() -> None:
    """The dry run writes the leaf once, and is undone: the step must not project it twice."""

    def project(leaves: Leaves, seen: Seen) -> Leaves:
        names = ("0.weight", "2.weight") if len(seen.broadcast) + seen.round > 2 else ("0.weight",)
        return {n: 0.9 * leaves[n] for n in names}

    method = fl.method("fedavg")
    phase = Phase(leaves="2.*", project=project)
    program = tuple([phase if isinstance(s, Phase) else s for s in method.schedule.round])
    method = replace(method, schedule=replace(method.schedule, round=program))
    for change in (None, lambda leaves, seen: {"0.bias": 0.9 * leaves["0.bias"]} if seen.round > 2 else {}):
        changed = replace(phase, project=project if change is None else change)
        rounds = tuple([changed if isinstance(s, Phase) else s for s in program])
        other = replace(method, schedule=replace(method.schedule, round=rounds))
        engine = Engine()
        a, b = (fit(other, mlp(), DATA, engine=e, cohort=4, rounds=4) for e in ("loop", engine))
        assert gap(everything(a), everything(b)) < 1e-10
        assert "mapped, not captured" in engine.captured.notes[0]


def test_a_phase_that_cannot_be_captured_runs_eagerly() -> None:
    engine, options = Engine(), {"cohort": 4, "epochs": 1, "batch_size": 64}
    a, b = (fit("fedmap(implicit=True)", bn_mlp(), DATA, engine=e, **options) for e in ("loop", engine))
    assert gap(everything(a), everything(b)) < 1e-10
    assert "mapped, not captured" in engine.captured.notes[0]


def test_the_next_round_is_prefetched_before_the_host_reads_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetched batches are those of the loop engine, with stragglers and dropouts, too."""
    engine, prefetched = Engine(), list[bool]()
    confirm = server.confirm

    def confirmed(pending: server.PendingRound) -> tuple[states.ServerState, server.Outcome]:
        prefetched.append(engine.captured.prefetcher._next is not None)
        return confirm(pending)

    monkeypatch.setattr(server, "confirm", confirmed)
    odd = {"dropout": 0.3, "stragglers": 0.5}
    for options in ({}, {"participation": odd}):
        prefetched.clear()
        a, b = (
            fit("ditto", bn_mlp(), DATA, engine=e, rounds=4, cohort=3, batch_size=16, **options)
            for e in ("loop", engine)
        )
        assert gap(everything(a), everything(b)) < 1e-10
        assert prefetched[4:] == [True, True, True, False]
        assert engine.captured.prefetcher._next is None


def test_out_of_memory_while_prefetching() -> None:
    """Prefetched batches compete with the replies of this round. The next round then makes its own."""

    class Full(CapturedSteps):
        calls = 0

        def prefetch(self, *args: Any) -> None:
            self.calls += 1
            raise torch.OutOfMemoryError("no room")

    data, options = federation((20, 30, 40)), {"rounds": 3, "epochs": 1, "batch_size": 16}
    full = Engine()
    full.captured = Full(full.rows)
    a, b = (fit("fedavg", bn_mlp(), data, engine=e, **options) for e in (Engine(), full))
    assert full.captured.calls == 2
    assert gap(everything(a), everything(b)) == 0


class FullOnce(CapturedSteps):
    """Runs out of memory in a dry run or capture, once."""

    what = "phase"
    tried: list[str]

    def record(self, body: Any, mutable: Any, touched: Any, what: str) -> Any:
        replay = super().record(body, mutable, touched, what)
        if what.startswith(self.what) and not self.tried:
            self.tried.append(what)
            raise torch.OutOfMemoryError("no room")
        return replay


@pytest.mark.parametrize("what", ["phase", "sweep", "judgement"])
def test_out_of_memory_in_a_capture(what: str) -> None:
    """The engine drops its graphs and tries again with waves of half the size."""
    engine = Engine()
    engine.captured = captured = FullOnce(engine.rows)
    captured.what, captured.tried = what, []
    options = {"rounds": 5, "epochs": 1, "batch_size": 16, "cohort": 4}
    a, b = (fit("fedmap", bn_mlp(), DATA, engine=e, **options) for e in ("loop", engine))
    assert captured.tried
    assert gap(everything(a), everything(b)) < 1e-10
    assert engine.wave is not None
    assert "out of memory" in engine.events[0]
    assert engine.layouts(StepBuffers)


def test_eviction_of_phases_and_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used layouts go, of phases and of sweeps alike; the numbers stay."""
    monkeypatch.setattr(captured_steps, "LAYOUT_LIMIT", 2)
    engine = Engine()
    options = {"rounds": 5, "epochs": 1, "batch_size": 16, "cohort": 4, "evaluate": {"every": 1}}
    a, b = (fit("fedmap", bn_mlp(), DATA, engine=e, **options) for e in ("loop", engine))
    assert gap(everything(a), everything(b)) < 1e-10
    assert len(engine.captured.buffers) == 2


def test_the_least_recently_used_layout_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "LAYOUT_LIMIT", 2)
    store = CapturedSteps(RowCache())
    a, b, c = (SweepBuffers({}, ClientInputs({"start": {}}, {}, {}), EMPTY, {}) for _ in range(3))
    for key, buffers in (("a", a), ("b", b), ("a", a), ("c", c)):
        store.use(key, buffers)
    assert list(store.buffers) == ["a", "c"]


NAMES = ("own", "common", "owned start", "shared start", "owned leaves", "shared leaves")
EMPTY = {name: captured_steps.FlatTensors({}, name[0] == "o", captured_steps.TensorFacts) for name in NAMES}


@pytest.mark.parametrize("step", ["graphed", "compiled"])
def test_one_engine_for_several_runs(step: Any) -> None:
    """Objects of later runs may get the addresses of earlier ones: keys must hold what they compare."""
    engine = VectorisedEngine(step=step)
    for make in (mlp(), bn_mlp(), dropout_mlp()) * 3:
        options = {"rounds": 1, "epochs": 1, "batch_size": 8}
        a, b = (everything(fit("fedavg", make, federation((8, 8)), engine=e, **options)) for e in ("loop", engine))
        gc.collect()
        assert gap(a, b) < 1e-10
