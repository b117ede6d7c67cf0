"""What the prefix cache does to a request, over HTTP: `python -m bench.prefix [--dummy qwen3.5-0.8b]`.

Two servers of our own run side by side, with the cache and without; only one of them has work at a time.
Items, each measured once a round:
  system        chat with a system message of 448 tokens, then with another user message of 64: TTFT of the
                second over the first's
  repeat        a completion of 512 token ids, twice: TTFT of the second over the first's
  conversation  30 turns of a chat, each answer put into the history: TTFT fitted as
                a + b * new tokens + c * all tokens
  cold 512, cold 2048   two prompts that nobody sent before, to both servers: TTFT with the cache over without
  restart       a conversation on a server with --cache-dir; the server is started again: cached tokens of the
                next turn, then over before
  short         2,000 prompts of 200 tokens that share 128, 8 at once, to both servers: time with the cache
                over without

What is fair about it: no two rounds share a prompt; the halves of a ratio come from the same minute of the
same machine, with the order of the servers changing; the client is on the same cores for both. An answer of
one token ends with the first event that counts, so nothing that the detokenizer holds back can hide its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.agent_trace import Message, Writer
from deltic.bench.provenance import code, fault_of, machine, now, runs_directory
from deltic.commands.endpoint import DONE, Endpoint, LocalServer, ServerFailed
from deltic.config import BUILT_IN, EngineConfig
from deltic.models.checkpoint import model_name, text_directory
from deltic.text import Tokenizer

Row = dict[str, Any]

MODEL = "model"
"""What the servers call theirs."""
ITEMS = ("system", "repeat", "conversation", "cold", "restart", "short")
TARGETS: dict[str, tuple[str, float]] = {
    "system": ("<=", 0.25),
    "repeat": ("<=", 0.15),
    "cold 512": ("<=", 1.02),
    "cold 2048": ("<=", 1.02),
    "restart": (">=", 0.95),
    "short": ("<=", 0.6),
}
SYSTEM_TOKENS, USER_TOKENS = 448, 64
ANSWER_TOKENS = 24
"""Of a turn of the conversation."""
N_RESTART_TURNS = 4
N_AT_ONCE = 8
SHORT_TOKENS, SHORT_SHARED = 200, 128


@dataclass
class Answered:
    """Seconds to the first event that shows a token, and what the answer and its usage say."""

    ttft_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int


async def ask(endpoint: Endpoint, body: Row) -> Answered:
    """Streams one completion, or chat if the body has messages.

    Raises RuntimeError for a refusal, and for an answer of another length than `max_tokens`.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    fixed = {
        "model": MODEL,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: Row = {}
    reason = None
    begin, first, text = time.perf_counter(), 0.0, ""
    reply = await endpoint.open("POST", path, fixed | body)
    if reply.status != 200:
        raise RuntimeError((await reply.read()).decode())
    async for arrival, payload in reply.events():
        if payload == DONE:
            continue
        event = msgspec.json.decode(payload)
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            said = delta.get("content") or delta.get("reasoning_content") or delta.get("text") or ""
            if not first and (said or choice.get("finish_reason")):
                first = arrival
            text += said
            reason = choice.get("finish_reason") or reason
    if not first:
        raise RuntimeError(f"the answer ended without a token: {usage or 'no usage'}")
    if fault := fault_of(reason, usage["completion_tokens"], body["max_tokens"]):
        raise RuntimeError(fault)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answered(first - begin, text, usage["prompt_tokens"], cached)


def fit_ttft(points: Sequence[tuple[float, float, float]]) -> Row | None:
    """Least squares of seconds = a + b * new tokens + c * all tokens over (new, all, seconds).

    None for fewer than four points, or where both counts rise as one, as without a cache. `total_share`: the
    part of the mean time that c * all tokens makes, 0 if a turn costs its new tokens only.
    """
    if len(points) < 4:
        return None
    new, total, seconds = np.array(points, np.float64).T
    (a, b, c), _, rank, _ = np.linalg.lstsq(np.stack([np.ones_like(new), new, total], 1), seconds, rcond=None)
    if rank < 3:
        return None
    share = c * total.mean() / seconds.mean()
    return {"a_s": float(a), "b_s_per_new": float(b), "c_s_per_total": float(c), "total_share": float(share)}


class Prompts:
    """Prompts that nobody has seen: each is made from a seed and a counter."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self._seed = seed
        self._tokenizer = tokenizer
        self._n = 0

    def text(self, n_tokens: int) -> str:
        """Prose of so many tokens, or one or two off: where it is cut, letters may join in another way."""
        self._n += 1
        writer = Writer(f"prefix {self._seed} {self._n}", lambda text: len(self._tokenizer.encode(text)))
        # The counter first: two texts must not begin alike by chance.
        text = f"{self._seed}.{self._n}: " + writer.text("prose", n_tokens)
        return self._tokenizer.decode(self._tokenizer.encode(text)[:n_tokens])

    def ids(self, n_tokens: int) -> list[int]:
        self._n += 1
        rng = random.Random(f"prefix {self._seed} {self._n}")
        return [rng.randrange(1000) for _ in range(n_tokens)]


class Bench:
    """The servers, and a method for each item: a row of what one round found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        names = ("model", "dummy", "quantize")
        given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        config = EngineConfig(**given)
        self.name = model_name(config)
        self.prompts = Prompts(arguments.seed, Tokenizer.load(text_directory(config)))
        self.flags = ["--served-model-name", MODEL, "--max-num-seqs", str(N_AT_ONCE)]
        length = {"max_model_len": arguments.max_model_len, "threads": arguments.threads}
        for name, value in (given | length).items():
            if value is not None:
                self.flags += ["--" + name.replace("_", "-"), str(value)]
        self.n_items = 0
        self.is_built_in = config.dummy is None and config.model == BUILT_IN

    async def start(self, *flags: str) -> tuple[LocalServer, Endpoint]:
        server = LocalServer([*self.flags, *flags])
        try:
            return server, await server.wait_ready()
        except BaseException:
            server.stop()
            raise

    async def run(self, progress: Callable[[str], None]) -> list[Row]:
        """All rounds; a row for each item and round, with the item's `value`. Raises ServerFailed."""
        rows: list[Row] = []
        on_server, on = await self.start()
        try:
            off_server, off = await self.start("--no-prefix-cache")
            try:
                items = self._items(on, off)
                for name, item in items.items():  # a first time for whatever happens only once
                    if not name.startswith(("conversation", "restart", "short")):
                        await item(0)
                for i in range(self.arguments.rounds):
                    for name, item in items.items():
                        progress(f"round {i + 1}, {name}")
                        rows.append({"item": name, "round": i} | await item(i))
            finally:
                off_server.stop()
        finally:
            on_server.stop()
        return rows

    def _items(self, on: Endpoint, off: Endpoint) -> dict[str, Callable[[int], Awaitable[Row]]]:
        all_items: dict[str, Callable[[int], Awaitable[Row]]] = {
            "system": lambda i: self.system(on),
            "repeat": lambda i: self.repeat(on),
            "conversation": lambda i: self.conversation(on),
            "cold 512": lambda i: self.cold(on, off, 512),
            "cold 2048": lambda i: self.cold(on, off, 2048),
            "restart": lambda i: self.restart(),
            "short": lambda i: self.short(on, off, i),
        }
        wanted = [name for name in self.arguments.items if name != "short" or self.n_short]
        items = {name: item for name, item in all_items.items() if name.split()[0] in wanted}
        self.n_items = len(items)
        return items

    @property
    def n_short(self) -> int:
        given: int | None = self.arguments.short_prompts
        return given if given is not None else 2000 if self.is_built_in else 0

    async def system(self, endpoint: Endpoint) -> Row:
        """Two chats that share a system message."""
        system = {"role": "system", "content": self.prompts.text(SYSTEM_TOKENS)}
        found = []
        for _ in range(2):
            user = {"role": "user", "content": self.prompts.text(USER_TOKENS)}
            found.append(await ask(endpoint, {"messages": [system, user], "max_tokens": 1}))
        return _second_over_first(found)

    async def repeat(self, endpoint: Endpoint) -> Row:
        """One prompt, twice."""
        body = {"prompt": self.prompts.ids(512), "max_tokens": 1}
        return _second_over_first([await ask(endpoint, body) for _ in range(2)])

    async def conversation(self, endpoint: Endpoint) -> Row:
        """A chat of many turns. `value`: the share of the time that the length of what came before makes."""
        turns: list[Row] = []
        messages: list[Message] = [{"role": "system", "content": self.prompts.text(100)}]
        rng = random.Random(f"conversation {self.arguments.seed}")
        for turn in range(self.arguments.turns):
            messages.append({"role": "user", "content": self.prompts.text(rng.randint(20, 110))})
            answer = await ask(endpoint, {"messages": messages, "max_tokens": ANSWER_TOKENS})
            messages.append({"role": "assistant", "content": answer.text})
            turns.append(
                {
                    "turn": turn,
                    "prompt_tokens": answer.prompt_tokens,
                    "cached_tokens": answer.cached_tokens,
                    "ttft_s": answer.ttft_s,
                }
            )
        fit = fit_ttft(_points(turns))
        return {"value": fit["total_share"] if fit else None, "fit": fit, "turns": turns}

    async def cold(self, on: Endpoint, off: Endpoint, n_tokens: int) -> Row:
        """Two prompts that are new to both servers: each server is the first to get one of them, as that is
        slower.
        """
        spent = {"on": 0.0, "off": 0.0}
        for turn in range(2):
            body = {"prompt": self.prompts.ids(n_tokens), "max_tokens": 1}
            for name, endpoint in _in_turns(turn, on, off):
                answer = await ask(endpoint, body)
                if answer.cached_tokens:
                    raise RuntimeError(f"a prompt that was new had {answer.cached_tokens} tokens in the cache")
                spent[name] += answer.ttft_s
        return {"value": spent["on"] / spent["off"], "on_s": spent["on"], "off_s": spent["off"]}

    async def restart(self) -> Row:
        """The next turn of a conversation, before and after the server was started again with the same
        directory.
        """
        messages: list[Message] = [{"role": "system", "content": self.prompts.text(SYSTEM_TOKENS)}]
        found = []
        with tempfile.TemporaryDirectory(prefix="deltic-prefix-") as directory:
            for is_after in (False, True):
                server, endpoint = await self.start("--cache-dir", directory)
                try:
                    for _ in range(0 if is_after else N_RESTART_TURNS):
                        messages.append({"role": "user", "content": self.prompts.text(USER_TOKENS)})
                        answer = await ask(endpoint, {"messages": messages, "max_tokens": ANSWER_TOKENS})
                        messages.append({"role": "assistant", "content": answer.text})
                    # Two different next turns: neither may find what the other left.
                    user = {"role": "user", "content": self.prompts.text(USER_TOKENS)}
                    found.append(await ask(endpoint, {"messages": [*messages, user], "max_tokens": 1}))
                finally:
                    server.stop(60.0)
            n_bytes = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
        before, after = found
        return {
            "value": after.cached_tokens / before.cached_tokens if before.cached_tokens else None,
            "before": msgspec.to_builtins(before),
            "after": msgspec.to_builtins(after),
            "disk_bytes": n_bytes,
        }

    async def short(self, on: Endpoint, off: Endpoint, round_: int) -> Row:
        """Many short prompts that share their first half."""
        shared = self.prompts.ids(SHORT_SHARED)
        prompts = [shared + self.prompts.ids(SHORT_TOKENS - SHORT_SHARED) for _ in range(self.n_short)]
        spent: dict[str, float] = {}
        for name, endpoint in _in_turns(round_, on, off):
            waiting = iter(prompts)

            async def client(endpoint: Endpoint = endpoint, waiting: Any = waiting) -> None:
                for prompt in waiting:
                    await ask(endpoint, {"prompt": prompt, "max_tokens": 1})

            begin = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(N_AT_ONCE)))
            spent[name] = time.perf_counter() - begin
        return {"value": spent["on"] / spent["off"], "on_s": spent["on"], "off_s": spent["off"], "n": len(prompts)}


