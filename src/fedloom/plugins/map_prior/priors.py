"""Priors over clients' models, ``rho_gamma(theta) ~ exp(-R(theta, gamma))``: what FedMAP adds to a client's loss and minimises on the server.

All of them see only the gap ``theta - gamma``. A client uses ``penalty`` (R of one leaf) or, for an implicit step, ``near``. The server
sets gamma (and s, what a prior learns besides gamma) to the minimiser of ``sum_k w_k R(theta_k, gamma)``, or goes down its slope.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom import ops
from fedloom.errors import UserError
from fedloom.spec.registry import VALUES
from fedloom.spec.structure import LeafInfo, matches


@dataclass(frozen=True, slots=True)
class Gaps:
    """The clients' gaps ``d_k = theta_k - gamma`` of one leaf, reduced.

    Args:
        mean: ``sum_k w_k d_k``.
        square: ``sum_k w_k d_k^2``, for priors that need moments.
        each: every d_k along axis 0, in float64, for priors that need them all.
        weights: w, in the order of ``each``.
    """

    mean: Tensor
    square: Tensor | None = None
    each: Tensor | None = None
    weights: Tensor | None = None

    def weighed(self, values: Tensor) -> Tensor:
        """``sum_k w_k values_k``."""
        assert self.weights is not None
        total: Tensor = torch.tensordot(self.weights, values, dims=1)
        return total


@dataclass(frozen=True, slots=True, repr=False)
class Prior(ABC):
    """A family of priors around gamma. ``scale`` multiplies the whole of R and may differ between leaves."""

    needs: ClassVar[Literal["mean", "moments", "all"]] = "mean"

    def __repr__(self) -> str:
        given = ", ".join(f"{k}={getattr(self, k)!r}" for k in self.__dataclass_fields__ if k != "needs")
        return f"{_NAMES[type(self)]}({given})"

    @property
    def by_leaf(self) -> bool:
        """Whether ``scale`` differs between leaves."""
        return False

    @property
    def flat(self) -> bool:
        """Whether R is zero everywhere, so that no term is built."""
        return False

    def scale(self, leaf: LeafInfo | None = None) -> float:
        """Return the factor of R for a leaf."""
        return 1.0

    def check(self, leaves: tuple[LeafInfo, ...]) -> None:  # noqa: B027 (a hook: most priors fit any leaves)
        """Raise UserError if the prior does not fit the leaves."""

    def begin(self, leaf: Tensor) -> Tensor | None:
        """Return the initial s of a leaf; None if the prior learns nothing besides gamma."""
        return None

    @abstractmethod
    def penalty(self, gap: Tensor, scale: Tensor | float, s: Tensor | None = None) -> Tensor:
        """Return R of one leaf."""

    def near(self, gap: Tensor, scale: Tensor | float, eta: float, s: Tensor | None = None) -> Tensor:
        """Return the gap after an implicit step of size eta: ``argmin_d eta R(d) + (d - gap)^2/2``."""
        raise UserError(f"{self!r} has no closed implicit step; use implicit=False")

    @abstractmethod
    def minimise(self, gaps: Gaps, gamma: Tensor, scale: float, s: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the move of gamma that minimises ``sum_k w_k R``, and the new s."""

    @abstractmethod
    def slope(
        self, gaps: Gaps, gamma: Tensor, move: Tensor, scale: float, s: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of ``sum_k w_k R`` at gamma + move, with respect to gamma and to s."""

    def inside(self, s: Tensor | None) -> Tensor | None:
        """Return s, clamped to its range."""
        return s


@dataclass(frozen=True, slots=True, repr=False)
class Gaussian(Prior):
    """``R = sum_i p_i (theta_i - gamma_i)^2 / 2``; make it with :func:`gaussian`."""

    sigma2: float = 15.0
    precision: Mapping[str, float] = field(default_factory=dict)

    @property
    def by_leaf(self) -> bool:
        return bool(self.precision)

    @property
    def flat(self) -> bool:
        return not any(self.precision.values()) if self.precision else math.isinf(self.sigma2)

    def scale(self, leaf: LeafInfo | None = None) -> float:
        for pattern, value in self.precision.items():
            if leaf is not None and matches(pattern, leaf):
                return value
        return 1.0 / self.sigma2

    def check(self, leaves: tuple[LeafInfo, ...]) -> None:
        for pattern in self.precision:
            if not any(matches(pattern, leaf) for leaf in leaves):
                names = ", ".join(leaf.name for leaf in leaves[:12])
                raise UserError(
                    f"gaussian: the pattern {pattern!r} matches no leaf under the prior; leaves are {names}"
                )

    def penalty(self, gap: Tensor, scale: Tensor | float, s: Tensor | None = None) -> Tensor:
        return 0.5 * scale * ops.squared_norm(gap)

    def near(self, gap: Tensor, scale: Tensor | float, eta: float, s: Tensor | None = None) -> Tensor:
        return gap / (1 + eta * scale)

    def minimise(self, gaps: Gaps, gamma: Tensor, scale: float, s: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return gaps.mean, None

    def slope(
        self, gaps: Gaps, gamma: Tensor, move: Tensor, scale: float, s: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return scale * (move - gaps.mean), None


@dataclass(frozen=True, slots=True, repr=False)
class LearnableGaussian(Prior):
    """``R = sum_i (theta_i - mu_i)^2 / (2 (s_i + c)) + eps (||s||^2 + ||mu||^2)``; make it with :func:`learnable_gaussian`."""

    needs: ClassVar[Literal["mean", "moments", "all"]] = "moments"

    eps: float = 1e-4
    c: float = 1.0

    def begin(self, leaf: Tensor) -> Tensor | None:
        return torch.zeros_like(leaf)

    def penalty(self, gap: Tensor, scale: Tensor | float, s: Tensor | None = None) -> Tensor:
        assert s is not None
        return 0.5 * (gap**2 / (s + self.c)).sum()

    def near(self, gap: Tensor, scale: Tensor | float, eta: float, s: Tensor | None = None) -> Tensor:
        assert s is not None
        return gap / (1 + eta / (s + self.c))

    def minimise(self, gaps: Gaps, gamma: Tensor, scale: float, s: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Alternate the two closed forms, ``mu = alpha mean / (alpha + 2 eps)`` and ``V = 4 eps s (s + c)^2``."""
        assert s is not None
        at, s, mean = gamma.double(), s.double(), gamma.double() + gaps.mean.double()
        move = torch.zeros_like(at)
        for _ in range(50):
            alpha = 1 / (s + self.c)
            move = alpha * mean / (alpha + 2 * self.eps) - at
            new = variance_root(self.variance(gaps, move), self.eps, self.c)
            done = bool(((new - s).abs() <= 1e-13 * (1 + new)).all())
            s = new
            if done:
                break
        return move.to(gamma), s.to(gamma)

    def slope(
        self, gaps: Gaps, gamma: Tensor, move: Tensor, scale: float, s: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert s is not None
        d_gamma = (move - gaps.mean) / (s + self.c) + 2 * self.eps * (gamma + move)
        d_s = -self.variance(gaps, move) / (2 * (s + self.c) ** 2) + 2 * self.eps * s
        return d_gamma, d_s

    def inside(self, s: Tensor | None) -> Tensor | None:
        assert s is not None
        return s.clamp(min=-self.c + 1e-3)

    def variance(self, gaps: Gaps, move: Tensor) -> Tensor:
        """Return ``V = sum_k w_k (theta_k - mu)^2`` around mu = gamma + move, from moments."""
        assert gaps.square is not None
        return (gaps.square.to(move) - 2 * move * gaps.mean.to(move) + move**2).clamp(min=0)


@dataclass(frozen=True, slots=True, repr=False)
class Laplace(Prior):
    """``R = ||theta - gamma||_1 / b``; make it with :func:`laplace`."""

    needs: ClassVar[Literal["mean", "moments", "all"]] = "all"

    b: float = 1.0

    @property
    def flat(self) -> bool:
        return math.isinf(self.b)

    def scale(self, leaf: LeafInfo | None = None) -> float:
        return 1.0 / self.b

    def penalty(self, gap: Tensor, scale: Tensor | float, s: Tensor | None = None) -> Tensor:
        return scale * gap.abs().sum()

    def near(self, gap: Tensor, scale: Tensor | float, eta: float, s: Tensor | None = None) -> Tensor:
        return gap.sign() * (gap.abs() - eta * scale).clamp(min=0)

    def minimise(self, gaps: Gaps, gamma: Tensor, scale: float, s: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert gaps.each is not None and gaps.weights is not None
        return weighted_median(gaps.each, gaps.weights).to(gamma), None

    def slope(
        self, gaps: Gaps, gamma: Tensor, move: Tensor, scale: float, s: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert gaps.each is not None
        return -scale * gaps.weighed((gaps.each - move).sign()).to(move), None


@dataclass(frozen=True, slots=True, repr=False)
class StudentT(Prior):
    """``R = (nu + 1)/2 sum_i log(1 + (theta_i - gamma_i)^2 / (nu tau2))``; make it with :func:`student_t`."""

    needs: ClassVar[Literal["mean", "moments", "all"]] = "all"

    nu: float = 3.0
    tau2: float = 1.0

    def penalty(self, gap: Tensor, scale: Tensor | float, s: Tensor | None = None) -> Tensor:
        return 0.5 * (self.nu + 1) * torch.log1p(gap**2 / (self.nu * self.tau2)).sum()

    def minimise(self, gaps: Gaps, gamma: Tensor, scale: float, s: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Iteratively re-weighted means, ``a_k = w_k (nu + 1) / (nu tau2 + (theta_k - gamma)^2)``, from the present gamma."""
        assert gaps.each is not None and gaps.weights is not None
        move = torch.zeros_like(gaps.each[0])
        w = gaps.weights.reshape(-1, *[1] * move.dim())
        for _ in range(200):
            a = w * (self.nu + 1) / (self.nu * self.tau2 + (gaps.each - move) ** 2)
            new = (a * gaps.each).sum(0) / a.sum(0)
            done = bool(((new - move).abs() <= 1e-13 * (1 + new.abs())).all())
            move = new
            if done:
                break
        return move.to(gamma), None

    def slope(
        self, gaps: Gaps, gamma: Tensor, move: Tensor, scale: float, s: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert gaps.each is not None
        off = gaps.each - move
        return -gaps.weighed((self.nu + 1) * off / (self.nu * self.tau2 + off**2)).to(move), None


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """Coordinate-wise weighted median over axis 0; the lower one at ties.

    Example:
        >>> weighted_median(torch.tensor([[0.0], [5.0], [1.0]]), torch.tensor([0.2, 0.45, 0.35]))
        tensor([1.])
    """
    ordered, index = values.sort(dim=0, stable=True)
    reached = weights.double()[index].cumsum(0) >= 0.5 * float(weights.double().sum()) - 1e-12
    return ordered.gather(0, reached.to(torch.int8).argmax(0, keepdim=True))[0]


def variance_root(variance: Tensor, eps: float, c: float) -> Tensor:
    """The s >= 0 with ``4 eps s (s + c)^2 = V``: Newton's steps from above, where the cubic is convex and increasing."""
    s = (variance / (4 * eps)) ** (1 / 3)
    for _ in range(60):
        value = 4 * eps * s * (s + c) ** 2 - variance
        s = (s - value / (4 * eps * (s + c) * (3 * s + c))).clamp(min=0)
    return s


def gaussian(sigma2: float = 15.0, precision: Mapping[str, float] | None = None) -> Prior:
    """Gaussian prior: ``R = ||theta - gamma||^2 / (2 sigma2)``, or with a precision of its own for some leaves.

    Args:
        sigma2: variance, as in eq. 6; ``inf`` is no prior.
        precision: ``{pattern: p}``: ``R = p/2 (theta - gamma)^2`` on the leaves that match (eqs. 16 and 17, whose sigma_i^2 is a precision,
            not a variance); the others have 1 / sigma2.

    Example:
        >>> gaussian(2.0, {"head": 0.1})
        gaussian(sigma2=2.0, precision={'head': 0.1})
    """
    chosen = dict(precision or {})
    if any(not isinstance(p, (int, float)) or not 0 <= p < math.inf for p in chosen.values()):
        raise UserError(f"gaussian: precision={precision!r}; expected patterns with finite numbers of at least 0")
    return Gaussian(_positive("gaussian", "sigma2", sigma2, finite=False), chosen)


def learnable_gaussian(eps: float = 1e-4, c: float = 1.0) -> Prior:
    """Gaussian prior whose variances ``s + c`` the server learns, one per parameter.

    There is no log-normaliser, so this is not maximum likelihood: eps alone stops s from growing.

    Args:
        eps: strength of the perturbation ``eps (||s||^2 + ||mu||^2)``.
        c: offset; s starts at 0.

    Reference: FedMAP, eqs. 18 and 21.
    """
    return LearnableGaussian(_positive("learnable_gaussian", "eps", eps), _positive("learnable_gaussian", "c", c))


def laplace(b: float = 1.0) -> Prior:
    """Laplace prior: ``R = ||theta - gamma||_1 / b``; gamma is the weighted median. FedMAP's Theorem 1 does not cover it (not smooth).

    Args:
        b: scale; ``inf`` is no prior.
    """
    return Laplace(_positive("laplace", "b", b, finite=False))


def student_t(nu: float = 3.0, tau2: float = 1.0) -> Prior:
    """Student-t prior: ``R = (nu + 1)/2 sum log(1 + (theta - gamma)^2 / (nu tau2))``. Theorem 1 does not cover it (not convex).

    Args:
        nu: degrees of freedom; ``inf`` is the Gaussian with sigma2 = tau2.
        tau2: squared scale.
    """
    _positive("student_t", "nu", nu, finite=False)
    _positive("student_t", "tau2", tau2)
    return gaussian(tau2) if math.isinf(nu) else StudentT(nu, tau2)


def _positive(who: str, name: str, value: float, *, finite: bool = True) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    if not good or math.isnan(value) or (finite and math.isinf(value)):
        raise UserError(f"{who}: {name}={value!r}; expected a number > 0")
    return float(value)


_NAMES: dict[type, str] = {
    Gaussian: "gaussian",
    LearnableGaussian: "learnable_gaussian",
    Laplace: "laplace",
    StudentT: "student_t",
}

PRIORS: dict[str, Callable[..., Prior]] = {
    "gaussian": gaussian,
    "learnable_gaussian": learnable_gaussian,
    "laplace": laplace,
    "student_t": student_t,
}

VALUES.update(PRIORS)  # for map_prior(prior=gaussian(precision=2)) in the text form
