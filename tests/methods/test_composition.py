"""What stacks on what: every method under ``isr``, named compositions on both engines, and the generated page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedloom as fl
from scripts import docs_pages
from tests.helpers import everything, federation, fit, gap, run_of


def net() -> nn.Module:
    """Three hidden layers and batch normalisation without a bias before it."""
    return nn.Sequential(
        nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(),
        nn.Linear(4, 3),
    )  # fmt: skip


def run(method: str, engine: str, **options: Any) -> fl.Result:
    settings = {"rounds": 2, "epochs": 1, "batch_size": 3, "cohort": 3, "optimizer": fl.sgd(0.05)} | options
    return fit(method, net, federation((6, 9, 5, 1, 7)), engine=engine, **settings)


def same_on_both_engines(method: str) -> fl.Result:
    loop, vectorised = run(method, "loop"), run(method, "vectorised")
    left, right = everything(loop), everything(vectorised)
    assert set(left) == set(right)
    assert gap(left, right) <= 1e-9
    assert all(bool(torch.isfinite(v).all()) for v in left.values() if v.is_floating_point())
    return loop


@pytest.mark.parametrize("method", fl.list_methods())
def test_isr_stacks_on_every_method(method: str) -> None:
    """Adapters move, on both engines alike; the pairs that are refused are those of the page."""
    if docs_pages.refusal(f"{method} + isr") is not None:
        assert method in ("fedaf", "omniisr")
        return
    result = same_on_both_engines(f"{method} + isr(points=2)")
    bound, state = run_of(result).bound, run_of(result)
    adapters = [n for n in bound.start if "isr:" in n]
    assert len([n for n in adapters if n.startswith("isr:")]) == 4
    moved = [
        n
        for n in adapters
        if not torch.equal(state.state.leaves[n], bound.start[n])
        or any(n in c.leaves and not torch.equal(c.leaves[n], bound.start[n]) for c in state.clients.values())
    ]
    assert {n.rpartition("/")[2] for n in moved} == {n.rpartition("/")[2] for n in adapters}


COMPOSITIONS = [
    "fedaims + lag",
    "fedaims + isr",
    "fedaims + isr + lag",
    "fedaims_full + isr",
    "fedaims + proximal + clip",
    "fedaims + map_prior",
    "fedaims(prototypes='blockwise') + isr(adapters='personal')",
    "fedrep + aims",
    "fedrep + aims + isr",
    "fedbabu + aims + lag",
    "fedrod + aims",
    "fedbn + aims + isr",
    "ditto + aims + isr",
    "fedmap + isr",
    "scaffold + isr + lag",
    "fedrep + map_prior + isr",
    "feddyn + isr",
    "moon + isr + clip + noise(sigma=0.01)",
    "fedadam + isr + proximal",
    "apfl + isr",
    "pfedme + isr",
    "fedala + isr",
    "peravg + isr",
    "lg_fedavg + isr + server_momentum",
    "fedpac + isr",
    "gpfl + isr + clip",
    "fedavg + isr + robust",
]


@pytest.mark.parametrize("method", COMPOSITIONS)
def test_named_compositions(method: str) -> None:
    same_on_both_engines(method)


def pairs() -> list[str]:
    plugins = docs_pages.plugins().values()
    bases = [*fl.list_methods(), *(f"fedavg + {p}" for p in plugins)]
    return [f"{base} + {plugin}" for base in bases for plugin in plugins]


@pytest.mark.slow
@pytest.mark.parametrize("method", pairs())
def test_every_pair(method: str) -> None:
    if docs_pages.refusal(method) is None:
        same_on_both_engines(method)


def test_the_page_is_current() -> None:
    """``python scripts/docs_pages.py`` writes it."""
    assert (docs_pages.DOCS / "composition.md").read_text(encoding="utf-8") == docs_pages.composition_page()
