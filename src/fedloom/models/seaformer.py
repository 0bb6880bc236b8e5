"""SeaFormer: convolution stages, squeeze-enhanced axial attention, a light fusion head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.mobile_parts import Row, TokenBlock, attend, class_head, drop_path_rates, residual_stage
from fedloom.models.parts import ConvNorm, Norm, TappableNetwork, positive, probability
from fedloom.ops.resize import resized


class AxisAttention(nn.Module):
    """Attention along one axis of a squeezed map, with learned positions of queries and keys.

    The tables hold 16 positions and are resized linearly to the length of the axis.
    """

    def __init__(self, keys: int, values: int, heads: int, norm: Norm) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (keys // heads) ** -0.5
        self.position_q = nn.Parameter(torch.randn(1, keys, 16))
        self.position_k = nn.Parameter(torch.randn(1, keys, 16))
        self.act = nn.ReLU6()
        self.project = ConvNorm(values, values, norm=norm, gain=0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, C, N] each, to [B, values, N, 1]."""
        q = q + resized(self.position_q, q.shape[-1:])
        k = k + resized(self.position_k, k.shape[-1:])
        mixed = attend(q, k, v, self.heads, self.scale)
        y: Tensor = self.project(self.act(mixed.unsqueeze(-1)))
        return y


class AxialAttention(nn.Module):
    """Squeeze-enhanced axial attention: hardsigmoid(project(v + rows + columns)) * detail(q, k, v).

    Rows attend to each other after averaging over the width, columns after averaging over the height;
    the detail is a depthwise 3x3 and a 1x1 convolution of the unsqueezed queries, keys and values.
    """

    def __init__(self, width: int, key: int, heads: int, norm: Norm) -> None:
        super().__init__()
        keys, values = heads * key, 2 * heads * key
        self.q = ConvNorm(width, keys, norm=norm)
        self.k = ConvNorm(width, keys, norm=norm)
        self.v = ConvNorm(width, values, norm=norm)
        self.rows = AxisAttention(keys, values, heads, norm)
        self.columns = AxisAttention(keys, values, heads, norm)
        self.act = nn.ReLU6()
        self.project = ConvNorm(values, width, norm=norm, gain=0.0)
        inner = 2 * keys + values
        self.detail = nn.Sequential(
            ConvNorm(inner, inner, 3, norm=norm, groups=inner, act=nn.ReLU6()),
            ConvNorm(inner, width, norm=norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the same shape."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        rows = self.rows(q.mean(-1), k.mean(-1), v.mean(-1))
        columns = self.columns(q.mean(-2), k.mean(-2), v.mean(-2)).transpose(-2, -1)
        gate = F.hardsigmoid(self.project(self.act(v + rows + columns)))
        y: Tensor = gate * self.detail(torch.cat([q, k, v], 1))
        return y


class Fusion(nn.Module):
    """local(x) * up(hardsigmoid(gate(tokens))), each a 1x1 conv-norm."""

    def __init__(self, inputs: int, tokens: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.local = ConvNorm(inputs, outputs, norm=norm)
        self.gate = ConvNorm(tokens, outputs, norm=norm)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[B, inputs, H, W] and [B, tokens, h, w] to [B, outputs, H, W]."""
        y: Tensor = self.local(x) * resized(F.hardsigmoid(self.gate(tokens)), x.shape[-2:])
        return y


class SeaFormer(TappableNetwork):
    """Five convolution stages, transformers after the last two, fusion with the stride-8 features.

    Args:
        stages: rows of the five convolution stages.
        depth: transformer blocks after stage 4, and as many after stage 5.
        heads: attention heads.
        outputs: widths of the two fusions.
        num_classes: classes of a pixel.
        in_channels: channels of the images.
        norm: normalisation everywhere.
        drop_path: rate of the last block of each transformer.
        dropout: rate before the head.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Row]],
        depth: int,
        heads: int,
        outputs: tuple[int, int],
        num_classes: int,
        in_channels: int,
        norm: Norm,
        drop_path: float,
        dropout: float,
    ) -> None:
        super().__init__()
        widths = [16, *(rows[-1][2] for rows in stages)]
        stem = ConvNorm(positive("in_channels", in_channels), 16, 3, norm=norm, stride=2, act=nn.ReLU())
        convs = [residual_stage(inputs, rows, norm) for inputs, rows in zip(widths, stages, strict=False)]
        self.stage1 = nn.Sequential(stem, *convs[0])
        self.stage2, self.stage3, self.stage4, self.stage5 = convs[1:]
        rates = drop_path_rates(depth, probability("drop_path", drop_path))
        self.transformer1, self.transformer2 = (
            nn.Sequential(*(TokenBlock(AxialAttention(width, key, heads, norm), width, ratio, norm, r) for r in rates))
            for width, key, ratio in ((widths[4], 16, 2), (widths[5], 24, 4))
        )
        self.fusion1 = Fusion(widths[2], widths[4], outputs[0], norm)
        self.fusion2 = Fusion(outputs[0], widths[5], outputs[1], norm)
        self.fuse = ConvNorm(outputs[1], outputs[1], norm=norm, groups=outputs[1], act=nn.ReLU())
        self.dropout = nn.Dropout(probability("dropout", dropout))
        self.head = class_head(outputs[1], positive("num_classes", num_classes))
        self.tap_points = ["stage1", "stage2", "stage3", "stage4", "transformer1", "stage5", "transformer2"]
        self.tap_points += ["fusion1", "fusion2"]

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [B, num_classes, H, W] of images [B, in_channels, H, W]."""
        fine = self.stage2(self.stage1(x))
        middle = self.transformer1(self.stage4(self.stage3(fine)))
        coarse = self.transformer2(self.stage5(middle))
        joined = self.fusion2(self.fusion1(fine, middle), coarse)
        return resized(self.head(self.dropout(self.fuse(joined))), x.shape[-2:])


def stage_rows(widths: tuple[int, int, int, int, int], expansion: int) -> list[list[Row]]:
    """The five stages of both sizes, which differ in widths and in stage 4's expansion."""
    a, b, c, d, e = widths
    return [
        [(3, 1, 16, 1), (3, 4, a, 2), (3, 3, a, 1)],
        [(5, 3, b, 2), (5, 3, b, 1)],
        [(3, 3, c, 2), (3, 3, c, 1)],
        [(5, expansion, d, 2)],
        [(3, 6, e, 2)],
    ]


