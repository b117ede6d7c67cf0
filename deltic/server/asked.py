"""Model that a request means, where there are several; and the signs of life that its client gets while that
model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltic.server.limits import TICKET
from deltic.server.openapi import Route
from deltic.server.preparation import prepared
from deltic.server.service import Server, Service
from deltic.server.transport import ANTHROPIC, BODY, EVENT_HEADERS, own_path, read_body

SIGN_S = 2.0
"""Seconds between two signs of life of a request whose model is loaded."""

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Sign of life as Anthropic's clients know it."""


class Asked(msgspec.Struct):
    """Fields of a body that are looked at before its endpoint is."""

    model: str | None = None
    stream: object = None


def _asked_in(body: bytes) -> Asked:
    """Returns what a body says; nothing for a body that the endpoint will refuse, too."""
    try:
        asked = msgspec.json.decode(body, type=Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked()
    asked.model = asked.model or None
    return asked


async def read_asked(server: Server, route: Route, request: Request) -> Asked:
    """Reads which model a request names. Where there is but one, without adapters, its endpoint looks at the
    name in the body. Raises ApiError, as reading a body does.
    """
    if route.takes_model:
        return Asked(request.query_params.get("model"))
    if route.body is None or route.form or route.names_later or not server.has_choice:
        return Asked()
    body = request.scope[BODY] = await read_body(request, server.max_body_mb)
    return await prepared(server.first(route.kind), request, len(body), _asked_in, body)


async def asked_model(server: Server, route: Route, request: Request, name: str | None) -> Service:
    """The model of this name, or the first of the route's kind. One that is to answer is loaded first.

    Raises ApiError (404, and as `Server.loaded`).
    """
    if server.on_demand is not None and (route.generates or route.prepares):
        is_read = BODY in request.scope  # so what is to come is at most that the client leaves
        receive, n_bytes = (request.receive, len(request.scope[BODY])) if is_read else (None, 0)
        return await server.loaded(name, route.kind, request.scope[TICKET], receive, n_bytes)
    return server.first(route.kind) if name is None else await server.opened(name)


class EarlyStream:
    """Stream of events that begins before its answer does, where its model has to be loaded first: the client
    gets a sign of life every few seconds.
    """

    def __init__(
        self, answer: Callable[[Request], Awaitable[ASGIApp]], request: Request, tell: Callable[[], str]
    ) -> None:
        """answer: makes the answer, or a response that is an error. tell: says what is waited for."""
        self._answer, self._request, self._tell = answer, request, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_theirs = own_path(scope).startswith(ANTHROPIC)
        is_begun = is_error = False

        async def send_rest(message: Message) -> None:
            """Sends a response without its start, which was sent before; an error as an event."""
            nonlocal is_error
            if message["type"] == "http.response.start":
                is_error = message["status"] != 200
                return
            if is_error and message.get("body"):
                event = b"event: error\n" if is_theirs else b""
                message = {**message, "body": event + b"data: " + message["body"] + b"\n\n"}
            await send(message)

        answering = asyncio.ensure_future(self._answer(self._request))
        try:
            while not (await asyncio.wait((answering,), timeout=SIGN_S))[0]:
                if not is_begun:
                    is_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                sign = PING if is_theirs else f": {self._tell()}\n\n".encode()
                await send({"type": "http.response.body", "body": sign, "more_body": True})
            await answering.result()(scope, receive, send_rest if is_begun else send)
        finally:
            answering.cancel()
