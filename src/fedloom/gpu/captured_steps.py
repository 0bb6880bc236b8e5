"""Captured steps and sweeps: CUDA graphs that are captured once and replayed in every round.

A graph reads and writes fixed addresses. :class:`StepBuffers` holds a step's state and inputs at
such addresses: they are copied in when a phase begins and out when it ends. Learning rates, step
counts and the number of the step are tensors there, so that a graph serves every round. What is
captured is :meth:`Step.take`, unchanged. A step that cannot be captured runs eagerly on the same
tensors. On a CPU nothing is captured and every replay runs eagerly, which is how the code is
tested.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedloom import tensors as tree
from fedloom.clients.arrangement import Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.messages import Participant, Work
from fedloom.clients.step import EagerRunner, PhaseStart, ScheduleOf, Step, StepRunner, StepState, start_eager
from fedloom.clients.sweep import Statistic, add_up, common_leaves
from fedloom.devices import to_device_async
from fedloom.engines.vectorised.first_round import FirstRound, Reached
from fedloom.engines.vectorised.rows import RowCache, WaveSchedule
from fedloom.engines.vectorised.traced import recording
from fedloom.gpu.batch_buffers import BatchBuffer, BatchBuffers, evict_graphs
from fedloom.gpu.prefetch_batches import BatchPrefetcher
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Judge, Program
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, flatten, map_nested, structure_of, unflatten

Replay = Callable[[], None]
Graphs = dict[Hashable, tuple[Replay, BatchBuffer]]
"""Replays by the shape of their batch, and the buffers that they read."""

LAYOUT_LIMIT = 16
"""Most phases and sweeps, each for one layout of a wave, that keep their tensors and graphs."""
EAGER_SWEEPS, EAGER_JUDGEMENTS = 1, 2
"""How often a sweep or an evaluation of one layout runs eagerly before it is captured.

