"""Checkpoints: everything a run needs to go on after a power cut.

``checkpoint/round-000012/`` holds the server's state, ``checkpoint/clients-000012.safetensors`` clients that changed since the file
before it; ``checkpoint/LATEST`` names the newest complete checkpoint. A file is only ever replaced as a whole, and nothing that the
last two checkpoints need is removed. What a checkpoint costs depends on the clients that changed, not on how many there are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fedloom.clients.states import ClientState, ServerState
from fedloom.errors import UserError
from fedloom.store import atomic
from fedloom.store.client_store import ClientStore
from fedloom.store.codec import pack, read, unpack
from fedloom.store.format_number import FORMAT, check_format

KEPT = 2


@dataclass(slots=True)
class Snapshot:
    """The state of a run after a round.

    Args:
        server: the server.
        clients: what each client keeps.
        facts: numbers and texts: the hybrid share, the last metrics of each client.
        best: makes the tree of the best state so far, for runs that keep it.
        number: of the round that was played last, where the server's state is of an earlier one.
    """

    server: ServerState
    clients: MutableMapping[str, ClientState]
    facts: dict[str, Any] = field(default_factory=dict)
    best: Callable[[], Any] | None = None
    number: int | None = None


class Checkpoints:
    """The checkpoints of one run, and the store of what its clients keep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = ClientStore(folder)

    def save(self, snapshot: Snapshot, metrics_bytes: int) -> None:
        """Writes a checkpoint and commits it by naming it in ``LATEST``."""
        with atomic.writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        number = f"{snapshot.server.round if snapshot.number is None else snapshot.number:06d}"
        if snapshot.clients is not self.store:
            self.store.take(snapshot.clients)
        self.store.mark()
        files = self.store.flush()
        temporary = atomic.fresh(self.folder / f".round-{number}.tmp")
        try:
            self._commit(snapshot, metrics_bytes, files, temporary, number)
        except UserError:
            atomic.remove(temporary)
            raise
        self._clean(set(files))

    def _commit(
        self, snapshot: Snapshot, metrics_bytes: int, files: Mapping[str, str], temporary: Path, number: str
    ) -> None:
        """Writes the server's state and makes it the newest checkpoint."""
        tree = {"leaves": snapshot.server.leaves, "memory": snapshot.server.memory}
        device = next(iter(snapshot.server.leaves.values())).device
        state = {
            "format": FORMAT,
            "round": snapshot.server.round,
            "server": atomic.write(temporary / "server.safetensors", pack(tree, device)),
            "metrics_bytes": metrics_bytes,
            "facts": snapshot.facts,
            "files": files,
            "gone": sorted(self.store.gone),
        }
        if snapshot.best is not None:
            state["best"] = atomic.write(temporary / "best.safetensors", pack(snapshot.best(), device))
        digest = atomic.write(temporary / "state.json", json.dumps(state).encode())
        atomic.swap(temporary, self.folder / f"round-{number}")
        atomic.write(self.folder / "LATEST", f"round-{number} {digest}\n".encode())

    def _clean(self, needed: set[str]) -> None:
        """Removes what the last two checkpoints do not need."""
        rounds = sorted(self.folder.glob("round-*"), key=lambda p: int(p.name[6:]))
        for path in rounds[:-KEPT]:
            atomic.remove(path)
        for path in rounds[-KEPT:]:
            needed |= set(json.loads(read(path / "state.json"))["files"])
        self.store.clean(needed)

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
            number = state.get("format")
            check_format(place / "state.json", number, "Run it again in another folder.")
            tree = unpack(self._whole(place / "server.safetensors", state["server"]), device)
            best = None
            if "best" in state:
                best = unpack(self._whole(place / "best.safetensors", state["best"]), device)
            self.store = ClientStore(self.folder, device)
            for file, expected in state["files"].items():
                self._check(self.folder / file, expected)
            self.store.open(state["files"], state["gone"])
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            if isinstance(error, UserError):
                raise
            raise self._damaged(place) from None
        for path in self.folder.glob("round-*"):
            if int(path.name[6:]) > int(name[6:]):
                atomic.remove(path)
        server = ServerState(tree["leaves"], tree["memory"], state["round"])
        return Snapshot(server, self.store, state["facts"], lambda: best), state["metrics_bytes"]

    def _whole(self, path: Path, digest: str) -> bytes:
        data = read(path)
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(path)
        return data

    def _check(self, path: Path, digest: str) -> None:
        """As :meth:`_whole`, without holding the file in memory."""
        found = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                while piece := file.read(1 << 24):
                    found.update(piece)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        if found.hexdigest() != digest:
            raise self._damaged(path)

    def _damaged(self, path: Path) -> UserError:
        return UserError(f"the checkpoint is damaged: {path} is not what was written; start again in another folder")
