"""One shared model, the mean of the clients': ``w <- w + sum_k p_k (theta_k - w)``."""

from __future__ import annotations

from fedloom.spec.method import Method
from fedloom.spec.registry import recipe
from fedloom.spec.terms import data_term
from fedloom.spec.uploads import send_model


@recipe(paper="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017")
def fedavg(weight: str = "n") -> Method:
    """One shared model, the mean of the clients': ``w <- w + sum_k p_k (theta_k - w)``.

    Args:
        weight: ``"n"`` for p_k proportional to the clients' rows, ``"uniform"`` for equal weights.

    Example:
        >>> import fedloom as fl
        >>> fl.fedavg().reducers()["delta"]
        Reducer(kind='mean', weight='n', log=False)
    """
    return Method(objective=(data_term(),), upload=(send_model(weight),))
