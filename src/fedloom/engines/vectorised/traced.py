"""Traced gradients: the mapped objective and its backward pass as one flat list of tensor operations.

Tracing runs the client code once; what remains has no Python of the model, of terms or of ``vmap`` in it. A trace holds
for one phase and one set of shapes. What changes from round to round as a Python number (round, learning rate) would
be baked in, so a trace notes which of these the client code read and is used only while they have the same values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedloom.engines.vectorised.algebra import is_write, simplify
from fedloom.engines.vectorised.mapping import over_clients
from fedloom.stepping import objective
from fedloom.types import Memory, Seen

if TYPE_CHECKING:
    from fedloom.client import Desk
    from fedloom.engines.vectorised.stepper import Known, MappedStepper

TRACE_STEPS = 200
"""A shape that occurs this often in a run is worth a trace."""
RETRACES = 3
CHANGING = ("round", "lr", "rates")


def watched(desk: Desk, common: dict[str, Any], touched: set[str]) -> Callable[..., Seen]:
    """``desk.see`` with what everybody receives passed in, noting which changing Python numbers are read."""

    class Watched(Seen):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name in CHANGING:
                touched.add(name)
            return super().__getattribute__(name)

    def see(private: dict[str, Any]) -> Seen:
        plain = desk.see(private)
        values = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
        return Watched(**(values | common))

    return see


def common_of(desk: Desk) -> dict[str, Any]:
    """What everybody receives, as arguments of a trace."""
    post = desk.post
    return {"received": post.leaves, "broadcast": post.broadcast, "gate": post.gate}


def constants(desk: Desk, names: Iterable[str]) -> tuple[Hashable, ...]:
    """Present values of the numbers that a trace has baked in."""
    now = {"round": desk.post.round, "lr": desk.lr, "rates": tuple(sorted(desk.rates.items()))}
    return tuple(now[n] for n in sorted(names))


@dataclasses.dataclass(slots=True)
class Trace:
    """A traced gradient, ready for use: ``(packed, carry, step) -> (losses, gradients, carry)``.

    Args:
        run: the operations.
        kept: which of the flat arguments they use.
        used: which of the trained leaves have a gradient.
        touched: changing numbers that are baked in, and their values.
    """

    run: Callable[..., Any]
    kept: list[int]
    used: list[bool]
    touched: frozenset[str]
    values: tuple[Hashable, ...]


class Attached:
    """A trace with the arguments of a phase that stay the same from step to step."""

    def __init__(self, trace: Trace, fixed: list[Any]) -> None:
        self.trace, self.count = trace, len(fixed)
        self.run, self.used = trace.run, trace.used
        self.fixed = [fixed[i] for i in trace.kept if i < self.count]
        self.moving = [i - self.count for i in trace.kept if i >= self.count]

    @torch.no_grad()
    def __call__(
        self, packed: dict[str, Any], carry: Memory, step: Tensor
    ) -> tuple[Tensor, list[Tensor | None], Memory]:
        """Losses, gradients and the terms' carried values."""
        flat = pytree.tree_leaves((packed, step, carry))
        found = iter(self.run(*self.fixed, *[flat[i] for i in self.moving]))
        losses = next(found)
        grads = [next(found) if used else None for used in self.used]
        return losses, grads, pytree.tree_unflatten(list(found), pytree.tree_structure(carry)) if carry else carry


class Traces:
    """Traces of a run.

    Args:
        least: steps in a run from which on a shape is traced.
        compiled: whether whole steps are compiled where that is possible.
    """

    def __init__(self, least: int = TRACE_STEPS, compiled: bool = False) -> None:
        self.least, self.compiled = least, compiled
        self.notes: list[str] = []
        self.times: dict[Hashable, int] = {}
        self.owners: list[object] = []
        self.used: dict[Hashable, Known] = {}
        self.programs: dict[Hashable, Any] = {}
        self._known: dict[Hashable, Trace | None] = {}

    def of(self, stepper: MappedStepper, packed: dict[str, Any], step: Tensor, planned: int) -> Attached | None:
        """The trace of the present step, made if it is worth it; None where the step is better mapped."""
        if planned < self.least:
            return None
        desk = stepper.desk
        fixed, fixed_spec = pytree.tree_flatten((stepper.leaves, stepper.private, common_of(desk)))
        moving, moving_spec = pytree.tree_flatten((packed, step, stepper.carry))
        shapes = tuple((t.shape, t.dtype) for t in [*fixed, *moving])
        key = (id(desk.bound), stepper.phase.phase.name, desk.participants[0].key, fixed_spec, moving_spec, shapes)
        trace = self._known.get(key)
        if trace is None and key in self._known:
            return None
        if trace is None or constants(desk, trace.touched) != trace.values:
            self.times[key] = self.times.get(key, 0) + 1
            trace = None
            if self.times[key] <= RETRACES:
                trace = self._make(stepper, fixed, fixed_spec, moving, moving_spec)
            self._known[key] = trace
            self.owners.append(desk.bound)
        return None if trace is None else Attached(trace, fixed)

    def _make(
        self, stepper: MappedStepper, fixed: list[Any], fixed_spec: Any, moving: list[Any], moving_spec: Any
    ) -> Trace | None:
        desk, phase = stepper.desk, stepper.phase
        touched: set[str] = set()
        used: list[bool] = []

        def fn(*flat: Any) -> list[Tensor]:
            leaves, private, common = pytree.tree_unflatten(list(flat[: len(fixed)]), fixed_spec)
            packed, step, carry = pytree.tree_unflatten(list(flat[len(fixed) :]), moving_spec)
            params = [leaves[n].detach().requires_grad_() for n in phase.trained]
            leaves = leaves | dict(zip(phase.trained, params, strict=True))
            value = objective(desk, phase, watched(desk, common, touched))
            losses, carry = over_clients(value)(leaves, private, packed, carry, step)
            grads = torch.autograd.grad(losses.sum(), params, allow_unused=True)
            used[:] = [g is not None for g in grads]
            return [losses.detach(), *(g for g in grads if g is not None), *pytree.tree_leaves(carry)]

        flat = [t.detach() if isinstance(t, Tensor) else t for t in [*fixed, *moving]]
        try:
            graph = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
        except Exception as error:
            name, why = phase.phase.name, str(error).splitlines()
            self.notes.append(f"phase {name!r} is mapped, not traced: {type(error).__name__}: {why[0] if why else ''}")
            return None
        kept = tidy(graph)
        return Trace(graph.forward, kept, used, frozenset(touched), constants(desk, touched))


_ALIASES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
}


def tidy(graph: fx.GraphModule) -> list[int]:
    """Drops operations that do nothing and arguments that nothing reads; returns the positions of those kept."""
    nodes = graph.graph.nodes
    writes = any(is_write(n) for n in nodes)
    for node in list(nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        by_one = node.target is torch.ops.aten.mul.Scalar and node.args[1] == 1 and not writes
        if (by_one or node.target in _ALIASES) and _same(node, source):
            node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or is_write(n))
    kept = []
    for i, node in enumerate([n for n in nodes if n.op == "placeholder"]):
        if node.users:
            kept.append(i)
        else:
            graph.graph.erase_node(node)
    simplify(graph)
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.recompile()
    return kept


def _same(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
