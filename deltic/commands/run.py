"""`deltic run IN.jsonl OUT.jsonl`: a file of requests to a file of answers, resumed where it stopped.

A line is what OpenAI's batch API takes, `{"custom_id": ..., "url": "/v1/chat/completions", "body": {...}}`,
or a bare body, whose route is known by its fields (`batch_lines.PATHS`). The requests go over HTTP to a
server (a child of ours without --url), or with --ray to servers on a cluster, so they mean exactly what they
mean online. A result line is `{"custom_id", "line", "response": {"status_code", "body"}, "error"}`; results
come in the order of completion.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import functools
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deltic.batch_lines import N_TRIES, PATHS, BatchLine, ForeignFile, parse, read_results, wait_s
from deltic.commands import endpoint as endpoints
from deltic.commands import settings
from deltic.config import MayPass
from deltic.json_types import JsonObject
from deltic.logs import counted

if TYPE_CHECKING:
    from deltic.ray.actors import Actors

MAX_UNAVAILABLE = 60
"""Times that a request may find no engine; the server waits between them as it was told to."""


class Stopped(MayPass):
    """The run cannot go on; what is written stays and the next run resumes."""


def is_result(line: JsonObject) -> bool:
    """Returns whether a line of an output file is one of `deltic run`."""
    return isinstance(line.get("line"), int)


def key_of(result: JsonObject) -> str | int:
    """The key of the job that a result line answers."""
    key: str | int = result["line"] if result.get("custom_id") is None else result["custom_id"]
    return key


def finished(out: BinaryIO) -> dict[str | int, bool]:
    """Keys of the results that `out` holds, and whether each is an error; cuts off a last line that was not
    written to its end.
    """
    try:
        return {key_of(result): result.get("error") is not None for result in read_results(out, is_result)}
    except ForeignFile as error:
        raise Stopped(f"line {error.line} of the output is no result of deltic run. Give another file.") from None


def without_errors(path: Path, out: BinaryIO) -> BinaryIO:
    """The output file again, less its lines with an error. `out` is closed. Raises Stopped.

    A file of its own takes the place of the old one when it is whole, so that nothing is lost if this process
    ends meanwhile; who may read it, and a link to it, stay as they were.
    """
    finished(out)
    path = path.resolve()
    new = open_output(path.with_name(path.name + ".retry"))
    new.truncate(0)
    os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(out.fileno()).st_mode))
    out.seek(0)
    for line in out:
        if json.loads(line).get("error") is None:
            new.write(line)
    new.flush()
    os.fsync(new.fileno())
    os.replace(new.name, path)
    out.close()
    return new


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


def jobs(source: BinaryIO, done: Collection[str | int]) -> Iterator[BatchLine]:
    """The lines still to do, without empty ones; a custom_id that comes again is an error of that line."""
    seen: set[str] = set()
    for line, text in enumerate(source, 1):
        if not text.strip():
            continue
        job = parse(text, line)
        if job.custom_id is not None and job.custom_id in seen:
            # By line from here on, so that the first line's result is not taken for this one's.
            job = BatchLine(line, None, error=f"line {line}: custom_id {job.custom_id!r} was used before")
        elif job.custom_id is not None:
            seen.add(job.custom_id)
        if job.key not in done:
            yield job


def with_pictures(asked: JsonObject, path: str, urls: Sequence[str], videos: Sequence[str]) -> JsonObject:
    """The body with pictures and videos before the text of the user's last message. Raises ValueError."""
    field = {"/v1/decisions": "input", "/v1/embeddings": ""}.get(path, PATHS.get(path, ""))
    flag = "--image" if urls else "--video"
    if videos and field != "messages":
        raise ValueError("--video: videos are for lines of /v1/chat/completions")
    value = asked.get(field)
    if field == "input" and isinstance(value, str):
        value = [{"role": "user", "content": value}]
    messages = list(value) if isinstance(value, list) and field != "prompt" else []
    at = max((i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "user"), default=-1)
    if at < 0:
        raise ValueError(f"{flag}: there is no message of a user")
    is_chat = field == "messages"
    content = messages[at].get("content")
    if not isinstance(content, list):
        content = [{"type": "text" if is_chat else "input_text", "text": content}]
    parts = [
        {"type": "image_url", "image_url": {"url": url}} if is_chat else {"type": "input_image", "image_url": url}
        for url in urls
    ]
    parts += [{"type": "video_url", "video_url": {"url": url}} for url in videos]
    messages[at] = messages[at] | {"content": [*parts, *content]}
    return asked | {field: messages}


