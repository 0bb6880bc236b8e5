"""A method of one's own, registered where this module is imported while OWN is in the environment.

Looking for doctests imports every file here, and must not add a method that other tests would then find.
"""

from __future__ import annotations

import os

import fedloom as fl
from fedloom.spec.registry import recipe

OWN = "FEDLOOM_TEST_OWN_METHOD"

if OWN in os.environ:

    @recipe("mu >= 0", force=True)
    def compared_near(mu: float = 0.1) -> fl.Method:
        """FedAvg near its anchor.

        Args:
            mu: strength.
        """
        return fl.compose(fl.fedavg(), fl.proximal(mu=mu))
