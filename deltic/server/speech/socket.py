"""Speech over a WebSocket: text comes in as a language model writes it, audio goes out part by part.

The client says how (`session.config`), sends text (`input.text`) and ends an utterance (`input.done`), as
often as it likes; then `session.close`. A part, a whole utterance unless `split_granularity` cuts it, is one
request of the engine and is answered by `audio.start`, binary audio and `audio.done`; an utterance by
`session.done`; what went wrong by `error`, and the socket goes on. One part is spoken while the text of the
next ones is still coming; when much text waits, no more is read.

A part that is a whole utterance, by a prompt that has its text beside the frames, is spoken while it is
written: it begins with its first words, and the engine gets the others as they come. Its audio is that of the
same text at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from deltic.server.access import KEY_PROTOCOL, Access
from deltic.server.api import decode
from deltic.server.chat.generation import unavailable
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import ASKING, TICKET, Account, Ticket
from deltic.server.preparation import Preparation, prepared
from deltic.server.service import Server, Service
from deltic.server.speech.prompt import OpenText
from deltic.server.speech.protocol import ClientMessage, InputDone, InputText, SessionClose, SessionConfig
from deltic.server.speech.routes import Utterance, admit, plan, utterance
from deltic.server.transport import MAX_CONTAINERS, error_response, let_go

log = logging.getLogger("deltic.server")

PATH = "/v1/audio/speech/stream"
CONFIG_S = 10.0
"""Seconds that the first message may take."""
IDLE_S = 300.0
"""Seconds that a socket may be open with nothing to say."""
MAX_SOCKETS = 1000
"""Sockets of all keys, who share them out."""
MAX_WAITING = 100_000
"""Characters that may wait to be said."""


LEFT = 499
"""The status of a part whose client went while it was spoken."""

Note = Callable[[str, str, int, Ticket, str], None]
"""`log_request` of server/app.py."""


async def converse(server: Server, access: Access, socket: WebSocket, note: Note) -> None:
    """Serves a socket from its handshake to its end.

    What refuses it is an HTTP answer. note: is told of each part.
    """
    ticket: Ticket = socket.scope[TICKET]
    try:
        ticket.account = access.check_socket(socket)
        if server.on_demand is None or not any(model.kind == "speech" for model in server.on_demand.models.values()):
            admit(server)
        tenant, most = ticket.tenant, server.accounts.share(MAX_SOCKETS)
        if server.sockets[tenant] >= most:
            raise ApiError(429, f"{most} WebSockets are open, as many as may be", code="too_many_sockets")
    except ApiError as error:
        await socket.send_denial_response(error_response(error, socket.scope))
        return
    server.sockets[tenant] += 1
    try:
        await socket.accept(_taken(socket.scope["subprotocols"]))
        await _Conversation(server, socket, ticket.account, note).run()
    except WebSocketDisconnect:
        log.debug("a client left its WebSocket")
    finally:
        server.sockets[tenant] -= 1


def _taken(offered: list[str]) -> str | None:
    """The subprotocol of the answer: a browser that offers some wants one of them, and none needs its key
    told.
    """
    return min(offered, key=lambda name: name.startswith(KEY_PROTOCOL), default=None)


@dataclass(frozen=True, slots=True)
class _Part:
    service: Service
    config: SessionConfig
    utterance: int
    index: int
    text: str | OpenText

    @property
    def size(self) -> int:
        """Characters, of MAX_WAITING; of an open text those so far."""
        return len(self.text) if isinstance(self.text, str) else self.text.n_characters


@dataclass(frozen=True, slots=True)
class _End:
    """Mark of an utterance's end."""

    utterance: int
    n_parts: int

    size: ClassVar[int] = 1


