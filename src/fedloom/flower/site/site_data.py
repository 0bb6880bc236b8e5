"""A site's rows, from files of its own that a few lines of TOML describe.

.. code-block:: toml

    site = "north"
    store = "store"                 # what the site keeps; relative to this file

    [data]
    path = "patients.csv"           # a CSV, an npz with x and y, or a folder of pictures by class
    label = "outcome"
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import data as sets
from fedloom.data import ClientData, Federation, Preprocess, Rows
from fedloom.data.client_data import check_ids, cut_client
from fedloom.data.preprocess import Preprocessing
from fedloom.data.readers.tables import MISSING, TableInputs, TextTable, labels, read_csv
from fedloom.errors import UserError
from fedloom.flower.experiment import Experiment, RowForm
from fedloom.spec.options import read

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteData:
    """Where a site's rows are and how they are read; what the site does not say is the experiment's.

    Args:
        path: a CSV file, an npz file with x and y (or x_train, y_train, x_test, y_test), or a folder of pictures by class.
        name: instead, a data set that fedloom knows; the site's rows are those of the natural client of its name.
        data_dir: where data sets by name are kept.
        label: of a CSV, the column to predict.
        test: share of the rows for testing, where the files do not say.
        val: share of the training rows for validation.
        seed: of the cut; the run's without.
        preprocess: impute, scale, missing, types; fitted on this site's training rows alone.
    """

    path: str | None = None
    name: str | None = None
    data_dir: str | None = None
    label: str | None = None
    test: float = 0.25
    val: float = 0.0
    seed: int | None = None
    preprocess: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteConfig:
    """A site's own file.

    Args:
        site: its name, as the experiment lists it.
        store: folder of what it keeps.
        data: where its rows are.
        device: where it computes.
        share_rows: whether outputs and targets of its test rows may leave, for metrics over all sites together.
        approve: SHA-256 of the experiment that its administrator has approved; any is accepted without.
        methods: the methods it takes part in; any without.
        server: address of the server, and the port on this machine that Flower's node uses.
    """

    site: str
    store: str = "store"
    data: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    share_rows: bool = False
    approve: str | None = None
    methods: tuple[str, ...] = ()
    server: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def load(path: str | Path) -> SiteConfig:
        """A site's configuration; paths in it are relative to the file."""
        place = Path(path).resolve()
        try:
            table = tomllib.loads(place.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"cannot read the site's configuration {path}: {error}") from None
        made = read(SiteConfig, table, "")
        check_ids([made.site])
        given = read(SiteData, made.data, "data")
        found = dict(made.data)
        if given.path is not None:
            found["path"] = str(place.parent / given.path)
        return replace(made, store=str(place.parent / made.store), data=found)


Loaded = tuple[ClientData, Preprocessing | None]
"""A site's rows as its model sees them, and what made them so."""


def load_rows(plan: Experiment, config: SiteConfig, seed: int) -> ClientData:
    """A site's rows, checked; errors say in words what is wrong."""
    return _load(plan, config, seed)[0]


def new_rows(plan: Experiment, config: SiteConfig, seed: int, file: Path) -> torch.Tensor:
    """Further rows of a site as its model sees them: encoded and preprocessed as its training rows were.

    Args:
        plan: the experiment.
        config: the site's own file.
        seed: of the run, which cuts the rows that preprocessing was fitted on.
        file: a CSV with the input columns, for a site whose rows are one, or an npz file with x.
    """
    fitted = _load(plan, config, seed)[1]
    options = read(SiteData, {**plan.data, **config.data}, "data")
    if file.suffix.lower() == ".csv":
        if options.path is None or Path(options.path).suffix.lower() != ".csv":
            raise UserError(f"{file}: this site's own rows are no CSV; give an npz file with x")
        form, steps = plan.form(), _steps(options) or Preprocess()
        columns = _names(read_csv(Path(options.path)), form, steps, options.label)
        x, extra = _inputs(read_csv(file), columns, form, steps)
    else:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                x, extra = torch.from_numpy(arrays["x"]), None
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"{file}: expected a CSV file, or an npz file with x ({error})") from None
    x = x if fitted is None else fitted.apply(x, config.site)
    x = x if extra is None else torch.cat([x, extra], 1)
    expected = plan.rows().x
    assert isinstance(expected, torch.Tensor)
    if x.is_floating_point() and expected.is_floating_point():
        x = x.to(expected.dtype)
    if x.shape[1:] != expected.shape[1:] or x.dtype != expected.dtype:
        raise UserError(
            f"{file}: x is {tuple(x.shape)} {x.dtype}; expected rows of {tuple(expected.shape[1:])} {expected.dtype}"
        )
    if x.is_floating_point() and not x.isfinite().all():
        raise UserError(f"{file}: x holds missing or infinite values, and the experiment's preprocessing fills none")
    return x


