"""The user's module as a pure function of its leaves."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import devices
from fedloom.errors import UserError
from fedloom.network import replace_layers
from fedloom.ops import forward_context
from fedloom.spec.structure import Structure
from fedloom.tensors import Inputs, Leaves
from fedloom.torch_internals import clear_hooks


@dataclass(slots=True)
class Network:
    """The user's module, used as a function of leaves. The object that was passed in is never changed."""

    module: nn.Module
    structure: Structure
    device: devices.Device
    scale: tuple[Tensor, Tensor] | None = None
    autocast: torch.dtype | None = None
    start: Leaves = field(default_factory=dict)
    noisy: bool = False
    batch_norm: bool = False
    channels_last: bool = False
    _places: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)
    _head: nn.Module | None = None
    _mode: tuple[bool, frozenset[str]] | None = None
    _hooked: set[str] = field(default_factory=set)

    def __call__(
        self,
        leaves: Leaves,
        x: Inputs,
        frame: forward_context.Frame,
        *,
        train: bool,
        still: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Output for ``x`` at ``leaves``; ``still`` names normalisation layers kept in evaluation mode."""
        self._load(leaves)
        self._set_mode(train, still)
        x = self.prepared(x)
        with forward_context.entered(frame):
            if self.autocast is None:
                out = self._call(x)
            else:
                with torch.autocast(_device_of(x), dtype=self.autocast):
                    out = self._call(x)
        out = _tensor_of(out)
        return out if self.autocast is None else out.float()

    def head(self, leaves: Leaves, z: Tensor) -> Tensor:
        """The head alone, applied to features."""
        if self._head is None:
            raise UserError("the model's head was not found; name it with head='...'")
        self._load(leaves)
        with forward_context.entered(forward_context.Frame()):
            return _tensor_of(self._head(z))

    def want(self, names: frozenset[str]) -> None:
        """Makes the outputs of these modules available to frames (``"z"``: the head's input)."""
        modules = dict(self.module.named_modules())
        for name in sorted(names - self._hooked):
            if name == "z":
                if self._head is None:
                    raise UserError("the method needs the head's input, but no head was found; name it with head='...'")
                self._head.register_forward_pre_hook(_at_head)
            elif name in modules:
                modules[name].register_forward_hook(_Keeper(name))
            else:
                raise UserError(f"the model has no module {name!r} to tap")
            self._hooked.add(name)

    def prepared(self, x: Inputs) -> Inputs:
        """Inputs in the run's floating type; bytes are scaled by 1/255 and standardised."""
        if isinstance(x, Tensor):
            return self._prepared(x)
        if isinstance(x, dict):
            return {k: self._prepared(v) for k, v in x.items()}
        return tuple(self._prepared(v) for v in x)

    def as_module(self, leaves: Leaves) -> nn.Module:
        """A module of the user's own class, with these leaves, in evaluation mode."""
        shapes = {leaf.name: leaf for leaf in self.structure.leaves}
        fresh: dict[str, Tensor] = {}
        for name, value in self.start.items():
            tensor = leaves[name].detach().to("cpu", value.dtype, copy=True)
            fresh[name] = tensor if shapes[name].buffer else nn.Parameter(tensor, requires_grad=shapes[name].trainable)
        memo: dict[int, Any] = {id(holder[key]): fresh[name] for holder, key, name in self._places}
        module = copy.deepcopy(self.module, memo)
        for part in module.modules():
            clear_hooks(part)
        replace_layers.restore(module)
        return module.eval()

    def _prepared(self, x: Tensor) -> Tensor:
        dtype = self.structure.dtype
        if x.dtype is torch.uint8:
            x = x.to(dtype) / 255
            return x if self.scale is None else (x - self.scale[0]) / self.scale[1]
        return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x

    def _call(self, x: Inputs) -> Any:
        return _called(self.module, x)

    def _load(self, leaves: Leaves) -> None:
        for holder, key, name in self._places:
            holder[key] = leaves[name]

    def _set_mode(self, train: bool, still: frozenset[str]) -> None:
        if self._mode == (train, still):
            return
        self.module.train(train)
        for name, part in self.module.named_modules():
            if name in still:
                part.eval()
        self._mode = (train, still)


def _called(module: nn.Module, x: Inputs) -> Any:
    if isinstance(x, Tensor):
        return module(x)
    return module(**x) if isinstance(x, dict) else module(*x)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """A hook that keeps a copy of a module's output if the frame wants it: a layer behind it may work in place."""

    name: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        frame = forward_context.current()
        if frame is not None and self.name in frame.wanted:
            frame.features[self.name] = _tensor_of(output).clone()
            frame.summaries.pop(self.name, None)  # of an earlier call of the same module: the last one counts


def _at_head(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    frame = forward_context.current()
    if frame is None:
        return None
    z = args[0]
    if "z" in frame.wanted:
        frame.features["z"] = z.clone()  # a rewritten input, or a head, may work in place
    return None if frame.rewrite is None else (frame.rewrite(z), *args[1:])


def _tensor_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return _tensor_of(output.logits)
    if isinstance(output, dict):
        for key in ("logits", "out"):
            if key in output:
                return _tensor_of(output[key])
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UserError(
        f"the model returned {type(output).__name__}; expected a tensor, or an object with .logits, ['logits'] or ['out']"
    )


def _device_of(x: Inputs) -> str:
    first = x if isinstance(x, Tensor) else next(iter(x.values() if isinstance(x, dict) else x))
    return devices.device_kind(first.device)
