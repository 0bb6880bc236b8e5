"""Which outputs of a model's layers last until the end of the forward pass, and which are overwritten by a layer behind them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom import frames
from fedloom.errors import UserError

_SOMETIMES_VIEWS = (
    "clone", "_to_copy", "_reshape_copy", "view_copy",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle",
)  # fmt: skip
"""Operations that copy in one layout of memory where they, or those that call them, may return a view in another one."""


class _Writes(TorchDispatchMode):
    """Notes which memory is written when. Memory that could be the same in another layout counts as the same."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = 0
        self._alive: list[torch.UntypedStorage] = []  # so that no two of them have the same address
        self._same: dict[int, set[int]] = {}
        self._written: dict[int, int] = {}

    def memory(self, x: Tensor) -> int:
        """The memory of a tensor, which is kept from now on."""
        storage = x.untyped_storage()
        at = storage._cdata
        if at not in self._same:
            self._alive.append(storage)
            self._same[at] = {at}
        return int(at)

    def changed(self, memory: int, since: int) -> bool:
        """Whether memory was written after a time."""
        return any(self._written.get(m, 0) > since for m in self._same[memory])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.clock += 1
        made = func(*args, **kwargs)
        for place, declared in enumerate(func._schema.arguments):
            if declared.alias_info is not None and declared.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(declared.name)
                for x in given if isinstance(given, (list, tuple)) else [given]:
                    if isinstance(x, Tensor):
                        self._written[self.memory(x)] = self.clock
        if func._schema.name.rpartition("::")[2] in _SOMETIMES_VIEWS:
            both = self._same[self.memory(args[0])] | self._same[self.memory(made)]
            self._same.update(dict.fromkeys(both, both))
        return made


def lasting(
    module: nn.Module, run: Callable[[nn.Module], Any], tensor_of: Callable[[Any], Tensor], head: str | None
) -> frozenset[str]:
    """Names of the modules whose output nothing overwrites in a forward pass (``"z"``: the head's input).

    A copy of the module runs in evaluation and in training mode. Whatever is in doubt does not last: all outputs if a run fails, or if
    a layer that says it works in place was not called.

    Args:
        module: the model.
        run: calls a copy of it on a sample.
        tensor_of: the tensor among what a module returns.
        head: name of the head.
    """
    module = copy.deepcopy(module)
    seen: set[str] = set()
    changed: set[str] = set()
    devices = {p.device for p in module.parameters() if p.is_cuda}
    try:
        for train in (False, True):
            module.train(train)
            with torch.no_grad(), torch.random.fork_rng(devices=devices), frames.entered(frames.Frame()):
                over, found = _run(module, run, tensor_of, head)
            seen |= found
            changed |= over
    except Exception:
        return frozenset()
    if any(getattr(part, "inplace", False) and name not in seen for name, part in module.named_modules()):
        return frozenset()
    return frozenset(seen - changed)


def _run(
    module: nn.Module, run: Callable[[nn.Module], Any], tensor_of: Callable[[Any], Tensor], head: str | None
) -> tuple[set[str], set[str]]:
    """Names of the outputs that a forward pass overwrites, and of all that it makes."""
    writes = _Writes()
    made: list[tuple[str, int, int]] = []

    def note(name: str, x: Tensor) -> None:
        made.append((name, writes.memory(x), writes.clock))

    def behind(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, output: Any) -> None:
            try:
                note(name, tensor_of(output))
            except UserError:
                return

        return hook

    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_hook(behind(name)))
        if name == head:
            handles.append(part.register_forward_pre_hook(lambda part, args: note("z", args[0])))
    try:
        with writes:
            run(module)
    finally:
        for handle in handles:
            handle.remove()
    return {name for name, memory, time in made if writes.changed(memory, time)}, {name for name, _, _ in made}
