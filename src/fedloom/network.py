"""A user's module as a pure function of its leaves, and what is known of its structure."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import frames, layers, orders, rng, swaps, transfer
from fedloom.errors import UserError
from fedloom.ops import dispatch
from fedloom.structure import Call, LeafInfo, Structure
from fedloom.torch_internals import clear_hooks, registries
from fedloom.types import Inputs, Leaves


@dataclass(slots=True)
class Network:
    """The user's module, used as a function of leaves. The object that was passed in is never changed."""

    module: nn.Module
    structure: Structure
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
        frame: frames.Frame,
        *,
        train: bool,
        still: frozenset[str] = frozenset(),
    ) -> Tensor:
        """Output for ``x`` at ``leaves``; ``still`` names normalisation layers kept in evaluation mode."""
        self._load(leaves)
        self._set_mode(train, still)
        x = self.prepared(x)
        with frames.entered(frame):
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
        with frames.entered(frames.Frame()):
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
        swaps.restore(module)
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
        frame = frames.current()
        if frame is not None and self.name in frame.wanted:
            frame.features[self.name] = _tensor_of(output).clone()
            frame.summaries.pop(self.name, None)  # of an earlier call of the same module: the last one counts


def _at_head(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    frame = frames.current()
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
    return transfer.device_kind(first.device)


def build(
    module: nn.Module,
    sample: Inputs,
    *,
    task: str,
    head: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    scale: tuple[Tensor, Tensor] | None = None,
) -> Network:
    """Makes a network of a copy of ``module``; one forward pass over ``sample`` tells its structure.

    Args:
        module: any module; it is copied.
        sample: a few rows of input.
        task: name of the task.
        head: pattern of the head's leaves; None to find it.
        dtype: floating type of the run.
        device: where leaves live.
        scale: mean and standard deviation for byte inputs.

    Returns:
        The network; ``noisy`` tells whether it draws noise, ``batch_norm`` whether it normalises by batch.
    """
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
    with rng.torch_generator():
        module = copy.deepcopy(module).to(device=device, dtype=dtype)
    dispatch.prepare_for(torch.device(device))
    swaps.prepare(module)
    unknown = Structure((), (), None, None, 0, task, dtype=dtype)
    network = Network(module, unknown, scale)
    prepared = network.prepared(sample)
    calls, output, heads = _trace(module, prepared, network)
    names = dict(module.named_modules())
    head_name = _named_head(module, head) if head is not None else _find_head(heads, output, names)
    if head_name is not None:
        network._head = names.get(head_name)
    network.structure = Structure(
        leaves=_leaf_infos(module, head_name, head, frozen),
        calls=calls,
        head=head_name,
        feature=heads[head_name].feature if head_name in heads else None,
        outputs=output.shape[1] if output.dim() > 1 else 1,
        task=task,
        tap_points=tuple(getattr(module, "tap_points", ())),
        blocks=tuple(getattr(module, "blocks", ())) if _all_text(getattr(module, "blocks", ())) else (),
        dtype=dtype,
        inputs=sample.shape[1:] if isinstance(sample, Tensor) else None,
    )
    network._places = _find_places(module, network.structure)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    network.noisy = any(layers.is_noisy(part) for part in module.modules())
    network.batch_norm = any(layers.is_norm(part) for part in module.modules())
    network.start = {leaf.name: state[leaf.name].detach().clone() for leaf in network.structure.leaves}
    network.channels_last = _runs_channels_last(network, sample)
    network._load(network.start)
    return network


def _runs_channels_last(network: Network, sample: Inputs) -> bool:
    """Whether convolutions may compute with channels last: in float32 on a CPU, unless the model depends on the order in memory."""
    first = next(iter(network.start.values()), None)
    filters = any(isinstance(part, nn.Conv2d) for part in network.module.modules())
    if first is None or not transfer.on_host(first) or network.structure.dtype != torch.float32 or not filters:
        return False
    if not torch.backends.mkldnn.is_available():
        return False

    def called(turned: bool) -> list[Tensor]:
        outputs = []
        for train in (False, True):
            leaves = {k: orders.suited(v.clone()) if turned else v.clone() for k, v in network.start.items()}
            torch.manual_seed(0)
            outputs.append(network(leaves, sample, frames.Frame(), train=train))
        return outputs

    found = orders.indifferent(called, first.device)
    network._load(network.start)
    return found


@dataclass(frozen=True, slots=True)
class _HeadCandidate:
    output: Tensor
    feature: int
    dense: bool


def _all_text(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)


def _trace(
    module: nn.Module, sample: Inputs, network: Network
) -> tuple[tuple[Call, ...], Tensor, dict[str, _HeadCandidate]]:
    calls: list[Call] = []
    heads: dict[str, _HeadCandidate] = {}
    handles = []

    def watch(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, output: Any) -> None:
            try:
                tensor = _tensor_of(output)
            except UserError:
                return
            weighted = any(p.requires_grad for p in part.parameters(recurse=False))
            calls.append(Call(name, type(part).__name__, tensor.shape, weighted))
            if isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and args:
                dense = not isinstance(part, nn.Linear)
                heads.pop(name, None)
                heads[name] = _HeadCandidate(tensor.clone(), args[0].shape[1 if dense else -1], dense)

        return hook

    for name, part in module.named_modules():
        if name:
            handles.append(part.register_forward_hook(watch(name)))
    was = module.training
    try:
        module.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = _tensor_of(network._call(sample))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the model failed on a sample of the data ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"inputs have shape {_shapes(sample)}"
        ) from error
    finally:
        module.train(was)
        for handle in handles:
            handle.remove()
    return tuple(calls), output, heads


