"""Bodies in, responses and server-sent events out, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from deltic.json_types import JsonObject
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import TICKET, Ticket

log = logging.getLogger("deltic.server")

SERVER_SEND = "deltic.send"
"""Key in the scope: the HTTP server's own `send`."""

BODY = "deltic.body"
"""Key in the scope: a body that was read to find its model, until it is read once more."""

ANTHROPIC = "/v1/messages"
"""Path prefixes of Anthropic's API that OpenAI's does not have."""

ANTHROPIC_HEADER = b"anthropic-version"
"""A header that Anthropic's clients send on all paths."""

SESSION_HEADERS = (b"x-session-id", b"x-session-affinity", b"x-claude-code-session-id", b"x-smg-routing-key")
"""Headers by which routers and agents name a session, the first of them first. Not among them is
x-session-token, which may be a secret.
"""

OLLAMA = "/api/"
"""Path prefix of Ollama's API."""

MAX_CONTAINERS = 100_000
"""The most JSON objects and arrays in a body, nested and side by side.

The interpreter stands still while they are made and collected: 15 ms for this many, 3 s for a body of 16 MB
with nothing else.
"""

MAX_UNSENT_BYTES = 8_000_000
"""The most bytes of a stream kept for a client that does not read, beside those the system keeps.

That is half an hour of an answer, or some 4,000 tokens with twenty alternatives each.
"""

MAX_VALUES = 500_000
"""The most values in a body's arrays and objects, mostly numbers.

They, too, are made in one go, which takes 15 ms.
"""

PART_BYTES = 131_072
"""Bytes of a large answer that are sent at once."""

AT_ONCE_S = 0.003
"""Seconds of work on a large answer before others get their turn."""

COUNTED_BYTES = 16_384
"""Bytes of a body whose brackets are counted at a time."""

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


