"""Recurrent layers of cohorts against torch's own, client by client, and how many kernels a time step takes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.engines.vectorised import VectorisedEngine
from fedloom.engines.vectorised.arrangement import over_clients
from fedloom.network import replace_layers
from fedloom.ops import recurrent
from tests.engines.test_vectorised import Words, agree, sentences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, ROWS, STEPS, INPUTS, VALUES = 3, 4, 6, 5, 7
KINDS = [(nn.LSTM, {}), (nn.GRU, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]
kinds = pytest.mark.parametrize(("made", "extra"), KINDS, ids=["lstm", "gru", "tanh", "relu"])


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64).mul(0.5).to(DEVICE, dtype).requires_grad_()


def outputs(found: Any) -> list[Tensor]:
    y, state = found
    return [y, *(state if isinstance(state, tuple) else (state,))]


def compare(module: nn.RNNBase, x: Tensor, axis: int | None, *state: Tensor, shared: bool = False) -> None:
    """Outputs and gradients of a layer whose weights, unless shared, are each client's own."""
    module = module.to(DEVICE, torch.float64)
    ours = copy.deepcopy(module)
    replace_layers.prepare(ours)
    front = () if shared else (CLIENTS,)
    weights = {n: random(*front, *p.shape) for n, p in module.named_parameters()}

    def called(layer: nn.Module, w: dict[str, Tensor], x: Tensor, *state: Tensor) -> list[Tensor]:
        hx = None if not state else state if len(state) > 1 else state[0]
        return outputs(functional_call(layer, w, (x, hx)))

    axes = (None if shared else 0, axis, *[0] * len(state))
    made = torch.vmap(lambda *a: called(ours, *a), axes)(weights, x, *state)
    each = [
        called(
            module,
            weights if shared else {n: v[i] for n, v in weights.items()},
            x if axis is None else x.select(axis, i),
            *(s[i] for s in state),
        )
        for i in range(CLIENTS)
    ]
    plain = [torch.stack(parts) for parts in zip(*each, strict=True)]
    inputs = [x, *weights.values(), *state]
    noise = [torch.randn_like(y) for y in plain]
    grads = [
        torch.autograd.grad(sum((y * n).sum() for y, n in zip(found, noise, strict=True)), inputs)
        for found in (made, plain)
    ]
    for a, b in [*zip(made, plain, strict=True), *zip(*grads, strict=True)]:
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=1e-10, rtol=1e-9)


@kinds
@pytest.mark.parametrize(
    "form",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"batch_first": True, "bidirectional": True}],
    ids=["one layer", "two layers both ways", "without bias", "rows first"],
)
def test_gradients(made: Callable[..., nn.RNNBase], extra: dict[str, Any], form: dict[str, Any]) -> None:
    compare(made(INPUTS, VALUES, **extra, **form), random(CLIENTS, STEPS, ROWS, INPUTS), 0)


@kinds
def test_a_state_to_begin_with(made: Callable[..., nn.RNNBase], extra: dict[str, Any]) -> None:
    state = [random(CLIENTS, 2, ROWS, VALUES) for _ in range(2 if made is nn.LSTM else 1)]
    module = made(INPUTS, VALUES, bidirectional=True, **extra)
    compare(module, random(CLIENTS, STEPS, ROWS, INPUTS), 0, *state)


@kinds
def test_what_clients_share(made: Callable[..., nn.RNNBase], extra: dict[str, Any]) -> None:
    compare(made(INPUTS, VALUES, **extra), random(STEPS, ROWS, INPUTS), None)
    compare(made(INPUTS, VALUES, **extra), random(STEPS, CLIENTS, ROWS, INPUTS), 1, shared=True)
    compare(made(INPUTS, VALUES, **extra), random(CLIENTS, 1, ROWS, INPUTS), 0)


@kinds
def test_no_rows(made: Callable[..., nn.RNNBase], extra: dict[str, Any]) -> None:
    compare(made(INPUTS, VALUES, num_layers=2, bidirectional=True, **extra), random(CLIENTS, STEPS, 0, INPUTS), 0)


def test_a_state_in_a_list() -> None:
    module, x = nn.LSTM(INPUTS, VALUES).to(DEVICE, torch.float64), random(CLIENTS, STEPS, ROWS, INPUTS)
    h, c = random(CLIENTS, 1, ROWS, VALUES), random(CLIENTS, 1, ROWS, VALUES)
    ours = copy.deepcopy(module)
    replace_layers.prepare(ours)
    made, _ = over_clients(lambda x, h, c: ours(x, [h, c]))(x, h, c)
    assert torch.allclose(made[1], module(x[1], (h[1], c[1]))[0])


