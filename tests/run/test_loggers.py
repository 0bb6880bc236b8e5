"""Loggers: what TensorBoard, MLflow and an object of one's own are told of a run."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from tests.helpers import federation, mlp

OPTIONS: dict[str, Any] = {"rounds": 3, "progress": False}


class Ear:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def open(self, config: Mapping[str, Any], folder: Path | None, played: int) -> None:
        self.heard.append(("open", config["method"], folder, played))

    def log(self, record: Mapping[str, Any]) -> None:
        self.heard.append(dict(record))

    def close(self, failed: bool) -> None:
        self.heard.append(("close", failed))


class Stop(Exception):
    pass


def stop(record: Mapping[str, Any]) -> None:
    if record["round"] == 3:
        raise Stop


def test_a_logger_of_ones_own_hears_every_round_complete(tmp_path: Path) -> None:
    ear = Ear()
    result = fl.fit(
        "fedavg", mlp(), federation(), out=tmp_path / "run", loggers=[ear], **OPTIONS, evaluate={"every": 0}
    )
    assert ear.heard[0] == ("open", "fedavg()", tmp_path / "run", 0)
    assert ear.heard[1:-1] == result.history
    assert ear.heard[-2]["accuracy"] == result.summary().mean
    assert ear.heard[-1] == ("close", False)


def test_a_logger_is_closed_when_a_run_fails_and_told_where_it_goes_on(tmp_path: Path) -> None:
    ear = Ear()
    with pytest.raises(Stop):
        fl.fit("fedavg", mlp(), federation(), out=tmp_path / "run", loggers=[ear], callbacks=[stop], **OPTIONS)
    assert ear.heard[-1] == ("close", True)
    again = Ear()
    fl.fit("fedavg", mlp(), federation(), out=tmp_path / "run", loggers=[again], resume=True, **OPTIONS)
    played = again.heard[0][-1]  # a checkpoint is not written after every short round
    assert 1 <= played <= 2
    assert [r["round"] for r in again.heard[1:-1]] == list(range(played + 1, 4))


def test_tensorboard_holds_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, method = federation(), "fedavg + lag(k=1)"
    with pytest.raises(Stop):
        fl.fit(method, mlp(), data, out=tmp_path, loggers=["tensorboard"], callbacks=[stop], **OPTIONS)
    result = fl.fit(method, mlp(), data, out=tmp_path, loggers=["tensorboard"], resume=True, **OPTIONS)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    for name in ("accuracy", "train_loss", "bytes_up"):
        points = [(e.step, e.value) for e in read.Scalars(name)]
        assert points == [(r["round"], pytest.approx(r[name], rel=1e-6)) for r in result.history]
    layer = next(iter(result.history[-1]["lag"]["score"]))
    assert read.Scalars(f"lag/score/{layer}")[-1].value == result.history[-1]["lag"]["score"][layer]


def test_tensorboard_needs_a_folder() -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    with pytest.raises(fl.UserError, match="out='folder'"):
        fl.fit("fedavg", mlp(), federation(), loggers=["tensorboard"], **OPTIONS)


class Server:
    """What stands in for MLflow's server: its client's calls as they are documented."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.experiments: dict[str, str] = {}

    def client(self) -> types.SimpleNamespace:
        def create(experiment: str, run_name: str) -> types.SimpleNamespace:
            self.runs.append(
                {"experiment": experiment, "name": run_name, "params": {}, "metrics": {}, "status": "RUNNING"}
            )
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=str(len(self.runs) - 1)))

        def experiment(name: str) -> types.SimpleNamespace | None:
            there = name in self.experiments
            return types.SimpleNamespace(experiment_id=self.experiments[name]) if there else None

        def metric(run: str, name: str, value: float, step: int) -> None:
            self.runs[int(run)]["metrics"].setdefault(name, {})[step] = value

        return types.SimpleNamespace(
            create_run=create,
            get_experiment_by_name=experiment,
            create_experiment=lambda name: self.experiments.setdefault(name, f"e-{name}"),
            log_param=lambda run, key, value: self.runs[int(run)]["params"].update({key: value}),
            log_metric=metric,
            set_terminated=lambda run, status: self.runs[int(run)].update(status=status),
        )


def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=server.client))  # type: ignore[misc]
    data = federation()
    with pytest.raises(Stop):
        fl.fit("fedprox(mu=0.1)", mlp(), data, out=tmp_path, loggers=["mlflow"], callbacks=[stop], **OPTIONS)
    assert server.runs[0]["status"] == "FAILED"
    result = fl.fit("fedprox(mu=0.1)", mlp(), data, out=tmp_path, loggers=["mlflow"], resume=True, **OPTIONS)
    (run,) = server.runs
    assert run["status"] == "FINISHED"
    assert run["experiment"] == "e-fedloom"
    assert run["params"]["method"] == "fedprox(mu=0.1)"
    assert run["params"]["optimizer.lr"] == "0.05"
    assert run["metrics"]["accuracy"] == {r["round"]: r["accuracy"] for r in result.history}


def test_mistakes_are_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, said in ((["tensorbord"], "Did you mean 'tensorboard'"), ("tensorboard", "expected a list")):
        with pytest.raises(fl.UserError, match=said):
            fl.fit("fedavg", mlp(), federation(), out=tmp_path / "run", loggers=given, **OPTIONS)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(fl.UserError, match=r"fedloom\[mlflow\]"):
        fl.fit("fedavg", mlp(), federation(), out=tmp_path / "run", loggers=["mlflow"], **OPTIONS)
    assert not (tmp_path / "run").exists()