async def read_body(request: Request, max_mb: float, is_json: bool = True) -> bytes:
    """The whole body.

    Raises ApiError: 413 as soon as it is larger than allowed, whatever Content-Length says; 429 as soon as
    the bodies of its key are; 400 for JSON with more than MAX_CONTAINERS or MAX_VALUES.
    """
    kept: bytes | None = request.scope.pop(BODY, None)
    if kept is not None:
        return kept
    limit = int(max_mb * 1_000_000)
    # The rest is not read, so the connection cannot be used again.
    too_large = ApiError(
        413, f"the body is larger than {max_mb:g} MB", code="body_too_large", headers={"connection": "close"}
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    ticket: Ticket = request.scope.get(TICKET) or Ticket()
    if length.isdecimal():
        ticket.hold_body(int(length))  # not to read at all what would be refused
        ticket.drop_body()
    body, n_brackets, n_commas = bytearray(), 0, 0
    async for part in request.stream():
        body += part
        ticket.hold_body(len(body))
        n_brackets += part.count(b"[") + part.count(b"{")
        n_commas += part.count(b",")
        if len(body) > limit:
            raise too_large
    if is_json and n_brackets > MAX_CONTAINERS and await _n_outside(body, b"[{", MAX_CONTAINERS) > MAX_CONTAINERS:
        message = f"the body has more than {MAX_CONTAINERS} JSON objects and arrays"
        raise bad_request(None, message, "too_many_containers")
    if is_json and n_commas > MAX_VALUES and await _n_outside(body, b",", MAX_VALUES) > MAX_VALUES:
        message = f"the body has more than {MAX_VALUES} JSON values. Send them in several requests."
        raise bad_request(None, message, "too_many_values")
    return bytes(body)


async def _n_outside(body: bytearray, marks: bytes, most: int) -> int:
    """Counts the `marks` that stand in no string, until there are more than `most`.

    Others have their turn between the pieces.
    """
    n, start, is_inside = 0, 0, False
    while start < len(body) and n <= most:
        piece = body[start : start + COUNTED_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what is escaped belongs to it
            piece += body[start + COUNTED_BYTES : start + COUNTED_BYTES + 1]
        start += len(piece)
        for empty in (b"\\\\", b'\\"', b'""'):
            piece = piece.replace(empty, b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[is_inside::2])
        n += sum(map(outside.count, marks))
        is_inside ^= len(parts) % 2 == 0
        await asyncio.sleep(0)
    return n


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientDisconnect then.

    A coroutine runs in the caller's own task. One of its own would begin, and be seen to end, a turn of the
    event loop later, in which all other requests have theirs.
    """
    task, is_over = asyncio.current_task(), False
    assert task is not None
    watch = asyncio.create_task(disconnected(receive))
    watch.add_done_callback(lambda _: is_over or task.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if watch.done() and not watch.cancelled() and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        watch.cancel()


class EventStream:
    """A response of server-sent events.

    Nothing is sent before the first chunk: an error until then has a status. While the client reads, a chunk
    goes to the socket as it is written, and no task wakes up for it. Chunks that come while it does not read
    are sent together later.
    """

    max_unsent_bytes = MAX_UNSENT_BYTES
    """Unsent bytes at which the stream of a client that does not read ends."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return EVENT_HEADERS

    def __init__(self) -> None:
        self._started = False
        self._is_cut = False
        """True if later chunks were dropped, as the client left too much unread. Nothing may follow the gap.
        """
        self._unsent: list[bytes] = []
        self._n_unsent = 0
        self._sending: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        """Takes the body's chunks, once the response has started, if the HTTP server is the one we know."""

    @property
    def is_unwritten(self) -> bool:
        """True if nothing has been written, so that the response has not begun."""
        return not self._started and not self._unsent

    async def run(self) -> None:
        """Has chunks written until it returns; cancelled when the client leaves. May raise ApiError."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._server_send = send, scope[SERVER_SEND]
        try:
            await unless_disconnected(receive, self._answer(scope, receive, send))
        except ClientDisconnect:
            log.debug("a client left its stream")
        finally:
            if self._sending is not None:
                self._sending.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        try:
            await self.run()
        except ApiError as raised:
            error = raised
        if self._sending is not None:
            await self._sending
        if self._is_cut:
            message = f"the client left {self.max_unsent_bytes} bytes of its stream unread: the rest was not kept"
            error = ApiError(408, message, code="stream_not_read")
        if error is not None and not self._started:
            await error_response(error, scope)(scope, receive, send)
            return
        if error is not None:
            let_go(error, scope)
        await send({"type": "http.response.body", "body": self.last(error), "more_body": False})

    def last(self, error: ApiError | None) -> bytes:
        """The bytes that end the stream, as in OpenAI's API. error: raised by `run` after the first chunk."""
        return b"data: [DONE]\n\n" if error is None else b"data: " + error.body() + b"\n\n"

    def write(self, chunk: bytes) -> None:
        """Sends a chunk, at once if the client reads; never waits.

        The first may be empty: it starts the response.
        """
        transport = self._transport
        if self._is_cut:
            return
        if (
            transport is not None
            and self._sending is None
            and not transport.get_write_buffer_size()
            and not transport.is_closing()
        ):
            # What `send` would do in the end. Past that and the middleware, a token costs a quarter less.
            transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            return
        if self._n_unsent > self.max_unsent_bytes:
            self._is_cut = True
            log.warning("a client did not read %d bytes of its stream, which was ended", self._n_unsent)
            if transport is not None:
                transport.abort()  # it has gone, as far as everybody else can tell
            return
        self._unsent.append(chunk)
        self._n_unsent += len(chunk)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_unsent())

    async def drained(self) -> None:
        """Gives others their turn, and waits until the client has read most of what was written."""
        await (self._sending or asyncio.sleep(0))

    async def _send_unsent(self) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self.headers})
            server = getattr(self._server_send, "__self__", None)
            if isinstance(server, RequestResponseCycle) and server.chunked_encoding:
                self._transport = server.transport
        while self._unsent:
            chunk = b"".join(self._unsent)
            self._unsent.clear()
            self._n_unsent = 0
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending = None


EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EncodedArray(list[bytes | Iterator[bytes]]):
    """The items of a JSON array, some at a time, encoded already or as they are asked for."""


