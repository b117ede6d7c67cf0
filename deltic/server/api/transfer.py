"""Prefixes that move between servers: POST /cache/export and /cache/import.

What moves is a line of JSON (`Head`), and behind it the files of the prefix cache as they lie on disk: the
pages of a prompt from the first on, then the state behind the last. Each has its own header and checksum
(`engine/cache/disk.py`). They go from disk to socket and from socket to disk a block at a time. Nothing
of a stream that is cut off or damaged is left: its files get their names when all of them are whole, pages
before what lies beyond them. The engine finds them when a request wants them, as those of another server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deltic.engine.cache.directory import ABANDONED_S, HEADER_BYTES, Directory, Entry, unpack_header
from deltic.engine.events import CacheLocated
from deltic.engine.messages import EngineInfo
from deltic.engine.messages import Request as EngineRequest
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.api import decode
from deltic.server.api.completions import prepared_chat, prepared_completion
from deltic.server.batch.file_store import private, unwritable
from deltic.server.chat.generation import refusals, unavailable
from deltic.server.chat.request import engine_request
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import TICKET
from deltic.server.service import SHUTTING_DOWN, Service
from deltic.server.transport import BODY, json_response, read_body, unless_disconnected

log = logging.getLogger("deltic.server")

STREAM = "application/octet-stream"
BLOCK_BYTES = 1 << 20
MAX_HEAD_BYTES = 4096
LOCATE_S = 60.0
"""Seconds that the engine may take to write a prefix to disk."""

CLOSE = {"connection": "close"}


class Head(Struct, forbid_unknown_fields=True, kw_only=True):
    """The first line of a stream."""

    deltic_cache: int = 1
    """Version of the stream."""
    fingerprint: str
    """Names everything that decides the bits: weights, formats, kernels, versions."""
    model: str
    """Name that the sending server has for the model; for people."""
    tokens: int
    page_bytes: int
    state_bytes: int


class ExportRequest(Struct):
    """The body of POST /v1/chat/completions, or of /v1/completions with one prompt."""

    model: str | None = None
    messages: list[object] | None = None
    prompt: str | list[object] | None = None


def _check(service: Service) -> EngineInfo:
    """Raises ApiError: 403 without --allow-cache-transfer, 404 for a model that speaks, 503 before the engine
    was ready, and in the drain.
    """
    info = service.rendering()
    if not service.client.config.allow_cache_transfer:
        message = f"prefixes of {service.model_name!r} may not be moved. Start the server with --allow-cache-transfer."
        raise ApiError(403, message, code="cache_transfer_off")
    if service.server.draining:
        raise unavailable(SHUTTING_DOWN)
    return info


# From here.


async def export_cache(service: Service, request: Request) -> ASGIApp:
    """POST /cache/export: what the prefix cache has of a prompt, for /cache/import of another server."""
    info = _check(service)
    asked = await _asked(service, request, info)
    ticket = request.scope[TICKET]
    asked.namespace = ticket.namespace
    asked.adapter = service.adapter.current_key() if service.adapter else b""
    located = await unless_disconnected(request.receive, _locate(service, asked))
    if located.error is not None:
        status, code = (400, None) if located.is_refused else (409, "cache_not_exported")
        raise ApiError(status, f"the prefix cannot be exported: {located.error}", code=code)
    if not located.n_tokens:
        message = "nothing of this prompt is cached that could be resumed from. Send it to be answered first (max_tokens 1 does)."
        raise ApiError(404, message, code="nothing_cached")
    head = Head(
        fingerprint=Path(info.cache_files).name,
        model=service.model_name,
        tokens=located.n_tokens,
        page_bytes=info.page_bytes,
        state_bytes=info.state_bytes,
    )
    stream = FileStream(msgspec.json.encode(head) + b"\n", located.files)
    try:
        await asyncio.to_thread(stream.measure)
    except OSError as error:
        message = f"another server has just evicted it ({error.strerror}). Send the prompt again."
        raise ApiError(409, message, code="cache_not_exported") from None
    return stream


async def _locate(service: Service, asked: EngineRequest) -> CacheLocated:
    try:
        with refusals():
            async with asyncio.timeout(LOCATE_S):
                return await service.client.locate_cache(asked)
    except TimeoutError:
        raise ApiError(504, f"the engine did not answer in {LOCATE_S:g} s", code="engine_timeout") from None


async def _asked(service: Service, request: Request, info: EngineInfo) -> EngineRequest:
    """The request that the body would be sent to the engine as. Raises ApiError, as for an answer."""
    body = request.scope[BODY] = await read_body(request, service.server.max_body_mb)
    export = decode.parse(body, ExportRequest)
    if (export.messages is None) == (export.prompt is None):
        raise bad_request("messages", "send the body of a chat, with messages, or of a completion, with a prompt")
    if export.messages is not None:
        _, chat = await prepared_chat(service, request, info)
        prompt = chat.prompt
        made = engine_request("", prompt.ids, chat.params, chat.chat.sampling, prompt.boundaries)
        made.pictures = prompt.pictures
    else:
        _, completion = await prepared_completion(service, request, info)
        if len(completion.requests) > 1:
            raise bad_request("prompt", "send one prompt: a prefix is of one")
        made = completion.requests[0]
    made.id = f"export-{secrets.token_hex(16)}"
    if not made.use_cache:
        raise bad_request("cache_prompt", "is false: this prompt is not to be in the cache. Leave it out.")
    made.params = msgspec.structs.replace(made.params, constraint=None)
    return made


class FileStream:
    """Files behind each other, in one answer."""

    def __init__(self, head: bytes, files: list[str]) -> None:
        self._head, self._files = head, files
        self._n_bytes = 0

    def measure(self) -> None:
        """Raises OSError for a file that is not there."""
        self._n_bytes = len(self._head) + sum(os.stat(path).st_size for path in self._files)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", STREAM.encode()), (b"content-length", b"%d" % self._n_bytes)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._head, "more_body": True})
        blocks = self._blocks()
        try:
            while block := await asyncio.to_thread(next, blocks, b""):
                await send({"type": "http.response.body", "body": block, "more_body": True})
        except OSError as error:  # the connection closes before its length is reached: it is cut off
            log.warning("an export was cut off: %s (%s)", error.filename, error.strerror)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _blocks(self) -> Iterator[bytes]:
        for path in self._files:
            with open(path, "rb", buffering=0) as file:
                while block := file.read(BLOCK_BYTES):
                    yield block


# To here.


async def import_cache(service: Service, request: Request) -> ASGIApp:
    """POST /cache/import: takes what another server's /cache/export gave into the prefix cache."""
    info = _check(service)
    began_s = time.monotonic()
    budget = int(service.client.config.cache_disk_gb * 1e9)
    async with service.server.importing:  # one at a time: each may need the whole budget while it comes
        if service.server.draining:
            raise unavailable(SHUTTING_DOWN)
        coming = Import(info, budget)
        try:
            await _read_by(coming.take, request)
            await asyncio.to_thread(coming.end)
        except OSError as error:
            raise unwritable("the prefix", error) from None
        finally:
            await asyncio.shield(asyncio.to_thread(coming.drop))
    counts = {"tokens": coming.n_tokens, "bytes": coming.n_bytes, "seconds": round(time.monotonic() - began_s, 3)}
    return json_response({"object": "cache.import", "model": service.model_name} | counts)


