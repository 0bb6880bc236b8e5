"""What taps cost, and what the features at them tell of the labels."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedloom import frames, models, network, tasks, transfer
from fedloom.errors import UserError
from fedloom.slots import Sweep
from fedloom.structure import Structure
from fedloom.taps.losses import adapted, entropy_term, information_term
from fedloom.taps.points import Tap, candidates, choose, named
from fedloom.types import Batch, Inputs, Leaves, Seen
from fedloom.view import View

if TYPE_CHECKING:
    from fedloom.result import Result
    from fedloom.run import Run


@dataclass(frozen=True, slots=True)
class TapCost:
    """What a tap adds to a step of training.

    Args:
        name: the module.
        kind: why it is a candidate.
        channels: of its output.
        positions: latent positions of its output.
        parameters: of its adapter, C K + K.
        seconds: of both losses and their gradients, median over repetitions.
        memory: bytes that a step keeps for them: the feature, and what the gradient needs.
        chosen: whether the defaults of ``isr`` tap it.
    """

    name: str
    kind: str
    channels: int
    positions: int
    parameters: int
    seconds: float
    memory: int
    chosen: bool


def costs(model: nn.Module, x: Inputs, *, task: str = "classification", repeats: int = 5) -> list[TapCost]:
    """What each candidate tap of a model adds: parameters, seconds and memory per step on a batch.

    Args:
        model: any module.
        x: a batch of inputs; its size is that of the step that is measured.
        task: ``"classification"``, ``"binary"`` or ``"segmentation"``; without classes there are no adapters.
        repeats: measurements of each tap, of which the median is reported.

    Example:
        >>> from fedloom.models import convnet3
        >>> [(c.name, c.parameters) for c in costs(convnet3(10), torch.zeros(2, 1, 8, 8), repeats=1) if c.chosen]
        [('body.block1.act', 650), ('body.block2.act', 650), ('body.block3.act', 650)]
    """
    net = network.build(model, x, task=task)
    found = candidates(net.structure)
    default = {t.name for t in choose(net.structure, None, None, "input")}
    net.want(frozenset(t.name for t in found))
    frame = frames.Frame(wanted=frozenset(t.name for t in found))
    with torch.no_grad():
        output = net(net.start, x, frame, train=False)
    y = _labels(task, output)
    made = []
    for tap in found:
        seconds, memory = _measured(net.structure, tap, frame.features[tap.name], Batch(x, y), repeats)
        width = net.structure.outputs if _supervised(task) else 0
        parameters = width * (tap.channels + 1)
        chosen = tap.name in default
        made.append(TapCost(tap.name, tap.kind, tap.channels, tap.positions, parameters, seconds, memory, chosen))
    return made


def model_costs(
    name: str,
    *,
    sample_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    rows: int = 8,
    repeats: int = 5,
) -> list[TapCost]:
    """:func:`costs` of a network that fedloom ships, by its name, in training on its own kind of data.

    Args:
        name: of the network.
        sample_shape: of one input; None for the factory's own size, pictures of 64 x 64 or the least that works.
        num_classes: None for the factory's own.
        rows: of the batch.
        repeats: measurements of each tap.

    Example:
        >>> [c.name for c in model_costs("mlp", repeats=1)]
        ['body.act1']
    """
    settings = {k: p.default for k, p in inspect.signature(models.find(name)).parameters.items()}
    classes = settings["num_classes"] if num_classes is None else num_classes
    if sample_shape is None and "in_features" in settings:
        sample_shape = (settings["in_features"],)
    for side in (64, 256) if sample_shape is None else (0,):
        shape = sample_shape or (settings["in_channels"], side, side)
        model = models.build(name, num_classes=classes, sample_shape=shape)
        if side >= getattr(model, "min_size", 1):
            break
    x = torch.zeros(rows, *shape)
    with torch.no_grad():
        output = model.eval()(x[:1])
    task = "segmentation" if output.dim() == 4 else "binary" if output.shape[1] == 1 else "classification"
    return costs(model, x, task=task, repeats=repeats)


def _supervised(task: str) -> bool:
    return task in tasks.TASKS and tasks.TASKS[task].classes


def _labels(task: str, output: Tensor) -> Tensor:
    shape = (output.shape[0], *output.shape[2:]) if task == "segmentation" else output.shape[:1]
    return torch.zeros(shape, dtype=torch.long, device=output.device)


def _measured(structure: Structure, tap: Tap, feature: Tensor, batch: Batch, repeats: int) -> tuple[float, int]:
    weight = feature.new_zeros(structure.outputs, tap.channels, requires_grad=True)
    bias = feature.new_zeros(structure.outputs, requires_grad=True)
    task, dense = tasks.named(structure.task), structure.task == "segmentation"
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    times = []
    for _ in range(1 + max(repeats, 1)):
        transfer.synchronise(feature.device)
        begun = time.perf_counter()
        z = feature.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            total = entropy_term(z, batch, tap.axis)
            if _supervised(structure.task):
                total = total + task.value(adapted(z, weight, bias, tap.axis, batch.y, dense=dense), batch)
        total.backward()
        transfer.synchronise(feature.device)
        times.append(time.perf_counter() - begun)
        memory = feature.numel() * feature.element_size() + sum(kept.values())
        kept.clear()
    times = sorted(times[1:])  # the first one warms up
    return times[len(times) // 2], memory


@dataclass(frozen=True, slots=True)
class Information:
    """What the features at a tap tell of a client's labels, in nats.

    Args:
        client: the client.
        tap: the module.
        entropy: H(Y) of the training labels (pixels for dense tasks).
        loss: MI_m, the cross-entropy of the adapter.
        bound: ``H(Y) - MI_m``, a lower bound of the mutual information of features and labels.
    """

    client: str
    tap: str
    entropy: float
    loss: float
    bound: float


def information(result: Result) -> list[Information]:
    """The bound ``H(Y) - MI_m`` for every client and every supervised tap of a run with ``isr``, on training rows.

    Reference: OmniISR, section 3.1.2.
    """
    run = result.run
    if run is None:
        raise UserError("information: the run's state is not there; use the result that fit returned")
    found = informed(run, list(run.sites))
    if not found:
        text = run.at(run.state.round).method.text
        raise UserError(f"information: {text!r} has no adapters to ask; add isr(alpha=...) to the method")
    return found


def informed(run: Run, clients: Sequence[str]) -> list[Information]:
    """The bound for some clients of a run between two rounds; nothing where the method has no adapters."""
    bound = run.at(run.state.round)
    names = [
        n[4:-7]
        for n in (leaf.name for leaf in bound.structure.leaves)
        if n.startswith("isr:") and n.endswith(".weight")
    ]
    if not names:
        return []
    taps = [named(bound.structure, name, "given") for name in names]
    sweep = Sweep(
        name="information",
        fn=lambda view, batch, seen: _sums(taps, view, batch, seen),
        copy=bound.method.evaluate.copy,
        taps=tuple(names),
    )
    found = []
    for client in clients:
        sums = run.desk(client).sweep(sweep)
        share = sums["labels"] / sums["labels"].sum()
        entropy = float(-(share * share.clamp(min=1e-300).log()).sum())
        for tap in taps:
            loss = float(sums[tap.name] / sums["labels"].sum())
            found.append(Information(client, tap.name, entropy, loss, entropy - loss))
    return found


def _sums(taps: list[Tap], view: View, batch: Batch, seen: Seen) -> Leaves:
    """Labels per class, and the adapters' losses times the number of labels."""
    classes = max(view.structure.outputs, 2)
    y = batch.y.reshape(batch.y.shape[0], -1)
    hot = (y[:, :, None] == torch.arange(classes, device=y.device)).to(view.structure.dtype).sum(1)
    sums: dict[str, Any] = {"labels": batch.sum(hot)}
    for tap in taps:
        weight, bias = (view.leaves[f"isr:{tap.name}.{part}"] for part in ("weight", "bias"))
        z = view.feature(tap.name).to(view.structure.dtype)
        sums[tap.name] = information_term(view, z, weight, bias, tap.axis) * sums["labels"].sum()
    return sums
