"""Construction of a run's network, clients and bound method."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fedloom import rng
from fedloom.clients.messages import Site
from fedloom.data import ClientData, Federation, Rows, concatenate
from fedloom.devices import Device
from fedloom.errors import UserError
from fedloom.network import functional, inspect_model
from fedloom.network.bound_method import Bound, bind
from fedloom.ops import forward_context
from fedloom.rounds.modes import Mixing
from fedloom.spec.method import Method
from fedloom.spec.optimizer import Optimizer
from fedloom.tasks import Task
from fedloom.tensors import Inputs

_TOGETHER = 1000


def make_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module as it is, or what a callable makes under the run's seed; torch's global generator is not moved."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UserError(f"model: expected an nn.Module or a callable that makes one, got {type(model).__name__}")
    with rng.torch_generator(rng.key_of(seed, "init")):
        made = model()
    if not isinstance(made, nn.Module):
        raise UserError(f"model: the callable returned {type(made).__name__}, expected an nn.Module")
    return made


def make_network(
    model: nn.Module | Callable[[], nn.Module],
    data: Federation,
    task: Task,
    *,
    seed: int,
    head: str | None,
    device: Device,
) -> functional.Network:
    """The user's model as a function, checked against the data."""
    first = data.clients[0].train
    sample = first.take(torch.arange(2) % len(first))  # two rows: batch normalisation cannot do with one
    scale: tuple[Tensor, Tensor] | None = None
    where = device.torch_device
    if data.scale is not None:
        shape = (1, -1, *[1] * (_dims(sample.x) - 2))
        mean, std = (
            torch.tensor(v, dtype=device.dtype, device=where).reshape(shape) for v in (data.scale.mean, data.scale.std)
        )
        scale = (mean, std)
    net = inspect_model.build(
        make_module(model, seed),
        _move(sample.x, where),
        task=task.name,
        device=device,
        head=head,
        scale=scale,
    )
    if not any(leaf.trainable for leaf in net.structure.leaves):
        raise UserError(f"model: {type(net.module).__name__} has no parameter that can be trained")
    if task.check is not None:
        _check_labels(data, task, net.structure.outputs)
    else:
        _check_loss(net, task, sample, where)
    return net


def _check_labels(data: Federation, task: Task, outputs: int) -> None:
    """Everyone's labels fit the model's output; those of many clients are looked at together, and apart only if something is wrong."""
    assert task.check is not None
    for start in range(0, len(data), _TOGETHER):
        clients = data.clients[start : start + _TOGETHER]
        try:
            if len(data) > _TOGETHER:
                task.check(outputs, torch.cat([rows.y for c in clients for rows in c.parts().values()]), "labels")
                continue
        except UserError:
            pass
        for client in clients:
            for part, rows in client.parts().items():
                task.check(outputs, rows.y, f"client {client.id!r}, {part}")


def _check_loss(net: functional.Network, task: Task, sample: Rows, device: torch.device) -> None:
    """A loss of one's own is tried on two rows before anything begins."""
    with torch.no_grad():
        output = net(net.start, _move(sample.x, device), forward_context.Frame(), train=False)
        try:
            losses = task.loss(output, sample.y.to(device))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UserError(
                f"task: its loss cannot take the model's output of shape {tuple(output.shape)}: {error}"
            ) from None
    if not isinstance(losses, Tensor) or losses.dim() != 1 or len(losses) != len(sample.y):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise UserError(
            f"task: its loss gave {got} for {len(sample.y)} rows; expected one value per row (reduction='none')"
        )


def make_site(client: ClientData, task: Task, classes: int, device: torch.device) -> Site:
    """A client's rows on the device, with what samplers and methods ask of them."""
    labels = client.train.y
    counts = torch.zeros(0)
    if task.classes and labels.dim() == 1:
        width = max(classes, 2)
        counts = torch.bincount(labels.long(), minlength=width).float()
    return Site(
        id=client.id,
        train=_rows(client.train, device),
        test=None if client.test is None else _rows(client.test, device),
        val=None if client.val is None else _rows(client.val, device),
        labels=labels.numpy() if labels.dim() == 1 else _presence(labels, classes if task.classes else 1),
        counts=counts if device.type == "cpu" else counts.to(device),
    )


def _presence(labels: Tensor, classes: int) -> np.ndarray:
    """Which classes a picture holds, for samplers: pictures x classes."""
    found = [(labels == c).flatten(1).any(1) for c in range(classes)]
    return torch.stack(found, 1).numpy()


def bind_all(method: Method, net: functional.Network, task: Task, seed: int) -> dict[int, Bound]:
    """The bound method, and those that take over later, by the round after which they do."""
    bounds = {0: bind(method, net, task, seed=seed)}
    while method.then is not None:
        rounds, method = method.then
        bounds[rounds] = bind(replace(method), net, task, seed=seed)
    return bounds


def _rows(rows: Rows, device: torch.device) -> Rows:
    return rows if device.type == "cpu" else Rows(_move(rows.x, device), rows.y.to(device))


def _move(x: Inputs, device: torch.device) -> Inputs:
    if isinstance(x, Tensor):
        return x.to(device)
    return {k: v.to(device) for k, v in x.items()} if isinstance(x, dict) else tuple(v.to(device) for v in x)


def _dims(x: Inputs) -> int:
    return x.dim() if isinstance(x, Tensor) else next(iter(x.values() if isinstance(x, dict) else x)).dim()


def notes_of(method: Method, optimizer: Optimizer) -> tuple[str, ...]:
    """What a reader of the result should know: an optimiser that the method is not defined for."""
    if method.plain_sgd and (optimizer.name != "sgd" or optimizer.momentum):
        note = f"off_spec: {method.text} is defined for SGD without momentum; with {optimizer.name} its correction is no gradient"
        warnings.warn(note, stacklevel=3)
        return (note,)
    return ()


def with_cloud(data: Federation, mixing: Mixing, seed: int) -> Federation:
    """The federation with rows moved to the cloud, unless it has cloud rows already."""
    if mixing.cloud_clients:
        moved = [data[c] for c in mixing.cloud_clients]
        rest = tuple(c for c in data if c.id not in mixing.cloud_clients)
        if not rest:
            raise UserError("hybrid.cloud_clients names every client; leave at least one site")
        return replace(data, clients=rest, cloud=concatenate([c.train for c in moved]))
    if mixing.cloud_fraction is None:
        if data.cloud is None:
            raise UserError(
                "mode='hybrid' needs cloud rows: data.with_cloud((x, y)), hybrid.cloud_fraction or hybrid.cloud_clients"
            )
        return data
    clients, taken = [], [] if data.cloud is None else [data.cloud]
    for client in data:
        order = torch.from_numpy(rng.stream(seed, "cloud", client.id).permutation(len(client.train)))
        count = min(int(mixing.cloud_fraction * len(client.train) + 0.5), len(client.train) - 1)
        if count:
            taken.append(client.train.take(order[:count].sort()[0]))
        clients.append(replace(client, train=client.train.take(order[count:].sort()[0])))
    if not taken:
        raise UserError(
            f"hybrid.cloud_fraction={mixing.cloud_fraction} takes no row from any client; give a larger one"
        )
    return replace(data, clients=tuple(clients), cloud=concatenate(taken))
