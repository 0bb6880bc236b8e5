"""Processes: SuperLink and proxy at the server, and the run; those of a site are in :mod:`fedloom.flower.site.node`."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedloom.errors import RunError, UserError
from fedloom.flower.experiment import Experiment
from fedloom.flower.server.records import EXPERIMENT
from fedloom.flower.setup.project import read_consortium
from fedloom.flower.site.site_store import folder_name
from fedloom.store.atomic import file_name


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's commands: no telemetry, no look for updates, nothing installed at run time."""
    home.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {
        "PATH": path,
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def command(name: str) -> str:
    """A command of Flower's, from the environment that fedloom runs in."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


@contextmanager
def started(
    words: Sequence[str], env: dict[str, str], log: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is stopped whole: Flower's commands start children.

    On Linux it also ends when this process is killed, so that nobody finds its port in use afterwards.
    """
    process = subprocess.Popen(
        words, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent if _LIBC else None
    )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """Asks a process group to end, then makes it."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait(patience)


def wait_for_port(port: int, process: subprocess.Popen[bytes], what: str, seconds: float = 60.0) -> None:
    """Waits until something listens on a port of this machine."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RunError(f"{what} ended with status {process.returncode}; its log says why")
        if _listens(port):
            return
        time.sleep(0.2)
    raise RunError(f"{what} did not come up within {seconds:g} s")


def wait_for_server(folder: Path, port: int, seconds: float = 60.0) -> None:
    """Waits for a server that is just being started on this machine."""
    end = time.monotonic() + seconds
    while not _listens(port):
        if time.monotonic() >= end:
            raise UserError(f"the server is not running on this machine; start it with fedloom deploy server {folder}")
        time.sleep(0.5)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def check_free(port: int) -> None:
    """Refuses a port that is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise UserError(
                f"port {port} is in use on this machine; choose another one in consortium.toml or site.toml"
            ) from None


# The server -----------------------------------------------------------------------------------------------


def write_home(folder: Path, inner: int) -> Path:
    """Flower's own configuration: how ``flwr`` reaches the SuperLink."""
    home = folder / "server" / "home"
    home.mkdir(exist_ok=True)
    ca = (folder / "server" / "ca.crt").resolve()
    text = f'[superlink]\ndefault = "consortium"\n\n[superlink.consortium]\naddress = "127.0.0.1:{inner}"\nroot-certificates = "{ca}"\n'
    (home / "config.toml").write_text(text, encoding="utf-8")
    return home


def register(folder: Path, env: dict[str, str]) -> None:
    """Lets the sites in whose public keys are there; one that is registered already stays so."""
    for name in read_consortium(folder)["sites"]:
        public = folder / "sites" / file_name(name) / "site.pub"
        if not public.exists():
            raise UserError(f"{public} is missing; the site {name!r} makes it with fedloom deploy key")
        words = [command("flwr"), "supernode", "register", "--name", name, str(public), "consortium"]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        said = done.stdout + done.stderr
        if done.returncode and "already" not in said.lower():
            raise RunError(f"the key of site {name!r} could not be registered: {' '.join(said.split())[-300:]}")


@contextmanager
def server(folder: Path, *, listen: str = "0.0.0.0", proxy: bool = True) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The SuperLink on the loopback interface, the sites' keys, and the proxy before it."""
    facts = read_consortium(folder)
    place, inner, port = folder / "server", int(facts["inner_port"]), int(facts["port"])
    check_free(inner)
    if proxy:
        check_free(port)
    env = environment(write_home(folder, inner))
    link = [
        *(command("flower-superlink"), "--host", "127.0.0.1", "--port", str(inner)),
        *("--disable-runtime-dependency-installation", "--enable-supernode-auth"),
        *("--database", str((place / "link.db").resolve())),
        *("--ssl-ca-certfile", str(place / "ca.crt")),
        *("--ssl-certfile", str(place / "server.crt"), "--ssl-keyfile", str(place / "server.key")),
    ]
    with open(place / "link.log", "ab") as log, started(link, env, log) as superlink:
        wait_for_port(inner, superlink, "the SuperLink")
        register(folder, env)
        if not proxy:
            yield [superlink]
            return
        door = [
            sys.executable,
            "-P",
            "-m",
            "fedloom.flower.server.tls_proxy",
            f"https://127.0.0.1:{inner}",
            listen,
            str(port),
            str(place),
        ]
        with open(place / "proxy.log", "ab") as door_log, started(door, env, door_log) as gate:
            wait_for_port(port, gate, "the proxy")
            yield [superlink, gate]


def run(folder: Path, out: Path, *, resume: bool = False, experiment: Path | None = None, quiet: bool = False) -> None:
    """Starts the experiment and follows it to its end.

    Raises:
        RunError: the run ended before its last round.
    """
    facts = read_consortium(folder)
    chosen = experiment or folder / "experiment.toml"
    plan, _ = Experiment.load(chosen)
    strangers = [s for s in plan.sites if s not in facts["sites"]]
    if strangers:
        raise UserError(
            f"the experiment names {strangers[0]!r}, which is no site of this consortium: {', '.join(facts['sites'])}"
        )
    if (out / EXPERIMENT).exists() != resume:
        wrong = (
            "holds no experiment to go on with; start it without"
            if resume
            else "holds an experiment already; go on with"
        )
        raise UserError(f"{out} {wrong} --resume, or choose another folder")
    wait_for_server(folder, int(facts["inner_port"]))
    env = environment(write_home(folder, int(facts["inner_port"])))
    options = f'experiment="{chosen.resolve()}" out="{out.resolve()}" resume={str(resume).lower()}'
    words = [command("flwr"), "run", str(folder / "server" / "app"), "consortium", "--stream", "-c", options]
    with open(folder / "server" / "run.log", "ab") as log:
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if not quiet:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
        process.wait()
    missing = [key for key in plan.runs() if not (out / folder_name(key) / "clients.csv").exists()]
    if missing:
        begun = (out / EXPERIMENT).exists()
        raise RunError(
            f"the run ended before its {'last' if begun else 'first'} round ({', '.join(missing)}); "
            f"{folder / 'server' / 'run.log'} says why; "
            + ("go on with fedloom deploy run --resume" if begun else "then start it again")
        )
