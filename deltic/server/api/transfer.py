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
import threading
import time
import zlib
from collections.abc import Iterator
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
from deltic.host.client import EngineUnavailable
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.api import decode
from deltic.server.api.completions import prepared_chat, prepared_completion
from deltic.server.batch.file_store import private, unwritable
from deltic.server.chat.generation import unavailable
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
        async with asyncio.timeout(LOCATE_S):
            return await service.client.locate_cache(asked)
    except EngineUnavailable as error:
        raise unavailable(str(error)) from None
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
            waiting = bytearray()
            async for data in request.stream():
                waiting += data
                if len(waiting) >= BLOCK_BYTES:
                    data, waiting = bytes(waiting), bytearray()
                    await asyncio.to_thread(coming.feed, data)
            await asyncio.to_thread(coming.feed, bytes(waiting))
            await asyncio.to_thread(coming.end)
        except OSError as error:
            raise unwritable("the prefix", error) from None
        finally:
            await asyncio.shield(asyncio.to_thread(coming.drop))
    counts = {"tokens": coming.n_tokens, "bytes": coming.n_bytes, "seconds": round(time.monotonic() - began_s, 3)}
    return json_response({"object": "cache.import", "model": service.model_name} | counts)


class Import:
    """A stream on its way to the disk. Its methods raise ApiError and OSError, and block."""

    def __init__(self, info: EngineInfo, budget: int) -> None:
        """budget: the most bytes that it may have."""
        self._info = info
        path = Path(info.cache_files)
        self._directory = Directory(path.parent, path.name)
        self._budget = budget
        self._lock = threading.Lock()
        """Held by each method: a request that is cancelled leaves the thread of its last `feed` behind."""
        self._unread = bytearray()
        self._head: Head | None = None
        self._entry: Entry | None = None
        self._above: Entry | None = None
        self._size = self._crc = self._given_crc = 0
        self._n_left = 0
        """Bytes of the object's payload that are to come."""
        self._n_objects = 0
        """Objects that are to come."""
        self._out: BinaryIO | None = None
        self._parts: list[tuple[str, str]] = []
        """Name for now and final name of each file."""
        self._is_dropped = False
        self._renew_at = 0.0
        self.n_tokens = 0
        self.n_bytes = 0

    def feed(self, data: bytes) -> None:
        """Takes more of the stream."""
        with self._lock:
            if not self._is_dropped:
                self._renew()
                self._feed(data)

    def _renew(self) -> None:
        """Renews the files of a long stream, so that nobody takes them for abandoned."""
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + ABANDONED_S / 10
            for part, _ in self._parts:
                os.utime(part)

    def _feed(self, data: bytes) -> None:
        self.n_bytes += len(data)
        self._unread += data
        while self._unread:
            if self._head is None:
                if not self._take_head():
                    return
            elif self._n_left:
                self._take_payload()
            elif not self._n_objects:
                raise damaged("there is more behind its end")
            elif len(self._unread) < HEADER_BYTES:
                return
            else:
                self._take_header()

    def end(self) -> None:
        """The stream is over: the files get their names."""
        if self._head is None or self._n_objects or self._n_left:
            raise damaged("it ends before its end")
        with self._lock:
            for part, path in self._parts:
                os.rename(part, path)
            self._parts.clear()
        self.n_tokens = self._head.tokens

    def drop(self) -> None:
        """Removes what is half received."""
        with self._lock:
            self._is_dropped = True
            if self._out is not None:
                self._out.close()
            for part, _ in self._parts:
                with contextlib.suppress(OSError):
                    os.unlink(part)

    def _take_head(self) -> bool:
        line, end, rest = bytes(self._unread).partition(b"\n")
        if not end and len(line) <= MAX_HEAD_BYTES:
            return False
        try:
            head = msgspec.json.decode(line[:MAX_HEAD_BYTES], type=Head)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise damaged("it does not begin as an export of this version does") from None
        info, n_pages = self._info, head.tokens // PAGE_SIZE
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
        if n_pages * head.page_bytes + head.state_bytes > self._budget:
            raise ApiError(413, "the prefix is larger than --cache-disk-gb", code="body_too_large", headers=CLOSE)
        self._head, self._n_objects, self._unread = head, n_pages + 1, bytearray(rest)
        return True

    def _take_header(self) -> None:
        assert self._head is not None
        header = bytes(self._unread[:HEADER_BYTES])
        try:
            model, entry, size, self._given_crc = unpack_header(header)
        except ValueError as error:
            raise damaged(f"a file in it is {error}") from None
        del self._unread[:HEADER_BYTES]
        above = self._above
        if model != self._directory.model:
            raise damaged("a file in it is of another model")
        if above is None:
            expected: tuple[object, ...] = "page", entry.key, entry.parent, PAGE_SIZE, self._head.page_bytes
        elif self._n_objects > 1:
            expected = "page", entry.key, above.key, above.depth + PAGE_SIZE, self._head.page_bytes
        else:
            expected = "state", above.key, above.parent, above.depth, self._head.state_bytes
        if (entry.kind, entry.key, entry.parent, entry.depth, size) != expected:
            raise damaged("a file in it is not the one that comes next")
        self._entry, self._n_left, self._crc = entry, size, 0
        self._open(entry, header)

    def _open(self, entry: Entry, header: bytes) -> None:
        path = self._directory.file(entry)
        part = self._directory.part(path)
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        self._out = open(part, "xb", buffering=0, opener=private)  # noqa: SIM115
        self._parts.append((part, path))
        _write(self._out, header)

    def _take_payload(self) -> None:
        data = bytes(self._unread[: self._n_left])
        del self._unread[: self._n_left]
        assert self._out is not None and self._entry is not None
        self._crc = zlib.crc32(data, self._crc)
        _write(self._out, data)
        self._n_left -= len(data)
        if self._n_left:
            return
        self._out.close()
        if self._crc != self._given_crc:
            raise damaged("the checksum of a file in it is wrong")
        self._n_objects -= 1
        self._above = self._entry


def _write(file: BinaryIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def damaged(why: str) -> ApiError:
    """A stream that is refused whole."""
    return ApiError(400, f"the stream is damaged: {why}. Nothing of it was kept.", code="damaged_stream", headers=CLOSE)
