"""Options of a run: one dataclass field per option, with its type, range and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal


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
