"""The proximal term of FedProx."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedloom.spec.method import Method
from fedloom.spec.parts import Term
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Seen
from fedloom.spec.terms import quadratic
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch


@plugin("mu >= 0", paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, eq. 2")
def proximal(mu: float = 0.01) -> Callable[[Method], Method]:
    """Keeps a client near the model it received: adds ``(mu/2) ||theta - w||^2``.

    Over the trainable leaves that travel; a leaf that is personal in this round is left alone. ``mu=0`` builds no term.

    Args:
        mu: strength.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedper(), fl.proximal(mu=0.1)))
        fedper() + proximal(mu=0.1)
    """

    def penalty(view: View, batch: Batch, seen: Seen) -> Tensor:
        names = tuple(n for n in view.trained if seen.specs[n].sent)
        return mu * quadratic(names, view.leaves, seen.received, seen)

    return lambda method: method.adding(terms=(Term(owner="proximal", fn=penalty),)) if mu else method
