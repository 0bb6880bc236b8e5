"""Batches of captured steps at fixed addresses are those that would be handed over one by one."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fedloom as fl
from fedloom.data import Rows
from fedloom.engines.vectorised import VectorisedEngine, buffers
from fedloom.engines.vectorised.buffers import BatchBuffer, BatchBuffers, renewed
from fedloom.engines.vectorised.rows import JoinedRows, WaveSchedule, sweep_schedule, training_schedule
from tests.helpers import bn_mlp, dropout_mlp, everything, federation, fit, gap


def pool(sizes: tuple[int, ...], kind: str) -> JoinedRows:
    draw = torch.Generator().manual_seed(0)

    def x(n: int) -> Any:
        numbers = torch.randn(n, 3, generator=draw)
        pictures = torch.randint(0, 255, (n, 3, 4, 8), generator=draw, dtype=torch.uint8)
        return {"numbers": numbers, "pictures": pictures, "both": {"a": numbers, "b": pictures}}[kind]

    return JoinedRows.of([Rows(x(n), torch.randint(0, 5, (n,), generator=draw)) for n in sizes])


def feed(kind: str, groups: int = 1, seed: int = 0) -> WaveSchedule:
    """Clients with 5, 3, 3 and no steps of up to 4 rows."""
    draw, sizes = np.random.default_rng(seed), (20, 11, 10, 1)
    plans = []
    for n in sizes:
        order = draw.permutation(n)
        cuts = [order[i : i + 4] for i in range(0, n if n > 1 else 0, 4)]
        plans.append([tuple(cut for _ in range(groups)) for cut in cuts])
    return training_schedule(pool(sizes, kind), plans, torch.float32, "narrow")


def same(shelf: BatchBuffer, laid: WaveSchedule, steps: list[int]) -> None:
    for step in steps:
        tick = laid.slots[step]
        shelf.load(laid, step)
        packed, active = shelf.batch(tick)
        mine, other = (pytree.tree_flatten(p) for p in (packed, laid.batch(tick).packed()))
        assert mine[1] == other[1]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine[0], other[0], strict=True))
        assert all(a.is_contiguous() for a in mine[0])
        assert (active is None) == (tick.active is None)
        assert active is None or tick.active is None or torch.equal(active, tick.active)


@pytest.mark.parametrize("room", [1, 2, 16])
@pytest.mark.parametrize("kind", ["numbers", "pictures", "both"])
def test_batches(kind: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "BUFFER_STEPS", room)
    laid = feed(kind, groups=2)
    assert {t.padded for t in laid.slots} == {True, False}
    shelf = BatchBuffer(laid)
    assert shelf.room == room
    same(shelf, laid, [0, 1, 2, 3, 4])
    same(shelf, laid, [3, 1])


def test_a_shelf_is_filled_once_for_several_steps_and_anew_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    laid, others = feed("pictures"), feed("pictures", seed=1)
    filled, lay = list[int](), BatchBuffer.fill

    def counted(self: BatchBuffer, laid: WaveSchedule, first: int) -> None:
        filled.append(first)
        lay(self, laid, first)

    monkeypatch.setattr(BatchBuffer, "fill", counted)
    monkeypatch.setattr(buffers, "BUFFER_STEPS", 3)
    shelf = BatchBuffer(laid)
    same(shelf, laid, [0, 1, 2, 3, 4])
    assert filled == [0, 3]
    same(shelf, others, [3])
    same(shelf, laid, [3])
    assert filled == [0, 3, 3, 3]


def test_large_batches_lie_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    laid = feed("pictures")
    step = laid.index[:1].numel() * (3 * 4 * 8 + 8)
    monkeypatch.setattr(buffers, "BUFFER_BYTES", 2 * step + 1)
    assert BatchBuffer(laid).room == 2
    monkeypatch.setattr(buffers, "BUFFER_BYTES", step - 1)
    assert BatchBuffer(laid).room == 1


def test_sweeps_lie_on_shelves_of_their_own() -> None:
    laid, steps = sweep_schedule(pool((9, 5, 2), "both"), torch.float32, 4, 1, narrow=True), feed("both")
    known = BatchBuffers()
    shelf = known.of(laid)
    assert shelf is known.of(laid)
    assert shelf is not known.of(steps)
    same(shelf, laid, list(range(len(laid.slots))))
    del shelf
    assert known.known_of(laid) is None, "nobody takes batches from there"


@pytest.mark.parametrize("method", ["fedavg", "fedmap", "ditto"])
def test_how_many_steps_lie_there_changes_no_bit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = federation((1, 7, 64, 65, 200)), []
    for steps in (16, 2, 1):
        monkeypatch.setattr(buffers, "BUFFER_STEPS", steps)
        for make in (bn_mlp(), dropout_mlp()):
            options = {"cohort": 4, "epochs": 2, "batch_size": 16, "optimizer": fl.sgd(0.05)}
            found.append(everything(fit(method, make, data, engine=VectorisedEngine(step="graphed"), **options)))
    for other in (found[2:4], found[4:]):
        assert [gap(a, b) for a, b in zip(found[:2], other, strict=True)] == [0, 0]


class Halves(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x.mul_(0.5))))


@pytest.mark.parametrize("room", [1, 16])
@pytest.mark.parametrize("method", ["fedavg", "fedmap", "pfedme"])
def test_a_model_may_change_its_input_in_place(method: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is tried before it is captured: what it does to its batch then is not done twice."""
    monkeypatch.setattr(buffers, "BUFFER_STEPS", room)
    options = {"precision": "fp32", "optimizer": fl.sgd(0.05), "data": federation((9, 14, 5, 8))}
    a, b = (fit(method, Halves, engine=e, **options) for e in ("loop", VectorisedEngine(step="graphed")))
    assert gap(everything(a), everything(b)) < 1e-5


def test_graphs_of_ever_new_widths_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full batches of clients of ever other sizes: those unused for longest are given up, with what they hold."""
    monkeypatch.setattr(buffers, "KEPT_BUFFERS", 2)
    data, options = federation((5, 9, 13, 17, 21, 25)), {"cohort": 2, "rounds": 12, "batch_size": "full"}
    engine = VectorisedEngine(step="graphed")
    a, b = (fit("fedavg", bn_mlp(), data, engine=e, **options) for e in ("loop", engine))
    assert gap(everything(a), everything(b)) < 1e-10
    (arena,) = engine.captured.known.values()
    assert len({id(shelf) for _, shelf in arena.graphs.values()}) == 2
    gc.collect()
    assert [key[0] for key in engine.captured.batches.known if isinstance(key, tuple)].count(False) == 2


def test_what_reads_the_shelf_unused_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "KEPT_BUFFERS", 2)
    a, b, c = (BatchBuffer(feed("numbers")) for _ in range(3))
    graphs: dict[Any, tuple[Any, BatchBuffer]] = {}
    for name, shelf in (("a", a), ("b", b), ("a", a), ("other a", a)):
        assert not renewed(graphs, shelf)
        graphs[name] = (None, shelf)
    assert renewed(graphs, c), "a was used after b"
    assert set(graphs) == {"a", "other a"}
