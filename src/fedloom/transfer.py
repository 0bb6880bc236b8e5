"""Between host and device: a copy or a question at the wrong moment makes the host wait for all that was begun there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
    question = Question()
    question.ask(values)
    return question.answer()


def alike(values: Sequence[Tensor]) -> Collection[list[int]]:
    """Which of some tensors are of one type and without gaps: one that is not would have all of a list treated one by one.

    Example:
        >>> list(alike([torch.ones(2), torch.ones(2, 2).T, torch.ones(3)]))
        [[0, 2], [1]]
    """
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, value in enumerate(values):
        kinds.setdefault((value.dtype, value.is_contiguous()), []).append(i)
    return kinds.values()


class Question:
    """Values of tensors of one element that the host will want: collected at once, answered when it has nothing else to do."""

    def __init__(self) -> None:
        self._vectors: list[Tensor] = []
        self._places: list[int] = []

    def ask(self, values: Sequence[Tensor]) -> None:
        """Asks for some more values; nobody waits."""
        begin = len(self._places)
        for at in alike(values):
            self._vectors.append(torch.stack([values[i] for i in at]))
            self._places += [begin + i for i in at]

    def answer(self) -> list[float]:
        """All values in the order of asking, in one answer from the device."""
        vectors = self._vectors
        if not vectors:
            return []
        alike = len({v.dtype for v in vectors}) < 2
        # A conversion a vector, not one a value: each is a kernel of its own.
        whole = vectors[0] if len(vectors) == 1 else torch.cat([v if alike else v.double() for v in vectors])
        told: list[float] = whole.tolist()
        found = [0.0] * len(told)
        for place, value in zip(self._places, told, strict=True):
            found[place] = value
        return found
