"""A federation: clients with their rows, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.data.preprocessing import Preprocess, Preprocessing, fit, plain
from fedloom.data.rows import Rows, leaves, make_rows, map_inputs
from fedloom.errors import UserError

if TYPE_CHECKING:
    from fedloom.data.summary import Summary

_ID_LENGTH = 64
_CLOUD = "cloud"


@dataclass(frozen=True, slots=True)
class Scale:
    """How uint8 inputs become floating in the step: x/255, then (x - mean)/std per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def to_float(part: Tensor, scale: Scale | None) -> Tensor:
    """What the step makes of an input: uint8 becomes float32, scaled per channel (axis 1); others stay."""
    if part.dtype != torch.uint8:
        return part
    part = part.float() / 255
    if scale is None:
        return part
    shape = (-1, *[1] * (part.dim() - 2))
    return (part - part.new_tensor(scale.mean).reshape(shape)) / part.new_tensor(scale.std).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class ClientData:
    """One client's rows; `test` and `val` are None where it has none."""

    id: str
    train: Rows
    test: Rows | None = None
    val: Rows | None = None

    def parts(self) -> dict[str, Rows]:
        """The splits that have rows, by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: rows for name, rows in named.items() if rows is not None}


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Clients in a fixed order, which is the order of sums, ties and files everywhere.

    Args:
        clients: The clients; ids are unique strings of at most 64 characters.
        cloud: Rows that the server holds, for hybrid mode.
        name: Where the data come from.
        classes: Class names, by label.
        scale: How uint8 inputs are scaled in the step.
        origin: JSON-able description that is enough to make the federation again; empty means "not
            repeatable".
        preprocessing: What was done to the inputs, fitted; saved with a model and applied by `predict`.

    Example:
        >>> import numpy as np
        >>> x, y = np.zeros((6, 2), np.float32), np.array([0, 1, 0, 1, 0, 1])
        >>> data = Federation.from_arrays([((x, y), (x[:2], y[:2])), ((x, y), None)])
        >>> data.ids, len(data["1"].train), data[1].test
        (('0', '1'), 6, None)
    """

    clients: tuple[ClientData, ...]
    cloud: Rows | None = None
    name: str = "arrays"
    classes: tuple[str, ...] | None = None
    scale: Scale | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing | None = None

    def __post_init__(self) -> None:
        if not self.clients:
            raise UserError("a federation needs at least one client, got none.")
        check_ids([client.id for client in self.clients])
        first = self.clients[0]
        form = _form(first.train)
        for client in self.clients:
            if client.train.y.shape[0] == 0:
                raise UserError(
                    f"client {client.id!r} has no training rows; expected at least one. Leave the client out."
                )
            for part in ("train", "val", "test"):
                rows: Rows | None = getattr(client, part)
                # A population may be large: its differences are put in words only where there are some.
                if rows is not None and (form is None or _form(rows) != form):
                    _check_form(rows, f"client {client.id!r}, {part}", first.train, f"client {first.id!r}")
        if self.cloud is not None:
            _check_form(self.cloud, "cloud", first.train, f"client {first.id!r}")

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        rows = sum(len(rows) for client in self.clients for rows in client.parts().values())
        return f"Federation({self.name!r}, {len(self)} clients, {rows} rows)"

    def __iter__(self) -> Iterator[ClientData]:
        return iter(self.clients)

    def __getitem__(self, key: int | str) -> ClientData:
        if isinstance(key, str):
            if key not in self._position:
                raise UserError(f"no client {key!r}; the federation has {_some(self.ids)}.")
            return self.clients[self._position[key]]
        try:
            return self.clients[key]
        except IndexError:
            raise UserError(f"no client at position {key}; the federation has {len(self)} clients.") from None

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The clients' ids, in order."""
        return tuple(client.id for client in self.clients)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.ids)}

    @classmethod
    def from_arrays(
        cls,
        clients: Iterable[Any],
        ids: Sequence[object] | None = None,
        *,
        cloud: Any = None,
        name: str = "arrays",
        classes: Sequence[str] | None = None,
        scale: Scale | None = None,
        preprocess: Preprocess | Mapping[str, Any] | None = None,
    ) -> Federation:
        """A federation from numpy arrays or torch tensors, which are shared, not copied.

        Args:
            clients: For each client `(train, test)` or `(train, test, val)`, each `(x, y)` or None; x is an
                array, a tuple of arrays (the model is called as `model(*x)`) or a dict of arrays
                (`model(**x)`). Images are N, C, H, W.
            ids: A name for each client; "0", "1", ... without.
            cloud: `(x, y)` that the server holds, for hybrid mode.
            name: Where the data come from.
            classes: Class names, by label.
            scale: How uint8 inputs are scaled; x/255 only, without.
            preprocess: What to do with the columns (axis 1) of x; see `Preprocess`.
        """
        entries = list(clients)
        names = [str(i) for i in (range(len(entries)) if ids is None else ids)]
        if len(names) != len(entries):
            raise UserError(f"{len(names)} ids for {len(entries)} clients; expected one id per client.")
        check_ids(names)
        raw = preprocess is not None
        made = [_client(key, entry, raw) for key, entry in zip(names, entries, strict=True)]
        server = None if cloud is None else make_rows(cloud, "cloud", allow_missing=raw)
        made, server = _promote(made, server)
        named = None if classes is None else tuple(str(c) for c in classes)
        federation = cls(tuple(made), server, name, named, scale)
        return federation if preprocess is None else federation.preprocess(preprocess)

    @classmethod
    def from_rows(cls, data: Any, client: Any, **options: Any) -> Federation:
        """A federation from one array of rows that says whose each is; see `fedloom.data.from_rows`."""
        from fedloom.data.pooled import from_rows

        return from_rows(data, client, **options)

    @classmethod
    def from_datasets(
        cls,
        clients: Iterable[Any],
        ids: Sequence[object] | None = None,
        *,
        name: str = "datasets",
        classes: Sequence[str] | None = None,
        scale: Scale | None = None,
    ) -> Federation:
        """A federation from torch datasets, of which every item is read once into memory.

        Random transforms are frozen by that (a warning says so): augment in training instead.

        Args:
            clients: For each client `(train, test)` or `(train, test, val)`; each a dataset of items `(x, y)`
                or dictionaries with a label, or None.
            ids: A name for each client; "0", "1", ... without.
            name: Where the data come from.
            classes: Class names, by label.
            scale: How uint8 inputs are scaled; x/255 only, without.
        """
        from fedloom.data.torch_datasets import read_clients

        return cls.from_arrays(read_clients(clients, ids), ids, name=name, classes=classes, scale=scale)

    @classmethod
    def from_folder(cls, path: str | Path, **options: Any) -> Federation:
        """A federation from a folder with a file per client; see `fedloom.data.from_folder`."""
        from fedloom.data.folders import from_folder

        return from_folder(path, **options)

    @classmethod
    def from_table(cls, data: Any, *, client: str, label: str, **options: Any) -> Federation:
        """A federation from one table with a client column; see `fedloom.data.from_table`."""
        from fedloom.data.folders import from_table

        return from_table(data, client=client, label=label, **options)

    def with_cloud(self, data: Any) -> Federation:
        """The same clients, and rows that the server holds: `(x, y)` or `Rows`.

        Where the federation is preprocessed, so is the cloud, which needs a fit of the federation.
        """
        fitted = self.preprocessing
        cloud = make_rows(data, "cloud", allow_missing=fitted is not None)
        if fitted is not None:
            cloud = Rows(fitted.apply(cloud.x, _CLOUD), cloud.y)
        clients, cloud_rows = _promote(list(self.clients), cloud)
        return replace(self, clients=tuple(clients), cloud=cloud_rows, origin={})

    def preprocess(
        self,
        spec: Preprocess | Mapping[str, Any],
        *,
        columns: Sequence[str] | None = None,
        vocabulary: Mapping[str, Sequence[str]] | None = None,
    ) -> Federation:
        """The federation with its inputs preprocessed, fitted on training rows only.

        Args:
            spec: What to do; see `Preprocess`.
            columns: Names of the columns (axis 1) of x; "0", "1", ... without.
            vocabulary: The words of text columns, by number.

        Example:
            >>> x, y = torch.tensor([[1.0], [float("nan")], [3.0]]), torch.zeros(3, dtype=torch.long)
            >>> data = Federation.from_arrays([((x, y), None)], preprocess={"impute": "median"})
            >>> data[0].train.x.squeeze(1).tolist()
            [1.0, 2.0, 3.0]
        """
        if self.preprocessing is not None:
            raise UserError("the federation is preprocessed already; give all steps in one Preprocess.")
        train = {client.id: _columns(client.train, client.id) for client in self.clients}
        if self.cloud is not None and Preprocess.of(spec).fit == "client":
            train[_CLOUD] = _columns(self.cloud, _CLOUD)
        fitted = fit(train, Preprocess.of(spec), columns, vocabulary)
        clients = tuple(
            ClientData(c.id, **{part: Rows(fitted.apply(rows.x, c.id), rows.y) for part, rows in c.parts().items()})
            for c in self.clients
        )
        cloud = None if self.cloud is None else Rows(fitted.apply(self.cloud.x, _CLOUD), self.cloud.y)
        origin = {**self.origin, "preprocess": plain(fitted.spec)} if self.origin else {}
        return replace(self, clients=clients, cloud=cloud, origin=origin, preprocessing=fitted)

    def check_finite(self) -> Federation:
        """The federation itself; an error that names the client where an input is NaN or infinite."""
        for client in self.clients:
            for part, rows in client.parts().items():
                make_rows(rows, f"client {client.id!r}, {part}")
        return self

    def summary(self) -> Summary:
        """Who has what: prints as a table, and `.save("who.png")` draws it."""
        from fedloom.data.summary import Summary

        return Summary(self)

    def subset(self, ids: Iterable[str]) -> Federation:
        """Only the clients named, in the federation's order."""
        wanted = [self[key].id for key in ids]
        check_ids(wanted)
        chosen = set(wanted)
        kept = tuple(client for client in self.clients if client.id in chosen)
        origin = {**self.origin, "subset": [client.id for client in kept]} if self.origin else {}
        return replace(self, clients=kept, origin=origin)


