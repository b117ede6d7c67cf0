"""`deltic bench stalls`: how long running answers stand still while long prompts arrive.

Some answers decode; then prompts are computed beside them, one after another. Measured for each target of a step's time
(`--max-itl-ms` of the server) are the gaps between an answer's tokens, alone and beside the prompts, and what the target costs
the prompts. Answers repeat one token, whose text is whole, so every token is an event. Prints a table, writes JSON with every
gap and a PNG, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deltic.bench.load import WORDS, percentile
from deltic.bench.provenance import code, machine, now
from deltic.bench.report import report
from deltic.bench.sweep import numbers
from deltic.commands.endpoint import (
    DONE,
    Endpoint,
    EndpointError,
    LocalServer,
    ServerFailed,
    error_message,
    model_name,
)
from deltic.config import ConfigError

PATH = "/v1/completions"

ALONE_S = 3.0
"""How long the answers are measured before the first prompt comes."""


@dataclass
class Answers:
    """Answers that run until they are cancelled, each begun again when its context is full."""

    endpoint: Endpoint
    body: dict[str, Any]
    n_begun: int = 0
    gaps: list[tuple[float, float]] | None = None
    """(arrival, seconds since the token before), of all answers."""

    async def run(self) -> None:
        """One of them. Raises EndpointError."""
        while True:
            reply = await self.endpoint.open("POST", PATH, self.body)
            if reply.status != 200:
                raise EndpointError(error_message(msgspec.json.decode(await reply.read()), reply.status))
            last: float | None = None
            async for arrival, payload in reply.events():
                if payload == DONE or not msgspec.json.decode(payload)["choices"][0]["text"]:
                    continue
                if last is None:
                    self.n_begun += 1
                elif self.gaps is not None:
                    self.gaps.append((arrival, arrival - last))
                last = arrival


async def post(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Any:
    """Raises EndpointError unless the answer is 200."""
    status, answer = await endpoint.json("POST", path, body)
    if status != 200:
        raise EndpointError(f"{endpoint.url}{path}: {error_message(answer, status)}")
    return answer


async def measure(endpoint: Endpoint, arguments: argparse.Namespace) -> dict[str, Any]:
    """The gaps and the prompts' times with one server."""
    name, rng = await model_name(endpoint), random.Random(0)
    words = await post(endpoint, "/tokenize", {"model": name, "prompt": " ".join(WORDS)})
    ids, limit = words["tokens"], words["max_model_len"]
    token = (await post(endpoint, "/tokenize", {"model": name, "prompt": "a"}))["tokens"][0]
    answers = Answers(
        endpoint,
        {
            "model": name, "prompt": rng.choices(ids, k=16), "max_tokens": limit - 32, "stream": True,
            "ignore_eos": True, "temperature": 0, "logit_bias": {str(token): 100},
        },
    )  # fmt: skip
    tasks = [asyncio.create_task(answers.run()) for _ in range(arguments.n)]
    try:
        while answers.n_begun < arguments.n:
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()
        alone: list[tuple[float, float]] = []
        answers.gaps = alone
        await asyncio.sleep(ALONE_S)
        beside: list[tuple[float, float]] = []
        answers.gaps, begin, seconds = beside, time.perf_counter(), []
        for _ in range(arguments.prompts):
            prompt, sent = rng.choices(ids, k=arguments.prompt_tokens), time.perf_counter()
            await post(endpoint, PATH, {"model": name, "prompt": prompt, "max_tokens": 1})
            seconds.append(time.perf_counter() - sent)
        answers.gaps = None
        for task in tasks:
            if task.done():
                task.result()  # it failed, and the rest had the server for itself
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "model": name,
        "alone_ms": spread([gap for _, gap in alone]),
        "beside_ms": spread([gap for _, gap in beside]),
        "prompt_s": round(statistics.median(seconds), 3),
        "prompt_tok_s": round(arguments.prompt_tokens * len(seconds) / sum(seconds), 1),
        "gaps": [(round(at - begin, 4), round(gap * 1e3, 2)) for at, gap in beside],
    }


def spread(gaps: list[float]) -> dict[str, float | None]:
    """Milliseconds: p50, p99 and the longest."""
    points = {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99), "max": max(gaps, default=None)}
    return {name: None if value is None else round(value * 1e3, 1) for name, value in points.items()}


async def _run(arguments: argparse.Namespace, server_arguments: list[str], console: Console) -> list[Any]:
    rows = []
    for target in arguments.targets:
        server = LocalServer([*server_arguments, "--max-itl-ms", f"{target:g}"])
        try:
            with console.status("starting the server"):
                endpoint = await server.wait_ready()
            with console.status(f"target {target:g} ms: {arguments.prompts} prompts"):
                row = await measure(endpoint, arguments)
                status, ready = await endpoint.json("GET", "/ready")
            fit_s = ready.get("start_s", {}).get("fit") if status == 200 else None
            rows.append({"target_ms": target, "fit_s": fit_s, **row})
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.stop()
    return rows


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title, title_justify="left")
    for name in (
        "target ms", "alone, ITL ms\np50 / p99 / max", "beside prompts, ITL ms\np50 / p99 / max", "a prompt s\nmedian",
        "prompt tok/s",
    ):  # fmt: skip
        out.add_column(name, justify="right")
    for row in rows:
        spreads = [
            " / ".join("-" if v is None else f"{v:.0f}" for v in row[name].values())
            for name in ("alone_ms", "beside_ms")
        ]
        target = f"{row['target_ms']:g}" if row["target_ms"] else "none"
        out.add_row(target, *spreads, f"{row['prompt_s']:.2f}", f"{row['prompt_tok_s']:.0f}")
    return out


def bench(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command. Exit status 1 when a server failed."""
    arguments.targets = [0.0 if t == "0" else numbers(t, "--targets", float)[0] for t in arguments.targets.split(",")]  # fmt: skip
    if min(arguments.n, arguments.prompts, arguments.prompt_tokens) < 1:
        raise ConfigError("--n, --prompts and --prompt-tokens must be at least 1")
    console = Console(stderr=True)
    try:
        rows = asyncio.run(_run(arguments, server_arguments, console))
    except (EndpointError, ServerFailed) as error:
        print(f"deltic: {error}", file=sys.stderr)
        return 1
    label = rows[0]["model"]
    result = {
        "bench": "stalls", "label": label, "date": now().isoformat(), "machine": machine(), "code": code(),
        "serve": server_arguments, "n": arguments.n, "prompt_tokens": arguments.prompt_tokens,
        "prompts": arguments.prompts, "rows": rows,
    }  # fmt: skip
    title = f"{label}: {arguments.n} answers beside prompts of {arguments.prompt_tokens} tokens, one after another"
    report(result, table(rows, title), arguments.out, _draw, raw="gaps")
    return 0


def _draw(path: Path, picture: Path) -> None:
    from deltic.bench.plot import draw_stalls

    draw_stalls(path, picture)
