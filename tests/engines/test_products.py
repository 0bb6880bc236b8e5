"""Linear layers, cross-entropies, lengths and inner products of a cohort on CUDA, as torch has them client by client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import fedloom as fl
from fedloom import kernels
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.kernels import products
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
    launched = torch.vmap(lambda z, y: kernels.cross_entropies(z, y, unused))(z, y)
    assert "CohortCrossEntropy" in type(launched.grad_fn).__name__
    compare(launched, expected, [z])


@cuda
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    x, w, b = random(3, *shape), random(3, 4, 5), random(3, 4) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    found = torch.vmap(lambda *each: kernels.linear(each[0], each[1], each[2] if bias else None))(*inputs)
    assert "CohortLinear" in type(found.grad_fn).__name__
    expected = torch.stack([F.linear(x[i], w[i], None if b is None else b[i]) for i in range(3)])
    (gradient,) = torch.autograd.grad(found.sum(), [w], retain_graph=True)
    compare(found, expected, inputs)
    assert gradient.is_contiguous(), "optimisers read it beside the weights"


@cuda
def test_linear_on_rows_that_all_clients_share() -> None:
    x, w, b = random(7, 5), random(3, 4, 5), random(3, 4)
    found = torch.vmap(kernels.linear, in_dims=(None, 0, 0))(x, w, b)
    assert "CohortLinear" in type(found.grad_fn).__name__
    compare(found, torch.stack([F.linear(x, w[i], b[i]) for i in range(3)]), [x, w, b])


@cuda
def test_a_layer_behind_may_work_in_place() -> None:
    x, w, z = random(3, 2, 7, 5), random(3, 4, 5), random(3, 4, 5)
    y = torch.zeros(3, 4, dtype=torch.long, device=DEVICE)
    compare(torch.vmap(lambda x, w: kernels.linear(x, w, None).relu_())(x, w), (x @ w.mT[:, None]).relu(), [x, w])
    found = torch.vmap(lambda z, y: kernels.cross_entropies(z, y).mul_(2))(z, y)
    compare(found, 2 * F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(3, 4), [z])


@cuda
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 7), (3, 2, 3, 4)])
def test_squared_length(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    compare(torch.vmap(kernels.squared_length)(x), (x**2).flatten(1).sum(1), [x])


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
def test_inner_products(shared: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHORT", 100)
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
def test_half_squares(shared: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHORT", 100)
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
def test_half_squares_of_all_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHORT", 100)
    x, anchor = leaves(3, 0), leaves(None, 1)
    of_each = torch.vmap(lambda *own: products.half_squares(own, anchor, torch.float64))(*x)
    assert torch.equal(products.half_squares_of_all(x, anchor, torch.float64), of_each)


@cuda
def test_an_anchor_that_moves_is_left_to_torch() -> None:
    x, anchor = random(3, 4), random(3, 5)[:, :4]

    def value(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        assert products.half_squares([x], [anchor]) is None
        assert products.inner_products([x], [anchor], [x]) is None
        return kernels.squared_length(x - anchor)

    torch.vmap(value)(x, anchor)


@cuda
@pytest.mark.parametrize("fill", [True, False])
def test_what_pulls_at_large_leaves_is_added_to_their_gradient_last(
    fill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SHORT", 100)
    added, plain = list[bool](), products.Pull.onto
    monkeypatch.setattr(products.Pull, "onto", lambda p, g: added.append(g is not None) or plain(p, g))
    x, plus, minus = ([random(3, 12, 11), random(3, 2), random(3, 13, 10), random(3, 3)] for _ in range(3))
    plus, minus = ([t.detach() * k for t in own] for k, own in ((2.0, plus), (0.5, minus)))

    def value(x: list[torch.Tensor], plus: list[torch.Tensor], minus: list[torch.Tensor]) -> torch.Tensor:
        pulls = products.inner_products(x[:3], plus[:3], minus[:3]), products.half_squares(x[:3], minus[:3])
        return (x[0] ** 2).sum() * 3 + (x[1] ** 3).sum() + 0.5 * pulls[0] + 2 * pulls[1]  # type: ignore[operator]

    total = torch.vmap(value)(x, plus, minus).sum()
    expected = torch.autograd.grad(total, x, allow_unused=True, materialize_grads=fill, retain_graph=True)
    assert not added
    with products.put_off() as pulls:
        total = torch.vmap(value)(x, plus, minus).sum()
        rest = torch.autograd.grad(total, x, allow_unused=True, materialize_grads=fill)
    found = products.completed(rest, x, pulls)
    assert added.count(False) == (not fill)  # of the third leaf, which has no other gradient
    assert added.count(True) == 6 - (not fill)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert torch.equal(products.completed(rest[2:3], x[2:3], pulls)[0], found[2])  # type: ignore[arg-type]


@cuda
def test_what_is_put_off_is_a_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in another thread has its gradients whole meanwhile."""
    monkeypatch.setattr(products, "SHORT", 100)
    x, plus, minus = (random(3, 12, 11) for _ in range(3))

    def gradient() -> torch.Tensor:
        value = torch.vmap(lambda *t: products.inner_products(*([one] for one in t)))(x, plus.detach(), minus.detach())
        return torch.autograd.grad(value.sum(), x)[0]

    with products.put_off() as pulls, ThreadPoolExecutor(1) as other:
        found = other.submit(gradient).result()
    assert not pulls
    assert torch.allclose(found, plus - minus)


@cuda
@pytest.mark.parametrize("short", [4, 1 << 16])
@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedprox(mu=0.5)", "fedmap(sigma2=2.0)", "ditto"])
def test_methods_with_pulls_as_the_loop_engine_has_them(
    method: str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SHORT", short)
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
