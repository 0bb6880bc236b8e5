"""What client code may do with leaves that all clients of a sweep or a judgement have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.engines.vectorised import VectorisedEngine
from tests.helpers import everything, federation, fit, gap


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
