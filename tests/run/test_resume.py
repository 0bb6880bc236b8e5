"""A run that is killed at any moment and resumed is the run that was never interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.errors import UserError
from tests.helpers import bn_mlp, federation, mlp

CONFIG = """
method = "{method}"
mode = "{mode}"
rounds = {rounds}
cohort = {cohort}
epochs = 2
batch_size = 16
seed = 3
engine = "{engine}"
workers = {workers}
[data]
name = "digits"
clients = 6
partition = "dirichlet(0.5)"
{holdout}
[model]
name = "mlp"
hidden = [16]
norm = "{norm}"
[optimizer]
{optimizer}
[evaluate]
every = 2
{hybrid}
"""


def config(folder: Path, **changes: Any) -> Path:
    values = {
        "method": "scaffold + personal('head')",
        "mode": "federated",
        "engine": "loop",
        "workers": 0,
        "rounds": 12,
        "cohort": 0.5,
        "norm": "bn_track",
        "optimizer": 'name = "sgd"\nlr = 0.05',
        "hybrid": "",
        "holdout": "",
    } | changes
    path = folder / "config.toml"
    path.write_text(CONFIG.format(**values))
    return path


def contents(run: Path) -> dict[str, Any]:
    """What identical means: models, the table of clients, and metrics without the times."""
    found: dict[str, Any] = {
        str(p.relative_to(run)): p.read_bytes() for p in (run / "models").rglob("*") if p.is_file()
    }
    found["clients.csv"] = (run / "clients.csv").read_bytes()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]
    return found


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(config: Path, out: Path, *, resume: bool = False, patch: str = "") -> subprocess.Popen[bytes]:
    """The command line in a process of its own, with a patch run first."""
    words = ["run", str(config), "--out", str(out), "--quiet", *(["--resume"] if resume else [])]
    script = textwrap.dedent(patch) + f"\nfrom fedloom.cli import main\nmain({words!r})\n"
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], env=ENVIRONMENT, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, err = process.communicate(timeout=300)
    return process.returncode, err.decode()


SLOW_ROUNDS = """
import time
from fedloom.rounds.run import Run
played = Run.play
def slow(self, *args, **kwargs):
    time.sleep(0.03)
    return played(self, *args, **kwargs)
