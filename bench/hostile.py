"""Two keys on one server: what the one waits for its answers while the other does all it can.

    python -m bench.hostile --minutes 30 [MODEL] [--serve-args "..."]

`deltic serve` is started with two keys (default: a tiny model with a vision tower, random weights). The quiet
key asks a few short requests again and again, first alone, then beside the hostile key, which a process of
its own plays: stored responses, pictures for /tokenize that take seconds to decode, many requests that wait
with one picture, bodies as large as they may be, large schemas, and more sequences than the queue holds;
pictures from a host that sends trailers without end, and questions of 50 MB to the cache's events. It comes
and goes; between two of its turns everything must be free, and memory is measured.

Checked: each answer of the quiet key is the one that it got alone, ran to its end, and took at most twice as
long as the slowest alone and half a second; what it has stored is still there; memory stays within 30 MB; no
process was killed. Of each answer the report has how long the bench itself waited for a processor, which it
shares with the server. And the attack itself: each of its tricks was answered, or waited, as it is meant to.
Prints a table, writes a JSON report, ends with a line of JSON; exit status 1 when a promise broke, or the
attack was none.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import itertools
import json
import os
import random
import secrets
import shlex
import signal
import statistics
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.soak.soak import engine_pid, rss_bytes
from deltic.bench.gauges import in_use, settled
from deltic.bench.load import WORDS
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.commands.endpoint import Endpoint, EndpointError, LocalServer, ServerFailed, free_port, model_name
from deltic.host.process import die_with_parent
from deltic.server.chat.picture_parts import MAX_KEPT_BYTES

FACTOR, SLACK_S = 2.0, 0.5
"""The slowest answer beside the hostile key, in those of the slowest alone, and beside that."""
MEMORY_BYTES = 30e6
"""By how much a process may differ from its median at the quiet points, the first two left out."""
LONGEST_S = 120.0
N_ALONE = 5
"""How often each request is asked alone."""
ROUND_S = 60.0
"""How long the hostile key stays, until it leaves everything open at once."""
QUIET_S = 20.0
"""How soon all must be free then."""
SIDE = 1024
"""Pixels of a side of the pictures that fill what the server keeps of them: 1024 tokens each."""
BODY_BYTES = 57_000_000
QUESTION_BYTES = 50_000_000
NICENESS, NICEST, GROUP_NICENESS = -10, 39, 10
"""Niceness of the measuring client, what the hostile one adds, and that of its session: on machines of their
own, neither would take a processor from the server. The kernel cuts the sum to 19. Where sessions are groups
(sched(7), autogroup), each has as much of the processors as another, whatever its processes' niceness is.
"""
HOST = "127.0.0.1"
EXPECTED = {"pictures with endless trailers": ("400",)}
"""Statuses of tricks that work where the server refuses, behind the work."""
PLAIN = str.maketrans({",": None, " ": "-"})
SERVE = "--max-model-len 4096 --max-num-seqs 8 --max-queue 64 --max-picture-tokens 1024 --log-level warning"
CHAT, COMPLETIONS, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"


@functools.cache
def png(width: int, height: int, colour: bytes = b"\x40\x80\xc0\xff") -> str:
    """The data: URL of a picture of one colour, RGBA, that is small as a file whatever its sides are."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = b"\0" + colour * width
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def words(n: int, seed: object) -> str:
    return " ".join(random.Random(f"{seed}").choices(WORDS, k=n))


def shown(url: str, text: str = "What is it?") -> list[dict[str, Any]]:
    """A message with a picture."""
    return [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]}
    ]


def schema(n: int, seed: object) -> dict[str, Any]:
    """Of an object with n fields, each an object, that nobody asked for before."""
    inner = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 50}, "b": {"type": "integer"}}}
    fields = {f"field_{seed}_{i}": inner for i in range(n)}
    asked = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": asked}}


# The quiet key.