def seaformer_t(
    num_classes: int = 19,
    in_channels: int = 3,
    norm: Norm = "bn_track",
    drop_path: float = 0.1,
    dropout: float = 0.1,
) -> SeaFormer:
    """SeaFormer-Tiny for segmentation, 1.7 million parameters.

    Args:
        num_classes: classes of a pixel.
        in_channels: channels of the images.
        norm: "bn_track", "bn_batch", "gn" or "none".
        drop_path: rate of the last block of each transformer.
        dropout: rate before the head.

    Example:
        >>> sum(p.numel() for p in seaformer_t(num_classes=150).parameters())
        1667318

    Reference: Wan et al., SeaFormer, 2023.
    """
    stages = stage_rows((16, 32, 64, 128, 160), expansion=3)
    return SeaFormer(stages, 2, 4, (64, 96), num_classes, in_channels, norm, drop_path, dropout)


def seaformer_s(
    num_classes: int = 19,
    in_channels: int = 3,
    norm: Norm = "bn_track",
    drop_path: float = 0.1,
    dropout: float = 0.1,
) -> SeaFormer:
    """SeaFormer-Small for segmentation, 4.0 million parameters.

    The arguments are those of `seaformer_t`.

    Example:
        >>> sum(p.numel() for p in seaformer_s(num_classes=150).parameters())
        3990118

    Reference: Wan et al., SeaFormer, 2023.
    """
    stages = stage_rows((24, 48, 96, 160, 192), expansion=4)
    return SeaFormer(stages, 3, 6, (96, 128), num_classes, in_channels, norm, drop_path, dropout)
