"""FedAvg for some rounds, then local training: the control for FedLAG."""

from __future__ import annotations

from dataclasses import replace

from fedloom.methods.fedavg import fedavg
from fedloom.methods.local import local
from fedloom.plugins.lag import PAPER
from fedloom.spec.method import Method
from fedloom.spec.registry import recipe


@recipe("rounds >= 0", paper=PAPER + " (what its public code does)")
def fedavg_then_local(rounds: int = 31) -> Method:
    """FedAvg for some rounds, then each client trains alone: the control for FedLAG.

    FedLAG's public code sends nothing after its warm-up, so this, and not FedLAG, is what it runs.

    Args:
        rounds: rounds of FedAvg.
    """
    return replace(fedavg(), then=(rounds, local()))
