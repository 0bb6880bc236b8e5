"""One run in two processes gives the numbers of one process; rank 0 writes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.clients.messages import Participant
from fedloom.engines.distributed import dealt
from tests.run.test_resume import contents

CONFIG = """
method = "{method}"
rounds = 4
cohort = 5
epochs = 2
batch_size = 16
seed = 3
engine = "{engine}"
[data]
name = "digits"
clients = 9
partition = "dirichlet(0.3)"
holdout = 0.2
[model]
name = "mlp"
hidden = [16]
norm = "bn_track"
"""


def ranks(words: list[str], count: int = 2, patch: str = "") -> list[tuple[int, str, str]]:
    """The command line in some processes, as torchrun starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = f"{patch}\nfrom fedloom.cli import main\nmain({words!r})\n"
    started = []
    for rank in range(count):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        started.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", script],
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return [(p.returncode, *said) for p, said in [(p, p.communicate(timeout=240)) for p in started]]


def close(a: Any, b: Any) -> None:
    """Records that agree to 1e-6."""
    assert set(a) == set(b)
    for key, value in a.items():
        if key.startswith("seconds"):
            continue
        if isinstance(value, dict):
            close(value, b[key])
        elif isinstance(value, float):
            assert value == pytest.approx(b[key], rel=1e-6, abs=1e-9), key
        else:
            assert value == b[key], key


@pytest.mark.parametrize(
    ("method", "engine"), [("scaffold + personal('head')", "loop"), ("fedrep + lag(k=1)", "vectorised")]
)
def test_two_processes_give_the_numbers_of_one(tmp_path: Path, method: str, engine: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(method=method, engine=engine))
    alone = fl.fit(**fl.runs.config_file.load(path), out=tmp_path / "alone", device="cpu", progress=False)
    (zero, shown, said), (one, nothing, quiet) = ranks(["run", str(path), "--out", str(tmp_path / "both"), "--json"])
    assert (zero, one) == (0, 0), said + quiet
    assert json.loads(shown)["mean"] == pytest.approx(alone.summary().mean, rel=1e-6)
    assert nothing == "", "only rank 0 speaks"
    both = fl.load_run(tmp_path / "both")
    assert both.config["resolved"]["ranks"] == 2
    for record, other in zip(both.history, alone.history, strict=True):
        close(record, other)
    for name in (None, "0", "3"):
        left, right = both.model(name).state_dict(), alone.model(name).state_dict()
        for key, value in right.items():
            top = max(float(value.abs().max()), 1e-3)
            assert float((left[key] - value).abs().max()) <= 1e-6 * top
    if engine == "loop":
        a, b = contents(tmp_path / "both"), contents(tmp_path / "alone")
        assert a == b, "on the loop engine the number of processes changes nothing at all"


STOP = """
from fedloom.store.checkpoint import Checkpoints
saved = Checkpoints.save
def save(self, snapshot, length):
    saved(self, snapshot, length)
    if snapshot.server.round == 1:
        raise KeyboardInterrupt
Checkpoints.save = save
import torch.distributed as dist, datetime
made = dist.init_process_group
dist.init_process_group = lambda backend: made(backend, timeout=datetime.timedelta(seconds=5))
"""


def test_a_run_goes_on_in_several_processes(tmp_path: Path) -> None:
    """Rank 0's checkpoint reaches the others, which need not see its folder."""
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(method="fedper", engine="loop"))
    words = ["run", str(path), "--quiet", "--out", str(tmp_path / "cut")]
    codes = [code for code, _, _ in ranks(words, patch=STOP)]
    assert all(codes), "rank 0 was stopped, and the other one misses it"
    assert [code for code, _, _ in ranks([*words, "--resume"])] == [0, 0]
    fl.fit(**fl.runs.config_file.load(path), out=tmp_path / "whole", device="cpu", progress=False)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


LATE = """
import os, time
from pathlib import Path
import fedloom.engines.distributed as here
plain, rank = here._leave, os.environ["RANK"]
def leave():
    if rank == "0":
        time.sleep(2)
    begun = time.time()
    plain()
    Path("{folder}", rank).write_text(f"{begun} {time.time()}")
here._leave = leave
"""


def test_nobody_leaves_before_all_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(method="fedavg", engine="loop").replace("rounds = 4", "rounds = 1"))
    patch = LATE.replace("{folder}", str(tmp_path))
    found = ranks(["run", str(path), "--quiet", "--out", str(tmp_path / "run")], patch=patch)
    assert [code for code, _, _ in found] == [0, 0], found
    (late, _), (_, left) = ([float(v) for v in (tmp_path / rank).read_text().split()] for rank in "01")
    assert left >= late


def test_clients_are_dealt_by_their_work() -> None:
    class Site:
        def __init__(self, rows: int) -> None:
            self.train = range(rows)

    people = [Participant(Site(n), None) for n in (10, 50, 20, 30, 5, 5)]  # type: ignore[arg-type]
    assert dealt(people, 2) == [[0, 1], [2, 3, 4, 5]]
    assert dealt(people[:1], 3) == [[0], [], []]
