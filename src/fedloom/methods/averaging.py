"""Local training, FedAvg, and corrections of FedAvg's local steps."""

from __future__ import annotations

from dataclasses import replace

from fedloom.objectives import data_term
from fedloom.plugins.control_variates import control_variates
from fedloom.plugins.proximal import proximal
from fedloom.record import Method, compose
from fedloom.registry import recipe
from fedloom.slots import Partition, Phase, Receive, Schedule, Send
from fedloom.uploads import send_model


@recipe()
def local(stream: str = "main") -> Method:
    """Each client trains alone, in the rounds in which it is sampled.

    ``theta_k <- theta_k - eta grad f_k(theta_k)``. Nothing is sent. With partial participation the work equals FedAvg's.

    Args:
        stream: the random stream that orders the rows; ``"own"`` is that of second copies such as Ditto's.
    """
    return Method(
        objective=(data_term(),),
        partition=Partition(base="personal"),
        schedule=Schedule(round=(Receive(), Phase(stream=stream), Send())),
    )


@recipe("epochs >= 1")
def local_full(epochs: int | None = None) -> Method:
    """Each client trains alone, in every round, sampled or not: the strongest form of local training.

    ``theta_k <- theta_k - eta grad f_k(theta_k)``, ``epochs`` passes a round for everybody. Nothing is sent. With all clients
    sampled it is ``local`` bit for bit.

    Args:
        epochs: passes a round; None for the run's.
    """
    method = local()
    phase = Phase(epochs=epochs, stream="main")
    schedule = replace(method.schedule, round=(Receive(), phase, Send()), participation="all")
    return replace(method, schedule=schedule)


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


@recipe(
    "mu >= 0",
    paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    presets={"fedaims": {"mu": 0.5}, "omniisr": {"mu": 0.005}, "fedmap": {"mu": 2.0}},
    plugin="proximal",
)
def fedprox(mu: float = 0.01) -> Method:
    """FedAvg with a proximal term: clients minimise ``f_k(theta) + (mu/2) ||theta - w||^2``.

    Args:
        mu: strength; 0 is FedAvg bit for bit.
    """
    return compose(fedavg(), proximal(mu))


@recipe("eta_g > 0", paper="Karimireddy et al., SCAFFOLD, ICML 2020, Algorithm 1", plugin="control_variates")
def scaffold(eta_g: float = 1.0) -> Method:
    """FedAvg with control variates: each local step uses ``g - c_k + c``, means are uniform.

    Args:
        eta_g: the server's step.
    """
    return compose(fedavg(), control_variates(eta_g))
