"""The data sets known by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import torch

from fedloom.data.dataset import Dataset
from fedloom.data.rows import Rows
from fedloom.errors import UnknownName


def _digits() -> Dataset:
    """Handwritten digits, 8 x 8, 1,797 rows, 10 classes; comes with the package.

    Reference:
        Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository (1998); the copy of
        scikit-learn.
    """
    asset = resources.files("fedloom.data") / "assets" / "digits.npz"
    with asset.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    x = torch.from_numpy(images.astype(np.float32) / 16).unsqueeze(1)
    return Dataset("digits", Rows(x, torch.from_numpy(labels.astype(np.int64))), classes=tuple("0123456789"))


DATASETS: dict[str, Callable[..., Dataset]] = {"digits": _digits}


def load(name: str, **options: Any) -> Dataset:
    """A data set by name.

    Args:
        name: One of `DATASETS`.
        **options: Options of its reader.

    Example:
        >>> tuple(load("digits").train.x.shape)
        (1797, 1, 8, 8)
    """
    if name not in DATASETS:
        raise UnknownName("data set", name, DATASETS)
    return DATASETS[name](**options)
