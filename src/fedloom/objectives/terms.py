"""The terms that many methods share. Each formula is written here once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom import kernels
from fedloom.slots import Term
from fedloom.types import Batch, Leaves, Seen
from fedloom.view import View


def data_term() -> Term:
    """The task's own loss on the batch, in every phase and copy."""
    return Term(owner="task", fn=lambda view, batch, seen: view.loss(), role="data", copy=None)


def quadratic(names: tuple[str, ...], leaves: Leaves, anchor: Leaves, seen: Seen | None = None) -> Tensor:
    """``1/2 sum_l ||theta_l - anchor_l||^2`` over the named leaves; with ``seen``, over those shared in this round."""
    parts = []
    for name in names:
        gap = leaves[name] - anchor[name]
        parts.append(kernels.squared_length(gap if seen is None else seen.gated(name, gap)))
    return 0.5 * torch.stack(parts).sum() if parts else torch.zeros(())


def inner_product(owner: str, direction: Callable[[Seen], Leaves]) -> Term:
    """``sum_l <direction_l, theta_l>`` over the leaves of this phase that are shared in this round.

    Its gradient is ``direction``: drift corrections such as SCAFFOLD's are terms of this form.
    """

    def fn(view: View, batch: Batch, seen: Seen) -> Tensor:
        chosen = direction(seen)
        parts = [(seen.gated(n, chosen[n]) * view.leaves[n]).sum() for n in view.trained if n in chosen]
        return torch.stack(parts).sum() if parts else torch.zeros(())

    return Term(owner=owner, fn=fn)
