"""The rows of one client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.partition import Index, Labels
from fedloom.data.preprocess import Preprocess
from fedloom.data.rows import Rows
from fedloom.data.split import check_share, three_way
from fedloom.errors import UserError
from fedloom.rng import stream

_ID_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """How uint8 inputs become floating in the step: x/255, then (x - mean)/std per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def to_float(part: Tensor, scale: Scale | None) -> Tensor:
    """What the step makes of an input: uint8 becomes float32, scaled per channel (axis 1); others stay."""
    if part.dtype != torch.uint8:
        return part
    part = part.float() / 255
    if scale is None:
        return part
    shape = (-1, *[1] * (part.dim() - 2))
    return (part - part.new_tensor(scale.mean).reshape(shape)) / part.new_tensor(scale.std).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class ClientData:
    """One client's rows; `test` and `val` are None where it has none."""

    id: str
    train: Rows
    test: Rows | None = None
    val: Rows | None = None

    def parts(self) -> dict[str, Rows]:
        """The splits that have rows, by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: rows for name, rows in named.items() if rows is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FederationParts:
    """The parts of a federation, as the readers of files and arrays return them.

    Args:
        clients: the clients, in order.
        name: where the data come from.
        classes: class names, by label.
        scale: how uint8 inputs are scaled in the step.
        origin: JSON-able description that is enough to make the federation again, or empty.
        preprocess: the preprocessing to fit and apply to the clients; None for none.
        columns: names of the columns of x, for the preprocessing.
        vocabulary: the words of text columns, for the preprocessing.
    """

    clients: tuple[ClientData, ...]
    name: str
    classes: tuple[str, ...] | None = None
    scale: Scale | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    columns: Sequence[str] | None = None
    vocabulary: Mapping[str, Sequence[str]] | None = None


def check_ids(ids: Sequence[str]) -> None:
    """Ids are unique, printable strings of 1 to 64 characters."""
    seen: set[str] = set()
    for name in ids:
        if not isinstance(name, str):
            raise UserError(f"client id {name!r} is a {type(name).__name__}; expected a string.")
        if not 1 <= len(name) <= _ID_LENGTH or not name.isprintable():
            raise UserError(f"client id {name!r}: expected 1 to {_ID_LENGTH} printable characters.")
        if name in seen:
            raise UserError(f"client id {name!r} occurs twice; expected unique ids.")
        seen.add(name)


def cut_client(name: str, rows: Rows, test: float, val: float, seed: int) -> ClientData:
    """Cut one client's rows into training, test and validation rows, as `Dataset.partition` does.

    Args:
        name: The client's id.
        rows: All its rows.
        test: Share of the rows cut off for testing.
        val: Share of the remaining rows cut off for validation.
        seed: Seed of the cut.
    """
    check_share("test", test)
    check_share("val", val)
    train, off, checked = three_way(class_labels(rows.y), test, val, stream(seed, "split", name))
    return ClientData(name, rows.take(torch.from_numpy(train)), take_or_none(rows, off), take_or_none(rows, checked))


def take_or_none(rows: Rows, index: Index) -> Rows | None:
    """Return the rows at some positions, or None where there are no positions."""
    return rows.take(torch.from_numpy(index)) if len(index) else None


def is_class(y: Tensor) -> bool:
    """Whether labels are classes, one per row."""
    return y.dim() == 1 and not y.is_floating_point()


def class_labels(y: Tensor) -> Labels:
    """Return the class of each row for dealing and stratifying; 0 where labels are not classes."""
    return np.asarray(y.numpy(), np.int64) if is_class(y) else np.zeros(len(y), np.int64)
