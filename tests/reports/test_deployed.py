"""The report of an experiment of real sites."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr", reason="Flower is not installed")

import fedloom as fl
from fedloom.flower.experiment import Experiment
from fedloom.flower.server.serve import serve
from tests.flower.sites import experiment, grid_of, people, write_sites
from tests.reports.page import Page, check


def test_an_experiment_of_real_sites(tmp_path: Path) -> None:
    text = tomli_w.dumps(experiment(["local", "fedavg + lag(k=1)"], seeds=[0, 1]))
    grid = grid_of(write_sites(tmp_path / "sites", people()), None)
    courses = serve(grid, Experiment.parse(text), text, tmp_path / "out", poll=0.0)
    page = check(Page(fl.report(tmp_path / "out")))
    assert {"headline", "learning", "clients", "conflict", "client-curves", "client-table"} <= set(page.sections)
    assert "partition" not in page.sections
    rows = page.section("headline").all("tbody")[0].all("tr")  # type: ignore[union-attr]
    means = {r.inside[0].words: float(r.inside[1].attributes["data-v"]) for r in rows}
    last = [c.history[-1]["accuracy"] for k, c in courses.items() if k.startswith("local")]
    assert means["local"] == pytest.approx(sum(last) / 2)
