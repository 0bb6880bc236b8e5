"""Pictures with a mask each: class tables, masks by colour or by number, and a folder of anyone's own."""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.client_data import Scale
from fedloom.data.dataset import Dataset
from fedloom.data.rows import Rows
from fedloom.errors import UserError

VOID = 255
IMAGENET = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
Bytes = NDArray[np.uint8]
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Class:
    """A class of a mask: its name, and the numbers or colours by which masks show it; void pixels are ignored."""

    name: str
    ids: tuple[int, ...] = ()
    colours: tuple[Colour, ...] = ()
    void: bool = False


@dataclass(frozen=True, slots=True)
class ClassTable:
    """Classes of a data set; those that are not void are numbered in order.

    Example:
        >>> table = ClassTable((Class("void", (0,), void=True), Class("road", (7,)), Class("car", (26,))))
        >>> table.names, table.decode(np.array([[0, 7], [26, 7]]), "a mask").tolist()
        (('road', 'car'), [[255, 0], [1, 0]])
    """

    classes: tuple[Class, ...]
    others_void: bool = False

    def __post_init__(self) -> None:
        if len(self.names) > VOID:
            raise UserError(f"a table of {len(self.names)} classes; expected at most {VOID} besides void.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, by label."""
        return tuple(c.name for c in self.classes if not c.void)

    def decode(self, mask: NDArray[Any], what: str) -> Bytes:
        """Labels of a mask (h, w) of numbers or (h, w, 3) of colours: 0 to K-1, and 255 where it is void.

        Args:
            mask: The mask as it is stored.
            what: Which one, for error messages.
        """
        coloured = mask.ndim == 3
        codes = _codes(mask) if coloured else mask.astype(np.int64)
        pairs: dict[int, int] = {}
        label = -1
        for entry in self.classes:
            label += not entry.void
            keys = [_codes(np.array(c)) for c in entry.colours] if coloured else entry.ids
            pairs |= {int(key): VOID if entry.void else label for key in keys}
        if not coloured:
            pairs.setdefault(VOID, VOID)
        known = np.array(sorted(pairs), np.int64)
        if not len(known):
            raise UserError(
                f"{what} is in {'colour' if coloured else 'numbers'}, for which the class table has no entry."
            )
        place = np.clip(np.searchsorted(known, codes), 0, len(known) - 1)
        strange = known[place] != codes
        if strange.any() and not self.others_void:
            odd = int(codes[strange].ravel()[0])
            shown = f"the colour {(odd >> 16, odd >> 8 & 255, odd & 255)}" if coloured else f"the number {odd}"
            raise UserError(f"{what} holds {shown}, which is no class of the table ({', '.join(self.names)}).")
        labels = np.array([pairs[int(k)] for k in known], np.uint8)[place]
        return np.where(strange, VOID, labels).astype(np.uint8)


def _codes(colours: NDArray[Any]) -> NDArray[np.int64]:
    wide = colours[..., :3].astype(np.int64)
    return np.asarray(wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2], np.int64)


