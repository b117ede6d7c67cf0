"""The lines of a batch's input: they are read, checked, and each is sent through the application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

from starlette.types import ASGIApp, Message

from deltic.batch_lines import BadLine, BatchLine, read
from deltic.host.client import EngineClient
from deltic.json_types import JsonObject
from deltic.server.batch.record import line_error
from deltic.server.errors import ApiError
from deltic.server.limits import BATCH, Account
from deltic.server.transport import inner_scope

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Bad lines of an input file that are named."""

Find = Callable[[str | None], tuple[str, EngineClient]]
"""Gives name and engine of the model that a line means; raises ApiError (404)."""


class Input:
    """The input file of a batch."""

    def __init__(self, path: Path, endpoint: str, max_mb: float, find: Find) -> None:
        """endpoint: where all lines go. max_mb: most of one."""
        self._path, self._endpoint, self._max_mb, self._find = path, endpoint, max_mb, find

    def check(self) -> tuple[int, str | None, list[JsonObject]]:
        """Counts the lines. Returns their number, their model's name, and what is wrong with them."""
        errors: list[JsonObject] = []
        custom_ids: set[str] = set()
        models: dict[str, str] = {}
        n_lines = 0
        for line, text in self.lines():
            n_lines += 1
            if n_lines > MAX_LINES:
                errors.append(line_error(None, "too_many_tasks", f"The file has more than {MAX_LINES} requests."))
                break
            try:
                job = self._job(line, text)
                if job.custom_id in custom_ids:
                    message = f"custom_id {job.custom_id!r} was used before"
                    raise BadLine(message, "duplicate_custom_id", "custom_id")
                custom_ids.add(str(job.custom_id))
                name, _ = self._find(job.model)
                models.setdefault(name, job.model or name)
                if len(models) > 1:
                    message = f"a batch is for one model, but its lines name {' and '.join(map(repr, models.values()))}"
                    raise BadLine(message, "mismatched_model", "body.model")
            except BadLine as error:
                errors.append(line_error(line, error.code, f"line {line}: {error}", error.param))
            except ApiError as error:
                errors.append(line_error(line, error.code or "invalid_model", f"line {line}: {error}", "body.model"))
            if len(errors) >= MAX_ERRORS:
                break
        if not n_lines:
            errors.append(line_error(None, "empty_file", "The file has no lines."))
        return n_lines, next(iter(models.values()), None), errors

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines of the input that are not empty, with their numbers.

        A line that is too long is cut off, and is no JSON then.
        """
        most = int(self._max_mb * 1_000_000) + 4096
        with self._path.open("rb") as file:
            line = 0
            while text := file.readline(most):
                line += 1
                if len(text) == most and not text.endswith(b"\n"):
                    yield line, b""
                    return
                if text.strip():
                    yield line, text

    def _job(self, line: int, text: bytes) -> BatchLine:
        """Raises BadLine."""
        if not text:
            raise BadLine(f"is longer than a request may be ({self._max_mb:g} MB)", "line_too_long")
        job = read(text, line)
        if job.custom_id is None:
            raise BadLine("custom_id: is missing", "missing_required_parameter", "custom_id")
        if job.path != self._endpoint:
            message = f"url {job.path!r}: the batch is for {self._endpoint!r}"
            raise BadLine(message, "mismatched_url", "url")
        return job

    def left(self, done: set[str]) -> Iterator[BatchLine]:
        """Jobs without those that are done, by custom_id. Raises BadLine, OSError."""
        for line, text in self.lines():
            job = self._job(line, text)
            if job.custom_id not in done:
                yield job


async def ask(app: ASGIApp, job: BatchLine, account: Account | None) -> tuple[int, dict[str, str], bytes]:
    """Sends a line through the application. Returns status, headers and body of the answer."""
    assert job.body is not None
    given: Message | None = {"type": "http.request", "body": job.body, "more_body": False}
    status, headers, parts = 0, {}, []

    async def receive() -> Message:
        nonlocal given
        if given is None:
            await asyncio.Event().wait()  # this client never leaves
        message, given = given, None
        assert message is not None
        return message

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            pairs = message["headers"]
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}
        else:
            parts.append(message.get("body", b""))

    scope = inner_scope("POST", job.path, job.body, [(b"content-type", b"application/json")])
    scope[BATCH] = account
    await app(scope, receive, send)
    return status, headers, b"".join(parts)
