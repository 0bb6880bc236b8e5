"""Building networks by name from the shape of the data."""

from __future__ import annotations

import inspect

import pytest
import torch

from fedloom import models
from fedloom.errors import UnknownName, UserError
from fedloom.models.parts import NORMS, DropPath, group_count
from tests.models.cases import CASES


def test_every_network_has_a_case_and_a_sentence():
    assert {c.name for c in CASES} == set(models.MODELS)
    for name in models.MODELS:
        line = models.describe(name)
        assert line.endswith("."), name
        assert len(line) <= 110, name
        assert getattr(models, name) is models.MODELS[name]


def test_factories_share_the_names_of_their_arguments():
    for name, factory in models.MODELS.items():
        arguments = inspect.signature(factory).parameters
        assert {"num_classes", "norm"} <= set(arguments), name
        assert ("in_channels" in arguments) != ("in_features" in arguments), name
        assert all(p.default is not p.empty for p in arguments.values()), name
        assert arguments["norm"].default in NORMS


def test_sizes_follow_from_the_data():
    assert models.build("mlp", num_classes=3, sample_shape=(2, 5)).body.fc1.in_features == 10
    net = models.build("pfllib_cnn", num_classes=7, sample_shape=(1, 28, 28))
    assert net(torch.randn(2, 1, 28, 28)).shape == (2, 7)
    net = models.build("cnn20", num_classes=7, sample_shape=(2, 16, 24), image_size=[16, 24])
    assert net(torch.randn(2, 2, 16, 24)).shape == (2, 7)
    assert isinstance(models.build("lag_cnn", num_classes=3, sample_shape=(3, 8, 8)), type(net))


@pytest.mark.parametrize("num_classes", [1, 2])
def test_fedmap_mlp_gives_one_logit(num_classes):
    model = models.build("fedmap_mlp", num_classes=num_classes, sample_shape=(30,))
    x = torch.randn(4, 30)
    assert model(x).shape == (4, 1)
    assert model(100 * x).abs().max() > 1, "a sigmoid would keep the output in (0, 1)"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("convnet3", {"sample_shape": (30,)}, ["convnet3", "(30,)", "mlp"]),
        ("convnet4", {"sample_shape": (3, 8, 8)}, ["16x16", "8x8"]),
        ("cnn20", {"sample_shape": (3, 4, 4)}, ["too small"]),
        ("office_cnn", {"sample_shape": (3, 62, 224)}, ["too small"]),
        ("convnet3", {"in_channels": 3}, ["in_channels = 3", "1"]),
        ("cnn20", {"image_size": 32}, ["image_size = (32, 32)", "(28, 28)"]),
        ("cnn20", {"image_size": (1, 2, 3)}, ["image_size", "height"]),
        ("mlp", {"in_features": 3}, ["in_features = 3", "784"]),
        ("mlp", {"hidden": "big"}, ["hidden", "'big'"]),
        ("mlp", {"hidden": (8, 0)}, ["hidden[1]", "0"]),
        ("mlp", {"hidden": True}, ["hidden", "True"]),
        ("convnet3", {"norm": "batch"}, ["norm = 'batch'", "'bn_track'"]),
        ("convnet3", {"norm": None}, ["norm = None"]),
        ("convnet3", {"widht": 3}, ["'widht'", "width"]),
        ("convnet3", {"width": 2.5}, ["width = 2.5"]),
        ("resnet20", {"shortcut": "none"}, ["shortcut", "'pad'"]),
        ("resnet20", {"depths": [3, 3]}, ["depths", "three"]),
        ("femnist_cnn", {"dropout": 1.0}, ["dropout = 1.0"]),
        ("deeplabv3plus_resnet18", {"separable": "no"}, ["separable = 'no'", "true or false"]),
        ("topformer_t", {"scaled": 1}, ["scaled = 1"]),
        ("seaformer_t", {"drop_path": -0.1}, ["drop_path = -0.1"]),
        ("fedmap_mlp", {"num_classes": 3}, ["one logit", "3"]),
        ("resnet18", {"num_classes": 0}, ["num_classes = 0"]),
    ],
)
def test_mistakes_are_named(name, arguments, words):
    with pytest.raises(UserError) as raised:
        models.build(name, **({"num_classes": 10, "sample_shape": (1, 28, 28)} | arguments))
    assert all(word in str(raised.value) for word in words), raised.value


def test_unknown_names_get_a_suggestion():
    with pytest.raises(UnknownName, match="convnet4"):
        models.build("convnet_4", num_classes=10, sample_shape=(3, 32, 32))


def test_groups_of_a_group_norm_are_never_single_channels():
    for channels in range(2, 300):
        assert channels % group_count(channels) == 0
        assert channels // group_count(channels) >= min(16, channels)


def test_drop_path_keeps_the_mean_and_drops_whole_samples():
    torch.manual_seed(0)
    drop = DropPath(0.25)
    x = torch.ones(4000, 2, 3)
    out = drop(x)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert all(len(sample.unique()) == 1 for sample in out[:50])
    assert float(out.mean()) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(drop.eval()(x), x)


def test_drop_path_takes_its_noise_from_one_place():
    class Fixed(DropPath):
        def uniform(self, x):
            return torch.tensor([0.0, 0.9]).view(2, 1)

    out = Fixed(0.5)(torch.ones(2, 3))
    assert out.tolist() == [[2.0] * 3, [0.0] * 3]
