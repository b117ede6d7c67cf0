"""Bodies in, responses and server-sent events out, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltic.server.errors import ApiError

log = logging.getLogger("deltic.server")

T = TypeVar("T")


async def read_body(request: Request, max_mb: float) -> bytes:
    """The whole body. Raises ApiError (413) as soon as it is larger than allowed, whatever Content-Length says."""
    limit = int(max_mb * 1_000_000)
    # The rest is not read, so the connection cannot be used again.
    too_large = ApiError(
        413, f"the body is larger than {max_mb:g} MB", code="body_too_large", headers={"connection": "close"}
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientDisconnect then."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream:
    """A response of server-sent events. Nothing is sent before the first chunk: an error until then has a status.

    `chunks` is closed as soon as the client leaves; closing it aborts what runs.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._pump(scope, receive, send))
        except ClientDisconnect:
            log.debug("a client left its stream")

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                        started = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = b"data: [DONE]\n\n"
        except ApiError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            last = b"data: " + error.body() + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def json_response(body: bytes | dict[str, Any], status: int = 200) -> Response:
    return Response(
        body if isinstance(body, bytes) else msgspec.json.encode(body), status, None, "application/json"
    )


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")
