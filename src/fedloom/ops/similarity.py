"""Short projections of clients' models, and groups of clients that are unlike each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedloom import rng

WIDTH = 4096
CHUNK = 1 << 24
"""Numbers of clients that are copied side by side, or converted to float64, at a time."""

Sizes = tuple[tuple[str, int], ...]


@lru_cache(maxsize=1)  # drawing takes longer than all the rest of a projection
def coordinates(seed: int, sizes: Sizes, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw, for each coordinate of the named vectors, the sum that it is added to and its sign."""
    sums, signs = [], []
    for name, size in sizes:
        draw = rng.stream(seed, "sample", "projection", name)
        sums.append(draw.integers(0, width, size))
        signs.append((draw.integers(0, 2, size) * 2 - 1).astype(np.int8))
    return torch.from_numpy(np.concatenate(sums)).to(device), torch.from_numpy(np.concatenate(signs)).to(device)


def side_by_side(stacked: Iterable[Tensor], width: int) -> Iterator[Tensor]:
    """Yield stacked leaves (clients x ...) as pieces of shape ``(clients, width)``; the last one may be narrower.

    Example:
        >>> leaves = torch.zeros(2, 3, 2), torch.zeros(2, 1), torch.zeros(2, 3)
        >>> [tuple(piece.shape) for piece in side_by_side(leaves, 4)]
        [(2, 4), (2, 4), (2, 2)]
    """
    parts: list[Tensor] = []
    room = width
    for leaf in stacked:
        rest = leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]
        while rest.shape[1] > room:
            yield torch.cat([*parts, rest[:, :room]], 1)
            parts, rest, room = [], rest[:, room:], width
        parts.append(rest)
        room -= rest.shape[1]
    yield torch.cat(parts, 1)


def project(
    bodies: Mapping[str, Tensor], seed: int, width: int = WIDTH, base: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return a seeded random projection of each client's leaves, shape ``(clients, width)``, in float64.

    Every coordinate is added to one of ``width`` sums, with a random sign, which keeps inner products on
    average. Vectors that are no longer than ``width`` stay as they are.

    Args:
        bodies: leaves of the clients' models, stacked along axis 0.
        seed: seed of the run.
        width: length of the projection.
        base: leaves of one model that are added to those of all clients; None for nothing.

    Reference: Charikar et al., Finding Frequent Items in Data Streams, 2002.
    """
    sizes = tuple((name, value.shape[1:].numel()) for name, value in bodies.items())
    clients, columns = _pieces(bodies)
    pieces = side_by_side(bodies.values(), columns)
    if base is not None:
        pieces = map(torch.add, pieces, side_by_side((base[name].reshape(1, -1) for name in bodies), columns))
    if sum(size for _, size in sizes) <= width:
        return torch.cat(list(pieces), 1).double()
    device = next(iter(bodies.values())).device
    index, sign = coordinates(seed, sizes, width, device)
    sums = torch.zeros(clients, width, dtype=torch.float64, device=device)
    for piece, at, signs in zip(pieces, index.split(columns), sign.split(columns), strict=True):
        sums.scatter_add_(1, at.expand(clients, -1), piece.double().mul_(signs))
    return sums


def farthest(values: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> Tensor:
    """Return ``max_i ||v_i - c||^2`` over the clients i of stacked leaves, in float64 and on their device."""
    _, columns = _pieces(values)
    centres = side_by_side((centre[name].reshape(1, -1) for name in values), columns)
    pieces = zip(side_by_side(values.values(), columns), centres, strict=True)
    lengths = [(v - c).square_().sum(1, dtype=torch.float64) for v, c in pieces]
    return sum(lengths[1:], lengths[0]).max()


def _pieces(stacked: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the number of clients and the number of columns of a piece."""
    clients = next(iter(stacked.values())).shape[0]
    return clients, max(1, CHUNK // clients)


def unlike_groups(s: np.ndarray, groups: int) -> list[list[int]]:
    """Divide clients into groups of equal size (to one) whose members are unlike each other.

    Each client joins, of the smallest groups, the first one with the least ``delta_ik``, its mean
    similarity to the members (0 for an empty group).

    Args:
        s: similarities, shape ``(clients, clients)``.
        groups: number of groups.

    Returns:
        ``G_1 .. G_(m-1)``, the smallest group first.

    Example:
        >>> s = np.eye(4)
        >>> for i, j, value in [(0, 1, .9), (0, 2, .1), (0, 3, .2), (1, 2, .3), (1, 3, .8), (2, 3, .5)]:
        ...     s[i, j] = s[j, i] = value
        >>> unlike_groups(s, 2)
        [[0, 2], [1, 3]]

    Reference: FedAIMS, Algorithm 2 and eqs. 10, 11.
    """
    G: list[list[int]] = [[] for _ in range(groups)]
    for i, s_i in enumerate(s.tolist()):
        least = min(map(len, G))
        delta_i = {k: _mean(s_i, G_k) for k, G_k in enumerate(G) if len(G_k) == least}
        k = min(delta_i, key=delta_i.__getitem__)
        G[k].append(i)
    return sorted(G, key=len)


def _mean(s_i: Sequence[float], members: Sequence[int]) -> float:
    """Return ``delta_ik``, rounded to 10 digits (FedAIMS, eq. 11)."""
    return round(math.fsum([s_i[j] for j in members]) / max(len(members), 1), 10)


def dealt_groups(order: Sequence[int], groups: int) -> list[list[int]]:
    """Deal clients to groups one by one in an order; return the smallest group first."""
    return sorted((list(order[k::groups]) for k in range(groups)), key=len)
