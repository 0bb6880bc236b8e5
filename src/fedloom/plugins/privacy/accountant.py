"""Privacy accounting, by Flower's accountant."""

from __future__ import annotations

import functools
import importlib.util
import math

from fedloom.errors import UserError


def check() -> None:
    """Raises where what accounting needs is not installed."""
    missing = [name for name in ("flwr", "dp_accounting") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"privacy accounting needs {' and '.join(missing)}: pip install 'fedloom[dp]'")


@functools.cache
def epsilon(multiplier: float, releases: int, delta: float) -> float:
    """The epsilon of some Gaussian releases with a noise multiplier, at a delta.

    Rényi differential privacy of order a is ``releases a / (2 multiplier^2)``; the best a is taken. Nothing is gained from sampling.

    Args:
        multiplier: standard deviation of the noise over the sensitivity.
        releases: how many.
        delta: probability with which the bound may fail.
    """
    if not releases:
        return 0.0
    check()
    from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod

    config = PrivacyConfig(
        target_delta=delta,
        population_size=1,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
    )
    accountant = RdpAccountant(config)
    accountant.compose(GaussianPrivacyEvent(multiplier, sample_size=1, population_size=1), releases)
    found = accountant.get_epsilon(delta)
    return found if math.isfinite(found) else math.inf
