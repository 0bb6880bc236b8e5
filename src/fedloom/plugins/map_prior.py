"""FedMAP: every client has a model of its own, pulled towards a prior that the server learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.errors import Conflict, UnknownName
from fedloom.objectives import apart, quadratic
from fedloom.objectives.terms import half_squares_of_all
from fedloom.priors import PRIORS, Gaps, Gaussian, Laplace, Prior, gaussian
from fedloom.record import Method
from fedloom.reducers import Reducer, maximum, mean, stack
from fedloom.registry import plugin
from fedloom.slots import Phase, Prepare, Prepared, Program, Receive, Rule, Send, ServerStage, Stage, Sweep, Term
from fedloom.structure import LeafInfo, Structure
from fedloom.types import Batch, Cohort, Facts, Leaves, Message, Seen
from fedloom.uploads import send_model
from fedloom.view import View

OWNER = "map_prior"
PAPER = "Zhang et al., FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP Optimization"

Omega = Literal["mean_loglik", "mean_loglik_n", "sum_loglik", "n", "uniform"]


@dataclass(frozen=True, slots=True)
class _Map:
    """The options of the plug-in, and both sides of it."""

    prior: Prior
    omega: str
    server_lr: float | None
    server_steps: int

    @property
    def weighted(self) -> bool:
        """Whether clients upload their weights."""
        return self.omega not in ("n", "uniform")

    @property
    def plain(self) -> bool:
        """Whether R is one number times the squared gaps of all leaves."""
        return isinstance(self.prior, Gaussian) and not self.prior.by_leaf

    @property
    def reducer(self) -> Reducer:
        """The mean ``sum_k w_k (theta_k - gamma)``, in log space where weights are uploaded."""
        return mean("omega", log=True) if self.weighted else mean(self.omega)

    # The client's side.

    def scales(self, facts: Facts) -> Leaves:
        """The factor of R for each leaf, where it differs between leaves; nothing else is kept by clients."""
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

    def scale(self, name: str, seen: Seen) -> Tensor | float:
        return seen.memory[OWNER][name] if self.prior.by_leaf else self.prior.scale()

    def learnt(self, name: str, seen: Seen) -> Tensor | None:
        return seen.broadcast[OWNER][name] if self.prior.needs == "moments" else None

    def names(self, seen: Seen) -> tuple[str, ...]:
        """The leaves that the prior is about: the user's trainable ones that are mirrored."""
        return seen.names("mirrored", extra=False)

    def penalty(self, names: tuple[str, ...], leaves: Leaves, seen: Seen, dtype: torch.dtype | None = None) -> Tensor:
        """R over some leaves, computed in a type; None for that of the leaves. Of a plain prior also for all clients of a wave."""
        gamma = seen.received
        if self.plain:
            if seen.n.dim() and names:
                theirs, common = [leaves[n] for n in names], [gamma[n] for n in names]
                return self.prior.scale() * half_squares_of_all(theirs, common, dtype or theirs[0].dtype)
            return self.prior.scale() * quadratic(names, leaves, gamma, dtype=dtype)
        gaps = {n: apart(leaves[n], gamma[n], dtype) for n in names}
        parts = [self.prior.penalty(gap, self.scale(n, seen), self.learnt(n, seen)) for n, gap in gaps.items()]
        return torch.stack(parts).sum() if parts else torch.zeros(())

    def term(self, view: View, batch: Batch, seen: Seen) -> Tensor:
        mine = set(self.names(seen))
        return self.penalty(tuple(n for n in view.trained if n in mine), view.leaves, seen)

    def implicit(self, phase: Phase) -> Phase:
        """The phase with R taken implicitly: ``theta <- gamma + near(theta - eta g - gamma)`` after each step."""
        before = phase.project

        def project(leaves: Leaves, seen: Seen) -> Leaves:
            changed = before(leaves, seen) if before is not None else {}
            eta = seen.rates[phase.name]
            for n in self.names(seen):
                if phase.name in seen.specs[n].phases:
                    gap = changed.get(n, leaves[n]) - seen.received[n]
                    changed[n] = seen.received[n] + self.prior.near(gap, self.scale(n, seen), eta, self.learnt(n, seen))
            return changed

        return replace(phase, project=project)

    def send(self, message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        """``log omega_k`` in float64, and the squared gaps for priors that need moments."""
        if self.weighted:
            penalty = self.penalty(self.names(seen), seen.final, seen, torch.float64).double()
            found = seen.swept[OWNER]
            loss, rows = (found[k].reshape(seen.n.shape) for k in ("loss", "rows"))
            weight = {
                "mean_loglik": -loss / rows - penalty,
                "mean_loglik_n": -loss / rows - penalty / rows,
                "sum_loglik": -loss - penalty,
            }[self.omega]
            message = {**message, "omega": {"weight": weight}}
        if self.prior.needs == "moments":
            message = {**message, "squares": {n: message["delta"][n] ** 2 for n in self.names(seen)}}
        return message, memory

    # The server's side.

    def learnt_at_first(self, facts: Facts) -> Leaves:
        if self.prior.needs != "moments":
            return self.scales(facts) if self.prior.by_leaf else {}
        return {n: value for n, v in facts.travelling().items() if (value := self.prior.begin(v)) is not None}

    def settle(self, reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        """Moves gamma to the minimiser of ``sum_k w_k R(theta_k, gamma)``, or down its slope."""
        theirs = set(cohort.structure.trainable())
        moved, kept = dict(reduced["delta"]), dict(memory)
        weights = self.weights(reduced, cohort) if self.prior.needs == "all" else None
        for name, value in reduced["delta"].items():
            if name not in theirs:
                continue
            gaps = Gaps(
                mean=value,
                square=reduced["squares"][name] if self.prior.needs == "moments" else None,
                each=reduced["gaps"][name].double() if weights is not None else None,
                weights=None if weights is None else weights.to(value.device),
            )
            learnt = memory[name] if self.prior.needs == "moments" else None
            scale = float(memory[name]) if self.prior.by_leaf else self.prior.scale()
            moved[name], learnt = self.move(gaps, cohort.leaves[name], scale, learnt)
            if learnt is not None:
                kept[name] = learnt
        return {**reduced, "delta": moved}, kept

    def move(self, gaps: Gaps, gamma: Tensor, scale: float, learnt: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One leaf."""
        if self.server_lr is None:
            return self.prior.minimise(gaps, gamma, scale, learnt)
        move = torch.zeros_like(gamma)
        for _ in range(self.server_steps):
            down, wide = self.prior.slope(gaps, gamma, move, scale, learnt)
            move = move - self.server_lr * down
            if learnt is not None and wide is not None:
                learnt = self.prior.inside(learnt - self.server_lr * wide)
        return move, learnt

    def weights(self, reduced: Message, cohort: Cohort) -> Tensor:
        """Normalised w_k of the accepted replies."""
        if self.weighted:
            return torch.softmax(reduced["omegas"]["weight"].double().reshape(-1), 0).cpu()
        raw = torch.tensor(cohort.rows if self.omega == "n" else [1] * len(cohort), dtype=torch.float64)
        return raw / raw.sum()

    def report(self, memory: Leaves) -> dict[str, Any]:
        """Mean of what the prior learns, per leaf."""
        return {"s": {n: float(v.mean()) for n, v in memory.items()}}


def log_likelihood(view: View, batch: Batch, seen: Seen) -> Leaves:
    """Sum of the task's loss over rows, and their number: ``log P(Z_k | theta_k) = -loss``."""
    rows = batch.count().double()
    return {"loss": view.loss().double() * rows, "rows": rows}


def theirs(leaf: LeafInfo) -> bool:
    """Trainable leaves of the user's model."""
    return leaf.trainable and not leaf.owner


def statistics(leaf: LeafInfo) -> bool:
    """Buffers of the user's model, which a client keeps to itself."""
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
    taken = isinstance(chosen, Laplace) if implicit is None else implicit
    if taken:
        chosen.near(torch.zeros(1), 1.0, 0.0, torch.zeros(1))
    it = _Map(chosen, omega, server_lr, server_steps)

    def apply(method: Method) -> Method:
        for part in ("what clients start from", "the receive rule"):
            method = method.claiming(part, OWNER)
        if "delta" not in method.reducers():
            raise Conflict(f"'map_prior' cannot be stacked on {method.text!r}, which uploads no trained leaf")
        method = method.replacing_reducer(OWNER, "delta", it.reducer)
        entries = {"omega": maximum()} if it.weighted else {}
        also = {"gaps": ("delta", stack())} if chosen.needs == "all" else {}
        if also and it.weighted:
            also["omegas"] = ("omega", stack())
        if chosen.needs == "moments":
            entries["squares"] = it.reducer
        method = method.adding(
            rules=(
                Rule(owner=OWNER, pattern=theirs, kind="mirrored", only="shared"),
                Rule(owner=OWNER, pattern=statistics, kind="personal", only="shared", optional=True),
            ),
            terms=() if taken or chosen.flat else (Term(owner=OWNER, fn=it.term, phases=_not_first),),
            stages=(Stage(owner=OWNER, fn=it.send, entries=entries, also=also, memory=it.scales),),
        )
        if server_lr is not None or not isinstance(chosen, Gaussian):
            method = method.adding(server=(_stage(it),))
        if chosen.needs == "moments":
            method = method.adding(
                prepare=(Prepare(owner=OWNER, fn=lambda m, cohort: Prepared(memory=m, broadcast=m)),)
            )
        if it.weighted:
            method = method.sweeping(Sweep(name=OWNER, fn=log_likelihood))
        if init == "client":
            method = _begun(method)
        return _scheduled(method, it, renew=start == "gamma", implicit=taken and not chosen.flat)

    return apply


def named(prior: Prior | str | None, sigma2: float) -> Prior:
    """The prior that is meant."""
    if prior is None:
        return gaussian(sigma2)
    if isinstance(prior, Prior):
        return prior
    if prior not in PRIORS:
        raise UnknownName("prior", str(prior), PRIORS)
    return gaussian(sigma2) if prior == "gaussian" else PRIORS[prior]()


def _not_first(phase: Phase, structure: Structure) -> bool:
    return phase.name != "first"


def _begun(method: Method) -> Method:
    """The method with a setup in which one client trains once without the prior, and its model becomes everybody's."""
    program = (Receive(), Phase(name="first", stream="first"), Send())
    method = method.replacing_schedule(OWNER, setup=program, setup_by="one")
    return method.adding(stages=(replace(send_model("uniform", buffers="uniform"), when="setup"),))


def _stage(it: _Map) -> ServerStage:
    learns = it.prior.needs == "moments"
    kept = it.learnt_at_first if learns or it.prior.by_leaf else None
    return ServerStage(owner=OWNER, fn=it.settle, memory=kept, report=it.report if learns else None)


def _scheduled(method: Method, it: _Map, *, renew: bool, implicit: bool) -> Method:
    """The method with the round that its options ask for."""
    steps: Program = method.schedule.round
    if renew:
        steps = tuple(replace(s, mirrored=True) if isinstance(s, Receive) else s for s in steps)
    if implicit:
        steps = tuple(it.implicit(s) if isinstance(s, Phase) and s.copy == "main" else s for s in steps)
    return replace(method, schedule=replace(method.schedule, round=steps))
