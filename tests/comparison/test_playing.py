"""Cells are ordinary runs; a comparison goes on where it stopped, whoever plays it."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.comparison import execution, resources
from fedloom.comparison.execution import KILLED
from fedloom.spec.registry import METHODS
from tests.comparison import recipes, sources

QUICK: dict[str, Any] = {
    "rounds": 2,
    "batch_size": 4,
    "engine": "loop",
    "precision": "fp64",
    "jobs": 1,
    "progress": False,
}


def compare(methods: Any = "fedavg; fedper", **options: Any) -> fl.Comparison:
    given = {"model": sources.net, "data": sources.rows, "seeds": 2} | QUICK | options
    return fl.compare(methods, **given)


def curves(made: fl.Comparison) -> list[Any]:
    return [[(r["round"], r["loss"], r["accuracy"]) for r in c.history] for c in made.cells]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that ``fit`` is called for, in order."""
    found: list[Path] = []
    original = execution.fit

    def counted(**options: Any) -> fl.Result:
        found.append(options["out"])
        return original(**options)

    monkeypatch.setattr(execution, "fit", counted)
    return found


def test_a_cell_is_the_run_that_fit_makes(tmp_path: Path) -> None:
    made = compare(out=tmp_path / "c", sweep={"epochs": [1, 2], "data.shift": [0, 1], "model.hidden": [4]})
    assert len(made.cells) == 2 * 2 * 2 * 2
    cell = made.of("fedper", "epochs=2, data.shift=1, model.hidden=4", seed=1)[0]
    alone = fl.fit(
        "fedper",
        partial(sources.net, hidden=4),
        sources.rows(1, shift=1),
        rounds=2,
        epochs=2,
        batch_size=4,
        engine="loop",
        precision="fp64",
        seed=1,
        progress=False,
    )
    for ours, theirs in zip(cell.history, alone.history, strict=True):
        assert {k: v for k, v in ours.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }
    assert cell.result.model("1")(sources.rows(1).clients[0].train.x.double()).shape[1] == 3


def test_finished_cells_are_not_repeated_and_more_may_be_asked_for(tmp_path: Path, calls: list[Path]) -> None:
    first = compare(out=tmp_path / "c")
    assert len(calls) == 4
    assert curves(compare(out=tmp_path / "c")) == curves(first)
    assert len(calls) == 4
    more = compare("fedavg; fedper; local", seeds=[0, 1, 5], out=tmp_path / "c")
    assert [p.name for p in calls[4:]] == ["fedavg_seed=5", "fedper_seed=5", *(f"local_seed={s}" for s in (0, 1, 5))]
    again = fl.load_comparison(tmp_path / "c")
    assert curves(again) == curves(more)
    assert (again.methods, again.seeds, again.baseline) == (more.methods, more.seeds, "fedavg")
    with pytest.raises(fl.UserError, match="rounds was 2, now 3"):
        compare(out=tmp_path / "c", rounds=3)


def test_an_interrupted_cell_is_resumed(tmp_path: Path) -> None:
    whole = compare(rounds=4)
    heard = []

    def stop(record: dict[str, Any]) -> None:
        heard.append(record["round"])
        if len(heard) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(rounds=4, out=tmp_path / "c", callbacks=[stop])
    left = fl.load_comparison(tmp_path / "c")
    assert [c.state for c in left.cells] == ["done", "unfinished", "waiting", "waiting"]
    assert len(left.cells[1].history) == 2
    assert curves(compare(rounds=4, out=tmp_path / "c")) == curves(whole)


def test_a_failed_cell_is_shown_and_tried_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sweep": {"model.hidden": [4, -1]}, "seeds": 1}
    made = compare("fedavg", out=tmp_path / "c", **options)
    assert [c.state for c in made.cells] == ["done", "failed"]
    assert made.failed[0].failure
    assert fl.load_comparison(tmp_path / "c").failed[0].failure == made.failed[0].failure
    with pytest.raises(fl.UserError, match="is failed"):
        _ = made.failed[0].result
    assert compare("fedavg", out=tmp_path / "c", **options).failed[0].failure


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A method that only a module of one's own registers; it is gone afterwards."""
    monkeypatch.setenv(recipes.OWN, "1")
    importlib.reload(recipes)
    yield "compared_near(mu=0.5)"
    METHODS.pop("compared_near")


def test_processes_give_the_same_numbers(tmp_path: Path, own: str) -> None:
    made = compare(["fedavg", own], jobs=2, out=tmp_path / "c")
    assert [c.state for c in made.cells] == ["done"] * 4
    assert curves(made) == curves(compare(["fedavg", own]))


def test_a_script_that_cannot_be_imported_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import fedloom as fl\nfl.compare('fedavg')\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sources.net, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "net", sources.net, raising=False)
    with pytest.warns(UserWarning, match="if __name__ == '__main__'"):
        assert len(compare("fedavg", jobs=2).done) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(resources, "processors", lambda: 2)
        assert len(compare("fedavg", jobs="auto").done) == 2  # nobody asked for processes


@pytest.mark.slow
def test_a_process_that_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    source = partial(sources.deadly, marks=str(tmp_path))
    made = compare("fedavg", data=source, seeds=4, jobs=2, out=tmp_path / "c")
    assert (tmp_path / "died").exists()
    assert [c.state for c in made.cells] == ["done", "done", "failed", "done"]
    assert made.failed[0].failure == KILLED


def test_what_cannot_travel_is_played_here() -> None:
    with pytest.warns(UserWarning, match="one after another"):
        made = compare("fedavg", data=lambda seed: sources.rows(seed), jobs=2)
    assert len(made.done) == 2


def test_one_federation_for_all_seeds(tmp_path: Path) -> None:
    data = sources.rows(0)
    compare("fedavg", data=data, out=tmp_path / "c")
    with pytest.raises(fl.UserError, match=r"data\.fingerprint"):
        compare("fedavg", data=sources.rows(1), out=tmp_path / "c")
    with pytest.raises(fl.UserError, match="function of alpha"):
        compare("fedavg", data=data, sweep={"data.alpha": [0.1]})


def test_methods_of_ones_own_have_labels(tmp_path: Path) -> None:
    made = compare({"Ours": fl.fedprox(mu=0.5), "FedAvg": "fedavg"}, baseline="fedavg()", out=tmp_path / "c")
    assert made.baseline == "FedAvg"
    assert made.methods == {"Ours": "fedprox(mu=0.5)", "FedAvg": "fedavg()"}
    assert made.of("Ours")[0].config["method"] == "fedprox(mu=0.5)"


def test_the_lines_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert "fedper, seed 1: accuracy" in lines[3]


def test_a_folder_is_one_comparisons_at_a_time(tmp_path: Path) -> None:
    def meddle(record: dict[str, Any]) -> None:
        with pytest.raises(fl.UserError, match="another run is using"):
            compare(out=tmp_path / "c")

    assert not compare(out=tmp_path / "c", callbacks=[meddle]).failed


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(fl.UserError, match="holds no comparison"):
        compare(out=tmp_path)
    with pytest.raises(fl.UserError, match="holds no comparison"):
        fl.load_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(fl.UserError, match="damaged"):
        fl.load_comparison(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "comparison.json").write_text(text)
        with pytest.raises(fl.UserError, match="damaged"):
            fl.load_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(fl.UserError, match=r"^.*has format 2; expected format 1\. Make .*$"):
        fl.load_comparison(tmp_path)


def test_warnings_of_methods_do_not_stop_a_comparison() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compare("fedbn", seeds=1).failed
