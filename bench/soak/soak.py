"""A soak: random traffic on loopback against a server of our own, with its promises checked all along.

    python -m bench.soak --minutes 30 [--kill-engine 5] [--seed 0]
    python -m bench.soak MODEL --speech --minutes 20    (a model that speaks, or --serve-args "--dummy ...")
    python -m bench.soak --hostile 4 [--hang-engine 5] [--spoil-cache 2]
            (beside it: clients that mean harm, an engine that stands still, a prefix cache on disk that
            gives no numbers)
    python -m bench.soak --serve-args "--max-drafts 8" --against "--max-drafts 0"
            (a quarter of the requests is asked of a second server, too)
    python -m bench.soak --with all --kill-engine 5 --minutes 20
            (or --with drafts,pictures,...: features.py says what each is)

Checked: every request ends (a stream in [DONE], or an error event while the engine is being killed; any
other with a status), no 5xx except then, the answers' form, the same text for the same seed, and from the
second server; at quiet points, that nothing runs or waits and all pages and state slots are free; at the end,
that memory is flat and that the engine was started again once for each time it was killed. Stops by itself,
prints a table, writes a JSON report and ends with a line of JSON; exit status 1 when a promise broke.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import secrets
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.soak import features, hostile, speech, traffic
from bench.soak.spoil import spoil
from bench.soak.traffic import Kinds, Lost, Traffic, Violation
from deltic.bench.gauges import QUIET_S, in_use, settled
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.commands.endpoint import Endpoint, EndpointError, LocalServer, ServerFailed, model_name
from deltic.ops.geometry import PAGE_SIZE

MAX_NUM_SEQS, MAX_QUEUE = 8, 16
SERVE = f"--max-queue {MAX_QUEUE} --max-body-mb 1 --log-level warning".split()
CONTEXT = 1024
"""Tokens; three times as many where a token is a byte."""


def sizes(context: int) -> list[str]:
    """Flags of a model.

    The pages are few on purpose: 8 sequences of the whole context do not fit, so sequences are preempted.
    """
    return f"--max-model-len {context} --max-num-seqs {MAX_NUM_SEQS} --n-pages {3 * context // PAGE_SIZE}".split()


HOSTILE_SERVE = ["--client-timeout-s", f"{hostile.CLIENT_TIMEOUT_S:g}"]

ENGINE_TIMEOUT_S = 5.0
"""How long an engine may stand still in a run that stops it."""

MEMORY_TOLERANCE = (0.04, 6e6)
"""The median of a process's memory in the last third may exceed the second third's by 4 % and 6 MB."""

LEAK_BYTES = 500.0
"""Bytes of growth for each request in the last two thirds, by least squares, that may be noise, beside the 6
MB.

Half of what a leak of 1 KB a request would show. Runs of the built-in model without one showed 100 bytes in
the server and 5 in the engine after four minutes (11,000 requests), so such a leak is found once the last two
thirds have more than 12,000 requests.
"""

WARM_UP_S, WARM_UP_BYTES = 600.0, 20e6
"""A run shorter than this may grow by this much more: the allocator has not found its level yet."""


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process; None when it is gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def engine_pid(server_pid: int) -> int | None:
    """The engine process: the server's child that runs deltic.host.process."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, LookupError):
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server_pid and b"deltic.host.process" in (directory / "cmdline").read_bytes():
                return int(directory.name)
    return None


