"""Preprocessing of a federation: missing values, imputation, scaling, one-hot columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import UnknownName, UserError

_TYPES = ("categorical", "ignore", "numeric")
_EVERYONE = ""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """What to do with the columns (axis 1) of x before training.

    Args:
        impute: What replaces missing values: "median", "mean", "most_frequent" or "zero"; None leaves NaN, an
            error.
        scale: "standard" (mean 0, variance 1), "minmax" (0 to 1) or None.
        missing: Numbers that mean "missing" besides NaN, for all columns or by column, such as `{"chol":
            [0]}`.
        types: Column types that are not "numeric": "categorical" or "ignore" (left out).
        one_hot: Give each value of a categorical column a column of its own; else its number is kept.
        fit: "client" or "federated". The values of categorical columns are the federation's in both cases, as
            all clients share one model.

    Example:
        >>> Preprocess(impute="median", scale="standard", missing={"chol": [0]}).fit
        'client'
    """

    impute: str | None = None
    scale: str | None = None
    missing: Mapping[str, Sequence[float | str]] | Sequence[float | str] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    one_hot: bool = True
    fit: str = "client"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("impute", self.impute, (None, *IMPUTERS)),
            ("scale", self.scale, (None, *SCALERS)),
            ("fit", self.fit, ("client", "federated")),
        ):
            if value not in known:
                words = ", ".join(repr(k) for k in known)
                raise UserError(f"preprocess: {name} = {value!r}; expected one of {words}.")
        for column, kind in self.types.items():
            if kind not in _TYPES:
                raise UserError(f"preprocess: type {kind!r} of column {column!r}; expected {', '.join(_TYPES)}.")

    @classmethod
    def of(cls, value: Preprocess | Mapping[str, Any] | None) -> Preprocess:
        """A `Preprocess` from itself, from its arguments, or from None the one that does nothing."""
        if isinstance(value, Preprocess):
            return value
        known = {f.name for f in fields(cls)}
        for key in value or {}:
            if key not in known:
                raise UnknownName("preprocess option", str(key), known)
        return cls(**(value or {}))

    def without(self, columns: Collection[str]) -> Preprocess:
        """The same, for a table that these columns have been left out of."""
        missing = self.missing
        if isinstance(missing, Mapping):
            missing = {name: codes for name, codes in missing.items() if name not in columns}
        return replace(self, missing=missing, types={k: v for k, v in self.types.items() if k not in columns})

    def codes(self, column: str) -> list[float]:
        """The numbers that mean "missing" in this column."""
        codes = self.missing.get(column, ()) if isinstance(self.missing, Mapping) else self.missing
        return [float(c) for c in codes if not isinstance(c, str)]

    def words(self) -> set[str]:
        """The texts that mean "missing" in a table."""
        groups = self.missing.values() if isinstance(self.missing, Mapping) else [self.missing]
        return {code for group in groups for code in group if isinstance(code, str)}


@dataclass(frozen=True)
class Preprocessing:
    """A fitted `Preprocess`.

    Args:
        spec: What was asked for.
        columns: Names of the columns of x before.
        values: For each categorical column its values, in the order of the one-hot columns.
        fitted: By client id (or "" for all): the numbers "fill", "centre" and "spread" of each column.
        vocabulary: For each text column of the table its words, by number; empty where x was numbers.
    """

    spec: Preprocess
    columns: tuple[str, ...]
    values: dict[str, list[float]]
    fitted: dict[str, dict[str, list[float]]]
    vocabulary: dict[str, list[str]] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns of x after: one-hot columns are named "column=value"."""
        names: list[str] = []
        for column in self.columns:
            kind = self.spec.types.get(column, "numeric")
            if kind == "categorical" and self.spec.one_hot:
                words = self.vocabulary.get(column)
                names += [f"{column}={words[int(v)] if words else format(v, 'g')}" for v in self.values[column]]
            elif kind != "ignore":
                names.append(column)
        return tuple(names)

    def apply(self, x: Any, client: str | None = None) -> Tensor:
        """The rows as a model of this client was trained to see them.

        Args:
            x: Rows of raw columns, (n, columns, ...), NaN or a missing code where missing.
            client: Whose model; not needed where the fit is the federation's.
        """
        raw = torch.as_tensor(x)
        if raw.dim() < 2 or raw.shape[1] != len(self.columns):
            raise UserError(
                f"x has shape {tuple(raw.shape)}; expected rows of the {len(self.columns)} columns "
                f"{', '.join(self.columns[:8])}{', ...' if len(self.columns) > 8 else ''}."
            )
        key = _EVERYONE if self.spec.fit == "federated" else client
        if key not in self.fitted:
            raise UserError(
                f"no preprocessing was fitted for client {client!r}; known: "
                f"{', '.join(sorted(self.fitted))}. "
                "Use fit='federated' for clients that were not there in training."
            )
        state = self.fitted[key]
        values = blank(raw.double().numpy(), self.columns, self.spec)
        parts: list[Matrix] = []
        for i, column in enumerate(self.columns):
            kind = self.spec.types.get(column, "numeric")
            part = values[:, i]
            if kind == "ignore":
                continue
            if self.spec.impute is not None:
                part = np.where(np.isnan(part), state["fill"][i], part)
            if not np.isfinite(part).all():
                raise UserError(
                    f"client {client!r}: column {column!r} holds missing or infinite values. "
                    "Set impute='median' to fill them."
                )
            if kind == "categorical" and self.spec.one_hot:
                parts += [(part == value).astype(np.float64) for value in self.values[column]]
            else:
                parts.append((part - state["centre"][i]) / state["spread"][i])
        made = torch.from_numpy(np.stack(parts, axis=1))
        return made if raw.dtype == torch.float64 else made.float()

    def to_json(self) -> dict[str, Any]:
        """The fitted state as plain values; `from_json` is the inverse."""
        return asdict(self) | {"spec": plain(self.spec), "columns": list(self.columns)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Preprocessing:
        """A fitted preprocessing from what `to_json` gave."""
        return cls(
            Preprocess.of(state["spec"]),
            tuple(state["columns"]),
            {k: list(v) for k, v in state["values"].items()},
            {k: dict(v) for k, v in state["fitted"].items()},
            {k: list(v) for k, v in state.get("vocabulary", {}).items()},
        )


def plain(spec: Preprocess) -> dict[str, Any]:
    """The arguments of a `Preprocess` that differ from their defaults, as JSON-able values."""
    missing = spec.missing
    lists = {k: list(v) for k, v in missing.items()} if isinstance(missing, Mapping) else list(missing)
    given = asdict(spec) | {"missing": lists, "types": dict(spec.types)}
    default = asdict(Preprocess()) | {"missing": []}
    return {key: value for key, value in given.items() if value != default[key]}


def blank(values: Matrix, columns: Sequence[str], spec: Preprocess) -> Matrix:
    """The values with NaN in place of the missing codes."""
    values = np.array(values, np.float64)
    for i, column in enumerate(columns):
        codes = spec.codes(column)
        if codes:
            values[:, i] = np.where(np.isin(values[:, i], codes), np.nan, values[:, i])
    return values


def fit(
    train: Mapping[str, Tensor],
    spec: Preprocess,
    columns: Sequence[str] | None = None,
    vocabulary: Mapping[str, Sequence[str]] | None = None,
) -> Preprocessing:
    """Fit on the training inputs of each client.

    Args:
        train: By client id, rows (n, columns, ...).
        spec: What to do.
        columns: Names of the columns; "0", "1", ... without.
        vocabulary: For text columns of a table their words; such columns are categorical.
    """
    width = next(iter(train.values())).shape[1]
    names = tuple(columns) if columns is not None else tuple(str(i) for i in range(width))
    named = [*spec.types, *(spec.missing if isinstance(spec.missing, Mapping) else ())]
    for name in named:
        if name not in names:
            raise UnknownName("column", name, names)
    words = {key: list(value) for key, value in (vocabulary or {}).items()}
    types = {**dict.fromkeys(words, "categorical"), **spec.types}
    spec = replace(spec, types=types)
    if all(types.get(name) == "ignore" for name in names):
        raise UserError("preprocess: every column is ignored; expected at least one to train on.")
    blanked = {key: blank(x.double().numpy(), names, spec) for key, x in train.items()}
    together = spec.fit == "federated"
    groups = {_EVERYONE: list(blanked.values())} if together else {key: [part] for key, part in blanked.items()}
    kinds = [types.get(name, "numeric") for name in names]
    fitted = {}
    for key, parts in groups.items():
        fill = fill_values(parts, spec.impute, kinds)
        shown = [np.where(np.isnan(p), _shape(fill, p), p) for p in parts] if spec.impute else parts
        centre, spread = scale_values(shown, spec.scale)
        fitted[key] = {"fill": fill.tolist(), "centre": centre.tolist(), "spread": spread.tolist()}
    values = {
        name: (list(map(float, range(len(words[name])))) if name in words else categories(blanked.values(), i))
        for i, name in enumerate(names)
        if kinds[i] == "categorical"
    }
    return Preprocessing(spec, names, values, fitted, words)


def _shape(row: Matrix, like: Matrix) -> Matrix:
    return row.reshape(1, -1, *[1] * (like.ndim - 2))


def _columns(part: Matrix) -> Matrix:
    """(n, columns, ...) as (columns, everything else)."""
    return np.moveaxis(part, 1, 0).reshape(part.shape[1], -1)


def _seen(parts: Sequence[Matrix], column: int) -> list[Matrix]:
    flat = [_columns(part)[column] for part in parts]
    return [values[np.isfinite(values)] for values in flat]


def _kth(parts: Sequence[Matrix], k: int) -> float:
    """The k-th smallest value over all clients, by bisection on the summed counts of values at most t.

    At most k - 1 values are <= low throughout. The next value above low is the answer as soon as k values are
    at most that; until then low rises, and it cannot rise for ever as the interval is halved.
    """
    parts = [part for part in parts if len(part)]
    low, high = -np.inf, max(float(part.max()) for part in parts)

    def at_most(t: float) -> int:
        return sum(int((part <= t).sum()) for part in parts)

    while True:
        following = min(float(part[part > low].min()) for part in parts if (part > low).any())
        if at_most(following) >= k:
            return following
        low = following
        middle = low + (high - low) / 2
        if at_most(middle) < k:
            low = middle
        else:
            high = middle


def _median(parts: Sequence[Matrix]) -> float:
    n = sum(len(p) for p in parts)
    return (_kth(parts, (n + 1) // 2) + _kth(parts, n // 2 + 1)) / 2


def _mean(parts: Sequence[Matrix]) -> float:
    return sum(float(p.sum()) for p in parts) / sum(len(p) for p in parts)


def _most_frequent(parts: Sequence[Matrix]) -> float:
    counts: dict[float, int] = {}
    for part in parts:
        for value, count in zip(*np.unique(part, return_counts=True), strict=True):
            counts[float(value)] = counts.get(float(value), 0) + int(count)
    return min(counts, key=lambda value: (-counts[value], value))


def _zero(parts: Sequence[Matrix]) -> float:
    return 0.0


IMPUTERS: dict[str, Callable[[Sequence[Matrix]], float]] = {
    "mean": _mean,
    "median": _median,
    "most_frequent": _most_frequent,
    "zero": _zero,
}


def fill_values(parts: Sequence[Matrix], rule: str | None, kinds: Sequence[str]) -> Matrix:
    """What replaces a missing value in each column; categorical columns take their most frequent value.

    A column without a single value is filled with 0.
    """
    fill = np.zeros(len(kinds))
    for i, kind in enumerate(kinds):
        seen = _seen(parts, i)
        if rule is not None and kind != "ignore" and any(len(values) for values in seen):
            fill[i] = IMPUTERS["most_frequent" if kind == "categorical" else rule](seen)
    return fill


def _standard(parts: Sequence[Matrix]) -> tuple[float, float]:
    mean = _mean(parts)
    variance = sum(float(((p - mean) ** 2).sum()) for p in parts) / sum(len(p) for p in parts)
    # A constant column has a variance of rounding errors; it is centred, not blown up.
    spread = float(np.sqrt(variance))
    return mean, spread if spread > 1e-12 * max(1.0, abs(mean)) else 1.0


def _minmax(parts: Sequence[Matrix]) -> tuple[float, float]:
    low = min(float(p.min()) for p in parts if len(p))
    high = max(float(p.max()) for p in parts if len(p))
    return low, high - low or 1.0


SCALERS: dict[str, Callable[[Sequence[Matrix]], tuple[float, float]]] = {
    "minmax": _minmax,
    "standard": _standard,
}


def scale_values(parts: Sequence[Matrix], rule: str | None) -> tuple[Matrix, Matrix]:
    """Centre and spread of each column, for (x - centre)/spread; 0 and 1 where there is nothing to scale."""
    width = parts[0].shape[1]
    centre, spread = np.zeros(width), np.ones(width)
    for i in range(width if rule is not None else 0):
        seen = _seen(parts, i)
        if any(len(values) for values in seen):
            assert rule is not None
            centre[i], spread[i] = SCALERS[rule](seen)
    return centre, spread


def categories(parts: Iterable[Matrix], column: int) -> list[float]:
    """The values of a column at any client, ascending."""
    found: set[float] = set()
    for part in parts:
        found |= {float(v) for v in np.unique(_columns(part)[column]) if np.isfinite(v)}
    return sorted(found)
