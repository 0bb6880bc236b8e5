"""One set of names: configuration files, arguments of fit and the page of options say the same."""

from __future__ import annotations

import inspect
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.rounds.evaluation import Evaluate
from fedloom.rounds.sampling import Participation
from fedloom.runs import config_file
from fedloom.runs.options import Settings
from fedloom.runs.run_folder import flat
from fedloom.spec.options import default, meanings, option_names
from scripts import docs_pages
from tests.helpers import federation, mlp

ELSEWHERE = {"out", "resume", "progress", "callbacks"}
"""Arguments of fit that are options of the command line, or only make sense in Python."""


def test_every_key_is_an_argument_of_fit_and_the_other_way_round() -> None:
    arguments = set(inspect.signature(fl.fit).parameters)
    assert arguments - ELSEWHERE - {"head"} == set(config_file.KEYS), "head is a key of [model]"


def test_defaults_agree() -> None:
    parameters = inspect.signature(fl.fit).parameters
    for name in option_names(Settings):
        assert parameters[name].default == default(Settings, name), name


def test_every_option_has_a_meaning() -> None:
    for cls in (Settings, *config_file.SECTIONS.values()):
        assert set(meanings(cls)) == set(option_names(cls)), cls
    assert set(meanings(fl.fit)) == set(inspect.signature(fl.fit).parameters)


def test_the_page_is_current() -> None:
    """``python scripts/docs_pages.py`` writes it."""
    assert (docs_pages.DOCS / "configuration.md").read_text(encoding="utf-8") == docs_pages.configuration_page()


def test_a_run_repeats_from_its_own_configuration(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    first = fl.fit(
        "fedprox(mu=0.1)",
        "mlp(hidden=(12,))",
        {
            "name": "digits",
            "clients": 4,
            "partition": "dirichlet(0.5) + affine(scale=0.1)",
            "val": 0.2,
            "holdout": 0.25,
        },
        rounds=2,
        cohort=2,
        optimizer="adam(lr=0.01, betas=(0.8, 0.9))",
        evaluate={"every": 2, "clients": "sampled"},
        participation={"rule": "size", "stragglers": 0.5},
        out=tmp_path / "first",
        progress=False,
    )
    table = config_file.load(tmp_path / "first" / "run.toml")
    again = fl.fit(**table, out=tmp_path / "again", progress=False)
    assert [r["loss"] for r in again.history if "loss" in r] == [r["loss"] for r in first.history if "loss" in r]
    for name in ("clients.csv", "models/shared.safetensors", "run.toml"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


def test_modules_and_arrays_are_not_repeatable(tmp_path: Path) -> None:
    fl.fit("fedavg", mlp(), federation(), rounds=1, out=tmp_path, progress=False)
    table = tomllib.loads((tmp_path / "run.toml").read_text())
    assert table["repeatable"] is False
    assert table["model"]["given"] == "Sequential"
    assert table["model"]["leaves"] == {"0.weight": [5, 6], "0.bias": [5], "2.weight": [3, 5], "2.bias": [3]}
    assert len(table["model"]["sha256"]) == 64
    with pytest.raises(fl.UserError, match="given in Python"):
        config_file.load(tmp_path / "run.toml")


def test_a_given_model_is_needed_for_models_only(tmp_path: Path) -> None:
    import torch
    from torch import nn

    made = fl.fit("fedper", mlp(), federation(), rounds=1, out=tmp_path, progress=False)
    loaded = fl.load_run(tmp_path)
    assert loaded.summary() == made.summary()
    with pytest.raises(fl.UserError, match="model="):
        loaded.model("0")
    with pytest.raises(fl.UserError, match=r"differs .* 0\.weight"):
        fl.load_run(tmp_path, model=nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))).model()
    x = torch.randn(4, 6)
    for client in ("0", "1", "2", None):
        assert torch.equal(fl.load_run(tmp_path, model=mlp()).model(client)(x), made.model(client)(x))


