"""Who has what, in outline: small enough to be written with every run, and enough to draw its data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data import Federation, Rows, to_float

CLIENTS = 1000
"""Clients that are described at most, evenly chosen."""

POINTS = 500
"""Rows whose projection is kept at most."""

COMPONENTS = 10
"""Principal components that are kept of each."""

_GRID = 16  # pictures are averaged down to so many cells a side


def sketch(data: Federation) -> dict[str, Any]:
    """Rows and classes of each client, and a projection of some training rows on principal components.

    Args:
        data: the federation; at most 1,000 clients are described, and 500 rows projected, evenly chosen.

    Example:
        >>> import fedloom as fl
        >>> found = sketch(fl.data.load("digits").partition(fl.dirichlet(0.3), clients=4, seed=0))
        >>> len(found["clients"]), len(found["points"]["at"]), len(found["points"]["at"][0])
        (4, 500, 10)
    """
    picked = [data.clients[i] for i in even(len(data), CLIENTS)]
    y = data.clients[0].train.y
    summary = replace(data, clients=tuple(picked)).summary()
    found: dict[str, Any] = {
        "name": data.name,
        "total": len(data),
        "classes": list(summary.classes),
        "dense": y.dim() > 1 and not y.is_floating_point(),
        "cloud": 0 if data.cloud is None else len(data.cloud),
        "clients": [],
    }
    for client, counts in zip(picked, summary.counts.tolist(), strict=True):
        rows = {part: len(r) for part, r in client.parts().items()}
        found["clients"].append({"id": client.id, **rows, "counts": counts})
    points = _projected(data)
    return found if points is None else {**found, "points": points}


def even(size: int, most: int) -> list[int]:
    """At most so many of the first ``size`` numbers, evenly spread.

    Example:
        >>> even(3, 5), even(10, 4)
        ([0, 1, 2], [0, 3, 6, 9])
    """
    return list(range(size)) if size <= most else sorted({round(i * (size - 1) / (most - 1)) for i in range(most)})


def _projected(data: Federation) -> dict[str, Any] | None:
    """Some training rows on their principal components; None where inputs are no single array of numbers."""
    first = data.clients[0].train.x
    if not isinstance(first, Tensor) or not (first.is_floating_point() or first.dtype is torch.uint8):
        return None
    whose = even(len(data), POINTS)
    share = max(1, POINTS // len(whose))
    rows = [_some(data.clients[i].train, share) for i in whose]
    x = torch.cat([_flat(r, data) for r in rows]).double()
    if len(x) < 3 or x.shape[1] < 2:
        return None
    x = torch.nan_to_num(x)
    x = x - x.mean(0)
    if first.dim() == 2:  # columns of a table have units of their own
        x = x / x.std(0).clamp(min=1e-12)
    at, share_of = principal(x, COMPONENTS)
    labels = torch.cat([r.y for r in rows]) if rows[0].y.dim() == 1 else None
    return {
        "client": [i for i, r in zip(whose, rows, strict=True) for _ in range(len(r))],
        "label": None if labels is None else [_short(v) for v in labels.tolist()],
        "at": [[_short(v) for v in row] for row in at.tolist()],
        "explained": [_short(v) for v in share_of.tolist()],
    }


def principal(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Centred rows on their principal components, and the share of the variance that each has.

    A component's sign is that which makes its largest entry positive, so that a projection can be repeated.
    """
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    size = min(size, len(s))
    largest = v[:size].gather(1, v[:size].abs().argmax(1, keepdim=True)).squeeze(1)
    signs = torch.where(largest < 0, -1.0, 1.0).to(x.dtype)
    return u[:, :size] * s[:size] * signs, s[:size] ** 2 / (s**2).sum().clamp(min=1e-300)


def _some(rows: Rows, most: int) -> Rows:
    return rows.take(torch.tensor(even(len(rows), most) if most > 1 else [0]))


def _flat(rows: Rows, data: Federation) -> Tensor:
    """Rows x features; pictures are averaged over cells first."""
    assert isinstance(rows.x, Tensor)
    x = to_float(rows.x, data.scale).float()
    if x.dim() == 4 and max(x.shape[2:]) > _GRID:
        x = F.adaptive_avg_pool2d(x, _GRID)
    return x.reshape(len(x), -1)


def _short(value: float) -> float:
    """Four digits are enough to draw."""
    return value if not isinstance(value, float) else float(f"{value:.4g}") if math.isfinite(value) else 0.0
