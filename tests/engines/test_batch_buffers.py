"""Buffers of batches hold the batches of the schedule, whatever they held before."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.data import Rows
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.engines.vectorised.rows import JoinedRows, WaveSchedule, sweep_schedule, training_schedule
from fedloom.gpu import batch_buffers
from fedloom.gpu.batch_buffers import BatchBuffer, BatchBuffers, evict_graphs
from fedloom.gpu.captured_steps import CapturedSteps, StepBuffers
from fedloom.tensors import flatten, structure_of
from tests.helpers import bn_mlp, dropout_mlp, everything, federation, fit, gap


def rows_of(sizes: tuple[int, ...], kind: str) -> JoinedRows:
    draw = torch.Generator().manual_seed(0)

    def x(n: int) -> Any:
        numbers = torch.randn(n, 3, generator=draw)
        pictures = torch.randint(0, 255, (n, 3, 4, 8), generator=draw, dtype=torch.uint8)
        return {"numbers": numbers, "pictures": pictures, "both": {"a": numbers, "b": pictures}}[kind]

    return JoinedRows.of([Rows(x(n), torch.randint(0, 5, (n,), generator=draw)) for n in sizes])


def schedule_of(kind: str, groups: int = 1, seed: int = 0) -> WaveSchedule:
    """Clients with 5, 3, 3 and no steps of up to 4 rows."""
    draw, sizes = np.random.default_rng(seed), (20, 11, 10, 1)
    plans = []
    for n in sizes:
        order = draw.permutation(n)
        cuts = [order[i : i + 4] for i in range(0, n if n > 1 else 0, 4)]
        plans.append([tuple(cut for _ in range(groups)) for cut in cuts])
    return training_schedule(rows_of(sizes, kind), plans, torch.float32, "narrow")


def check(buffer: BatchBuffer, schedule: WaveSchedule, steps: list[int]) -> None:
    for step in steps:
        slot = schedule.slots[step]
        buffer.load(schedule, step)
        packed, active = buffer.batch(slot)
        expected = schedule.batch(slot).packed()
        assert structure_of(packed) == structure_of(expected)
        pairs = zip(flatten(packed), flatten(expected), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
        assert all(a.is_contiguous() for a in flatten(packed))
        assert (active is None) == (slot.active is None)
        assert active is None or slot.active is None or torch.equal(active, slot.active)


@pytest.mark.parametrize("steps", [1, 2, 16])
@pytest.mark.parametrize("kind", ["numbers", "pictures", "both"])
def test_batches(kind: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_buffers, "BUFFER_STEPS", steps)
    schedule = schedule_of(kind, groups=2)
    assert {slot.padded for slot in schedule.slots} == {True, False}
    buffer = BatchBuffer(schedule)
    assert buffer.steps == steps
    check(buffer, schedule, [0, 1, 2, 3, 4])
    check(buffer, schedule, [3, 1])


def test_a_buffer_serves_schedules_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_buffers, "BUFFER_STEPS", 3)
    first, second = schedule_of("pictures"), schedule_of("pictures", seed=1)
    buffer = BatchBuffer(first)
    addresses = buffer.x.data_ptr(), buffer.y.data_ptr(), buffer.index.data_ptr()
    check(buffer, first, [0, 1, 2, 3, 4])
    check(buffer, second, [3])
    check(buffer, first, [3])
    assert addresses == (buffer.x.data_ptr(), buffer.y.data_ptr(), buffer.index.data_ptr())


def test_large_batches_fill_a_buffer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedule_of("pictures")
    step = schedule.index[:1].numel() * (3 * 4 * 8 + 8)
    monkeypatch.setattr(batch_buffers, "BUFFER_BYTES", 2 * step + 1)
    assert BatchBuffer(schedule).steps == 2
    monkeypatch.setattr(batch_buffers, "BUFFER_BYTES", step - 1)
    assert BatchBuffer(schedule).steps == 1


def test_sweeps_have_buffers_of_their_own() -> None:
    rows = rows_of((9, 5, 2), "both")
    sweep, steps = sweep_schedule(rows, torch.float32, 4, 1, narrow=True), schedule_of("both")
    buffers = BatchBuffers()
    buffer = buffers.get_or_create(sweep)
    assert buffer is buffers.get_or_create(sweep)
    assert buffer is not buffers.get_or_create(steps)
    check(buffer, sweep, list(range(len(sweep.slots))))
    del buffer
    assert buffers.get(sweep) is None, "no graph reads it"


@pytest.mark.parametrize("method", ["fedavg", "fedmap", "ditto"])
def test_the_size_of_buffers_changes_no_bit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, runs = federation((1, 7, 64, 65, 200)), []
    for steps in (16, 2, 1):
        monkeypatch.setattr(batch_buffers, "BUFFER_STEPS", steps)
        for make in (bn_mlp(), dropout_mlp()):
            options = {"cohort": 4, "epochs": 2, "batch_size": 16, "optimizer": fl.sgd(0.05)}
            runs.append(everything(fit(method, make, data, engine=VectorisedEngine(step="graphed"), **options)))
    for other in (runs[2:4], runs[4:]):
        assert [gap(a, b) for a, b in zip(runs[:2], other, strict=True)] == [0, 0]


class Halves(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x.mul_(0.5))))


@pytest.mark.parametrize("steps", [1, 16])
@pytest.mark.parametrize("method", ["fedavg", "fedmap", "pfedme"])
def test_a_model_may_change_its_input_in_place(method: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run before a capture changes the batch, which is then copied again."""
    monkeypatch.setattr(batch_buffers, "BUFFER_STEPS", steps)
    options = {"precision": "fp32", "optimizer": fl.sgd(0.05), "data": federation((9, 14, 5, 8))}
    a, b = (fit(method, Halves, engine=e, **options) for e in ("loop", VectorisedEngine(step="graphed")))
    assert gap(everything(a), everything(b)) < 1e-5


@pytest.mark.parametrize("method", ["fedavg", "fedmap"])
def test_graphs_of_ever_new_widths_are_evicted(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full batches of clients of ever other sizes need ever new buffers, of steps and of sweeps."""
    monkeypatch.setattr(batch_buffers, "BUFFER_LIMIT", 2)
    options = {"cohort": 2, "rounds": 12, "batch_size": "full", "evaluate": {"every": 0}}
    data, engine = federation((5, 9, 13, 17, 21, 25)), VectorisedEngine(step="graphed")
    engine.captured = captured = CapturedSteps(engine.rows)
    a, b = (fit(method, bn_mlp(), data, engine=e, **options) for e in ("loop", engine))
    assert gap(everything(a), everything(b)) < 1e-10
    read = [[buffer for _, buffer in layout.graphs.values()] for layout in captured.buffers.values()]
    assert max(len(set(map(id, buffers))) for buffers in read) == 2
    assert any(isinstance(layout, StepBuffers) for layout in captured.buffers.values())
    gc.collect()
    alive = {id(buffer) for buffers in read for buffer in buffers}
    del read
    assert len(captured.batches) == len(alive)


def test_the_least_recently_used_buffer_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_buffers, "BUFFER_LIMIT", 2)
    a, b, c = (BatchBuffer(schedule_of("numbers")) for _ in range(3))
    graphs: dict[Any, tuple[Any, BatchBuffer]] = {}
    for name, buffer in (("a", a), ("b", b), ("a", a), ("other a", a)):
        assert not evict_graphs(graphs, buffer)
        graphs[name] = (None, buffer)
    assert evict_graphs(graphs, c), "a was used after b"
    assert set(graphs) == {"a", "other a"}