def quiet_requests(model: str, sees: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each kind. No prefix is found again: a salt of its own comes to each."""
    fixed: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True}
    hello = [{"role": "user", "content": "Tell a story."}]
    asked = {
        "chat": (CHAT, fixed | {"messages": hello, "max_tokens": 16}),
        "chat, streamed": (CHAT, fixed | {"messages": hello, "max_tokens": 16, "stream": True}),
        "long prompt": (COMPLETIONS, fixed | {"prompt": words(150, "quiet"), "max_tokens": 4}),
        "schema": (CHAT, {"model": model, "temperature": 0, "messages": hello, "max_tokens": 200}
            | {"response_format": schema(2, "quiet")}),
        "/tokenize": (TOKENIZE, {"model": model, "prompt": words(100, "quiet")}),
    }  # fmt: skip
    if sees:
        asked["picture"] = (CHAT, fixed | {"messages": shown(png(96, 64)), "max_tokens": 4})
    return asked


class Wrong(Exception):
    """An answer that is none, or has no end."""


async def answer(endpoint: Endpoint, path: str, body: dict[str, Any], name: str) -> Any:
    """What was said, as far as it is the same each time. Raises Wrong. name: in a trace."""
    if path in (CHAT, COMPLETIONS):
        body = body | {"cache_salt": secrets.token_hex(8)}
    reply = await endpoint.open("POST", path, body, f"X-Request-Id: {name}\r\n")
    if reply.status != 200:
        raise Wrong(f"HTTP {reply.status}: {(await reply.read())[:300].decode(errors='replace')}")
    if body.get("stream"):
        chunks = [data async for _, data in reply.events()]
        if chunks[-1] != b"[DONE]":
            raise Wrong("a stream without its end")
        choices = [choice for chunk in chunks[:-1] for choice in json.loads(chunk)["choices"]]
        said, reason = "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]
    else:
        told = json.loads(await reply.read())
        if path == TOKENIZE:
            return told["tokens"]
        choice = told["choices"][0]
        said, reason = (choice["message"]["content"] if path == CHAT else choice["text"]), choice["finish_reason"]
        if body.get("ignore_eos") and told["usage"]["completion_tokens"] != body["max_tokens"]:
            raise Wrong(f"{told['usage']['completion_tokens']} tokens, and not {body['max_tokens']}")
    if body.get("ignore_eos") and reason != "length":
        raise Wrong(f"it ended by {reason!r}")
    return [said, reason]


@dataclass
class Kind:
    """What was seen of one kind of request."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    """Of each of beside_s, the seconds in which this process was to run and had no processor."""
    n_different: int = 0
    failures: list[str] = field(default_factory=list)

    def most_s(self) -> float:
        return FACTOR * max(self.alone_s, default=0.0) + SLACK_S


def run_delay_s() -> float:
    """Seconds for which this thread has waited for a processor so far (Linux: sched-stats.rst)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Quiet:
    """The quiet key's requests, one behind the other."""

    def __init__(self, endpoint: Endpoint, model: str, sees: bool) -> None:
        self.endpoint = endpoint
        self.requests = quiet_requests(model, sees)
        self.kinds = {name: Kind() for name in [*self.requests, "stored response", "/health"]}
        self._expected: dict[str, Any] = {}
        self._model = model
        self._stored = ""

    async def store(self) -> None:
        """Has a response kept, which must be there to the end."""
        status, told = await self.endpoint.json(
            "POST", RESPONSES, {"model": self._model, "input": "Keep this.", "max_output_tokens": 16}
        )
        if status != 200:
            raise Wrong(f"no response was stored: {told}")
        self._stored = told["id"]

    async def fill(self) -> None:
        """Has as many pictures read as the server keeps: its memory grows no more by those that follow."""
        for n in range(-(-MAX_KEPT_BYTES // (3 * SIDE**2)) if "picture" in self.requests else 0):
            picture = png(SIDE, SIDE, n.to_bytes(3, "big") + b"\xff")
            await answer(self.endpoint, TOKENIZE, {"model": self._model, "messages": shown(picture)}, f"fill.{n}")

    async def once(self, is_alone: bool) -> None:
        """Each of the requests."""
        for name, (path, body) in self.requests.items():
            called = f"quiet.{name.strip('/').translate(PLAIN)}.{len(self.kinds[name].beside_s)}"
            await self._timed(name, is_alone, functools.partial(answer, self.endpoint, path, body, called))
        await self._timed("stored response", is_alone, functools.partial(self._get, f"{RESPONSES}/{self._stored}"))
        await self._timed("/health", is_alone, functools.partial(self._get, "/health"))

    async def _get(self, path: str) -> Any:
        status, told = await self.endpoint.json("GET", path)
        if status != 200:
            raise Wrong(f"HTTP {status}: {told}")
        return told

    async def _timed(self, name: str, is_alone: bool, work: Callable[[], Awaitable[Any]]) -> None:
        kind, begun_s, waited_s = self.kinds[name], time.perf_counter(), run_delay_s()
        try:
            async with asyncio.timeout(LONGEST_S):
                said = await work()
        except (Wrong, EndpointError, TimeoutError) as error:
            kind.failures.append(str(error)[:300] or f"no answer within {LONGEST_S:.0f} s")
            await asyncio.sleep(0.2)
            return
        (kind.alone_s if is_alone else kind.beside_s).append(round(time.perf_counter() - begun_s, 4))
        kind.own_s += [] if is_alone else [round(run_delay_s() - waited_s, 4)]
        if said != self._expected.setdefault(name, said):
            kind.n_different += 1


# The hostile key.


async def send_trailers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a request with a chunk of one byte, and trailers until the client leaves."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while True:
            writer.write(b"x: " + b"y" * 60_000 + b"\r\n")
            await writer.drain()


def ask_for_events(port: int, until_s: float, counts: Counter[str]) -> None:
    """Sends questions of QUESTION_BYTES to --kv-events-replay, where 8 bytes are expected."""
    import zmq  # the server's own

    with zmq.Context() as context:
        while time.monotonic() < until_s:
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 1000)
                socket.setsockopt(zmq.SNDTIMEO, 1000)
                socket.connect(f"tcp://{HOST}:{port}")
                with contextlib.suppress(zmq.Again):
                    socket.send(bytes(QUESTION_BYTES))
                    counts["sent"] += 1
                time.sleep(0.5)


def tricks(
    model: str, sees: bool, ports: Sequence[int]
) -> dict[str, tuple[int, Callable[[int], tuple[str, dict[str, Any] | bytes]]]]:
    """How many of each are open at once, and path and body of the i-th."""

    def many(i: int) -> tuple[str, dict[str, Any]]:
        body = {"prompt": words(60, f"{os.getpid()} {i}"), "n": 8, "max_tokens": 64, "ignore_eos": True}
        return COMPLETIONS, {"model": model} | body

    def formed(i: int) -> tuple[str, dict[str, Any]]:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
        return CHAT, {"model": model} | asked | {"response_format": schema(400, f"{os.getpid()}_{i}")}

    def large(i: int) -> tuple[str, bytes]:
        return TOKENIZE, large_text

    def small(i: int) -> tuple[str, dict[str, Any]]:
        return RESPONSES, {"model": model, "input": f"{i}", "max_output_tokens": 1}

    large_text = json.dumps({"model": model, "prompt": words(1_900_000, "large")}).encode()
    found: dict[str, Any] = {
        "stored responses": (4, small),
        "sequences": (24, many),
        "schemas": (8, formed),
        "large bodies": (4, large),
    }
    if sees:
        host = f"http://{HOST}:{ports[0]}/"
        slow = json.dumps({"model": model, "messages": shown(host)}).encode()
        giant = json.dumps({"model": model, "messages": shown(png(8192, 8192))}).encode()
        waiting = json.dumps({"model": model, "messages": shown(png(1024, 1024)), "max_tokens": 1}).encode()
        padded = shown(png(2048, 2048), "x" * BODY_BYTES)
        body = json.dumps({"model": model, "messages": padded}).encode()
        found |= {
            "/tokenize with pictures": (24, lambda i: (TOKENIZE, giant)),
            "waiting pictures": (64, lambda i: (CHAT, waiting)),
            "large bodies with pictures": (24, lambda i: (TOKENIZE, body)),
            "pictures with endless trailers": (8, lambda i: (TOKENIZE, slow)),
        }
    return found


async def attack(url: str, key: str, model: str, sees: bool, seconds: float, ports: Sequence[int]) -> dict[str, Any]:
    """What became of each trick's requests: by status, `open` at the end, or `lost`.

    ports: of the host of pictures, and of --kv-events-replay.
    """
    endpoint = Endpoint(url, key)
    seen: dict[str, Counter[str]] = {}

    async def one(name: str, make: Callable[[int], tuple[str, Any]], numbers: Any) -> None:
        while True:
            path, body = make(next(numbers))
            seen[name]["open"] += 1
            try:
                reply = await endpoint.open("POST", path, body)
                await reply.read()
                came = str(reply.status)
            except EndpointError:
                came = "lost"
            seen[name]["open"] -= 1
            seen[name][came] += 1
            await asyncio.sleep(0.0 if came == "200" else 0.05)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine itself: asyncio would tell of each that is cancelled at the end of the attack."""
        tasks.append(asyncio.create_task(send_trailers(reader, writer)))

    await asyncio.start_server(connected, HOST, ports[0])
    questions = seen["questions of events"] = Counter()
    tasks = [asyncio.create_task(asyncio.to_thread(ask_for_events, ports[1], time.monotonic() + seconds, questions))]
    for name, (n, make) in tricks(model, sees, ports).items():
        seen[name], numbers = Counter(), itertools.count()
        tasks += [asyncio.create_task(one(name, make, numbers)) for _ in range(n)]
    done, _ = await asyncio.wait(list(tasks), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
    return {name: dict(counts) for name, counts in seen.items()}


# One run.


@dataclass
class Run:
    """What was seen."""

    kinds: dict[str, Kind]
    tricks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each how many requests ended by which status."""
    memory: list[dict[str, Any]] = field(default_factory=list)
    """Of each quiet point."""
    peaks: dict[str, int] = field(default_factory=lambda: {"server": 0, "engine": 0})
    n_restarts: float = 0.0
    violations: list[str] = field(default_factory=list)

    def look(self, server_pid: int) -> dict[str, Any]:
        pid = engine_pid(server_pid)
        found = {"server": rss_bytes(server_pid), "engine": rss_bytes(pid) if pid else None, "engine_pid": pid}
        for name in self.peaks:
            self.peaks[name] = max(self.peaks[name], found[name] or 0)
        return found


def judged(run: Run) -> list[str]:
    """The promises that broke, and what of the run was none."""
    wrong = [*run.violations]
    for name, kind in run.kinds.items():
        wrong += [f"{name}: {len(kind.failures)} failed, as: {kind.failures[0]}"] if kind.failures else []
        if kind.n_different:
            wrong.append(f"{name}: {kind.n_different} answers are others than alone")
        if len(kind.alone_s) < N_ALONE or len(kind.beside_s) < 3:
            wrong.append(
                f"{name}: asked {len(kind.alone_s)} times alone and {len(kind.beside_s)} times beside: too few"
            )
        elif max(kind.beside_s) > kind.most_s():
            late = [(took, own) for took, own in zip(kind.beside_s, kind.own_s, strict=True) if took > kind.most_s()]
            took, own = max(late)
            wrong.append(
                f"{name}: took {took:.2f} s, and may take {kind.most_s():.2f} s; for {own:.2f} s of it the bench waited for a"
                f" processor. {len(late)} are late, {sum(t - o > kind.most_s() for t, o in late)} without that"
            )
    for name, counts in run.tricks.items():
        n_taken = sum(counts.get(status, 0) for status in ("200", "open", "sent", *EXPECTED.get(name, ())))
        if not n_taken or counts.get("lost", 0) > n_taken:
            wrong.append(f"the attack by {name} was none: {counts}")
        if errors := sum(n for status, n in counts.items() if status[:1] == "5" and status != "503"):
            wrong.append(f"{name}: {errors} errors inside the server")
    rows = run.memory[2:]
    for process in ("server", "engine") if len(rows) >= 3 else ():
        sizes = [row[process] or 0 for row in rows]
        middle = statistics.median(sizes)
        if (off := max(abs(size - middle) for size in sizes)) > MEMORY_BYTES:
            wrong.append(f"the {process}'s memory is up to {off / 1e6:.0f} MB off its median of {middle / 1e6:.0f} MB")
    if run.n_restarts or len({row["engine_pid"] for row in run.memory}) > 1:
        wrong.append(f"the engine was started again, {run.n_restarts:g} times")
    if not run.tricks:
        wrong.append("there was no attack")
    return wrong


async def measure(server: LocalServer, keys: tuple[str, str], minutes: float, ports: Sequence[int]) -> Run:
    endpoint = await server.wait_ready()
    model = await model_name(endpoint)
    _, cards = await endpoint.json("GET", "/v1/models")
    sees = any("image" in card.get("input_modalities", ()) for card in cards["data"])
    quiet = Quiet(Endpoint(server.url, keys[0]), model, sees)
    run = Run(quiet.kinds)
    with contextlib.suppress(PermissionError):  # own_s says what it waited
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    await quiet.store()
    await quiet.fill()
    for _ in range(N_ALONE):
        await quiet.once(is_alone=True)
    until_s = time.monotonic() + minutes * 60
    while time.monotonic() < until_s and server.process.poll() is None:
        seconds = min(ROUND_S, minutes * 60)
        given = [server.url, keys[1], model, str(int(sees)), str(seconds), *map(str, ports)]
        hostile = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(NICEST), sys.executable, "-m", "bench.hostile", "--attack", *given),
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
        with contextlib.suppress(OSError):
            Path(f"/proc/{hostile.pid}/autogroup").write_text(str(GROUP_NICENESS))
        ended = asyncio.create_task(hostile.communicate())
        while not ended.done():
            await quiet.once(is_alone=False)
            run.look(server.process.pid)
        told = (await ended)[0]
        if hostile.returncode:
            run.violations.append(f"the hostile process ended with status {hostile.returncode}")
            break
        for name, counts in json.loads(told).items():
            run.tricks[name] = dict(Counter(run.tricks.get(name)) + Counter(counts))
        gauges = await settled(endpoint, QUIET_S)
        if left := in_use(gauges):
            run.violations.append(f"not free {QUIET_S:.0f} s after the hostile key has gone: {left}")
        run.n_restarts = gauges.get("engine_restarts_total", float("nan"))
        await asyncio.sleep(2.0)  # what large requests took is given back
        run.memory.append(run.look(server.process.pid))
    if server.process.poll() is not None:
        run.violations.append(f"the server ended with status {server.process.returncode}:\n{server.log_tail()}")
    return run


def tables(run: Run) -> list[Table]:
    """The run for people."""
    answers = Table(title="the quiet key's answers", title_justify="left")
    for name in ("request", "n", "slowest alone s", "beside s", "allowed s", "median beside s", "different"):
        answers.add_column(name, justify="left" if name == "request" else "right")
    for name, kind in run.kinds.items():
        slowest = (max(times, default=float("nan")) for times in (kind.alone_s, kind.beside_s))
        middle = statistics.median(kind.beside_s) if kind.beside_s else float("nan")
        numbers = [f"{value:.3f}" for value in (*slowest, kind.most_s(), middle)]
        answers.add_row(name, str(len(kind.beside_s)), *numbers, str(kind.n_different))
    hostile = Table(title="the hostile key's requests", title_justify="left")
    for name in ("trick", "by status"):
        hostile.add_column(name)
    for name, counts in run.tricks.items():
        hostile.add_row(name, ", ".join(f"{status}: {n}" for status, n in sorted(counts.items())))
    memory = Table(title="memory MB at quiet points", title_justify="left")
    for name in ("process", "peak", "points"):
        memory.add_column(name)
    for process, peak in run.peaks.items():
        points = " ".join(f"{(row[process] or 0) / 1e6:.0f}" for row in run.memory)
        memory.add_row(process, f"{peak / 1e6:.0f}", points)
    return [answers, hostile, memory]


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m bench.hostile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="what to serve (default: a tiny model that sees)")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--serve-args", default="", help="more flags for deltic serve, in one string")
    parser.add_argument("--out", metavar="DIR", help="directory of the report (default: bench/runs/<date>-<machine>)")
    parser.add_argument("--attack", nargs=7, help=argparse.SUPPRESS)  # the hostile process
    return parser.parse_args(given)


