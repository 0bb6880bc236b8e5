"""What a deployment leaves at the server: a folder per run with metrics, checkpoints and the shared model."""

from __future__ import annotations

import csv
import io
import json
import secrets
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.states import ClientState, ServerState
from fedloom.errors import UserError
from fedloom.flower.experiment import Experiment, digest
from fedloom.flower.site.site_store import folder_name
from fedloom.rounds.run import Record, Run
from fedloom.runs.model_files import shared_leaves
from fedloom.runs.run_folder import finite, read_metrics
from fedloom.store import atomic
from fedloom.store.checkpoint import Checkpoints, Snapshot
from fedloom.store.codec import pack_model, read
from fedloom.store.format_number import FORMAT, check_format

EXPERIMENT = "experiment.json"


class RunRecords:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with atomic.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._checkpoints = Checkpoints(folder / "checkpoint")

    @staticmethod
    def of(out: Path | None, key: str) -> RunRecords | None:
        """The folder of a run below that of its experiment; None where nothing is kept."""
        return None if out is None else RunRecords(out / folder_name(key))

    @staticmethod
    def experiment(out: Path | None, plan: Experiment, text: str, *, resume: bool) -> str:
        """The key of the sites' folders: new for a new experiment, the old one for one that goes on."""
        if out is None:
            return f"{plan.name}-{secrets.token_hex(4)}"
        path = out / EXPERIMENT
        if resume:
            if not path.exists():
                raise UserError(f"{out} holds no experiment to go on with; start it without --resume")
            known = read_experiment(out)
            if known["plan"] != digest(text):
                raise UserError(f"{out} holds another experiment than the one given; choose another folder")
            return str(known["key"])
        if path.exists():
            raise UserError(f"{out} holds an experiment already; go on with --resume or choose another folder")
        with atomic.writing(out):
            out.mkdir(parents=True, exist_ok=True)
        key = f"{plan.name}-{secrets.token_hex(4)}"
        facts = {"format": FORMAT, "key": key, "plan": digest(text), "name": plan.name}
        atomic.write(path, json.dumps(facts).encode())
        atomic.write(out / "experiment.toml", text.encode())
        return key

    def checkpoint(self, state: ServerState, clients: MutableMapping[str, ClientState], facts: dict[str, Any]) -> None:
        """Writes a checkpoint; it is complete before the next message is sent."""
        self._checkpoints.save(Snapshot(state, clients, finite(facts)), 0)

    def restore(self) -> Snapshot | None:
        """The last checkpoint."""
        found = self._checkpoints.load(torch.device("cpu"))
        return None if found is None else found[0]

    def history(self) -> list[Record]:
        """The records so far."""
        return list(read_metrics(self.folder))

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a round to ``metrics.jsonl``."""
        with atomic.writing(self.folder), open(self.folder / "metrics.jsonl", "ab") as file:
            file.write((json.dumps(finite(record), allow_nan=False) + "\n").encode())

    def finish(self, run: Run) -> None:
        """Writes the shared model and the table of sites."""
        folder = self.folder / "models"
        with atomic.writing(folder):
            folder.mkdir(exist_ok=True)
        atomic.write(folder / "shared.safetensors", pack_model(shared_leaves(run)))
        rows = [
            {"client": name, "n_train": len(site.train), "rounds": run.state_of(name).rounds, **run.last.get(name, {})}
            for name, site in run.sites.items()
        ]
        text = io.StringIO()
        table = csv.DictWriter(text, list(dict.fromkeys(k for row in rows for k in row)), lineterminator="\n")
        table.writeheader()
        table.writerows([{k: "" if v is None else v for k, v in row.items()} for row in rows])
        atomic.write(self.folder / "clients.csv", text.getvalue().encode())


def read_experiment(out: Path) -> dict[str, Any]:
    """Load ``experiment.json`` of an experiment's folder.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    data = read(out / EXPERIMENT)
    try:
        facts: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise UserError(f"{out / EXPERIMENT} is damaged: {error}") from None
    check_format(out / EXPERIMENT, facts.get("format"), "Run it again in another folder.")
    return facts


def show(key: str, record: Mapping[str, Any], primary: str) -> str:
    """A round in one line.

    Example:
        >>> show("fedavg", {"round": 3, "auc": 0.8125, "seconds": 5.0, "rejected": [{"client": "b"}]}, "auc")
        'round 3  fedavg  auc 0.8125  5.0 s  without b'
        >>> show("fedavg + ...", {"round": 1, "auc": 0.75, "account": {"epsilon": 3.189}}, "auc")
        'round 1  fedavg + ...  auc 0.7500  epsilon 3.19'
    """
    value = record.get(primary)
    words = [f"round {record['round']}", key, f"{primary} {value:.4f}" if value is not None else "not tested"]
    if "seconds" in record:
        words.append(f"{record['seconds']:.1f} s")
    if "account" in record:
        spent = record["account"]["epsilon"]
        words.append("epsilon unknown" if spent is None else f"epsilon {spent:.2f}")
    if record.get("rejected"):
        words.append("without " + ", ".join(r["client"] for r in record["rejected"]))
    return "  ".join(words)
