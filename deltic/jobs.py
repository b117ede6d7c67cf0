"""`deltic run IN.jsonl OUT.jsonl`: a file of requests to a file of answers, resumed where it stopped.

A line is what OpenAI's batch API takes, `{"custom_id": ..., "url": "/v1/chat/completions", "body": {...}}`,
or a bare body with `messages` or `prompt`. The requests go over HTTP to a server (a child of ours without
--url), so they mean exactly what they mean online. A result line is `{"custom_id", "line", "response":
{"status_code", "body"}, "error"}`; results come in the order of completion.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from deltic.remote import Endpoint, EndpointError, LocalServer, ServerFailed, error_message, model_name

PATHS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
"""Where a line may go, and the field its body must have."""

N_TRIES = 5
"""Tries of a request whose answer says the server is at fault (5xx, lost connection)."""

LINE_START = b'{"custom_id":'
"""How every result line begins: what tells a truncated one from a file that is not ours."""


class BadLine(ValueError):
    """A line that cannot be sent; the message says why."""


class Stopped(Exception):
    """The run cannot go on; what is written stays and the next run resumes."""


@dataclass(frozen=True)
class Job:
    """One input line. `line` counts from 1."""

    line: int
    custom_id: str | None
    path: str = ""
    body: dict[str, Any] | None = None
    error: str | None = None

    @property
    def key(self) -> str | int:
        """What a result is recognised by when a run resumes."""
        return self.line if self.custom_id is None else self.custom_id


def parse(text: bytes, line: int) -> Job:
    """An input line; one that cannot be sent gets `error` instead of `body`."""
    custom_id: str | None = None
    try:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadLine(f"not JSON: {error}") from None
        if not isinstance(given, dict):
            raise BadLine("expected a JSON object")
        body, path = given, None
        if "body" in given:
            custom_id = given.get("custom_id")
            if custom_id is not None and not isinstance(custom_id, str):
                custom_id, kind = None, type(custom_id).__name__
                raise BadLine(f"custom_id: expected a string, found {kind}")
            body, path = given["body"], given.get("url")
            if given.get("method", "POST") != "POST":
                raise BadLine(f"method {given['method']!r}: only POST is supported")
        if not isinstance(body, dict):
            raise BadLine("body: expected a JSON object")
        if path is None:
            path = next((path for path, field in PATHS.items() if field in body), None)
        if path not in PATHS:
            known = " or ".join(PATHS)
            raise BadLine(
                "the body has neither messages nor prompt" if path is None else f"url {path!r}: use {known}"
            )
        if body.get("stream"):
            raise BadLine("stream: a line is answered whole; leave it out")
        return Job(line, custom_id, path, body)
    except BadLine as error:
        return Job(line, custom_id, error=f"line {line}: {error}")


def finished(out: BinaryIO) -> set[str | int]:
    """Keys of the results that `out` holds; cuts off a last line that was not written to its end."""
    keys: set[str | int] = set()
    end = 0
    out.seek(0)
    for line in out:
        try:
            result = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            result = None
        if not isinstance(result, dict) or not isinstance(result.get("line"), int):
            if out.read(1) or line[: len(LINE_START)] != LINE_START[: len(line)]:
                number = len(keys) + 1
                raise Stopped(
                    f"line {number} of the output is no result of deltic run; give another output file"
                )
            break
        end += len(line)
        keys.add(result["line"] if result.get("custom_id") is None else result["custom_id"])
    out.seek(end)
    out.truncate()
    return keys


def open_output(path: Path) -> BinaryIO:
    """The output file, for this process alone. Raises Stopped."""
    try:
        out = path.open("r+b") if path.exists() else path.open("w+b")
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Stopped(f"another run is writing {path}") from None
    except OSError as error:
        raise Stopped(f"cannot write {path}: {error.strerror}") from None
    return out


def jobs(source: BinaryIO, done: set[str | int]) -> Iterator[Job]:
    """The lines still to do, without empty ones; a custom_id that comes again is an error of that line."""
    seen: set[str] = set()
    for line, text in enumerate(source, 1):
        if not text.strip():
            continue
        job = parse(text, line)
        if job.custom_id is not None and job.custom_id in seen:
            # By line from here on, so that the first line's result is not taken for this one's.
            job = Job(line, None, error=f"line {line}: custom_id {job.custom_id!r} was used before")
        elif job.custom_id is not None:
            seen.add(job.custom_id)
        if job.key not in done:
            yield job


async def send(endpoint: Endpoint, model: str, job: Job) -> dict[str, Any]:
    """The job's result line. Waits as long as the server is full. Raises Stopped when it is gone."""
    result: dict[str, Any] = {"custom_id": job.custom_id, "line": job.line, "response": None, "error": None}
    if job.body is None:
        return result | {"error": {"code": "bad_line", "message": job.error}}
    n_tries = 0
    while True:
        n_tries += 1
        try:
            reply = await endpoint.open("POST", job.path, {"model": model, **job.body})
            data = await reply.read()
        except EndpointError as error:
            if n_tries >= N_TRIES:
                raise Stopped(f"{error}; {n_tries} tries") from None
            await asyncio.sleep(0.5 * 2**n_tries)
            continue
        if reply.status == 429:
            n_tries -= 1
            await asyncio.sleep(_retry_after(reply.headers))
        elif reply.status == 503 or (reply.status >= 500 and n_tries < N_TRIES):
            if n_tries > 60:
                raise Stopped(f"{endpoint.url} stays unavailable (HTTP 503)")
            await asyncio.sleep(_retry_after(reply.headers))
        elif reply.status in (401, 403):
            raise Stopped(f"{endpoint.url} refused the key (HTTP {reply.status}); give it with --api-key")
        else:
            break
    try:
        body = json.loads(data)
    except ValueError:
        body = {"error": {"message": "the answer is not JSON"}}
    result["response"] = {"status_code": reply.status, "body": body}
    if reply.status != 200:
        result["error"] = {"code": f"http_{reply.status}", "message": error_message(body, reply.status)}
    return result


