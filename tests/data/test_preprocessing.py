"""Preprocessing: the same numbers as scikit-learn, fitted on training rows only, and the same after saving."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from fedloom.data import ClientData, Federation, Preprocess, Preprocessing
from fedloom.data.preprocess import IMPUTERS
from fedloom.data.rows import make_rows
from fedloom.errors import UserError
from fedloom.rng import stream

NAMES = ("age", "chol", "kind")


def tables(clients: int = 3, rows: int = 40) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = stream(0, "init")
    made = []
    for k in range(clients):
        x = np.stack([50 + k + 9 * draw.standard_normal(rows), draw.integers(0, 9, rows), draw.integers(1, 4, rows)], 1)
        x[draw.random((rows, 3)) < 0.2] = np.nan
        made.append((x, draw.integers(0, 2, rows)))
    return made


def federation(spec, cut: int = 30) -> Federation:
    return _named([((x[:cut], y[:cut]), (x[cut:], y[cut:])) for x, y in tables()], spec, NAMES)


def _named(parts, spec, columns) -> Federation:
    clients = tuple(
        ClientData(str(k), *(make_rows(part, "x", allow_missing=True) for part in two)) for k, two in enumerate(parts)
    )
    return Federation(clients, origin={"name": "made"}).preprocess(spec, columns=columns)


@pytest.mark.parametrize("impute", ["median", "mean", "most_frequent"])
@pytest.mark.parametrize(("scale", "scaler"), [("standard", StandardScaler()), ("minmax", MinMaxScaler())])
@pytest.mark.parametrize("fit", ["client", "federated"])
def test_equals_scikit_learn(impute, scale, scaler, fit):
    data = federation(Preprocess(impute=impute, scale=scale, fit=fit))
    raw = tables()
    for k, client in enumerate(data):
        basis = raw[k][0][:30] if fit == "client" else np.concatenate([x[:30] for x, _ in raw])
        pipeline = make_pipeline(SimpleImputer(strategy=impute), scaler).fit(basis)
        assert np.allclose(client.train.x.numpy(), pipeline.transform(raw[k][0][:30]), atol=1e-9)
        assert np.allclose(client.test.x.numpy(), pipeline.transform(raw[k][0][30:]), atol=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.lists(st.one_of(st.floats(-1e30, 1e30), st.integers(-3, 3).map(float)), max_size=30), min_size=1, max_size=5
    ).filter(any)
)
def test_median_over_clients_is_the_median_of_the_pool(parts):
    arrays = [np.array(part, np.float64) for part in parts]
    pool = np.sort(np.concatenate(arrays))
    n = len(pool)
    expected = (pool[(n - 1) // 2] + pool[n // 2]) / 2
    assert IMPUTERS["median"](arrays) == expected


def test_test_rows_do_not_change_the_fit():
    parts = [((x[:30], y[:30]), (x[30:] * 1000, y[30:])) for x, y in tables()]
    spec = Preprocess(impute="median", scale="standard", fit="federated")
    assert _named(parts, spec, NAMES).preprocessing == federation(spec).preprocessing


@pytest.mark.parametrize("fit", ["client", "federated"])
def test_saved_state_applies_again_bit_for_bit(fit):
    spec = Preprocess(impute="median", scale="standard", missing={"chol": [0]}, types={"kind": "categorical"}, fit=fit)
    data = federation(spec)
    again = Preprocessing.from_json(json.loads(json.dumps(data.preprocessing.to_json())))
    assert again == data.preprocessing
    for k, (x, _) in enumerate(tables()):
        assert torch.equal(again.apply(x[30:], str(k)), data[k].test.x)
    assert json.loads(json.dumps(data.origin)) == data.origin
    assert Preprocess.of(data.origin["preprocess"]) == data.preprocessing.spec


def test_missing_codes_are_missing():
    raw = tables()
    data = federation(Preprocess(impute="mean", missing={"chol": [0, 8]}))
    for k, client in enumerate(data):
        column = raw[k][0][:30, 1]
        gone = np.isnan(column) | np.isin(column, [0, 8])
        assert np.allclose(client.train.x[:, 1].numpy()[gone], column[~gone].mean())
        assert np.allclose(client.train.x[:, 1].numpy()[~gone], column[~gone])
    everywhere = federation(Preprocess(impute="zero", missing=[1]))
    assert not (everywhere[0].train.x == 1).any()


def test_categorical_columns_become_one_hot():
    data = federation(Preprocess(impute="median", types={"kind": "categorical", "age": "ignore"}))
    assert data.preprocessing.outputs == ("chol", "kind=1", "kind=2", "kind=3")
    for k, client in enumerate(data):
        raw = tables()[k][0][:30, 2]
        seen = raw[~np.isnan(raw)]
        mode = np.bincount(seen.astype(int)).argmax()
        hot = client.train.x[:, 1:].numpy()
        assert (hot.sum(1) == 1).all()
        assert (hot.argmax(1) + 1 == np.where(np.isnan(raw), mode, raw)).all()
    unknown = data.preprocessing.apply([[50.0, 1.0, 7.0]], "0")
    assert unknown.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_a_column_without_a_value_at_a_client():
    x, y = np.array([[1.0, np.nan], [3.0, np.nan]]), np.array([0, 1])
    parts = [((x, y), None), ((np.nan_to_num(x, nan=8.0), y), None)]
    own = Federation.from_arrays(parts, preprocess={"impute": "median", "scale": "standard"})
    assert own[0].train.x[:, 1].tolist() == [0.0, 0.0]
    shared = Federation.from_arrays(parts, preprocess={"impute": "median", "fit": "federated"})
    assert shared[0].train.x[:, 1].tolist() == [8.0, 8.0]


def test_constant_columns_are_centred_only():
    x, y = np.full((5, 1), 0.1, np.float32), np.arange(5)
    data = Federation.from_arrays([((x, y), ((x + 1).astype(np.float32), y))], preprocess={"scale": "standard"})
    assert data[0].train.x.abs().max() < 1e-6
    assert torch.allclose(data[0].test.x, torch.ones(5, 1))


def test_channels_of_series_are_columns():
    x = stream(0, "init").standard_normal((20, 3, 50)) * [[[1], [10], [100]]] + 5
    data = Federation.from_arrays([((x, np.zeros(20, int)), None)], preprocess={"scale": "standard"})
    assert torch.allclose(data[0].train.x.mean((0, 2)), torch.zeros(3, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(data[0].train.x.std((0, 2), correction=0), torch.ones(3, dtype=torch.float64))


def test_cloud_is_preprocessed_too():
    (x, y), *_ = tables()
    spec = {"impute": "median", "fit": "federated"}
    data = Federation.from_arrays([((x, y), None)], preprocess=spec)
    assert data.with_cloud((x[:5], y[:5])).cloud.x.isfinite().all()
    own = Federation.from_arrays([((x, y), None)], cloud=(x[:9], y[:9]), preprocess={"impute": "median"})
    assert own.cloud.x.isfinite().all()
    assert set(own.preprocessing.fitted) == {"0", "cloud"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"impute": "guess"}, "impute = 'guess'"),
        ({"scale": "robust"}, "scale = 'robust'"),
        ({"fit": "server"}, "fit = 'server'"),
        ({"imputer": "mean"}, "impute"),
        ({"types": {"age": "text"}}, "type 'text'"),
        ({"types": {"agee": "ignore"}, "impute": "mean"}, "unknown column 'agee'.*age"),
        ({"missing": {"cholesterol": [0]}, "impute": "mean"}, "unknown column"),
        ({"types": dict.fromkeys(NAMES, "ignore")}, "every column is ignored"),
        ({}, "client '0': column 'age' holds missing.*impute='median'"),
    ],
)
def test_mistakes_are_explained(spec, words):
    with pytest.raises(UserError, match=words):
        federation(spec)


def test_mistakes_in_applying_are_explained():
    fitted = federation(Preprocess(impute="mean")).preprocessing
    with pytest.raises(UserError, match="3 columns age, chol, kind"):
        fitted.apply(np.zeros((2, 4)), "0")
    with pytest.raises(UserError, match=r"client 'new'.*federated"):
        fitted.apply(np.zeros((2, 3)), "new")
    with pytest.raises(UserError, match="preprocessed already"):
        federation(Preprocess(impute="mean")).preprocess({})
    with pytest.raises(UserError, match="one floating array"):
        Federation.from_arrays([(((torch.ones(2, 1), torch.ones(2, 1)), [0, 1]), None)], preprocess={"scale": "minmax"})
