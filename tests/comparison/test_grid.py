"""Which cells there are, and what is refused before anything runs."""

from __future__ import annotations

import os
from typing import Any

import pytest

import fedloom as fl
from fedloom.comparison import resources
from fedloom.comparison.arguments import arguments
from fedloom.comparison.grid import folder_of, methods_of, seeds_of, sweeps_of
from fedloom.comparison.resources import jobs_of
from fedloom.runs import choose_engine

DIGITS = {"name": "digits", "clients": 4}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"methods": "fedpox"}, "Did you mean 'fedprox'"),
        ({"methods": "fedavg; fedavg"}, "twice"),
        ({"methods": " ; "}, "at least one"),
        ({"methods": 3}, "expected a list"),
        ({"seeds": 0}, "at least 1"),
        ({"seeds": "one"}, "expected numbers"),
        ({"seeds": "5-2"}, "expected numbers"),
        ({"seeds": [1, 1]}, "twice"),
        ({"seeds": [-1]}, "at least 0"),
        ({"sweep": {"sed": [1]}}, "unknown option to sweep"),
        ({"sweep": {"seed": [1]}}, "options of their own"),
        ({"sweep": {"epochs": []}}, "list of values"),
        ({"sweep": {"epochs": "12"}}, "list of values"),
        ({"sweep": {"epochs": [1, 1]}}, "twice"),
        ({"sweep": {"epochs": ["many"]}}, "epochs='many'"),
        ({"sweep": ["epochs"]}, "key=value,value"),
        ({"sweep": ["epochs=1,"]}, "key=value,value"),
        ({"sweep": ["epochs=1", "epochs=2"]}, "twice"),
        ({"sweep": {"data.alpa": [0.1]}}, "unknown option of data or argument of its partition"),
        ({"sweep": {"data.alpha": [-1.0]}}, "alpha"),
        ({"sweep": {"optimizer.speed": [1]}}, "unknown option of optimizer"),
        ({"sweep": {"mode": ["sideways"]}}, "mode='sideways'"),
        ({"baseline": "scaffold"}, "unknown baseline"),
        ({"evaluate": {"folds": 5}}, "repeats runs by seeds"),
        ({"jobs": 0}, "jobs=0"),
        ({"jobs": "all"}, "jobs='all'"),
        ({"round": 3}, "Did you mean 'rounds'"),
        ({"data": 7}, "expected a federation"),
        ({"data": {"nam": "digits"}}, "unknown option of data"),
    ],
)
def test_mistakes_are_found_before_anything_runs(options: dict[str, Any], reason: str) -> None:
    given = {"methods": "fedavg; fedper", "data": DIGITS, "rounds": 1, "progress": False} | options
    with pytest.raises(fl.UserError, match=reason):
        fl.compare(given.pop("methods"), **given)


def test_seeds() -> None:
    assert seeds_of(2) == (0, 1)
    assert seeds_of("7, 3-5") == (7, 3, 4, 5)
    assert seeds_of([9]) == (9,)


def test_sweeps_from_text() -> None:
    found = sweeps_of(["data.alpha=0.1, 0.3", "mode=centralised,federated", "model.hidden=[8],[8, 8]"])
    assert found == {
        "data.alpha": [0.1, 0.3],
        "mode": ["centralised", "federated"],
        "model.hidden": [[8], [8, 8]],
    }


@pytest.mark.parametrize(
    ("base", "options", "expected"),
    [
        ({"data": "digits"}, {"data.clients": 3}, {"data": {"name": "digits", "clients": 3}}),
        (
            {"data": {"name": "digits", "partition": "dirichlet(0.5, min_size=2) + affine(0.1)"}},
            {"data.alpha": 0.1},
            {"data": {"name": "digits", "partition": "dirichlet(0.1, min_size=2) + affine(0.1)"}},
        ),
        (
            {"data": {"name": "digits", "partition": "dirichlet(0.5) + affine(0.1)"}},
            {"data.shift": 2},
            {"data": {"name": "digits", "partition": "dirichlet(0.5) + affine(0.1, shift=2)"}},
        ),
        ({"data": "digits"}, {"data.options.size": 3}, {"data": {"name": "digits", "options": {"size": 3}}}),
        ({"optimizer": "sgd(lr=0.1)"}, {"optimizer.lr": 0.2}, {"optimizer": {"name": "sgd", "lr": 0.2}}),
        ({}, {"evaluate.every": 5}, {"evaluate": {"every": 5}}),
        ({"model": "mlp(hidden=[4])"}, {"model.hidden": [8]}, {"model": {"name": "mlp", "hidden": [8]}}),
        ({}, {"optimizer": "adam"}, {"optimizer": "adam"}),
    ],
)
def test_values_find_their_places(base: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]) -> None:
    made = arguments(base, "fedavg", 3, options)
    assert made == base | expected | {"method": "fedavg", "seed": 3}


def test_an_optimiser_object_is_a_table_to_a_sweep() -> None:
    made = arguments({"optimizer": fl.sgd(lr=0.1, momentum=0.9)}, "fedavg", 0, {"optimizer.lr": 0.5})
    assert fl.runs.config_file.optimizer_of(made["optimizer"]) == fl.sgd(lr=0.5, momentum=0.9)  # type: ignore[attr-defined]


def test_folders_have_names_of_their_own() -> None:
    labels = ["fedavg", "fedprox(mu=0.1)", "fedprox(mu=1)", "a/b", "a:b", "é", "..", "x" * 300, "x" * 299 + "y"]
    names = {folder_of(label, {}, 0) for label in labels}
    assert len(names) == len(labels)
    assert all(len(n) < 120 and not set(n) & set("/\\: ()'\"*?") and not n.startswith(".") for n in names)


def test_jobs_go_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"data": DIGITS, "seed": 0, "device": "cpu"}
    monkeypatch.setattr(resources, "processors", lambda: 8)
    monkeypatch.setattr(resources, "free_memory", lambda: 3.5e9)
    assert jobs_of("auto", 20, made) == 3
    assert jobs_of("auto", 2, made) == 2
    assert jobs_of("auto", 1, made) == 1
    assert jobs_of("auto", 20, made | {"device": "cuda"}) == 1
    assert jobs_of("5", 20, made | {"device": "cuda"}) == 5
    monkeypatch.setattr(resources, "free_memory", lambda: 1e6)
    assert jobs_of("auto", 20, made) == 1
    assert resources.free_memory() > 0


@pytest.mark.parametrize(("told", "expected"), [("3", 3), ("0", 1), ("", None), ("many", None)])
def test_a_run_may_be_told_its_processors(monkeypatch: pytest.MonkeyPatch, told: str, expected: int | None) -> None:
    monkeypatch.setenv("FEDLOOM_CPUS", told)
    assert choose_engine.cpus_per_process() == (os.cpu_count() if expected is None else expected)


def test_methods_from_text_and_objects() -> None:
    assert list(methods_of([fl.fedprox(mu=0.1), "fedavg + isr"])) == ["fedprox(mu=0.1)", "fedavg + isr"]
