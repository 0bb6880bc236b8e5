"""Networks that nobody tuned anything for: what users bring along."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

WORDS = 80
"""Characters of texts, and the length of these."""


def lenet() -> nn.Module:
    """LeCun's, with its own activations and pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def grouped() -> nn.Module:
    """Convolutions with group normalisation and GELU, dropout before the classifier."""
    parts: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256), (256, 512)):
        parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.GELU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *parts, nn.Flatten(), nn.Dropout(0.3), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10)
    )  # fmt: skip


def heartbeats() -> nn.Module:
    """Convolutions over time, for signals of 12 leads."""
    return nn.Sequential(
        nn.Conv1d(12, 32, 7, padding=3), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(32, 64, 5, padding=2), nn.BatchNorm1d(64), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(64, 5),
    )  # fmt: skip


def wide() -> nn.Module:
    """A perceptron whose layers are large products."""
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


class Recurrent(nn.Module):
    """Two layers of LSTM over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(WORDS, 8), nn.LSTM(8, 128, 2, batch_first=True)
        self.head = nn.Linear(128, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.lstm(self.embedding(x))[0][:, -1])
        return made


class Transformer(nn.Module):
    """Two layers of a transformer's encoder over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True), 2)
        self.head = nn.Linear(64, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.encoder(self.embedding(x)).mean(1))
        return made


def vit() -> nn.Module:
    """timm's smallest vision transformer, for small pictures."""
    import timm

    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)
    return model


def mobile() -> nn.Module:
    """torchvision's MobileNetV3."""
    import torchvision

    model: nn.Module = torchvision.models.mobilenet_v3_small(num_classes=10)
    return model


def installed(**makers: Callable[[], nn.Module]) -> dict[str, Callable[[], nn.Module]]:
    """Those whose library, which is their name here, can be imported."""
    return {make.__name__: make for library, make in makers.items() if importlib.util.find_spec(library) is not None}


def data(kind: str, clients: int, rows: int = 500) -> list[tuple[Tensor, Tensor]]:
    """Random rows: ``texts``, ``signals`` or ``rows``."""
    draw = torch.Generator().manual_seed(0)

    def one() -> tuple[Tensor, Tensor]:
        if kind == "texts":
            return torch.randint(WORDS, (rows, WORDS), generator=draw), torch.randint(WORDS, (rows,), generator=draw)
        shape, classes = ((12, 250), 5) if kind == "signals" else ((784,), 10)
        return torch.randn(rows, *shape, generator=draw), torch.randint(classes, (rows,), generator=draw)

    return [one() for _ in range(clients)]
