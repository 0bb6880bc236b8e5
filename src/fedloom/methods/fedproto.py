"""FedProto: personal models; clients exchange class means of features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedloom.methods.local import local
from fedloom.ops import pooled
from fedloom.plugins.prototypes import OWNER, prototypes
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.view import View


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
