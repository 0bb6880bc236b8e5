"""Centralised, federated and hybrid training: one objective, one local loop, one round loop.

Hybrid: ``theta' = theta + a d_CL + (1 - a) d_FL`` with d the displacements of the cloud's and the sites' work from the same theta;
``a == 1`` returns the cloud's model and ``a == 0`` the sites', by branch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fedloom import server, tree
from fedloom.bound import Bound
from fedloom.errors import UserError
from fedloom.run import Record, Run, federated
from fedloom.slots import Phase, Program
from fedloom.types import Leaves
from fedloom.work import Participant, Site

CLOUD = "cloud"
POOL = "pool"


@dataclass(slots=True)
class Mixing:
    """How the cloud's share a of a hybrid round is set.

    Args:
        mixing: ``"alternate"`` (cloud first), ``"fixed"`` or ``"adaptive"``.
        rule: of adaptive mixing, from s = cos(d_CL, d_FL): ``"signed"`` a - beta s, ``"literal"`` a + beta (1 - s) as printed, which
            never falls, ``"proportional"`` a_min + (a_max - a_min)(1 - s)/2.
        alpha: a of the first round (of all, if fixed).
        beta: step of the adaptive rules.
        alpha_min: least share.
        alpha_max: largest share.
        period: rounds between alternations.
        cl_gradient: the cloud's work: ``"epochs"`` as a site's, ``"minibatch"`` one step, ``"full"`` one full-batch step.
        cloud_fraction: share of each site's training rows that is moved to the cloud.
        cloud_clients: clients whose rows are moved to the cloud whole.
    """

    mixing: Literal["alternate", "fixed", "adaptive"] = "adaptive"
    rule: Literal["signed", "literal", "proportional"] = "signed"
    alpha: float = 0.5
    beta: float = 0.1
    alpha_min: float = 0.05
    alpha_max: float = 1.0
    period: int = 1
    cl_gradient: Literal["epochs", "minibatch", "full"] = "epochs"
    cloud_fraction: float | None = None
    cloud_clients: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "mixing": ("alternate", "fixed", "adaptive"),
            "rule": ("signed", "literal", "proportional"),
            "cl_gradient": ("epochs", "minibatch", "full"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise UserError(f"hybrid.{key}={getattr(self, key)!r}: expected {', '.join(allowed)}")
        if not 0 <= self.alpha_min <= self.alpha_max <= 1 or not 0 <= self.alpha <= 1:
            raise UserError("hybrid: expected 0 <= alpha_min <= alpha_max <= 1 and 0 <= alpha <= 1")
        if self.cloud_fraction is not None and not 0 < self.cloud_fraction < 1:
            raise UserError(f"hybrid.cloud_fraction={self.cloud_fraction!r}: expected a number between 0 and 1")
        if self.period < 1 or self.beta < 0:
            raise UserError("hybrid: expected period >= 1 and beta >= 0")

    def share(self, round: int, current: float) -> float:
        """The share a of a round."""
        if self.mixing == "alternate":
            return 1.0 if ((round - 1) // self.period) % 2 == 0 else 0.0
        return self.alpha if self.mixing == "fixed" else current

    def next(self, current: float, alignment: float) -> float:
        """The share of the next round, given s = cos(d_CL, d_FL) of this one.

        Example:
            >>> [Mixing(rule="proportional").next(0.5, s) for s in (1.0, 0.0, -1.0)]
            [0.05, 0.525, 1.0]
        """
        if self.mixing != "adaptive":
            return current
        low, high = self.alpha_min, self.alpha_max
        if self.rule == "proportional":
            return low + (high - low) * (1 - alignment) / 2
        if self.rule == "literal":
            return min(max(current + self.beta * (1 - alignment), 0.0), 1.0)
        return min(max(current - self.beta * alignment, low), high)


@dataclass(slots=True)
class Hybrid:
    """Plays hybrid rounds: the sites and the cloud work from the same leaves, then displacements are mixed."""

    cloud: Site
    mixing: Mixing
    alpha: float = field(init=False)

    def __post_init__(self) -> None:
        self.alpha = self.mixing.alpha

    def __call__(self, run: Run, round: int) -> Record:
        """One hybrid round. Mixing comes after all server stages: d_FL = new w - w."""
        before = run.state
        share = self.mixing.share(round, self.alpha)
        facts: Record = {}
        if share < 1.0:
            facts = federated(run, round)
        sites = run.state
        cloud = self._cloud(run, before, round) if share > 0.0 or self.mixing.mixing == "adaptive" else before.leaves
        alignment = None
        if share == 1.0:
            mixed = cloud
        elif share == 0.0:
            mixed = sites.leaves
        else:
            mixed = mix(before.leaves, cloud, sites.leaves, share)
        if share < 1.0 and cloud is not before.leaves:
            alignment = cosine(before.leaves, cloud, sites.leaves, run.at(round).structure.trainable())
            self.alpha = self.mixing.next(self.alpha, alignment)
        run.state = replace(sites, leaves=mixed, round=round)
        return {"alpha": share, "alignment": alignment, **facts}

    def _cloud(self, run: Run, before: server.ServerState, round: int) -> Leaves:
        """The cloud's model after its own work from the leaves before the round."""
        bound = run.at(round)
        cohort = replace(
            run.cohort([], round),
            ids=(CLOUD,),
            rows=(len(self.cloud.train),),
            leaves=before.leaves,
            population=1,
        )
        _, sent = server.dispatch(bound, before, cohort)
        person = Participant(self.cloud, run.state_of(CLOUD), dict(sent.addressed[CLOUD]), sent.keys.get(CLOUD))
        program = shortened(bound.method.schedule.round, self.mixing.cl_gradient)
        worker = replace_phases(bound, program)
        (reply,) = run.engine.run_cohort(worker, run.work, program, sent.post, [person])
        run.clients[CLOUD] = reply.state
        reduced = {
            e: r.reduce(e, [reply.message], cohort.rows)
            for e, r in bound.method.reducers().items()
            if e in reply.message
        }
        return server.apply(before.leaves, reduced)


