"""Preparation of a request, from its body to what the engine is sent: what is read, counted and computed in
between, and in which thread.

An endpoint awaits one step after another: the body is parsed, its pictures are read, a prompt is made of it.

    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(ChatRequest)
        chat, pictures = await preparation.read_chat(chat_of, asked)
        prepared = await preparation.run(prepare_chat, service, chat, info, pictures)

A step of a small body is done in the event loop, one of a large body in the worker's thread, and one that
needs a new grammar in the compiler's. A step that finds itself in a thread where it would hold up others
raises NotInline or NewGrammar, and is done once more from its beginning, elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, Self, TypeVar

from starlette.requests import Request

from deltic.engine.messages import Handling
from deltic.server.api import decode
from deltic.server.chat.constraint import NewGrammar, NotInline, compiles
from deltic.server.chat.messages import find_pictures
from deltic.server.chat.picture_parts import PictureBounds, Pictures, Sent
from deltic.server.chat.request import Chat
from deltic.server.fair_thread import FairThread, ThreadTurn
from deltic.server.limits import INLINE_BYTES, LARGE_BYTES, TICKET, Ticket
from deltic.server.service import Service
from deltic.server.transport import read_body, unless_disconnected

P = ParamSpec("P")
T = TypeVar("T")


class Preparation:
    """The steps between the body of a request and its generation.

    The body counts as in memory until the last of them is done. All raise ClientDisconnect when the client
    leaves.
    """

    def __init__(self, service: Service, request: Request, size: int | None = None) -> None:
        """size: bytes to count where the steps do not work on the body of `request`."""
        self._service, self._request = service, request
        self._ticket: Ticket = request.scope[TICKET]
        self.size = size or 0
        """Bytes of the body, less those of pictures that were read."""
        self._reads = size is None
        self._body = b""
        self._turn: ThreadTurn | None = None
        """Turn in the worker's thread, where all steps of a body together have one."""

    async def __aenter__(self) -> Self:
        """Reads the body. Raises ApiError: as `read_body`; 429 when the key has too much that waits."""
        if self._reads:
            self._body = await read_body(self._request, self._service.server.max_body_mb)
            self.size = len(self._body)
        self.resize(self.size)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._body = b""
        self._ticket.drop_body()

    def resize(self, size: int) -> None:
        """Counts so many bytes from now on. Raises ApiError (429)."""
        self._ticket.hold_body(size)
        self.size, self._turn = size, None

    def read(self, kind: type[T]) -> T:
        """The body as `kind`, for use within a step.

        Raises ApiError (400), for fields that are not known unless --strict-fields is off.
        """
        server = self._service.server
        if server.config.strict_fields == "on":
            return decode.parse(self._body, kind)
        return decode.parse(self._body, kind, partial(server.note_unknown, self._request.scope["deltic.route"]))

    async def parse(self, kind: type[T]) -> T:
        """`read` as a step."""
        return await self.run(self.read, kind)

    async def read_chat(self, convert: Callable[P, Chat], *args: P.args, **kwargs: P.kwargs) -> tuple[Chat, Pictures]:
        """The chat that `convert` makes of what was parsed, and the pictures and videos in its messages, in
        which each becomes a Sent. Raises ApiError.
        """
        chat = await self.run(convert, *args, **kwargs)
        sent = await self.run(find_pictures, chat.messages)
        return chat, await self.read_sent(sent, chat.picture_bounds, chat.sampling.handling)

    async def read_sent(self, sent: list[Sent], bounds: PictureBounds | None, handling: Handling) -> Pictures:
        """The pictures and videos that a step has found. They count no more in the size of later steps.

        handling: of the request. Raises ApiError.
        """
        if not sent:
            return {}
        service = self._service
        self.size -= sum(len(file.url) + len(file.encoded) for file in sent)
        info = service.client.info or service.admit()
        if info.pictures is None:
            raise sent[0].not_taken(info.no_pictures)
        given = sent, info.pictures, bounds, info.max_model_len
        reading = service.server.pictures.read(*given, ticket=self._ticket, room=service.pixels, handling=handling)
        return await unless_disconnected(self._request.receive, reading)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does one step, without holding up other answers for long.

        work: may be begun several times, and then starts anew each time. Raises what it does.
        """
        step, server, size = partial(work, *args, **kwargs), self._service.server, self.size
        thread = server.worker
        if size <= INLINE_BYTES:
            try:
                return step()
            except NewGrammar:
                thread = server.compiler
            except NotInline:
                pass
        try:
            return await self._in_thread(thread, step, size)
        except NewGrammar:
            return await self._in_thread(server.compiler, step, size)

    async def _in_thread(self, thread: FairThread, step: Callable[[], T], size: int) -> T:
        """Raises NewGrammar if the step compiles a grammar and `thread` is the worker, where others wait."""
        server = self._service.server

        def run() -> T:
            compiles.set(thread is server.compiler)
            return step()

        turn = (self._turn if thread is server.worker else None) or thread.turn(self._ticket.turns, size)
        if thread is server.worker:
            self._turn = turn
        done = thread.submit_in(turn, run)
        if size > LARGE_BYTES or thread is server.compiler:  # its client may leave before it is done
            loop = asyncio.get_running_loop()
            done.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(server.trim_soon))
        return await unless_disconnected(self._request.receive, asyncio.wrap_future(done))


async def parsed(service: Service, request: Request, kind: type[T]) -> T:
    """The body of a request that needs no more preparation, as `kind`. Raises ApiError, ClientDisconnect."""
    async with Preparation(service, request) as preparation:
        return await preparation.parse(kind)


async def prepared(
    service: Service, request: Request, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Runs a step about so many bytes that are not, or no longer, the body of `request`. Raises as `work`."""
    async with Preparation(service, request, size) as preparation:
        return await preparation.run(work, *args, **kwargs)
