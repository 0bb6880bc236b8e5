"""The two apps as Flower runs them; ``fedloom deploy init`` copies this file into the bundle that travels to sites.

Flower starts a fresh Python process for every message, and importing torch there would take longer than the work. So this file
imports Flower and the standard library only, and hands a letter to the site's worker (:mod:`fedloom.flower.site.worker`), a process that has
all the rest imported already. Where there is no worker, or it dies over the letter, the letter is answered here instead: the code
is the same, and a letter that is answered twice changes nothing.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 20

client = ClientApp()
server = ServerApp()


@client.train()  # type: ignore[untyped-decorator, unused-ignore]
def _train(message: Message, context: Context) -> Message:
    """A letter, answered by the worker where there is one."""
    found = from_worker(message.content, context.node_config.get("worker"))
    if found is not None:
        return Message(found, reply_to=message)
    from fedloom.flower import apps

    return Message(apps.answer(message.content, context.node_config), reply_to=message)


@server.main()  # type: ignore[untyped-decorator, unused-ignore]
def _main(grid: Grid, context: Context) -> None:
    """The server's side of an experiment."""
    from fedloom.flower import apps

    apps.run(grid, context)


# The worker -----------------------------------------------------------------------------------------------


def from_worker(content: RecordDict, address: Any) -> RecordDict | None:
    """What the worker at an address answers; None where there is none, or where it did not answer."""
    parts = parts_of(content)
    if parts is None or not isinstance(address, str) or not hasattr(socket, "AF_UNIX"):
        return None
    # ValueError: an address that is no path. EOFError: the worker died over the letter.
    with contextlib.suppress(OSError, EOFError, ValueError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(10.0)
        line.connect(address)
        line.settimeout(None)  # a round of training takes as long as it takes
        send(line, *parts)
        return content_of(*(bytes(receive(line)) for _ in range(3)))
    return None


def parts_of(content: RecordDict) -> tuple[bytes, bytes, bytes] | None:
    """A message as three strings of bytes, see :func:`content_of`; None for a message of another form."""
    outline, tensors = content.config_records.get("outline"), content.array_records.get("tensors")
    text, small = (None, None) if outline is None else (outline.get("json"), outline.get("bytes"))
    array = None if tensors is None else tensors.get("bytes")
    if not isinstance(text, str):
        return None
    if array is None:
        return (text.encode(), b"", small) if isinstance(small, bytes) else None
    plain = isinstance(array, Array) and array.stype == "numpy.ndarray" and len(array.shape) == 1
    return (text.encode(), str(array.shape[0]).encode(), array.data) if plain and small is None else None


def content_of(outline: bytes, size: bytes, data: bytes) -> RecordDict:
    """A message from its parts.

    Args:
        outline: a JSON text.
        size: number of bytes that the array holds; empty where the bytes lie beside the outline.
        data: the array with its header, or the bytes.
    """
    text = outline.decode()
    if not size:
        return RecordDict({"outline": ConfigRecord({"json": text, "bytes": data})})
    array = Array("uint8", (int(size),), "numpy.ndarray", data)
    return RecordDict({"tensors": ArrayRecord({"bytes": array}), "outline": ConfigRecord({"json": text})})


def send(line: socket.socket, *parts: bytes) -> None:
    """Sends parts, each behind its length."""
    for part in parts:
        line.sendall(_LENGTH.pack(len(part)))
        if part:  # the other side may have left already, content with a last part that is empty
            line.sendall(part)


def receive(line: socket.socket) -> bytearray:
    """The next part.

    Raises:
        EOFError: the other side left before the part was complete.
    """
    (size,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytearray:
    """As many bytes as asked for; memory grows with what has come, not with what was announced."""
    found = bytearray()
    while len(found) < size:
        piece = line.recv(min(size - len(found), _PIECE))
        if not piece:
            raise EOFError
        found += piece
    return found
