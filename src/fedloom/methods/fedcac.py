"""FedCAC: critical elements are averaged with similar clients, all others with all clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.methods.client_combinations import combined, delivery, posted
from fedloom.methods.fedavg import fedavg
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Rule, ServerStage, Stage
from fedloom.spec.reducers import stack
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.structure import LeafInfo
from fedloom.tensors import Leaves, Message


def critical(new: Tensor, old: Tensor, tau: float) -> Tensor:
    """1 at the ``floor(tau numel)`` elements with the largest ``|(new - old) new|``, else 0; ties go to the first."""
    s = ((new - old) * new).abs().double().reshape(-1)
    s = (s / s.amax().clamp(min=1e-300)).round(decimals=10)
    rank = s.argsort(descending=True, stable=True).argsort()
    return (rank < int(tau * new.numel() + 1e-9)).to(torch.uint8).reshape(new.shape)


def overlaps(masks: Leaves) -> Tensor:
    """``O_kj = 1 - |m_k - m_j|_1 / (2 |m_k|_1)`` of stacked masks, in float64."""
    gram = torch.stack([(m := v.flatten(1).float()).matmul(m.T).double() for v in masks.values()]).sum(0)
    size = gram.diagonal()
    apart = size[:, None] + size[None] - 2 * gram
    return (1 - apart / (2 * size.clamp(min=1))[:, None]).round(decimals=10)


def partners(overlap: Tensor, progress: float) -> Tensor:
    """Row k has equal weights for k and for ``{j: O_kj >= mean O + progress (max O - mean O)}``; mean and maximum over k != j."""
    count = overlap.shape[0]
    itself = torch.eye(count, dtype=torch.bool, device=overlap.device)
    others = overlap[~itself]
    if not others.numel():
        return itself.double()
    threshold = (others.mean() + progress * (others.max() - others.mean())).round(decimals=10)
    chosen = (itself | (overlap >= threshold)).double()
    return chosen / chosen.sum(1, keepdim=True)


@recipe(
    "0 <= tau <= 1",
    "beta > 0",
    paper="Wu et al., Bold but Cautious: Unlocking the Potential of Personalized Federated Learning, ICCV 2023, Algorithm 1",
    presets={"cifar10": {"tau": 0.5, "beta": 100}, "cifar100": {"tau": 0.4, "beta": 170}},
)
def fedcac(tau: float = 0.5, beta: float = 100) -> Method:
    """Elements that matter most to a client come from clients with similar ones, all others from the mean of everybody.

    After training ``s = |(theta_new - theta_old) theta_new|`` element by element; in each tensor the top share tau is
    critical, mask m_k. The server's mean is FedAvg's. With ``O_kj = 1 - |m_k - m_j|_1 / (2 |m_k|_1)`` the clients of the
    round with ``O_kj >= mean O + (t / beta)(max O - mean O)`` join k in a plain mean, customised_k. A client begins with
    ``m_k customised_k + (1 - m_k) w`` and is evaluated with that.

    Args:
        tau: share of critical elements; 0 is FedAvg bit for bit, 1 gives everybody the plain mean.
        beta: rounds after which nobody joins any more.
    """
    if not tau:
        return fedavg()

    def user_leaf(leaf: LeafInfo) -> bool:
        return leaf.trainable and not leaf.owner

    def begin(start: Leaves, seen: Seen) -> Leaves:
        mask, custom = seen.memory["fedcac"], seen.addressed["fedcac"]
        return {n: torch.where(m.bool(), custom[n], seen.received[n]) for n, m in mask.items()}

    def mark(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        masks = {n: critical(seen.final[n], seen.start[n], tau) for n in memory}
        return {**message, "fedcac": masks}, masks

    def customise(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        weights = partners(overlaps(reduced["fedcac"]), cohort.round / beta)
        deltas = {n: reduced["fedcac_models"][n] for n in reduced["fedcac"]}
        return reduced, posted(memory, combined(weights, deltas, cohort), cohort)

    def nothing(facts: Facts) -> Leaves:
        return {n: torch.zeros_like(v, dtype=torch.uint8) for n, v in facts.travelling().items()}

    stage = Stage(
        owner="fedcac",
        fn=mark,
        entries={"fedcac": stack()},
        also={"fedcac_models": ("delta", stack())},
        memory=nothing,
    )
    return (
        fedavg()
        .replacing_receive("fedcac", begin)
        .adding(
            rules=(Rule(owner="fedcac", pattern=user_leaf, kind="mirrored"),),
            stages=(stage,),
            prepare=(delivery("fedcac", user_leaf),),
            server=(ServerStage(owner="fedcac", fn=customise, memory=lambda facts: {}),),
        )
    )
