"""Which clients are alike, from short projections of their models, and groups of unlike ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom import rng

WIDTH = 4096
CHUNK = 1 << 24
"""Numbers that are held in float64 at a time."""

Sizes = tuple[tuple[str, int], ...]


def coordinates(seed: int, sizes: Sizes, width: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For every coordinate of the named vectors which of ``width`` sums it is added to, and with which sign."""
    found = []
    for name, size in sizes:
        draw = rng.stream(seed, "sample", "projection", name)
        where = torch.from_numpy(draw.integers(0, width, size))
        sign = torch.from_numpy((draw.integers(0, 2, size) * 2 - 1).astype(np.int8))
        found.append((where.to(device), sign.to(device)))
    return found


def project(
    bodies: Mapping[str, Tensor],
    seed: int,
    width: int = WIDTH,
    drawn: Callable[[int, Sizes, int, torch.device], Sequence[tuple[Tensor, Tensor]]] = coordinates,
) -> Tensor:
    """Clients x width: a seeded random projection of stacked leaves (clients x ...) that keeps inner products on average.

    Every coordinate is added to one of ``width`` sums, with a random sign. Vectors that are no longer than ``width`` stay as they
    are.

    Args:
        bodies: leaves of the clients' models, stacked along axis 0.
        seed: of the run.
        width: length of the projection.
        drawn: :func:`coordinates`, or the same that remembers them: drawing takes longer than all the rest.

    Reference: Charikar et al., Finding Frequent Items in Data Streams, 2002.
    """
    flat = {k: v.flatten(1) for k, v in bodies.items()}
    if sum(v.shape[1] for v in flat.values()) <= width:
        return torch.cat(list(flat.values()), 1).double()
    first = next(iter(flat.values()))
    clients = first.shape[0]
    sums = torch.zeros(clients, width, dtype=torch.float64, device=first.device)
    found = drawn(seed, tuple((k, v.shape[1]) for k, v in flat.items()), width, first.device)
    for values, (where, sign) in zip(flat.values(), found, strict=True):
        pieces = (t.split(max(1, CHUNK // clients), dim=-1) for t in (values, where, sign))
        for piece, at, signed in zip(*pieces, strict=True):
            sums.scatter_add_(1, at.expand(clients, -1), piece.double() * signed)
    return sums


def cosines(vectors: Tensor, known: Tensor) -> np.ndarray:
    """``s_ij = cos(v_i, v_j)`` in float64, rounded to 10 digits; 0 where one of the two is not known."""
    found, there = likeness(vectors).cpu().numpy().round(10), known.cpu().numpy() > 0
    return np.asarray(found if there.all() else np.where(there[:, None] & there, found, 0.0))


def likeness(vectors: Tensor) -> Tensor:
    """As :func:`cosines` where all are known, still on the device and not rounded yet; a zero vector is like no other."""
    values = vectors.double()
    unit: Tensor = values / values.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return (unit @ unit.T).clamp(-1, 1)


def unlike_groups(similarity: np.ndarray, groups: int) -> list[list[int]]:
    """Clients in groups of equal size (to one) whose members are unlike each other, smallest groups first.

    In order, each client joins the smallest group with the least mean similarity to its members (0 for an empty group), the
    first such group. Then groups are sorted by size.

    Example:
        >>> s = np.eye(4)
        >>> for i, j, value in [(0, 1, .9), (0, 2, .1), (0, 3, .2), (1, 2, .3), (1, 3, .8), (2, 3, .5)]:
        ...     s[i, j] = s[j, i] = value
        >>> unlike_groups(s, 2)
        [[0, 2], [1, 3]]

    Reference: FedAIMS, Algorithm 2 and eqs. 10, 11.
    """
    found: list[list[int]] = [[] for _ in range(groups)]
    for i, row in enumerate(similarity.tolist()):
        least = min(map(len, found))
        costs = {k: math.fsum(row[j] for j in g) / max(1, least) for k, g in enumerate(found) if len(g) == least}
        found[min(costs, key=lambda k: round(costs[k], 10))].append(i)
    return sorted(found, key=len)


def dealt_groups(order: Sequence[int], groups: int) -> list[list[int]]:
    """Clients dealt to groups one by one in an order, smallest groups first."""
    return sorted((list(order[k::groups]) for k in range(groups)), key=len)
