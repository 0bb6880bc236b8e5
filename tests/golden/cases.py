"""Small runs of every method, reduced to hashes or to a few numbers each.

``scripts/golden.py`` runs this file against any commit, so it uses public names only, except in
``tensors_of``, which must read the state of a run in all commits that are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn

import fedloom as fl

STACKS = ("scaffold + lag", "fedavg + map_prior + aims", "fedavg + isr(points=2)")
ARGUMENTS = {"fedaf": "(image_steps=4, image_lr=0.1, server_epochs=2)"}
PROJECTIONS = 3


def make_federation(shape: tuple[int, ...]) -> fl.Federation:
    """Four clients with 9, 14, 5 and 7 training rows; the labels depend on the inputs."""
    draw = np.random.default_rng(0)
    planes = draw.normal(size=(int(np.prod(shape)), 3))
    clients = []
    for k, rows in enumerate((9, 14, 5, 7)):
        parts = []
        for n in (rows, max(1, rows // 3)):
            x = draw.normal(loc=0.3 * k, size=(n, *shape)).astype(np.float32)
            y = (x.reshape(n, -1) @ planes + draw.normal(size=(n, 3))).argmax(1)
            parts.append((x, y))
        clients.append(tuple(parts))
    return fl.Federation.from_arrays(clients)


def make_perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(8, 7),
        nn.Tanh(),
        nn.Linear(7, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def make_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class Recurrent(nn.Module):
    """Two GRU layers over five steps and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(4, 6, batch_first=True)
        self.second = nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.first(x)
        outputs, _ = self.second(outputs)
        return self.head(outputs[:, -1])


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "mlp": (
        make_perceptron,
        (6,),
        {"rounds": 3, "epochs": 2, "cohort": 3, "optimizer": fl.sgd(0.1, momentum=0.9, weight_decay=1e-3)},
    ),
    # No Adam here: the gradient of a bias before batch normalisation is rounding error, which Adam scales up.
    "cnn": (make_convolutions, (1, 6, 6), {"rounds": 2, "epochs": 1, "optimizer": fl.sgd(0.05, momentum=0.9)}),
    "gru": (Recurrent, (5, 4), {"rounds": 2, "epochs": 1, "optimizer": fl.adam(1e-2, weight_decay=1e-3)}),
}


def make_engine(name: str) -> Any:
    """Build an engine from its name: ``loop``, or a kind of step of the vectorised engine."""
    if name in ("loop", "vectorised"):
        return name
    from fedloom.engines.vectorised import VectorisedEngine

    if name == "waves of two":
        return VectorisedEngine(step="mapped", wave=2)
    return VectorisedEngine(step=name)  # type: ignore[arg-type]


def texts() -> list[str]:
    """Return the text forms of all cases: every registered method and three stacks."""
    return [name + ARGUMENTS.get(name, "") for name in fl.list_methods()] + list(STACKS)


def play(text: str, network: str, engine: Any, precision: str = "fp32", **options: Any) -> fl.Result:
    """Run one case on an engine, or on the one of a name."""
    make_model, shape, settings = NETWORKS[network]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fl.fit(
            text,
            make_model,
            make_federation(shape),
            engine=make_engine(engine) if isinstance(engine, str) else engine,
            precision=precision,
            batch_size=4,
            progress=False,
            **settings | options,
        )


def tensors_of(result: fl.Result) -> dict[str, Tensor]:
    """Return all tensors of a finished run: leaves and memory of the server and of every client."""
    run = result.run
    assert run is not None
    tensors = {f"server {k}": v for k, v in run.state.leaves.items()}
    tensors |= {f"server {o} {k}": v for o, m in run.state.memory.items() for k, v in m.items()}
    for name, state in run.clients.items():
        tensors |= {f"{name} {k}": v for k, v in state.leaves.items()}
        tensors |= {f"{name} {o} {k}": v for o, m in state.memory.items() for k, v in m.items()}
    return tensors


def record_lines(result: fl.Result) -> list[str]:
    """Return the history as JSON lines, without times."""
    return [
        json.dumps(
            {k: v for k, v in row.items() if not k.startswith("seconds") and k != "plainer_steps"},
            sort_keys=True,
            default=str,
        )
        for row in result.history
    ]


def digest(result: fl.Result) -> str:
    """Hash all tensors and records of a run. Equal hashes mean equal bits."""
    sha = hashlib.sha256()
    for name, value in sorted(tensors_of(result).items()):
        sha.update(f"{name} {value.dtype}".encode())
        sha.update(value.detach().contiguous().numpy().tobytes())
    for line in record_lines(result):
        sha.update(line.encode())
    return sha.hexdigest()[:16]


def project(result: fl.Result) -> list[float]:
    """Reduce a run to a few numbers: its tensors, sorted by name, times fixed random vectors, and its losses."""
    tensors = tensors_of(result)
    flat = np.concatenate([tensors[k].detach().double().numpy().ravel() for k in sorted(tensors)])
    flat = np.nan_to_num(flat)
    weights = np.random.default_rng(1).uniform(-1.0, 1.0, size=(PROJECTIONS, flat.size))
    losses = [float(row["train_loss"]) for row in result.history if row.get("train_loss") is not None]
    return [*(weights @ flat).tolist(), float(np.nansum(losses)), float(flat.size)]


def cases(engines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Return every (engine, network, text)."""
    for engine in engines:
        for network in NETWORKS:
            for text in texts():
                yield engine, network, text


def hash_cases(engines: list[str]) -> dict[str, str]:
    """Return the hash of every case, or the first line of its error."""
    hashes = {}
    for engine, network, text in cases(engines):
        try:
            value = digest(play(text, network, engine))
        except Exception as error:
            value = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        hashes[f"{engine} | {network} | {text}"] = value
    return hashes


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1], "w") as output:
        json.dump(hash_cases(sys.argv[2].split(",")), output, indent=1)