A run that evaluates only at its end, or at its beginning and end, captures no evaluation.
"""


class TensorFacts:
    """How a tensor lies in memory.

    Args:
        value: the tensor.
        owned: whether every client has a value of its own. Such a value gets memory of its own at
            a fixed address, so that new clients, which all begin with the same tensor, have the
            layout of others. Other tensors share memory if they do so in the first place.

    Attributes:
        tensor: the tensor; a shared one without axes along which it is repeated.
        shape: the shape of ``value``.
        repeats: the axes that were dropped.
        name: equal for tensors that are one tensor at fixed addresses.
        kind: equal for tensors whose fixed tensors are alike.
    """

    __slots__ = ("kind", "name", "repeats", "shape", "tensor", "value")

    def __init__(self, value: Tensor, owned: bool) -> None:
        self.value, self.tensor, self.shape = value, value, value.shape
        self.repeats: tuple[int, ...] = ()
        self.name: Hashable = id(value)
        if owned:
            self.kind: Hashable = (self.shape, value.dtype)
            return
        stride = value.stride()
        if 0 in stride:
            self.repeats = tuple([i for i, step in enumerate(stride) if not step and self.shape[i] > 1])
            for axis in reversed(self.repeats):
                self.tensor = self.tensor.select(axis, 0)
            stride = self.tensor.stride()
        # All empty tensors have the address 0.
        self.name = self.tensor.data_ptr() or -id(value), value.dtype, self.tensor.shape, stride
        self.kind = (self.shape, self.repeats, value.dtype, stride)


class FlatTensors:
    """A nested value as a flat list of tensors, and how they lie in memory.

    Args:
        value: nested dictionaries of tensors.
        owned: whether every client has values of its own.
        describe: returns the facts of a tensor.

    Attributes:
        facts: the facts of each tensor.
        layout: what two values have in common whose fixed tensors are alike, except ``names``.
    """

    def __init__(self, value: Any, owned: bool, describe: Callable[[Tensor, bool], TensorFacts]) -> None:
        self.owned, self.structure = owned, structure_of(value)
        self.facts = [describe(t, owned) for t in flatten(value)]
        self.layout = (owned, self.structure, tuple([f.kind for f in self.facts]))


class FixedInputs:
    """What client code reads, at fixed addresses. Each tensor lies there once.

    Args:
        leaves: the leaves that client code reads and does not change.
        inputs: the other values.
        parts: all these values, flattened by :meth:`CapturedWave.flatten`.
    """

    def __init__(self, leaves: Leaves, inputs: ClientInputs, parts: Mapping[str, FlatTensors]) -> None:
        self.sources: list[int] = []
        self.fixed: list[Tensor] = []
        place: dict[Hashable, Tensor] = {}
        position = 0
        twins: dict[str, Any] = {}
        for part_name, part in parts.items():
            flat = []
            for facts in part.facts:
                if facts.name not in place:
                    form = torch.contiguous_format if part.owned else torch.preserve_format
                    place[facts.name] = torch.empty_like(facts.tensor, memory_format=form)
                    self.sources.append(position)
                    self.fixed.append(place[facts.name])
                twin = place[facts.name]
                for axis in facts.repeats:
                    twin = twin.unsqueeze(axis)
                flat.append(twin.expand(facts.shape))
                position += 1
            twins[part_name] = unflatten(part.structure, flat)
        start = twins["owned start"] | twins["shared start"]
        fixed_leaves = twins["owned leaves"] | twins["shared leaves"]
        self.leaves: Leaves = {n: fixed_leaves[n] for n in leaves}
        self.own = {**twins["own"], "start": {n: start[n] for n in inputs.own["start"]}}
        self.common = twins["common"]

    def load(self, parts: Mapping[str, FlatTensors]) -> None:
        """Copy values of the same layout in."""
        flat = [f.tensor for part in parts.values() for f in part.facts]
        tree.overwrite(self.fixed, [flat[i] for i in self.sources])


class StepBuffers:
    """A step's state and inputs at fixed addresses, and the graphs that use them.

    Args:
        step: the step.
        start: where a phase begins; gives the shapes.
        inputs: what client code reads.
        parts: the same values, flattened.
        reached: the leaves that the objective reaches.
        written: the leaves that steps change.
    """

    def __init__(
        self,
        step: Step,
        start: PhaseStart,
        inputs: ClientInputs,
        parts: Mapping[str, FlatTensors],
        reached: set[str],
        written: set[str],
    ) -> None:
        def empty(value: Tensor) -> Tensor:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

        read_only = {n: v for n, v in start.leaves.items() if n not in written}
        self.inputs = FixedInputs(read_only, inputs, parts)
        leaves = {n: empty(v) if n in written else self.inputs.leaves[n] for n, v in start.leaves.items()}
        carry = map_nested(empty, start.carry)
        device = start.total.device
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.state = StepState(leaves, set(written), carry, empty(start.total), self.number, clients=start.clients)
        self.state.start_optimizers(step, reached)
        self.groups = self.state.groups or []
        # The rates of all groups are views of one tensor, and their step counts of another one.
        self.rates, self.counts = torch.zeros(2, len(self.groups), dtype=torch.float64, device=device).unbind()
        for group, rate, count in zip(self.groups, self.rates, self.counts, strict=True):
            group.rate, group.state.step = rate, count
        self.loaded_rates: list[float | Tensor] = []
        self.graphs: Graphs = {}
        self.touched: set[str] = set()

    def load(self, step: Step, start: PhaseStart, parts: Mapping[str, FlatTensors]) -> None:
        """Begin a phase: copy everything in, with few launches whatever the number of tensors."""
        state, saved = self.state, start.moments
        self.inputs.load(parts)
        rates = [rate for _, _, rate in step.groups]
        if rates != self.loaded_rates:
            self._load_numbers(self.rates, rates)
            self.loaded_rates = rates
        names = sorted(state.written)
        targets = [*(state.leaves[n] for n in names), *flatten(state.carry)]
        sources = [*(start.leaves[n] for n in names), *flatten(start.carry)]
        zeros = [state.total, self.number]
        if saved is None:
            zeros += [self.counts, *self.moments()]
        else:
            self._load_numbers(self.counts, [float(s.step) for s in saved])
            targets += self.moments()
            sources += flatten(
                [
                    {name: s.slots[name] for name in group.state.slots}
                    for group, s in zip(self.groups, saved, strict=True)
                ]
            )
        tree.overwrite(targets, sources)
        for places in tree.group_by_layout(zeros):
            torch._foreach_zero_([zeros[i] for i in places])

    @staticmethod
    def _load_numbers(target: Tensor, numbers: Sequence[float | Tensor]) -> None:
        target.copy_(to_device_async(torch.tensor(numbers, dtype=target.dtype), target.device))

    def moments(self) -> list[Tensor]:
        """Return the optimisers' moments."""
        moments: list[Tensor] = flatten([g.state.slots for g in self.groups])
        return moments

    def mutable(self) -> list[Tensor]:
        """Return all tensors that a step changes. A dry run is undone in these.

        A new field of :class:`StepState` that steps change belongs here, as in its ``front``.
        """
        state = self.state
        leaves = [state.leaves[n] for n in sorted(state.written)]
        carry = flatten(state.carry)
        return [*leaves, *self.moments(), self.counts, *carry, state.total, self.number]

    def result(self) -> StepState:
        """Return the state with copies of its leaves, which the next phase does not overwrite.

        The moments are the buffers' own: nobody but a run that keeps its optimiser reads them, and
        it copies them. The counts of steps stay on the device: to read them would synchronise.
        """
        state = self.state
        names = sorted(state.written)
        copies = dict(zip(names, tree.copies([state.leaves[n] for n in names]), strict=True))
        return replace(state, leaves={**state.leaves, **copies}, total=state.total.clone())


