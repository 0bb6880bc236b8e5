"""Nested dictionaries of tensors as one safetensors file with a JSON outline in its header. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedloom import devices
from fedloom.clients.states import ClientState
from fedloom.errors import UserError
from fedloom.spec.optimizer import OptState
from fedloom.store.format_number import FORMAT, check_format

OUTLINE = "outline"

# Not "format": other libraries expect the name of the framework ("pt") under that key.
MODEL_FORMAT = "fedloom_format"
"""Key of the format number in the metadata of models."""


def pack(value: Any, device: torch.device) -> bytes:
    """Serialise a tree of dictionaries, lists, numbers, texts and tensors.

    Args:
        value: the tree.
        device: the device of the run. :func:`unpack` leaves tensors that were on the host of
            such a run on the host, and moves all others to the device that it is given.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(outline(value, tensors, device))
    return bytes(save_tensors(tensors, {OUTLINE: text}))


def unpack(data: bytes, device: torch.device) -> Any:
    """Return the tree that :func:`pack` serialised, for a run on ``device``."""
    return tree(json.loads(_header(data)["__metadata__"][OUTLINE]), load_tensors(data), device)


def _header(data: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    return header


def outline(value: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """Return the structure of a tree as JSON, with a number in place of each tensor.

    Args:
        value: the tree.
        tensors: receives copies of the tensors on the host, by number.
        device: the device of the run.
    """
    if isinstance(value, Tensor):
        key = f"{len(tensors):06d}"
        tensors[key] = plain(value)
        last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        host = devices.on_host(value) and value.device != device
        return {"tensor": key, "last": last and not value.is_contiguous(), "host": host}
    if isinstance(value, OptState):
        parts = {f.name: getattr(value, f.name) for f in fields(OptState)}
        return {"optimizer": outline(parts, tensors, device)}
    if isinstance(value, Mapping):
        return {"keys": [[k, outline(v, tensors, device)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [outline(v, tensors, device) for v in value]}
    assert value is None or isinstance(value, (bool, int, float, str)), f"cannot be saved: {type(value)}"
    return {"value": value}


def tree(structure: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return the tree of an :func:`outline`: tensors on a device, or on the host by their flag."""
    if "tensor" in structure:
        tensor = tensors[structure["tensor"]]
        tensor = tensor if structure["host"] else tensor.to(device)
        return tensor.to(memory_format=torch.channels_last) if structure["last"] else tensor
    if "optimizer" in structure:
        return OptState(**tree(structure["optimizer"], tensors, device))
    if "keys" in structure:
        return {k: tree(v, tensors, device) for k, v in structure["keys"]}
    if "list" in structure:
        return [tree(v, tensors, device) for v in structure["list"]]
    return structure["value"]


def plain(value: Tensor) -> Tensor:
    """A tensor of its own, on the host: files may not share memory."""
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()


def state_tree(state: ClientState) -> dict[str, Any]:
    """What a client keeps, as a tree."""
    return {
        "leaves": state.leaves,
        "memory": state.memory,
        "rounds": state.rounds,
        "optimizer": {k: list(v) for k, v in state.optimizer.items()},
    }


def read(path: Path) -> bytes:
    """The bytes of a file of a run."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def pack_model(leaves: Mapping[str, Tensor], **metadata: str) -> bytes:
    """Return a safetensors file of a model's leaves, with the format number in its metadata."""
    metadata[MODEL_FORMAT] = str(FORMAT)
    return bytes(save_tensors({k: plain(v) for k, v in leaves.items()}, metadata))


def read_model(path: Path) -> dict[str, Tensor]:
    """Load the leaves that :func:`pack_model` wrote to a file."""
    data = read(path)
    try:
        leaves = load_tensors(data)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    number = _header(data).get("__metadata__", {}).get(MODEL_FORMAT)
    check_format(path, number, "Run it again in another folder.")
    return leaves
