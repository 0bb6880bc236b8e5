"""LG-FedAvg: a personal body and a shared head."""

from __future__ import annotations

from dataclasses import replace

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.personal import personal
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


@recipe(
    "pretrain_rounds >= 0",
    paper="Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020, Algorithm 1",
)
def lg_fedavg(pretrain_rounds: int = 0) -> Method:
    """A personal body under a shared head, trained together; the head is averaged.

    ``psi <- psi + sum_k p_k (psi_k - psi)``, psi the head. Only the head travels.

    Args:
        pretrain_rounds: rounds of FedAvg on the whole model first (the paper starts from such a model).
    """
    method = compose(fedavg(), personal("body"))
    return replace(fedavg(), then=(pretrain_rounds, method)) if pretrain_rounds else method
