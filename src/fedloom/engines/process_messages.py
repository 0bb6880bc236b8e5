"""What travels between a run and its worker processes, and in what form."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import tasks
from fedloom.data import Rows
from fedloom.data.augment import Augment
from fedloom.engines.base import Problem
from fedloom.engines.choose_device import choose_device
from fedloom.network import inspect_model
from fedloom.network.bound_method import Bound, bind
from fedloom.spec import text_form
from fedloom.spec.method import Method
from fedloom.spec.parts import Judge, Program, Receive

_PROGRAMS = ("setup", "round", "adapt")


class CannotShip(Exception):
    """A model, method or task that cannot be rebuilt in another process, with the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parcel:
    """All that a worker needs to rebuild a run's bound methods.

    Args:
        content: what the worker's end of the pipe receives.
        digest: of the leaves and phases that must come out.
        needs_main: whether the model's class lives in the user's script.
    """

    content: bytes
    digest: str
    needs_main: bool


# Values: tensors become arrays; dictionaries, lists, tuples and dataclasses are walked through.


@dataclasses.dataclass(frozen=True, slots=True)
class _Array:
    value: np.ndarray


def packed(value: Any) -> Any:
    """A copy in which every tensor is an array."""
    return _mapped(value, lambda v: _Array(v.detach().cpu().numpy()) if isinstance(v, Tensor) else v)


def unpacked(value: Any) -> Any:
    """The inverse of :func:`packed`; tensors have memory of torch's own, as they would have without the journey."""
    return _mapped(value, lambda v: torch.from_numpy(v.value).clone() if isinstance(v, _Array) else v)


def _mapped(value: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Tensor, _Array)):
        return fn(value)
    if isinstance(value, dict):
        return {k: _mapped(v, fn) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(v, fn) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _mapped(getattr(value, f.name), fn) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


# Programs: steps hold functions, so they are named by where they stand in the method's schedule.


def encoded(program: Program, bound: Bound) -> Any:
    """A program by reference to the method's schedule; None if it has a step that is not there."""
    schedule = bound.method.schedule
    for name in _PROGRAMS:
        if program is getattr(schedule, name):
            return name
    known = {id(step): (name, i) for name in _PROGRAMS for i, step in enumerate(getattr(schedule, name))}
    steps: list[Any] = []
    for step in program:
        if id(step) in known:
            steps.append(known[id(step)])
        elif isinstance(step, (Judge, Receive)):
            steps.append(step)
        else:
            return None
    return steps


def decoded(steps: Any, bound: Bound) -> Program:
    """The inverse of :func:`encoded`."""
    schedule = bound.method.schedule
    if isinstance(steps, str):
        found: Program = getattr(schedule, steps)
        return found
    return tuple(getattr(schedule, s[0])[s[1]] if isinstance(s, tuple) else s for s in steps)


# Model and method.


def parcel(run: Problem, head: str | None) -> Parcel:
    """What a worker needs to rebuild a run's model and method.

    Raises:
        CannotShip: the method has parts that its text does not name, or the model's class cannot be found by name.
    """
    net, task, first = run.bound.network, run.bound.task, next(iter(run.sites.values())).train
    method = run.bound.method
    if not text_form.can_rebuild(method):
        raise CannotShip(f"{method.text!r} has parts that its text does not name")
    if tasks.TASKS.get(task.name) is not task:
        raise CannotShip("the task is not known by name")
    if not isinstance(run.work.augment, (Augment, type(None))):
        raise CannotShip("the augmentation is a function of one's own")
    sample = first.take(torch.arange(2) % len(first))
    parts = {
        "method": method.text,
        "task": task.name,
        "head": head,
        "seed": run.work.seed,
        "precision": net.device.precision,
        "module": net.as_module(net.start),
        "training": sorted(i.name for i in net.structure.leaves if i.trainable),
    }
    try:
        content = bytes(_Sender.dumps({**parts, "sample": Rows(sample.x, sample.y), "scale": net.scale}))
    except Exception as error:
        raise CannotShip(f"the model cannot be sent: {(str(error).splitlines() or [repr(error)])[0]}") from error
    return Parcel(content, digest([run.bound, *run.later.values()]), b"__main__" in content)


class _Sender(ForkingPickler):
    """What ``Connection.send`` does, with tensors as bytes: torch would put them into memory that processes share."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return NotImplemented
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _received, (raw, value.dtype, tuple(value.shape), type(value), value.requires_grad)


def _received(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], kind: type[Tensor], moves: bool) -> Tensor:
    filled = raw.size > 0
    value = torch.from_numpy(raw.copy()).view(dtype).reshape(shape) if filled else torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(value, moves) if kind is torch.nn.Parameter else value.requires_grad_(moves)


def opened(parts: dict[str, Any]) -> tuple[list[Bound], str]:
    """The bound methods of a parcel as the worker received it, rebuilt."""
    module, rows = parts["module"].train(), parts["sample"]
    for name, value in module.named_parameters():
        value.requires_grad_(name in parts["training"])
    task = tasks.named(parts["task"])
    net = inspect_model.build(
        module,
        rows.x,
        task=task.name,
        device=choose_device("cpu", parts["precision"]),
        head=parts["head"],
        scale=parts["scale"],
    )
    method: Method | None = text_form.method(parts["method"])
    bounds = []
    while method is not None:
        bounds.append(bind(method, net, task, seed=parts["seed"]))
        method = None if method.then is None else method.then[1]
    return bounds, digest(bounds)


def digest(bounds: list[Bound]) -> str:
    """A hash of leaves, their kinds and values, and phases."""
    state = hashlib.blake2b(digest_size=16)
    for bound in bounds:
        for name, spec in bound.specs.items():
            state.update(f"{name} {spec.kind} {spec.trainable} {spec.gated} {spec.phases}".encode())
            state.update(bound.start[name].detach().cpu().contiguous().numpy().tobytes())
        state.update(repr([(n, p.trained, sorted(p.taps.items())) for n, p in bound.phases.items()]).encode())
    return state.hexdigest()