def _retry_after(headers: dict[str, str]) -> float:
    """Seconds to wait, from the server's wish; between 0.1 and 30."""
    try:
        return min(30.0, max(0.1, float(headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0


@dataclass
class Tally:
    """What a run did."""

    n_done: int = 0
    n_errors: int = 0
    n_tokens: int = 0

    def add(self, result: dict[str, Any]) -> None:
        """Counts one result line."""
        self.n_done += 1
        self.n_errors += result["error"] is not None
        body = (result["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        self.n_tokens += (usage or {}).get("completion_tokens") or 0


async def work(
    endpoint: Endpoint, model: str, todo: Iterator[Job], out: BinaryIO, n_in_flight: int, progress: Progress
) -> Tally:
    """Sends all jobs, `n_in_flight` at once, and writes each result as it comes. Raises Stopped."""
    tally = Tally()
    bar = progress.tasks[0].id

    async def client() -> None:
        for job in todo:
            result = await send(endpoint, model, job)
            out.write(json.dumps(result, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            out.flush()
            tally.add(result)
            speed = tally.n_tokens / max(progress.tasks[0].elapsed or 0.0, 1e-3)
            progress.update(bar, advance=1, note=f"{speed:.0f} tok/s, {tally.n_errors} errors")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(n_in_flight):
                group.create_task(client())
    except* (Stopped, OSError) as failures:
        raise failures.exceptions[0] from None
    return tally


async def _run(
    arguments: argparse.Namespace, server_arguments: list[str], source: BinaryIO, out: BinaryIO
) -> Tally:
    console = Console(stderr=True)
    done = finished(out)
    n_lines = sum(1 for line in source if line.strip())
    source.seek(0)
    if done:
        console.print(f"resuming: {len(done)} of {n_lines} lines are done", markup=False)
    if all(False for _ in jobs(source, done)):
        return Tally()
    source.seek(0)
    server = None if arguments.url else LocalServer(server_arguments)
    try:
        if server is None:
            endpoint = Endpoint(arguments.url, arguments.api_key)
        else:
            with console.status("starting the server") as status:
                endpoint = await server.wait_ready(lambda stage, part: status.update(f"{stage} {part:.0%}"))
        name = getattr(arguments, "model", None) if arguments.url else None
        model = name or await model_name(endpoint)
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as progress:
            progress.add_task("", total=n_lines, completed=len(done), note="")
            return await work(endpoint, model, jobs(source, done), out, arguments.in_flight, progress)
    finally:
        if server is not None:
            server.stop()


def run(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command. 0: every line has its result or error; 1: stopped early, run again to resume."""
    source, target = Path(arguments.input), Path(arguments.output)
    try:
        if arguments.in_flight < 1:
            raise Stopped("--in-flight must be at least 1")
        if not source.is_file():
            raise Stopped(f"{source} is not a file")
        if target.exists() and os.path.samefile(source, target):
            raise Stopped("input and output are the same file")
        with open_output(target) as out, source.open("rb") as lines:
            tally = asyncio.run(_run(arguments, server_arguments, lines, out))
    except (Stopped, EndpointError, ServerFailed) as error:
        print(f"deltic: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # of the disk, and again when what is left of a line is written at the close
        print(
            f"deltic: cannot write {error.filename or target}: {error.strerror}; "
            "when it can be, run the same command again to go on",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(f"deltic: stopped; run the same command again to go on with {target}", file=sys.stderr)
        return 130
    print(f"{tally.n_done} lines answered, {tally.n_errors} of them with an error: {target}", file=sys.stderr)
    return 1 if tally.n_errors else 0