class _Conversation:
    """Conversation of two tasks: one reads and cuts, one speaks. Whichever ends first ends the other."""

    def __init__(self, server: Server, socket: WebSocket, account: Account | None, note: Note) -> None:
        self._server = server
        self._service = server.first("speech")
        self._note = note
        self._socket = socket
        # Who asks, for what is prepared; that the client is there, the two tasks watch.
        self._request = Request({**socket.scope, "type": "http"}, _never)
        self._account = account
        self._config: SessionConfig | None = None
        self._splitter = Splitter("none")
        self._is_open = False  # a text is spoken while it is written
        self._text: OpenText | None = None  # the one that is written now, once it has a word
        self._is_inside = False  # an utterance that has begun, if only with white space
        self._utterance = self._n_parts = 0
        self._waiting: asyncio.Queue[_Part | _End | None] = asyncio.Queue()
        self._n_waiting = 0  # characters, of the part that is spoken, too
        self._said = asyncio.Event()
        self._n_bytes = 0  # of audio that was sent of the part that is spoken
        self._is_closing = False

    async def run(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._read(), self._speak())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # In.

    async def _read(self) -> None:
        """Returns when the client is gone, or has nothing to say for too long."""
        while True:
            try:
                async with asyncio.timeout(CONFIG_S if self._config is None else IDLE_S):
                    message = await self._socket.receive()
            except TimeoutError:
                if self._n_waiting > (self._text.n_characters if self._text else 0):
                    continue  # there is more to say than what waits for its end
                await self._end(f"no message came for {IDLE_S if self._config else CONFIG_S:g} s")
                return
            if message["type"] == "websocket.disconnect":
                return
            try:
                await self._take(message)
            except ApiError as error:
                await self._fail(error)
                if self._config is None:
                    await self._socket.close(1008)
                    return

    async def _take(self, message: Message) -> None:
        text = message.get("text")
        if text is None:
            raise bad_request(None, "expected a JSON object as a text message")
        if text.count("[") + text.count("{") > MAX_CONTAINERS:
            raise bad_request(None, f"the message has more than {MAX_CONTAINERS} brackets", "too_many_containers")
        taken: ClientMessage = await prepared(
            self._service,
            self._request,
            len(text),
            lambda: decode.parse(text.encode(), ClientMessage),  # type: ignore[arg-type]
        )
        if self._is_closing:
            raise bad_request("type", "nothing may come behind session.close")
        if isinstance(taken, SessionConfig):
            await self._configure(taken)
            return
        if (config := self._config) is None:
            raise bad_request("type", "the first message must be session.config")
        if isinstance(taken, InputText):
            n_held = self._text.n_characters if self._text else self._splitter.n_held
            if len(taken.text) + n_held > MAX_WAITING:
                raise bad_request("text", f"more than {MAX_WAITING} characters before an end. Send input.done.")
            if self._is_open:
                await self._write(taken.text, config)
            else:
                for part in self._splitter.push(taken.text):
                    await self._queue_part(part, config)
            self._is_inside |= bool(taken.text)
        elif isinstance(taken, InputDone) or self._is_inside:
            await self._finish(config)
        if isinstance(taken, SessionClose):
            self._is_closing = True
            self._waiting.put_nowait(None)

    async def _configure(self, config: SessionConfig) -> None:
        """Holds from the next utterance on. Raises ApiError, and what was said before still holds."""
        if self._is_inside:
            raise bad_request("type", "session.config must come before an utterance, not inside")
        if config.stream_audio:
            if config.response_format not in (None, "pcm"):
                raise bad_request("response_format", "stream_audio needs pcm")
            config.response_format = "pcm"
            if config.speed not in (None, 1.0):
                raise bad_request("speed", "excludes stream_audio: another tempo is one of a whole part")
        hold = Ticket()
        hold.account = self._account
        try:
            service = await self._server.loaded(config.model, "speech", hold)
            service.speaking()
            info = service.client.info
            if info is None:
                raise unavailable(service.client.why_unavailable())
            # Whether it can be said so shows now, not with the first part; whether there is a place shows
            # with that.
            planned = plan(service, config, "a", info, streamed=config.stream_audio)
        finally:
            if hold.leave_model is not None:
                hold.leave_model()
        self._is_open = planned.manner.streams_text and config.split_granularity == "none"
        self._service, self._config = service, config
        self._splitter = Splitter(config.split_granularity)

    async def _wait_for_room(self, size: int) -> None:
        """Counts `size` characters as waiting, once there is room for them."""
        while self._n_waiting and self._n_waiting + size > MAX_WAITING:
            self._said.clear()
            await self._said.wait()
        self._n_waiting += size

    async def _queue_part(self, text: str, config: SessionConfig) -> None:
        await self._wait_for_room(len(text))
        self._put_part(text, config)

    def _put_part(self, text: str | OpenText, config: SessionConfig) -> None:
        self._waiting.put_nowait(_Part(self._service, config, self._utterance, self._n_parts, text))
        self._n_parts += 1

    async def _write(self, piece: str, config: SessionConfig) -> None:
        """Adds to a text that is spoken while it is written.

        What comes when it has been said, or was refused, is dropped.
        """
        text = self._text
        if text is None:
            piece, text = piece.lstrip(), self._service.speaking().prompts.open_text()
        if not piece or text.is_over:
            return
        size = text.n_characters + len(piece)  # all of it, where nothing was certain until now
        ids = await prepared(self._service, self._request, size, text.encoder.push, piece)
        # What waits before this text does not need its end; and alone it is never more than may wait. So this
        # ends.
        await self._wait_for_room(len(piece))
        text.add(piece, ids)
        if self._text is None:
            self._text = text
            self._put_part(text, config)
        elif text.is_over:
            self._n_waiting -= len(piece)

    async def _finish(self, config: SessionConfig) -> None:
        if (text := self._text) is not None:
            text.end(await prepared(self._service, self._request, text.n_characters, text.encoder.flush))
            self._text = None
        if rest := self._splitter.flush():
            await self._queue_part(rest, config)
        end = _End(self._utterance, self._n_parts)
        await self._wait_for_room(end.size)
        self._waiting.put_nowait(end)
        self._utterance, self._n_parts, self._is_inside = self._utterance + 1, 0, False

    # Out.

    async def _speak(self) -> None:
        """Returns behind the last part, when the client wants no more."""
        while (item := await self._waiting.get()) is not None:
            if isinstance(item, _Part):
                await self._say(item)
                if isinstance(item.text, OpenText):
                    item.text.is_over = True
            else:
                await self._send("session.done", utterance_index=item.utterance, total_sentences=item.n_parts)
            self._n_waiting -= item.size
            self._said.set()
        await self._socket.close(1000)

    async def _say(self, part: _Part) -> None:
        """Answers a part.

        One that is refused for what others, or its key, have running waits for its turn, as long as a request
        may: its text is nowhere else.
        """
        service, config, text = part.service, part.config, part.text
        if isinstance(text, OpenText):
            await text.wait(1)
            text = "".join(text.written).rstrip()
        place = {"utterance_index": part.utterance, "sentence_index": part.index}
        form = config.response_format or config.default_format
        rate = config.sample_rate or 24000
        await self._send("audio.start", **place, sentence_text=text, format=form, sample_rate=rate)
        ticket = Ticket(service.config, labels=self._socket.scope[TICKET].labels, worker=service.server.worker)
        ticket.account = self._account
        ASKING.set(ticket)
        ticket.model = service.model_name if len(self._server.models) > 1 else ""
        limits = (service.config.request_timeout_s, service.config.queue_timeout_s)
        until_s = ticket.started_s + min(filter(None, limits), default=math.inf)
        scope = self._socket.scope
        scope["deltic.answer_id"] = "-"
        status, self._n_bytes = LEFT, 0
        self._server.n_open += 1
        try:
            while True:
                try:
                    await self._answer(part, ticket)
                    break
                except ApiError as error:
                    wait_s = float(error.headers.get("retry-after", "1"))
                    if error.status != 429 or time.monotonic() + wait_s > until_s:
                        raise
                    await asyncio.sleep(wait_s)
            status = 200
        except ApiError as error:
            status = error.status
            await self._fail(error, **place)
        finally:
            self._server.n_open -= 1
            ticket.end(status)
            self._note("PART", PATH, status, ticket, scope["deltic.answer_id"])
        await self._send("audio.done", **place, total_bytes=self._n_bytes, error=status != 200)

    async def _answer(self, part: _Part, ticket: Ticket) -> None:
        """Speaks a part. Raises ApiError; a 429 comes before the first byte."""
        service, config = part.service, part.config
        ticket.enter()
        await self._server.loaded(service.model_name, "speech", ticket)
        info = service.admit(speech=True)
        size = len(part.text) if isinstance(part.text, str) else 0
        async with Preparation(service, self._request, size) as preparation:
            planned = await preparation.run(plan, service, config, part.text, info, streamed=config.stream_audio)
        spoken = await utterance(service, planned, info, ticket)
        self._socket.scope["deltic.answer_id"] = spoken.sent.id
        if config.stream_audio:
            await self._stream(spoken)
        else:
            await self._send_audio(await spoken.file())

    async def _stream(self, spoken: Utterance) -> None:
        """Sends audio as it comes, as fast as the client reads."""
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        running = asyncio.create_task(spoken.stream(pieces.put_nowait))
        running.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                await self._send_audio(piece)
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _send_audio(self, audio: bytes) -> None:
        await self._socket.send_bytes(audio)
        self._n_bytes += len(audio)

    async def _fail(self, error: ApiError, **place: int) -> None:
        let_go(error, self._socket.scope)
        fields = msgspec.json.decode(error.body())["error"]
        await self._send("error", **place, **(fields | {"kind": fields.pop("type")}))

    async def _end(self, why: str) -> None:
        await self._send("error", message=why)
        await self._socket.close(1000)

    async def _send(self, kind: str, /, **fields: object) -> None:
        await self._socket.send_text(msgspec.json.encode({"type": kind} | fields).decode())