def _shapes(x: Inputs) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape)
    return {k: tuple(v.shape) for k, v in x.items()} if isinstance(x, dict) else [tuple(v.shape) for v in x]


def _find_head(heads: dict[str, _HeadCandidate], output: Tensor, names: dict[str, nn.Module]) -> str | None:
    """The last weight layer whose output is the model's (Linear), or has its channels (1x1 convolution, then resized)."""
    for name in reversed(heads):
        candidate = heads[name]
        if candidate.output.shape == output.shape and torch.equal(candidate.output, output):
            return name
        if candidate.output.numel() == output.numel() and torch.equal(candidate.output.flatten(), output.flatten()):
            return name
        part = names[name]
        if candidate.dense and output.dim() > 2 and isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1):
            return name if part.out_channels == output.shape[1] else None
    return None


def _named_head(module: nn.Module, pattern: str) -> str | None:
    owners = [n.rpartition(".")[0] for n, _ in module.named_parameters() if fnmatch.fnmatchcase(n, pattern)]
    owners += [n for n, _ in module.named_modules() if n and fnmatch.fnmatchcase(n, pattern)]
    if not owners:
        last = list(dict.fromkeys(n.rpartition(".")[0] for n, _ in module.named_parameters()))[-5:]
        raise UserError(f"head={pattern!r} matches no leaf; the last layers of the model are {', '.join(last)}")
    return min(owners, key=len)


def _leaf_infos(module: nn.Module, head: str | None, pattern: str | None, frozen: set[str]) -> tuple[LeafInfo, ...]:
    modules = dict(module.named_modules())
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    persistent = set(module.state_dict(keep_vars=True))
    infos = []
    for name, value in [*parameters.items(), *((n, b) for n, b in buffers.items() if n in persistent)]:
        owner = name.rpartition(".")[0]
        in_head = head is not None and (owner == head or owner.startswith(head + "."))
        if pattern is not None:
            in_head = in_head or fnmatch.fnmatchcase(name, pattern)
        infos.append(
            LeafInfo(
                name=name,
                module=owner,
                trainable=name in parameters and name not in frozen and value.is_floating_point(),
                buffer=name in buffers,
                norm=layers.is_norm(modules[owner]),
                role="head" if in_head else "body",
                shape=value.shape,
            )
        )
    return tuple(infos)


def _find_places(module: nn.Module, structure: Structure) -> list[tuple[dict[str, Any], str, str]]:
    """Every dictionary entry of the module tree that holds a leaf; a tied weight has several."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    by_id = {id(state[leaf.name]): leaf.name for leaf in structure.leaves}
    places: list[tuple[dict[str, Any], str, str]] = []
    for part in module.modules():
        for holder in registries(part):
            for key, value in holder.items():
                if value is not None and id(value) in by_id:
                    places.append((holder, key, by_id[id(value)]))
    return places
