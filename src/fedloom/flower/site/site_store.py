"""What a site keeps, in its own folder: personal leaves, memory, and the last model it was sent.

``FOLDER/<experiment>/<run>/round-000012.safetensors`` is the state after round 12. Two versions are kept, the one that a round
began from and the one that it made, so a round whose reply was lost can be played again from where it began. A file is written
under another name and renamed; its header holds an outline in JSON, nothing is pickled.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fedloom.clients.states import ClientState
from fedloom.flower.error_codes import Code, Refusal
from fedloom.store import atomic
from fedloom.store.codec import pack, read, state_tree, unpack
from fedloom.store.format_number import FORMAT, check_format

_LONGEST = 80
MODEL = "model.safetensors"


def folder_name(text: str) -> str:
    """A text as the name of a folder: readable, safe on any system, and never the same for two texts.

    Example:
        >>> folder_name("fedavg"), folder_name("fedprox(mu=0.1) + clip(1.0)")
        ('fedavg', 'fedprox%28mu%3D0.1%29%20%2B%20clip%281.0%29')
    """
    name = atomic.file_name(text)
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class SiteStore:
    """The folder of one site.

    Args:
        folder: where; it is made if need be.
        device: where tensors are wanted.
    """

    def __init__(self, folder: str | Path, device: torch.device | None = None) -> None:
        self.folder = Path(folder)
        self.device = device or torch.device("cpu")

    def place(self, experiment: str, run: str) -> Path:
        """The folder of a run of an experiment."""
        return self.folder / folder_name(experiment) / folder_name(run)

    def load(self, experiment: str, run: str, round: int | None) -> ClientState:
        """The state after a round; a fresh one for None."""
        if round is None:
            return ClientState()
        path = self._path(experiment, run, round)
        return ClientState(**self._read(path))

    def save(self, experiment: str, run: str, round: int, state: ClientState, base: int | None) -> None:
        """Writes the state after a round, and forgets all others but the one that the round began from."""
        path = self._path(experiment, run, round)
        with atomic.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, pack({"format": FORMAT, **state_tree(state)}, self.device))
        kept = {path.name} | (set() if base is None else {self._path(experiment, run, base).name})
        for old in path.parent.glob("round-*.safetensors"):
            if old.name not in kept:
                atomic.remove(old)

    def rounds(self, experiment: str, run: str) -> list[int]:
        """The rounds whose states are kept."""
        found = self.place(experiment, run).glob("round-*.safetensors")
        return sorted(int(path.name[6:].split(".")[0]) for path in found)

    def save_model(self, experiment: str, run: str, content: dict[str, Any]) -> None:
        """Keeps what is needed to use the site's own model: the last post and the round of the state beside it."""
        path = self.place(experiment, run) / MODEL
        with atomic.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, pack({"format": FORMAT, "experiment": experiment, **content}, self.device))

    def read_model(self, path: Path) -> dict[str, Any]:
        """What :meth:`save_model` wrote to a file."""
        return self._read(path)

    def _path(self, experiment: str, run: str, round: int) -> Path:
        return self.place(experiment, run) / f"round-{round:06d}.safetensors"

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            table: dict[str, Any] = unpack(read(path), self.device)
            check_format("it", table.pop("format", None), "Take part in an experiment again.")
            return table
        except (AttributeError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise Refusal(Code.STATE, f"cannot load {path}: {error}") from None
