"""Inspection of a user's module: its leaves, layers and head."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import devices, rng
from fedloom.errors import UserError
from fedloom.network import layers, memory_format, replace_layers
from fedloom.network.functional import Network, _tensor_of
from fedloom.ops import forward_context
from fedloom.spec.structure import Call, LeafInfo, Structure
from fedloom.tensors import Inputs
from fedloom.torch_internals import registries


def build(
    module: nn.Module,
    sample: Inputs,
    *,
    task: str,
    device: devices.Device,
    head: str | None = None,
    scale: tuple[Tensor, Tensor] | None = None,
) -> Network:
    """Makes a network of a copy of ``module``; one forward pass over ``sample`` tells its structure.

    Args:
        module: any module; it is copied.
        sample: a few rows of input.
        task: name of the task.
        device: device and precision of the network.
        head: pattern of the head's leaves; None to find it.
        scale: mean and standard deviation for byte inputs.

    Returns:
        The network; ``noisy`` tells whether it draws noise, ``batch_norm`` whether it normalises by batch.
    """
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
    with rng.torch_generator():
        module = copy.deepcopy(module).to(device=device.torch_device, dtype=device.dtype)
    replace_layers.prepare(module)
    unknown = Structure((), (), None, None, 0, task, dtype=device.dtype)
    network = Network(module, unknown, device, scale)
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
        dtype=device.dtype,
        inputs=sample.shape[1:] if isinstance(sample, Tensor) else None,
    )
    network._places = _find_places(module, network.structure)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    network.noisy = any(layers.is_noisy(part) for part in module.modules())
    network.batch_norm = any(layers.is_norm(part) for part in module.modules())
    network.start = {leaf.name: state[leaf.name].detach().clone() for leaf in network.structure.leaves}
    network.channels_last = _runs_channels_last(network, sample)
    network._load(network.start)
    network.autocast = device.autocast  # the structure and its memory format do not depend on it
    return network


def _runs_channels_last(network: Network, sample: Inputs) -> bool:
    """Whether convolutions may compute with channels last: in float32 on a CPU, unless the model depends on the order in memory."""
    first = next(iter(network.start.values()), None)
    filters = any(isinstance(part, nn.Conv2d) for part in network.module.modules())
    if first is None or not devices.on_host(first) or network.structure.dtype != torch.float32 or not filters:
        return False
    if not torch.backends.mkldnn.is_available():
        return False

    def called(turned: bool) -> list[Tensor]:
        outputs = []
        for train in (False, True):
            leaves = {k: memory_format.suited(v.clone()) if turned else v.clone() for k, v in network.start.items()}
            torch.manual_seed(0)
            outputs.append(network(leaves, sample, forward_context.Frame(), train=train))
        return outputs

    found = memory_format.indifferent(called, first.device)
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
