"""FedPer: a shared body and a personal head, trained together."""

from __future__ import annotations

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.personal import personal
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


@recipe(paper="Arivazhagan et al., Federated Learning with Personalization Layers, 2019", plugin="personal")
def fedper() -> Method:
    """A shared body and a personal head, trained together; the body is averaged."""
    return compose(fedavg(), personal("head"))
