"""What taps cost, and what the features at them tell of the labels."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom import devices, models, tasks
from fedloom.engines.choose_device import choose_device
from fedloom.errors import UserError
from fedloom.network import inspect_model
from fedloom.ops import forward_context
from fedloom.rounds.diagnostics.tap_information import Information, informed
from fedloom.spec.structure import Structure
from fedloom.spec.tap_losses import adapted, entropy_term
from fedloom.spec.taps import Tap, candidates, choose
from fedloom.tasks.batch import Batch
from fedloom.tensors import Inputs

if TYPE_CHECKING:
    from fedloom.runs.result import Result


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
    net = inspect_model.build(model, x, task=task, device=choose_device("cpu", "fp32"))
    found = candidates(net.structure)
    default = {t.name for t in choose(net.structure, None, None, "input")}
    net.want(frozenset(t.name for t in found))
    frame = forward_context.Frame(wanted=frozenset(t.name for t in found))
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
        devices.synchronise(feature.device)
        begun = time.perf_counter()
        z = feature.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            total = entropy_term(z, batch, tap.axis)
            if _supervised(structure.task):
                total = total + task.value(adapted(z, weight, bias, tap.axis, batch.y, dense=dense), batch)
        total.backward()
        devices.synchronise(feature.device)
        times.append(time.perf_counter() - begun)
        memory = feature.numel() * feature.element_size() + sum(kept.values())
        kept.clear()
    times = sorted(times[1:])  # the first one warms up
    return times[len(times) // 2], memory


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
