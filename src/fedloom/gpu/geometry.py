"""The shapes of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

Pair = tuple[int, int]
Steps = tuple[Pair, Pair, Pair]
"""Stride, padding and dilation of a convolution."""


def steps_of(conv: nn.Conv2d) -> Steps | None:
    """Stride, padding and dilation where kernels can serve; None for some groups and for borders that are not of zeros."""
    whole = conv.groups == 1 or conv.groups == conv.in_channels == conv.out_channels
    if not whole or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return None
    (a, b), (c, d), (e, f) = conv.stride, conv.padding, conv.dilation
    return (int(a), int(b)), (int(c), int(d)), (int(e), int(f))


def window_of(pool: nn.MaxPool2d) -> Pair | None:
    """Height and width of the windows if a kernel serves them, which do not overlap then."""
    size, stride, padding, dilation = (
        (v, v) if isinstance(v, int) else (v[0], v[1])
        for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    plain = size == stride and padding == (0, 0) and dilation == (1, 1) and not pool.ceil_mode
    return size if plain and not pool.return_indices and max(size) <= 8 else None


def sides(size: Sequence[int], kernel: Sequence[int], steps: Steps) -> Pair:
    """Height and width of what a convolution returns."""
    each = zip(size, kernel, *steps, strict=True)
    rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each)
    return rows, columns


@dataclass(frozen=True)
class Geometry:
    """The shapes of a convolution; ``apart`` lays patches out picture by picture rather than row by row."""

    channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    bias: bool = False
    apart: bool = False

    @classmethod
    def of(cls, x: Tensor, w: Tensor, steps: Steps, *, bias: bool = False, apart: bool = False) -> Geometry:
        """Of a cohort's pictures (clients, batch, channels, height, width) and filters, whose height and width are last too."""
        (channels, height, width), kernel = x.shape[2:], (w.shape[-2], w.shape[-1])
        return cls(channels, height, width, kernel, *steps, bias=bias, apart=apart)

    @cached_property
    def out(self) -> tuple[int, int]:
        """Height and width of the output."""
        return sides((self.height, self.width), self.kernel, (self.stride, self.padding, self.dilation))

    @property
    def inner(self) -> int:
        """Length of a patch."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def rows(self) -> int:
        """Rows of the matrix of patches: a patch, the row of ones, rows of zeros."""
        return -(-(self.inner + self.bias) // 8) * 8

    @property
    def sizes(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        return {
            "C": self.channels, "H": self.height, "W": self.width, "OH": self.out[0], "OW": self.out[1],
            "R": self.kernel[0], "S": self.kernel[1], "SH": self.stride[0], "SW": self.stride[1],
            "PH": self.padding[0], "PW": self.padding[1], "DH": self.dilation[0], "DW": self.dilation[1],
        }  # fmt: skip
