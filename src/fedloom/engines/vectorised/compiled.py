"""Compiled steps: :meth:`Step.take` of a whole wave, traced once and compiled by inductor.

Every step of a phase has one shape (all clients, full width, masks), so that one compilation serves
the run; torch stores the code on disk for later runs. The eager first round has these shapes too:
its masks change the last bits against mapped steps. Values that change between steps or rounds are
arguments: rows, masks, learning rates, step counts. A step changes the clients' tensors in place. Batches of several
steps are read at once, so that little Python runs between two steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.arrangement import Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.step import OptimizerGroup, PhaseStart, Step, StepState
from fedloom.engines.vectorised.rows import WaveSchedule
from fedloom.engines.vectorised.traced import Traces, constants, recording, tidy
from fedloom.spec.optimizer import OptState
from fedloom.tasks.batch import Batch
from fedloom.tensors import flatten, map_nested, structure_of, unflatten
from fedloom.torch_internals import compile_graph, trace_graph

RETRIES, PROGRAMS = 2, 4
"""Most compilations of one shape and of one phase: a term may read the round, and every round may
have a cohort of another size."""


@dataclasses.dataclass(slots=True)
class Program:
    """A compiled step: its code, the positions of its flat arguments, and its constants."""

    run: Callable[..., Any]
    arguments: list[int]
    touched: frozenset[str]
    values: tuple[Hashable, ...]


def fused(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a traced graph and compare the results with the graph's, on two sets of inputs.

    The C++ wrapper of inductor would be faster, but with torch 2.13 it gave wrong numbers for
    SCAFFOLD from the second round on. The cause is unknown: hence the comparison.
    """
    compiled = compile_graph(graph, inputs)
    draw = torch.Generator().manual_seed(0)
    for share in (0.0, 0.1):
        results = [t.clone() if not t.is_floating_point() else _jittered(t, share, draw) for t in inputs]
        expected = [t.clone() for t in results]
        graph(*expected)
        compiled(*results)
        for a, b in zip(expected, results, strict=True):
            near = 1e-3 if a.dtype == torch.float32 else 1e-8
            if not torch.allclose(a, b, rtol=near, atol=near, equal_nan=True):
                raise RuntimeError("the compiled step gives other numbers than the traced step")
    return compiled


def _jittered(value: Tensor, share: float, draw: torch.Generator) -> Tensor:
    noise = torch.rand(value.shape, generator=draw, dtype=torch.float64).to(value.device, value.dtype)
    return value + share * noise


class CompiledRunner:
    """Makes each step by one call of a compiled program, which changes the state in place."""

    def __init__(
        self, step: Step, state: StepState, inputs: ClientInputs, schedule: WaveSchedule, program: Program
    ) -> None:
        self.step, self.state, self.schedule, self.program = step, state, schedule, program
        fixed = flatten((_read_only(state, inputs), _changing(state)))
        self.fixed = [fixed[i] for i in program.arguments if i < len(fixed)]
        self.varying = [i - len(fixed) for i in program.arguments if i >= len(fixed)]
        self.batches = _rows_of_steps(schedule)

    def run(self, slot: Slot) -> None:
        """Call the program with the rows of the next step."""
        rows = (*next(self.batches), slot.active)
        with torch.no_grad():
            self.program.run(*self.fixed, *[rows[i] for i in self.varying])

    def finish(self) -> StepState:
        """Return the state, which the program has changed in place."""
        return self.state


def start_compiled(
    step: Step,
    start: PhaseStart,
    inputs: ClientInputs,
    schedule: WaveSchedule,
    reached: tuple[set[str], set[str]],
    store: Traces,
) -> CompiledRunner | None:
    """Return the compiled runner of a phase; None if there is no program for it."""
    names, written = reached
    state = start.state(step)
    for name in written:
        state.writable(name)
    state.start_optimizers(step, names)
    device = state.total.device
    state.number = torch.zeros((), dtype=torch.int64, device=device)
    for group in state.groups or ():
        group.rate = torch.tensor(group.rate, dtype=torch.float64, device=device)
        group.state.step = torch.tensor(float(group.state.step), dtype=torch.float64, device=device)
    state.leaves = {n: v.contiguous() if n in written else v for n, v in state.leaves.items()}
    inputs = dataclasses.replace(inputs, own=map_nested(lambda t: t.contiguous(), inputs.own))
    first = next(_rows_of_steps(schedule), None)
    if first is None:
        return None
    program = _program(step, state, inputs, (*first, schedule.slots[0].active), _batch_spec(schedule), store)
    return None if program is None else CompiledRunner(step, state, inputs, schedule, program)


