"""Rewrites of traced graphs: the same values, weight gradients the right way round, powers of the step number taken once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.engines.vectorised.graph_rewrites import simplify
from fedloom.engines.vectorised.traced import tidy

aten = torch.ops.aten


def targets(graph: torch.fx.GraphModule) -> list[object]:
    return [n.target for n in graph.graph.nodes if n.op == "call_function"]


def test_gradients_of_linear_layers_are_not_transposed() -> None:
    def gradients(w: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        weights = [t.detach().requires_grad_() for t in (w, v)]

        def loss(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(rows, a)), b).square().sum()

        return list(torch.autograd.grad(torch.vmap(loss)(*weights, x).sum(), weights))

    draw = torch.Generator().manual_seed(0)
    sizes = ((3, 5, 4), (3, 2, 5), (3, 7, 4))
    inputs = [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]
    graph = make_fx(gradients, tracing_mode="fake")(*inputs)
    assert tidy(graph) == [0, 1, 2]
    found, expected = graph(*inputs), gradients(*inputs)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))
    assert all(g.is_contiguous() for g in found)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    assert [n.target for n in output.args[0]] == [aten.bmm.default] * 2


def test_a_product_that_is_read_twice_stays() -> None:
    def both(a: Tensor, b: Tensor) -> list[Tensor]:
        product = torch.bmm(a, b)
        return [product + 1, product.transpose(-1, -2) * 2, a.transpose(1, 2).transpose(2, 1) + 0.5]

    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    graph = make_fx(both, tracing_mode="fake")(a, b)
    simplify(graph)
    assert all(torch.equal(x, y) for x, y in zip(graph(a, b), both(a, b), strict=True))
    assert targets(graph).count(aten.bmm.default) == 1
    assert targets(graph).count(aten.transpose.int) == 1


def test_powers_of_one_number_become_exponentials() -> None:
    def corrections(step: Tensor, many: Tensor) -> list[Tensor]:
        return [1 - 0.9**step, (1 - 0.999**step) ** 0.5, 0.9**many, (-2.0) ** step]

    step, many = torch.tensor(1.0, dtype=torch.float64), torch.tensor([1.0, 2.0])
    graph = make_fx(corrections, tracing_mode="fake")(step, many)
    simplify(graph)
    assert targets(graph).count(aten.exp.default) == 2
    assert targets(graph).count(aten.pow.Scalar) == 2
    for t in (1.0, 2.0, 220.0, 1e5):
        now = torch.tensor(t, dtype=torch.float64)
        found, expected = graph(now, many), corrections(now, many)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(found, expected, strict=True))
