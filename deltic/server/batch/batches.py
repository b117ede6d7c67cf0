"""OpenAI's files and batches: /v1/files and /v1/batches, for a server with `--batch-dir`.

Uploads go to the disk as they come, and never through memory whole. What a batch then does is in runner.py.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated, BinaryIO, Literal

import msgspec
from msgspec import Meta, Struct
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from deltic.batch_lines import PATHS
from deltic.server.batch.file_store import KEPT_S, MIN_BYTES, NO_RETRY, Card, FileStore, append, private, unwritable
from deltic.server.batch.record import BatchRecord
from deltic.server.batch.runner import BatchRunner
from deltic.server.chat.generation import unavailable
from deltic.server.errors import UNKNOWN_FIELD, ApiError, bad_request
from deltic.server.limits import TICKET, Ticket
from deltic.server.listing import ListQuery, listing, query_of
from deltic.server.preparation import parsed
from deltic.server.service import SHUTTING_DOWN, Service
from deltic.server.transport import json_response

MAX_FILE_BYTES = 200_000_000
MAX_FIELD_BYTES = 4096
"""The most bytes of all fields of a form beside its file, and of each part's head."""
WRITE_BYTES = 1_000_000
"""Bytes that are collected before they are written."""
MAX_LISTED = 10_000


class FileForm(Struct, kw_only=True):
    """The form of POST /v1/files."""

    file: bytes
    purpose: str
    anchor: Annotated[str | None, Meta(description="expires_after[anchor]")] = msgspec.field(
        default=None, name="expires_after[anchor]"
    )
    seconds: Annotated[int | None, Meta(description="expires_after[seconds]")] = msgspec.field(
        default=None, name="expires_after[seconds]"
    )


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=KEPT_S)]


Word = Annotated[str, Meta(max_length=64)]
Note = Annotated[str, Meta(max_length=512)]


WINDOW = re.compile("[1-9][0-9]{0,3}[mhd]")
WINDOW_SAID = "such as 24h: a number from 1 to 9999 and m, h or d"


class BatchRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Meta(description=WINDOW_SAID)]
    metadata: Annotated[dict[Word, Note], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


SECONDS = {"m": 60, "h": 3600, "d": 86_400}


async def upload(service: Service, request: Request) -> ASGIApp:
    """POST /v1/files: keeps a file of requests, for a batch."""
    files, owner = _runner(service, request).files, _owner(request)
    form = _Form(request, files, owner)
    try:
        await form.read()
        expires_s = form.check()
        now = int(time.time())
        card = Card(
            id=f"file-{secrets.token_hex(12)}",
            owner=owner,
            bytes=form.n_bytes,
            created_at=now,
            expires_at=now + expires_s,
            filename=form.filename,
            purpose=form.fields["purpose"],
        )
        await files.add(form.path, card)
    except BaseException as error:
        form.drop()
        if isinstance(error, OSError):
            raise unwritable("the file", error) from None
        raise
    return json_response(card.plain())


class _Form:
    """A form on its way to the disk."""

    def __init__(self, request: Request, files: FileStore, owner: str) -> None:
        self.path = files.part()
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.n_bytes = 0
        self._request = request
        self._files = files
        self._owner = owner
        self._out: BinaryIO | None = None
        self._n_taken = 0
        self._n_field_bytes = 0
        self._header = self._value = self._disposition = b""
        self._name = ""
        self._text = bytearray()
        self._unwritten = bytearray()
        self._is_file = False
        self._is_whole = False

    async def read(self) -> None:
        """Raises ApiError (400, 409, 413, 415), OSError."""
        kind, options = parse_options_header(self._request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise ApiError(415, "send a form as multipart/form-data with a boundary", code="unsupported_media_type")
        out = self._out = await self._files.in_thread(self._owner, self._open)
        try:
            parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_part_data": self._take,
                    "on_part_end": self._end,
                    "on_header_field": self._head,
                    "on_header_value": self._head_value,
                    "on_header_end": self._head_end,
                    "on_headers_finished": self._heads_end,
                    "on_end": self._end_form,
                },
            )
            async for data in self._request.stream():
                parser.write(data)
                if len(self._unwritten) >= WRITE_BYTES:
                    await self._write(out)
            parser.finalize()
            if not self._is_whole:
                raise FormParserError("it ends before its last boundary")
        except FormParserError as error:
            raise bad_request(None, f"the body is not a valid form: {error}", "invalid_form") from None
        await self._write(out)
        await self._files.in_thread(self._owner, out.close)

    def check(self) -> int:
        """Checks the form, and returns for how many seconds the file is kept. Raises ApiError (400)."""
        if not self._n_taken:
            raise bad_request("file", "is missing", "missing_field")
        purpose = self.fields.get("purpose")
        if purpose is None:
            raise bad_request("purpose", "is missing", "missing_field")
        if purpose != "batch":
            raise bad_request("purpose", f"{purpose!r}: this server keeps files for batches only. Use 'batch'.")
        if unknown := self.fields.keys() - FileForm.__struct_encode_fields__:
            raise bad_request(min(unknown), UNKNOWN_FIELD, "unknown_field")
        given = {
            name: self.fields[field]
            for name in ("anchor", "seconds")
            if (field := f"expires_after[{name}]") in self.fields
        }
        if not given:
            return KEPT_S
        try:
            return msgspec.convert(given, ExpiresAfter, strict=False).seconds
        except msgspec.ValidationError as error:
            raise bad_request("expires_after", str(error)) from None

    def drop(self) -> None:
        """Drops the file, so that nothing of it is left."""
        if self._out is not None:
            self._out.close()
        self.path.unlink(missing_ok=True)
        self._files.count(self._owner, -self._n_taken)

    def _open(self) -> BinaryIO:
        return open(self.path, "wb", buffering=0, opener=private)

    async def _write(self, out: BinaryIO) -> None:
        data, self._unwritten = bytes(self._unwritten), bytearray()
        await self._files.in_thread(self._owner, append, out, data)

    def _begin(self) -> None:
        self._disposition = b""

    def _head(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header += data[start:end]

    def _head_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _head_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _heads_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options
        if self._name in self.fields or (self._is_file and (self._n_taken or self._name != "file")):
            raise bad_request(self._name or None, "is given twice, or is not to be a file")
        if self._is_file:
            self.filename = options[b"filename"].decode("utf-8", "replace")[:255] or "file"
            self._reserve()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._count(end - start)
            self._text += data[start:end]
            return
        self.n_bytes += end - start
        if self.n_bytes > MAX_FILE_BYTES:
            text = f"file: is larger than {MAX_FILE_BYTES // 1_000_000} MB"
            raise ApiError(413, text, param="file", code="file_too_large", headers={"connection": "close"} | NO_RETRY)
        self._reserve()
        self._unwritten += data[start:end]

    def _reserve(self) -> None:
        n = max(MIN_BYTES, self.n_bytes) - self._n_taken
        self._files.take(self._owner, n)
        self._n_taken += n

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode("utf-8", "replace").strip()
            self._text.clear()

    def _end_form(self) -> None:
        self._is_whole = True

    def _count(self, n: int) -> None:
        self._n_field_bytes += n
        if self._n_field_bytes > MAX_FIELD_BYTES:
            raise bad_request(None, f"the form has more than {MAX_FIELD_BYTES} bytes beside its file")


class FilesQuery(ListQuery, kw_only=True):
    """Query of the list of files."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] | None = None
    """Entries of a page."""
    purpose: str | None = None
    """The purpose of the files."""


async def list_files(service: Service, request: Request) -> ASGIApp:
    """GET /v1/files: those of this key."""
    query, cards = query_of(request, FilesQuery), _runner(service, request).files.all(_owner(request))
    asked = [(card.id, card) for card in cards if query.purpose in (None, card.purpose)]
    return listing(query, asked, Card.plain, MAX_LISTED)


async def get_file(service: Service, request: Request) -> ASGIApp:
    """GET /v1/files/{file_id}: what is known of a file."""
    return json_response(_file(service, request).plain())


async def get_content(service: Service, request: Request) -> ASGIApp:
    """GET /v1/files/{file_id}/content: what it holds."""
    card = _file(service, request)
    return FileResponse(_runner(service, request).files.path(card.id), media_type="application/octet-stream")


async def delete_file(service: Service, request: Request) -> ASGIApp:
    """DELETE /v1/files/{file_id}: forgets a file."""
    card, files = _file(service, request), _runner(service, request).files
    if files.in_use[card.id]:
        message = f"file {card.id} is the input of a batch that has not ended. Cancel that first."
        raise ApiError(409, message, code="file_in_use", headers=NO_RETRY)
    files.remove(card.id)
    return json_response({"id": card.id, "object": "file", "deleted": True})


async def create_batch(service: Service, request: Request) -> ASGIApp:
    """POST /v1/batches: has the requests of a file answered, behind everybody else's."""
    runner, owner = _runner(service, request), _owner(request)
    if service.server.draining:
        raise unavailable(SHUTTING_DOWN)
    asked = await parsed(service, request, BatchRequest)
    if not WINDOW.fullmatch(asked.completion_window):
        raise bad_request("completion_window", f"must be {WINDOW_SAID}")
    if asked.endpoint not in PATHS:
        message = f"{asked.endpoint!r} is not supported: use {', '.join(PATHS)}"
        raise bad_request("endpoint", message, "unsupported_endpoint")
    try:
        card = runner.files.get(asked.input_file_id, owner)
    except ApiError:
        raise bad_request("input_file_id", f"there is no file {asked.input_file_id!r}", "not_found") from None
    if card.purpose != "batch":
        raise bad_request("input_file_id", f"its purpose is {card.purpose!r}, not 'batch'")
    now, window = int(time.time()), asked.completion_window
    batch = BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        owner=owner,
        endpoint=asked.endpoint,
        input_file_id=card.id,
        completion_window=window,
        created_at=now,
        expires_at=now + int(window[:-1]) * SECONDS[window[-1]],
        metadata=asked.metadata,
        output_s=asked.output_expires_after.seconds if asked.output_expires_after else KEPT_S,
    )
    runner.add(batch)
    return json_response(batch.plain())


