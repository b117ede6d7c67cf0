"""`deltic bench serve`: what a client sees of an OpenAI endpoint, by requests in flight or by arrival rate.

Each point is warmed up (with requests that are not counted) and then measured: time to first token, gaps
between tokens, whole time, tokens a second of one request and of all. Prints a table, writes JSON with every
request's raw row and a PNG, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from deltic.bench import load as loads
from deltic.bench.load import Prompts, Workload
from deltic.bench.provenance import code, machine, now
from deltic.bench.sweep import Work, measure_all, name_of, plot, points, report, run
from deltic.commands.endpoint import Endpoint, asked_model
from deltic.config import ConfigError
from deltic.json_types import JsonObject


def table(rows: list[JsonObject], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title, title_justify="left")
    spreads = {"TTFT ms": "\np50 / p95 / p99", "ITL ms per event": "\np50 / p95 / p99", "E2E s": "\np50 / p95 / p99"}
    rates = {"decode tok/s": "\nper request", "output tok/s": "\nall", "prompt tok/s": "\nall"}
    columns = {"": ""} | spreads | rates | {"requests": "\nerrors"}
    for name, what in columns.items():
        out.add_column(name + what, justify="right")

    def spread(values: dict[str, float | None], digits: int) -> str:
        return " / ".join("-" if v is None else f"{v:.{digits}f}" for v in values.values())

    for row in rows:
        decode = row["decode_tok_s"]
        out.add_row(
            name_of(row["mode"], row["value"]),
            spread(row["ttft_ms"], 0),
            spread(row["itl_ms"], 1),
            spread(row["e2e_s"], 2),
            "-" if decode is None else f"{decode:.1f}",
            f"{row['output_tok_s']:.1f}",
            f"{row['prompt_tok_s']:.1f}",
            f"{row['requests']} / {row['errors']}",
        )
    return out


async def sweep(endpoint: Endpoint, arguments: argparse.Namespace, console: Console) -> JsonObject:
    """Finds out what the server accepts, then measures every point. Raises EndpointError."""
    load = Workload(
        model=await asked_model(arguments, endpoint),
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        shared_prefix_tokens=arguments.shared_prefix_tokens,
        temperature=arguments.temperature,
        kind=arguments.stream_endpoint,
        seed=arguments.load_seed,
        images=arguments.images,
        image_size=arguments.image_size,
        same_images=arguments.same_images,
    )
    dialect = await loads.find_dialect(endpoint, load)
    if not dialect.ignore_eos:
        console.print("the server refuses ignore_eos: answers may be shorter than asked", style="yellow")
    prompts = Prompts(load)
    await prompts.calibrate(endpoint)
    status, version = await endpoint.json("GET", "/version")
    work = Work(
        send=lambda body, zero: loads.measure(endpoint, load, body, zero),
        body=lambda: dialect.body(load, prompts.text(), load.output_tokens, prompts.images()),
        warm_body=lambda: dialect.body(load, prompts.text(), min(16, load.output_tokens), prompts.images()),
        summary=loads.summary,
        raw=loads.raw,
        seed=load.seed,
    )
    rows = await measure_all(work, arguments, console)
    return {
        "load": asdict(load),
        "dialect": asdict(dialect),
        "warmup": arguments.warmup,
        "server": version if status == 200 else None,
        "rows": rows,
    }


def bench(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command. Exit status 1 when the server failed or a request did."""
    points(arguments)  # refuses malformed lists before anything starts
    if min(arguments.prompt_tokens, arguments.output_tokens) < 1:
        raise ConfigError("--prompt-tokens and --output-tokens must be at least 1")
    if not 0 <= arguments.shared_prefix_tokens < arguments.prompt_tokens:
        raise ConfigError("--shared-prefix-tokens must be less than --prompt-tokens")
    if arguments.images:
        if arguments.stream_endpoint != "chat":
            raise ConfigError("--images needs --stream-endpoint chat: completions have no pictures")
        try:
            loads.sides_of(arguments.image_size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    result = run(arguments, server_arguments, sweep)
    if result is None:
        return 1
    label = arguments.label or result["load"]["model"]
    head = {"bench": "serve", "label": label, "date": now().isoformat(), "machine": machine(), "client": code()}
    result = head | {"itl": loads.ITL} | result
    load = result["load"]
    title = f"{label}: {load['prompt_tokens']} prompt + {load['output_tokens']} output tokens, {load['kind']}"
    if load["images"]:
        same = ", the same ones in all" if load["same_images"] else ""
        title += f", {load['images']} pictures of {load['image_size']}{same}"
    draw = plot if arguments.plot else None
    report(result, table(result["rows"], title), arguments.out, draw, note=loads.ITL)
    return 1 if any(row["errors"] for row in result["rows"]) else 0
