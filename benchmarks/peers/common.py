"""What the scripts of all peers share: the two workloads, an environment of one's own, and how rounds are timed.

It needs NumPy only, so that it can be imported in every environment; torch is imported where a network is made.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / ".venv" / "peers"


@dataclass(frozen=True)
class Workload:
    """A federation and how its clients train.

    ``cnn``: PFLlib's network (conv5x5 32, conv5x5 64, fc 512; 878,538 parameters) on CIFAR-shaped pictures, SGD, one epoch.
    ``mlp``: 30-32-16-2 on tables, Adam, five epochs.
    """

    name: str
    clients: int
    cohort: int
    rows: int
    shape: tuple[int, ...]
    classes: int
    batch: int
    epochs: int
    lr: float


WORKLOADS = {
    "cnn": Workload("cnn", 100, 10, 500, (3, 32, 32), 10, 64, 1, 0.05),
    "mlp": Workload("mlp", 10, 10, 1400, (30,), 2, 32, 5, 1e-3),
}


def arrays(work: Workload) -> list[tuple[Any, Any]]:
    """Random rows whose labels depend on them, for each client."""
    import numpy as np

    draw = np.random.default_rng(0)
    plane = draw.standard_normal((int(np.prod(work.shape)), work.classes)).astype(np.float32)
    made = []
    for _ in range(work.clients):
        x = draw.standard_normal((work.rows, *work.shape), dtype=np.float32)
        made.append((x, (x.reshape(len(x), -1) @ plane).argmax(1)))
    return made


@functools.cache
def tensors(work: Workload) -> list[tuple[Any, Any]]:
    """The rows as tensors, made once in a process."""
    import torch

    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays(work)]


def network(work: Workload) -> Any:
    """The network in torch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if work.name == "mlp":
        return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    body = [nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10))


def optimizer(work: Workload, parameters: Any) -> Any:
    """The clients' optimiser in torch."""
    import torch

    return torch.optim.Adam(parameters, lr=work.lr) if work.name == "mlp" else torch.optim.SGD(parameters, lr=work.lr)


# Timing.


def processor() -> float:
    """Processor seconds of this process and of everything that it started and that still runs."""
    if not Path("/proc/self/stat").exists():
        return time.process_time()
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        number = int(path.parent.name)
        parents[number], spent[number] = int(words[1]), sum(int(w) for w in words[11:15])
    total, mine = 0, os.getpid()
    for number in spent:
        at = number
        while at not in (mine, 0, 1) and at in parents:
            at = parents[at]
        total += spent[number] if at == mine else 0
    return total / os.sysconf("SC_CLK_TCK")


class Clock:
    """Marks the end of each round."""

    def __init__(self) -> None:
        self.marks = [(time.perf_counter(), processor())]

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), processor()))

    def report(self, **facts: Any) -> None:
        """Prints what was measured as one line of JSON: the first round apart, medians of the others."""
        rounds = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        first, rest = rounds[0], rounds[1:]
        found = {
            "first": first[0],
            "round": statistics.median(w for w, _ in rest),
            "processor": statistics.median(c for _, c in rest),
            "rounds": len(rest),
            "load": os.getloadavg()[0],
            **facts,
        }
        print("RESULT " + json.dumps(found), flush=True)


def start(name: str, requirements: Sequence[str], play: Callable[[Workload, int, int], None]) -> None:
    """Runs a peer's script in an environment of its own, made from PyPI when it is not there yet.

    Args:
        name: the peer.
        requirements: what pip installs.
        play: plays a workload for some rounds, with as many processes of one thread as asked for, and reports.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    home = ENVIRONMENTS / name
    if Path(sys.prefix).resolve() == home.resolve():
        play(WORKLOADS[asked.workload], asked.rounds + 1, asked.processes)
        return
    python = home / "bin" / "python"
    stamp = home / ".installed"
    if not stamp.exists():
        subprocess.run([os.environ.get("PYTHON", "python3.11"), "-m", "venv", str(home)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
        subprocess.run(pip, check=True)
        stamp.touch()
    words = [str(python), *sys.argv]
    os.execve(str(python), words, {**os.environ, "OMP_NUM_THREADS": "1"})
