"""HTTP connections and what each may take: bytes of a head, time, a descriptor when they get scarce.

uvicorn's protocol reads requests; it bounds neither what a head takes nor how long a client is silent. Here
it is told to: a connection that breaks a bound is closed, counted in `deltic_http_connections_closed_total`,
and nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from deltic.logs import counted
from deltic.server.errors import ApiError

log = logging.getLogger("deltic.server")

MAX_HEAD_BYTES = 65_536
"""The most bytes of a request's line, headers and trailers together; and of data that is no part of a
request.
"""

MAX_DROPPED_BYTES = 1_000_000
"""The most bytes of a body that still comes after its answer (a 401, a 429) and is not read.

Then the connection is closed.
"""

LEAST_BYTES_PER_S = 256
"""A body that comes more slowly, for the client's whole timeout, is given up."""

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: one that is closed as it is used again looks like a failure to
them. A client that takes nothing of its answer for as long has stalled.
"""

MAX_PIPELINED = 8
"""Requests that may wait behind the one that is answered while it is still watched whether the client leaves.
"""

UNREAD_S = 0.01
"""Seconds between the last connection that is taken and the end of those that are idle: what a client has
sent is read by then, and answered.
"""

RESERVED = 16
"""Descriptors that connections leave to everything else, and to those that come next."""

ENDING_S = 1.0
"""Seconds after the drain that a head or a body that has begun may take to come, and an answer to be taken.
"""

WARN_EVERY_S = 60.0


class Connections:
    """The connections of a server."""

    def __init__(self, timeout_s: float, closed: Counter[str] | None = None) -> None:
        """timeout_s: how long a head may take, and a body make no progress; 0: any time. closed: counts, by
        why, those closed before their client was done with them.
        """
        self.timeout_s = timeout_s
        self.closed = Counter() if closed is None else closed
        self.silent: dict[HttpConnection | Handshake, None] = {}
        """Connections whose next request is not whole, the one that has said nothing for the longest first.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limit: float = math.inf if limit == resource.RLIM_INFINITY else limit
        self._n_evicted = 0
        self._warned_s = -WARN_EVERY_S

    def make_room(self, descriptor: int | None = None) -> None:
        """Closes the connection that has been silent longest when few descriptors are left, as that of a new
        connection tells: the system gives the lowest that is free. None: none is left.
        """
        if (descriptor is not None and descriptor < self._limit - RESERVED) or not self.silent:
            return
        oldest = next(iter(self.silent))
        del self.silent[oldest]
        oldest.cut("descriptors")
        self._n_evicted += 1
        if time.monotonic() - self._warned_s >= WARN_EVERY_S:
            log.warning(
                "few descriptors are left of %d: closed %s silent for longest; let the process have more (ulimit -n, LimitNOFILE=)",
                self._limit,
                counted(self._n_evicted, "connection"),
            )
            self._warned_s, self._n_evicted = time.monotonic(), 0


