"""What a run gives back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedloom.clients.runner import ClientRunner
from fedloom.errors import UserError
from fedloom.rounds import unseen_clients
from fedloom.rounds.run import Record, Run
from fedloom.tasks import Task
from fedloom.tasks.base import Metrics


@dataclass(frozen=True, slots=True)
class ClientResult:
    """One client at the end of a run.

    Args:
        id: the client.
        metrics: of its own model on its own test rows.
        rounds: how often it took part.
        n_train: its training rows.
        new: it never took part and was adapted at the end.
    """

    id: str
    metrics: Metrics
    rounds: int
    n_train: int
    new: bool = False

    def row(self) -> dict[str, Any]:
        """As a row of ``clients.csv``."""
        return {"client": self.id, "n_train": self.n_train, "rounds": self.rounds, "new": int(self.new), **self.metrics}

    @staticmethod
    def of(row: Mapping[str, Any]) -> ClientResult:
        """The inverse of :meth:`row`."""
        rest = dict(row)
        known = {k: rest.pop(k) for k in ("client", "n_train", "rounds", "new")}
        return ClientResult(known["client"], rest, known["rounds"], known["n_train"], bool(known["new"]))


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
    """The primary metric over clients at the end; prints as a table.

    Args:
        method: its text form.
        metric: the primary metric.
        mean: over the clients that have test rows.
        std: population standard deviation over them.
        worst_decile: mean of the worst tenth of them.
        worst: the worst client.
        best: the best client.
        weighted: mean weighted by test rows.
        participants: mean over the clients that took part, where some did not.
        shared: the shared model on all test rows; None where a method has none.
        new: mean over new clients, after adaptation.
        best_mean: the best round's mean; chosen on validation rows if there are any, else on test rows.
        best_round: that round.
        best_by: ``"validation rows"`` or ``"test rows"``.
        kept_round: the round whose model was kept, where a run may stop early.
        rounds: rounds played.
        bytes_up: tensor bytes sent by clients.
        bytes_down: tensor bytes sent to clients.
        seconds: training and aggregation.
        clients: number of clients that have test rows.
        untested: number of clients that have none.
        buffers: what happens to batch normalisation's running statistics.
        notes: what a reader should know.
    """

    method: str
    metric: str
    mean: float | None
    std: float | None
    worst_decile: float | None
    worst: float | None
    best: float | None
    weighted: float | None
    participants: float | None
    shared: float | None
    new: float | None
    best_mean: float | None
    best_round: int | None
    best_by: str
    rounds: int
    bytes_up: int
    bytes_down: int
    seconds: float
    clients: int = 0
    kept_round: int | None = None
    untested: int = 0
    buffers: str = "none"
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
        for name, value in {
            f"mean of {self.clients} clients": self.mean,
            "standard deviation": self.std,
            "worst tenth": self.worst_decile,
            "worst client": self.worst,
            "best client": self.best,
            "weighted by test rows": self.weighted,
            "clients that took part": self.participants,
            "shared model, all test rows": self.shared,
            "new clients, adapted": self.new,
        }.items():
            if value is not None:
                table.add_row(name, f"{value:.4f}")
        if self.best_mean is not None:
            table.add_row(f"best round ({self.best_round}), by {self.best_by}", f"{self.best_mean:.4f}")
        table.add_row("rounds", str(self.rounds))
        if self.kept_round is not None:
            table.add_row("model kept, of round", str(self.kept_round))
        table.add_row("MB up / down", f"{self.bytes_up / 1e6:.2f} / {self.bytes_down / 1e6:.2f}")
        table.add_row("seconds", f"{self.seconds:.1f}")
        if self.untested:
            table.add_row("clients without test rows", str(self.untested))
        if self.buffers != "none":
            table.add_row("running statistics", self.buffers)
        for note in self.notes:
            table.add_row("note", note)
        return table


class Models(Protocol):
    """Where a result that was read from disk finds its models."""

    def model(self, client: str | None) -> nn.Module:
        """The shared model, or a client's own."""


