"""Tables: CSV files or columns of values, with text columns as numbers."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.preprocess import Preprocess, Preprocessing
from fedloom.errors import UnknownName, UserError

MISSING = frozenset(("", "?", "na", "n/a", "nan", "null", "none"))

Values = NDArray[Any]


@dataclass(frozen=True)
class TextTable:
    """Columns of text, all of one length."""

    columns: dict[str, list[str]]
    where: str

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def column(self, name: str) -> list[str]:
        """A column by name."""
        if name not in self.columns:
            raise UnknownName(f"column of {self.where}", name, self.columns)
        return self.columns[name]


def read_csv(path: Path) -> TextTable:
    """A CSV file with a header line, whose commonest delimiter (comma, semicolon, tab) counts."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            file.seek(0)
            rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path} as CSV: {error}.") from None
    if len(rows) < 2:
        raise UserError(f"{path} has no rows; expected a header line and at least one row.")
    names = [name.strip() for name in rows[0]]
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"{path}: column names are empty or occur twice: {', '.join(map(repr, names))}.")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise UserError(f"{path}, row {number} has {len(row)} values; expected {len(names)} as in the header.")
    return TextTable({name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(names)}, str(path))


def as_table(data: Any) -> TextTable:
    """A table from a path, a mapping of columns, or a data frame."""
    if isinstance(data, (str, Path)):
        return read_csv(Path(data))
    if not isinstance(data, Mapping) and hasattr(data, "columns"):
        data = {name: data[name] for name in data.columns}
    if not isinstance(data, Mapping) or not data:
        raise UserError(f"a table is a CSV file, a data frame or a mapping of columns; got a {type(data).__name__}.")
    columns = {str(name): [_text(value) for value in values] for name, values in data.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise UserError(f"the columns of a table have equal length and at least one row; got {lengths}.")
    return TextTable(columns, "the table")


def _text(value: object) -> str:
    if value is None:
        return ""
    # repr of a float gives back the same float; str of a 32-bit one does not round-trip through float64.
    return repr(float(value)) if isinstance(value, (float, np.floating)) else str(value).strip()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class TableInputs:
    """How the input columns of tables become a matrix.

    Args:
        columns: The columns, in order.
        words: For each column that is not all numbers its words, sorted.
        blank: Texts that mean "missing", in lower case.
        spec: The preprocessing that is left to do.
    """

    columns: tuple[str, ...]
    words: dict[str, list[str]]
    blank: frozenset[str] = MISSING
    spec: Preprocess = field(default_factory=Preprocess)

    def encode(self, table: TextTable) -> NDArray[np.float32]:
        """The columns as a matrix: numbers, positions of words, NaN where a value is missing or unknown."""
        made = np.full((len(table), len(self.columns)), np.nan)
        for i, name in enumerate(self.columns):
            places = {word: float(k) for k, word in enumerate(self.words.get(name, ()))}
            for row, word in enumerate(table.column(name)):
                if word.lower() in self.blank:
                    continue
                if places:
                    made[row, i] = places.get(word, np.nan)
                elif _is_number(word):
                    made[row, i] = float(word)
                else:
                    raise UserError(f"{table.where}, row {row + 2}, column {name!r}: {word!r} is not a number.")
        return made.astype(np.float32)


def read_inputs(tables: Sequence[TextTable], special: Collection[str], spec: Preprocess) -> TableInputs:
    """Which columns are inputs, and the words of the text columns over all tables.

    Args:
        tables: Tables with the same columns.
        special: Columns that are no inputs: label, client, split.
        spec: Column types and missing words; columns of type "ignore" are left out.
    """
    for name in spec.types:
        tables[0].column(name)
    ignored = {name for name, kind in spec.types.items() if kind == "ignore"}
    columns = tuple(name for name in tables[0].columns if name not in special and name not in ignored)
    if not columns:
        raise UserError(f"{tables[0].where} has no input columns besides {', '.join(sorted(special))}.")
    blank = MISSING | {word.lower() for word in spec.words()}
    words: dict[str, list[str]] = {}
    for name in columns:
        found = {word for table in tables for word in table.column(name) if word.lower() not in blank}
        if any(not _is_number(word) for word in found):
            words[name] = sorted(found)
    return TableInputs(columns, words, blank, spec.without(ignored))


def encode_table(data: Any, fitted: Preprocessing) -> NDArray[np.float32]:
    """The raw inputs in a table, as `fitted.apply` takes them; columns are found by name, others do not
    matter.

    Args:
        data: A CSV file with a header, a data frame, or a mapping of columns.
        fitted: The preprocessing that was fitted in training.
    """
    blank = MISSING | {word.lower() for word in fitted.spec.words()}
    return TableInputs(fitted.columns, fitted.vocabulary, blank).encode(as_table(data))


def labels(
    tables: Sequence[TextTable], name: str, numeric: bool = False
) -> tuple[list[Values], tuple[str, ...] | None]:
    """The label column of each table, and class names where labels are text.

    Args:
        tables: The tables.
        name: The column.
        numeric: Labels are numbers to predict. Without, whole numbers are classes as they stand, other
            numbers are numbers to predict, and texts are classes in sorted order.
    """
    texts = [table.column(name) for table in tables]
    for table, words in zip(tables, texts, strict=True):
        for row, word in enumerate(words):
            if word.lower() in MISSING:
                raise UserError(f"{table.where}, row {row + 2}: label {name!r} is missing. Remove the row.")
    known = sorted({word for words in texts for word in words})
    if not all(_is_number(word) for word in known):
        places = {word: k for k, word in enumerate(known)}
        return [np.array([places[word] for word in words], np.int64) for words in texts], tuple(known)
    numbers = [np.array([float(word) for word in words]) for words in texts]
    if not numeric and all((values == np.floor(values)).all() for values in numbers):
        return [values.astype(np.int64) for values in numbers], None
    return [values.astype(np.float32) for values in numbers], None
