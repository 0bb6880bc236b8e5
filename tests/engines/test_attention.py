"""Attention of cohorts against torch's own, client by client: models, masks, kernels called, noise."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mha
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine, attention
from fedloom.engines.vectorised.arrangement import over_clients
from fedloom.network import replace_layers
from fedloom.ops import precision as numerics
from tests.helpers import everything, fit, gap

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Torch's fused kernels on CUDA, for which this is made, have no float64.
DTYPE, CLOSE = (torch.float64, 1e-11) if DEVICE == "cpu" else (torch.float32, 2e-4)
attend = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with numerics.tf32(products=False, convolutions=False):
        yield


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def compare(ours: Tensor, theirs: Tensor, inputs: list[Tensor], close: float = CLOSE) -> None:
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=close, rtol=close)
    if not theirs.requires_grad:
        return
    weight = torch.randn_like(theirs)
    found, expected = (torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=close * 10, rtol=close * 10)


class Kernels(TorchDispatchMode):
    """Counts the calls of torch's attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


# The function ---------------------------------------------------------------------------------------------

Q, K = (3, 2, 4, 5, 8), (3, 2, 4, 7, 8)


def both(fn: Callable[..., Tensor], axes: tuple[int | None, ...], tensors: list[Tensor], close: float = CLOSE) -> None:
    """Compares a function mapped over clients, whose axes are given, with the function called for each."""
    inside = torch.vmap(fn, axes, randomness="different")
    with attention.whole():
        ours = inside(*tensors)
    theirs = torch.stack(
        [
            fn(*(t if axis is None else t.select(axis, i) for t, axis in zip(tensors, axes, strict=True)))
            for i in range(len(ours))
        ]
    )
    compare(ours, theirs, [t for t in tensors if t.requires_grad], close)


@pytest.mark.parametrize(
    ("q", "k", "axes"),
    [
        (Q, K, (0, 0, 0)),
        ((2, 3, 4, 5, 8), (2, 4, 7, 8), (1, None, None)),
        ((2, 4, 5, 8), (2, 4, 7, 3, 8), (None, 3, 3)),
        ((3, 5, 8), (3, 7, 8), (0, 0, 0)),
        ((3, 2, 5, 8), (3, 2, 7, 8), (0, 0, 0)),
        ((3, 2, 2, 4, 5, 8), (3, 2, 2, 4, 7, 8), (0, 0, 0)),
        (Q, (3, 1, 4, 7, 8), (0, 0, 0)),
        (Q, (3, 4, 7, 8), (0, 0, 0)),
    ],
    ids=["batch", "shared keys", "shared queries", "plain", "rows", "more axes", "one batch of keys", "fewer axes"],
)
def test_shapes(q: tuple[int, ...], k: tuple[int, ...], axes: tuple[int | None, ...]) -> None:
    both(attend, axes, [random(*q), random(*k), random(*k)])


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((5, 7), None),
        ((1, 1, 5, 7), None),
        ((4, 5, 7), None),
        ((2, 1, 1, 7), None),
        ((3, 5, 7), 0),
        ((3, 2, 1, 1, 7), 0),
        ((2, 4, 5, 3, 7), 3),
    ],
)
def test_masks(shape: tuple[int, ...], axis: int | None, boolean: bool) -> None:
    mask = random(*shape)
    mask = (mask > -1).detach() if boolean else mask
    both(attend, (0, 0, 0, axis), [random(*Q), random(*K), random(*K), mask])


def test_what_no_client_owns_is_computed_once() -> None:
    k, x = random(*K[1:]), random(3, 1)
    both(lambda x, k: attend(k, k, k) * x, (0, None), [x, k])


def test_a_mask_alone_is_each_clients_own() -> None:
    both(attend, (None, None, None, 0), [random(*Q[1:]), random(*K[1:]), random(*K[1:]), random(3, 5, 7)])


@pytest.mark.parametrize("length", [1, 5, 17, 33])
def test_causal_scaled_and_odd_lengths(length: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, is_causal=True, scale=0.3)

    both(fn, (0, 0, 0), [random(3, 2, 4, length, 8) for _ in range(3)])


@pytest.mark.parametrize("rows", [(), (2,)])
def test_shared_heads(rows: tuple[int, ...]) -> None:
    q, k = random(3, *rows, 4, 5, 8), random(3, *rows, 2, 5, 8)
    both(lambda q, k: attend(q, k, k * 2, enable_gqa=True), (0, 0), [q, k])


