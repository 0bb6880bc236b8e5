"""Pictures: the right pixels in the right colours, files per client, and clear words where there is nothing to show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedloom as fl
from fedloom.reports.segmentation_pictures import Legend, errors, predictions
from tests.helpers import federation, fit


@pytest.fixture(scope="module")
def streets() -> fl.Federation:
    return fl.data.load("street_scenes", towns=3, frames=9, length=3, size=(16, 24), quantity=0.0).partition()


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 9, 1))


def run(method: str, data: fl.Federation, **more: object) -> fl.Result:
    return fit(method, net, data, task="segmentation", rounds=2, epochs=1, **more)


def test_no_two_classes_share_a_colour() -> None:
    for names in (
        fl.data.sets.street_scenes.CLASSES,
        ["Car", "Cars", "sidewalk", "Sidewalk 2"],
        [str(i) for i in range(40)],
    ):
        colours = Legend.of(names).colours
        assert len(np.unique(colours, axis=0)) == len(names)
        assert not (colours == 0).all(1).any()


def test_errors_are_red_and_void_is_black() -> None:
    found = errors(np.array([[1, 2, 2]]), np.array([[1, 1, 255]]))
    assert found[0, 1].tolist() == [214, 48, 39]
    assert found[0, 2].tolist() == [0, 0, 0]
    assert found[0, 0].min() > 200


@pytest.mark.parametrize("method", ["fedavg", "fedper", "apfl", "local"])
def test_predictions_are_those_that_were_judged(method: str, streets: fl.Federation) -> None:
    result = run(method, streets)
    for client in streets:
        said = predictions(result, client.id, client.test, streets.scale)
        true = client.test.y.numpy()
        valid = true != 255
        right = (said == true)[valid].mean()
        assert right == pytest.approx(result.clients[client.id].metrics["pixel_accuracy"], abs=1e-9)


def test_a_file_per_client(tmp_path: Path, streets: fl.Federation) -> None:
    runs = {"fedavg": run("fedavg", streets), "with isr": run("fedavg + isr(points=1)", streets, out=tmp_path / "run")}
    files = fl.pictures(runs, streets, tmp_path / "new" / "pictures", clients=["town3", "town1"], frames=2)
    assert [f.name for f in files] == ["town3.png", "town1.png"]
    with Image.open(files[0]) as image:
        pixels = np.asarray(image.convert("RGB"))
    legend = Legend.of(streets.classes)
    occurring = [int(v) for v in streets["town3"].test.y.unique() if v != 255]
    for label in occurring:
        assert (pixels == legend.colours[label]).all(-1).sum() > 20, streets.classes[label]
    assert (pixels == (214, 48, 39)).all(-1).sum() > 20
    (beside,) = fl.pictures(runs, streets, clients=["town2"])
    assert beside == tmp_path / "run" / "pictures" / "town2.png"


def test_what_cannot_be_shown(tmp_path: Path, streets: fl.Federation) -> None:
    result = run("fedavg", streets)
    with pytest.raises(fl.UserError, match="town9"):
        fl.pictures(result, streets, tmp_path, clients=["town9"])
    with pytest.raises(fl.UserError, match="no client has val rows"):
        fl.pictures(result, streets, tmp_path, part="val")
    with pytest.raises(fl.UserError, match="folder"):
        fl.pictures(result, streets)
    with pytest.raises(fl.UserError, match="no pictures with masks"):
        fl.pictures(fit("fedavg"), federation(), tmp_path)
    other = fl.Federation.from_arrays(
        [((torch.rand(4, 3, 4, 4), torch.zeros(4, 4, 4).long()), (torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4).long()))]
    )
    with pytest.raises(fl.UserError, match="segmentation"):
        fl.pictures(fit("fedavg"), other, tmp_path, clients=["0"])