@pytest.mark.parametrize(
    "method", ["fedavg", "fedper", "ditto", "fedbn", "fedrod", "feddbe", "apfl", "fedbabu", "fedala"]
)
def test_models_come_back_from_disk(tmp_path: Path, method: str) -> None:
    """Every route: plain, second copy, own statistics, extra leaves, fine-tuned at evaluation."""
    import torch

    if method not in fl.list_methods():
        pytest.skip(f"{method} is not there")
    data = {"name": "digits", "clients": 3, "partition": "dirichlet(0.5)"}
    made = fl.fit(method, "mlp(norm='bn_track')", data, rounds=2, cohort=2, out=tmp_path, progress=False)
    x = fl.data.load("digits").train.x[:8]
    loaded = fl.load_run(tmp_path)
    for client in ("0", "1", "2", None):
        with torch.no_grad():
            assert torch.equal(loaded.model(client)(x), made.model(client)(x)), client


def test_more_than_a_thousand_clients_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("fedloom.runs.model_files.SINGLE", 2)
    monkeypatch.setattr("fedloom.runs.loading.SINGLE", 2)
    made = fl.fit("fedper", mlp(), federation((9, 4, 5)), rounds=1, out=tmp_path, progress=False)
    names = sorted(p.name for p in (tmp_path / "models").iterdir())
    assert names == ["clients-0001.safetensors", "clients-0002.safetensors", "shared.safetensors"]
    x = torch.randn(4, 6)
    for client in ("0", "1", "2"):
        assert torch.equal(fl.load_run(tmp_path, model=mlp()).model(client)(x), made.model(client)(x))


def test_only_personal_leaves_are_saved_for_clients(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    fl.fit("fedper", mlp(), federation(), rounds=1, out=tmp_path, progress=False)
    assert set(load_file(tmp_path / "models" / "clients" / "1.safetensors")) == {"2.weight", "2.bias"}
    assert set(load_file(tmp_path / "models" / "shared.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_odd_ids_are_safe_file_names(tmp_path: Path) -> None:
    data = federation((9, 4, 5))
    ids = ["../up", "a b%c", ".."]
    odd = fl.Federation.from_arrays([((c.train.x, c.train.y), (c.test.x, c.test.y)) for c in data if c.test], ids=ids)
    made = fl.fit("fedper", mlp(), odd, rounds=1, out=tmp_path / "run", progress=False)
    files = sorted(p.name for p in (tmp_path / "run" / "models" / "clients").iterdir())
    assert files == ["%2E%2E.safetensors", "..%2Fup.safetensors", "a%20b%25c.safetensors"]
    assert list(fl.load_run(tmp_path / "run").clients) == ids == list(made.clients)


def test_assignments_reach_into_tables() -> None:
    table: dict[str, Any] = {"model": "convnet3", "data": {"name": "digits"}}
    for text in (
        "model.width=8",
        "data.clients=7",
        "optimizer.name=adam",
        "cohort=0.5",
        'method="fedper"',
        "task=binary",
    ):
        config_file.assign(table, text)
    assert flat(table) == {
        "model.name": "convnet3",
        "model.width": 8,
        "data.name": "digits",
        "data.clients": 7,
        "optimizer.name": "adam",
        "cohort": 0.5,
        "method": "fedper",
        "task": "binary",
    }


def test_options_objects_are_accepted_as_they_are() -> None:
    result = fl.fit(
        "fedavg",
        mlp(),
        federation(),
        rounds=1,
        evaluate=Evaluate(every=0),  # type: ignore[arg-type]
        participation=Participation(rule="cyclic"),  # type: ignore[arg-type]
        progress=False,
    )
    assert len(result.history) == 1


def test_the_head_of_a_named_model_is_a_pattern() -> None:
    with pytest.raises(fl.UserError, match=r"model\.head=False: expected text"):
        fl.fit("fedavg", {"name": "mlp", "head": False}, {"name": "digits", "clients": 2}, rounds=1, progress=False)
