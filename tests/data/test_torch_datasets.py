"""Torch datasets: every item once, any form, random transforms noticed, generators untouched."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fedloom.data import Federation
from fedloom.errors import UserError


class Items(Dataset):
    def __init__(self, items):
        self.items = items
        self.reads = 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        self.reads += 1
        item = self.items[i]
        return item() if callable(item) else item


def rows(items, **options):
    return Federation.from_datasets([(Items(items), None)], **options)[0].train


def test_tensors_arrays_numbers_and_labels():
    made = rows([(torch.ones(2), 0), (torch.zeros(2), 1)])
    assert made.x.tolist() == [[1, 1], [0, 0]]
    assert made.y.tolist() == [0, 1]
    assert rows([(np.ones(3, np.float32), np.int64(1))]).x.dtype == torch.float32
    assert rows([([1.0, 2.0], torch.tensor(1))]).x.shape == (1, 2)


def test_test_and_validation_sets_and_ids():
    one, two, three = (Items([(torch.full((1,), float(k)), 0)] * n) for k, n in enumerate((3, 2, 1)))
    data = Federation.from_datasets([(one, two, three), (one, None)], ids=["a", "b"], classes=["only"])
    assert data.ids == ("a", "b")
    assert [len(r) for r in data["a"].parts().values()] == [3, 1, 2]
    assert data["a"].val.x.unique().tolist() == [2]
    assert data["b"].test is None
    assert data.classes == ("only",)


def test_pictures_become_bytes_in_channels_first():
    grey = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    colour = Image.fromarray(np.arange(18, dtype=np.uint8).reshape(2, 3, 3))
    assert rows([(grey, 0)]).x.shape == (1, 1, 2, 3)
    made = rows([(colour, 0)]).x
    assert made.dtype == torch.uint8
    assert made[0, :, 0, 1].tolist() == [3, 4, 5]


def test_several_inputs_and_dictionaries():
    made = rows([(torch.ones(2), torch.zeros(3), 1)])
    assert [tuple(part.shape) for part in made.x] == [(1, 2), (1, 3)]
    assert isinstance(rows([((torch.ones(2), torch.zeros(3)), 1)]).x, tuple)
    named = rows([({"a": torch.ones(2)}, 1)])
    assert named.x["a"].shape == (1, 2)
    whole = rows([{"pixels": torch.ones(2), "mask": torch.ones(2), "label": 1}])
    assert set(whole.x) == {"pixels", "mask"}
    assert whole.y.tolist() == [1]


def test_tensor_datasets_subsets_and_streams():
    x, y = torch.arange(10.0).unsqueeze(1), torch.arange(10)
    whole = TensorDataset(x, y)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(x[i], y[i]) for i in range(10)])

    data = Federation.from_datasets([(whole, Subset(whole, [3, 5])), (Stream(), None)])
    assert data[0].train.x is x or torch.equal(data[0].train.x, x)
    assert data[0].test.y.tolist() == [3, 5]
    assert torch.equal(data[1].train.x, x)


def test_random_transforms_are_noticed_and_frozen_the_same_each_time():
    items = [(lambda: (torch.rand(2) + torch.tensor([random.random(), np.random.rand()]), 0))] * 5
    with pytest.warns(UserWarning, match=r"client '0', train.*augment="):
        first = rows(items)
    with pytest.warns(UserWarning, match="random transforms"):
        second = rows(items)
    assert torch.equal(first.x, second.x)
    assert len(first.x.unique(dim=0)) == 5


def test_no_warning_without_random_transforms(recwarn):
    rows([(torch.ones(2), 0)] * 4)
    assert not recwarn.list


def test_global_generators_are_as_before():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.warns(UserWarning, match="frozen"):
        rows([(lambda: (torch.rand(2), random.random() > 0.5))] * 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], "no items"),
        ([torch.ones(2)], r"expected \(x, y\)"),
        ([(torch.ones(2), 0), (torch.ones(3), 0)], "different shapes"),
        ([("text", 0)], "expected numbers"),
        ([{"pixels": torch.ones(1)}], "expected one of label"),
        ([(torch.tensor([float("nan")]), 0)], "client '0', train: x holds NaN"),
    ],
)
def test_mistakes_are_explained(items, words):
    with pytest.raises(UserError, match=words):
        rows(items)


@pytest.mark.parametrize("entry", [3, (None, None), (Items([(torch.ones(1), 0)]),), (5, None)])
def test_entries_that_are_no_datasets(entry):
    with pytest.raises(UserError, match="client '0'"):
        Federation.from_datasets([entry])
