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

from fedloom.errors import UserError
from fedloom.optim import OptState
from fedloom.values import FORMAT, check_format
from fedloom.work import ClientState

OUTLINE = "outline"

# Not "format": other libraries expect the name of the framework ("pt") under that key.
MODEL_FORMAT = "fedloom_format"
"""Key of the format number in the metadata of models."""


def pack(value: Any) -> bytes:
    """The bytes of a file that holds a tree of dictionaries, lists, numbers, texts and tensors."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(outline(value, tensors))
    return bytes(save_tensors(tensors, {OUTLINE: text}))


def unpack(data: bytes, device: torch.device) -> Any:
    """The inverse of :func:`pack`."""
    return tree(json.loads(_header(data)["__metadata__"][OUTLINE]), load_tensors(data), device)


def _header(data: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    return header


def outline(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What a tree is made of; its tensors are put aside under numbers, which stand in their places."""
    if isinstance(value, Tensor):
        key = f"{len(tensors):06d}"
        tensors[key] = plain(value)
        last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return {"tensor": key, "last": last and not value.is_contiguous()}
    if isinstance(value, OptState):
        return {"optimizer": outline({f.name: getattr(value, f.name) for f in fields(OptState)}, tensors)}
    if isinstance(value, Mapping):
        return {"keys": [[k, outline(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [outline(v, tensors) for v in value]}
    assert value is None or isinstance(value, (bool, int, float, str)), f"cannot be saved: {type(value)}"
    return {"value": value}


def tree(made: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The inverse of :func:`outline`."""
    if "tensor" in made:
        tensor = tensors[made["tensor"]].to(device)
        return tensor.to(memory_format=torch.channels_last) if made["last"] else tensor
    if "optimizer" in made:
        return OptState(**tree(made["optimizer"], tensors, device))
    if "keys" in made:
        return {k: tree(v, tensors, device) for k, v in made["keys"]}
    if "list" in made:
        return [tree(v, tensors, device) for v in made["list"]]
    return made["value"]


def to_device(value: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device."""
    if device.type == "cpu":
        return value
    tensors: dict[str, Tensor] = {}
    return tree(outline(value, tensors), tensors, device)


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
