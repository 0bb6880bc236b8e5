"""Readers of files: a folder with a file per client (npz, CSV, or PFLlib's own), or one table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.client_data import ClientData, FederationParts, Scale, cut_client
from fedloom.data.preprocess import Preprocess
from fedloom.data.readers.object_arrays import read_objects
from fedloom.data.readers.tables import TableInputs, TextTable, as_table, labels, read_csv, read_inputs
from fedloom.data.rows import Rows, make_rows
from fedloom.data.sets.download import DAMAGED
from fedloom.errors import UserError

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


def _label_column(table: TextTable, label: str | None) -> str:
    if label is not None:
        table.column(label)
        return label
    for name in LABELS:
        if name in table.columns:
            return name
    raise UserError(f"{table.where}: which column is the label? Say label='...'; columns: {', '.join(table.columns)}.")


def read_folder(
    path: str | Path,
    *,
    label: str | None,
    numeric_label: bool,
    test: float,
    val: float,
    seed: int,
    preprocess: Preprocess | Mapping[str, Any] | None,
    classes: Sequence[str] | None,
    scale: Scale | None,
) -> FederationParts:
    """Read a folder with a file per client; see `Federation.from_folder`."""
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
    # Tables always need preprocessing; arrays need it only if there are steps.
    steps = inputs.spec if inputs is not None else spec if spec != Preprocess() else None
    return FederationParts(
        clients=tuple(clients),
        name=folder.name,
        classes=None if classes is None else tuple(str(c) for c in classes),
        scale=scale,
        origin=origin,
        preprocess=steps,
        columns=None if inputs is None else inputs.columns,
        vocabulary=None if inputs is None else inputs.words,
    )


def _csv_parts(
    files: Mapping[str, Mapping[str, Path]], label: str | None, numeric: bool, spec: Preprocess
) -> tuple[Pairs, TableInputs, tuple[str, ...] | None]:
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


def read_table(
    data: Any,
    *,
    client: str,
    label: str,
    numeric_label: bool,
    split: str | None,
    test: float,
    val: float,
    seed: int,
    preprocess: Preprocess | Mapping[str, Any] | None,
    name: str | None,
) -> FederationParts:
    """Read one table with a client column; see `Federation.from_table`."""
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
    return FederationParts(
        clients=tuple(clients),
        name=title,
        classes=classes,
        origin=origin if path else {},
        preprocess=inputs.spec,
        columns=inputs.columns,
        vocabulary=inputs.words,
    )


def _where(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    return rows.take(torch.from_numpy(np.flatnonzero(mask)))
