"""Federations from arrays: forms, types, ids, and errors that name the client."""

import numpy as np
import pytest
import torch

from fedloom.data import ClientData, Federation, Rows, Scale, concatenate, load, to_float
from fedloom.errors import UserError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])


def one(train=(X, Y), test=None, **options) -> Federation:
    return Federation.from_arrays([(train, test)], **options)


def test_ids_are_strings_and_positions_work_too():
    data = Federation.from_arrays([((X, Y), (X[:2], Y[:2]))] * 11)
    assert data.ids == tuple(str(i) for i in range(11))
    assert data[3] is data["3"] is data[np.int64(3)]
    assert data[-1].id == "10"
    assert len(data) == 11
    assert [c.id for c in data] == list(data.ids)


def test_given_ids_keep_their_order():
    data = Federation.from_arrays([((X, Y), None)] * 3, ids=["b", 10, "2"])
    assert data.ids == ("b", "10", "2")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (X.astype(np.float64), torch.float64),
        (X, torch.float32),
        (X.astype(np.float16), torch.float32),
        (torch.from_numpy(X).bfloat16(), torch.float32),
        (X.astype(np.uint8), torch.uint8),
        (X.astype(np.int32), torch.int64),
        (X.astype(np.uint16), torch.int64),
        (X > 3, torch.float32),
        (X.tolist(), torch.float64),
        (X.astype(">f4"), torch.float32),
        (X[::-1], torch.float32),
    ],
)
def test_types_of_inputs(given, expected):
    x = one((given, Y))[0].train.x
    assert x.dtype == expected
    assert torch.equal(
        x.double(),
        torch.from_numpy(np.array(given, dtype=np.float64)) if not torch.is_tensor(given) else given.double(),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Y.astype(np.uint8), torch.int64),
        (Y > 0, torch.int64),
        (Y[:, None], torch.int64),
        (Y.astype(np.float32), torch.float32),
        (Y.astype(np.float64)[:, None] * np.ones(2), torch.float64),
        (np.zeros((6, 4, 4), np.uint8), torch.int64),
    ],
)
def test_types_of_labels(given, expected):
    y = one((X, given))[0].train.y
    assert y.dtype == expected
    assert y.shape == (6,) if given.shape == (6, 1) else y.shape == given.shape


def test_memory_is_shared_not_copied():
    x = X.copy()
    data = one((x, Y))
    x[0, 0] = 99
    assert data[0].train.x[0, 0] == 99


def test_memory_maps_are_accepted_without_a_warning(tmp_path, recwarn):
    np.save(tmp_path / "x.npy", X)
    data = one((np.load(tmp_path / "x.npy", mmap_mode="r"), Y))
    assert torch.equal(data[0].train.x, torch.from_numpy(X))
    assert not recwarn.list


@pytest.mark.parametrize("x", [(X, X[:, :1]), {"a": X, "b": X.astype(np.int64)}])
def test_tuples_and_dictionaries_of_inputs(x):
    rows = one((x, Y), (x, Y))["0"].test
    assert type(rows.x) is type(x)
    taken = rows.take(torch.tensor([4, 0]))
    assert taken.y.tolist() == [1, 0]
    first = taken.x[0] if isinstance(x, tuple) else taken.x["a"]
    assert torch.equal(first, torch.from_numpy(X[[4, 0]]))
    both = concatenate([taken, rows])
    assert len(both) == 8
    assert type(both.x) is type(x)


def test_narrow_beside_wide_is_widened():
    data = Federation.from_arrays([((X, Y), None), ((X.astype(np.float64), Y + 0.5), None)])
    assert data[0].train.x.dtype == data[1].train.x.dtype == torch.float64
    assert data[0].train.y.dtype == data[1].train.y.dtype == torch.float64


def test_empty_test_rows_are_none():
    assert one(test=(X[:0], Y[:0]))[0].test is None


def test_subset_keeps_the_federations_order():
    data = load("digits").partition(clients=6)
    part = data.subset(["4", "1"])
    assert part.ids == ("1", "4")
    assert part["4"] is data["4"]
    assert part.origin["subset"] == ["1", "4"]
    with pytest.raises(UserError, match="no client '9'"):
        data.subset(["9"])


