"""Dictionaries of named tensors: the types of leaves, messages and memory, and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedloom import devices
from fedloom.torch_internals import base_of_view, is_wrapped

Leaves = dict[str, Tensor]
"""Named tensors of a model: parameters, buffers, and the extra leaves that plug-ins bring."""

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model takes: one tensor, a tuple (``model(*x)``) or a dictionary (``model(**x)``)."""

Memory = dict[str, dict[str, Tensor]]
"""Named tensors by owner: the plug-in or recipe that keeps them."""

Message = dict[str, Leaves]
"""What leaves a client: named entries, each a dictionary of tensors."""

Structure = tuple[type, Any, tuple[Any, ...]] | None
"""The structure of a nested value without its tensors; it can be hashed."""

Summary = tuple[Tensor, Tensor]
"""Of a feature, per row, means over positions: of its channels, and of ``sum_c p_c log p_c``, p the softmax over them."""


T = TypeVar("T")


def flatten(value: Any) -> list[Tensor]:
    """Return the tensors of nested dictionaries, lists and tuples, in order.

    Example:
        >>> flatten({"a": [torch.tensor(1)], "b": (torch.tensor(2), {})})
        [tensor(1), tensor(2)]
    """
    flat: list[Tensor] = []
    _add_tensors(value, flat)
    return flat


