"""Layers that replace torch's: for one client, as on the loop engine, they equal torch's layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedloom.engines.choose_device import choose_device
from fedloom.network import inspect_model, replace_layers
from fedloom.network.functional import Network
from fedloom.ops import forward_context

ROWS = 4
CASES: dict[type[nn.Module], tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    nn.Conv2d: (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="circular"), (2, 6, 6)),
    nn.Linear: (lambda: nn.Linear(5, 3), (5,)),
    nn.Embedding: (lambda: nn.Embedding(7, 3, padding_idx=0), (5,)),
    nn.Dropout: (lambda: nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.0)), (5,)),
    nn.Dropout1d: (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Dropout1d(0.0)), (2, 6)),
    nn.Dropout2d: (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.0)), (2, 6, 6)),
    nn.Dropout3d: (lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.Dropout3d(0.0)), (2, 4, 4, 4)),
    nn.BatchNorm1d: (lambda: nn.BatchNorm1d(5), (5,)),
    nn.BatchNorm2d: (lambda: nn.BatchNorm2d(2, momentum=None), (2, 3, 3)),
    nn.BatchNorm3d: (lambda: nn.BatchNorm3d(2, affine=False), (2, 3, 3, 3)),
    nn.LSTM: (lambda: nn.LSTM(5, 3, num_layers=2, bidirectional=True, batch_first=True), (6, 5)),
    nn.GRU: (lambda: nn.GRU(5, 3, bias=False, batch_first=True), (6, 5)),
    nn.RNN: (lambda: nn.RNN(5, 3, batch_first=True), (6, 5)),
    nn.TransformerEncoder: (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
        (6, 4),
    ),
    nn.LayerNorm: (lambda: nn.LayerNorm(5), (5,)),
}
"""A model with the layer, and the shape of a row of its input."""


def inputs(kind: type[nn.Module], shape: tuple[int, ...]) -> Tensor:
    if kind is nn.Embedding:
        return torch.randint(7, (ROWS, *shape))
    return torch.randn(ROWS, *shape, dtype=torch.float64)


def build(module: nn.Module, x: Tensor) -> Network:
    return inspect_model.build(module, x, task="regression", device=choose_device("cpu", "fp64"))


def output(y: Tensor | tuple[Tensor, ...]) -> Tensor:
    return y if isinstance(y, Tensor) else y[0]


def test_every_replaced_layer_has_a_case() -> None:
    assert CASES.keys() == replace_layers._SWAPS.keys()


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_values_gradients_and_buffers_equal_torchs(kind: type[nn.Module], train: bool) -> None:
    make, shape = CASES[kind]
    module, x = make().double().train(train), inputs(kind, shape)
    network = build(module, x)
    assert any(type(part) is replace_layers._SWAPS[kind] for part in network.module.modules())
    assert list(network.module.state_dict()) == list(module.state_dict())
    leaves = {n: v.clone().requires_grad_(v.is_floating_point()) for n, v in network.start.items()}
    for name, buffer in module.named_buffers():
        leaves[name] = buffer.clone()

    y = network(leaves, x, forward_context.Frame(), train=train)
    expected = output(module(x))
    assert torch.equal(y, expected)
    names = [n for n, _ in module.named_parameters()]
    if names:
        weight = torch.randn_like(y)
        gradients = torch.autograd.grad((y * weight).sum(), [leaves[n] for n in names])
        expected_gradients = torch.autograd.grad((expected * weight).sum(), list(module.parameters()))
        assert all(map(torch.equal, gradients, expected_gradients))
    assert all(torch.equal(leaves[n], buffer) for n, buffer in module.named_buffers())


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_exported_module_has_the_users_layers_and_names(kind: type[nn.Module]) -> None:
    make, shape = CASES[kind]
    module, x = make().double(), inputs(kind, shape)
    types = [type(part) for part in module.modules()]
    network = build(module, x)
    exported = network.as_module(network.start)
    assert [type(part) for part in exported.modules()] == types
    assert [type(part) for part in module.modules()] == types, "the user's module was changed"
    assert list(exported.state_dict()) == list(module.state_dict())
    assert torch.equal(output(exported(x)), output(copy.deepcopy(module).eval()(x)))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_dropout_scales_the_values_that_it_does_not_drop(kind: type[nn.Module]) -> None:
    """The noise is a counter's, not torch's: only the possible values are equal."""
    _, shape = CASES[kind]
    layer, x = kind(0.4), torch.rand(64, *(shape if len(shape) > 1 else (2,)), dtype=torch.float64) + 1
    network = build(nn.Sequential(layer), x)
    y = network(network.start, x, forward_context.Frame(key=torch.tensor([1, 2])), train=True)
    dropped = y == 0
    assert 0.2 < float(dropped.double().mean()) < 0.6
    assert torch.allclose(y[~dropped], x[~dropped] / 0.6)
