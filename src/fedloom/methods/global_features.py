"""Methods that pull a client's features towards those of the federation: FedProto, MOON, FedIntR."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.methods.averaging import fedavg, local
from fedloom.objectives.classes import teacher
from fedloom.objectives.nets import apply_two_layers, two_layers
from fedloom.plugins.prototypes import OWNER, feature_width, prototypes
from fedloom.record import Method, compose
from fedloom.registry import recipe
from fedloom.slots import Extra, Stage, Term
from fedloom.structure import Structure
from fedloom.taps import blocks, pooled
from fedloom.types import Batch, Facts, Leaves, Message, Seen
from fedloom.view import View


@recipe(
    "lam >= 0",
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, Algorithm 1",
    presets={"authors": {"weight": "uniform"}},
    plugin="prototypes",
)
def fedproto(
    lam: float = 1.0, weight: Literal["n", "uniform"] = "n", predict: Literal["head", "nearest"] = "head"
) -> Method:
    """Whole models stay with the clients; only class means of features travel.

    Clients minimise ``f_k(theta_k) + lam/(b D) sum_i ||z_i - C_{y_i}||^2``; the server joins the means, ``C_c = sum_k n_kc C_kc
    / sum_k n_kc``.

    Args:
        lam: strength; 0 is local training bit for bit.
        weight: ``"n"`` (the paper), or ``"uniform"`` over the clients that hold a class (the authors' code).
        predict: by the client's own ``"head"``, or by the ``"nearest"`` prototype (logit ``-||z - C_c||^2``).
    """
    method = compose(local(), prototypes(lam, weight))
    return method if predict == "head" else method.replacing_evaluation("fedproto", predict=_nearest, taps=("z",))


def _nearest(view: View, seen: Seen) -> Tensor:
    shared, z = seen.broadcast[OWNER], pooled(view.z)
    distance = ((z[:, None] - shared["mean"]) ** 2).sum(2)
    # A class that was never seen is far away, not infinitely so: the test loss stays a number.
    logits = -torch.where(shared["known"] > 0, distance, distance.amax(1, keepdim=True) + 1e3)
    return logits if view.output.shape[-1] == logits.shape[1] else (logits[:, 1] - logits[:, 0])[:, None]


# Contrast with the received and the previous model --------------------------------------------------------


def _previous_model(owner: str) -> Stage:
    """Keeps the client's final model until it takes part again."""

    def names(specs: Seen | Facts) -> list[str]:
        return [s.name for s in specs.specs.values() if s.copy == "main" and s.floating]

    def keep(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return message, {n: seen.final[n] for n in names(seen)}

    return Stage(owner=owner, fn=keep, memory=lambda facts: {n: facts.start[n] for n in names(facts)})


def _cosines(view: View, seen: Seen, owner: str, read: Callable[[View], list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Per feature and row ``cos(z, z_global)`` and ``cos(z, z_prev)``; at first the previous model is the received one."""
    found = []
    old = read(teacher(view, seen, seen.memory[owner]))
    for z, received, previous in zip(read(view), read(teacher(view, seen)), old, strict=True):
        previous = torch.where(seen.first.bool(), received, previous)
        found.append((F.cosine_similarity(z, received, dim=1), F.cosine_similarity(z, previous, dim=1)))
    return found


def _contrast(towards: Tensor, away: Tensor, tau: float, seen: Seen) -> Tensor:
    """``-log(e^(a/tau) / (e^(a/tau) + e^(b/tau))) - ln 2``.

    At a client's first participation a = b and it is zero. It is made so by a factor: the rounding noise of its gradient is
    all the gradient that a projection gets then, and Adam would make steps of it.
    """
    return (F.softplus((away - towards) / tau) - math.log(2)) * (1 - seen.first)


@recipe(
    "mu >= 0",
    "tau > 0",
    paper="Li et al., Model-Contrastive Federated Learning, CVPR 2021",
    presets={
        "fedaims": {"mu": 1.0, "tau": 0.5},
        "original": {"mu": 1.0, "tau": 0.5, "projection": 256},
        "original_cifar10": {"mu": 5.0, "tau": 0.5, "projection": 256},  # with SGD(0.01, momentum 0.9, decay 1e-5)
    },
)
def moon(mu: float = 1.0, tau: float = 0.5, projection: int | None = None) -> Method:
    """FedAvg with features drawn to the received model's and away from the client's previous model's.

    Adds ``mu mean_i l_i``, ``l = -log(e^(s_g/tau) / (e^(s_g/tau) + e^(s_p/tau)))``, ``s_g = cos(z, z_global)``, ``s_p = cos(z,
    z_prev)``. z is the head's input (pooled). The two other models are in evaluation mode and have no gradient; at a client's
    first participation the previous model is the received one, and the loss is ln 2.

    Args:
        mu: strength; 0 is FedAvg bit for bit.
        tau: temperature.
        projection: outputs of a two-layer projection of z beside the classifier, shared as the model is; None for z
            itself. In the authors' network the classifier reads the projection: a model that ends so needs none here.
    """
    if not mu:
        return fedavg()

    def read(view: View) -> list[Tensor]:
        z = pooled(view.z)
        return [apply_two_layers(view.leaves, "moon:projection", z) if projection else z]

    def term(view: View, batch: Batch, seen: Seen) -> Tensor:
        ((towards, away),) = _cosines(view, seen, "moon", read)
        return mu * (math.log(2) + batch.mean(_contrast(towards, away, tau, seen)))

    def build(structure: Structure, generator: np.random.Generator) -> Leaves:
        width = feature_width(structure)
        return two_layers("projection", width, width, int(projection or 0), generator)

    return fedavg().adding(
        terms=(Term(owner="moon", fn=term, taps=("z",)),),
        stages=(_previous_model("moon"),),
        extras=(Extra(owner="moon", build=build),) if projection else (),
    )


@recipe(
    "mu >= 0",
    "tau > 0",
    "projection >= 1",
    paper="Tun et al., Federated Learning with Intermediate Representation Regularization, BigComp 2023",
    presets={"authors": {"mu": 10.0, "pool": False}},
)
def fedintr(mu: float = 1.0, tau: float = 0.5, projection: int = 256, pool: bool = True) -> Method:
    """MOON's contrast at every block: adds ``mu sum_l a_l l_l``.

    ``l_l = -log(e^(s_g/tau) / (e^(s_g/tau) + e^(s_p/tau)))`` with batch means ``s_g = mean_i cos(z_l, z_l,global)``, ``s_p = mean_i
    cos(z_l, z_l,prev)`` of projected block outputs, and ``a = softmax_l(s_g / tau)``, through which the gradient flows too. The
    last block is the head's input. Projections (two layers) are shared and averaged.

    Args:
        mu: strength; 0 is FedAvg bit for bit.
        tau: temperature.
        projection: width of the projections.
        pool: whether features are pooled over positions; the authors flatten them, at a cost of millions of parameters.
    """
    if not mu:
        return fedavg()

    def read(view: View) -> list[Tensor]:
        found = []
        for i, tap in enumerate(blocks(view.structure)):
            feature = view.feature(tap.name)
            flat = pooled(feature, tap.axis) if pool else feature.flatten(1)
            found.append(apply_two_layers(view.leaves, f"fedintr:{i}", flat))
        return [*found, apply_two_layers(view.leaves, "fedintr:z", pooled(view.z))]

    def term(view: View, batch: Batch, seen: Seen) -> Tensor:
        pairs = [(batch.mean(s_g), batch.mean(s_p)) for s_g, s_p in _cosines(view, seen, "fedintr", read)]
        losses = torch.stack([_contrast(s_g, s_p, tau, seen) for s_g, s_p in pairs])
        a = torch.softmax(torch.stack([s_g for s_g, _ in pairs]) / tau, 0)
        return mu * (math.log(2) + (a * losses).sum())

    def build(structure: Structure, generator: np.random.Generator) -> Leaves:
        wide = {str(i): t.channels * (1 if pool else t.positions) for i, t in enumerate(blocks(structure))}
        wide["z"] = feature_width(structure)
        nets = [two_layers(name, width, projection, projection, generator) for name, width in wide.items()]
        return {k: v for net in nets for k, v in net.items()}

    def taps(structure: Structure) -> tuple[str, ...]:
        return (*(t.name for t in blocks(structure)), "z")

    return fedavg().adding(
        terms=(Term(owner="fedintr", fn=term, taps=taps),),
        stages=(_previous_model("fedintr"),),
        extras=(Extra(owner="fedintr", build=build),),
    )