@pytest.mark.parametrize("made", [nn.LSTM, nn.GRU])
def test_noise_between_layers(made: Callable[..., nn.RNNBase]) -> None:
    module = made(INPUTS, VALUES, 2, dropout=0.5).to(DEVICE, torch.float64)
    replace_layers.prepare(module)
    x = random(1, STEPS, ROWS, INPUTS).detach().expand(CLIENTS, -1, -1, -1)
    y, _ = over_clients(module)(x)
    assert not torch.equal(y[0], y[1])
    quiet, _ = over_clients(module.eval())(x)
    assert torch.allclose(quiet[0], quiet[1])


@kinds
def test_gradients_of_gradients(made: Callable[..., nn.RNNBase], extra: dict[str, Any]) -> None:
    module = made(INPUTS, VALUES, **extra).to(torch.float64)  # torch's own has no second derivative on CUDA
    ours = copy.deepcopy(module)
    replace_layers.prepare(ours)
    weights = {n: random(CLIENTS, *p.shape).cpu().detach().requires_grad_() for n, p in module.named_parameters()}
    x = random(CLIENTS, STEPS, ROWS, INPUTS).cpu().detach()

    def slope(layer: nn.Module, w: dict[str, Tensor], x: Tensor) -> Tensor:
        found = torch.func.grad(lambda w: functional_call(layer, w, x)[0].square().sum())(w)
        return sum(v.square().sum() for v in found.values())

    sides = over_clients(lambda w, x: slope(ours, w, x))(weights, x)
    plain = torch.stack([slope(module, {n: v[i] for n, v in weights.items()}, x[i]) for i in range(CLIENTS)])
    assert torch.allclose(sides, plain)
    found, expected = (torch.autograd.grad(y.sum(), list(weights.values())) for y in (sides, plain))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("made", [nn.LSTM, nn.GRU, nn.RNN])
def test_under_autocast(made: Callable[..., nn.RNNBase]) -> None:
    module = made(INPUTS, VALUES).to(DEVICE)
    replace_layers.prepare(module)
    weights = {n: random(CLIENTS, *p.shape, dtype=torch.float32) for n, p in module.named_parameters()}
    x = random(CLIENTS, STEPS, ROWS, INPUTS, dtype=torch.float32)
    call = over_clients(lambda w, x: functional_call(module, w, x)[0])
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        short = call(weights, x)
    assert short.dtype == torch.bfloat16
    assert torch.allclose(short.float(), call(weights, x), atol=5e-2)
    grads = torch.autograd.grad(short.float().sum(), list(weights.values()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


# Kernels --------------------------------------------------------------------------------------------------

_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view"}


class Kernels(TorchDispatchMode):
    """Counts operations that are more than a look at memory; a cell counts as one, as torch's fused ones on CUDA are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside and not func.is_view and name not in _FREE:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def one(self) -> Iterator[None]:
        self.calls["cell"] += 1
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


def whole(fn: Callable[..., Any], modes: list[Kernels]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with modes[-1].one():
            return fn(*args)

    return call


def counted(kind: recurrent.Kind, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """The kernels of a layer forwards and backwards."""
    gates = VALUES * {"lstm": 4, "gru": 3}.get(kind, 1)
    x = random(CLIENTS, steps, ROWS, INPUTS)
    weights = [random(CLIENTS, gates, *tail) for tail in ((INPUTS,), (VALUES,), (), ())]
    found: list[Kernels] = []
    with monkeypatch.context() as patch:
        for name in () if DEVICE == "cuda" else ("recurrent_cell", "lstm_cell_backward", "gru_cell_backward"):
            patch.setattr(recurrent, name, whole(getattr(recurrent, name), found))
        found.append(Kernels())
        with found[-1]:
            y, _ = torch.vmap(lambda x, *w: recurrent.layer(kind, x, w, None))(x, *weights)
        total = y.sum()
        found.append(Kernels())
        with found[-1], torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(total, [x, *weights])
    return found[0].calls, found[1].calls


@pytest.mark.parametrize(("kind", "ahead", "back"), [("lstm", 2, 2), ("gru", 2, 3), ("tanh", 2, 2), ("relu", 2, 2)])
def test_kernels_of_a_time_step(kind: Any, ahead: int, back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (counted(kind, steps, monkeypatch) for steps in (5, 15))
    steps = [(b - a).total() / 10 for a, b in zip(few, many, strict=True)]
    assert steps == [ahead, back]
    assert (few[0].total() - 5 * ahead, few[1].total() - 5 * back) <= (12, 16), "what is done once"


# Runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [nn.LSTM, nn.GRU])
def test_gradients_of_gradients_in_runs(made: Any) -> None:
    """On the CPU: torch's own layers have no second derivative on CUDA."""
    options = {"rounds": 1, "device": "cpu"}
    agree("peravg(exact=True)", lambda: Words(made), sentences((9, 5)), VectorisedEngine(step="mapped"), **options)