class SweepBuffers:
    """What a sweep reads and the sums that it adds to, at fixed addresses, and its graphs."""

    def __init__(
        self,
        leaves: Leaves,
        inputs: ClientInputs,
        parts: Mapping[str, FlatTensors],
        sums: Leaves,
    ) -> None:
        self.inputs = FixedInputs(leaves, inputs, parts)
        form = torch.contiguous_format
        self.sums = {k: torch.empty_like(v, memory_format=form) for k, v in sums.items()}
        self.graphs: Graphs = {}
        self.touched: set[str] = set()


class CapturedSteps:
    """The captured steps and sweeps of a run.

    Args:
        rows: the joined rows of waves.

    Attributes:
        buffers: tensors and graphs of phases and sweeps by their layout, least recently used first.
        reached: which leaves the objective of a phase reaches and which its steps write.
        eager: how many sweeps of a layout ran eagerly.
        refused: layouts of phases and sweeps that could not be captured.
        notes: why they could not.
        batches: the buffers of batches.
    """

    def __init__(self, rows: RowCache) -> None:
        self.buffers: OrderedDict[Hashable, StepBuffers | SweepBuffers] = OrderedDict()
        self.reached: Reached = {}
        self.eager: Counter[Hashable] = Counter()
        self.refused: set[Hashable] = set()
        self.notes: list[str] = []
        self.batches = BatchBuffers()
        self.prefetcher = BatchPrefetcher(rows, self.batches)
        self._layouts: dict[Hashable, int] = {}
        self._garbage = True  # graphs of an earlier run may still hold memory
        self._pool: Any = None
        self._stream: Any = None

    def wave(self) -> CapturedWave:
        """Return what starts the runners and adds up the sweeps of one wave."""
        return CapturedWave(self)

    def prefetch(self, bound: Bound, work: Work, round: int, wave: Sequence[Participant]) -> None:
        """Prefetch the first batches of a round."""
        self.prefetcher.prefetch(bound, work, round, wave)

    def take_schedules(
        self, bound: Bound, work: Work, round: int, program: Program, wave: Sequence[Participant]
    ) -> Mapping[str, WaveSchedule]:
        """Return the prefetched schedules of a program by their phases."""
        return self.prefetcher.take(bound, work, round, program, wave)

    def clear(self) -> None:
        """Drop all tensors and graphs."""
        self.prefetcher.clear()
        self.buffers.clear()
        self._garbage = True

    def layout(self, parts: Mapping[str, FlatTensors]) -> Hashable:
        """Return a key for the layout of values: equal keys have the same fixed tensors."""
        # A short number for each part: a tuple of hundreds of facts is hashed once.
        numbers = [self._layouts.setdefault(p.layout, len(self._layouts)) for p in parts.values()]
        first: dict[Hashable, int] = {}
        names = [f.name for part in parts.values() for f in part.facts]
        return tuple(numbers), tuple([first.setdefault(n, i) for i, n in enumerate(names)])

    def use(self, key: Hashable, buffers: StepBuffers | SweepBuffers) -> None:
        """Mark tensors and graphs as most recently used and evict the least recently used ones."""
        self.buffers[key] = buffers
        self.buffers.move_to_end(key)
        while len(self.buffers) > LAYOUT_LIMIT:
            self.buffers.popitem(last=False)
            self._garbage = True

    def batches_of(self, schedule: WaveSchedule, graphs: Graphs) -> BatchBuffer:
        """Return the buffer of a schedule. Evict graphs of the least recently used other one."""
        buffer = self.batches.get_or_create(schedule)
        self._garbage |= evict_graphs(graphs, buffer)
        return buffer

    def record(self, body: Replay, mutable: Sequence[Tensor], touched: set[str], what: str) -> Replay | None:
        """Run ``body`` once, undo it, and capture it.

        Args:
            body: what is replayed.
            mutable: all tensors that it changes.
            touched: names of changing Python numbers that client code reads; ``body`` adds to it.
            what: its name in a note.

        Returns:
            A function that repeats ``body``; None, and a note, if it cannot be captured.

        Raises:
            torch.OutOfMemoryError: the engine then makes its waves smaller.
        """
        before, cuda = tree.copies(mutable), mutable[0].is_cuda
        try:
            if cuda:
                self._run_on_stream(body)
            else:
                body()
            tree.overwrite(mutable, before)
            if touched:
                names = ", ".join(sorted(touched))
                raise ValueError(f"client code reads {names}, which change from round to round")
            return self._capture(body) if cuda else body
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = str(error).strip().splitlines()
            self.notes.append(f"{what} is mapped, not captured: {why[0] if why else repr(error)}")
            tree.overwrite(mutable, before)
            return None

    def _run_on_stream(self, body: Replay) -> None:
        # One stream for all dry runs: memory freed on a stream is of use to that stream alone.
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                body()
        finally:  # after an error too: kernels still read tensors that are freed next
            torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self, body: Replay) -> Replay:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        if self._garbage:  # not always: it takes longer than the capture
            gc.collect()
            self._garbage = False
        gc.disable()  # freeing an evicted graph during a capture would invalidate the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                body()
        finally:
            if collects:
                gc.enable()
        return graph.replay


