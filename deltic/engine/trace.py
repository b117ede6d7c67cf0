"""The engine's steps over time, as a file for Perfetto or chrome://tracing.

Chrome's JSON array, which needs no end: whole lines are appended, so what a killed process leaves loads, and
an engine that is started again goes on in the same file. A row of steps with their phases, counters, and a
row for each open sequence.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deltic.config import ConfigError
from deltic.engine.events import Stats
from deltic.engine.messages import Output, Request
from deltic.engine.step import Sequence, Step

log = logging.getLogger("deltic.engine")

MAX_BYTES = 256 << 20
"""The file grows no larger."""

BUFFER_BYTES = 1 << 16
FLUSH_S = 1.0
"""Seconds after which what was written is in the file at the latest, if steps go on."""


class Trace:
    """Appends to `path`.

    Times are time.perf_counter()'s, in seconds. What fails later than the opening ends the trace alone.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._n_bytes = os.fstat(self._file).st_size
        except OSError as error:
            raise ConfigError(f"--trace {path}: {error.strerror}. Give a file that can be written.") from None
        self.is_open = True
        self._offset_s = time.time() - time.perf_counter()
        self._encode = msgspec.json.Encoder().encode
        self._buffer: list[bytes] = []
        self._n_buffered = 0
        self._flushed_s = 0.0
        self._phase: dict[tuple[str, int], str] = {}
        """Phases of the open sequences, by id and index."""
        self._n_preemptions = 0
        self._pid = os.getpid()
        if not self._n_bytes:
            self._put(b"[\n")
        for kind, name in (("process_name", f"deltic engine {self._pid}"), ("thread_name", "steps")):
            self._event("M", kind, time.perf_counter(), args={"name": name})
        self.flush()

    def arrived(self, request: Request) -> None:
        """Notes that a request was queued."""
        now_s = time.perf_counter()
        for index in range(request.params.n):
            self._enter((request.id, index), "queue", now_s, request.labels or None)

    def stepped(self, step: Step, stats: Stats, waiting: list[Sequence], times: tuple[float, ...]) -> None:
        """Notes a step.

        times: when it began, was planned, had run, ended. waiting: the waiting sequences, preempted ones too.
        """
        begin, planned, ran, end = times
        prefills = [chunk for chunk in step.chunks if not chunk.is_decode]
        for chunk in step.chunks:
            sequence = chunk.sequence
            phase = "decode" if chunk.is_decode else "prefill"
            self._enter((sequence.request.id, sequence.index), phase, begin)
        args = {
            "decodes": len(step.chunks) - len(prefills),
            "prefill_tokens": sum(chunk.length for chunk in prefills),
            "prefills": [
                f"{c.sequence.request.id}:{c.sequence.index} [{c.start}, {c.start + c.length})" for c in prefills
            ],
            "copies": len(step.slot_copies) + len(step.page_copies),
        }
        self._event("X", "step", begin, end, args)
        for name, start, stop in (("plan", begin, planned), ("run", planned, ran), ("commit", ran, end)):
            self._event("X", name, start, stop)
        self._event("C", "sequences", end, args={"running": stats.n_running, "waiting": stats.n_waiting})
        self._event("C", "pages", end, args={"used": stats.n_pages_used})
        if stats.n_preemptions != self._n_preemptions:
            self._event("i", "preempted", begin, args={"n": stats.n_preemptions - self._n_preemptions})
            self._n_preemptions = stats.n_preemptions
            for sequence in waiting:
                if sequence.n_preempted:
                    self._enter((sequence.request.id, sequence.index), "preempted", begin)

    def said(self, outputs: list[Output]) -> None:
        """Notes Outputs that were made, by a step or instead of one."""
        now_s = time.perf_counter()
        for output in outputs:
            if output.n_read is None:
                self._enter((output.id, output.index), None if output.finish_reason else "decode", now_s)
        if self._n_buffered > BUFFER_BYTES or now_s - self._flushed_s > FLUSH_S:
            self.flush()

    def close(self) -> None:
        """Writes what is left."""
        self.flush()
        if self.is_open:
            self.is_open = False
            os.close(self._file)

    def _enter(self, key: tuple[str, int], phase: str | None, now_s: float, args: dict[str, str] | None = None) -> None:
        """Ends the phase of a sequence and begins another, if it is another. args: what is said of that."""
        old = self._phase.get(key)
        if old == phase:
            return
        name = f"{key[0]}:{key[1]}"
        if old is not None:
            self._event("e", old, now_s, span=name)
        if phase is None:
            del self._phase[key]
        else:
            self._phase[key] = phase
            self._event("b", phase, now_s, args=args, span=name)

    def _event(
        self, ph: str, name: str, at: float, end: float = 0.0, args: Mapping[str, object] | None = None, span: str = ""
    ) -> None:
        if not self.is_open:
            return
        event: dict[str, object] = {"ph": ph, "name": name, "pid": self._pid, "tid": 1}
        if span:
            event |= {"cat": "request", "id": span}
        event["ts"] = round((at + self._offset_s) * 1e6, 1)
        if ph == "X":
            event["dur"] = round((end - at) * 1e6, 1)
        if args is not None:
            event["args"] = args
        self._put(self._encode(event) + b",\n")

    def _put(self, line: bytes) -> None:
        self._buffer.append(line)
        self._n_buffered += len(line)

    def flush(self) -> None:
        """Puts what was noted so far into the file."""
        data, self._buffer, self._n_buffered = b"".join(self._buffer), [], 0
        self._flushed_s = time.perf_counter()
        if not self.is_open or not data:
            return
        try:
            if self._n_bytes + len(data) > MAX_BYTES:
                raise OSError(0, f"it has reached {MAX_BYTES >> 20} MB")
            if os.write(self._file, data) < len(data):
                os.ftruncate(self._file, self._n_bytes)
                raise OSError(0, "the disk is full")
            self._n_bytes += len(data)
        except OSError as error:
            log.warning("--trace ends here: %s", error.strerror)
            self.is_open = False
            os.close(self._file)
