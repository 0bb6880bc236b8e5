"""A method of one's own, registered where this module is imported."""

from __future__ import annotations

import fedloom as fl
from fedloom.registry import recipe


@recipe("mu >= 0", force=True)
def compared_near(mu: float = 0.1) -> fl.Method:
    """FedAvg near its anchor.

    Args:
        mu: strength.
    """
    return fl.compose(fl.fedavg(), fl.proximal(mu=mu))
