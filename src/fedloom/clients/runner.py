"""A client's work in a round: it interprets programs and contains the only training loop.

The code serves one client or a wave of clients. An engine passes an arrangement of tensors, a
function that starts a runner of steps, and an accumulator of sweeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom import devices, rng, tensors
from fedloom.clients import batches
from fedloom.clients.arrangement import ONE_CLIENT, Arrangement, BatchSchedule, Shapes
from fedloom.clients.batches import SWEEP_BATCH
from fedloom.clients.inputs import client_inputs
from fedloom.clients.messages import Participant, Post, Reply, Work
from fedloom.clients.states import ClientState
from fedloom.clients.step import PhaseStart, StartSteps, Step, start_eager
from fedloom.clients.stop import StopRule
from fedloom.clients.sweep import Accumulate, Statistic, Value, add_up, judge_value, prediction, sweep_size, sweep_value
from fedloom.data import Rows
from fedloom.network.bound_method import Bound, BoundPhase
from fedloom.spec.optimizer import OptState
from fedloom.spec.parts import Judge, Phase, Program, Receive, Send, Sweep
from fedloom.spec.seen import Seen
from fedloom.tasks.batch import Batch
from fedloom.tensors import Inputs, Leaves, Memory, Message


class ClientRunner:
    """Runs a program for one client or for a wave of clients.

    Args:
        bound: the method with its network and task.
        work: the options of the clients, equal for all.
        post: the server's message to all clients.
        participants: the clients.
        arrangement: the layout of their tensors.
        start_steps: returns the runner that executes the steps of a phase.
        accumulate: adds up a statistic over rows.
        schedules: prefetched schedules of shapes ``"narrow"``, by the name of the phase.
    """

    def __init__(
        self,
        bound: Bound,
        work: Work,
        post: Post,
        participants: Sequence[Participant],
        arrangement: Arrangement = ONE_CLIENT,
        start_steps: StartSteps = start_eager,
        accumulate: Accumulate = add_up,
        schedules: Mapping[str, BatchSchedule] | None = None,
    ) -> None:
        self.bound, self.work, self.post, self.participants = bound, work, post, participants
        self.arrangement, self.start_steps, self.accumulate = arrangement, start_steps, accumulate
        self.schedules = {} if schedules is None else schedules
        self.inputs = client_inputs(bound, work, post, participants, arrangement)
        self.leaves: Leaves = post.leaves
        self.message: Message = {}
        self.losses: list[Tensor] = []
        self.counts: dict[str, Sequence[int] | None] = {}
        self.judged: dict[str, tuple[Leaves, dict[str, Sequence[Tensor]]]] = {}
        self.optimizer: dict[str, list[OptState]] = {}

    def run(self, program: Program) -> None:
        """Run the steps of a program in order."""
        for step in program:
            if isinstance(step, Receive):
                self.receive(step)
            elif isinstance(step, Phase):
                self.train(self.bound.phases[step.name])
            elif isinstance(step, Sweep):
                self.inputs = self.inputs.with_own(swept={**self.inputs.own["swept"], step.name: self.sweep(step)})
            elif isinstance(step, Judge):
                self.judge(step)
            else:
                assert isinstance(step, Send)
                schedule = self.bound.method.schedule
                self.send("setup" if program is schedule.setup else "server" if program is schedule.server else "round")

    def receive(self, step: Receive) -> None:
        """Load shared leaves from the server, the others from the clients; apply the rule."""
        specs, stack, off = self.bound.specs, self.arrangement.stack, self.post.off
        gates = self.inputs.common["gate"]
        start: Leaves = {}
        for name, shared in self.received().items():
            if not specs[name].kept or step.plain or (step.mirrored and specs[name].kind == "mirrored"):
                start[name] = stack(shared)
                continue
            own = [p.state.leaves.get(name, v) for p, v in zip(self.participants, shared, strict=True)]
            gate = gates.get(name)
            if gate is None:
                start[name] = stack(own)
            elif off is None:
                start[name] = torch.where(gate.bool(), stack(shared), stack(own))
            else:  # the same strides for personal and shared leaves: captured graphs are looked up by strides
                start[name] = stack(own if name in off else shared, copy=self.arrangement.several)
        rule = self.bound.method.partition.receive
        if rule is not None and step.rule and not step.plain:
            apply, plain = rule, start
            receive = self.arrangement.map(lambda leaves, own: {**leaves, **apply(leaves, self.inputs.seen(own))})
            start = receive(start, self.inputs.own)
            for name, gate in gates.items():
                start[name] = torch.where(gate.bool(), start[name], plain[name])
        self.leaves = start
        self.inputs = self.inputs.with_own(start=start)

    def received(self) -> dict[str, Sequence[Tensor]]:
        """Return the server's leaves for each client. Clients of one run receive the same."""
        leaves = self.inputs.common["received"]
        return {name: [value] * len(self.participants) for name, value in leaves.items()}

    def train(self, phase: BoundPhase) -> None:
        """Run the gradient steps of a phase. This is the only training loop in the package.

        A step continues in the runner, for example :meth:`fedloom.clients.step.EagerRunner.run`,
        and in :meth:`fedloom.clients.step.Step.take`.
        """
        step, start = self.step(phase), self.start(phase)
        runner = self.start_steps(step, start, self.inputs, partial(self.schedule, phase))
        until = phase.phase.until
        stop = None if until is None else StopRule(until, self.inputs, self.arrangement)
        step_count = 0
        for planned_slot in runner.schedule.slots:
            slot = planned_slot if stop is None else stop.next(planned_slot)
            if slot is None:  # every client has stopped
                break
            losses = runner.run(slot)
            step_count += 1
            if stop is not None:
                stop.record(losses, slot.active)
        state = runner.finish()
        name = phase.phase.name
        self.counts[name] = runner.schedule.counts if stop is None else stop.counts(len(self.participants))
        counts = self.vector(runner.schedule.counts) if stop is None else stop.steps()
        self.inputs = self.inputs.with_own(steps={**self.inputs.own["steps"], name: counts})
        if step_count:
            self.losses.append(state.total / counts)  # a client without steps gets 0 / 0 = NaN
        self.leaves = self.leaves | {n: state.leaves[n].contiguous() for n in self.leaves if n in state.written}
        if self.work.keep_optimizer:  # such a run has one client; `int` waits for the device
            unstack = self.arrangement.unstack
            self.optimizer[name] = [
                OptState({k: [unstack(t)[0].clone() for t in v] for k, v in g.state.slots.items()}, int(g.state.step))
                for g in state.groups or ()
            ]

    # The beginning of a phase.

    def step(self, phase: BoundPhase) -> Step:
        """Return the training step of a phase in this round."""
        work, round = self.work, self.inputs.facts["round"]
        groups = tuple(
            [(names, o, o.lr_at(round, work.rounds)) for names, own in phase.groups for o in [own or work.optimizer]]
        )
        trained = tuple([self.bound.specs[n].local for n in phase.trained])
        return Step(self.bound, phase, self.arrangement, groups, work.augment, trained)

    def start(self, phase: BoundPhase) -> PhaseStart:
        """Return the state at the beginning of a phase."""
        stack, count, own = self.arrangement.stack, len(self.participants), self.inputs.own
        device = own["n"].device
        # Copies: without them the clients would share one tensor, which steps change in place.
        carry: Memory = {
            t.owner: {k: stack([v.to(device)] * count, copy=True) for k, v in t.carry(self.bound.structure).items()}
            for t in phase.terms
            if t.carry is not None
        }
        saved = [
            k for p in self.participants if self.work.keep_optimizer and (k := p.state.optimizer.get(phase.phase.name))
        ]
        moments = [
            OptState({k: [stack([t]) for t in v] for k, v in state.slots.items()}, state.step)
            for state in (saved[0] if saved else ())
        ]
        leaves = self.arrangement.to_memory_format(self.bound.network, self.leaves)
        return PhaseStart(leaves, carry, torch.zeros_like(own["n"]), moments or None, count)

    def schedule(self, phase: BoundPhase, shapes: Shapes) -> BatchSchedule:
        """Return the batches of a phase."""
        name = phase.phase.name
        if shapes == "narrow" and name in self.schedules:
            return self.schedules[name]
        bound, work, people = self.bound, self.work, self.participants
        steps = [planned(bound, work, self.inputs.facts["round"], phase, p) for p in people]
        return self.arrangement.schedule([p.site.train for p in people], steps, bound.structure.dtype, shapes)

    def vector(self, numbers: Sequence[float]) -> Tensor:
        """Return one number per client as a tensor on their device."""
        n: Tensor = self.inputs.own["n"]
        return devices.to_device_async(torch.tensor(numbers, dtype=n.dtype), n.device).reshape(n.shape)

    # Sweeps, judgements and predictions.

    def sweep(self, step: Sweep) -> Leaves:
        """Add up a statistic over the training rows."""
        sums = self._added_up(step, sweep_value(self.bound, step), "train")
        if step.finish is None:
            return sums
        finish = step.finish
        result: Leaves = self.arrangement.map(lambda s, own: finish(s, self.inputs.seen(own)))(sums, self.inputs.own)
        return result

    def judge(self, step: Judge) -> None:
        """Evaluate the model on test or validation rows."""
        value = judge_value(self.bound, step)
        if self.bound.task.statistics is not None:
            self.judged[step.name] = (self._added_up(step, value, step.rows), {})
        else:
            self.judged[step.name] = ({}, self._all_rows(step, value))

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """Return the output of one client's model."""
        first = x if isinstance(x, Tensor) else next(iter(x.values() if isinstance(x, dict) else x))
        batch = Batch(x, torch.zeros(first.shape[0], dtype=torch.long, device=first.device))
        return prediction(self.bound, self.leaves, self.inputs.seen(self.inputs.own), batch, route=True)

    @torch.no_grad()
    def _added_up(self, step: Sweep | Judge, value: Value, rows: str) -> Leaves:
        parts = [rows_of(p, rows) for p in self.participants]
        size = sweep_size(self.work, step, parts[0])
        schedule = self.arrangement.sweep(parts, size, self.bound.structure.dtype, narrow=True)
        leaves = self.arrangement.to_memory_format(self.bound.network, self.leaves)
        return self.accumulate(Statistic(step, self.bound, self.arrangement, value), leaves, self.inputs, schedule)

    @torch.no_grad()
    def _all_rows(self, step: Judge, value: Value) -> dict[str, Sequence[Tensor]]:
        parts = [rows_of(p, step.rows) for p in self.participants]
        schedule = self.arrangement.sweep(parts, SWEEP_BATCH, self.bound.structure.dtype, narrow=False)
        leaves = self.arrangement.to_memory_format(self.bound.network, self.leaves)
        statistic = Statistic(step, self.bound, self.arrangement, value)
        outputs = [statistic.of(leaves, self.inputs, schedule.batch(slot), {}) for slot in schedule.slots]
        axis = 1 if self.arrangement.several else 0
        return {k: schedule.unpad(torch.cat([part[k] for part in outputs], axis)) for k in outputs[0]}

    # Messages and replies.

    def send(self, when: str) -> None:
        """Apply the upload stages in order."""
        stages = [s for s in self.bound.method.upload if s.when == when]
        off = self.post.gate if self.post.off is None else self.post.off

        def fn(message: Message, memory: Memory, leaves: Leaves, own: dict[str, Any]) -> tuple[Message, Memory]:
            seen: Seen = self.inputs.seen(own, leaves)
            gate = {n: v for n, v in seen.gate.items() if n in off}  # absent: shared
            seen = replace(seen, gate=gate, personal=self.post.off or ())
            memory = dict(memory)
            for stage in stages:
                message, own_memory = stage.fn(message, memory.get(stage.owner, {}), seen)
                if stage.owner in memory:
                    memory[stage.owner] = own_memory
            return message, memory

        own = self.inputs.own
        with torch.no_grad():
            self.message, memory = self.arrangement.map(fn)(Message(), own["memory"], self.leaves, own)
        self.inputs = self.inputs.with_own(memory=memory)

    def replies(self) -> list[Reply]:
        """Return one reply per client. Losses stay on the device: the host does not wait."""
        split, people = self.arrangement.unstack, self.participants
        several = len(people) > 1

        def each(values: Mapping[str, Sequence[Tensor]]) -> list[Leaves]:
            if not values:
                return [{} for _ in people]
            return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

        def views(values: Leaves) -> list[Leaves]:
            return each({k: split(v) for k, v in values.items()})

        def copies(values: Leaves) -> list[Leaves]:
            # A view would keep the whole wave in memory as long as one client's state exists.
            return (
                each(dict(zip(values, tensors.rows(list(values.values())), strict=True))) if several else views(values)
            )

        leaves = copies({n: v for n, v in self.leaves.items() if self.bound.specs[n].kept})
        memory = {o: copies(m) for o, m in self.inputs.own["memory"].items()}
        message = {e: views(m) for e, m in self.message.items()}
        steps = {p: self.counts[p] or devices.read_scalars(split(v)) for p, v in self.inputs.own["steps"].items()}
        loss = self.losses[0] if len(self.losses) == 1 else torch.stack(self.losses).nanmean(0) if self.losses else None
        losses = [None] * len(people) if loss is None else split(loss)
        judged = {n: list(zip(views(sums), each(rows), strict=True)) for n, (sums, rows) in self.judged.items()}
        return [
            Reply(
                id=p.site.id,
                message={e: m[i] for e, m in message.items()},
                state=ClientState(
                    leaves=leaves[i],
                    memory={o: m[i] for o, m in memory.items()},
                    rounds=p.state.rounds + 1,
                    optimizer=self.optimizer,
                ),
                steps={name: int(v[i]) for name, v in steps.items()},
                loss=losses[i],
                judged={n: values[i] for n, values in judged.items()},
            )
            for i, p in enumerate(people)
        ]


def planned(bound: Bound, work: Work, round: int, phase: BoundPhase, person: Participant) -> batches.Steps:
    """Return the row indices of each step, drawn from the stream of this client, round and copy."""
    stream = phase.phase.stream or phase.phase.copy
    return batches.plan(
        phase.phase,
        person.site.labels,
        rng.stream(work.seed, "batches", person.site.id, round, stream),
        epochs=work.epochs,
        batch_size=work.batch_size,
        skip_single=bound.network.batch_norm,
        share=person.share,
    )


def rows_of(person: Participant, rows: str) -> Rows:
    """Return the training, validation or test rows of a client."""
    part: Rows | None = getattr(person.site, rows)
    assert part is not None, f"client {person.site.id} has no {rows} rows"
    return part
