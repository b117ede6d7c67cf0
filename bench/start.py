"""Seconds from the command to `/ready`, and which stage they go to:
`python -m bench.start --dummy qwen3.5-0.8b`.

Each start is a fresh server process with its engine; files are warm in the system's cache after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.flags import add_engine, add_model
from deltic.__main__ import finished
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.commands.endpoint import LocalServer, ServerFailed
from deltic.commands.settings import own_arguments
from deltic.config import BUILT_IN, ConfigError

STAGES = ("python", "import", "plan", "weights", "memory", "compile", "record", "cache", "fit", "grammars")
"""What the engine reports: interpreter, imports, sizing, reading weights, allocating and warming up, on a GPU
compiling and recording instead, opening --cache-dir, timing steps for --max-itl-ms.
"""


async def start_once(serve: list[str]) -> dict[str, float]:
    """Seconds by stage of one start; "ready" is the whole. Raises ServerFailed."""
    begun = time.perf_counter()
    server = LocalServer(serve)
    try:
        endpoint = await server.wait_ready()
        seconds = time.perf_counter() - begun
        _, body = await endpoint.json("GET", "/ready")
        return {**{stage: float(body["start_s"].get(stage, 0.0)) for stage in STAGES}, "ready": seconds}
    finally:
        server.stop()


def bench(arguments: argparse.Namespace, serve: list[str]) -> int:
    """Prints a table and a last line of JSON, and writes a JSON file.

    Exit status 1 when the server did not start.
    """
    if arguments.starts < 1:
        raise ConfigError(f"--starts {arguments.starts}: must be at least 1")
    console = Console(stderr=True)
    starts = []
    try:
        with console.status("starting") as status:
            for i in range(arguments.starts):
                status.update(f"start {i + 1} of {arguments.starts}")
                starts.append(asyncio.run(start_once(serve)))
    except ServerFailed as error:
        console.print(f"[red]{error}[/]")
        return 1
    medians = {name: round(statistics.median(start[name] for start in starts), 3) for name in (*STAGES, "ready")}
    table = Table("stage", "s, median", "least", "most", title=f"{arguments.starts} starts", title_justify="left")
    for name in (*STAGES, "ready"):
        times = [start[name] for start in starts]
        table.add_row(name, f"{medians[name]:.2f}", f"{min(times):.2f}", f"{max(times):.2f}")
    Console().print(table)
    label = getattr(arguments, "dummy", None) or getattr(arguments, "model", None) or BUILT_IN
    path = runs_directory(arguments.out) / f"start-{str(label).replace('/', '-')}-{now():%H%M%S}.json"
    result = {
        "bench": "start",
        "date": now().isoformat(timespec="seconds"),
        "label": label,
        "arguments": serve,
        "machine": machine(),
        "code": code(),
        "starts": starts,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"bench": "start", "file": str(path), "median_s": medians}))
    return 0


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m bench.start", description=__doc__)
    add_model(parser)
    parser.add_argument("--starts", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    add_engine(parser)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    arguments = parsed(given)
    return finished(lambda: bench(arguments, own_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
