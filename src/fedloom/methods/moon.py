"""MOON: features near the received model's and far from the client's previous model's."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.methods.fedavg import fedavg
from fedloom.ops import pooled
from fedloom.plugins.prototypes import feature_width
from fedloom.spec.class_losses import teacher
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Extra, Stage, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.structure import Structure
from fedloom.spec.two_layer_net import apply_two_layers, two_layers
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message


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
