"""Federations from files: a folder with a file per client (npz, CSV, or PFLlib's own), or one table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import cut_client
from fedloom.data.federation import ClientData, Federation, Scale
from fedloom.data.files import DAMAGED
from fedloom.data.object_arrays import read_objects
from fedloom.data.preprocessing import Preprocess
from fedloom.data.rows import Rows, make_rows
from fedloom.data.tables import Inputs, Table, as_table, labels, read_csv, read_inputs
from fedloom.errors import UnknownName, UserError

LABELS = ("label", "labels", "y", "target", "class")
_PARTS = ("train", "test", "val")

Pairs = dict[str, dict[str, Any]]


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts "2" before "10"."""
    return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", name) if t]


def _files(folder: Path) -> dict[str, dict[str, Path]]:
    """By client id, the file of each part; the part "all" where there are no subfolders train and test."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder.")
    places = {part: folder / part for part in _PARTS if (folder / part).is_dir()}
    places = places if "train" in places else {"all": folder}
    found: dict[str, dict[str, Path]] = {}
    for part, place in places.items():
        for path in sorted(place.iterdir(), key=lambda p: _natural_order(p.name)):
            if path.suffix.lower() in (".npz", ".csv") and path.is_file():
                if part in found.setdefault(path.stem, {}):
                    raise UserError(f"{place}: client {path.stem!r} has two files; expected one npz or one CSV.")
                found[path.stem][part] = path
    if not found:
        raise UserError(
            f"{folder} holds no clients; expected ID.npz or ID.csv for each client, or the same below train/ and test/."
        )
    kinds = {path.suffix.lower() for files in found.values() for path in files.values()}
    if len(kinds) > 1:
        raise UserError(f"{folder} mixes npz and CSV files; expected one kind.")
    return dict(sorted(found.items(), key=lambda item: _natural_order(item[0])))


def _read_npz(path: Path) -> dict[str, Any]:
    """The arrays of an npz file by name; PFLlib's dictionary counts as such."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if arrays.files == ["data"]:
                content = read_objects(path)
                if not isinstance(content, dict) or not {"x", "y"} <= set(content):
                    raise UserError(f"{path}: expected the arrays x and y inside 'data'.")
                return {"x": _sequences(content["x"]), "y": content["y"]}
            return {name: arrays[name] for name in arrays.files}
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"cannot read {path}: {error}. Expected numeric arrays saved with numpy.savez.") from None


def _sequences(x: Any) -> Any:
    """PFLlib stores text as pairs (tokens, length): two arrays of inputs here."""
    if isinstance(x, list) and x and all(isinstance(row, (list, tuple)) and len(row) == 2 for row in x):
        tokens, lengths = zip(*x, strict=True)
        if all(isinstance(row, (list, tuple)) for row in tokens):
            return np.array(tokens, np.int64), np.array(lengths, np.int64)
    return x


def _npz_parts(files: Mapping[str, Path], what: str) -> dict[str, Any]:
    """One client's (x, y) by part."""
    if "all" not in files:
        return {part: _pair(_read_npz(path), "", path) for part, path in files.items()}
    arrays = _read_npz(files["all"])
    if {"x", "y"} <= set(arrays):
        return {"all": (arrays["x"], arrays["y"])}
    parts = [part for part in _PARTS if f"x_{part}" in arrays]
    if "train" not in parts:
        raise UserError(
            f"{what}: {files['all']} holds {', '.join(arrays)}; expected x and y, or x_train, y_train, x_test, y_test."
        )
    return {part: _pair(arrays, f"_{part}", files["all"]) for part in parts}


def _pair(arrays: Mapping[str, Any], ending: str, path: Path) -> tuple[Any, Any]:
    for name in (f"x{ending}", f"y{ending}"):
        if name not in arrays:
            raise UserError(f"{path} holds {', '.join(arrays)}; expected the array {name}.")
    return arrays[f"x{ending}"], arrays[f"y{ending}"]


def _label_column(table: Table, label: str | None) -> str:
    if label is not None:
        table.column(label)
        return label
    for name in LABELS:
        if name in table.columns:
            return name
    raise UserError(f"{table.where}: which column is the label? Say label='...'; columns: {', '.join(table.columns)}.")


def from_folder(
    path: str | Path,
    *,
    label: str | None = None,
    numeric_label: bool = False,
    test: float = 0.25,
    val: float = 0.0,
    seed: int = 0,
    preprocess: Preprocess | Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    scale: Scale | None = None,
) -> Federation:
    """A federation from a folder with a file per client, whose name is the client's id.

    Three layouts: `ID.npz` with arrays x, y (cut here into training and test rows) or x_train, y_train,
    x_test, y_test; `train/ID.npz` and `test/ID.npz` with x, y, or as PFLlib writes them; and the same with
    CSV files that have a header.

    Args:
        path: The folder.
        label: Label column of CSV files; without, the first of label, labels, y, target, class.
        numeric_label: The label of CSV files is a number to predict, not a class.
        test: Share of a client's rows cut off for testing where the files do not say.
        val: Share of a client's training rows cut off for validation where the files do not say.
        seed: Seed of the cuts.
        preprocess: What to do with the columns; see `Preprocess`.
        classes: Class names, by label.
        scale: How uint8 inputs are scaled.
    """
    folder, spec = Path(path), Preprocess.of(preprocess)
    files = _files(folder)
    inputs = None
    if next(iter(next(iter(files.values())).values())).suffix.lower() == ".npz":
        raw = {key: _npz_parts(paths, f"client {key!r}") for key, paths in files.items()}
    else:
        raw, inputs, named = _csv_parts(files, label, numeric_label, spec)
        classes = classes if classes is not None else named
    clients = []
    for key, parts in raw.items():
        made = {part: make_rows(data, f"client {key!r}, {part}", allow_missing=True) for part, data in parts.items()}
        clients.append(_cut(key, made, test, val, seed))
    origin: dict[str, Any] = {"path": str(folder.resolve()), "label": label, "numeric_label": numeric_label}
    origin |= {"test": test, "val": val, "seed": seed}
    return _finish(Federation(tuple(clients), None, folder.name, _names(classes), scale, origin), spec, inputs)


