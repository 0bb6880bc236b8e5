"""One array with the rows of all clients: each client is a view, so 100,000 clients cost little."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fedloom.data.client_data import ClientData, FederationParts, Scale, class_labels
from fedloom.data.rows import Inputs, Rows, make_rows
from fedloom.data.split import check_share, three_way
from fedloom.errors import UserError
from fedloom.rng import stream

PARTS = ("train", "val", "test")


def group_rows(
    data: Any,
    client: Any,
    *,
    split: Any,
    test: float,
    val: float,
    seed: int,
    name: str,
    classes: Sequence[str] | None,
    scale: Scale | None,
) -> FederationParts:
    """Group rows by client; see `Federation.from_rows`."""
    rows = make_rows(data, "rows")
    owner = np.asarray(client)
    if owner.shape != (len(rows),) or owner.dtype.kind not in "iuU":
        raise UserError(
            f"client: got an array of shape {owner.shape} and type {owner.dtype}; expected whose each of the {len(rows)} rows is."
        )
    names, place = np.unique(owner, return_inverse=True)
    ids = [str(n) for n in names.tolist()]
    part = _given(split, len(rows)) if split is not None else _cut(rows, place, ids, test, val, seed)
    order = np.lexsort((part, place))
    index = torch.from_numpy(order)
    sorted_rows = rows if bool((order[1:] > order[:-1]).all()) else rows.take(index)
    counts = np.bincount(place * 3 + part, minlength=3 * len(ids))
    return FederationParts(
        clients=tuple(_clients(sorted_rows, ids, counts.tolist())),
        name=name,
        classes=None if classes is None else tuple(classes),
        scale=scale,
    )


def _clients(rows: Rows, ids: Sequence[str], sizes: list[int]) -> Iterator[ClientData]:
    """Every client's parts, in order; all pieces are cut at once, which is many times faster than one by one."""
    xs, ys = _pieces(rows.x, sizes), rows.y.split(sizes)
    made = [
        Rows(x, y) if size or i % 3 == 0 else None for i, (x, y, size) in enumerate(zip(xs, ys, sizes, strict=True))
    ]
    for k, key in enumerate(ids):
        train, val, test = made[3 * k : 3 * k + 3]
        assert train is not None
        yield ClientData(key, train, test, val)


def _pieces(x: Inputs, sizes: list[int]) -> Iterable[Inputs]:
    if isinstance(x, torch.Tensor):
        cut: tuple[torch.Tensor, ...] = x.split(sizes)
        return cut
    if isinstance(x, tuple):
        return zip(*(part.split(sizes) for part in x), strict=True)
    return (dict(zip(x, one, strict=True)) for one in zip(*(part.split(sizes) for part in x.values()), strict=True))


def _given(split: Any, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    words = np.asarray(split)
    found = np.full(words.shape, -1, np.int64)
    for p, word in enumerate(PARTS):
        found[words == word] = p
    if words.shape != (count,) or (found < 0).any():
        raise UserError(f"split: expected one of {', '.join(PARTS)} for each of the {count} rows.")
    return found


def _cut(
    rows: Rows, place: np.ndarray[Any, Any], ids: Sequence[str], test: float, val: float, seed: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The part of each row: a cut of every client's rows, by class where there are classes."""
    check_share("test", test)
    check_share("val", val)
    labels = class_labels(rows.y)
    order = np.argsort(place, kind="stable")
    found = np.zeros(len(rows), np.int64)
    for key, mine in zip(ids, np.split(order, np.cumsum(np.bincount(place))[:-1]), strict=True):
        _, off, checked = three_way(labels[mine], test, val, stream(seed, "split", key))
        found[mine[checked]], found[mine[off]] = 1, 2
    return found
