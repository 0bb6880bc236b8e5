"""Fig. 7 of OmniISR: the four panels of the escape time as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Mode
from fedloom.theory.escape import escape_time

GAMMAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ETAS = (0.01, 0.02, 0.05, 0.1)


def escape_curves(*, mode: Mode = "paper", **constants: float) -> dict[str, Any]:
    """The curves of the four panels: panel -> (x values, {label: escape times}); `nan` where there is no
    bound.

    Args:
        mode: as printed, or corrected.
        **constants: those of `escape_time`; eta (0.08) serves panels (c) and (d).

    Reference: OmniISR, Fig. 7.
    """
    eta = constants.pop("eta", 0.08)

    def times(**changed: Any) -> Any:
        return escape_time(**{"eta": eta, **constants, **changed}, mode=mode).value

    gammas, etas = np.geomspace(1e-3, 1.0, 400), np.geomspace(1e-3, 2.0, 400)
    radii, deltas = np.geomspace(1.0, 100.0, 200), np.geomspace(1e-6, 0.9, 400)
    return {
        "gamma": (gammas, {f"η = {e:g}": times(eta=e, gamma=gammas) for e in ETAS}),
        "eta": (etas, {f"γ = {g:g}": times(eta=etas, gamma=g) for g in GAMMAS}),
        "radius": (radii, {f"γ = {g:g}": times(gamma=g, radius=radii) for g in GAMMAS}),
        "delta": (deltas, {f"γ = {g:g}": times(gamma=g, delta=deltas) for g in GAMMAS}),
    }


def draw_escape(path: str | Path, *, mode: Mode = "paper", **constants: float) -> Path:
    """Draw the four panels into one file (PNG or SVG by its ending); the same numbers give the same bytes.

    Args:
        path: where to write; its folder must exist.
        mode: as printed, or corrected.
        **constants: those of `escape_time`.

    Reference: OmniISR, Fig. 7.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"{path.name} ends in {path.suffix or 'nothing'}: expected .png or .svg.")
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist. Create it first.")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the picture needs matplotlib. Install it with: pip install 'fedloom[plots]'") from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    labels = {
        "gamma": "(a) curvature γ",
        "eta": "(b) step size η",
        "radius": "(c) neighbourhood radius R",
        "delta": "(d) probability of failure δ",
    }
    curves = escape_curves(mode=mode, **constants)
    for axes, (panel, (x, lines)) in zip(figure.subplots(2, 2).flat, curves.items(), strict=True):
        for index, (label, y) in enumerate(lines.items()):
            if np.any(np.isfinite(y)):
                axes.plot(x, y, label=label, color=f"C{index}")
        # As in the paper: (a) and (b) double logarithmic; (c) and (d) linear in T, so that ln R is a straight line.
        scale = "log" if panel in ("gamma", "eta") else "linear"
        axes.set(xscale="log", yscale=scale, xlabel=labels[panel], ylabel="steps to escape, T")
        axes.grid(True, which="both", alpha=0.2)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.suptitle(f"Escape time from a strict saddle, eq. 21 ({mode}); a curve ends where there is no bound")
    date = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "fedloom"}):
        figure.savefig(path, metadata=date)
    return path