@dataclass(slots=True)
class Result:
    """A finished run.

    Attributes:
        history: one dictionary per round, the fields of ``metrics.jsonl``.
        clients: clients at the end.
        config: the resolved configuration, as in ``run.toml``.
        task: what was predicted.
        run: the run's state, where it was made in this process.
        notes: what a reader should know.
        path: the run's folder, if it has one.
        models: where models come from, for a run that was read from disk.
    """

    history: list[Record]
    clients: Clients
    config: dict[str, Any]
    task: Task
    run: Run | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    path: Path | None = None
    models: Models | None = field(default=None, repr=False)

    def summary(self) -> Summary:
        """The primary metric over clients, at the end."""
        p, last = self.task.primary, self.history[-1] if self.history else {}
        there = [c for c in self.clients.values() if not c.new]
        values = [v for c in there if (v := c.metrics.get(p)) is not None]
        low, high = (min(values), max(values)) if values else (None, None)
        better = self.task.higher_is_better
        best, by = self._best()
        return Summary(
            method=str(self.config.get("method", "")),
            metric=p,
            mean=last.get(p),
            std=last.get(f"{p}_std"),
            worst_decile=last.get(f"{p}_worst10"),
            worst=low if better else high,
            best=high if better else low,
            weighted=last.get(f"{p}_weighted"),
            participants=last.get(f"{p}_participants"),
            shared=last.get(f"global_{p}"),
            new=last.get(f"new_{p}"),
            best_mean=None if best is None else best.get(p),
            best_round=None if best is None else best["round"],
            best_by=by,
            rounds=len(self.history),
            bytes_up=sum(r.get("bytes_up") or 0 for r in self.history),
            bytes_down=sum(r.get("bytes_down") or 0 for r in self.history),
            seconds=sum(r["seconds"] for r in self.history),
            clients=len(values),
            kept_round=last.get("kept_round"),
            untested=len(there) - len(values),
            buffers=str(self.config.get("resolved", {}).get("buffers", "none")),
            notes=self.notes,
        )

    def _best(self) -> tuple[Record | None, str]:
        """The best round, by validation rows where there are any."""
        p, better = self.task.primary, self.task.higher_is_better
        by = f"val_{p}" if any(r.get(f"val_{p}") is not None for r in self.history) else p
        judged = [r for r in self.history if r.get(by) is not None]
        if not judged:
            return None, "test rows"
        sign = 1.0 if better else -1.0
        return max(judged, key=lambda r: (sign * r[by], -r["round"])), "test rows" if by == p else "validation rows"

    def model(self, client: str | int | None = None) -> nn.Module:
        """A client's own model, or with no argument the shared one.

        The module is of the user's own class where its plain output is the prediction, else a wrapper that takes the method's
        predict route. It is a copy, on the CPU, in evaluation mode. A new client's is the one that was adapted at the end.
        """
        if client is not None:
            client = self.clients[client].id
        if self.run is None:
            assert self.models is not None
            return self.models.model(client)
        run = self.run
        bound = run.at(run.state.round)
        if client is None:
            rule = bound.method.evaluate.tested
            leaves = run.state.leaves if rule is None else rule(run.state.leaves, run.state.memory)
            return bound.network.as_module(leaves)
        desk = next(unseen_clients.desks(run, [client])) if client in run.new else run.desk(client)
        if bound.method.evaluate.predict is None and bound.method.partition.rewrite is None:
            return bound.network.as_module(bound.of_copy(desk.leaves, bound.method.evaluate.copy))
        return Routed(desk)


class Routed(nn.Module):
    """A client's model whose prediction takes the method's own route (extra leaves, a rewritten feature)."""

    def __init__(self, desk: ClientRunner) -> None:
        super().__init__()
        self._desk = desk

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The prediction for a batch of inputs."""
        return self._desk.predict(kwargs or (args[0] if len(args) == 1 else args))
