"""Torch datasets read into arrays."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedloom import rng
from fedloom.errors import UserError

LABEL_KEYS = ("label", "labels", "y", "target", "targets")
_PROBES = 3


@contextmanager
def _own_generators() -> Iterator[None]:
    """Random transforms draw from seeded generators, and the global ones are as before afterwards."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with rng.torch_generator(0):
            np.random.seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def read_clients(clients: Iterable[Any], ids: Sequence[object] | None) -> list[tuple[Any, ...]]:
    """For each client its datasets as (x, y) of arrays, for `Federation.from_arrays`."""
    entries = list(clients)
    names = [str(i) for i in (range(len(entries)) if ids is None else ids)]
    made = []
    with _own_generators():
        for name, entry in zip(names, entries, strict=False):
            if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3) or entry[0] is None:
                raise UserError(
                    f"client {name!r}: expected (train_set, test_set); write (train_set, None) without test rows."
                )
            parts = zip(entry, ("train", "test", "val"), strict=False)
            made.append(
                tuple(None if data is None else _read(data, f"client {name!r}, {part}") for data, part in parts)
            )
    return made


def _read(data: Any, what: str) -> tuple[Any, Any]:
    if isinstance(data, TensorDataset) and len(data.tensors) >= 2:
        *inputs, y = data.tensors
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), y
    pairs = [_pair(item, what) for item in _items(data, what)]
    if not pairs:
        raise UserError(f"{what}: the dataset has no items; expected at least one.")
    _warn_if_random(data, what)
    first = pairs[0][0]
    x: Any
    if isinstance(first, dict):
        x = {key: _stack([p[0][key] for p in pairs], f"{what}: x[{key!r}]") for key in first}
    elif isinstance(first, tuple):
        x = tuple(_stack([p[0][i] for p in pairs], f"{what}: x[{i}]") for i in range(len(first)))
    else:
        x = _stack([p[0] for p in pairs], f"{what}: x")
    return x, _stack([p[1] for p in pairs], f"{what}: y")


def _items(data: Any, what: str) -> Iterator[Any]:
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return (data[i] for i in range(len(data)))
    if hasattr(data, "__iter__"):
        return iter(data)
    raise UserError(f"{what}: expected a torch Dataset, got a {type(data).__name__}.")


def _pair(item: Any, what: str) -> tuple[Any, Any]:
    """An item as (x, y): a pair, several inputs and a label, or a dictionary with a label."""
    if isinstance(item, dict):
        for key in LABEL_KEYS:
            if key in item:
                named = {name: _tensor(value, what) for name, value in item.items() if name != key}
                return named, _tensor(item[key], what)
        raise UserError(
            f"{what}: items have the keys {', '.join(map(str, item))}; expected one of {', '.join(LABEL_KEYS)}."
        )
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise UserError(f"{what}: items are of type {type(item).__name__}; expected (x, y).")
    *inputs, y = item
    if len(inputs) > 1:
        return tuple(_tensor(part, what) for part in inputs), _tensor(y, what)
    x = inputs[0]
    if isinstance(x, dict):
        return {key: _tensor(part, what) for key, part in x.items()}, _tensor(y, what)
    if isinstance(x, tuple):
        return tuple(_tensor(part, what) for part in x), _tensor(y, what)
    return _tensor(x, what), _tensor(y, what)


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if hasattr(value, "getbands"):
        # A Pillow image: H, W or H, W, C in bytes becomes C, H, W.
        picture = torch.from_numpy(np.array(value))
        return picture.unsqueeze(0) if picture.dim() == 2 else picture.permute(2, 0, 1)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{what}: items hold {array.dtype} values; expected numbers, arrays, tensors or images.")
    return torch.from_numpy(np.array(array))


def _stack(parts: list[Tensor], what: str) -> Tensor:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        shown = ", ".join(map(str, sorted(shapes)[:4]))
        raise UserError(
            f"{what}: items have different shapes ({shown}); expected one. Resize or pad them in the dataset."
        )
    return torch.stack(parts)


def _warn_if_random(data: Any, what: str) -> None:
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return
    for i in range(min(_PROBES, len(data))):
        if not _same(data[i], data[i]):
            warnings.warn(
                f"{what}: reading an item twice gives different values. Every item is read once, so random "
                "transforms "
                "are frozen; take them out of the dataset and pass augment= to the run instead.",
                stacklevel=5,
            )
            return


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return all(_same(p, q) for p, q in zip(a, b, strict=True))
    one, two = np.asarray(a), np.asarray(b)
    return bool(np.array_equal(one, two, equal_nan=one.dtype.kind == "f"))
