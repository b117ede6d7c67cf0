"""The agent trace of `bench.agent` over HTTP: through a router to replicas, and to one server of the same
size.

A session sends its next request when the last is answered; several run at once, as coding agents do. Each
session's requests carry its `x-session-id`, by which nginx and HAProxy hash; SGLang's gateway and Ray Serve
look at the text.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bench.agent_trace import Conversation, Trace
from deltic.bench.load import percentile
from deltic.bench.provenance import fault_of
from deltic.commands.endpoint import DONE, Endpoint, error_message

Row = dict[str, Any]


async def replay(
    endpoint: Endpoint,
    model: str,
    trace: Trace,
    n_sessions: int,
    n_parallel: int,
    on_turn: Callable[[], object] = lambda: None,
) -> list[Row]:
    """A row for each request. Raises RuntimeError for one that fails."""
    system, tools, rows = trace.system(), trace.tools(), []
    numbers = iter(range(n_sessions))

    async def client() -> None:
        for number in numbers:
            conversation = Conversation(trace, number, system)
            while (turn := conversation.next_turn()) is not None:
                body = {"model": model, "messages": conversation.messages, "tools": tools, "stream": True}
                # SGLang's gateway loses a field that is called enable_thinking itself.
                body |= {"chat_template_kwargs": {"enable_thinking": conversation.thinking}}
                body |= {"max_tokens": turn.n_answer, "seed": turn.seed}
                body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
                row = await _ask(endpoint, body, f"session-{trace.seed}-{number}")
                if row is None:
                    break
                rows.append(row | {"session": number, "turn": turn.number, "kind": turn.kind})
                on_turn()
                conversation.answered()

    async with asyncio.TaskGroup() as group:
        for _ in range(n_parallel):
            group.create_task(client())
    return rows


async def _ask(endpoint: Endpoint, body: Row, session: str) -> Row | None:
    """A turn's row; None when the session has become longer than a prompt may be."""
    begin = time.perf_counter()
    reply = await endpoint.open("POST", "/v1/chat/completions", body, f"x-session-id: {session}\r\n")
    if reply.status != 200:
        answer = await reply.read()
        if reply.status == 400 and b"context_length_exceeded" in answer:
            return None
        raise RuntimeError(f"{session}: HTTP {reply.status}: {answer[:300]!r}")
    row: Row = {}
    async for arrival, payload in reply.events():
        if payload == DONE:
            continue
        event = msgspec.json.decode(payload)
        if event.get("error"):
            raise RuntimeError(f"{session}: {error_message(event, 200)}")
        if event["choices"]:
            row.setdefault("ttft_s", arrival - begin)
        if usage := event.get("usage"):
            row["prompt_tokens"], row["answer_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
            row["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
    # A call in it has its own reason.
    if fault := fault_of("length", row["answer_tokens"], body["max_tokens"]):
        raise RuntimeError(f"{session}: {fault}")
    return row | {"total_s": time.perf_counter() - begin}


def summarise(rows: list[Row], seconds: float) -> Row:
    """Sums over the requests, and times to the first token in seconds."""
    total = {name: sum(row[name] for row in rows) for name in ("prompt_tokens", "cached_tokens", "answer_tokens")}
    times = [row["ttft_s"] for row in rows]
    return total | {
        "n_requests": len(rows),
        "reuse": total["cached_tokens"] / total["prompt_tokens"],
        "ttft_p50_s": statistics.median(times),
        "ttft_p95_s": percentile(times, 95),
        "wall_s": round(seconds, 2),
    }
