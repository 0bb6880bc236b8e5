"""FedProto's use of class prototypes; the parts are in :mod:`fedloom.spec.prototypes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from fedloom.errors import UserError
from fedloom.ops import pooled
from fedloom.spec.method import Method
from fedloom.spec.parts import Term
from fedloom.spec.prototypes import OWNER, class_sweep, feature_width, pull, with_prototypes
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch

__all__ = ["OWNER", "class_sweep", "feature_width", "pooled", "prototypes", "pull", "with_prototypes"]


@plugin(
    "lam >= 0",
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, Algorithm 1",
)
def prototypes(lam: float = 1.0, weight: Literal["n", "uniform"] = "n") -> Callable[[Method], Method]:
    """Pulls features to the classes' shared means: adds ``lam/(b D) sum_i ||z_i - C_{y_i}||^2``.

    z is the head's input. After local training each client sends the sums and counts of z per class (evaluation mode, all
    rows); the server sends back ``C_c = sum_k n_kc C_kc / sum_k n_kc``, and keeps the old C_c where no client of the
    round holds c. Classes without a prototype add nothing.

    Args:
        lam: strength; 0 builds no term.
        weight: ``"n"`` (the paper), or ``"uniform"`` over the clients that hold a class (the authors' code).
    """
    if weight not in ("n", "uniform"):
        raise UserError(f"prototypes: weight={weight!r}; expected 'n' or 'uniform'")

    def term(view: View, batch: Batch, seen: Seen) -> Tensor:
        shared = seen.broadcast[OWNER]
        return lam * pull(pooled(view.z), batch, shared["mean"], shared["known"])

    def apply(method: Method) -> Method:
        method = with_prototypes(method, weight=weight)
        return method.adding(terms=(Term(owner=OWNER, fn=term, taps=("z",)),)) if lam else method

    return apply
