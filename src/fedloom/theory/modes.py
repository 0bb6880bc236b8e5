"""Table II of OmniISR, with numbers: centralised, federated and hybrid training compared."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.theory.answer import Answer, Mode, check_mode
from fedloom.theory.bounds import cl_bound, fl_bound
from fedloom.theory.hybrid import hybrid_bound
from fedloom.theory.rounds import rounds_cl, rounds_fl, rounds_hybrid


@dataclass(frozen=True, slots=True, eq=False)
class ModeRow:
    """A row of Table II: the formulas as text, and the two answers with their conditions."""

    mode: str
    update: str
    formula: str
    rate: str
    condition: str
    holds: bool
    bound: Answer
    rounds: Answer


def compare_modes(
    *,
    gap: float,
    eta: float,
    rounds: float,
    eps: float,
    smoothness: float,
    second_moment: float,
    steps: float,
    heterogeneity: float,
    alpha_min: float,
    noise: float,
    bias: float,
    c: float = 1.0,
    mode: Mode = "sound",
) -> tuple[ModeRow, ...]:
    """The three modes of training side by side: update, bound after T rounds, condition, rounds to eps.

    The bounds take the step size given; the rounds to eps take the best one, as the table's O(...) do.
    `holds` is the verdict on the step-size condition, which for federated training is the printed one
    (paper) or the right one (sound).

    Args:
        gap: Delta = L(theta_0) - L*.
        eta: step size; the steps made are eta/sqrt(T).
        rounds: T.
        eps: wanted mean squared gradient.
        smoothness: L.
        second_moment: V = G^2 + sigma^2.
        steps: local steps K.
        heterogeneity: mean H over the rounds.
        alpha_min: least mixing weight of the cloud.
        noise: sigma_eff^2.
        bias: B_eff.
        c: the paper's constants c and C.
        mode: as printed, or corrected.

    Example:
        >>> rows = compare_modes(gap=1, eta=1, rounds=100, eps=0.5, smoothness=2, second_moment=3, steps=1,
        ...                      heterogeneity=1, alpha_min=0.5, noise=1, bias=0.1)
        >>> [(row.mode, round(row.bound.value, 2), row.holds) for row in rows]
        [('centralised', 0.8, True), ('federated', 1.25, True), ('hybrid', 0.31, True)]

    Reference: OmniISR, Table II.
    """
    check_mode(mode)
    start = {"gap": gap, "eta": eta, "rounds": rounds, "smoothness": smoothness}
    goal = {"eps": eps, "gap": gap}
    local = {"steps": steps, "heterogeneity": heterogeneity, "c": c}
    mixed = {"alpha_min": alpha_min, "noise": noise, "bias": bias, "c": c}
    work = {"smoothness": smoothness, "second_moment": second_moment}
    central = cl_bound(**start, second_moment=second_moment)
    federated = fl_bound(**start, **local, second_moment=second_moment, mode=mode)
    hybrid = hybrid_bound(**start, **mixed)
    power, printed = ("^2", "L eta sqrt(T) c K^2 < 1") if mode == "paper" else ("", "L eta c K^2 < sqrt(T)")
    target = "K^2 H" if mode == "paper" else "c K^2 (H + eps)"
    return (
        ModeRow(
            mode="centralised",
            update="theta - eta_t g",
            formula="2 Delta/(eta sqrt T) + L eta V/sqrt T",
            rate="O(1/sqrt T); rounds 8 Delta L V/eps^2",
            condition="L eta <= sqrt(T)",
            holds=central.conditions[-1].everywhere,
            bound=central,
            rounds=rounds_cl(**goal, **work),
        ),
        ModeRow(
            mode="federated",
            update="theta + sum_n w_n delta_n",
            formula="2 Delta/(eta sqrt T) + L eta (V + c K^2 (A + H))/sqrt T, solved for A",
            rate=f"O(1/sqrt T); rounds 8 Delta L (V + {target})/eps^2",
            condition=printed,
            holds=federated.conditions[0].everywhere,
            bound=federated,
            rounds=rounds_fl(**goal, **work, **local, mode=mode),
        ),
        ModeRow(
            mode="hybrid",
            update="theta - eta_t (a_t g_CL + (1 - a_t) g_FL)",
            formula="C Delta/(a_min eta sqrt T) + C eta sigma_eff^2/sqrt T + C B_eff^2",
            rate=f"O(1/sqrt T) + C B_eff^2; rounds 4 C^2 Delta sigma_eff^2/(a_min{power} (eps - C B_eff^2)^2)",
            condition="L eta <= sqrt(T)/4",
            holds=hybrid.conditions[-1].everywhere,
            bound=hybrid,
            rounds=rounds_hybrid(**goal, **mixed, mode=mode),
        ),
    )
