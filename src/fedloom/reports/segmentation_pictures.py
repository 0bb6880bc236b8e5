"""Pictures of dense prediction: what a client's camera saw, what is true, what each run says, and where it is wrong."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data import Federation, Rows, Scale
from fedloom.errors import UserError
from fedloom.runs.result import Result

VOID = 255
Bytes = NDArray[np.uint8]

# Colours that readers of street scenes know (those of Cityscapes), by words that occur in class names.
_KNOWN = {
    "road lines": (157, 234, 50),
    "road": (128, 64, 128),
    "sidewalk": (244, 35, 232),
    "pavement": (244, 35, 232),
    "building": (70, 70, 70),
    "wall": (102, 102, 156),
    "fence": (190, 153, 153),
    "traffic light": (250, 170, 30),
    "sign": (220, 220, 0),
    "pole": (153, 153, 153),
    "vegetation": (107, 142, 35),
    "tree": (107, 142, 35),
    "terrain": (152, 251, 152),
    "sky": (70, 130, 180),
    "person": (220, 20, 60),
    "pedestrian": (220, 20, 60),
    "rider": (255, 0, 0),
    "bicyclist": (119, 11, 32),
    "bicycle": (119, 11, 32),
    "motorcycle": (0, 0, 230),
    "car": (0, 0, 142),
    "truck": (0, 0, 70),
    "bus": (0, 60, 100),
    "train": (0, 80, 100),
}
_WRONG, _RIGHT, _IGNORED = (214, 48, 39), (232, 232, 228), (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Legend:
    """A colour for every class.

    Args:
        names: Class names, by label.
        colours: Classes x 3 bytes.
    """

    names: tuple[str, ...]
    colours: Bytes

    @staticmethod
    def of(names: Sequence[str]) -> Legend:
        """Known colours for known names, others spread over the hues; no two classes share one.

        Example:
            >>> Legend.of(["road", "Sky", "gnome"]).colours[:2].tolist()
            [[128, 64, 128], [70, 130, 180]]
        """
        chosen: list[tuple[int, int, int]] = []
        for i, name in enumerate(names):
            words = name.lower().replace("_", " ")
            colour = next((c for word, c in _KNOWN.items() if word in words and c not in chosen), None)
            chosen.append(colour or _hue(i, len(names)))
        return Legend(tuple(names), np.array(chosen, np.uint8).reshape(-1, 3))

    def paint(self, labels: NDArray[Any]) -> Bytes:
        """Labels (h, w) as a picture (h, w, 3); void is black."""
        table = np.zeros((VOID + 1, 3), np.uint8)
        table[: len(self.colours)] = self.colours
        return np.asarray(table[labels], np.uint8)


def _hue(i: int, n: int) -> tuple[int, int, int]:
    r, g, b = colorsys.hsv_to_rgb((i * 0.618) % 1, 0.55 + 0.4 * (i % 2), 0.75 + 0.2 * (i % 3 == 0))
    return int(r * 255), int(g * 255), int(b * 255)


def errors(said: NDArray[Any], true: NDArray[Any]) -> Bytes:
    """Red where a prediction is wrong, pale where it is right, black where the truth is void."""
    kind = np.where(true == VOID, 2, (said != true).astype(int))
    return np.array([_RIGHT, _WRONG, _IGNORED], np.uint8)[kind]


def pictures(
    results: Mapping[str, Result] | Result,
    data: Federation,
    folder: str | Path | None = None,
    *,
    clients: Iterable[str] | None = None,
    frames: int = 3,
    part: str = "test",
) -> list[Path]:
    """One PNG per client: its pictures, the truth, and for each run the prediction and its errors, with a colour legend.

    Predictions are those of each client's own model, as it is tested.

    Args:
        results: Finished runs by the name that columns bear, such as ``{"fedavg": a, "fedavg + isr": b}``; or one run.
        data: The federation that they were trained on.
        folder: Where to write; made if it is not there. Without, ``pictures`` in the folder of the last run that has one.
        clients: Which clients; without, the first four that have rows in ``part``.
        frames: Pictures of a client, spread evenly over its rows.
        part: "test", "val" or "train".

    Returns:
        The files, in the order of the clients.
    """
    runs = results if isinstance(results, Mapping) else {str(results.config.get("method", "run")): results}
    chosen = _chosen(data, clients, part)
    if frames < 1 or not runs:
        raise UserError(f"pictures: {len(runs)} runs, frames={frames!r}; expected at least one of each")
    target = Path(folder) if folder is not None else _run_folder(runs.values())
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {target}: {error}.") from None
    legend = Legend.of(_class_names(data))
    made = []
    for name in chosen:
        rows: Rows = getattr(data[name], part)
        picked = torch.from_numpy(np.unique(np.linspace(0, len(rows) - 1, min(frames, len(rows))).round().astype(int)))
        some = rows.take(picked)
        said = {title: predictions(result, name, some, data.scale) for title, result in runs.items()}
        made.append(_draw(target / f"{quote(name, safe='')}.png", name, some, picked.tolist(), said, legend))
    return made


def _run_folder(runs: Iterable[Result]) -> Path:
    paths = [result.path for result in runs if result.path is not None]
    if not paths:
        raise UserError("pictures: give folder='...'; none of the runs has a folder of its own")
    return paths[-1] / "pictures"


def predictions(result: Result, client: str, rows: Rows, scale: Scale | None) -> NDArray[np.int64]:
    """What a client's own model says of some rows: labels (n, h, w)."""
    if result.task.name != "segmentation":
        raise UserError(f"pictures are for task 'segmentation', but this run is of {result.task.name!r}")
    model = result.model(client)
    first = next(iter([*model.parameters(), *model.buffers()]), torch.zeros(1))
    dtype = first.dtype if first.is_floating_point() else torch.float32
    said = []
    with torch.no_grad():
        for i in range(len(rows)):
            x = rows.take(torch.tensor([i])).x
            assert isinstance(x, Tensor)
            out = model(_scaled(x, scale, dtype).to(first.device))
            out = out if isinstance(out, Tensor) else out["out"]
            said.append(out.argmax(1)[0].cpu().numpy())
    return np.stack(said)


