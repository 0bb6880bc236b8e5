"""Augmentation: what it does to a picture and its mask, that padding and engines change nothing, and where it applies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from fedloom import rng
from fedloom.data import Augment
from fedloom.engines.vectorised import VectorisedEngine
from tests.helpers import everything, federation, fit, gap, identical, run_of, shared, small_cnn

KEY = torch.tensor(rng.key_of(0, "augment"))


def pictures(n: int = 5, size: tuple[int, int] = (9, 12), channels: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, channels, *size, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 5, (n, *size), generator=draw)


def coded(n: int = 6, size: tuple[int, int] = (9, 12)) -> tuple[Tensor, Tensor]:
    """Pictures whose value is the mask's, so that both must have moved together."""
    y = torch.arange(n * size[0] * size[1]).reshape(n, *size) % 200
    return (y[:, None].double() + 1).expand(n, 3, *size), y


def test_nothing_asked_nothing_done() -> None:
    x, y = pictures()
    a, b = Augment()(x, y, KEY)
    assert torch.equal(a, x)
    assert torch.equal(b, y)


@pytest.mark.parametrize(
    "options",
    [{"flip": 0.5}, {"pad": 3}, {"crop": (5, 7)}, {"crop": (12, 15)}, {"flip": 0.5, "pad": 2, "crop": (6, 6)}],
)
def test_whole_pixel_moves_keep_picture_and_mask_together(options: dict[str, object]) -> None:
    x, y = coded()
    a, b = Augment(**options)(x, y, KEY)
    inside = b != 255
    assert torch.equal(a[:, 0][inside], b[inside].double() + 1)
    assert (a[:, 0][~inside] == 0).all()
    assert inside.any()
    assert len({tuple(m.flatten().tolist()) for m in b - y.reshape(len(y), -1).min(1)[0].reshape(-1, 1, 1)}) > 1


def test_scaling_is_interpolation_of_the_enlarged_picture() -> None:
    """With the window as large as the enlarged picture the result is torch's own resize."""
    x, y = pictures(3, (8, 10))
    twice = Augment(scale=(2.0, 2.0), crop=(16, 20))
    a, b = twice(x, y, KEY)
    expected = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
    assert torch.allclose(a, expected, rtol=0, atol=1e-12)
    assert torch.equal(b, y.repeat_interleave(2, 1).repeat_interleave(2, 2))


def test_small_pictures_are_surrounded_by_void() -> None:
    x, y = pictures(4, (8, 8))
    a, b = Augment(scale=(0.5, 0.5))(x + 10, y, KEY)
    assert ((b != 255).sum((1, 2)) <= 25).all()
    assert ((b != 255).sum((1, 2)) >= 9).all()
    assert (a[:, 0][b == 255] == 0).all()
    assert (a[:, 0][b != 255] > 3).all()


def test_flip_happens_as_often_as_asked() -> None:
    x, y = pictures(2000, (1, 4), 1)
    a, _ = Augment(flip=0.3)(x, y, KEY)
    turned = (a == x.flip(3)).all(-1).flatten()
    assert (turned | (a == x).all(-1).flatten()).all()
    assert float(turned.double().mean()) == pytest.approx(0.3, abs=0.04)


def test_offsets_are_equally_likely() -> None:
    y = torch.arange(4).expand(4000, 1, 4)
    _, found = Augment(crop=(1, 2))(y[:, None].double(), y, KEY)
    counts = np.bincount(found[:, 0, 0].numpy(), minlength=3)
    assert counts.min() > 1200
    assert len(counts) == 3
    _, padded = Augment(pad=1)(y[:, None].double(), y, KEY)
    level = padded[(padded != 255).any(-1).any(-1)]
    assert len(level) == pytest.approx(4000 / 3, abs=150)
    firsts = np.bincount(level[:, 0, 0].numpy(), minlength=256)
    assert firsts[[255, 0, 1]].min() > 370


def test_colour_changes_pictures_only_and_by_its_formula() -> None:
    x, y = pictures()
    a, b = Augment(colour=0.5)(x, y, KEY)
    assert torch.equal(b, y)
    u = (2 * rng.uniform(KEY, (5, 8), torch.float64)[:, 4:7] - 1) * 0.5
    for i in range(5):
        grey = x[i].mean(0)
        expected = grey + (x[i] - grey) * (1 + u[i, 0])
        expected = expected.mean() + (expected - expected.mean()) * (1 + u[i, 1]) + u[i, 2]
        assert torch.allclose(a[i], expected, rtol=0, atol=1e-12)


FULL = Augment(flip=0.5, scale=(0.75, 1.5), colour=0.2)


