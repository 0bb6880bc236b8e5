"""What clients know of themselves in numbers, which may be laid out before a round begins."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom import rng, transfer
from fedloom.work import Participant, Work

if TYPE_CHECKING:
    from fedloom.client import Layout


class Particulars:
    """Rows, rows per class, whether a client is new, and the key of its noise, of clients side by side.

    Args:
        work: how they work.
        round: the round.
        people: the clients.
        layout: how their tensors are laid out.
        device: where.
        dtype: type of what are no keys.
    """

    def __init__(
        self,
        work: Work,
        round: int,
        people: Sequence[Participant],
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._name = _name(work, round, people)
        self._held = (work, [p.site for p in people])  # the name tells them by their addresses

        def columns(kind: torch.dtype, *rows: Sequence[float]) -> Sequence[Tensor]:
            together = transfer.onto(torch.tensor(rows, dtype=kind), device)
            return [layout.column(row) for row in together.unbind(0)]

        n, first = columns(dtype, [len(p.site.train) for p in people], [p.state.rounds == 0 for p in people])
        (noise,) = columns(torch.int64, [rng.key_of(work.seed, "noise", p.site.id, round) for p in people])
        self.values = {"n": n, "counts": layout.gather([p.site.counts for p in people]), "first": first, "noise": noise}

    def are_of(self, work: Work, round: int, people: Sequence[Participant]) -> bool:
        """Whether these clients are meant, in this order and round."""
        return self._name == _name(work, round, people)


def _name(work: Work, round: int, people: Sequence[Participant]) -> Hashable:
    return id(work), round, tuple((id(p.site), p.state.rounds == 0) for p in people)
