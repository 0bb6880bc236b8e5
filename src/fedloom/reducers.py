"""How the server reduces one entry of the clients' messages.

``mean``: ``sum_k q_k v_k`` with q normalised over the accepted replies; ``ratio``: ``sum_k a_k / sum_k b_k``, element by
element (per-class sums over per-class counts); ``total``, ``maximum``; ``stack``: every reply is kept, and a rule such
as a median may then reduce them. Secure aggregation is possible exactly when no entry is stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedloom import transfer, tree
from fedloom.errors import RunError
from fedloom.types import Leaves, Message


@dataclass(frozen=True, slots=True)
class Reducer:
    """Reducer of one entry; make it with :func:`mean`, :func:`ratio`, :func:`total`, :func:`maximum`, :func:`stack`."""

    kind: Literal["mean", "ratio", "total", "maximum", "stack"]
    weight: str = "n"
    log: bool = False
    rule: Callable[[Leaves], Leaves] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"mean({self.weight})" if self.kind == "mean" else self.kind

    def reduce(self, entry: str, messages: Sequence[Message], rows: Sequence[int]) -> Leaves:
        """Reduces one entry over the accepted messages, in federation order."""
        values = [m[entry] for m in messages]
        if self.kind == "mean":
            return tree.weighted_sum(values, self.weights(messages, rows)) if values[0] else {}
        if self.kind == "stack":
            stacked = {k: together([v[k] for v in values]) for k in values[0]}
            return stacked if self.rule is None else self.rule(stacked)
        if self.kind == "maximum":
            return {k: torch.stack([v[k] for v in values]).amax(0) for k in values[0]}
        sums = tree.weighted_sum(values, [1.0] * len(values))
        if self.kind == "total":
            return sums
        top, bottom = sums["sum"], sums["count"]
        shape = bottom.shape + (1,) * (top.dim() - bottom.dim())
        return {"mean": top / bottom.clamp(min=1).reshape(shape), "count": bottom}

    def weights(self, messages: Sequence[Message], rows: Sequence[int]) -> list[float]:
        """The normalised weights q of a mean: by rows, uniform, or uploaded (as logarithms if ``log``)."""
        if self.weight == "n":
            raw = [float(n) for n in rows]
        elif self.weight == "uniform":
            raw = [1.0] * len(messages)
        else:
            raw = transfer.read([m[self.weight]["weight"].reshape(()) for m in messages])
            if self.log:
                top = max(raw)
                raw = [math.exp(v - top) for v in raw] if math.isfinite(top) else [math.nan]
        total = math.fsum(raw)
        if not total > 0 or not math.isfinite(total):
            raise RunError(f"the weights of the round add up to {total}; expected a positive finite number")
        return [w / total for w in raw]


def together(values: Sequence[Tensor]) -> Tensor:
    """Tensors along a new axis 0: nothing is copied where they are all rows of one tensor, in order."""
    whole = values[0]._base
    if whole is None or whole.requires_grad or whole.shape != (len(values), *values[0].shape):
        return torch.stack(list(values))
    begin, step, lies = whole.data_ptr(), whole.stride(0) * whole.element_size(), (whole.dtype, whole.stride()[1:])
    rows = [begin + i * step for i in range(len(values))]
    same = whole.is_contiguous() and all(v._base is whole and (v.dtype, v.stride()) == lies for v in values)
    return whole if same and [v.data_ptr() for v in values] == rows else torch.stack(list(values))


def mean(weight: str = "n", *, log: bool = False) -> Reducer:
    """Weighted mean; ``weight`` is ``"n"`` (rows), ``"uniform"``, or the name of an uploaded entry ``{"weight": w}``."""
    return Reducer("mean", weight, log)


def ratio() -> Reducer:
    """``sum_k sum / sum_k count``; the entry holds ``sum`` and ``count``; the result ``mean`` and ``count``."""
    return Reducer("ratio")


def total() -> Reducer:
    """Plain sum."""
    return Reducer("total")


def maximum() -> Reducer:
    """Elementwise maximum (counters)."""
    return Reducer("maximum")


def stack(rule: Callable[[Leaves], Leaves] | None = None) -> Reducer:
    """Every client's value, along a new axis 0, in federation order; then ``rule``, if there is one."""
    return Reducer("stack", rule=rule)
