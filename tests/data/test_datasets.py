"""Data sets by name: what is embedded, the official formats, downloads, and the real files where they are."""

import functools
import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, Preprocess, dirichlet, load
from fedloom.data.sets import download, images
from fedloom.data.sets.clinical import parse_heart
from fedloom.data.sets.download import Official, Remote, read_official
from fedloom.errors import UserError

DRAW = np.random.Generator(np.random.Philox(1))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    """No test but the ones that ask reaches a network, nor the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(url, timeout):
        if "127.0.0.1" in url:
            return opened(url, timeout=timeout)
        raise OSError("no network here")

    opened = download.urllib.request.urlopen
    monkeypatch.setattr(download.urllib.request, "urlopen", refuse)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.tobytes()


def pictures(n: int, high: int = 10) -> tuple[np.ndarray, np.ndarray]:
    return DRAW.integers(0, 256, (n, 28, 28), np.uint8), DRAW.integers(0, high, n, np.uint8)


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    data, original = load("digits"), load_digits()
    assert data.train.x.shape == (1797, 1, 8, 8)
    assert data.train.x.dtype == torch.float32
    assert (data.train.x[:, 0].numpy() * 16 == original.images).all()
    assert (data.train.y.numpy() == original.target).all()
    assert data.test is None


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, name, packed):
    x, y = pictures(30)
    folder = tmp_path / name
    folder.mkdir()
    for part, n in (("train", 20), ("t10k", 30)):
        cut = slice(0, 20) if part == "train" else slice(20, n)
        for ending, array in (("images-idx3-ubyte", x[cut]), ("labels-idx1-ubyte", y[cut])):
            content = idx(array)
            path = folder / f"{part}-{ending}{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    data = load(name, data_dir=tmp_path)
    assert data.train.x.dtype == torch.uint8
    assert (data.train.x[:, 0].numpy() == x[:20]).all()
    assert (data.test.y.numpy() == y[20:]).all()
    assert len(data.classes) == 10
    path.write_bytes(b"\x00\x00\x08\x01")
    with pytest.raises(UserError, match=r"idx|cannot read"):
        load(name, data_dir=tmp_path)


@pytest.mark.parametrize(("kind", "classes", "first"), [("balanced", 47, 0), ("letters", 26, 1), ("byclass", 62, 0)])
def test_emnist_is_turned_upright_and_numbered_from_zero(tmp_path, kind, classes, first):
    x, y = pictures(8, classes)
    (tmp_path / "emnist").mkdir()
    with zipfile.ZipFile(tmp_path / "emnist" / "gzip.zip", "w") as archive:
        for part in ("train", "test"):
            for ending, array in (("images-idx3-ubyte", x), ("labels-idx1-ubyte", y + np.uint8(first))):
                archive.writestr(f"gzip/emnist-{kind}-{part}-{ending}.gz", gzip.compress(idx(array)))
    data = load("emnist", kind=kind, data_dir=tmp_path)
    assert (data.train.x[:, 0].numpy() == x.transpose(0, 2, 1)).all()
    assert (data.train.y.numpy() == y).all()
    assert len(data.classes) == classes
    assert data.partition(clients=2).origin["options"] == ({} if kind == "balanced" else {"kind": kind})


def tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            archive.addfile(item, io.BytesIO(content))


def test_cifar10_binary(tmp_path):
    records = DRAW.integers(0, 256, (60, 3073), np.uint8)
    records[:, 0] %= 10
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    (tmp_path / "cifar10").mkdir()
    members = {f"cifar-10-batches-bin/{n}": records[10 * i : 10 * i + 10].tobytes() for i, n in enumerate(names)}
    tar(tmp_path / "cifar10" / "cifar-10-binary.tar.gz", members)
    data = load("cifar10", data_dir=tmp_path)
    assert (data.train.x.numpy() == records[:50, 1:].reshape(50, 3, 32, 32)).all()
    assert (data.test.y.numpy() == records[50:, 0]).all()
    assert data.classes[3] == "cat"


def test_cifar100_binary_has_the_fine_labels(tmp_path):
    records = DRAW.integers(0, 100, (12, 3074), np.uint8)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(records[:9].tobytes())
    (folder / "test.bin").write_bytes(records[9:].tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"c{i}" for i in range(100)))
    data = load("cifar100", data_dir=tmp_path)
    assert (data.train.y.numpy() == records[:9, 1]).all()
    assert (data.test.x.numpy() == records[9:, 2:].reshape(3, 3, 32, 32)).all()
    assert data.classes[7] == "c7"
    (folder / "train.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match="whole number of records"):
        load("cifar100", data_dir=tmp_path)


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "remote"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{made.server_port}/"
    made.shutdown()
    made.server_close()


def source(url: str, content: bytes, md5: str | None = None) -> Official:
    digest = hashlib.md5(content).hexdigest() if md5 is None else md5
    return Official("thing", ("thing",), (Remote("a.bin.gz", (url + "missing", url + "a.bin.gz"), digest),))


def test_download_is_checked_kept_and_not_repeated(server, tmp_path, monkeypatch):
    remote, url = server
    content = gzip.compress(b"x" * 100_000)
    (remote / "a.bin.gz").write_bytes(content)
    place = tmp_path / "data"
    assert read_official(source(url, content), ["a.bin"], place)["a.bin"] == b"x" * 100_000
    assert [p.name for p in (place / "thing").iterdir()] == ["a.bin.gz"]
    (remote / "a.bin.gz").unlink()
    assert read_official(source(url, content), ["a.bin"], place)["a.bin"] == b"x" * 100_000
    monkeypatch.setenv("FEDLOOM_DATA", str(place))
    assert len(read_official(source(url, content), ["a.bin"])["a.bin"]) == 100_000


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    remote, url = server
    (remote / "a.bin.gz").write_bytes(b"something else")
    with pytest.raises(UserError, match="MD5 sum .* expected " + "0" * 32):
        read_official(source(url, b"", "0" * 32), ["a.bin"], tmp_path / "data")
    assert not list((tmp_path / "data" / "thing").iterdir())


def test_without_a_network_the_error_says_where_to_put_the_files(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    with pytest.raises(UserError, match=r"no network here.*cifar-10-binary\.tar\.gz from https://www\.cs\.toronto"):
        load("cifar10", data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()
    with pytest.raises(UserError, match=r"heart_disease.*no network.*or set FEDLOOM_DATA"):
        load("heart_disease")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"har_f16\.npz is not in .*FEDLOOM_DATA"):
        load("har", data_dir=tmp_path)


def test_damaged_archives_are_named(tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8b" + b"0" * 50)
    with pytest.raises(UserError, match="cifar10"):
        load("cifar10", data_dir=tmp_path)
    (tmp_path / "har_f16.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"cannot read .*har_f16\.npz"):
        load("har", data_dir=tmp_path)


def test_unknown_names_and_options_are_explained():
    with pytest.raises(UserError, match="Did you mean 'cifar10"):
        load("cifar")
    with pytest.raises(UserError, match="no option 'kind'"):
        load("digits", kind="a")
    with pytest.raises(UserError, match="balanced"):
        load("emnist", kind="all")


def test_registry_is_documented():
    assert list(DATASETS) == sorted(DATASETS)
    assert all((reader.__doc__ or "").strip() for reader in DATASETS.values())
    assert all(
        remote.md5
        for name in ("_MNIST", "_FASHION", "_EMNIST", "_CIFAR10", "_CIFAR100")
        for remote in getattr(images, name).remotes
    )


def test_ucis_own_heart_files():
    table = parse_heart(
        "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n35,1,4,?,0,?,0,130,1,?,?,?,7,3\n"
    )
    assert table.shape == (2, 14)
    assert np.isnan(table[1]).sum() == 5
    assert table[:, -1].tolist() == [0, 3]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "shape", "rows", "classes"),
    [
        ("cifar10", (3, 32, 32), 60_000, 10),
        ("emnist47", (1, 28, 28), 42_300, 47),
        ("har", (9, 128), 10_299, 6),
        ("heart_disease", (13,), 920, 2),
        ("mnist", (1, 28, 28), 70_000, 10),
        ("office_caltech10", (3, 96, 96), 2_533, 10),
        ("tcga_brca", (39,), 593, 2),
    ],
)
def test_real_data(data_dir, name, shape, rows, classes):
    data = load(name, data_dir=data_dir)
    assert tuple(data.train.x.shape[1:]) == shape
    assert len(data) == rows
    assert data.train.y.unique().tolist() == list(range(classes))
    assert len(data.classes) == classes
    if data.scale is not None and name != "office_caltech10":
        pixels = data.train.x[::20].double() / 255
        assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(data.scale.mean).double(), atol=0.01)
        assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(data.scale.std).double(), atol=0.01)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("heart_disease", ("cleveland", "hungarian", "switzerland", "va")),
        ("har", tuple(str(i) for i in range(1, 31))),
        ("office_caltech10", ("amazon", "caltech10", "dslr", "webcam")),
    ],
)
def test_natural_clients(data_dir, name, ids):
    source = load(name, data_dir=data_dir)
    data = source.partition()
    assert data.ids == ids
    sizes = np.bincount(source.train_groups)
    assert [sum(map(len, client.parts().values())) for client in data] == sizes.tolist()
    assert data.origin["partition"] == "natural()"


@pytest.mark.data
def test_heart_disease_is_imputed_and_scaled_on_training_rows(data_dir):
    data = load("heart_disease", data_dir=data_dir).partition(seed=1)
    for client in data:
        assert client.train.x.isfinite().all()
        assert client.test.x.isfinite().all()
        assert client.train.x.mean(0).abs().max() < 1e-5
    swiss = data["switzerland"]
    assert (swiss.train.x[:, 4] == 0).all(), "cholesterol is missing throughout"
    raw = load("heart_disease", data_dir=data_dir, preprocess={})
    with pytest.raises(UserError, match=r"impute='median'"):
        raw.partition()


@pytest.mark.data
def test_heart_disease_from_ucis_files_is_the_same(data_dir, tmp_path):
    packed = np.load(data_dir / "heart_disease.npz", allow_pickle=False)
    (tmp_path / "heart_disease").mkdir()
    with zipfile.ZipFile(tmp_path / "heart_disease" / "heart+disease.zip", "w") as archive:
        for hospital in ("cleveland", "hungarian", "switzerland", "va"):
            archive.writestr(f"processed.{hospital}.data", packed[f"raw_{hospital}"].tobytes())
    ours, theirs = load("heart_disease", data_dir=data_dir), load("heart_disease", data_dir=tmp_path)
    assert torch.equal(ours.train.x.nan_to_num(-1), theirs.train.x.nan_to_num(-1))
    assert torch.equal(ours.train.y, theirs.train.y)
    assert (ours.train_groups == theirs.train_groups).all()
    (tmp_path / "heart_disease" / "processed.va.data").write_text("1,2\n")
    for hospital in ("cleveland", "hungarian", "switzerland"):
        (tmp_path / "heart_disease" / f"processed.{hospital}.data").write_bytes(packed[f"raw_{hospital}"].tobytes())
    with pytest.raises(UserError, match=r"processed\.va\.data has the SHA-256 sum"):
        load("heart_disease", data_dir=tmp_path)


@pytest.mark.data
def test_tcga_labels(data_dir):
    z = np.load(data_dir / "tcga_brca.npz", allow_pickle=False)
    horizon = np.median(z["time"])
    data = load("tcga_brca", data_dir=data_dir)
    positive = int(data.train.y.sum() + data.test.y.sum())
    assert positive == int(((z["event"] == 1) & (z["time"] <= horizon)).sum())
    every = load("tcga_brca", data_dir=data_dir, censored="negative")
    assert len(every) == 1088
    assert int(every.train.y.sum() + every.test.y.sum()) == positive
    federation = data.partition()
    assert len(federation) == 6
    assert sum(len(c.test) for c in federation if c.test is not None) == len(data.test)
    with pytest.raises(UserError, match="drop"):
        load("tcga_brca", data_dir=data_dir, censored="maybe")


@pytest.mark.data
def test_mnist_by_dirichlet_is_quick_and_whole(data_dir):
    data = load("mnist", data_dir=data_dir).partition(dirichlet(0.1), clients=100, seed=3)
    assert sum(len(c.train) for c in data) == 60_000
    assert sum(len(c.test) for c in data if c.test is not None) == 10_000
    assert min(len(c.train) for c in data) >= 10
    for client in data:
        if client.test is not None:
            assert set(client.test.y.tolist()) <= set(client.train.y.tolist())


@pytest.mark.data
def test_preprocessing_is_saved_with_real_data(data_dir):
    data = load("heart_disease", data_dir=data_dir, preprocess=Preprocess(impute="median", fit="federated"))
    federation = data.partition()
    rows = data.train.x[data.train_groups == 3]
    done = federation.preprocessing.apply(rows)
    assert done.isfinite().all()
    assert len(federation.preprocessing.outputs) == 13
