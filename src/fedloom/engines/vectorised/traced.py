"""Traced gradients: :meth:`Step.gradients` of a wave as a flat list of tensor operations.

Tracing runs the client code once. The trace contains no Python code of the model, of terms or of
``vmap``. It is valid for one phase and one set of shapes. Python numbers (round, learning rate)
become constants of the trace. A trace therefore records which of these client code reads, and is
used only while they have the same values.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fedloom.clients.arrangement import BatchSchedule
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.step import Step
from fedloom.engines.vectorised.graph_rewrites import simplify
from fedloom.spec.seen import Seen
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Memory, flatten, structure_of, unflatten
from fedloom.torch_internals import UNSAFE_VIEW, is_write, trace_graph

TRACE_STEPS = 200
"""Steps of one shape in a run from which on a trace saves time."""
RETRACES = 3
"""Most traces of one shape: client code that reads the round would need one in every round."""
CHANGING = ("round", "lr", "rates")
"""Fields of ``Seen`` that are Python numbers and change from round to round."""


def recording(inputs: ClientInputs, touched: set[str], **tensors: Any) -> ClientInputs:
    """Return inputs that add the names of changing numbers to ``touched`` when code reads them."""

    class Recorded(Seen):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name in CHANGING:
                touched.add(name)
            return super().__getattribute__(name)

    return dataclasses.replace(inputs, seen_type=Recorded, **tensors)


def constants(inputs: ClientInputs, names: Iterable[str]) -> tuple[Hashable, ...]:
    """Return the present values of numbers that are constants of a trace."""
    facts = inputs.facts
    now = {"round": facts["round"], "lr": facts["lr"], "rates": tuple(sorted(facts["rates"].items()))}
    return tuple(now[n] for n in sorted(names))


@dataclasses.dataclass(slots=True)
class Trace:
    """A traced gradient.

    Args:
        run: the operations.
        arguments: the positions of the flat arguments that they use.
        used: for each trained leaf, whether it has a gradient.
        touched: names of the changing numbers that are constants of the trace.
        values: their values.
    """

    run: Callable[..., Any]
    arguments: list[int]
    used: list[bool]
    touched: frozenset[str]
    values: tuple[Hashable, ...]


class Traces:
    """Traces of a run.

    Args:
        least: number of steps of one shape in a run from which on it is traced.
        compiled: whether whole steps are compiled if possible.
    """

    def __init__(self, least: int = TRACE_STEPS, compiled: bool = False) -> None:
        self.least, self.compiled = least, compiled
        self.notes: list[str] = []
        self.times: dict[Hashable, int] = {}
        self.programs: dict[Hashable, Any] = {}
        self._traces: dict[Hashable, Trace | None] = {}

    def of(self, step: Step, inputs: ClientInputs, fixed: Any, moving: Any) -> Trace | None:
        """Return a trace for these arguments; None if it failed or changes too often."""
        flat, spec = flatten((fixed, moving)), structure_of((fixed, moving))
        shapes = tuple((t.shape, t.dtype) for t in flat)
        key = (step.bound, step.phase.phase.name, inputs.facts.get("key"), spec, shapes)
        trace = self._traces.get(key)
        if trace is None and key in self._traces:
            return None
        if trace is None or constants(inputs, trace.touched) != trace.values:
            self.times[key] = self.times.get(key, 0) + 1
            trace = self._make(step, inputs, flat, spec) if self.times[key] <= RETRACES else None
            self._traces[key] = trace
        return trace

    def _make(self, step: Step, inputs: ClientInputs, flat: list[Any], spec: Any) -> Trace | None:
        touched: set[str] = set()
        used: list[bool] = []

        def fn(*flat: Any) -> list[Tensor]:
            (leaves, own, common), (packed, number, carry) = unflatten(spec, flat)
            recorded = recording(inputs, touched, own=own, common=common)
            losses, grads, carry = step.gradients(leaves, recorded, Batch.unpacked(packed), carry, number)
            if grads is None:
                raise ValueError("the objective reaches no leaf")
            used[:] = [g is not None for g in grads]
            return [losses, *(g for g in grads if g is not None), *flatten(carry)]

        try:
            graph = trace_graph(fn, flat)
        except Exception as error:
            name, why = step.phase.phase.name, str(error).splitlines()
            self.notes.append(f"phase {name!r} is mapped, not traced: {type(error).__name__}: {why[0] if why else ''}")
            return None
        arguments = tidy(graph)  # before `graph.forward` is read, as it compiles that again
        return Trace(graph.forward, arguments, used, frozenset(touched), constants(inputs, touched))


class TracedGradients:
    """Computes :meth:`Step.gradients` for the steps of one phase with traces, where possible."""

    def __init__(self, step: Step, traces: Traces, schedule: BatchSchedule, rounds: int) -> None:
        self.step, self.traces = step, traces
        times = Counter((slot.clients, slot.widths, slot.padded) for slot in schedule.slots)
        self.planned = {shape: count * step.phase.phase.repeat * rounds for shape, count in times.items()}
        self.leaves: Leaves | None = None
        self.inputs: ClientInputs | None = None
        self.ready: dict[Hashable, tuple[Trace, list[Any], list[int]] | None] = {}

    def __call__(
        self, leaves: Leaves, inputs: ClientInputs, batch: Batch, carry: Memory, number: Tensor
    ) -> tuple[Tensor, list[Tensor | None] | None, Memory]:
        """Return losses, gradients and the terms' carried values."""
        if leaves is not self.leaves or inputs is not self.inputs:  # a narrower wave, or another writable leaf
            self.leaves, self.inputs = leaves, inputs
            self.ready.clear()
        moving = (batch.packed(), number, carry)
        shape = _shape(batch)
        if shape not in self.ready:
            self.ready[shape] = self._prepare(leaves, inputs, shape, moving)
        prepared = self.ready[shape]
        if prepared is None:
            return self.step.gradients(leaves, inputs, batch, carry, number)
        trace, fixed, varying = prepared
        flat = flatten(moving)
        with torch.no_grad():
            results = iter(trace.run(*fixed, *[flat[i] for i in varying]))
        losses = next(results)
        grads = [next(results) if used else None for used in trace.used]
        return losses, grads, unflatten(structure_of(carry), results) if carry else carry

    def _prepare(
        self, leaves: Leaves, inputs: ClientInputs, shape: tuple[int, tuple[int, ...], bool], moving: Any
    ) -> tuple[Trace, list[Any], list[int]] | None:
        if self.planned.get(shape, 0) < self.traces.least:
            return None
        fixed = (leaves, inputs.own, inputs.common)
        trace = self.traces.of(self.step, inputs, fixed, moving)
        if trace is None:
            return None
        flat = flatten(fixed)
        return (
            trace,
            [flat[i] for i in trace.arguments if i < len(flat)],
            [i - len(flat) for i in trace.arguments if i >= len(flat)],
        )


def _shape(batch: Batch) -> tuple[int, tuple[int, ...], bool]:
    widths: list[int] = []
    part: Batch | None = batch
    while part is not None:
        widths.append(part.y.shape[1])
        part = part.pair
    return batch.y.shape[0], tuple(widths), batch.mask is not None


_ALIASES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.view.default,
    UNSAFE_VIEW,
}


def tidy(graph: fx.GraphModule) -> list[int]:
    """Remove useless operations and unused arguments; return the positions of the rest."""
    nodes = graph.graph.nodes
    writes = any(is_write(n) for n in nodes)
    for node in list(nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        by_one = node.target is torch.ops.aten.mul.Scalar and node.args[1] == 1 and not writes
        if (by_one or node.target in _ALIASES) and _same(node, source):
            node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or is_write(n))
    arguments = []
    for i, node in enumerate([n for n in nodes if n.op == "placeholder"]):
        if node.users:
            arguments.append(i)
        else:
            graph.graph.erase_node(node)
    simplify(graph)
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.recompile()
    return arguments


def _same(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
