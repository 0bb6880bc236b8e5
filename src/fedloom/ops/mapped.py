"""Tensors inside ``vmap``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.torch_internals import is_batched


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type that autocast sets for products on the device of a tensor; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def in_autocast_type(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs of a product to the dtype of autocast, which ignores products under ``vmap``."""
    dtype = autocast_type(x)
    if dtype is None or not is_batched(x):
        return x, w, bias
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)


def clients_at(value: Any, axis: int | None, clients: int, place: int = 0) -> Any:
    """Return a tensor with its client axis in front or at another index. A tensor that all clients share is expanded, not copied."""
    if not isinstance(value, Tensor):
        return value
    if axis is not None:
        return (
            value if axis == place else value.movedim(axis, place)
        )  # autograd identifies an input by the tensor itself
    return value.unsqueeze(place).expand(*value.shape[:place], clients, *value.shape[place:])