def _program(
    step: Step, state: StepState, inputs: ClientInputs, moving: tuple[Any, ...], batch_spec: Any, store: Traces
) -> Program | None:
    phase = step.phase.phase.name
    values = (_read_only(state, inputs), _changing(state), list(moving))
    flat, spec = flatten(values), structure_of(values)
    shapes = tuple([(t.shape, t.dtype) for t in flat])
    key = ("compiled", step.bound, phase, inputs.facts.get("key"), spec, shapes)
    program: Program | None = store.programs.get(key)
    if program is not None and constants(inputs, program.touched) == program.values:
        return program
    times = [_count(store, key), _count(store, key[:3])]
    if times[0] > RETRIES or times[1] > PROGRAMS:
        if times[0] <= RETRIES + 1 and times[1] <= PROGRAMS + 1:
            store.notes.append(f"phase {phase!r}: tried often enough, other steps are traced")
        return None
    touched: set[str] = set()

    def full(*args: Tensor) -> list[Tensor]:
        # The step runs on copies, which are written back at the end: one write per tensor.
        (rest, own, common, rates), before, (*batch, active) = unflatten(spec, args)
        after = map_nested(torch.clone, before)
        copied = _with(state, rest, after, rates)
        packed = unflatten(batch_spec, batch)
        step.take(copied, recording(inputs, touched, own=own, common=common), Batch.unpacked(packed), active)
        assert copied.written == state.written, "a projection changes other leaves than in round 1"
        for old, new in zip(flatten(before), flatten(_changing(copied)), strict=True):
            old.copy_(new)
        return []

    try:
        graph = trace_graph(full, flat)
        arguments = tidy(graph)  # before `graph.forward` is read: it recompiles the graph
        with torch.no_grad():
            compiled = fused(graph, [flat[i].detach().contiguous() for i in arguments])
    except Exception as error:
        why = str(error).strip().splitlines()
        store.notes.append(f"phase {phase!r} is traced, not compiled: {type(error).__name__}: {why[0] if why else ''}")
        return None
    program = store.programs[key] = Program(compiled, arguments, frozenset(touched), constants(inputs, touched))
    return program


def _count(store: Traces, what: Hashable) -> int:
    """Count the attempts to compile something."""
    store.times[what] = store.times.get(what, 0) + 1
    return store.times[what]


def _read_only(state: StepState, inputs: ClientInputs) -> Any:
    """Return the tensors that a step reads only."""
    rest = {n: v for n, v in state.leaves.items() if n not in state.written}
    return rest, inputs.own, inputs.common, [g.rate for g in state.groups or ()]


def _changing(state: StepState) -> Any:
    """Return the tensors that a step changes."""
    # A new field of the state that steps change belongs here, as in `StepState.front`.
    leaves = {n: state.leaves[n] for n in sorted(state.written)}
    return leaves, [(g.state.slots, g.state.step) for g in state.groups or ()], state.carry, state.total, state.number


def _with(state: StepState, rest: Any, changing: Any, rates: Any) -> StepState:
    leaves, moments, carry, total, number = changing
    groups = [
        OptimizerGroup(g.names, g.optimizer, rate, OptState(slots, count))
        for g, rate, (slots, count) in zip(state.groups or (), rates, moments, strict=True)
    ]
    return StepState({**rest, **leaves}, set(state.written), carry, total, number, groups, clients=state.clients)


def _rows_of_steps(schedule: WaveSchedule) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of each step's batch. Several steps are read at a time."""
    for _, block in schedule.blocks():
        yield from zip(*(t.unbind(0) for t in flatten(block.packed())), strict=True)


def _batch_spec(schedule: WaveSchedule) -> Any:
    return structure_of(schedule.batch(schedule.slots[0]).packed())
