"""Between host and device: a copy or a question at the wrong moment makes the host wait for all that was begun there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


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
    return question.answer()[0]


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
    """Values that the host will want: collected at once, answered when it has nothing else to do."""

    def __init__(self) -> None:
        self._vectors: list[Tensor] = []
        self._places: list[int] = []

    def ask(self, values: Sequence[Tensor]) -> None:
        """Asks for the values of some more tensors of one element; nobody waits."""
        begin = len(self._places)
        for at in alike(values):
            self._vectors.append(torch.stack([values[i] for i in at]))
            self._places += [begin + i for i in at]

    def answer(self, others: Sequence[Tensor] = ()) -> tuple[list[float], list[Array]]:
        """All values in the order of asking, and other tensors of any shape: in one answer from the device.

        Example:
            >>> question = Question()
            >>> question.ask([torch.tensor(1.5)])
            >>> question.answer([torch.eye(2, dtype=torch.int64)])
            ([1.5], [array([[1., 0.],
                   [0., 1.]])])
        """
        vectors = [*self._vectors, *(value.reshape(-1) for value in others)]
        if not vectors:
            return [], []
        plain = len({v.dtype for v in vectors}) < 2 and vectors[0].dtype is not torch.bfloat16  # which numpy lacks
        # A conversion a vector, not one a value: each is a kernel of its own.
        vectors = vectors if plain else [v.double() for v in vectors]
        where = next((v.device for v in vectors if not v.is_cpu), vectors[0].device)  # what is the host's goes along
        whole = (vectors[0] if len(vectors) == 1 else torch.cat([v.to(where) for v in vectors])).detach().cpu().numpy()
        found, count = [0.0] * len(self._places), len(self._places)
        for place, value in zip(self._places, whole[:count].tolist(), strict=True):
            found[place] = value
        ends = np.cumsum([count, *(value.numel() for value in others)])
        rest = zip(others, ends[:-1], ends[1:], strict=True)
        return found, [whole[begin:end].reshape(tuple(value.shape)) for value, begin, end in rest]
