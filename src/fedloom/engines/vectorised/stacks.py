"""What clients keep, stacked ahead: while the device is at work on a round, the host has what the next one begins with laid side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.bound import Bound
from fedloom.work import Participant, Post, leaves_of, memories_of

STACKED_BYTES = 1 << 28
"""Most bytes that are stacked ahead."""


class Stacks:
    """Clients' values along a new axis 0, made when they are asked for unless they were foreseen.

    Which are meant is told by the tensors themselves: where a reply is rejected, or other layers become personal, others are asked for.
    """

    def __init__(self) -> None:
        self._ahead: dict[tuple[int, ...], tuple[Sequence[Tensor], Tensor]] = {}

    def foresee(self, bound: Bound, people: Sequence[Participant], post: Post) -> None:
        """Stacks what clients will begin with if they are sent such a post; what was foreseen before is forgotten."""
        self._ahead = {}
        off = post.off or ()
        # Of an earlier method that hands over, the post may lack leaves and gates of this one, and have others.
        kept = [n for n, spec in bound.specs.items() if spec.kept and n in post.leaves]
        gated = [n for n in kept if n in post.gate and post.off is not None]
        own = {n: leaves_of(people, n, post.leaves[n]) for n in kept if n not in post.gate or n in gated}
        alike = {n: [post.leaves[n]] * len(people) for n in gated}
        lists = [each for n, each in own.items() if n not in gated or n in off]
        lists += [each for values in memories_of(people, bound.memory).values() for each in values.values()]
        lists = [each for each in lists if not same(each)] + [alike[n] for n in gated if n not in off]
        # Gates may turn with the answer: leaves that are personal now, or are not, are stacked the other way too.
        turned = [alike[n] if n in off else own[n] for n in gated]
        for some in ([*lists, *turned], lists):
            if sum([len(each) * each[0].nbytes for each in some]) <= STACKED_BYTES:
                # They are held, since they are told by their addresses.
                self._ahead = {tuple(map(id, each)): (each, _stacked(each)) for each in some}
                return

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """The stack of some values, which is the caller's own."""
        found = self._ahead.pop(tuple(map(id, values)), None)
        return _stacked(values) if found is None else found[1]

    def clear(self) -> None:
        """Forgets what was foreseen."""
        self._ahead = {}


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Values along a new axis 0; of one for all a copy for each, which is less for the host to name."""
    if not same(values):
        return torch.stack(list(values))
    return values[0].expand(len(values), *values[0].shape).clone(memory_format=torch.contiguous_format)


def same(values: Sequence[Tensor]) -> bool:
    """Whether values are all the very same tensor."""
    first = values[0]
    return all(v is first for v in values)
