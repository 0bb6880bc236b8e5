"""CamVid, Cityscapes and SYNTHIA-SF: recordings of streets, in their official folder layouts."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.client_data import Scale
from fedloom.data.dataset import Dataset
from fedloom.data.readers.masks import IMAGENET, Class, ClassTable, check_size, numbered, pictures_in, read_pictures
from fedloom.data.rows import Rows, concatenate
from fedloom.data.sets.download import data_folders, find, load_npz
from fedloom.errors import UserError

Pair = tuple[Path, Path]

# CamVid: the eleven classes that everyone reports, and the thirty-two of the official colours that make them up.
_CAMVID = {
    "Sky": {"Sky": (128, 128, 128)},
    "Building": {
        "Bridge": (0, 128, 64),
        "Building": (128, 0, 0),
        "Wall": (64, 192, 0),
        "Tunnel": (64, 0, 64),
        "Archway": (192, 0, 128),
    },
    "Pole": {"Column_Pole": (192, 192, 128), "TrafficCone": (0, 0, 64)},
    "Road": {"Road": (128, 64, 128), "LaneMkgsDriv": (128, 0, 192), "LaneMkgsNonDriv": (192, 0, 64)},
    "Pavement": {"Sidewalk": (0, 0, 192), "ParkingBlock": (64, 192, 128), "RoadShoulder": (128, 128, 192)},
    "Tree": {"Tree": (128, 128, 0), "VegetationMisc": (192, 192, 0)},
    "SignSymbol": {"SignSymbol": (192, 128, 128), "Misc_Text": (128, 128, 64), "TrafficLight": (0, 64, 64)},
    "Fence": {"Fence": (64, 64, 128)},
    "Car": {
        "Car": (64, 0, 128),
        "SUVPickupTruck": (64, 128, 192),
        "Truck_Bus": (192, 128, 192),
        "Train": (192, 64, 128),
        "OtherMoving": (128, 64, 64),
    },
    "Pedestrian": {
        "Pedestrian": (64, 64, 0),
        "Child": (192, 128, 64),
        "CartLuggagePram": (64, 0, 192),
        "Animal": (64, 128, 64),
    },
    "Bicyclist": {"Bicyclist": (0, 128, 192), "MotorcycleScooter": (192, 0, 192)},
}
CAMVID = ClassTable(
    (
        *(Class(name, (i,), tuple(parts.values())) for i, (name, parts) in enumerate(_CAMVID.items())),
        Class("Void", (11,), ((0, 0, 0),), void=True),
    )
)
# Cityscapes: labelIds of the nineteen classes that are evaluated; all other numbers are void.
_CITYSCAPES = (
    "road:7 sidewalk:8 building:11 wall:12 fence:13 pole:17 traffic_light:19 traffic_sign:20 vegetation:21 terrain:22 "
    "sky:23 person:24 rider:25 car:26 truck:27 bus:28 train:31 motorcycle:32 bicycle:33"
)
CITYSCAPES = ClassTable(
    tuple(Class(name.replace("_", " "), (int(i),)) for name, i in (entry.split(":") for entry in _CITYSCAPES.split())),
    others_void=True,
)
_SYNTHIA = (
    "void road sidewalk building wall fence pole traffic_light traffic_sign vegetation terrain sky person rider car truck "
    "bus train motorcycle bicycle road_lines other road_works"
)


def _synthia(keep_void: bool) -> ClassTable:
    names = [name.replace("_", " ") for name in _SYNTHIA.split()]
    return ClassTable(tuple(Class(name, (i,), void=i == 0 and not keep_void) for i, name in enumerate(names)))


def camvid(
    data_dir: str | Path | None = None,
    *,
    train: str | Sequence[str] = "train",
    test: str | Sequence[str] = "test",
    size: tuple[int, int] | None = None,
) -> Dataset:
    """CamVid, 701 street scenes, 11 classes; recordings (0001TP, 0006R0, 0016E5, Seq05V) are the natural clients.

    Read from camvid_240x180.npz, from the folder ``camvid`` or ``CamVid`` with the official split (train, trainannot, val,
    valannot, test, testannot; masks by number), or from the original distribution (701_StillsRaw_full, LabeledApproved_full;
    masks by colour), which has no split: all its frames are pooled.

    Args:
        data_dir: Where to look.
        train: Which official parts to train on: "train", or "train+val".
        test: Which part to test on.
        size: Height and width to resize to; None for the files' own.

    Reference:
        Brostow et al., Semantic object classes in video (2009); split of Badrinarayanan et al., SegNet (2017).
    """
    wanted = check_size("camvid", size)
    chosen = [tuple(p.split("+")) if isinstance(p, str) else tuple(p) for p in (train, test)]
    odd = [p for p in itertools.chain(*chosen) if p not in ("train", "val", "test")]
    if odd or set(chosen[0]) & set(chosen[1]):
        raise UserError(f"camvid: train = {train!r}, test = {test!r}; expected different parts among train, val, test.")
    if find("camvid_240x180.npz", data_dir) is not None:
        if wanted not in (None, (180, 240)):
            raise UserError(
                f"camvid: camvid_240x180.npz holds 180 x 240 pixels; size = {size!r} needs the official files."
            )
        z = load_npz("camvid", "camvid_240x180.npz", data_dir)
        parts = {part: _packed(z, part) for part in ("train", "val", "test")}
    else:
        folder = _folder("camvid", ("camvid", "CamVid", "camvid/CamVid", "CamVid/CamVid"), data_dir)
        if (folder / "LabeledApproved_full").is_dir():
            return _camvid_original(folder, wanted)
        parts = {part: _camvid_part(folder, part, wanted) for part in dict.fromkeys(itertools.chain(*chosen))}
    rows, ids = zip(*(_joined([parts[p] for p in which]) for which in chosen), strict=True)
    options = {"train": "+".join(chosen[0]), "test": "+".join(chosen[1]), "size": wanted}
    kept = {k: v for k, v in options.items() if v != {"train": "train", "test": "test", "size": None}[k]}
    return _recordings("camvid", rows[0], ids[0], rows[1], ids[1], CAMVID.names, kept)


def _packed(z: Mapping[str, NDArray[Any]], part: str) -> tuple[Rows, list[str]]:
    try:
        from PIL import Image
    except ImportError:
        raise UserError('reading pictures needs Pillow: pip install "fedloom[images]".') from None
    blob, offsets = z[f"{part}_webp"], z[f"{part}_offsets"]
    pictures = [
        np.asarray(Image.open(io.BytesIO(blob[a:b].tobytes())).convert("RGB")) for a, b in itertools.pairwise(offsets)
    ]
    x = np.stack(pictures).transpose(0, 3, 1, 2)
    y = np.stack([CAMVID.decode(mask, f"camvid_240x180.npz, {part}_labels") for mask in z[f"{part}_labels"]])
    ids = [str(i) for i in z[f"{part}_ids"]]
    return Rows(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64))), ids


def _camvid_part(folder: Path, part: str, size: tuple[int, int] | None) -> tuple[Rows, list[str]]:
    pictures = pictures_in(folder / part)
    if not pictures:
        raise UserError(f"camvid: {folder / part} holds no pictures; expected the folders {part} and {part}annot.")
    pairs = [(picture, folder / f"{part}annot" / picture.name) for picture in pictures]
    return read_pictures(pairs, CAMVID, size), [picture.stem for picture in pictures]


def _camvid_original(folder: Path, size: tuple[int, int] | None) -> Dataset:
    pictures = pictures_in(folder / "701_StillsRaw_full")
    if not pictures:
        raise UserError(f"camvid: {folder / '701_StillsRaw_full'} holds no pictures.")
    pairs = [(p, folder / "LabeledApproved_full" / f"{p.stem}_L{p.suffix}") for p in pictures]
    rows, ids = read_pictures(pairs, CAMVID, size), [p.stem for p in pictures]
    return _recordings("camvid", rows, ids, None, [], CAMVID.names, {} if size is None else {"size": size})


def _recordings(
    name: str,
    train: Rows,
    ids: Sequence[str],
    test: Rows | None,
    test_ids: Sequence[str],
    classes: tuple[str, ...],
    options: dict[str, Any],
) -> Dataset:
    """CamVid's frames in the order of their ids, whose first six characters name the recording."""
    groups, position = numbered(i[:6] for i in (*sorted(ids), *sorted(test_ids)))
    order = torch.from_numpy(np.argsort(np.array(ids), kind="stable"))
    later = torch.from_numpy(np.argsort(np.array(test_ids, dtype=str), kind="stable"))
    n = len(ids)
    return Dataset(
        name,
        train.take(order),
        None if test is None else test.take(later),
        classes,
        Scale((0.412, 0.426, 0.433), (0.302, 0.307, 0.302)),
        groups,
        position[:n],
        None if test is None else position[n:],
        options,
        sequences=position[:n],
        test_sequences=None if test is None else position[n:],
    )