def _in_turns(round_: int, on: Endpoint, off: Endpoint) -> list[tuple[str, Endpoint]]:
    both = [("on", on), ("off", off)]
    return both if round_ % 2 else both[::-1]


def _second_over_first(found: Sequence[Answered]) -> Row:
    first, second = found
    return {
        "value": second.ttft_s / first.ttft_s,
        "first": msgspec.to_builtins(first),
        "second": msgspec.to_builtins(second),
    }


def _points(turns: Sequence[Row]) -> list[tuple[float, float, float]]:
    """What fit_ttft takes: the turns after the first, whose prompt is all new."""
    return [(t["prompt_tokens"] - t["cached_tokens"], t["prompt_tokens"], t["ttft_s"]) for t in turns if t["turn"]]


def summarise(rows: Sequence[Row]) -> list[Row]:
    """A row for each item: median and range of its value, and whether it meets its target, if any."""
    found = []
    for item in dict.fromkeys(row["item"] for row in rows):
        of = [row for row in rows if row["item"] == item]
        values = [row["value"] for row in of if row["value"] is not None]
        summary: Row = {"item": item, "n": len(values), "target": None, "met": None, "median": None}
        if values:
            summary |= {"median": statistics.median(values), "min": min(values), "max": max(values)}
        if item in TARGETS:
            sign, bound = TARGETS[item]
            summary["target"] = f"{sign} {bound:g}"
            value = summary["median"]
            summary["met"] = value is not None and (value <= bound if sign == "<=" else value >= bound)
        if item == "conversation":
            summary["fit"] = fit_ttft([point for row in of for point in _points(row["turns"])])
        found.append(summary)
    return found


