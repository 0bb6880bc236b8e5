"""What the two Flower apps of a deployment do: the same for every experiment, since the experiment travels as text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid

from fedloom.engines.choose_device import choose_device
from fedloom.errors import UserError
from fedloom.flower.error_codes import Code, Refusal
from fedloom.flower.experiment import Experiment, digest
from fedloom.flower.server.serve import serve
from fedloom.flower.site.runner import Bench, Workshop, answered, log_to
from fedloom.flower.site.site_data import SiteConfig, load_rows
from fedloom.flower.site.site_store import SiteStore
from fedloom.flower.wire import Letter


def workshop(config: SiteConfig, text: str, only: set[str] | None = None) -> Workshop:
    """A site's workshop for an experiment; what is wrong is refused with a code and logged here in words.

    Args:
        config: the site's own file.
        text: the experiment.
        only: the runs that are needed; all without.
    """
    try:
        plan = Experiment.parse(text)
        _check(config, plan, text)
        device = choose_device(config.device, plan.precision)
        runs = {k: v for k, v in plan.runs().items() if only is None or k in only}
        bounds = {key: plan.bounds(method, seed, device) for key, (method, seed) in runs.items()}
    except UserError as error:
        raise Refusal(Code.PLAN, str(error)) from None
    try:
        rows = {seed: load_rows(plan, config, seed) for seed in {s for _, s in runs.values()}}
        benches = {
            key: Bench(
                bounds[key],
                plan.work(seed),
                plan.site(rows[seed], bounds[key][0].structure.outputs, device.torch_device),
            )
            for key, (_, seed) in runs.items()
        }
    except UserError as error:
        raise Refusal(Code.DATA, str(error)) from None
    return Workshop(config.site, benches, SiteStore(config.store, device.torch_device), config.share_rows, secret=True)


def _check(config: SiteConfig, plan: Experiment, text: str) -> None:
    """Whether the site's administrator lets it take part."""
    if config.site not in plan.sites:
        raise UserError(f"the experiment names the sites {', '.join(plan.sites)}; this one is {config.site!r}")
    if config.approve is not None and config.approve != digest(text):
        raise UserError(f"the experiment {digest(text)} is not the approved one, {config.approve}")
    for method in plan.methods:
        if config.methods and method not in config.methods:
            raise UserError(f"the method {method!r} is not among those of this site: {', '.join(config.methods)}")


def _open(letter: Letter, node: Mapping[str, Any]) -> Workshop:
    path = node.get("config")
    if not isinstance(path, str):
        raise Refusal(Code.DATA, 'the node was started without config="site.toml"')
    try:
        config = SiteConfig.load(path)
    except UserError as error:
        raise Refusal(Code.DATA, str(error)) from None
    log_to(Path(config.store) / "site.log")
    only = {job.run for job in letter.jobs} if letter.jobs else None
    return workshop(config, letter.plan, only)


def answer(content: RecordDict, node: Mapping[str, Any]) -> RecordDict:
    """A site's reply to a letter.

    Args:
        content: the letter.
        node: the configuration of the site's node; ``config`` is the site's own file.
    """
    return answered(content, node, _open)


def run(grid: Grid, context: Context) -> None:
    """Runs the experiment that the run's configuration names."""
    news = logging.getLogger("fedloom.server")
    news.addHandler(logging.StreamHandler(sys.stdout))
    news.setLevel(logging.INFO)
    news.propagate = False
    plan, text = Experiment.load(str(context.run_config["experiment"]))
    serve(grid, plan, text, Path(str(context.run_config["out"])), resume=bool(context.run_config["resume"]))
