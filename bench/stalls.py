"""How long running answers stand still while long prompts arrive:
`python -m bench.stalls --dummy qwen3.5-0.8b`.

Some answers decode; then prompts are computed beside them, one after another. Measured for each target of a
step's time (`--max-itl-ms` of the server) are the gaps between an answer's tokens, alone and beside the
prompts, and what the target costs the prompts. Answers repeat one token, whose text is whole, so every token
is an event. Prints a table, writes JSON with every gap and a PNG, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deltic.__main__ import finished
from deltic.bench.load import WORDS, percentile
from deltic.bench.provenance import code, machine, now
from deltic.bench.sweep import numbers, report
from deltic.commands.endpoint import DONE, Endpoint, EndpointError, LocalServer, ServerFailed, error_message, model_name
from deltic.commands.flags import add_flags, add_table
from deltic.commands.settings import own_arguments
from deltic.config import ConfigError, EngineConfig

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
                if payload == DONE:
                    continue
                event = msgspec.json.decode(payload)
                if event.get("error") or event["choices"][0]["finish_reason"] not in (None, "length"):
                    raise EndpointError(f"an answer that was to fill its context ended: {payload[:300]!r}")
                if not event["choices"][0]["text"]:
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
            "model": name,
            "prompt": rng.choices(ids, k=16),
            "max_tokens": limit - 32,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "logit_bias": {str(token): 100},
        },
    )
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


async def _run(arguments: argparse.Namespace, serve: list[str], console: Console) -> list[Any]:
    rows = []
    for target in arguments.targets:
        server = LocalServer([*serve, "--max-itl-ms", f"{target:g}"])
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
        "target ms",
        "alone, ITL ms\np50 / p99 / max",
        "beside prompts, ITL ms\np50 / p99 / max",
        "a prompt s\nmedian",
        "prompt tok/s",
    ):
        out.add_column(name, justify="right")
    for row in rows:
        spreads = [
            " / ".join("-" if v is None else f"{v:.0f}" for v in row[name].values())
            for name in ("alone_ms", "beside_ms")
        ]
        target = f"{row['target_ms']:g}" if row["target_ms"] else "none"
        out.add_row(target, *spreads, f"{row['prompt_s']:.2f}", f"{row['prompt_tok_s']:.0f}")
    return out


def bench(arguments: argparse.Namespace, serve: list[str]) -> int:
    """Measures and reports. Exit status 1 when a server failed."""
    texts = arguments.targets.split(",")
    arguments.targets = [0.0 if text == "0" else numbers(text, "--targets", float)[0] for text in texts]
    if min(arguments.n, arguments.prompts, arguments.prompt_tokens) < 1:
        raise ConfigError("--n, --prompts and --prompt-tokens must be at least 1")
    console = Console(stderr=True)
    try:
        rows = asyncio.run(_run(arguments, serve, console))
    except (EndpointError, ServerFailed) as error:
        print(f"deltic: {error}", file=sys.stderr)
        return 1
    label = rows[0]["model"]
    result = {
        "bench": "stalls",
        "label": label,
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        "serve": serve,
        "n": arguments.n,
        "prompt_tokens": arguments.prompt_tokens,
        "prompts": arguments.prompts,
        "rows": rows,
    }
    title = f"{label}: {arguments.n} answers beside prompts of {arguments.prompt_tokens} tokens, one after another"
    report(result, table(rows, title), arguments.out, _draw, raw="gaps")
    return 0


def _draw(path: Path, picture: Path) -> None:
    """Writes `picture` (PNG) of a result: every gap over time, and their distribution.

    Raises ModuleNotFoundError.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    figure, (over_time, part) = pyplot.subplots(1, 2, figsize=(14, 4.6))
    for row in result["rows"]:
        label = f"target {row['target_ms']:g} ms" if row["target_ms"] else "no target"
        gaps = sorted(gap for _, gap in row["gaps"])
        (line,) = part.plot(gaps, [(i + 1) / len(gaps) for i in range(len(gaps))], label=label)
        over_time.plot(*zip(*row["gaps"], strict=True), ".", markersize=3, color=line.get_color(), label=label)
        if row["target_ms"]:
            for axis, draw_line in ((over_time, over_time.axhline), (part, part.axvline)):
                draw_line(row["target_ms"], color=line.get_color(), linestyle=":", linewidth=1)
                axis.grid(alpha=0.3)
    over_time.set(xlabel="s", ylabel="ms", title="time between two tokens of an answer")
    part.set(xlabel="ms", xscale="log", title="part of the gaps that are at most so long")
    over_time.legend(frameon=False)
    figure.suptitle(
        f"{result['label']}: {result['n']} answers beside prompts of {result['prompt_tokens']} tokens · "
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores · {result['date'][:10]}"
    )
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m bench.stalls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_table(parser, "model")
    add = parser.add_argument
    text = "--max-itl-ms of each server; 0: none (default: 250,0)"
    add("--targets", default="250,0", metavar="MS,MS,...", help=text)
    add("--n", type=int, default=8, metavar="N", help="answers that run (default: 8)")
    add("--prompts", type=int, default=4, metavar="N", help="long prompts (default: 4)")
    add("--prompt-tokens", type=int, default=8192, metavar="T", help="default: 8192")
    add("--out", metavar="DIR", help="directory of the results (default: bench/runs/<date>-<machine>)")
    add_flags(parser, EngineConfig, but=("model", "max_itl_ms"))
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    arguments = parsed(given)
    return finished(lambda: bench(arguments, own_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
