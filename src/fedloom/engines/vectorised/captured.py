"""Captured steps: on CUDA a whole step (gradient, optimiser, masks, projections) becomes one graph that is replayed.

A graph reads and writes fixed addresses. :class:`StepBuffers` holds a step's state and inputs at such addresses: they are
copied in when a phase begins and out when it ends. Learning rates, step counts and the number of the step are tensors there,
so that a graph serves every round. What is captured is :meth:`Step.take`, unchanged. A step that cannot be captured is made
as it is, on the same tensors. On a CPU there is nothing to capture, which is how the code is tested.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import tree
from fedloom.clients.arrangement import Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.step import EagerRunner, PhaseStart, ScheduleOf, Step, StepRunner, StepState, start_eager
from fedloom.clients.sweep import Statistic, add_up, common_leaves
from fedloom.engines.vectorised.buffers import BatchBuffer, BatchBuffers, renewed
from fedloom.engines.vectorised.first_round import FirstRound
from fedloom.engines.vectorised.rows import WaveSchedule
from fedloom.engines.vectorised.traced import recording
from fedloom.types import Batch, Leaves

Replay = Callable[[], None]
KEPT_BUFFERS = 8
"""How many phases and waves keep their tensors and graphs."""


class FixedTensors:
    """A nested value whose tensors lie at fixed addresses. What is the same tensor, or repeated along an axis, lies there once.

    Attributes:
        value: the twin, with views of the fixed tensors in the place of the tensors.
    """

    def __init__(self, value: Any) -> None:
        flat, spec = pytree.tree_flatten(value)
        self.sources: list[int] = []
        self.fixed: list[Tensor] = []
        places: dict[Hashable, int] = {}
        twins = []
        for i, tensor in enumerate(flat):
            once = _once(tensor)
            name = (once.data_ptr(), once.dtype, once.shape, once.stride()) if once.numel() else (i,)
            if name not in places:
                places[name] = len(self.fixed)
                self.sources.append(i)
                self.fixed.append(torch.empty_like(once, memory_format=torch.preserve_format))
            twins.append(self.fixed[places[name]].expand(tensor.shape))
        self.value = pytree.tree_unflatten(twins, spec)

    def load(self, value: Any) -> None:
        """Copies a value of the same layout in."""
        flat = pytree.tree_leaves(value)
        tree.overwrite(self.fixed, [_once(flat[i]) for i in self.sources])


def _once(value: Tensor) -> Tensor:
    """A tensor with one entry along axes along which it is repeated."""
    for dim, step in enumerate(value.stride()):
        if not step and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value


def layout(value: Any) -> Hashable:
    """What two values have in common whose fixed tensors are alike: shapes, types, strides, and which tensors are the same."""
    flat, spec = pytree.tree_flatten(value)
    first: dict[int, int] = {}
    same = tuple([first.setdefault(t.data_ptr(), i) if t.numel() else i for i, t in enumerate(flat)])
    return spec, tuple([(t.shape, t.dtype, t.stride()) for t in flat]), same


class StepBuffers:
    """A step's state and inputs at fixed addresses.

    Args:
        step: the step.
        start: where a phase begins; gives the shapes.
        inputs: what client code reads.
        reached: the leaves that the objective reaches.
        written: the leaves that steps change.
    """

    def __init__(
        self, step: Step, start: PhaseStart, inputs: ClientInputs, reached: set[str], written: set[str]
    ) -> None:
        def empty(value: Tensor) -> Tensor:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

        self.read = FixedTensors(self.read_only(start, inputs, written))
        rest, self.own, self.common = self.read.value
        leaves = {n: empty(v) if n in written else rest[n] for n, v in start.leaves.items()}
        number = torch.zeros((), dtype=torch.float64, device=start.total.device)
        self.state = StepState(
            leaves, set(written), pytree.tree_map(empty, start.carry), empty(start.total), clients=start.clients
        )
        self.state.start_optimizers(step, reached)
        self.number = self.state.number = number.to(torch.int64)
        self.rates = [number.clone() for _ in self.state.groups or ()]
        self.counts = [number.clone() for _ in self.state.groups or ()]
        for group, rate, count in zip(self.state.groups or (), self.rates, self.counts, strict=True):
            group.rate, group.state.step = rate, count
        self.graphs: dict[Hashable, tuple[Replay, BatchBuffer]] = {}
        self.touched: set[str] = set()

    @staticmethod
    def read_only(start: PhaseStart, inputs: ClientInputs, written: set[str]) -> Any:
        """What steps read and do not change."""
        return {n: v for n, v in start.leaves.items() if n not in written}, inputs.own, inputs.common

    def load(self, step: Step, start: PhaseStart, inputs: ClientInputs) -> None:
        """A phase begins: copies everything in."""
        state = self.state
        self.read.load(self.read_only(start, inputs, state.written))
        names = sorted(state.written)
        tree.overwrite([state.leaves[n] for n in names], [start.leaves[n] for n in names])
        tree.overwrite(pytree.tree_leaves(state.carry), pytree.tree_leaves(start.carry))
        for i, (group, (_, _, rate)) in enumerate(zip(state.groups or (), step.groups, strict=True)):
            self.rates[i].fill_(rate)
            kept = None if start.moments is None else start.moments[i]
            self.counts[i].fill_(0 if kept is None else kept.step)
            for name, moments in group.state.slots.items():
                for k, moment in enumerate(moments):
                    moment.zero_() if kept is None else moment.copy_(kept.slots[name][k])
        state.total.zero_()
        self.number.zero_()

    def mutable(self) -> list[Tensor]:
        """What a step changes."""
        state = self.state
        leaves = [state.leaves[n] for n in sorted(state.written)]
        moments = [t for g in state.groups or () for t in pytree.tree_leaves(g.state.slots)]
        return [*leaves, *moments, *self.counts, *pytree.tree_leaves(state.carry), state.total, self.number]

    def result(self) -> StepState:
        """The state with copies of its leaves, which the next phase does not overwrite; moments are the buffers' own."""
        state = self.state
        names = sorted(state.written)
        copies = dict(zip(names, tree.copies([state.leaves[n] for n in names]), strict=True))
        return replace(state, leaves={**state.leaves, **copies}, total=state.total.clone())


