"""Products of float32 as three of TF32: to float32's digits, in whatever pieces, and where they are used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import numerics, ops, swaps
from fedloom.gpu import products
from tests.engines.test_kernels import DEVICE, cuda

DIGITS = 1e-6
"""Of the largest: what sums of some hundred float32 keep."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@cuda
@pytest.mark.parametrize("programs", [1, 64], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("clients", "rows", "columns", "depth"),
    [(2, 50, 70, 320), (3, 130, 10, 257), (1, 64, 64, 64), (2, 5, 3, 1000)],
)
def test_products_keep_the_digits(
    clients: int, rows: int, columns: int, depth: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.gpu import threefold

    monkeypatch.setattr(threefold, "PROGRAMS", programs)
    a, b, bias = numbers(clients, rows, depth), numbers(clients, columns, depth), numbers(clients, columns)
    crossed = a.mT.contiguous().mT, b.mT.contiguous().mT
    for left, right, shift in ((a, b, bias), (a, b, None), (*crossed, bias), (a, crossed[1], None)):
        out = torch.full((clients, rows, columns), torch.nan, device=DEVICE)
        assert threefold.product(left, right, shift, out) is out
        exact = a.double() @ b.double().mT + (0 if shift is None else shift.double()[:, None])
        assert float((out - exact).abs().max() / exact.abs().max()) < DIGITS


@cuda
def test_products_are_added_to_rows_that_lie_apart() -> None:
    from fedloom.gpu import threefold

    a, b, begun = numbers(2, 70, 300), numbers(2, 66, 300), numbers(70, 2, 66)
    for onto in (True, False):
        out = begun.clone()
        threefold.product(a, b, None, out.transpose(0, 1), onto=onto)
        exact = a.double() @ b.double().mT + (begun.double().transpose(0, 1) if onto else 0)
        assert float((out.transpose(0, 1) - exact).abs().max() / exact.abs().max()) < DIGITS


@cuda
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
def test_what_is_not_finite_stays_so() -> None:
    from fedloom.gpu import threefold

    a, b = numbers(1, 70, 40).abs(), numbers(1, 30, 40).abs()
    a[0, 3, 7], a[0, 5, 2], b[0, 4, 0] = torch.inf, torch.nan, -torch.inf
    found = threefold.product(a, b, None, torch.empty(1, 70, 30, device=DEVICE))
    exact = a.double() @ b.double().mT
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.isinf(), exact.isinf())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the left factors of all products from now on."""
    from fedloom.gpu import threefold

    found: list[tuple[int, ...]] = []
    plain = threefold.product

    def product(a: Tensor, *rest: Tensor, onto: bool = False) -> Tensor:
        found.append(tuple(a.shape))
        return plain(a, *rest, onto=onto)

    monkeypatch.setattr(threefold, "product", product)
    return found


@cuda
@pytest.mark.parametrize(
    ("shape", "outputs", "many"), [((2, 70, 90), 170, False), ((2, 7, 10, 90), 170, True)], ids=["few", "many"]
)
def test_linear_layers(
    shape: tuple[int, ...], outputs: int, many: bool, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, and where there is much to multiply both gradients, as torch has them in float64."""
    monkeypatch.setattr(products, "ROWS", 1 if many else 1 << 20)
    monkeypatch.setattr(products, "CROSSED", 1 if many else 1 << 40)
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


@cuda
def test_inputs_that_lie_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of inputs whose client axis is not in front, or which are turned, is not laid out as they are."""
    monkeypatch.setattr(products, "ROWS", 1)
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


@cuda
@pytest.mark.parametrize("rows", [1, 1 << 20], ids=["turned", "layer"])
def test_gradients_of_gradients(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROWS", rows)
    given = numbers(2, 70, 90), numbers(2, 170, 90), numbers(2, 170)
    found = []
    for layer, dtype in ((ops.linear, torch.float32), (torch.nn.functional.linear, torch.float64)):
        x, w, b = (t.to(dtype).requires_grad_() for t in given)
        y = torch.vmap(layer)(x, w, b)
        (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((dx**2).sum(), (x, w, b)))
    for mine, other in zip(*found, strict=True):
        assert float((mine - other).abs().max() / other.abs().max()) < DIGITS


@cuda
def test_where_three_products_serve() -> None:
    a, b = numbers(2, 70, 130), numbers(2, 130, 130)
    assert products._threefold(a, b)
    assert not products._threefold(a.double(), b.double())
    assert not products._threefold(a.bfloat16(), b.bfloat16())
    assert not products._threefold(a[:, :, :60], b[:, :, :60])  # few summands
    assert not products._threefold(a[:, :20], b[:, :70])  # few products
    assert products._threefold(numbers(2, 40, 130), numbers(2, 210, 130))
    assert not products._threefold(numbers(100, 40, 70), numbers(100, 100, 70))  # few rows, but enough columns
    assert not products._threefold(numbers(1, 1, 64).expand(1, 1 << 23, 64), numbers(1, 64, 64))  # more than a grid has
    with numerics.tf32(products=True):
        assert not products._threefold(a, b)


@cuda
def test_a_layer_that_all_clients_share(calls: list[tuple[int, ...]]) -> None:
    """Without a gradient all of their rows are one product; with one, or of few numbers, torch's."""
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


@cuda
def test_one_weight_and_a_bias_for_each() -> None:
    """A personal bias behind a weight that all clients have: seen from inside both are a client's own."""
    x, w, b = numbers(3, 40, 90), numbers(210, 90), numbers(3, 210)
    with torch.no_grad():
        found = torch.vmap(ops.linear)(x, w.expand(3, 210, 90), b)
    exact = x.double() @ w.double().T + b.double()[:, None]
    assert float((found - exact).abs().max() / exact.abs().max()) < DIGITS


@cuda
def test_a_cohort_that_begins_with_one_weight() -> None:
    """Seen as each client's own, though there is one in memory: each has a gradient of its own."""
    x, w = numbers(3, 40, 90), numbers(210, 90)
    own = w.expand(3, *w.shape).requires_grad_()
    found = torch.vmap(lambda x, w: ops.linear(x, w, None))(x, own)
    (gradient,) = torch.autograd.grad(found.square().sum(), [own])
    assert gradient.shape == own.shape
    expected = 2 * (x.double() @ w.double().T).mT @ x.double()
    assert float((gradient - expected).abs().max() / expected.abs().max()) < DIGITS


@cuda
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their products, of which a client's rows lie far apart."""
    for name in ("CROSSED", "LARGE", "DEEP"):
        monkeypatch.setattr(products, name, 1)
    layer, x = kind(50, 60, batch_first=True).to(DEVICE), numbers(3, 8, 5, 50)
    theirs = copy.deepcopy(layer).cpu().double()
    swaps.prepare(layer)
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


@cuda
def test_rows_that_lie_too_far_apart() -> None:
    """Addresses within what a client has are of 32 bits; those of a cohort are not."""
    a, b = numbers(2, 70, 130), numbers(2, 130, 130)
    apart = torch.empty(1, device=DEVICE).expand(2, 70, 130)
    assert products._threefold(a, b, apart)
    far = torch.as_strided(torch.empty(1, device="meta"), (2, 70, 130), (130, 1 << 25, 1))
    assert not products._threefold(a, b, far)
