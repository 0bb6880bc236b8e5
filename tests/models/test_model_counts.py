"""Trainable parameters, against the papers' tables as recomputed in the specification."""

from __future__ import annotations

import pytest
import torch

from fedloom import models
from tests.models.cases import count


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mlp", {"in_features": 784, "hidden": 100}, 784 * 100 + 100 + 100 * 10 + 10),
        ("mlp", {"in_features": 30, "num_classes": 1, "hidden": [32, 16]}, 1_537),
        ("fedmap_mlp", {}, 1_537),
        ("fedmap_mlp", {"in_features": 31}, 1_569),
        ("convnet3", {}, 77_935),
        ("convnet4", {}, 448_650),
        ("convnet3", {"norm": "none"}, 77_935 - 3 * 128),
        ("cnn20", {}, 1_341_226),
        ("lag_cnn", {}, 1_341_226),
        ("pfllib_cnn", {}, 878_538),
        ("femnist_cnn", {}, 3_374_782),
        ("resnet18", {"num_classes": 100}, 11_220_132),
        ("resnet18", {"num_classes": 200}, 11_271_432),
        ("resnet9", {}, 1_695_210),
        ("resnet9", {"num_classes": 62}, 1_701_918),
        ("resnet20", {}, 4_383_434),
        ("resnet20", {"shortcut": "projection"}, 4_425_162),
        ("resnet20", {"num_classes": 100, "depths": (2, 3, 4)}, 5_501_732),
        ("resnet20", {"num_classes": 100, "depths": (2, 3, 4), "shortcut": "projection"}, 5_543_460),
    ],
)
def test_parameters(name, options, expected):
    assert count(getattr(models, name)(**options)) == expected


def test_office_parameters():
    with torch.device("meta"):
        assert count(models.office_cnn()) == 57_149_535


@pytest.mark.parametrize(
    ("name", "body"), [("convnet3", 74_880), ("convnet4", 447_360), ("resnet18", 11_168_832)]
)
def test_body_and_head(name, body):
    model = getattr(models, name)()
    assert count(model) - count(model.head) == body


@pytest.mark.parametrize(
    ("name", "num_classes", "mebibytes"),
    [("convnet3", 47, 0.59), ("convnet4", 10, 3.42), ("resnet18", 100, 85.60), ("resnet18", 200, 85.99)],
)
def test_fedaims_message(name, num_classes, mebibytes):
    model = getattr(models, name)(num_classes=num_classes)
    floats = count(model) - count(model.head) + num_classes * model.head.in_features
    assert round(2 * 4 * floats / 2**20, 2) == mebibytes


def test_cnn20_has_the_sixteen_tensors_that_fedlag_ranks():
    assert len(list(models.cnn20().parameters())) == 16


def test_batch_norm_without_running_statistics_has_no_buffers():
    assert not list(models.convnet4().buffers())
    assert not list(models.resnet18(norm="bn_batch").buffers())
    assert count(models.resnet18(norm="bn_batch")) == 11_220_132
