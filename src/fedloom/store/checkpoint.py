"""Checkpoints: everything a run needs to go on after a power cut.

``checkpoint/round-000012/`` holds the server's state; ``checkpoint/clients-000012.safetensors`` the clients that changed since the
checkpoint before; ``checkpoint/LATEST`` names the newest complete one. A file is only ever replaced as a whole, and nothing that
the last two checkpoints need is removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fedloom.errors import UserError
from fedloom.server import ServerState
from fedloom.store import disk
from fedloom.store.packing import pack, read, state_tree, unpack
from fedloom.work import ClientState

KEPT = 2


@dataclass(slots=True)
class Snapshot:
    """The state of a run after a round.

    Args:
        server: the server.
        clients: what each client keeps.
        facts: numbers and texts: the hybrid share, the last metrics of each client.
    """

    server: ServerState
    clients: dict[str, ClientState]
    facts: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, ClientState] = {}
        self._index: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    def save(self, snapshot: Snapshot, metrics_bytes: int) -> None:
        """Writes a checkpoint and commits it by naming it in ``LATEST``."""
        with disk.writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        number = f"{snapshot.server.round:06d}"
        changed = self._changed(snapshot.clients)
        index = {k: v for k, v in self._index.items() if k in snapshot.clients}
        if changed:
            file = f"clients-{number}.safetensors"
            data = pack({name: state_tree(snapshot.clients[name]) for name in changed})
            self._digests[file] = disk.write(self.folder / file, data)
            self._sizes[file] = len(changed)
            index |= dict.fromkeys(changed, file)
        temporary = disk.fresh(self.folder / f".round-{number}.tmp")
        try:
            self._commit(snapshot, metrics_bytes, index, temporary, number)
        except UserError:
            disk.remove(temporary)
            raise
        self._saved, self._index = dict(snapshot.clients), index
        self._clean(set(index.values()))

    def _commit(
        self, snapshot: Snapshot, metrics_bytes: int, index: Mapping[str, str], temporary: Path, number: str
    ) -> None:
        """Writes the server's state and makes it the newest checkpoint."""
        tree = {"leaves": snapshot.server.leaves, "memory": snapshot.server.memory}
        state = {
            "round": snapshot.server.round,
            "server": disk.write(temporary / "server.safetensors", pack(tree)),
            "metrics_bytes": metrics_bytes,
            "facts": snapshot.facts,
            "clients": index,
            "files": {f: self._digests[f] for f in dict.fromkeys(index.values())},
            "sizes": {f: self._sizes[f] for f in dict.fromkeys(index.values())},
        }
        digest = disk.write(temporary / "state.json", json.dumps(state).encode())
        disk.swap(temporary, self.folder / f"round-{number}")
        disk.write(self.folder / "LATEST", f"round-{number} {digest}\n".encode())

    def _changed(self, clients: Mapping[str, ClientState]) -> list[str]:
        """Clients that changed, and those in files that are mostly out of date, which can then be removed."""
        changed = [name for name, state in clients.items() if self._saved.get(name) is not state]
        live: dict[str, list[str]] = {}
        for name, file in self._index.items():
            if name in clients and name not in set(changed):
                live.setdefault(file, []).append(name)
        for file, names in live.items():
            if len(names) < self._sizes[file] / 2:
                changed += names
        return changed

    def _clean(self, needed: set[str]) -> None:
        """Removes what the last two checkpoints do not need."""
        rounds = sorted(self.folder.glob("round-*"), key=lambda p: int(p.name[6:]))
        for path in rounds[:-KEPT]:
            disk.remove(path)
        for path in rounds[-KEPT:]:
            needed |= set(json.loads(read(path / "state.json"))["files"])
        for path in self.folder.glob("clients-*.safetensors"):
            if path.name not in needed:
                disk.remove(path)
        self._sizes = {k: v for k, v in self._sizes.items() if k in needed}
        self._digests = {k: v for k, v in self._digests.items() if k in needed}

    def load(self, device: torch.device) -> tuple[Snapshot, int] | None:
        """The newest complete checkpoint and the length of ``metrics.jsonl`` then; None where there is none."""
        if not (self.folder / "LATEST").exists():
            return None
        name, _, digest = read(self.folder / "LATEST").decode("utf-8", "replace").strip().partition(" ")
        if not re.fullmatch(r"round-\d{6,}", name):
            raise self._damaged(self.folder / "LATEST")
        place = self.folder / name
        try:
            state = json.loads(self._whole(place / "state.json", digest))
            tree = unpack(self._whole(place / "server.safetensors", state["server"]), device)
            clients: dict[str, ClientState] = {}
            for file, expected in state["files"].items():
                for client, kept in unpack(self._whole(self.folder / file, expected), device).items():
                    if state["clients"].get(client) == file:
                        clients[client] = ClientState(**kept)
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            if isinstance(error, UserError):
                raise
            raise self._damaged(place) from None
        ordered = {name: clients[name] for name in state["clients"]}
        self._saved, self._index = dict(ordered), dict(state["clients"])
        self._digests, self._sizes = dict(state["files"]), dict(state["sizes"])
        for path in self.folder.glob("round-*"):
            if int(path.name[6:]) > state["round"]:
                disk.remove(path)
        server = ServerState(tree["leaves"], tree["memory"], state["round"])
        return Snapshot(server, ordered, state["facts"]), state["metrics_bytes"]

    def _whole(self, path: Path, digest: str) -> bytes:
        data = read(path)
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(path)
        return data

    def _damaged(self, path: Path) -> UserError:
        return UserError(f"the checkpoint is damaged: {path} is not what was written; start again in another folder")
