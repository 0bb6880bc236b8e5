"""Linear layers, cross-entropies, lengths and inner products of a cohort on CUDA, as torch has them client by client."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fedloom as fl
from fedloom import ops
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.gpu import products
from tests.engines.test_kernels import DEVICE, compare, cuda, random
from tests.helpers import bn_mlp, everything, federation, fit, gap


@cuda
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 11, 6, 7), (2, 2, 70, 129), (1, 2, 1, 3), (2, 3, 4200)])
@pytest.mark.parametrize("unused", [-100, 2])
def test_cross_entropies(shape: tuple[int, ...], unused: int) -> None:
    z = (random(*shape) * 30).detach().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(0, shape[2], (*shape[:2], *shape[3:]), generator=draw).to(DEVICE)
    y.view(-1)[0] = unused
    expected = F.cross_entropy(z.flatten(0, 1), y.flatten(0, 1), ignore_index=unused, reduction="none").view(y.shape)
    launched = torch.vmap(lambda z, y: ops.cross_entropies(z, y, unused))(z, y)
    assert "CohortCrossEntropy" in type(launched.grad_fn).__name__
    compare(launched, expected, [z])


@cuda
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    x, w, b = random(3, *shape), random(3, 4, 5), random(3, 4) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    found = torch.vmap(lambda *each: ops.linear(each[0], each[1], each[2] if bias else None))(*inputs)
    assert "CohortLinear" in type(found.grad_fn).__name__
    expected = torch.stack([F.linear(x[i], w[i], None if b is None else b[i]) for i in range(3)])
    (gradient,) = torch.autograd.grad(found.sum(), [w], retain_graph=True)
    compare(found, expected, inputs)
    assert gradient.is_contiguous(), "optimisers read it beside the weights"


@cuda
def test_linear_on_rows_that_all_clients_share() -> None:
    x, w, b = random(7, 5), random(3, 4, 5), random(3, 4)
    found = torch.vmap(ops.linear, in_dims=(None, 0, 0))(x, w, b)
    assert "CohortLinear" in type(found.grad_fn).__name__
    compare(found, torch.stack([F.linear(x, w[i], b[i]) for i in range(3)]), [x, w, b])


@cuda
def test_a_layer_behind_may_work_in_place() -> None:
    x, w, z = random(3, 2, 7, 5), random(3, 4, 5), random(3, 4, 5)
    y = torch.zeros(3, 4, dtype=torch.long, device=DEVICE)
    compare(torch.vmap(lambda x, w: ops.linear(x, w, None).relu_())(x, w), (x @ w.mT[:, None]).relu(), [x, w])
    found = torch.vmap(lambda z, y: ops.cross_entropies(z, y).mul_(2))(z, y)
    compare(found, 2 * F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(3, 4), [z])


@cuda
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 7), (3, 2, 3, 4)])
def test_squared_length(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    compare(torch.vmap(ops.squared_length)(x), (x**2).flatten(1).sum(1), [x])


SHAPES = [(5, 3), (), (2, 3, 4), (70, 130), (1,)]
"""The fourth is longer than what is joined in these tests, and than a program takes."""


def leaves(clients: int | None, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    front = () if clients is None else (clients,)
    return [torch.randn((*front, *s), generator=draw, dtype=torch.float64).to(DEVICE) for s in SHAPES]


def along(values: list[torch.Tensor], clients: int | None) -> list[torch.Tensor]:
    """Values of every client, flat."""
    return [v.reshape(3, -1) if clients else v.flatten().expand(3, -1) for v in values]


@cuda
@pytest.mark.parametrize("shared", [None, 3], ids=["everybody's", "each its own"])
def test_inner_products(shared: int | None) -> None:
    x, plus, minus = leaves(3, 0), leaves(shared, 1), leaves(3, 2)
    x = [t.requires_grad_() for t in x]
    x[2] = x[2].detach().transpose(1, 3).requires_grad_()  # lies otherwise than the rest
    plus[2], minus[2] = plus[2].transpose(-1, -3), minus[2].transpose(-1, -3)
    found = torch.vmap(lambda *t: products.inner_products(*t), in_dims=(0, 0 if shared else None, 0))(x, plus, minus)
    assert "CohortPull" in type(found.grad_fn).__name__
    parts = zip(along(x, 3), along(plus, shared), along(minus, 3), strict=True)
    compare(found, sum(((p - m) * t).sum(1) for t, p, m in parts), x)


@cuda
@pytest.mark.parametrize("shared", [None, 3], ids=["everybody's", "each its own"])
def test_half_squares(shared: int | None) -> None:
    x, anchor = [t.requires_grad_() for t in leaves(3, 0)], leaves(shared, 1)
    found = torch.vmap(products.half_squares, in_dims=(0, 0 if shared else None))(x, anchor)
    assert "CohortPull" in type(found.grad_fn).__name__
    compare(found, sum(((t - a) ** 2).sum(1) / 2 for t, a in zip(along(x, 3), along(anchor, shared), strict=True)), x)


@cuda
def test_half_squares_of_single_precision_in_double() -> None:
    """Gaps of 1e-6 around 1, of which single precision would keep a digit; their sum is of double precision."""
    x, anchor = (torch.ones(2, 5000) + torch.rand(2, 5000) * 1e-6 for _ in range(2))
    found = torch.vmap(lambda x, a: products.half_squares([x], [a], torch.float64))(x.to(DEVICE), anchor.to(DEVICE))
    expected = ((x.double() - anchor.double()) ** 2).sum(1) / 2
    assert found.dtype == torch.float64
    assert torch.allclose(found.cpu(), expected, rtol=1e-12, atol=0)


@cuda
def test_an_anchor_that_moves_is_left_to_torch() -> None:
    x, anchor = random(3, 4), random(3, 5)[:, :4]

    def value(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        assert products.half_squares([x], [anchor]) is None
        assert products.inner_products([x], [anchor], [x]) is None
        return ops.squared_length(x - anchor)

    torch.vmap(value)(x, anchor)


@cuda
@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedprox(mu=0.5)", "fedmap(sigma2=2.0)", "ditto"])
def test_methods_with_pulls_as_the_loop_engine_has_them(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, plain = [], products._CohortPull.apply

    def apply(*args):  # type: ignore[no-untyped-def]
        launched.append(1)
        return plain(*args)

    monkeypatch.setattr(products._CohortPull, "apply", apply)
    how = {"cohort": 2, "optimizer": fl.sgd(0.05), "device": DEVICE, "epochs": 1}
    data = federation((9, 5, 7))
    a, b = (fit(method, bn_mlp(), data, engine=e, **how) for e in ("loop", VectorisedEngine(step="mapped")))
    assert gap(everything(a), everything(b)) < 1e-9
    assert launched
