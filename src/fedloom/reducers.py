"""How the server reduces one entry of the clients' messages.

``mean``: ``sum_k q_k v_k`` with q normalised over the accepted replies; ``ratio``: ``sum_k a_k / sum_k b_k``, element by
element (per-class sums over per-class counts); ``total``, ``maximum``; ``stack``: every reply is kept, and a rule such
as a median may then reduce them. Secure aggregation is possible exactly when no entry is stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedloom import transfer, tree
from fedloom.errors import RunError
from fedloom.torch_internals import base_of_view
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
        return reduced({entry: (entry, self)}, messages, rows)[entry]

    @property
    def sums(self) -> Hashable:
        """What entries have in common whose values are added up with the same weights; None where nothing is added up."""
        if self.kind == "mean":
            return self.weight, self.log
        return "ones" if self.kind in ("ratio", "total") else None

    def shares(
        self, messages: Sequence[Message], rows: Sequence[int], entry: str, *, read_weights: bool = False
    ) -> list[float] | Tensor:
        """The weights of an entry's sum. Uploaded ones stay on the device, so that the host does not wait for them.

        Weights that do not add up to a positive finite number are an error on the host, and NaN on the device.
        """
        if self.kind != "mean":
            return [1.0] * len(messages)
        if self.weight in ("n", "uniform"):
            return self.weights(messages, rows)
        raw = [m[self.weight]["weight"] for m in messages]
        if read_weights or _on_host(raw[0]) or any(v.element_size() < 4 for v in messages[0][entry].values()):
            return self.weights(messages, rows)
        values = _uploaded(raw)
        if self.log:
            values = (values - values.amax()).exp()
        total = values.sum()
        return values / torch.where(total > 0, total, math.nan)

    def finished(self, values: Leaves) -> Leaves:
        """What is made of the sums of an entry."""
        if self.kind != "ratio":
            return values
        top, bottom = values["sum"], values["count"]
        shape = bottom.shape + (1,) * (top.dim() - bottom.dim())
        return {"mean": top / bottom.clamp(min=1).reshape(shape), "count": bottom}

    def weights(self, messages: Sequence[Message], rows: Sequence[int]) -> list[float]:
        """The normalised weights q of a mean: by rows, uniform, or uploaded (as logarithms if ``log``)."""
        if self.weight == "n":
            raw = [float(n) for n in rows]
        elif self.weight == "uniform":
            raw = [1.0] * len(messages)
        else:
            raw = transfer.read_scalars([m[self.weight]["weight"] for m in messages])
            if self.log:
                top = max(raw)
                raw = [math.exp(v - top) for v in raw] if math.isfinite(top) else [math.nan]
        total = math.fsum(raw)
        if not total > 0 or not math.isfinite(total):
            raise RunError(f"the weights of the round add up to {total}; expected a positive finite number")
        return [w / total for w in raw]


def reduced(
    wanted: Mapping[str, tuple[str, Reducer]],
    messages: Sequence[Message],
    rows: Sequence[int],
    *,
    read_weights: bool = False,
) -> Message:
    """Reduces entries over the accepted messages, in federation order.

    What is added up with the same weights is added up together: an operation for each client, not one for each of its entries.

    Args:
        wanted: the entry and its reducer, by the name of what is made of it.
        messages: of the clients.
        rows: their training rows.
        read_weights: whether uploaded weights are read and checked on the host.
    """
    made: Message = {}
    alike: dict[Hashable, list[str]] = {}
    for name, (entry, reducer) in wanted.items():
        values = [m[entry] for m in messages]
        first = next(iter(values[0].values()), None)
        made[name] = {}  # in order, whatever is made first
        if first is None:
            continue
        if reducer.sums == "ones" and first.is_floating_point():  # few leaves, as a rule
            made[name] = reducer.finished({k: together([v[k] for v in values]).sum(0) for k in values[0]})
        elif reducer.sums is not None:
            alike.setdefault((reducer.sums, first.dtype), []).append(name)
        elif reducer.kind == "maximum":
            made[name] = {k: together([v[k] for v in values]).amax(0) for k in values[0]}
        else:
            stacked = {k: together([v[k] for v in values]) for k in values[0]}
            made[name] = stacked if reducer.rule is None else reducer.rule(stacked)
    for names in alike.values():
        entry, reducer = wanted[names[0]]
        shares = reducer.shares(messages, rows, entry, read_weights=read_weights)
        places = [(wanted[name][0], k) for name in names for k in messages[0][wanted[name][0]]]
        rows_of = [[m[e][k] for e, k in places] for m in messages]
        sums = iter(tree.weighted_sums(rows_of, shares))
        for name in names:
            entry, reducer = wanted[name]
            made[name] = reducer.finished({k: next(sums) for k in messages[0][entry]})
    return made


def _uploaded(values: Sequence[Tensor]) -> Tensor:
    """Numbers that clients sent, of any shape with one element, as a vector."""
    alike = len({v.shape for v in values}) == 1
    return together(values if alike else [v.reshape(()) for v in values]).reshape(-1).double()


def _on_host(value: Tensor) -> bool:
    """Whether the host can read a value without waiting."""
    return value.is_cpu


def together(values: Sequence[Tensor]) -> Tensor:
    """Tensors along a new axis 0: nothing is copied where they are all rows of one tensor, in order."""
    whole = _whole(values)
    return torch.stack(list(values)) if whole is None else whole


def _whole(values: Sequence[Tensor]) -> Tensor | None:
    """The tensor without gaps of which these are the rows, in order; None where there is none."""
    whole = base_of_view(values[0])
    if whole is None or whole.requires_grad or whole.shape != (len(values), *values[0].shape):
        return None
    begin, step, lies = whole.data_ptr(), whole.stride(0) * whole.element_size(), (whole.dtype, whole.stride()[1:])
    rows = [begin + i * step for i in range(len(values))]
    same = whole.is_contiguous() and all(base_of_view(v) is whole and (v.dtype, v.stride()) == lies for v in values)
    return whole if same and [v.data_ptr() for v in values] == rows else None


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