@dataclass
class Soak:
    """One run: the server, its traffic, and what was found."""

    server: LocalServer
    traffic: Traffic
    kinds: Kinds
    seed: int
    deadline: float
    max_requests: int
    timeout_s: float
    violations: list[str] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    """A row for each quiet point: seconds since the start, resident bytes of both processes."""
    recoveries_s: list[float] = field(default_factory=list)
    gauges: dict[str, float] = field(default_factory=dict)
    keys: list[Endpoint] = field(default_factory=list)
    """The server with the keys of clients, who take turns."""
    n_requests: int = 0
    n_lost: int = 0
    killing: bool = False
    cache_dir: Path | None = None
    """The prefix cache that is spoilt now and then."""
    n_spoilt: int = 0
    """Its files that were."""

    def __post_init__(self) -> None:
        self.begin = time.monotonic()
        self._open = asyncio.Event()
        self._open.set()
        self._n_busy = 0

    def violate(self, message: str) -> None:
        """Notes a broken promise."""
        self.violations.append(f"{time.monotonic() - self.begin:.1f} s: {message}")

    def over(self) -> bool:
        """Time or count is used up, or so much is broken that more would say nothing new."""
        spent = time.monotonic() > self.deadline or self.n_requests >= self.max_requests
        return spent or len(self.violations) >= 50 or self.server.process.poll() is not None

    async def client(self, number: int, kinds: Kinds) -> None:
        """One client: random requests of these kinds, one after another, paused at quiet points."""
        rng, own = random.Random(f"{self.seed} {number}"), self.traffic
        if self.keys:
            key, stranger = self.keys[number % len(self.keys)], self.keys[(number + 1) % len(self.keys)]
            own = dataclasses.replace(own, endpoint=key, stranger=stranger, is_guest=key is not self.keys[0])
        while not self.over():
            await self._open.wait()
            self.n_requests += 1
            self._n_busy += 1
            killed_before = len(self.recoveries_s)
            try:
                await traffic.one(own, kinds, rng, self.timeout_s)
            except Violation as violation:
                self.violate(str(violation))
            except Lost as lost:
                if self.killing or len(self.recoveries_s) > killed_before:
                    self.n_lost += 1
                    await asyncio.sleep(0.1)
                else:
                    self.violate(str(lost))
            finally:
                self._n_busy -= 1

    async def quiet(self) -> None:
        """Lets the traffic run out, then looks whether everything is free, and measures memory."""
        self._open.clear()
        limit = time.monotonic() + self.timeout_s
        while self._n_busy and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        self.gauges = await settled(self.traffic.endpoint, QUIET_S)
        if left := in_use(self.gauges):
            self.violate(f"not free {QUIET_S:.0f} s after the last request: {left}")
        pid = engine_pid(self.server.process.pid)
        self.memory.append(
            {
                "s": round(time.monotonic() - self.begin, 1),
                "server": rss_bytes(self.server.process.pid),
                "engine": rss_bytes(pid) if pid else None,
                "engine_pid": pid,
                "requests": self.n_requests,
            }
        )
        self._open.set()

    async def break_engine(self, with_signal: signal.Signals) -> None:
        """Kills or stops the engine process under load and waits until the server is ready again."""
        pid = engine_pid(self.server.process.pid)
        if pid is None:
            self.violate("no engine process to kill")
            return
        self.killing = True
        begin = time.monotonic()
        await self.spoil()  # the next engine process has nothing but these files
        os.kill(pid, with_signal)
        seen: set[int] = set()
        probe = Endpoint(self.server.url, self.server.api_key)
        while time.monotonic() < begin + 60:
            with contextlib.suppress(EndpointError):
                status, _ = await probe.json("GET", "/health")
                seen.add(status)
                status, _ = await probe.json("GET", "/ready")
                if status == 200 and seen != {200}:
                    break
            await asyncio.sleep(0.02)
        else:
            self.violate(f"not ready again 60 s after the engine got {with_signal.name}")
        if 503 not in seen:
            self.violate(f"/health never said 503 while the engine was down, but {sorted(seen)}")
        probe.close()
        self.recoveries_s.append(round(time.monotonic() - begin, 2))
        self.killing = False

    async def spoil(self) -> None:
        """Fills the prefix cache on disk with what is no number; requests must be answered as if it were not
        there.
        """
        if self.cache_dir is not None:
            self.n_spoilt += await asyncio.to_thread(spoil, self.cache_dir)  # the clients go on meanwhile

    async def run(self, n_clients: int, n_hostile: int, breaks: dict[signal.Signals | None, float]) -> None:
        """Traffic until the deadline, with quiet points between.

        breaks: what the engine gets under load, and every how many seconds; None: its prefix cache on disk is
        spoilt.
        """
        every = min(30.0, (self.deadline - self.begin) / 13)
        kinds = [self.kinds] * n_clients + [hostile.KINDS] * n_hostile
        clients = [asyncio.create_task(self.client(number, its)) for number, its in enumerate(kinds)]
        due = {which: self.begin + every_s for which, every_s in breaks.items()}
        while not self.over():
            await asyncio.sleep(min(every, max(0.0, self.deadline - time.monotonic())))
            for which, every_s in breaks.items():
                if time.monotonic() >= due[which] and not self.over():
                    if which is None:
                        await self.spoil()
                    else:
                        await self.break_engine(which)
                    due[which] = time.monotonic() + every_s
            await self.quiet()
        await asyncio.gather(*clients)
        if self.server.process.poll() is not None:
            self.violate(f"the server ended with status {self.server.process.returncode}:\n{self.server.log_tail()}")
        else:
            await self.quiet()
            self.check_restarts()
            if self.n_spoilt and not self.gauges.get("recomputed_sequences_total"):
                self.violate(f"{self.n_spoilt} spoilt files of the prefix cache, and none was met")

    def check_restarts(self) -> None:
        """The engine was started again as often as it was killed here: more means that it died by itself."""
        n_restarts, n_kills = self.gauges.get("engine_restarts_total"), len(self.recoveries_s)
        if n_restarts != n_kills:
            self.violate(f"deltic_engine_restarts_total is {n_restarts}, and the engine was killed {n_kills} times")

    def check_memory(self) -> dict[str, Any]:
        """Growth of each process's memory: from the second third to the last, and for each request of both.

        Too much is a violation. An engine that was started again is another process: the one seen most often
        is looked at.
        """
        growth: dict[str, Any] = {}
        for name in ("server", "engine") if self.memory else ():
            pid = statistics.mode(row["engine_pid"] for row in self.memory)
            rows = self.memory if name == "server" else [r for r in self.memory if r["engine_pid"] == pid]
            rows = [row for row in rows if row[name]]
            sizes = [row[name] for row in rows]
            if len(sizes) < 6:
                growth[name] = None
                continue
            third = len(sizes) // 3
            middle, last = statistics.median(sizes[third : 2 * third]), statistics.median(sizes[-third:])
            share, room = MEMORY_TOLERANCE
            room += WARM_UP_BYTES if time.monotonic() - self.begin < WARM_UP_S else 0.0
            requests = [row["requests"] for row in rows[third:]]
            n_requests = requests[-1] - requests[0]
            slope = statistics.linear_regression(requests, sizes[third:]).slope if n_requests else 0.0
            growth[name] = {
                "second_third_mb": middle / 1e6,
                "last_third_mb": last / 1e6,
                "mb_per_1000_requests": round(slope / 1e3, 4),
            }
            if slope * n_requests > LEAK_BYTES * n_requests + room:
                self.violate(f"the {name}'s memory grew by {slope:.0f} bytes a request over {n_requests} requests")
            if last > middle * (1 + share) + room:
                self.violate(f"the {name}'s memory grew from {middle / 1e6:.1f} to {last / 1e6:.1f} MB")
        return growth

    def report(self) -> dict[str, Any]:
        """Everything that was seen."""
        return {
            "minutes": round((time.monotonic() - self.begin) / 60, 2),
            "requests": self.n_requests,
            "kinds": dict(sorted(self.traffic.counts.items())),
            "generated_tokens_checked": self.traffic.n_tokens,
            "lost_to_kills": self.n_lost,
            "spoilt_cache_files": self.n_spoilt,
            "recomputed_sequences": self.gauges.get("recomputed_sequences_total"),
            "kills": len(self.recoveries_s),
            "recoveries_s": self.recoveries_s,
            "memory_growth": self.check_memory(),
            "memory": self.memory,
            "gauges": self.gauges,
            "violations": self.violations,
        }


