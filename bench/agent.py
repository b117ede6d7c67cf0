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
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.agent_trace import Conversation, Message, Oracle, Trace, Turn, Writer
from bench.cache_reader import Index, Score
from bench.prefix import fit_ttft
from deltic.bench.load import percentile
from deltic.bench.provenance import checked, code, fault_of, machine, now, runs_directory
from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.cache.events import CacheEvents
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.host.kv_events import payload
from deltic.llm import LLM
from deltic.machine import free_memory_bytes
from deltic.models.checkpoint import locate, model_name, text_directory
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.plan import CACHE_SHARE
from deltic.server.api import decode, protocol
from deltic.server.chat.answer import Choice, Shown
from deltic.server.chat.answer import Message as AnswerMessage
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.template import ChatTemplate, Prompt, render
from deltic.text import Tokenizer

TOPIC = "kv@here@agent"

Row = dict[str, Any]
Event = tuple[str, Row, list[int]]
"""What happened to a request, in order: "asked", "computed" (its prompt) or "answered"; its row; token ids.
"""

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


@dataclass
class Prepared:
    """A turn's request, rendered. `at`: when, on time.perf_counter's clock."""

    turn: Turn
    prompt: Prompt
    schemas: dict[str, Any] | None
    at: float


class Clerk:
    """Renders the requests of the sessions, in a thread of its own."""

    def __init__(self, template: ChatTemplate, tools: list[Row], max_tokens: int) -> None:
        self._template = template
        self._tools = tools
        self._max_tokens = max_tokens
        self._thread = ThreadPoolExecutor(1)

    def ask(self, conversation: Conversation) -> Future[Prepared | None]:
        """The conversation's next request; None when it is over, or would be longer than a prompt may be."""
        return self._thread.submit(self._prepare, conversation)

    def _prepare(self, conversation: Conversation) -> Prepared | None:
        turn = conversation.next_turn()
        if turn is None:
            return None
        body = {"messages": conversation.messages, "tools": self._tools, "enable_thinking": conversation.thinking}
        chat = decode.parse(msgspec.json.encode(body), protocol.ChatRequest)
        prompt, schemas = render(self._template, chat)
        if len(prompt.ids) + turn.n_answer > self._max_tokens:
            return None
        return Prepared(turn, prompt, schemas, time.perf_counter())

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


@dataclass
class Session:
    """A conversation, and its request in the engine when it has one."""

    conversation: Conversation
    preparing: Future[Prepared | None] | None = None
    request: Prepared | None = None
    choice: Choice | None = None
    message: AnswerMessage = field(default_factory=AnswerMessage)
    answer_ids: list[int] = field(default_factory=list)
    row: Row = field(default_factory=dict)


