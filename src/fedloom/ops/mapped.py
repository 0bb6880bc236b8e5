"""Tensors inside ``vmap``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_batched(x: Tensor) -> bool:
    """Return whether a tensor is one client's inside ``vmap``."""
    return bool(torch._C._functorch.is_batchedtensor(x))


def in_autocast_type(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs of a product to the dtype of autocast, which ignores products under ``vmap``."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not is_batched(x):
        return x, w, bias
    dtype = torch.get_autocast_dtype(kind)
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
