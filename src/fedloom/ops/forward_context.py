"""What the layers of a network need to know of the forward pass that is going on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom import rng
from fedloom.tensors import Summary


@dataclass(slots=True)
class Frame:
    """What layers are told.

    Args:
        mask: 1 for real rows, 0 for padding; None when every row is real.
        key: counter key for noise; None for torch's own noise.
        wanted: names of the modules whose outputs are kept.
        features: those outputs.
        summed: those of which a summary is enough, see :func:`fedloom.spec.seen.summary_of`.
        summaries: those that a kernel made, in the place of the output.
        rewrite: applied to the head's input.
        draws: how often noise was drawn.
    """

    mask: Tensor | None = None
    key: Tensor | None = None
    wanted: frozenset[str] = frozenset()
    features: dict[str, Tensor] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    summaries: dict[str, Summary] = field(default_factory=dict)
    rewrite: Callable[[Tensor], Tensor] | None = None
    draws: int = 0


class _Frames(threading.local):
    """The frames of this thread: runs that share a process, a deployment's for one, each have their own."""

    def __init__(self) -> None:
        self.entered: list[Frame] = []


_frames = _Frames()


@contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
    """Makes a frame the current one."""
    _frames.entered.append(frame)
    try:
        yield frame
    finally:
        _frames.entered.pop()


def current() -> Frame | None:
    """The frame of the forward pass that is going on, if fedloom runs it."""
    return _frames.entered[-1] if _frames.entered else None


def uniform_like(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Uniform noise in [0, 1): from the counter inside fedloom's forward pass, from torch outside."""
    frame = current()
    if frame is None or frame.key is None:
        return torch.rand(shape, device=x.device, dtype=x.dtype)
    frame.draws += 1
    return rng.uniform(rng.fold(frame.key, frame.draws), tuple(shape)).to(x.dtype)
