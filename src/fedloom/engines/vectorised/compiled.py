"""Compiled steps: gradient, optimiser, masks and projections of a whole wave traced once and fused by ``torch.compile``.

Every step of a phase has one shape (all clients, full width, masks always there), so that one compilation serves the run;
the code is kept on disk by torch and found again by later runs. What changes from step to step or from round to round is
an argument: rows, masks, learning rates, step counts. A step changes the clients' tensors in place, and batches of several
steps are gathered at once, so that little Python is left between two steps.
"""

from __future__ import annotations

import copy
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

from fedloom.bound import BoundPhase
from fedloom.client import Desk
from fedloom.engines.vectorised.feed import Pools
from fedloom.engines.vectorised.mapping import over_clients
from fedloom.engines.vectorised.stepper import MappedStepper
from fedloom.engines.vectorised.traced import Traces, common_of, constants, tidy, watched
from fedloom.optim import OptState
from fedloom.stepping import objective
from fedloom.types import Batch, Leaves


@dataclasses.dataclass(slots=True)
class Program:
    """A compiled step: what it computes, which flat arguments it takes, which leaves it trains."""

    run: Callable[..., Any]
    kept: list[int]
    used: frozenset[str]
    touched: frozenset[str]
    values: tuple[Hashable, ...]


def eligible(desk: Desk, phase: BoundPhase) -> bool:
    """Whether a phase's steps can be compiled: nothing about them is decided while they run."""
    return phase.phase.until is None and not desk.work.keep_optimizer


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


RETRIES, PROGRAMS = 2, 4
"""Most compilations of one shape and of one phase: numbers that a term reads, or cohorts of ever new sizes, have no end."""