def test_heads_in_front_of_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``nn.MultiheadAttention`` lays them out: rows between time steps and heads."""
    given: list[Tensor] = []

    def spy(*args: Any, **named: Any) -> Tensor:
        given.extend(args[:3])
        return attend(*args, **named)

    monkeypatch.setattr(attention, "_attend", spy)
    x = random(3, 5, 2, 4, 8)
    both(lambda x: attend(*[x.permute(1, 2, 0, 3)] * 3), (0,), [x])
    assert {t.data_ptr() for t in given} == {x.data_ptr()}
    assert given[0].shape == (3, 8, 5, 8)


def test_more_sequences_than_a_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST", 4)
    both(attend, (0, 0, 0, 0), [random(*Q), random(*K), random(*K), random(3, 2, 1, 1, 7)])


def test_no_rows() -> None:
    both(attend, (0, 0, 0), [random(3, 0, 4, n, 8) for n in (5, 7, 7)])


def test_single_vectors_are_refused_as_they_are_for_one_client() -> None:
    x = random(3, 8)
    with pytest.raises(RuntimeError, match="dimensional"):
        attend(x[0], x[0], x[0])
    with pytest.raises(RuntimeError, match="sequences of vectors"):
        over_clients(lambda x: attend(x, x, x))(x)


def test_torchs_own_rule_holds_outside_of_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(*Q)
    ours = over_clients(lambda x: attend(x, x, x))(x)
    calls: list[Any] = []
    monkeypatch.setattr(attention, "_attend", lambda *args, **named: calls.append(args) or attend(*args, **named))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's takes clients one after another
        theirs = torch.vmap(lambda x: attend(x, x, x))(x)
    assert not calls
    assert torch.allclose(ours, theirs, atol=CLOSE)


def test_the_kernels_are_called_once_for_all_clients() -> None:
    q, k = random(*Q, dtype=torch.float32), random(*K, dtype=torch.float32)
    with Kernels() as seen, warnings.catch_warnings():
        warnings.simplefilter("error")
        over_clients(attend)(q, k, k).sum().backward()
    assert seen.calls
    assert set(seen.calls.values()) == {1}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_types(dtype: torch.dtype, masked: bool) -> None:
    inputs = [random(3, 2, 4, n, 16, dtype=dtype) for n in (13, 21, 21)]
    mask = [(random(3, 2, 1, 1, 21) > -1).detach()] if masked else []
    both(attend, (0,) * (3 + masked), [*inputs, *mask], 2e-4 if dtype is torch.float32 else 3e-2)


def test_under_autocast() -> None:
    q = random(*Q, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        made = over_clients(lambda q: attend(q, q, q))(q)
        plain = attend(q[0], q[0], q[0])
    assert made.dtype == plain.dtype == torch.bfloat16
    assert torch.allclose(made[0], plain, atol=3e-2)
    (found,) = torch.autograd.grad(made.float().sum(), q)
    assert found.isfinite().all()


def test_noise() -> None:
    x = random(1, 2, 4, 5, 8).detach().expand(3, -1, -1, -1, -1).contiguous()

    def fn(x: Tensor) -> Tensor:
        return attend(x, x, x, dropout_p=0.5)

    with attention.whole():
        own = torch.vmap(fn, randomness="different")(x)
        if DEVICE == "cpu":  # elsewhere torch has no attention with one noise for all
            same = torch.vmap(fn, randomness="same")(x)
            assert torch.equal(same[0], same[1])
        with pytest.raises(RuntimeError, match="random"):
            torch.vmap(fn)(x)
    assert not torch.equal(own[0], own[1])
    alike = over_clients(lambda n: fn(x[0]) + n)(torch.zeros(3, 1, 1, 1, device=DEVICE, dtype=DTYPE))
    assert not torch.equal(alike[0], alike[1])
    draws = torch.stack([over_clients(fn)(x) for _ in range(400)])
    assert torch.allclose(draws.mean((0, 1)), attend(x[0], x[0], x[0]), atol=0.25)


def test_gradients_of_gradients() -> None:
    x = random(3, 2, 5, 8)

    def fn(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: attend(x, x, x).square().sum())(x)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        both(fn, (0,), [x])


# Layers ---------------------------------------------------------------------------------------------------

CLIENTS, ROWS, LENGTH = 3, 4, 7


def cohort(module: nn.Module, call: Callable[..., Tensor], *data: Tensor, close: float = CLOSE) -> None:
    """Compares a layer of clients with weights of their own, prepared and mapped, with torch's, client by client."""
    torch.manual_seed(0)
    module = module.to(DEVICE, DTYPE)
    weights = {n: random(CLIENTS, *p.shape).mul(0.3).detach().requires_grad_() for n, p in module.named_parameters()}
    ours = copy.deepcopy(module)
    replace_layers.prepare(ours)
    grads = module.training
    with nullcontext() if grads else torch.no_grad():
        made = over_clients(lambda w, *x: call(lambda *a, **k: functional_call(ours, w, a, k), *x))(weights, *data)
        plain = torch.stack(
            [
                call(
                    lambda *a, i=i, **k: functional_call(module, {n: v[i] for n, v in weights.items()}, a, k),
                    *(t[i] for t in data),
                )
                for i in range(CLIENTS)
            ]
        )
    compare(made, plain, list(weights.values()), close)


