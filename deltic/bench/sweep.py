"""A sweep: points of requests in flight, or of requests a second, warmed up and measured one after another;
and its report, in a file, a picture, a table for people and one line of JSON for programs.

What is sent, and what is noted of the answers, is the caller's (`Work`): serve.py has it for text, speech.py
for speech.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deltic.bench.provenance import now, runs_directory
from deltic.commands.endpoint import Endpoint, EndpointError, ServerFailed, own_server, reached
from deltic.config import ConfigError
from deltic.json_types import JsonObject

Sample = TypeVar("Sample")
Number = TypeVar("Number", int, float)
Body = JsonObject
Send = Callable[[Body, float], Awaitable[Sample]]
Sweep = Callable[[Endpoint, argparse.Namespace, Console], Awaitable[JsonObject]]
"""Measures an endpoint, and returns what is to be kept."""


def name_of(mode: str, value: float) -> str:
    """Returns what a point is called: see Point."""
    return f"N = {value:g}" if mode == "closed" else f"{value:g} req/s"


@dataclass(frozen=True)
class Point:
    """Point, a row of the table: `value` requests in flight (closed) or a second (open)."""

    mode: str
    value: float
    n_requests: int | None
    duration_s: float | None


@dataclass(frozen=True)
class Work(Generic[Sample]):
    """Input of a sweep: what it sends, and what it makes of the answers."""

    send: Send[Sample]
    """Sends a body; is given the time at which the measurement began. A failure is a Sample, too."""
    body: Callable[[], Body]
    """The next request."""
    warm_body: Callable[[], Body]
    """Makes a request that is not counted."""
    summary: Callable[[Sequence[Sample], float], JsonObject]
    """The row of a point, from its samples and seconds; has `errors`."""
    raw: Callable[[Sample], JsonObject]
    """A request's row in the result file; has `error`, None when there was none."""
    seed: int = 0
    """Seed of the arrivals of an open loop."""


def numbers(text: str, what: str, kind: Callable[[str], Number]) -> list[Number]:
    """A list of positive numbers from `1,2,4`. Raises ConfigError naming the flag."""
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise ConfigError(f"{what} {text!r}: expected positive numbers with commas between, such as 1,2,4")
    return values


def points(arguments: argparse.Namespace) -> list[Point]:
    """Lists what to measure, from the flags. Raises ConfigError."""
    if arguments.warmup < 0:
        raise ConfigError("--warmup must be at least 0")
    chosen = []
    if arguments.n is not None or arguments.poisson is None:
        for n in numbers(arguments.n or "1,2,4,8,16", "--n", int):
            count = None if arguments.duration else arguments.requests_per_n or max(8, 4 * n)
            chosen.append(Point("closed", n, count, arguments.duration))
    if arguments.poisson is not None:
        for rate in numbers(arguments.poisson, "--poisson", float):
            chosen.append(Point("open", rate, None, arguments.duration or 30.0))
    return chosen


def bodies(point: Point, make: Callable[[], Body]) -> Iterator[Body]:
    """The point's requests: so many, or until its time is over."""
    deadline = time.perf_counter() + (point.duration_s or 0.0)
    n_sent = 0
    while n_sent < point.n_requests if point.n_requests else time.perf_counter() < deadline:
        n_sent += 1
        yield make()


async def closed_loop(send: Send[Sample], work: Iterator[Body], n_streams: int, done: Callable[[Sample], None]) -> None:
    """`n_streams` clients, each sending its next request when the last is answered, until `work` ends."""
    zero = time.perf_counter()

    async def client() -> None:
        for body in work:
            done(await send(body, zero))

    async with asyncio.TaskGroup() as group:
        for _ in range(n_streams):
            group.create_task(client())