class Replay:
    """One replay of a trace on one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        trace: Trace,
        *,
        n_parallel: int = 4,
        gap_s: float = 0.0,
        own: bool = False,
        ignore_eos: bool = True,
        on_turn: Callable[[Row], None] = lambda row: None,
        events: CacheEvents | None = None,
    ) -> None:
        """gap_s: mean time between two sessions' arrivals. own: the model's answers become the history, as
        the parser reads them; else the recorded ones. ignore_eos: answers are as long as the trace says.
        events: a router reads these, and predicts what each request will find.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._trace = trace
        self._template = template
        self._n_parallel = n_parallel
        self._gap_s = gap_s
        self._own = own
        self._ignore_eos = ignore_eos
        self._on_turn = on_turn
        self._cache_events = events
        self._index = Index()
        self._events: list[Event] = []
        self._live: dict[str, Session] = {}
        self._begin = 0.0
        self.rows: list[Row] = []
        """One for each request, in the order in which they were answered."""

    def run(self, n_sessions: int) -> list[Row]:
        """Replays that many sessions. Raises RuntimeError when the engine fails a request."""
        arrivals, rng = [0.0], random.Random(f"{self._trace.seed} arrivals")
        while len(arrivals) < n_sessions:
            arrivals.append(arrivals[-1] + (rng.expovariate(1 / self._gap_s) if self._gap_s else 0.0))
        system = self._trace.system()
        clerk = Clerk(self._template, self._trace.tools(), self._trace.max_tokens)
        self._begin = time.perf_counter()
        n_started = 0
        try:
            while n_started < n_sessions or self._live:
                here = time.perf_counter() - self._begin
                while n_started < n_sessions and len(self._live) < self._n_parallel and arrivals[n_started] <= here:
                    session = Session(Conversation(self._trace, n_started, system))
                    session.preparing = clerk.ask(session.conversation)
                    self._live[f"session {n_started}"] = session
                    n_started += 1
                self._submit_prepared()
                if self._engine.has_work():
                    for output in self._engine.step():
                        self._take(output, clerk)
                    if self._cache_events is not None and (told := self._cache_events.collect()):
                        self._index.take(TOPIC, payload(time.time(), told))
                else:
                    time.sleep(0.001)
        finally:
            clerk.close()
        self._engine.check()
        add_best(self._events)
        return self.rows

    def _submit_prepared(self) -> None:
        for name, session in list(self._live.items()):
            if session.preparing is None or not session.preparing.done():
                continue
            prepared, session.preparing = session.preparing.result(), None
            if prepared is None:
                del self._live[name]
            else:
                self._submit(name, session, prepared)

    def _submit(self, name: str, session: Session, prepared: Prepared) -> None:
        turn, ids = prepared.turn, prepared.prompt.ids
        parser = OutputParser(thinking=prepared.prompt.thinking, tools=prepared.schemas)
        session.request, session.message, session.answer_ids = prepared, AnswerMessage(), []
        session.choice = Choice(0, self._tokenizer, Shown(), parser)
        session.row = {
            "session": session.conversation.number,
            "turn": turn.number,
            "kind": turn.kind,
            "at_s": prepared.at - self._begin,
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
            "n_others": sum(other.request is not None for other in self._live.values()) - 1,
        }
        if self._cache_events is not None:
            session.row["predicted_tokens"] = len(self._index.path(*TOPIC.split("@")[1:], ids)) * PAGE_SIZE
        self._events.append(("asked", session.row, ids))
        params = SamplingParams(max_tokens=turn.n_answer, temperature=1.0, seed=turn.seed, ignore_eos=self._ignore_eos)
        self._engine.add(Request(id=name, prompt_ids=ids, params=params, boundaries=prepared.prompt.boundaries))

    def _take(self, output: Output, clerk: Clerk) -> None:
        session = self._live[output.id]
        prepared, row = session.request, session.row
        assert prepared is not None and session.choice is not None
        if output.finish_reason == "error":
            raise RuntimeError(f"{output.id}, turn {prepared.turn.number}: {output.error}")
        here = time.perf_counter()
        if output.token_ids and not session.answer_ids:
            row["ttft_s"] = here - prepared.at
            self._events.append(("computed", row, prepared.prompt.ids))
        row["cached_tokens"] = max(row["cached_tokens"], output.cached_tokens)
        session.answer_ids += output.token_ids
        session.message.add(session.choice.push(output))
        if output.finish_reason is None:
            return
        n, asked = len(session.answer_ids), prepared.turn.n_answer
        if self._ignore_eos and (fault := fault_of(output.finish_reason, n, asked)):
            raise RuntimeError(f"{output.id}, turn {prepared.turn.number}: {fault}")
        # The last token drawn has not been through the model.
        self._events.append(("answered", row, prepared.prompt.ids + session.answer_ids[:-1]))
        row |= {"answer_tokens": len(session.answer_ids), "total_s": here - prepared.at}
        self.rows.append(row)
        self._on_turn(row)
        session.request = None
        session.conversation.answered(_own_message(session.message) if self._own else None)
        session.preparing = clerk.ask(session.conversation)


def add_best(events: Sequence[Event]) -> None:
    """Adds to the row of each request what could have been reused, afterwards, so that it costs the replay no
    time.

    best_tokens: of what was computed when it was made; best_exact_tokens: were it not for whole pages;
    best_waiting_tokens: if it waited for every prompt that had been asked before it, as the engine does for a
    little while.
    """
    computed, asked = Oracle(), Oracle()
    for what, row, ids in events:
        if what == "asked":
            row["best_tokens"], row["best_exact_tokens"] = computed.longest(ids)
            row["best_waiting_tokens"] = max(row["best_tokens"], asked.longest(ids)[0])
        else:
            computed.add(ids)
        asked.add(ids)


def _own_message(message: AnswerMessage) -> Message:
    """What a client would put into the history. A call that was cut short is not one."""
    plain: Message = {"role": "assistant", "content": "".join(message.content)}
    if reasoning := "".join(message.reasoning):
        plain["reasoning_content"] = reasoning
    if message.finish_reason == "tool_calls":
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return plain


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
            replay = Replay(
                llm._engine,
                llm.tokenizer,
                llm._template,
                self.trace,
                n_parallel=arguments.parallel,
                gap_s=arguments.gap,
                own=self.own,
                ignore_eos=self.ignore_eos,
                on_turn=on_turn,
                events=events,
            )
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
        messages = [
            {"role": "system", "content": writer.text("prose", length // 4)},
            {"role": "user", "content": writer.text("code", length - length // 4 - 64)},
        ]
        return template.render(messages)


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
