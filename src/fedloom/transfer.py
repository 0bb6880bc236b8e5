"""Between host and device: a copy or a question at the wrong moment makes the host wait for all that was begun there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import chain
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
            self._vectors.append(values[at[0]].reshape(1) if len(at) == 1 else torch.stack([values[i] for i in at]))
            self._places += [begin + i for i in at]

    def answer(self, others: Sequence[Tensor] = ()) -> tuple[list[float], list[Array]]:
        """All values in the order of asking, and other tensors of any shape and type: in one answer from the device.

        Example:
            >>> question = Question()
            >>> question.ask([torch.tensor(1.5)])
            >>> question.answer([torch.eye(2, dtype=torch.int64)])
            ([1.5], [array([[1, 0],
                   [0, 1]])])
        """
        told = _arrays([*self._vectors, *others])
        found, asked = [0.0] * len(self._places), len(self._vectors)
        values = chain.from_iterable(array.tolist() for array in told[:asked])
        for place, value in zip(self._places, values, strict=True):
            found[place] = value
        return found, told[asked:]


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    """Tensors as arrays of the host, in one answer from the device: as bytes where types differ, of which none is converted."""
    if not tensors:
        return []
    values = [v.float() if v.dtype is torch.bfloat16 else v for v in tensors]  # which numpy lacks
    where = next((v.device for v in values if not v.is_cpu), values[0].device)  # what is the host's goes along
    mixed = len({v.dtype for v in values}) > 1
    # The widest first, so that each begins at a multiple of its width.
    order = sorted(range(len(values)), key=lambda i: -values[i].element_size()) if mixed else range(len(values))
    flat = [v if v.dim() == 1 else v.reshape(-1) for v in (values[i].to(where) for i in order)]
    flat = [v.contiguous().view(torch.uint8) for v in flat] if mixed else flat
    whole = (flat[0] if len(flat) == 1 else torch.cat(flat)).detach().cpu().numpy()
    found, begin = [whole] * len(values), 0
    for i, part in zip(order, flat, strict=True):
        piece = whole[begin : begin + len(part)]
        begin += len(part)
        found[i] = (piece.view(_kind(values[i].dtype)) if mixed else piece).reshape(values[i].shape)
    return found


@cache
def _kind(dtype: torch.dtype) -> np.dtype[Any]:
    """Numpy's name of a type."""
    return torch.empty(0, dtype=dtype).numpy().dtype
