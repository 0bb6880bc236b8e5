"""Real processes over TLS with authenticated sites: the simulator's numbers, an intruder, and what dies on the way."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from safetensors.torch import load_file

import fedloom as fl
from fedloom.flower.server import processes
from fedloom.flower.setup import keys
from fedloom.flower.site.site_store import folder_name
from fedloom.plugins.privacy import accountant
from tests.flower.consortium import Consortium, consortium, tail, wait_until
from tests.flower.sites import experiment, people
from tests.flower.test_serve import simulated

SIZES = (9, 14)
PRIVATE = "fedavg + clip(0.5) + noise(1.0) + account"


def records(out: Path, method: str) -> list[dict[str, Any]]:
    path = out / folder_name(method) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_simulated(out: Path, method: str, data: fl.Federation, table: dict[str, Any]) -> None:
    result = simulated(method, data, table)
    shared = load_file(out / folder_name(method) / "models" / "shared.safetensors")
    assert result.run is not None
    for name, value in shared.items():
        torch.testing.assert_close(value, result.run.state.leaves[name], rtol=1e-4, atol=1e-6)
    found = records(out, method)
    assert [r["round"] for r in found] == [r["round"] for r in result.history]
    for mine, theirs in zip(found, result.history, strict=True):
        for key in ("loss", "accuracy", "train_loss", "global_accuracy"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4), key


def status(port: int, context: ssl.SSLContext, method: str, path: str) -> int:
    """Status of a request whose path is sent as it stands."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    try:
        connection.request(method, path, body=b"")
        return connection.getresponse().status
    finally:
        connection.close()


def intrude(made: Consortium, folder: Path) -> None:
    """A stranger who has the CA file: no path to the Control API, no key registered, no run started, no site admitted."""
    context = ssl.create_default_context(cafile=str(made.folder / "server" / "ca.crt"))
    paths = (
        *("/", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull-messages"),
        *("/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet//../control/start-run"),
        *("/v1/control/../fleet/x", "/v1/%63ontrol/start-run/../../fleet/x", "/v1/fleet/x%2fy", "/v1/fleet/x;y"),
        *("/v1/fleet/x?y=1", "/V1/CONTROL/start-run", "//v1/control/start-run", "/v1/fleet", "/v1/fleet/"),
    )
    for path in paths:
        for method in ("POST", "GET", "PUT", "OPTIONS"):
            assert status(made.port, context, method, path) == 403, (method, path)
    # What sites need is forwarded, and Flower refuses it without a signature.
    assert status(made.port, context, "POST", "/v1/fleet/activate-node") not in (200, 403, 502)
    home = folder / "intruder"
    home.mkdir()
    keys.make_site_key(home, "intruder")
    ca = made.folder / "server" / "ca.crt"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "door"\n[superlink.door]\naddress = "127.0.0.1:{made.port}"\nroot-certificates = "{ca}"\n'
    )
    env = processes.environment(home)
    app = str(made.folder / "server" / "app")
    for words in (["supernode", "register", str(home / "site.pub"), "door"], ["run", app, "door"]):
        line = [processes.command("flwr"), *words]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300, check=False)
        said = (done.stdout + done.stderr).lower()
        assert done.returncode != 0 or "403" in said or "failed" in said, said
        assert "successfully" not in said
    node = [
        *(
            processes.command("flower-supernode"),
            "--superlink",
            f"127.0.0.1:{made.port}",
            "--root-certificates",
            str(ca),
        ),
        *("--auth-supernode-private-key", str(home / "site.key"), "--host", "127.0.0.1", "--port", "0"),
    ]
    assert subprocess.run(node, env=env, capture_output=True, timeout=300, check=False).returncode != 0


def test_methods_over_processes_an_intruder_and_a_worker_that_dies(tmp_path: Path) -> None:
    private = [PRIVATE] if importlib.util.find_spec("dp_accounting") else []
    data, table = people(SIZES), experiment(["fedavg", "fedmap", *private], sites=2, rounds=2)
    out = tmp_path / "out"
    with consortium(tmp_path, table, data) as made:
        made.start_server()
        for name in table["sites"]:
            made.start_site(name)
        north = made.folder / "sites" / "north" / "store"
        with made.run(out) as run:
            wait_until(lambda: list(north.rglob("round-000001.safetensors")))
            worker = made.workers["north"].process
            assert worker is not None
            os.killpg(
                worker.pid, signal.SIGKILL
            )  # over the first round's letter or after it: what follows is done without
            intrude(made, tmp_path)
            said, _ = run.communicate(timeout=1200)
        assert run.returncode == 0, said + tail(made.folder / "server" / "link.log")
        for method in ("fedavg", "fedmap"):
            assert_simulated(out, method, data, table)
        for method in private:
            spent = [r["account"]["epsilon"] for r in records(out, method)]
            assert spent == [pytest.approx(accountant.epsilon(1.0, releases, 1e-5)) for releases in (1, 2)]
            assert f"epsilon {spent[-1]:.2f}" in said
            # The seed is known to everybody: noise that came from it would be the simulator's.
            with pytest.raises(AssertionError):
                assert_simulated(out, method, data, table)
        assert not any(r["rejected"] for method in table["methods"] for r in records(out, method))
        assert "accuracy" in said
        with made.run(out) as again:
            refused, _ = again.communicate(timeout=600)
        assert again.returncode == 2
        assert "--resume" in refused
        assert (made.folder / "sites" / "north" / "site.key").stat().st_mode & 0o077 == 0