async def _read_by(take: Callable[[BinaryIO], None], request: Request) -> None:
    """Has a thread read a body as a file, as it comes. Raises what that does, and ClientDisconnect."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def read() -> None:
        with theirs, theirs.makefile("rb") as stream:
            take(stream)

    async def send() -> None:
        with ours, contextlib.suppress(ConnectionError):  # the thread has had enough, and raises why
            async for data in request.stream():
                await loop.sock_sendall(ours, data)

    reading, sending = loop.run_in_executor(None, read), asyncio.create_task(send())
    try:
        await asyncio.wait((reading, sending), return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
        await reading
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        ours.close()  # so that the thread comes to an end
        await asyncio.gather(reading, return_exceptions=True)


class Import:
    """A stream on its way to the disk. Its methods raise ApiError and OSError, and block."""

    def __init__(self, info: EngineInfo, budget: int) -> None:
        """budget: the most bytes that it may have."""
        self._info = info
        path = Path(info.cache_files)
        self._directory = Directory(path.parent, path.name)
        self._budget = budget
        self._parts: list[tuple[str, str]] = []
        """Name for now and final name of each file."""
        self._renew_at = 0.0
        self.n_tokens = 0
        self.n_bytes = 0

    def take(self, stream: BinaryIO) -> None:
        """Writes the files of a stream, under names for now. Nothing is left of one that is damaged."""
        try:
            head = self._head(stream.readline(MAX_HEAD_BYTES))
            above: Entry | None = None
            for n_left in range(head.tokens // PAGE_SIZE, -1, -1):
                above = self._take_file(stream, head, above, is_last=not n_left)
            if stream.read(1):
                raise damaged("there is more behind its end")
            self.n_tokens = head.tokens
        except BaseException:
            self.drop()
            raise

    def end(self) -> None:
        """The stream is over: the files get their names."""
        for part, path in self._parts:
            os.rename(part, path)
        self._parts.clear()

    def drop(self) -> None:
        """Removes what has no name yet."""
        for part, _ in self._parts:
            with contextlib.suppress(OSError):
                os.unlink(part)
        self._parts.clear()

    def _renew(self) -> None:
        """Renews the files of a long stream, so that nobody takes them for abandoned."""
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + ABANDONED_S / 10
            for part, _ in self._parts:
                os.utime(part)

    def _exactly(self, stream: BinaryIO, n: int) -> bytes:
        data = stream.read(n)
        self.n_bytes += len(data)
        if len(data) < n:
            raise damaged("it ends before its end")
        return data

    def _head(self, line: bytes) -> Head:
        """Reads the first line, and compares it with what is here."""
        self.n_bytes += len(line)
        try:
            head = msgspec.json.decode(line, type=Head)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise damaged("it does not begin as an export of this version does") from None
        info = self._info
        own = (1, self._directory.path.name, info.page_bytes, info.state_bytes)
        theirs = (head.deltic_cache, head.fingerprint, head.page_bytes, head.state_bytes)
        names = "version of the stream", "fingerprint", "bytes of a page", "bytes of a state"
        for name, here, there in zip(names, own, theirs, strict=True):
            if here != there:
                message = (
                    f"the {name} is {there!r}, and here {here!r}: both servers need the same weights, formats, version of Deltic and "
                    "kind of processor"
                )
                raise ApiError(409, message, code="other_model", headers=CLOSE)
        if head.tokens < PAGE_SIZE or head.tokens % PAGE_SIZE:
            raise damaged(f"{head.tokens} tokens are not a multiple of {PAGE_SIZE}")
        if head.tokens // PAGE_SIZE * head.page_bytes + head.state_bytes > self._budget:
            raise ApiError(413, "the prefix is larger than --cache-disk-gb", code="body_too_large", headers=CLOSE)
        return head

    def _take_file(self, stream: BinaryIO, head: Head, above: Entry | None, *, is_last: bool) -> Entry:
        """Writes the file that comes next, behind that of `above`: a page's, or last the state's."""
        header = self._exactly(stream, HEADER_BYTES)
        try:
            model, entry, n_left, given_crc = unpack_header(header)
        except ValueError as error:
            raise damaged(f"a file in it is {error}") from None
        if model != self._directory.model:
            raise damaged("a file in it is of another model")
        if above is None:
            expected: tuple[object, ...] = "page", entry.key, entry.parent, PAGE_SIZE, head.page_bytes
        elif not is_last:
            expected = "page", entry.key, above.key, above.depth + PAGE_SIZE, head.page_bytes
        else:
            expected = "state", above.key, above.parent, above.depth, head.state_bytes
        if (entry.kind, entry.key, entry.parent, entry.depth, n_left) != expected:
            raise damaged("a file in it is not the one that comes next")
        path = self._directory.file(entry)
        part, crc = self._directory.part(path), 0
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(part, "xb", opener=private) as out:
            self._parts.append((part, path))
            out.write(header)
            while n_left:
                data = self._exactly(stream, min(n_left, BLOCK_BYTES))
                crc, n_left = zlib.crc32(data, crc), n_left - len(data)
                out.write(data)
                self._renew()
        if crc != given_crc:
            raise damaged("the checksum of a file in it is wrong")
        return entry


def damaged(why: str) -> ApiError:
    """A stream that is refused whole."""
    return ApiError(400, f"the stream is damaged: {why}. Nothing of it was kept.", code="damaged_stream", headers=CLOSE)
