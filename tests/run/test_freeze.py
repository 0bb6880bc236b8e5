"""Frozen leaves neither train nor travel."""

from __future__ import annotations

import pytest
import torch

import fedloom as fl
from tests.helpers import fit, identical


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto", "fedprox(mu=0.1)"])
def test_frozen_leaves_stay(method: str, engine: str) -> None:
    result = fit(f"{method} + freeze('body')", engine=engine)
    assert result.run is not None
    start = result.run.bound.start
    for client in (None, "0", "1"):
        leaves = result.model(client).state_dict()
        assert torch.equal(leaves["0.weight"], start["0.weight"].cpu())
        assert not torch.equal(leaves["2.weight"], start["2.weight"].cpu())
    assert result.history[0]["bytes_down"] <= 3 * 2 * 8 * (5 * 3 + 3), "only the head, and a correction of its size"


def test_requires_grad_false_means_frozen() -> None:
    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        made[0].requires_grad_(False)
        return made

    a, b = fit("fedavg", model), fit("fedavg + freeze('body')")
    assert identical(dict(a.model().state_dict()), dict(b.model().state_dict()))


def test_two_owners_of_a_leaf_are_refused() -> None:
    with pytest.raises(fl.Conflict):
        fit("fedper + freeze('head')")
    with pytest.raises(fl.UserError, match="matches no leaf"):
        fit("fedavg + freeze('conv*')")
