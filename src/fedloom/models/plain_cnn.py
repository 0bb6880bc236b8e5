"""Plain convolutional networks that end in fully connected layers on the flattened map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fedloom.errors import UserError
from fedloom.models.parts import Norm, TappableNetwork, image_extent, make_norm, positive, probability


class Conv(NamedTuple):
    """One convolution of a plain network."""

    width: int
    kernel: int = 3
    padding: int = 1
    stride: int = 1


class PlainCNN(TappableNetwork):
    """Stages of convolutions that end in max pooling, then linear layers, all with ReLU.

    Args:
        stages: the convolutions of each stage.
        hidden: widths of the linear layers before the head.
        num_classes: width of the output.
        in_channels: channels of the images.
        image_size: side of the images, or (height, width); it sets the first linear layer's width.
        norm: normalisation after every layer but the head: "bn_track", "bn_batch", "gn" or "none".
        pool: side of the pooling window, whose stride is 2.
        grid: average the last map to grid x grid first, so that any image size fits.
        dropout: probability after each linear layer but the head.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Conv]],
        hidden: Sequence[int],
        num_classes: int,
        in_channels: int,
        image_size: int | Sequence[int],
        norm: Norm,
        pool: int = 2,
        grid: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        inputs = positive("in_channels", in_channels)
        extent = image_extent(image_size)
        self.body = nn.Sequential()
        for i, convs in enumerate(stages, start=1):
            stage = nn.Sequential()
            for j, conv in enumerate(convs, start=1):
                layer = nn.Conv2d(inputs, conv.width, conv.kernel, conv.stride, conv.padding)
                stage.add_module(f"conv{j}", layer)
                stage.add_module(f"norm{j}", make_norm(norm, conv.width))
                stage.add_module(f"act{j}", nn.ReLU())
                extent = shrink(extent, conv.kernel, conv.stride, conv.padding)
                inputs = conv.width
            stage.add_module("pool", nn.MaxPool2d(pool, stride=2))
            extent = shrink(extent, pool, 2, 0)
            self.body.add_module(f"stage{i}", stage)
            self.tap_points += [f"body.stage{i}.act{len(convs)}", f"body.stage{i}.pool"]
            self.blocks.append(f"body.stage{i}")
        if min(extent) < 1:
            raise UserError(
                f"images of {image_size} pixels are too small for {len(stages)} pooled stages; "
                "use a smaller network, or larger images"
            )
        self.grid = nn.AdaptiveAvgPool2d(grid) if grid else nn.Identity()
        inputs *= grid * grid if grid else extent[0] * extent[1]
        self.fc = nn.Sequential()
        for i, width in enumerate(hidden, start=1):
            self.fc.add_module(f"fc{i}", nn.Linear(inputs, width))
            self.fc.add_module(f"norm{i}", make_norm(norm, width, flat=True))
            self.fc.add_module(f"act{i}", nn.ReLU())
            if dropout:
                self.fc.add_module(f"drop{i}", nn.Dropout(dropout))
            inputs = width
        self.blocks.append("fc")
        self.head = nn.Linear(inputs, positive("num_classes", num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, num_classes] of images [B, in_channels, H, W]."""
        logits: Tensor = self.head(self.fc(self.grid(self.body(x)).flatten(1)))
        return logits


def shrink(extent: tuple[int, int], kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """Height and width after a convolution or a pooling; below 1 if the window does not fit."""
    high, wide = ((side + 2 * padding - kernel) // stride + 1 for side in extent)
    return high, wide


def cnn20(
    num_classes: int = 10, in_channels: int = 3, norm: Norm = "none", image_size: int | Sequence[int] = 32
) -> PlainCNN:
    """The network of FedLAG's code: six 3x3 convolutions, pooling after each pair, two linear layers.

    It has 1,341,226 parameters. Arguments: see :class:`PlainCNN`.

    Reference: FedLAG, the authors' code.
    """
    stages = [[Conv(width), Conv(width)] for width in (32, 64, 128)]
    return PlainCNN(stages, (512,), num_classes, in_channels, image_size, norm)


def pfllib_cnn(
    num_classes: int = 10, in_channels: int = 3, norm: Norm = "none", image_size: int | Sequence[int] = 32
) -> PlainCNN:
    """PFLlib's network: 5x5 convolutions of 32 and 64 channels with pooling, two linear layers.

    It has 878,538 parameters. Arguments: see :class:`PlainCNN`.

    Reference: Zhang et al., PFLlib, 2025; the network of McMahan et al., 2017, without padding.
    """
    stages = [[Conv(32, 5, 0)], [Conv(64, 5, 0)]]
    return PlainCNN(stages, (512,), num_classes, in_channels, image_size, norm)


def femnist_cnn(
    num_classes: int = 62,
    in_channels: int = 1,
    norm: Norm = "bn_track",
    image_size: int | Sequence[int] = 28,
    dropout: float = 0.5,
) -> PlainCNN:
    """FedMAP's network for FEMNIST: four 3x3 convolutions, pooling after each pair, two linear layers.

    It has 3,374,782 parameters. Arguments: see :class:`PlainCNN`.

    Reference: FedMAP, Table 7.
    """
    stages = [[Conv(32), Conv(64)], [Conv(64), Conv(128)]]
    rate = probability("dropout", dropout)
    return PlainCNN(stages, (512,), num_classes, in_channels, image_size, norm, dropout=rate)


def office_cnn(
    num_classes: int = 31,
    in_channels: int = 3,
    norm: Norm = "bn_track",
    image_size: int | Sequence[int] = 224,
) -> PlainCNN:
    """FedBN's AlexNet with BatchNorm for Office pictures of 224x224 (57 million parameters).

    Images need at least 63x63 pixels. Arguments: see :class:`PlainCNN`.

    Reference: Li et al., FedBN, 2021; FedMAP, Table 4.
    """
    stages = [
        [Conv(64, 11, 2, 4)],
        [Conv(192, 5, 2)],
        [Conv(384), Conv(256), Conv(256)],
    ]
    return PlainCNN(stages, (4096, 4096), num_classes, in_channels, image_size, norm, pool=3, grid=6)
