"""A site's worker: a process that has torch and fedloom imported, and answers letters one at a time.

It listens on a Unix socket in a folder that only the site's own account can enter, and does what
:mod:`fedloom.flower.setup.bundle` would do without it. It keeps nothing between letters: the site's file, its rows and its store are looked at anew
each time, so that what an administrator changes counts from the next letter on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from fedloom.flower.apps import answer
from fedloom.flower.setup import bundle

log = logging.getLogger("fedloom.site")

SILENCE = 60.0
"""Seconds without a byte after which a caller that has not said all is left alone."""


def listen(address: Path) -> socket.socket:
    """A socket at an address, which appears there once it can be called."""
    made = socket.socket(socket.AF_UNIX)
    early = address.with_suffix(".new")
    early.unlink(missing_ok=True)
    made.bind(str(early))
    made.listen(8)
    early.rename(address)
    return made


def serve(door: socket.socket, node: Mapping[str, Any]) -> None:
    """Answers letters for ever; nothing that a caller sends ends it.

    Args:
        door: where callers come.
        node: what Flower would hand over as the configuration of the site's node.
    """
    while True:
        line, _ = door.accept()
        with line:
            try:
                _serve_one(line, node)
            except (OSError, EOFError):
                log.warning("a letter to the worker broke off")
            except Exception:
                log.exception("the worker could not answer")


def _serve_one(line: socket.socket, node: Mapping[str, Any]) -> None:
    line.settimeout(SILENCE)
    content = bundle.content_of(*(bytes(bundle.receive(line)) for _ in range(3)))
    line.settimeout(None)
    parts = bundle.parts_of(answer(content, node))
    assert parts is not None
    bundle.send(line, *parts)


def _leave_with(parent: IO[bytes], address: Path) -> None:
    """Ends this process when the other end of its input is gone: that happens however its parent ends."""
    parent.read()
    with contextlib.suppress(OSError):
        address.unlink()
        address.parent.rmdir()
    os._exit(0)


def main(config: str, site: str, address: Path) -> None:
    """Listens until the process that started it is gone.

    Args:
        config: the site's own file.
        site: its name.
        address: where to listen.
    """
    threading.Thread(target=_leave_with, args=(sys.stdin.buffer, address), daemon=True).start()
    serve(listen(address), {"config": config, "site": site})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
