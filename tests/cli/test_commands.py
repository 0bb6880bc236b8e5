"""Each command does what its help says."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedloom as fl
from fedloom.cli import demo
from tests.cli.conftest import Cli

COMMANDS = [
    "demo",
    "run",
    "compare",
    "report",
    "list",
    "check",
    "predict",
    "export",
    "tune",
    "doctor",
    "cite",
    "theory",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(cli: Cli, command: str) -> None:
    outcome = cli(command, "--help")
    assert outcome.status == 0
    assert "Usage: fedloom " + command in outcome.out
    assert command in cli("--help").out


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"fedloom {fl.__version__}\n"


@pytest.mark.parametrize("what", ["methods", "plugins", "models", "datasets", "partitions", "options"])
def test_list(cli: Cli, what: str) -> None:
    rows = json.loads(cli("list", what, "--json").out)
    lines = cli("list", what).out.splitlines()
    assert len(rows) == len(lines) > 4
    assert all(row["summary"] for row in rows)
    if what == "methods":
        assert [row["name"] for row in rows] == fl.list_methods()
        assert next(r for r in rows if r["name"] == "fedprox")["hyperparameters"] == {"mu": 0.01}
        assert next(r for r in rows if r["name"] == "local")["uploads"] == "sends nothing"


def test_list_taps(cli: Cli) -> None:
    rows = json.loads(cli("list", "taps", "convnet3", "--json").out)
    assert [r["name"] for r in rows if r["chosen"]] == ["body.block1.act", "body.block2.act", "body.block3.act"]
    assert "belongs to taps" in cli("list", "taps").mistake()
    assert "belongs to taps" in cli("list", "models", "mlp").mistake()


@pytest.fixture
def run(cli: Cli, config: Path, tmp_path: Path) -> Path:
    outcome = cli("run", config, "--set", "method=fedper", "--out", tmp_path / "run", "--json")
    assert outcome.status == 0, outcome.err
    summary = json.loads(outcome.out)
    assert summary["method"] == "fedper()"
    assert summary["rounds"] == 2
    return tmp_path / "run"


def test_run_shows_a_table(cli: Cli, config: Path, tmp_path: Path) -> None:
    outcome = cli("run", config, "--out", tmp_path / "run")
    assert "mean of 4 clients" in outcome.out
    assert str(tmp_path / "run") in outcome.out
    assert cli("run", config, "--out", tmp_path / "quiet", "--quiet").out == ""
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "run.toml",
        "metrics.jsonl",
        "curves.jsonl",
        "data.json",
        "clients.csv",
        "models",
        "checkpoint",
    }


@pytest.mark.parametrize("ending", [".npy", ".npz"])
def test_predict(cli: Cli, run: Path, tmp_path: Path, ending: str) -> None:
    x = fl.data.load("digits").train.x[:6]
    file = tmp_path / f"x{ending}"
    np.save(file, x.numpy()) if ending == ".npy" else np.savez(file, x=x.numpy())
    rows = list(csv.DictReader(io.StringIO(cli("predict", run, "--client", "2", "--input", file).out)))
    with torch.no_grad():
        p = torch.softmax(fl.load_run(run).model("2")(x).double(), 1)
    assert [r["prediction"] for r in rows] == [str(int(i)) for i in p.argmax(1)]
    assert [float(r["probability"]) for r in rows] == pytest.approx(p.amax(1).tolist(), abs=1e-6)
    shared = json.loads(cli("predict", run, "--input", file, "--json").out)
    assert len(shared) == 6
    assert "no client '9'" in cli("predict", run, "--client", "9", "--input", file).mistake()


def test_predict_refuses_other_shapes(cli: Cli, run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 7), np.float32))
    assert "the model takes (1, 8, 8)" in cli("predict", run, "--input", tmp_path / "x.npy").mistake()
    (tmp_path / "y.npy").write_text("nonsense")
    assert "cannot read" in cli("predict", run, "--input", tmp_path / "y.npy").mistake()
    np.savez(tmp_path / "z.npz", a=np.zeros(3))
    assert "expected an array x" in cli("predict", run, "--input", tmp_path / "z.npz").mistake()


def test_predict_applies_the_preprocessing_of_the_run(cli: Cli, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = ["site,age,colour,sick"]
    for i in range(60):
        age = draw.normal(50, 10)
        lines.append(f"{'ab'[i % 2]},{age:.1f},{draw.choice(['red', 'blue'])},{int(age > 50)}")
    lines[5] = "a,,red,1"
    (tmp_path / "table.csv").write_text("\n".join(lines))
    (tmp_path / "c.toml").write_text(
        f"""
        method = "fedavg"
        task = "binary"
        rounds = 3
        [data]
        path = {json.dumps(str(tmp_path / "table.csv"))}
        client = "site"
        label = "sick"
        [data.preprocess]
        impute = "median"
        scale = "standard"
        """
    )
    assert cli("run", tmp_path / "c.toml", "--out", tmp_path / "run", "--quiet").status == 0
    (tmp_path / "new.csv").write_text("colour,age\nred,80\nblue,20\nred,\n")
    rows = json.loads(cli("predict", tmp_path / "run", "--client", "a", "--input", tmp_path / "new.csv", "--json").out)
    assert len(rows) == 3
    assert rows[0]["probability"] > rows[1]["probability"]


def test_predict_needs_python_for_a_module_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    fl.fit(
        "fedavg",
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        {"name": "digits", "clients": 2},
        rounds=1,
        out=tmp_path / "run",
        progress=False,
    )
    assert "fl.load_run" in cli("predict", tmp_path / "run", "--input", "x.npy").mistake()


def test_export(cli: Cli, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    outcome = cli("export", run, "--client", "1", "--out", file)
    assert outcome.status == 0
    code = outcome.out.split("\n\n", 1)[1]
    with safe_open(file, "pt") as model:
        metadata = model.metadata()
    assert (metadata["format"], metadata["fedloom_format"]) == ("pt", "1")
    space: dict[str, Any] = {}
    exec(code, space)  # the lines that are printed are the lines that work
    x = fl.data.load("digits").train.x[:6]
    assert torch.equal(space["model"](x), fl.load_run(run).model("1")(x))
    assert "exists" in cli("export", run, "--client", "1", "--out", file).mistake()


def test_check(cli: Cli) -> None:
    assert json.loads(cli("check", "fedprox(mu=0.1)", "--json").out)["ok"] is True
    assert "Did you mean" in cli("check", "fedpox").mistake()


def test_cite(cli: Cli) -> None:
    out = cli("cite", "fedprox + clip").out
    assert "Federated Optimization in Heterogeneous Networks" in out
    assert "fedloom" in out
    assert "Did you mean" in cli("cite", "fedpox").mistake()


def test_theory(cli: Cli) -> None:
    assert "= 8" in cli("theory", "local-steps", "epochs=2", "samples=100", "batch=32").out
    assert json.loads(cli("theory", "local-steps", "epochs=2", "samples=100", "batch=32", "--json").out)["value"] == 8
    assert len(cli("theory").out.splitlines()) > 30
    assert "missing" in cli("theory", "local-steps").mistake()
    assert "expected a number" in cli("theory", "local-steps", "epochs=two").mistake()
    assert "unknown calculator" in cli("theory", "nothing").mistake()
    assert (
        "has no figure"
        in cli("theory", "local-steps", "epochs=2", "samples=100", "batch=32", "--plot", "x.png").mistake()
    )


def test_doctor(cli: Cli) -> None:
    facts = json.loads(cli("doctor", "--json").out)
    assert facts["problems"] == []
    assert facts["torch"] == torch.__version__


def test_folds_from_the_command_line_and_from_the_file(cli: Cli, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "folds"
    first = json.loads(cli("run", config, "--folds", "2", "--repeats", "2", "--out", out, "--json").out)
    assert sorted(p.name for p in out.iterdir()) == [
        "folds.json",
        *(f"repeat-{r}-fold-{f}" for r in (1, 2) for f in (1, 2)),
    ]
    assert first["runs"] == 4
    assert first["overall"]["low"] < first["overall"]["mean"] < first["overall"]["high"]
    means = [fl.load_run(p).summary().mean for p in out.glob("repeat-*")]
    assert first["overall"]["mean"] == pytest.approx(sum(means) / 4)
    assert "not empty" in cli("run", config, "--folds", "2", "--out", out).mistake()
    again = cli("run", config, "--folds", "2", "--repeats", "2", "--out", out, "--resume", "--json")
    assert json.loads(again.out) == first
    told = cli("run", config, "--set", "evaluate.folds=2", "--out", tmp_path / "told")
    assert told.status == 0, told.err
    assert "2 folds, 1 times" in told.out
    with pytest.raises(fl.errors.UserError, match="cross_validate"):
        fl.fit("fedavg", "mlp", {"name": "digits", "clients": 3}, evaluate={"folds": 3})


def test_tune_writes_its_answer_into_the_configuration(cli: Cli, config: Path) -> None:
    before = config.read_text()
    found = json.loads(cli("tune", config, "--rounds", "1", "--set", "workers=0", "--json", "--write").out)
    text = config.read_text()
    assert text.splitlines()[0] == f'engine = "{found["engine"]}"'
    assert text.endswith(before.split("method", 1)[1])
    assert fl.runs.config_file.load(config)["engine"] == found["engine"]  # type: ignore[attr-defined]


def test_demo_ends_with_a_table(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "DEMO", ("local", "fedavg", "nothing of this name", "fedper"))
    threads = torch.get_num_threads()
    try:
        outcome = cli("demo", "--out", tmp_path / "demo", "--json")
    finally:
        torch.set_num_threads(threads)
    found = json.loads(outcome.out)
    assert [row["method"] for row in found["methods"]] == ["local", "fedavg", "fedper"]
    assert set(found["methods"][0]) >= {"mean", "std", "worst_decile", "gain_over_local", "bytes", "seconds"}
    assert found["methods"][0]["gain_over_local"] == 0
    assert "3 methods, 20 clients" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert found["report"] == str(tmp_path / "demo" / "report.html")
    for row in found["methods"]:
        assert fl.load_run(tmp_path / "demo" / row["method"]).summary().mean == row["mean"]
    assert "not empty" in cli("demo", "--out", tmp_path / "demo").mistake()


def test_demo_finds_a_free_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo._free() == Path("runs/demo")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert demo._free() == Path("runs/demo-2")


@pytest.mark.slow
def test_the_whole_demo(cli: Cli, tmp_path: Path) -> None:
    """Every federated method of the demo helps over training alone; in at most 90 seconds of one processor."""
    import time

    begun = time.process_time()
    found = json.loads(cli("demo", "--out", tmp_path / "demo", "--json").out)
    assert time.process_time() - begun < 90
    assert [row["method"] for row in found["methods"]] == list(demo.DEMO)
    assert all(row["gain_over_local"] > 0 for row in found["methods"][1:])
