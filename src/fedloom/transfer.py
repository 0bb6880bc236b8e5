"""Between host and device: a copy or a question at the wrong moment makes the host wait for all that was begun there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def onto(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; nobody waits, since CUDA copies from pinned memory behind the host's back."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


def read(values: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one element, in one answer from the device.

    Example:
        >>> read([torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64)])
        [1.5, 2.0]
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for i, value in enumerate(values):
        kinds.setdefault(value.dtype, []).append(i)
    if len(kinds) < 2:
        found: list[float] = torch.stack(list(values)).tolist() if values else []
        return found
    # A conversion a type, not one a tensor: each is a kernel of its own.
    told: list[float] = torch.cat([torch.stack([values[i] for i in at]).double() for at in kinds.values()]).tolist()
    places = [i for at in kinds.values() for i in at]
    return [value for _, value in sorted(zip(places, told, strict=True))]
