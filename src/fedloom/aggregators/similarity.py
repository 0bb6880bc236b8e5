"""Which clients are alike, from short projections of their models, and groups of unlike ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom import rng

WIDTH = 4096
CHUNK = 1 << 24
"""Numbers of clients that are laid side by side, or held in float64, at a time."""

Sizes = tuple[tuple[str, int], ...]
Numbers = TypeVar("Numbers", Tensor, np.ndarray)


@dataclass(frozen=True, eq=False)
class Places:
    """Of every coordinate of some vectors, one behind the other, which of ``width`` sums it is added to, and with which sign."""

    where: Tensor
    sign: Tensor
    width: int


def coordinates(seed: int, sizes: Sizes, width: int, device: torch.device) -> Places:
    """The places of the coordinates of the named vectors, drawn at random."""
    places, signs = [], []
    for name, size in sizes:
        draw = rng.stream(seed, "sample", "projection", name)
        places.append(draw.integers(0, width, size))
        signs.append((draw.integers(0, 2, size) * 2 - 1).astype(np.int8))
    where, sign = (torch.from_numpy(np.concatenate(some)).to(device) for some in (places, signs))
    return Places(where, sign, width)


def side_by_side(stacked: Iterable[Tensor], width: int) -> Iterator[Tensor]:
    """Stacked leaves (clients x ...) as clients x numbers, ``width`` of them at a time, which small leaves fill together.

    Example:
        >>> leaves = torch.zeros(2, 3, 2), torch.zeros(2, 1), torch.zeros(2, 3)
        >>> [tuple(piece.shape) for piece in side_by_side(leaves, 4)]
        [(2, 4), (2, 4), (2, 2)]
    """
    some: list[Tensor] = []
    room = width
    for leaf in stacked:
        rest = leaf if leaf.dim() == 2 else leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]
        while rest.shape[1] > room:
            yield torch.cat([*some, rest[:, :room]], 1)
            some, rest, room = [], rest[:, room:], width
        some.append(rest)
        room -= rest.shape[1]
    yield torch.cat(some, 1)


def project(
    bodies: Mapping[str, Tensor],
    seed: int,
    width: int = WIDTH,
    drawn: Callable[[int, Sizes, int, torch.device], Places] = coordinates,
    base: Mapping[str, Tensor] | None = None,
    whole: Tensor | None = None,
) -> Tensor:
    """Clients x width: a seeded random projection of stacked leaves (clients x ...) that keeps inner products on average.

    Every coordinate is added to one of ``width`` sums, with a random sign. Vectors that are no longer than ``width`` stay as they
    are.

    Args:
        bodies: leaves of the clients' models, stacked along axis 0.
        seed: of the run.
        width: length of the projection.
        drawn: :func:`coordinates`, or the same that remembers them: drawing takes longer than all the rest.
        base: leaves of one model that are added to those of all clients; None for nothing.
        whole: the leaves as :func:`at_once` has them.

    Reference: Charikar et al., Finding Frequent Items in Data Streams, 2002.
    """
    sizes = tuple((name, value.shape[1:].numel()) for name, value in bodies.items())
    clients, some = _pieces(bodies)
    device = next(iter(bodies.values())).device
    short = sum(size for _, size in sizes) <= width
    places = None if short else drawn(seed, sizes, width, device)
    pieces = side_by_side(bodies.values(), some) if whole is None else iter((whole,))
    bases = None if base is None else side_by_side((base[name].reshape(1, -1) for name in bodies), some)
    if bases is not None:
        pieces = map(torch.add, pieces, bases)
    if places is None:
        return torch.cat(list(pieces), 1).double()
    sums = torch.zeros(clients, width, dtype=torch.float64, device=device)
    for piece, at, signed in zip(pieces, places.where.split(some), places.sign.split(some), strict=True):
        sums.scatter_add_(1, at.expand(clients, -1), piece.double().mul_(signed))
    return sums


def farthest(values: Mapping[str, Tensor], centre: Mapping[str, Tensor], whole: Tensor | None = None) -> Tensor:
    """``max_i ||v_i - c||^2`` over the clients i of stacked leaves, in float64 and still on the device."""
    _, some = _pieces(values)
    centres = side_by_side((centre[name].reshape(1, -1) for name in values), some)
    pieces = side_by_side(values.values(), some) if whole is None else iter((whole,))
    each = zip(pieces, centres, strict=True)
    gaps = [(piece - middle).square_().sum(1, dtype=torch.float64) for piece, middle in each]
    return sum(gaps[1:], gaps[0]).max()


def at_once(stacked: Mapping[str, Tensor]) -> Tensor | None:
    """Stacked leaves side by side, for several who want them; None where they are too many and each makes pieces of them."""
    _, some = _pieces(stacked)
    numbers = sum(value.shape[1:].numel() for value in stacked.values())
    return next(side_by_side(stacked.values(), some)) if numbers <= some else None


def _pieces(stacked: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many clients there are, and how many numbers of each are taken at a time."""
    clients = next(iter(stacked.values())).shape[0]
    return clients, max(1, CHUNK // clients)


def cosines(products: np.ndarray) -> np.ndarray:
    """``s_ij = cos(v_i, v_j)`` from inner products in float64, rounded to 10 digits."""
    return scaled(products).round(10)


def likeness(vectors: Numbers) -> Numbers:
    """As :func:`cosines`, from vectors, arrays or tensors on any device, and not rounded."""
    return scaled(vectors @ vectors.T)


def scaled(products: Numbers) -> Numbers:
    """Inner products of vectors by their lengths; a zero vector is like no other."""
    length = (products.diagonal() ** 0.5).clip(min=1e-300)
    found: Numbers = (products / length[:, None] / length).clip(-1, 1)
    return found


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
    found: list[list[int]] = [[i] for i in range(min(groups, len(similarity)))]  # each the first of an empty group
    found += [[] for _ in range(groups - len(found))]
    smallest: list[list[int]] = []
    for i, row in enumerate(similarity[groups:].tolist(), start=groups):
        smallest = smallest or list(found)  # all are of one size again
        costs = [_mean(row, g) for g in smallest] if len(smallest) > 1 else [0.0]
        smallest.pop(costs.index(min(costs))).append(i)
    return sorted(found, key=len)


def _mean(row: Sequence[float], places: Sequence[int]) -> float:
    """The mean of some numbers of a row, rounded to 10 digits."""
    return round(math.fsum([row[j] for j in places]) / len(places), 10)


def dealt_groups(order: Sequence[int], groups: int) -> list[list[int]]:
    """Clients dealt to groups one by one in an order, smallest groups first."""
    return sorted((list(order[k::groups]) for k in range(groups)), key=len)
