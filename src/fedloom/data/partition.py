"""Partitioners: functions that assign rows to clients, (labels, clients, generator) -> one index array per client."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import UserError


@dataclass(frozen=True, slots=True)
class Partitioner(ABC):
    """A rule that deals rows to clients; `rule + affine(...)` adds feature skew, `str(rule)` is its text."""

    name: ClassVar[str]
    by_class: ClassVar[bool] = False

    def __call__(self, labels: Labels, clients: int, generator: Generator) -> list[Index]:
        """The rows of each client, as ascending positions.

        Args:
            labels: The class of each row; for `natural()` the group of each row.
            clients: How many clients.
            generator: Source of all random choices.
        """
        if isinstance(clients, bool) or not isinstance(clients, (int, np.integer)) or clients < 1:
            raise UserError(f"clients = {clients!r}; expected a whole number of at least 1.")
        needed = int(clients) * self._least()
        if needed > len(labels):
            raise UserError(
                f"{self}: {clients} clients with at least {self._least()} rows each need {needed} rows, "
                f"there are {len(labels)}. Use fewer clients or fewer rows for each."
            )
        parts = self._deal(labels, int(clients), generator)
        return [np.sort(np.asarray(part, np.int64)) for part in parts]

    def _least(self) -> int:
        return 1

    @abstractmethod
    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[Sequence[int] | Index]:
        """The rows of each client, in any order."""

    def __str__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(given)})"

    def __add__(self, other: object) -> Affine:
        if not isinstance(other, Affine) or isinstance(self, Affine) or other.base != Iid():
            raise UserError(f"{self} + {other}: only affine(...) can be added to a partition, and only once.")
        return replace(other, base=self)


@dataclass(frozen=True, slots=True)
class Iid(Partitioner):
    """See `iid`."""

    name = "iid"

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[Index]:
        return np.array_split(generator.permutation(len(labels)), clients)


@dataclass(frozen=True, slots=True)
class Dirichlet(Partitioner):
    """See `dirichlet`."""

    name = "dirichlet"
    by_class = True

    alpha: float
    min_size: int = 10
    balanced: bool = False
    replace: bool = False

    def _least(self) -> int:
        return max(self.min_size, 1)

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[list[int]]:
        pools = [generator.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
        count = self._balanced if self.balanced else self._unbalanced
        parts: list[list[int]] = [[] for _ in range(clients)]
        for pool, wanted in zip(pools, count([len(p) for p in pools], clients, generator), strict=True):
            for part, rows in zip(parts, np.split(pool, np.cumsum(wanted)[:-1]), strict=True):
                mine = generator.choice(pool, len(rows), replace=False) if self.replace else rows
                part.extend(mine.tolist())
        for part in parts:
            # Rows lie class by class; shuffled, those that are moved are of any class.
            generator.shuffle(part)
        if self.replace:
            top_up(parts, len(labels), self._least(), generator)
        else:
            repair(parts, self._least())
        return parts

    def _unbalanced(self, sizes: list[int], clients: int, generator: Generator) -> list[Index]:
        """For each class, proportions over the clients."""
        return [apportion(n, simplex(self.alpha, clients, generator)) for n in sizes]

    def _balanced(self, sizes: list[int], clients: int, generator: Generator) -> list[Index]:
        """Clients of equal size, each with its own proportions over the classes as far as classes have rows.

        A client takes what it wants of each class; where a class has run out, the rest comes from its other
        classes. Each pass empties a class or satisfies the client: there are at most as many as classes.
        """
        left = np.asarray(sizes, np.int64)
        counts = np.zeros((len(sizes), clients), np.int64)
        shares = apportion(int(left.sum()), np.full(clients, 1.0 / clients))
        for k in generator.permutation(clients):
            wish, need = simplex(self.alpha, len(sizes), generator), int(shares[k])
            while need:
                open_wish = np.where(left > 0, wish, 0.0)
                if open_wish.sum() == 0:
                    open_wish = left.astype(np.float64)
                taken = np.minimum(apportion(need, open_wish), left)
                counts[:, k] += taken
                left -= taken
                need -= int(taken.sum())
        return list(counts)


@dataclass(frozen=True, slots=True)
class ClassesPerClient(Partitioner):
    """See `classes_per_client`."""

    name = "classes_per_client"
    by_class = True

    n: int

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[list[int]]:
        classes = np.unique(labels)
        if self.n > len(classes):
            raise UserError(f"{self}: the data have only {len(classes)} classes. Use n <= {len(classes)}.")
        if clients * self.n < len(classes):
            raise UserError(
                f"{self}: {clients} clients with {self.n} classes each cannot hold {len(classes)} classes; "
                f"rows would be left over. Use at least {-(-len(classes) // self.n)} clients."
            )
        used = np.zeros(len(classes), np.int64)
        holders: list[list[int]] = [[] for _ in classes]
        for k in range(clients):
            # The least used classes, ties at random: uses differ by at most one, so every class has a holder.
            chosen = np.lexsort((generator.random(len(classes)), used))[: self.n]
            used[chosen] += 1
            for c in chosen:
                holders[c].append(k)
        parts: list[list[int]] = [[] for _ in range(clients)]
        for c, who in zip(classes, holders, strict=True):
            rows = generator.permutation(np.flatnonzero(labels == c))
            for k, piece in zip(generator.permutation(who), np.array_split(rows, len(who)), strict=True):
                parts[k].extend(piece.tolist())
        empty = sum(not part for part in parts)
        if empty:
            raise UserError(
                f"{self}: {empty} of {clients} clients would have no rows, as some classes are rare. Use fewer clients."
            )
        return parts


@dataclass(frozen=True, slots=True)
class Shards(Partitioner):
    """See `shards`."""

    name = "shards"
    by_class = True

    per_client: int = 2

    def _least(self) -> int:
        return self.per_client

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[Index]:
        order = np.lexsort((generator.random(len(labels)), labels))
        pieces = np.array_split(order, clients * self.per_client)
        dealt = generator.permutation(len(pieces)).reshape(clients, self.per_client)
        return [np.concatenate([pieces[i] for i in mine]) for mine in dealt]


@dataclass(frozen=True, slots=True)
class Quantity(Partitioner):
    """See `quantity`."""

    name = "quantity"

    alpha: float | None = None
    sigma: float | None = None
    min_size: int = 10

    def _least(self) -> int:
        return max(self.min_size, 1)

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[list[int]]:
        if self.alpha is not None:
            shares = simplex(self.alpha, clients, generator)
        else:
            assert self.sigma is not None
            logs = self.sigma * generator.standard_normal(clients)
            shares = np.exp(logs - logs.max())
        rows = generator.permutation(len(labels))
        parts = [part.tolist() for part in np.split(rows, np.cumsum(apportion(len(rows), shares))[:-1])]
        repair(parts, self._least())
        return parts


@dataclass(frozen=True, slots=True)
class Natural(Partitioner):
    """See `natural`."""

    name = "natural"

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[Index]:
        known = np.unique(labels)
        if clients > len(known):
            raise UserError(f"natural(): {clients} clients, but the data have {len(known)}. Ask for at most that.")
        chosen = np.sort(generator.choice(known, clients, replace=False))
        return [np.flatnonzero(labels == group) for group in chosen]


@dataclass(frozen=True, slots=True)
class Affine(Partitioner):
    """See `affine`."""

    name = "affine"

    scale: float = 0.3
    shift: float = 0.3
    base: Partitioner = Iid()

    def _deal(self, labels: Labels, clients: int, generator: Generator) -> Sequence[Index]:
        return self.base(labels, clients, generator)

    def __str__(self) -> str:
        return f"{self.base} + affine(scale={self.scale!r}, shift={self.shift!r})"

    def draw(self, channels: int, generator: Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """One client's a and b of x -> a x + b: a = exp(scale z), b = shift z', z and z' standard normal."""
        z, other = generator.standard_normal((2, channels))
        return np.exp(self.scale * z), self.shift * other


