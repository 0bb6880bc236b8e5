"""What a run gives back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedloom.client import Desk
from fedloom.errors import UserError
from fedloom.run import Record, Run
from fedloom.tasks import Task
from fedloom.tasks.base import Metrics


@dataclass(frozen=True, slots=True)
class ClientResult:
    """One client at the end of a run: metrics of its own model on its own test rows, and how often it took part."""

    id: str
    metrics: Metrics
    rounds: int
    n_train: int


class Clients(Mapping[str, ClientResult]):
    """Clients by id; ``clients[3]`` and ``clients["3"]`` are the same."""

    def __init__(self, items: Mapping[str, ClientResult]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str | int) -> ClientResult:
        if str(key) not in self._items:
            raise UserError(f"no client {str(key)!r}; clients are {', '.join(list(self._items)[:10])}")
        return self._items[str(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass(frozen=True, slots=True)
class Summary:
    """The primary metric over clients; prints as a table."""

    method: str
    metric: str
    mean: float | None
    std: float | None
    worst: float | None
    best: float | None
    weighted: float | None
    shared: float | None
    rounds: int
    bytes_up: int
    bytes_down: int
    seconds: float
    clients: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        console = Console(width=100)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip()

    def table(self) -> Table:
        """As a table for a terminal."""
        table = Table(title=self.method, title_justify="left")
        table.add_column("measure")
        table.add_column(self.metric, justify="right")
        rows = {
            f"mean of {self.clients} clients": self.mean,
            "standard deviation": self.std,
            "worst client": self.worst,
            "best client": self.best,
            "weighted by test rows": self.weighted,
            "shared model, all test rows": self.shared,
        }
        for name, value in rows.items():
            table.add_row(name, "-" if value is None else f"{value:.4f}")
        table.add_row("rounds", str(self.rounds))
        table.add_row("MB up / down", f"{self.bytes_up / 1e6:.2f} / {self.bytes_down / 1e6:.2f}")
        table.add_row("seconds", f"{self.seconds:.1f}")
        for note in self.notes:
            table.add_row("note", note)
        return table


@dataclass(slots=True)
class Result:
    """A finished run.

    Attributes:
        history: one dictionary per round, the fields of ``metrics.jsonl``.
        clients: clients at the end.
        config: the resolved configuration.
    """

    history: list[Record]
    clients: Clients
    config: dict[str, Any]
    task: Task
    run: Run | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    def summary(self) -> Summary:
        """The primary metric over clients, at the end."""
        p, last = self.task.primary, self.history[-1]
        values = [v for c in self.clients.values() if (v := c.metrics.get(p)) is not None]
        low, high = (min(values), max(values)) if values else (None, None)
        better = self.task.higher_is_better
        return Summary(
            method=str(self.config.get("method", "")),
            metric=p,
            mean=last.get(p),
            std=last.get(f"{p}_std"),
            worst=low if better else high,
            best=high if better else low,
            weighted=last.get(f"{p}_weighted"),
            shared=last.get(f"global_{p}"),
            rounds=len(self.history),
            bytes_up=sum(r.get("bytes_up") or 0 for r in self.history),
            bytes_down=sum(r.get("bytes_down") or 0 for r in self.history),
            seconds=sum(r["seconds"] for r in self.history),
            clients=len(values),
            notes=self.notes,
        )

    def model(self, client: str | int | None = None) -> nn.Module:
        """A client's own model, or with no argument the shared one.

        The module is of the user's own class where its plain output is the prediction, else a wrapper that takes the method's
        predict route. It is a copy, on the CPU, in evaluation mode.
        """
        assert self.run is not None
        run = self.run
        bound = run.at(run.state.round)
        if client is None:
            rule = bound.method.evaluate.tested
            leaves = run.state.leaves if rule is None else rule(run.state.leaves, run.state.memory)
            return bound.network.as_module(leaves)
        name = str(client)
        if name not in run.judges:
            raise UserError(f"no client {name!r}; clients are {', '.join(list(run.judges)[:10])}")
        desk = run.desk(name)
        if bound.method.evaluate.predict is None and bound.method.partition.rewrite is None:
            return bound.network.as_module(bound.of_copy(desk.leaves, bound.method.evaluate.copy))
        return Routed(desk)


class Routed(nn.Module):
    """A client's model whose prediction takes the method's own route (extra leaves, a rewritten feature)."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The prediction for a batch of inputs."""
        return self._desk.predict(kwargs or (args[0] if len(args) == 1 else args))
