"""The loop engine: one client after another. It is slow, plain, and the definition of right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom import batches, rng
from fedloom.batches import SWEEP_BATCH
from fedloom.bound import Bound, BoundPhase
from fedloom.client import Adder, Desk
from fedloom.data import Rows
from fedloom.orders import suited
from fedloom.slots import Judge, Program, Sweep
from fedloom.stepping import Stepper
from fedloom.transfer import onto
from fedloom.types import Batch, Leaves
from fedloom.work import Participant, Post, Reply, Work


class Single:
    """The layout of one client: tensors as they are."""

    def gather(self, values: Sequence[Tensor], *, apart: bool = False) -> Tensor:
        """The only value."""
        return values[0]

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The only value."""
        return (value,)

    def column(self, values: Tensor) -> Tensor:
        """The only number."""
        return values[0]

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """A plain call."""
        return fn(*args)

    def suited(self, bound: Bound, leaves: Leaves) -> Leaves:
        """Filters with their channels last, where the network computes faster with them."""
        return {k: suited(v) for k, v in leaves.items()} if bound.network.channels_last else dict(leaves)

    def stepper(self, desk: Desk, phase: BoundPhase, leaves: Leaves) -> Stepper:
        """The plain one."""
        return Stepper(desk, phase, leaves)

    def batches(self, desk: Desk, phase: BoundPhase) -> Iterator[tuple[Batch, Tensor | None]]:
        """The batches of a phase."""
        person = desk.participants[0]
        train = person.site.train
        for groups in planned(desk.bound, desk.work, desk.post.round, phase, person):
            made: Batch | None = None
            for index in reversed(groups):
                rows = train.take(onto(torch.from_numpy(index), train.y.device))
                made = Batch(rows.x, rows.y, pair=made)
            assert made is not None
            yield made, None

    def sweep(self, desk: Desk, rows: str, size: int | str = SWEEP_BATCH, *, narrow: bool = False) -> Iterator[Batch]:
        """All rows in order."""
        part = rows_of(desk.participants[0], rows)
        for low, high in batches.in_order(len(part), size):
            some = part.take(torch.arange(low, high, device=part.y.device))
            yield Batch(some.x, some.y)

    def adder(self, desk: Desk, step: Sweep | Judge, fn: Callable[..., Leaves]) -> Adder:
        """The plain one."""
        return Adder(desk, step, fn)

    def trim(self, desk: Desk, rows: str, kept: Tensor) -> Sequence[Tensor]:
        """Every row is real."""
        return (kept,)


def planned(bound: Bound, work: Work, round: int, phase: BoundPhase, person: Participant) -> batches.Steps:
    """Row indices of each step of a phase, from the stream of this client, round and copy."""
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
    """Training, validation or test rows of a client."""
    found: Rows | None = getattr(person.site, rows)
    assert found is not None, f"client {person.site.id} has no {rows} rows"
    return found


class LoopEngine:
    """A ``for`` statement.

    Args:
        single: whether to compute with one thread, as worker processes do.
    """

    name = "loop"

    def __init__(self, *, single: bool = False) -> None:
        self.single = single

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One client after another."""
        before = torch.get_num_threads()
        if self.single and before != 1:
            torch.set_num_threads(1)
        try:
            replies = []
            for person in participants:
                desk = Desk(bound, work, post, [person], Single())
                desk.run(program)
                replies += desk.replies()
            return replies
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def facts(self) -> dict[str, Any]:
        """What was resolved."""
        return {"engine": self.name, "workers": 0, "events": []}