def _number(name: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise UserError(f"{name} = {value!r}; expected a number of at least {least:g}.")
    return float(value)


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} = {value!r}; expected a whole number of at least {least}.")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} = {value!r}; expected True or False.")
    return value


def iid() -> Iid:
    """Rows dealt at random; sizes are equal to within one."""
    return Iid()


def dirichlet(alpha: float, min_size: int = 10, balanced: bool = False, replace: bool = False) -> Dirichlet:
    """Label skew: for each class, proportions over the clients from Dirichlet(alpha).

    Args:
        alpha: Concentration; small is skewed, `inf` is equal shares.
        min_size: Rows that each client has at least; they move from the largest client, in order.
        balanced: Clients of equal size instead, each with proportions over the classes from Dirichlet(alpha).
        replace: Clients may share rows: each draws its rows of a class from all rows of that class.

    Reference:
        Hsu, Qi and Brown, Measuring the effects of non-identical data distribution (2019).
    """
    least = _whole("dirichlet: min_size", min_size, 0)
    flags = _switch("dirichlet: balanced", balanced), _switch("dirichlet: replace", replace)
    return Dirichlet(_number("dirichlet: alpha", alpha, 1e-9), least, *flags)


def classes_per_client(n: int) -> ClassesPerClient:
    """Label skew: each client has n classes (the "pathological" split); classes are used equally often."""
    return ClassesPerClient(_whole("classes_per_client: n", n, 1))


