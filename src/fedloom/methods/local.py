"""Local training: every client trains alone."""

from __future__ import annotations

from dataclasses import replace

from fedloom.spec.method import Method
from fedloom.spec.parts import Partition, Phase, Receive, Schedule, Send
from fedloom.spec.registry import recipe
from fedloom.spec.terms import data_term


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
