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


@pytest.mark.parametrize(("name", "body"), [("convnet3", 74_880), ("convnet4", 447_360), ("resnet18", 11_168_832)])
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


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("deeplabv3plus_resnet18", {11: 16_605_611, 19: 16_607_667, 23: 16_608_695}),
        ("topformer_t", {11: 1_371_723, 19: 1_372_755, 23: 1_373_271, 150: 1_389_654}),
        ("topformer_s", {11: 3_007_835, 19: 3_009_379, 23: 3_010_151, 150: 3_034_662}),
        ("topformer_b", {11: 5_026_923, 19: 5_028_979, 23: 5_030_007, 150: 5_062_646}),
        ("seaformer_t", {11: 1_653_835, 19: 1_654_611, 23: 1_654_999, 150: 1_667_318}),
        ("seaformer_s", {11: 3_972_187, 19: 3_973_219, 23: 3_973_735, 150: 3_990_118}),
    ],
)
def test_segmentation_parameters(name, counts):
    for num_classes, expected in counts.items():
        with torch.device("meta"):
            assert count(getattr(models, name)(num_classes=num_classes)) == expected


@pytest.mark.parametrize("num_classes", [11, 19, 23])
def test_separable_deeplab_has_12_34_million_parameters(num_classes):
    with torch.device("meta"):
        model = models.deeplabv3plus_resnet18(num_classes=num_classes, separable=True)
    assert round(count(model) / 1e6, 2) == 12.34


def test_deeplab_parts():
    model = models.deeplabv3plus_resnet18()
    backbone = [model.stem, model.layer1, model.layer2, model.layer3, model.layer4]
    assert sum(map(count, backbone)) == 11_176_512
    assert count(model.aspp) == 4_131_840


@pytest.mark.parametrize(
    ("name", "pyramid", "transformer", "injections", "head"),
    [
        ("topformer_t", 256_832, 1_037_056, 76_032, 19_734),
        ("topformer_s", 688_272, 2_120_064, 160_128, 66_198),
        ("topformer_b", 1_097_056, 3_586_048, 274_944, 104_598),
    ],
)
def test_topformer_parts(name, pyramid, transformer, injections, head):
    model = getattr(models, name)(num_classes=150)
    assert count(model.pyramid) == pyramid
    assert count(model.transformer) == transformer
    assert count(model.injections) == injections
    assert count(model.fuse) + count(model.head) == head


@pytest.mark.parametrize(
    ("name", "stages", "transformers", "backbone"),
    [
        ("seaformer_t", [6_032, 12_752, 37_792, 42_688, 231_488], [384_000, 905_344], 1_620_096),
        ("seaformer_s", [8_808, 25_464, 82_032, 109_760, 350_784], [1_039_296, 2_296_512], 3_912_656),
    ],
)
def test_seaformer_parts(name, stages, transformers, backbone):
    model = getattr(models, name)()
    assert [count(model.get_submodule(f"stage{i}")) for i in range(1, 6)] == stages
    assert [count(model.transformer1), count(model.transformer2)] == transformers
    assert sum(stages) + sum(transformers) == backbone
