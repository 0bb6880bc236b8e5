"""Made-up data whose difficulty is known."""

from __future__ import annotations

import inspect

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset
from fedloom.data.preprocess import Preprocess
from fedloom.data.rows import Rows
from fedloom.errors import UserError
from fedloom.rng import stream

SKEWS = ("feature", "label", "none", "quantity")

Matrix = NDArray[np.float64]


def synthetic(
    skew: str = "feature",
    *,
    clients: int = 10,
    samples: int = 2000,
    few: int = 500,
    share: float = 0.85,
    nuisance: float = 9.0,
    features: int = 30,
    intrinsic: int = 4,
    seed: int = 0,
) -> Dataset:
    """FedMAP's two classes in a hidden subspace: a ball (class 0) and the sphere around it (class 1).

    Class 0: z ~ N(0, 2 I_d). Class 1: z = r u, r ~ N(8, 2), u uniform on the unit sphere. Then x = Q (z, e)
        with one random
    rotation Q for all clients and nuisance e ~ N(0, v I). With a skew, client k (from 0) sees A_k x + b_k,
    A_k standard normal, b_k standard normal times 5(k + 1); "quantity" and "label" come on top of that, for
    the second half of the clients.

    Args:
        skew: "none", "feature", "quantity" (the second half has `few` rows) or "label" (the second half has
            the share `share` of class 0).
        clients: Number of natural clients.
        samples: Rows of a client.
        few: Rows of the small clients of "quantity".
        share: Share of class 0 at the skewed clients of "label".
        nuisance: The variance v; 2 in the paper's text, 9 in its code, which gives the paper's level of
            accuracy.
        features: Number of features.
        intrinsic: The dimension d of the subspace.
        seed: Seed of everything.

    Example:
        >>> data = synthetic("quantity").partition(test=0.3)
        >>> [len(client.train) for client in data]
        [1400, 1400, 1400, 1400, 1400, 350, 350, 350, 350, 350]

    Reference:
        Zhang et al., FedMAP: unlocking potential in personalised federated learning through bi-level MAP
        optimisation, appendix B.1.
    """
    if skew not in SKEWS:
        raise UserError(f"synthetic: skew = {skew!r}; expected one of {', '.join(SKEWS)}.")
    if not 1 <= intrinsic <= features or clients < 1 or min(samples, few) < 2 or not 0 < share < 1 or not nuisance > 0:
        raise UserError(
            "synthetic: expected 1 <= intrinsic <= features, clients >= 1, samples and few >= 2, 0 < share "
            "< 1, nuisance > 0."
        )
    rotation = _rotation(features, stream(seed, "partition", "rotation"))
    inputs, labels, sizes = [], [], []
    for k in range(clients):
        draw = stream(seed, "partition", "client", k)
        odd = k >= clients // 2 + clients % 2
        size = few if skew == "quantity" and odd else samples
        zeros = int(np.floor(size * (share if skew == "label" and odd else 0.5) + 0.5))
        y = draw.permutation(np.arange(size) >= zeros).astype(np.int64)
        hidden = np.where(
            y[:, None] == 0, np.sqrt(2) * draw.standard_normal((size, intrinsic)), _sphere(size, intrinsic, draw)
        )
        noise = np.sqrt(nuisance) * draw.standard_normal((size, features - intrinsic))
        x = np.concatenate([hidden, noise], axis=1) @ rotation.T
        if skew != "none":
            x = x @ draw.standard_normal((features, features)).T + 5 * (k + 1) * draw.standard_normal(features)
        inputs.append(x)
        labels.append(y)
        sizes.append(size)
    rows = Rows(torch.from_numpy(np.concatenate(inputs).astype(np.float32)), torch.from_numpy(np.concatenate(labels)))
    values = {"skew": skew, "clients": clients, "samples": samples, "few": few, "share": share}
    values |= {"nuisance": nuisance, "features": features, "intrinsic": intrinsic, "seed": seed}
    defaults = {name: p.default for name, p in inspect.signature(synthetic).parameters.items()}
    return Dataset(
        "synthetic",
        rows,
        classes=("ball", "sphere"),
        groups=tuple(str(k) for k in range(clients)),
        train_groups=np.repeat(np.arange(clients), sizes),
        options={name: value for name, value in values.items() if value != defaults[name]},
        preprocess=Preprocess(scale="standard"),
    )


def _rotation(size: int, draw: np.random.Generator) -> Matrix:
    """A uniformly random orthogonal matrix: QR of a standard normal one, signs fixed by R's diagonal."""
    q, r = np.linalg.qr(draw.standard_normal((size, size)))
    return np.asarray(q * np.sign(np.diag(r)), np.float64)


def _sphere(size: int, dimension: int, draw: np.random.Generator) -> Matrix:
    """Points around the sphere of radius 8: radius N(8, 2), direction uniform."""
    direction = draw.standard_normal((size, dimension))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return np.asarray((8 + np.sqrt(2) * draw.standard_normal((size, 1))) * direction, np.float64)
