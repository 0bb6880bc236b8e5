"""FedAIMS's convolutional networks: equal blocks, global average pooling, a linear head."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.models.parts import Norm, TappableNetwork, make_norm, positive


class ConvBlock(nn.Sequential):
    """3x3 convolution with bias, normalisation, ReLU, 2x2 max pooling."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = make_norm(norm, outputs)
        self.act = nn.ReLU()
        self.pool = nn.MaxPool2d(2)


class ConvNet(TappableNetwork):
    """Convolution blocks of one width; the head reads the mean over space of the last.

    Args:
        depth: number of blocks.
        width: channels of every block.
        num_classes: width of the output.
        in_channels: channels of the images.
        norm: "bn_batch" (batch statistics, as FedBABU), "bn_track", "gn" or "none".
    """

    def __init__(self, depth: int, width: int, num_classes: int, in_channels: int, norm: Norm) -> None:
        super().__init__()
        inputs = positive("in_channels", in_channels)
        self.body = nn.Sequential()
        for i in range(1, positive("depth", depth) + 1):
            self.body.add_module(f"block{i}", ConvBlock(inputs, positive("width", width), norm))
            self.tap_points += [f"body.block{i}.act", f"body.block{i}.pool"]
            self.blocks.append(f"body.block{i}")
            inputs = width
        self.head = nn.Linear(width, positive("num_classes", num_classes))
        self.min_size = 2**depth

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, num_classes] of images [B, in_channels, H, W]."""
        logits: Tensor = self.head(self.body(x).mean((-2, -1)))
        return logits


def convnet3(num_classes: int = 47, in_channels: int = 1, norm: Norm = "bn_batch", width: int = 64) -> ConvNet:
    """FedAIMS's network for EMNIST: three conv blocks of width 64, global pooling.

    It has 77,935 parameters. Arguments: see :class:`ConvNet`.

    Reference: FedAIMS, section 5.1 and Table 6.
    """
    return ConvNet(3, width, num_classes, in_channels, norm)


def convnet4(num_classes: int = 10, in_channels: int = 3, norm: Norm = "bn_batch", width: int = 128) -> ConvNet:
    """FedAIMS's network for CIFAR-10: four conv blocks of width 128, global pooling.

    It has 448,650 parameters. Arguments: see :class:`ConvNet`.

    Reference: FedAIMS, section 5.1 and Table 6.
    """
    return ConvNet(4, width, num_classes, in_channels, norm)