def _csv_parts(
    files: Mapping[str, Mapping[str, Path]], label: str | None, numeric: bool, spec: Preprocess
) -> tuple[Pairs, Inputs, tuple[str, ...] | None]:
    """Each client's (x, y) by part, how x was read, and class names where labels are text."""
    tables = {(key, part): read_csv(path) for key, paths in files.items() for part, path in paths.items()}
    everything = list(tables.values())
    first = everything[0]
    for table in everything:
        if set(table.columns) != set(first.columns):
            difference = ", ".join(sorted(set(table.columns) ^ set(first.columns)))
            raise UserError(f"{table.where} and {first.where} have different columns: {difference}.")
    target = _label_column(first, label)
    inputs = read_inputs(everything, {target}, spec)
    values, named = labels(everything, target, numeric)
    raw: Pairs = {key: {} for key in files}
    for (key, part), table, y in zip(tables, everything, values, strict=True):
        raw[key][part] = (inputs.encode(table), y)
    return raw, inputs, named


def _cut(key: str, parts: dict[str, Rows], test: float, val: float, seed: int) -> ClientData:
    """One client, its rows cut where the files do not say what is for what."""
    if "all" in parts:
        return cut_client(key, parts["all"], test, val, seed)
    made = {part: rows for part, rows in parts.items() if len(rows)}
    if "train" not in made:
        raise UserError(f"client {key!r} has no training rows; expected at least one. Leave the client out.")
    if val and "val" not in made:
        made |= cut_client(key, made["train"], 0.0, val, seed).parts()
    return ClientData(key, **made)


def _finish(federation: Federation, spec: Preprocess, inputs: Inputs | None) -> Federation:
    """Preprocess, which tables need in any case; of arrays only what was asked for."""
    if inputs is not None:
        return federation.preprocess(inputs.spec, columns=inputs.columns, vocabulary=inputs.words)
    if spec != Preprocess():
        return federation.preprocess(spec)
    return federation.check_finite()


def _names(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if classes is None else tuple(str(c) for c in classes)


def from_table(
    data: Any,
    *,
    client: str,
    label: str,
    numeric_label: bool = False,
    split: str | None = None,
    test: float = 0.25,
    val: float = 0.0,
    seed: int = 0,
    preprocess: Preprocess | Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Federation:
    """A federation from one table with a client column; clients are in the order of their first row.

    Args:
        data: A CSV file with a header, a data frame, or a mapping of columns.
        client: The column that says whose row it is.
        label: The column to predict.
        numeric_label: The label is a number to predict, not a class.
        split: A column with the words train, val and test; without, rows are cut at each client.
        test: Share of a client's rows cut off for testing.
        val: Share of a client's training rows cut off for validation.
        seed: Seed of the cuts.
        preprocess: What to do with the columns; see `Preprocess`.
        name: Name of the federation; the file's without.
    """
    table = as_table(data)
    owners = np.array(table.column(client))
    if (owners == "").any():
        row = int(np.argmax(owners == "")) + 2
        raise UserError(f"{table.where}, row {row}: the client column {client!r} is empty.")
    inputs = read_inputs([table], {client, label, *([] if split is None else [split])}, Preprocess.of(preprocess))
    (y,), classes = labels([table], label, numeric_label)
    rows = make_rows((inputs.encode(table), y), table.where, allow_missing=True)
    words = None if split is None else np.array([word.lower() for word in table.column(split)])
    clients = []
    for key in dict.fromkeys(owners.tolist()):
        mine = owners == key
        if words is None:
            clients.append(cut_client(key, _where(rows, mine), test, val, seed))
        else:
            parts = {part: _where(rows, mine & (words == part)) for part in _PARTS}
            clients.append(_cut(key, parts, 0.0, val, seed))
    if words is not None and not np.isin(words, _PARTS).all():
        odd = words[~np.isin(words, _PARTS)][0]
        raise UserError(f"{table.where}: column {split!r} holds {str(odd)!r}; expected train, val or test.")
    path = str(Path(data).resolve()) if isinstance(data, (str, Path)) else None
    origin: dict[str, Any] = {"path": path, "client": client, "label": label, "numeric_label": numeric_label}
    origin |= {"split": split, "test": test, "val": val, "seed": seed}
    title = name or (Path(path).stem if path else "table")
    made = Federation(tuple(clients), None, title, classes, None, origin if path else {})
    return _finish(made, inputs.spec, inputs)


def read(path: str | Path, **options: Any) -> Federation:
    """A federation from a path: a folder with a file per client, or a table with a client column.

    Args:
        path: A folder, or a CSV file (which needs the options `client` and `label`).
        **options: Options of `from_folder` or `from_table`.
    """
    place = Path(path)
    if not place.exists():
        raise UserError(f"{place} does not exist; expected a folder with a file per client, or a CSV file.")
    reader: Callable[..., Federation] = from_folder if place.is_dir() else from_table
    known = inspect.signature(reader).parameters
    for option in options:
        if option not in known:
            raise UnknownName("option of " + reader.__name__, option, known)
    if reader is from_table:
        for option in ("client", "label"):
            if option not in options:
                raise UserError(f"{place}: which column is the {option}? Say {option}='...'.")
    return reader(place, **options)


def _where(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    return rows.take(torch.from_numpy(np.flatnonzero(mask)))
