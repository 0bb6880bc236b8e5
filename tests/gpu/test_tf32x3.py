"""Products of float32 as three of TF32: precision, limits, and the layers that use them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import ops
from fedloom.network import replace_layers
from fedloom.ops import precision
from tests.gpu.helpers import DEVICE, kernels

pytest.importorskip("triton")
from fedloom.gpu import linear, tf32x3

DIGITS = 1e-6
"""Error of sums of some hundred float32, relative to the largest."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@kernels
@pytest.mark.parametrize("programs", [1, 64], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("clients", "rows", "columns", "depth"),
    [(2, 50, 70, 320), (3, 130, 10, 257), (1, 64, 64, 64), (2, 5, 3, 1000)],
)
def test_precision(
    clients: int, rows: int, columns: int, depth: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf32x3, "MIN_PROGRAMS", programs)
    a, b, bias = numbers(clients, rows, depth), numbers(clients, columns, depth), numbers(clients, columns)
    transposed = a.mT.contiguous().mT, b.mT.contiguous().mT
    for left, right, shift in ((a, b, bias), (a, b, None), (*transposed, bias), (a, transposed[1], None)):
        out = torch.full((clients, rows, columns), torch.nan, device=DEVICE)
        assert tf32x3.multiply(left, right, shift, out) is out
        exact = a.double() @ b.double().mT + (0 if shift is None else shift.double()[:, None])
        assert float((out - exact).abs().max() / exact.abs().max()) < DIGITS


@kernels
def test_accumulation_in_a_strided_tensor() -> None:
    a, b, begun = numbers(2, 70, 300), numbers(2, 66, 300), numbers(70, 2, 66)
    for accumulate in (True, False):
        out = begun.clone()
        tf32x3.multiply(a, b, None, out.transpose(0, 1), accumulate=accumulate)
        exact = a.double() @ b.double().mT + (begun.double().transpose(0, 1) if accumulate else 0)
        assert float((out.transpose(0, 1) - exact).abs().max() / exact.abs().max()) < DIGITS


@kernels
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
def test_infinities_and_nans() -> None:
    a, b = numbers(1, 70, 40).abs(), numbers(1, 30, 40).abs()
    a[0, 3, 7], a[0, 5, 2], b[0, 4, 0] = torch.inf, torch.nan, -torch.inf
    found = tf32x3.multiply(a, b, None, torch.empty(1, 70, 30, device=DEVICE))
    exact = a.double() @ b.double().mT
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.isinf(), exact.isinf())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list of the shapes of the left factors of all products from now on."""
    found: list[tuple[int, ...]] = []
    plain = tf32x3.multiply

    def counted(a: Tensor, *rest: Tensor, accumulate: bool = False) -> Tensor:
        found.append(tuple(a.shape))
        return plain(a, *rest, accumulate=accumulate)

    monkeypatch.setattr(tf32x3, "multiply", counted)
    return found


@kernels
@pytest.mark.parametrize(
    ("shape", "outputs", "many"), [((2, 70, 90), 170, False), ((2, 7, 10, 90), 170, True)], ids=["few", "many"]
)
def test_linear_layers(
    shape: tuple[int, ...], outputs: int, many: bool, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients equal torch's in float64; large gradients use the kernel too."""
    monkeypatch.setattr(linear, "MIN_ROWS", 1 if many else 1 << 20)
    monkeypatch.setattr(tf32x3, "MIN_GRADIENT_PRODUCTS", 1 if many else 1 << 40)
    x, w, b = (numbers(*s).requires_grad_() for s in (shape, (2, outputs, 90), (2, outputs)))
    found = torch.vmap(ops.linear)(x, w, b)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    rows = wide[0].flatten(1, -2)
    exact = (rows @ wide[1].mT + wide[2][:, None]).view(found.shape)
    weights = torch.randn_like(exact)
    ours = torch.autograd.grad((found * weights.float()).sum(), (x, w, b))
    theirs = torch.autograd.grad((exact * weights).sum(), wide)
    for mine, other in zip((found, *ours), (exact, *theirs), strict=True):
        assert float((mine - other).detach().abs().max() / other.detach().abs().max()) < DIGITS
    assert [shape[-1] for shape in calls] == ([90, outputs, 70] if many else [90])


