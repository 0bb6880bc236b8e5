"""A consortium on this machine: real SuperLink, proxy and SuperNodes, each in processes of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tomli_w

import fedloom as fl
from fedloom.flower.server import processes
from fedloom.flower.setup import project
from fedloom.flower.site import node
from fedloom.flower.site.site_data import SiteConfig
from tests.flower.sites import write_sites

PATIENCE = 600.0
"""Seconds that the server waits at the start: a busy machine is slow to start processes."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    found = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return found


class Consortium:
    """The folder and the processes."""

    def __init__(self, folder: Path, table: dict[str, Any], data: fl.Federation) -> None:
        self.folder, self.stack = folder / "consortium", ExitStack()
        (folder / "trial.toml").write_text(tomli_w.dumps(table))
        self.port, inner, *locals_ = free_ports(2 + len(data))
        project.init(
            self.folder, experiment=folder / "trial.toml", sites=[], host="127.0.0.1", port=self.port, inner=inner
        )
        server = {"address": f"127.0.0.1:{self.port}"}
        for client, local in zip(data, locals_, strict=True):
            write_sites(
                self.folder / "sites",
                fl.Federation.from_arrays([client], [client.id]),
                server={**server, "local_port": local},
            )
        self.inner, self.nodes = inner, dict[str, subprocess.Popen[bytes]]()
        self.workers, self.sites = dict[str, node.Worker](), dict[str, ExitStack]()
        self._server: ExitStack | None = None

    def start_server(self, proxy: bool = True) -> list[subprocess.Popen[bytes]]:
        self._server = ExitStack()
        self.links = self._server.enter_context(processes.server(self.folder, listen="127.0.0.1", proxy=proxy))
        return self.links

    def stop_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def start_site(self, name: str) -> subprocess.Popen[bytes]:
        place = self.folder / "sites" / name
        log = self.stack.enter_context((place / "node.log").open("ab"))
        if name in self.sites:
            self.sites[name].close()
        self.sites[name] = ExitStack()
        started = node.site(place, SiteConfig.load(place / "site.toml"), log)
        self.nodes[name], self.workers[name] = self.sites[name].enter_context(started)
        return self.nodes[name]

    def kill_site(self, name: str) -> None:
        """As a power cut would."""
        worker = self.workers[name].process
        for process in (self.nodes[name], *([] if worker is None else [worker])):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, out: Path, *words: str) -> subprocess.Popen[str]:
        """`fedloom deploy run` as a user starts it."""
        start = "from fedloom.cli import main; main()"
        line = [sys.executable, "-c", start, "deploy", "run", str(self.folder), "--out", str(out), *words]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))

    def flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = processes.environment(self.folder / "server" / "home")
        return subprocess.run(
            [processes.command("flwr"), *words], env=env, capture_output=True, text=True, timeout=120, check=False
        )

    def close(self) -> None:
        for site in self.sites.values():
            site.close()
        self.stop_server()
        self.stack.close()


@contextmanager
def consortium(folder: Path, table: dict[str, Any], data: fl.Federation) -> Iterator[Consortium]:
    made = Consortium(folder, {**table, "wait": PATIENCE, "timeout": table.get("timeout", PATIENCE)}, data)
    try:
        yield made
    finally:
        made.close()


def wait_until(what: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def tail(path: Path, size: int = 3000) -> str:
    return path.read_text(errors="replace")[-size:] if path.exists() else ""
