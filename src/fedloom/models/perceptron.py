"""Multi-layer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedloom.errors import UserError
from fedloom.models.parts import Norm, TappableNetwork, make_norm, positive, positives


class MLP(TappableNetwork):
    """Linear layers with ReLU between them; inputs of any shape are flattened to [B, in_features]."""

    def __init__(
        self, in_features: int, num_classes: int, hidden: int | Sequence[int] = (64,), norm: Norm = "none"
    ) -> None:
        super().__init__()
        widths = (positive("in_features", in_features), *positives("hidden", hidden))
        self.body = nn.Sequential()
        for i, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            self.body.add_module(f"fc{i}", nn.Linear(inputs, outputs, bias=norm == "none"))
            self.body.add_module(f"norm{i}", make_norm(norm, outputs, flat=True))
            self.body.add_module(f"act{i}", nn.ReLU())
            self.tap_points.append(f"body.act{i}")
        self.head = nn.Linear(widths[-1], positive("num_classes", num_classes))
        self.blocks = list(self.tap_points)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, num_classes]."""
        logits: Tensor = self.head(self.body(x.flatten(1)))
        return logits


def mlp(in_features: int = 64, num_classes: int = 10, hidden: int | Sequence[int] = (64,), norm: Norm = "none") -> MLP:
    """Multi-layer perceptron with ReLU, for tables and flattened images.

    Args:
        in_features: numbers per sample.
        num_classes: width of the output.
        hidden: widths of the hidden layers; an empty list gives logistic regression.
        norm: "bn_batch", "bn_track", "gn" or "none".

    Example:
        >>> mlp(in_features=30, num_classes=2, hidden=(32, 16)).tap_points
        ['body.act1', 'body.act2']
    """
    return MLP(in_features, num_classes, hidden, norm)


def fedmap_mlp(in_features: int = 30, num_classes: int = 1, norm: Norm = "none") -> MLP:
    """FedMAP's perceptron for two classes, 30-32-16-1, which returns one logit.

    Args:
        in_features: numbers per sample; 30 in the paper, 31 in its code.
        num_classes: 1, or 2 for the same thing: two classes told apart by one logit.
        norm: "bn_batch", "bn_track", "gn" or "none".

    Reference: FedMAP, Table 3; the sigmoid belongs to the binary task's loss.
    """
    if positive("num_classes", num_classes) > 2:
        raise UserError(
            f"fedmap_mlp returns one logit for two classes, but num_classes = {num_classes}; "
            "use mlp with hidden = [32, 16] for more classes"
        )
    return MLP(in_features, 1, (32, 16), norm)