class CapturedWave:
    """Starts the captured phases and sweeps of one wave.

    The phases and sweeps of a wave read mostly the same tensors, which are described once. The
    object must not outlive the wave: it holds the wave's tensors.
    """

    def __init__(self, store: CapturedSteps) -> None:
        self.store = store
        # The facts hold their tensors, so that the addresses cannot be given to others.
        self._facts: dict[tuple[int, bool], TensorFacts] = {}

    def start(self, step: Step, start: PhaseStart, inputs: ClientInputs, schedule: ScheduleOf) -> StepRunner:
        """Return the captured runner; in a phase's first round the eager one.

        The first round shows which leaves the objective reaches. A phase that stops by itself needs
        its losses on the host, so it runs eagerly.
        """
        if step.phase.phase.until is not None:
            return start_eager(step, start, inputs, schedule)
        store = self.store
        phase = (step.bound, step.phase.phase.name, inputs.facts.get("key"))
        steps: Any = schedule("narrow")
        if phase not in store.reached:
            return FirstRound(EagerRunner(step, start, inputs, steps), store.reached, phase)
        reached, written = store.reached[phase]
        read_only = {n: v for n, v in start.leaves.items() if n not in written}
        parts = self.flatten(step.bound, read_only, inputs)
        optimizers = tuple([(names, optimizer) for names, optimizer, _ in step.groups])
        key = (phase, _numbers(inputs), optimizers, store.layout(parts))
        buffers = store.buffers.get(key)
        if not isinstance(buffers, StepBuffers):
            buffers = StepBuffers(step, start, inputs, parts, reached, written)
        store.use(key, buffers)
        buffers.load(step, start, parts)
        return CapturedRunner(step, inputs, steps, buffers, store, key)

    def accumulate(self, statistic: Statistic, leaves: Leaves, inputs: ClientInputs, schedule: Any) -> Leaves:
        """Add up the sums of a sweep, eagerly until it has run often enough to be captured."""
        store, judges = self.store, isinstance(statistic.step, Judge)
        parts = self.flatten(statistic.bound, leaves, inputs, own_leaves=not judges)
        # The types of sums may depend on masks: `Batch.count` has the type of the mask.
        masks = frozenset([slot.padded for slot in schedule.slots])
        facts = (*_numbers(inputs), inputs.facts.get("key"))
        key = (statistic.bound, statistic.step, facts, masks, store.layout(parts))
        buffers = store.buffers.get(key)
        if not isinstance(buffers, SweepBuffers):
            sums = add_up(statistic, leaves, inputs, schedule)
            store.eager[key] += 1
            often = store.eager[key] >= (EAGER_JUDGEMENTS if judges else EAGER_SWEEPS)
            if sums and often and key not in store.refused:
                store.use(key, SweepBuffers(leaves, inputs, parts, sums))
            return sums
        store.use(key, buffers)
        batches = store.batches_of(schedule, buffers.graphs)
        buffers.inputs.load(parts)
        torch._foreach_zero_(list(buffers.sums.values()))
        name = f"{'judgement' if judges else 'sweep'} {statistic.step.name!r}"
        for slot in schedule.slots:
            batches.load(schedule, slot.step)
            shape = (id(batches), slot.clients, slot.widths, slot.padded)
            if shape not in buffers.graphs:
                body = _sweep_body(statistic, inputs, buffers, batches, slot)
                mutable = [*buffers.sums.values(), batches.index]
                replay = store.record(body, mutable, buffers.touched, name)
                if replay is None:
                    store.refused.add(key)
                    del store.buffers[key]
                    return add_up(statistic, leaves, inputs, schedule)
                buffers.graphs[shape] = replay, batches
                # The dry run may have changed the batch: a model may change its input in place.
                batches.fill(schedule, slot.step - batches.host_index)
            buffers.graphs[shape][0]()
            batches.host_index += 1
        return {k: v.clone() for k, v in buffers.sums.items()}

    def flatten(
        self, bound: Bound, leaves: Leaves, inputs: ClientInputs, own_leaves: bool = True
    ) -> dict[str, FlatTensors]:
        """Flatten what client code reads.

        Args:
            bound: says which leaves clients keep.
            leaves: the leaves that are read.
            inputs: the other values.
            own_leaves: whether clients own the leaves that they keep. An evaluation does without:
                layers whose leaves all clients share are then computed once for all rows.
        """
        kept = frozenset([n for n, s in bound.specs.items() if s.kept]) if own_leaves else frozenset()
        start = inputs.own["start"]
        parts: dict[str, tuple[Any, bool]] = {
            "own": ({k: v for k, v in inputs.own.items() if k != "start"}, True),
            "common": (inputs.common, False),
            "owned start": (_select(start, kept, True), True),
            "shared start": (_select(start, kept, False), False),
            "owned leaves": (_select(leaves, kept, True), True),
            "shared leaves": (_select(leaves, kept, False), False),
        }
        return {name: FlatTensors(value, owned, self._describe) for name, (value, owned) in parts.items()}

    def _describe(self, value: Tensor, owned: bool) -> TensorFacts:
        key = (id(value), owned)
        if key not in self._facts:
            self._facts[key] = TensorFacts(value, owned)
        return self._facts[key]


