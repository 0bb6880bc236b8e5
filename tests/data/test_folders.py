"""Federations from files: npz and CSV per client, PFLlib's folders, one table with a client column."""

import contextlib
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import Federation, Preprocessing, encode_table, read
from fedloom.data.readers.object_arrays import read_objects
from fedloom.data.readers.tables import read_csv
from fedloom.errors import UserError

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20) % 2


def numbers(data: Federation) -> list[float]:
    return sorted(v for client in data for rows in client.parts().values() for v in rows.x[:, 0].tolist())


def test_npz_with_one_set_is_cut_here(tmp_path):
    for name in ("2", "10", "a"):
        np.savez(tmp_path / f"{name}.npz", x=X, y=Y)
    data = Federation.from_folder(tmp_path, test=0.25, val=0.2)
    assert data.ids == ("2", "10", "a")
    assert [(len(c.train), len(c.val), len(c.test)) for c in data] == [(12, 3, 5)] * 3
    assert numbers(data) == sorted(X[:, 0].tolist() * 3)
    again = Federation.from_folder(tmp_path, test=0.25, val=0.2)
    assert torch.equal(data[0].test.x, again[0].test.x)
    assert data.origin["path"] == str(tmp_path.resolve())
    assert json.loads(json.dumps(data.origin)) == data.origin


def test_npz_with_named_parts(tmp_path):
    np.savez(tmp_path / "site.npz", x_train=X, y_train=Y, x_test=X[:4], y_test=Y[:4], x_val=X[:2], y_val=Y[:2])
    client = Federation.from_folder(tmp_path)["site"]
    assert (len(client.train), len(client.test), len(client.val)) == (20, 4, 2)


def test_npz_below_train_and_test(tmp_path):
    for part, n in (("train", 20), ("test", 6)):
        (tmp_path / part).mkdir()
        for name in ("b", "a"):
            np.savez(tmp_path / part / f"{name}.npz", x=X[:n], y=Y[:n])
    data = Federation.from_folder(tmp_path, val=0.5)
    assert data.ids == ("a", "b")
    assert (len(data[0].train), len(data[0].val), len(data[0].test)) == (10, 10, 6)


def pfllib(folder: Path, clients: int = 12, train=None) -> None:
    """Folders as PFLlib's dataset/utils/dataset_utils.py writes them."""
    for part, n in (("train", 15), ("test", 5)):
        (folder / part).mkdir(parents=True)
        for k in range(clients):
            content = {"x": X[:n].reshape(n, 1, 3) + k, "y": Y[:n]} if train is None else train
            with open(folder / part / f"{k}.npz", "wb") as file:
                np.savez_compressed(file, data=content)
    (folder / "config.json").write_text(json.dumps({"num_clients": clients, "num_classes": 2}))


def test_pfllib_folders_as_they_are(tmp_path):
    pfllib(tmp_path / "MNIST")
    data = Federation.from_folder(tmp_path / "MNIST")
    assert data.ids == tuple(str(k) for k in range(12))
    assert data.name == "MNIST"
    for k, client in enumerate(data):
        assert torch.equal(client.train.x, torch.from_numpy(X[:15].reshape(15, 1, 3) + k))
        assert torch.equal(client.test.y, torch.from_numpy(Y[:5]))


