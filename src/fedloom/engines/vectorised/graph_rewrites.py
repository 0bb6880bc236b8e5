"""Rewrites of traced graphs for the CPU. Values stay equal up to rounding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fedloom import devices
from fedloom.torch_internals import is_write

aten = torch.ops.aten


def simplify(graph: fx.GraphModule) -> None:
    """Compute weight gradients without transposes, and powers of the step number once.

    ``(P Q)^T = Q^T P^T``: under ``vmap`` the gradient of a linear layer's weight is a transpose
    of a product, which the optimiser would read column by column. ``b^t = exp(t log b)``: the compiler
    repeats the power of a number in every loop that reads it, but stores an exponential.
    """
    for node in list(graph.graph.nodes):
        if not _on_cpu(node):
            continue
        if _is_transpose(node):
            _untranspose(graph.graph, node)
        elif node.target is aten.pow.Scalar and node.args[0] > 0 and _value(node).dim() == 0:
            with graph.graph.inserting_before(node):
                inner = _call(graph.graph, aten.mul.Tensor, (node.args[1], math.log(node.args[0])), node)
                node.replace_all_uses_with(_call(graph.graph, aten.exp.default, (inner,), node))
    graph.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or is_write(n))
    graph.recompile()


def _untranspose(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the transpose of a transpose, or of a product that nothing else reads."""
    source: Any = node.args[0]
    if _is_transpose(source):
        node.replace_all_uses_with(source.args[0])
    elif source.target is aten.bmm.default and len(source.users) == 1:
        with graph.inserting_before(node):
            right, left = (_transposed(graph, part) for part in source.args)
            product = _call(graph, aten.bmm.default, (left, right), node)
        node.replace_all_uses_with(product)


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if _is_transpose(node):
        source: Any = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    turned = graph.call_function(aten.transpose.int, (node, 1, 2))
    turned.meta["val"] = _value(node).transpose(1, 2)
    return turned


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = _value(like)
    return node


def _is_transpose(node: fx.Node) -> bool:
    """Return whether a node transposes a stack of matrices."""
    if node.target is not aten.transpose.int or not isinstance(node.meta.get("val"), Tensor):
        return False
    axes: Any = node.args[1:3]
    return _value(node).dim() == 3 and {i % 3 for i in axes} == {1, 2}


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and devices.on_host(value)
