"""Rows: inputs and labels aligned on axis 0, and how arrays become them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import UserError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

_CHUNK = 1 << 22


def leaves(x: Inputs) -> dict[str, Tensor]:
    """The tensors of an input by name: "" for a tensor, "[i]" in a tuple, "['key']" in a dict."""
    if isinstance(x, Tensor):
        return {"": x}
    if isinstance(x, tuple):
        return {f"[{i}]": part for i, part in enumerate(x)}
    return {f"[{key!r}]": part for key, part in x.items()}


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to every tensor of an input, keeping its form."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, tuple):
        return tuple(function(part) for part in x)
    return {key: function(part) for key, part in x.items()}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rows:
    """Inputs x and labels y, aligned on axis 0; x is a tensor, a tuple of tensors or a dict of tensors."""

    x: Inputs
    y: Tensor

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def __repr__(self) -> str:
        shapes = ", ".join(f"x{name} {tuple(part.shape)}" for name, part in leaves(self.x).items())
        return f"Rows({shapes}, y {tuple(self.y.shape)})"

    def take(self, index: Tensor) -> Rows:
        """The rows at these positions, in this order.

        Example:
            >>> Rows(torch.arange(4.0), torch.arange(4)).take(torch.tensor([2, 0])).y.tolist()
            [2, 0]
        """
        return Rows(map_inputs(lambda part: part[index], self.x), self.y[index])


def concatenate(parts: list[Rows]) -> Rows:
    """All rows of the parts, in order; the parts have the same form."""
    first = parts[0].x
    x: Inputs
    if isinstance(first, Tensor):
        x = torch.cat([p.x for p in parts if isinstance(p.x, Tensor)])
    elif isinstance(first, tuple):
        x = tuple(torch.cat([p.x[i] for p in parts if isinstance(p.x, tuple)]) for i in range(len(first)))
    else:
        x = {key: torch.cat([p.x[key] for p in parts if isinstance(p.x, dict)]) for key in first}
    return Rows(x, torch.cat([p.y for p in parts]))


def to_tensor(value: Any, what: str) -> Tensor:
    """A CPU tensor that shares memory with the array or tensor given where it can.

    Args:
        value: numpy array (memory-mapped ones stay so), tensor, or nested list of numbers.
        what: What the value is, for error messages, such as "client 'a': x".
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise UserError(f"{what} is not one array ({error}). Give rows of equal shape.") from None
        if array.dtype.kind not in "biuf":
            raise UserError(
                f"{what} holds {array.dtype} values; expected numbers. Encode text as integers first, "
                "or read it with Federation.from_table, which does."
            )
        if array.dtype in (np.uint16, np.uint32, np.uint64):
            array = array.astype(np.int64)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        array = np.ascontiguousarray(array) if min(array.strides, default=0) < 0 else array
        tensor = torch.from_numpy(array) if array.flags.writeable else _read_only(array)
    if tensor.is_complex():
        raise UserError(
            f"{what} holds complex values; expected real numbers. Give real and imaginary parts as channels."
        )
    if tensor.dim() == 0:
        raise UserError(f"{what} is a single number; expected one row per sample on axis 0.")
    return tensor


def _read_only(array: Any) -> Tensor:
    """A tensor on a read-only array (a memory map, a buffer), which is never written to here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    step = max(1, _CHUNK * len(tensor) // tensor.numel())
    pieces = (tensor[i : i + step] for i in range(0, len(tensor), step))
    # One bad number would spoil the sum; a sum may overflow without one, so the others are looked at.
    return all(math.isfinite(float(piece.sum())) or bool(torch.isfinite(piece).all()) for piece in pieces)


def _input(value: Any, what: str, allow_missing: bool) -> Tensor:
    tensor = to_tensor(value, what)
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.bool):
        tensor = tensor.float()
    elif not tensor.is_floating_point() and tensor.dtype != torch.uint8:
        tensor = tensor.long()
    if not allow_missing and not _finite(tensor):
        raise UserError(
            f"{what} holds NaN or infinite values; expected finite numbers. Impute them with "
            "preprocess={'impute': 'median'}."
        )
    return tensor


def _labels(value: Any, what: str) -> Tensor:
    tensor = to_tensor(value, what)
    if tensor.is_floating_point():
        if not _finite(tensor):
            raise UserError(f"{what} holds NaN or infinite labels; expected finite numbers. Remove those rows.")
        return tensor if tensor.dtype == torch.float64 else tensor.float()
    tensor = tensor.long()
    if tensor.dim() == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if len(tensor) and (least := int(tensor.min())) < 0:
        raise UserError(
            f"{what} holds the negative label {least}; expected classes 0 to K-1. "
            "Renumber the classes (255 marks ignored pixels in segmentation)."
        )
    return tensor


def make_rows(data: Any, what: str, *, allow_missing: bool = False) -> Rows:
    """Rows from (x, y) of arrays or tensors, checked.

    Integer and Boolean labels become int64, other labels stay floating. Inputs of type uint8 stay so (the run
    scales them), other integers become int64, float32 and float64 are kept and narrower floats become
    float32; the run casts to its precision.

    Args:
        data: (x, y), or `Rows`; x is an array, a tuple of arrays or a dict of arrays.
        what: Whose rows they are, for error messages, such as "client 'a', train".
        allow_missing: Let NaN in x pass; for data that will be preprocessed.
    """
    if isinstance(data, Rows):
        data = (data.x, data.y)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise UserError(f"{what}: expected a pair (x, y), got {_describe(data)}.")
    raw, y = data[0], _labels(data[1], f"{what}: y")
    x: Inputs
    if isinstance(raw, dict):
        x = {str(key): _input(part, f"{what}: x[{key!r}]", allow_missing) for key, part in raw.items()}
    elif isinstance(raw, tuple):
        x = tuple(_input(part, f"{what}: x[{i}]", allow_missing) for i, part in enumerate(raw))
    else:
        x = _input(raw, f"{what}: x", allow_missing)
    if not leaves(x):
        raise UserError(f"{what}: x is empty; expected at least one array.")
    for name, part in leaves(x).items():
        if len(part) != len(y):
            raise UserError(f"{what}: x{name} has {len(part)} rows but y has {len(y)}; expected one label per row.")
    return Rows(x, y)


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"an array of shape {tuple(shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
