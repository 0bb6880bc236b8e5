"""The contract of a method as a function that anyone can call."""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import api, rng
from fedloom.clients.messages import Reply
from fedloom.data import Federation
from fedloom.engines import Engine, LoopEngine
from fedloom.errors import Conflict, UserError
from fedloom.plugins import clip, proximal
from fedloom.runs.result import Result
from fedloom.spec import text_form
from fedloom.spec.method import Method, compose
from fedloom.tensors import Leaves

_PACKAGE = Path(__file__).parents[1]
_METHODS = (_PACKAGE / "methods", _PACKAGE / "plugins")
_TORCH = Path(torch.__file__).parent


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the contract: its name, and the reason where it does not hold."""

    name: str
    problem: str | None = None


@dataclass(slots=True)
class Report:
    """The contract, line by line. True when every line holds."""

    method: str
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """The lines that do not hold."""
        return [c for c in self.checks if c.problem is not None]

    def __bool__(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        lines = [
            f"{'ok  ' if c.problem is None else 'FAIL'}  {c.name}{'' if c.problem is None else f': {c.problem}'}"
            for c in self.checks
        ]
        return "\n".join([self.method, *lines])


class _Net(nn.Module):
    """A small picture network with everything that methods look for: normalisation, blocks, a head."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.pool(self.second(self.first(x))))
        return out


def check_method(
    method: Method | str,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data: Federation | None = None,
    task: str | None = None,
) -> Report:
    """Runs the contract of a method on a tiny federation.

    It binds to a model; sends finite tensors and no personal leaf; changes nothing that it was given; is deterministic; leaves the
    global generators alone; keeps only tensors; gives the same numbers one client at a time and all at once, and if not
    says which line cannot be mapped; and composes with ``proximal`` and ``clip``.

    Args:
        method: a method or its text form.
        model: another network than the small one with batch normalisation.
        data: another federation than four clients of 2 to 9 pictures.
        task: another task than classification (or the first that the method can serve).

    Returns:
        A report that is true when every line holds, and prints as a list.

    Example:
        >>> import fedloom as fl
        >>> bool(fl.check_method(fl.fedprox(mu=0.1)))
        True
    """
    chosen = text_form.method(method)
    report = Report(chosen.text)
    goal = task or (chosen.tasks or ("classification",))[0]
    if goal == "segmentation" and data is None:
        raise UserError(f"{chosen.text!r} serves {goal} only: give check_method a model and data of your own")
    trial = _Trial(chosen, model or (lambda: _Net(3 if goal == "classification" else 1)), data or _pictures(goal), goal)
    if not _line(report, "binds to a model and runs", trial.loop):
        return report
    for name, fn in (
        ("sends finite tensors, and no personal leaf", trial.uploads),
        ("changes nothing that it was given", trial.pure),
        ("is deterministic under a seed", trial.deterministic),
        ("leaves the global generators alone", trial.generators),
        ("keeps only tensors", trial.memory),
        ("can be mapped over clients, with equal numbers", trial.mapped),
        ("composes with proximal and clip, or refuses them", trial.composes),
    ):
        _line(report, name, fn)
    return report


