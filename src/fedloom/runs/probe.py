"""The probe of the vectorised engine: a comparison with the loop engine on a few rows."""

from __future__ import annotations

import linecache
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom import rng
from fedloom.clients.messages import Site
from fedloom.engines.base import Engine
from fedloom.engines.loop import LoopEngine
from fedloom.engines.vectorised.engine import VectorisedEngine
from fedloom.errors import FedloomError
from fedloom.ops import precision
from fedloom.rounds import server
from fedloom.spec.optimizer import sgd

if TYPE_CHECKING:
    from fedloom.network.bound_method import Bound
    from fedloom.rounds.run import Run

UNEQUAL, EQUAL = (7, 5), (6, 6)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}
_CLIENT_CODE = (
    "methods",
    "plugins",
    "models",
    "spec/terms.py",
    "spec/class_losses.py",
    "spec/two_layer_net.py",
    "spec/prototypes.py",
    "spec/uploads.py",
    "tasks/base.py",
    "tasks/builtin.py",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a probe.

    Args:
        possible: whether the vectorised engine gives the loop's numbers.
        why: the reason in one line, or empty.
    """

    possible: bool
    why: str = ""


def probe(run: Run) -> Verdict:
    """Run a round and an evaluation on a few rows of two clients with both engines, and compare.

    Args:
        run: a run before its first round; it is not changed.
    """
    verdict = Verdict(True)
    for bound in (run.bound, *run.later.values()):
        result = _probe(run, bound)
        if not result.possible:
            return result
        if result.why:
            verdict = result
    return verdict


@contextmanager
def _strict(bound: Bound) -> Iterator[None]:
    """Switch off autocast and TF32: the probe looks for other numbers, not for other rounding."""
    net, before = bound.network, bound.network.autocast
    net.autocast = None
    try:
        with precision.tf32(products=False, convolutions=False):
            yield
    finally:
        net.autocast = before


def _probe(run: Run, bound: Bound) -> Verdict:
    if bound.network.autocast is not None:
        try:
            _played(run, bound, VectorisedEngine(step="mapped"), UNEQUAL, 0)
        except FedloomError:
            return Verdict(True)
        except Exception as error:
            return Verdict(False, why=f"in bf16: {said(error)}")
    with _strict(bound):
        try:
            plain, again = (_played(run, bound, LoopEngine(), UNEQUAL, seed) for seed in (0, 1))
        except FedloomError:
            return Verdict(True)  # the run raises the same error at its beginning
        try:
            return _compared(run, bound, plain, again)
        except FedloomError:
            return Verdict(True)
        except Exception as error:
            return Verdict(False, why=said(error))


def _compared(run: Run, bound: Bound, plain: dict[str, Tensor], again: dict[str, Tensor]) -> Verdict:
    """Compare the vectorised engine with the loop's numbers for two seeds of torch's noise."""
    tolerance = TOLERANCE[bound.structure.dtype]
    random = _gap(plain, again) > tolerance
    mapped = _played(run, bound, VectorisedEngine(step="mapped"), UNEQUAL, 0)
    if random:
        return Verdict(True, why="the model draws noise of its own, so that engines agree in distribution only")
    if _gap(plain, mapped) <= tolerance:
        return Verdict(True)
    even, side = (_played(run, bound, e, EQUAL, 0) for e in (LoopEngine(), VectorisedEngine(step="mapped")))
    gap = _gap(even, side)
    if gap > tolerance:
        return Verdict(False, why=f"under vmap the model gives other numbers than plainly (they differ by {gap:.1g})")
    return Verdict(False, why="padding rows change the model's output (rows of a batch see each other)")


def _played(run: Run, bound: Bound, engine: Engine, sizes: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """Return all numbers of one round and one evaluation of a tiny run."""
    sites = _sites(run, sizes)
    tiny = replace(
        run,
        bound=bound,
        later={},
        engine=engine,
        work=replace(run.work, epochs=1, batch_size=max(sizes), optimizer=sgd(0.01), keep_optimizer=False),
        sites=sites,
        size=len(sites),
        state=server.initial_state(bound),
        clients={},
        judges={name: (site, name) for name, site in sites.items()},
        last={},
    )
    with warnings.catch_warnings(), rng.torch_generator(seed):
        warnings.simplefilter("ignore")
        tiny.setup()
        outcome, _ = tiny.play(list(sites), 1)
        own, _ = tiny.evaluate(list(sites))
    numbers = {f"server {k}": v - bound.start[k] for k, v in tiny.state.leaves.items() if v.is_floating_point()}
    for reply in outcome.accepted:
        numbers |= {
            f"{reply.id} {k}": v - bound.start[k] for k, v in reply.state.leaves.items() if v.is_floating_point()
        }
        numbers[f"{reply.id} loss"] = torch.tensor(outcome.losses.get(reply.id, 0.0))
    for name, metrics in own.items():
        loss = metrics.get("loss")
        numbers[f"{name} test loss"] = torch.tensor(math.nan if loss is None else loss)
    return numbers


def _sites(run: Run, sizes: tuple[int, ...]) -> dict[str, Site]:
    """Return two clients with the first rows of the run's clients, or of its only client."""
    fitting = [n for n, rows in zip(run.roster.ids, run.roster.rows, strict=True) if rows >= max(sizes)]
    chosen = [run.sites[n] for n in (fitting or run.roster.ids)[: len(sizes)]]
    sites = {}
    for i, size in enumerate(sizes):
        site = chosen[i % len(chosen)]
        index = torch.arange(min(size, len(site.train)), device=site.train.y.device)
        rows = site.train.take(index)
        sites[str(i)] = replace(
            site, id=str(i), train=rows, test=rows, val=None, labels=site.labels[: len(index)], counts=site.counts
        )
    return sites


def _gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference; NaN equals NaN."""
    if set(a) != set(b):
        return math.inf
    tops = {k: float(torch.nan_to_num(v).abs().max()) if v.numel() else 0.0 for k, v in a.items()}
    moved = [v for k, v in tops.items() if not k.endswith("loss")]
    floor = 1e-2 * max(moved, default=0.0)
    worst = 0.0
    for k, v in a.items():
        if not v.numel():
            continue
        if not torch.equal(torch.isnan(v), torch.isnan(b[k])):
            return math.inf
        difference = float(torch.nan_to_num(v - b[k]).abs().max())
        worst = max(worst, difference / max(tops[k], floor, 1e-12))
    return worst


def blame(error: BaseException) -> str:
    """Return a message with the line of client code (a model's, a term's) that raised an error."""
    home, torch_home = Path(__file__).parents[1], Path(torch.__file__).parent
    ours = {home / part for part in _CLIENT_CODE}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        inside = path.is_relative_to(home) and not any(path.is_relative_to(part) for part in ours)
        if inside or path.is_relative_to(torch_home) or not path.is_absolute():
            continue
        text = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        return f"{path.name}, line {frame.lineno}, in {frame.name}: `{text}` cannot be run for many clients at once"
    return "the model or the method cannot be run for many clients at once"


def said(error: BaseException) -> str:
    """Return the origin and the message of an error in one line."""
    text: Any = str(error).strip().splitlines()
    return f"{blame(error)}; vmap says: {text[0] if text else type(error).__name__}"
