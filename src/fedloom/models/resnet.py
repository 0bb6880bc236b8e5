"""Residual networks for small images: ResNet-18 and FedLAG's ResNet-9 and ResNet-20."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.errors import UserError
from fedloom.models.parts import ConvNorm, Norm, TappableNetwork, choice, positive, positives

Shortcut = Literal["projection", "pad"]


class PadShortcut(nn.Module):
    """Strided identity with zeros in the new channels: a shortcut without parameters.

    Reference: He et al., Deep Residual Learning, 2015, option A.
    """

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C + extra, ceil(H / stride), ceil(W / stride)]."""
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


class BasicBlock(nn.Module):
    """relu(shortcut(x) + norm(conv3x3(relu(norm(conv3x3(x)))))).

    Reference: He et al., Deep Residual Learning, 2015.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        norm: Norm,
        stride: int = 1,
        dilation: int = 1,
        shortcut: Shortcut = "projection",
    ) -> None:
        super().__init__()
        self.conv1 = ConvNorm(inputs, outputs, 3, norm=norm, stride=stride, dilation=dilation, act=nn.ReLU())
        self.conv2 = ConvNorm(outputs, outputs, 3, norm=norm, dilation=dilation)
        self.shortcut: nn.Module
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        elif shortcut == "projection":
            self.shortcut = ConvNorm(inputs, outputs, norm=norm, stride=stride)
        else:
            self.shortcut = PadShortcut(outputs - inputs, stride)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, [B, outputs, H / stride, W / stride]."""
        y: Tensor = self.act(self.shortcut(x) + self.conv2(self.conv1(x)))
        return y


class ResNet(TappableNetwork):
    """A 3x3 stem, stages of basic blocks (all but the first halve the map), pooling, linear layers.

    Args:
        depths: blocks of each stage.
        widths: channels of each stage.
        num_classes: width of the output.
        in_channels: channels of the images.
        norm: "bn_track", "bn_batch" (FedAIMS), "gn" or "none".
        shortcut: "pad" (zeros in the new channels) or "projection" (1x1 convolution).
        hidden: widths of the linear layers before the head.
    """

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        num_classes: int,
        in_channels: int,
        norm: Norm,
        shortcut: Shortcut = "projection",
        hidden: Sequence[int] = (),
    ) -> None:
        super().__init__()
        choice("shortcut", shortcut, ("projection", "pad"))
        inputs = widths[0]
        self.stem = ConvNorm(positive("in_channels", in_channels), inputs, 3, norm=norm, act=nn.ReLU())
        self.tap_points.append("stem")
        self.stages = nn.Sequential()
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
            stage = nn.Sequential()
            for j in range(depth):
                stride = 2 if i > 1 and j == 0 else 1
                stage.append(BasicBlock(inputs, width, norm=norm, stride=stride, shortcut=shortcut))
                self.tap_points.append(f"stages.stage{i}.{j}")
                inputs = width
            self.stages.add_module(f"stage{i}", stage)
            self.blocks.append(f"stages.stage{i}")
        self.fc = nn.Sequential()
        for i, width in enumerate(hidden, start=1):
            self.fc.add_module(f"fc{i}", nn.Linear(inputs, width))
            self.fc.add_module(f"act{i}", nn.ReLU())
            inputs = width
        if hidden:
            self.blocks.append("fc")
        self.head = nn.Linear(inputs, positive("num_classes", num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, num_classes] of images [B, in_channels, H, W]."""
        logits: Tensor = self.head(self.fc(self.stages(self.stem(x)).mean((-2, -1))))
        return logits


def resnet18(num_classes: int = 100, in_channels: int = 3, norm: Norm = "bn_track") -> ResNet:
    """ResNet-18 for 32x32 images: 3x3 stem, stages (2, 2, 2, 2) at 64 to 512 channels.

    It has 11,220,132 parameters. Arguments: see :class:`ResNet`.

    Reference: He et al., Deep Residual Learning, 2015; FedAIMS, Table 6.
    """
    return ResNet((2, 2, 2, 2), (64, 128, 256, 512), num_classes, in_channels, norm)


def resnet9(num_classes: int = 10, in_channels: int = 1, norm: Norm = "bn_track") -> ResNet:
    """FedLAG's ResNet-9 for MNIST and EMNIST: blocks (1, 2, 2, 1) at 32 to 256 channels, three linear layers.

    It has 1,695,210 parameters. Arguments: see :class:`ResNet`.

    Reference: FedLAG, Table 5.
    """
    return ResNet((1, 2, 2, 1), (32, 64, 128, 256), num_classes, in_channels, norm, hidden=(256, 128))


def resnet20(
    num_classes: int = 10,
    in_channels: int = 3,
    norm: Norm = "bn_track",
    shortcut: Shortcut = "pad",
    depths: Sequence[int] = (3, 3, 3),
) -> ResNet:
    """FedLAG's ResNet-20 for CIFAR: blocks (3, 3, 3) at 64 to 256 channels, three linear layers.

    It has 4,383,434 parameters. The paper prints depths (2, 3, 4) for CIFAR-100. Arguments: see
    :class:`ResNet`.

    Reference: FedLAG, Table 5.
    """
    blocks = positives("depths", depths)
    if len(blocks) != 3:
        raise UserError(f"depths = {depths!r}: three numbers of blocks were expected, as in [3, 3, 3]")
    return ResNet(blocks, (64, 128, 256), num_classes, in_channels, norm, shortcut, hidden=(256, 128))
