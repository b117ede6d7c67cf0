"""The one exception of the HTTP side, and the error body every failed request gets."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

THREAD_NOT_FOUND = "thread_not_found"
"""On which Anthropic's client sends its history whole."""


class ApiError(Exception):
    """A request that fails with an HTTP status and OpenAI's error body.

    `param` names the field at fault (`messages[0].content`), `code` is a word a program can test.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = headers or {}

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def anthropic_status(self) -> int:
        """To Anthropic's clients, 429 is about their key; a server that has too much to do says 529."""
        return 529 if self.code in ("queue_full", "queue_timeout", "too_many_large_requests") else self.status

    def anthropic_body(self, request_id: str) -> bytes:
        """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
        status = self.anthropic_status
        kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error: dict[str, object] = {"type": kind, "message": self.message}
        if self.code == THREAD_NOT_FOUND:
            error["details"] = {"error_code": self.code}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def ollama_body(self) -> bytes:
        """`{"error": message}`."""
        return msgspec.json.encode({"error": self.message})


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field; the message is prefixed with its name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def renamed(error: ApiError, names: Iterable[tuple[str, str]]) -> ApiError:
    """The error with its field called as in the API that was asked. names: patterns of fields' names, and
    what becomes of them.
    """
    if error.param and error.message.startswith(error.param):
        theirs = error.param
        for pattern, name in names:
            theirs = re.sub(pattern, name, theirs)
        error.message = theirs + error.message[len(error.param) :]
        error.param = theirs
    return error
