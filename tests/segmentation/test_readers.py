"""Official folder layouts and folders of one's own, on tiny trees that the tests make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedloom as fl
from fedloom.data import from_masks, load
from fedloom.data.readers.masks import Class, ClassTable, read_table
from fedloom.data.sets.street import CAMVID, CITYSCAPES

DRAW = np.random.default_rng(0)


def save(path: Path, pixels: np.ndarray) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def picture(path: Path, size: tuple[int, int] = (6, 8)) -> np.ndarray:
    return save(path, DRAW.integers(0, 256, (*size, 3), np.uint8))


def numbers(path: Path, high: int, size: tuple[int, int] = (6, 8)) -> np.ndarray:
    return save(path, DRAW.integers(0, high, size, np.uint8))


def test_table_by_number_and_by_colour() -> None:
    table = ClassTable(
        (
            Class("sky", (5,), ((10, 20, 30), (10, 20, 31))),
            Class("void", (0, 9), ((0, 0, 0),), void=True),
            Class("road", (7,), ((128, 64, 128),)),
        )
    )
    assert table.names == ("sky", "road")
    assert table.decode(np.array([[5, 0, 9, 7, 255]]), "").tolist() == [[0, 255, 255, 1, 255]]
    colours = np.array([[[10, 20, 31], [0, 0, 0], [128, 64, 128], [10, 20, 30]]], np.uint8)
    assert table.decode(colours, "").tolist() == [[0, 255, 1, 0]]
    with pytest.raises(fl.UserError, match=r"mask 3 holds the number 6.*sky, road"):
        table.decode(np.array([[5, 6]]), "mask 3")
    with pytest.raises(fl.UserError, match=r"the colour \(10, 20, 32\)"):
        table.decode(np.array([[[10, 20, 32]]], np.uint8), "mask 3")


@pytest.mark.parametrize("ending", ["toml", "csv", "csv_rgb"])
def test_table_files(tmp_path: Path, ending: str) -> None:
    text = {
        "toml": '[[class]]\nname = "road"\nid = [1, 2]\ncolour = [128, 64, 128]\n[[class]]\nname = "gap"\nid = 0\ncolour = "#000000"\nvoid = true\n[[class]]\nname = "car"\nid = 3\ncolour = ["#00008e", [0, 0, 70]]\n',
        "csv": "name,id,colour,void\nroad,1,#804080,\ngap,0,#000000,1\ncar,3,#00008e,\n",
        "csv_rgb": "Name,r,g,b\nroad,128,64,128\nVoid,0,0,0\ncar,0,0,142\n",
    }[ending]
    path = tmp_path / f"classes.{ending[:4].rstrip('_')}"
    path.write_text(text)
    table = read_table(path)
    assert table.names == ("road", "car")
    colours = np.array([[[128, 64, 128], [0, 0, 0], [0, 0, 142]]], np.uint8)
    assert table.decode(colours, "").tolist() == [[0, 255, 1]]
    if ending == "toml":
        assert table.decode(np.array([[2, 0, 3]]), "").tolist() == [[0, 255, 1]]


@pytest.mark.parametrize("text", ["", "name,id\n,3\n", "name,id\nroad,x\n", "name,colour\nroad,#12\n"])
def test_bad_tables_say_where(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes.csv").write_text(text)
    with pytest.raises(fl.UserError, match=r"classes\.csv"):
        read_table(tmp_path / "classes.csv")


def test_camvid_with_the_official_split(tmp_path: Path) -> None:
    ids = {"train": ["0006R0_f00960", "0001TP_006690", "0001TP_006720"], "val": ["0016E5_07959"]}
    ids["test"] = ["0001TP_008550", "Seq05VD_f00000", "Seq05VD_f00030"]
    kept = {}
    for part, names in ids.items():
        for name in names:
            image = picture(tmp_path / "CamVid" / part / f"{name}.png")
            kept[name] = image, numbers(tmp_path / "CamVid" / f"{part}annot" / f"{name}.png", 12)
    data = load("camvid", data_dir=tmp_path)
    assert data.groups == ("0001TP", "0006R0", "Seq05V")
    assert data.train_groups.tolist() == [0, 0, 1]
    assert data.test_groups.tolist() == [0, 2, 2]
    image, mask = kept["0001TP_006690"]
    assert (data.train.x[0].numpy() == image.transpose(2, 0, 1)).all()
    assert (data.train.y[0].numpy() == np.where(mask == 11, 255, mask)).all()
    assert data.classes == CAMVID.names
    assert len(load("camvid", data_dir=tmp_path, train="train+val").train) == 4
    assert load("camvid", data_dir=tmp_path, test="val", size=(3, 4)).test.x.shape == (1, 3, 3, 4)
    with pytest.raises(fl.UserError, match="different parts"):
        load("camvid", data_dir=tmp_path, train="test")


def test_camvid_original_colours(tmp_path: Path) -> None:
    palette = np.array([c for entry in CAMVID.classes for c in entry.colours], np.uint8)
    assert len(np.unique(palette, axis=0)) == len(palette) == 32
    label = [i for i, entry in enumerate(CAMVID.classes) for _ in entry.colours]
    for name in ("0016E5_00390", "0001TP_006690"):
        picture(tmp_path / "camvid" / "701_StillsRaw_full" / f"{name}.png", (4, 8))
        save(tmp_path / "camvid" / "LabeledApproved_full" / f"{name}_L.png", palette.reshape(4, 8, 3))
    data = load("camvid", data_dir=tmp_path)
    assert data.test is None
    assert data.groups == ("0001TP", "0016E5")
    expected = np.array([255 if v == 11 else v for v in label]).reshape(4, 8)
    assert (data.train.y.numpy() == expected).all()


def test_cityscapes(tmp_path: Path) -> None:
    names = {
        "train": ["aachen_000000_000019", "aachen_000001_000019", "bochum_000000_000313"],
        "val": ["ulm_000003_000019"],
    }
    masks = {}
    for part, frames in names.items():
        for name in frames:
            city = name.split("_")[0]
            picture(tmp_path / "cityscapes" / "leftImg8bit" / part / city / f"{name}_leftImg8bit.png", (8, 16))
            path = tmp_path / "cityscapes" / "gtFine" / part / city / f"{name}_gtFine_labelIds.png"
            masks[name] = numbers(path, 34, (8, 16))
            numbers(path.with_name(f"{name}_gtFine_instanceIds.png"), 34, (8, 16))
    data = load("cityscapes", data_dir=tmp_path, size=None)
    assert data.groups == ("aachen", "bochum", "ulm")
    assert data.train_groups.tolist() == [0, 0, 1]
    assert data.sequences.tolist() == [0, 1, 2]
    raw, found = masks["aachen_000000_000019"], data.train.y[0].numpy()
    official = {entry.ids[0]: i for i, entry in enumerate(CITYSCAPES.classes)}
    assert official[7] == 0
    assert official[33] == 18
    assert (found == np.vectorize(lambda v: official.get(v, 255))(raw)).all()
    federation = data.partition()
    assert federation.ids == ("aachen", "bochum")
    assert sum(0 if c.test is None else len(c.test) for c in federation) == 1
    assert load("cityscapes", data_dir=tmp_path, size=(4, 8)).train.x.shape == (3, 3, 4, 8)


@pytest.mark.parametrize("keep_void", [False, True])
def test_synthia_sf(tmp_path: Path, keep_void: bool) -> None:
    for sequence in ("SEQ1", "SEQ2"):
        for frame in ("0000000", "0000001"):
            picture(tmp_path / "SYNTHIA-SF" / sequence / "RGBLeft" / f"{frame}.png")
            mask = np.zeros((6, 8, 3), np.uint8)
            mask[..., 0], mask[..., 2] = np.arange(48).reshape(6, 8) % 23, 77
            save(tmp_path / "SYNTHIA-SF" / sequence / "GTLeft" / f"{frame}.png", mask)
    data = load("synthia_sf", data_dir=tmp_path, size=None, keep_void=keep_void)
    assert data.groups == ("SEQ1", "SEQ2")
    assert len(data.classes) == (23 if keep_void else 22)
    expected = np.arange(48).reshape(6, 8) % 23
    expected = expected if keep_void else np.where(expected == 0, 255, expected - 1)
    assert (data.train.y[3].numpy() == expected).all()


def by_client(top: Path) -> None:
    for who, n in (("anna", 3), ("ben", 4)):
        for i in range(n):
            picture(top / who / "images" / f"{i:03}.jpg")
            numbers(top / who / "masks" / f"{i:03}.png", 3)


def by_part(top: Path) -> None:
    for who, n in (("anna", 3), ("ben", 4)):
        for i in range(n):
            picture(top / "images" / who / f"{i:03}.png")
            numbers(top / "masks" / who / f"{i:03}_mask.png", 3)


def flat(top: Path) -> None:
    for who, n in (("anna", 3), ("ben", 4)):
        for i in range(n):
            picture(top / "images" / f"{who}-{i:03}.png")
            numbers(top / "masks" / f"{who}-{i:03}.png", 3)


@pytest.mark.parametrize("layout", [by_client, by_part, flat])
def test_own_folders(tmp_path: Path, layout: Callable[[Path], None]) -> None:
    layout(tmp_path)
    data = from_masks(tmp_path, client=r"(\w+)-" if layout is flat else None)
    assert data.groups == ("anna", "ben")
    assert np.bincount(data.train_groups).tolist() == [3, 4]
    assert data.classes == ("0", "1", "2")
    assert torch.equal(load("masks", path=tmp_path, client=r"(\w+)-" if layout is flat else None).train.y, data.train.y)
    federation = data.partition(test=0.3)
    assert [len(c.test) for c in federation] == [1, 1]
    with pytest.raises(fl.UserError, match="near-copies"):
        data.partition(fl.iid(), clients=2)
    assert len(from_masks(tmp_path, video=False).partition(fl.iid(), clients=3)) == 3


def test_own_folders_in_colour_with_a_table(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png")
    mask = np.zeros((6, 8, 3), np.uint8)
    mask[:3] = (0, 128, 0)
    save(tmp_path / "masks" / "a.png", mask)
    with pytest.raises(fl.UserError, match=r"classes\.toml"):
        from_masks(tmp_path)
    (tmp_path / "classes.csv").write_text("name,colour\ngrass,#008000\nvoid,#000000\n")
    data = from_masks(tmp_path, size=(12, 16))
    assert data.classes == ("grass",)
    assert (data.train.y[0, :6] == 0).all()
    assert (data.train.y[0, 6:] == 255).all()


def test_own_folders_with_something_wrong(tmp_path: Path) -> None:
    with pytest.raises(fl.UserError, match="not a folder"):
        from_masks(tmp_path / "nowhere")
    with pytest.raises(fl.UserError, match="no pictures"):
        from_masks(tmp_path)
    picture(tmp_path / "images" / "a.png")
    (tmp_path / "masks").mkdir()
    with pytest.raises(fl.UserError, match="0 masks"):
        from_masks(tmp_path)
    numbers(tmp_path / "masks" / "a.png", 2)
    picture(tmp_path / "images" / "b.png", (5, 8))
    numbers(tmp_path / "masks" / "b.png", 2, (5, 8))
    with pytest.raises(fl.UserError, match="another size"):
        from_masks(tmp_path)


@pytest.mark.parametrize("name", ["camvid", "cityscapes", "synthia_sf"])
def test_what_is_not_there_is_said_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(fl.UserError, match="authors"):
        load(name, data_dir=tmp_path)


@pytest.mark.data
def test_camvid_packed(data_dir: Path) -> None:
    data = load("camvid", data_dir=data_dir)
    assert (len(data.train), len(data.test)) == (367, 233)
    assert data.train.x.shape[1:] == (3, 180, 240)
    assert data.groups == ("0001TP", "0006R0", "0016E5", "Seq05V")
    federation = data.partition()
    assert [(c.id, len(c.train), len(c.test)) for c in federation] == [
        ("0001TP", 62, 91),
        ("0006R0", 101, 47),
        ("0016E5", 204, 95),
    ]
    pooled = data.partition(split="per_client", test=0.25)
    assert pooled.ids == data.groups
    assert len(data.partition(fl.chunks(), clients=12)) == 12
