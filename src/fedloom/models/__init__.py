"""The networks that fedloom ships, and their construction by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fedloom.errors import UnknownName, UserError
from fedloom.models.convnet import convnet3, convnet4
from fedloom.models.deeplab import deeplabv3plus_resnet18
from fedloom.models.parts import image_extent
from fedloom.models.perceptron import fedmap_mlp, mlp
from fedloom.models.plain_cnn import cnn20, femnist_cnn, office_cnn, pfllib_cnn
from fedloom.models.resnet import resnet9, resnet18, resnet20
from fedloom.models.seaformer import seaformer_s, seaformer_t
from fedloom.models.topformer import topformer_b, topformer_s, topformer_t

__all__ = [
    "ALIASES",
    "MODELS",
    "build",
    "cnn20",
    "convnet3",
    "convnet4",
    "deeplabv3plus_resnet18",
    "describe",
    "fedmap_mlp",
    "femnist_cnn",
    "lag_cnn",
    "mlp",
    "office_cnn",
    "pfllib_cnn",
    "resnet18",
    "resnet20",
    "resnet9",
    "seaformer_s",
    "seaformer_t",
    "topformer_b",
    "topformer_s",
    "topformer_t",
]

lag_cnn = cnn20

MODELS: dict[str, Callable[..., nn.Module]] = {
    factory.__name__: factory
    for factory in (
        mlp,
        fedmap_mlp,
        convnet3,
        convnet4,
        cnn20,
        pfllib_cnn,
        femnist_cnn,
        office_cnn,
        resnet9,
        resnet18,
        resnet20,
        deeplabv3plus_resnet18,
        topformer_t,
        topformer_s,
        topformer_b,
        seaformer_t,
        seaformer_s,
    )
}
"""Every network by name, as a function that makes it."""

ALIASES: dict[str, str] = {"lag_cnn": "cnn20"}
"""Second names."""


def find(name: str) -> Callable[..., nn.Module]:
    """The factory of a network, by its name or second name."""
    known = ALIASES.get(name, name)
    if known not in MODELS:
        raise UnknownName("model", name, [*MODELS, *ALIASES])
    return MODELS[known]


def describe(name: str) -> str:
    """One line on a network: the first of its factory's documentation.

    Example:
        >>> describe("mlp")
        'Multi-layer perceptron with ReLU, for tables and flattened images.'
    """
    return (inspect.getdoc(find(name)) or "").splitlines()[0]


def build(name: str, *, num_classes: int, sample_shape: Sequence[int], **options: Any) -> nn.Module:
    """Build a network by name, with the sizes that follow from the data filled in.

    Args:
        name: a key of MODELS, or an alias.
        num_classes: width of the output.
        sample_shape: shape of one input without the batch axis: (features,) or (channels, height, width).
        **options: the factory's other arguments.

    Example:
        >>> build("convnet3", num_classes=10, sample_shape=(1, 8, 8)).head
        Linear(in_features=64, out_features=10, bias=True)

    Raises:
        UnknownName: no such network.
        UserError: an option that the network does not have, or one that contradicts the data.
    """
    factory = find(name)
    shape = tuple(int(side) for side in sample_shape)
    accepted = inspect.signature(factory).parameters
    for option in options:
        if option not in accepted:
            settable = ", ".join(p for p in accepted if p != "num_classes")
            raise UserError(f"model {name!r} has no option {option!r}; it has: {settable}")
    filled: dict[str, Any] = {"num_classes": num_classes}
    if "in_features" in accepted:
        filled["in_features"] = math.prod(shape)
    else:
        if len(shape) != 3:
            raise UserError(
                f"model {name!r} takes images of shape (channels, height, width), but a sample of the data "
                f"has shape {shape}; reshape the data, or use a model for vectors such as 'mlp'"
            )
        filled["in_channels"] = shape[0]
        if "image_size" in accepted:
            filled["image_size"] = shape[1:]
            if "image_size" in options:
                options["image_size"] = image_extent(options["image_size"])
    for key, value in filled.items():
        if options.setdefault(key, value) != value:
            raise UserError(
                f"model {name!r}: {key} = {options[key]!r} was given, but the data needs {value!r}; leave it out"
            )
    model = factory(**options)
    smallest = getattr(model, "min_size", 1)
    if "in_channels" in accepted and min(shape[1:]) < smallest:
        raise UserError(
            f"model {name!r} needs images of at least {smallest}x{smallest} pixels, but the data has "
            f"{shape[1]}x{shape[2]}; use a smaller network"
        )
    return model
