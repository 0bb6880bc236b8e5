"""Parts of the mobile transformers: inverted residuals, transformer blocks on maps, gates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedloom.models.parts import ConvNorm, DropPath, Norm, he_normal_

Row = tuple[int, int, int, int]
"""Kernel, expansion, channels and stride of an inverted residual."""


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter each channel by k x k, project by 1x1; added to x where the shapes agree.

    Reference: Sandler et al., MobileNetV2, 2018.
    """

    def __init__(self, inputs: int, row: Row, norm: Norm) -> None:
        super().__init__()
        kernel, expansion, outputs, stride = row
        inner = inputs * expansion
        self.skip = stride == 1 and inputs == outputs
        self.conv = nn.Sequential()
        if expansion != 1:
            self.conv.add_module("expand", ConvNorm(inputs, inner, norm=norm, act=nn.ReLU()))
        depthwise = ConvNorm(inner, inner, kernel, norm=norm, stride=stride, groups=inner, act=nn.ReLU())
        self.conv.add_module("depthwise", depthwise)
        self.conv.add_module("project", ConvNorm(inner, outputs, norm=norm))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, ceil(H / stride), ceil(W / stride)]."""
        y: Tensor = self.conv(x)
        return x + y if self.skip else y


def residual_stage(inputs: int, rows: Sequence[Row], norm: Norm) -> nn.Sequential:
    """Inverted residuals one after the other."""
    stage = nn.Sequential()
    for row in rows:
        stage.append(InvertedResidual(inputs, row, norm))
        inputs = row[2]
    return stage


class FeedForward(nn.Module):
    """1x1 convolution to `ratio` times the width, depthwise 3x3 with bias, ReLU6, 1x1 back."""

    def __init__(self, width: int, ratio: int, norm: Norm) -> None:
        super().__init__()
        inner = width * ratio
        self.expand = ConvNorm(width, inner, norm=norm)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        he_normal_(self.depthwise)
        self.act = nn.ReLU6()
        self.project = ConvNorm(inner, width, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the same shape."""
        y: Tensor = self.project(self.act(self.depthwise(self.expand(x))))
        return y


class TokenBlock(nn.Module):
    """x + drop(attention(x)), then x + drop(feed_forward(x)), on maps [B, C, H, W]."""

    def __init__(self, attention: nn.Module, width: int, ratio: int, norm: Norm, drop_path: float) -> None:
        super().__init__()
        self.attention = attention
        self.drop1 = DropPath(drop_path)
        self.feed_forward = FeedForward(width, ratio, norm)
        self.drop2 = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the same shape."""
        mixed: Tensor = x + self.drop1(self.attention(x))
        y: Tensor = mixed + self.drop2(self.feed_forward(mixed))
        return y


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float = 1.0) -> Tensor:
    """softmax(scale * q^T k) v for each head, channels first: [B, heads * d, N] to [B, heads * d_v, N].

    Written with matrix products because the fused attention has no batching rule under vmap.
    """
    q, k, v = (t.unflatten(1, (heads, -1)) for t in (q, k, v))
    weights = (q.transpose(-2, -1) @ k * scale).softmax(-1)
    return (v @ weights.transpose(-2, -1)).flatten(1, 2)


def drop_path_rates(depth: int, last: float) -> list[float]:
    """Rates that rise evenly from 0 to `last` over the blocks.

    Example:
        >>> drop_path_rates(3, 0.1)
        [0.0, 0.05, 0.1]
    """
    return [last * i / max(depth - 1, 1) for i in range(depth)]


def class_head(inputs: int, num_classes: int) -> nn.Conv2d:
    """The 1x1 convolution to class scores, weights N(0, 0.01^2) and no bias at first."""
    head = nn.Conv2d(inputs, num_classes, 1)
    nn.init.normal_(head.weight, 0.0, 0.01)
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    return head
