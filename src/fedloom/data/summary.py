"""Who has what: rows and classes of each client, as text and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from fedloom.data.client_data import ClientData
from fedloom.data.rows import Rows
from fedloom.errors import UserError

_MOST_CLASSES = 20
_MOST_CLIENTS = 60
_IGNORED = 255


@dataclass(frozen=True, eq=False)
class FederationSummary:
    """Rows of each client in training, validation and test, and its rows (train, val and test) of each class.

    Clients that share their test rows (split "shared") each count them.

    Args:
        clients: the clients, in order.
        name: where the data come from.
        class_names: class names, by label; None where the federation has none.
        cloud: the rows that the server holds, if any.
    """

    clients: tuple[ClientData, ...]
    name: str
    class_names: tuple[str, ...] | None
    cloud: Rows | None

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, or numbers where there are none; empty for numbers to predict."""
        names, width = self.class_names or (), self.counts.shape[1]
        return (*names[:width], *(str(c) for c in range(len(names), width)))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Clients x classes: rows of each class over all parts (pixels for dense labels)."""
        clients, y = self.clients, self.clients[0].train.y
        if y.is_floating_point():
            return np.zeros((len(clients), 0), np.int64)
        parts = [(i, rows.y) for i, client in enumerate(clients) for rows in client.parts().values()]
        counts = pad_sequence([torch.bincount(y.reshape(-1)) for _, y in parts], batch_first=True)
        if y.dim() > 1:
            counts[:, _IGNORED : _IGNORED + 1] = 0
        used = [label + 1 for label, count in enumerate(counts.sum(0).tolist()) if count]
        width = max(len(self.class_names or ()), *used[-1:], 0)
        counts = F.pad(counts, (0, width - counts.shape[1]))
        by_client = counts.new_zeros(len(clients), width)
        return by_client.index_add_(0, torch.tensor([i for i, _ in parts]), counts).numpy()

    @property
    def rows(self) -> NDArray[np.int64]:
        """Clients x (train, val, test): rows of each part."""
        parts = [(client.train, client.val, client.test) for client in self.clients]
        return np.array([[0 if rows is None else len(rows) for rows in three] for three in parts], np.int64)

    def __str__(self) -> str:
        """A table with a line per client (the first 60) and the totals of all."""
        classes, rows, counts = self.classes, self.rows, self.counts
        shown = classes if len(classes) <= _MOST_CLASSES else ()
        table = Table(title=f"{self.name}: {len(self.clients)} clients, {rows.sum():,} rows")
        for head in ("client", "train", "val", "test", *(shown or (("classes",) if classes else ()))):
            table.add_column(head, justify="left" if head == "client" else "right", no_wrap=True)
        for client, three, mine in list(zip(self.clients, rows, counts, strict=True))[:_MOST_CLIENTS]:
            table.add_row(client.id, *map(_number, three), *self._classes(mine, shown))
        if len(rows) > _MOST_CLIENTS:
            table.add_row(f"... {len(rows) - _MOST_CLIENTS} more")
        table.add_section()
        table.add_row("all", *map(_number, rows.sum(0)), *self._classes(counts.sum(0), shown))
        width = 24 + 12 * (4 + max(1, len(shown)))
        out = StringIO()
        Console(file=out, width=width, no_color=True, highlight=False).print(table)
        if self.cloud is not None:
            out.write(f"cloud: {len(self.cloud):,} rows\n")
        return out.getvalue().rstrip()

    def _classes(self, mine: NDArray[np.int64], shown: tuple[str, ...]) -> list[str]:
        if shown:
            return [_number(n) for n in mine]
        return [f"{np.count_nonzero(mine)} of {len(mine)}"] if len(mine) else []

    def save(self, path: str | Path) -> Path:
        """Draw who has what: a bar per client, a colour per class (PNG, or what the ending says).

        Args:
            path: Where to; needs matplotlib.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise UserError('drawing needs matplotlib: pip install "fedloom[plots]".') from None
        counts, rows, classes = self.counts, self.rows, self.classes
        values, names = (counts.T, classes) if classes else (rows.T, ("train", "val", "test"))
        figure = Figure(figsize=(min(4 + 0.25 * len(rows), 20), 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        bottom = np.zeros(len(rows))
        colours = _colours(len(names))
        for value, name, colour in zip(values, names, colours, strict=True):
            axes.bar(np.arange(len(rows)), value, bottom=bottom, width=0.9, label=name, color=colour)
            bottom += value
        axes.set_xlabel("client")
        axes.set_ylabel("rows" if self.clients[0].train.y.dim() == 1 or not classes else "labels")
        axes.set_title(f"{self.name}: {len(rows)} clients, {rows.sum():,} rows")
        if len(rows) <= 30:
            axes.set_xticks(
                np.arange(len(rows)), [client.id for client in self.clients], rotation=45 if len(rows) > 12 else 0
            )
        if len(names) <= _MOST_CLASSES:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, title="class" if classes else None)
        target = Path(path)
        try:
            figure.savefig(target, dpi=120)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write {target}: {error}.") from None
        return target


def _colours(count: int) -> list[tuple[float, float, float, float]]:
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](i) for i in range(count)]
    return [colormaps["turbo"](i / (count - 1)) for i in range(count)]


def _number(value: np.int64 | int) -> str:
    return f"{int(value):,}" if value else "·"
