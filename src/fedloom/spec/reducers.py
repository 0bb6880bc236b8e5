"""Reducers: how the server combines one entry of the clients' messages.

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

from fedloom import devices, tensors
from fedloom.devices import on_host
from fedloom.errors import RunError
from fedloom.tensors import Leaves, Message
from fedloom.torch_internals import base_of_view


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
        """Reduce one entry over the accepted messages, in federation order."""
        return reduce_entries({entry: (entry, self)}, messages, rows)[entry]

    @property
    def sum_key(self) -> Hashable:
        """Key of the weights of the reducer's sum; entries with equal keys are summed together. None if not a sum."""
        if self.kind == "mean":
            return self.weight, self.log
        return "ones" if self.kind in ("ratio", "total") else None

    def sum_weights(
        self, messages: Sequence[Message], rows: Sequence[int], entry: str, *, read_weights: bool = False
    ) -> list[float] | Tensor:
        """Return the weights of an entry's sum. Uploaded weights stay on the device, so that the host does not wait.

        Weights that do not add up to a positive finite number are an error on the host, and NaN on the device.
        """
        if self.kind != "mean":
            return [1.0] * len(messages)
        if self.weight in ("n", "uniform"):
            return self.weights(messages, rows)
        uploaded = [m[self.weight]["weight"] for m in messages]
        half_precision = any(v.element_size() < 4 for v in messages[0][entry].values())
        if read_weights or on_host(uploaded[0]) or half_precision:
            return self.weights(messages, rows)
        values = _as_vector(uploaded)
        if self.log:
            values = (values - values.amax()).exp()
        total = values.sum()
        return values / torch.where(total > 0, total, math.nan)

    def finish(self, values: Leaves) -> Leaves:
        """Return the reduced entry from its sums."""
        if self.kind != "ratio":
            return values
        top, bottom = values["sum"], values["count"]
        shape = bottom.shape + (1,) * (top.dim() - bottom.dim())
        return {"mean": top / bottom.clamp(min=1).reshape(shape), "count": bottom}

    def weights(self, messages: Sequence[Message], rows: Sequence[int]) -> list[float]:
        """Return the normalised weights q of a mean: by rows, uniform, or uploaded (as logarithms if ``log``)."""
        if self.weight == "n":
            raw = [float(n) for n in rows]
        elif self.weight == "uniform":
            raw = [1.0] * len(messages)
        else:
            raw = devices.read_scalars([m[self.weight]["weight"] for m in messages])
            if self.log:
                top = max(raw)
                raw = [math.exp(v - top) for v in raw] if math.isfinite(top) else [math.nan]
        total = math.fsum(raw)
        if not total > 0 or not math.isfinite(total):
            raise RunError(f"the weights of the round add up to {total}; expected a positive finite number")
        return [w / total for w in raw]


def reduce_entries(
    entries: Mapping[str, tuple[str, Reducer]],
    messages: Sequence[Message],
    rows: Sequence[int],
    *,
    read_weights: bool = False,
) -> Message:
    """Reduce entries over the accepted messages, in federation order.

    Entries whose sums have the same weights are summed together: one operation per client, not one per entry.

    Args:
        entries: the uploaded entry and its reducer, by the name of the reduced entry.
        messages: the clients' messages.
        rows: the clients' training rows.
        read_weights: whether uploaded weights are read and checked on the host.

    Returns:
        The reduced entries, in the order of ``entries``.
    """
    reduced: Message = {}
    groups: dict[Hashable, list[str]] = {}
    for name, (entry, reducer) in entries.items():
        values = [m[entry] for m in messages]
        first = next(iter(values[0].values()), None)
        reduced[name] = {}  # fixes the order of the result
        if first is None:
            continue
        if reducer.sum_key == "ones" and first.is_floating_point():
            reduced[name] = reducer.finish({k: stack_or_view([v[k] for v in values]).sum(0) for k in values[0]})
        elif reducer.sum_key is not None:
            groups.setdefault((reducer.sum_key, first.dtype), []).append(name)
        elif reducer.kind == "maximum":
            reduced[name] = {k: stack_or_view([v[k] for v in values]).amax(0) for k in values[0]}
        else:
            stacked = {k: stack_or_view([v[k] for v in values]) for k in values[0]}
            reduced[name] = stacked if reducer.rule is None else reducer.rule(stacked)
    for names in groups.values():
        entry, reducer = entries[names[0]]
        weights = reducer.sum_weights(messages, rows, entry, read_weights=read_weights)
        keys = [(entries[name][0], k) for name in names for k in messages[0][entries[name][0]]]
        values_of_clients = [[m[entry][k] for entry, k in keys] for m in messages]
        sums = iter(tensors.weighted_sums(values_of_clients, weights))
        for name in names:
            entry, reducer = entries[name]
            reduced[name] = reducer.finish({k: next(sums) for k in messages[0][entry]})
    return reduced


def _as_vector(values: Sequence[Tensor]) -> Tensor:
    """Return tensors of one element, of any shapes, as a vector in float64."""
    same_shape = len({v.shape for v in values}) == 1
    return stack_or_view(values if same_shape else [v.reshape(()) for v in values]).reshape(-1).double()


def stack_or_view(values: Sequence[Tensor]) -> Tensor:
    """Stack K tensors of shape S into a tensor of shape ``(K, *S)``.

    If they are the rows of one contiguous tensor, in order, return that tensor, not a copy.
    """
    base = _common_base(values)
    return torch.stack(list(values)) if base is None else base


def _common_base(values: Sequence[Tensor]) -> Tensor | None:
    """Return the contiguous tensor whose rows are exactly these tensors, in order; None if there is none."""
    base = base_of_view(values[0])
    if base is None or base.requires_grad or base.shape != (len(values), *values[0].shape):
        return None
    start, step, layout = base.data_ptr(), base.stride(0) * base.element_size(), (base.dtype, base.stride()[1:])
    rows = [start + i * step for i in range(len(values))]
    same = base.is_contiguous() and all(base_of_view(v) is base and (v.dtype, v.stride()) == layout for v in values)
    return base if same and [v.data_ptr() for v in values] == rows else None


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
