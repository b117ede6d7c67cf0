"""`deltic bench serve`: what a client sees of an OpenAI endpoint, by requests in flight or by arrival rate.

Each point is warmed up (with requests that are not counted) and then measured: time to first token, gaps
between tokens, whole time, tokens a second of one request and of all. Prints a table, writes JSON with every
request's raw row and a PNG, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deltic.bench import load as loads
from deltic.bench.load import Dialect, Load, Prompts, Sample
from deltic.bench.machine import code, machine, now, runs_directory
from deltic.config import ConfigError
from deltic.remote import Endpoint, EndpointError, LocalServer, ServerFailed, model_name


@dataclass(frozen=True)
class Point:
    """One row of the table: `value` requests in flight (closed) or a second (open)."""

    mode: str
    value: float
    n_requests: int | None
    duration_s: float | None

    @property
    def name(self) -> str:
        return f"N = {self.value:g}" if self.mode == "closed" else f"{self.value:g} req/s"


def numbers(text: str, what: str, kind: type[int] | type[float]) -> list[Any]:
    """A list of positive numbers from `1,2,4`. Raises ConfigError naming the flag."""
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise ConfigError(f"{what} {text!r}: expected positive numbers with commas between, such as 1,2,4")
    return values


def points(arguments: argparse.Namespace) -> list[Point]:
    """What to measure, from the flags. Raises ConfigError."""
    found = []
    if arguments.n is not None or arguments.poisson is None:
        for n in numbers(arguments.n or "1,2,4,8,16", "--n", int):
            count = None if arguments.duration else arguments.requests_per_n or max(8, 4 * n)
            found.append(Point("closed", n, count, arguments.duration))
    if arguments.poisson is not None:
        for rate in numbers(arguments.poisson, "--poisson", float):
            found.append(Point("open", rate, None, arguments.duration or 30.0))
    return found


def bodies(point: Point, load: Load, dialect: Dialect, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """The point's requests: so many, or until its time is over."""
    deadline = time.perf_counter() + (point.duration_s or 0.0)
    n_sent = 0
    while n_sent < point.n_requests if point.n_requests else time.perf_counter() < deadline:
        n_sent += 1
        yield dialect.body(load, prompts.text(), load.output_tokens)


async def measure_point(
    endpoint: Endpoint,
    load: Load,
    dialect: Dialect,
    prompts: Prompts,
    point: Point,
    warmup: int,
    progress: Progress,
) -> dict[str, Any]:
    """Warms up and measures one point; returns its row with the raw requests."""
    n_streams = int(point.value) if point.mode == "closed" else 1
    if warmup:
        warm = (
            dialect.body(load, prompts.text(), min(16, load.output_tokens)) for _ in range(warmup * n_streams)
        )
        await loads.closed_loop(endpoint, load, warm, n_streams, lambda sample: None)
    bar = progress.add_task(point.name, total=point.n_requests)
    samples: list[Sample] = []

    def done(sample: Sample) -> None:
        samples.append(sample)
        progress.advance(bar)

    begin, cpu = time.perf_counter(), time.process_time()
    work = bodies(point, load, dialect, prompts)
    if point.mode == "closed":
        await loads.closed_loop(endpoint, load, work, n_streams, done)
    else:
        await loads.open_loop(endpoint, load, work, point.value, done)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    progress.update(bar, total=len(samples))
    row = asdict(point) | loads.summary(samples, seconds) | {"client_cpu": round(cpu / seconds, 3)}
    return row | {"samples": [loads.raw(sample) for sample in samples]}


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title, title_justify="left")
    spreads = {
        "TTFT ms": "\np50 / p95 / p99",
        "ITL ms per event": "\np50 / p95 / p99",
        "E2E s": "\np50 / p95 / p99",
    }
    rates = {"decode tok/s": "\nper request", "output tok/s": "\nall", "prompt tok/s": "\nall"}
    columns = {"": ""} | spreads | rates | {"requests": "\nerrors"}
    for name, what in columns.items():
        out.add_column(name + what, justify="right")

    def spread(values: dict[str, float | None], digits: int) -> str:
        return " / ".join("-" if v is None else f"{v:.{digits}f}" for v in values.values())

    for row in rows:
        decode = row["decode_tok_s"]
        out.add_row(
            f"N = {row['value']:g}" if row["mode"] == "closed" else f"{row['value']:g} req/s",
            spread(row["ttft_ms"], 0), spread(row["itl_ms"], 1), spread(row["e2e_s"], 2),
            "-" if decode is None else f"{decode:.1f}", f"{row['output_tok_s']:.1f}",
            f"{row['prompt_tok_s']:.1f}", f"{row['requests']} / {row['errors']}",
        )  # fmt: skip
    return out