def test_with_cloud():
    data = one().with_cloud((X[:3], Y[:3]))
    assert len(data.cloud) == 3
    assert data.clients[0].id == "0"
    with pytest.raises(UserError, match=r"cloud: x has rows of shape \(1,\), but \(2,\) at client '0'"):
        one().with_cloud((X[:, :1], Y))


def test_only_named_data_are_repeatable():
    assert one().origin == {}
    data = load("digits").partition(clients=3)
    assert data.origin["name"] == "digits"
    assert data.with_cloud((data[0].train.x, data[0].train.y)).origin == {}


def test_bytes_become_floating_per_channel():
    x = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    assert torch.allclose(to_float(x, None), torch.tensor([[[[0.0, 1.0]], [[0.2, 0.4]]]]))
    scaled = to_float(x, Scale((0.5, 0.2), (0.5, 0.1)))
    assert torch.allclose(scaled, torch.tensor([[[[-1.0, 1.0]], [[0.0, 2.0]]]]))
    assert to_float(scaled, Scale((9.0,), (9.0,))) is scaled


NAN = X.copy()
NAN[2, 1] = np.nan
INF = np.where(np.isnan(NAN), np.inf, X)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (((X[:0], Y[:0]), None), "client 'b' has no training rows"),
        (((X, Y[:5]), None), "client 'b', train: x has 6 rows but y has 5"),
        (((X, Y), (X[:3], Y)), "client 'b', test: x has 3 rows but y has 6"),
        (((NAN, Y), None), "client 'b', train: x holds NaN.*[Ii]mpute"),
        (((INF, Y), None), "client 'b', train: x holds NaN or infinite"),
        (((X, Y - 1), None), "client 'b', train: y holds the negative label -1"),
        (((X, Y + np.nan), None), "client 'b', train: y holds NaN"),
        (((X.astype(str), Y), None), "client 'b', train: x holds .* values; expected numbers"),
        (((X, np.array(list("abcabc"))), None), "client 'b', train: y holds"),
        (((X + 1j, Y), None), "client 'b', train: x"),
        (((X[:, :1], Y), None), r"client 'b', train: x has rows of shape \(1,\), but \(2,\) at client 'a'"),
        (((X.astype(np.uint8), Y), None), "client 'b', train: x is of type uint8, but float32 at client 'a'"),
        ((((X, X), Y), None), "client 'b', train: x is a tuple, but Tensor at client 'a'"),
        (((X, np.zeros((6, 3))), None), "client 'b', train: y has rows of shape"),
        ((X, Y), "client 'b': expected .*x_train"),
        (((X, Y),), "client 'b': expected"),
        ((None, (X, Y)), "client 'b': expected"),
        (((3.0, 1), None), "client 'b', train: y is a single number"),
        ((([[1, 2], [3]], [0, 1]), None), "client 'b', train: x is not one array"),
        ((((), Y), None), "client 'b', train: x is empty"),
    ],
)
def test_errors_name_the_client(entry, words):
    with pytest.raises(UserError, match=words):
        Federation.from_arrays([((X, Y), None), entry], ids=["a", "b"])


@pytest.mark.parametrize("ids", [["a", "a"], ["a"], ["a", ""], ["a", "b" * 65], ["a", "b\n"], ["a", "b\x1f"]])
def test_bad_ids_are_refused(ids):
    with pytest.raises(UserError, match="id"):
        Federation.from_arrays([((X, Y), None)] * 2, ids=ids)


def test_no_clients_are_refused():
    with pytest.raises(UserError, match="at least one client"):
        Federation.from_arrays([])


def test_ids_are_checked_for_federations_made_by_hand():
    rows = Rows(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
    with pytest.raises(UserError, match="expected a string"):
        Federation((ClientData(3, rows),))


@pytest.mark.parametrize("key", ["x", 7])
def test_unknown_clients_are_refused(key):
    with pytest.raises(UserError, match="no client"):
        one()[key]


def test_they_print_in_one_line():
    data = load("digits")
    assert repr(data.train) == "Rows(x (1797, 1, 8, 8), y (1797,))"
    assert repr(data).startswith("Dataset('digits', train=Rows(")
    assert repr(data.partition(clients=4)) == "Federation('digits', 4 clients, 1797 rows)"
