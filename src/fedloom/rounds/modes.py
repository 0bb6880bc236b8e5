"""Centralised, federated and hybrid training: one objective, one local loop, one round loop.

Hybrid: ``theta' = theta + a d_CL + (1 - a) d_FL`` with d the displacements of the cloud's and the sites' work from the same theta;
``a == 1`` returns the cloud's model and ``a == 0`` the sites', by branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fedloom import tensors
from fedloom.clients.messages import Site
from fedloom.clients.states import ServerState
from fedloom.errors import UserError
from fedloom.network.bound_method import Bound
from fedloom.rounds.run import Record, Run, federated
from fedloom.spec.parts import Phase
from fedloom.tensors import Leaves

CLOUD = "cloud"
POOL = "pool"


@dataclass(slots=True)
class Mixing:
    """Rule for the cloud's share a of a hybrid round.

    Args:
        mixing: ``"alternate"`` (cloud first), ``"fixed"`` or ``"adaptive"``.
        rule: of adaptive mixing, from s = cos(d_CL, d_FL): ``"signed"`` a - beta s, ``"literal"`` a + beta (1 - s) as printed, which
            never falls, ``"proportional"`` a_min + (a_max - a_min)(1 - s)/2.
        alpha: a of the first round (of all, if fixed).
        beta: step of the adaptive rules.
        alpha_min: least share.
        alpha_max: largest share.
        period: rounds between alternations.
        cl_gradient: the cloud's training: ``"epochs"`` as a site's, ``"minibatch"`` one step, ``"full"`` one full-batch step.
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
    """Play hybrid rounds: the sites and the cloud train from the same leaves, then their displacements are mixed.

    The cloud is a federation of one client, with the method's own server stages. Its server memory is stored with the
    sites' under ``cloud/owner``, its client state with the clients' under ``cloud``, so that a checkpoint holds both.
    """

    cloud: Site
    mixing: Mixing
    alpha: float = field(init=False)

    def __post_init__(self) -> None:
        self.alpha = self.mixing.alpha

    def __call__(self, run: Run, round: int) -> Record:
        """Play one hybrid round. Mixing follows all server stages: d_FL = new w - w."""
        before, share = run.state, self.mixing.share(round, self.alpha)
        # An adaptive share of 0 or 1 would never change again if only one side trained.
        both = self.mixing.mixing == "adaptive"
        facts: Record = dict(_IDLE)
        if share < 1.0 or both:
            facts = federated(run, round)
        sites, cloud, memory = run.state, before.leaves, run.state.memory
        if share > 0.0 or both:
            after, facts["cloud_loss"] = self._play_cloud(run, before, round)
            cloud = after.leaves
            memory = {**memory, **{f"{CLOUD}/{owner}": values for owner, values in after.memory.items()}}
        mixed = (
            cloud if share == 1.0 else sites.leaves if share == 0.0 else mix(before.leaves, cloud, sites.leaves, share)
        )
        alignment = None
        if both or 0.0 < share < 1.0:
            alignment = cosine(before.leaves, cloud, sites.leaves, run.at(round).structure.trainable())
            self.alpha = self.mixing.next(self.alpha, alignment)
        run.state = replace(sites, leaves=mixed, memory=memory, round=round)
        return {"alpha": share, "alignment": alignment, **facts}

    def _play_cloud(self, run: Run, before: ServerState, round: int) -> tuple[ServerState, float | None]:
        """Play the cloud's round. Returns the state of the cloud's server after it, and the loss."""
        memory = {k.removeprefix(f"{CLOUD}/"): v for k, v in before.memory.items() if k.startswith(f"{CLOUD}/")}
        cloud = Run(
            bound=cloud_method(run.bound, self.mixing.cl_gradient),
            engine=run.engine,
            work=run.work,
            sites={CLOUD: self.cloud},
            size=1,
            state=ServerState(before.leaves, {**run.bound.server_memory, **memory}, before.round),
            clients={CLOUD: run.clients[CLOUD]} if CLOUD in run.clients else {},
            later={r: cloud_method(b, self.mixing.cl_gradient) for r, b in run.later.items()},
        )
        if CLOUD not in run.clients:
            cloud.setup()
            cloud.state = replace(cloud.state, leaves=before.leaves)
        outcome, _ = cloud.play([CLOUD], round)
        run.clients[CLOUD] = cloud.clients[CLOUD]
        return cloud.state, outcome.losses.get(CLOUD)


_IDLE: Record = {
    "train_loss": None,
    "bytes_up": 0,
    "bytes_down": 0,
    "bytes_up_by_kind": {},
    "bytes_down_by_kind": {},
    "clients": [],
    "skipped": [],
    "rejected": [],
}
"""The facts of a round in which the sites do not train."""


def cloud_method(bound: Bound, cl_gradient: str) -> Bound:
    """Return the cloud's form of a method: a site's round, or one mini-batch or full-batch step per phase."""
    if cl_gradient == "epochs":
        return bound
    size: Literal["full"] | None = "full" if cl_gradient == "full" else None
    schedule = bound.method.schedule
    steps = tuple(replace(s, steps=1, batch_size=size) if isinstance(s, Phase) else s for s in schedule.round)
    phases = {s.name: replace(bound.phases[s.name], phase=s) for s in steps if isinstance(s, Phase)}
    method = replace(bound.method, schedule=replace(schedule, round=steps))
    return replace(bound, method=method, phases={**bound.phases, **phases})


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
    """Return the cosine of the two displacements over the trainable leaves; 0 if one of them is zero."""
    a, b = ({n: (end[n] - theta[n]).double() for n in names} for end in (cloud, sites))
    norm = math.sqrt(float(tensors.square_norm(a))) * math.sqrt(float(tensors.square_norm(b)))
    return max(-1.0, min(1.0, float(tensors.dot(a, b)) / norm)) if norm > 0 else 0.0
