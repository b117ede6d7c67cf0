"""A Deltic server without a socket: what a replica of Ray Serve holds, and an actor of `deltic run --ray`.

The application of `deltic serve` runs in the replica's own event loop, and its engine process is a child as
ever, which dies with it. Requests come as an `Ask` and leave in pieces. This file knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message

from deltic import logs
from deltic.engine.messages import EngineInfo
from deltic.host.supervisor import EngineHost
from deltic.ray.settings import Settings
from deltic.server.app import create_app
from deltic.server.downloads import fetched
from deltic.server.serve import build, prepared
from deltic.server.service import Server
from deltic.server.transport import inner_scope

log = logging.getLogger("deltic.ray")

PIECE_S = 0.02
"""Pieces of an answer that come sooner than this after the last one are put together: each costs Ray a
millisecond or two of three processes.
"""

Head = tuple[int, list[tuple[bytes, bytes]]]
"""An answer's status and headers."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP request, whole."""

    method: str
    path: str
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    query: bytes = b""
    key: bytes = b""
    """Key by `affinity.key_of`, for the router."""


class Hosted:
    """A server and its engines, in one process each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: set[asyncio.Task[None]] = set()
        self._host: EngineHost | None = None
        self._starting = asyncio.Lock()
        self._is_started = False

    async def start(self) -> None:
        """Returns when requests are taken. It may be called again, by who has not heard that it had returned.

        Raises ConfigError, CheckpointError, OSError, EngineFailed: why the model cannot be served.
        """
        async with self._starting:
            if not self._is_started:
                await self._start()
                self._is_started = True

    async def _start(self) -> None:
        config = self._settings.server
        logs.set_up(config.log_level, config.log_format)
        served = prepared(self._settings.models, config.max_queue)
        for model in served:
            local = await fetched(model.client.config, asyncio.Event())
            assert local is not None
            model.client.config = local
        self._clients = [model.client for model in served]
        self._host = EngineHost(self._clients, config)
        await self._host.start()
        try:
            self._server: Server = build(served, config)
            self._app: ASGIApp = create_app(self._server)
            infos: list[EngineInfo] = await asyncio.gather(*(client.ready() for client in self._clients))
        except BaseException:
            await self._host.stop()
            raise
        for model, info in zip(served, infos, strict=True):
            for notice in info.notices:
                log.info("%s: %s", model.names[0], notice)
        # What there is now stays: the collector need not walk it again, which holds up everybody's tokens.
        gc.collect()
        gc.freeze()

    async def stop(self) -> None:
        """Ends what is open, and the engine process."""
        if self._host is not None:
            await self._host.stop()

    @property
    def failure(self) -> str | None:
        """Reason why an engine is down for good; None while it runs, loads or is started again."""
        failed = (client for client in self._clients if client.state == "failed")
        return next((client.failure or "the engine has failed" for client in failed), None)

    @property
    def n_sequences(self) -> int:
        """Sequences that run or wait."""
        return sum(client.n_open for client in self._clients)

    async def reset_cache(self) -> None:
        """Empties the prefix caches."""
        for client in self._clients:
            await client.inspect_cache(reset=True)

    async def stream(self, ask: Ask) -> AsyncGenerator[Head | bytes, None]:
        """The answer: its head, then its body as it is made. Ended early, it is as if the client had left."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        further: Message | None
        has_left = asyncio.Event()
        body: list[bytes] = [ask.body]

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        scope = inner_scope(ask.method, ask.path, ask.body, ask.headers, ask.query)
        running = asyncio.ensure_future(self._app(scope, receive, send))
        self._running.add(running)  # it may go on for a moment when this has ended
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda _: messages.put_nowait(None))
        sent_s = -PIECE_S
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message.get("headers", ()))
                    continue
                if (left_s := sent_s + PIECE_S - time.monotonic()) > 0:
                    await asyncio.wait((running,), timeout=left_s)
                parts, further = [message.get("body", b"")], message
                while not messages.empty() and (further := messages.get_nowait()) is not None:
                    parts.append(further.get("body", b""))
                if part := b"".join(parts):
                    sent_s = time.monotonic()
                    yield part
                if further is None:
                    break
        finally:
            has_left.set()

    async def answer(self, ask: Ask) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Answers at once (see `stream`).

        Starts first where it has to: Ray hands a request of an actor that died to the one in its place.
        """
        await self.start()
        pieces = [piece async for piece in self.stream(ask)]
        heads = (piece for piece in pieces if not isinstance(piece, bytes))
        status, headers = next(heads, (500, []))  # the application may end without an answer
        return status, headers, b"".join(piece for piece in pieces if isinstance(piece, bytes))
