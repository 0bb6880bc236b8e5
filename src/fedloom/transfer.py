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
        self._answer: Answer | None = None

    def ask(self, values: Sequence[Tensor]) -> None:
        """Asks for the values of some more tensors of one element; nobody waits."""
        begin = len(self._places)
        for at in alike(values):
            self._vectors.append(values[at[0]].reshape(1) if len(at) == 1 else torch.stack([values[i] for i in at]))
            self._places += [begin + i for i in at]

    def send(self, others: Sequence[Tensor] = ()) -> None:
        """Has the answer sent when the device is that far: what it is given to do from now on does not delay it."""
        self._answer = Answer([*self._vectors, *others])

    def answer(self, others: Sequence[Tensor] = ()) -> tuple[list[float], list[Array]]:
        """All values in the order of asking, and other tensors of any shape and type: in one answer from the device.

        Where it was sent for already, the other tensors are those that were named then.

        Example:
            >>> question = Question()
            >>> question.ask([torch.tensor(1.5)])
            >>> question.answer([torch.eye(2, dtype=torch.int64)])
            ([1.5], [array([[1, 0],
                   [0, 1]])])
        """
        if self._answer is None:
            self.send(others)
        assert self._answer is not None
        told = self._answer.arrays()
        found, asked = [0.0] * len(self._places), len(self._vectors)
        values = chain.from_iterable(array.tolist() for array in told[:asked])
        for place, value in zip(self._places, values, strict=True):
            found[place] = value
        return found, told[asked:]


class Answer:
    """Tensors on their way to the host, in one piece: as bytes where types differ, of which none is converted."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        values = [v.float() if v.dtype is torch.bfloat16 else v for v in tensors]  # which numpy lacks
        where = next((v.device for v in values if not v.is_cpu), torch.device("cpu"))  # what is the host's goes along
        self._mixed = len({v.dtype for v in values}) > 1
        # The widest first, so that each begins at a multiple of its width.
        widths = [-v.element_size() for v in values]
        self._order = sorted(range(len(values)), key=widths.__getitem__) if self._mixed else range(len(values))
        flat = [v if v.dim() == 1 else v.reshape(-1) for v in (values[i].to(where) for i in self._order)]
        flat = [v.contiguous().view(torch.uint8) for v in flat] if self._mixed else flat
        self._facts = [(v.dtype, v.shape) for v in values]
        self._lengths = [len(v) for v in flat]
        whole = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0)
        self._there: torch.cuda.Event | None = None
        if whole.is_cuda:  # a copy to pinned memory is the device's own business, of which it tells when it is there
            self._whole = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            self._whole.copy_(whole.detach(), non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(whole.device))
        else:
            self._whole = whole.detach().to("cpu")

    def arrays(self) -> list[Array]:
        """The tensors as arrays of the host, for which it waits."""
        if self._there is not None:
            self._there.synchronize()
        whole = self._whole.numpy()
        found, begin = [whole] * len(self._facts), 0
        for i, length in zip(self._order, self._lengths, strict=True):
            dtype, shape = self._facts[i]
            piece = whole[begin : begin + length]
            begin += length
            found[i] = (piece.view(_kind(dtype)) if self._mixed else piece).reshape(shape)
        return found


@cache
def _kind(dtype: torch.dtype) -> np.dtype[Any]:
    """Numpy's name of a type."""
    return torch.empty(0, dtype=dtype).numpy().dtype
