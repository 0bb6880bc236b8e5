"""A run read from disk: its numbers, and its models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import tasks
from fedloom.clients.messages import Site, Work
from fedloom.data import Preprocessing
from fedloom.data.augment import augmentation
from fedloom.engines import LoopEngine
from fedloom.engines.choose_device import choose_device
from fedloom.errors import UserError
from fedloom.network.bound_method import bind
from fedloom.rounds import evaluation, unseen_clients
from fedloom.rounds import run as runs
from fedloom.rounds.modes import POOL
from fedloom.runs import config_file, problem
from fedloom.runs.model_files import SEPARATOR, SINGLE
from fedloom.runs.result import ClientResult, Clients, Result, Routed
from fedloom.runs.run_folder import MODELS, read_clients, read_config, read_metrics
from fedloom.spec import text_form
from fedloom.store.atomic import file_name
from fedloom.store.checkpoint import Checkpoints
from fedloom.store.codec import read, read_model
from fedloom.tasks import Task
from fedloom.tensors import Leaves

Given = nn.Module | Callable[[], nn.Module] | None


def load_run(path: str | Path, model: Given = None) -> Result:
    """A finished run from its folder.

    Args:
        path: the folder.
        model: the module of a run whose model was given in Python (same class, leaves and shapes), or a callable that makes it;
            needed for ``.model()`` only. Networks known by name are rebuilt.

    Example:
        >>> import tempfile
        >>> import fedloom as fl
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = fl.fit("fedavg", "mlp", {"name": "digits", "clients": 3}, rounds=1, out=folder, progress=False)
        ...     fl.load_run(folder).summary().mean == made.summary().mean
        True
    """
    place = Path(path)
    table = read_config(place)
    rows = read_clients(place)
    resolved = table.get("resolved", {})
    task = tasks.TASKS.get(str(table.get("task")))
    if task is None:
        task = Task(
            _no_loss,
            name=str(table.get("task")),
            primary=resolved["primary"],
            higher_is_better=resolved["higher_is_better"],
        )
    clients = Clients({row["client"]: ClientResult.of(row) for row in rows})
    history = read_metrics(place)
    absent = evaluation.absent_note(task, history[-1]) if history else None
    notes = (*resolved.get("notes", ()), *([] if absent is None else [absent]))
    models = SavedModels(place, table, model, clients, task)
    return Result(history, clients, table, task, None, notes, place, models)


def _no_loss(output: Tensor, y: Tensor) -> Tensor:
    raise UserError("the run's task was given in Python; its loss is not saved with the run")


class SavedModels:
    """The models of a run's folder."""

    def __init__(self, path: Path, table: Mapping[str, Any], given: Given, clients: Clients, task: Task) -> None:
        self.path, self.table, self.given, self.clients, self.task = path, table, given, clients, task

    def shared(self) -> Leaves:
        """The shared model's leaves."""
        return read_model(self.path / MODELS / "shared.safetensors")

    def own(self, client: str) -> Leaves:
        """The leaves of a client's own model that are not the shared model's."""
        if self.clients[client].new:
            place = self.path / MODELS / "new" / f"{file_name(client)}.safetensors"
            return read_model(place) if place.exists() else {}
        names = [n for n, c in self.clients.items() if not c.new]
        if len(names) <= SINGLE:
            return read_model(self.path / MODELS / "clients" / f"{file_name(client)}.safetensors")
        shard = names.index(client) // SINGLE + 1
        prefix = file_name(client) + SEPARATOR
        found = read_model(self.path / MODELS / f"clients-{shard:04d}.safetensors")
        return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}

    def leaves(self, client: str | None) -> Leaves:
        """The leaves of a whole model."""
        return self.shared() | ({} if client is None else self.own(client))

    def preprocessing(self) -> Preprocessing | None:
        """What was done to the inputs, fitted; None where nothing was."""
        place = self.path / MODELS / "preprocessing.json"
        return Preprocessing.from_json(json.loads(read(place))) if place.exists() else None

    def module(self) -> nn.Module:
        """The network, with its initial weights."""
        table = dict(self.table.get("model", {}))
        if "given" not in table:
            resolved = self.table["resolved"]
            made = config_file.model_by_name(table, resolved["outputs"], resolved["shape"])
            return problem.make_module(made, int(self.table["seed"]))
        if self.given is None:
            raise UserError(
                f"{self.path}: the model {table['given']!r} was given in Python; call fl.load_run(path, model=...) with it"
            )
        module = problem.make_module(self.given, int(self.table["seed"]))
        shapes = {k: list(v.shape) for k, v in module.state_dict().items()}
        differs = [k for k, v in self.shared().items() if shapes.get(k) != list(v.shape)]
        differs += [k for k in shapes if k not in table["leaves"]]
        if differs:
            raise UserError(f"{self.path}: the model given differs from the run's in {', '.join(differs[:8])}")
        return module

    def routed(self) -> bool:
        """Whether predictions take a route of the method's own, rather than being the model's plain output."""
        try:
            method = text_form.method(str(self.table["method"]))
        except UserError:
            return False
        while method.then is not None:
            method = method.then[1]
        return method.evaluate.predict is not None or method.partition.rewrite is not None

    def model(self, client: str | None) -> nn.Module:
        """The shared model, or a client's own."""
        module = self.module()
        if client is None or not self.routed():
            if self.table["precision"] == "fp64":
                module = module.double()
            module.load_state_dict(self.leaves(client), strict=False)  # tied weights are saved once
            return module.eval()
        return self._routed(module, client)

    def _routed(self, module: nn.Module, client: str) -> nn.Module:
        """A client's model whose prediction takes the method's own route: the run's state comes from its checkpoint."""
        cpu, seed = torch.device("cpu"), int(self.table["seed"])
        found = Checkpoints(self.path / "checkpoint").load(cpu)
        if found is None or "given" in self.table["model"]:
            raise UserError(
                f"{self.path}: the models of {self.table['method']!r} need the run's checkpoint and a network known by name; "
                "use the result of fl.fit in the same process"
            )
        federation, _ = config_file.federation_of(self.table["data"], seed)
        net = problem.make_network(
            module,
            federation,
            self.task,
            seed=seed,
            head=self.table["model"].get("head"),
            device=choose_device("cpu", str(self.table["precision"])),
        )
        bound = bind(text_form.method(str(self.table["method"])), net, self.task, seed=seed)
        sites: dict[str, Site] = {
            c.id: problem.make_site(c, self.task, net.structure.outputs, cpu)
            for c in federation
            if c.id in self.clients
        }
        new = {name: sites.pop(name) for name, c in self.clients.items() if c.new and name in sites}
        snapshot, _ = found
        work = Work(
            int(self.table["epochs"]),
            self.table["batch_size"],
            config_file.optimizer_of(self.table["optimizer"]),
            seed,
            int(self.table["rounds"]),
            augment=augmentation(self.table.get("augment")),
        )
        state = runs.Run(
            bound=bound,
            engine=LoopEngine(),
            work=work,
            sites=sites,
            size=1,
            state=snapshot.server,
            clients=snapshot.clients,
            judges={n: (s, POOL if self.table["mode"] == "centralised" else n) for n, s in sites.items()},
        )
        state.new, state.adapt_epochs = new, int(self.table["evaluate"]["adapt_epochs"])
        return Routed(next(unseen_clients.desks(state, [client])) if client in new else state.desk(client))
