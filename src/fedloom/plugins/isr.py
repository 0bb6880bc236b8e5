"""OmniISR's intermediate supervision and regularisation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import Conflict, UserError
from fedloom.spec import taps as places
from fedloom.spec.method import Method
from fedloom.spec.parts import Extra, Phase, Term
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Seen, TapName, summary_of
from fedloom.spec.structure import Call, Structure, matches
from fedloom.spec.tap_losses import both_terms, entropy_term, information_term
from fedloom.spec.view import View
from fedloom.tasks import TASKS
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Summary

OWNER = "isr"

Weights = float | tuple[float, ...]


class IsrOptions:
    """Hyper-parameters of ``isr``, and the taps and weights that follow from them for a model."""

    def __init__(
        self,
        points: int | tuple[str, ...] | None,
        spacing: int | None,
        position: places.Position,
        alpha: Any,
        lam: Any,
        weights: str = "fixed",
    ) -> None:
        self.adaptive = weights == "adaptive"
        self.given, self.points, self.spacing = _points(points), points, _whole("spacing", spacing)
        self.position = position
        self.alpha, self.lam = _weights("alpha", alpha), _weights("lam", lam)
        lengths = {len(w) for w in (self.alpha, self.lam) if isinstance(w, tuple)}
        lengths |= {self.given} if self.given is not None else set()
        if len(lengths) > 1:
            raise UserError(f"isr: points, alpha and lam name {sorted(lengths)} taps; expected one weight per tap")
        self.wanted = lengths.pop() if lengths else None
        self._seen: tuple[Call, ...] | None = None
        self._taps: tuple[places.Tap, ...] = ()

    @property
    def most(self) -> int:
        """The largest number of taps that can come out."""
        return self.wanted or places.POINTS

    @property
    def idle(self) -> bool:
        """Whether every weight is zero."""
        return not any(self.weights(i) != (0.0, 0.0) for i in range(self.most))

    def weights(self, i: int) -> tuple[float, float]:
        """``alpha_m`` and ``lambda_m`` of the tap i."""
        a, b = ((w[i] if isinstance(w, tuple) else w) for w in (self.alpha, self.lam))
        return a, b

    def taps(self, structure: Structure) -> tuple[places.Tap, ...]:
        """The taps chosen in a model."""
        if structure.calls is not self._seen:
            if isinstance(self.points, tuple):
                found = tuple(places.named(structure, name, "given") for name in self.points)
            else:
                found = places.choose(structure, self.wanted, self.spacing, self.position)
            self._taps, self._seen = found, structure.calls
        return self._taps

    def resolved(self, structure: Structure) -> dict[str, Any]:
        """What the options came to: the taps, how many, and how far apart; 0 where they were named or there is but one."""
        taps = [t.name for t in self.taps(structure)]
        spacing = 0
        if not isinstance(self.points, tuple) and len(taps) > 1:
            listed = [t.name for t in places.candidates(structure, self.most)]
            spacing = listed.index(taps[1]) - listed.index(taps[0])
        return {"taps": taps, "points": len(taps), "spacing": spacing}

    def supervised(self, i: int, structure: Structure) -> bool:
        """Whether the tap i has an adapter: the task has classes and its alpha is not zero."""
        known = TASKS.get(structure.task)
        return known is not None and known.classes and self.weights(i)[0] != 0


def _points(points: Any) -> int | None:
    if isinstance(points, tuple):
        if not points or not all(isinstance(p, str) for p in points):
            raise UserError(f"isr: points={points!r}; expected a number, or names of modules to tap")
        return len(points)
    return _whole("points", points)


def _whole(name: str, value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UserError(f"isr: {name}={value!r}; expected a whole number of at least 1")
    return value


def _weights(name: str, value: Any) -> Weights:
    many = isinstance(value, (tuple, list))
    for v in value if many else [value]:
        good = isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and v >= 0
        if not good or (many and not value):
            raise UserError(f"isr: {name}={value!r}; expected a number of at least 0, or one such number per tap")
    return tuple(float(v) for v in value) if many else float(value)


@plugin(paper="OmniISR, eqs. 2 to 6: mutual information and negative entropy at intermediate points")
def isr(
    alpha: float | Sequence[float] = 0.1,
    lam: float | Sequence[float] = 0.01,
    points: int | str | Sequence[str] | None = None,
    spacing: int | None = None,
    position: Literal["input", "middle", "output"] = "input",
    adapters: Literal["shared", "personal"] = "shared",
    weights: Literal["fixed", "adaptive"] = "fixed",
) -> Callable[[Method], Method]:
    """Supervises intermediate layers: adds ``sum_m alpha_m MI_m + lambda_m NE_m`` over taps m.

    ``MI_m`` is the cross-entropy of an adapter on the features of tap m (1x1 convolution for dense tasks, linear on pooled
    features for classification), ``NE_m`` the mean over latent positions of ``sum_c p_c log p_c``, p = softmax over channels. It
    enters every phase that fits the data and trains a leaf before the tap. On regression only NE is built.

    ``weights="adaptive"`` (not in the paper) lets them follow the task's loss L on the batch, taken as a constant: ``alpha_m min(1,
    L / MI_m)``, so that no tap weighs more than the task, and ``lambda_m L``: what is learned is left alone.

    Args:
        alpha: weight of MI: a number, or one per tap. With ``alpha = lam = 0`` the method is unchanged.
        lam: weight of NE: likewise.
        points: number of taps, or name or names of modules; None for 3, or as many as the model has.
        spacing: distance of the taps in the list of candidates; None for 2, or what fits.
        position: the taps begin at the ``"input"`` side, lie in the ``"middle"``, or end at the ``"output"`` side.
        adapters: ``"shared"`` adapters are averaged as the model is; ``"personal"`` ones stay with their client.
        weights: alpha and lam as they are given, or following the task's loss.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedprox(mu=0.01), fl.isr(alpha=0.1, points=2)))
        fedprox(mu=0.01) + isr(alpha=0.1, points=2)
    """
    names = (points,) if isinstance(points, str) else points
    chosen = names if names is None or isinstance(names, int) else tuple(names)
    plan = IsrOptions(chosen, spacing, position, alpha, lam, weights)

    def apply(method: Method) -> Method:
        if plan.idle:
            return method
        terms = tuple(_term(plan, i, method) for i in range(plan.most) if plan.weights(i) != (0.0, 0.0))
        extra = Extra(
            owner=OWNER, build=lambda s, g: _adapters(plan, method, s, g), kind=adapters, resolved=plan.resolved
        )
        return method.claiming("the intermediate supervision", OWNER).adding(terms=terms, extras=(extra,))

    return apply


def _term(plan: IsrOptions, i: int, method: Method) -> Term:
    """``alpha_m MI_m + lambda_m NE_m`` of the tap i; an owner of its own lets phases leave single taps out."""
    alpha, lam = plan.weights(i)
    owner = f"{OWNER}.{i + 1}"

    def fn(view: View, batch: Batch, seen: Seen) -> Tensor:
        tap = plan.taps(view.structure)[i]
        summed = reads_summary(view.structure)
        z: Tensor | Summary = view.summary(tap.name, tap.axis) if summed else _feature(view, tap.name)
        L = view.loss().detach() if plan.adaptive else None
        lam_m: float | Tensor = lam if L is None else lam * L
        if not plan.supervised(i, view.structure):
            return lam_m * entropy_term(z, batch, tap.axis)
        weight, bias = (view.leaves[f"{OWNER}:{tap.name}.{part}"] for part in ("weight", "bias"))
        if lam:
            MI, NE = both_terms(view, z, weight, bias, tap.axis)
        else:
            MI, NE = information_term(view, z, weight, bias, tap.axis), None
        alpha_m = alpha if L is None else alpha * (L / MI.detach().clamp(min=1e-12)).clamp(max=1.0)
        return alpha_m * MI if NE is None else alpha_m * MI + lam_m * NE

    def enters(phase: Phase, structure: Structure) -> bool:
        taps = plan.taps(structure)
        if i >= len(taps) or not (lam or plan.supervised(i, structure)):
            return False
        return _fits(method, phase, structure) and _trains(phase, structure, taps[i].name)

    def taps(structure: Structure) -> tuple[TapName, ...]:
        tap = plan.taps(structure)[i]
        return (summary_of(tap.name) if reads_summary(structure) and tap.axis == 1 else tap.name,)

    def reads_summary(structure: Structure) -> bool:
        return bool(lam) and structure.task != "segmentation"

    return Term(owner=owner, fn=fn, phases=enters, copy=None, taps=taps)


def _feature(view: View, name: str) -> Tensor:
    """A feature in the run's floating type: a model may compute in another one."""
    return view.feature(name).to(view.structure.dtype)


