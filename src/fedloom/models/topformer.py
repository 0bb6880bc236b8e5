"""TopFormer: a token pyramid, a transformer on its pooled tokens, semantics injected back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.mobile_parts import Row, TokenBlock, attend, class_head, drop_path_rates, residual_stage
from fedloom.models.parts import ConvNorm, Norm, TappableNetwork, flag, positive, probability
from fedloom.ops.resize import resized


class TokenPyramid(nn.Module):
    """A strided stem and four stages of inverted residuals, whose outputs have strides 4, 8, 16 and 32."""

    def __init__(self, in_channels: int, stages: Sequence[Sequence[Row]], norm: Norm) -> None:
        super().__init__()
        width = 16
        self.stem = ConvNorm(in_channels, width, 3, norm=norm, stride=2, act=nn.ReLU())
        self.stages = nn.ModuleList()
        for rows in stages:
            self.stages.append(residual_stage(width, rows, norm))
            width = rows[-1][2]

    def forward(self, x: Tensor) -> list[Tensor]:
        """The four stages' outputs."""
        x = self.stem(x)
        maps: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class TokenPool(nn.Module):
    """All maps averaged to half the last one's size (rounded up), side by side along the channels."""

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """[B, sum of widths, ceil(h / 2), ceil(w / 2)]."""
        high, wide = ((side + 1) // 2 for side in maps[-1].shape[-2:])
        return torch.cat([F.adaptive_avg_pool2d(m, (high, wide)) for m in maps], 1)


class TokenAttention(nn.Module):
    """Multi-head attention among pixels: 1x1 conv-norm queries and keys of 16 numbers, values of 32.

    The authors' code does not scale the scores by 1 / sqrt(16); `scaled` does.
    """

    def __init__(self, width: int, heads: int, norm: Norm, scaled: bool) -> None:
        super().__init__()
        key, value = 16, 32
        self.heads = heads
        self.scale = key**-0.5 if flag("scaled", scaled) else 1.0
        self.q = ConvNorm(width, heads * key, norm=norm)
        self.k = ConvNorm(width, heads * key, norm=norm)
        self.v = ConvNorm(width, heads * value, norm=norm)
        self.act = nn.ReLU6()
        self.project = ConvNorm(heads * value, width, norm=norm, gain=0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the same shape; zero at first, since the last norm starts with gain 0."""
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        mixed = attend(q, k, v, self.heads, self.scale).unflatten(-1, x.shape[-2:])
        y: Tensor = self.project(self.act(mixed))
        return y


class Injection(nn.Module):
    """local * up(hardsigmoid(gate(tokens))) + up(semantics(tokens)), each a 1x1 conv-norm."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.local = ConvNorm(inputs, outputs, norm=norm)
        self.gate = ConvNorm(inputs, outputs, norm=norm)
        self.semantics = ConvNorm(inputs, outputs, norm=norm)

    def forward(self, local: Tensor, tokens: Tensor) -> Tensor:
        """[B, inputs, H, W] and [B, inputs, h, w] to [B, outputs, H, W]."""
        size = local.shape[-2:]
        gate = resized(F.hardsigmoid(self.gate(tokens)), size)
        y: Tensor = self.local(local) * gate + resized(self.semantics(tokens), size)
        return y


class TopFormer(TappableNetwork):
    """The token pyramid transformer with its simple head.

    Args:
        stages: rows of the pyramid's four stages.
        heads: attention heads.
        outputs: width of the injected features.
        depthwise: the head's first 1x1 convolution acts on each channel alone.
        num_classes: classes of a pixel.
        in_channels: channels of the images.
        norm: normalisation everywhere.
        drop_path: rate of the last of the four transformer blocks.
        dropout: rate before the head.
        scaled: scale the attention scores by 1 / sqrt(16).
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Row]],
        heads: int,
        outputs: int,
        depthwise: bool,
        num_classes: int,
        in_channels: int,
        norm: Norm,
        drop_path: float,
        dropout: float,
        scaled: bool,
    ) -> None:
        super().__init__()
        self.widths = [rows[-1][2] for rows in stages]
        tokens = sum(self.widths)
        self.pyramid = TokenPyramid(positive("in_channels", in_channels), stages, norm)
        self.pool = TokenPool()
        self.transformer = nn.Sequential(
            *(
                TokenBlock(TokenAttention(tokens, heads, norm, scaled), tokens, 2, norm, rate)
                for rate in drop_path_rates(4, probability("drop_path", drop_path))
            )
        )
        self.injections = nn.ModuleList(Injection(width, outputs, norm) for width in self.widths[1:])
        groups = outputs if depthwise else 1
        self.fuse = ConvNorm(outputs, outputs, norm=norm, groups=groups, act=nn.ReLU())
        self.dropout = nn.Dropout(probability("dropout", dropout))
        self.head = class_head(outputs, positive("num_classes", num_classes))
        self.tap_points = [f"pyramid.stages.{i}" for i in range(4)]
        self.tap_points += ["pool", "transformer", *(f"injections.{i}" for i in range(3))]

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [B, num_classes, H, W] of images [B, in_channels, H, W]."""
        maps = self.pyramid(x)
        tokens = self.transformer(self.pool(maps)).split(self.widths, 1)
        fine, middle, coarse = (
            inject(local, t) for inject, local, t in zip(self.injections, maps[1:], tokens[1:], strict=True)
        )
        size = fine.shape[-2:]
        joined = fine + resized(middle, size) + resized(coarse, size)
        return resized(self.head(self.dropout(self.fuse(joined))), x.shape[-2:])


def pyramid_rows(widths: tuple[int, int, int, int], extra: bool) -> list[list[Row]]:
    """The four stages of every size: kernels, expansions and strides are common, widths are not."""
    a, b, c, d = widths
    last: list[Row] = [(5, 6, d, 2), (5, 6, d, 1)]
    return [
        [(3, 1, 16, 1), (3, 4, a, 2), (3, 3, a, 1)],
        [(5, 3, b, 2), (5, 3, b, 1)],
        [(3, 3, c, 2), (3, 3, c, 1)],
        [*last, (3, 6, d, 1)] if extra else last,
    ]


def topformer_t(
    num_classes: int = 19,
    in_channels: int = 3,
    norm: Norm = "bn_track",
    drop_path: float = 0.1,
    dropout: float = 0.1,
    scaled: bool = False,
) -> TopFormer:
    """TopFormer-Tiny for segmentation, 1.4 million parameters.

    Args:
        num_classes: classes of a pixel.
        in_channels: channels of the images.
        norm: "bn_track", "bn_batch", "gn" or "none".
        drop_path: rate of the last transformer block.
        dropout: rate before the head.
        scaled: scale the attention scores by 1 / sqrt(16), which the authors' code does not.

    Example:
        >>> sum(p.numel() for p in topformer_t(num_classes=150).parameters())
        1389654

    Reference: Zhang et al., TopFormer, 2022.
    """
    stages = pyramid_rows((16, 32, 64, 96), extra=False)
    return TopFormer(stages, 4, 128, True, num_classes, in_channels, norm, drop_path, dropout, scaled)


def topformer_s(
    num_classes: int = 19,
    in_channels: int = 3,
    norm: Norm = "bn_track",
    drop_path: float = 0.1,
    dropout: float = 0.1,
    scaled: bool = False,
) -> TopFormer:
    """TopFormer-Small for segmentation, 3.0 million parameters.

    The arguments are those of `topformer_t`.

    Example:
        >>> sum(p.numel() for p in topformer_s(num_classes=150).parameters())
        3034662

    Reference: Zhang et al., TopFormer, 2022.
    """
    stages = pyramid_rows((24, 48, 96, 128), extra=True)
    return TopFormer(stages, 6, 192, False, num_classes, in_channels, norm, drop_path, dropout, scaled)


def topformer_b(
    num_classes: int = 19,
    in_channels: int = 3,
    norm: Norm = "bn_track",
    drop_path: float = 0.1,
    dropout: float = 0.1,
    scaled: bool = False,
) -> TopFormer:
    """TopFormer-Base for segmentation, 5.1 million parameters.

    The arguments are those of `topformer_t`.

    Example:
        >>> sum(p.numel() for p in topformer_b(num_classes=150).parameters())
        5062646

    Reference: Zhang et al., TopFormer, 2022.
    """
    stages = pyramid_rows((32, 64, 128, 160), extra=True)
    return TopFormer(stages, 8, 256, False, num_classes, in_channels, norm, drop_path, dropout, scaled)
