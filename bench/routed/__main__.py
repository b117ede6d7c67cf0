"""Replicas of one model behind a router.

    python -m bench.routed trace --router sglang       reuse of an agent trace, beside that of one big server
    python -m bench.routed overhead --router nginx     tokens/s and TTFT, beside the replicas asked directly
    python -m bench.routed soak --router haproxy       traffic while replicas are killed and restarted

The replicas share this machine's cores, pages and checkpoints; the one server has all of them. Each command
prints a table and writes a JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.agent_trace import Trace
from bench.routed import trace as agent
from bench.routed.fleet import ROUTERS, Fleet, Visitors, running
from bench.routed.soak import RoutedSoak
from bench.soak.traffic import Traffic
from deltic.bench.load import Prompts, Sample, Workload, find_dialect, measure, summary
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.bench.sweep import closed_loop
from deltic.commands.endpoint import Endpoint
from deltic.config import EngineConfig
from deltic.machine import n_usable_cpus
from deltic.models.checkpoint import text_directory
from deltic.text import Tokenizer

Row = dict[str, Any]

SOAK_MODEL_LEN, SOAK_SEQS, SOAK_QUEUE = 1024, 8, 64


def model_flags(arguments: argparse.Namespace) -> list[str]:
    flags = ["--dummy", arguments.dummy] if arguments.dummy else []
    return [
        *flags,
        *(["--quantize", arguments.quantize] if arguments.quantize else []),
        *shlex.split(arguments.serve_args),
    ]


def replica_flags(arguments: argparse.Namespace, n_shares: int) -> list[str]:
    """Of a server with 1 / n_shares of the threads, pages and checkpoints."""
    threads = max(1, n_usable_cpus() // n_shares)
    pools = [
        "--n-pages",
        str(arguments.n_pages // n_shares),
        "--n-checkpoints",
        str(arguments.n_checkpoints // n_shares),
    ]
    return [*model_flags(arguments), "--threads", str(threads), "--max-model-len", str(arguments.max_tokens), *pools]


async def trace(arguments: argparse.Namespace, console: Console) -> Row:
    """The same sessions through the router and on one server, in turns."""
    config = EngineConfig(dummy=arguments.dummy) if arguments.dummy else EngineConfig()
    tokenizer = Tokenizer.load(text_directory(config))
    runs: list[Row] = []
    for round_ in range(arguments.rounds):
        session = Trace(lambda text: len(tokenizer.encode(text)), round_, arguments.turns, arguments.max_tokens)
        for router, n in ((None, 1), (arguments.router, arguments.replicas)):
            fleet = Fleet.of(router, n, replica_flags(arguments, n))
            async with running(fleet):
                endpoint = Endpoint(fleet.url, fleet.api_key)
                name = await fleet.model()
                with Progress(console=console) as progress:
                    bar = progress.add_task(router or "one server", total=arguments.sessions * arguments.turns)
                    done = functools.partial(progress.advance, bar)
                    begin = time.perf_counter()
                    rows = await agent.replay(endpoint, name, session, arguments.sessions, arguments.parallel, done)
                seconds = time.perf_counter() - begin
                endpoint.close()
                shares = [(await replica.gauges())["prefix_cache_lookups_total"] for replica in fleet.replicas]
            run = {"router": router, "replicas": n, "round": round_, "requests_of_each": shares, "rows": rows}
            runs.append(run | agent.summarise(rows, seconds))
    table = Table(
        title=f"agent trace, {arguments.replicas} replicas behind {arguments.router}, and one server",
        title_justify="left",
    )
    for head in ("", "requests", "prompt tokens", "reused", "of one server's", "TTFT p50, p95 (ms)", "s"):
        table.add_column(head, justify="right")
    for one, routed in zip(runs[::2], runs[1::2], strict=True):
        routed["of_one"] = routed["reuse"] / one["reuse"]
        for run in (one, routed):
            table.add_row(
                run["router"] or "one server",
                " + ".join(f"{n:.0f}" for n in run["requests_of_each"] if n) or str(run["n_requests"]),
                f"{run['prompt_tokens']:,}",
                f"{run['reuse']:.2%}",
                f"{run['of_one']:.2%}" if "of_one" in run else "",
                f"{1e3 * run['ttft_p50_s']:,.0f}, {1e3 * run['ttft_p95_s']:,.0f}",
                f"{run['wall_s']:.0f}",
            )
    console.print(table)
    return {"runs": runs}


async def overhead(arguments: argparse.Namespace, console: Console) -> Row:
    """Rounds through the router and to the replicas directly, on the same servers, in turns."""
    fleet = Fleet.of(arguments.router, arguments.replicas, replica_flags(arguments, arguments.replicas))
    rows: list[Row] = []
    async with running(fleet):
        direct = [Endpoint(replica.url, fleet.api_key) for replica in fleet.replicas]
        routed = Visitors(fleet.url, fleet.api_key)
        load = Workload(await fleet.model(), arguments.prompt, arguments.output)
        dialect, prompts = await find_dialect(direct[0], load), Prompts(load)
        await prompts.calibrate(direct[0])
        order: list[tuple[str, list[Endpoint]]] = [("direct", direct), ("routed", [routed])]
        for round_ in range(-1, arguments.rounds):  # the first one only warms up
            for n in arguments.n:
                for name, endpoints in order[:: -1 if round_ % 2 else 1]:
                    samples = await _closed(endpoints, load, dialect, prompts, n, arguments.requests)
                    if round_ >= 0:
                        rows.append({"round": round_, "way": name, "n": n} | samples)
        for endpoint in (*direct, routed):
            endpoint.close()
    table = Table(
        title=f"{arguments.replicas} replicas behind {arguments.router}: medians of {arguments.rounds} rounds",
        title_justify="left",
    )
    for head in ("N", "", "tokens/s", "TTFT p50 (ms)", "ITL p50 (ms)", "errors"):
        table.add_column(head, justify="right")
    for n in arguments.n:
        for name in ("direct", "routed"):
            of = [row for row in rows if (row["n"], row["way"]) == (n, name)]
            middle = [statistics.median(row[key] if at is None else row[key][at] for row in of) for key, at in FIGURES]
            table.add_row(str(n), name, *(f"{value:.2f}" for value in middle), str(sum(row["errors"] for row in of)))
    console.print(table)
    return {"rows": rows}


FIGURES = (("output_tok_s", None), ("ttft_ms", "p50"), ("itl_ms", "p50"))


async def _closed(
    endpoints: list[Endpoint], load: Workload, dialect: Any, prompts: Prompts, n: int, n_requests: int
) -> Row:
    """n clients, each of whom asks one of the endpoints."""
    turns = itertools.cycle(endpoints)
    samples: list[Sample] = []

    async def send(body: Row, zero: float) -> Sample:
        return await measure(next(turns), load, body, zero)

    def bodies() -> Iterator[Row]:
        for _ in range(n_requests):
            yield dialect.body(load, prompts.text(), load.output_tokens)

    begin = time.perf_counter()
    await closed_loop(send, bodies(), n, samples.append)
    return summary(samples, time.perf_counter() - begin)


async def soak(arguments: argparse.Namespace, console: Console) -> Row:
    """See bench/routed/soak.py."""
    sizes = ["--max-model-len", str(SOAK_MODEL_LEN), "--max-num-seqs", str(SOAK_SEQS), "--max-queue", str(SOAK_QUEUE)]
    sizes += ["--n-pages", "96", "--threads", "1", "--log-level", "warning"]
    sizes += ["--drain-notice-s", str(arguments.notice)] if arguments.notice else []
    fleet = Fleet.of(arguments.router, arguments.replicas, [*model_flags(arguments), *sizes])
    async with running(fleet):
        endpoint = Visitors(fleet.url, fleet.api_key)
        name = await fleet.model()
        sent = Traffic(endpoint, name, SOAK_MODEL_LEN, (SOAK_SEQS + SOAK_QUEUE) * arguments.replicas)
        run = RoutedSoak(fleet, sent, arguments.seed, arguments.timeout, lambda text: console.print(text, markup=False))
        await run.run(arguments.minutes, arguments.clients, 60 * arguments.kill, 60 * arguments.roll)
        endpoint.close()
        report = run.report()
    table = Table(title=f"soak through {arguments.router}: {report['minutes']:g} minutes", title_justify="left")
    for line in ("requests", "generated_tokens_checked", "lost_to_kills", "lost"):
        table.add_row(line, str(report[line]))
    table.add_row("kills", str(len(report["kills"])))
    table.add_row("rolling restarts", str(len(report["rolling_restarts"])))
    table.add_row("violations", str(len(report["violations"])))
    console.print(table)
    return report


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m bench.routed", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("trace", "overhead", "soak"):
        add = commands.add_parser(name).add_argument
        add("--router", choices=ROUTERS, default="sglang")
        add("--replicas", type=int, default=2)
        add("--dummy", metavar="SHAPE", help="random weights (default: the built-in model)")
        add("--quantize", choices=("int8", "int4"))
        add("--serve-args", default="", help="more flags for deltic serve, in one string")
        add("--out", metavar="DIR", help="for the JSON (default: bench/runs/<date>-<machine>)")
        if name == "soak":
            add("--minutes", type=float, default=30.0)
            add("--clients", type=int, default=12)
            add("--kill", type=float, default=3.0, metavar="MINUTES", help="SIGKILL a replica this often; 0: never")
            add("--roll", type=float, default=5.0, metavar="MINUTES", help="restart all, one after another; 0: never")
            add("--notice", type=float, default=3.0, help="--drain-notice-s of the replicas")
            add("--timeout", type=float, default=120.0, help="seconds until a request must have ended")
            add("--seed", type=int, default=0)
            continue
        add("--rounds", type=int, default=1 if name == "trace" else 5)
        add("--n-pages", type=int, default=2048, help="of all servers together")
        add("--n-checkpoints", type=int, default=256, help="of all servers together")
        add("--max-tokens", type=int, default=4096, help="longest prompt with its answer")
        if name == "trace":
            add("--sessions", type=int, default=8)
            add("--parallel", type=int, default=4)
            add("--turns", type=int, default=20)
        else:
            add("--n", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
            add("--requests", type=int, default=64, help="of a round")
            add("--prompt", type=int, default=64)
            add("--output", type=int, default=64)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    arguments, console = parsed(given), Console()
    work = {"trace": trace, "overhead": overhead, "soak": soak}[arguments.what]
    found = asyncio.run(work(arguments, console))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("what", "out")}
    result = {"bench": f"routed {arguments.what}", "date": now().isoformat(), "machine": machine(), "code": code()}
    result |= settings | found
    model = arguments.dummy or "built-in"
    path = runs_directory(arguments.out) / f"routed-{arguments.what}-{arguments.router}-{model}-{now():%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1))
    console.print(str(path))
    return 1 if found.get("violations") else 0


if __name__ == "__main__":
    sys.exit(main())
