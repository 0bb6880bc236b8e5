"""A client's work in a round: the interpreter of programs, and THE local loop.

The code here serves one client or many side by side. How tensors are laid out (plain, or stacked along a client axis)
is the business of a :class:`Layout`, which an engine provides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import transfer, tree
from fedloom.batches import SWEEP_BATCH, sweep_rows
from fedloom.bound import Bound, BoundPhase
from fedloom.data import Rows
from fedloom.optim import OptState
from fedloom.particulars import Particulars
from fedloom.slots import Judge, Phase, Program, Receive, Send, Stage, Sweep
from fedloom.stepping import Stepper
from fedloom.types import Batch, Inputs, Leaves, Memory, Message, Seen
from fedloom.view import View
from fedloom.work import ClientState, Participant, Post, Reply, Work, leaves_of, memories_of

See = Callable[..., Seen]
"""What makes of a client's private part what the client sees: :meth:`Desk.see`, or the same with values at fixed addresses."""


class Layout(Protocol):
    """How the tensors of the clients at work are laid out."""

    def gather(self, values: Sequence[Tensor], *, apart: bool = False) -> Tensor:
        """Joins the clients' values of one tensor; with ``apart`` each has its own, though all have the same."""

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The clients' values of one tensor."""

    def column(self, values: Tensor) -> Tensor:
        """The clients' values of one number, given as a vector."""

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of one client's tensors for every client."""

    def suited(self, bound: Bound, leaves: Leaves) -> Leaves:
        """The leaves in the order in memory in which the network computes fastest."""

    def stepper(self, desk: Desk, phase: BoundPhase, leaves: Leaves) -> Stepper:
        """What makes the steps of a phase."""

    def batches(self, desk: Desk, phase: BoundPhase) -> Iterator[tuple[Batch, Tensor | None]]:
        """The batches of a phase, and which clients take part in each (None: all)."""

    def sweep(self, desk: Desk, rows: str, size: int | str = SWEEP_BATCH, *, narrow: bool = False) -> Iterator[Batch]:
        """All rows in order; with ``narrow`` batches after the first may leave out the last clients, where their rows are over."""

    def adder(self, desk: Desk, step: Sweep | Judge, fn: Callable[..., Leaves]) -> Adder:
        """What adds up a statistic of these rows."""

    def trim(self, desk: Desk, rows: str, kept: Tensor) -> Sequence[Tensor]:
        """Per client the kept values of its real rows."""


def sweep_size(work: Work, step: Sweep | Judge, rows: Rows) -> int | str:
    """Rows of a batch of a sweep over some rows."""
    asked = step.batch_size if isinstance(step, Sweep) else None
    if asked is None:
        parts = [rows.x] if isinstance(rows.x, Tensor) else pytree.tree_leaves(rows.x)
        return sweep_rows(sum(t.shape[1:].numel() for t in parts))
    return work.batch_size if asked == "run" else asked


class Adder:
    """Adds up a statistic of the clients' rows, batch by batch.

    Args:
        desk: where the clients work.
        step: what asks for it.
        fn: the statistic of one client's batch: ``(see, leaves, private, packed) -> dict of tensors``.
    """

    def __init__(self, desk: Desk, step: Sweep | Judge, fn: Callable[..., Leaves]) -> None:
        self.desk, self.step, self.fn = desk, step, fn
        self.leaves = desk.layout.suited(desk.bound, desk.leaves)
        self.sums: Leaves | None = None

    def over(self, rows: str, size: int | str) -> None:
        """Adds the statistic of some rows, batch by batch."""
        for batch in self.desk.layout.sweep(self.desk, rows, size, narrow=True):
            self.add(batch.packed())

    def add(self, packed: dict[str, Any]) -> None:
        """Adds the statistic of a batch."""
        part = self.of(self.desk.see, self.leaves, self.desk.private, packed)
        self.sums = part if self.sums is None else tree.add(self.sums, part)

    def of(self, see: See, leaves: Leaves, private: dict[str, Any], packed: dict[str, Any]) -> Leaves:
        """The statistic of a batch."""
        found: Leaves = self.desk.layout.call(partial(self.fn, see), leaves, private, packed)
        return found

    def total(self) -> Leaves:
        """The sums over all batches."""
        assert self.sums is not None, "a sweep over no rows"
        return self.sums


