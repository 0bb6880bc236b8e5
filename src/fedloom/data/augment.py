"""Augmentation of training pictures, and of their masks with them.

A pure function of tensors of one client's batch, so that it can be mapped over clients; its noise comes from a counter key of
client, round and step, row by row. Both engines therefore see the same pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom import rng
from fedloom.errors import UserError

Augmentation = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(x, y, key) -> (x, y)`` for one client's batch; ``x`` as the network sees it, ``key`` a counter key."""

VOID = 255
_TAG = 0x617567
_DRAWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Augment:
    """Random flips, sizes, positions and colours of training pictures; masks move with them.

    A picture of H x W is mirrored, enlarged by s, and seen through a window of the size of the output at offset o:

        output[i, j] = picture[(i + 1/2 + o_y) / s - 1/2, (j + 1/2 + o_x) / s - 1/2],

    bilinear for pictures, the nearest pixel for masks. Outside of the picture it is 0 (the mean colour, once standardised) and
    void (255). Colours change before: with m the picture's mean and g a pixel's mean over channels, x becomes g + (x - g)(1 +
    u1), then m + (x - m)(1 + u2), then x + u3, each u uniform in [-colour, colour].

    Args:
        flip: Probability of mirroring left and right.
        scale: Smallest and largest s.
        pad: Pixels by which the window may lie outside of the picture.
        crop: Height and width of the output; None for the picture's.
        colour: Strength of the changes of saturation, contrast and brightness, the latter in standard deviations.

    Example:
        >>> x, y = torch.arange(6.0).reshape(1, 1, 2, 3), torch.tensor([[[0, 1, 2], [3, 4, 5]]])
        >>> mirrored, mask = Augment(flip=1.0)(x, y, torch.tensor(7))
        >>> mirrored.int().tolist(), mask.tolist()
        ([[[[2, 1, 0], [5, 4, 3]]]], [[[2, 1, 0], [5, 4, 3]]])
    """

    flip: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    pad: int = 0
    crop: tuple[int, int] | None = None
    colour: float = 0.0

    BOUNDS: ClassVar[tuple[str, ...]] = ("0 <= flip <= 1", "pad >= 0", "0 <= colour <= 1")

    def __post_init__(self) -> None:
        good = (
            isinstance(self.scale, (tuple, list))
            and len(self.scale) == 2
            and 0.1 <= self.scale[0] <= self.scale[1] <= 10
        )
        if not good:
            raise UserError(f"augment: scale={self.scale!r}; expected (smallest, largest) between 0.1 and 10")
        if self.crop is not None and (len(self.crop) != 2 or min(self.crop) < 1):
            raise UserError(f"augment: crop={self.crop!r}; expected (height, width)")
        if not 0 <= self.flip <= 1 or self.pad < 0 or not 0 <= self.colour <= 1:
            raise UserError(f"augment: {self}; expected flip and colour between 0 and 1, pad of at least 0")

    def __call__(self, x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The pictures (n, channels, height, width), and their masks where y is (n, height, width)."""
        if x.dim() != 4:
            raise UserError(
                f"augment: x has rows of shape {tuple(x.shape[1:])}; expected pictures (channels, height, width)"
            )
        dense = y.dim() == 3 and y.shape[1:] == x.shape[2:]
        draws = rng.uniform(key, (x.shape[0], _DRAWS), torch.float64)
        if self.colour:
            x = self._coloured(x, draws[:, 4:7])
        if not self.flip and self._still(x):
            return x, y
        h, w = x.shape[2:] if self.crop is None else self.crop
        low, high = self.scale
        # Linear in the draw and in float64: the same bits on every engine, so that no pixel is rounded another way.
        size = low + (high - low) * draws[:, 1:2]
        rows = self._positions(h, x.shape[2], size, draws[:, 2:3])
        columns = self._positions(w, x.shape[3], size, draws[:, 3:4])
        columns = torch.where(draws[:, :1] < self.flip, columns.flip(1), columns)
        exact = low == high == 1.0
        x = _along(_along(x, rows, 2, exact), columns, 3, exact)
        return x, _nearest(y, rows, columns) if dense else y

    def _still(self, x: Tensor) -> bool:
        return self.scale == (1.0, 1.0) and not self.pad and self.crop in (None, tuple(x.shape[2:]))

    def _positions(self, out: int, there: int, size: Tensor, draw: Tensor) -> Tensor:
        """Where each row (or column) of the output lies in the picture, for every picture."""
        room = there * size - out + 2 * self.pad
        if self.scale == (1.0, 1.0):
            # Whole pixels, each offset equally likely; a picture smaller than its window has room the other way.
            offset = torch.where(room < 0, torch.ceil((room - 1) * draw), torch.floor((room + 1) * draw)) - self.pad
        else:
            offset = room * draw - self.pad
        return (torch.arange(out, device=draw.device) + 0.5 + offset) / size - 0.5

    def _coloured(self, x: Tensor, draws: Tensor) -> Tensor:
        saturation, contrast, brightness = (
            (self.colour * (2 * draws[:, i] - 1)).to(x.dtype).reshape(-1, 1, 1, 1) for i in range(3)
        )
        if x.shape[1] > 1:
            grey = x.mean(1, keepdim=True)
            x = grey + (x - grey) * (1 + saturation)
        mean = x.mean((1, 2, 3), keepdim=True)
        return mean + (x - mean) * (1 + contrast) + brightness


def _along(x: Tensor, positions: Tensor, axis: int, exact: bool) -> Tensor:
    """The picture at these positions along an axis, linear between pixels, 0 outside."""
    there, n = x.shape[axis], positions.shape[1]
    shape = [x.shape[0], 1, 1, 1]
    shape[axis] = n
    full = [*x.shape[:axis], n, *x.shape[axis + 1 :]]

    def at(index: Tensor) -> Tensor:
        return x.gather(axis, index.clamp(0, there - 1).long().reshape(shape).expand(full))

    inside = ((positions >= -0.5) & (positions < there - 0.5)).reshape(shape)
    if exact:
        found = at(torch.floor(positions + 0.5))
    else:
        below = torch.floor(positions)
        weight = (positions - below).to(x.dtype).reshape(shape)
        found = torch.lerp(at(below), at(below + 1), weight)
    return torch.where(inside, found, torch.zeros_like(found))


def _nearest(y: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The masks at the nearest pixels, void outside."""
    n, height, width = y.shape
    row, column = torch.floor(rows + 0.5), torch.floor(columns + 0.5)
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    picked = y.gather(1, row.clamp(0, height - 1).long()[:, :, None].expand(n, row.shape[1], width))
    index = column.clamp(0, width - 1).long()[:, None, :].expand(n, row.shape[1], column.shape[1])
    return torch.where(inside, picked.gather(2, index), VOID)


def key_of(noise: Tensor, step: Tensor | int) -> Tensor:
    """The key of a step's augmentation, from the key of its client and round."""
    return rng.fold(noise, _TAG, step)


def augmentation(value: Augmentation | Mapping[str, Any] | None) -> Augmentation | None:
    """An augmentation from itself, from its table, or none.

    Example:
        >>> augmentation({"flip": 0.5, "scale": [0.75, 1.5]})
        Augment(flip=0.5, scale=(0.75, 1.5), pad=0, crop=None, colour=0.0)
    """
    if value is None or callable(value):
        return value
    from fedloom.spec.options import read

    if "given" in value:
        raise UserError(
            f"augment: the run was made with a function of one's own, {value['given']}; give it in Python again"
        )
    return read(Augment, value, "augment")


def augment_table(value: Augmentation | None) -> dict[str, Any] | None:
    """An augmentation as its table; a function of one's own by its name only."""
    if value is None:
        return None
    if not isinstance(value, Augment):
        return {"given": getattr(value, "__name__", type(value).__name__)}
    found = {f.name: getattr(value, f.name) for f in fields(value)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items() if v is not None}
