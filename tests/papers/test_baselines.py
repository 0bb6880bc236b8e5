"""The sanity table: what is run, what is not run again, and what the page says."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedloom as fl

SCRIPT = Path(__file__).resolve().parents[2] / "papers" / "baselines" / "table.py"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("baselines_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["baselines_table"] = module
    spec.loader.exec_module(module)
    return module


def line(table: ModuleType, method: str, seed: int, lr: float, accuracy: float, alpha: float = 0.1) -> dict[str, Any]:
    cell = table.Cell("digits", alpha, seed, method, lr)
    numbers = dict.fromkeys(("accuracy_weighted", "accuracy_worst10", "bytes_up", "bytes_down", "cpu"), 1.0)
    return dict(zip(table.KEY, cell.key, strict=True)) | numbers | {"accuracy": accuracy}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(found) for found in lines) + "\n")


def test_every_method_is_in_it(table: ModuleType) -> None:
    assert sorted(table.methods()) == fl.list_methods()
    assert set(table.GLOBAL) <= set(fl.list_methods())
    for data in table.SETTINGS:
        for method in table.methods():
            fl.method(table.Cell(data, 0.1, 0, method, 0.1).text)


def test_one_cell(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.SETTINGS, "digits", replace(table.SETTINGS["digits"], rounds=1, epochs=1))
    cell = table.Cell("digits", 0.3, 0, "fedper", 0.1)
    found = json.loads(json.dumps(table.run(cell, "cpu", None)))
    assert tuple(found[k] for k in table.KEY) == cell.key
    assert "failed" not in found
    assert found["bytes_up"] > 0
    broken = table.run(table.Cell("digits", 0.3, 0, "no_such_method", 0.1), "cpu", None)
    assert "no_such_method" in broken["failed"]


def test_rates_are_the_best_on_the_tuning_seed_under_the_present_settings(table: ModuleType) -> None:
    lines = [line(table, "fedavg", 100, lr, a) for lr, a in ((0.3, 0.8), (0.02, 0.8), (0.1, 0.7))]
    lines += [line(table, "pfedme", 100, 0.1, 0.5), line(table, "pfedme", 100, 0.3, 0.9) | {"text": "pfedme"}]
    assert table.best_rates(lines) == {("digits", "fedavg"): 0.02, ("digits", "pfedme"): 0.1}


def test_finished_cells_are_not_repeated(table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "cells.jsonl", [line(table, "fedavg", 0, 0.1, 0.9)])
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"data": "digi')  # cut off by a kill
    options = table.argparse.Namespace(jobs=1, stop_after=float("inf"), device="cpu", data_dir=None)
    cells = [table.Cell("digits", 0.1, 0, "fedavg", 0.1)]
    monkeypatch.setattr(table, "run", None)  # would fail
    assert table.run_all(cells, tmp_path / "cells.jsonl", options, table.time.perf_counter())
    late = [*cells, table.Cell("digits", 0.1, 1, "fedavg", 0.1)]
    options.stop_after = 0.0
    assert not table.run_all(late, tmp_path / "cells.jsonl", options, table.time.perf_counter())


def test_the_page_marks_what_is_not_above_fedavg(table: ModuleType, tmp_path: Path) -> None:
    tuned = {"fedavg": 0.5, "fedper": 0.4, "ditto": 0.6}
    write(tmp_path / "tuning.jsonl", [line(table, m, 100, 0.1, a) for m, a in tuned.items()])
    cells = [line(table, m, s, 0.1, a + 0.01 * s) for m, a in tuned.items() for s in (0, 1, 2)]
    cells.append(line(table, "fedper", 100, 0.1, 1.0))  # the tuning seed is never reported
    write(tmp_path / "cells.jsonl", cells)
    page = table.table(tmp_path, {"digits fedper": "a reason."})
    rows = [r for r in page.splitlines() if r.startswith("| ")]
    assert [r.split(" | ")[0].strip("| ") for r in rows[1:]] == ["ditto", "fedavg", "fedper¹"]
    assert "| 41.0 ± 1.0 |" in rows[3]
    assert "- *fedper*: a reason." in page
    assert "*ditto*:" not in page


def test_rows_of_each_class(table: ModuleType) -> None:
    rows = fl.data.Rows(torch.arange(8.0)[:, None], torch.tensor([0, 0, 1, 0, 1, 1, 1, 0]))
    kept = table.first(rows, 2)
    assert kept.y.tolist() == [0, 0, 1, 1]
    assert kept.x.flatten().tolist() == [0, 1, 2, 4]


def test_reasons_are_for_what_is_in_the_table(table: ModuleType) -> None:
    for key in json.loads((SCRIPT.parent / "reasons.json").read_text()):
        data, method = key.split()
        assert data in table.SETTINGS
        assert method in fl.list_methods()
        assert method not in table.GLOBAL
