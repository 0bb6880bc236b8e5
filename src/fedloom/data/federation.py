"""A federation: clients with their rows, in a fixed order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.data.client_data import ClientData, FederationParts, Scale, check_ids
from fedloom.data.one_array import group_rows
from fedloom.data.preprocess import Preprocess, Preprocessing, fit, plain
from fedloom.data.readers.folders import read_folder, read_table
from fedloom.data.readers.torch_datasets import read_clients
from fedloom.data.rows import Rows, leaves, make_rows, map_inputs
from fedloom.data.summary import FederationSummary
from fedloom.errors import UnknownName, UserError

_CLOUD = "cloud"


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
    def from_rows(
        cls,
        data: Any,
        client: Any,
        *,
        split: Any = None,
        test: float = 0.25,
        val: float = 0.0,
        seed: int = 0,
        name: str = "rows",
        classes: Sequence[str] | None = None,
        scale: Scale | None = None,
    ) -> Federation:
        """Make a federation from one array with the rows of all clients.

        The rows are sorted by client once; each client's rows are then a view of that array, not a copy.

        Args:
            data: `(x, y)`; x is an array, a tuple of arrays or a dict of arrays.
            client: The owner of each row: whole numbers or words. Clients come in sorted order.
            split: The part of each row: "train", "val" or "test"; without it, the shares `test` and `val` of
                each client's rows are cut off.
            test: Share of a client's rows for testing, where `split` is not given.
            val: Share of the rest for validation.
            seed: Seed of the cut.
            name: Where the data come from.
            classes: Class names, by label.
            scale: How uint8 inputs are scaled; x/255 only, without.

        Example:
            >>> import numpy as np
            >>> x, y = np.zeros((6, 2), np.float32), np.array([0, 1, 0, 1, 0, 1])
            >>> split = ["train"] * 4 + ["test"] * 2
            >>> made = Federation.from_rows((x, y), ["b", "a", "b", "a", "b", "b"], split=split)
            >>> made.ids, len(made["b"].train), len(made["b"].test), made["a"].test
            (('a', 'b'), 2, 2, None)
        """
        parts = group_rows(
            data,
            client,
            split=split,
            test=test,
            val=val,
            seed=seed,
            name=name,
            classes=classes,
            scale=scale,
        )
        return cls._from_parts(parts)

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
        return cls.from_arrays(read_clients(clients, ids), ids, name=name, classes=classes, scale=scale)

    @classmethod
    def from_folder(
        cls,
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
        """Make a federation from a folder with a file per client; the file's name is the client's id.

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
        parts = read_folder(
            path,
            label=label,
            numeric_label=numeric_label,
            test=test,
            val=val,
            seed=seed,
            preprocess=preprocess,
            classes=classes,
            scale=scale,
        )
        made = cls._from_parts(parts)
        return made if parts.preprocess is not None else made.check_finite()

    @classmethod
    def from_table(
        cls,
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
        """Make a federation from one table with a client column; clients are in the order of their first row.

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
        return cls._from_parts(
            read_table(
                data,
                client=client,
                label=label,
                numeric_label=numeric_label,
                split=split,
                test=test,
                val=val,
                seed=seed,
                preprocess=preprocess,
                name=name,
            )
        )

    @classmethod
    def _from_parts(cls, parts: FederationParts) -> Federation:
        """Build a federation from its parts, and preprocess it if they say so."""
        made = cls(parts.clients, None, parts.name, parts.classes, parts.scale, parts.origin)
        if parts.preprocess is None:
            return made
        return made.preprocess(parts.preprocess, columns=parts.columns, vocabulary=parts.vocabulary)

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

    def summary(self) -> FederationSummary:
        """Who has what: prints as a table, and `.save("who.png")` draws it."""
        return FederationSummary(self.clients, self.name, self.classes, self.cloud)

    def subset(self, ids: Iterable[str]) -> Federation:
        """Only the clients named, in the federation's order."""
        wanted = [self[key].id for key in ids]
        check_ids(wanted)
        chosen = set(wanted)
        kept = tuple(client for client in self.clients if client.id in chosen)
        origin = {**self.origin, "subset": [client.id for client in kept]} if self.origin else {}
        return replace(self, clients=kept, origin=origin)


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


from_folder = Federation.from_folder
from_table = Federation.from_table
from_rows = Federation.from_rows


def read(path: str | Path, **options: Any) -> Federation:
    """Make a federation from a path: a folder with a file per client, or a table with a client column.

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
