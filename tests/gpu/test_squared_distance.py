"""Squared norms, squared distances and inner products of a cohort, and the methods that use them."""

from __future__ import annotations

import pytest
import torch

import fedloom as fl
from fedloom import ops
from fedloom.engines.vectorised import VectorisedEngine
from tests.gpu.helpers import DEVICE, compare, count_calls, kernels, random
from tests.helpers import bn_mlp, everything, federation, fit, gap

pytest.importorskip("triton")
from fedloom.gpu import squared_distance


@kernels
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 7), (3, 2, 3, 4)])
def test_squared_norm(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    compare(torch.vmap(ops.squared_norm)(x), (x**2).flatten(1).sum(1), [x])


SHAPES = [(5, 3), (), (2, 3, 4), (70, 130), (1,)]
"""Shapes of leaves."""


@pytest.fixture(params=[8, 1 << 16], ids=["large leaves", "small leaves"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the size up to which leaves are concatenated."""
    monkeypatch.setattr(squared_distance, "SMALL", request.param)


def leaves(clients: int | None, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    front = () if clients is None else (clients,)
    return [torch.randn((*front, *s), generator=draw, dtype=torch.float64).to(DEVICE) for s in SHAPES]


def along(values: list[torch.Tensor], clients: int | None) -> list[torch.Tensor]:
    """Return the values of each client, flat."""
    return [v.reshape(3, -1) if clients else v.flatten().expand(3, -1) for v in values]


@kernels
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shared", [None, 3], ids=["shared", "per client"])
def test_difference_inner_product(shared: int | None) -> None:
    x, plus, minus = leaves(3, 0), leaves(shared, 1), leaves(3, 2)
    x = [t.requires_grad_() for t in x]
    x[2] = x[2].detach().transpose(1, 3).requires_grad_()  # other strides than the rest
    plus[2], minus[2] = plus[2].transpose(-1, -3), minus[2].transpose(-1, -3)
    ours = torch.vmap(lambda *t: squared_distance.difference_inner_product(*t), in_dims=(0, 0 if shared else None, 0))(
        x, plus, minus
    )
    assert "CohortDifference" in type(ours.grad_fn).__name__
    parts = zip(along(x, 3), along(plus, shared), along(minus, 3), strict=True)
    compare(ours, sum(((p - m) * t).sum(1) for t, p, m in parts), x)


@kernels
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shared", [None, 3], ids=["shared", "per client"])
def test_half_squared_distance(shared: int | None) -> None:
    x, anchor = [t.requires_grad_() for t in leaves(3, 0)], leaves(shared, 1)
    ours = torch.vmap(squared_distance.half_squared_distance, in_dims=(0, 0 if shared else None))(x, anchor)
    assert "CohortDifference" in type(ours.grad_fn).__name__
    compare(ours, sum(((t - a) ** 2).sum(1) / 2 for t, a in zip(along(x, 3), along(anchor, shared), strict=True)), x)


@kernels
@pytest.mark.usefixtures("small")
def test_second_gradient() -> None:
    x, anchor = [t.requires_grad_() for t in leaves(3, 0)], leaves(None, 1)
    ours = torch.vmap(squared_distance.half_squared_distance, in_dims=(0, None))(x, anchor)
    pairs = zip(along(x, 3), along(anchor, None), strict=True)
    theirs = sum(((t - a) ** 2).sum(1) / 2 for t, a in pairs)
    grads = (torch.autograd.grad((y**2).sum(), x, create_graph=True) for y in (ours, theirs))
    lengths = [sum((g**2).reshape(3, -1).sum(1) for g in own) for own in grads]
    compare(*lengths, x)


@kernels
@pytest.mark.usefixtures("small")
def test_strides_of_leaves() -> None:
    gaps = random(5, 3, 8)[:, :, ::2].movedim(1, 0)  # the client axis is the second in memory
    same, repeated = random(5, 4).expand(3, 5, 4), random(3, 5, 1).expand(3, 5, 4)
    x, plus, minus = [gaps, same, repeated], [same, repeated, gaps], [repeated, gaps, same]
    x, plus, minus = ([t.detach() for t in tensors] for tensors in (x, plus, minus))
    x = [t.requires_grad_() for t in x]
    ours = torch.vmap(squared_distance.difference_inner_product)(x, plus, minus)
    parts = zip(along(x, 3), along(plus, 3), along(minus, 3), strict=True)
    compare(ours, sum(((p - m) * t).sum(1) for t, p, m in parts), x)


@kernels
def test_half_precision_is_left_to_torch() -> None:
    def value(x: torch.Tensor) -> torch.Tensor:
        assert squared_distance.half_squared_distance([x], [x]) is None
        assert squared_distance.difference_inner_product([x], [x], [x]) is None
        return x

    torch.vmap(value)(random(3, 4).detach().bfloat16())


@kernels
def test_float32_distance_in_float64() -> None:
    """Differences of 1e-6 around 1, of which float32 keeps one digit."""
    x, anchor = (torch.ones(2, 5000) + torch.rand(2, 5000) * 1e-6 for _ in range(2))
    ours = torch.vmap(lambda x, a: squared_distance.half_squared_distance([x], [a], torch.float64))(
        x.to(DEVICE), anchor.to(DEVICE)
    )
    expected = ((x.double() - anchor.double()) ** 2).sum(1) / 2
    assert ours.dtype == torch.float64
    assert torch.allclose(ours.cpu(), expected, rtol=1e-12, atol=0)


@kernels
def test_anchor_with_gradient_is_left_to_torch() -> None:
    x, anchor = random(3, 4), random(3, 5)[:, :4]

    def value(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        assert squared_distance.half_squared_distance([x], [anchor]) is None
        assert squared_distance.difference_inner_product([x], [anchor], [x]) is None
        return ops.squared_norm(x - anchor)

    torch.vmap(value)(x, anchor)


@kernels
@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedprox(mu=0.5)", "fedmap(sigma2=2.0)", "ditto"])
def test_methods_equal_the_loop_engine(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, squared_distance._CohortDifference)
    how = {"cohort": 2, "optimizer": fl.sgd(0.05), "device": DEVICE, "epochs": 1}
    data = federation((9, 5, 7))
    a, b = (fit(method, bn_mlp(), data, engine=e, **how) for e in ("loop", VectorisedEngine(step="mapped")))
    assert gap(everything(a), everything(b)) < 1e-9
    assert calls
