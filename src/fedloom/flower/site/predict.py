"""A site's own model, at the site, from what it keeps there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.clients.messages import Post
from fedloom.clients.runner import ClientRunner
from fedloom.errors import UserError
from fedloom.flower.apps import workshop
from fedloom.flower.error_codes import Refusal
from fedloom.flower.experiment import Experiment
from fedloom.flower.site.runner import desk_for
from fedloom.flower.site.site_data import SiteConfig, new_rows
from fedloom.flower.site.site_store import MODEL, SiteStore, folder_name
from fedloom.flower.wire import SiteJob


def newest_model(store: SiteStore, run: str, key: str | None = None) -> dict[str, Any]:
    """What a site last kept of a run: of the experiment with this key, or of the newest."""
    found = store.folder.glob(f"*/{folder_name(run)}/{MODEL}")
    if key is not None:
        found = (path for path in found if path.parent.parent.name == folder_name(key))
    paths = sorted(found, key=lambda path: path.stat().st_mtime)
    if not paths:
        raise UserError(
            f"{store.folder} holds no model of {run!r} yet; the site has to take part in an experiment first"
        )
    return store.read_model(paths[-1])


def site_desk(config: str | Path, experiment: str, run: str, key: str | None = None) -> ClientRunner:
    """The desk of a site after its adapt program: its own model, ready for ``predict``.

    Args:
        config: the site's own file.
        experiment: the text of the experiment.
        run: the method (and seed, where there are several).
        key: key of the experiment in the site's store; the newest without.
    """
    site = SiteConfig.load(config)
    try:
        shop = workshop(site, experiment, {run})
        if run not in shop.benches:
            raise UserError(f"the experiment has no run {run!r}")
        kept = newest_model(shop.store, run, key)
        post = Post(**{k: kept[k] for k in ("leaves", "broadcast", "gate", "round", "cohort", "population")})
        job = SiteJob(run, kept["stage"], "own", post, kept["addressed"], base=kept["base"])
        bench = shop.benches[run]
        desk = desk_for(bench, job, shop.store.load(kept["experiment"], run, kept["base"]))
    except Refusal as refusal:
        raise UserError(refusal.reason) from None
    desk.run(bench.bounds[job.stage].method.schedule.adapt)
    return desk


def predict(config: Path, experiment: Path, run: str, file: Path) -> list[list[float]]:
    """Outputs of a site's own model for the rows of a file.

    Args:
        config: the site's own file.
        experiment: the experiment.
        run: the method (and seed, where there are several).
        file: a CSV with the input columns, or an npz file with x, as the site's own rows are before preprocessing.
    """
    plan, text = Experiment.load(experiment)
    if run not in plan.runs():
        raise UserError(f"the experiment has no run {run!r}; it has {', '.join(map(repr, plan.runs()))}")
    x = new_rows(plan, SiteConfig.load(config), plan.runs()[run][1], file)
    output = site_desk(config, text, run).predict(x)
    return [[float(v) for v in row.flatten()] for row in output]
