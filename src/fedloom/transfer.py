"""Copies between host and device. Reading a value makes the host wait for all work that the device was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def onto(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting: CUDA copies from pinned memory asynchronously."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


def read_scalars(values: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one element, of any types, as numbers. Waits for the device once.

    Example:
        >>> read_scalars([torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64)])
        [1.5, 2.0]
    """
    return torch.stack([v.reshape(()).double() for v in values]).tolist() if values else []
