"""Parts that the networks share: normalisation, convolution with its norm, drop-path, checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fedloom.errors import UserError
from fedloom.ops.forward_context import uniform_like

Norm = Literal["bn_batch", "bn_track", "gn", "none"]
NORMS: tuple[Norm, ...] = ("bn_batch", "bn_track", "gn", "none")


class TappableNetwork(nn.Module):
    """A module that says where its intermediate features are.

    Attributes:
        tap_points: dotted names of submodules in the order of execution, each called once per forward;
            their outputs are the features that intermediate supervision may read.
        blocks: dotted names of submodules whose outputs are block features; the last one, averaged over
            space, is the input of `head`. Empty where a network has no such blocks.
        min_size: the smallest height and width of an input image.
    """

    tap_points: list[str]
    blocks: list[str]
    min_size: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.tap_points = []
        self.blocks = []


def positive(name: str, value: Any) -> int:
    """`value` if it is an integer of at least 1, else an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} = {value!r}: a whole number of at least 1 was expected")
    return value


def positives(name: str, value: Any) -> tuple[int, ...]:
    """A tuple of positive integers from one integer or a sequence of them."""
    if isinstance(value, int):
        return (positive(name, value),)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name} = {value!r}: a whole number or a list of whole numbers was expected")
    return tuple(positive(f"{name}[{i}]", v) for i, v in enumerate(value))


def image_extent(value: Any) -> tuple[int, int]:
    """Height and width from one number (a square image) or from a pair."""
    sizes = positives("image_size", value)
    if len(sizes) > 2 or not sizes:
        raise UserError(f"image_size = {value!r}: one number or (height, width) was expected")
    return sizes[0], sizes[-1]


def probability(name: str, value: Any) -> float:
    """`value` if it lies in [0, 1), else an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UserError(f"{name} = {value!r}: a number from 0 up to, but not including, 1 was expected")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """`value` if it is true or false, else an error that names the argument."""
    if not isinstance(value, bool):
        raise UserError(f"{name} = {value!r}: true or false was expected")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`, else an error that lists them."""
    if not isinstance(value, str) or value not in allowed:
        raise UserError(f"{name} = {value!r}: one of {', '.join(map(repr, allowed))} was expected")
    return value


def group_count(channels: int) -> int:
    """Number of groups of a group norm: groups of at least 16 channels, as near to 16 as divides them.

    A group of one channel on a 1x1 map would always be zero, so small widths form a single group.

    Example:
        >>> [group_count(c) for c in (7, 24, 48, 64, 100)]
        [1, 1, 3, 4, 5]

    Reference: Wu and He, Group Normalization, 2018 (16 channels per group).
    """
    size = next((d for d in range(16, channels + 1) if channels % d == 0), channels)
    return channels // size


def make_norm(kind: Norm, channels: int, *, flat: bool = False, gain: float = 1.0) -> nn.Module:
    """The normalisation layer that `kind` names.

    Args:
        kind: "bn_batch" (batch statistics always, none kept), "bn_track" (running statistics in
            evaluation), "gn" (group norm) or "none".
        channels: width of the feature.
        flat: True for features [B, C], False for maps [B, C, H, W].
        gain: initial value of the scale.
    """
    choice("norm", kind, NORMS)
    if kind == "none":
        return nn.Identity()
    layer: nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d
    if kind == "gn":
        layer = nn.GroupNorm(group_count(channels), channels)
    elif flat:
        layer = nn.BatchNorm1d(channels, track_running_stats=kind == "bn_track")
    else:
        layer = nn.BatchNorm2d(channels, track_running_stats=kind == "bn_track")
    nn.init.constant_(layer.weight, gain)
    return layer


class ConvNorm(nn.Sequential):
    """Convolution, normalisation and, if given, an activation; biased only when nothing normalises it.

    The weights are drawn as He et al. do: N(0, 2 / (k * k * outputs / groups)).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        *,
        norm: Norm,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        act: nn.Module | None = None,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        padding = dilation * (kernel // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=norm == "none")
        he_normal_(self.conv)
        self.norm = make_norm(norm, outputs, gain=gain)
        if act is not None:
            self.act = act


def he_normal_(conv: nn.Conv2d) -> None:
    """Draw a convolution's weights as N(0, 2 / fan_out), fan_out counted per group; its bias is 0."""
    fan_out = conv.kernel_size[0] * conv.kernel_size[1] * conv.out_channels // conv.groups
    nn.init.normal_(conv.weight, 0.0, (2.0 / fan_out) ** 0.5)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


class DropPath(nn.Module):
    """Drops the whole branch of a sample with probability p in training: x * 1[u < 1 - p] / (1 - p).

    Reference: Huang et al., Deep Networks with Stochastic Depth, 2016.
    """

    draws_noise = True

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = probability("drop path", p)

    def uniform(self, x: Tensor) -> Tensor:
        """One uniform number in [0, 1) per sample; the single source of this module's noise."""
        return uniform_like(x, (x.shape[0],) + (1,) * (x.dim() - 1))

    def forward(self, x: Tensor) -> Tensor:
        """The branch, kept or dropped sample by sample."""
        if not self.training or self.p == 0.0:
            return x
        keep = 1.0 - self.p
        return x * (self.uniform(x) < keep).to(x.dtype) / keep

    def extra_repr(self) -> str:
        """Show p."""
        return f"p={self.p}"