def _load(plan: Experiment, config: SiteConfig, seed: int) -> Loaded:
    options = read(SiteData, {**plan.data, **config.data}, "data")
    chosen = options.seed if options.seed is not None else seed
    if (options.path is None) == (options.name is None):
        raise UserError("data: expected path (files of the site) or name (a known data set), one of the two")
    if options.name is not None:
        return _known(config.site, options, chosen)
    assert options.path is not None
    path = Path(options.path)
    if not path.exists():
        raise UserError(f"data.path {path} does not exist")
    if path.is_dir():
        return cut_client(config.site, _pictures(path, plan.form()), options.test, options.val, chosen), None
    if path.suffix.lower() == ".csv":
        return _table(config.site, read_csv(path), plan, options, chosen)
    if path.suffix.lower() == ".npz":
        return _arrays(config.site, path, options, chosen)
    raise UserError(f"data.path {path}: expected a CSV file, an npz file or a folder of pictures")


def _known(site: str, options: SiteData, seed: int) -> Loaded:
    assert options.name is not None
    found = sets.load(options.name, data_dir=options.data_dir)
    if site not in found.groups:
        raise UserError(f"data set {options.name!r} has no client {site!r}; it has {', '.join(found.groups) or 'none'}")
    made = found.partition(
        sets.natural(), seed=seed, test=options.test, val=options.val, preprocess=_steps(options) or found.preprocess
    )
    return made[site], made.preprocessing


def _steps(options: SiteData) -> Preprocess | None:
    if not options.preprocess:
        return None
    steps = Preprocess.of(options.preprocess)
    if steps.fit != "client":
        raise UserError("preprocess.fit='federated' would need other sites' rows; leave it out, or give fixed numbers")
    return steps


def _arrays(site: str, path: Path, options: SiteData, seed: int) -> Loaded:
    with tempfile.TemporaryDirectory() as folder:
        # The reader names clients by files, so the file gets the site's name.
        link = Path(folder) / f"{site}.npz"
        if link.parent != Path(folder):
            raise UserError(f"site {site!r}: a name with '/' cannot be read from an npz file")
        link.symlink_to(path.resolve())
        made = sets.from_folder(folder, test=options.test, val=options.val, seed=seed, preprocess=_steps(options))
    return made[site], made.preprocessing


def _table(site: str, table: TextTable, plan: Experiment, options: SiteData, seed: int) -> Loaded:
    if options.label is None:
        raise UserError(
            f"{table.where}: which column is the label? Say [data] label = '...'; columns: {', '.join(table.columns)}"
        )
    form, steps = plan.form(), _steps(options) or Preprocess()
    columns = _names(table, form, steps, options.label)
    _check_columns(table, [*columns, options.label])
    x, extra = _inputs(table, columns, form, steps)
    rows = Rows(x, _labels(table, options.label, form, numeric=not _classes(plan)))
    numbers = tuple(c for c in columns if c not in form.words)
    return _finished(site, rows, replace(options, preprocess=_plain(steps, numbers)), seed, numbers, extra)


def _names(table: TextTable, form: RowForm, steps: Preprocess, label: str | None) -> tuple[str, ...]:
    """The input columns: those of the experiment, or all but the label and those that are ignored."""
    ignored = {name for name, kind in steps.types.items() if kind == "ignore"}
    return form.columns or tuple(c for c in table.columns if c != label and c not in ignored)