def main() -> int:
    """The command. Exit status 1 when a promise broke."""
    arguments = parsed()
    if arguments.attack:
        url, key, model, sees, seconds, *ports = arguments.attack
        counts = asyncio.run(attack(url, key, model, sees == "1", float(seconds), [*map(int, ports)]))
        print(json.dumps(counts))
        return 0
    model = arguments.model
    if model is None:
        from tests.tiny import tiny_checkpoint

        model = str(tiny_checkpoint("dense", has_tower=True, has_mtp=True))
    operator, quiet, hostile = (secrets.token_hex(8) for _ in range(3))
    keys = ["--api-key", operator, "--api-key", f"quiet={quiet}", "--api-key", f"hostile={hostile}"]
    ports = [free_port() for _ in range(3)]
    at = [f"tcp://{HOST}:{port}" for port in ports[1:]]
    more = ["--fetch-images-from", HOST, "--kv-events", at[1], "--kv-events-replay", at[0]]
    server = LocalServer(
        [model, *shlex.split(SERVE), *more, *keys, *shlex.split(arguments.serve_args)], api_key=operator
    )
    try:
        run = asyncio.run(measure(server, (quiet, hostile), arguments.minutes, ports[:2]))
        wrong = judged(run)
        if wrong:
            print(server.log_tail(), file=sys.stderr)
    except (EndpointError, ServerFailed, Wrong) as error:
        print(f"hostile: {error}", file=sys.stderr)
        return 1
    finally:
        server.stop()
    head = {"bench": "hostile", "date": now().isoformat(), "machine": machine(), "client": code()}
    head |= {"model": arguments.model, "serve_args": arguments.serve_args, "minutes": arguments.minutes}
    path = runs_directory(arguments.out) / f"hostile-{now():%H%M%S}.json"
    path.write_text(json.dumps(head | asdict(run) | {"violations": wrong}, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 130)
    for table in tables(run):
        console.print(table)
    for violation in wrong[:20]:
        print(f"VIOLATION {violation}")
    slowest = {
        name: [round(max(times, default=0.0), 3) for times in (kind.alone_s, kind.beside_s)]
        for name, kind in run.kinds.items()
    }
    print(json.dumps({"bench": "hostile", "slowest_s": slowest, "violations": len(wrong), "file": str(path)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
