"""Runs that reports are made from, played once for all tests."""

from __future__ import annotations

import csv
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import fedloom as fl
from tests.helpers import federation

OPTIONS: dict[str, Any] = {"rounds": 3, "optimizer": fl.sgd(lr=0.1), "progress": False}
MODEL = {"name": "mlp", "hidden": [5, 5]}


@pytest.fixture(scope="session")
def data() -> fl.Federation:
    return federation((9, 12, 6))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, data: fl.Federation) -> dict[str, fl.Result]:
    """Runs of all kinds on the same clients."""
    place = tmp_path_factory.mktemp("runs")
    methods = {
        "local": "local",
        "isr": "fedavg + isr(points=2)",
        "lag": "fedavg + lag(k=1)",
        "proto": "fedproto",
        "aims": "fedaims",
    }
    made = {k: fl.fit(m, MODEL, data, out=place / k, **OPTIONS) for k, m in methods.items()}
    for mode, more in (("centralised", {}), ("federated", {}), ("hybrid", {"hybrid": {"cloud_fraction": 0.2}})):
        made[mode] = fl.fit("fedavg", MODEL, data, mode=mode, out=place / mode, **OPTIONS, **more)
    return made


def written(path: Path, clients: int, rounds: int = 3, **changes: Any) -> Path:
    """A run folder of many clients, written by hand: reports only read files."""
    draw = np.random.default_rng(zlib.crc32(str(sorted(changes.items())).encode()))
    path.mkdir(parents=True)
    names = [f"c{i:04d}" for i in range(clients)]
    resolved = {"primary": "accuracy", "higher_is_better": True, "clients": clients, "device": "cpu"}
    config = {
        "format": 1,
        "method": "fedavg()",
        "mode": "federated",
        "seed": 0,
        "rounds": rounds,
        "data": {"name": "made"},
    }
    (path / "run.toml").write_text(tomli_w.dumps({**config, "resolved": resolved, **changes}))
    values = draw.uniform(0.5, 1, (rounds, clients)).round(4)
    lines, curves = [], []
    for r in range(rounds):
        lines.append({"round": r + 1, "accuracy": values[r].mean(), "seconds": 0.5, "bytes_up": 10, "bytes_down": 20})
        curves.append({"round": r + 1, "clients": dict(zip(names, values[r].tolist(), strict=True))})
    for name, what in (("metrics.jsonl", lines), ("curves.jsonl", curves)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in what))
    with open(path / "clients.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["client", "n_train", "rounds", "new", "accuracy", "n_test"])
        table.writerows([n, 10, rounds, 0, v, 5] for n, v in zip(names, values[-1].tolist(), strict=True))
    counts = np.random.default_rng(clients).integers(0, 9, (clients, 4)).tolist()
    described = [{"id": n, "train": 10, "test": 5, "counts": c} for n, c in zip(names, counts, strict=True)]
    sketch = {"name": "made", "total": clients, "classes": list("abcd"), "dense": False, "cloud": 0}
    (path / "data.json").write_text(json.dumps({**sketch, "clients": described}))
    return path
