"""Methods whose server makes something for each client of its own: FedPAC's heads, FedCAC's models."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.methods import simplex
from fedloom.methods.averaging import fedavg
from fedloom.optim import sgd
from fedloom.plugins.prototypes import OWNER as CENTROIDS
from fedloom.plugins.prototypes import class_sweep, pooled, pull, with_prototypes
from fedloom.record import Method
from fedloom.reducers import stack
from fedloom.registry import recipe
from fedloom.slots import Phase, Prepare, Prepared, Receive, Rule, Send, ServerStage, Stage, Term
from fedloom.structure import LeafInfo, Pattern, matches
from fedloom.types import Batch, Cohort, Facts, Leaves, Message, Seen
from fedloom.view import View

SMALL = 1e-3


# Letters: what the server keeps for a client until it takes part or is evaluated again ---------------------


def posted(memory: Leaves, letters: Leaves, cohort: Cohort) -> Leaves:
    """The server's memory with new letters, given as stacks in the order of the cohort."""
    new = {f"{client}/{n}": v[i].clone() for n, v in letters.items() for i, client in enumerate(cohort.ids)}
    return {**memory, **new}


def delivery(owner: str, pattern: Pattern) -> Prepare:
    """Hands each client its last letter in ``seen.addressed[owner]``; those without one get the server's own leaves."""

    def fn(memory: Leaves, cohort: Cohort) -> Prepared:
        names = [i.name for i in cohort.structure.leaves if i.trainable and matches(pattern, i)]
        letters = {c: {n: memory.get(f"{c}/{n}", cohort.leaves[n]) for n in names} for c in cohort.ids}
        return Prepared(memory=memory, addressed=letters)

    return Prepare(owner=owner, fn=fn)


def combined(weights: Tensor, deltas: Leaves, cohort: Cohort) -> Leaves:
    """Per client k ``w + sum_j weights[k, j] delta_j``, as stacks."""
    return {n: cohort.leaves[n] + torch.einsum("kj,j...->k...", weights.to(v.dtype), v) for n, v in deltas.items()}


# FedPAC ---------------------------------------------------------------------------------------------------


def head_weights(h: Tensor, v: Tensor) -> Tensor:
    """Row k is ``argmin_a a^T (diag(V) + D_k) a`` on the simplex, ``D_k[i, j] = sum_c (h_k[c] - h_i[c]) . (h_k[c] - h_j[c])``.

    Weights below 1e-3 are dropped and the rest made to add up to 1 again.

    Args:
        h: clients x classes x dimension.
        v: one variance per client.
    """
    h, v = h.double().flatten(1), v.double()
    apart = h[:, None] - h[None]
    a = simplex.minimise(torch.diag_embed(v) + apart @ apart.transpose(1, 2)).round(decimals=10)
    a = torch.where(a < SMALL, 0.0, a)
    return a / a.sum(1, keepdim=True)


@recipe(
    "lam >= 0",
    "head_epochs >= 1",
    "head_lr > 0",
    paper="Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023, Algorithm 1",
    presets={"original": {"lam": 1.0, "head_epochs": 1, "head_lr": 0.1}},
)
def fedpac(lam: float = 1.0, head_epochs: int = 1, head_lr: float | None = None) -> Method:
    """A shared body whose features gather at shared class centroids, and per client the best mixture of all heads.

    First the head trains alone on CE, then the body on ``CE + lam mean ||z - C_y||^2`` (no pull while there are no
    centroids; a class without one uses the client's own mean). Before that, under the received body, clients find
    ``h_k[c] = q_k(c) mu_kc`` and ``V_k = (sum_c q_k(c) E||z||^2_c - sum_c ||h_k[c]||^2) / n_k``. The server averages the
    bodies, joins the centroids, and makes for each k of the round ``psi_k = sum_j a_kj psi_j``, ``a_k = argmin a^T
    (diag(V) + D_k) a`` on the simplex. The head reaches its client when it next
    takes part or is evaluated; a client that has none begins with the mean head.

    Args:
        lam: strength of the pull.
        head_epochs: epochs on the head.
        head_lr: step on the head; None for the run's optimiser.
    """

    def feature(view: View) -> Tensor:
        z = pooled(view.z)
        return torch.cat([z, (z**2).sum(1, keepdim=True)], 1)

    def align(view: View, batch: Batch, seen: Seen) -> Tensor:
        shared, mine = seen.broadcast[CENTROIDS], seen.swept["fedpac"]
        local = mine["sum"][:, :-1] / mine["count"].clamp(min=1)[:, None]
        centres = torch.where(shared["known"][:, None] > 0, shared["mean"], local)
        return lam * pull(pooled(view.z), batch, centres, shared["known"].amax().expand_as(shared["known"]))

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        sums = seen.swept["fedpac"]["sum"] / seen.n
        h, square = sums[:, :-1], sums[:, -1].sum()
        return {**message, "fedpac": {"h": h, "v": (square - (h**2).sum()) / seen.n}}, memory

    def mix(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        a = head_weights(reduced["fedpac"]["h"], reduced["fedpac"]["v"])
        heads = {i.name for i in cohort.structure.leaves if i.role == "head"}
        deltas = {n: v for n, v in reduced["fedpac_heads"].items() if n in heads}
        return reduced, posted(memory, combined(a, deltas, cohort), cohort)

    head = Phase(
        name="head",
        leaves="head",
        epochs=head_epochs,
        stream="head",
        eval_norm="body",
        optimizer=None if head_lr is None else sgd(lr=head_lr),
    )
    body = Phase(name="body", leaves="body")
    stage = Stage(owner="fedpac", fn=tell, entries={"fedpac": stack()}, also={"fedpac_heads": ("delta", stack())})
    method = (
        fedavg()
        .replacing_schedule("fedpac", round=(Receive(), class_sweep("fedpac", feature=feature), head, body, Send()))
        .replacing_receive("fedpac", lambda start, seen: dict(seen.addressed["fedpac"]))
        .adding(
            rules=(Rule(owner="fedpac", pattern="head", kind="mirrored"),),
            terms=(Term(owner="fedpac", fn=align, phases=("body",), taps=("z",)),) if lam else (),
            stages=(stage,),
            prepare=(delivery("fedpac", "head"),),
            server=(ServerStage(owner="fedpac", fn=mix, memory=lambda facts: {}),),
        )
    )
    return with_prototypes(method)


# FedCAC ---------------------------------------------------------------------------------------------------


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
