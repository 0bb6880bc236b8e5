"""Sites for tests: folders with their rows, an experiment, and client apps as real nodes would run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

import fedloom as fl
from fedloom.flower.local import LocalGrid
from tests.helpers import federation

NAMES = ("north", "south", "east", "west")


def people(sizes: tuple[int, ...] = (9, 14, 5), classes: int = 3) -> fl.Federation:
    """A federation whose clients have the sites' names."""
    made = federation(sizes, classes=classes)
    return fl.Federation.from_arrays(list(made.clients), NAMES[: len(sizes)])


def experiment(methods: list[str], sites: int = 3, **more: Any) -> dict[str, Any]:
    """The table of an experiment on those sites."""
    return {
        "name": "trial",
        "methods": methods,
        "sites": list(NAMES[:sites]),
        "rounds": 3,
        "epochs": 2,
        "batch_size": 4,
        "model": {"name": "mlp", "hidden": [5]},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "inputs": {"shape": [6], "classes": ["a", "b", "c"]},
        "wait": 0.0,
        **more,
    }


def write_sites(folder: Path, data: fl.Federation, **more: Any) -> dict[str, Path]:
    """A folder per site with its rows as an npz file and its configuration; returns the configurations."""
    found = {}
    for client in data:
        place = folder / client.id
        place.mkdir(parents=True, exist_ok=True)
        arrays = {}
        for part, rows in client.parts().items():
            assert isinstance(rows.x, torch.Tensor)
            arrays |= {f"x_{part}": rows.x.numpy(), f"y_{part}": rows.y.numpy()}
        np.savez(place / "rows.npz", **arrays)  # type: ignore[arg-type]
        table = {"site": client.id, "data": {"path": "rows.npz"}, **more}
        (place / "site.toml").write_text(tomli_w.dumps(table))
        found[client.id] = place / "site.toml"
    return found


def grid_of(configs: dict[str, Path], watch: Any = None) -> LocalGrid:
    """A grid whose nodes are the client app of a deployment, one per site."""
    from fedloom.flower.setup.bundle import client

    nodes = dict(enumerate(configs.items(), start=11))
    return LocalGrid(
        dict.fromkeys(nodes, client),
        {node: {"site": name, "config": str(path)} for node, (name, path) in nodes.items()},
        watch,
    )
