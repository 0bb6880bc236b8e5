"""FedMAP's synthetic data: its three skews, its geometry, its determinism."""

import numpy as np
import pytest
import torch

from fedloom.data import load, synthetic
from fedloom.data.sets.synthetic import _rotation
from fedloom.errors import UserError
from fedloom.rng import stream


def client(data, k):
    mine = torch.from_numpy(data.train_groups == k)
    return data.train.x[mine].double().numpy(), data.train.y[mine].numpy()


@pytest.mark.parametrize(
    ("skew", "sizes", "zeros"),
    [
        ("none", [2000] * 10, [0.5] * 10),
        ("feature", [2000] * 10, [0.5] * 10),
        ("quantity", [2000] * 5 + [500] * 5, [0.5] * 10),
        ("label", [2000] * 10, [0.5] * 5 + [0.85] * 5),
    ],
)
def test_sizes_and_classes_of_the_papers_scenarios(skew, sizes, zeros):
    data = synthetic(skew)
    assert data.train.x.shape[1] == 30
    for k in range(10):
        _, y = client(data, k)
        assert len(y) == sizes[k]
        assert (y == 0).mean() == pytest.approx(zeros[k])


@pytest.mark.parametrize("nuisance", [2.0, 9.0])
def test_geometry_before_the_skew(nuisance):
    data = synthetic("none", samples=20_000, clients=1, nuisance=nuisance)
    x, y = client(data, 0)
    hidden = x @ _rotation(30, stream(0, "partition", "rotation"))
    ball, sphere = hidden[y == 0], hidden[y == 1]
    assert np.allclose(np.cov(ball[:, :4].T), 2 * np.eye(4), atol=0.15)
    radius = np.linalg.norm(sphere[:, :4], axis=1)
    assert radius.mean() == pytest.approx(8, abs=0.06)
    assert radius.var() == pytest.approx(2, abs=0.12)
    direction = sphere[:, :4] / radius[:, None]
    assert np.allclose(direction.mean(0), 0, atol=0.03)
    assert np.allclose(direction.T @ direction / len(direction), np.eye(4) / 4, atol=0.02)
    assert np.allclose(hidden[:, 4:].var(0), nuisance, rtol=0.06)


def test_rotation_is_orthogonal_and_shared():
    q = _rotation(30, stream(0, "partition", "rotation"))
    assert np.allclose(q @ q.T, np.eye(30), atol=1e-12)
    data = synthetic("none")
    for k in (0, 7):
        x, y = client(data, k)
        assert np.linalg.norm((x @ q)[y == 1][:, :4], axis=1).mean() == pytest.approx(8, abs=0.2)


def test_feature_skew_grows_with_the_client():
    data = synthetic("feature")
    shift = [np.abs(client(data, k)[0].mean(0)).mean() for k in range(10)]
    assert shift[9] > 4 * shift[0]
    covariances = [np.cov(client(data, k)[0].T) for k in (0, 1)]
    assert np.linalg.norm(covariances[0] - covariances[1]) > 0.5 * np.linalg.norm(covariances[0])


def test_deterministic_and_repeatable_from_its_origin():
    one, same, other = synthetic("label"), synthetic("label"), synthetic("label", seed=1)
    assert torch.equal(one.train.x, same.train.x)
    assert not torch.equal(one.train.x, other.train.x)
    small = synthetic("quantity", samples=100, few=20, seed=3).partition(test=0.3, seed=2)
    assert small.origin["options"] == {"skew": "quantity", "samples": 100, "few": 20, "seed": 3}
    again = load("synthetic", **small.origin["options"]).partition(test=0.3, seed=2)
    assert all(torch.equal(a.test.x, b.test.x) for a, b in zip(small, again, strict=True))


def test_clients_are_standardised_each_on_its_training_rows():
    for site in synthetic("feature").partition(test=0.3):
        assert len(site.train) == 1400
        assert site.train.x.mean(0).abs().max() < 1e-4
        assert (site.train.x.std(0, correction=0) - 1).abs().max() < 1e-4


def test_clients_differ_in_numbers_only_where_asked():
    """Adding clients leaves the first ones as they are."""
    few, many = synthetic("feature", clients=3), synthetic("feature", clients=6)
    for k in range(3):
        assert (client(few, k)[0] == client(many, k)[0]).all()


@pytest.mark.parametrize(
    "options", [{"skew": "both"}, {"clients": 0}, {"samples": 1}, {"share": 1.0}, {"nuisance": 0.0}, {"intrinsic": 31}]
)
def test_arguments_out_of_range(options):
    with pytest.raises(UserError, match="synthetic"):
        synthetic(**options)
