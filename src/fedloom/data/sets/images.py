"""Image data sets: MNIST and its kin, CIFAR, Office-Caltech, in their official formats or as packed arrays."""

from __future__ import annotations

import io
import itertools
import math
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.client_data import Scale
from fedloom.data.dataset import Dataset
from fedloom.data.rows import Rows
from fedloom.data.sets.download import Official, Remote, find, load_npz, read_official
from fedloom.errors import UserError

Bytes = NDArray[np.uint8]

_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST = Official(
    "mnist",
    ("mnist", "MNIST/raw"),
    tuple(
        Remote(f"{name}.gz", (f"{_MIRROR}{name}.gz",), md5)
        for name, md5 in zip(
            _IDX,
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            strict=True,
        )
    ),
    ("mnist_raw.tar",),
)
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FASHION = Official(
    "fashion_mnist",
    ("fashion_mnist", "FashionMNIST/raw"),
    tuple(
        Remote(f"{name}.gz", (f"{_FASHION_URL}{name}.gz",), md5)
        for name, md5 in zip(
            _IDX,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            strict=True,
        )
    ),
)
_EMNIST = Official(
    "emnist",
    ("emnist", "EMNIST/raw"),
    (
        Remote(
            "gzip.zip", ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",), "58c8d27c78d21e728a6bc7b3cc06412e"
        ),
    ),
    ("emnist.zip",),
)
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_CIFAR10 = Official(
    "cifar10",
    ("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
    (Remote("cifar-10-binary.tar.gz", (f"{_TORONTO}cifar-10-binary.tar.gz",), "c32a1d4ab5d03f1284b67883e8d87530"),),
)
_CIFAR100 = Official(
    "cifar100",
    ("cifar100", "cifar-100-binary", "cifar100/cifar-100-binary"),
    (Remote("cifar-100-binary.tar.gz", (f"{_TORONTO}cifar-100-binary.tar.gz",), "03b5dce01913d631647c71ecec9e9cb8"),),
)
_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_MERGED = tuple(
    c for c in string.digits + string.ascii_uppercase + string.ascii_lowercase if c not in "cijklmopsuvwxyz"
)
_EMNIST_SPLITS = {
    "balanced": _MERGED,
    "bymerge": _MERGED,
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "digits": tuple(string.digits),
    "letters": tuple(string.ascii_lowercase),
    "mnist": tuple(string.digits),
}


def _rows(images: Bytes, labels: NDArray[Any]) -> Rows:
    """Images N, H, W or N, H, W, C as N, C, H, W in bytes."""
    tensor = torch.from_numpy(np.array(images, order="C"))
    tensor = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2).contiguous()
    return Rows(tensor, torch.from_numpy(labels.astype(np.int64)))