class HttpConnection(HttpToolsProtocol):
    """Connection of HTTP, until it becomes a WebSocket."""

    def __init__(self, all_: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = all_
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since_s: float | None = None
        """Time when the wait began for the rest of a head, or of a body that nobody reads any more."""
        self._is_head_open = self._is_body_open = False
        self._n_head_bytes = 0
        self._n_mute_bytes = 0
        """Received since the parser last understood something."""
        self._n_body_bytes = 0
        """Since `_body_since_s`."""
        self._body_since_s = 0.0
        self._n_dropped = 0
        self._n_unsent = self._n_same = 0
        """Bytes of the answer that the client had not taken at the last look, and how many looks saw as many.
        """
        self._refusal: ApiError | None = None
        self._answered: RequestResponseCycle | None = None
        """The request whose answer is made, or was last; `cycle` is the newest, which may have to wait in
        `pipeline`.
        """

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.silent[self] = None
        self._waits_since_s = time.monotonic()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self in self._all.silent:  # it is the last to have said something
            del self._all.silent[self]
            self._all.silent[self] = None
            if self._waits_since_s is None and not self._is_body_open:
                self._waits_since_s = time.monotonic()
        self._n_mute_bytes += len(data)
        super().data_received(data)
        if self._n_mute_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse("head", too_large_head())

    def handle_websocket_upgrade(self) -> None:
        self._leave()
        super().handle_websocket_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] != "1.0" else _unframed(app, cycle))

    def _disconnect(self) -> None:
        """Tells all requests that are not answered that their client has gone."""
        for cycle in (self._answered, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # What the parser calls. An error that is raised here ends in `send_400_response`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._is_head_open = True
        self._waits_since_s = time.monotonic()
        self._n_head_bytes = self._n_mute_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count_head(self, n_bytes: int) -> None:
        self._n_head_bytes += n_bytes
        self._n_mute_bytes = 0
        if self._n_head_bytes > MAX_HEAD_BYTES:
            self._refusal = too_large_head()
            raise self._refusal

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_head_open, self._is_body_open = False, True
        self._waits_since_s = None
        self._body_since_s, self._n_body_bytes = time.monotonic(), 0
        self._n_dropped = 0
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # else nobody would notice that the client leaves

    def on_body(self, body: bytes) -> None:
        self._n_mute_bytes = 0
        self._n_body_bytes += len(body)
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._n_dropped += len(body)
            if self._n_dropped > MAX_DROPPED_BYTES and not self.transport.is_closing():
                self.cut("body")

    def on_message_complete(self) -> None:
        self._n_mute_bytes = 0
        self._is_body_open = False
        super().on_message_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self._all.silent.pop(self, None)
        elif self.cycle is not None and not self.transport.is_closing():
            # The answer came before the body was whole: now it waits for the next request.
            self._waits_since_s = None
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is None or not self.cycle.response_complete:
            return  # it has ended, or the next answer has begun
        self._all.silent[self] = None
        if self._is_head_open or self._is_body_open:
            self._waits_since_s = time.monotonic()

    def send_400_response(self, msg: str) -> None:
        refusal = self._refusal
        if refusal is None:
            self._refuse("malformed", ApiError(400, "this is not HTTP as the server reads it", code="invalid_http"))
        else:
            self._refuse("head", refusal)

    def shutdown(self) -> None:
        """Ends it, once what is open is answered; so is a request that has begun to come, to whose client the
        end of the connection looks like a failure. What is not done in `ENDING_S` is ended as it is.
        """
        if not self._is_head_open:
            super().shutdown()
        self.loop.call_later(ENDING_S, self._end)

    def _end(self) -> None:
        if self.transport.is_closing():
            return
        cycle = self._answered
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.cut("stopping")
        else:
            self._refuse("stopping", ApiError(503, "the server is shutting down", code="engine_unavailable"))

    # Bounds of time.

    def _look_later(self) -> None:
        self._timer = self.loop.call_later((self._all.timeout_s or KEEP_ALIVE_S) / 4, self._look)

    def _look(self) -> None:
        """Looks if the connection is still worth its place. Looks again, until the connection has ended."""
        self._look_later()
        timeout_s, now_s = self._all.timeout_s, time.monotonic()
        n_unsent = self.transport.get_write_buffer_size()
        self._n_same = self._n_same + 1 if n_unsent and n_unsent == self._n_unsent else 0
        self._n_unsent = n_unsent
        if self._n_same * (timeout_s or KEEP_ALIVE_S) / 4 >= KEEP_ALIVE_S:
            log.warning("a client took nothing of its answer for %d s: its connection was closed", KEEP_ALIVE_S)
            self.cut("stalled")
            return
        if not timeout_s or self.transport.is_closing() or self.flow.read_paused:
            return
        if self._waits_since_s is not None:
            if now_s - self._waits_since_s >= timeout_s:
                self._give_up("the head of the request")
        elif self._is_body_open and now_s - self._body_since_s >= timeout_s:
            if self._n_body_bytes < LEAST_BYTES_PER_S * timeout_s:
                self._give_up("the body")
            self._body_since_s, self._n_body_bytes = now_s, 0

    def _give_up(self, what: str) -> None:
        if not (self._is_head_open or self._is_body_open):
            self.cut("timeout")  # it has not begun to ask: there is nothing to answer
            return
        message = f"{what} did not come in {self._all.timeout_s:g} s"
        self._refuse("timeout", ApiError(408, message, code="request_timeout"))

    def _refuse(self, why: str, error: ApiError) -> None:
        """Answers for the application, unless that has begun to, or has answered what is not whole; and
        closes.
        """
        cycle = self._answered
        has_answer = cycle.response_started if cycle and not cycle.response_complete else self._is_body_open
        self._disconnect()
        if not has_answer:
            body = error.body()
            self.transport.write(
                STATUS_LINE[error.status]
                + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                + body
            )
        self._all.closed[why] += 1
        self._all.silent.pop(self, None)
        self.transport.close()

    def cut(self, why: str) -> None:
        """Closes the connection now, whatever was not sent."""
        self._all.closed[why] += 1
        self._all.silent.pop(self, None)
        self.transport.abort()

    def _leave(self) -> None:
        self._all.silent.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _unframed(app: Any, cycle: RequestResponseCycle) -> Any:
    """The application for a request of HTTP/1.0, whose client knows no chunks: an answer without its length
    ends where the connection does.
    """

    is_open = False

    async def send(message: Any) -> None:
        nonlocal is_open
        if message["type"] == "http.response.start":
            headers = message.get("headers", [])
            is_open = all(name.lower() != b"content-length" for name, _ in headers)
            if is_open:
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
                cycle.chunked_encoding = False
        elif is_open:  # so much is "expected" that there is room for it, and more to come
            cycle.expected_content_length = len(message.get("body", b"")) + message.get("more_body", False)
        await cycle.send(message)

    async def run(scope: Any, receive: Any, _: Any) -> None:
        await app(scope, receive, send)

    return run


def too_large_head() -> ApiError:
    return ApiError(431, f"the head of a request may have {MAX_HEAD_BYTES} bytes", code="head_too_large")


def _is_true(record: logging.LogRecord) -> bool:
    """Returns whether a line of uvicorn's is worth its place: it says of each handshake that is refused that
    it failed.
    """
    return record.getMessage() != "ASGI callable returned without completing handshake."


class HttpServer(uvicorn.Server):
    """uvicorn's server on sockets that are bound, with bounds on what their clients may take, and without its
    own signals.
    """

    def __init__(self, app: ASGIApp, connections: Connections, **settings: Any) -> None:
        """settings: further ones of uvicorn.Config."""
        given = {
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
        }
        protocol: Any = functools.partial(HttpConnection, connections)
        super().__init__(uvicorn.Config(app, http=protocol, **given | settings))
        logging.getLogger("uvicorn.error").addFilter(_is_true)
        self._connections = connections
        self._accepting: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to StopSignals: the server's own would cut off what the drain lets finish."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes connections one by one: uvloop takes all that wait at once, and resets those it has no
        descriptors for.
        """
        await self.lifespan.startup()
        for listener in sockets or []:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._accepting.append(asyncio.create_task(self._accept(listener)))
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in sockets or []:
            with contextlib.suppress(OSError):  # none waits any more
                while True:  # one that waited would be reset
                    self._begin(listener.accept()[0])
            listener.close()
        await asyncio.sleep(UNREAD_S)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors, no memory, a client that has gone already
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._connections.make_room()
                await asyncio.sleep(0.01)
                continue
            self._begin(accepted)
            self._connections.make_room(accepted.fileno())
            await asyncio.sleep(0)  # what has to make room does so before the next is taken

    def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        task = asyncio.create_task(self._open(accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        config, loop, silent = self.config, asyncio.get_running_loop(), self._connections.silent
        bound_s = self._connections.timeout_s or KEEP_ALIVE_S
        secure: dict[str, Any] = {}
        if config.ssl is not None:
            secure = {"ssl": config.ssl, "ssl_handshake_timeout": bound_s, "ssl_shutdown_timeout": bound_s}
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made: Any = config.http_protocol_class
        handshake = Handshake(accepted)
        silent[handshake] = None
        try:
            await loop.connect_accepted_socket(
                lambda: made(config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop),
                accepted,
                **secure,
            )
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError
            log.debug("a TLS handshake failed", exc_info=True)
        finally:
            silent.pop(handshake, None)


class Handshake:
    """A connection that is not HTTP's yet."""

    def __init__(self, accepted: socket.socket) -> None:
        self._accepted = accepted

    def cut(self, why: str) -> None:
        """Ends it: its transport sees that the client has gone."""
        with contextlib.suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)