class SweepBuffers:
    """What a sweep reads, and the sums that it adds to, at fixed addresses."""

    def __init__(self, values: Any, sums: Leaves) -> None:
        self.read = FixedTensors(values)
        self.sums = {k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in sums.items()}
        self.graphs: dict[Hashable, tuple[Replay, BatchBuffer]] = {}
        self.touched: set[str] = set()


class CapturedSteps:
    """The captured steps and sweeps of a run: starts the runner of each phase, and adds up sweeps."""

    def __init__(self) -> None:
        self.known: OrderedDict[Hashable, StepBuffers] = OrderedDict()
        self.reached: dict[Hashable, tuple[set[str], set[str]]] = {}
        self.sweeps: OrderedDict[Hashable, SweepBuffers] = OrderedDict()
        self.batches = BatchBuffers()
        self.refused: set[Hashable] = set()
        self.notes: list[str] = []
        self.dropped = True  # graphs of an earlier run may still hold memory
        self.pool: Any = None
        self.side: Any = None

    def start(self, step: Step, start: PhaseStart, inputs: ClientInputs, schedule: ScheduleOf) -> StepRunner:
        """The captured runner; in a phase's first round the eager one, which shows what the objective reaches."""
        if step.phase.phase.until is not None:
            return start_eager(step, start, inputs, schedule)
        name = (step.bound, step.phase.phase.name, inputs.facts.get("key"))
        steps: Any = schedule("narrow")
        if name not in self.reached:
            return FirstRound(EagerRunner(step, start, inputs, steps), self.reached, name)
        reached, written = self.reached[name]
        facts = (inputs.facts["cohort"], inputs.facts["population"], tuple([(n, o) for n, o, _ in step.groups]))
        values = (StepBuffers.read_only(start, inputs, written), start.leaves, start.carry)
        key = (name, facts, layout(values))
        buffers = self.known.get(key) or StepBuffers(step, start, inputs, reached, written)
        self._keep(key, buffers)
        return CapturedRunner(step, start, inputs, steps, buffers, self, key)

    def accumulate(self, statistic: Statistic, leaves: Leaves, inputs: ClientInputs, schedule: Any) -> Leaves:
        """The sums of a sweep. The first one with tensors of this layout runs eagerly, which shows what it adds up."""
        values = (leaves, inputs.own, inputs.common)
        facts = (inputs.facts.get("key"), inputs.facts["cohort"], inputs.facts["population"])
        key = (statistic.bound, statistic.step, facts, layout(values))
        buffers = self.sweeps.get(key)
        if buffers is None or key in self.refused:
            sums = add_up(statistic, leaves, inputs, schedule)
            self.sweeps[key] = SweepBuffers(values, sums)
            return sums
        self.sweeps.move_to_end(key)
        buffers.read.load(values)
        torch._foreach_zero_(list(buffers.sums.values()))
        leaves, own, common = buffers.read.value
        fixed = recording(inputs, buffers.touched, own=own, common=common)
        shared, batches = common_leaves(statistic, leaves), self.batches.of(schedule)
        for slot in schedule.slots:

            def body(slot: Slot = slot) -> None:
                front = {n: v[: slot.clients] for n, v in leaves.items()}
                part = statistic.of(front, fixed.front(slot.clients), Batch.unpacked(batches.batch(slot)[0]), shared)
                torch._foreach_add_([v[: slot.clients] for v in buffers.sums.values()], [part[k] for k in buffers.sums])
                batches.place.add_(1)

            batches.load(schedule, slot.step)
            shape = (id(batches), slot.clients, slot.widths, slot.padded)
            if shape not in buffers.graphs:
                what = f"sweep {statistic.step.name!r}"
                replay = self.record(body, [*buffers.sums.values(), batches.place], buffers.touched, what)
                if replay is None:
                    self.refused.add(key)
                    return add_up(statistic, leaves, inputs, schedule)
                buffers.graphs[shape] = replay, batches
                batches.fill(schedule, slot.step - batches.at)  # a model may have changed its input in place
            buffers.graphs[shape][0]()
            batches.at += 1
        return {k: v.clone() for k, v in buffers.sums.items()}

    def _keep(self, key: Hashable, buffers: StepBuffers) -> None:
        """Marks buffers as most recently used and evicts the least recently used."""
        self.known[key] = buffers
        self.known.move_to_end(key)
        while len(self.known) > KEPT_BUFFERS:
            self.known.popitem(last=False)
            self.dropped = True

    def record(self, body: Replay, mutable: Sequence[Tensor], touched: set[str], what: str) -> Replay | None:
        """A replay of ``body``, which is tried once, undone, then captured; None and a note where it cannot be."""
        before, cuda = tree.copies(mutable), mutable[0].is_cuda
        try:
            if cuda:
                self.side = self.side or torch.cuda.Stream()
                self.side.wait_stream(torch.cuda.current_stream())
                try:
                    with torch.cuda.stream(self.side):
                        body()
                finally:  # after an error too: what was begun there still reads tensors that are freed next
                    torch.cuda.current_stream().wait_stream(self.side)
            else:
                body()
            tree.overwrite(mutable, before)
            if touched:
                raise ValueError(f"client code reads {', '.join(sorted(touched))}, which change from round to round")
            return self._capture(body) if cuda else body
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = str(error).strip().splitlines()
            self.notes.append(f"{what} is mapped, not captured: {why[0] if why else repr(error)}")
            tree.overwrite(mutable, before)
            return None

    def _capture(self, body: Replay) -> Replay:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        if self.dropped:  # not always: it takes longer than the capture
            gc.collect()
            self.dropped = False
        gc.disable()  # an old graph that is collected while another is captured spoils it
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                body()
        finally:
            if collecting:
                gc.enable()
        return graph.replay


