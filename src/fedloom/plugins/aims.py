"""FedAIMS's intermediate supervision: prototypes, adapters, auxiliary heads, and a block per client."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import ops
from fedloom.aggregators.block_sampling import block_of, sampled
from fedloom.errors import Conflict, UserError
from fedloom.record import Method
from fedloom.registry import plugin
from fedloom.slots import Extra, Phase, Term
from fedloom.structure import Call, Structure
from fedloom.taps import Tap, blocks, pooled
from fedloom.types import EACH, Batch, Leaves, Seen
from fedloom.uploads.prototypes import OWNER as PROTOTYPES
from fedloom.uploads.prototypes import pull, with_prototypes
from fedloom.view import View

OWNER = "aims"
HIDDEN = 64

_CHOICES = {
    "supervise": ("sampled", "full"),
    "assign": ("cluster", "random", "round_robin"),
    "similarity": ("raw", "delta"),
    "prototypes": ("last", "blockwise"),
    "aux_ce": ("head", "none", "prototype"),
    "reduction": ("mean", "sum_dim"),
    "when": ("before", "after"),
    "weights": ("fixed", "adaptive"),
}


@dataclass(slots=True)
class AimsOptions:
    """Hyper-parameters of ``aims``, and the blocks that a model has."""

    mu: float
    lam: float | None
    alpha: tuple[float, ...] | None
    full: bool
    blockwise: bool
    aux_ce: str
    sum_dim: bool
    adaptive: bool = False
    _seen: tuple[Call, ...] | None = None
    _taps: tuple[Tap, ...] = field(default=())

    def taps(self, structure: Structure) -> tuple[Tap, ...]:
        """Blocks 1 .. m-1."""
        if structure.calls is not self._seen:
            found = blocks(structure)
            if self.alpha is not None and len(self.alpha) != len(found) + 1:
                raise UserError(f"aims: alpha has {len(self.alpha)} weights, but the model has {len(found) + 1} blocks")
            self._taps, self._seen = found, structure.calls
        return self._taps

    def main(self, structure: Structure) -> float:
        """Weight of the main task F."""
        m = len(self.taps(structure)) + 1
        if self.alpha is not None:
            return self.alpha[-1]
        return 1 / m if self.lam is None or m == 1 else self.lam

    def weight(self, structure: Structure, j: int) -> float:
        """Weight of the auxiliary task A^j."""
        if self.alpha is not None:
            return self.alpha[j - 1]
        return 1 / (len(self.taps(structure)) + 1) if self.full else 1 - self.main(structure)

    @property
    def adapts(self) -> bool:
        """Whether prototypes of the last block are mapped to the others by adapters."""
        return not self.blockwise and self.compares

    @property
    def compares(self) -> bool:
        """Whether prototypes are used at all."""
        return self.mu > 0 or self.aux_ce == "prototype"


@plugin(
    "mu >= 0",
    "0 < lam <= 1",
    "period >= 1",
    paper="Li et al., FedAIMS: Adaptive Intermediate Supervision for Personalized Federated Learning, 2025, eq. 12",
)
def aims(
    mu: float = 1.0,
    lam: float | None = None,
    supervise: Literal["sampled", "full"] = "sampled",
    alpha: Sequence[float] | None = None,
    assign: Literal["cluster", "random", "round_robin"] = "cluster",
    similarity: Literal["raw", "delta"] = "raw",
    period: int = 1,
    prototypes: Literal["last", "blockwise"] = "last",
    aux_ce: Literal["head", "none", "prototype"] = "head",
    reduction: Literal["mean", "sum_dim"] = "mean",
    when: Literal["before", "after"] = "before",
    weights: Literal["fixed", "adaptive"] = "fixed",
) -> Callable[[Method], Method]:
    """Supervises one intermediate block of each client: ``Phi = lambda F + (1 - lambda) A^b``, b given by the server.

    ``F = CE + mu R^m`` with ``R^m = 1/(b D) sum ||C_y - z||^2`` (classes' shared prototypes C), ``A^j = CE^j + mu R^j`` with
    ``R^j = 1/(b d_j) sum ||sigma^j(C_y) - u^j||^2``: u^j is block j's pooled output, sigma^j a personal adapter D -> 64 -> d_j,
    CE^j the loss of a personal auxiliary head on u^j. Only the adapter and the head of the client's block move. ``supervise="full"``
    supervises all blocks: ``Phi = alpha_m F + sum_j alpha_j A^j``.

    ``weights="adaptive"`` (not in the paper) lets the weights follow the losses of the batch, taken as constants:
    ``lambda = CE^b / (CE + CE^b)``, so that each task weighs as the inverse of its loss does (the closed form of Kendall et
    al., Multi-Task Learning Using Uncertainty, CVPR 2018), and ``mu CE`` in place of mu: a task that is learned is left alone.

    Args:
        mu: weight of the distances to prototypes.
        lam: lambda; None for 1/m, m the number of blocks.
        supervise: one block per client and round, or all.
        alpha: weights of all m blocks, main task last, which sum to 1; None for 1/m each (``supervise="full"`` only).
        assign: how blocks are given out: Algorithm 2, at random, or in turn.
        similarity: of the uploaded bodies, or of what the round changed in them.
        period: rounds between updates of the similarity.
        prototypes: of the last block, mapped by adapters, or of every block, without adapters.
        aux_ce: CE^j by an auxiliary head, none, or over the distances ``-||u^j - sigma^j(C_c)||^2``.
        reduction: distances are means over dimensions, or sums.
        when: prototypes are taken before local training (from the received body), or after it.
        weights: lambda and mu as they are given, or following the losses (one block per client, auxiliary heads, no lam).
    """
    given: dict[str, str] = {"supervise": supervise, "assign": assign, "similarity": similarity}
    given |= {"prototypes": prototypes, "aux_ce": aux_ce, "reduction": reduction, "when": when}
    given["weights"] = weights
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise UserError(f"aims: {name}={value!r}; expected {', '.join(map(repr, _CHOICES[name]))}")
    full = supervise == "full"
    if (alpha is not None and not full) or (lam is not None and full):
        raise UserError("aims: alpha goes with supervise='full', lam with supervise='sampled'")
    adaptive = weights == "adaptive"
    if adaptive and (full or lam is not None or aux_ce != "head"):
        raise UserError("aims: weights='adaptive' goes with supervise='sampled', aux_ce='head' and without lam")
    shares = None if alpha is None else _sum_to_one(alpha)
    plan = AimsOptions(mu, lam, shares, full, prototypes == "blockwise", aux_ce, reduction == "sum_dim", adaptive)

    def apply(method: Method) -> Method:
        if "delta" not in method.reducers():
            raise Conflict(f"'aims' cannot be stacked on {method.text!r}, which uploads no trained body")
        names = {p.name for p in method.phases() if p.copy == "main"}
        objective = tuple(part for t in method.objective for part in _weighted(t, plan, names))
        method = replace(method, objective=objective, tasks=("classification", "binary"))
        method = method.claiming("the supervision of blocks", OWNER)
        if plan.compares:
            method = with_prototypes(
                method,
                at="start" if when == "before" else "now",
                feature=lambda view: _features(plan, view),
                taps=lambda s: (*(t.name for t in plan.taps(s) if plan.blockwise), "z"),
                width=lambda s: _width(plan, s),
            )
        if not full:
            method = sampled(method, plan.taps, assign=assign, similarity=similarity, period=period)
        term = Term(
            owner=OWNER,
            fn=lambda view, batch, seen: _supervision(plan, view, batch, seen),
            phases=lambda phase, s: phase.name in names and _any(plan, s),
            taps=lambda s: (*(t.name for t in plan.taps(s)), "z"),
        )
        extra = Extra(
            owner=OWNER,
            build=lambda s, g: _build(plan, s, g),
            kind="personal",
            key=None if full else lambda leaf: int(leaf.split(".")[0]),
        )
        return method.adding(terms=(term,), extras=(extra,))

    return apply


def _sum_to_one(alpha: Sequence[float]) -> tuple[float, ...]:
    good = isinstance(alpha, (list, tuple)) and all(isinstance(a, (int, float)) and a >= 0 for a in alpha)
    if not good or not math.isclose(math.fsum(alpha), 1.0, rel_tol=0, abs_tol=1e-9) or not alpha[-1] > 0:
        raise UserError(f"aims: alpha={alpha!r}; expected one weight per block that sum to 1, the last above 0")
    return tuple(float(a) for a in alpha)


def _any(plan: AimsOptions, structure: Structure) -> bool:
    return plan.mu > 0 or (bool(plan.taps(structure)) and plan.aux_ce != "none")


def _weighted(term: Term, plan: AimsOptions, names: set[str]) -> tuple[Term, ...]:
    """The data term times the weight of the main task in the phases of a round, as it is elsewhere; others stay."""
    if term.role != "data":
        return (term,)

    def fn(view: View, batch: Batch, seen: Seen, *carry: Leaves) -> Any:
        value, weight = term.fn(view, batch, seen, *carry), _lambda(plan, view, seen)
        return (_times(weight, value[0]), value[1]) if term.carry is not None else _times(weight, value)

    def inside(phase: Phase, structure: Structure) -> bool:
        return phase.copy == "main" and phase.name in names

    return (
        replace(term, fn=fn, copy=None, phases=lambda p, s: inside(p, s) and term.enters(p, s)),
        replace(term, copy=None, phases=lambda p, s: not inside(p, s) and term.enters(p, s)),
    )


def _width(plan: AimsOptions, structure: Structure) -> int:
    if structure.feature is None:
        raise UserError("aims: the model's head was not found; name it with head='...'")
    return structure.feature + (sum(t.channels for t in plan.taps(structure)) if plan.blockwise else 0)


def _u(view: View, tap: Tap) -> Tensor:
    """A block's pooled output."""
    return pooled(view.feature(tap.name), tap.axis)


def _features(plan: AimsOptions, view: View) -> Tensor:
    """What prototypes are means of: z, with ``blockwise`` behind the features of the other blocks."""
    parts = [_u(view, tap) for tap in plan.taps(view.structure)] if plan.blockwise else []
    return torch.cat([*parts, pooled(view.z)], 1)


def _supervision(plan: AimsOptions, view: View, batch: Batch, seen: Seen) -> Tensor:
    """``lambda mu R^m + sum_j weight_j A^j`` over the blocks that this client supervises."""
    structure = view.structure
    taps = plan.taps(structure)
    centres = known = seen.n
    if plan.compares:
        shared = seen.broadcast[PROTOTYPES]
        centres, known = shared["mean"], shared["known"]
    main, mu = _lambda(plan, view, seen), plan.mu * view.loss().detach() if plan.adaptive else plan.mu
    total = torch.zeros_like(seen.n)
    if plan.mu:
        z = pooled(view.z)
        total = _times(main, _times(mu, _distance(plan, z, batch, centres[:, -z.shape[1] :], known)))
    numbers = _active(plan, structure, seen)
    begin = [0, *np.cumsum([t.channels for t in taps]).tolist()]
    tasks: list[Tensor] = []
    for j in numbers:
        u = _u(view, taps[j - 1])
        mine = centres[:, begin[j - 1] : begin[j]] if plan.blockwise else _adapter(view.leaves, j, centres, plan)
        if plan.aux_ce == "head" and not isinstance(mu, Tensor):
            tasks.append(_head_loss(view, u, j, (mine, known) if mu else None, mu * u.shape[1] if plan.sum_dim else mu))
            continue
        parts = []
        if plan.aux_ce == "head":
            parts.append(_head_loss(view, u, j))
        elif plan.aux_ce == "prototype":
            parts.append(_nearest(u, batch, mine, known))
        if plan.mu:
            parts.append(_times(mu, _distance(plan, u, batch, mine, known)))
        tasks += [sum(parts[1:], parts[0])] if parts else []
    if not tasks:
        return total
    weights = {plan.weight(structure, j) for j in numbers}
    if len(weights) > 1:
        tasks = [plan.weight(structure, j) * task for j, task in zip(numbers, tasks, strict=True)]
    aside = _own(tasks, seen)
    return total + (aside if len(weights) > 1 else _times(1 - main if plan.adaptive else weights.pop(), aside))


def _times(weight: float | Tensor, value: Tensor) -> Tensor:
    """A weight times a value: no operation where the weight is the number 1."""
    return value if isinstance(weight, float) and weight == 1 else weight * value


def _active(plan: AimsOptions, structure: Structure, seen: Seen) -> Sequence[int]:
    """The blocks whose tasks are computed: all, or the client's own; those of a whole wave where clients run side by side."""
    if plan.full or seen.key == EACH:
        return range(1, len(plan.taps(structure)) + 1)
    return [seen.key] if isinstance(seen.key, int) else []


def _own(tasks: Sequence[Tensor], seen: Seen) -> Tensor:
    """The sum of the tasks that are computed; for a client of a wave that computes all blocks' its own block's alone."""
    if seen.key != EACH:
        return sum(tasks[1:], tasks[0])
    values = torch.stack(list(tasks))
    numbers = torch.arange(1, len(tasks) + 1, device=values.device)
    return torch.where(block_of(seen) == numbers, values, torch.zeros_like(values)).sum()


def _lambda(plan: AimsOptions, view: View, seen: Seen) -> float | Tensor:
    """Weight of the main task: as given, or ``CE^b / (CE + CE^b)`` of this batch."""
    if not plan.adaptive:
        return plan.main(view.structure)
    asides = []
    for j in _active(plan, view.structure, seen):
        asides.append(_head_loss(view, _u(view, plan.taps(view.structure)[j - 1]), j).detach())
    if not asides:
        return 1.0
    aside = _own(asides, seen)
    return aside / (view.loss().detach() + aside).clamp(min=1e-12)


def _head_loss(view: View, u: Tensor, j: int, centres: tuple[Tensor, Tensor] | None = None, mu: float = 0.0) -> Tensor:
    """``CE^j``, the loss of block j's auxiliary head on its features; with centres and which are known ``CE^j + mu R^j``."""
    weight, bias = (view.leaves[f"{OWNER}:{j}.head.{p}"] for p in ("weight", "bias"))
    loss = view.loss(ops.linear(u, weight, bias))
    return loss if centres is None else loss + mu * pull(u, view.batch, *centres)


def _distance(plan: AimsOptions, u: Tensor, batch: Batch, centres: Tensor, known: Tensor) -> Tensor:
    value = pull(u, batch, centres, known)
    return value * u.shape[1] if plan.sum_dim else value


def _nearest(u: Tensor, batch: Batch, centres: Tensor, known: Tensor) -> Tensor:
    """Cross-entropy over ``-||u - C_c||^2`` of the classes with a prototype; rows of other classes add nothing."""
    y = batch.y.long()
    logits = -((u[:, None] - centres[None]) ** 2).sum(2)
    logits = torch.where(known > 0, logits, torch.full_like(logits, -1e9))
    return batch.mean(known[y] * ops.cross_entropies(logits, y))


def _adapter(leaves: Leaves, j: int, centres: Tensor, plan: AimsOptions) -> Tensor:
    """``sigma^j(c) = W2 relu(W1 c + b1) + b2`` for every class."""
    if not plan.adapts:
        return centres
    first, last = ([leaves[f"{OWNER}:{j}.{part}.{p}"] for p in ("weight", "bias")] for part in ("hidden", "out"))
    return ops.linear(F.relu(ops.linear(centres, *first)), *last)


def _build(plan: AimsOptions, structure: Structure, generator: np.random.Generator) -> Leaves:
    """Adapters and auxiliary heads of the blocks 1 .. m-1, initialised as torch initialises linear layers."""
    made: Leaves = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        bound = 1 / math.sqrt(inputs)
        made[f"{name}.weight"] = torch.from_numpy(generator.uniform(-bound, bound, (outputs, inputs)))
        made[f"{name}.bias"] = torch.from_numpy(generator.uniform(-bound, bound, (outputs,)))

    for j, tap in enumerate(plan.taps(structure), start=1):
        if plan.adapts:
            linear(f"{j}.hidden", _width(plan, structure), HIDDEN)
            linear(f"{j}.out", HIDDEN, tap.channels)
        if plan.aux_ce == "head":
            linear(f"{j}.head", tap.channels, structure.outputs)
    return made
