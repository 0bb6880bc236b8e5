"""Every calculator by name, and what it takes, for a command line or a form."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedloom.errors import UnknownName
from fedloom.theory.aims_theorem import aims_bound, aims_rounds, aims_step_limit
from fedloom.theory.alignment import inner_product, non_conflict
from fedloom.theory.answer import Answer
from fedloom.theory.bounds import cl_best_step, cl_bound, drift_bound, fl_bound, fl_bound_explicit
from fedloom.theory.constants import contraction, heterogeneity, local_steps, smoothness, squared_bound
from fedloom.theory.escape import escape_best_step, escape_round, escape_time
from fedloom.theory.figure import draw_escape
from fedloom.theory.hybrid import effective_bias, effective_noise, hybrid_bound, hybrid_bound_explicit
from fedloom.theory.lag_theorem import lag_coefficient, lag_gain, lag_interval, lag_variance
from fedloom.theory.map_convexity import map_convex_on_box, map_curvature, map_round, map_update
from fedloom.theory.modes import ModeRow, compare_modes
from fedloom.theory.rounds import isr_ratio, rounds_cl, rounds_fl, rounds_hybrid, rounds_hybrid_explicit

CALCULATORS: dict[str, Callable[..., Answer]] = {
    "local-steps": local_steps,
    "smoothness": smoothness,
    "squared-bound": squared_bound,
    "heterogeneity": heterogeneity,
    "contraction": contraction,
    "drift": drift_bound,
    "cl-bound": cl_bound,
    "cl-best-step": cl_best_step,
    "fl-bound": fl_bound,
    "fl-bound-explicit": fl_bound_explicit,
    "effective-bias": effective_bias,
    "effective-noise": effective_noise,
    "hybrid-bound": hybrid_bound,
    "hybrid-bound-explicit": hybrid_bound_explicit,
    "rounds-cl": rounds_cl,
    "rounds-fl": rounds_fl,
    "rounds-hybrid": rounds_hybrid,
    "rounds-hybrid-explicit": rounds_hybrid_explicit,
    "isr-ratio": isr_ratio,
    "inner-product": inner_product,
    "non-conflict": non_conflict,
    "escape": escape_time,
    "escape-best-step": escape_best_step,
    "escape-round": escape_round,
    "aims-step-limit": aims_step_limit,
    "aims-bound": aims_bound,
    "aims-rounds": aims_rounds,
    "lag-coefficient": lag_coefficient,
    "lag-interval": lag_interval,
    "lag-variance": lag_variance,
    "lag-gain": lag_gain,
    "map-curvature": map_curvature,
    "map-box": map_convex_on_box,
    "map-update": map_update,
    "map-round": map_round,
}
TABLES: dict[str, Callable[..., tuple[ModeRow, ...]]] = {"modes": compare_modes}
FIGURES: dict[str, Callable[..., Path]] = {"escape": draw_escape}

Kind = Literal["number", "whole", "numbers", "mode", "flag"]
_KINDS: dict[str, Kind] = {
    "Real": "number",
    "float": "number",
    "int": "whole",
    "Vector": "numbers",
    "Any": "numbers",
    "Mode": "mode",
    "bool": "flag",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a calculator: `numbers` is a list of them, `mode` is `paper` or `sound`.

    `default` is None for a required argument and for one that may be left out (`required` tells which).
    """

    name: str
    kind: Kind
    required: bool
    default: Any
    help: str


def parameters(name: str) -> tuple[Parameter, ...]:
    """The arguments of a calculator or table, in order, with the help of its docstring.

    Example:
        >>> [(p.name, p.kind, p.required) for p in parameters("local-steps")]
        [('epochs', 'number', True), ('samples', 'number', True), ('batch', 'number', True)]
    """
    known: dict[str, Callable[..., Any]] = {**CALCULATORS, **TABLES}
    if name not in known:
        raise UnknownName("calculator", name, known)
    function = known[name]
    text = dict(re.findall(r"^ {4}(\w+): (.+)$", inspect.getdoc(function) or "", re.MULTILINE))
    return tuple(
        Parameter(
            name=p.name,
            kind=_KINDS[str(p.annotation).removesuffix(" | None")],
            required=p.default is p.empty,
            default=None if p.default is p.empty else p.default,
            help=text[p.name],
        )
        for p in inspect.signature(function).parameters.values()
    )


def one_line(name: str) -> str:
    """The first line of a calculator's docstring, for a list.

    Example:
        >>> one_line("local-steps")
        'Local SGD steps K = E ceil(n/B) of a client in a round.'
    """
    known: dict[str, Callable[..., Any]] = {**CALCULATORS, **TABLES}
    if name not in known:
        raise UnknownName("calculator", name, known)
    return (inspect.getdoc(known[name]) or "").split("\n", 1)[0]
