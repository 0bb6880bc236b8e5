"""The models of a finished run as plain safetensors files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from fedloom.clients.runner import ClientRunner
from fedloom.data import Federation
from fedloom.network.functional import Network
from fedloom.rounds import unseen_clients
from fedloom.rounds.run import Run
from fedloom.store.atomic import file_name
from fedloom.store.codec import pack_model, plain
from fedloom.tensors import Leaves

SINGLE = 1000
"""Up to so many clients have a file each; beyond that so many share one."""

SEPARATOR = "/"


def model_files(run: Run, data: Federation) -> Iterator[tuple[str, bytes]]:
    """Contents of ``models/`` with their paths: the shared model, and of each client the leaves that are its own."""
    shared = shared_leaves(run)
    yield "shared.safetensors", pack_model(shared)
    names = list(run.judges)
    desks = run.desks(names)
    if len(names) <= SINGLE:
        for name, desk in zip(names, desks, strict=True):
            yield f"clients/{file_name(name)}.safetensors", pack_model(own_leaves(desk, shared))
    else:
        for start in range(0, len(names), SINGLE):
            shard: Leaves = {}
            for name in names[start : start + SINGLE]:
                prefix = file_name(name) + SEPARATOR
                shard |= {prefix + k: v for k, v in own_leaves(next(desks), shared).items()}
            yield f"clients-{start // SINGLE + 1:04d}.safetensors", pack_model(shard)
    for name, desk in zip(run.new, unseen_clients.desks(run, run.new), strict=True):
        yield f"new/{file_name(name)}.safetensors", pack_model(own_leaves(desk, shared))
    if data.preprocessing is not None:
        yield "preprocessing.json", json.dumps(data.preprocessing.to_json()).encode()


def shared_leaves(run: Run) -> Leaves:
    """The shared model that is tested, by the user's own names."""
    bound = run.at(run.state.round)
    rule = bound.method.evaluate.tested
    leaves = run.state.leaves if rule is None else rule(run.state.leaves, run.state.memory)
    return {name: leaves[name] for name in bound.network.start}


def own_leaves(desk: ClientRunner, shared: Leaves) -> Leaves:
    """The leaves of a client's own model that are not the shared model's, after its adapt program."""
    bound = desk.bound
    copy = bound.method.evaluate.copy
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
    shapes: dict[tuple[tuple[int, ...], ...], str] = {}
    for client in data:
        for part in ("train", "val", "test"):
            rows = getattr(client, part)
            if rows is None:
                continue
            x, y = rows.x, rows.y.numpy()
            # Arrays, and shapes put in words once: a hundred thousand clients would take seconds otherwise.
            if isinstance(x, Tensor):
                heads = (x.numpy()[:1],)
            else:
                heads = tuple(t.numpy()[:1] for t in (x.values() if isinstance(x, dict) else x))
            form = tuple([h.shape for h in heads])
            if form not in shapes:
                shapes[form] = str(list(form))
            text = f"{client.id} {part} {len(y)} {shapes[form]}\n".encode()
            digest.update(b"".join([text, *[h.tobytes() for h in heads], y.tobytes()]))
    return digest.hexdigest()


def _raw(value: Tensor) -> bytes:
    return plain(value).reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
