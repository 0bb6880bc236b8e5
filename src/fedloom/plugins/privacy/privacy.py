"""Clipping, noise, and what they amount to: differential privacy of whole clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom import rng, tensors
from fedloom.errors import Conflict
from fedloom.plugins.privacy import accountant
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Prepare, Prepared, ServerStage, Stage
from fedloom.spec.reducers import mean
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.uploads import unchanged
from fedloom.tensors import Leaves, Message

_PAPER = "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018"
_STREAM = 0x6E6F6973  # keeps this noise apart from dropout's, which folds step numbers into the same key


@dataclass(frozen=True, slots=True)
class _Clip:
    norm: float

    def __call__(self, message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        if not message.get("delta"):
            return message, memory
        length = tensors.square_norm(message["delta"]).sqrt()
        factor = torch.where(length > self.norm, self.norm / length, torch.ones_like(length))
        return {**message, "delta": tensors.scale(message["delta"], factor)}, memory


def _noisy(values: Leaves, sigma: float, key: Tensor) -> Leaves:
    return {
        name: value + sigma * rng.secret_normal(rng.fold(key, i), tuple(value.shape)).to(value)
        for i, (name, value) in enumerate(values.items())
    }


@dataclass(frozen=True, slots=True)
class _SiteNoise:
    sigma: float

    def __call__(self, message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        noisy = _noisy(message.get("delta", {}), self.sigma, rng.fold(seen.noise, _STREAM))
        return ({**message, "delta": noisy} if noisy else message), memory


@dataclass(frozen=True, slots=True)
class _ServerNoise:
    sigma: float

    def __call__(self, reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        key = torch.tensor(rng.key_of(cohort.seed, "noise", "server", cohort.round))
        device = next(iter(cohort.leaves.values())).device
        noisy = _noisy(reduced.get("delta", {}), self.sigma / len(cohort), key.to(device))
        return ({**reduced, "delta": noisy} if noisy else reduced), memory


@plugin("norm > 0", paper=_PAPER)
def clip(norm: float = 1.0) -> Callable[[Method], Method]:
    """Shortens a client's update to a norm: ``d <- d min(1, C / ||d||)``.

    The norm is over all trainable leaves of the update jointly; buffers are left alone.

    Args:
        norm: the bound C.
    """
    return lambda method: method.adding(stages=(Stage(owner="clip", fn=_Clip(norm)),))


@plugin("sigma >= 0", paper=_PAPER)
def noise(sigma: float = 1.0, at: Literal["site", "server"] = "site") -> Callable[[Method], Method]:
    """Adds Gaussian noise: at the site ``d_k <- d_k + sigma N(0, I)``, or at the server ``D <- D + (sigma / M) N(0, I)``.

    At the server the mean D of the M updates of a round is uniform, and the noise comes before every other server stage. After
    ``clip(C)`` either is the Gaussian mechanism; ``account`` says what it amounts to. Before ``clip`` it is refused. In a simulation the
    noise is counter-based, hence the same on every engine; a deployed site or server draws it from the operating system, so that
    nobody who knows the seed can take it off.

    Args:
        sigma: standard deviation of each coordinate, of an update or of the sum of the updates.
        at: who adds it: each ``"site"`` to its own update (local), or the ``"server"`` to the sum (central).
    """
    if not sigma:
        return lambda method: method
    if at == "site":
        return lambda method: method.adding(stages=(Stage(owner="noise", fn=_SiteNoise(sigma), follows=("clip",)),))

    def central(method: Method) -> Method:
        if method.reducers().get("delta") != mean("uniform"):
            method = method.replacing_reducer("noise", "delta", mean("uniform"))
        stages = (ServerStage(owner="noise", fn=_ServerNoise(sigma)), *method.server.stages)
        # An empty stage at the client keeps the order: what is clipped later would not be covered.
        method = method.adding(stages=(Stage(owner="noise", fn=unchanged, follows=("clip",)),))
        return replace(method, server=replace(method.server, stages=stages))

    return central


# Accounting -----------------------------------------------------------------------------------------------

_COVERED = ("delta", "counters")


@dataclass(frozen=True, slots=True)
class _Ledger:
    """The server's book: how often each client was asked, and which entries came that no noise covers."""

    multiplier: float
    delta: float
    at: str
    spared: frozenset[str]

    def memory(self, facts: Facts) -> Leaves:
        accountant.check()
        return {"taken": torch.zeros(0, dtype=torch.int64)}

    def ask(self, memory: Leaves, cohort: Cohort) -> Prepared:
        """Counts those who are asked: a reply that comes too late to be used has been sent all the same."""
        taken = memory["taken"]
        taken = torch.zeros(len(cohort.order), dtype=torch.int64) if not len(taken) else taken.clone()
        place = {name: i for i, name in enumerate(cohort.order)}
        # The pool of centralised training and the cloud of hybrid training are none of the federation's clients.
        for name in cohort.ids:
            if name in place:
                taken[place[name]] += 1
        return Prepared(memory={**memory, "taken": taken})

    def stage(self, reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        bare = [entry for entry, values in reduced.items() if values and entry not in self.spared]
        return reduced, {**memory, **{f"bare:{entry}": torch.ones(()) for entry in bare}}

    def report(self, memory: Leaves) -> dict[str, Any]:
        bare = sorted(key.removeprefix("bare:") for key in memory if key.startswith("bare:"))
        releases = int(memory["taken"].max()) if len(memory["taken"]) else 0
        spent = None if bare else accountant.epsilon(self.multiplier, releases, self.delta)
        facts = {"epsilon": spent, "delta": self.delta, "releases": releases, "noise_multiplier": self.multiplier}
        return {**facts, "noise_at": self.at, "unprotected": bare}


@plugin("0 < delta < 1", paper=_PAPER)
def account(delta: float = 1e-5) -> Callable[[Method], Method]:
    """Records after each round the privacy spent so far: (epsilon, delta) of the client that was asked most often.

    It is written after ``clip(C)`` and ``noise(sigma)`` and composes one Gaussian release for each time, by Flower's Renyi
    accountant, without amplification by sampling. Noise at the site: no two data sets of a site can be told apart from its uploads,
    not even by the server, multiplier ``sigma / (2 C)``. Noise at the server: whether a site's update was in the sum cannot be told
    from the shared models, multiplier ``sigma / C``; the server itself sees all. Only the model's updates are covered. A method that sends
    anything else (class means, histograms, running statistics) is refused, and where a part that is written later does, epsilon is null and
    ``unprotected`` names it. Needs ``fedloom[dp]``.

    Args:
        delta: the probability with which the bound may fail; well below one over the number of clients.

    Example:
        >>> import fedloom as fl
        >>> print(fl.method("fedavg + clip(1.0) + noise(2.0, at='server') + account(1e-5)"))
        fedavg() + clip(norm=1.0) + noise(sigma=2.0, at='server') + account(delta=1e-05)
    """

    def apply(method: Method) -> Method:
        clips = [s.fn.norm for s in method.upload if isinstance(s.fn, _Clip)]
        local = [s.fn.sigma for s in method.upload if isinstance(s.fn, _SiteNoise)]
        central = [s.fn.sigma for s in method.server.stages if isinstance(s.fn, _ServerNoise)]
        if not clips or len(local) + len(central) != 1:
            raise Conflict(
                f"'account' cannot be stacked on {method.text!r}: it follows clip(norm) and one noise(sigma)"
            )
        weights = {r.weight for r in method.reducers().values() if r.weight not in (None, "n", "uniform")}
        sent = ({e for s in method.upload for e in s.entries} | weights) - {*_COVERED, "buffers"}
        again = {new for s in method.upload for new, (source, _) in s.also.items() if source == "delta"}
        other = sorted(sent) if local else sorted(sent | again)
        if other:
            raise Conflict(
                f"'account' cannot be stacked on {method.text!r}, which also sends {other[0]!r}: no noise covers it"
            )
        at, multiplier = ("site", local[0] / (2 * clips[-1])) if local else ("server", central[0] / clips[-1])
        # What the server makes of noisy uploads, such as the mean of layers that are personal now, was released with them.
        made = {*again, "personal"} if local else set()
        ledger = _Ledger(multiplier, delta, at, frozenset((*_COVERED, *made)))
        return method.adding(
            prepare=(Prepare(owner="account", fn=ledger.ask),),
            server=(ServerStage(owner="account", fn=ledger.stage, memory=ledger.memory, report=ledger.report),),
        )

    return apply