class CapturedRunner:
    """Makes the steps of a phase, each the replay of a captured graph."""

    def __init__(
        self,
        step: Step,
        start: PhaseStart,
        inputs: ClientInputs,
        schedule: WaveSchedule,
        buffers: StepBuffers,
        store: CapturedSteps,
        key: Hashable,
    ) -> None:
        self.step, self.schedule, self.buffers, self.store, self.key = step, schedule, buffers, store, key
        buffers.load(step, start, inputs)
        self.inputs = recording(inputs, buffers.touched, own=buffers.own, common=buffers.common)
        self.batches = store.batches.of(schedule)
        store.dropped |= renewed(buffers.graphs, self.batches)

    def run(self, slot: Slot) -> None:
        """One replay; a step of a shape that cannot be captured is made as it is."""
        buffers, batches = self.buffers, self.batches
        batches.load(self.schedule, slot.step)
        shape = (id(batches), slot.clients, slot.widths, slot.padded, slot.active is None)
        if shape not in buffers.graphs and self.key not in self.store.refused:
            what = f"phase {self.step.phase.phase.name!r}"
            body = self._body(slot)
            replay = self.store.record(body, [*buffers.mutable(), batches.place], buffers.touched, what)
            if replay is None:
                self.store.refused.add(self.key)
            else:
                buffers.graphs[shape] = replay, batches
            batches.fill(self.schedule, slot.step - batches.at)  # a model may have changed its input in place
        captured = buffers.graphs.get(shape)
        (self._body(slot) if captured is None else captured[0])()
        batches.at += 1

    def finish(self) -> StepState:
        """A copy of what the steps have changed."""
        return self.buffers.result()

    def _body(self, slot: Slot) -> Replay:
        step, state, inputs, batches = self.step, self.buffers.state, self.inputs, self.batches

        def body() -> None:
            packed, active = batches.batch(slot)
            written = set(state.written)
            step.take(state.front(slot.clients), inputs.front(slot.clients), Batch.unpacked(packed), active)
            if state.written != written:
                raise ValueError("a projection changes a leaf that it did not change in the first round")
            batches.place.add_(1)

        return body
