"""Segments: states of many clients in one safetensors file, from which one client's can be read by itself.

States of one form (same leaves, shapes and types) lie side by side: tensor ``g.t`` of the file holds tensor t of every client of
group g along its first axis, and the header says which client is which row.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedloom.clients.states import ClientState
from fedloom.errors import UserError
from fedloom.store.codec import outline, state_tree, tree

TABLE = "segment"

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def content(states: Mapping[str, ClientState], device: torch.device) -> bytes:
    """Return the bytes of a segment.

    Args:
        states: the states of its clients.
        device: the device of the run.
    """
    groups: dict[str, list[tuple[str, int, list[Tensor]]]] = {}
    for name, state in states.items():
        tensors: dict[str, Tensor] = {}
        parts = state_tree(state)
        rounds = parts.pop("rounds")
        form = [outline(parts, tensors, device), [[str(v.dtype), list(v.shape)] for v in tensors.values()]]
        groups.setdefault(json.dumps(form), []).append((name, rounds, list(tensors.values())))
    table, stacked = [], {}
    for g, (form_text, members) in enumerate(groups.items()):
        names, rounds, values = zip(*members, strict=True)
        table.append({"outline": json.loads(form_text)[0], "names": names, "rounds": rounds})
        for t, column in enumerate(zip(*values, strict=True)):
            stacked[f"{g}.{t}"] = torch.stack(column)
    return bytes(save_tensors(stacked, {TABLE: json.dumps(table)}))


class Segment:
    """A segment on disk.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(size))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        self._groups: list[dict[str, Any]] = json.loads(header.pop("__metadata__")[TABLE])
        self._spots: list[list[tuple[torch.dtype, tuple[int, ...], int]]] = [[] for _ in self._groups]
        for key in sorted(header, key=lambda k: tuple(int(n) for n in k.split("."))):
            spot = header[key]
            place = (_TYPES[spot["dtype"]], tuple(spot["shape"][1:]), 8 + size + spot["data_offsets"][0])
            self._spots[int(key.split(".")[0])].append(place)

    def members(self) -> dict[str, tuple[int, int, int]]:
        """Group, row and rounds of every client in it."""
        return {
            name: (g, row, rounds)
            for g, group in enumerate(self._groups)
            for row, (name, rounds) in enumerate(zip(group["names"], group["rounds"], strict=True))
        }

    def read(self, group: int, row: int, rounds: int, device: torch.device) -> ClientState:
        """The state of one client."""
        try:
            # Opened anew each time: results of many runs may be alive at once, and a process has few open files.
            with io.FileIO(self.path) as file:
                tensors = {
                    f"{t:06d}": self._tensor(file, dtype, shape, start, row)
                    for t, (dtype, shape, start) in enumerate(self._spots[group])
                }
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from None
        return ClientState(**tree(self._groups[group]["outline"], tensors, device), rounds=rounds)

    def _tensor(self, file: io.FileIO, dtype: torch.dtype, shape: tuple[int, ...], start: int, row: int) -> Tensor:
        # Read into memory of torch's own: how numbers lie in memory may change the last bit of what is computed from them.
        value = torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        if size:
            file.seek(start + row * size)
            buffer: Any = value.reshape(-1).view(torch.uint8).numpy()
            if file.readinto(buffer) != size:
                raise UserError(f"{self.path} ends too early; it was changed while the run went on")
        return value
