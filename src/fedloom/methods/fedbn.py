"""FedBN: FedAvg with personal batch normalisation (affine parameters and running statistics)."""

from __future__ import annotations

from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.parts import Rule
from fedloom.spec.registry import recipe


@recipe(paper="Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021")
def fedbn(weight: str = "n") -> Method:
    """FedAvg with personal batch normalisation, found by type: affine parameters and running statistics stay.

    A model without batch normalisation makes it FedAvg bit for bit, with a warning.

    Args:
        weight: ``"n"`` or ``"uniform"`` (the authors' code).
    """
    return fedavg(weight).adding(rules=(Rule(owner="fedbn", pattern="norm", kind="personal", optional=True),))
