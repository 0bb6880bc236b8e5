"""What client code may do with leaves that all clients of a sweep or a judgement have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.spec.parts import Sweep
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves
from tests.helpers import bn_mlp, everything, federation, fit, gap


class Begun(nn.Module):
    """Rows are added, in place, to a state that is made of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Parameter(torch.randn(8))
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.begin.expand(x.shape[0], -1).clone()
        state += torch.tanh(self.body(x))
        made: Tensor = self.head(state)
        return made


@pytest.mark.parametrize("step", ["mapped", "graphed"])
@pytest.mark.parametrize("method", ["fedavg", "fedmap"])
def test_rows_may_be_written_into_what_is_made_of_a_shared_leaf(method: str, step: Any) -> None:
    """Of which ``vmap`` allows nothing unless every client has a leaf of its own; fedmap sweeps, all evaluate."""
    data, how = federation((9, 14, 5, 11)), {"rounds": 4, "evaluate": {"every": 1}}
    a, b = (fit(method, Begun, data, engine=e, **how) for e in ("loop", VectorisedEngine(step=step)))
    assert gap(everything(a), everything(b)) < 1e-10
    assert [r["loss"] for r in b.history] == pytest.approx([r["loss"] for r in a.history])


@pytest.mark.parametrize("step", ["loop", "mapped", "graphed"])
@pytest.mark.parametrize("first", [True, False], ids=["before training", "after it"])
def test_sweeps_in_training_mode_leave_running_statistics_alone(first: bool, step: Any) -> None:
    """Before training they are the server's own tensors, later the clients': as if there were no sweep."""

    def loss(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"loss": view.loss() * batch.count()}

    plain = fl.fedavg()
    at = 1 if first else len(plain.schedule.round) - 1
    steps = (*plain.schedule.round[:at], Sweep(name="loss", fn=loss, train=True), *plain.schedule.round[at:])
    method = replace(plain, schedule=replace(plain.schedule, round=steps))
    engine = "loop" if step == "loop" else VectorisedEngine(step=step)
    data = federation((9, 14, 5, 11))
    a, b = (fit(m, bn_mlp(), data, engine=e, rounds=4) for m, e in ((plain, "loop"), (method, engine)))
    assert gap(everything(a), everything(b)) < 1e-10
