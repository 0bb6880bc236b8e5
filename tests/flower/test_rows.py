"""A site's rows from its own files, and what it is told when they are wrong."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

pytest.importorskip("flwr")

import fedloom as fl
from fedloom.flower.experiment import Experiment
from fedloom.flower.site.site_data import SiteConfig, load_rows, new_rows
from tests.flower.sites import experiment

HEADER = ["age", "sex", "chol", "outcome"]
LINES = [
    [str(30 + k), "F" if k % 3 else "M", "" if k == 5 else str(200 + k), "yes" if k % 2 else "no"] for k in range(20)
]


def plan(**more: Any) -> Experiment:
    inputs = {"shape": [4], "classes": ["no", "yes"], "columns": ["age", "sex", "chol"], "words": {"sex": ["F", "M"]}}
    table = experiment(
        ["fedavg"],
        task="binary",
        inputs=inputs,
        data={"label": "outcome", "preprocess": {"impute": "median", "scale": "standard"}},
    )
    return Experiment.of(table | more)


def site(
    folder: Path, lines: list[list[str]] | None = None, header: list[str] | None = None, **data: Any
) -> SiteConfig:
    with open(folder / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([header or HEADER, *(LINES if lines is None else lines)])
    table = {"site": "north", "data": {"path": "rows.csv", **data}}
    (folder / "site.toml").write_text(tomli_w.dumps(table))
    return SiteConfig.load(folder / "site.toml")


def test_a_table_is_encoded_by_the_experiment_and_fitted_on_the_sites_own_training_rows(tmp_path: Path) -> None:
    client = load_rows(plan(), site(tmp_path), 0)
    plan().check_rows(client)
    x, y = client.train.x, client.train.y
    assert isinstance(x, torch.Tensor)
    assert x.shape == (15, 4)
    assert client.test is not None
    assert len(client.test) == 5
    torch.testing.assert_close(x[:, :2].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    assert set(x[:, 2:].sum(1).tolist()) == {1.0}
    assert set(y.tolist()) == {0, 1}


def test_labels_follow_the_experiment_where_a_site_lacks_a_class(tmp_path: Path) -> None:
    lines = [[*line[:3], "yes"] for line in LINES]
    assert set(load_rows(plan(), site(tmp_path, lines), 0).train.y.tolist()) == {1}


def test_the_simulators_rows_from_the_same_file(tmp_path: Path) -> None:
    numbers = [[line[0], line[2] or "201", str(k % 2)] for k, line in enumerate(LINES)]
    config = site(tmp_path, numbers, ["age", "chol", "outcome"])
    steps = {"impute": "median", "scale": "standard"}
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "north.csv").write_text((tmp_path / "rows.csv").read_text())
    expected = fl.Federation.from_folder(tmp_path / "all", label="outcome", preprocess=steps, seed=7)["north"]
    made = load_rows(plan(inputs={"shape": [2], "classes": ["no", "yes"]}), config, 7)
    for part, rows in expected.parts().items():
        assert torch.equal(rows.x, made.parts()[part].x)  # type: ignore[arg-type]
        assert torch.equal(rows.y, made.parts()[part].y)


@pytest.mark.parametrize(
    ("lines", "header", "data", "words"),
    [
        (None, ["age", "sex", "cholesterol", "outcome"], {}, "'chol' is missing"),
        ([["x", "F", "1", "no"]], None, {}, "'x' is not a number"),
        ([["1", "female", "1", "no"]], None, {}, "'female' is not one of F, M"),
        ([["1", "F", "1", "maybe"]], None, {}, "'maybe' is not one of the experiment's classes"),
        ([["1", "F", "1", ""]], None, {}, "missing"),
        (None, None, {"label": "death"}, "'death'"),
        (None, None, {"path": "nowhere.csv"}, "does not exist"),
        (None, None, {"name": "heart_disease"}, "one of the two"),
        (None, None, {"test": "half"}, "test='half'"),
        (None, None, {"preprocess": {"fit": "federated"}}, "other sites' rows"),
        (None, None, {"preprocess": {}}, "ill"),
    ],
)
def test_what_is_wrong_is_said_in_words(tmp_path: Path, lines: Any, header: Any, data: Any, words: str) -> None:
    if words == "ill":
        chosen = plan(data={"label": "outcome"})
        words = "NaN"
    else:
        chosen = plan()
    with pytest.raises(fl.UserError, match=words):
        load_rows(chosen, site(tmp_path, lines, header, **data), 0)


def test_another_number_of_columns_is_said_in_words(tmp_path: Path) -> None:
    chosen = plan(inputs={"shape": [9], "classes": ["no", "yes"], "words": {"sex": ["F", "M"]}})
    with pytest.raises(fl.UserError, match=r"shape \(4,\); the experiment says \(9,\)"):
        chosen.check_rows(load_rows(chosen, site(tmp_path), 0))


def test_pictures_by_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, value in (("cat", 10), ("dog", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for k in range(4):
            image.fromarray(np.full((9, 7, 3), value, np.uint8)).save(tmp_path / "pictures" / name / f"{k}.png")
    (tmp_path / "site.toml").write_text(tomli_w.dumps({"site": "north", "data": {"path": "pictures"}}))
    inputs = {"shape": [3, 8, 8], "type": "uint8", "classes": ["dog", "cat"]}
    chosen = Experiment.of(experiment(["fedavg"], inputs=inputs))
    client = load_rows(chosen, SiteConfig.load(tmp_path / "site.toml"), 0)
    chosen.check_rows(client)
    for rows in client.parts().values():
        assert isinstance(rows.x, torch.Tensor)
        assert torch.equal(rows.x[:, 0, 0, 0], torch.where(rows.y == 1, 10, 200).to(torch.uint8))
    (tmp_path / "pictures" / "fish").mkdir()
    with pytest.raises(fl.UserError, match="'fish' is not one of the classes"):
        load_rows(chosen, SiteConfig.load(tmp_path / "site.toml"), 0)


@pytest.mark.data
def test_hospitals_of_the_heart_disease_data(tmp_path: Path, data_dir: Path) -> None:
    inputs = {"shape": [13], "classes": ["healthy", "diseased"]}
    chosen = Experiment.of(
        experiment(["fedavg"], sites=1, task="binary", inputs=inputs, data={"name": "heart_disease"})
        | {"sites": ["va"]}
    )
    (tmp_path / "site.toml").write_text('site = "va"\n')
    client = load_rows(chosen, SiteConfig.load(tmp_path / "site.toml"), 3)
    expected = fl.data.load("heart_disease").partition(fl.natural(), seed=3)["va"]
    assert torch.equal(client.train.x, expected.train.x)  # type: ignore[arg-type]


def test_new_rows_are_seen_as_the_training_rows_were(tmp_path: Path) -> None:
    """The training rows once more, as new ones: without labels, in another order of columns, the same numbers."""
    config = site(tmp_path)
    client = load_rows(plan(), config, 0)
    with open(tmp_path / "new.csv", "w", newline="") as file:
        csv.writer(file).writerows([["chol", "age", "sex"], *([c, a, s] for a, s, c, _ in LINES)])
    made = new_rows(plan(), config, 0, tmp_path / "new.csv")
    assert made.shape == (20, 4)
    assert client.test is not None
    expected = torch.cat([client.train.x, client.test.x])  # type: ignore[list-item]
    assert sorted(made.tolist()) == sorted(expected.tolist())
    (tmp_path / "new.csv").write_text("age,sex\n40,F\n")
    with pytest.raises(fl.UserError, match="'chol' is missing"):
        new_rows(plan(), config, 0, tmp_path / "new.csv")
    (tmp_path / "new.csv").write_text("age,sex,chol\n40,X,200\n")
    with pytest.raises(fl.UserError, match="'X' is not one of F, M"):
        new_rows(plan(), config, 0, tmp_path / "new.csv")


def test_new_arrays_are_preprocessed_too(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(5.0, 3.0, (20, 6)).astype("float32")
    np.savez(tmp_path / "rows.npz", x=x, y=np.arange(20) % 3)
    (tmp_path / "site.toml").write_text(tomli_w.dumps({"site": "north", "data": {"path": "rows.npz"}}))
    config = SiteConfig.load(tmp_path / "site.toml")
    scaled = Experiment.of(experiment(["fedavg"], data={"preprocess": {"impute": "median", "scale": "standard"}}))
    client = load_rows(scaled, config, 0)
    x[0, 0] = float("nan")
    np.savez(tmp_path / "new.npz", x=x.astype("float64"))
    made = new_rows(scaled, config, 0, tmp_path / "new.npz")
    assert client.test is not None
    before = torch.cat([client.train.x, client.test.x])  # type: ignore[list-item]
    rows = {tuple(row) for row in before.tolist()}
    assert made.dtype == torch.float32
    assert sum(tuple(row) in rows for row in made.tolist()) == 19
    with pytest.raises(fl.UserError, match="missing or infinite"):
        new_rows(Experiment.of(experiment(["fedavg"])), config, 0, tmp_path / "new.npz")
    np.savez(tmp_path / "new.npz", x=x[:, :5])
    with pytest.raises(fl.UserError, match="x has shape"):
        new_rows(scaled, config, 0, tmp_path / "new.npz")
