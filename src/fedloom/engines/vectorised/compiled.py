"""Compiled steps: :meth:`Step.take` of a whole wave traced once and fused by ``torch.compile``.

Every step of a phase has one shape (all clients, full width, masks always there), so that one compilation serves the run;
the code is kept on disk by torch and found again by later runs. What changes from step to step or from round to round is
an argument: rows, masks, learning rates, step counts. A step changes the clients' tensors in place, and batches of several
steps are gathered at once, so that little Python is left between two steps.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fedloom.clients.arrangement import Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.step import OptimizerGroup, PhaseStart, Step, StepState
from fedloom.engines.vectorised.rows import WaveSchedule
from fedloom.engines.vectorised.traced import Traces, constants, recording, tidy
from fedloom.optim import OptState
from fedloom.types import Batch

RETRIES, PROGRAMS = 2, 4
"""Most compilations of one shape and of one phase: numbers that a term reads, or cohorts of ever new sizes, have no end."""


@dataclasses.dataclass(slots=True)
class Program:
    """A compiled step: what it computes, which flat arguments it takes, and the numbers that are baked in."""

    run: Callable[..., Any]
    kept: list[int]
    touched: frozenset[str]
    values: tuple[Hashable, ...]


def fused(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A traced graph compiled by torch's inductor, and compared with the graph on these inputs and on others.

    The graph needs no second analysis, so that it goes to the compiler without the checks that ``torch.compile`` makes at
    each call; they would take longer than a step. The C++ wrapper would save more, but with torch 2.13 it gave wrong numbers
    for SCAFFOLD from the second round on (the cause was not found): hence the comparison.
    """
    options = {"size_asserts": False, "alignment_asserts": False}
    fake = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(fake)):  # without it torch does not look for the code on disk
        shapes: list[Any] = [fake.from_tensor(t, static_shapes=True) for t in inputs]
        compiled: Callable[..., Any] = torch._inductor.compile(graph, shapes, options=options)
    draw = torch.Generator().manual_seed(0)
    for share in (0.0, 0.1):
        found = [t.clone() if not t.is_floating_point() else _jittered(t, share, draw) for t in inputs]
        expected = [t.clone() for t in found]
        graph(*expected)
        compiled(*found)
        for a, b in zip(expected, found, strict=True):
            near = 1e-3 if a.dtype == torch.float32 else 1e-8
            if not torch.allclose(a, b, rtol=near, atol=near, equal_nan=True):
                raise RuntimeError("the compiled step gives other numbers than the traced one")
    return compiled


def _jittered(value: Tensor, share: float, draw: torch.Generator) -> Tensor:
    noise = torch.rand(value.shape, generator=draw, dtype=torch.float64).to(value.device, value.dtype)
    return value + share * noise


class CompiledRunner:
    """Makes the steps of a phase, each one call of a compiled program that changes the state in place."""

    def __init__(
        self, step: Step, state: StepState, inputs: ClientInputs, schedule: WaveSchedule, program: Program
    ) -> None:
        self.step, self.state, self.schedule, self.program = step, state, schedule, program
        held = pytree.tree_leaves((_read_only(state, inputs), _changing(state)))
        self.held = [held[i] for i in program.kept if i < len(held)]
        self.picked = [i - len(held) for i in program.kept if i >= len(held)]
        self.batches = _rows_of_steps(schedule)

    def run(self, slot: Slot) -> None:
        """One call of the program."""
        moving = (*next(self.batches), slot.active)
        with torch.no_grad():
            self.program.run(*self.held, *[moving[i] for i in self.picked])

    def finish(self) -> StepState:
        """The state, which the program has changed in place."""
        return self.state


def start_compiled(
    step: Step,
    start: PhaseStart,
    inputs: ClientInputs,
    schedule: WaveSchedule,
    reached: tuple[set[str], set[str]],
    store: Traces,
) -> CompiledRunner | None:
    """The compiled runner of a phase; None where there is no program for it."""
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
    inputs = dataclasses.replace(inputs, own=pytree.tree_map(lambda t: t.contiguous(), inputs.own))
    first = next(_rows_of_steps(schedule), None)
    if first is None:
        return None
    program = _program(step, state, inputs, (*first, schedule.slots[0].active), _batch_spec(schedule), store)
    return None if program is None else CompiledRunner(step, state, inputs, schedule, program)


def _program(
    step: Step, state: StepState, inputs: ClientInputs, moving: tuple[Any, ...], batch_spec: Any, store: Traces
) -> Program | None:
    phase = step.phase.phase.name
    flat, spec = pytree.tree_flatten((_read_only(state, inputs), _changing(state), list(moving)))
    shapes = tuple([(t.shape, t.dtype) for t in flat])
    key = ("compiled", step.bound, phase, inputs.facts["key"], spec, shapes)
    program: Program | None = store.programs.get(key)
    if program is not None and constants(inputs, program.touched) == program.values:
        return program
    times = [_again(store, key), _again(store, key[:3])]
    if times[0] > RETRIES or times[1] > PROGRAMS:
        if times[0] <= RETRIES + 1 and times[1] <= PROGRAMS + 1:
            store.notes.append(f"phase {phase!r}: tried often enough, other steps are traced")
        return None
    touched: set[str] = set()

    def full(*args: Tensor) -> list[Tensor]:
        (rest, own, common, rates), before, (*batch, active) = pytree.tree_unflatten(list(args), spec)
        after = pytree.tree_map(torch.clone, before)
        mine = _with(state, rest, after, rates)
        packed = pytree.tree_unflatten(list(batch), batch_spec)
        step.take(mine, recording(inputs, touched, own=own, common=common), Batch.unpacked(packed), active)
        assert mine.written == state.written, "a projection changes a leaf that it did not change in the first round"
        for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(_changing(mine)), strict=True):
            old.copy_(new)
        return []

    try:
        graph = make_fx(full, tracing_mode="fake", _allow_non_fake_inputs=True)(*[t.detach() for t in flat])
        kept = tidy(graph)  # before anybody reads `graph.forward`: it recompiles the graph
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own, about its insides
            compiled = fused(graph, [flat[i].detach().contiguous() for i in kept])
    except Exception as error:
        why = str(error).strip().splitlines()
        store.notes.append(f"phase {phase!r} is traced, not compiled: {type(error).__name__}: {why[0] if why else ''}")
        return None
    program = store.programs[key] = Program(compiled, kept, frozenset(touched), constants(inputs, touched))
    return program


def _again(store: Traces, what: Hashable) -> int:
    store.times[what] = store.times.get(what, 0) + 1
    return store.times[what]


def _read_only(state: StepState, inputs: ClientInputs) -> Any:
    rest = {n: v for n, v in state.leaves.items() if n not in state.written}
    return rest, inputs.own, inputs.common, [g.rate for g in state.groups or ()]


def _changing(state: StepState) -> Any:
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
    """The tensors of each step's batch, gathered several steps at a time."""
    for _, block in schedule.blocks():
        yield from zip(*(t.unbind(0) for t in pytree.tree_leaves(block.packed())), strict=True)


def _batch_spec(schedule: WaveSchedule) -> Any:
    return pytree.tree_structure(schedule.batch(schedule.slots[0]).packed())
