"""Models that come and go, memory for one and a half of three: `python -m bench.on_demand [MODEL ...]`.

Requests in random order go to models that do not fit together. None may be lost, and none may differ from
what a server of its model alone answers. Beside that it times a load where nothing else is loaded, one that
has to unload another first, and the start of a server with that model alone. And it has two models answer at
once: each in its own process, and both in one that takes turns.

Without a MODEL it writes three tiny checkpoints. Larger ones, of random weights, are written by
`write_checkpoint` (peers_model.py), and need a tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from deltic.__main__ import finished
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.commands.endpoint import LocalServer
from deltic.config import ConfigError
from tests.tiny import tiny_checkpoint

PROMPTS = ("Once upon a time", "The", "A longer prompt, which has more tokens than the others have, and says so.")
TIMEOUT_S = 600.0

Asked = tuple[str, int]
"""Model, and which of PROMPTS."""


class Client:
    """A server that was started, and what it is asked."""

    def __init__(self, arguments: list[str]) -> None:
        begun_s = time.perf_counter()
        self.server = LocalServer(arguments)
        asyncio.run(self.server.wait_ready())
        self.start_s = time.perf_counter() - begun_s
        headers = {"authorization": f"Bearer {self.server.api_key}"}
        self.http = httpx.Client(base_url=self.server.url, headers=headers, timeout=TIMEOUT_S)

    def close(self) -> None:
        self.http.close()
        self.server.stop()

    def answer(self, asked: Asked, n_tokens: int) -> str:
        """The text; "" with its status where there is none."""
        model, i = asked
        body = {"model": model, "prompt": PROMPTS[i], "max_tokens": n_tokens, "seed": i, "ignore_eos": True}
        reply = self.http.post("/v1/completions", json=body | {"temperature": 0.8, "return_token_ids": True})
        if reply.status_code != 200:
            return f"status {reply.status_code}: {reply.text[:200]}"
        return json.dumps(reply.json()["choices"][0]["token_ids"])

    def seconds(self, model: str) -> float:
        """Seconds until a model has answered a token."""
        begun_s = time.perf_counter()
        self.answer((model, 1), 1)
        return time.perf_counter() - begun_s

    def unload(self, model: str) -> None:
        """Returns once it is unloaded."""
        self.http.post("/v1/models/unload", json={"model": model}).raise_for_status()
        while self.http.get("/health").json()["models"][model]["status"] != "unloaded":
            time.sleep(0.01)

    def needs(self) -> dict[str, int]:
        """Bytes that each loaded model may take."""
        models = self.http.get("/api/ps").json()["models"]
        return {model["name"].removesuffix(":latest"): model["size"] for model in models}

    def total(self, metric: str) -> float:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return sum(s.value for family in families for s in family.samples if s.name == metric)


def _rates(client: Client, names: Sequence[str], n_tokens: int) -> list[float]:
    """Tokens/s of an answer of each model, all at once."""

    def rate(name: str) -> float:
        begun_s = time.perf_counter()
        client.answer((name, 0), n_tokens)
        return round(n_tokens / (time.perf_counter() - begun_s), 2)

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(rate, names))


def bench(arguments: argparse.Namespace) -> int:
    """Prints a table and a last line of JSON, and writes a JSON file. Exit status 1: a request was lost, or
    an answer differs.
    """
    with tempfile.TemporaryDirectory(prefix="deltic-on-demand-") as folder:
        names = _models(arguments, Path(folder))
        result = _measured(arguments, Path(folder), names)
    table = Table("", *names, title=f"{len(names)} models, {arguments.requests} requests", title_justify="left")
    for row in ("start_s", "load_s", "swap_s"):
        table.add_row(row, *(f"{statistics.median(result[row][name]):.2f}" for name in names))
    console = Console()
    console.print(table)
    console.print(
        f"{result['n_loads']:.0f} loads, {result['n_lost']} lost, {result['n_different']} different, {result['seconds']:.1f} s; a swap "
        f"took {result['swap_over_load']:.2f} of a load"
    )
    for what, rates in result["rates"].items():
        said = ", ".join(f"{statistics.median(of):.1f}" for of in zip(*rates, strict=True))
        console.print(f"tokens/s of {' and '.join(names[:2])}, {what}: {said}")
    path = runs_directory(arguments.out) / f"on-demand-{now():%H%M%S}.json"
    about = {"bench": "on_demand", "date": now().isoformat(timespec="seconds"), "machine": machine(), "code": code()}
    path.write_text(json.dumps(about | result, indent=1) + "\n")
    print(json.dumps({"bench": "on_demand", "file": str(path), "swap_over_load": result["swap_over_load"]}))
    return 1 if result["n_lost"] or result["n_different"] else 0


def _models(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Puts the models into a directory; their names. Raises ConfigError."""
    if not arguments.models:
        for seed, kind in enumerate(("dense", "moe", "next")):
            shutil.copytree(tiny_checkpoint(kind, seed=seed), folder / kind)
        return ["dense", "moe", "next"]
    for given in map(Path, arguments.models):
        if not given.is_dir() or (folder / given.name).exists():
            raise ConfigError(f"{given}: give directories, of different names")
        (folder / given.name).symlink_to(given.resolve())
    return [Path(given).name for given in arguments.models]