def check_ids(ids: Sequence[str]) -> None:
    """Ids are unique, printable strings of 1 to 64 characters."""
    seen: set[str] = set()
    for name in ids:
        if not isinstance(name, str):
            raise UserError(f"client id {name!r} is a {type(name).__name__}; expected a string.")
        if not 1 <= len(name) <= _ID_LENGTH or not name.isprintable():
            raise UserError(f"client id {name!r}: expected 1 to {_ID_LENGTH} printable characters.")
        if name in seen:
            raise UserError(f"client id {name!r} occurs twice; expected unique ids.")
        seen.add(name)


def _client(name: str, entry: Any, allow_missing: bool) -> ClientData:
    what = f"client {name!r}"
    if isinstance(entry, ClientData):
        entry = (entry.train, entry.test, entry.val)
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3) or not _is_pair(entry[0]):
        raise UserError(
            f"{what}: expected ((x_train, y_train), (x_test, y_test)). "
            "Where there are no test rows write ((x, y), None)."
        )
    test, val = entry[1], entry[2] if len(entry) == 3 else None
    parts = {
        part: make_rows(data, f"{what}, {part}", allow_missing=allow_missing)
        for part, data in (("train", entry[0]), ("test", test), ("val", val))
        if data is not None
    }
    return ClientData(name, **{part: rows for part, rows in parts.items() if part == "train" or len(rows)})


