"""The terms that many methods share. Each formula is written here once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedloom import ops
from fedloom.ops import operator
from fedloom.spec.parts import Term
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves


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
        return half_squared_distance([leaves[n] for n in names], [anchor[n] for n in names], dtype)
    return _half_squares([seen.gated(n, apart(leaves[n], anchor[n], dtype)) for n in names])


@operator
def half_squared_distance(x: Sequence[Tensor], anchor: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return ``1/2 sum_l ||x_l - anchor_l||^2``, computed in a dtype; None for that of the leaves."""
    return _half_squares([apart(v, a, dtype) for v, a in zip(x, anchor, strict=True)])


def _half_squares(gaps: Sequence[Tensor]) -> Tensor:
    return 0.5 * torch.stack([ops.squared_norm(gap) for gap in gaps]).sum() if gaps else torch.zeros(())


@operator
def difference_inner_product(x: Sequence[Tensor], plus: Sequence[Tensor], minus: Sequence[Tensor]) -> Tensor:
    """Return ``sum_l <plus_l - minus_l, x_l>``."""
    return _inner_products([p - m for p, m in zip(plus, minus, strict=True)], x)


def _inner_products(directions: Sequence[Tensor], x: Sequence[Tensor]) -> Tensor:
    parts = [(d * v).sum() for d, v in zip(directions, x, strict=True)]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def inner_product(
    owner: str, direction: Callable[[Seen], Leaves], minus: Callable[[Seen], Leaves] | None = None
) -> Term:
    """``sum_l <direction_l - minus_l, theta_l>`` over the leaves of this phase that are shared in this round.

    Its gradient is ``direction - minus``: drift corrections such as SCAFFOLD's are terms of this form.
    """

    def fn(view: View, batch: Batch, seen: Seen) -> Tensor:
        plus, less = direction(seen), None if minus is None else minus(seen)
        names = [n for n in view.trained if n in plus]
        own = [view.leaves[n] for n in names]
        if less is not None and not any(n in seen.gate for n in names):
            return difference_inner_product(own, [plus[n] for n in names], [less[n] for n in names])
        chosen = [plus[n] if less is None else plus[n] - less[n] for n in names]
        return _inner_products([seen.gated(n, d) for n, d in zip(names, chosen, strict=True)], own)

    return Term(owner=owner, fn=fn)
