"""The vectorised engine: waves of clients, each wave one vectorised program."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.bound import Bound
from fedloom.client import Desk
from fedloom.engines.vectorised.feed import Pools
from fedloom.engines.vectorised.layout import Stacked
from fedloom.engines.vectorised.traced import TRACE_STEPS, Traces
from fedloom.slots import Program
from fedloom.work import Participant, Post, Reply, Work


class VectorisedEngine:
    """Runs clients side by side."""

    name = "vectorised"

    def __init__(self, *, trace_from: int | None = TRACE_STEPS) -> None:
        self.pools = Pools()
        self.traces = None if trace_from is None else Traces(trace_from)

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given."""
        found: dict[str, Reply] = {}
        for key in dict.fromkeys(p.key for p in participants):
            wave = sorted((p for p in participants if p.key == key), key=lambda p: -p.share * len(p.site.train))
            desk = Desk(bound, work, post, wave, Stacked(self.pools, self.traces))
            desk.run(program)
            found |= {r.id: r for r in desk.replies()}
        return [found[p.site.id] for p in participants]