async def sweep(endpoint: Endpoint, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Finds out what the server accepts, then measures every point. Raises EndpointError."""
    name = getattr(arguments, "model", None) if arguments.url else None
    load = Load(
        model=name or await model_name(endpoint),
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        shared_prefix_tokens=arguments.shared_prefix_tokens,
        temperature=arguments.temperature,
        kind=arguments.stream_endpoint,
        seed=arguments.load_seed,
    )
    dialect = await loads.find_dialect(endpoint, load)
    if not dialect.ignore_eos:
        console.print("the server refuses ignore_eos: answers may be shorter than asked", style="yellow")
    prompts = Prompts(load)
    await prompts.calibrate(endpoint)
    status, version = await endpoint.json("GET", "/version")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console) as progress:
        for point in points(arguments):
            rows.append(
                await measure_point(endpoint, load, dialect, prompts, point, arguments.warmup, progress)
            )
    for row in rows:
        if row["client_cpu"] > 0.7:
            console.print(f"the load generator itself used {row['client_cpu']:.0%} of a core", style="yellow")
        for message in sorted({s["error"] for s in row["samples"] if s["error"]})[:3]:
            console.print(f"error at {row['value']:g}: {message}", style="red", markup=False)
    return {
        "load": asdict(load),
        "dialect": asdict(dialect),
        "warmup": arguments.warmup,
        "server": version if status == 200 else None,
        "rows": rows,
    }


async def _run(
    arguments: argparse.Namespace, server_arguments: list[str], console: Console
) -> dict[str, Any]:
    if arguments.url:
        endpoint = Endpoint(arguments.url, arguments.api_key)
        return await sweep(endpoint, arguments, console)
    server = LocalServer([*server_arguments, *shlex.split(arguments.serve_args)])
    try:
        with console.status("starting the server") as status:
            begin = time.perf_counter()
            endpoint = await server.wait_ready(
                lambda stage, done: status.update(f"server: {stage} {done:.0%}")
            )
            ready_s = round(time.perf_counter() - begin, 2)
        result = await sweep(endpoint, arguments, console)
        return result | {"ready_s": ready_s, "serve": [*server_arguments, *shlex.split(arguments.serve_args)]}
    finally:
        server.stop()


def bench(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command. Exit status 1 when the server failed or a request did."""
    points(arguments)  # refuses malformed lists before anything starts
    if min(arguments.prompt_tokens, arguments.output_tokens) < 1 or arguments.warmup < 0:
        raise ConfigError("--prompt-tokens and --output-tokens must be at least 1, --warmup at least 0")
    if not 0 <= arguments.shared_prefix_tokens < arguments.prompt_tokens:
        raise ConfigError("--shared-prefix-tokens must be less than --prompt-tokens")
    console = Console(stderr=True)
    try:
        result = asyncio.run(_run(arguments, server_arguments, console))
    except (EndpointError, ServerFailed) as error:
        print(f"deltic: {error}", file=sys.stderr)
        return 1
    label = arguments.label or result["load"]["model"]
    head = {
        "bench": "serve",
        "label": label,
        "date": now().isoformat(),
        "machine": machine(),
        "client": code(),
        "itl": loads.ITL,
    }
    result = head | result
    directory = runs_directory(arguments.out)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")
    path = directory / f"serve-{slug}-{now():%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    load = result["load"]
    title = f"{label}: {load['prompt_tokens']} prompt + {load['output_tokens']} output tokens, {load['kind']}"
    Console(width=None if sys.stdout.isatty() else 130).print(table(result["rows"], title))
    print(loads.ITL)
    picture = plot(path) if arguments.plot else None
    rows = [{name: value for name, value in row.items() if name != "samples"} for row in result["rows"]]
    print(json.dumps({"bench": "serve", "label": label, "file": str(path), "plot": picture, "rows": rows}))
    return 1 if any(row["errors"] for row in rows) else 0


def plot(path: Any) -> str | None:
    """Draws the result file beside itself; None, with a word of advice, without matplotlib."""
    try:
        from deltic.bench.plot import draw
    except ModuleNotFoundError as error:
        print(f"no plot: {error.name} is missing; pip install 'deltic[bench]'", file=sys.stderr)
        return None
    picture = path.with_suffix(".png")
    draw([path], picture)
    return str(picture)