def _measured(arguments: argparse.Namespace, folder: Path, names: list[str]) -> dict[str, Any]:
    engine, n_tokens = ["--threads", str(arguments.threads), "--max-model-len", "2048"], arguments.tokens
    start_s: dict[str, list[float]] = {name: [] for name in names}
    alone: dict[Asked, str] = {}
    for _ in range(arguments.rounds):
        for name in names:
            client = Client([str(folder / name), "--served-model-name", name, *engine])
            start_s[name].append(client.start_s)
            alone |= {(name, i): client.answer((name, i), n_tokens) for i in range(len(PROMPTS))}
            client.close()
    demand = ["--models-from", str(folder), "--keep-alive", "-1", *engine]
    client = Client(demand)
    for name in names:
        client.seconds(name)
    needs, both = client.needs(), names[:2]
    first, second = (["--served-model-name", name, *engine] for name in both)
    turns = Client([str(folder / both[0]), *first, "--and", str(folder / both[1]), *second[:2], *second[4:]])
    rates: dict[str, list[list[float]]] = {"alone": [], "two processes": [], "one process": []}
    for _ in range(arguments.rounds):
        rates["alone"].append([_rates(client, [name], arguments.long)[0] for name in both])
        rates["two processes"].append(_rates(client, both, arguments.long))
        rates["one process"].append(_rates(turns, both, arguments.long))
    turns.close()
    client.close()
    limit_gb = 1.5 * max(needs.values()) / 1e9
    client = Client([*demand, "--models-gb", f"{limit_gb:.4f}"])
    load_s: dict[str, list[float]] = {name: [] for name in names}
    swap_s: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # plans it, and has its files in the system's cache
        client.seconds(name)
    for _ in range(arguments.rounds):
        for i, name in enumerate(names):
            for other in client.needs():
                client.unload(other)
            load_s[name].append(client.seconds(name))
            client.seconds(names[i - 1])
            swap_s[name].append(client.seconds(name))
    asked = random.Random(arguments.seed).choices(list(alone), k=arguments.requests)
    before, begun_s = client.total("deltic_model_loads_total"), time.perf_counter()
    with ThreadPoolExecutor(arguments.concurrency) as pool:
        answers = list(pool.map(lambda one: client.answer(one, n_tokens), asked))
    seconds = time.perf_counter() - begun_s
    n_loads = client.total("deltic_model_loads_total") - before
    client.close()
    lost = [answer for answer in answers if answer.startswith("status")]
    different = [one for one, answer in zip(asked, answers, strict=True) if answer not in (alone[one], *lost)]
    middle = {row: sum(statistics.median(times) for times in of.values()) for row, of in (("l", load_s), ("s", swap_s))}
    return {
        "arguments": {
            "requests": arguments.requests,
            "concurrency": arguments.concurrency,
            "tokens": n_tokens,
            "long": arguments.long,
            "engine": engine,
        },
        "needs_bytes": needs,
        "models_gb": limit_gb,
        "start_s": start_s,
        "load_s": load_s,
        "swap_s": swap_s,
        "rates": rates,
        "swap_over_load": round(middle["s"] / middle["l"], 3),
        "n_loads": n_loads,
        "seconds": round(seconds, 3),
        "n_lost": len(lost),
        "lost": lost[:5],
        "n_different": len(different),
    }


def main(given: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser("python -m bench.on_demand", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="directories (default: three tiny checkpoints)")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="of an answer; default: 16")
    parser.add_argument(
        "--long", type=int, default=128, metavar="N", help="tokens of answers side by side; default: 128"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each time; default: 5")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    arguments = parser.parse_args(given)
    return finished(lambda: bench(arguments))


if __name__ == "__main__":
    sys.exit(main())
