"""The private and experimental parts of torch that the package uses, except on a GPU.

Each name says which public API is missing. A new release of torch may change any of them:
``tests/core/test_torch_internals.py`` checks them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = [
    "UNSAFE_VIEW",
    "LiveWeightsRNN",
    "add_batch_axis",
    "base_of_view",
    "check_input_dim",
    "clear_hooks",
    "compile_graph",
    "convolve",
    "innermost_vmap",
    "is_batched",
    "is_differentiated",
    "is_write",
    "is_wrapped",
    "registries",
    "remove_batch_axis",
    "reset_flat_weights",
    "trace_graph",
    "unwrapped",
    "vmap_level",
    "without_vmap_rule",
]

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view in traced graphs; it has no public name."""


# Wrapped tensors. torch.func wraps the tensors inside `vmap` and `grad`, one wrapper for each
# level, and has no public function that tells a wrapped tensor from a plain one.


def is_wrapped(x: Tensor) -> bool:
    """Return whether a tensor is inside ``vmap`` or ``grad`` of torch.func."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def is_batched(x: Tensor) -> bool:
    """Return whether the outer wrapper of a tensor is that of ``vmap``: one client's part of it."""
    return bool(torch._C._functorch.is_batchedtensor(x))


def is_differentiated(x: Tensor) -> bool:
    """Return whether the outer wrapper of a tensor is that of ``grad``."""
    return bool(torch._C._functorch.is_gradtrackingtensor(x))


def unwrapped(x: Tensor) -> Tensor:
    """Return a wrapped tensor without its outer wrapper."""
    value: Tensor = torch._C._functorch.get_unwrapped(x)
    return value


# The parts of `vmap`. torch.vmap flattens its arguments and results in Python, which takes longer
# than the operations of a small network.


@contextmanager
def vmap_level(size: int) -> Iterator[int]:
    """Open a level of ``vmap`` over ``size`` elements that draw different noise."""
    lazy_load_decompositions()
    try:
        yield torch._C._functorch._vmap_increment_nesting(size, "different")
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def add_batch_axis(value: Tensor, level: int) -> Tensor:
    """Wrap a tensor for a level of ``vmap``: axis 0 is the client."""
    wrapped: Tensor = torch._C._functorch._add_batch_dim(value, 0, level)
    return wrapped


def remove_batch_axis(value: Tensor, level: int, size: int) -> Tensor:
    """Unwrap a result of a level of ``vmap``; a result that is equal for all clients is expanded."""
    result: Tensor = torch._C._functorch._remove_batch_dim(value, level, size, 0)
    return result


# Rules for `vmap`. torch.library.register_vmap replaces a rule, but a rule can read neither the
# level of `vmap` that it is called in, nor call the operator without itself.


def innermost_vmap() -> Any:
    """Return the innermost ``vmap``: ``randomness()``, ``batch_size()`` and ``level()``."""
    return retrieve_current_functorch_interpreter()


def without_vmap_rule() -> Any:
    """Return a context in which operators skip rules of the key ``FuncTorchVmapMode``."""
    key = torch._C.DispatchKey.FuncTorchVmapMode
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


# Traces. The public torch.export and torch.compile trace modules and Python bytecode; only
# `make_fx` records the operations of a function that calls `vmap` and `autograd.grad`.


def trace_graph(fn: Callable[..., Any], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Record the operations of a function of tensors, without computing them.

    Tensors that ``fn`` holds itself become constants of the graph.
    """
    traced = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph: fx.GraphModule = traced(*[t.detach() for t in arguments])
    return graph


def compile_graph(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a traced graph for arguments of these shapes with inductor, torch's compiler.

    The public torch.compile would analyse the graph again and check its arguments at every call,
    which takes longer than a step. Inductor looks for code on disk only in a tracing context.
    """
    # Imported here: symbolic_shapes imports sympy, which takes half a second.
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    options = {"size_asserts": False, "alignment_asserts": False}
    fake = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(fake)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about the compiler's own code
        shapes: list[Any] = [fake.from_tensor(t, static_shapes=True) for t in arguments]
        compiled: Callable[..., Any] = torch._inductor.compile(graph, shapes, options=options)
    return compiled


def is_write(node: fx.Node) -> bool:
    """Return whether an operation of a graph changes one of its arguments.

    The schema of an operator has no public name.
    """
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def base_of_view(value: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of; None if it is no view. No public name exists."""
    return value._base


# Modules.


def registries(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries in which a module holds its own parameters and buffers.

    Public functions copy them; ``setattr`` refuses a plain tensor in place of a parameter.
    """
    return module._parameters, module._buffers


def clear_hooks(module: nn.Module) -> None:
    """Remove all forward hooks of a module. In public, only the handle of a hook removes it."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def check_input_dim(norm: nn.Module, x: Tensor) -> None:
    """Raise torch's error for an input that a batch norm does not accept."""
    norm._check_input_dim(x)  # type: ignore[operator]


def convolve(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a convolution with other weights. ``F.conv2d`` knows no padding modes."""
    y: Tensor = layer._conv_forward(x, weight, bias)
    return y


class LiveWeightsRNN(nn.RNNBase):
    """A recurrent layer that reads its weights at every call.

    torch reads a list of its own, which does not follow when tensors of the module are replaced.
    """

    @property
    def _flat_weights(self) -> list[Any]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: list[Any]) -> None:
        pass

    def flat_weights(self) -> list[Any]:
        """Return the weights in torch's order; None where there is no bias."""
        return self._flat_weights


def reset_flat_weights(layer: nn.RNNBase) -> None:
    """Rebuild torch's list of the weights of a recurrent layer."""
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
