"""Shapes of convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

Pair = tuple[int, int]
ConvParameters = tuple[Pair, Pair, Pair]
"""Stride, padding and dilation of a convolution."""


def conv_parameters(conv: nn.Conv2d) -> ConvParameters | None:
    """Return stride, padding and dilation if kernels support the layer.

    They support one group or one group per channel, with zero padding.
    """
    supported_groups = conv.groups == 1 or conv.groups == conv.in_channels == conv.out_channels
    if not supported_groups or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return None
    (a, b), (c, d), (e, f) = conv.stride, conv.padding, conv.dilation
    return (int(a), int(b)), (int(c), int(d)), (int(e), int(f))


def pool_window(pool: nn.MaxPool2d) -> Pair | None:
    """Return height and width of the windows if they do not overlap and have at most 8 rows and columns."""
    size, stride, padding, dilation = (
        (v, v) if isinstance(v, int) else (v[0], v[1])
        for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    plain = size == stride and padding == (0, 0) and dilation == (1, 1) and not pool.ceil_mode
    return size if plain and not pool.return_indices and max(size) <= 8 else None


def output_size(size: Sequence[int], kernel: Sequence[int], parameters: ConvParameters) -> Pair:
    """Return height and width of the output of a convolution."""
    per_axis = zip(size, kernel, *parameters, strict=True)
    height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in per_axis)
    return height, width


@dataclass(frozen=True)
class ConvShape:
    """Sizes of a convolution.

    Args:
        channels: input channels.
        height: of the input.
        width: of the input.
        kernel: height and width of the filters.
        stride: along both axes.
        padding: along both axes.
        dilation: along both axes.
        bias: whether the matrix of patches has a row of ones.
        per_image: whether there is one matrix of patches per image, not one per client.
    """

    channels: int
    height: int
    width: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    bias: bool = False
    per_image: bool = False

    @classmethod
    def of(
        cls, x: Tensor, w: Tensor, parameters: ConvParameters, *, bias: bool = False, per_image: bool = False
    ) -> ConvShape:
        """Return the shape for images (clients, batch, channels, height, width) and filters (..., height, width)."""
        (channels, height, width), kernel = x.shape[2:], (w.shape[-2], w.shape[-1])
        return cls(channels, height, width, kernel, *parameters, bias=bias, per_image=per_image)

    @cached_property
    def out(self) -> Pair:
        """Height and width of the output."""
        parameters = self.stride, self.padding, self.dilation
        return output_size((self.height, self.width), self.kernel, parameters)

    @property
    def patch_size(self) -> int:
        """Number of values of a patch."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def matrix_rows(self) -> int:
        """Rows of the matrix of patches: the patch, a row of ones for the bias, zeros up to a multiple of 8."""
        return -(-(self.patch_size + self.bias) // 8) * 8

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time arguments of the kernels."""
        return {
            "C": self.channels, "H": self.height, "W": self.width, "OH": self.out[0], "OW": self.out[1],
            "R": self.kernel[0], "S": self.kernel[1], "SH": self.stride[0], "SW": self.stride[1],
            "PH": self.padding[0], "PW": self.padding[1], "DH": self.dilation[0], "DW": self.dilation[1],
        }  # fmt: skip