def _inputs(
    table: TextTable, columns: tuple[str, ...], form: RowForm, steps: Preprocess
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The number columns of a table, and its text columns as zeros and ones."""
    _check_columns(table, columns)
    blank = MISSING | {word.lower() for word in steps.words()}
    numbers = tuple(c for c in columns if c not in form.words)
    hot = [_hot(table, c, [str(w) for w in form.words[c]], blank) for c in columns if c in form.words]
    return torch.from_numpy(TableInputs(numbers, {}, blank).encode(table)), torch.cat(hot, 1) if hot else None


def _check_columns(table: TextTable, columns: Iterable[str]) -> None:
    missing = [c for c in columns if c not in table.columns]
    if missing:
        raise UserError(f"{table.where}: the column {missing[0]!r} is missing; columns: {', '.join(table.columns)}")


def _plain(steps: Preprocess, columns: tuple[str, ...]) -> dict[str, Any]:
    kept = steps.without([c for c in steps.types if c not in columns])
    return {"impute": kept.impute, "scale": kept.scale, "missing": kept.missing, "types": kept.types, "one_hot": False}


def _classes(plan: Experiment) -> bool:
    return plan.task in ("classification", "binary", "segmentation")


def _hot(table: TextTable, column: str, words: list[str], blank: frozenset[str]) -> torch.Tensor:
    """A text column as a column of zeros and ones for each value it can take; a missing value is all zeros."""
    made = torch.zeros(len(table), len(words))
    for row, word in enumerate(table.column(column)):
        if word in words:
            made[row, words.index(word)] = 1.0
        elif word.lower() not in blank:
            raise UserError(
                f"{table.where}, row {row + 2}, column {column!r}: {word!r} is not one of {', '.join(words)}"
            )
    return made


def _labels(table: TextTable, column: str, form: RowForm, *, numeric: bool) -> torch.Tensor:
    """Labels by the classes that the experiment lists: text by name, whole numbers as they stand."""
    (values,), names = labels([table], column, numeric)
    if names is None:
        return torch.from_numpy(values)
    unknown = [name for name in names if name not in form.classes]
    if unknown:
        known = ", ".join(form.classes) or "none: add inputs.classes to the experiment"
        raise UserError(f"{table.where}: the label {unknown[0]!r} is not one of the experiment's classes ({known})")
    places = np.array([form.classes.index(name) for name in names])
    return torch.from_numpy(places[values])


def _finished(
    site: str, rows: Rows, options: SiteData, seed: int, columns: tuple[str, ...], extra: torch.Tensor | None
) -> Loaded:
    """The rows cut into parts and preprocessed by this site's own training rows; further columns are put behind."""
    steps, width = _steps(options), _columns(rows).shape[1]
    if extra is not None:
        rows = Rows(torch.cat([_columns(rows), extra], 1), rows.y)
    parts = cut_client(site, rows, options.test, options.val, seed).parts()
    numbers = ClientData(site, **{part: Rows(_columns(r)[:, :width], r.y) for part, r in parts.items()})
    federation = Federation((numbers,))
    made = (
        federation.check_finite()
        if steps is None or steps == Preprocess(one_hot=False)
        else federation.preprocess(steps, columns=columns)
    )
    joined = {
        part: Rows(torch.cat([_columns(made.clients[0].parts()[part]), _columns(r)[:, width:]], 1), r.y)
        for part, r in parts.items()
    }
    return ClientData(site, **joined), made.preprocessing


def _columns(rows: Rows) -> torch.Tensor:
    assert isinstance(rows.x, torch.Tensor)
    return rows.x


def _pictures(folder: Path, form: RowForm) -> Rows:
    try:
        from PIL import Image
    except ImportError:
        raise UserError('pictures need Pillow: pip install "fedloom[images]"') from None
    if len(form.shape) != 3 or form.type != "uint8" or form.shape[0] not in (1, 3):
        raise UserError("pictures need inputs.type = 'uint8' and inputs.shape = [1 or 3, height, width]")
    if not form.classes:
        raise UserError("pictures need inputs.classes, the names of the subfolders in order")
    odd = [p.name for p in sorted(folder.iterdir()) if p.is_dir() and p.name not in form.classes]
    if odd:
        raise UserError(f"{folder}: the subfolder {odd[0]!r} is not one of the classes {', '.join(form.classes)}")
    x, y = [], []
    for label, name in enumerate(form.classes):
        place = folder / name
        for path in sorted(place.iterdir()) if place.is_dir() else []:
            if path.suffix.lower() in _PICTURES:
                try:
                    with Image.open(path) as image:
                        sized = image.convert("L" if form.shape[0] == 1 else "RGB").resize(
                            (form.shape[2], form.shape[1])
                        )
                        pixels = np.asarray(sized, np.uint8)
                except OSError as error:
                    raise UserError(f"cannot read the picture {path}: {error}") from None
                x.append(pixels.reshape(form.shape[1], form.shape[2], form.shape[0]).transpose(2, 0, 1))
                y.append(label)
    if not x:
        raise UserError(f"{folder} holds no pictures; expected one subfolder for each of {', '.join(form.classes)}")
    return Rows(torch.from_numpy(np.stack(x)), torch.tensor(y))
