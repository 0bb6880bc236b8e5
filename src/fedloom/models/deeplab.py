"""DeepLabv3+ on ResNet-18."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.models.parts import ConvNorm, Norm, TappableNetwork, flag, he_normal_, positive
from fedloom.models.resnet import BasicBlock
from fedloom.ops.resize import resized


def conv3x3(inputs: int, outputs: int, norm: Norm, separable: bool, rate: int = 1) -> nn.Sequential:
    """A 3x3 convolution of the given rate with norm and ReLU, or its depthwise separable form."""
    if not separable:
        return ConvNorm(inputs, outputs, 3, norm=norm, dilation=rate, act=nn.ReLU())
    return nn.Sequential(
        ConvNorm(inputs, inputs, 3, norm=norm, dilation=rate, groups=inputs, act=nn.ReLU()),
        ConvNorm(inputs, outputs, norm=norm, act=nn.ReLU()),
    )


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: 1x1, three 3x3 at rates 6, 12 and 18, and the image's mean, joined."""

    def __init__(self, inputs: int, outputs: int, norm: Norm, separable: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList([ConvNorm(inputs, outputs, norm=norm, act=nn.ReLU())])
        self.branches.extend(conv3x3(inputs, outputs, norm, separable, rate) for rate in (6, 12, 18))
        self.image = ConvNorm(inputs, outputs, norm=norm, act=nn.ReLU())
        self.project = ConvNorm(5 * outputs, outputs, norm=norm, act=nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, H, W]."""
        image = self.image(x.mean((-2, -1), keepdim=True)).expand(-1, -1, *x.shape[-2:])
        y: Tensor = self.project(torch.cat([*(branch(x) for branch in self.branches), image], 1))
        return y


class LowLevelConcat(nn.Module):
    """Upsampled semantic features beside reduced low-level ones, at the size of the latter."""

    def __init__(self, low: int, reduced: int, norm: Norm) -> None:
        super().__init__()
        self.reduce = ConvNorm(low, reduced, norm=norm, act=nn.ReLU())

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        """[B, low, H, W] and [B, C, h, w] to [B, C + reduced, H, W]."""
        return torch.cat([resized(high, low.shape[-2:]), self.reduce(low)], 1)


class DeepLabV3Plus(TappableNetwork):
    """ResNet-18 at output stride 16, ASPP, and a decoder that joins the first stage's features."""

    def __init__(self, num_classes: int, in_channels: int, norm: Norm, separable: bool) -> None:
        super().__init__()
        inputs = positive("in_channels", in_channels)
        self.stem = ConvNorm(inputs, 64, 7, norm=norm, stride=2, act=nn.ReLU())
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = residual_layer(64, 64, norm)
        self.layer2 = residual_layer(64, 128, norm, stride=2)
        self.layer3 = residual_layer(128, 256, norm, stride=2)
        self.layer4 = residual_layer(256, 512, norm, dilation=2)
        self.aspp = ASPP(512, 256, norm, separable)
        self.concat = LowLevelConcat(64, 48, norm)
        self.decoder = nn.Sequential(
            conv3x3(304, 256, norm, separable),
            conv3x3(256, 256, norm, separable),
        )
        self.head = nn.Conv2d(256, positive("num_classes", num_classes), 1)
        he_normal_(self.head)
        self.tap_points = ["stem", "layer1", "layer2", "layer3", "layer4", "aspp", "concat"]

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [B, num_classes, H, W] of images [B, in_channels, H, W]."""
        low = self.layer1(self.pool(self.stem(x)))
        high = self.aspp(self.layer4(self.layer3(self.layer2(low))))
        return resized(self.head(self.decoder(self.concat(low, high))), x.shape[-2:])


def residual_layer(inputs: int, outputs: int, norm: Norm, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Two basic blocks, of which the first may change width and size."""
    return nn.Sequential(
        BasicBlock(inputs, outputs, norm=norm, stride=stride, dilation=dilation),
        BasicBlock(outputs, outputs, norm=norm, dilation=dilation),
    )


def deeplabv3plus_resnet18(
    num_classes: int = 19, in_channels: int = 3, norm: Norm = "bn_track", separable: bool = False
) -> DeepLabV3Plus:
    """DeepLabv3+ for segmentation: ResNet-18 at stride 16, ASPP, low-level features.

    Args:
        num_classes: classes of a pixel.
        in_channels: channels of the images.
        norm: "bn_track", "bn_batch", "gn" or "none".
        separable: depthwise separable 3x3 convolutions in ASPP and decoder (12.34 million parameters
            instead of 16.61).

    Example:
        >>> sum(p.numel() for p in deeplabv3plus_resnet18(num_classes=11).parameters())
        16605611

    Reference: Chen et al., Encoder-Decoder with Atrous Separable Convolution, 2018; OmniISR, section IV.
    """
    return DeepLabV3Plus(num_classes, in_channels, norm, flag("separable", separable))
