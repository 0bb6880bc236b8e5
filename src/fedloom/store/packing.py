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
from fedloom.work import ClientState

OUTLINE = "outline"


def pack(value: Any) -> bytes:
    """The bytes of a file that holds a tree of dictionaries, lists, numbers, texts and tensors."""
    tensors: dict[str, Tensor] = {}
    outline = _outline(value, tensors)
    return bytes(save_tensors(tensors, {OUTLINE: json.dumps(outline)}))


def unpack(data: bytes, device: torch.device) -> Any:
    """The inverse of :func:`pack`."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return _tree(json.loads(header["__metadata__"][OUTLINE]), load_tensors(data), device)


def _outline(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = f"{len(tensors):06d}"
        tensors[key] = plain(value)
        last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return {"tensor": key, "last": last and not value.is_contiguous()}
    if isinstance(value, OptState):
        return {"optimizer": _outline({f.name: getattr(value, f.name) for f in fields(OptState)}, tensors)}
    if isinstance(value, Mapping):
        return {"keys": [[k, _outline(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_outline(v, tensors) for v in value]}
    assert value is None or isinstance(value, (bool, int, float, str)), f"cannot be saved: {type(value)}"
    return {"value": value}


def _tree(outline: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if "tensor" in outline:
        tensor = tensors[outline["tensor"]].to(device)
        return tensor.to(memory_format=torch.channels_last) if outline["last"] else tensor
    if "optimizer" in outline:
        return OptState(**_tree(outline["optimizer"], tensors, device))
    if "keys" in outline:
        return {k: _tree(v, tensors, device) for k, v in outline["keys"]}
    if "list" in outline:
        return [_tree(v, tensors, device) for v in outline["list"]]
    return outline["value"]


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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return load_tensors(read(path))
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}") from None
