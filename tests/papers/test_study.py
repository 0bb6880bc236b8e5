"""The experiments under papers/: their log, their tables, and a tiny run of each that needs no data from elsewhere."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from papers.beyond import points, stacks
from papers.fedaims import table2
from papers.fedlag import maps
from papers.fedmap import real, synthetic
from papers.lib import study, tables
from papers.omniisr import hybrid, small, table7

CASES = [{"name": name, "seed": seed} for seed in (0, 1) for name in ("a", "b")]


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"stop_after": math.inf, "shard": "0/1", "queue": None, "device": "cpu", "every": 0, **changes}
    )


def test_finished_runs_are_not_repeated_and_shards_share_a_log(tmp_path: Path) -> None:
    log, made = tmp_path / "log.jsonl", []

    def run(case: study.Case) -> dict[str, Any]:
        made.append((case["name"], case["seed"]))
        return {"accuracy": 0.5}

    study.play(CASES, run, log, options(shard="1/2"))
    assert made == [("b", 0), ("b", 1)]
    study.play(CASES, run, log, options())
    study.play(CASES, run, log, options())
    assert sorted(made) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert len(study.read(log)) == 4


def test_processes_that_share_a_queue_take_each_case_once(tmp_path: Path) -> None:
    def run_of(name: str) -> Callable[[study.Case], dict[str, Any]]:
        def run(case: study.Case) -> dict[str, Any]:
            ran.append((name, case))
            if name == "a" and len(ran) == 1:  # another process begins while this one is at its first case
                study.play(CASES, run_of("b"), log, options(queue=tmp_path / "queue"))
            return {"accuracy": 1.0}

        return run

    ran: list[tuple[str, study.Case]] = []
    log = tmp_path / "log.jsonl"
    study.play(CASES, run_of("a"), log, options(queue=tmp_path / "queue"))
    assert ran == [("a", CASES[0]), *(("b", case) for case in CASES[1:])]
    assert len(study.read(log)) == len(CASES)


def test_no_run_begins_that_would_end_too_late_and_a_failed_one_is_a_line(tmp_path: Path) -> None:
    def run(case: study.Case) -> dict[str, Any]:
        if case["name"] == "a":
            raise fl.RunError("all replies were rejected")
        return {"accuracy": 0.5}

    log = tmp_path / "log.jsonl"
    study.play(CASES, run, log, options())
    assert [line["found"].get("failed") for line in study.read(log)] == ["all replies were rejected", None] * 2
    assert list(tables.by(study.read(log), "name")) == [("b",)]
    study.play(CASES, run, tmp_path / "other.jsonl", options(stop_after=-1.0))
    assert study.read(tmp_path / "other.jsonl") == []


def test_how_long_a_run_takes_is_known_from_earlier_ones_on_the_same_data(tmp_path: Path) -> None:
    def run(case: study.Case) -> dict[str, Any]:
        made.append(case["data"])
        return {"accuracy": 0.5}

    made: list[str] = []
    log = tmp_path / "log.jsonl"
    known = [("long", "cpu", 500.0), ("long", "cpu", 300.0), ("short", "another", 900.0), ("short", "cpu", 1.0)]
    lines = [{"case": {"data": d, "seed": i}, "device": at, "wall": w} for i, (d, at, w) in enumerate(known)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cases = [{"data": data, "seed": 9} for data in ("long", "short", "new")]
    study.play(cases, run, log, options(stop_after=200.0))
    assert made == ["short", "new"]
    study.play(cases, run, log, options(stop_after=600.0))
    assert made == ["short", "new", "long"]


def test_differences_are_paired_by_seed() -> None:
    def lines(values: dict[int, float]) -> list[dict[str, Any]]:
        return [{"case": {"seed": s}, "found": {"accuracy": v}} for s, v in values.items()]

    found = tables.difference(lines({2: 0.9, 0: 0.5, 7: 0.1}), lines({0: 0.4, 2: 0.95}), "accuracy")
    assert found == pytest.approx([0.1, -0.05])
    assert tables.signed(found) == "+2.50 ± 10.61 (1/2)"
    assert tables.spread([0.5]) == "50.00 (1 seed)"
    assert tables.spread([]) == "–"


def test_fewer_rows_of_recordings_stay_in_order() -> None:
    scenes = fl.data.load("street_scenes", towns=2, frames=6, length=3, size=(16, 24))
    few = study.shrunk(scenes, 5)
    assert len(few.train) == 5
    assert few.sequences is not None
    assert (few.sequences[1:] >= few.sequences[:-1]).all()


@pytest.mark.parametrize("module", [table7, hybrid, small, stacks, points, table2], ids=lambda m: m.__name__)
def test_a_tiny_run_of_each(module: Any, tmp_path: Path) -> None:
    chosen = options(
        seeds=[0], only=None, rounds=2, rows=None, data="digits", alpha=0.5, clients=4, lr=0.05, precision="fp32",
        isr=["on"] if module is hybrid else "isr", fractions=[0.2], part="table" if module is table2 else "kappa",
        participation=["0.2"], classes=None, alphas=[0.1], norm="gn",
    )  # fmt: skip
    images = study.shrunk(fl.data.load("digits"), 200)
    case = list(module.cases(chosen))[3]
    log = tmp_path / "log.jsonl"
    study.play([case], lambda c: module.run(c, images, chosen), log, chosen)
    (line,) = study.read(log)
    assert 0 <= line["found"]["accuracy"] <= 1
    assert line["case"] == json.loads(json.dumps(case))
    assert isinstance(module.report(log), str)


@pytest.mark.data
@pytest.mark.parametrize("data", ["heart_disease", "office"])
def test_natural_clients_of_fedmap(data: str, data_dir: Path, tmp_path: Path) -> None:
    chosen = options(data_dir=data_dir, rows=None, precision="fp32", every=2)
    if data == "office":  # the network is large: its clients must do
        sites = real.parted(real.SETTINGS[data], chosen, seed=0)
        assert [(c.id, len(c.train) + len(c.test)) for c in sites] == [("amazon", 958), ("dslr", 157), ("webcam", 295)]
        return
    log, case = tmp_path / "log.jsonl", {"data": data, "name": "Local", "method": "local", "seed": 0, "rounds": 4}
    study.play([case], lambda c: real.run(c, chosen), log, chosen)
    assert set(study.read(log)[0]["found"]["clients"]) == {"cleveland", "hungarian", "switzerland", "va"}
    assert "Local, 10 epochs" in real.report(log)


def test_late_tests_are_the_last_five() -> None:
    curve = [[r, float(r)] for r in range(1, 8)]
    assert study.late({"curve_accuracy": curve}, "miou", "accuracy") == 5.0
    assert study.late({"curve_accuracy": curve[:4]}, "accuracy") is None
    assert study.late({}, "accuracy") is None


def test_conflict_is_rarer_where_users_are_alike() -> None:
    found = {s: maps.toy({"part": "toy", "setting": s, "seed": 0, "rounds": 5}) for s in ("iid", "skewed")}
    assert found["iid"]["cosine"] > found["skewed"]["cosine"] + 0.2


@pytest.mark.filterwarnings("ignore:fedbn")
def test_fedbn_is_fedavg_on_a_network_without_normalisation() -> None:
    """FedMAP prints 63.28 for one and 54.66 for the other."""
    case = {"skew": "label", "seed": 0, "rounds": 1, "epochs": 1, "nuisance": 9.0}
    a, b = (synthetic.run({**case, "method": m}, "auto") for m in ("fedavg", "fedbn"))
    assert a["balanced_accuracy_clients"] == b["balanced_accuracy_clients"]
