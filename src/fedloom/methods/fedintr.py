"""FedIntR: MOON's contrast at every block, ``mu sum_l a_l l_l``."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedloom.methods.fedavg import fedavg
from fedloom.methods.moon import _contrast, _cosines, _previous_model
from fedloom.ops import pooled
from fedloom.plugins.prototypes import feature_width
from fedloom.spec.blocks import blocks
from fedloom.spec.method import Method
from fedloom.spec.parts import Extra, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.structure import Structure
from fedloom.spec.two_layer_net import apply_two_layers, two_layers
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves


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
