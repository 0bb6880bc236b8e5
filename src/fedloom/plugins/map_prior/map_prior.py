"""FedMAP: every client has its own model, pulled towards a prior that the server learns (Algorithms 1 to 3).

The code uses the symbols of the paper:

    theta_k    model of client k, ``delta`` is theta_k - gamma
    gamma      global model, the mean of the prior
    R          ``-log rho_gamma(theta)`` without its constant; ``||theta - gamma||^2 / (2 sigma2)`` for eq. 6
    omega_k    weight of client k (eq. 8), ``w_k`` after normalisation
    s          what a prior learns besides gamma: variances (eq. 18); None for the other priors
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.errors import Conflict, UnknownName
from fedloom.plugins.map_prior.priors import PRIORS, Gaps, Gaussian, Laplace, Prior, gaussian
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Phase, Prepare, Prepared, Program, Receive, Rule, Send, ServerStage, Stage, Sweep, Term
from fedloom.spec.reducers import Reducer, maximum, mean, stack
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.structure import LeafInfo, Structure
from fedloom.spec.terms import apart, quadratic
from fedloom.spec.uploads import send_model
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message

OWNER = "map_prior"
PAPER = "Zhang et al., FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP Optimization"

Omega = Literal["mean_loglik", "mean_loglik_n", "sum_loglik", "n", "uniform"]


@dataclass(frozen=True, slots=True)
class _Map:
    """The options of :func:`map_prior`, Algorithm 2 for the client and Algorithm 3 for the server."""

    prior: Prior
    omega: str
    server_lr: float | None
    server_steps: int

    @property
    def uploads_omega(self) -> bool:
        """Whether clients upload omega_k."""
        return self.omega not in ("n", "uniform")

    @property
    def learns(self) -> bool:
        """Whether the server learns s, for which clients upload squared gaps."""
        return self.prior.needs == "moments"

    @property
    def reducer(self) -> Reducer:
        """The mean ``sum_k w_k (theta_k - gamma)``, from logarithms of omega_k where they are uploaded."""
        return mean("omega", log=True) if self.uploads_omega else mean(self.omega)

    # Algorithm 2, local optimisation.

    def penalty(self, view: View, batch: Batch, seen: Seen) -> Tensor:
        """Line 11: ``-log rho_gamma(theta)``, the term R of the leaves that the phase trains."""
        names = set(self.names(seen))
        return self.R(tuple(n for n in view.trained if n in names), view.leaves, seen)

    def send(self, message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        """Lines 13 and 14: send ``log omega_k`` (eq. 8) in float64, and the squared gaps that s needs."""
        if self.uploads_omega:
            R = self.R(self.names(seen), seen.final, seen, torch.float64).double()
            swept = seen.swept[OWNER]
            loss, n_k = (swept[name].reshape(seen.n.shape) for name in ("loss", "rows"))
            log_omega = {
                "mean_loglik": -loss / n_k - R,
                "mean_loglik_n": -loss / n_k - R / n_k,
                "sum_loglik": -loss - R,
            }[self.omega]
            message = {**message, "omega": {"weight": log_omega}}
        if self.learns:
            message = {**message, "squares": {n: message["delta"][n] ** 2 for n in self.names(seen)}}
        return message, memory

    def names(self, seen: Seen) -> tuple[str, ...]:
        """Return the leaves under the prior: the mirrored trainable ones of the user's model."""
        return seen.names("mirrored", extra=False)

    def R(self, names: tuple[str, ...], theta: Leaves, seen: Seen, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``R(theta, gamma)`` over some leaves.

        Args:
            names: the leaves.
            theta: the client's leaves.
            seen: holds gamma, as received.
            dtype: type to compute in; None for that of the leaves.
        """
        gamma = seen.received
        if isinstance(self.prior, Gaussian) and not self.prior.by_leaf:
            return self.prior.scale() * quadratic(names, theta, gamma, dtype=dtype)
        gaps = {n: apart(theta[n], gamma[n], dtype) for n in names}
        parts = [self.prior.penalty(gap, self.scale(n, seen), self.s(n, seen)) for n, gap in gaps.items()]
        return torch.stack(parts).sum() if parts else torch.zeros(())

    def implicit(self, phase: Phase) -> Phase:
        """Return the phase with R taken implicitly: ``theta <- gamma + near(theta - eta g - gamma)`` after each step."""
        before = phase.project

        def project(leaves: Leaves, seen: Seen) -> Leaves:
            theta = before(leaves, seen) if before is not None else {}
            eta, gamma = seen.rates[phase.name], seen.received
            for n in self.names(seen):
                if phase.name in seen.specs[n].phases:
                    gap = theta.get(n, leaves[n]) - gamma[n]
                    theta[n] = gamma[n] + self.prior.near(gap, self.scale(n, seen), eta, self.s(n, seen))
            return theta

        return replace(phase, project=project)

    def scale(self, name: str, seen: Seen) -> Tensor | float:
        """Return the factor of R for a leaf."""
        return seen.memory[OWNER][name] if self.prior.by_leaf else self.prior.scale()

    def s(self, name: str, seen: Seen) -> Tensor | None:
        """Return what the prior learned for a leaf."""
        return seen.broadcast[OWNER][name] if self.learns else None

    def scales(self, facts: Facts) -> Leaves:
        """Return the memory of a client: the factor of R for each leaf, if it differs between leaves."""
        if not any(s.phases for s in facts.specs.values() if s.kind == "mirrored" and not s.owner):
            raise Conflict("'map_prior' has nothing to act on here: no phase trains a shared leaf of the model itself")
        if not self.prior.by_leaf:
            return {}
        infos = {i.name: i for i in facts.structure.leaves if i.name in facts.travelling()}
        self.prior.check(tuple(infos.values()))
        dtype = facts.structure.dtype
        return {
            n: torch.tensor(self.prior.scale(infos[n]), dtype=dtype, device=v.device)
            for n, v in facts.travelling().items()
        }

    # Algorithm 3, global aggregation.

    def aggregate(self, reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        """Line 5: move gamma to the minimiser of ``sum_k w_k R(theta_k, gamma)``, or down its slope (eq. 3).

        For the Gaussian prior the minimiser is the mean that ``reduced`` holds, so that no stage is needed.
        """
        trainable = set(cohort.structure.trainable())
        delta, memory = dict(reduced["delta"]), dict(memory)
        w = self.weights(reduced, cohort) if self.prior.needs == "all" else None
        for name, value in reduced["delta"].items():
            if name not in trainable:
                continue
            gaps = Gaps(
                mean=value,
                square=reduced["squares"][name] if self.learns else None,
                each=reduced["gaps"][name].double() if w is not None else None,
                weights=None if w is None else w.to(value.device),
            )
            s = memory[name] if self.learns else None
            scale = float(memory[name]) if self.prior.by_leaf else self.prior.scale()
            delta[name], s = self.minimise(gaps, cohort.leaves[name], scale, s)
            if s is not None:
                memory[name] = s
        return {**reduced, "delta": delta}, memory

    def minimise(self, gaps: Gaps, gamma: Tensor, scale: float, s: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the move of one leaf of gamma, and its new s."""
        if self.server_lr is None:
            return self.prior.minimise(gaps, gamma, scale, s)
        move = torch.zeros_like(gamma)
        for _ in range(self.server_steps):
            d_gamma, d_s = self.prior.slope(gaps, gamma, move, scale, s)
            move = move - self.server_lr * d_gamma
            if s is not None and d_s is not None:
                s = self.prior.inside(s - self.server_lr * d_s)
        return move, s

    def weights(self, reduced: Message, cohort: Cohort) -> Tensor:
        """Return ``w_k = omega_k / sum_j omega_j`` of the accepted replies."""
        if self.uploads_omega:
            return torch.softmax(reduced["omegas"]["weight"].double().reshape(-1), 0).cpu()
        omega = torch.tensor(cohort.rows if self.omega == "n" else [1] * len(cohort), dtype=torch.float64)
        return omega / omega.sum()

    def memory(self, facts: Facts) -> Leaves:
        """Return the server's memory before round one: s, or the factors of R."""
        if not self.learns:
            return self.scales(facts)
        return {n: s for n, v in facts.travelling().items() if (s := self.prior.begin(v)) is not None}

    def report(self, memory: Leaves) -> dict[str, Any]:
        """Return the mean of s, per leaf."""
        return {"s": {n: float(v.mean()) for n, v in memory.items()}}


def log_likelihood(view: View, batch: Batch, seen: Seen) -> Leaves:
    """Return the sum of the task's loss over rows, and their number: ``log P(Z_k | theta_k) = -loss``."""
    rows = batch.count().double()
    return {"loss": view.loss().double() * rows, "rows": rows}


def is_parameter(leaf: LeafInfo) -> bool:
    """Return whether a leaf is a trainable one of the user's model."""
    return leaf.trainable and not leaf.owner


def is_buffer(leaf: LeafInfo) -> bool:
    """Return whether a leaf is a buffer of the user's model, which does not leave the client."""
    return leaf.buffer and not leaf.owner


@plugin("sigma2 > 0", "server_lr > 0", "server_steps >= 1", paper=PAPER)
def map_prior(
    sigma2: float = 15.0,
    omega: Omega = "mean_loglik",
    prior: Prior | str | None = None,
    start: Literal["own", "gamma"] = "own",
    server_lr: float | None = None,
    server_steps: int = 1,
    init: Literal["model", "client"] = "model",
    implicit: bool | None = None,
) -> Callable[[Method], Method]:
    """Gives every client a model of its own under a shared prior: clients minimise ``f_k(theta) + R(theta, gamma)``.

    Leaves that were shared become mirrored: sent, but a client starts from its own. The server sets gamma to the minimiser of
    ``sum_k w_k R(theta_k, gamma)``, for a Gaussian the mean ``gamma + sum_k w_k (theta_k - gamma)`` (eq. 9). Buffers stay with the client.
    Leaves that plug-ins bring are left alone.

    Args:
        sigma2: variance of the Gaussian prior; ``inf`` is local training.
        omega: the weights: ``"mean_loglik"`` exp(mean log-likelihood - R), ``"mean_loglik_n"`` with R / n_k, ``"sum_loglik"`` as printed
            (eq. 8: hands nearly all weight to the smallest client), ``"n"`` rows (what the authors' code ran), or ``"uniform"``. They are
            kept as logarithms in float64.
        prior: another prior: ``fl.gaussian``, ``fl.learnable_gaussian``, ``fl.laplace``, ``fl.student_t``, or its name.
        start: a client goes on from its ``"own"`` model (Algorithm 2) or from ``"gamma"``.
        server_lr: step of the server's gradient descent (eq. 3); None for the exact minimiser.
        server_steps: number of such steps.
        init: gamma and every client begin with the ``"model"`` given, or with that of one ``"client"``, drawn by the seed, after one local
            phase (Algorithm 1, lines 3 to 5).
        implicit: take R implicitly after each gradient step, which is stable for every sigma2; None for the Laplace prior only, whose
            gradient is not defined where a client's parameter is the median.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedrep(), fl.map_prior(sigma2=1.0)))
        fedrep() + map_prior(sigma2=1.0)
    """
    chosen = named(prior, sigma2)
    if implicit is None:
        implicit = isinstance(chosen, Laplace)
    if implicit:
        chosen.near(torch.zeros(1), 1.0, 0.0, torch.zeros(1))  # raises if the prior has no implicit step
    it = _Map(chosen, omega, server_lr, server_steps)

    def apply(method: Method) -> Method:
        for part in ("what clients start from", "the receive rule"):
            method = method.claiming(part, OWNER)
        if "delta" not in method.reducers():
            raise Conflict(f"'map_prior' cannot be stacked on {method.text!r}, which uploads no trained leaf")
        # Algorithm 3 for the Gaussian prior: eq. 9.
        method = method.replacing_reducer(OWNER, "delta", it.reducer)
        # Every client has its own theta_k, and sends it.
        method = method.adding(
            rules=(
                Rule(owner=OWNER, pattern=is_parameter, kind="mirrored", only="shared"),
                Rule(owner=OWNER, pattern=is_buffer, kind="personal", only="shared", optional=True),
            )
        )
        # Algorithm 1, lines 3 to 5.
        if init == "client":
            method = _begin_with_one_client(method)
        # Algorithm 2.
        program: Program = method.schedule.round
        if start == "gamma":
            program = tuple(replace(step, mirrored=True) if isinstance(step, Receive) else step for step in program)
        if implicit and not chosen.flat:
            program = tuple(
                it.implicit(step) if isinstance(step, Phase) and step.copy == "main" else step for step in program
            )
        method = replace(method, schedule=replace(method.schedule, round=program))
        if not implicit and not chosen.flat:
            method = method.adding(terms=(Term(owner=OWNER, fn=it.penalty, phases=_not_first),))
        entries: dict[str, Reducer] = {"omega": maximum()} if it.uploads_omega else {}
        also = {"gaps": ("delta", stack())} if chosen.needs == "all" else {}
        if it.uploads_omega:
            method = method.sweeping(Sweep(name=OWNER, fn=log_likelihood))
            if also:
                also["omegas"] = ("omega", stack())
        if it.learns:
            entries["squares"] = it.reducer
        method = method.adding(stages=(Stage(owner=OWNER, fn=it.send, entries=entries, also=also, memory=it.scales),))
        # Algorithm 3 for the other priors, and for steps down the slope.
        if server_lr is not None or not isinstance(chosen, Gaussian):
            memory = it.memory if it.learns or chosen.by_leaf else None
            report = it.report if it.learns else None
            method = method.adding(server=(ServerStage(owner=OWNER, fn=it.aggregate, memory=memory, report=report),))
        if it.learns:
            method = method.adding(
                prepare=(Prepare(owner=OWNER, fn=lambda s, cohort: Prepared(memory=s, broadcast=s)),)
            )
        return method

    return apply


def named(prior: Prior | str | None, sigma2: float) -> Prior:
    """Return the prior of a name; the Gaussian by default."""
    if prior is None:
        return gaussian(sigma2)
    if isinstance(prior, Prior):
        return prior
    if prior not in PRIORS:
        raise UnknownName("prior", str(prior), PRIORS)
    return gaussian(sigma2) if prior == "gaussian" else PRIORS[prior]()


def _not_first(phase: Phase, structure: Structure) -> bool:
    return phase.name != "first"


def _begin_with_one_client(method: Method) -> Method:
    """Add a setup in which one client trains without the prior and all clients take its model."""
    program = (Receive(), Phase(name="first", stream="first"), Send())
    method = method.replacing_schedule(OWNER, setup=program, setup_by="one")
    return method.adding(stages=(replace(send_model("uniform", buffers="uniform"), when="setup"),))