class CompiledStepper(MappedStepper):
    """The steps of a phase for a wave of clients, compiled."""

    def __init__(self, desk: Desk, phase: BoundPhase, leaves: Leaves, pools: Pools, traces: Traces) -> None:
        super().__init__(desk, phase, leaves, pools, None, fixed=True)
        self.store = traces
        self.program: Program | None = None
        self.failed = False
        self.recall(self.store.used.get(self.name))

    def batches(self) -> Iterator[tuple[Batch, Tensor | None]]:
        """One batch of every client, and the same as a flat row of tensors for the compiled step."""
        for ticks, block in self.feed.blocks():
            flat, spec = pytree.tree_flatten(block.packed())
            for tick, row in zip(ticks, zip(*(t.unbind(0) for t in flat), strict=True), strict=True):
                self.tick, self.row = tick, row
                yield (Batch(*row) if len(row) == 3 else Batch.unpacked(pytree.tree_unflatten(row, spec))), tick.active

    def step(self, batch: Batch, active: Tensor | None) -> None:
        """One compiled step; the first of a run is mapped, which tells what the objective reaches."""
        if not self.groups or self.failed:
            super().step(batch, active)
            if self.groups:
                self.store.used[self.name] = self.known()
            return
        assert active is not None
        number = self.number()
        if self.program is None:
            self._attach((batch.packed(), active, number))
            if self.program is None:
                self.failed, self.traces = True, self.store  # traced, which is the next best
                super().step(batch, active)
                return
        moving = (*self.row, active, number)
        with torch.no_grad():
            self.program.run(*self.held, *[moving[i] for i in self.picked])
        self.made += 1

    # State, flat: parameters, other leaves that change, moments, numbers of steps, carried values, summed losses.

    def _flatten(self) -> None:
        """Lays the state out."""
        n: Tensor = self.private["n"]
        if self.total is None:
            self.total = torch.zeros(n.shape, dtype=self.params[0].dtype, device=n.device)
        # Buffers, and what projections write besides.
        self.others = [name for name in self.leaves if name in self.own and name not in self.phase.trained]
        self.flat_state = [
            *(self.leaves[name].detach().contiguous() for name in (*self.phase.trained, *self.others)),
            *(t for s in self.states for v in s.slots.values() for t in v),
            *(torch.tensor(float(s.step), dtype=torch.float64, device=n.device) for s in self.states),
            *(t.clone(memory_format=torch.contiguous_format) for t in pytree.tree_leaves(self.carry)),
            self.total,
        ]

    def _unflatten(self, flat: list[Tensor]) -> tuple[list[Tensor], Leaves, list[OptState], Any, Tensor]:
        left = iter(flat)
        params = [next(left) for _ in self.params]
        others = {n: next(left) for n in self.others}
        slots = [{k: [next(left) for _ in v] for k, v in s.slots.items()} for s in self.states]
        states = [OptState(s, next(left)) for s in slots]
        carry = pytree.tree_map(lambda _: next(left), self.carry)
        return params, others, states, carry, next(left)

    # Making and finding the program.

    def _attach(self, moving: tuple[Any, ...]) -> None:
        desk, phase = self.desk, self.phase
        self._flatten()
        rates = [torch.tensor(lr, dtype=torch.float64, device=self.private["n"].device) for _, _, lr in self.groups]
        changing = {*phase.trained, *self.others}
        rest = {n: v for n, v in self.leaves.items() if n not in changing}
        fixed, fixed_spec = pytree.tree_flatten((rest, self.private, common_of(desk), rates))
        inputs, moving_spec = pytree.tree_flatten(moving)
        flat = [*fixed, *self.flat_state, *inputs]
        shapes = tuple((t.shape, t.dtype) for t in flat)
        optimizers = tuple((tuple(where), optimizer) for where, optimizer, _ in self.groups)
        key = ("compiled", id(desk.bound), phase.phase.name, desk.participants[0].key, shapes, optimizers, fixed_spec)
        program: Program | None = self.store.programs.get(key)
        if program is None or constants(desk, program.touched) != program.values:
            times = [self._again(key), self._again(key[:3])]
            program = None
            if times[0] <= RETRIES and times[1] <= PROGRAMS:
                program = self._make(flat, len(fixed), fixed_spec, moving_spec)
            elif times[0] <= RETRIES + 1 and times[1] <= PROGRAMS + 1:
                self.store.notes.append(f"phase {phase.phase.name!r}: tried often enough, other steps are traced")
            if program is None:
                return
            self.store.programs[key] = program
            self.store.owners.append(desk.bound)
        # From here on steps change these very tensors.
        self.leaves.update(zip((*phase.trained, *self.others), self.flat_state, strict=False))
        self.program, still = program, len(flat) - len(inputs)
        self.held = [flat[i].contiguous() for i in program.kept if i < still]
        self.picked = [i - still for i in program.kept if i >= still]

    def _again(self, what: Hashable) -> int:
        self.store.times[what] = self.store.times.get(what, 0) + 1
        return self.store.times[what]

    def _make(self, flat: list[Tensor], count: int, fixed_spec: Any, moving_spec: Any) -> Program | None:
        desk, phase, size = self.desk, self.phase, len(self.flat_state)
        touched: set[str] = set()

        def full(*args: Tensor) -> list[Tensor]:
            before = args[count : count + size]
            rest, private, common, rates = pytree.tree_unflatten(list(args[:count]), fixed_spec)
            packed, active, number = pytree.tree_unflatten(list(args[count + size :]), moving_spec)
            state = [t.clone() for t in before]
            twin = copy.copy(self)
            twin.params, others, twin.states, twin.carry, total = self._unflatten(state)
            twin.own = set(self.own)
            twin.private = private
            twin.leaves = {**rest, **others, **dict(zip(phase.trained, twin.params, strict=True))}
            twin.groups = [(w, o, rate) for (w, o, _), rate in zip(self.groups, rates, strict=True)]
            twin.see = watched(desk, common, touched)
            value = over_clients(objective(desk, phase, twin.see))
            for _ in range(phase.phase.repeat):
                moved = [p.detach().requires_grad_() for p in twin.params]
                leaves = twin.leaves | dict(zip(phase.trained, moved, strict=True))
                losses, twin.carry = value(leaves, private, packed, twin.carry, number)
                grads = torch.autograd.grad(losses.sum(), moved, allow_unused=True)
                twin.move(list(grads), active)
                if phase.phase.project is not None:
                    twin.assign(phase.phase.project, active)
            if phase.phase.after is not None:
                twin.assign(phase.phase.after, active)
            assert twin.own == self.own, "a projection changes a leaf that it did not change in the first step"
            total = total + torch.where(active, losses.detach(), 0.0)
            moments = [t for s in twin.states for v in s.slots.values() for t in v]
            steps = [s.step for s in twin.states]
            kept = [twin.leaves[n] for n in self.others]
            after = [*twin.params, *kept, *moments, *steps, *pytree.tree_leaves(twin.carry), total]
            for old, new in zip(before, after, strict=True):
                old.copy_(new)
            return []

        try:
            graph = make_fx(full, tracing_mode="fake", _allow_non_fake_inputs=True)(*[t.detach() for t in flat])
            kept = tidy(graph)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's own, about its insides
                compiled = fused(graph, [flat[i].detach().contiguous() for i in kept])
        except Exception as error:
            why = str(error).strip().splitlines()
            self.store.notes.append(
                f"phase {phase.phase.name!r} is traced, not compiled: {type(error).__name__}: {why[0] if why else ''}"
            )
            return None
        used = frozenset(phase.trained[i] for where, _, _ in self.groups for i in where)
        return Program(compiled, kept, used, frozenset(touched), constants(desk, touched))