def _columns(rows: Rows, name: str) -> Tensor:
    if not isinstance(rows.x, Tensor) or rows.x.dim() < 2 or rows.x.dtype == torch.uint8:
        raise UserError(f"client {name!r}: preprocessing needs x to be one floating array of rows and columns.")
    return rows.x


def _is_pair(value: Any) -> bool:
    return isinstance(value, Rows) or (isinstance(value, (tuple, list)) and len(value) == 2)


_LOOKS: dict[str, Callable[[Rows], object]] = {
    "x is a": lambda rows: type(rows.x).__name__,
    "x has rows of shape": lambda rows: {name: tuple(t.shape[1:]) for name, t in leaves(rows.x).items()},
    "x is of type": lambda rows: {name: t.dtype for name, t in leaves(rows.x).items()},
    "y has rows of shape": lambda rows: tuple(rows.y.shape[1:]),
    "y is of type": lambda rows: rows.y.dtype,
}


def _check_form(rows: Rows, what: str, model: Rows, whose: str) -> None:
    """Everyone's x and y have the same form, row shapes and types."""
    for name, look in _LOOKS.items():
        ours, theirs = look(rows), look(model)
        if ours != theirs:
            raise UserError(
                f"{what}: {name} {_plain(ours)}, but {_plain(theirs)} at {whose}; expected the same everywhere."
            )


def _form(rows: Rows) -> tuple[object, ...] | None:
    """What must be the same everywhere, where x is one tensor."""
    x, y = rows.x, rows.y
    return (x.dtype, y.dtype, x.shape[1:], y.shape[1:]) if isinstance(x, Tensor) else None


def _plain(value: object) -> str:
    if isinstance(value, dict) and list(value) == [""]:
        value = value[""]
    return str(value).replace("torch.", "")


def _promote(clients: list[ClientData], cloud: Rows | None) -> tuple[list[ClientData], Rows | None]:
    """Float32 beside float64 becomes float64, whole-number labels beside floating ones become floating."""
    parts = [rows for client in clients for rows in client.parts().values()]
    parts += [] if cloud is None else [cloud]
    wide = any(t.dtype == torch.float64 for rows in parts for t in leaves(rows.x).values())
    labels = {rows.y.dtype for rows in parts}
    if not wide and len(labels) == 1:
        return clients, cloud
    target = torch.float64 if torch.float64 in labels else torch.float32

    def widen(tensor: Tensor) -> Tensor:
        return tensor.double() if wide and tensor.is_floating_point() else tensor

    def change(rows: Rows) -> Rows:
        return Rows(map_inputs(widen, rows.x), rows.y.to(target) if len(labels) > 1 else rows.y)

    made = [ClientData(c.id, **{name: change(rows) for name, rows in c.parts().items()}) for c in clients]
    return made, None if cloud is None else change(cloud)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
