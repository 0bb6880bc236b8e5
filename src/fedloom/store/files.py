"""The models of a finished run as plain safetensors files."""

from __future__ import annotations

import hashlib
import json

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedloom.data import Federation
from fedloom.network import Network
from fedloom.run import Run
from fedloom.store.disk import file_name
from fedloom.store.packing import plain
from fedloom.types import Leaves

SINGLE = 1000
"""Up to so many clients have a file each; beyond that so many share one."""

SEPARATOR = "/"


def model_files(run: Run, data: Federation) -> dict[str, bytes]:
    """Contents of ``models/`` by path: the shared model, and of each client the leaves that are its own."""
    shared = shared_leaves(run)
    files = {"shared.safetensors": _bytes(shared)}
    names = list(run.judges)
    if len(names) <= SINGLE:
        for name in names:
            files[f"clients/{file_name(name)}.safetensors"] = _bytes(own_leaves(run, name, shared))
    else:
        for start in range(0, len(names), SINGLE):
            shard: Leaves = {}
            for name in names[start : start + SINGLE]:
                prefix = file_name(name) + SEPARATOR
                shard |= {prefix + k: v for k, v in own_leaves(run, name, shared).items()}
            files[f"clients-{start // SINGLE + 1:04d}.safetensors"] = _bytes(shard)
    if data.preprocessing is not None:
        files["preprocessing.json"] = json.dumps(data.preprocessing.to_json()).encode()
    return files


def shared_leaves(run: Run) -> Leaves:
    """The shared model that is tested, by the user's own names."""
    bound = run.at(run.state.round)
    rule = bound.method.evaluate.tested
    leaves = run.state.leaves if rule is None else rule(run.state.leaves, run.state.memory)
    return {name: leaves[name] for name in bound.network.start}


def own_leaves(run: Run, name: str, shared: Leaves) -> Leaves:
    """The leaves of a client's own model that are not the shared model's, after its adapt program."""
    bound = run.at(run.state.round)
    copy = bound.method.evaluate.copy
    desk = run.desk(name)
    prefix = "" if copy == "main" else f"{copy}/"
    found = {}
    for local, value in bound.of_copy(desk.leaves, copy).items():
        if local in shared and (bound.specs[prefix + local].kept or not torch.equal(value, shared[local])):
            found[local] = value
    return found


def fingerprint(network: Network) -> str:
    """SHA-256 of a model's initial weights, names and shapes."""
    digest = hashlib.sha256()
    for name, value in network.start.items():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(_raw(value))
    return digest.hexdigest()


def rows_fingerprint(data: Federation) -> str:
    """SHA-256 of a federation's ids, sizes, shapes and targets: tells whether a run is resumed on the same rows."""
    digest = hashlib.sha256()
    for client in data:
        for part, rows in client.parts().items():
            first = rows.take(torch.arange(min(1, len(rows)))).x
            parts = [first] if isinstance(first, Tensor) else list(first.values() if isinstance(first, dict) else first)
            digest.update(f"{client.id} {part} {len(rows)} {[tuple(p.shape) for p in parts]}\n".encode())
            for tensor in [*parts, rows.y]:
                digest.update(_raw(tensor))
    return digest.hexdigest()


def _raw(value: Tensor) -> bytes:
    return plain(value).reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def _bytes(leaves: Leaves) -> bytes:
    return bytes(save_tensors({k: plain(v) for k, v in leaves.items()}))
