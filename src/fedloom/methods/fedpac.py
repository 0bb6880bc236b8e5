"""FedPAC: a shared body with features near shared class centroids; per client the best combination of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.methods.client_combinations import combined, delivery, posted
from fedloom.methods.fedavg import fedavg
from fedloom.ops import simplex
from fedloom.plugins.prototypes import OWNER as CENTROIDS
from fedloom.plugins.prototypes import class_sweep, pooled, pull, with_prototypes
from fedloom.spec.method import Method
from fedloom.spec.optimizer import sgd
from fedloom.spec.parts import Phase, Receive, Rule, Send, ServerStage, Stage, Term
from fedloom.spec.reducers import stack
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message

SMALL = 1e-3


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
