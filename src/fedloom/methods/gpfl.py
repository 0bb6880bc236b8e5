"""GPFL: a personal head on features conditioned on the client's labels, and shared class embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import ops
from fedloom.methods.fedper import fedper
from fedloom.plugins.prototypes import feature_width
from fedloom.spec.class_losses import CLASSES
from fedloom.spec.method import Method
from fedloom.spec.parts import Extra, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.structure import Structure
from fedloom.spec.terms import quadratic
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves


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
