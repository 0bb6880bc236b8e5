"""Arithmetic on dictionaries of tensors. Nothing here but :func:`overwrite` changes its arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedloom import transfer
from fedloom.torch_internals import base_of_view, is_wrapped
from fedloom.types import Leaves

T = TypeVar("T")


def sub(a: Leaves, b: Leaves) -> Leaves:
    """``a - b`` on the leaves of ``a``."""
    return {k: v - b[k] for k, v in a.items()}


def add(a: Leaves, b: Leaves) -> Leaves:
    """``a + b``, where leaves that ``b`` lacks stay as they are."""
    return {k: v + b[k] if k in b else v for k, v in a.items()}


def scale(a: Leaves, factor: float | Tensor) -> Leaves:
    """``factor * a``."""
    return {k: v * factor for k, v in a.items()}


def zeros_like(a: Leaves) -> Leaves:
    """Zeros in the shape of ``a``."""
    return {k: torch.zeros_like(v) for k, v in a.items()}


def clone(a: Leaves) -> Leaves:
    """A deep copy, cut from any graph."""
    return {k: v.detach().clone() for k, v in a.items()}


def copies(values: Sequence[Tensor]) -> list[Tensor]:
    """Copies that share memory with nobody and lie as what they are copied from, cut from any graph."""
    # The larger of a number and itself: one operation makes dozens of tensors, which would otherwise be made one by one.
    with torch.no_grad():
        return _of_alike(lambda some: torch._foreach_maximum(some, some), values)


def rows(values: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Copies of the rows of tensors, which share memory with nobody, cut from any graph.

    Example:
        >>> (first, second), = rows([torch.eye(2)])
        >>> second, second.untyped_storage().nbytes()
        (tensor([0., 1.]), 8)
    """

    def apart(some: list[Tensor]) -> list[Sequence[Tensor]]:
        views = [value.unbind(0) for value in some]
        flat = list(chain.from_iterable(views))
        made = iter(torch._foreach_maximum(flat, flat))
        return [list(islice(made, len(own))) for own in views]

    with torch.no_grad():
        return _of_alike(apart, values)


def _of_alike(op: Callable[[list[Tensor]], Sequence[T]], values: Sequence[Tensor]) -> list[T]:
    """An operation on a list of tensors, called once for each group of one type and layout."""
    results: dict[int, T] = {}
    for places in alike(values):
        results |= zip(places, op([values[i] for i in places]), strict=True)
    return [results[i] for i in range(len(values))]


def alike(values: Sequence[Tensor]) -> Collection[list[int]]:
    """Places of tensors of one type that all are, or all are not, contiguous: torch treats mixed lists one by one.

    Example:
        >>> list(alike([torch.ones(2), torch.ones(2, 2).T, torch.ones(3)]))
        [[0, 2], [1]]
    """
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault((value.dtype, value.is_contiguous()), []).append(i)
    return groups.values()


def by_list(
    whole: Callable[..., Sequence[Tensor]], one: Callable[..., Tensor], *lists: list[Tensor]
) -> Sequence[Tensor]:
    """An operation on lists of tensors: ``whole`` does it at once, or ``one`` tensor by tensor under ``vmap``, which knows no lists.

    Example:
        >>> by_list(torch._foreach_sub, torch.sub, [torch.ones(2)], [torch.tensor(3.0)])
        [tensor([-2., -2.])]
    """
    if any(is_wrapped(t) for some in lists for t in some):
        return [one(*each) for each in zip(*lists, strict=True)]
    return list(whole(*lists)) if lists[0] else []


def overwrite(to: Iterable[Tensor], source: Iterable[Tensor]) -> None:
    """Copies tensor by tensor into ``to``, in one operation those that are of one type and lie alike.

    One pair in a list that does not, such as a value that all clients share, would have all of them copied one by one.
    """
    kinds: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for mine, other in zip(to, source, strict=True):
        alike = (mine.is_contiguous() and other.is_contiguous()) or mine.stride() == other.stride()
        here, there = kinds.setdefault((mine.dtype, alike), ([], []))
        here.append(mine)
        there.append(other)
    with torch.no_grad():
        for here, there in kinds.values():
            torch._foreach_copy_(here, there)


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
    """``sum_k weights[k] * rows[k]`` of lists of tensors, summed in the order given; weights may be a vector on the device.

    The order is the federation's, so that the sum is the same whatever engine made the replies.
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


def map_nested(fn: Callable[[Tensor], Tensor], tree: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Leaves]:
    """Applies ``fn`` to every tensor of a dictionary of dictionaries."""
    return {owner: {k: fn(v) for k, v in leaves.items()} for owner, leaves in tree.items()}


def spread(value: Any, path: tuple[Hashable, ...] = ()) -> dict[tuple[Hashable, ...], Tensor]:
    """The tensors of nested dictionaries, lists and tuples by their paths, in order.

    Example:
        >>> list(spread({"a": [torch.zeros(1)], "b": {}, "c": torch.zeros(2)}))
        [('a', 0), ('c',)]
    """
    if isinstance(value, Tensor):
        return {path: value}
    found: dict[tuple[Hashable, ...], Tensor] = {}
    _spread(value, path, found)
    return found


def _spread(value: Any, path: tuple[Hashable, ...], found: dict[tuple[Hashable, ...], Tensor]) -> None:
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(part, Tensor):
            found[(*path, key)] = part
        elif part:
            _spread(part, (*path, key), found)


def flat(a: Leaves) -> Tensor:
    """All leaves as one vector."""
    return torch.cat([v.reshape(-1) for v in a.values()]) if a else torch.zeros(0)


def size_in_bytes(a: Leaves) -> int:
    """Bytes of all tensors."""
    return sum([v.nbytes for v in a.values()])


def finite_indicator(values: Iterable[Tensor]) -> Tensor:
    """A number in float64, on the device, that is finite only if all elements of the floating tensors are.

    It is the sum of their norms, which torch computes ten times as fast as it looks for single elements. It overflows if
    elements of float32 are beyond 1e19: :func:`all_finite` is exact. A row of a stacked tensor is looked at through the
    stacked tensor, once for all clients.
    """
    floats = [v for v in values if v.is_floating_point() and v.numel()]
    wholes = {id(w): w for v in floats for base in [base_of_view(v)] for w in [v if base is None else base]}
    tensors = list(wholes.values())
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    groups = [torch._foreach_norm([tensors[i] for i in places], 2) for places in alike(tensors)]
    return torch.stack([torch.stack(list(norms)).double().sum() for norms in groups]).sum()


def all_finite(a: Leaves) -> bool:
    """Whether no floating leaf holds a NaN or an infinity. Waits for the device."""
    flags = [v.isfinite().all() for v in a.values() if v.is_floating_point()]
    return not flags or bool(torch.stack(flags).all())


def first_non_finite(a: Leaves) -> str | None:
    """The first leaf that holds a NaN or an infinity; None where all are finite."""
    return None if all_finite(a) else next(name for name, value in a.items() if not all_finite({name: value}))


def zero_names(gates: Leaves) -> list[str]:
    """Names of the tensors of one element that are zero. Waits for the device if they are there."""
    values = list(gates.values())
    numbers = [v.item() for v in values] if all(v.is_cpu for v in values) else transfer.read_scalars(values)
    return [name for name, number in zip(gates, numbers, strict=True) if not number]
