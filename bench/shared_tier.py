"""Several servers on one --cache-dir, over HTTP: `python -m bench.shared_tier [--requests 10000]`.

Three parts, each with servers of its own, of the built-in model or of --dummy SHAPE:
  same     prompts of families that share beginnings, one after the other, each to any of the servers, and to
           one server alone: the cached tokens of both
  killed   such prompts from several clients at once, with room on disk for some of them only; every so often
           one server is killed (SIGKILL) while it writes, and started again: files that were found damaged,
           answers that are not what the prompt has without a cache (tokens and log-probabilities), bytes on
           disk beside the budget
  first    a prompt of --tokens: the time to its first token computed, found by another server, and from the
           server's own disk after a restart

What is fair about it: a round of `first` takes all three times, one after the other on the same machine, of a
prompt that nobody sent before; servers that do not answer have no work. All is on one machine and one file
system, so a network's time is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.prefix import MODEL, ask
from deltic.bench.provenance import code, fault_of, machine, now, runs_directory
from deltic.commands.endpoint import Endpoint, EndpointError, LocalServer

Row = dict[str, Any]

N_FAMILIES = 12
PAGE = 64
SETTLE_S = 0.05
"""After a request of `same`: what it has left is on disk by then."""

STARTED_S = 90.0
N_CLIENTS = 4
MAX_TRIES = 50
"""Of a request, at one server after the other: a killed one needs a while to come back."""


class Servers:
    """Servers with the same settings, that can be killed and started again."""

    def __init__(self, n: int, arguments: list[str]) -> None:
        self._arguments = [*arguments, "--served-model-name", MODEL]
        self.all = [LocalServer(self._arguments) for _ in range(n)]
        self.endpoints: list[Endpoint | None] = [None] * n
        self.n_damaged = 0
        """Files that servers which were stopped had found damaged."""
        self.n_found = 0

    async def ready(self) -> None:
        for i in range(len(self.all)):
            await self._wait(i)

    async def _wait(self, i: int) -> None:
        self.endpoints[i] = await self.all[i].wait_ready(timeout_s=STARTED_S)

    async def kill(self, i: int) -> None:
        """Ends a server and its engine at once, and starts it again."""
        await self.count(i)
        self.endpoints[i] = None
        server = self.all[i]
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        self.all[i] = LocalServer(self._arguments)
        await self._wait(i)

    async def count(self, i: int) -> None:
        """Adds up what a server that is about to go has counted."""
        endpoint = self.endpoints[i]
        assert endpoint is not None
        text = (await (await endpoint.open("GET", "/metrics")).read()).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "deltic_prefix_damaged_files_total":
                    self.n_damaged += int(sample.value)
        told = msgspec.json.decode(await (await endpoint.open("GET", "/cache")).read())
        self.n_found += told["tiers"]["disk"].get("found_pages", 0)

    async def stop(self) -> None:
        """The end of all, with what they have counted."""
        for i, endpoint in enumerate(self.endpoints):
            if endpoint is not None:
                await self.count(i)
        self.drop()

    def drop(self) -> None:
        """Ends what still runs."""
        for server in self.all:
            if server.process.poll() is None:
                server.stop()


def prompts_of(rng: random.Random, n: int, n_pages: int, n_vocab: int) -> list[list[int]]:
    """Prompts that begin as others do: some are asked again, most go on in another way."""
    families = [ids(rng, PAGE * rng.randrange(1, n_pages) + rng.randrange(PAGE), n_vocab) for _ in range(N_FAMILIES)]
    made: list[list[int]] = []
    for _ in range(n):
        if made and rng.random() < 0.25:
            made.append(rng.choice(made[-200:]))
            continue
        own = ids(rng, rng.choice([5, 40, 150, 300]), n_vocab)
        made.append([*rng.choice(families), *own])
        if rng.random() < 0.02:  # prompts change with the hours
            families[rng.randrange(N_FAMILIES)] = ids(rng, PAGE * rng.randrange(1, n_pages), n_vocab)
    return made


def ids(rng: random.Random, n: int, n_vocab: int) -> list[int]:
    return [rng.randrange(n_vocab) for _ in range(n)]


async def complete(endpoint: Endpoint, prompt: list[int], use_cache: bool = True) -> tuple[int, Any]:
    """Cached tokens, and the answer with its log-probabilities. Raises EndpointError, RuntimeError."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    reply = await endpoint.open("POST", "/v1/completions", body | {"cache_prompt": use_cache})
    read = await reply.read()
    if reply.status != 200:
        raise RuntimeError(read.decode())
    told = msgspec.json.decode(read)
    cached = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if fault := fault_of(told["choices"][0]["finish_reason"], told["usage"]["completion_tokens"], 2):
        raise RuntimeError(fault)
    return cached, told["choices"][0]["logprobs"]


