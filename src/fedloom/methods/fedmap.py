"""FedMAP: personal models as MAP estimates under a prior that the server learns (see ``map_prior``)."""

from __future__ import annotations

from typing import Literal

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.map_prior.map_prior import PAPER, Omega, map_prior
from fedloom.plugins.map_prior.priors import Prior
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


@recipe(
    "sigma2 > 0",
    "server_lr > 0",
    "server_steps >= 1",
    paper=PAPER,
    presets={"code": {"sigma2": 15.0, "omega": "n"}},
    plugin="map_prior",
)
def fedmap(
    sigma2: float = 15.0,
    omega: Omega = "mean_loglik",
    prior: Prior | str | None = None,
    start: Literal["own", "gamma"] = "own",
    server_lr: float | None = None,
    server_steps: int = 1,
    init: Literal["model", "client"] = "model",
    implicit: bool | None = None,
) -> Method:
    """Every client has its own model, the posterior mode under a prior that the server learns (see ``map_prior``).

    ``theta_k = argmin f_k(theta) + ||theta - gamma||^2 / (2 sigma2)`` (eq. 7), ``gamma = sum_k omega_k theta_k / sum_k omega_k`` (eq. 9).
    A client goes on from its own model; at its first participation it starts from the gamma received then. As sigma2 tends to 0 nothing
    moves (it does not become FedAvg); ``inf`` is local training, bit for bit at full participation.

    Args:
        sigma2: variance of the Gaussian prior.
        omega: the weights of the mean.
        prior: another prior.
        start: ``"own"`` or ``"gamma"``.
        server_lr: step of the server's gradient descent; None for the exact minimiser.
        server_steps: number of such steps.
        init: begin with the ``"model"`` given, or with one ``"client"``'s after one local phase.
        implicit: take the prior implicitly; None where its gradient needs it.

    Example:
        >>> import fedloom as fl
        >>> print(fl.method("fedmap(sigma2=2.0, prior=laplace(b=0.5))"))
        fedmap(sigma2=2.0, prior=laplace(b=0.5))
    """
    return compose(fedavg(), map_prior(sigma2, omega, prior, start, server_lr, server_steps, init, implicit))
