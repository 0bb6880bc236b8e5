"""``compare``: methods by seeds by swept options."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.comparison import arguments, execution, grid, resources
from fedloom.comparison.cell import Cell
from fedloom.comparison.progress import Board
from fedloom.comparison.record import FILE, RUNS, Comparison, read_facts
from fedloom.errors import UnknownName, UserError
from fedloom.runs.options import Settings
from fedloom.runs.run_folder import flat
from fedloom.spec import text_form
from fedloom.spec.method import Method
from fedloom.spec.options import default
from fedloom.store import atomic


def compare(
    methods: grid.Methods,
    *,
    model: Any = "mlp",
    data: Any,
    seeds: int | Sequence[int] | str = 3,
    sweep: Mapping[str, Sequence[Any]] | Sequence[str] | None = None,
    baseline: str | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    jobs: int | str = "auto",
    progress: bool = True,
    **options: Any,
) -> Comparison:
    """Runs every method with every seed and every combination of swept values, and holds them against a baseline.

    Every cell is an ordinary run with a folder of its own. Called again with the same ``out``, finished cells are not repeated,
    an interrupted one is resumed, one that failed is tried again; more methods, seeds or values may be asked for.

    Args:
        methods: a list of methods or of their text forms, text with ``;`` between them, or a mapping from labels to them.
        model: as for ``fit``; a callable may take swept values, ``model.width`` as its argument ``width``.
        data: as for ``fit``, or a function that makes a federation; it is given ``seed`` and, of swept values, ``data.alpha`` as
            ``alpha``, where it has arguments of these names. A table's ``data.alpha`` is the argument of its partition.
        seeds: how many (0, 1, ...), or which. Methods are paired by seed: same partition, same initial weights, same cohorts.
        sweep: values by dotted key of the configuration, such as ``{"data.alpha": [0.1, 0.3]}``.
        baseline: label of the method to hold the others against; the first one without.
        target: value of the metric whose rounds and bytes are counted; the baseline's own mean without.
        out: folder of the comparison; a temporary one without.
        jobs: cells at once, each in a process of its own; ``"auto"`` goes by processors and memory, and takes one on CUDA.
        progress: whether a live table is shown.
        **options: options of ``fit``, the same for all cells.

    Returns:
        The comparison: cells, statistics and tables. Runs that fail are in it, with the reason.

    Example:
        >>> import fedloom as fl
        >>> data = {"name": "digits", "clients": 4, "partition": "dirichlet(0.3)"}
        >>> made = fl.compare(["local", "fedavg"], data=data, seeds=2, sweep={"epochs": [1, 2]}, rounds=1, jobs=1, progress=False)
        >>> len(made.cells), made.settings
        (8, ['epochs=1', 'epochs=2'])
    """
    for key in options:
        if key not in grid.OPTIONS:
            raise UnknownName("option of compare", key, [*grid.OPTIONS, "methods", "seeds", "sweep", "baseline"])
    chosen, numbers, swept = grid.methods_of(methods), grid.seeds_of(seeds), grid.sweeps_of(sweep)
    base = {"model": model, "data": data, **options}
    comparison = _planned(chosen, numbers, swept, baseline, target, out, base)
    checked = [arguments.arguments(base, chosen[c.method], c.seed, c.options) for c in comparison.cells]
    for made in checked:
        arguments.check(made)
    _go_on(comparison)
    comparison.save()
    lock = atomic.Lock(comparison.path)
    try:
        _play_missing(comparison, chosen, checked, base, jobs, progress)
    finally:
        lock.release()
    comparison.write()
    return comparison


def _play_missing(
    comparison: Comparison,
    methods: Mapping[str, Method],
    checked: list[dict[str, Any]],
    base: Mapping[str, Any],
    jobs: int | str,
    progress: bool,
) -> None:
    """Plays the cells that are not done."""
    todo = [(c, made) for c, made in zip(comparison.cells, checked, strict=True) if c.state != "done"]
    count = resources.jobs_of(jobs, len(todo), todo[0][1] if todo else None)
    work = [execution.Job(_sendable(methods[c.method]), c.seed, c.options, c.path) for c, _ in todo]
    for cell, _ in todo:
        cell.failure = ""
    _play(comparison, [c for c, _ in todo], work, base, count, progress, asked=jobs != "auto")


def _planned(
    methods: Mapping[str, Method],
    seeds: tuple[int, ...],
    sweep: dict[str, list[Any]],
    baseline: str | None,
    target: float | None,
    out: str | Path | None,
    base: Mapping[str, Any],
) -> Comparison:
    """The comparison before anything is played."""
    values = grid.combinations(sweep)
    if len(values) * len(methods) * len(seeds) > grid.MOST:
        raise UserError(f"{len(values) * len(methods) * len(seeds)} runs are more than {grid.MOST}; sweep fewer values")
    place = Path(tempfile.mkdtemp(prefix="fedloom-") if out is None else out)
    model = base["model"] if not isinstance(base["model"], (str, Mapping)) else None
    cells = [
        Cell(label, seed, chosen, place / RUNS / grid.folder_of(label, chosen, seed), "", model)
        for chosen in values
        for label in methods
        for seed in seeds
    ]
    texts = {label: m.text for label, m in methods.items()}
    made = Comparison(place, texts, seeds, sweep, _baseline(baseline, methods), cells, arguments.facts(base), target)
    if out is None:
        weakref.finalize(made, shutil.rmtree, place, ignore_errors=True)
    return made


def _baseline(given: str | None, methods: Mapping[str, Method]) -> str:
    """The label of the baseline, which may be given as another way to write its method."""
    if given is None:
        return next(iter(methods))
    if given in methods:
        return given
    try:
        text = text_form.method(given).text
    except UserError:
        text = ""
    for label, method in methods.items():
        if text == method.text:
            return label
    raise UnknownName("baseline", given, methods)


def _go_on(comparison: Comparison) -> None:
    """Refuses a folder that holds something else; takes over what failed before."""
    place = comparison.path
    if place.exists() and not place.is_dir():
        raise UserError(f"{place} is not a folder; choose another one with --out")
    if not (place / FILE).exists():
        if place.is_dir() and any(not p.name.startswith(".") for p in place.iterdir()):
            raise UserError(f"{place} is not empty and holds no comparison; choose another folder")
        return
    old, new = flat(read_facts(place)["options"]), flat(comparison.options)
    keys = [k for k in {**old, **new} if old.get(k) != new.get(k)]
    if keys:
        told = ", ".join(f"{k} was {old.get(k, 'not given')!r}, now {new.get(k, 'not given')!r}" for k in keys[:5])
        raise UserError(f"{place} holds a comparison with other options: {told}; choose another folder")


def _sendable(method: Method) -> Method | str:
    """Return the text of a method for another process, or the method if its text is not enough."""
    return method.text if text_form.can_rebuild(method) else method


def _play(
    comparison: Comparison,
    cells: list[Cell],
    jobs: list[execution.Job],
    base: Mapping[str, Any],
    count: int,
    progress: bool,
    asked: bool,
) -> None:
    rounds = int(base.get("rounds") or default(Settings, "rounds"))
    pool = None
    board = Board(comparison, cells, rounds, count, progress)
    if count > 1:
        try:
            pool = execution.Pool(base, jobs, count, board)
            with board:
                pool.go()
            return
        except execution.CannotSend as error:
            if asked:
                warnings.warn(f"jobs={count}: the runs are played one after another here ({error})", stacklevel=4)
            board = Board(comparison, cells, rounds, 1, progress)
    with board:
        execution.one_by_one(base, jobs, board)