def _idx(content: bytes, name: str) -> Bytes:
    """An array in the idx format: two zero bytes, type 8 (uint8), number of axes, sizes, values."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise UserError(f"{name} is not an idx file of bytes.")
    first = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:first].ljust(first - 4, b"\0"), ">u4"))
    if len(content) != first + math.prod(shape):
        raise UserError(f"{name} has {len(content)} bytes, which does not fit {shape}. Is the file complete?")
    return np.frombuffer(content, np.uint8, offset=first).reshape(shape)


def _four(source: Official, names: tuple[str, ...], data_dir: str | Path | None) -> list[Bytes]:
    content = read_official(source, names, data_dir)
    x, y, x_test, y_test = (_idx(content[name], name) for name in names)
    if len(x) != len(y) or len(x_test) != len(y_test):
        raise UserError(f"data set {source.name!r}: numbers of pictures and labels differ. Get the files again.")
    return [x, y, x_test, y_test]


def mnist(data_dir: str | Path | None = None) -> Dataset:
    """Handwritten digits, 28 x 28, 60,000 + 10,000 rows, 10 classes (LeCun et al., 1998)."""
    x, y, x_test, y_test = _four(_MNIST, _IDX, data_dir)
    scale = Scale((0.1307,), (0.3081,))
    return Dataset("mnist", _rows(x, y), _rows(x_test, y_test), tuple(string.digits), scale)


def fashion_mnist(data_dir: str | Path | None = None) -> Dataset:
    """Clothes, 28 x 28, 60,000 + 10,000 rows, 10 classes (Xiao et al., 2017)."""
    x, y, x_test, y_test = _four(_FASHION, _IDX, data_dir)
    scale = Scale((0.2860,), (0.3530,))
    return Dataset("fashion_mnist", _rows(x, y), _rows(x_test, y_test), _FASHION_CLASSES, scale)


def emnist(kind: str = "balanced", data_dir: str | Path | None = None) -> Dataset:
    """Handwritten letters and digits, 28 x 28, 47 classes in "balanced" (Cohen et al., 2017).

    Args:
        kind: Which official set: "balanced", "bymerge", "byclass", "digits", "letters" or "mnist".
        data_dir: Where to look for the files.
    """
    if kind not in _EMNIST_SPLITS:
        raise UserError(f"emnist: kind = {kind!r}; expected one of {', '.join(sorted(_EMNIST_SPLITS))}.")
    names = tuple(
        f"emnist-{kind}-{part}-{ending}"
        for part in ("train", "test")
        for ending in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    x, y, x_test, y_test = _four(_EMNIST, names, data_dir)
    # The official files hold pictures with rows and columns exchanged; letters are numbered from 1.
    first = 1 if kind == "letters" else 0
    train = _rows(x.transpose(0, 2, 1), y - np.uint8(first))
    test = _rows(x_test.transpose(0, 2, 1), y_test - np.uint8(first))
    options = {} if kind == "balanced" else {"kind": kind}
    return Dataset("emnist", train, test, _EMNIST_SPLITS[kind], Scale((0.1751,), (0.3332,)), options=options)


def emnist47(data_dir: str | Path | None = None) -> Dataset:
    """Handwritten letters and digits, 28 x 28, 35,250 + 7,050 rows, 47 classes, from emnist47.npz.

    Genuine EMNIST images in another split: numbers are not comparable with published ones of "balanced".
    """
    z = load_npz("emnist47", "emnist47.npz", data_dir)
    train, test = (_rows(z[f"{part}_images"], z[f"{part}_labels"]) for part in ("train", "test"))
    return Dataset("emnist47", train, test, tuple(map(str, z["classes"])), Scale((0.1751,), (0.3332,)))


def _cifar(content: dict[str, bytes], names: tuple[str, ...], heads: int) -> Rows:
    """Records of `heads` label bytes, of which the last is the class, and 3 x 32 x 32 pixel bytes."""
    size = heads + 3072
    for name in names:
        if len(content[name]) % size:
            raise UserError(f"{name} is not a whole number of records of {size} bytes. Is the file complete?")
    records = np.concatenate([np.frombuffer(content[name], np.uint8).reshape(-1, size) for name in names])
    images = torch.from_numpy(records[:, heads:].reshape(-1, 3, 32, 32).copy())
    return Rows(images, torch.from_numpy(records[:, heads - 1].astype(np.int64)))


def cifar10(data_dir: str | Path | None = None) -> Dataset:
    """Colour pictures, 32 x 32, 50,000 + 10,000 rows, 10 classes (Krizhevsky, 2009)."""
    scale = Scale((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    classes = tuple(_CIFAR10_CLASSES.split())
    if find("cifar10_a.npz", data_dir) is not None:
        a, b = (load_npz("cifar10", f"cifar10_{part}.npz", data_dir) for part in "ab")
        batches = [a[f"data_batch_{i}"] for i in (1, 2, 3)] + [b[f"data_batch_{i}"] for i in (4, 5)]
        train = _rows(np.concatenate([_mosaic(batch) for batch in batches]), a["train_labels"])
        return Dataset("cifar10", train, _rows(_mosaic(b["test_batch"]), a["test_labels"]), classes, scale)
    names = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
    content = read_official(_CIFAR10, (*names, "test_batch.bin"), data_dir)
    return Dataset("cifar10", _cifar(content, names, 1), _cifar(content, ("test_batch.bin",), 1), classes, scale)


def cifar100(data_dir: str | Path | None = None) -> Dataset:
    """Colour pictures, 32 x 32, 50,000 + 10,000 rows, 100 classes (Krizhevsky, 2009)."""
    wanted = ("train.bin", "test.bin", "fine_label_names.txt")
    content = read_official(_CIFAR100, wanted, data_dir)
    classes = tuple(content["fine_label_names.txt"].decode().split())
    train, test = (_cifar(content, (name,), 2) for name in wanted[:2])
    scale = Scale((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    return Dataset("cifar100", train, test, classes, scale)


def office_caltech10(data_dir: str | Path | None = None) -> Dataset:
    """Office objects, 96 x 96, 2,533 rows, 10 classes; 4 domains are the natural clients (Gong et al., 2012)."""
    z = load_npz("office_caltech10", "office_caltech10_96px.npz", data_dir)
    pictures = [_picture(z["jpeg"][a:b].tobytes()) for a, b in itertools.pairwise(z["offsets"])]
    return Dataset(
        "office_caltech10",
        _rows(np.stack(pictures), z["labels"]),
        classes=tuple(map(str, z["classes"])),
        scale=Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        groups=tuple(map(str, z["domains"])),
        train_groups=z["domain"].astype(np.int64),
    )


def _picture(content: bytes) -> Bytes:
    try:
        from PIL import Image
    except ImportError:
        raise UserError('reading pictures needs Pillow: pip install "fedloom[images]".') from None
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def _mosaic(content: Bytes, side: int = 32, tiles: int = 100) -> Bytes:
    """One picture of tiles x tiles small ones, row by row."""
    whole = _picture(content.tobytes())
    return whole.reshape(tiles, side, tiles, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
