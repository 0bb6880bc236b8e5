"""Rewrites of a traced graph for the CPU that leave its values as they are, up to rounding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fedloom.torch_internals import is_write

aten = torch.ops.aten


def simplify(graph: fx.GraphModule) -> None:
    """Turns weight gradients the right way round and takes powers of the step number once, not for each element.

    ``(P Q)^T = Q^T P^T``: under ``vmap`` the gradient of a linear layer's weight is the transpose of a product, which the
    optimiser would read across its rows. ``b^t = exp(t log b)``: the compiler repeats a power of one number in every loop
    that reads it, an exponential it keeps.
    """
    for node in list(graph.graph.nodes):
        if not _on_cpu(node):
            continue
        if _swaps(node):
            _turned(graph.graph, node)
        elif node.target is aten.pow.Scalar and node.args[0] > 0 and _value(node).dim() == 0:
            with graph.graph.inserting_before(node):
                inner = _call(graph.graph, aten.mul.Tensor, (node.args[1], math.log(node.args[0])), node)
                node.replace_all_uses_with(_call(graph.graph, aten.exp.default, (inner,), node))
    graph.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or is_write(n))
    graph.recompile()


def _turned(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces the transpose of a transpose, or of a product that nothing else reads."""
    source: Any = node.args[0]
    if _swaps(source):
        node.replace_all_uses_with(source.args[0])
    elif source.target is aten.bmm.default and len(source.users) == 1:
        with graph.inserting_before(node):
            right, left = (_transposed(graph, part) for part in source.args)
            made = _call(graph, aten.bmm.default, (left, right), node)
        node.replace_all_uses_with(made)


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if _swaps(node):
        source: Any = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    made = graph.call_function(aten.transpose.int, (node, 1, 2))
    made.meta["val"] = _value(node).transpose(1, 2)
    return made


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    made = graph.call_function(target, args)
    made.meta["val"] = _value(like)
    return made


def _swaps(node: fx.Node) -> bool:
    """Whether a node exchanges the last two axes of a stack of matrices."""
    if node.target is not aten.transpose.int or not isinstance(node.meta.get("val"), Tensor):
        return False
    axes: Any = node.args[1:3]
    return _value(node).dim() == 3 and {i % 3 for i in axes} == {1, 2}


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and value.device.type == "cpu"
