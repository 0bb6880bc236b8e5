"""``fedloom deploy``: real sites on Flower."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from fedloom.errors import RunError, UserError

app = typer.Typer(help="Real sites on Flower: init, server, site, run.", no_args_is_help=True, rich_markup_mode=None)


def _needs_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError('fedloom deploy needs Flower: pip install "fedloom[flower]"') from None


@app.callback()
def top() -> None:
    """Real sites on Flower."""
    _needs_flower()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    experiment: Annotated[Path | None, typer.Option(help="The experiment; an example without.")] = None,
    sites: Annotated[str, typer.Option(help="Names of the sites, with commas, where there is no experiment.")] = "",
    host: Annotated[str, typer.Option(help="Name or address of the server as sites see it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8443,
    inner_port: Annotated[int, typer.Option(help="Port of Flower's SuperLink on the loopback interface.")] = 9443,
) -> None:
    """Make the folder of a consortium: certificates, keys, configurations, instructions."""
    from fedloom.flower.setup import project

    names = [s.strip() for s in sites.split(",") if s.strip()]
    plan = project.init(folder, experiment=experiment, sites=names, host=host, port=port, inner=inner_port)
    typer.echo(f"{folder}: {len(plan.sites)} sites ({', '.join(plan.sites)}); read {folder / 'README.md'}")


@app.command()
def key(folder: Annotated[Path, typer.Argument(help="A site's folder.")]) -> None:
    """Make a site's key pair anew, at the site; send site.pub to the server."""
    from fedloom.flower.setup.keys import make_site_key
    from fedloom.flower.site.site_data import SiteConfig

    make_site_key(folder, SiteConfig.load(folder / "site.toml").site)
    typer.echo(f"{folder / 'site.pub'}: send this file to the server; {folder / 'site.key'} never leaves")


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@app.command()
def server(
    folder: Annotated[Path, typer.Argument(help="The consortium's folder.")] = Path("."),
    listen: Annotated[str, typer.Option(help="Interface on which sites are let in.")] = "0.0.0.0",
    proxy: Annotated[bool, typer.Option(help="Start the proxy; without, put nginx there.")] = True,
) -> None:
    """Start the SuperLink, let the sites' keys in, and open the door to sites; runs until it is stopped."""
    from fedloom.flower.server import processes
    from fedloom.flower.setup.project import read_consortium

    signal.signal(signal.SIGTERM, _stop)
    with processes.server(folder, listen=listen, proxy=proxy) as running:
        typer.echo(f"ready; sites: {', '.join(read_consortium(folder)['sites'])}")
        try:
            while True:
                for process in running:
                    try:
                        process.wait(1.0)
                    except subprocess.TimeoutExpired:
                        continue
                    raise RunError(f"a process of the server ended; see the logs in {folder / 'server'}")
        except KeyboardInterrupt:
            typer.echo("stopped")


@app.command()
def site(
    folder: Annotated[Path, typer.Argument(help="The site's folder.")] = Path("."),
    data: Annotated[Path | None, typer.Option(help="Where the rows are, instead of [data] path in site.toml.")] = None,
    experiment: Annotated[Path | None, typer.Option(help="The experiment, to check the rows against it first.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would leave, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Join the consortium with this site's rows; runs until it is stopped."""
    from fedloom.flower.site import join, node
    from fedloom.flower.site.site_data import SiteConfig

    if data is not None:
        join.set_path(folder / "site.toml", data)
    config = SiteConfig.load(folder / "site.toml")
    if dry_run or experiment is not None:
        if experiment is None:
            raise UserError("--dry-run needs the experiment: --experiment experiment.toml")
        found = join.inspect(config, experiment)
        if dry_run:
            typer.echo(json.dumps(found, indent=2) if as_json else join.text(found))
            return
    signal.signal(signal.SIGTERM, _stop)
    with node.site(folder, config) as (process, worker):
        typer.echo(f"site {config.site} joins {config.server['address']}")
        try:
            while True:
                try:
                    status = process.wait(30.0)
                    break
                except subprocess.TimeoutExpired:
                    worker.start()  # one that died is replaced
        except KeyboardInterrupt:
            typer.echo("stopped")
            return
    raise RunError(
        f"the site's node ended with status {status}; its key may not be registered, or the certificate is wrong"
    )


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="The consortium's folder.")] = Path("."),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    experiment: Annotated[Path | None, typer.Option(help="Another experiment than the consortium's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last completed round.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sites' metrics as JSON.")] = False,
) -> None:
    """Run the experiment over the sites, from the server's machine."""
    from fedloom.flower.server import processes, results

    processes.run(folder, out, resume=resume, experiment=experiment, quiet=quiet)
    found: dict[str, Any] = results.read(out)
    typer.echo(json.dumps(found) if as_json else results.text(found))


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(help="The site's folder.")],
    experiment: Annotated[Path, typer.Option(help="The experiment.")],
    method: Annotated[str, typer.Option(help="Which of its methods.")],
    input: Annotated[
        Path, typer.Option(help="A CSV like the site's own, without need of a label, or an npz file with x.")
    ],
) -> None:
    """Use the site's own model, at the site: one line of outputs per row."""
    from fedloom.flower.site import predict as using

    for row in using.predict(folder / "site.toml", experiment, method, input):
        typer.echo(",".join(f"{value:.6g}" for value in row))