async def _run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extra = shlex.split(arguments.serve_args)
    kinds = speech.KINDS if arguments.speech else traffic.KINDS
    breaks: dict[signal.Signals | None, float] = {}
    if arguments.kill_engine:
        breaks[signal.SIGKILL] = arguments.kill_engine * 60
    if arguments.hang_engine:
        breaks[signal.SIGSTOP] = arguments.hang_engine * 60
        extra += ["--engine-timeout-s", f"{ENGINE_TIMEOUT_S:g}"]
    if arguments.hostile:
        extra += HOSTILE_SERVE
    cache = tempfile.TemporaryDirectory(prefix="deltic-soak-") if arguments.spoil_cache else None
    if cache is not None:
        breaks[None] = arguments.spoil_cache * 60
        extra += ["--cache-dir", cache.name]
    scratch = tempfile.TemporaryDirectory(prefix="deltic-soak-")
    more = features.prepare(features.chosen(getattr(arguments, "with")), arguments.model, Path(scratch.name))
    context = CONTEXT // 4 if arguments.speech else CONTEXT * 3 if more.is_of_bytes else CONTEXT
    given = sizes(context)
    others = [flag for flags in more.others.values() for flag in ("--and", *flags, *given)]
    shared, operator = [*more.model, *SERVE, *given, *more.flags], secrets.token_hex(8)
    extra = ["--api-key", operator, *more.own_flags, *extra]
    server = LocalServer([*shared, *extra, *others], api_key=operator)
    other = LocalServer([*shared, *shlex.split(arguments.against), *others]) if arguments.against else None
    try:
        with console.status("starting the server"):
            endpoint = await server.wait_ready()
            against = await other.wait_ready() if other is not None else None
        name = await model_name(endpoint)
        _, cards = await endpoint.json("GET", "/v1/models")
        sees = any("image" in card.get("input_modalities", ()) for card in cards["data"] if card["id"] == name)
        sent = Traffic(endpoint, name, context, MAX_NUM_SEQS + MAX_QUEUE, against=against, sees=sees)
        sent.adapters, sent.adapter_directory, sent.grammars = more.adapters, Path(scratch.name), more.grammars
        sent.others = tuple(more.others)
        deadline = time.monotonic() + arguments.minutes * 60
        soak = Soak(
            server, sent, kinds | more.kinds, arguments.seed, deadline, arguments.max_requests, arguments.timeout
        )
        soak.keys = [endpoint, *(Endpoint(server.url, key) for key in more.keys)] if more.keys else []
        soak.cache_dir = Path(cache.name) if cache is not None else None
        with console.status(f"{arguments.minutes:g} minutes of traffic"):
            await soak.run(arguments.clients, arguments.hostile, breaks)
        report = soak.report()
        for closed in (endpoint, *soak.keys):
            closed.close()
        if against is not None:
            against.close()
        begin = time.monotonic()
        status = server.stop()
        if status != 0:
            report["violations"].append(f"the server ended with status {status} on SIGTERM")
        return report | {"stop_s": round(time.monotonic() - begin, 2)}
    finally:
        server.stop()
        if other is not None:
            other.stop()
        if cache is not None:
            cache.cleanup()
        scratch.cleanup()


