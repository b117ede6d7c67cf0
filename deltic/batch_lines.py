"""The lines of OpenAI's batch files: a request each on the way in, an answer each on the way out.

`deltic run` (commands/run.py) and the server's /v1/batches (server/batch/batches.py) read the same lines,
take the same answers for worth another try, and go on behind what is written already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from deltic.json_types import JsonObject

T = TypeVar("T")

PATHS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/systemone": "state",
    "/v1/decisions": "questions",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
    "/v1/score": "text_1",
    "/v1/rerank": "query",
}
"""Paths that a line may go to, and the field by which a bare body is known to be for each: the first that has
it."""

N_TRIES = 5
"""Tries of a request whose answer says the server is at fault (5xx, lost connection)."""


class BadLine(ValueError):
    """A line that cannot be sent. The message says why, `code` and `param` are those of OpenAI's API."""

    def __init__(self, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class ForeignFile(ValueError):
    """A file of results that holds something else; `line` says where."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is no result")
        self.line = line


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Job of one input line. `line` counts from 1."""

    line: int
    custom_id: str | None
    path: str = ""
    body: bytes | None = None
    """The JSON object that is sent."""
    model: str | None = None
    """The one that the body names."""
    error: str | None = None

    @property
    def key(self) -> str | int:
        """The key by which a resumed run recognises a result."""
        return self.line if self.custom_id is None else self.custom_id


class _Line(Struct):
    """Fields that stand around a body. Nothing is made of what is not looked at: a line may hold anything."""

    body: Raw | UnsetType = UNSET
    custom_id: Raw = Raw(b"null")
    method: Raw = Raw(b'"POST"')
    url: Raw = Raw(b"null")


class _Body(Struct):
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    questions: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    state: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET
    model: Raw = Raw(b"null")
    stream: Raw = Raw(b"false")


def read(text: bytes, line: int) -> BatchLine:
    """An input line. Raises BadLine."""
    try:
        text.decode()  # what is not looked at is not decoded below
    except UnicodeDecodeError as error:
        raise BadLine(f"not JSON: {error}", "invalid_json_line") from None
    given = _object(text, _Line, "")
    body = text if given.body is UNSET else bytes(given.body)
    about = _object(body, _Body, "body: " * (given.body is not UNSET))
    custom_id = path = None
    if given.body is not UNSET:
        custom_id = _word(given.custom_id, "custom_id")
        method, path = _word(given.method, "method"), _word(given.url, "url")
        if method != "POST":
            raise BadLine(f"method {method!r}: only POST is supported", "invalid_method", "method")
    if path is None:
        path = next((path for path, field in PATHS.items() if getattr(about, field) is not UNSET), None)
    if path not in PATHS:
        known = " or ".join(PATHS)
        if path is None:
            raise BadLine(f"the body has none of {', '.join(dict.fromkeys(PATHS.values()))}", param="body")
        raise BadLine(f"url {path!r}: use {known}", "invalid_url", "url")
    if bytes(about.stream) not in (b"false", b"null"):
        raise BadLine("stream: a line is answered whole. Leave it out.", param="body.stream")
    return BatchLine(line, custom_id, path, body, _word(about.model, "model"))


def parse(text: bytes, line: int) -> BatchLine:
    """Reads a line (see `read`); one that cannot be sent gets `error` instead of `body`. It keeps its
    custom_id, if it has one.
    """
    try:
        return read(text, line)
    except BadLine as error:
        try:
            custom_id = _word(_object(text, _Line, "").custom_id, "custom_id")
        except BadLine:
            custom_id = None
        return BatchLine(line, custom_id, error=f"line {line}: {error}")


def _object(text: bytes, kind: type[T], place: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise BadLine(f"{place}expected a JSON object", "invalid_json_line") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine(f"not JSON: {error}", "invalid_json_line") from None
    except RecursionError:
        raise BadLine("not JSON: nested too deeply", "invalid_json_line") from None


def _word(raw: Raw, field: str) -> str | None:
    try:
        word: str | None = msgspec.json.decode(raw, type=str | None)
        return word
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadLine(f"{field}: expected a string", param=field) from None


def read_results(out: BinaryIO, is_result: Callable[[JsonObject], bool]) -> Iterator[JsonObject]:
    """The results that `out` holds, from its start; cuts off a last line that was not written to its end.

    Raises ForeignFile for any other line that is none, and leaves the file as it is then.
    """
    out.seek(0)
    end, number = 0, 0
    for number, line in enumerate(out, 1):
        try:
            result = msgspec.json.decode(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            result = None
        if not isinstance(result, dict) or not is_result(result):
            if out.read(1) or not _begins_result(line):
                raise ForeignFile(number)
            break
        end += len(line)
        yield result
    out.seek(end)
    out.truncate()


def _begins_result(line: bytes) -> bool:
    """Returns whether a line that broke off may have been one of ours, and not of a foreign file."""
    return any(line[: len(start)] == start[: len(line)] for start in (b'{"custom_id":', b'{"id":"batch_req'))


def wait_s(status: int, headers: Mapping[str, str], n_tries: int) -> float | None:
    """Seconds after which a request that was answered with `status` is worth another try; None: it has its
    answer.

    A server that is full (429) or has no engine at the moment (503) is waited for however often it says so;
    at any other fault of the server a request has N_TRIES. headers: with their names in lower case.
    """
    if status in (429, 503) or (status >= 500 and n_tries < N_TRIES and headers.get("x-should-retry") != "false"):
        try:
            return min(30.0, max(0.1, float(headers.get("retry-after", "1"))))
        except ValueError:
            return 1.0
    return None