class Desk:
    """Where one client works, or many side by side, while a program runs; their particulars may be there already."""

    def __init__(
        self,
        bound: Bound,
        work: Work,
        post: Post,
        participants: Sequence[Participant],
        layout: Layout,
        ahead: Particulars | None = None,
    ) -> None:
        self.bound, self.work, self.post, self.participants, self.layout = (
            bound,
            work,
            post,
            participants,
            layout,
        )
        optimizer = work.optimizer
        self.lr = optimizer.lr_at(post.round, work.rounds)
        self.rates = {
            name: (phase.phase.optimizer or optimizer).lr_at(post.round, work.rounds)
            for name, phase in bound.phases.items()
        }
        self.momenta = {name: (phase.phase.optimizer or optimizer).momentum for name, phase in bound.phases.items()}
        self.leaves: Leaves = post.leaves
        self.message: Message = {}
        self.losses: list[Tensor] = []
        self.counted: dict[str, list[int] | None] = {}
        self.judged: dict[str, tuple[Leaves, dict[str, Sequence[Tensor]]]] = {}
        self.optimizer: dict[str, list[OptState]] = {}
        if ahead is None or not ahead.are_of(work, post.round, participants):
            device = next(iter(post.leaves.values())).device
            ahead = Particulars(work, post.round, participants, layout, device, bound.structure.dtype)
        self.private = self._private(ahead)

    # What clients see.

    def _private(self, own: Particulars) -> dict[str, Any]:
        people, gather = self.participants, self.layout.gather
        memories = memories_of(people, self.bound.memory)
        return {
            "start": {},
            "addressed": {
                owner: {k: gather([p.addressed[owner][k] for p in people]) for k in names}
                for owner, names in people[0].addressed.items()
            },
            "memory": {owner: {k: gather(v) for k, v in each.items()} for owner, each in memories.items()},
            "swept": {},
            "steps": {},
            **own.values,
        }

    def see(self, private: Mapping[str, Any], final: Leaves | None = None) -> Seen:
        """What one client sees, given its private part."""
        post = self.post
        return Seen(
            **private,
            received=post.leaves,
            broadcast=post.broadcast,
            gate=post.gate,
            final=final or {},
            round=post.round,
            lr=self.lr,
            cohort=post.cohort,
            population=post.population,
            key=self.participants[0].key,
            specs=self.bound.specs,
            rates=self.rates,
            momenta=self.momenta,
        )

    # Programs.

    def run(self, program: Program) -> None:
        """Interprets a program."""
        for step in program:
            if isinstance(step, Receive):
                self.receive(step)
            elif isinstance(step, Phase):
                self.train(self.bound.phases[step.name])
            elif isinstance(step, Sweep):
                self.private["swept"] = {**self.private["swept"], step.name: self.sweep(step)}
            elif isinstance(step, Judge):
                self.judge(step)
            else:
                assert isinstance(step, Send)
                schedule = self.bound.method.schedule
                self.send("setup" if program is schedule.setup else "server" if program is schedule.server else "round")

    def receive(self, step: Receive) -> None:
        """Shared leaves come from the server, kept ones are the client's own; then the method's receive rule."""
        post, specs, gather = self.post, self.bound.specs, self.layout.gather
        start: Leaves = {}
        for name, value in post.leaves.items():
            everywhere = [value] * len(self.participants)
            if not specs[name].kept or step.plain or (step.mirrored and specs[name].kind == "mirrored"):
                start[name] = gather(everywhere)
                continue
            own = leaves_of(self.participants, name, value)
            gate = post.gate.get(name)
            if gate is None:
                start[name] = gather(own)
            elif post.off is None:
                start[name] = torch.where(gate.bool(), gather(everywhere), gather(own))
            else:  # laid out alike, personal or not: captured sweeps tell tensors by how they lie
                start[name] = gather(own if name in post.off else everywhere, apart=True)
        rule = self.bound.method.partition.receive
        if rule is not None and step.rule and not step.plain:
            apply = rule
            plain = start
            start = self.layout.call(lambda s, private: {**s, **apply(s, self.see(private))}, start, self.private)
            for name, gate in post.gate.items():
                start[name] = torch.where(gate.bool(), start[name], plain[name])
        self.leaves = start
        self.private["start"] = start

    def train(self, bound_phase: BoundPhase) -> None:
        """THE local loop."""
        phase = bound_phase.phase
        leaves = self.layout.suited(self.bound, self.leaves)
        still = dict(leaves)
        stepper = self.layout.stepper(self, bound_phase, leaves)
        for batch, active in stepper.batches():
            more, active = stepper.goes_on(active)
            if not more:
                break
            stepper.step(batch, active)
        stepper.finish()
        count = stepper.count()
        self.private["steps"] = {**self.private["steps"], phase.name: count}
        self.counted[phase.name] = stepper.counted()
        if stepper.total is not None:  # the mean of no steps is NaN, zero by zero
            self.losses.append(stepper.total / count.to(stepper.total.dtype))
        found = {k: v.detach() if v.requires_grad else v for k, v in leaves.items()}
        self.leaves = {k: self.leaves[k] if leaves[k] is still[k] else v.contiguous() for k, v in found.items()}
        if self.work.keep_optimizer:
            self.optimizer[phase.name] = stepper.kept()

    def sweep(self, step: Sweep) -> Leaves:
        """One pass over the training rows that adds up a statistic."""
        taps = {step.name: self.bound.taps(step.taps)}

        def fn(see: See, leaves: Leaves, private: dict[str, Any], packed: dict[str, Any]) -> Leaves:
            seen = see(private)
            if step.at == "received":
                leaves = {**leaves, **seen.received}
            elif callable(step.at):
                leaves = {**leaves, **step.at(leaves, seen)}
            if step.train:  # layers move running statistics in place, which may be everybody's: a sweep changes nothing
                leaves = {n: v.clone() if self.bound.specs[n].buffer else v for n, v in leaves.items()}
            batch = Batch.unpacked(packed)
            return step.fn(
                View(self.bound, leaves, batch, seen, copy=step.copy, train=step.train, taps=taps),
                batch,
                seen,
            )

        sums = self._accumulate(step, fn, "train")
        if step.finish is not None:
            finish = step.finish
            sums = self.layout.call(lambda s, private: finish(s, self.see(private)), sums, self.private)
        return sums

    def judge(self, step: Judge) -> None:
        """The model on rows it was not trained on."""
        task = self.bound.task

        def fn(see: See, leaves: Leaves, private: dict[str, Any], packed: dict[str, Any]) -> Leaves:
            batch = Batch.unpacked(packed)
            output = self._output(leaves, see(private), batch, step.route)
            return task.statistics(output, batch) if task.statistics is not None else {"output": output, "y": batch.y}

        if task.statistics is not None:
            self.judged[step.name] = (self._accumulate(step, fn, step.rows), {})
        else:
            self.judged[step.name] = ({}, self._keep(fn, step.rows))

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """Output of one client's own model for some inputs."""
        first = x if isinstance(x, Tensor) else next(iter(x.values() if isinstance(x, dict) else x))
        batch = Batch(x, torch.zeros(first.shape[0], dtype=torch.long, device=first.device))
        return self._output(self.leaves, self.see(self.private), batch, route=True)

    def _output(self, leaves: Leaves, seen: Seen, batch: Batch, route: bool) -> Tensor:
        rule = self.bound.method.evaluate
        predict = rule.predict if route else None
        taps = {} if predict is None else {"predict": self.bound.taps(rule.taps)}
        view = View(self.bound, leaves, batch, seen, copy=rule.copy if route else "main", taps=taps)
        return view.output if predict is None else predict(view, seen)

    def send(self, when: str) -> None:
        """The upload stages, in order."""
        stages = [s for s in self.bound.method.upload if s.when == when]
        off = self.post.gate if self.post.off is None else self.post.off

        def fn(
            some: Sequence[Stage], message: Message, memory: Memory, leaves: Leaves, private: dict[str, Any]
        ) -> tuple[Message, Memory]:
            seen = self.see(private, leaves)
            gate = {n: v for n, v in seen.gate.items() if n in off}  # those absent are shared
            seen = replace(seen, gate=gate, personal=self.post.off or ())
            memory = dict(memory)
            for stage in some:
                message, kept = stage.fn(message, memory.get(stage.owner, {}), seen)
                if stage.owner in memory:
                    memory[stage.owner] = kept
            return message, memory

        message, memory = Message(), self.private["memory"]
        with torch.no_grad():
            for stacked, some in groupby(stages, lambda stage: stage.stacked):
                part = partial(fn, list(some))
                call = part if stacked else partial(self.layout.call, part)
                message, memory = call(message, memory, self.leaves, self.private)
        self.message, self.private["memory"] = message, memory

    def replies(self, *, read: bool = True) -> list[Reply]:
        """One reply per client; without ``read`` their losses stay on the device, for which nobody then waits here."""
        split, people = self.layout.split, self.participants
        several = len(people) > 1

        def each(values: Mapping[str, Sequence[Tensor]]) -> list[Leaves]:
            if not values:
                return [{} for _ in people]
            return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

        def views(values: Leaves) -> list[Leaves]:
            return each({k: split(v) for k, v in values.items()})

        def apart(values: Leaves) -> list[Leaves]:
            # A view would keep the tensors of the whole wave alive for as long as one client's state is kept.
            return each(dict(zip(values, tree.rows(list(values.values())), strict=True))) if several else views(values)

        mine = {n: v for n, v in self.leaves.items() if self.bound.specs[n].kept}
        kept = apart(mine)
        memory = {o: apart(m) for o, m in self.private["memory"].items()}
        message = {e: views(m) for e, m in self.message.items()}
        steps = {p: self.counted[p] or transfer.read(split(v)) for p, v in self.private["steps"].items()}
        loss = self.losses[0] if len(self.losses) == 1 else torch.stack(self.losses).nanmean(0) if self.losses else None
        unread = None if loss is None else split(loss)
        losses = transfer.read(unread) if read and unread is not None else None
        judged = {n: list(zip(views(sums), each(rows), strict=True)) for n, (sums, rows) in self.judged.items()}
        brought = tree.floating([*(v for m in self.message.values() for v in m.values()), *mine.values()])
        size = torch.stack(tree.sizes(brought)).amax() if several and brought and not read else None
        return [
            Reply(
                id=p.site.id,
                message={e: m[i] for e, m in message.items()},
                state=ClientState(
                    leaves=kept[i],
                    memory={o: m[i] for o, m in memory.items()},
                    rounds=p.state.rounds + 1,
                    optimizer=self.optimizer,
                ),
                steps={name: int(v[i]) for name, v in steps.items()},
                loss=None if losses is None else losses[i],
                judged={n: found[i] for n, found in judged.items()},
                unread=None if read or unread is None else unread[i],
                size=size,
            )
            for i, p in enumerate(people)
        ]

    # Details.

    @torch.no_grad()
    def _accumulate(self, step: Sweep | Judge, fn: Callable[..., Leaves], rows: str) -> Leaves:
        size = sweep_size(self.work, step, getattr(self.participants[0].site, rows))
        adder = self.layout.adder(self, step, fn)
        adder.over(rows, size)
        return adder.total()

    @torch.no_grad()
    def _keep(self, fn: Callable[..., Leaves], rows: str) -> dict[str, Sequence[Tensor]]:
        leaves = self.layout.suited(self.bound, self.leaves)
        one = partial(fn, self.see)
        parts = [self.layout.call(one, leaves, self.private, b.packed()) for b in self.layout.sweep(self, rows)]
        axis = self.private["n"].dim()
        return {k: self.layout.trim(self, rows, torch.cat([p[k] for p in parts], axis)) for k in parts[0]}
