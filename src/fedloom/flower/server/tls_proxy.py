"""The door of a consortium's server: TLS outside, and only what sites need is let through to Flower.

Flower's Control API, with which runs are started and keys registered, has no login. The SuperLink therefore listens on the loopback
interface, and this proxy forwards ``POST /v1/fleet/...`` and nothing else.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ALLOWED = re.compile(rb"/v1/fleet/[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*")
_HOP = frozenset({b"connection", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"})


class Door:
    """Forwards what is allowed.

    Args:
        upstream: address of the SuperLink, such as ``https://127.0.0.1:9443``.
        ca: certificate authority of the SuperLink.
    """

    def __init__(self, upstream: str, ca: Path) -> None:
        self._client = httpx.AsyncClient(
            base_url=upstream,
            verify=ssl.create_default_context(cafile=str(ca)),
            timeout=httpx.Timeout(120.0, connect=5.0),
            trust_env=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope.get("raw_path", b"")
        if scope["method"] != "POST" or not ALLOWED.fullmatch(path) or scope.get("query_string"):
            await _plain(send, 403, b"forbidden")
            return
        headers = [(k, v) for k, v in scope["headers"] if k not in _HOP]
        request = self._client.build_request("POST", path.decode(), headers=headers, content=_body(receive))
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError:
            await _plain(send, 502, b"the server is not there")
            return
        try:
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in _HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = await receive()
            await send({"type": f"{event['type']}.complete"})
            if event["type"] == "lifespan.shutdown":
                await self._client.aclose()
                return


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            return
        yield event.get("body", b"")
        more = event.get("more_body", False)


async def _plain(send: Send, status: int, text: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": text})


def main(upstream: str, host: str, port: int, folder: Path) -> None:
    """Serves until it is stopped.

    Args:
        upstream: address of the SuperLink.
        host: interface on which sites are let in.
        port: its port.
        folder: with ca.crt, server.crt and server.key.
    """
    uvicorn.run(
        Door(upstream, folder / "ca.crt"),
        host=host,
        port=port,
        ssl_certfile=str(folder / "server.crt"),
        ssl_keyfile=str(folder / "server.key"),
        log_level="warning",
        server_header=False,
        access_log=False,
    )


if __name__ == "__main__":
    import sys

    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