def _line(report: Report, name: str, fn: Callable[[], None]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            fn()
    except _Broken as broken:
        report.checks.append(Check(name, str(broken)))
    except Exception as error:  # whatever a stranger's method raises is a line of the report
        report.checks.append(Check(name, f"{type(error).__name__}: {_first(error)}{_where(error)}"))
    else:
        report.checks.append(Check(name))
    return report.checks[-1].problem is None


class _Broken(Exception):
    """A line of the contract that does not hold."""


class _Watching(Engine):
    """An engine that looks at what passes through it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name = engine, engine.name
        self.replies: list[Reply] = []
        self.touched: list[str] = []

    def run_cohort(self, bound: Any, work: Any, program: Any, post: Any, participants: Any) -> list[Reply]:
        """Runs the cohort and compares what was given before and after."""
        given = [("the server's leaves", post.leaves)]
        given += [(f"what {o!r} broadcast", v) for o, v in post.broadcast.items()]
        for p in participants:
            given.append(("a client's leaves", p.state.leaves))
            given += [(f"the client memory of {o!r}", v) for o, v in p.state.memory.items()]
        before = [{k: v.clone() for k, v in leaves.items()} for _, leaves in given]
        replies = self.engine.run_cohort(bound, work, program, post, participants)
        for (what, leaves), old in zip(given, before, strict=True):
            self.touched += [f"{what}: {k!r}" for k, v in leaves.items() if not torch.equal(v, old[k])]
        if program is bound.method.schedule.round:
            self.replies += replies
        return replies


@dataclass(slots=True)
class _Trial:
    method: Method
    model: nn.Module | Callable[[], nn.Module]
    data: Federation
    task: str
    done: Result | None = None
    watched: _Watching | None = None

    def fit(self, method: Method, engine: Engine | str) -> Result:
        options: dict[str, Any] = {"rounds": 2, "cohort": 3, "batch_size": 4, "precision": "fp64", "progress": False}
        return api.fit(method, self.model, self.data, task=self.task, engine=engine, **options)

    def loop(self) -> None:
        self.watched = _Watching(LoopEngine())
        self.done = self.fit(self.method, self.watched)

    def uploads(self) -> None:
        assert self.watched is not None and self.done is not None and self.done.run is not None
        specs = self.done.run.bound.specs
        reducers = self.method.reducers()
        declared = {*reducers, *(r.weight for r in reducers.values())} if self.method.then is None else None
        for reply in self.watched.replies:
            for entry, value in reply.message.items():
                if declared is not None and entry not in declared:
                    raise _Broken(f"the entry {entry!r} is sent, but no stage declares it with a reducer")
                for name, tensor in value.items():
                    if not isinstance(tensor, Tensor):
                        raise _Broken(f"{entry}[{name!r}] is {type(tensor).__name__}, not a tensor")
                    if name in specs and specs[name].kind == "personal":
                        raise _Broken(f"{entry}[{name!r}] is a personal leaf")
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                        raise _Broken(f"{entry}[{name!r}] is not finite")

    def pure(self) -> None:
        assert self.watched is not None
        if self.watched.touched:
            raise _Broken(f"{self.watched.touched[0]} was changed in place; return new tensors instead")

    def deterministic(self) -> None:
        again = self.fit(self.method, "loop")
        _equal(self.done, again, 0.0, "a second run with the same seed")

    def generators(self) -> None:
        before = torch.random.get_rng_state()
        self.fit(self.method, "loop")
        if not torch.equal(before, torch.random.get_rng_state()):
            raise _Broken("torch's global generator was moved; draw from fedloom.rng with seen.noise instead")

    def memory(self) -> None:
        assert self.done is not None and self.done.run is not None
        memories = [self.done.run.state.memory, *(c.memory for c in self.done.run.clients.values())]
        for memory in memories:
            for owner, values in memory.items():
                for name, value in values.items():
                    if not isinstance(value, Tensor):
                        raise _Broken(f"memory {owner!r} holds {name!r} of type {type(value).__name__}")

    def mapped(self) -> None:
        try:
            other = self.fit(self.method, "vectorised")
        except Exception as error:
            raise _Broken(f"{_first(error)}{_where(error)}") from error
        try:
            _equal(self.done, other, 1e-8, "the vectorised engine")
        except _Broken as broken:
            hint = "a term that adds up rows must do it with batch.mean or batch.sum, which leave padding rows out"
            raise _Broken(f"{broken}; {hint}") from None

    def composes(self) -> None:
        plugins = [proximal(0.01)]
        if "delta" in self.method.reducers():
            plugins.append(clip(1.0))
        try:
            stacked = compose(self.method, *plugins)
        except Conflict:
            return  # refused before round one, with a reason: that is within the contract
        self.fit(stacked, "loop")


def _equal(a: Result | None, b: Result | None, tolerance: float, what: str) -> None:
    for (name, left), (_, right) in zip(_tensors(a), _tensors(b), strict=True):
        if left.shape != right.shape:
            raise _Broken(f"{what} gives another shape of {name}")
        gap = float((left.double() - right.double()).abs().max()) if left.numel() else 0.0
        if not gap <= tolerance * max(1.0, float(left.double().abs().max()) if left.numel() else 0.0):
            raise _Broken(f"{what} gives another {name} (difference {gap:.2g})")


def _tensors(result: Result | None) -> Iterator[tuple[str, Tensor]]:
    assert result is not None and result.run is not None
    run = result.run

    def named(what: str, leaves: Leaves) -> Iterator[tuple[str, Tensor]]:
        for name, value in leaves.items():
            yield f"{what} {name!r}", value

    yield from named("the server's", run.state.leaves)
    for owner, memory in run.state.memory.items():
        yield from named(f"the server memory of {owner}", memory)
    for client in sorted(run.clients):
        yield from named(f"client {client}'s", run.clients[client].leaves)
        for owner, memory in run.clients[client].memory.items():
            yield from named(f"client {client}'s memory of {owner}", memory)


def _first(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _where(error: BaseException) -> str:
    """The innermost line of the method's own code in a traceback."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        ours = path.is_relative_to(_PACKAGE) and not any(path.is_relative_to(m) for m in _METHODS)
        if not ours and not path.is_relative_to(_TORCH) and frame.lineno is not None:
            line = linecache.getline(frame.filename, frame.lineno).strip()
            found = f" (at {path.name}:{frame.lineno}: {line})"
    return found


def _pictures(task: str) -> Federation:
    draw = rng.stream(0, "init", "check")
    clients = []
    for rows in (5, 9, 2, 7):
        x = draw.normal(size=(rows, 1, 6, 6)).astype("float32")
        y = draw.integers(0, 3 if task == "classification" else 2, size=rows)
        clients.append(((x, y if task != "regression" else y.astype("float32")),) * 2)
    return Federation.from_arrays(clients)