def cityscapes(data_dir: str | Path | None = None, *, size: tuple[int, int] | None = (256, 512)) -> Dataset:
    """Cityscapes, 2,975 + 500 street scenes, 19 classes; cities are the natural clients.

    Read from the folder ``cityscapes`` in the official layout: leftImg8bit/train/CITY/*_leftImg8bit.png and
    gtFine/train/CITY/*_gtFine_labelIds.png; val, whose cities are others, is the official test set here (the labels of test
    are not public) and is dealt to the clients in contiguous pieces.

    Args:
        data_dir: Where to look.
        size: Height and width to resize to; None for the full 1024 x 2048.

    Reference:
        Cordts et al., The Cityscapes dataset for semantic urban scene understanding (2016).
    """
    wanted = check_size("cityscapes", size)
    folder = _folder("cityscapes", ("cityscapes", "Cityscapes"), data_dir)
    parts: list[tuple[Rows, list[str]]] = []
    for part in ("train", "val"):
        pairs: list[Pair] = []
        for picture in sorted((folder / "leftImg8bit" / part).glob("*/*_leftImg8bit.png")):
            stem = picture.name.removesuffix("_leftImg8bit.png")
            pairs.append((picture, folder / "gtFine" / part / picture.parent.name / f"{stem}_gtFine_labelIds.png"))
        if not pairs:
            raise UserError(f"cityscapes: {folder / 'leftImg8bit' / part} has no CITY/*_leftImg8bit.png.")
        parts.append((read_pictures(pairs, CITYSCAPES, wanted), [p.name for p, _ in pairs]))
    (train, names), (test, test_names) = parts
    cities, city = numbered(name.split("_")[0] for name in (*names, *test_names))
    # aachen_000003_000019: city, sequence, frame; several frames of one sequence are neighbours.
    _, sequence = numbered("_".join(name.split("_")[:2]) for name in (*names, *test_names))
    n = len(train)
    options = {} if wanted == (256, 512) else {"size": wanted}
    return Dataset(
        "cityscapes",
        train,
        test,
        CITYSCAPES.names,
        Scale((0.287, 0.325, 0.284), (0.187, 0.190, 0.187)),
        cities,
        city[:n],
        city[n:],
        options,
        sequences=sequence[:n],
        test_sequences=sequence[n:],
    )