async def _never() -> Message:
    """A `receive` of who watches the client elsewhere."""
    await asyncio.Event().wait()
    raise AssertionError


MIN_PART, MIN_CLAUSE, MAX_PART = 6, 16, 600
"""Characters of a part: a shorter one stays with what follows it, a longer one is cut at a space."""

_CLOSERS = "[\"'”’»)\\]」』）】]*+"
_SENTENCE = rf"[.!?…]++{_CLOSERS}(?=\s)|[。！？｡।॥؟]++{_CLOSERS}(?=.)|\n+"
_CLAUSE = rf"[,;:—]++{_CLOSERS}(?=\s)|[，、；：،]++{_CLOSERS}(?=.)"
_NO_END = re.compile(
    r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|sr|jr|vs|no|fig|e\.g|i\.e|approx|[^\W\d_]|\d{1,3})\.$", re.IGNORECASE
)
"""Ends of text whose point ends no sentence: abbreviations, initials, numbers of a list."""


class Splitter:
    """Text as it comes, into parts that can be spoken by themselves.

    A boundary is certain only with the character behind it: "3." may be the beginning of "3.5", and a
    quotation mark may follow.
    """

    def __init__(self, granularity: Literal["none", "sentence", "clause"]) -> None:
        """none: all of it is one part."""
        self._held = ""
        self._whole: list[str] = []
        self.n_held = 0
        """Characters that are in no part yet."""
        self._sentence = None if granularity == "none" else re.compile(_SENTENCE, re.DOTALL)
        self._any = re.compile(f"{_SENTENCE}|{_CLAUSE}", re.DOTALL) if granularity == "clause" else self._sentence

    def push(self, text: str) -> list[str]:
        """The parts that are certain now, without the white space around them."""
        if self._sentence is None or self._any is None:
            self._whole.append(text)
            self.n_held += len(text)
            return []
        held, cut = self._held + text, 0
        texts: list[str] = []
        for match in self._any.finditer(held):
            while match.end() - cut > MAX_PART:
                cut = self._cut_long(held, cut, texts)
            part = held[cut : match.end()].strip()
            least = MIN_PART if self._sentence.match(held, match.start()) else MIN_CLAUSE
            if len(part) >= least and not _NO_END.search(part):
                texts.append(part)
                cut = match.end()
        while len(held) - cut > MAX_PART:
            cut = self._cut_long(held, cut, texts)
        self._held = held[cut:]
        self.n_held = len(self._held)
        return texts

    @staticmethod
    def _cut_long(held: str, cut: int, texts: list[str]) -> int:
        """Takes MAX_PART characters, or fewer up to a space; where the next part begins."""
        space = held.rfind(" ", cut + MAX_PART // 2, cut + MAX_PART)
        end = space if space > 0 else cut + MAX_PART
        if part := held[cut:end].strip():
            texts.append(part)
        return end

    def flush(self) -> str:
        """The remaining text; "" for nothing but white space."""
        rest = ("".join(self._whole) + self._held).strip()
        self._held, self._whole, self.n_held = "", [], 0
        return rest