def _fits(method: Method, phase: Phase, structure: Structure) -> bool:
    """Whether a phase contains the term that fits the data."""
    return any(t.role == "data" and t.enters(phase, structure) for t in method.objective)


def _trains(phase: Phase, structure: Structure, tap: str) -> bool:
    """Whether a phase trains a leaf before a tap."""
    before = places.leaves_before(structure, tap)
    return any(leaf.name in before and matches(phase.leaves, leaf) for leaf in structure.leaves)


def _adapters(plan: IsrOptions, method: Method, structure: Structure, generator: np.random.Generator) -> Leaves:
    """An adapter per supervised tap, initialised as torch initialises a linear layer."""
    taps = plan.taps(structure)
    if plan.wanted is None and len(taps) < places.POINTS:
        warnings.warn(
            f"isr: the model has {len(taps)} place(s) to tap, so points={len(taps)} instead of {places.POINTS}",
            stacklevel=2,
        )
    if not any(
        _fits(method, phase, structure) and _trains(phase, structure, tap.name)
        for phase in method.phases()
        for tap in taps
    ):
        raise Conflict(
            f"'isr' cannot be stacked on {method.text!r}: no phase of it fits the data by training a layer before a tap"
        )
    flat = [t.name for t in taps if structure.task == "segmentation" and len(t.shape) != 4]
    if flat:
        raise UserError(f"isr: the output of {flat[0]!r} is no map (rows, channels, height, width); tap another module")
    made: Leaves = {}
    for i, tap in enumerate(taps):
        if plan.supervised(i, structure):
            bound = 1 / math.sqrt(tap.channels)
            shape = (structure.outputs, tap.channels)
            made[f"{tap.name}.weight"] = torch.from_numpy(generator.uniform(-bound, bound, shape))
            made[f"{tap.name}.bias"] = torch.from_numpy(generator.uniform(-bound, bound, shape[:1]))
    if not made and not any(plan.weights(i)[1] for i in range(len(taps))):
        raise UserError(
            f"isr: the task {structure.task!r} has no classes, so that only the entropy part is defined; give lam > 0"
        )
    return made