def synthia_sf(
    data_dir: str | Path | None = None, *, size: tuple[int, int] | None = (270, 480), keep_void: bool = False
) -> Dataset:
    """SYNTHIA-SF, 2,224 rendered street scenes, 22 classes; the six sequences are the natural clients.

    Read from the folder ``SYNTHIA-SF`` in the official layout: SEQ1/RGBLeft/*.png and SEQ1/GTLeft/*.png, whose red channel is
    the class.

    Args:
        data_dir: Where to look.
        size: Height and width to resize to; None for the full 1080 x 1920.
        keep_void: Count void as a class (the first of 23), as some papers do.

    Reference:
        Hernandez-Juarez et al., Slanted stixels: representing San Francisco's steepest streets (2017).
    """
    wanted = check_size("synthia_sf", size)
    folder = _folder("synthia_sf", ("SYNTHIA-SF", "synthia_sf"), data_dir)
    pairs = [
        (picture, sequence / "GTLeft" / picture.name)
        for sequence in sorted(folder.glob("SEQ*"))
        for picture in pictures_in(sequence / "RGBLeft")
    ]
    if not pairs:
        raise UserError(f"synthia_sf: {folder} has no SEQ*/RGBLeft/*.png.")
    table = _synthia(keep_void)
    rows = read_pictures(pairs, table, wanted, lambda mask: mask if mask.ndim == 2 else mask[..., 0])
    groups, position = numbered(picture.parent.parent.name for picture, _ in pairs)
    options: dict[str, Any] = {} if wanted == (270, 480) else {"size": wanted}
    options |= {"keep_void": True} if keep_void else {}
    return Dataset(
        "synthia_sf",
        rows,
        classes=table.names,
        scale=IMAGENET,
        groups=groups,
        train_groups=position,
        options=options,
        sequences=position,
    )


def _folder(name: str, places: Sequence[str], data_dir: str | Path | None) -> Path:
    """The folder of a data set that must be fetched by hand: its terms have to be accepted."""
    tops = data_folders(data_dir)
    for top in tops:
        for place in places:
            if (top / place).is_dir():
                return top / place
    where = " or ".join(str(top / places[0]) for top in tops)
    raise UserError(
        f"data set {name!r} is not in {where}. Get it from its authors, whose terms apply, and unpack it there."
    )


def _joined(parts: Sequence[tuple[Rows, list[str]]]) -> tuple[Rows, list[str]]:
    return concatenate([rows for rows, _ in parts]), [i for _, ids in parts for i in ids]