def on_disk(directory: Path) -> int:
    """Bytes of the objects, without their headers."""
    n_bytes = 0
    for path in directory.rglob("*"):
        if path.suffix in (".page", ".state"):
            try:
                n_bytes += path.stat().st_size - 128
            except FileNotFoundError:
                continue
    return n_bytes


async def same(args: argparse.Namespace, root: Path) -> Row:
    """Cached tokens of several servers beside those of one."""
    rng = random.Random(args.seed)
    roomy = [*args.serve, "--cache-disk-gb", "64"]
    shared = Servers(args.servers, [*roomy, "--cache-dir", str(root / "shared")])
    alone = Servers(1, [*roomy, "--cache-dir", str(root / "alone")])
    differ: Counter[str] = Counter()
    n_cached = [0, 0]
    try:
        await asyncio.gather(shared.ready(), alone.ready())
        await asyncio.sleep(6.0)  # until those who came first know of the others
        prompts = prompts_of(rng, args.same, args.pages, args.vocab)
        for i, prompt in enumerate(prompts):
            server, other = rng.choice(shared.endpoints), alone.endpoints[0]
            assert server is not None and other is not None
            one, answer = await complete(server, prompt)
            two, expected = await complete(other, prompt)
            differ["answers"] += answer != expected
            differ["fewer"] += one < two
            differ["more"] += one > two
            n_cached[0] += one
            n_cached[1] += two
            await asyncio.sleep(SETTLE_S)
            show(f"same {i + 1}/{len(prompts)}: {n_cached[0]} tokens cached, alone {n_cached[1]}")
        await shared.stop()
        await alone.stop()
    finally:
        shared.drop()
        alone.drop()
    return {
        "requests": args.same,
        "servers": args.servers,
        "prompt_tokens": sum(map(len, prompts)),
        "cached_tokens": n_cached[0],
        "cached_tokens_alone": n_cached[1],
        "requests_with_fewer": differ["fewer"],
        "requests_with_more": differ["more"],
        "other_answers": differ["answers"],
        "found_pages": shared.n_found,
        "damaged_files": shared.n_damaged,
    }


async def killed(args: argparse.Namespace, root: Path) -> Row:
    """Random requests, while servers are killed."""
    rng = random.Random(args.seed + 1)
    small = [*args.serve, "--cache-disk-gb", str(args.disk_gb), "--n-pages", "200", "--n-checkpoints", "8"]
    servers = Servers(args.servers, [*small, "--cache-dir", str(root)])
    plain = Servers(1, [*args.serve, "--no-prefix-cache"])
    truth: dict[tuple[int, ...], Any] = {}
    counts: Counter[str] = Counter()
    most = 0
    await_next = iter(prompts_of(rng, args.requests, args.pages, args.vocab))
    try:
        await asyncio.gather(servers.ready(), plain.ready())

        async def client() -> None:
            for prompt in await_next:
                cached, answer = await anywhere(servers, prompt, rng, counts)
                if tuple(prompt) not in truth:
                    reference = plain.endpoints[0]
                    assert reference is not None
                    truth[tuple(prompt)] = (await complete(reference, prompt))[1]
                counts["requests"] += 1
                counts["prompt_tokens"] += len(prompt)
                counts["cached_tokens"] += cached
                counts["other_answers"] += answer != truth[tuple(prompt)]
                if len(truth) > 2000:
                    truth.pop(next(iter(truth)))

        async def killer() -> None:
            while True:
                before = counts["requests"]
                while counts["requests"] < before + args.kill_every:
                    await asyncio.sleep(0.003)
                await servers.kill(rng.randrange(args.servers))
                counts["kills"] += 1

        async def watcher() -> None:
            nonlocal most
            while True:
                most = max(most, await asyncio.to_thread(on_disk, root))
                show(f"killed {dict(counts)}, at most {most / 1e6:.1f} MB")
                await asyncio.sleep(1.0)

        beside = [asyncio.create_task(killer()), asyncio.create_task(watcher())]
        clients = asyncio.gather(*(client() for _ in range(N_CLIENTS)))
        ends: list[asyncio.Future[Any]] = [clients, *beside]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        for i, endpoint in enumerate(servers.endpoints):
            if endpoint is None:  # it was just being started
                await servers._wait(i)
        await servers.stop()
    finally:
        servers.drop()
        plain.drop()
    bytes_told = {"disk_bytes": int(args.disk_gb * 1e9), "most_bytes": most, "bytes_at_the_end": on_disk(root)}
    return dict(counts) | {"damaged_files": servers.n_damaged, "found_pages": servers.n_found} | bytes_told


