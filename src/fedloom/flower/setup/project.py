"""``fedloom deploy init``: a folder with all that a consortium needs, for the server and for each site."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

from fedloom.errors import UserError
from fedloom.flower.experiment import Experiment
from fedloom.flower.setup.keys import make_certificates, make_site_key
from fedloom.store.atomic import file_name
from fedloom.store.format_number import FORMAT, check_format

CONSORTIUM = "consortium.toml"
APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedloom-app"
version = "1.0.0"
description = "Hands messages to the fedloom that is installed at every site."
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "fedloom_app:server"
clientapp = "fedloom_app:client"

[tool.flwr.app.config]
experiment = ""
out = ""
resume = false
"""


def app_code() -> str:
    """The module of the bundle that Flower sends to sites."""
    return (files("fedloom.flower.setup") / "bundle.py").read_text(encoding="utf-8")


def example(sites: list[str]) -> dict[str, Any]:
    """An experiment to begin with."""
    return {
        "name": "first",
        "methods": ["local", "fedavg"],
        "sites": sites,
        "rounds": 10,
        "task": "classification",
        "inputs": {"shape": [10], "classes": ["no", "yes"]},
        "model": {"name": "mlp"},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "data": {"label": "label", "preprocess": {"impute": "median", "scale": "standard"}},
    }


def init(
    folder: Path, *, experiment: Path | None, sites: list[str], host: str, port: int = 8443, inner: int = 9443
) -> Experiment:
    """Makes the folder of a consortium.

    Args:
        folder: a new one.
        experiment: the experiment's file; an example for ``sites`` without.
        sites: names of the sites, where there is no experiment yet.
        host: name or address under which sites reach the server.
        port: the server's port.
        inner: port of the SuperLink on the loopback interface.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another folder")
    if experiment is None:
        if not sites:
            raise UserError("name the sites with --sites a,b,c or give an experiment with --experiment FILE")
        text = tomli_w.dumps(example(sites))
        plan = Experiment.parse(text)
    else:
        plan, text = Experiment.load(experiment)
    server = folder / "server"
    (server / "app").mkdir(parents=True)
    server.chmod(0o700)
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    table = {"format": FORMAT, "host": host, "port": port, "inner_port": inner}
    table["sites"] = list(plan.sites)
    (folder / CONSORTIUM).write_text(tomli_w.dumps(table), encoding="utf-8")
    make_certificates(server, [host])
    (server / "app" / "pyproject.toml").write_text(APP, encoding="utf-8")
    (server / "app" / "fedloom_app.py").write_text(app_code(), encoding="utf-8")
    _fill("nginx.conf", server / "nginx.conf", host=host, port=port, inner=inner)
    for number, name in enumerate(plan.sites):
        _make_site(folder, name, f"{host}:{port}", 9600 + number, own_rows="name" not in plan.data)
    _fill("README.server.md", folder / "README.md", host=host, port=port, sites=", ".join(plan.sites))
    _fill("compose.yaml", folder / "compose.yaml", port=port, sites="".join(_service(n) for n in plan.sites))
    return plan


def _make_site(folder: Path, name: str, address: str, local: int, *, own_rows: bool) -> None:
    place = folder / "sites" / file_name(name)
    place.mkdir(parents=True)
    place.chmod(0o700)
    shutil.copy(folder / "server" / "ca.crt", place / "ca.crt")
    shutil.copy(folder / "experiment.toml", place / "experiment.toml")
    make_site_key(place, name)
    table: dict[str, Any] = {"site": name, "store": "store"}
    if own_rows:
        table["data"] = {"path": "data.csv"}
    table["server"] = {"address": address, "local_port": local}
    (place / "site.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    _fill("README.site.md", place / "README.md", site=name, address=address)


def _service(name: str) -> str:
    folder = file_name(name)
    safe = "".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-").lower() or "site"
    return (
        f"  site-{safe}:\n    image: fedloom\n    command: fedloom deploy site /site\n"
        f'    volumes: ["./sites/{folder}:/site"]\n    init: true\n    restart: unless-stopped\n'
    )


def _fill(template: str, path: Path, **values: Any) -> None:
    text = (files("fedloom.flower.setup") / "templates" / template).read_text(encoding="utf-8")
    path.write_text(Template(text).substitute({k: str(v) for k, v in values.items()}), encoding="utf-8")


def read_consortium(folder: Path) -> Mapping[str, Any]:
    """The facts of a consortium's folder."""
    try:
        table = tomllib.loads((folder / CONSORTIUM).read_text(encoding="utf-8"))
        assert {"host", "port", "inner_port", "sites"} <= set(table)
    except (OSError, tomllib.TOMLDecodeError, AssertionError):
        raise UserError(f"{folder} is no folder of a consortium; make one with fedloom deploy init") from None
    check_format(folder / CONSORTIUM, table.get("format"), "Make it again with fedloom deploy init.")
    return table
