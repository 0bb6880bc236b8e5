"""Calculators of the papers' bounds: as printed (`paper`) and corrected (`sound`).

    >>> from fedloom import theory
    >>> theory.cl_bound(gap=1.0, eta=1.0, rounds=100, smoothness=2.0, second_moment=3.0).value
    0.8

`CALCULATORS` lists them. `docs/theory.md` explains each, and the errors of the papers.
"""

from __future__ import annotations

from fedloom.theory.aims_theorem import aims_bound, aims_rounds, aims_step_limit
from fedloom.theory.alignment import inner_product, non_conflict
from fedloom.theory.answer import Answer, Condition
from fedloom.theory.bounds import cl_best_step, cl_bound, drift_bound, fl_bound, fl_bound_explicit
from fedloom.theory.calculators import CALCULATORS, FIGURES, TABLES, Parameter, one_line, parameters
from fedloom.theory.constants import contraction, heterogeneity, local_steps, smoothness, squared_bound
from fedloom.theory.escape import escape_best_step, escape_round, escape_time, escape_trends
from fedloom.theory.figure import draw_escape, escape_curves
from fedloom.theory.hybrid import effective_bias, effective_noise, hybrid_bound, hybrid_bound_explicit
from fedloom.theory.lag_theorem import lag_coefficient, lag_gain, lag_interval, lag_variance
from fedloom.theory.map_convexity import map_convex_on_box, map_curvature, map_hessian, map_round, map_update
from fedloom.theory.modes import ModeRow, compare_modes
from fedloom.theory.rounds import isr_ratio, rounds_cl, rounds_fl, rounds_hybrid, rounds_hybrid_explicit

__all__ = [
    "Answer",
    "CALCULATORS",
    "Condition",
    "FIGURES",
    "ModeRow",
    "Parameter",
    "TABLES",
    "aims_bound",
    "aims_rounds",
    "aims_step_limit",
    "cl_best_step",
    "cl_bound",
    "compare_modes",
    "contraction",
    "draw_escape",
    "drift_bound",
    "effective_bias",
    "effective_noise",
    "escape_best_step",
    "escape_curves",
    "escape_round",
    "escape_time",
    "escape_trends",
    "fl_bound",
    "fl_bound_explicit",
    "heterogeneity",
    "hybrid_bound",
    "hybrid_bound_explicit",
    "inner_product",
    "isr_ratio",
    "lag_coefficient",
    "lag_gain",
    "lag_interval",
    "lag_variance",
    "local_steps",
    "map_convex_on_box",
    "map_curvature",
    "map_hessian",
    "map_round",
    "map_update",
    "non_conflict",
    "one_line",
    "parameters",
    "rounds_cl",
    "rounds_fl",
    "rounds_hybrid",
    "rounds_hybrid_explicit",
    "smoothness",
    "squared_bound",
]
