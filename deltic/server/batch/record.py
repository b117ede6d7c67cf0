"""Record of a batch: its state, and its answers and errors so far, each in a file of its own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from deltic.batch_lines import BatchLine, read_results
from deltic.json_types import JsonObject
from deltic.server.batch.file_store import KEPT_S, private

STEPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""Statuses whose times an answer of the API has."""

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class BatchUsage(Struct):
    """Tokens of all answers."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plain(self) -> JsonObject:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }

    def add(self, body: bytes) -> None:
        """An answer's, in the form of chats and completions or of responses."""
        try:
            counts = msgspec.json.decode(body, type=_AnsweredUsage).usage
        except msgspec.DecodeError:
            return
        self.input_tokens += counts.prompt_tokens + counts.input_tokens
        self.output_tokens += counts.completion_tokens + counts.output_tokens
        self.cached_tokens += (counts.prompt_tokens_details | counts.input_tokens_details).get("cached_tokens", 0)
        details = counts.completion_tokens_details | counts.output_tokens_details
        self.reasoning_tokens += details.get("reasoning_tokens", 0)


class _Counts(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, int] = {}
    completion_tokens_details: dict[str, int] = {}
    input_tokens_details: dict[str, int] = {}
    output_tokens_details: dict[str, int] = {}


class _AnsweredUsage(Struct):
    usage: _Counts


class BatchRecord(Struct, kw_only=True):
    """Batch as it is kept on disk. Times in seconds of the epoch."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_s: int = KEPT_S
    """Seconds for which what the batch makes is kept."""
    status: str = "validating"
    final: str | None = None
    """The `status` that follows once all lines are finished."""
    model: str | None = None
    errors: list[JsonObject] = []
    times: dict[str, int] = {}
    """`in_progress_at` and the like."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)

    @property
    def counts(self) -> str:
        return f"{self.completed} answered, {self.failed} with an error, of {self.total}"

    def plain(self) -> JsonObject:
        """Returns the batch as OpenAI's API has it."""
        fields: JsonObject = msgspec.to_builtins(self)
        for own in ("owner", "output_s", "final", "times"):
            del fields[own]
        counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
        if self.status in UNFINISHED:
            fields["output_file_id"] = fields["error_file_id"] = None
        return fields | {
            "object": "batch",
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            **dict.fromkeys(f"{status}_at" for status in STEPS),
            **self.times,
            "request_counts": counts,
            "usage": self.usage.plain(),
        }


class Results:
    """The files of a batch's answers and errors so far, open to be added to. Raises ForeignFile, OSError."""

    def __init__(self, out: Path, err: Path) -> None:
        self.usage = BatchUsage()
        self.done: set[str] = set()
        self.n_out = self.n_err = self.n_bytes = 0
        self._paths = out, err
        self.read()
        self.out: BinaryIO = out.open("ab", buffering=0)
        self.err: BinaryIO = err.open("ab", buffering=0)

    def read(self) -> None:
        """The contents of the files."""
        self.usage, self.done, self.n_bytes = BatchUsage(), set(), 0
        self.n_out, self.n_err = map(self._read, self._paths)

    def close(self) -> None:
        self.out.close()
        self.err.close()

    def _read(self, path: Path) -> int:
        n = 0
        with open(path, "r+b" if path.exists() else "w+b", opener=private) as file:
            for result in read_results(file, lambda line: isinstance(line.get("custom_id"), str)):
                n += 1
                self.done.add(result["custom_id"])
                if result.get("response"):
                    self.usage.add(msgspec.json.encode(result["response"]["body"]))
            self.n_bytes += file.tell()
        return n


def line_error(line: int | None, code: str, message: str, param: str | None = None) -> JsonObject:
    """Entry of a batch's `errors`. line: its number in the input; None: it is about the whole file."""
    return {"code": code, "line": line, "message": message, "param": param}


def result_line(job: BatchLine, response: JsonObject | None, error: JsonObject | None) -> bytes:
    """A line of the output or the error file."""
    fields = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": job.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(fields) + b"\n"