@kernels
def test_strided_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of inputs whose client axis is not in front, or which are transposed, has other strides."""
    monkeypatch.setattr(linear, "MIN_ROWS", 1)
    w, d = numbers(2, 170, 90), numbers(2, 70, 170)
    dx = d.double() @ w.double()
    for x, axis, expected in (
        (numbers(70, 2, 90), 1, dx.transpose(0, 1)),
        (numbers(2, 90, 70), 0, dx.mT),
    ):
        x.requires_grad_()
        y = torch.vmap(lambda x, w: ops.linear(x.mT if len(x) == 90 else x, w, None), (axis, 0))(x, w)
        (found,) = torch.autograd.grad(y, x, d)
        assert float((found - expected).abs().max() / expected.abs().max()) < DIGITS


@kernels
@pytest.mark.parametrize("rows", [1, 1 << 20], ids=["kernel", "torch"])
def test_gradients_of_gradients(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_ROWS", rows)
    given = numbers(2, 70, 90), numbers(2, 170, 90), numbers(2, 170)
    found = []
    for layer, dtype in ((ops.linear, torch.float32), (torch.nn.functional.linear, torch.float64)):
        x, w, b = (t.to(dtype).requires_grad_() for t in given)
        y = torch.vmap(layer)(x, w, b)
        (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((dx**2).sum(), (x, w, b)))
    for mine, other in zip(*found, strict=True):
        assert float((mine - other).abs().max() / other.abs().max()) < DIGITS


@kernels
def test_conditions() -> None:
    a, b = numbers(2, 70, 130), numbers(2, 130, 130)
    assert tf32x3.is_supported(a, b)
    assert not tf32x3.is_supported(a.double(), b.double())
    assert not tf32x3.is_supported(a.bfloat16(), b.bfloat16())
    assert not tf32x3.is_supported(a[:, :, :60], b[:, :, :60])  # few summands
    assert not tf32x3.is_supported(a[:, :20], b[:, :70])  # few products
    assert tf32x3.is_supported(numbers(2, 40, 130), numbers(2, 210, 130))
    assert not tf32x3.is_supported(numbers(100, 40, 70), numbers(100, 100, 70))  # few rows, but enough columns
    assert not tf32x3.is_supported(
        numbers(1, 1, 64).expand(1, 1 << 23, 64), numbers(1, 64, 64)
    )  # more rows than a grid has programs
    with precision.tf32(products=True):
        assert not tf32x3.is_supported(a, b)


@kernels
def test_shared_layer(calls: list[tuple[int, ...]]) -> None:
    """Without a gradient all rows are one product; torch computes the others and small ones."""
    x, w, b = numbers(3, 2, 20, 90), numbers(210, 90), numbers(210)
    for bias in (b, None):
        calls.clear()
        with torch.no_grad():
            found = torch.vmap(ops.linear, (0, None, None))(x, w, bias)
        exact = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
        assert float((found - exact).abs().max() / exact.abs().max()) < DIGITS
        assert calls == [(1, 120, 90)]
    calls.clear()
    torch.vmap(ops.linear, (0, None, None))(x, w.requires_grad_(), b)
    with torch.no_grad():
        torch.vmap(ops.linear, (0, None, None))(x[:, :, :2], w, b)
    assert not calls


@kernels
def test_shared_weight_and_a_bias_per_client() -> None:
    """Inside ``vmap`` an expanded weight has a client axis, like the personal bias."""
    x, w, b = numbers(3, 40, 90), numbers(210, 90), numbers(3, 210)
    with torch.no_grad():
        found = torch.vmap(ops.linear)(x, w.expand(3, 210, 90), b)
    exact = x.double() @ w.double().T + b.double()[:, None]
    assert float((found - exact).abs().max() / exact.abs().max()) < DIGITS


@kernels
def test_expanded_weight_has_a_gradient_per_client() -> None:
    x, w = numbers(3, 40, 90), numbers(210, 90)
    own = w.expand(3, *w.shape).requires_grad_()
    found = torch.vmap(lambda x, w: ops.linear(x, w, None))(x, own)
    (gradient,) = torch.autograd.grad(found.square().sum(), [own])
    assert gradient.shape == own.shape
    expected = 2 * (x.double() @ w.double().T).mT @ x.double()
    assert float((gradient - expected).abs().max() / expected.abs().max()) < DIGITS


@kernels
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All products use the kernel; a client's rows are not contiguous."""
    for name in ("MIN_GRADIENT_PRODUCTS", "MIN_PRODUCTS", "MIN_DEPTH"):
        monkeypatch.setattr(tf32x3, name, 1)
    layer, x = kind(50, 60, batch_first=True).to(DEVICE), numbers(3, 8, 5, 50)
    theirs = copy.deepcopy(layer).cpu().double()
    replace_layers.prepare(layer)
    own = {n: v.detach().expand(3, *v.shape).clone().requires_grad_() for n, v in layer.named_parameters()}
    x.requires_grad_()
    found = torch.vmap(lambda w, x: torch.func.functional_call(layer, w, (x,))[0])(own, x)
    slopes = torch.autograd.grad(found.square().sum(), [x, *own.values()])
    each = [
        torch.autograd.grad(theirs(v)[0].square().sum(), [v, *theirs.parameters()])
        for v in x.detach().cpu().double().requires_grad_()
    ]
    for mine, others in zip(slopes, zip(*each, strict=True), strict=True):
        assert float((mine.cpu() - torch.stack(others)).abs().max() / mine.abs().max()) < 1e-5
    # Forward of all inputs, and step by step; back step by step, then of the inputs and of both weights.
    assert len(calls) == 1 + 5 + 4 + 3


@kernels
def test_32_bit_indices_must_reach_all_values() -> None:
    """Indices within a client's values have 32 bits; those of the cohort have more."""
    a, b = numbers(2, 70, 130), numbers(2, 130, 130)
    apart = torch.empty(1, device=DEVICE).expand(2, 70, 130)
    assert tf32x3.is_supported(a, b, apart)
    far = torch.as_strided(torch.empty(1, device="meta"), (2, 70, 130), (130, 1 << 25, 1))
    assert not tf32x3.is_supported(a, b, far)