def shards(per_client: int = 2) -> Shards:
    """Rows sorted by label, cut into equal shards, of which each client is dealt `per_client` at random.

    Reference:
        McMahan et al., Communication-efficient learning of deep networks (2017), section 3.
    """
    return Shards(_whole("shards: per_client", per_client, 1))


def quantity(alpha: float | None = None, sigma: float | None = None, min_size: int = 10) -> Quantity:
    """Quantity skew: sizes in proportion to Dirichlet(alpha) or log-normal(0, sigma) draws; rows at random.

    Args:
        alpha: Concentration of the Dirichlet distribution.
        sigma: Spread of the logarithm of the sizes; give this or alpha.
        min_size: Rows that each client has at least; they move from the largest client, in order.
    """
    least = _whole("quantity: min_size", min_size, 0)
    if (alpha is None) == (sigma is None):
        raise UserError("quantity: give either alpha (Dirichlet sizes) or sigma (log-normal sizes).")
    if alpha is not None:
        return Quantity(alpha=_number("quantity: alpha", alpha, 1e-9), min_size=least)
    spread = _number("quantity: sigma", sigma, 0.0)
    if np.isinf(spread):
        raise UserError("quantity: sigma = inf; expected a finite number.")
    return Quantity(sigma=spread, min_size=least)


def natural() -> Natural:
    """The data set's own clients (hospitals, people, domains), or a seeded choice of them."""
    return Natural()


def affine(scale: float = 0.3, shift: float = 0.3, base: Partitioner | None = None) -> Affine:
    """Feature skew: client k sees a_k x + b_k; a_k = exp(scale z), b_k = shift z' per feature or channel.

    Args:
        scale: Spread of the logarithm of the gain.
        shift: Spread of the offset.
        base: Who has which rows; `iid()` without. `dirichlet(0.3) + affine()` says the same.
    """
    spreads = [_number(f"affine: {name}", value, 0.0) for name, value in (("scale", scale), ("shift", shift))]
    if np.isinf(spreads).any():
        raise UserError(f"affine: scale = {scale!r}, shift = {shift!r}; expected finite numbers.")
    return Affine(spreads[0], spreads[1], base or Iid())


PARTITIONS: dict[str, Callable[..., Partitioner]] = {
    "affine": affine,
    "classes_per_client": classes_per_client,
    "dirichlet": dirichlet,
    "iid": iid,
    "natural": natural,
    "quantity": quantity,
    "shards": shards,
}


Index = NDArray[np.int64]
Labels = NDArray[np.int64]
Shares = NDArray[np.float64]
Generator = np.random.Generator


def simplex(alpha: float, size: int, generator: Generator) -> Shares:
    """A draw of Dirichlet(alpha, ..., alpha), in logarithms so that no alpha, however small, gives 0/0."""
    if np.isinf(alpha):
        return np.full(size, 1.0 / size)
    # Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha)
    logs = np.log(generator.standard_gamma(alpha + 1.0, size)) + np.log1p(-generator.random(size)) / alpha
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum(), np.float64)


def apportion(total: int, shares: Shares) -> Index:
    """Whole numbers that sum to total, each within one of total*share: cuts at the cumulative shares."""
    edges = np.floor(np.cumsum(shares) / np.sum(shares) * total + 0.5).astype(np.int64)
    edges[-1] = total
    return np.diff(np.minimum(edges, total), prepend=0)


def largest_remainder(total: int, weights: Shares, generator: Generator) -> Index:
    """Whole numbers that sum to total: quotas rounded down, the rest to the largest remainders."""
    quota = total * weights / weights.sum()
    # A quota that is whole but for rounding counts as whole: no remainder is decided by the last bit.
    whole = np.floor(quota + 1e-9)
    order = np.lexsort((generator.random(len(weights)), whole - quota))
    taken: Index = whole.astype(np.int64)
    taken[order[: total - int(taken.sum())]] += 1
    return taken


def repair(parts: Sequence[list[int]], least: int) -> None:
    """Move rows, in place, from the largest client to those below `least`, in order, until all have enough.

    There are at least clients*least rows: while one client has fewer, the largest has more than `least`, so
    each move brings the end nearer.
    """
    heap = [(-len(part), k) for k, part in enumerate(parts)]
    heapq.heapify(heap)
    for part in parts:
        while len(part) < least:
            _, k = heap[0]
            part.append(parts[k].pop())
            heapq.heapreplace(heap, (-len(parts[k]), k))


def top_up(parts: Sequence[list[int]], rows: int, least: int, generator: Generator) -> None:
    """Fill clients below `least`, in place, from all rows they do not have; for clients that share rows."""
    for part in parts:
        if len(part) < least:
            others = np.setdiff1d(np.arange(rows), part)
            part.extend(generator.choice(others, least - len(part), replace=False).tolist())
