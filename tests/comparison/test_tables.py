"""What the tables say of runs whose numbers are known, and of runs that are short, missing or failed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedloom as fl
from fedloom.comparison.cell import Cell
from fedloom.comparison.grid import combinations, folder_of
from fedloom.comparison.record import RUNS
from tests.comparison import sources

Clients = dict[str, float | None]


def fake(path: Path, curve: list[float | None], clients: Clients, *, up: int = 10, seconds: float = 1.0) -> None:
    """A finished run folder with such a curve; its value is the mean over clients."""
    path.mkdir(parents=True)
    known = [v for v in clients.values() if v is not None]
    mean = sum(known) / len(known) if known else None
    lines = [
        {"round": i, "accuracy": v, "accuracy_worst10": v, "bytes_up": up, "bytes_down": up, "seconds": seconds}
        for i, v in enumerate([*curve, mean], start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resolved = {"primary": "accuracy", "higher_is_better": True}
    (path / "run.toml").write_text(
        tomli_w.dumps({"format": 1, "task": "classification", "method": "fedavg()", "resolved": resolved})
    )
    rows = [f"{name},5,1,0,{'' if v is None else v}" for name, v in clients.items()]
    (path / "clients.csv").write_text("\n".join(["client,n_train,rounds,new,accuracy", *rows]) + "\n")


def comparison(
    path: Path, methods: list[str], seeds: int = 3, sweep: dict[str, list[Any]] | None = None
) -> fl.Comparison:
    cells = [
        Cell(m, s, o, path / RUNS / folder_of(m, o, s))
        for o in combinations(sweep or {})
        for m in methods
        for s in range(seeds)
    ]
    texts = {m: m for m in methods}
    return fl.Comparison(path, texts, tuple(range(seeds)), sweep or {}, methods[0], cells)


@pytest.fixture
def known(tmp_path: Path) -> fl.Comparison:
    """Method b is better by 0.1, 0.2 and 0.4, costs twice the bytes; method c is worse and dearer than a everywhere."""
    made = comparison(tmp_path, ["a", "b", "c"])
    for s, (a, b) in enumerate([(0.5, 0.6), (0.4, 0.6), (0.3, 0.7)]):
        fake(made.of("a", seed=s)[0].path, [0.1, 0.45], {"x": a + 0.1, "y": a - 0.1})
        fake(made.of("b", seed=s)[0].path, [0.1, 0.5], {"x": b + 0.1, "y": b - 0.1}, up=20)
        fake(made.of("c", seed=s)[0].path, [], {"x": a - 0.1, "y": a - 0.1}, up=30, seconds=5.0)
    return made


def test_numbers_by_hand(known: fl.Comparison) -> None:
    a, b, c = known.tables["summary"].rows
    assert a["value"] == pytest.approx(0.4)
    assert a["value_high"] - a["value"] == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    assert b["difference"] == pytest.approx(0.7 / 3)
    assert b["p"] == pytest.approx(0.118082, rel=1e-4)  # of the differences 1, 2, 4: scale does not matter
    assert (b["wins"], b["losses"], b["ties"]) == (3, 0, 0)
    assert (c["clients_better"], c["clients_worse"], c["clients_equal"]) == (0, 3, 3)
    assert [r["rank"] for r in (a, b, c)] == [2.0, 1.0, 3.0]
    assert [r["pareto"] for r in (a, b, c)] == [True, True, False]
    assert (a["difference"], a["p"], a["wins"]) == (None, None, 0)
    # The target is a's mean, 0.4: a passes it in its second round.
    assert (a["target"], a["rounds_to_target"], a["bytes_to_target"]) == (pytest.approx(0.4), 2.0, 40.0)
    assert (b["rounds_to_target"], b["bytes_to_target"]) == (2.0, 80.0)
    assert (c["reached"], c["rounds_to_target"]) == (1, 1.0)


def test_an_asked_for_target(known: fl.Comparison) -> None:
    known.target = 0.65
    a, b, _ = known.tables["summary"].rows
    assert (a["reached"], a["rounds_to_target"]) == (0, None)
    assert (b["reached"], b["rounds_to_target"]) == (1, 3.0)
    assert "never" in known.tables["costs"].markdown()


def test_lower_may_be_better(known: fl.Comparison) -> None:
    known.__dict__["higher_is_better"] = False
    a, b, c = known.tables["summary"].rows
    assert b["difference"] == pytest.approx(-0.7 / 3)
    assert [r["rank"] for r in (a, b, c)] == [2.0, 3.0, 1.0]


def test_forms(known: fl.Comparison, tmp_path: Path) -> None:
    files = {p.name for p in known.write()}
    assert files == {
        *(f"{n}.{e}" for n in ("summary", "overall") for e in ("csv", "md", "tex")),
        *("costs.md", "costs.tex", "cells.csv", "clients.csv"),
    }
    table = list(csv.DictReader(io.StringIO((tmp_path / "tables" / "summary.csv").read_text())))
    assert float(table[1]["difference"]) == known.tables["summary"].rows[1]["difference"]
    assert len((tmp_path / "tables" / "clients.csv").read_text().splitlines()) == 1 + 3 * 3 * 2
    text = known.tables["summary"].markdown()
    assert "**0.6333 ± 0.1434**" in text
    assert "+0.2333 ± 0.3795" in text
    assert "3 of 3" in text
    tex = known.tables["summary"].latex()
    assert r"\textbf{0.6333 $\pm$ 0.1434}" in tex
    assert tex.count(r"\\") == 4
    assert "over a" in str(known)


def test_special_characters_are_escaped(tmp_path: Path) -> None:
    made = comparison(tmp_path, ["a_b|c & 50 %<"], seeds=1)
    fake(made.cells[0].path, [], {"x": 0.5})
    assert r"a\_b|c \& 50 \%$<$" in made.tables["summary"].latex()
    assert r"a\_b\|c & 50 %\<" in made.tables["summary"].markdown()


def test_settings_and_the_unification_gap(tmp_path: Path) -> None:
    made = comparison(
        tmp_path, ["a", "b"], seeds=2, sweep={"mode": ["centralised", "federated"], "data.alpha": [0.1, 1]}
    )
    for cell in made.cells:
        gap = {"a": 0.3, "b": 0.1}[cell.method] + 0.02 * cell.seed * (cell.method == "a")
        value = 0.9 - gap * (cell.options["mode"] == "federated") - 0.1 * (cell.options["data.alpha"] == 1)
        fake(cell.path, [], {"x": value})
    found = {(r["setting"], r["method"]): r for r in made.tables["gap"].rows}
    assert set(found) == {(f"data.alpha={v}", m) for v in (0.1, 1) for m in "ab"}
    assert found["data.alpha=1", "a"]["gap"] == pytest.approx(0.31)
    assert found["data.alpha=1", "b"]["gap"] == pytest.approx(0.1)
    assert found["data.alpha=1", "b"]["closed"] == pytest.approx(0.21)
    assert found["data.alpha=1", "b"]["mode"] == "federated"
    overall = made.tables["overall"].rows[1]
    assert (overall["wins"], overall["ties"]) == (4, 4)
    assert overall["p_sign"] == pytest.approx(0.125)
    assert "gap" not in comparison(tmp_path, ["a"], sweep={"mode": ["federated", "hybrid"]}).tables


def test_what_is_missing_is_shown(tmp_path: Path) -> None:
    made = comparison(tmp_path, ["a", "b", "c", "d"])
    fake(made.cells[0].path, [None], {"x": 0.5})
    fake(made.cells[1].path, [None, None], {"x": None})  # no test rows
    made.cells[3].failure = "nan in the update of client 3"
    fake(made.cells[4].path, [], {"other": 0.4})
    (made.cells[6].path).mkdir()
    (made.cells[6].path / "run.toml").write_text("format = 1\ntask = 'classification'")
    (made.cells[6].path / "metrics.jsonl").write_text('{"round": 1, "bytes_up": 3, "bytes_down": 4}\n')
    a, b, c, d = made.tables["summary"].rows
    assert (a["done"], a["value"], a["value_n"], a["value_low"]) == (2, 0.5, 1, None)
    assert (b["done"], b["failed"], b["difference"], b["p"]) == (1, 1, None, None)
    assert (c["done"], c["value"]) == (0, None)
    assert d["rank"] is None
    assert [r["state"] for r in made.tables["cells"].rows[3:7]] == ["failed", "done", "waiting", "unfinished"]
    assert made.tables["cells"].rows[6]["bytes"] == 7
    text = made.tables["summary"].markdown()
    assert "1/3 (1 failed)" in text
    assert "nan in the update of client 3" in text
    assert made.write()
    assert str(made)


def test_nothing_has_begun(tmp_path: Path) -> None:
    made = comparison(tmp_path, ["a", "b"])
    assert (made.metric, made.higher_is_better) == ("accuracy", True)
    assert made.tables["summary"].rows[0]["done"] == 0
    assert made.write()


def test_one_client_one_seed_one_method() -> None:
    made = fl.compare(
        "local",
        model=sources.net,
        data=fl.Federation((sources.rows(0).clients[0],)),
        seeds=1,
        rounds=1,
        progress=False,
    )
    (row,) = made.tables["summary"].rows
    assert row["value_n"] == 1
    assert "over" not in made.tables["summary"].markdown().splitlines()[2]


def test_real_runs_in_two_modes_that_stop_early(tmp_path: Path) -> None:
    made = fl.compare(
        "local; fedavg",
        model={"name": "mlp", "hidden": [4]},
        data={"name": "digits", "clients": 3, "val": 0.2},
        seeds=2,
        rounds=6,
        sweep={"mode": ["centralised", "federated"]},
        evaluate={"patience": 1},
        jobs=1,
        progress=False,
        out=tmp_path / "c",
    )
    assert {r["state"] for r in made.tables["cells"].rows} == {"done"}
    assert len(made.tables["gap"].rows) == 2
    again = fl.load_comparison(tmp_path / "c").tables["summary"].rows
    assert again == made.tables["summary"].rows
