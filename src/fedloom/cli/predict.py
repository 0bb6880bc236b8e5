"""``fedloom predict`` and ``fedloom export``: using the models of a finished run."""

from __future__ import annotations

import csv
import json
import sys
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from fedloom.data import Preprocessing, Scale, to_float
from fedloom.data.readers.tables import encode_table
from fedloom.errors import UserError
from fedloom.runs.loading import SavedModels, load_run
from fedloom.runs.result import Result
from fedloom.store import atomic
from fedloom.store.codec import pack_model

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
Client = Annotated[str | None, typer.Option(help="Whose personal model; the shared model without.")]


def predict(
    run: Folder,
    file: Annotated[Path, typer.Option("--input", help="Rows: .npy, .npz with an array x, or .csv with a header.")],
    client: Client = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON instead of CSV.")] = False,
) -> None:
    """Predict rows with a client's personal model; the run's preprocessing is applied first."""
    result, models = _open(run)
    name = None if client is None else result.clients[client].id
    if "given" in result.config["model"]:
        raise UserError(
            f"the model of {run} was given in Python; use fl.load_run({str(run)!r}, model=...).model(...) there"
        )
    x = _rows(file, models.preprocessing(), name, result.config["resolved"])
    module = result.model(name)
    with torch.no_grad():
        output = torch.cat([module(part) for part in x.split(256)])
    rows = [_answer(o, result) for o in output]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = csv.DictWriter(sys.stdout, ["row", *rows[0]] if rows else ["row"], lineterminator="\n")
    table.writeheader()
    table.writerows([{"row": i, **row} for i, row in enumerate(rows)])


def export(
    run: Folder,
    out: Annotated[Path, typer.Option(help="File to write, such as model.safetensors.")],
    client: Client = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not say how to load it.")] = False,
) -> None:
    """Write a personal model as one plain safetensors file, and say how to load it."""
    result, models = _open(run)
    name = None if client is None else result.clients[client].id
    if name is not None and models.routed():
        raise UserError(
            f"predictions of {result.config['method']!r} take a route of their own and are no plain model; "
            "use fedloom predict, or fl.load_run(...).model(...) in Python"
        )
    if out.exists():
        raise UserError(f"{out} exists; choose another file")
    how = loading(result, out)
    leaves = models.leaves(name)
    method = str(result.config["method"])
    atomic.write(out, pack_model(leaves, format="pt", method=method, client=name or "", how=how))
    if not quiet:
        typer.echo(
            f"{out}: {sum(v.numel() for v in leaves.values()):,} numbers in {len(leaves)} leaves. To load it:\n\n{how}"
        )


def loading(result: Result, file: Path) -> str:
    """Lines of Python that load an exported model."""
    table, resolved = result.config["model"], result.config["resolved"]
    if "given" in table:
        make = f"model = {table['given']}(...)  # your own class"
    else:
        given = {k: v for k, v in table.items() if k not in ("name", "head")}
        more = "".join(f", {k}={v!r}" for k, v in given.items())
        make = (
            "import fedloom as fl\n"
            f"model = fl.models.build({table['name']!r}, num_classes={resolved['outputs']}, "
            f"sample_shape={tuple(resolved['shape'])}{more})"
        )
    return f"from safetensors.torch import load_file\n{make}\nmodel.load_state_dict(load_file({str(file)!r}))\nmodel.eval()"


def _open(run: Path) -> tuple[Result, SavedModels]:
    result = load_run(run)
    assert isinstance(result.models, SavedModels)
    return result, result.models


def _rows(file: Path, fitted: Preprocessing | None, client: str | None, resolved: dict[str, Any]) -> Tensor:
    """The rows of a file as the model was trained to see them."""
    if not file.is_file():
        raise UserError(f"{file} is not a file; expected rows as .npy, .npz or .csv")
    if file.suffix == ".csv" and fitted is not None:
        raw = torch.from_numpy(encode_table(file, fitted))
    else:
        raw = torch.from_numpy(_array(file))
    if fitted is not None:
        raw = fitted.apply(raw, client)
    shape = tuple(resolved["shape"])
    if raw.dim() == 2 and raw.shape[1] == int(np.prod(shape)):
        raw = raw.reshape(-1, *shape)
    if tuple(raw.shape[1:]) != shape:
        raise UserError(f"{file}: rows have shape {tuple(raw.shape[1:])}; the model takes {shape}")
    if resolved.get("bytes"):
        scale = resolved.get("scale")
        if raw.dtype != torch.uint8:
            raise UserError(f"{file}: the model was trained on whole numbers from 0 to 255 (uint8); got {raw.dtype}")
        return to_float(raw, None if scale is None else Scale(tuple(scale["mean"]), tuple(scale["std"])))
    if not bool(torch.isfinite(raw.float()).all()):
        raise UserError(f"{file} holds missing or infinite values; train with [data.preprocess] impute = 'median'")
    return raw.float() if raw.is_floating_point() else raw


def _array(file: Path) -> np.ndarray[Any, Any]:
    try:
        if file.suffix == ".csv":
            return np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2, dtype=np.float32)
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            if "x" not in found:
                raise UserError(f"{file} holds {', '.join(found)}; expected an array x")
            return np.asarray(found["x"])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {file}: {error}") from None


def _answer(output: Tensor, result: Result) -> dict[str, Any]:
    """A prediction in the words of the task."""
    task, names = result.task.name, result.config["resolved"].get("classes") or []
    if task == "classification":
        p = torch.softmax(output.double(), 0)
        best = int(p.argmax())
        return {"prediction": names[best] if best < len(names) else best, "probability": round(float(p[best]), 6)}
    if task == "binary":
        p = torch.sigmoid(output.double().reshape(()))
        return {"prediction": int(p > 0.5), "probability": round(float(p), 6)}
    if task == "segmentation":
        return {"prediction": json.dumps(output.argmax(0).tolist())}
    return {"prediction": json.dumps(output.reshape(-1).tolist()) if output.numel() > 1 else float(output)}