def test_rows_do_not_depend_on_rows_behind_them_and_mapping_changes_no_bit() -> None:
    x, y = pictures(6)
    a, b = FULL(x, y, KEY)
    c, d = FULL(x[:4], y[:4], KEY)
    assert torch.equal(a[:4], c)
    assert torch.equal(b[:4], d)
    keys = torch.stack([rng.fold(KEY, i) for i in range(3)])
    many = torch.stack([x + i for i in range(3)]), torch.stack([y, y.flip(1), y])
    mapped = torch.vmap(FULL)(*many, keys)
    for i in range(3):
        one = FULL(many[0][i], many[1][i], keys[i])
        assert torch.equal(mapped[1][i], one[1])
        assert torch.allclose(mapped[0][i], one[0], rtol=0, atol=1e-13)
    assert not torch.equal(FULL(x, y, keys[0])[1], FULL(x, y, keys[1])[1])


def test_labels_of_whole_pictures_stay() -> None:
    x, _ = pictures(3)
    y = torch.tensor([2, 0, 1])
    assert torch.equal(FULL(x, y, KEY)[1], y)


@pytest.mark.parametrize(
    "wrong",
    [{"flip": 1.5}, {"scale": (2.0, 1.0)}, {"scale": (0.0, 1.0)}, {"crop": (0, 3)}, {"pad": -1}, {"colour": 2.0}],
)
def test_wrong_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(fl.UserError, match="augment"):
        Augment(**wrong)


# In a run.


def dense_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 9, 1))


def streets() -> fl.Federation:
    return fl.data.load("street_scenes", towns=3, frames=15, length=3, size=(16, 24), quantity=0.3).partition()


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper + isr(points=1)", "peravg"])
def test_both_engines_see_the_same_pictures(method: str) -> None:
    options = {"task": "segmentation", "rounds": 2, "epochs": 2, "batch_size": 4, "augment": FULL}
    a, b = (fit(method, dense_net, streets(), engine=engine, **options) for engine in ("loop", "vectorised"))
    assert gap(everything(a), everything(b)) <= 1e-10
    plain = fit(method, dense_net, streets(), engine="loop", **{**options, "augment": None})
    assert gap(shared(a), shared(plain)) > 1e-4


def test_traced_steps_see_the_same_pictures() -> None:
    options = {"task": "segmentation", "rounds": 2, "epochs": 2, "batch_size": 4, "augment": FULL}
    engine = VectorisedEngine(step="traced")
    a, b = (fit("fedavg", dense_net, streets(), engine=how, **options) for how in ("loop", engine))
    assert engine.traces is not None
    assert not engine.traces.notes
    assert gap(everything(a), everything(b)) <= 1e-10


def test_classification_pictures_on_both_engines() -> None:
    data = federation((6, 9, 2), (1, 6, 6))
    options = {"augment": {"flip": 0.5, "pad": 1, "colour": 0.1}}
    a, b = (fit("fedavg", small_cnn(), data, engine=engine, **options) for engine in ("loop", "vectorised"))
    assert gap(everything(a), everything(b)) <= 1e-10
    assert gap(shared(a), shared(fit("fedavg", small_cnn(), data))) > 1e-4


def test_steps_rounds_and_clients_differ() -> None:
    seen: list[Tensor] = []

    def spy(x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(key.clone())
        return x, y

    plain = fit("fedavg", dense_net, streets(), task="segmentation", rounds=2, epochs=1)
    spied = fit("fedavg", dense_net, streets(), task="segmentation", rounds=2, epochs=1, augment=spy)
    assert identical(shared(plain), shared(spied))
    steps = sum(
        len(run_of(plain).sites[i].train) // 4 + (len(run_of(plain).sites[i].train) % 4 > 1) for i in plain.clients
    )
    assert len(seen) == 2 * steps
    assert len({int(k) for k in seen}) == len(seen)


def test_sweeps_and_judgement_see_the_pictures_as_they_are() -> None:
    """An augmentation that destroys every picture leaves test scores at given weights alone."""

    def destroy(x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return x * 0, y

    options = {"rounds": 1, "epochs": 1, "optimizer": fl.sgd(0.0), "task": "segmentation"}
    net = nn.Sequential(nn.Conv2d(3, 9, 1))
    a, b = (fit("fedavg", net, streets(), augment=how, **options) for how in (None, destroy))
    assert a.history[0]["miou"] == b.history[0]["miou"]
    assert a.history[0]["train_loss"] != b.history[0]["train_loss"]


def test_tables_need_pictures() -> None:
    with pytest.raises(fl.UserError, match="expected pictures"):
        fit("fedavg", augment=FULL)


def test_a_run_says_how_it_was_augmented(tmp_path: Path) -> None:
    options = {"task": "segmentation", "rounds": 1, "epochs": 1}
    result = fit("fedavg", dense_net, streets(), augment=FULL, out=tmp_path / "run", **options)
    assert result.config["augment"] == {"flip": 0.5, "scale": [0.75, 1.5], "pad": 0, "colour": 0.2}
    again = fl.fit(  # the table of a run makes the same run
        "fedavg",
        dense_net,
        streets(),
        augment=result.config["augment"],
        batch_size=4,
        precision="fp64",
        engine="loop",
        optimizer=fl.sgd(0.1),
        progress=False,
        **options,
    )
    assert identical(shared(result), shared(again))
    with pytest.raises(fl.UserError, match="augment"):
        fit("fedavg", dense_net, streets(), augment={"flop": 0.5}, **options)
