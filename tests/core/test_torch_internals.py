"""The private parts of torch do on the installed release what the package expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import torch_internals as internals


def test_wrapped_tensors() -> None:
    """Inside ``vmap`` and ``grad``, one in the other, tensors know their levels."""
    kinds = []

    def record(x: Tensor) -> Tensor:
        inner = internals.unwrapped(x)
        kinds.append((internals.is_batched(x), internals.is_differentiated(x), internals.is_batched(inner)))
        assert internals.is_wrapped(x)
        return x.sum()

    torch.vmap(record)(torch.ones(2, 3))
    torch.func.grad(record)(torch.ones(3))
    torch.vmap(torch.func.grad(record))(torch.ones(2, 3))
    assert kinds == [(True, False, False), (False, True, False), (False, True, True)]
    assert not internals.is_wrapped(torch.ones(3))


def test_axis_of_a_vmap_can_be_added() -> None:
    """A shared tensor becomes one of each client."""

    def fn(x: Tensor) -> Tensor:
        level = internals.innermost_vmap()
        assert (level.randomness(), level.batch_size()) == ("different", 2)
        return x + internals.add_batch_axis(torch.tensor([[1.0], [2.0]]), level.level())

    result = torch.vmap(fn, randomness="different")(torch.zeros(2, 1))
    assert torch.equal(result, torch.tensor([[1.0], [2.0]]))


def test_the_parts_of_vmap_make_a_vmap() -> None:
    """Results that depend on no argument are expanded, and noise differs, as in ``torch.vmap``."""
    x = torch.arange(3.0)
    with internals.vmap_level(3) as level:
        row = internals.add_batch_axis(x, level)
        results = [row * 2, torch.ones(()), torch.rand(())]
        doubled, ones, noise = [internals.remove_batch_axis(r, level, 3) for r in results]
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(ones, torch.ones(3))
    assert len(set(noise.tolist())) == 3
    assert not internals.is_wrapped(doubled)


def test_rules_are_skipped_inside_the_context() -> None:
    """A rule of the key calls its own operator without being called again."""
    library: Any = torch.library.Library("fedloom_internals", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    calls = []
    operator: Any = torch.ops.fedloom_internals.twice.default

    def rule(x: Tensor) -> Tensor:
        calls.append(x)
        with internals.without_vmap_rule():
            return operator(x)  # type: ignore[no-any-return]

    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    library.impl("twice", rule, "FuncTorchVmapMode")
    assert torch.equal(torch.vmap(lambda x: operator(x))(torch.ones(2)), torch.full((2,), 2.0))
    assert len(calls) == 1


def test_traces_record_a_gradient_under_vmap() -> None:
    """The graph has the values of the function, and its in-place operations are known as writes."""
    held = torch.full((3,), 2.0)

    def fn(x: Tensor, to: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.vmap(lambda row: (row * row * held).sum())(x).sum(), x)
        to.copy_(gradient.view(6).view(2, 3))
        return []

    arguments = [torch.ones(2, 3), torch.zeros(2, 3)]
    graph = internals.trace_graph(fn, arguments)
    assert torch.equal(arguments[1], torch.zeros(2, 3)), "tracing computes nothing"
    writes = [node.target for node in graph.graph.nodes if internals.is_write(node)]
    assert writes == [torch.ops.aten.copy_.default]
    graph(*arguments)
    assert torch.equal(arguments[1], torch.full((2, 3), 4.0))
    assert internals.UNSAFE_VIEW is torch.ops.aten._unsafe_view.default


@pytest.mark.slow
def test_graphs_are_compiled() -> None:
    """Inductor's code changes tensors in place as the graph does."""
    arguments = [torch.ones(8), torch.zeros(8)]
    graph = internals.trace_graph(lambda x, to: [to.copy_(x.sin() + 1)][:0], arguments)
    internals.compile_graph(graph, arguments)(*arguments)
    assert torch.allclose(arguments[1], arguments[0].sin() + 1)


def test_views_know_their_base() -> None:
    """A row refers to the whole tensor, which is no view."""
    whole = torch.ones(2, 3)
    assert internals.base_of_view(whole[1]) is whole
    assert internals.base_of_view(whole) is None


def test_registries_are_the_module_itself() -> None:
    """What is written into them is what the module computes with."""
    layer = nn.Linear(1, 1, bias=False)
    parameters, buffers = internals.registries(layer)
    parameters["weight"] = torch.full((1, 1), 3.0)
    assert layer(torch.ones(1)).item() == 3
    assert buffers == {}


def test_hooks_are_removed() -> None:
    """Hooks before and after the forward pass."""
    layer, calls = nn.Identity(), []
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    internals.clear_hooks(layer)
    layer(torch.ones(1))
    assert not calls


def test_batch_norm_refuses_other_shapes() -> None:
    """The error is torch's own."""
    internals.check_input_dim(nn.BatchNorm2d(3), torch.ones(2, 3, 4, 4))
    with pytest.raises(ValueError, match="expected 4D input"):
        internals.check_input_dim(nn.BatchNorm2d(3), torch.ones(2, 3))


def test_convolutions_keep_their_padding_mode() -> None:
    """With the layer's own weight the result is the layer's."""
    layer, x = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), torch.rand(1, 1, 5, 5)
    assert torch.equal(internals.convolve(layer, x, layer.weight, layer.bias), layer(x))


def test_recurrent_layers_read_their_weights_when_they_run() -> None:
    """After the tensors were replaced; torch's list can be rebuilt."""

    class Live(internals.LiveWeightsRNN, nn.GRU):
        """A layer with live weights."""

    layer, x = nn.GRU(2, 3), torch.rand(4, 1, 2)
    layer.__class__ = Live
    before = layer(x)[0]
    for name, value in list(layer.named_parameters()):
        internals.registries(layer)[0][name] = value.detach() * 2
    assert not torch.equal(layer(x)[0], before)
    layer.__class__ = nn.GRU
    internals.reset_flat_weights(layer)
    assert not torch.equal(layer(x)[0], before)
    assert len(layer._flat_weights) == 4
