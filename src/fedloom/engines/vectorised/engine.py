"""The vectorised engine: waves of clients, each wave one vectorised program."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.bound import Bound
from fedloom.client import Desk
from fedloom.engines.vectorised.layout import Stacked
from fedloom.slots import Program
from fedloom.work import Participant, Post, Reply, Work


class VectorisedEngine:
    """Runs clients side by side."""

    name = "vectorised"

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given."""
        found: dict[str, Reply] = {}
        for key in dict.fromkeys(p.key for p in participants):
            wave = [p for p in participants if p.key == key]
            desk = Desk(bound, work, post, wave, Stacked())
            desk.run(program)
            found |= {r.id: r for r in desk.replies()}
        return [found[p.site.id] for p in participants]
