"""The prefix cache under coding agents: `python -m bench.agent --dummy qwen3.5-0.8b --quantize int8`.

Replays the trace of `bench.agent_trace` on an engine in this process, as the server would run it: the same
templates, message boundaries and steps; prompts are rendered in another thread, as the server renders them in
another process. A session sends its next request when the answer to the last one is complete; several
sessions run at once. So the ids of every prompt and of every answer are known here, and with them what the
best of all caches could have reused (`agent_trace.Oracle`): of everything computed by the time a request was
made, the longest beginning in common, in whole pages. The headline is the share of that which was reused.

runs   "all"        pools so large that nothing need leave them; in the end they hold the memory the trace
                    wants
       "share S"    pools of S times as many pages and as many checkpoints, and no host memory below them
       "off"        with --off: without a prefix cache (each turn computes its whole prompt: slow)
cold   prompts that share nothing, one at a time, on an engine with the cache and on one without, in turns:
       the cost of having it

A time to the first token is counted from when the prompt was rendered, waiting for a place in the engine's
step included.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.agent_replay import Replay, ReplayOptions, Row
from bench.agent_trace import Trace, Writer
from bench.cache_reader import Score
from bench.prefix import fit_ttft
from deltic.bench.load import percentile
from deltic.bench.provenance import checked, code, machine, now, runs_directory
from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.cache.events import CacheEvents
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.llm import LLM
from deltic.machine import free_memory_bytes
from deltic.models.checkpoint import locate, model_name, text_directory
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.plan import CACHE_SHARE
from deltic.server.chat.template import ChatTemplate, Prompt
from deltic.text import Tokenizer

QUICK: Row = {
    "sessions": 2,
    "parallel": 2,
    "turns": 6,
    "max_tokens": 2048,
    "gap": 0.1,
    "off": True,
    "cold_rounds": 1,
    "cold_lengths": [512],
}
POOLS_SHARE = 0.6
"""Of the free memory, which the pools of the run "all" may take."""


def summarise(rows: Sequence[Row]) -> Row:
    """Sums over the requests of a run, and times to the first token in seconds."""
    total = {
        name: sum(row[name] for row in rows)
        for name in ("prompt_tokens", "cached_tokens", "best_tokens", "best_exact_tokens", "best_waiting_tokens")
    }
    lost: dict[str, int] = defaultdict(int)
    for row in rows:
        lost[row["kind"]] += row["best_tokens"] - row["cached_tokens"]
    times = [row["ttft_s"] for row in rows]
    score = Score()
    for row in rows:
        if "predicted_tokens" in row:
            score.add(row["predicted_tokens"], row["cached_tokens"])
    return total | {
        "n_requests": len(rows),
        "answer_tokens": sum(row["answer_tokens"] for row in rows),
        "reuse": total["cached_tokens"] / total["prompt_tokens"],
        "best_reuse": total["best_tokens"] / total["prompt_tokens"],
        "best_exact_reuse": total["best_exact_tokens"] / total["prompt_tokens"],
        "reuse_of_best": total["cached_tokens"] / max(1, total["best_tokens"]),
        "reuse_of_best_waiting": total["cached_tokens"] / max(1, total["best_waiting_tokens"]),
        "lost_tokens": dict(lost),
        **({"predictions": score.row()} if score.n else {}),
        "ttft_p50_s": statistics.median(times),
        "ttft_p95_s": percentile(times, 95),
        "ttft_fit": fit_ttft(
            [(row["prompt_tokens"] - row["cached_tokens"], row["prompt_tokens"], row["ttft_s"]) for row in rows]
        ),
    }


class Bench:
    """The runs of one model."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.arguments = arguments
        self.console = console
        names = ("model", "dummy", "quantize", "threads", "memory_gb")
        self.engine = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        config = EngineConfig(**self.engine)
        self.name = model_name(config)
        self.shape = locate(config)[1]
        self.max_tokens = min(arguments.max_tokens, self.shape.max_position_embeddings)
        tokenizer = Tokenizer.load(text_directory(config))
        self.trace = Trace(lambda text: len(tokenizer.encode(text)), arguments.seed, arguments.turns, self.max_tokens)
        self.own = arguments.answers == "own"
        self.ignore_eos = arguments.dummy is not None or not self.own

    def pools(self) -> Row:
        """Counts with which nothing should have to leave: every session twice over, and a checkpoint for
        every message of every turn, if that much memory is free.
        """
        arguments = self.arguments
        n_pages = arguments.n_pages or 2 * arguments.sessions * pages_for(self.max_tokens)
        n_left = POOLS_SHARE * free_memory_bytes() - n_pages * self.shape.page_bytes(PAGE_SIZE)
        n_most = max(0, int(n_left / self.shape.state_bytes))
        wanted = arguments.n_checkpoints or min(n_most, 4 * arguments.sessions * arguments.turns)
        return {"n_pages": n_pages, "n_checkpoints": wanted}

    def replay(self, label: str, **settings: Any) -> Row:
        """A run on an engine of its own."""
        gc.collect()  # the last run's pools
        arguments, n_sessions = self.arguments, self.arguments.sessions
        llm = LLM(
            **self.engine,
            **settings,
            max_num_seqs=arguments.parallel,
            max_model_len=self.max_tokens,
            cache_host_gb=arguments.host_gb,
        )
        assert llm._template is not None
        reuse = TextColumn("{task.fields[reuse]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), reuse)
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:
            task = progress.add_task(label, total=n_sessions * arguments.turns, reuse="")
            n_prompt, n_cached = 0, 0

            def on_turn(row: Row) -> None:
                nonlocal n_prompt, n_cached
                n_prompt += row["prompt_tokens"]
                n_cached += row["cached_tokens"]
                progress.update(task, advance=1, reuse=f"{n_cached / n_prompt:.1%} reused")

            is_told = arguments.kv_events and llm._engine.info.prefix_cache
            events = CacheEvents(llm._engine.info, "agent") if is_told else None
            if events is not None:
                llm._engine.cache.store.listen(events)
            options = ReplayOptions(arguments.parallel, arguments.gap, self.own, self.ignore_eos)
            replay = Replay(llm._engine, llm.tokenizer, llm._template, self.trace, options, on_turn, events)
            begin = time.perf_counter()
            rows = replay.run(n_sessions)
            wall_s = time.perf_counter() - begin
            progress.update(task, total=len(rows))
        stats = llm._engine.stats()
        found = {"label": label, "settings": settings, "wall_s": wall_s, "n_preemptions": stats.n_preemptions}
        found["held"] = self._held(stats.cache.n_pages, stats.cache.n_checkpoints)
        found |= {"cache": msgspec.structs.asdict(stats.cache), "rows": rows} | summarise(rows)
        return found

    def _held(self, n_pages: int, n_checkpoints: int) -> Row:
        """Counts, and bytes in all."""
        n_bytes = n_pages * self.shape.page_bytes(PAGE_SIZE) + n_checkpoints * self.shape.state_bytes
        return {"pages": n_pages, "checkpoints": n_checkpoints, "bytes": n_bytes}

    def runs(self) -> list[Row]:
        """All replays that were asked for."""
        pools = self.pools()
        found = [self.replay("all", **pools)]
        held = found[0]["held"]
        for share in self.arguments.memory_share:
            if not held["pages"]:
                self.console.print("nothing was kept: no runs with a share of the memory")
                break
            n_bytes = share * held["bytes"]  # divided as the engine's plan divides what it is given
            n_checkpoints = round(n_bytes / CACHE_SHARE / self.shape.state_bytes)
            n_pages = int((n_bytes - n_checkpoints * self.shape.state_bytes) / self.shape.page_bytes(PAGE_SIZE))
            n_pages = max(n_pages, pages_for(self.max_tokens))
            found.append(self.replay(f"share {share:g}", n_pages=n_pages, n_checkpoints=n_checkpoints))
        if self.arguments.off:
            found.append(self.replay("off", n_pages=pools["n_pages"], prefix_cache=False))
        return found

    def cold(self) -> list[Row]:
        """Prefills that share nothing, with the cache and without; a row for each prompt."""
        lengths = [n for n in self.arguments.cold_lengths if n < self.max_tokens]
        if not lengths or not self.arguments.cold_rounds:
            return []
        gc.collect()
        engines = {
            on: LLM(**self.engine, max_num_seqs=2, max_model_len=self.max_tokens, prefix_cache=on)
            for on in (True, False)
        }
        rows: list[Row] = []
        with Progress(console=self.console) as progress:
            task = progress.add_task("cold", total=(self.arguments.cold_rounds + 1) * len(lengths))
            for round_ in range(-1, self.arguments.cold_rounds):  # the first one only warms up
                for length in lengths:
                    prompt = self._cold_prompt(engines[True]._template, round_, length)
                    order = (True, False) if round_ % 2 else (False, True)
                    spent = {on: prefill_s(engines[on]._engine, prompt) for on in order}
                    if round_ >= 0:
                        row = {"length": length, "tokens": len(prompt.ids)}
                        rows.append(row | {"on_s": spent[True], "off_s": spent[False]})
                    progress.advance(task)
        return rows

    def _cold_prompt(self, template: ChatTemplate | None, round_: int, length: int) -> Prompt:
        assert template is not None
        writer = Writer(f"{self.arguments.seed} cold {round_} {length}", self.trace.count)
        return template.render(
            [
                {"role": "system", "content": writer.text("prose", length // 4)},
                {"role": "user", "content": writer.text("code", length - length // 4 - 64)},
            ]
        )


def prefill_s(engine: Engine, prompt: Prompt) -> float:
    """Seconds from the request until the engine has nothing left to do for it."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
    begin = time.perf_counter()
    engine.add(Request(id="cold", prompt_ids=prompt.ids, params=params, boundaries=prompt.boundaries))
    while engine.has_work():
        checked(engine.step())
    return time.perf_counter() - begin


def cold_summary(rows: Sequence[Row]) -> list[Row]:
    """Medians by length.

    The ratio is taken prompt by prompt: both engines met the same machine within a second.
    """
    found = []
    for length in dict.fromkeys(row["length"] for row in rows):
        of = [row for row in rows if row["length"] == length]
        ratios = [row["on_s"] / row["off_s"] for row in of]
        found.append(
            {
                "length": length,
                "n": len(of),
                "on_s": statistics.median(row["on_s"] for row in of),
                "off_s": statistics.median(row["off_s"] for row in of),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
    return found


def show(result: Row, console: Console) -> None:
    """The tables."""
    title = f"agent trace, {result['model']}: {result['sessions']} sessions, {result['parallel']} at once"
    table = Table("", title=title)
    figures: dict[str, Callable[[Row], str]] = {
        "requests": lambda run: f"{run['n_requests']}",
        "prompt tokens": lambda run: f"{run['prompt_tokens']:,}",
        "reused": lambda run: f"{run['reuse']:.2%}",
        "best possible": lambda run: f"{run['best_reuse']:.2%}",
        "best, to the token": lambda run: f"{run['best_exact_reuse']:.2%}",
        "reused / best": lambda run: f"[bold]{run['reuse_of_best']:.2%}",
        "reused / best with waiting": lambda run: f"{run['reuse_of_best_waiting']:.2%}",
        "TTFT p50, p95 (ms)": lambda run: f"{run['ttft_p50_s'] * 1e3:,.0f}, {run['ttft_p95_s'] * 1e3:,.0f}",
        "whole run (s)": lambda run: f"{run['wall_s']:,.1f}",
        "pools: pages": lambda run: f"{run['settings']['n_pages']:,}",
        "pools: checkpoints": lambda run: f"{run['settings'].get('n_checkpoints', 0):,}",
        "pages held": lambda run: f"{run['held']['pages']:,}",
        "checkpoints held": lambda run: f"{run['held']['checkpoints']:,}",
        "pages evicted": lambda run: f"{run['cache']['n_pages_evicted']:,}",
        "checkpoints evicted": lambda run: f"{run['cache']['n_checkpoints_evicted']:,}",
        "preemptions": lambda run: f"{run['n_preemptions']}",
    }
    if any("predictions" in run for run in result["runs"]):
        figures["a router's predictions: exact, over, under"] = said_of_predictions
    for run in result["runs"]:
        table.add_column(run["label"], justify="right")
    for name, figure in figures.items():
        table.add_row(name, *map(figure, result["runs"]))
    console.print(table)
    first = result["runs"][0]
    held = first["held"]
    console.print(
        f"memory wanted: {held['bytes'] / 1e9:.2f} GB, {held['pages']} pages and {held['checkpoints']} checkpoints; "
        f"tokens lost by kind of turn: {first['lost_tokens']}"
    )
    cold = Table(title="cold prompts: cache on over off")
    for head in ("tokens", "on", "off", "on / off", "from", "to", "n"):
        cold.add_column(head, justify="right")
    for row in result["cold"]:
        cold.add_row(
            str(row["length"]),
            f"{row['on_s'] * 1e3:,.1f} ms",
            f"{row['off_s'] * 1e3:,.1f} ms",
            f"[bold]{row['ratio']:.3f}",
            f"{row['ratio_min']:.3f}",
            f"{row['ratio_max']:.3f}",
            str(row["n"]),
        )
    if result["cold"]:
        console.print(cold)


def said_of_predictions(run: Row) -> str:
    """In requests, and in tokens where they were wrong."""
    of = run.get("predictions")
    return (
        ""
        if of is None
        else f"{of['n_exact']}, {of['n_over']} ({of['over_tokens']:,}), {of['n_under']} ({of['under_tokens']:,})"
    )


def draw(result: Row, path: Path) -> None:
    """Writes a PNG: time to the first token over turns and over new tokens, reuse over turns, and the cold
    cost.
    """
    figure = Figure(figsize=(18, 4.6))
    by_turn, by_new, reuse, cold = figure.subplots(1, 4)
    for i, run in enumerate(result["runs"]):
        color, turns = f"C{i}", defaultdict(list)
        for row in run["rows"]:
            turns[row["turn"]].append(row)
        at = sorted(turns)
        medians = [statistics.median(row["ttft_s"] for row in turns[turn]) for turn in at]
        by_turn.plot(at, medians, color=color, label=run["label"])
        by_new.scatter(
            [row["prompt_tokens"] - row["cached_tokens"] for row in run["rows"]],
            [row["ttft_s"] for row in run["rows"]],
            s=8,
            color=color,
            alpha=0.6,
        )

        def share(name: str, turns: dict[int, list[Row]] = turns, at: list[int] = at) -> list[float]:
            return [sum(r[name] for r in turns[t]) / sum(r["prompt_tokens"] for r in turns[t]) for t in at]

        reuse.plot(at, share("cached_tokens"), color=color, label=run["label"])
        if i == 0:
            reuse.plot(at, share("best_tokens"), color="black", linestyle=":", label="best possible")
    by_turn.set(title="TTFT, median over sessions", xlabel="turn", ylabel="s", yscale="log")
    by_new.set(title="TTFT of each request", xlabel="prompt tokens not reused", xscale="log", yscale="log")
    reuse.set(title="share of the prompt that was reused", xlabel="turn", ylim=(0, 1.02))
    names = [str(row["length"]) for row in result["cold"]]
    cold.errorbar(
        names,
        [row["ratio"] for row in result["cold"]],
        yerr=[
            [row["ratio"] - row["ratio_min"] for row in result["cold"]],
            [row["ratio_max"] - row["ratio"] for row in result["cold"]],
        ],
        marker="o",
        linestyle="none",
        capsize=4,
    )
    cold.axhline(1.0, color="black", linewidth=0.8)
    cold.set(title="cold prompts: time with the cache over without", xlabel="prompt tokens")
    for axis in (by_turn, by_new, reuse, cold):
        axis.grid(alpha=0.3)
    by_turn.legend(frameon=False)
    reuse.legend(frameon=False, loc="lower right")
    figure.suptitle(f"agent trace · {result['model']} · {result['machine']['cpu']} · {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def numbers(kind: type) -> Callable[[str], list[Any]]:
    """Parses a list with commas between; an empty one is none."""
    return lambda text: [kind(part) for part in text.split(",") if part]


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line. --quick is a set of defaults: whatever else is given still counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="checkpoint directory or hub name (default: the built-in model)")
    add("--dummy", metavar="SHAPE", help="random weights at a published shape, e.g. qwen3.5-0.8b")
    add("--quantize", choices=("int8", "int4", "int4-symmetric"))
    add("--threads", type=int, help="CPU threads of the engine")
    add("--memory-gb", type=float, help="most memory of the engine")
    add("--sessions", type=int, default=8)
    add("--parallel", type=int, default=4, help="sessions that run at once")
    add("--gap", type=float, default=2.0, help="mean seconds between two sessions' arrivals")
    add("--turns", type=int, default=40, help="requests of a session at most")
    add("--max-tokens", type=int, default=30_000, help="longest prompt with its answer")
    add("--seed", type=int, default=0, help="of the trace")
    add("--answers", choices=("recorded", "own"), default="recorded", help="whose go into the history")
    add("--n-pages", type=int, help='of the run "all" (default: enough)')
    add("--n-checkpoints", type=int, help='of the run "all" (default: enough, if so much memory is free)')
    add("--memory-share", type=numbers(float), default=[1.0, 0.25], help="runs with so much of what that held")
    add("--host-gb", type=float, default=0.0, help="host memory below the pools, in every run")
    add("--off", action="store_true", default=False, help="replay without a prefix cache, too")
    add("--kv-events", action="store_true", help="have a router read the cache events, and predict each request")
    add("--cold-rounds", type=int, default=8, help="cold prompts of each length, best an even number; 0: none")
    add("--cold-lengths", type=numbers(int), default=[512, 2048])
    add("--quick", action="store_true", help="a small size: seconds on the built-in model")
    add("--out", metavar="DIR", help="for the JSON and the PNG (default: bench/runs/<date>-<machine>)")
    arguments = parser.parse_args(given)
    if arguments.quick:
        parser.set_defaults(**QUICK)
        arguments = parser.parse_args(given)
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    arguments = parsed(given)
    console = Console()
    try:
        bench = Bench(arguments, console)
        runs = bench.runs()
        cold = bench.cold()
    except (ConfigError, CheckpointError, UnsupportedModelError) as error:
        console.print(f"[red]{error}")
        return 2
    result = {name: value for name, value in vars(arguments).items() if name not in ("out", "quick")}
    result |= {"bench": "agent", "date": now().isoformat(), "machine": machine(), "code": code()}
    result |= {
        "model": bench.name,
        "max_tokens": bench.max_tokens,
        "runs": runs,
        "cold": cold_summary(cold),
        "cold_rows": cold,
    }
    stem = f"agent-{bench.name.replace('/', '-')}-{arguments.quantize or 'bf16'}-{now():%H%M%S}"
    path = runs_directory(arguments.out) / f"{stem}.json"
    path.write_text(json.dumps(result, indent=1))
    draw(result, path.with_suffix(".png"))
    show(result, console)
    console.print(f"{path} and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