async def send(
    endpoint: endpoints.Endpoint | Actors,
    model: str,
    job: BatchLine,
    *,
    renamed: bool = False,
    pictures: Sequence[str] = (),
    videos: Sequence[str] = (),
) -> JsonObject:
    """The job's result line. Waits as long as the server is full. Raises Stopped when it is gone.

    model: of lines that name none; renamed: of all lines. pictures, videos: URLs of those that are added.
    """
    result: JsonObject = {"custom_id": job.custom_id, "line": job.line, "response": None, "error": None}
    if job.body is None:
        return result | {"error": {"code": "bad_line", "message": job.error}}
    try:
        asked = json.loads(job.body)
        if pictures or videos:
            asked = with_pictures(asked, job.path, pictures, videos)
    except (ValueError, RecursionError) as error:  # a number or nesting beyond Python's own limits
        return result | {"error": {"code": "bad_line", "message": f"line {job.line}: {error}"}}
    asked = asked | {"model": model} if renamed else {"model": model} | asked
    n_tries = n_unavailable = 0
    while True:
        n_tries += 1
        try:
            reply = await endpoint.open("POST", job.path, asked)
            data = await reply.read()
        except endpoints.EndpointError as error:
            if n_tries >= N_TRIES:
                raise Stopped(f"after {n_tries} tries: {error}") from None
            await asyncio.sleep(0.5 * 2**n_tries)
            continue
        if reply.status in (401, 403):
            raise Stopped(f"{endpoint.url} refused the key (HTTP {reply.status}). Give it with --api-key.")
        wait = wait_s(reply.status, reply.headers, n_tries)
        if wait is None:
            break
        n_tries -= reply.status == 429
        n_unavailable += reply.status == 503
        if n_unavailable > MAX_UNAVAILABLE:
            raise Stopped(f"{endpoint.url} stays unavailable (HTTP 503)")
        await asyncio.sleep(wait)
    try:
        body = json.loads(data)
    except ValueError:
        body = {"error": {"message": "the answer is not JSON"}}
    result["response"] = {"status_code": reply.status, "body": body}
    if reply.status != 200:
        result["error"] = {"code": f"http_{reply.status}", "message": endpoints.error_message(body, reply.status)}
    return result


@dataclass
class Tally:
    """The counts of a run."""

    n_done: int = 0
    n_errors: int = 0
    n_old_errors: int = 0
    """Number of errors that earlier runs left in the output."""
    n_tokens: int = 0

    def add(self, result: JsonObject) -> None:
        """Counts one result line."""
        self.n_done += 1
        self.n_errors += result["error"] is not None
        body = (result["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        usage = usage if isinstance(usage, dict) else {}
        self.n_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


async def work(
    ask: Callable[[BatchLine], Awaitable[JsonObject]],
    todo: Iterator[BatchLine],
    out: BinaryIO,
    n_in_flight: int,
    progress: Progress,
    tally: Tally,
) -> None:
    """Has all jobs answered by `ask`, `n_in_flight` at once, and writes each result as it comes.

    Raises Stopped.
    """
    bar = progress.tasks[0].id

    async def client() -> None:
        for job in todo:
            result = await ask(job)
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


@contextlib.asynccontextmanager
async def asked_server(
    arguments: argparse.Namespace, server_arguments: list[str]
) -> AsyncIterator[tuple[endpoints.Endpoint | Actors, str]]:
    """Yields who answers, and the model of lines that name none. Raises ServerFailed, EndpointError,
    ConfigError.
    """
    if arguments.ray is None:
        with endpoints.own_server(arguments, server_arguments) as server:
            endpoint = await endpoints.reached(arguments, server)
            yield endpoint, await endpoints.asked_model(arguments, endpoint)
        return
    from deltic.ray.actors import cluster

    with Console(stderr=True).status("starting servers on the cluster") as status:
        async with cluster(arguments.ray, settings.engine(arguments), arguments.replicas) as asked:
            status.stop()
            yield asked


async def _run(arguments: argparse.Namespace, server_arguments: list[str], source: BinaryIO, out: BinaryIO) -> Tally:
    console = Console(stderr=True)
    pictures, videos = ([*map(endpoints.picture_url, names)] for names in (arguments.image, arguments.video))
    done = finished(out)
    n_lines = sum(1 for line in source if line.strip())
    source.seek(0)
    tally = Tally(n_old_errors=sum(done.values()))
    if done:
        console.print(f"resuming: {len(done)} of {n_lines} lines are done", markup=False)
    if all(False for _ in jobs(source, done)):
        return tally
    source.seek(0)
    async with asked_server(arguments, server_arguments) as (endpoint, model):
        is_renamed = getattr(arguments, "model", None) is not None
        ask = functools.partial(send, endpoint, model, renamed=is_renamed, pictures=pictures, videos=videos)
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
            progress.add_task("", total=n_lines, completed=len(done), note="")
            await work(ask, jobs(source, done), out, arguments.in_flight, progress, tally)
            return tally


def run(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command. 0: every line has its answer; 1: some have an error, or it stopped early: run again to
    resume. Raises Stopped, EndpointError, ServerFailed.
    """
    source, target = Path(arguments.input), Path(arguments.output)
    try:
        if arguments.in_flight < 1:
            raise Stopped("--in-flight must be at least 1")
        if arguments.ray is not None and arguments.url:
            raise Stopped("--ray starts servers on a cluster, and --url names one that runs. Give one of both.")
        if arguments.replicas is not None and (arguments.ray is None or arguments.replicas < 1):
            raise Stopped("--replicas: how many servers --ray starts, at least 1")
        if arguments.ray is not None and find_spec("ray") is None:
            raise Stopped("--ray needs Ray: pip install 'deltic[ray]'")
        if not source.is_file():
            raise Stopped(f"{source} is not a file")
        if target.exists() and os.path.samefile(source, target):
            raise Stopped("input and output are the same file")
        out = open_output(target)
        if arguments.retry_errors:
            out = without_errors(target, out)
        with out, source.open("rb") as lines:
            tally = asyncio.run(_run(arguments, server_arguments, lines, out))
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
    n_errors = tally.n_errors + tally.n_old_errors
    text = f"{tally.n_done} lines answered, {tally.n_errors} of them with an error: {target}"
    if n_errors:
        text += f"; it holds {counted(n_errors, 'error')}, which --retry-errors tries again"
    print(text, file=sys.stderr)
    return 1 if n_errors else 0