def table(report: dict[str, Any]) -> Table:
    """The report for people."""
    out = Table(title=f"soak: {report['minutes']:g} minutes, {report['requests']} requests", title_justify="left")
    out.add_column("what")
    out.add_column("", justify="right")
    for name, value in report["kinds"].items():
        out.add_row(name, str(value))
    spoilt = f"{report['spoilt_cache_files']}, {report['recomputed_sequences'] or 0:.0f}"
    out.add_row("spoilt files of the prefix cache, sequences computed once more", spoilt)
    out.add_row("engine kills, requests lost to them", f"{report['kills']}, {report['lost_to_kills']}")
    for name, sizes in report["memory_growth"].items():
        if sizes:
            shown = f"{sizes['second_third_mb']:.1f} -> {sizes['last_third_mb']:.1f}"
            out.add_row(f"{name} memory MB, second third -> last", shown)
            out.add_row(f"{name} memory MB per 1,000 requests", f"{sizes['mb_per_1000_requests']:.3f}")
    out.add_row("violations", str(len(report["violations"])))
    return out


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m bench.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="what to serve (default: the built-in model)")
    parser.add_argument("--speech", action="store_true", help="the model speaks")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=12, help="clients at once (default: 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-engine", type=float, metavar="MINUTES", help="SIGKILL the engine this often")
    parser.add_argument(
        "--hang-engine", type=float, metavar="MINUTES", help="SIGSTOP the engine this often, until it is noticed"
    )
    parser.add_argument(
        "--spoil-cache",
        type=float,
        metavar="MINUTES",
        help="keep the prefix cache on disk, and fill it with NaN this often",
    )
    parser.add_argument("--hostile", type=int, default=0, help="hostile clients beside the others (default: 0)")
    parser.add_argument(
        "--against",
        default="",
        metavar="FLAGS",
        help="compare answers with those of a second server of the model, with these flags for deltic serve",
    )
    parser.add_argument("--with", default="", metavar="NAME,...", help=f"also soak {', '.join(features.NAMES)}; all")
    parser.add_argument("--max-requests", type=int, default=1_000_000)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until a request must have ended")
    parser.add_argument("--serve-args", default="", help="more flags for deltic serve, in one string")
    parser.add_argument("--out", metavar="DIR", help="directory of the report (default: bench/runs/<date>-<machine>)")
    return parser.parse_args(given)


def main() -> int:
    """The command. Exit status 1 when a promise broke."""
    arguments = parsed()
    console = Console(stderr=True)
    try:
        report = asyncio.run(_run(arguments, console))
    except (EndpointError, ServerFailed, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    head = {
        "bench": "soak",
        "date": now().isoformat(),
        "machine": machine(),
        "client": code(),
        "seed": arguments.seed,
        "model": arguments.model,
        "speech": arguments.speech,
        "serve_args": arguments.serve_args,
        "against": arguments.against,
        "with": ",".join(features.chosen(getattr(arguments, "with"))),
    }
    report = head | report
    path = runs_directory(arguments.out) / f"soak-{now():%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 130).print(table(report))
    for violation in report["violations"][:20]:
        print(f"VIOLATION {violation[:1000]}")
    keys = ("minutes", "requests", "kills", "lost_to_kills", "recoveries_s", "memory_growth")
    line = {name: report[name] for name in keys} | {"violations": len(report["violations"]), "file": str(path)}
    print(json.dumps({"bench": "soak"} | line))
    return 1 if report["violations"] else 0
