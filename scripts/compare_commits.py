"""Processor time of a round on a CPU: the working tree against another commit.

    python scripts/compare_commits.py before-architecture

Both versions run in turn, each time in a new process with one thread. A row shows the best round of
the best process, in milliseconds. Evaluation is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("fedavg", "scaffold", "fedlag(k=1)", "fedaims")
ENGINES = ("loop", "vectorised")
ROUNDS = 9


def measure() -> dict[str, float]:
    """Return the milliseconds of the best round of each case, with the package on the path."""
    import numpy as np
    import torch
    from torch import nn

    import fedloom as fl

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = np.random.default_rng(0)

    def federation(clients: int, rows: int, shape: tuple[int, ...]) -> fl.Federation:
        parts = [
            [(draw.normal(size=(n, *shape)).astype("f4"), draw.integers(0, 10, n)) for n in (rows, 10)]
            for _ in range(clients)
        ]
        return fl.Federation.from_arrays(parts)

    def perceptron() -> nn.Module:
        hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(64, 10))

    def convolutions() -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            norm = nn.BatchNorm2d(outputs)
            return [nn.Conv2d(inputs, outputs, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(*block(1, 8), *block(8, 16), nn.Flatten(), nn.Linear(144, 10))

    networks = {
        "perceptron 64-64-64-64-10, 20 clients of 100 rows": (perceptron, federation(20, 100, (64,))),
        "2 convolutions with batch norm, 10 clients of 60 rows": (convolutions, federation(10, 60, (1, 14, 14))),
    }
    times = {}
    for name, (model, data) in networks.items():
        for engine in ENGINES:
            for method in METHODS:
                marks: list[float] = []

                def mark(record: dict[str, Any], marks: list[float] = marks) -> None:
                    marks.append(time.process_time())

                options: dict[str, Any] = {"rounds": ROUNDS, "batch_size": 20, "optimizer": fl.sgd(0.05)}
                options |= {"evaluate": {"every": 0}, "progress": False, "callbacks": [mark], "engine": engine}
                fl.fit(method, model, data, device="cpu", **options)
                # Without the first rounds, which warm up, and the last one, which evaluates.
                rounds = [b - a for a, b in itertools.pairwise(marks[1:-1])]
                times[f"{name} | {engine} | {method}"] = 1e3 * min(rounds)
    return times


def run_version(source: Path) -> dict[str, float]:
    """Measure the package in ``source`` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    times: dict[str, float] = json.loads(output.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure()))
        return
    if arguments.commit is None:
        parser.error("name the commit to compare with")
    best: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), arguments.commit], cwd=ROOT, check=True)
        try:
            for repeat in range(arguments.repeats):
                print(f"repeat {repeat + 1} of {arguments.repeats}", file=sys.stderr)
                versions = [run_version(tree / "src"), run_version(ROOT / "src")]
                for name in versions[1]:
                    pair = [times[name] for times in versions]
                    best[name] = [min(a, b) for a, b in zip(best.get(name, pair), pair, strict=True)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(f"| network | engine | method | {arguments.commit} | working tree | change |\n|---|---|---|---|---|---|")
    for name, (before, after) in best.items():
        print(f"| {name} | {before:.2f} | {after:.2f} | {100 * (after / before - 1):+.1f} % |")


if __name__ == "__main__":
    main()
