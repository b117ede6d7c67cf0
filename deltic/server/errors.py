"""The one exception of the HTTP side, and the error body every failed request gets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

THREAD_NOT_FOUND = "thread_not_found"
"""Code on which Anthropic's client sends its history whole."""


UNKNOWN_FIELD = "unknown field. It is not supported: leave it out."

RETRY_LATER = {"retry-after": "2"}
"""Headers of an error that may be over in a moment."""


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
        begins: bool = False,
    ) -> None:
        """begins: the message begins with the name of the field, which is not in `message`."""
        super().__init__(message)
        self.status = status
        self.said = message
        self.param = param
        self._begins = begins
        self.code = code
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = headers or {}

    @property
    def message(self) -> str:
        return f"{self.param}: {self.said}" if self._begins and self.param else self.said

    def __str__(self) -> str:
        return self.message

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


_COMMON = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_KINDS = _COMMON | {503: "service_unavailable"}
_ANTHROPIC_KINDS = _COMMON | {413: "request_too_large", 504: "timeout_error", 529: "overloaded_error"}


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field; the message is prefixed with its name."""
    return ApiError(400, message, param=param, code=code, begins=True)


class PromptTooLong(ApiError):
    """The 400 for a prompt that the context does not hold."""

    def __init__(self, param: str, n_prompt: int, limit: int, *, at_least: bool = False) -> None:
        """n_prompt: its length; at_least: as far as it is known."""
        self.n_prompt, self.limit = n_prompt, limit
        yours = ("your messages have" if param == "messages" else "your prompt has") + " at least" * at_least
        message = (
            f"This model's maximum context length is {limit} tokens. However, {yours} {n_prompt} tokens. "
            f"Please shorten the prompt: with one token of an answer it may have {limit - 1}."
        )
        super().__init__(400, message, param=param, code="context_length_exceeded", begins=True)


def waited_too_long(seconds: float) -> ApiError:
    """The 503 for a request that had no place for so long."""
    message = f"no place for the request within {seconds:g} s: too many run. Try again later."
    retry_after_s = min(60, math.ceil(seconds))  # it would wait as long again
    return ApiError(503, message, code="queue_timeout", headers={"retry-after": str(retry_after_s)})


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Has errors name a chat's field as its client does. fields: the client's names (`Chat.origin`)."""
    try:
        yield
    except ApiError as error:
        error.param = fields.get(error.param or "", error.param)
        raise
