"""The processes of a site: Flower's SuperNode, and the worker beside it that answers letters."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from fedloom.errors import UserError
from fedloom.flower.server.processes import check_free, command, environment, started, stop
from fedloom.flower.site.site_data import SiteConfig


def node_command(folder: Path, config: SiteConfig, worker: Path | None = None) -> list[str]:
    """The SuperNode of a site, with the address of its worker."""
    for file in ("ca.crt", "site.key"):
        if not (folder / file).exists():
            raise UserError(f"{folder / file} is missing; it comes with the site's folder from fedloom deploy init")
    address, local = config.server.get("address"), config.server.get("local_port", 9094)
    if not isinstance(address, str) or not isinstance(local, int):
        raise UserError(f"{folder / 'site.toml'}: expected [server] address = 'host:port' and local_port = 9094")
    check_free(local)
    place = (folder / "site.toml").resolve()
    facts = {"site": config.site, "config": str(place)} | ({} if worker is None else {"worker": str(worker)})
    if any('"' in value for value in facts.values()):
        raise UserError('names and paths of sites may not hold the character "')
    return [
        *(command("flower-supernode"), "--superlink", address),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--auth-supernode-private-key", str(folder / "site.key")),
        *("--host", "127.0.0.1", "--port", str(local)),
        *("--node-config", " ".join(f'{name}="{value}"' for name, value in facts.items())),
    ]


class Worker:
    """The process beside a site's SuperNode that answers its letters (:mod:`fedloom.flower.site.worker`).

    Args:
        folder: the site's.
        config: its own file.
        log: where the process writes.
    """

    def __init__(self, folder: Path, config: SiteConfig, log: IO[bytes] | None = None) -> None:
        self.address = _socket_path()
        self._words = [
            *(
                sys.executable,
                "-P",
                "-m",
                "fedloom.flower.site.worker",
            ),  # -P: nothing is imported from the current folder
            *(str((folder / "site.toml").resolve()), config.site, str(self.address)),
        ]
        self._env, self._log = environment(folder / "home"), log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process, where it is not there or not any more."""
        if self.address is None or (self.process is not None and self.process.poll() is None):
            return
        self._end()
        self.address.unlink(missing_ok=True)
        # The worker leaves when its input ends, which it does however this process ends.
        self.process = subprocess.Popen(
            self._words,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait(self, seconds: float = 60.0) -> None:
        """Waits until it can be called; without it a site works too, only more slowly."""
        end = time.monotonic() + seconds
        while self.process is not None and self.process.poll() is None and time.monotonic() < end:
            if self.address is not None and self.address.exists():
                return
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the process and removes its folder."""
        self._end()
        if self.address is not None:
            shutil.rmtree(self.address.parent, ignore_errors=True)

    def _end(self) -> None:
        if self.process is not None:
            stop(self.process)
            assert self.process.stdin is not None
            self.process.stdin.close()


def _socket_path() -> Path | None:
    """A path in a new folder that nobody else can enter; None where there are no such sockets.

    The path of a Unix socket is limited to some hundred bytes, so a long one is replaced.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    for place in (None, "/tmp"):
        path = Path(tempfile.mkdtemp(prefix="fedloom-", dir=place)) / "worker"
        if len(os.fsencode(path)) < 90:
            return path
        path.parent.rmdir()
    return None


@contextmanager
def site(
    folder: Path, config: SiteConfig, log: IO[bytes] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Worker]]:
    """A site's worker and its SuperNode, which begins once the worker can be called."""
    with closing(Worker(folder, config, log)) as worker:
        words = node_command(folder, config, worker.address)
        worker.start()
        worker.wait()
        # A node looks twice a second for a message that has come and has to be worked on; by itself it does so once.
        env = environment(folder / "home") | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}
        with started(words, env, log) as node:
            yield node, worker
