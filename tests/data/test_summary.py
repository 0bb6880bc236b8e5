"""The summary: counts that add up, as text and as a picture."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data import Federation, classes_per_client, dirichlet, iid, load, quantity
from fedloom.errors import UserError


def _cells(text: str) -> dict[str, list[str]]:
    lines = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in text.splitlines() if line[:1] in "│┃"]
    return {line[0].strip(): [cell.replace(",", "").replace("·", "0") for cell in line[1:]] for line in lines}


@pytest.mark.parametrize("rule", [iid(), dirichlet(0.1), classes_per_client(2), quantity(0.3)])
def test_counts_add_up(rule):
    data = load("digits").partition(rule, clients=12, val=0.1)
    summary = data.summary()
    assert summary.rows.sum() == summary.counts.sum() == 1797
    assert (summary.rows.sum(1) == summary.counts.sum(1)).all()
    assert (summary.counts.sum(0) == np.bincount(load("digits").train.y.numpy())).all()
    for client, three in zip(data, summary.rows, strict=True):
        assert three.tolist() == [len(client.train), len(client.val), len(client.test)]


def test_text_says_what_the_counts_say():
    data = load("digits").partition(dirichlet(0.3), clients=5)
    summary = data.summary()
    cells = _cells(str(summary))
    assert list(cells) == ["client", *data.ids, "all"]
    for k, name in enumerate(data.ids):
        assert [int(c) for c in cells[name]] == [*summary.rows[k], *summary.counts[k]]
    assert [int(c) for c in cells["all"]] == [*summary.rows.sum(0), *summary.counts.sum(0)]
    assert "1,797 rows" in str(summary)


def test_many_clients_and_many_classes_stay_readable():
    y = torch.arange(6000) % 50
    data = Federation.from_arrays([((torch.zeros(60, 1), y[60 * k : 60 * k + 60]), None) for k in range(100)])
    text = str(data.summary())
    assert "... 40 more" in text
    assert "50 of 50" in text
    assert len(text.splitlines()) < 75
    assert max(map(len, text.splitlines())) < 120


def test_regression_dense_labels_and_cloud():
    numbers = Federation.from_arrays([((torch.zeros(5, 1), torch.rand(5)), None)])
    assert numbers.summary().classes == ()
    assert _cells(str(numbers.summary()))["all"] == ["5", "0", "0"]
    dense = torch.tensor([[[0, 1], [255, 1]], [[2, 2], [2, 255]]])
    maps = Federation.from_arrays([((torch.zeros(2, 1, 2, 2), dense), None)], cloud=(torch.zeros(2, 1, 2, 2), dense))
    assert maps.summary().counts.tolist() == [[1, 2, 3]]
    assert "cloud: 2 rows" in str(maps.summary())


def test_class_names_are_used():
    data = Federation.from_arrays([((torch.zeros(2, 1), [0, 2]), None)], classes=["cat", "dog"])
    assert data.summary().classes == ("cat", "dog", "2")
    assert "cat" in str(data.summary())


@pytest.mark.parametrize("clients", [3, 40])
def test_picture(tmp_path, clients):
    data = load("digits").partition(dirichlet(0.3), clients=clients)
    path = data.summary().save(tmp_path / "who.png")
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    with pytest.raises(UserError, match="cannot write"):
        data.summary().save(tmp_path / "none" / "who.png")
    with pytest.raises(UserError, match="cannot write"):
        data.summary().save(tmp_path / "who.nothing")
