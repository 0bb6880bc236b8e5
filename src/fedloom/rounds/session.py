"""Session: evaluation, early stopping, checkpoints, progress and callbacks around the rounds of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedloom import rng
from fedloom.clients.messages import Site
from fedloom.clients.states import ClientState, ServerState
from fedloom.engines.distributed import Ranks
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.errors import RunError
from fedloom.rounds import diagnostics, evaluation, run, unseen_clients
from fedloom.rounds.diagnostics.probe import Probe
from fedloom.rounds.evaluation import Evaluate
from fedloom.rounds.logger import Logger
from fedloom.rounds.modes import Hybrid
from fedloom.rounds.run import Record, Run
from fedloom.store.checkpoint import Snapshot
from fedloom.store.client_store import ClientStore
from fedloom.store.codec import state_tree
from fedloom.tasks.base import Metrics

Callback = Callable[[Record], object]

_LONG = 60.0
"""Remaining seconds above which the session prints an estimate of the remaining time."""

LIMIT = 1000
"""Default for the largest number of clients that are evaluated after a round."""


class Folder(Protocol):
    """The folder of a run as a session needs it.

    :class:`fedloom.runs.run_folder.RunFolder` is one.
    """

    def append(self, record: Record, clients: Mapping[str, float | None] | None = None) -> None:
        """Add a round, and the metric of each client."""

    def checkpoint(self, snapshot: Snapshot, *, last: bool) -> None:
        """Write a checkpoint; it may skip one that is not the last."""


@dataclass(slots=True)
class Session:
    """State of a running experiment.

    Args:
        state: the run.
        mode: centralised, federated or hybrid.
        options: options of the evaluation.
        hybrid: plays the rounds in hybrid mode.
        probe: measures the rounds, if diagnostics are switched on.
        folder: the run folder, if any.
        new: clients that never take part.
        callbacks: called with each round's record; the run stops if one returns True.
        loggers: receive each complete record.
        progress: whether to show a progress bar.
        ranks: the processes of a distributed run.
        history: the records of the rounds.
        fresh: metrics of the new clients.
        notes: notes for the result.
    """

    state: Run
    mode: str
    options: Evaluate
    hybrid: Hybrid | None = None
    probe: Probe | None = None
    folder: Folder | None = None
    new: Mapping[str, Site] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    loggers: Sequence[Logger] = ()
    progress: bool = True
    ranks: Ranks | None = None
    history: list[Record] = field(default_factory=list)
    fresh: dict[str, Metrics] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _whole: bool = False
    _events: int = 0
    _notes: int = 0
    _unmeasured: set[str] = field(default_factory=set)
    _own: dict[str, Metrics] = field(default_factory=dict)
    _good: Snapshot | None = None
    _best: tuple[float, ServerState] | None = None

    def restore(self, snapshot: Snapshot, history: list[Record]) -> None:
        """Restore a checkpoint."""
        self.state.state, self.state.clients = snapshot.server, snapshot.clients
        self.state.last, self.fresh = snapshot.facts["last"], snapshot.facts["new"]
        self.history = history
        if self.hybrid is not None:
            self.hybrid.alpha = snapshot.facts["alpha"]
        self._whole = snapshot.facts["whole"]
        best = None if snapshot.best is None else snapshot.best()
        if best is not None and isinstance(snapshot.clients, ClientStore):
            self._best = (best["value"], ServerState(*best["server"]))
            states = {n: None if s is None else ClientState(**s) for n, s in best["clients"].items()}
            snapshot.clients.remember("best", states)

    def snapshot(self) -> Snapshot:
        """Return everything that is needed to resume."""
        alpha = None if self.hybrid is None else self.hybrid.alpha
        facts = {"alpha": alpha, "last": self.state.last, "new": self.fresh, "whole": self._whole}
        best = None if self._best is None else self._best_tree
        number = self.history[-1]["round"] if self.history else None
        return Snapshot(self.state.state, self.state.clients, facts, best, number)

    # The best round, for runs that stop early.

    def _best_tree(self) -> Record:
        """Return the best state, with the states then of the clients that changed since."""
        assert self._best is not None and isinstance(self.state.clients, ClientStore)
        value, state = self._best
        clients = {n: None if s is None else state_tree(s) for n, s in self.state.clients.since("best").items()}
        return {"value": value, "server": [state.leaves, state.memory, state.round], "clients": clients}

    def _note_best(self, record: Record) -> None:
        """Record the state if the round has the best validation metric; of equal rounds the first counts."""
        task, clients = self.state.bound.task, self.state.clients
        value = record.get(f"val_{task.primary}")
        if not self.options.patience or value is None or not isinstance(clients, ClientStore):
            return
        value = value if task.higher_is_better else -value
        if self._best is None or value > self._best[0]:
            self._best = (value, self.state.state)
            clients.mark("best")

    def _restore_best(self, record: Record) -> None:
        """Restore the state of the best round at the end of the run. The last evaluation is of that model."""
        if self._best is None:
            return
        assert isinstance(self.state.clients, ClientStore)
        _, best = self._best
        if best.round != record["round"]:
            self.state.state = best
            self.state.clients.back("best")
            self._whole = False
        record["kept_round"] = best.round
        self._best = None

    def go(self, total: int) -> None:
        """Play the remaining rounds."""
        if self._whole:
            return
        with _bar(self.progress) as bar:
            text, p = self.state.bound.method.text, self.state.bound.task.primary
            line = bar.add_task(text, total=total, completed=len(self.history))

            def after(record: Record) -> bool:
                self.history.append(record)
                self._record_engine(record)
                self._note_best(record)
                results = [c(record) for c in self.callbacks]
                stop = any(r is True for r in results) or self._stops_early()
                stop = stop if self.ranks is None else bool(self.ranks.agree(stop))
                last = stop or record["round"] == total
                if last:
                    self._restore_best(record)
                if last and not self._whole:
                    record |= self._evaluate(last=True)
                    self._record_engine(record)
                self._good = self.snapshot()
                if isinstance(self.state.clients, ClientStore):
                    self.state.clients.mark()
                if self.folder is not None:
                    self.folder.append(record, {n: m.get(p) for n, m in self._own.items()})
                    self._own = {}
                    self.folder.checkpoint(self._good, last=last)
                for logger in self.loggers:
                    logger.log(record)
                value = record.get(p)
                shown = "" if value is None else f"  {p} {value:.4f}"
                if not bar.disable:
                    bar.update(line, advance=1, description=f"{text}{shown}")
                self._show_time_left(bar, record, total)
                return last

            try:
                run.rounds(self.state, total, self._play, evaluate=lambda r, f: self._judge(r, f, total), after=after)
            except RunError:
                if self.folder is not None and self._good is not None:
                    if isinstance(self.state.clients, ClientStore):
                        self.state.clients.back()
                    self.folder.checkpoint(self._good, last=True)
                raise

    def _show_time_left(self, bar: Progress, record: Record, total: int) -> None:
        """Print an estimate of the remaining time after the first round of a long run."""
        left = total - record["round"]
        seconds = record["seconds_total"] * left
        compiled = getattr(self.state.engine, "step", "") == "compiled"  # compiling makes the first round the longest
        if self.progress and len(self.history) == 1 + compiled and seconds > _LONG:
            bar.console.print(
                f"one round took {record['seconds_total']:.1f} s; {left} more take about {in_words(seconds)}"
            )

    def _record_engine(self, record: Record) -> None:
        """Add the engine's events to a record: out of memory, and steps that could not be traced, compiled or captured."""
        engine = getattr(self.state.engine, "inner", self.state.engine)
        if not isinstance(engine, VectorisedEngine):
            return
        if len(engine.events) > self._events:
            record["out_of_memory"] = engine.events[self._events :]
            self._events = len(engine.events)
        notes = engine.notes
        if len(notes) > self._notes:
            record["plainer_steps"] = notes[self._notes :]
            self._notes = len(notes)

    def _play(self, round: int) -> Record:
        hybrid = self.hybrid

        def play() -> Record:
            return run.federated(self.state, round) if hybrid is None else hybrid(self.state, round)

        facts = play() if self.probe is None else self.probe.around(self.state, round, play)
        if self.mode == "centralised":
            facts |= {"bytes_up": 0, "bytes_down": 0, "bytes_up_by_kind": {}, "bytes_down_by_kind": {}}
        return {"mode": self.mode, **facts}

    # Evaluation.

    def _judge(self, round: int, facts: Record, total: int) -> Record:
        every, last = self.options.every, round == total
        if not last and (every == 0 or round % every):
            return {self.state.bound.task.primary: None}
        return self._evaluate(last=last, sampled=facts.get("clients", ()))

    def _evaluate(self, *, last: bool, sampled: Sequence[str] = ()) -> Record:
        """Return the metrics of a round; after the last one of all clients and of new ones."""
        state, task = self.state, self.state.bound.task
        names = self._clients_to_evaluate(sampled, last)
        own, shared = state.evaluate(names)
        state.last = self._own = own
        self._whole = last
        record: Record = dict(evaluation.summary(task, own))
        p = task.primary
        part = {n: m for n, m in own.items() if state.rounds_of(state.judges[n][1]) > 0}
        if part and len(part) < len(own):
            record[f"{p}_participants"] = evaluation.summary(task, part).get(p)
        record["evaluated"] = len(own)
        if shared is None:
            record[f"global_{p}"] = None
        else:
            record |= {f"global_{k}": v for k, v in shared.items()}
        validated = state.validate(names)
        if validated:
            record |= {f"val_{k}": v for k, v in evaluation.summary(task, validated).items() if k in ("loss", p)}
        if self.folder is not None:
            record |= self._parts()
        if last and self.new:
            self.fresh = unseen_clients.judge(state, self.new, self.options.adapt_epochs)
            record |= {f"new_{k}": v for k, v in evaluation.summary(task, self.fresh).items()}
        if last:
            self._warn(record)
        return record

    def _parts(self) -> Record:
        """Measure the parts of the loss and what taps tell of the labels.

        A measurement that fails does not end the run: the record names its first failure under ``unmeasured``.
        """
        record: Record = {}
        for name, measure in (("terms", diagnostics.term_values), ("information", diagnostics.information_bounds)):
            try:
                parts = dict(measure(self.state))
            except Exception as error:  # a user's term may raise anything outside of training
                if name not in self._unmeasured:
                    self._unmeasured.add(name)
                    record.setdefault("unmeasured", []).append(f"{name}: {type(error).__name__}: {error}")
                continue
            if parts:
                record[name] = parts
        return record

    def _clients_to_evaluate(self, sampled: Sequence[str], last: bool) -> list[str]:
        names, whom = list(self.state.judges), self.options.clients
        if last or whom == "all" or (whom is None and len(names) <= LIMIT):
            return names
        if whom == "sampled":
            owners = set(sampled)
            return [n for n in names if self.state.judges[n][1] in owners]
        size = min(LIMIT if whom is None else int(whom), len(names))
        draw = rng.stream(self.state.work.seed, "sample", "evaluate").choice(len(names), size=size, replace=False)
        return [names[i] for i in sorted(draw)]

    def _stops_early(self) -> bool:
        """Return whether the validation metric has stopped improving."""
        task = self.state.bound.task
        if not self.options.patience:
            return False
        key, sign = f"val_{task.primary}", 1.0 if task.higher_is_better else -1.0
        values = [sign * v for r in self.history if (v := r.get(key)) is not None]
        if len(values) <= self.options.patience:
            return False
        best = values.index(max(values))
        return len(values) - 1 - best >= self.options.patience

    def _warn(self, record: Record) -> None:
        note = evaluation.absent_note(self.state.bound.task, record)
        if note is not None:
            self.notes.append(note)
            warnings.warn(note, stacklevel=2)


def in_words(seconds: float) -> str:
    """Format a time span.

    Example:
        >>> in_words(90), in_words(5000), in_words(200000)
        ('2 min', '1.4 h', '2.3 days')
    """
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} days"


def _bar(shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not shown or not console.is_terminal,
        transient=True,
    )
