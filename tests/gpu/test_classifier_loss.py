"""The loss of a cohort's linear classifiers against the plain form, client by client, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.tasks import TASKS
from fedloom.tasks.base import classifier_loss
from fedloom.tasks.batch import Batch
from tests.gpu.helpers import DEVICE, compare, count_calls, kernels, numbers, random

pytest.importorskip("triton")
from fedloom.gpu.classifier_loss import _CohortClassifierLoss

SHAPES = [(3, 10, 7, 5), (2, 1, 1, 2), (2, 65, 3, 10), (1, 70, 33, 17), (2, 20, 130, 64)]
"""Clients, rows, channels and classes."""


def results(
    task: str, u: Tensor, weight: Tensor, bias: Tensor, *values: Tensor, y: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the loss, and the mean of each value, of one client."""
    return torch.stack(classifier_loss(TASKS[task], Batch(u, y, mask), u, weight, bias, *values))


def labels_and_mask(clients: int, rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random labels, and masks of clients with fewer and fewer rows, the last without any."""
    y = torch.randint(0, classes, (clients, rows), generator=torch.Generator().manual_seed(0))
    last = torch.linspace(rows, 0, clients).long() if clients > 1 else torch.tensor([rows // 2])
    return y.to(DEVICE), (torch.arange(rows) < last[:, None]).float().to(DEVICE)


def both(inputs: list[Tensor], y: Tensor, mask: Tensor | None, shared: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Return the results of the cohort and of its clients one by one. Clients share the inputs at some indices."""

    def client(y: Tensor, mask: Tensor | None, *inputs: Tensor) -> Tensor:
        return results("classification", *inputs, y=y, mask=mask)

    axes = (0, None if mask is None else 0, *(None if i in shared else 0 for i in range(len(inputs))))
    ours = torch.vmap(client, in_dims=axes)(y, mask, *inputs)
    each = range(len(y))
    theirs = [
        client(y[j], None if mask is None else mask[j], *(t if i in shared else t[j] for i, t in enumerate(inputs)))
        for j in each
    ]
    return ours, torch.stack(theirs)


@kernels
@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "masks"])
@pytest.mark.parametrize("value", [False, True], ids=["loss", "loss and mean"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(
    shape: tuple[int, ...], value: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, rows, channels, classes = shape
    calls = count_calls(monkeypatch, _CohortClassifierLoss)
    inputs = [random(clients, rows, channels), random(clients, classes, channels), random(clients, classes)]
    inputs += [random(clients, rows)] if value else []
    y, mask = labels_and_mask(clients, rows, classes)
    ours, theirs = both(inputs, y, mask if masked else None)
    assert calls == [1]
    compare(ours, theirs, inputs)


@kernels
def test_inputs_without_gradient_or_with_other_strides() -> None:
    u, weight, bias = random(4, 3, 5).transpose(0, 1), random(3, 5, 6).mT, random(3, 6)
    y, mask = labels_and_mask(3, 4, 6)
    ours, theirs = both([u.detach(), weight, bias, random(3, 4)], y, mask)
    compare(ours, theirs, [weight, bias])
    shared = random(4, 5)
    compare(*both([shared, weight, bias], y, mask, shared=(0,)), [shared, weight, bias])


@kernels
def test_large_logits() -> None:
    inputs = [(500 * random(2, 4, 5)).detach().requires_grad_(), random(2, 6, 5), random(2, 6)]
    compare(*both(inputs, *labels_and_mask(2, 4, 6)), inputs, scale=1e-9)


@kernels
def test_second_gradient() -> None:
    inputs = [random(2, 4, 5), random(2, 6, 5), random(2, 6), random(2, 4)]
    y, mask = labels_and_mask(2, 4, 6)
    grads = (torch.autograd.grad((result**2).sum(), inputs, create_graph=True) for result in both(inputs, y, mask))
    lengths = [torch.stack([(g**2).sum() for g in own]) for own in grads]
    compare(*lengths, inputs)


@kernels
def test_float32() -> None:
    inputs = [numbers(2, 20, 40).requires_grad_(), numbers(2, 10, 40).requires_grad_(), numbers(2, 10).requires_grad_()]
    y, mask = labels_and_mask(2, 20, 10)
    ours, theirs = both(inputs, y, mask)
    assert ours.dtype == torch.float32
    compare(ours, theirs, inputs, scale=1e-5)


@kernels
@pytest.mark.parametrize("case", ["bf16", "autocast", "binary", "classes", "rows", "two values", "one client"])
def test_unsupported_arguments_are_left_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, _CohortClassifierLoss)
    rows, classes = 1025 if case == "rows" else 4, {"classes": 65, "binary": 1}.get(case, 6)
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    tensors = [numbers(2, rows, 3, dtype=dtype), numbers(2, classes, 3, dtype=dtype), numbers(2, classes, dtype=dtype)]
    tensors += [numbers(2, rows), numbers(2, rows)] if case == "two values" else []
    y, mask = labels_and_mask(2, rows, classes)

    def client(y: Tensor, mask: Tensor, *tensors: Tensor) -> Tensor:
        return results("binary" if case == "binary" else "classification", *tensors, y=y, mask=mask)

    with torch.autocast(DEVICE, torch.bfloat16, enabled=case == "autocast"):
        if case == "one client":
            client(y[0], mask[0], *(t[0] for t in tensors))
        else:
            torch.vmap(client)(y, mask, *tensors)
    assert not calls