NGINX = os.environ.get("FEDLOOM_NGINX") or shutil.which("nginx")


@contextmanager
def nginx(made: Consortium, folder: Path) -> Iterator[None]:
    """nginx with the file that init wrote, paths adapted as its first lines ask."""
    assert NGINX is not None
    folder.mkdir()
    text = (made.folder / "server" / "nginx.conf").read_text()
    (folder / "site.conf").write_text(text.replace("/etc/fedloom", str(made.folder / "server")))
    temporary = "".join(
        f"{kind}_temp_path {folder / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = (
        f"daemon off;\npid {folder / 'pid'};\nerror_log {folder / 'error.log'};\nevents {{}}\n"
        f"http {{\n{temporary}access_log off;\ninclude {folder / 'site.conf'};\n}}\n"
    )
    (folder / "nginx.conf").write_text(("user root;\n" if os.geteuid() == 0 else "") + whole)
    line = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    with processes.started(line, dict(os.environ)) as process:
        processes.wait_for_port(made.port, process, "nginx")
        yield


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (FEDLOOM_NGINX can name its program)")
def test_nginx_instead_of_the_proxy_lets_sites_in_and_nobody_else(tmp_path: Path) -> None:
    data, table = people(SIZES), experiment(["fedavg"], sites=2, rounds=1)
    with consortium(tmp_path, table, data) as made:
        made.start_server(proxy=False)
        with nginx(made, tmp_path / "nginx"):
            for name in table["sites"]:
                made.start_site(name)
            with made.run(tmp_path / "out") as run:
                intrude(made, tmp_path)
                said, _ = run.communicate(timeout=1200)
            assert run.returncode == 0, said + tail(tmp_path / "nginx" / "error.log")
        assert_simulated(tmp_path / "out", "fedavg", data, table)


@pytest.mark.slow
def test_a_site_that_is_killed_is_named_and_comes_back(tmp_path: Path) -> None:
    data, table = people((9, 14, 5)), experiment(["ditto"], rounds=6, timeout=90)
    with consortium(tmp_path, table, data) as made:
        made.start_server()
        for name in table["sites"]:
            made.start_site(name)
        out = tmp_path / "out"
        with made.run(out) as run:
            wait_until(lambda: len(records(out, "ditto")) >= 1)
            made.kill_site("south")
            wait_until(lambda: any(r["rejected"] for r in records(out, "ditto")))
            made.start_site("south")
            said, _ = run.communicate(timeout=1800)
        assert run.returncode == 0, said
        found = records(out, "ditto")
        assert {r["client"] for record in found for r in record["rejected"]} == {"south"}
        assert [r["round"] for r in found] == [1, 2, 3, 4, 5, 6]
        assert not found[-1]["rejected"] or "south" in said


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_with_resume(tmp_path: Path) -> None:
    data, table = people(SIZES), experiment(["ditto", "fedavg"], sites=2, rounds=4)
    with consortium(tmp_path, table, data) as made:
        links = made.start_server()
        for name in table["sites"]:
            made.start_site(name)
        out = tmp_path / "out"
        with made.run(out) as run:
            wait_until(lambda: len(records(out, "ditto")) >= 2)
            for link in links:
                os.killpg(link.pid, signal.SIGKILL)
            said, _ = run.communicate(timeout=600)
        assert run.returncode == 1
        assert "--resume" in said
        made.stop_server()
        made.start_server()
        with made.run(out, "--resume") as run:
            said, _ = run.communicate(timeout=1800)
        assert run.returncode == 0, said
        for method in ("ditto", "fedavg"):
            assert_simulated(out, method, data, table)


@pytest.mark.slow
def test_a_site_with_another_certificate_authority_stays_out(tmp_path: Path) -> None:
    data, table = people(SIZES), experiment(["fedavg"], sites=2)
    with consortium(tmp_path, table, data) as made:
        made.start_server()
        other = tmp_path / "other"
        other.mkdir()
        keys.make_certificates(other, ["127.0.0.1"])
        shutil.copy(other / "ca.crt", made.folder / "sites" / "north" / "ca.crt")
        made.start_site("north")
        log = made.folder / "sites" / "north" / "node.log"
        wait_until(lambda: "certificate" in tail(log).lower() or made.nodes["north"].poll() is not None)
        listed = made.flwr("supernode", "list", "consortium")
        assert "online" not in listed.stdout.lower()