def show(result: Row, console: Console) -> None:
    """The table, and the fit of the conversations."""
    table = Table(title=f"prefix cache over HTTP, {result['model']}: medians of {result['rounds']} rounds")
    for head in ("item", "median", "from", "to", "target", "met"):
        table.add_column(head, justify="left" if head == "item" else "right")
    for row in result["summary"]:
        if row["median"] is None:
            figures = ["nothing was cached", "", ""]
        else:
            figures = [f"{row[name]:.3f}" for name in ("median", "min", "max")]
        met = "" if row["met"] is None else "[green]yes" if row["met"] else "[red]no"
        table.add_row(row["item"], *figures, row["target"] or "", met)
    console.print(table)
    fit = next((row.get("fit") for row in result["summary"] if row["item"] == "conversation"), None)
    if fit:
        console.print(
            f"conversation: TTFT = {fit['a_s'] * 1e3:.2f} ms + {fit['b_s_per_new'] * 1e6:.1f} us a new token "
            f"+ {fit['c_s_per_total'] * 1e6:.2f} us a token in all, which is {fit['total_share']:.1%} of the mean"
        )


def draw(result: Row, path: Path) -> None:
    """Writes a PNG: the ratios with their targets, and the turns of the conversations."""
    figure = Figure(figsize=(16, 4.6))
    ratios, by_turn, by_new = figure.subplots(1, 3)
    shown = [row for row in result["summary"] if row["item"] != "conversation" and row["median"] is not None]
    for at, row in enumerate(shown):
        values = [r["value"] for r in result["rows"] if r["item"] == row["item"] and r["value"] is not None]
        ratios.bar(at, row["median"], color="C0", alpha=0.5)
        ratios.plot([at] * len(values), values, "o", color="C0", markersize=3)
        if row["target"]:
            ratios.plot([at - 0.4, at + 0.4], [TARGETS[row["item"]][1]] * 2, color="C3")
    ratios.set_xticks(range(len(shown)), [row["item"] for row in shown], rotation=20)
    ratios.set(title="ratio: median, rounds, and target (red)")
    turns = [turn for row in result["rows"] if row["item"] == "conversation" for turn in row["turns"]]
    totals = [turn["prompt_tokens"] for turn in turns]
    by_turn.scatter([turn["turn"] for turn in turns], [turn["ttft_s"] * 1e3 for turn in turns], s=10)
    by_turn.set(title="conversation: TTFT of each turn", xlabel="turn", ylabel="ms")
    new = [turn["prompt_tokens"] - turn["cached_tokens"] for turn in turns]
    dots = by_new.scatter(new, [turn["ttft_s"] * 1e3 for turn in turns], c=totals, s=10)
    by_new.set(title="the same over new tokens", xlabel="prompt tokens not cached", ylabel="ms")
    if turns:
        figure.colorbar(dots, ax=by_new, label="prompt tokens")
    for axis in (ratios, by_turn, by_new):
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.suptitle(f"prefix cache · {result['model']} · {result['machine']['cpu']} · {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="checkpoint directory or hub name (default: the built-in model)")
    add("--dummy", metavar="SHAPE", help="random weights at a published shape, e.g. qwen3.5-0.8b")
    add("--quantize", choices=("int8", "int4", "int4-symmetric"))
    add("--threads", type=int, help="CPU threads of each server's engine")
    add("--max-model-len", type=int, help="of each server (default: the model's, at most 32768)")
    add("--rounds", type=int, default=5)
    add("--turns", type=int, default=30, help="of the conversation")
    add("--short-prompts", type=int, help="how many (default: 2000 with the built-in model, else none)")
    add("--items", type=lambda text: text.split(","), default=list(ITEMS), help=f"some of {','.join(ITEMS)}")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--out", metavar="DIR", help="for the JSON and the PNG (default: bench/runs/<date>-<machine>)")
    arguments = parser.parse_args(given)
    if unknown := set(arguments.items) - set(ITEMS):
        parser.error(f"--items: unknown {', '.join(sorted(unknown))}; there are {', '.join(ITEMS)}")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    arguments = parsed(given)
    console, bench = Console(), Bench(arguments)
    with Progress(console=console) as progress:
        task = progress.add_task("starting", total=None)

        def step(what: str) -> None:
            progress.update(task, description=what, total=bench.n_items * arguments.rounds, advance=1)

        try:
            rows = asyncio.run(bench.run(step))
        except ServerFailed as error:
            progress.stop()
            console.print(f"[red]{error}")
            return 2
    result: Row = {"bench": "prefix", "date": now().isoformat(), "machine": machine(), "code": code()}
    result["model"] = bench.name
    fields = ("quantize", "threads", "max_model_len", "rounds", "turns", "seed")
    result |= {name: getattr(arguments, name) for name in fields}
    result |= {"summary": summarise(rows), "rows": rows}
    stem = f"prefix-{bench.name.replace('/', '-')}-{arguments.quantize or 'bf16'}-{now():%H%M%S}"
    path = runs_directory(arguments.out) / f"{stem}.json"
    path.write_text(json.dumps(result, indent=1))
    draw(result, path.with_suffix(".png"))
    show(result, console)
    console.print(f"{path} and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
