"""Small federations, small networks, and comparisons that many tests share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.rounds.run import Run
from fedloom.tensors import Leaves

AWKWARD = (1, 7, 64, 65, 640)
"""Client sizes that exercise padding, masks and the one-row rule with batches of 64."""


def federation(
    sizes: Sequence[int] = (9, 14, 5),
    shape: tuple[int, ...] = (6,),
    classes: int = 3,
    seed: int = 0,
    one_class: int | None = None,
) -> fl.Federation:
    """Clients with random rows whose labels depend on the inputs; ``one_class`` names a client with a single class."""
    draw = np.random.default_rng(seed)
    planes = draw.normal(size=(int(np.prod(shape)), classes))
    clients = []
    for k, n in enumerate(sizes):
        parts = []
        for rows in (n, max(1, n // 3)):
            x = draw.normal(loc=0.3 * k, size=(rows, *shape)).astype(np.float32)
            y = (x.reshape(rows, -1) @ planes + draw.normal(size=(rows, classes))).argmax(1)
            parts.append((x, np.zeros_like(y) if k == one_class else y))
        clients.append(tuple(parts))
    return fl.Federation.from_arrays(clients)


def mlp(inputs: int = 6, classes: int = 3, hidden: int = 5) -> Callable[[], nn.Module]:
    """Two layers, no normalisation, nothing random."""
    return lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def bn_mlp(inputs: int = 6, classes: int = 3, hidden: int = 5, track: bool = True) -> Callable[[], nn.Module]:
    """Two layers with batch normalisation and no bias directly before it."""
    return lambda: nn.Sequential(
        nn.Linear(inputs, hidden, bias=False),
        nn.BatchNorm1d(hidden, track_running_stats=track),
        nn.Tanh(),
        nn.Linear(hidden, classes),
    )


def dropout_mlp(inputs: int = 6, classes: int = 3, hidden: int = 8) -> Callable[[], nn.Module]:
    """Two layers with dropout."""
    return lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Dropout(0.4), nn.Linear(hidden, classes))


def small_cnn(classes: int = 3) -> Callable[[], nn.Module]:
    """A convolution with batch normalisation on 1 x 6 x 6 pictures, and an in-place activation."""
    return lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, classes),
    )


def fit(method: str | fl.Method, model: Any = None, data: fl.Federation | None = None, **options: Any) -> fl.Result:
    """``fl.fit`` on a tiny federation in float64, without a progress bar; warnings of methods are not errors here."""
    options = {"rounds": 3, "epochs": 2, "batch_size": 4, "precision": "fp64", "engine": "loop"} | options
    options.setdefault("optimizer", fl.sgd(lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fl.fit(method, model or mlp(), data or federation(), progress=False, **options)


def run_of(result: fl.Result) -> Run:
    """The state behind a result."""
    assert result.run is not None
    return result.run


def shared(result: fl.Result) -> Leaves:
    """The server's leaves."""
    return run_of(result).state.leaves


def own(result: fl.Result, client: str) -> Leaves:
    """A client's own model, ready for use."""
    return run_of(result).desk(client).leaves


def identical(a: Leaves, b: Leaves) -> bool:
    """Bitwise equality on the leaves of ``a``."""
    return all(torch.equal(v, b[k]) for k, v in a.items())


def gap(a: Leaves, b: Leaves) -> float:
    """Largest difference of a leaf over its size, as parity is defined: max|a-b| / max(max|a|, 1e-3 largest entry)."""
    assert set(a) == set(b)
    tops = {k: float(v.abs().max()) if v.numel() else 0.0 for k, v in a.items()}
    floor = 1e-3 * max(tops.values(), default=0.0)
    worst = 0.0
    for k, v in a.items():
        if v.numel():
            worst = max(worst, float((v - b[k]).abs().max()) / max(tops[k], floor, 1e-300))
    return worst


def everything(result: fl.Result) -> dict[str, Tensor]:
    """All that a run leaves behind: the server's leaves and memory, every client's leaves and memory."""
    run = run_of(result)
    found = {f"server {k}": v for k, v in run.state.leaves.items()}
    found |= {f"server {o} {k}": v for o, m in run.state.memory.items() for k, v in m.items()}
    for name, state in run.clients.items():
        found |= {f"{name} {k}": v for k, v in state.leaves.items()}
        found |= {f"{name} {o} {k}": v for o, m in state.memory.items() for k, v in m.items()}
    return found


def mostly_slow(cases: Iterable[str], kept: Iterable[str]) -> list[Any]:
    """Parameters of a large matrix: those kept run every time, the others with the slow tests."""
    return [c if c in set(kept) else pytest.param(c, marks=pytest.mark.slow) for c in cases]