def _add_tensors(value: Any, flat: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        flat.append(value)
        return
    for part in value.values() if isinstance(value, dict) else value:
        _add_tensors(part, flat)


def structure_of(value: Any) -> Structure:
    """Return the keys and lengths of nested dictionaries, lists and tuples; None for a tensor."""
    if isinstance(value, Tensor):
        return None
    kind = type(value)
    if kind is dict:
        return kind, tuple(value), tuple([structure_of(v) for v in value.values()])
    return kind, len(value), tuple([structure_of(v) for v in value])


def unflatten(structure: Structure, flat: Iterable[Tensor]) -> Any:
    """Nest tensors again: the inverse of :func:`flatten` and :func:`structure_of`."""
    return _nest(structure, iter(flat))


def _nest(structure: Structure, flat: Iterator[Tensor]) -> Any:
    if structure is None:
        return next(flat)
    kind, keys, parts = structure
    values = [_nest(part, flat) for part in parts]
    return dict(zip(keys, values, strict=True)) if kind is dict else kind(values)


def map_nested(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to each tensor of nested dictionaries, lists and tuples.

    Example:
        >>> map_nested(torch.neg, {"a": [torch.tensor(1)], "b": (torch.tensor(2),)})
        {'a': [tensor(-1)], 'b': (tensor(-2),)}
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {k: map_nested(fn, v) for k, v in value.items()}
    return type(value)([map_nested(fn, v) for v in value])


def sub(a: Leaves, b: Leaves) -> Leaves:
    """``a - b`` on the leaves of ``a``."""
    return {k: v - b[k] for k, v in a.items()}


def add(a: Leaves, b: Leaves) -> Leaves:
    """``a + b``; leaves that ``b`` lacks do not change."""
    return {k: v + b[k] if k in b else v for k, v in a.items()}


def scale(a: Leaves, factor: float | Tensor) -> Leaves:
    """``factor * a``."""
    return {k: v * factor for k, v in a.items()}


def zeros_like(a: Leaves) -> Leaves:
    """Zeros in the shape of ``a``."""
    return {k: torch.zeros_like(v) for k, v in a.items()}


def clone(a: Leaves) -> Leaves:
    """Return a deep copy, detached from the graph."""
    return {k: v.detach().clone() for k, v in a.items()}


def copies(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors with their strides, detached from the graph."""
    # max(x, x) copies all tensors of a list in one operation; torch has no such copy.
    with torch.no_grad():
        return _call_by_group(lambda tensors: torch._foreach_maximum(tensors, tensors), values)


def rows(values: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Copy each row of each tensor into memory of its own, detached from the graph.

    Example:
        >>> (first, second), = rows([torch.eye(2)])
        >>> second, second.untyped_storage().nbytes()
        (tensor([0., 1.]), 8)
    """

    def copy_rows(tensors: list[Tensor]) -> list[Sequence[Tensor]]:
        views = [value.unbind(0) for value in tensors]
        flat_views = list(chain.from_iterable(views))
        rows_of_all = iter(torch._foreach_maximum(flat_views, flat_views))
        return [list(islice(rows_of_all, len(view))) for view in views]

    with torch.no_grad():
        return _call_by_group(copy_rows, values)


def _call_by_group(op: Callable[[list[Tensor]], Sequence[T]], values: Sequence[Tensor]) -> list[T]:
    """Call an operation on lists of tensors once for each group of :func:`group_by_layout`."""
    results: dict[int, T] = {}
    for places in group_by_layout(values):
        results |= zip(places, op([values[i] for i in places]), strict=True)
    return [results[i] for i in range(len(values))]


def group_by_layout(values: Sequence[Tensor]) -> Collection[list[int]]:
    """Group the indices of tensors by type and contiguity. In mixed lists torch handles the tensors one by one.

    Example:
        >>> list(group_by_layout([torch.ones(2), torch.ones(2, 2).T, torch.ones(3)]))
        [[0, 2], [1]]
    """
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault((value.dtype, value.is_contiguous()), []).append(i)
    return groups.values()


def by_list(
    whole: Callable[..., Sequence[Tensor]], one: Callable[..., Tensor], *lists: list[Tensor]
) -> Sequence[Tensor]:
    """Call ``whole`` on lists of tensors, or under ``vmap``, which does not support lists, ``one`` tensor by tensor.

    Example:
        >>> by_list(torch._foreach_sub, torch.sub, [torch.ones(2)], [torch.tensor(3.0)])
        [tensor([-2., -2.])]
    """
    if any(is_wrapped(t) for some in lists for t in some):
        return [one(*each) for each in zip(*lists, strict=True)]
    return list(whole(*lists)) if lists[0] else []


def overwrite(to: Iterable[Tensor], source: Iterable[Tensor]) -> None:
    """Copy each tensor of ``source`` into its counterpart in ``to``, with one operation per type and layout.

    Pairs with different strides have a group of their own: in a mixed list torch copies all tensors one by one.
    """
    groups: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, value in zip(to, source, strict=True):
        same = (target.is_contiguous() and value.is_contiguous()) or target.stride() == value.stride()
        targets, values = groups.setdefault((target.dtype, same), ([], []))
        targets.append(target)
        values.append(value)
    with torch.no_grad():
        for targets, values in groups.values():
            torch._foreach_copy_(targets, values)


def select(a: Leaves, names: Iterable[str]) -> Leaves:
    """The named leaves, in the order of ``names``."""
    return {k: a[k] for k in names}


def dot(a: Leaves, b: Leaves) -> Tensor:
    """Inner product over the leaves of ``a``."""
    parts = [(v * b[k]).sum() for k, v in a.items()]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def square_norm(a: Leaves) -> Tensor:
    """Sum of squares over all leaves."""
    return dot(a, a)


def weighted_sum(trees: Sequence[Leaves], weights: Sequence[float]) -> Leaves:
    """``sum_k weights[k] * trees[k]``, summed in the order given."""
    names = list(trees[0])
    return dict(zip(names, weighted_sums([[t[k] for k in names] for t in trees], weights), strict=True))


def weighted_sums(rows: Sequence[list[Tensor]], weights: Sequence[float] | Tensor) -> Sequence[Tensor]:
    """``sum_k weights[k] * rows[k]``: a weighted sum of lists of tensors.

    The order of summation is that of ``rows``, the federation's, so that all engines give the same sum.

    Args:
        rows: K lists of tensors, with equal shapes from list to list.
        weights: K numbers, or a vector on the device.
    """
    if not isinstance(weights, Tensor):
        total = torch._foreach_mul(rows[0], weights[0])
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            torch._foreach_add_(total, row, alpha=weight)
        return total
    kinds = {value.dtype for value in rows[0]}
    first, *others = weights.to(kinds.pop() if len(kinds) == 1 else weights.dtype).unbind()
    total = torch._foreach_mul(rows[0], first)
    for row, share in zip(rows[1:], others, strict=True):
        torch._foreach_add_(total, torch._foreach_mul(row, share))
    return total


def flat(a: Leaves) -> Tensor:
    """All leaves as one vector."""
    return torch.cat([v.reshape(-1) for v in a.values()]) if a else torch.zeros(0)


def size_in_bytes(a: Leaves) -> int:
    """Bytes of all tensors."""
    return sum([v.nbytes for v in a.values()])


def finite_indicator(values: Iterable[Tensor]) -> Tensor:
    """Return a number in float64, on the device, that is finite only if all elements of the floating tensors are.

    It is the sum of their norms, which is ten times as fast as a test of single elements. It overflows if elements of
    float32 are beyond 1e19; :func:`all_finite` is exact.
    """
    # Rows of a stacked tensor count once, as the stacked tensor: one norm for all clients.
    floats = [v for v in values if v.is_floating_point() and v.numel()]
    bases = [v if (base := base_of_view(v)) is None else base for v in floats]
    tensors = list({id(base): base for base in bases}.values())
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    groups = [torch._foreach_norm([tensors[i] for i in places], 2) for places in group_by_layout(tensors)]
    return torch.stack([torch.stack(list(norms)).double().sum() for norms in groups]).sum()


def all_finite(a: Leaves) -> bool:
    """Return whether no floating leaf holds a NaN or an infinity. Waits for the device."""
    flags = [v.isfinite().all() for v in a.values() if v.is_floating_point()]
    return not flags or bool(torch.stack(flags).all())


def first_non_finite(a: Leaves) -> str | None:
    """Return the name of the first leaf that holds a NaN or an infinity; None if all are finite."""
    return None if all_finite(a) else next(name for name, value in a.items() if not all_finite({name: value}))


def zero_names(gates: Leaves) -> list[str]:
    """Return the names of the tensors of one element that are zero. Waits for the device if they are on it."""
    numbers = devices.read_scalars(list(gates.values()))
    return [name for name, number in zip(gates, numbers, strict=True) if not number]
