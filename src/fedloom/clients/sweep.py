"""Sweeps: one pass over rows that adds up a statistic, for one client or a wave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom import tensors
from fedloom.clients.arrangement import Arrangement, BatchSchedule
from fedloom.clients.batches import sweep_rows
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.messages import Work
from fedloom.data import Rows
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Judge, Sweep
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, flatten

Value = Callable[[Leaves, Seen, Batch], Leaves]


@dataclass(frozen=True, slots=True)
class Statistic:
    """The function of one client's batch that a sweep or a judgement adds up."""

    step: Sweep | Judge
    bound: Bound
    arrangement: Arrangement
    value: Value

    def of(self, leaves: Leaves, inputs: ClientInputs, batch: Batch, common: Leaves) -> Leaves:
        """Compute the statistic of each client's batch.

        Args:
            leaves: the leaves of the clients.
            inputs: what client code reads.
            batch: the rows.
            common: leaves that are equal for all clients, without a client axis.
        """
        own = {n: v for n, v in leaves.items() if n not in common}
        mapped = self.arrangement.map(
            lambda own, private, packed: self.value({**common, **own}, inputs.seen(private), Batch.unpacked(packed))
        )
        parts: Leaves = mapped(own, inputs.own, batch.packed())
        return parts


Accumulate = Callable[[Statistic, Leaves, ClientInputs, BatchSchedule], Leaves]
"""Adds up a statistic over the batches of a schedule: :func:`add_up`, or a captured form of it."""


def add_up(statistic: Statistic, leaves: Leaves, inputs: ClientInputs, schedule: BatchSchedule) -> Leaves:
    """Return the sums over all batches. Later ones may contain the first clients only."""
    sums: Leaves | None = None
    common = common_leaves(statistic, leaves)
    clients = None
    for slot in schedule.slots:
        if statistic.arrangement.several and clients != slot.clients:
            clients = slot.clients
            leaves, inputs = {n: v[:clients] for n, v in leaves.items()}, inputs.front(clients)
        try:
            part = statistic.of(leaves, inputs, schedule.batch(slot), common)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # ``vmap`` refuses writes of one client into a shared tensor
            if not common:
                raise
            common = {}
            part = statistic.of(leaves, inputs, schedule.batch(slot), common)
        if sums is None:
            sums = part
        elif statistic.arrangement.several and len(next(iter(sums.values()))) > slot.clients:
            sums = {k: torch.cat([v[: slot.clients] + part[k], v[slot.clients :]]) for k, v in sums.items()}
        else:
            sums = tensors.add(sums, part)
    assert sums is not None, "a sweep over no rows"
    return sums


def common_leaves(statistic: Statistic, leaves: Leaves) -> Leaves:
    """Return the parameters that are equal for all clients of a wave, without a client axis.

    A layer with such parameters is computed once for the rows of all clients. Buffers are not
    among them: a layer may change them in place, differently for each client.
    """
    specs = statistic.bound.specs
    if not statistic.arrangement.several:
        return {}
    return {n: v[0] for n, v in leaves.items() if len(v) > 1 and not v.stride(0) and not specs[n].buffer}


def sweep_value(bound: Bound, step: Sweep) -> Value:
    """Return the function that a sweep adds up."""
    taps = {step.name: bound.taps(step.taps)}

    def value(leaves: Leaves, seen: Seen, batch: Batch) -> Leaves:
        if step.at == "received":
            leaves = {**leaves, **seen.received}
        elif callable(step.at):
            leaves = {**leaves, **step.at(leaves, seen)}
        if step.train:  # layers change running statistics in place, which clients may share
            leaves = {n: v.clone() if bound.specs[n].buffer else v for n, v in leaves.items()}
        view = View(bound, leaves, batch, seen, copy=step.copy, train=step.train, taps=taps)
        return step.fn(view, batch, seen)

    return value


def prediction(bound: Bound, leaves: Leaves, seen: Seen, batch: Batch, *, route: bool) -> Tensor:
    """Return one client's output, by the method's own route or by the model's forward pass."""
    rule = bound.method.evaluate
    predict = rule.predict if route else None
    taps = {} if predict is None else {"predict": bound.taps(rule.taps)}
    view = View(bound, leaves, batch, seen, copy=rule.copy if route else "main", taps=taps)
    return view.output if predict is None else predict(view, seen)


def judge_value(bound: Bound, step: Judge) -> Value:
    """Return the function that a judgement adds up, or stores if the task has no statistics."""
    task = bound.task

    def value(leaves: Leaves, seen: Seen, batch: Batch) -> Leaves:
        output = prediction(bound, leaves, seen, batch, route=step.route)
        return task.statistics(output, batch) if task.statistics is not None else {"output": output, "y": batch.y}

    return value


def sweep_size(work: Work, step: Sweep | Judge, rows: Rows) -> int | str:
    """Return the number of rows of a batch of a sweep."""
    size = step.batch_size if isinstance(step, Sweep) else None
    if size is None:
        return sweep_rows(sum(t.shape[1:].numel() for t in flatten(rows.x)))
    return work.batch_size if size == "run" else size
