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


def apart(x: Tensor, anchor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x - anchor``, computed in a type; None for that of the two."""
    return x - anchor if dtype is None else x.to(dtype) - anchor.to(dtype)


def quadratic(
    names: tuple[str, ...],
    leaves: Leaves,
    anchor: Leaves,
    seen: Seen | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``1/2 sum_l ||theta_l - anchor_l||^2`` over the named leaves; with ``seen``, over those shared in this round.

    It is computed in ``dtype``; None for that of the leaves.
    """
    if seen is None or not any(n in seen.gate for n in names):
        value = kernels.half_squares([leaves[n] for n in names], [anchor[n] for n in names], dtype)
        if value is not None:
            return value
    parts = []
    for name in names:
        gap = apart(leaves[name], anchor[name], dtype)
        parts.append(kernels.squared_length(gap if seen is None else seen.gated(name, gap)))
    return 0.5 * torch.stack(parts).sum() if parts else torch.zeros(())


def inner_product(
    owner: str, direction: Callable[[Seen], Leaves], minus: Callable[[Seen], Leaves] | None = None
) -> Term:
    """``sum_l <direction_l - minus_l, theta_l>`` over the leaves of this phase that are shared in this round.

    Its gradient is ``direction - minus``: drift corrections such as SCAFFOLD's are terms of this form.
    """

    def fn(view: View, batch: Batch, seen: Seen) -> Tensor:
        plus, less = direction(seen), None if minus is None else minus(seen)
        names = [n for n in view.trained if n in plus]
        if less is not None and not any(n in seen.gate for n in names):
            value = kernels.inner_products(*([own[n] for n in names] for own in (view.leaves, plus, less)))
            if value is not None:
                return value
        parts = []
        for name in names:
            chosen = plus[name] if less is None else plus[name] - less[name]
            parts.append((seen.gated(name, chosen) * view.leaves[name]).sum())
        return torch.stack(parts).sum() if parts else torch.zeros(())

    return Term(owner=owner, fn=fn)
