"""Who takes part in a round."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from fedloom import rng
from fedloom.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Participation:
    """Who takes part in a round.

    Args:
        rule: uniform; size (in proportion to training rows); cyclic (in turn); trace (who is available, from a file).
        trace: CSV file with the columns round and client, a line for each client that is available in a round; after
            its last round it begins again.
        dropout: share of the chosen clients that send nothing and keep their old state.
        stragglers: share of the chosen clients that make only ceil(u K) of their K steps.
        min_work: u is uniform between this and 1.
    """

    rule: Literal["uniform", "size", "cyclic", "trace"] = "uniform"
    trace: str | None = None
    dropout: float = 0.0
    stragglers: float = 0.0
    min_work: float = 0.1

    BOUNDS: ClassVar[tuple[str, ...]] = ("0 <= dropout < 1", "0 <= stragglers <= 1", "0 < min_work <= 1")

    def __post_init__(self) -> None:
        if (self.rule == "trace") != (self.trace is not None):
            raise UserError("participation: rule='trace' and trace='file.csv' belong together; give both or neither")


Trace = tuple[tuple[str, ...], ...]


def cohort_size(cohort: float | int, clients: int) -> int:
    """Number of clients in a round: a fraction (float) or a number (int).

    Example:
        >>> cohort_size(0.1, 7), cohort_size(0.25, 10), cohort_size(1, 10), cohort_size(1.0, 10)
        (1, 3, 1, 10)
    """
    if isinstance(cohort, bool) or not isinstance(cohort, (int, float)):
        raise UserError(f"cohort={cohort!r}: expected a fraction such as 0.1 or a number of clients such as 10")
    if isinstance(cohort, int):
        if not 1 <= cohort <= clients:
            raise UserError(f"cohort={cohort}: expected 1 to {clients} clients, or a fraction in (0, 1]")
        return cohort
    if not 0 < cohort <= 1:
        raise UserError(f"cohort={cohort}: a fraction must be in (0, 1]; give an int for a number of clients")
    return max(1, math.floor(cohort * clients + 0.5))


def sample(seed: int, round: int, ids: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Uniform, without replacement, then in federation order."""
    if size >= len(ids):
        return ids
    chosen = rng.stream(seed, "sample", round).choice(len(ids), size=size, replace=False)
    return tuple(ids[i] for i in sorted(chosen))


@dataclass(frozen=True, slots=True)
class Roster:
    """Who there is and how many training rows each has; made once, so that a round does not walk through the population.

    Args:
        ids: every client, in federation order.
        rows: their training rows.
    """

    ids: tuple[str, ...]
    rows: tuple[int, ...]

    @staticmethod
    def of(rows: Mapping[str, int]) -> Roster:
        """From rows by client."""
        return Roster(tuple(rows), tuple(rows.values()))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The clients of a round.

    Args:
        ids: who was asked, in federation order.
        dropped: those of them who send nothing.
        shares: share of their steps that stragglers make.
    """

    ids: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    shares: dict[str, float] = field(default_factory=dict)


def draw(
    options: Participation, trace: Trace, seed: int, round: int, roster: Roster, size: int, *, everyone: bool
) -> Drawn:
    """Who takes part in a round, by the rules of a run.

    Args:
        options: the rules.
        trace: who is available in each round, in federation order, for the rule ``trace``.
        seed: the run's.
        round: the round, from 1.
        roster: who there is.
        size: clients in a round.
        everyone: the method asks for every client.
    """
    ids = roster.ids
    if everyone:
        chosen = ids
    elif options.rule == "uniform":
        chosen = sample(seed, round, ids, size)
    elif options.rule == "size":
        chosen = _by_size(seed, round, roster, size)
    elif options.rule == "cyclic":
        first = (round - 1) * size
        places = sorted({(first + i) % len(ids) for i in range(min(size, len(ids)))})
        chosen = tuple(ids[i] for i in places)
    else:
        chosen = sample(seed, round, trace[(round - 1) % len(trace)], size)
    if not options.dropout and not options.stragglers:
        return Drawn(chosen)
    dropped, shares = [], {}
    for name in chosen:
        stream = rng.stream(seed, "availability", name, round)
        gone, slow, work = stream.random(3)
        if gone < options.dropout:
            dropped.append(name)
        elif slow < options.stragglers:
            shares[name] = options.min_work + (1 - options.min_work) * float(work)
    return Drawn(chosen, tuple(dropped), shares)


def _by_size(seed: int, round: int, roster: Roster, size: int) -> tuple[str, ...]:
    """In proportion to training rows, without replacement."""
    ids = roster.ids
    if size >= len(ids):
        return ids
    weights = np.array(roster.rows, np.float64)
    chosen = rng.stream(seed, "sample", round).choice(len(ids), size=size, replace=False, p=weights / weights.sum())
    return tuple(ids[i] for i in sorted(chosen))


def read_trace(path: str | Path, ids: Sequence[str]) -> Trace:
    """Who is available in each round, in federation order: from a CSV file with the columns ``round`` (from 1) and ``client``."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if not {"round", "client"} <= set(table.fieldnames or ()):
                raise UserError(f"participation.trace {path}: expected a CSV file with the columns round and client")
            lines = [(row["round"], row["client"]) for row in table]
    except OSError as error:
        raise UserError(f"participation.trace: cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"participation.trace {path}: {error}") from None
    known, found = {name: i for i, name in enumerate(ids)}, dict[int, list[str]]()
    for number, (round, client) in enumerate(lines, start=2):
        if not str(round).isdecimal() or int(round) < 1 or int(round) > 10**7:
            raise UserError(f"participation.trace {path}, line {number}: round {round!r}; expected 1, 2, 3, ...")
        if client not in known:
            raise UserError(f"participation.trace {path}, line {number}: unknown client {client!r}")
        found.setdefault(int(round), []).append(client)
    last = max(found, default=0)
    for round in range(1, last + 1):
        if round not in found:
            raise UserError(
                f"participation.trace {path}: nobody is available in round {round}; add a client or leave a round out"
            )
    if not found:
        raise UserError(f"participation.trace {path} names no client")
    return tuple(tuple(sorted(set(found[r]), key=lambda name: known[name])) for r in range(1, last + 1))
