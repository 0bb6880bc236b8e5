"""FedRoD: a shared model trained for balanced classes, and a personal linear head W_k added to its logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom import ops
from fedloom.methods.fedavg import fedavg
from fedloom.plugins.prototypes import feature_width
from fedloom.spec.class_losses import CLASSES
from fedloom.spec.method import Method
from fedloom.spec.parts import Extra, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.structure import Structure
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves


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
