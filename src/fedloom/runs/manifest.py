"""The whole configuration of a run as it was resolved: what ``run.toml`` holds."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedloom import tasks
from fedloom.data import Federation
from fedloom.errors import UserError
from fedloom.network.functional import Network
from fedloom.rounds.run import Run
from fedloom.runs import config_file
from fedloom.runs.model_files import fingerprint
from fedloom.runs.options import Settings
from fedloom.spec import text_form
from fedloom.spec.method import Method
from fedloom.tasks import Task

Table = dict[str, Any]


def given_model(table: Table, net: Network) -> Table:
    """The table of a module that was given in Python: its class, leaves, and a hash of its initial weights."""
    leaves = {name: list(value.shape) for name, value in net.start.items()}
    return {**table, "given": type(net.module).__name__, "sha256": fingerprint(net), "leaves": leaves}


def configuration(
    method: Method, settings: Settings, tables: Mapping[str, Table | None], task: Task, state: Run, notes: Sequence[str]
) -> Table:
    """The whole resolved configuration: what ``run.toml`` holds."""
    try:
        text_form.method(method.text)
        known = True
    except UserError:
        known = False
    repeatable = known and "fingerprint" not in (tables["data"] or {}) and "name" in (tables["model"] or {})
    repeatable = repeatable and "given" not in (tables["augment"] or {})
    full: Table = {"method": method.text, **config_file.table_of(settings)}
    full |= {key: config_file.plain(table) for key, table in tables.items() if table}
    full["repeatable"] = repeatable and tasks.TASKS.get(task.name) is task
    full["resolved"] = {
        "engine": state.engine.name,
        "device": str(next(iter(state.state.leaves.values())).device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "clients": len(state.judges),
        "cohort": state.size,
        "primary": task.primary,
        "higher_is_better": task.higher_is_better,
        "buffers": buffer_policy(state),
        "notes": list(notes),
    }
    return full


def shapes(data: Federation, net: Network) -> Table:
    """What is needed to make the network again, and to use it, without the data."""
    x = data.clients[0].train.x
    found: Table = {"outputs": net.structure.outputs, "classes": list(data.classes or ())}
    if isinstance(x, torch.Tensor):
        found |= {"shape": list(x.shape[1:]), "bytes": x.dtype == torch.uint8}
    if data.scale is not None:
        found["scale"] = {"mean": list(data.scale.mean), "std": list(data.scale.std)}
    return found


def buffer_policy(state: Run) -> str:
    """What happens to batch normalisation's running statistics."""
    kinds = {s.kind for s in state.bound.specs.values() if s.buffer and s.copy == "main"}
    if not kinds:
        return "none"
    said = {"shared": "averaged", "mirrored": "averaged, clients keep their own", "personal": "stay with the clients"}
    return "; ".join(said.get(k, "frozen") for k in sorted(kinds))