async def anywhere(servers: Servers, prompt: list[int], rng: random.Random, counts: Counter[str]) -> tuple[int, Any]:
    """The answer of any server that lives long enough to give it. Raises RuntimeError."""
    for _ in range(MAX_TRIES):
        endpoint = rng.choice(servers.endpoints)
        if endpoint is not None:
            try:
                return await complete(endpoint, prompt)
            except (EndpointError, OSError, RuntimeError, ValueError) as error:
                if endpoint in servers.endpoints:
                    counts["refused"] += 1
                    counts["failed"] += "the engine could not run" in str(error)
        await asyncio.sleep(0.05)
    raise RuntimeError("no server answers")


async def first(args: argparse.Namespace, root: Path) -> Row:
    """Times to a first token."""
    rng, times = random.Random(args.seed + 2), {"computed": [], "found": [], "own disk": []}  # type: ignore[var-annotated]
    length = ["--max-model-len", str(args.tokens + 64)]
    pair = Servers(2, [*args.serve, *length, "--cache-dir", str(root), "--cache-disk-gb", "64"])
    bodies = [{"prompt": ids(rng, args.tokens, args.vocab), "max_tokens": 1} for _ in range(args.rounds)]
    cached = []
    try:
        await pair.ready()
        await asyncio.sleep(6.0)
        for body in bodies:
            one, two = pair.endpoints
            assert one is not None and two is not None
            times["computed"].append((await ask(one, body)).ttft_s)
            await asyncio.sleep(1.0)  # what is promised: it is on disk by then
            found = await ask(two, body)
            times["found"].append(found.ttft_s)
            cached.append(found.cached_tokens)
            await pair.kill(0)
            one = pair.endpoints[0]
            assert one is not None
            await ask(one, {"prompt": ids(rng, 100, args.vocab), "max_tokens": 1})  # it is warm
            times["own disk"].append((await ask(one, body)).ttft_s)
            show(f"first {times}")
        await pair.stop()
    finally:
        pair.drop()
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {
        "tokens": args.tokens,
        "cached_tokens": cached,
        "seconds": times,
        "median_s": middle,
        "damaged_files": pair.n_damaged,
    }


def show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:150]}", end="", file=sys.stderr, flush=True)


PARTS = {"same": same, "killed": killed, "first": first}


async def measure(args: argparse.Namespace) -> Row:
    found: Row = {}
    for name in args.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="deltic-shared-", dir=args.dir) as root:
            began = time.monotonic()
            found[name] = await PARTS[name](args, Path(root)) | {"took_s": round(time.monotonic() - began, 1)}
            show("")
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="of the part with kills")
    parser.add_argument("--same", type=int, default=600, help="requests of the part that compares cached tokens")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--kill-every", type=int, default=150, help="requests between two kills")
    parser.add_argument("--pages", type=int, default=8, help="pages that a family of prompts shares, at most")
    parser.add_argument("--disk-gb", type=float, default=0.05, help="--cache-disk-gb of the part with kills")
    parser.add_argument("--dummy", help="a shape with random weights, instead of the built-in model")
    parser.add_argument("--tokens", type=int, default=3000, help="of the prompt whose first token is timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=1000, help="ids from 0 to this are drawn for prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", help="the file system that is measured (default: that of temporary files)")
    parser.add_argument("--out", help="directory of the result (default: bench/runs/DATE-MACHINE)")
    args = parser.parse_args()
    args.serve = ["--threads", str(args.threads), "--max-num-seqs", "8"]
    args.serve += ["--dummy", args.dummy] if args.dummy else []
    found = asyncio.run(measure(args))
    failed = [
        f"{name}: {key}" for name, part in found.items() for key in ("damaged_files", "other_answers") if part.get(key)
    ]
    given = {name: value for name, value in vars(args).items() if name not in ("out", "dir", "serve")}
    told = {
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        "arguments": given,
        "failed": failed,
    } | found
    path = runs_directory(args.out) / f"shared-tier-{args.dummy or 'built-in'}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written: {path}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