def shortened(program: Program, cl_gradient: str) -> Program:
    """The cloud's program: a site's, or one mini-batch step, or one full-batch step."""
    if cl_gradient == "epochs":
        return program
    size: Literal["full"] | None = "full" if cl_gradient == "full" else None
    return tuple(replace(s, steps=1, batch_size=size) if isinstance(s, Phase) else s for s in program)


def replace_phases(bound: Bound, program: Program) -> Bound:
    """The bound method with the phases of another program of the same names."""
    phases = {s.name: replace(bound.phases[s.name], phase=s) for s in program if isinstance(s, Phase)}
    return replace(bound, phases={**bound.phases, **phases})


def mix(theta: Leaves, cloud: Leaves, sites: Leaves, share: float) -> Leaves:
    """``theta + a (cloud - theta) + (1 - a) (sites - theta)``; counters take the larger value."""
    mixed = {}
    for name, value in theta.items():
        if value.is_floating_point():
            mixed[name] = value + share * (cloud[name] - value) + (1 - share) * (sites[name] - value)
        else:
            mixed[name] = torch.maximum(cloud[name], sites[name])
    return mixed


def cosine(theta: Leaves, cloud: Leaves, sites: Leaves, names: tuple[str, ...]) -> float:
    """Cosine of the two displacements over the trainable leaves; 0 where one is zero."""
    a, b = (tree.sub(tree.select(end, names), tree.select(theta, names)) for end in (cloud, sites))
    norm = float((tree.square_norm(a) * tree.square_norm(b)).sqrt())
    return max(-1.0, min(1.0, float(tree.dot(a, b)) / norm)) if norm > 0 else 0.0