def json_pieces(value: object) -> Iterator[bytes]:
    """JSON in pieces of a few kilobytes.

    An iterator in `value` becomes an array, each of its items a piece.
    """
    if isinstance(value, dict):
        start = b"{"
        for name, part in value.items():
            yield start + _encode(name) + b":"
            yield from json_pieces(part)
            start = b","
        yield b"{}" if start == b"{" else b"}"
    elif isinstance(value, str) and len(value) > COUNTED_BYTES:
        yield b'"'
        for at in range(0, len(value), COUNTED_BYTES):
            yield _encode(value[at : at + COUNTED_BYTES])[1:-1]
        yield b'"'
    elif isinstance(value, list | Iterator):
        start = b"["
        for some in _items(value):
            yield start
            yield from some
            start = b","
        yield b"[]" if start == b"[" else b"]"
    else:
        yield _encode(value)


def _items(value: list[object] | Iterator[object]) -> Iterator[Iterable[bytes]]:
    """An array's items, what stands between two commas or more."""
    if isinstance(value, EncodedArray):
        for some in value:
            yield from ((some,),) if isinstance(some, bytes) else ((element,) for element in some)
    elif isinstance(value, Iterator):
        yield from ((_encode(item),) for item in value)
    elif value and isinstance(value[0], dict):
        yield from map(json_pieces, value)
    else:
        yield from ((_encode(value[at : at + 1024])[1:-1],) for at in range(0, len(value), 1024))


def _parts(made: bytes) -> Iterator[bytes]:
    for start in range(0, len(made), PART_BYTES):
        yield made[start : start + PART_BYTES]


class LargeResponse:
    """A body of any size that is made while it is sent, a few milliseconds at a time.

    Other answers go on meanwhile. A body that turns out to be small is sent with its length, as any other
    answer.
    """

    def __init__(
        self, value: bytes | JsonObject | Sequence[object], headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """value: as of `json_pieces`, or what is made already. headers: where it is no JSON."""
        self._pieces = _parts(value) if isinstance(value, bytes) else json_pieces(value)
        self._headers = headers or [(b"content-type", b"application/json")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        part = await self._part()
        if len(part) < PART_BYTES:
            headers = [*self._headers, (b"content-length", b"%d" % len(part))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": part, "more_body": False})
            return
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        while part:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # where the client reads fast, `send` waits for nothing
            part = await self._part()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _part(self) -> bytes:
        """PART_BYTES and a little more; less at the end."""
        made: list[bytes] = []
        n_bytes, paused_s = 0, time.perf_counter()
        for piece in self._pieces:
            made.append(piece)
            n_bytes += len(piece)
            if time.perf_counter() - paused_s > AT_ONCE_S:
                await asyncio.sleep(0)
                paused_s = time.perf_counter()
            if n_bytes >= PART_BYTES:
                break
        return b"".join(made)


def json_response(body: bytes | JsonObject, status: int = 200) -> Response:
    return Response(body if isinstance(body, bytes) else msgspec.json.encode(body), status, None, "application/json")


def forget_frames(error: BaseException | None) -> None:
    """Cuts an error's ties to its frames.

    The frames, and futures in them, hold the error, and the error holds them. Such a ring keeps a request's
    body alive until the garbage collector runs, which is seldom.
    """
    while error is not None:
        error.__traceback__, error = None, error.__context__


def let_go(error: ApiError, scope: Scope) -> None:
    """Finishes every caught error: forgets its frames, and logs it if the client is not to blame.

    The request's own line in the log has no room for the reason.
    """
    forget_frames(error)
    if error.status >= 500:
        log.error("%s %s: %s", scope["deltic.request_id"], scope.get("deltic.answer_id", "-"), error.message)


def named_event(name: str, **fields: object) -> bytes:
    """An event of a stream whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name} | fields))


def inner_scope(method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]], query: bytes = b"") -> Scope:
    """Makes the scope of a request without a connection. headers: beside the length of its body."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [*headers, (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "state": {},
    }


def own_path(scope: Scope) -> str:
    """The path of a request without `--root-path`."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error in the form of the API that was asked; one of ours is noted in the log."""
    let_go(error, scope)
    return in_form(error, own_path(scope), scope)


def in_form(error: ApiError, path: str, scope: Scope) -> Response:
    """An error in the form of the API that was asked. path: without `--root-path`."""
    body, status = error.body(), error.status
    is_theirs = any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])
    if is_theirs or path.startswith(ANTHROPIC):
        body, status = error.anthropic_body(scope.get("deltic.request_id", "")), error.anthropic_status
    elif path.startswith(OLLAMA):
        body = error.ollama_body()
    return Response(body, status, error.headers, "application/json")