async def open_loop(
    send: Send[Sample], work: Iterator[Body], rate: float, seed: int, done: Callable[[Sample], None]
) -> None:
    """Requests at random times, `rate` a second on average, whether or not earlier ones are answered."""
    zero = time.perf_counter()
    gaps = random.Random(seed + 1)

    async def one(body: Body) -> None:
        done(await send(body, zero))

    due = zero
    async with asyncio.TaskGroup() as group:
        for body in work:
            group.create_task(one(body))
            due += gaps.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def measure_point(work: Work[Sample], point: Point, warmup: int, progress: Progress) -> JsonObject:
    """Warms up and measures one point; returns its row with the raw requests."""
    n_streams = int(point.value) if point.mode == "closed" else 1
    warm = (work.warm_body() for _ in range(warmup * n_streams))
    await closed_loop(work.send, warm, n_streams, lambda sample: None)
    bar = progress.add_task(name_of(point.mode, point.value), total=point.n_requests)
    samples: list[Sample] = []

    def done(sample: Sample) -> None:
        samples.append(sample)
        progress.advance(bar)

    begin, cpu = time.perf_counter(), time.process_time()
    sent = bodies(point, work.body)
    if point.mode == "closed":
        await closed_loop(work.send, sent, n_streams, done)
    else:
        await open_loop(work.send, sent, point.value, work.seed, done)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    progress.update(bar, total=len(samples))
    row = asdict(point) | work.summary(samples, seconds) | {"client_cpu": round(cpu / seconds, 3)}
    return row | {"samples": [work.raw(sample) for sample in samples]}


async def measure_all(work: Work[Sample], arguments: argparse.Namespace, console: Console) -> list[JsonObject]:
    """The rows of all points; says what went wrong in them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        rows = [await measure_point(work, point, arguments.warmup, progress) for point in points(arguments)]
    for row in rows:
        if row["client_cpu"] > 0.7:
            console.print(f"the load generator itself used {row['client_cpu']:.0%} of a core", style="yellow")
        for message in sorted({s["error"] for s in row["samples"] if s["error"]})[:3]:
            console.print(f"error at {row['value']:g}: {message}", style="red", markup=False)
    return rows


async def _measure(arguments: argparse.Namespace, server_arguments: list[str], sweep: Sweep) -> JsonObject:
    console = Console(stderr=True)
    serve = [*server_arguments, *shlex.split(arguments.serve_args)]
    with own_server(arguments, serve) as server:
        begin = time.perf_counter()
        endpoint = await reached(arguments, server)
        about_server = {} if server is None else {"ready_s": round(time.perf_counter() - begin, 2), "serve": serve}
        return await sweep(endpoint, arguments, console) | about_server


def run(arguments: argparse.Namespace, server_arguments: list[str], sweep: Sweep) -> JsonObject | None:
    """Returns what `sweep` found at --url, or at a server started for it; None, with a line on stderr, when
    that failed.
    """
    try:
        return asyncio.run(_measure(arguments, server_arguments, sweep))
    except (EndpointError, ServerFailed) as error:
        print(f"deltic: {error}", file=sys.stderr)
        return None


def plot(path: Path, picture: Path) -> None:
    """The `draw` of a sweep's result."""
    from deltic.bench.plot import draw

    draw([path], picture)


def report(
    result: JsonObject,
    table: Table,
    out: str | None,
    draw: Callable[[Path, Path], None] | None,
    raw: str = "samples",
    note: str | None = None,
) -> None:
    """result: has the bench's name, a label and rows; all of it goes into the file, under
    runs_directory(out). draw: writes a PNG (second path) of a file; may find matplotlib missing. raw: the
    field of a row that the last line leaves out. note: stands below the table.
    """
    name, label = result["bench"], result["label"]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")
    path = runs_directory(out) / f"{name}-{slug}-{now():%H%M%S}.json"
    path.write_text(json.dumps(result) + "\n")
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    if note:
        print(note)
    picture = None
    if draw:
        try:
            draw(path, path.with_suffix(".png"))
            picture = str(path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"no plot: {error.name} is missing; pip install 'deltic[bench]'", file=sys.stderr)
    rows = [{field: value for field, value in row.items() if field != raw} for row in result["rows"]]
    print(json.dumps({"bench": name, "label": label, "file": str(path), "plot": picture, "rows": rows}))