def test_pfllib_text_is_tokens_and_lengths(tmp_path):
    rows = np.empty(4, object)
    rows[:] = [([1, 2, 0], 2), ([3, 0, 0], 1), ([4, 5, 6], 3), ([7, 8, 0], 2)]
    pfllib(tmp_path, 2, {"x": rows, "y": np.array([0, 1, 0, 1])})
    tokens, lengths = Federation.from_folder(tmp_path)[0].train.x
    assert tokens.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 8, 0]]
    assert lengths.tolist() == [2, 1, 3, 2]


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _store(path: Path, stream: bytes) -> Path:
    """An npz file whose array `data` is this pickle stream."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": ()})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", header.getvalue() + stream)
    return path


def test_code_in_a_pickle_is_never_run(tmp_path):
    target = tmp_path / "made"
    pfllib(tmp_path / "bad", 1, {"x": _Attack(target), "y": Y})
    with pytest.raises(UserError, match=r"mkdir.*could run code.*allow_pickle=True"):
        Federation.from_folder(tmp_path / "bad")
    assert not target.exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"cnumpy\nload\n(X\x01\x00\x00\x00atR.",
        b"(X\x02\x00\x00\x00osX\x06\x00\x00\x00systemios\nsystem\n.",
        b"cnumpy\nndarray\n.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
        b"]\x94h\x00a.",
        b"(lp0\n.",
        b"0.",
        b"h\x05.",
        b"}(K\x01K\x02u.",
        b"\x80\x04N",
        b"",
        b"not a pickle",
        b"cnumpy\ndtype\n(X\x02\x00\x00\x00V8tR.",
        b"cnumpy\ndtype\n(X\x01\x00\x00\x00OtR.",
    ],
)
def test_streams_that_are_not_arrays_are_refused(tmp_path, stream):
    with pytest.raises(UserError, match=r"cannot read|holds more than numbers"):
        read_objects(_store(tmp_path / "a.npz", stream))


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["f4", ">f8", "i2", "u1", "?", "f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_kind_come_back(tmp_path, protocol, dtype, order):
    array = np.array(X.reshape(5, 4, 3), dtype=dtype, order=order)
    content = {"x": array, "y": [np.int64(3), 4, 2.5], "z": {"deep": (array[:1], None, True)}, "e": array[:0]}
    whole = np.array(content, dtype=object)
    found = read_objects(_store(tmp_path / "a.npz", pickle.dumps(whole, protocol=protocol)))
    assert found["x"].dtype == array.dtype
    assert (found["x"] == array).all()
    assert found["y"] == [3, 4, 2.5]
    assert (found["z"]["deep"][0] == array[:1]).all()
    assert found["e"].shape == (0, 4, 3)


def _csv(path: Path, rows: int = 20, sexes: str = "mf", first: int = 0) -> None:
    lines = ["age,sex,chol,y"]
    for i in range(rows):
        lines.append(f"{30 + i + first},{sexes[i % len(sexes)]},{'?' if i % 7 == 3 else 200 + i},{i % 2}")
    path.write_text("\n".join(lines) + "\n")


def test_csv_per_client(tmp_path):
    _csv(tmp_path / "north.csv")
    _csv(tmp_path / "south.csv", sexes="mx")
    data = Federation.from_folder(tmp_path, preprocess={"impute": "median"})
    assert data.ids == ("north", "south")
    assert data.preprocessing.outputs == ("age", "sex=f", "sex=m", "sex=x", "chol")
    for client, never in (("north", 3), ("south", 1)):
        assert all((rows.x[:, never] == 0).all() for rows in data[client].parts().values())
    assert sorted(len(rows) for rows in data[0].parts().values()) == [5, 15]
    assert data[0].train.x.dtype == torch.float32


def test_csv_below_train_and_test(tmp_path):
    for part, rows in (("train", 20), ("test", 4)):
        (tmp_path / part).mkdir()
        _csv(tmp_path / part / "a.csv", rows)
    data = Federation.from_folder(tmp_path, label="y", preprocess={"impute": "zero"})
    assert (len(data[0].train), len(data[0].test)) == (20, 4)
    assert data[0].test.x[:, 0].tolist() == [30, 31, 32, 33]


TABLE = {
    "site": ["b", "b", "a", "a", "a", "b", "a", "b"],
    "age": [30, 31, 32, 33, None, 35, 36, 37],
    "kind": ["u", "v", "u", "u", "v", "w", "u", "u"],
    "id": [f"p{i}" for i in range(8)],
    "part": ["train", "test", "train", "val", "train", "train", "test", "train"],
    "outcome": ["no", "yes", "yes", "no", "no", "yes", "yes", "no"],
}


def test_table_with_client_and_split_columns():
    data = Federation.from_table(
        TABLE, client="site", label="outcome", split="part", preprocess={"impute": "mean", "types": {"id": "ignore"}}
    )
    assert data.ids == ("b", "a")
    assert data.classes == ("no", "yes")
    assert data.preprocessing.outputs == ("age", "kind=u", "kind=v", "kind=w")
    assert data["b"].train.x.tolist() == [[30, 1, 0, 0], [35, 0, 0, 1], [37, 1, 0, 0]]
    assert data["a"].train.x.tolist() == [[32, 1, 0, 0], [32, 0, 1, 0]]
    assert data["a"].val.y.tolist() == [0]
    assert data["b"].test.y.tolist() == [1]
    assert data.origin == {}


def test_table_from_a_file_is_cut_at_each_client(tmp_path):
    path = tmp_path / "all.csv"
    path.write_text(
        "site;x;y\n" + "".join(f"{'ab'[i % 2]};{i};{(i // 2) % 2}\n" for i in range(40)), encoding="utf-8-sig"
    )
    data = read(path, client="site", label="y", test=0.25)
    assert [(len(c.train), len(c.test)) for c in data] == [(15, 5), (15, 5)]
    assert numbers(data) == list(range(40))
    assert data.name == "all"
    assert data.origin["client"] == "site"


def test_new_rows_go_the_same_way_as_training_rows(tmp_path):
    """What `predict` does: a table, by column name, through the saved preprocessing."""
    spec = {"impute": "median", "scale": "standard", "missing": {"kind": ["w"], "age": [33]}, "types": {"id": "ignore"}}
    data = Federation.from_table(TABLE, client="site", label="outcome", split="part", preprocess=spec)
    fitted = Preprocessing.from_json(json.loads(json.dumps(data.preprocessing.to_json())))
    rows = [i for i in range(8) if TABLE["site"][i] == "a" and TABLE["part"][i] == "test"]
    lines = ["extra,kind,age"] + [f"9,{TABLE['kind'][i]},{TABLE['age'][i]}" for i in rows]
    (tmp_path / "new.csv").write_text("\n".join(lines))
    raw = encode_table(tmp_path / "new.csv", fitted)
    assert torch.equal(fitted.apply(raw, "a"), data["a"].test.x)
    (tmp_path / "new.csv").write_text("kind,age\nnever seen,?\n")
    assert fitted.apply(encode_table(tmp_path / "new.csv", fitted), "a").isfinite().all()
    (tmp_path / "new.csv").write_text("kind\nu\n")
    with pytest.raises(UserError, match="age"):
        encode_table(tmp_path / "new.csv", fitted)


def test_numbers_to_predict():
    columns = {"c": ["a"] * 4, "x": [1, 2, 3, 4], "y": [1, 2, 3, 4]}
    whole = Federation.from_table(columns, client="c", label="y")
    assert whole[0].train.y.dtype == torch.int64
    numeric = Federation.from_table(columns, client="c", label="y", numeric_label=True)
    assert numeric[0].train.y.dtype == torch.float32
    parts = Federation.from_table({**columns, "y": [0.5, 1, 2, 3]}, client="c", label="y")
    assert parts[0].train.y.dtype == torch.float32


class _Frame:
    """What a data frame looks like from here."""

    columns = ("site", "x", "y")

    def __getitem__(self, name):
        return {"site": np.array(["a", "a"]), "x": np.array([0.1, 0.2], np.float32), "y": np.array([0, 1])}[name]


def test_data_frames():
    data = Federation.from_table(_Frame(), client="site", label="y", test=0.0)
    assert data[0].train.x[:, 0].tolist() == [np.float32(0.1), np.float32(0.2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n", "no rows"),
        ("a,a\n1,2\n", "occur twice"),
        ("a,b\n1,2\n1\n", "row 3 has 1 values; expected 2"),
        ("a,\n1,2\n", "empty"),
    ],
)
def test_broken_csv(tmp_path, text, words):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_csv(path)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"client": "town"}, "unknown column of the table 'town'"),
        ({}, {"label": "outcom"}, "outcome"),
        ({"site": ["b", "", "a", "a", "a", "b", "a", "b"]}, {}, "row 3: the client column"),
        ({"outcome": ["no", None, "yes", "no", "no", "yes", "yes", "no"]}, {}, "row 3: label 'outcome' is missing"),
        ({"part": ["train"] * 7 + ["hidden"]}, {"split": "part"}, "'hidden'; expected train, val or test"),
        ({"part": ["test"] * 8}, {"split": "part"}, "client 'b' has no training rows"),
        ({}, {}, "column 'age' holds missing.*impute"),
        ({"age": [1]}, {}, "equal length"),
        ({}, {"preprocess": {"types": {"nothing": "ignore"}}}, "nothing"),
        ({}, {"test": 2}, "share"),
    ],
)
def test_mistakes_in_tables_are_explained(change, options, words):
    with pytest.raises(UserError, match=words):
        Federation.from_table({**TABLE, **change}, **{"client": "site", "label": "outcome", **options})


def test_mistakes_in_folders_are_explained(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        Federation.from_folder(tmp_path / "none")
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(UserError, match="holds no clients"):
        Federation.from_folder(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(UserError, match=r"cannot read .*a\.npz"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", z=X)
    with pytest.raises(UserError, match=r"client 'a'.* holds z; expected x and y"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.where(X == 3, np.nan, X), y=Y)
    with pytest.raises(UserError, match=r"client 'a', .*NaN"):
        Federation.from_folder(tmp_path)
    assert len(Federation.from_folder(tmp_path, preprocess={"impute": "mean"})[0].train) == 15
    np.savez(tmp_path / "a.npz", x=np.array([{}, {}], object), y=Y)
    with pytest.raises(UserError, match="numeric arrays"):
        Federation.from_folder(tmp_path)
    _csv(tmp_path / "b.csv")
    with pytest.raises(UserError, match="mixes"):
        Federation.from_folder(tmp_path)
    (tmp_path / "a.npz").unlink()
    with pytest.raises(UserError, match=r"unknown column of .*'z'"):
        Federation.from_folder(tmp_path, label="z")
    (tmp_path / "b.csv").write_text("p,q\n1,2\n")
    with pytest.raises(UserError, match="which column is the label"):
        Federation.from_folder(tmp_path)
    (tmp_path / "c.csv").write_text("p,r\n1,2\n")
    with pytest.raises(UserError, match="different columns: q, r"):
        Federation.from_folder(tmp_path, label="p")
    with pytest.raises(UserError, match="which column is the client"):
        read(tmp_path / "c.csv", label="p")
    with pytest.raises(UserError, match="unknown option of from_folder 'clients'"):
        read(tmp_path, clients=3)


VALID = pickle.dumps(np.array({"x": X[:2], "y": [1, 2], "z": ("a", None)}, dtype=object), protocol=4)


@settings(max_examples=400)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    end=st.integers(1, len(VALID)),
)
def test_damaged_streams_give_arrays_or_an_error_and_nothing_else(tmp_path_factory, changes, end):
    stream = bytearray(VALID[:end])
    for place, value in changes:
        if place < end:
            stream[place] = value
    with contextlib.suppress(UserError):
        read_objects(_store(tmp_path_factory.getbasetemp() / "fuzzed.npz", bytes(stream)))


@settings(max_examples=200)
@given(words=st.lists(st.sampled_from(list(range(0x80, 0x96)) + list(b"().012RNKMJX]}lsuaebhqcjrt")), max_size=40))
def test_random_programs_give_arrays_or_an_error_and_nothing_else(tmp_path_factory, words):
    with contextlib.suppress(UserError):
        read_objects(_store(tmp_path_factory.getbasetemp() / "random.npz", bytes(words)))


@settings(max_examples=150)
@given(place=st.integers(0, 400), value=st.integers(0, 255))
def test_damaged_npz_files_are_the_users_error_or_none(tmp_path_factory, place, value):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / "a.npz", x=X, y=Y)
    content = bytearray((folder / "a.npz").read_bytes())
    content[place % len(content)] = value
    (folder / "a.npz").write_bytes(content)
    with contextlib.suppress(UserError):
        Federation.from_folder(folder)
