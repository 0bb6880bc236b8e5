"""Made-up street scenes: what towns differ in, that frames follow each other, and that a seed gives the same film."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.data.sets.street_drawing import CLASSES, VOID

SMALL = {"towns": 4, "frames": 12, "length": 4, "size": (32, 48)}


def scenes(**options: object) -> fl.data.Dataset:
    return fl.data.load("street_scenes", **{**SMALL, **options})


def frequencies(data: fl.data.Dataset) -> np.ndarray:
    """Towns x classes, shares of the valid pixels."""
    counts = np.stack(
        [np.bincount(data.train.y[data.train_groups == k].flatten(), minlength=256) for k in range(len(data.groups))]
    )[:, : len(CLASSES)]
    return counts / counts.sum(1, keepdims=True)


def brightness(data: fl.data.Dataset) -> np.ndarray:
    return np.array([float(data.train.x[data.train_groups == k].float().mean()) for k in range(len(data.groups))])


def test_form() -> None:
    data = scenes()
    x, y = data.train.x, data.train.y
    assert x.dtype == torch.uint8
    assert x.shape[1:] == (3, 32, 48)
    assert y.shape == (len(x), 32, 48)
    assert set(np.unique(y)) <= {*range(len(CLASSES)), VOID}
    assert data.classes == CLASSES
    assert len(data.sequences) == len(x)


def test_every_class_and_void_occur() -> None:
    y = fl.data.load("street_scenes", towns=8, frames=24).train.y
    assert set(y.unique().tolist()) == {*range(len(CLASSES)), VOID}


def test_the_seed_decides_everything() -> None:
    a, b, c = scenes(), scenes(), scenes(seed=1)
    assert torch.equal(a.train.x, b.train.x)
    assert torch.equal(a.train.y, b.train.y)
    assert a.train.x.shape != c.train.x.shape or not torch.equal(a.train.x, c.train.x)


def test_each_skew_is_a_skew_of_its_own() -> None:
    even = {"layout": 0.0, "weather": 0.0, "quantity": 0.0}
    plain, labels, light, sizes = (
        scenes(**(even | more), frames=24, towns=6)
        for more in ({}, {"layout": 1.0}, {"weather": 1.0}, {"quantity": 0.8})
    )
    spread = lambda values: float(np.std(values, axis=0).sum())  # noqa: E731
    assert spread(frequencies(labels)) > 2 * spread(frequencies(plain))
    assert spread(brightness(light)) > 4 * spread(brightness(plain))
    count = lambda data: np.bincount(data.train_groups)  # noqa: E731
    assert len(set(count(plain))) == 1
    assert len(set(count(sizes))) > 1
    # What is to be seen does not depend on the weather.
    assert torch.equal(light.train.y, plain.train.y)


def test_frames_of_a_sequence_follow_each_other() -> None:
    data = scenes(weather=0.0)
    y = data.train.y
    same = (y[1:] == y[:-1]).float().mean((1, 2)).numpy()
    inside = data.sequences[1:] == data.sequences[:-1]
    assert same[inside].mean() > same[~inside].mean() + 0.05
    assert same[inside].max() < 1


def test_a_class_can_be_told_from_its_colours() -> None:
    """A linear classifier of single pixels of a clear day beats always saying the commonest class."""
    data = scenes(weather=0.0, frames=24)
    x = data.train.x.permute(0, 2, 3, 1).reshape(-1, 3).double() / 255
    y = data.train.y.flatten()
    x, y = x[y != VOID], y[y != VOID]
    design = torch.cat([x, x**2, torch.ones(len(x), 1)], 1)
    target = (y[:, None] == torch.arange(len(CLASSES))).double()
    weights = torch.linalg.lstsq(design, target).solution
    accuracy = float(((design @ weights).argmax(1) == y).double().mean())
    assert accuracy > float(target.mean(0).max()) + 0.15


@pytest.mark.parametrize(
    "wrong", [{"towns": 0}, {"size": (8, 48)}, {"size": 32}, {"layout": -1.0}, {"frames": 2.5}, {"weather": "fog"}]
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(fl.UserError, match="street_scenes"):
        scenes(**wrong)
