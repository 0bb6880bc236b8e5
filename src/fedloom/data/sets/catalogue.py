"""The data sets known by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.data.dataset import Dataset
from fedloom.data.readers.masks import from_masks
from fedloom.data.rows import Rows
from fedloom.data.sets import clinical, images, street
from fedloom.data.sets.street_scenes import street_scenes
from fedloom.data.sets.synthetic import synthetic
from fedloom.errors import UnknownName, UserError


def digits() -> Dataset:
    """Handwritten digits, 8 x 8, 1,797 rows, 10 classes; comes with the package.

    Reference:
        Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository (1998), as in
        scikit-learn.
    """
    asset = resources.files("fedloom.data") / "assets" / "digits.npz"
    with asset.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        pictures, labels = arrays["images"], arrays["labels"]
    x = torch.from_numpy(pictures.astype(np.float32) / 16).unsqueeze(1)
    return Dataset("digits", Rows(x, torch.from_numpy(labels.astype(np.int64))), classes=tuple("0123456789"))


DATASETS: dict[str, Callable[..., Dataset]] = {
    "camvid": street.camvid,
    "cifar10": images.cifar10,
    "cifar100": images.cifar100,
    "cityscapes": street.cityscapes,
    "digits": digits,
    "emnist": images.emnist,
    "emnist47": images.emnist47,
    "fashion_mnist": images.fashion_mnist,
    "har": clinical.har,
    "heart_disease": clinical.heart_disease,
    "masks": from_masks,
    "mnist": images.mnist,
    "office_caltech10": images.office_caltech10,
    "street_scenes": street_scenes,
    "synthetic": synthetic,
    "synthia_sf": street.synthia_sf,
    "tcga_brca": clinical.tcga_brca,
}


def load(name: str, *, data_dir: str | Path | None = None, **options: Any) -> Dataset:
    """A data set by name: from `data_dir`, else from `FEDLOOM_DATA` or the user's cache, else downloaded.

    Args:
        name: One of `DATASETS`.
        data_dir: The only folder to look in and to download to.
        **options: Options of this data set, such as `kind` of emnist.

    Example:
        >>> tuple(load("digits").train.x.shape)
        (1797, 1, 8, 8)
    """
    if name not in DATASETS:
        raise UnknownName("data set", name, DATASETS)
    reader = DATASETS[name]
    known = inspect.signature(reader).parameters
    for option in options:
        if option not in known:
            raise UserError(f"data set {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}.")
    if "data_dir" in known:
        options["data_dir"] = data_dir
    return reader(**options)
