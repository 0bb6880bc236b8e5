"""Bounds beside measurements of the same run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedloom import theory
from fedloom.errors import UserError

if TYPE_CHECKING:
    from fedloom.runs.result import Result


@dataclass(frozen=True, slots=True)
class Row:
    """A quantity: what was measured, what a theorem allows, and whether the measurement lies within it.

    Args:
        name: what it is, with the paper's equation.
        measured: its value in the run.
        bound: what the bound says with the run's own constants; None where there is none.
        holds: whether it is kept; None without a bound.
        note: what the comparison rests on.
    """

    name: str
    measured: float | None
    bound: float | None = None
    holds: bool | None = None
    note: str = ""


def beside(result: Result, *, metric: str | None = None) -> list[Row]:
    """The bounds of the papers with a run's own constants, beside what the run measured.

    L is the largest smoothness measured along the rounds: an estimate from below, so a bound that just holds may hold by luck, and
    one that is broken would be broken by the true L only if that is close. The bounds are for plain SGD and full participation.

    Args:
        result: of a run with ``diagnostics``.
        metric: whose curve is looked at for its plateau; None for the task's primary metric.

    Example:
        >>> import fedloom as fl
        >>> data = fl.data.load("digits").partition(fl.dirichlet(0.5), clients=3, seed=0)
        >>> found = fl.fit("fedavg", "mlp", data, rounds=3, batch_size="full", diagnostics={}, progress=False)
        >>> [row.holds for row in beside(found) if row.name.startswith("drift")]
        [True]
    """
    records = [r["diagnostics"] for r in result.history if "heterogeneity" in r.get("diagnostics", {})]
    if not records:
        raise UserError(
            "the run has no diagnostics of a shared model; give fit(diagnostics={}) and a method that shares one"
        )
    rows = [*_bounds(records), *_facts(records)]
    return [*rows, _plateau(result, metric or result.task.primary)]


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| quantity | measured | bound | within |", "|---|---|---|---|"]
    for row in rows:
        verdict = "" if row.holds is None else "yes" if row.holds else "NO"
        lines.append(f"| {row.name} | {_shown(row.measured)} | {_shown(row.bound)} | {verdict} |")
    return "\n".join(lines)


def _bounds(records: list[dict[str, Any]]) -> list[Row]:
    lips = max((r["smoothness"] for r in records if r.get("smoothness") is not None), default=None)
    moved = [r for r in records if "drift" in r]
    if lips is None or not moved:
        return []
    worst: Row | None = None
    for r in moved:
        limit = float(
            theory.drift_bound(
                eta_t=r["lr"],
                steps=max(r["local_steps"], 1.0),
                grad_sq=r["gradient_norm"] ** 2,
                heterogeneity=r["heterogeneity"],
                noise=r["noise"],
                smoothness=lips,
                mode="sound",
            ).value
        )
        row = Row("drift, mean ‖theta_k - w‖² (OmniISR, eq. 14, sound)", r["drift"], limit, r["drift"] <= limit)
        if worst is None or worst.bound is None or r["drift"] / limit > (worst.measured or 0.0) / worst.bound:
            worst = row
    assert worst is not None
    first, rounds = moved[0], len(moved)
    # The theorem's step eta/sqrt(T) is the run's; a loss is never below 0, so Delta is at most its first value.
    constants = {
        "gap": first["objective"],
        "eta": first["lr"] * math.sqrt(rounds),
        "rounds": float(rounds),
        "smoothness": lips,
        "steps": max(1.0, first["local_steps"]),
        "heterogeneity": max(r["heterogeneity"] for r in moved),
    }
    mean = sum(r["gradient_norm"] ** 2 for r in moved) / rounds
    limit = float(theory.fl_bound_explicit(**constants, noise=max(r["noise"] for r in moved)).value)
    name = "mean ‖grad‖² over the rounds (Theorem 3, every constant explicit)"
    return [worst, Row(name, mean, limit, mean <= limit if math.isfinite(limit) else None)]


def _facts(records: list[dict[str, Any]]) -> list[Row]:
    """What is measured and has no bound; kappa's claims are those of OmniISR and FedAIMS."""
    last = records[-1]
    found = [
        Row("heterogeneity H (OmniISR, eq. 13)", last["heterogeneity"]),
        Row("H / ‖grad‖²", last["heterogeneity_relative"]),
        Row("noise sigma² of a mini-batch", last["noise"]),
        Row("smoothness L, largest seen", max((r.get("smoothness") or 0.0 for r in records), default=None)),
    ]
    for key, name in (
        ("kappa", "kappa = H of all terms / H of the data term, same parameters (OmniISR, eq. 26: below 1)"),
        ("kappa_relative", "the same of H / ‖grad‖²"),
    ):
        values = [r[key] for r in records if r.get(key) is not None]
        if values:
            middle = sum(values) / len(values)
            found.append(Row(name, middle, 1.0, middle < 1.0))
    if "aggregation_jump" in last:
        found.append(Row("kappa², max ‖phi' - phi_k‖² (FedAIMS, Theorem 1)", last["aggregation_jump"]))
    if last.get("conflict"):
        found.append(
            Row("share of conflicting pairs, mean over layers", sum(last["conflict"].values()) / len(last["conflict"]))
        )
    if last.get("cosine_cloud") is not None:
        found.append(
            Row(
                "cos(g_cloud, g_sites) (OmniISR, Lemma 5: not below 0)",
                last["cosine_cloud"],
                0.0,
                last["cosine_cloud"] >= 0,
            )
        )
    return found


def _plateau(result: Result, metric: str) -> Row:
    curve = [v for r in result.history if (v := r.get(metric)) is not None]
    name = f"round in which {metric} leaves its plateau (OmniISR, Fig. 6)"
    if len(curve) < 3:
        return Row(name, None)
    value = float(theory.escape_round(curve=tuple(curve), higher_is_better=result.task.higher_is_better).value)
    return Row(name, value if math.isfinite(value) else None)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
