"""Options of a run: each is a field of a dataclass, with its type, range and meaning in one place.

A configuration file, ``fit`` and the documentation all read these classes, so they cannot drift apart.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from fedloom import registry
from fedloom.errors import UnknownName, UserError
from fedloom.values import checked

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is not in a table.

    Args:
        mode: centralised (one participant with all rows), federated, or hybrid (cloud and sites).
        rounds: number of rounds.
        cohort: clients in a round: a fraction (0.1) or a number (10); 1 is one client, 1.0 all of them.
        epochs: local epochs.
        batch_size: rows of a mini-batch, or "full".
        task: classification, binary, regression, segmentation; in Python also an `fl.Task`.
        engine: auto, loop, vectorised, or flower (every client a site in this process, through Flower's messages).
        device: auto, cpu or cuda.
        precision: fp32, tf32, bf16 or fp64.
        seed: of everything random.
        workers: processes of the loop engine; 0 for none.
        deterministic: use deterministic kernels only (slower on CUDA); the CPU always is.
        optimizer_state: keep or reset the clients' optimiser state between rounds; centralised runs keep it,
            others reset it.
        loggers: where else a run's numbers go while it goes on: tensorboard, mlflow; in Python also an object of one's own.
    """

    mode: Literal["centralised", "federated", "hybrid"] = "federated"
    rounds: int = 10
    cohort: float | int = 1.0
    epochs: int = 1
    batch_size: int | Literal["full"] = 32
    task: str = "classification"
    engine: Literal["auto", "loop", "vectorised", "flower"] = "auto"
    device: str = "auto"
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = "fp32"
    seed: int = 0
    workers: int = 0
    deterministic: bool = False
    optimizer_state: Literal["keep", "reset"] | None = None
    loggers: tuple[str, ...] = ()

    BOUNDS: ClassVar[tuple[str, ...]] = (
        "1 <= rounds <= 10000000",
        "1 <= epochs <= 1000000",
        "batch_size >= 1",
        "workers >= 0",
        "cohort > 0",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Who has which rows: a data set by name that is dealt to clients, or one's own files.

    Args:
        name: a data set (`fedloom list datasets`).
        path: one's own data instead: a folder with an npz or CSV file per client, or one CSV table.
        data_dir: where data sets by name are kept; else FEDLOOM_DATA or the user's cache.
        clients: how many clients the rows are dealt to.
        partition: how they are dealt (`fedloom list partitions`), such as "dirichlet(0.3)".
        split: matched, per_client or shared; of a table, the column with the words train, val, test.
        test: share of a client's rows for testing, where the data do not say.
        val: share of a client's training rows for validation.
        seed: of the partition and the cuts; the run's seed without.
        client: of a table, the column that says whose row it is.
        label: of a table or of CSV files, the column to predict.
        numeric_label: the label is a number, not a class.
        subset: only these clients.
        options: options of the data set.
        preprocess: what to do with columns: impute, scale, missing, types, one_hot, fit.
        holdout: share of the clients that never take part and are adapted at the end (`new_...`).
        adapt_epochs: epochs on the personal leaves of those new clients.
    """

    name: str | None = None
    path: str | None = None
    data_dir: str | None = None
    clients: int | None = None
    partition: str | None = None
    split: str | None = None
    test: float = 0.25
    val: float = 0.0
    seed: int | None = None
    client: str | None = None
    label: str | None = None
    numeric_label: bool = False
    subset: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    holdout: float = 0.0
    adapt_epochs: int = 5

    BOUNDS: ClassVar[tuple[str, ...]] = (
        "clients >= 1",
        "0 <= test < 1",
        "0 <= val < 1",
        "0 <= holdout < 1",
        "adapt_epochs >= 0",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """When and on whom models are tested.

    Args:
        every: rounds between evaluations; 0: only after the last round, which is always evaluated, on all clients.
        clients: all, sampled (those of the round), or a number (a fixed seeded choice); all up to 1,000 clients.
        moments: end (after the round), and for the clients of the round: before and after their local training.
        patience: stop when the validation metric has not improved for so many evaluations, and keep the model of the best round
            (`kept_round` of the last record); 0: never.
        holdout: as in [data], for federations made in Python.
        adapt_epochs: as in [data], for federations made in Python.
        folds: cross-validation: every client's rows are cut into so many parts, each tested once by a run of its own; 0: none.
            In Python it is `fl.cross_validate`.
        repeats: how often the rows are cut anew for it.
    """

    every: int = 1
    clients: Literal["all", "sampled"] | int | None = None
    moments: tuple[Literal["before", "after", "end"], ...] = ("end",)
    patience: int = 0
    holdout: float = 0.0
    adapt_epochs: int = 5
    folds: int = 0
    repeats: int = 1

    BOUNDS: ClassVar[tuple[str, ...]] = (
        "folds >= 0",
        "repeats >= 1",
        "every >= 0",
        "clients >= 1",
        "patience >= 0",
        "0 <= holdout < 1",
        "adapt_epochs >= 0",
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """What the papers' theorems speak of, measured in the run and recorded under ``diagnostics``; without the table nothing is.

    Args:
        every: rounds between measurements; the first round is always measured.
        clients: clients whose gradients are taken (a fixed seeded choice); drift and conflict are of the clients of the round.
        rows: most training rows of a client that are used for its gradient.
    """

    every: int = 1
    clients: int = 10
    rows: int = 1024

    BOUNDS: ClassVar[tuple[str, ...]] = ("every >= 1", "clients >= 1", "rows >= 2")


# Reading ----------------------------------------------------------------------------------------------------


def read(cls: type[T], values: object, where: str) -> T:
    """An options object from plain values, checked: keys, types, ranges.

    Args:
        cls: the dataclass.
        values: a mapping of its fields.
        where: what to call it in messages, such as ``evaluate``; empty for the top level.

    Example:
        >>> @dataclass
        ... class Interval:
        ...     every: int = 1
        >>> read(Interval, {"every": 5}, "evaluate").every
        5
    """
    prefix = f"{where}." if where else ""
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise UserError(f"{where}={values!r}: expected a table of options")
    hints = typing.get_type_hints(cls)
    known = option_names(cls)
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UnknownName(f"option of {where}" if where else "option", str(key), known)
        made[key] = checked(f"{prefix}{key}", value, hints[key])
    for bound in getattr(cls, "BOUNDS", ()):
        numbers = {k: v for k, v in made.items() if isinstance(v, (int, float))}
        registry.check_bound(where or "options", bound, numbers)
    return cls(**made)


def option_names(cls: type[Any]) -> tuple[str, ...]:
    """Names of the options of a class, in order."""
    return tuple(f.name for f in fields(cls))


def default(cls: type[Any], name: str) -> Any:
    """Default of an option."""
    found = next(f for f in fields(cls) if f.name == name)
    if found.default_factory is not MISSING:
        return found.default_factory()
    return found.default


def meanings(of: Callable[..., Any]) -> dict[str, str]:
    """What each argument means, from the ``Args`` of a docstring."""
    text = inspect.getdoc(of) or ""
    block = re.search(r"^Args:\n((?: +.*\n?|\n)+)", text, re.MULTILINE)
    found: dict[str, str] = {}
    last = ""
    for line in (block.group(1) if block else "").splitlines():
        entry = re.match(r"^ {4}(\w+): (.*)$", line)
        if entry:
            last = entry.group(1)
            found[last] = entry.group(2)
        elif line.strip() and last:
            found[last] += " " + line.strip()
    return found