def _scaled(x: Tensor, scale: Scale | None, dtype: torch.dtype) -> Tensor:
    if x.dtype is not torch.uint8:
        return x.to(dtype)
    x = x.to(dtype) / 255
    if scale is None:
        return x
    mean, std = (torch.tensor(v, dtype=dtype).reshape(1, -1, 1, 1) for v in (scale.mean, scale.std))
    return (x - mean) / std


def _chosen(data: Federation, clients: Iterable[str] | None, part: str) -> list[str]:
    if part not in ("train", "val", "test"):
        raise UserError(f"pictures: part={part!r}; expected train, val or test")
    there = [c.id for c in data if getattr(c, part) is not None]
    wanted = there[:4] if clients is None else [data[str(name)].id for name in clients]
    for name in wanted:
        rows = getattr(data[name], part)
        if rows is None:
            raise UserError(f"pictures: client {name!r} has no {part} rows")
        if not isinstance(rows.x, Tensor) or rows.x.dim() != 4 or rows.y.dim() != 3:
            raise UserError(f"pictures: client {name!r} has no pictures with masks")
    if not wanted:
        raise UserError(f"pictures: no client has {part} rows")
    return wanted


def _class_names(data: Federation) -> tuple[str, ...]:
    return data.summary().classes


def _shown(x: Tensor) -> Bytes:
    """A picture as bytes (h, w, 3): floating ones are stretched over the range of their values."""
    picture = x.float()
    if x.dtype != torch.uint8:
        low, high = picture.min(), picture.max()
        picture = (picture - low) / (high - low).clamp(min=1e-9) * 255
    picture = picture[:3] if picture.shape[0] >= 3 else picture[:1].expand(3, -1, -1)
    return np.asarray(picture.permute(1, 2, 0).numpy(), np.uint8)


def _draw(
    path: Path, client: str, rows: Rows, numbers: Sequence[int], said: Mapping[str, NDArray[np.int64]], legend: Legend
) -> Path:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UserError('drawing needs matplotlib: pip install "fedloom[plots]".') from None
    assert isinstance(rows.x, Tensor)
    n, columns = len(rows), 2 + 2 * len(said)
    height, width = rows.y.shape[1:]
    wide = 2.6
    tall = wide * height / width
    seen = sorted({int(v) for v in np.unique(rows.y.numpy())} | {int(v) for s in said.values() for v in np.unique(s)})
    names = [(legend.names[v] if v < len(legend.names) else str(v), v) for v in seen if v != VOID]
    lines = -(-(len(names) + 3) // (2 * columns))
    room = 0.35 + 0.28 * lines
    figure = Figure(figsize=(wide * columns, (tall + 0.28) * n + 0.45 + room), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(n, columns, squeeze=False)
    for i in range(n):
        true = rows.y[i].numpy()
        panels = [("image", _shown(rows.x[i])), ("ground truth", legend.paint(true))]
        for title, labels in said.items():
            valid = true != VOID
            right = float((labels[i] == true)[valid].mean()) if valid.any() else float("nan")
            panels += [(title, legend.paint(labels[i])), (f"errors, {right:.1%} right", errors(labels[i], true))]
        for j, (title, picture) in enumerate(panels):
            axes[i, j].imshow(picture, interpolation="nearest")
            axes[i, j].set_xticks([])
            axes[i, j].set_yticks([])
            if i == 0 or title.startswith("errors"):
                axes[i, j].set_title(title, fontsize=9)
        axes[i, 0].set_ylabel(f"row {numbers[i]}", fontsize=8)
    keys = [(name, legend.paint(np.array([[v]]))[0, 0]) for name, v in names]
    keys += [("void", _IGNORED), ("wrong", _WRONG), ("right", _RIGHT)]
    handles = [Patch(facecolor=f"#{bytes(colour).hex()}", label=name) for name, colour in keys]
    figure.suptitle(f"client {client}", fontsize=11)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * columns), fontsize=8, frameon=False
    )
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}.") from None
    return path