def _select(leaves: Leaves, kept: frozenset[str], owned: bool) -> Leaves:
    return {n: v for n, v in leaves.items() if (n in kept) is owned}


def _numbers(inputs: ClientInputs) -> tuple[Hashable, ...]:
    """Return the Python numbers that a graph bakes in and that may differ between waves."""
    return inputs.facts["cohort"], inputs.facts["population"]


def _sweep_body(
    statistic: Statistic,
    inputs: ClientInputs,
    buffers: SweepBuffers,
    batches: BatchBuffer,
    slot: Slot,
) -> Replay:
    fixed, clients = buffers.inputs, slot.clients
    recorded = recording(inputs, buffers.touched, own=fixed.own, common=fixed.common)
    common = common_leaves(statistic, fixed.leaves)

    def body() -> None:
        leaves = {n: v[:clients] for n, v in fixed.leaves.items()}
        batch = Batch.unpacked(batches.batch(slot)[0])
        part = statistic.of(leaves, recorded.front(clients), batch, common)
        sums = [v[:clients] for v in buffers.sums.values()]
        torch._foreach_add_(sums, [part[k] for k in buffers.sums])
        batches.index.add_(1)

    return body


class CapturedRunner:
    """Runs the steps of a phase, each as the replay of a captured graph."""

    def __init__(
        self,
        step: Step,
        inputs: ClientInputs,
        schedule: WaveSchedule,
        buffers: StepBuffers,
        store: CapturedSteps,
        key: Hashable,
    ) -> None:
        self.step, self.schedule, self.buffers = step, schedule, buffers
        self.store, self.key = store, key
        self.batches = store.batches_of(schedule, buffers.graphs)
        fixed = buffers.inputs
        self.inputs = recording(inputs, buffers.touched, own=fixed.own, common=fixed.common)

    def run(self, slot: Slot) -> None:
        """Replay one step. Run it eagerly if it cannot be captured."""
        buffers, batches = self.buffers, self.batches
        batches.load(self.schedule, slot.step)
        shape = (id(batches), slot.clients, slot.widths, slot.padded, slot.active is None)
        if shape not in buffers.graphs and self.key not in self.store.refused:
            self._record(slot, shape)
        if shape in buffers.graphs:
            buffers.graphs[shape][0]()
        else:
            self._take(slot)
        batches.host_index += 1

    def finish(self) -> StepState:
        """Return a copy of what the steps changed."""
        return self.buffers.result()

    def _take(self, slot: Slot) -> None:
        packed, active = self.batches.batch(slot)
        state, inputs = self.buffers.state.front(slot.clients), self.inputs.front(slot.clients)
        self.step.take(state, inputs, Batch.unpacked(packed), active)
        self.batches.index.add_(1)

    def _record(self, slot: Slot, shape: Hashable) -> None:
        buffers, batches, state = self.buffers, self.batches, self.buffers.state
        leaves, written = state.leaves, set(state.written)

        def body() -> None:
            self._take(slot)
            if state.written != written:
                raise ValueError("a projection changes a leaf that it did not change before")

        what = f"phase {self.step.phase.phase.name!r}"
        mutable = [*buffers.mutable(), batches.index]
        replay = self.store.record(body, mutable, buffers.touched, what)
        if replay is None:
            self.store.refused.add(self.key)
            # Undo what `StepState.writable` did in the dry run.
            state.leaves, state.written = leaves, written
        else:
            buffers.graphs[shape] = replay, batches
        # The dry run may have changed the batch: a model may change its input in place.
        batches.fill(self.schedule, slot.step - batches.host_index)
