"""FedAIMS: supervision of intermediate blocks by prototypes and auxiliary heads.

The code uses the symbols of the paper (sections 3 and 4):

    j, m       a block, and the number of blocks; block m ends at the head
    u_j        pooled output of block j on a batch, written phi^j(x) in the paper; ``z`` is that of block m
    C          global prototypes, one per class; ``known`` is 1 for the classes that have one
    sigma_j    personal adapter of block j, which maps C to the width of u_j
    CE_j       loss of the personal auxiliary head of block j
    R_j        distance of u_j to its class's prototype (eqs. 5 and 8)
    F          main task, CE + mu R_m (eq. 6)
    A_j        auxiliary task of block j, CE_j + mu R_j (eq. 7)
    lam        weight of F (eq. 12); ``alpha`` are the weights of all tasks (eq. 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import ops
from fedloom.errors import Conflict, UserError
from fedloom.ops import pooled
from fedloom.plugins.aims.block_sampling import sampled
from fedloom.spec.blocks import blocks
from fedloom.spec.method import Method
from fedloom.spec.parts import Extra, Phase, Term
from fedloom.spec.prototypes import OWNER as PROTOTYPES
from fedloom.spec.prototypes import pull, with_prototypes
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Seen
from fedloom.spec.structure import Call, Structure
from fedloom.spec.taps import Tap
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves

OWNER = "aims"
HIDDEN = 64


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
    full = supervise == "full"
    if (alpha is not None and not full) or (lam is not None and full):
        raise UserError("aims: alpha goes with supervise='full', lam with supervise='sampled'")
    adaptive = weights == "adaptive"
    if adaptive and (full or lam is not None or aux_ce != "head"):
        raise UserError("aims: weights='adaptive' goes with supervise='sampled', aux_ce='head' and without lam")
    shares = None if alpha is None else _sum_to_one(alpha)
    it = _Aims(mu, lam, shares, full, prototypes == "blockwise", aux_ce, reduction == "sum_dim", adaptive)

    def apply(method: Method) -> Method:
        """Algorithm 1 on top of a method that samples clients, trains and averages a body."""
        if "delta" not in method.reducers():
            raise Conflict(f"'aims' cannot be stacked on {method.text!r}, which uploads no trained body")
        method = replace(method, tasks=("classification", "binary")).claiming("the supervision of blocks", OWNER)
        phases = {p.name for p in method.phases() if p.copy == "main"}
        # Lines 4 and 17: supervision sampling, and the similarities that it needs.
        if not full:
            method = sampled(method, it.blocks, assign=assign, similarity=similarity, period=period)
        # Lines 7, 9, 13 and 16: prototypes are received, computed, uploaded and aggregated (eqs. 3 and 4).
        if it.compares:
            method = with_prototypes(
                method,
                at="start" if when == "before" else "now",
                feature=it.prototype_features,
                taps=lambda s: (*(tap.name for tap in it.blocks(s) if it.blockwise), "z"),
                width=it.width,
            )
        # Lines 10 to 12: the objective, and the adapters and auxiliary heads that it trains.
        objective = tuple(part for term in method.objective for part in it.weighted(term, phases))
        supervision = Term(
            owner=OWNER,
            fn=it.supervision,
            phases=lambda phase, s: phase.name in phases and it.supervises(s),
            taps=lambda s: (*(tap.name for tap in it.blocks(s)), "z"),
        )
        personal = Extra(
            owner=OWNER,
            build=it.build,
            kind="personal",
            key=None if full else lambda leaf: int(leaf.split(".")[0]),
        )
        return replace(method, objective=objective).adding(terms=(supervision,), extras=(personal,))

    return apply


def _sum_to_one(alpha: Sequence[float]) -> tuple[float, ...]:
    good = isinstance(alpha, (list, tuple)) and all(isinstance(a, (int, float)) and a >= 0 for a in alpha)
    if not good or not math.isclose(math.fsum(alpha), 1.0, rel_tol=0, abs_tol=1e-9) or not alpha[-1] > 0:
        raise UserError(f"aims: alpha={alpha!r}; expected one weight per block that sum to 1, the last above 0")
    return tuple(float(a) for a in alpha)


@dataclass(slots=True)
class _Aims:
    """The options of :func:`aims`, and the objective of a client."""

    mu: float
    lam: float | None
    alpha: tuple[float, ...] | None
    full: bool
    blockwise: bool
    aux_ce: str
    sum_dim: bool
    adaptive: bool
    _calls: tuple[Call, ...] | None = None
    _blocks: tuple[Tap, ...] = field(default=())

    @property
    def compares(self) -> bool:
        """Whether the objective contains prototypes."""
        return self.mu > 0 or self.aux_ce == "prototype"

    @property
    def adapts(self) -> bool:
        """Whether adapters map the prototypes of block m to the other blocks."""
        return not self.blockwise and self.compares

    def blocks(self, structure: Structure) -> tuple[Tap, ...]:
        """Return the blocks 1 .. m-1; block j has index j - 1."""
        if structure.calls is not self._calls:  # every step asks
            taps = blocks(structure)
            if self.alpha is not None and len(self.alpha) != len(taps) + 1:
                raise UserError(f"aims: alpha has {len(self.alpha)} weights, but the model has {len(taps) + 1} blocks")
            self._blocks, self._calls = taps, structure.calls
        return self._blocks

    def supervises(self, structure: Structure) -> bool:
        """Return whether :meth:`supervision` adds anything to the loss of a model."""
        return self.mu > 0 or (bool(self.blocks(structure)) and self.aux_ce != "none")

    # The objective: eq. 12, with ``supervise="full"`` eq. 2.

    def weighted(self, term: Term, phases: set[str]) -> tuple[Term, ...]:
        """Return a data term as ``lam CE`` in the phases of a round and as it is elsewhere; other terms as they are."""
        if term.role != "data":
            return (term,)

        def fn(view: View, batch: Batch, seen: Seen, *carry: Leaves) -> Any:
            CE, lam = term.fn(view, batch, seen, *carry), self.main_weight(view, seen)
            return (lam * CE[0], CE[1]) if term.carry is not None else lam * CE

        def of_round(phase: Phase, structure: Structure) -> bool:
            return phase.copy == "main" and phase.name in phases

        return (
            replace(term, fn=fn, copy=None, phases=lambda p, s: of_round(p, s) and term.enters(p, s)),
            replace(term, copy=None, phases=lambda p, s: not of_round(p, s) and term.enters(p, s)),
        )

    def supervision(self, view: View, batch: Batch, seen: Seen) -> Tensor:
        """``lam mu R_m + (1 - lam) A_b``, or with ``supervise="full"`` ``alpha_m mu R_m + sum_j alpha_j A_j``.

        The data term adds ``lam CE``, so that the sum is Phi.
        """
        lam = self.main_weight(view, seen)
        mu = self.mu * view.loss().detach() if self.adaptive else self.mu
        Phi = torch.zeros_like(seen.n)
        if self.mu:
            z = pooled(view.z)
            C_m = seen.broadcast[PROTOTYPES]["mean"][:, -z.shape[1] :]
            Phi = lam * (mu * self.R(z, C_m, batch, seen))
        supervised = self.supervised(view.structure, seen)
        A = {j: A_j for j in supervised if (A_j := self.A(j, mu, view, batch, seen)) is not None}
        if not A:
            return Phi
        if not self.full:
            return Phi + (1 - lam) * select(A, seen)
        alpha = {j: 1 / (len(self.blocks(view.structure)) + 1) if self.alpha is None else self.alpha[j - 1] for j in A}
        if len(set(alpha.values())) == 1:
            return Phi + alpha[1] * _sum(A.values())
        return Phi + _sum([alpha[j] * A_j for j, A_j in A.items()])

    def main_weight(self, view: View, seen: Seen) -> float | Tensor:
        """Return lam: as given, 1/m, or ``CE_b / (CE + CE_b)`` of this batch."""
        m = len(self.blocks(view.structure)) + 1
        if self.adaptive:
            supervised = self.supervised(view.structure, seen)
            if not supervised:
                return 1.0
            CE_b = select({j: self.CE(j, self.u(j, view), view).detach() for j in supervised}, seen)
            return CE_b / (view.loss().detach() + CE_b).clamp(min=1e-12)
        if self.alpha is not None:
            return self.alpha[-1]
        return 1 / m if self.lam is None or m == 1 else self.lam

    def supervised(self, structure: Structure, seen: Seen) -> list[int]:
        """Return the blocks to compute: all, or the client's; in a wave those of all its clients."""
        numbers = range(1, len(self.blocks(structure)) + 1)
        return [j for j in numbers if self.full or seen.selects(j) is not False]

    def A(self, j: int, mu: float | Tensor, view: View, batch: Batch, seen: Seen) -> Tensor | None:
        """``A_j = CE_j + mu R_j`` (eq. 7); None where the options leave nothing of it."""
        u_j = self.u(j, view)
        parts = [self.CE(j, u_j, view)] if self.aux_ce == "head" else []
        if self.compares:
            C_j = self.C(j, view, seen)  # once: two would change the last bits of the adapter's gradient
            if self.aux_ce == "prototype":
                parts.append(_nearest(u_j, batch, C_j, seen.broadcast[PROTOTYPES]["known"]))
            if self.mu:
                parts.append(mu * self.R(u_j, C_j, batch, seen))
        return _sum(parts) if parts else None

    def CE(self, j: int, u_j: Tensor, view: View) -> Tensor:
        """``CE_j``: the task's loss of the auxiliary head on u_j."""
        weight, bias = (view.leaves[f"{OWNER}:{j}.head.{part}"] for part in ("weight", "bias"))
        return view.classifier_loss(u_j, weight, bias)[0]

    def R(self, u: Tensor, C: Tensor, batch: Batch, seen: Seen) -> Tensor:
        """``R_j = 1/b sum ||C_y - u_j||^2`` (eqs. 5 and 8), over the mean of the dimensions unless ``sum_dim``."""
        distance = pull(u, batch, C, seen.broadcast[PROTOTYPES]["known"])
        return distance * u.shape[1] if self.sum_dim else distance

    def C(self, j: int, view: View, seen: Seen) -> Tensor:
        """Return the prototypes of block j < m: ``sigma_j(C_m)`` (eq. 8), or with ``blockwise`` its own (eq. 5)."""
        C = seen.broadcast[PROTOTYPES]["mean"]
        if self.blockwise:
            widths = [tap.channels for tap in self.blocks(view.structure)]
            return C[:, sum(widths[: j - 1]) : sum(widths[:j])]
        hidden, out = (
            [view.leaves[f"{OWNER}:{j}.{layer}.{part}"] for part in ("weight", "bias")] for layer in ("hidden", "out")
        )
        return ops.linear(F.relu(ops.linear(C, *hidden)), *out)

    def u(self, j: int, view: View) -> Tensor:
        """Return u_j, shape ``(rows, channels)``."""
        tap = self.blocks(view.structure)[j - 1]
        return pooled(view.feature(tap.name), tap.axis)

    # Prototypes, adapters and heads.

    def prototype_features(self, view: View) -> Tensor:
        """Return the features whose means are the prototypes: z, with ``blockwise`` u_1 .. u_(m-1) and z."""
        others = [self.u(j, view) for j in range(1, len(self.blocks(view.structure)) + 1)] if self.blockwise else []
        return torch.cat([*others, pooled(view.z)], 1)

    def width(self, structure: Structure) -> int:
        """Return the number of columns of :meth:`prototype_features`."""
        if structure.feature is None:
            raise UserError("aims: the model's head was not found; name it with head='...'")
        return structure.feature + (sum(tap.channels for tap in self.blocks(structure)) if self.blockwise else 0)

    def build(self, structure: Structure, generator: np.random.Generator) -> Leaves:
        """Build ``sigma_j = W2 relu(W1 c + b1) + b2`` and the head of each block, initialised as torch does."""
        leaves: Leaves = {}

        def linear(name: str, inputs: int, outputs: int) -> None:
            bound = 1 / math.sqrt(inputs)
            leaves[f"{name}.weight"] = torch.from_numpy(generator.uniform(-bound, bound, (outputs, inputs)))
            leaves[f"{name}.bias"] = torch.from_numpy(generator.uniform(-bound, bound, (outputs,)))

        for j, tap in enumerate(self.blocks(structure), start=1):
            if self.adapts:
                linear(f"{j}.hidden", self.width(structure), HIDDEN)
                linear(f"{j}.out", HIDDEN, tap.channels)
            if self.aux_ce == "head":
                linear(f"{j}.head", tap.channels, structure.outputs)
        return leaves


def select(tasks: dict[int, Tensor], seen: Seen) -> Tensor:
    """Return the task of the client's block; of a wave each client's own, with no gradient to the others."""
    masked = []
    for j, task in tasks.items():
        selected = seen.selects(j)
        masked.append(torch.where(selected, task, torch.zeros_like(task)) if isinstance(selected, Tensor) else task)
    return _sum(masked)


def _sum(values: Iterable[Tensor]) -> Tensor:
    first, *rest = values
    return sum(rest, first)


def _nearest(u: Tensor, batch: Batch, C: Tensor, known: Tensor) -> Tensor:
    """Cross-entropy over ``-||u - C_c||^2`` of the classes with a prototype; rows of other classes add nothing."""
    y = batch.y.long()
    logits = -((u[:, None] - C[None]) ** 2).sum(2)
    logits = torch.where(known > 0, logits, torch.full_like(logits, -1e9))
    return batch.mean(known[y] * ops.cross_entropies(logits, y))