Run.play = slow
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "ditto", "optimizer": 'name = "adam"\nlr = 0.01', "holdout": "holdout = 0.2"},
        {"mode": "centralised", "method": "fedavg", "optimizer": 'name = "sgd"\nlr = 0.05\nmomentum = 0.9'},
        {"mode": "hybrid", "method": "fedavg", "hybrid": "[hybrid]\ncloud_fraction = 0.2\nrule = 'proportional'"},
        {"method": "fedavg", "hybrid": "[participation]\ndropout = 0.4\nstragglers = 0.5"},
        {"engine": "vectorised", "rounds": 30},
        {"workers": 2, "rounds": 8},
    ],
    ids=["scaffold", "ditto", "centralised", "hybrid", "dropout", "vectorised", "workers"],
)
def test_killed_at_random_moments(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = config(tmp_path, **changes)
    assert finish(start(path, tmp_path / "whole"))[0] == 0
    draw = random.Random(str(changes))
    kills = 0
    for _ in range(30):
        process = start(path, tmp_path / "killed", resume=True, patch=SLOW_ROUNDS)
        metrics = tmp_path / "killed" / "metrics.jsonl"
        lines = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        target, deadline = lines + draw.randint(1, 4), time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and len(metrics.read_bytes().splitlines()) >= target:
                break
            time.sleep(0.005)
        time.sleep(draw.random() * 0.06)
        if process.poll() is not None:
            assert finish(process)[0] == 0
            break
        process.send_signal(signal.SIGKILL)
        finish(process)
        kills += 1
    assert kills >= 2, f"killed only {kills} times"
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


KILL_AT_WRITE = """
import os, signal
from fedloom.store import atomic
left = {count}
renamed = os.replace
def replace(a, b):
    global left
    left -= 1
    if left == {offset}:
        os.kill(os.getpid(), signal.SIGKILL)
    renamed(a, b)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
atomic.os.replace = replace
"""


@pytest.mark.slow
def test_killed_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    """A kill right before and right after each rename of the first two checkpoints and of the end."""
    path = config(tmp_path, method="fedper", rounds=3, norm="none")
    assert finish(start(path, tmp_path / "whole"))[0] == 0
    for count in (2, 3, 4, 5, 6, 8, 10, 13, 16, 20):
        for offset in (0, -1):
            out = tmp_path / f"killed-{count}-{offset}"
            status, _ = finish(start(path, out, patch=KILL_AT_WRITE.format(count=count, offset=offset)))
            assert status in (-signal.SIGKILL, 0)
            status, err = finish(start(path, out, resume=True))
            assert (status, err) == (0, "")
            assert contents(out) == contents(tmp_path / "whole"), (count, offset)
            assert not list(out.rglob(".*")), "temporary files are left behind"


def test_half_written_file_of_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    """A process that dies while it writes leaves only temporary files."""
    path = config(tmp_path, method="fedper", rounds=4, norm="none")
    assert finish(start(path, tmp_path / "whole"))[0] == 0
    patch = """
    import os, signal
    from fedloom.store import atomic as disk
    written = []
    def fsync(number):
        written.append(number)
        if len(written) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
    disk.os.fsync = fsync
    """
    assert finish(start(path, tmp_path / "killed", patch=patch))[0] == -signal.SIGKILL
    assert finish(start(path, tmp_path / "killed", resume=True)) == (0, "")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


class Stop(Exception):
    """Ends a run from a callback, as a crash would."""


def interrupted(out: Path, after: int, **options: Any) -> None:
    def crash(record: dict[str, Any]) -> None:
        if record["round"] == after:
            raise Stop

    with pytest.raises(Stop):
        fl.fit(out=out, callbacks=[crash], **options | {"progress": False})


@pytest.mark.parametrize(
    "method", ["fedavg", "fedrep", "ditto", "scaffold", "fedprox(mu=0.1) + clip(1.0) + noise(0.01)"]
)
def test_every_state_is_resumed(tmp_path: Path, method: str) -> None:
    options = {"method": method, "model": bn_mlp(), "data": federation(), "rounds": 5, "cohort": 2, "batch_size": 4}
    whole = fl.fit(**options, out=tmp_path / "whole", progress=False)
    interrupted(tmp_path / "cut", 3, **options)
    resumed = fl.fit(**options, out=tmp_path / "cut", resume=True, progress=False)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert len(resumed.history) == len(whole.history) == 5


def test_resume_of_nothing_starts(tmp_path: Path) -> None:
    result = fl.fit("fedavg", mlp(), federation(), rounds=2, out=tmp_path / "new", resume=True, progress=False)
    assert len(result.history) == 2


def test_resume_of_a_finished_run_rewrites_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "fedper", "model": mlp(), "data": federation(), "rounds": 2, "progress": False}
    first = fl.fit(**options, out=tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    again = fl.fit(**options, out=tmp_path, resume=True)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    assert again.summary() == first.summary()


def test_other_configuration_names_the_keys(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "fedavg", "model": mlp(), "data": federation(), "progress": False}
    interrupted(tmp_path, 1, **options, rounds=3)
    with pytest.raises(UserError, match=r"another configuration: rounds was 3, now 4.*lr was 0.05, now 0.2"):
        fl.fit(**options, rounds=4, optimizer=fl.sgd(lr=0.2), out=tmp_path, resume=True)
    with pytest.raises(UserError, match=r"data\.fingerprint"):
        fl.fit(**options | {"data": federation(seed=5)}, rounds=3, out=tmp_path, resume=True)


def test_without_resume_a_folder_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        fl.fit("fedavg", mlp(), federation(), out=tmp_path, progress=False)
    with pytest.raises(UserError, match=r"run.toml is missing"):
        fl.fit("fedavg", mlp(), federation(), out=tmp_path, resume=True, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["LATEST", "state.json", "server.safetensors", "clients-*.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damaged_checkpoint(tmp_path: Path, name: str, damage: str) -> None:
    options: dict[str, Any] = {"method": "fedper", "model": mlp(), "data": federation(), "rounds": 3, "progress": False}
    interrupted(tmp_path, 3, **options)
    if name == "LATEST" and damage == "gone":
        pytest.skip("no LATEST means no checkpoint: the run starts again")
    for victim in (tmp_path / "checkpoint").rglob(name):
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 0xFF
        if damage == "gone":
            victim.unlink()
        else:
            victim.write_bytes(bytes(data[: len(data) // 2] if damage == "cut" else data))
    with pytest.raises(UserError, match=r"damaged|cannot read"):
        fl.fit(**options, out=tmp_path, resume=True)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    path = config(tmp_path, method="fedavg")
    process = start(path, tmp_path / "run", patch=SLOW_ROUNDS.replace("0.03", "5"))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "run.toml").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        status, err = finish(start(path, tmp_path / "run", resume=True))
        assert status == 2
        assert "another run is using" in err
    finally:
        process.kill()
        finish(process)
    assert finish(start(path, tmp_path / "run", resume=True))[0] == 0, "the lock of a dead process is released"


def test_early_stopping_keeps_the_best_model(tmp_path: Path) -> None:
    """The run ends as one that was told to end at its best round; also where it is interrupted on the way, or spills to disk."""
    data = fl.data.load("digits").partition(fl.dirichlet(0.5), clients=6, val=0.3, seed=0)
    options: dict[str, Any] = {
        "method": "fedper",
        "model": "mlp",
        "data": data,
        "cohort": 3,
        "batch_size": 8,
        "seed": 2,
    }
    # The loop: whether mapped steps are traced depends on how many rounds are planned, and processors round the two differently.
    options |= {"optimizer": fl.sgd(lr=1.2), "progress": False, "engine": "loop"}
    early = {"rounds": 30, "evaluate": {"patience": 4}}
    result = fl.fit(**options, **early, out=tmp_path / "whole")
    kept = result.summary().kept_round
    assert kept is not None
    assert kept == result.summary().best_round < len(result.history) < 30
    short = fl.fit(**options, rounds=kept)
    loaded = fl.load_run(tmp_path / "whole")
    for name in (None, *result.clients):
        expected = short.model(name).state_dict()
        for found in (result.model(name).state_dict(), loaded.model(name).state_dict()):
            assert all(torch.equal(found[k], v) for k, v in expected.items())
    assert {n: c.metrics for n, c in result.clients.items()} == {n: c.metrics for n, c in short.clients.items()}
    assert result.history[-1]["accuracy"] == short.history[-1]["accuracy"]
    interrupted(tmp_path / "cut", kept + 2, **options, **early)
    fl.fit(**options, **early, out=tmp_path / "cut", resume=True)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
