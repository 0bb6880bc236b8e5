"""A user's mistake: one clear line, exit status 2, no traceback, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.errors import UserError
from fedloom.store import atomic
from tests.cli.conftest import Cli
from tests.helpers import federation, mlp

MISTAKES = {
    # unknown keys
    "round=5": "unknown key 'round'. Did you mean 'rounds'",
    "optimizer.learning_rate=0.1": "unknown option of optimizer sgd 'learning_rate'",
    "data.partitions='iid'": "Did you mean 'partition'",
    "evaluate.evry=2": "Did you mean 'every'",
    "participation.rul='size'": "Did you mean 'rule'",
    "hybrid.aplha=0.1": "Did you mean 'alpha'",
    "model.hiden=[4]": "has no option 'hiden'",
    # wrong types
    "rounds='many'": "rounds='many': expected a whole number",
    "rounds=2.5": "rounds=2.5: expected a whole number",
    "rounds=true": "rounds=True: expected a whole number",
    "cohort='half'": "cohort='half': expected a number",
    "batch_size='some'": "expected a whole number or 'full'",
    "seed='x'": "seed='x': expected a whole number",
    "optimizer.lr='fast'": "optimizer.lr='fast': expected a number",
    "evaluate=3": "evaluate=3: expected a table",
    "data=3": "data=3: expected a table",
    "data.clients='four'": "data.clients='four': expected a whole number",
    "method=3": "method=3: expected text",
    "model=7": "model=7: expected a name",
    # out of range
    "rounds=0": "rounds=0 is out of range",
    "epochs=0": "epochs=0 is out of range",
    "batch_size=0": "batch_size=0 is out of range",
    "cohort=0": "cohort=0 is out of range",
    "cohort=1.5": "a fraction must be in (0, 1]",
    "cohort=9": "expected 1 to 4 clients",
    "optimizer.lr=-1": "lr=-1.0 is out of range",
    "optimizer.momentum=1.0": "momentum=1.0 is out of range",
    "method='fedprox(mu=-1)'": "mu=-1 is out of range",
    "participation.dropout=1.0": "dropout=1.0 is out of range",
    "data.test=1.0": "test=1.0 is out of range",
    "data.holdout=0.01": "of 4 clients 0 would be new",
    "data.clients=5000": "clients",
    # names
    "method='fedpox'": "unknown method 'fedpox'. Did you mean 'fedprox'",
    "method='fedavg + fedprox'": "use its plug-in 'proximal'",
    "method='fedavg +'": "cannot be read",
    "method='__import__(1)'": "unknown method '__import__'",
    "data.name='digit'": "Did you mean 'digits'",
    "data.partition='dirichlet(0.3'": "cannot be read",
    "data.partition='dirichlet(a=1)'": "dirichlet takes",
    "data.partition='dirichlet(-1)'": "alpha",
    "data.partition='zipf'": "unknown partition 'zipf'",
    "model.name='convent4'": "Did you mean 'convnet4'",
    "optimizer.name='adma'": "Did you mean 'adam'",
    "task='clasification'": "Did you mean 'classification'",
    "engine='fast'": "expected 'auto' or 'loop' or 'vectorised'",
    "device='tpu9'": "expected auto, cpu or cuda",
    "precision='fp8'": "expected 'fp32'",
    "mode='decentralised'": "expected 'centralised' or 'federated' or 'hybrid'",
    # things that do not fit together
    "task='binary'": "needs 0 or 1",
    "mode='hybrid'": "needs cloud rows",
    "participation.rule='trace'": "belong together",
    "optimizer_state='keep'": "is for mode='centralised'",
    "data.path='somewhere'": "one of the two",
    "data.val='x'": "data.val='x': expected a number",
    "method='fedavg + personal(\"conv*\")'": "matches no leaf",
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_configuration(cli: Cli, config: Path, tmp_path: Path, mistake: str) -> None:
    outcome = cli("run", config, "--set", mistake, "--out", tmp_path / "run")
    assert MISTAKES[mistake] in outcome.mistake()
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method = ", "not valid TOML"),
        ('method = "fedavg"', "has no 'data'"),
        ('[data]\nname = "digits"', "has no 'method'"),
        ('method = "fedavg"\nrepeatable = false\n[data]\nname = "digits"', "given in Python"),
        ('method = "fedavg"\n[data]\nclients = 3', "expected a name"),
        ('method = "fedavg"\n[data]\npath = "/nowhere/at/all"', "does not exist"),
    ],
)
def test_file(cli: Cli, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert said in cli("run", path, "--out", tmp_path / "run").mistake()


def test_binary_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(bytes(range(256)))
    assert "UTF-8" in cli("run", path).mistake()


@pytest.mark.parametrize("words", [("rum",), ("run",), ("list", "things"), ("run", "--fast"), ("predict", "nowhere")])
def test_command_line(cli: Cli, words: tuple[str, ...]) -> None:
    cli(*words).mistake()


@pytest.mark.parametrize("assignment", ["rounds", "=3", "a..b=1", "rounds.x=3"])
def test_assignments(cli: Cli, config: Path, assignment: str) -> None:
    assert "--set" in cli("run", config, "--set", assignment).mistake()


# Data and models -------------------------------------------------------------------------------------------


def arrays(labels: Any = (0, 1, 2), x: Any = None) -> fl.Federation:
    rows = np.zeros((len(labels), 6), np.float32) if x is None else x
    return fl.Federation.from_arrays([((rows, np.array(labels)), (rows, np.array(labels)))])


def test_client_without_rows() -> None:
    empty = (np.zeros((0, 6), np.float32), np.zeros(0, np.int64))
    with pytest.raises(UserError, match="client '0'"):
        fl.Federation.from_arrays([(empty, None)])


def test_labels_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="labels go from 0 to 7, but the model has 3 outputs"):
        fl.fit("fedavg", mlp(), arrays([0, 7]), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_missing_values_name_the_remedy() -> None:
    x = np.full((3, 6), np.nan, np.float32)
    with pytest.raises(UserError, match="impute"):
        arrays(x=x)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Linear(5, 3), "6"),
        (lambda: nn.Linear(6, 1), "binary"),
        (lambda: 3, "expected an nn.Module"),
        (3, "expected an nn.Module"),
        (lambda: nn.Flatten(), "Flatten has no parameter"),
    ],
)
def test_model_that_does_not_fit(tmp_path: Path, model: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        fl.fit("fedavg", model, arrays(), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_bad_reply_is_recorded_and_the_round_goes_on() -> None:
    """One client overflows: it is named with its round, rolled back, and the others go on."""
    data = federation((9, 14, 5))
    clients = [((c.train.x, c.train.y), None) for c in data]
    clients[1] = ((torch.full_like(data[1].train.x, 1e38), data[1].train.y), None)
    linear = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    result = fl.fit(
        "fedper", linear, fl.Federation.from_arrays(clients), optimizer=fl.sgd(lr=1e6), rounds=1, progress=False
    )
    rejected = result.history[0]["rejected"]
    assert [(r["client"], r["round"]) for r in rejected] == [("1", 1)]
    assert "not finite" in rejected[0]["reason"]
    assert result.run is not None
    assert "1" not in result.run.clients


# The disk --------------------------------------------------------------------------------------------------


def test_unwritable_folder(cli: Cli, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in cli("run", config, "--out", tmp_path / "file" / "run").mistake()
    assert "is not a folder" in cli("run", config, "--out", tmp_path / "file").mistake()
    assert "cannot write" in cli("run", config, "--out", "/proc/fedloom/run").mistake()


@pytest.mark.parametrize("limit", [100, 2000, 4500])
def test_full_disk(config: Path, tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE stops a file from growing; with room again the run goes on to the same end."""
    script = textwrap.dedent(
        f"""
        import resource, signal
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
        from fedloom.cli import main
        main(["run", {str(config)!r}, "--out", {str(tmp_path / "run")!r}, "--quiet", "--set", "rounds=12"])
        """
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr
    assert "make room" in done.stderr
    run = tmp_path / "run"
    assert not list(run.rglob(".*.tmp*"))
    for line in (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []:
        json.loads(line)
    fl.fit(**_arguments(config), rounds=12, out=run, resume=True, progress=False)
    whole = fl.fit(**_arguments(config), rounds=12, out=tmp_path / "whole", progress=False)
    assert (run / "clients.csv").read_bytes() == (tmp_path / "whole" / "clients.csv").read_bytes()
    assert len(whole.history) == 12


def _arguments(path: Path) -> dict[str, Any]:
    from fedloom.runs import config_file as config

    return {k: v for k, v in config.load(path).items() if k != "rounds"}


def test_failing_writer(cli: Cli, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "fsync", full)
    assert "No space left on device; make room" in cli("run", config, "--out", tmp_path / "run").mistake()
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_damaged_and_other_runs(cli: Cli, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("run", config, "--out", run, "--quiet").status == 0
    assert "not empty" in cli("run", config, "--out", run).mistake()
    assert "rounds was 2, now 3" in cli("run", config, "--out", run, "--resume", "--set", "rounds=3").mistake()
    assert cli("run", config, "--out", run, "--resume", "--quiet").status == 0
    (run / "clients.csv").unlink()
    (run / "checkpoint" / "LATEST").write_text("round-000002 0")
    assert "damaged" in cli("run", config, "--out", run, "--resume").mistake()
    (run / "run.toml").write_text("nonsense =")
    assert "run.toml" in cli("predict", run, "--input", config).mistake()


def test_anything_else_is_status_one(cli: Cli, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("no reason")

    monkeypatch.setattr("fedloom.cli.run.fit", broken)
    outcome = cli("run", config, "--out", tmp_path / "run")
    assert outcome.status == 1
    assert "Traceback" not in outcome.err
    assert "ZeroDivisionError" in outcome.err
    outcome = cli("run", config, "--out", tmp_path / "run", "--debug")
    assert outcome.status == 1
    assert "Traceback" in outcome.err


def test_task_of_ones_own_with_a_wrong_loss() -> None:
    task = fl.Task(lambda out, y: nn.functional.cross_entropy(out, y), primary="loss")
    with pytest.raises(UserError, match="reduction='none'"):
        fl.fit("fedavg", mlp(), federation(), task=task, rounds=1, progress=False)


def test_device_without_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match="no CUDA device"):
        fl.fit("fedavg", mlp(), federation(), device="cuda", progress=False)
