"""Waves: the split of a cohort, a pure function of the model's structure and of the plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fedloom.clients.messages import Participant, Work
from fedloom.network.bound_method import Bound

BUDGET = {"cpu": 2 << 30, "cuda": 32 << 30}
"""Bytes that a wave may use, by type of device."""
JUDGED_ROWS = 128
"""Rows of a batch of an evaluation."""


def client_bytes(bound: Bound, work: Work, rows: int) -> int:
    """Estimate the bytes that one client of a wave uses in a step.

    These are the leaves, their gradients, two moments and a working copy, and twice the outputs of
    all modules: stored for the backward pass, and their gradients.
    """
    size = bound.structure.dtype.itemsize
    leaves = sum(v.numel() for v in bound.start.values())
    per_row = sum(call.shape[1:].numel() for call in bound.structure.calls)
    width = max(JUDGED_ROWS // 2, rows if work.batch_size == "full" else min(int(work.batch_size), rows))
    return size * (5 * leaves + 2 * width * per_row)


def wave_size(bound: Bound, work: Work, rows: int, device: str) -> int:
    """Return the largest number of clients of a wave."""
    budget = BUDGET.get(device, BUDGET["cpu"])
    return max(1, budget // max(1, client_bytes(bound, work, rows)))


def cut(bound: Bound, people: Sequence[Participant], most: int) -> list[list[Participant]]:
    """Split clients into waves of at most ``most`` clients.

    Clients with different static keys share a wave only if client code finds the keys in a tensor.
    Waves have about equal size. Clients are sorted by training rows, largest first, so that a wave
    narrows as clients run out of rows.
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