def padding() -> Tensor:
    real = torch.tensor([[7, 5, 2, 6], [1, 7, 3, 4], [7, 7, 7, 2]], device=DEVICE)
    return torch.arange(LENGTH, device=DEVICE) >= real[..., None]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["plain", "padded", "causal"])
def test_encoders(kind: str, nested: bool, training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).train(training)
    x = random(CLIENTS, ROWS, LENGTH, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, DEVICE, DTYPE)

    def call(layer: Any, x: Tensor, padded: Tensor) -> Tensor:
        if kind == "plain":
            return layer(x)
        if kind == "causal":
            return layer(x, mask=mask, is_causal=True)
        # What stands at positions of padding nobody asks for: zeros in torch's nested tensors, something else elsewhere.
        return layer(x, src_key_padding_mask=padded).masked_fill(padded[..., None], 0)

    cohort(module, call, x, padding(), close=CLOSE if training else max(CLOSE, 1e-8))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_multihead_attention(weighed: bool, padded: bool, training: bool) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).train(training)

    def call(layer: Any, x: Tensor, mask: Tensor) -> Tensor:
        y, weights = layer(x, x, x, key_padding_mask=mask if padded else None, need_weights=weighed)
        return y if weights is None else torch.cat([y, weights], -1)

    cohort(module, call, random(CLIENTS, ROWS, LENGTH, 8), padding())


def test_decoders() -> None:
    module = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, DEVICE, DTYPE)
    memory = random(CLIENTS, ROWS, 5, 8)
    cohort(module, lambda f, x, m: f(x, m, tgt_mask=mask, tgt_is_causal=True), random(CLIENTS, ROWS, LENGTH, 8), memory)


def test_torchs_fused_layers_stay_as_they_were() -> None:
    assert mha.get_fastpath_enabled()
    with attention.whole():
        assert not mha.get_fastpath_enabled()
        with attention.whole():
            pass
        assert not mha.get_fastpath_enabled()
    assert mha.get_fastpath_enabled()


# Runs -----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Tokens, of which 0 is padding, to classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8, padding_idx=0)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.words(x), src_key_padding_mask=x == 0)[:, 0])
        return out


def sentences() -> fl.Federation:
    draw = np.random.default_rng(0)
    clients = []
    for n in (9, 14, 5):
        x = draw.integers(1, 7, (n, 9))
        x[np.arange(9) >= draw.integers(2, 10, (n, 1))] = 0
        clients.append(((x, x.sum(1) % 3), (x[:3], x[:3].sum(1) % 3)))
    return fl.Federation.from_arrays(clients)


@pytest.mark.parametrize("method", ["fedavg", "peravg(exact=True)"])
def test_runs(method: str) -> None:
    options: dict[str, Any] = {"rounds": 2, "device": DEVICE}
    loop = fit(method, Encoder, sentences(), engine="loop", **options)
    side = fit(method, Encoder, sentences(), engine=VectorisedEngine(), **options)
    assert gap(everything(loop), everything(side)) <= (1e-10 if DEVICE == "cpu" else 1e-6)
    assert type(side.model().layers) is nn.TransformerEncoder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_runs_with_noise(precision: str) -> None:
    result = fit(
        "fedavg", lambda: Encoder(0.2), sentences(), engine="vectorised", rounds=2, precision=precision, device=DEVICE
    )
    assert all(v.isfinite().all() for v in everything(result).values())
    assert result.config["resolved"]["plan"]["engine"] == "vectorised"