def read_table(path: str | Path) -> ClassTable:
    """Classes from a TOML or CSV file.

    TOML: entries ``[[class]]`` with name, id (a number or several), colour ([r, g, b], "#rrggbb" or several) and void. CSV: a
    header with name and any of id, colour ("#rrggbb") or r, g, b, and void (1 or true). A class named void is void.
    """
    place = Path(path)
    try:
        if place.suffix.lower() == ".toml":
            entries = tomllib.loads(place.read_text(encoding="utf-8")).get("class", [])
        else:
            with place.open(encoding="utf-8", newline="") as file:
                entries = [{(k or "").strip().lower(): v for k, v in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the class table {place}: {error}.") from None
    if not entries:
        raise UserError(f"{place} names no class; expected [[class]] entries (TOML) or a header with name (CSV).")
    return ClassTable(tuple(_entry(entry, place) for entry in entries))


def _entry(entry: Mapping[str, Any], place: Path) -> Class:
    name = str(entry.get("name") or "").strip()
    if not name:
        raise UserError(f"{place}: a class without a name: {dict(entry)}.")
    try:
        ids, colour = entry.get("id"), entry.get("colour", entry.get("color"))
        if colour in (None, "") and entry.get("r") not in (None, ""):
            colour = [int(entry[c]) for c in "rgb"]
        many = isinstance(colour, list) and colour and not isinstance(colour[0], int)
        colours = () if colour in (None, "") else tuple(_colour(c) for c in (colour if many else [colour]))
        numbers = () if ids in (None, "") else tuple(int(i) for i in (ids if isinstance(ids, list) else [ids]))
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{place}, class {name!r}: expected id as a whole number and colour as [r, g, b] or '#rrggbb', got {dict(entry)}."
        ) from None
    void = str(entry.get("void", "")).strip().lower() in ("1", "true", "yes") or name.lower() == "void"
    return Class(name, numbers, colours, void)


def _colour(value: Any) -> Colour:
    if isinstance(value, str):
        text = value.strip().lstrip("#")
        if len(text) != 6:
            raise ValueError(value)
        return int(text[:2], 16), int(text[2:4], 16), int(text[4:], 16)
    r, g, b = (int(v) for v in value)
    return r, g, b


# Files ----------------------------------------------------------------------------------------------------


def pictures_in(folder: Path) -> list[Path]:
    """The pictures of a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS) if folder.is_dir() else []


def read_pictures(
    pairs: Sequence[tuple[Path, Path]],
    table: ClassTable,
    size: tuple[int, int] | None,
    prepare: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
) -> Rows:
    """Pictures (n, 3, h, w) in bytes and labels (n, h, w); resized, masks without mixing classes.

    Args:
        pairs: A picture and its mask each.
        table: The classes.
        size: Height and width; None for the pictures' own, which must then agree.
        prepare: What to do with a mask as it is stored, before it is decoded.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UserError('reading pictures needs Pillow: pip install "fedloom[images]".') from None
    x: Bytes | None = None
    for i, (picture, mask) in enumerate(pairs):
        try:
            with Image.open(picture) as one, Image.open(mask) as two:
                image, label = (
                    one.convert("RGB"),
                    two.convert("RGB") if two.mode not in ("L", "P", "I", "I;16", "1") else two,
                )
                wide = (image.width, image.height) if size is None else (size[1], size[0])
                pixels = np.asarray(image if image.size == wide else image.resize(wide, Image.Resampling.BILINEAR))
                label = label if label.size == wide else label.resize(wide, Image.Resampling.NEAREST)
                stored = np.asarray(label)
        except OSError as error:
            raise UserError(f"cannot read {picture} and its mask {mask}: {error}.") from None
        if x is None:
            x = np.empty((len(pairs), 3, *pixels.shape[:2]), np.uint8)
            y = np.empty((len(pairs), *pixels.shape[:2]), np.uint8)
        if pixels.shape[:2] != x.shape[2:]:
            raise UserError(
                f"{picture} is of another size than {pairs[0][0]}; give size=(height, width) to resize all."
            )
        x[i] = pixels.transpose(2, 0, 1)
        y[i] = table.decode(stored if prepare is None else prepare(stored), str(mask))
    assert x is not None
    return Rows(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def numbered(names: Iterable[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Distinct names in the order of their first occurrence, and the position of each name among them.

    Example:
        >>> numbered(["b", "a", "b"])
        (('b', 'a'), array([0, 1, 0]))
    """
    all_ = list(names)
    distinct = tuple(dict.fromkeys(all_))
    place = {name: i for i, name in enumerate(distinct)}
    return distinct, np.array([place[name] for name in all_], np.int64)


def check_size(what: str, size: Any) -> tuple[int, int] | None:
    """A size is None or (height, width)."""
    if size is None:
        return None
    if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(isinstance(v, int) and v > 0 for v in size):
        raise UserError(f"{what}: size = {size!r}; expected (height, width).")
    return int(size[0]), int(size[1])


def from_masks(
    path: str | Path,
    *,
    classes: str | Path | None = None,
    images: str = "images",
    masks: str = "masks",
    client: str | None = None,
    size: tuple[int, int] | None = None,
    video: bool = True,
    scale: Scale | None = IMAGENET,
) -> Dataset:
    """Anyone's pictures and masks: a folder of each, for every client or for all.

    Three layouts below ``path``, in which a mask has its picture's name (the ending may differ, and so may an ending such as
    ``_mask`` before it): ``CLIENT/images/*.png`` and ``CLIENT/masks/*.png``; ``images/CLIENT/*.png`` and ``masks/CLIENT/*.png``;
    ``images/*.png`` and ``masks/*.png``, where ``client`` tells the client from the name.

    Args:
        path: The folder.
        classes: Class table (TOML or CSV, see `read_table`); without, ``classes.toml`` or ``classes.csv`` in the folder. With
            none, masks hold the numbers 0 to K-1, and 255 for void.
        images: Name of the folders of pictures.
        masks: Name of the folders of masks.
        client: Regular expression whose first group, found in a picture's file name, is its client.
        size: Height and width to resize to; None for the pictures' own.
        video: Pictures of a client, in the order of their names, are frames of a recording, which are never parted at random;
            False for pictures that have nothing to do with each other.
        scale: How pixel bytes are standardised.
    """
    folder = Path(path)
    pairs = [
        pair for place, owner in _places(folder, images, masks) for pair in _pairs(place, images, masks, owner, client)
    ]
    if not pairs:
        raise UserError(
            f"{folder} has no pictures in {images}/ with a mask in {masks}/; expected CLIENT/{images} and CLIENT/{masks}, "
            f"{images}/CLIENT and {masks}/CLIENT, or {images} and {masks}."
        )
    wanted = check_size("from_masks", size)
    table = _table(folder, classes, [mask for _, mask, _ in pairs])
    rows = read_pictures([(picture, mask) for picture, mask, _ in pairs], table, wanted)
    groups, position = numbered(owner for _, _, owner in pairs)
    options: dict[str, Any] = {"path": str(folder.resolve()), "images": images, "masks": masks, "client": client}
    options |= {"size": wanted, "video": video, "classes": None if classes is None else str(Path(classes).resolve())}
    defaults = {"images": "images", "masks": "masks", "video": True}
    return Dataset(
        "masks",
        rows,
        classes=table.names,
        scale=scale,
        groups=groups,
        train_groups=position,
        options={k: v for k, v in options.items() if v is not None and v != defaults.get(k)},
        sequences=position if video else None,
    )


def _places(folder: Path, images: str, masks: str) -> list[tuple[Path, str | None]]:
    """Folders that hold pictures and masks, and the client that each names."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; expected one with pictures in {images}/ and masks in {masks}/.")
    if (folder / images).is_dir() and (folder / masks).is_dir():
        return [(folder, None)]
    return [(p, p.name) for p in sorted(folder.iterdir()) if (p / images).is_dir() and (p / masks).is_dir()]


def _pairs(place: Path, images: str, masks: str, owner: str | None, client: str | None) -> list[tuple[Path, Path, str]]:
    found = []
    inner: list[str | None] = []
    if owner is None:
        inner += [p.name for p in sorted((place / images).iterdir()) if p.is_dir()]
    for name in inner or [None]:
        left, right = (place / part if name is None else place / part / name for part in (images, masks))
        known = pictures_in(right)
        for picture in pictures_in(left):
            mask = [m for m in known if m.stem == picture.stem] or [
                m for m in known if m.stem.startswith(picture.stem + "_")
            ]
            if len(mask) != 1:
                raise UserError(f"{picture} has {len(mask)} masks in {right}; expected one of its name.")
            found.append((picture, mask[0], _client(picture, owner or name, client)))
    return found


def _client(picture: Path, owner: str | None, pattern: str | None) -> str:
    if pattern is None:
        return owner or "all"
    hit = re.search(pattern, picture.stem)
    if hit is None:
        raise UserError(f"{picture}: the expression client={pattern!r} does not occur in its name.")
    return hit.group(1) if hit.groups() else hit.group(0)


def _table(folder: Path, given: str | Path | None, masks: Sequence[Path]) -> ClassTable:
    beside = [folder / "classes.toml", folder / "classes.csv"]
    place = Path(given) if given is not None else next((p for p in beside if p.is_file()), None)
    if place is not None:
        return read_table(place)
    from PIL import Image

    highest = 0
    for path in masks:
        with Image.open(path) as image:
            if image.mode not in ("L", "P", "1"):
                raise UserError(
                    f"{path} is in colour, and there is no class table; write {beside[0].name} (name, colour)."
                )
            values = np.unique(np.asarray(image))
        highest = max(highest, int(values[values != VOID].max(initial=0)))
    return ClassTable(tuple(Class(str(k), (k,)) for k in range(highest + 1)))
