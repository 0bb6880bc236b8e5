"""Which clients run side by side: a pure function of the model's structure and of the plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fedloom.bound import Bound
from fedloom.work import Participant, Work

BUDGET = {"cpu": 2 << 30, "cuda": 32 << 30}
"""Bytes that a wave may take, by kind of device."""
JUDGED_ROWS = 128


def client_bytes(bound: Bound, work: Work, rows: int) -> int:
    """A rough count of the bytes that one client of a wave takes in a step.

    Leaves, their gradients, two moments and one working copy; outputs of all modules, kept for the backward pass, and
    as much again while it runs.
    """
    size = bound.structure.dtype.itemsize
    leaves = sum(v.numel() for v in bound.start.values())
    per_row = sum(call.shape[1:].numel() for call in bound.structure.calls)
    width = max(JUDGED_ROWS // 2, rows if work.batch_size == "full" else min(int(work.batch_size), rows))
    return size * (5 * leaves + 2 * width * per_row)


def wave_size(bound: Bound, work: Work, rows: int, device: str) -> int:
    """How many clients a wave holds at most."""
    budget = BUDGET.get(device, BUDGET["cpu"])
    return max(1, budget // max(1, client_bytes(bound, work, rows)))


def cut(bound: Bound, people: Sequence[Participant], most: int) -> list[list[Participant]]:
    """Divide clients into waves of at most ``most``, similar in their number of steps and equal in size.

    Clients with different keys share a wave only if the keys are in a tensor. Clients are sorted
    longest first, so that a wave narrows as its clients run out.
    """
    groups: dict[Hashable, list[Participant]] = {}
    for person in people:
        groups.setdefault(person.key if bound.client_key is None else None, []).append(person)
    waves: list[list[Participant]] = []
    for group in groups.values():
        group.sort(key=lambda p: -p.share * len(p.site.train))
        count = -(-len(group) // most)
        size = -(-len(group) // count)
        waves += [group[i : i + size] for i in range(0, len(group), size)]
    return waves