async def list_batches(service: Service, request: Request) -> ASGIApp:
    """GET /v1/batches: those of this key, the last first."""
    rows = [(batch.id, batch) for batch in _runner(service, request).all(_owner(request))]
    return listing(query_of(request, ListQuery), rows, BatchRecord.plain)


async def get_batch(service: Service, request: Request) -> ASGIApp:
    """GET /v1/batches/{batch_id}: how far it is."""
    return json_response(_batch(service, request).plain())


async def cancel_batch(service: Service, request: Request) -> ASGIApp:
    """POST /v1/batches/{batch_id}/cancel: ends it, with what it has."""
    batch = _batch(service, request)
    _runner(service, request).cancel(batch)
    return json_response(batch.plain())


def _runner(service: Service, request: Request) -> BatchRunner:
    """Raises ApiError (404) without a place for files."""
    runner = service.server.batches
    if runner is None:
        where = f"{request.method} {request.url.path}"
        message = f"{where}: this server keeps no files and runs no batches. Start it with --batch-dir DIR."
        raise ApiError(404, message, code="not_found")
    return runner


def _owner(request: Request) -> str:
    ticket: Ticket = request.scope[TICKET]
    return ticket.tenant


def _file(service: Service, request: Request) -> Card:
    return _runner(service, request).files.get(request.path_params["file_id"], _owner(request))


def _batch(service: Service, request: Request) -> BatchRecord:
    return _runner(service, request).get(request.path_params["batch_id"], _owner(request))
