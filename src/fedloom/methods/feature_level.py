"""Methods that add to, or rewrite, what the head sees: FedRoD, FedDBE and GPFL."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import ops
from fedloom.errors import UserError
from fedloom.methods.averaging import fedavg
from fedloom.methods.personalised import fedper
from fedloom.objectives import quadratic
from fedloom.plugins.prototypes import feature_width
from fedloom.record import Method
from fedloom.reducers import mean
from fedloom.registry import recipe
from fedloom.slots import Extra, Prepare, Prepared, Receive, Send, ServerStage, Stage, Sweep, Term
from fedloom.structure import Structure
from fedloom.types import Batch, Cohort, Facts, Leaves, Message, Seen
from fedloom.view import View

CLASSES = ("classification", "binary")


# FedRoD ---------------------------------------------------------------------------------------------------


def balanced_loss(logits: Tensor, batch: Batch, counts: Tensor) -> Tensor:
    """Balanced soft-max: cross-entropy of ``logits_c + log n_c``; a class without rows has -1e9 in place of log 0."""
    prior = torch.where(counts > 0, counts.to(logits.dtype).clamp(min=1).log(), -1e9)
    return batch.mean(ops.cross_entropies(logits + prior, batch.y.long()))


@recipe(
    paper="Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022, eqs. 7, 8"
)
def fedrod() -> Method:
    """A shared model trained for balanced classes, and a personal linear head W_k that adds to its logits.

    Shared: the balanced soft-max ``CE(g(z) + log n_kc, y)``; personal: ``CE(sg(g(z)) + sg(z) W_k, y)``, where sg stops the
    gradient, so that nothing of it reaches the shared model. Both on every mini-batch. W_k begins at zero. A client
    predicts with ``g(z) + z W_k``, the shared model with ``g(z)``.
    """

    def addition(view: View, z: Tensor) -> Tensor:
        return ops.linear(z, view.leaves["fedrod:weight"], view.leaves["fedrod:bias"])

    def generic(view: View, batch: Batch, seen: Seen) -> Tensor:
        return balanced_loss(view.logits, batch, seen.counts)

    def own(view: View, batch: Batch, seen: Seen) -> Tensor:
        return view.loss(view.output.detach() + addition(view, view.z.detach()))

    def build(structure: Structure, generator: np.random.Generator) -> Leaves:
        width = feature_width(structure)
        return {"weight": torch.zeros(structure.outputs, width), "bias": torch.zeros(structure.outputs)}

    terms = (Term(owner="fedrod", fn=f, role="data", taps=("z",)) for f in (generic, own))
    method = (
        fedavg()
        .adding(extras=(Extra(owner="fedrod", build=build, kind="personal", role="head"),))
        .replacing_data(*terms)
        .replacing_evaluation("fedrod", predict=lambda view, seen: view.output + addition(view, view.z), taps=("z",))
    )
    return replace(method, tasks=CLASSES)


# FedDBE ---------------------------------------------------------------------------------------------------


def mean_gap(m: Tensor, shared: Tensor) -> Tensor:
    """``1/2 mean_d (m_d - Mg_d)^2``."""
    return 0.5 * ((m - shared) ** 2).mean()


@recipe(
    "kappa >= 0",
    "0 < mu <= 1",
    paper="Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023, eqs. 5 to 7",
    presets={"original": {"kappa": 50.0, "mu": 1.0}, "small": {"kappa": 1.0}},
)
def feddbe(kappa: float = 50.0, mu: float = 1.0, bias: bool = True) -> Method:
    """FedAvg whose features agree in mean across clients, while a personal bias b_k takes up the difference.

    Clients minimise ``CE(head(z + b_k)) + kappa/2 mean_d (m_k - Mg)^2`` with the running mean ``m_k <- (1 - mu) sg(m_k)
    + mu mean(z)``, zero when the round begins (sg stops the gradient). ``Mg`` is the rows' mean of z under the initial
    model, over all clients, made once before round one. The shared model is tested without a bias. kappa is in units of the
    features: the paper's 50 holds those of small perceptrons where they began, and ``preset="small"`` takes 1.

    Args:
        kappa: strength of the agreement; 0 builds no term.
        mu: weight of the present mini-batch in the running mean.
        bias: whether there is a personal bias; without it and with kappa 0 this is FedAvg bit for bit.
    """

    def add_up(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"mean": batch.sum(view.z)}

    def average(sums: Leaves, seen: Seen) -> Leaves:
        return {"mean": sums["mean"] / seen.n}

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, "feddbe": seen.swept["feddbe"]}, memory

    def settle(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        return reduced, reduced["feddbe"]

    def blank(facts: Facts) -> Leaves:
        return {"mean": _zeros(facts.structure)}

    def agree(view: View, batch: Batch, seen: Seen, carry: Leaves) -> tuple[Tensor, Leaves]:
        now = batch.sum(view.z) / batch.count().clamp(min=1).to(view.z.dtype)
        m = (1 - mu) * carry["mean"] + mu * now
        return kappa * mean_gap(m, seen.broadcast["feddbe"]["mean"]), {"mean": m}

    method = fedavg()
    if bias:
        extra = Extra(owner="feddbe", build=lambda s, generator: {"bias": _zeros(s)}, kind="personal", role="head")
        method = method.adding(extras=(extra,)).replacing_rewrite(
            "feddbe", lambda z, leaves, seen: z + leaves["feddbe:bias"]
        )
    if not kappa:
        return method
    sweep = Sweep(name="feddbe", fn=add_up, finish=average, taps=("z",))
    return method.replacing_schedule("feddbe", setup=(Receive(), sweep, Send())).adding(
        terms=(Term(owner="feddbe", fn=agree, taps=("z",), carry=lambda s: {"mean": _zeros(s)}),),
        stages=(Stage(owner="feddbe", fn=tell, entries={"feddbe": mean("n")}, when="setup"),),
        prepare=(Prepare(owner="feddbe", fn=lambda memory, cohort: Prepared(memory=memory, broadcast=memory)),),
        server=(ServerStage(owner="feddbe", fn=settle, memory=blank, when="setup"),),
    )


def _zeros(structure: Structure) -> Tensor:
    if structure.task == "segmentation":
        raise UserError(
            "feddbe: it corrects one feature vector per row, and dense prediction has one per pixel; use fedbn"
        )
    return torch.zeros(feature_width(structure), dtype=structure.dtype)


# GPFL -----------------------------------------------------------------------------------------------------


def conditioned(z: Tensor, condition: Tensor, leaves: Leaves) -> Tensor:
    """``relu(z (1 + g) + s)``, where g and s are two small nets (linear, ReLU, layer norm) of the condition vector."""
    g, s = (_valve(condition, leaves, f"gpfl:{name}") for name in ("scale", "shift"))
    return torch.relu(z * (1 + g) + s)


def _valve(condition: Tensor, leaves: Leaves, name: str) -> Tensor:
    hidden = torch.relu(leaves[f"{name}.weight"] @ condition + leaves[f"{name}.bias"])
    return F.layer_norm(hidden, hidden.shape, leaves[f"{name}.gain"], leaves[f"{name}.offset"])


@recipe(
    "lam >= 0",
    "mu >= 0",
    paper="Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information, ICCV 2023, eqs. 3 to 10",
    presets={"original": {"lam": 0.01, "mu": 0.1}, "resnet18": {"lam": 1e-4, "mu": 0.0}},
)
def gpfl(lam: float = 0.01, mu: float = 0.1) -> Method:
    """A personal head on features steered by the client's label mix, and shared class embeddings that steer the features.

    ``CE(head(relu(z (1 + g_p) + s_p))) + CE(cos(zg, e_c), y) + lam ||zg - sg(e_y)||`` with ``zg = relu(z (1 + g_0) + s_0)``. The
    scale g and the shift s are two small shared nets of a condition vector: p is the mean of the received class
    embeddings by the client's label frequencies, 0 their plain mean. The norm is over the whole mini-batch, not squared;
    its e_y are the received embeddings. ``(mu/2) ||.||^2`` on embeddings and nets is their weight decay. Body,
    embeddings and nets are averaged, the head stays; a client predicts with the p route.

    Args:
        lam: weight of the magnitude term.
        mu: weight decay of embeddings and nets.
    """

    def condition(seen: Seen, counts: Tensor) -> Tensor:
        e = seen.received["gpfl:embeddings"]
        return counts.to(e.dtype) / counts.sum() @ e

    def steer(z: Tensor, leaves: Leaves, seen: Seen) -> Tensor:
        return conditioned(z, condition(seen, seen.counts), leaves)

    def guide(view: View, batch: Batch, seen: Seen) -> Tensor:
        e, y = view.leaves["gpfl:embeddings"], batch.y.long()
        zg = conditioned(view.z, condition(seen, torch.ones_like(seen.counts)), view.leaves)
        cosines = F.normalize(zg) @ F.normalize(e).T
        loss = batch.mean(ops.cross_entropies(cosines, y))
        if lam:
            square = batch.sum((zg - seen.received["gpfl:embeddings"][y]) ** 2).sum()
            # A mini-batch of padding only has norm zero, where the square root has no gradient.
            loss = loss + lam * torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
        return loss

    def decay(view: View, batch: Batch, seen: Seen) -> Tensor:
        own = tuple(n for n in view.trained if n.startswith("gpfl:"))
        return mu * quadratic(own, view.leaves, {n: torch.zeros_like(view.leaves[n]) for n in own})

    def build(structure: Structure, generator: np.random.Generator) -> Leaves:
        d = feature_width(structure)

        def uniform(*shape: int) -> Tensor:
            return torch.from_numpy(generator.uniform(-1 / math.sqrt(d), 1 / math.sqrt(d), shape))

        made = {"embeddings": torch.from_numpy(generator.normal(size=(max(structure.outputs, 2), d)))}
        for name in ("scale", "shift"):
            made |= {f"{name}.weight": uniform(d, d), f"{name}.bias": uniform(d)}
            made |= {f"{name}.gain": torch.ones(d), f"{name}.offset": torch.zeros(d)}
        return made

    terms = (Term(owner="gpfl", fn=guide, taps=("z",)), *((Term(owner="gpfl", fn=decay),) if mu else ()))
    method = fedper().adding(extras=(Extra(owner="gpfl", build=build),), terms=terms).replacing_rewrite("gpfl", steer)
    return replace(method, tasks=CLASSES)
