"""A replay of the trace of `bench.agent_trace` on an engine in this process, for `bench/agent.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.agent_trace import Conversation, Message, Oracle, Trace, Turn
from bench.cache_reader import Index
from deltic.bench.provenance import fault_of
from deltic.engine.cache.events import CacheEvents
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.host.kv_events import payload
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.api import decode, protocol
from deltic.server.chat.answer import Choice
from deltic.server.chat.answer import Message as AnswerMessage
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.request import Shown
from deltic.server.chat.template import ChatTemplate, Prompt, render
from deltic.text import Tokenizer

SERVER, MODEL = "here", "agent"
TOPIC = f"kv@{SERVER}@{MODEL}"

Row = dict[str, Any]
Event = tuple[str, Row, list[int]]
"""What happened to a request, in order: "asked", "computed" (its prompt) or "answered"; its row; token ids.
"""


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
        chat = protocol.chat_of(decode.parse(msgspec.json.encode(body), protocol.ChatRequest))
        prompt = render(self._template, chat)
        if len(prompt.ids) + turn.n_answer > self._max_tokens:
            return None
        return Prepared(turn, prompt, chat.schemas, time.perf_counter())

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


@dataclass(frozen=True)
class ReplayOptions:
    """The load of a replay, and what becomes of its answers."""

    n_parallel: int = 4
    gap_s: float = 0.0
    """Mean time between two sessions' arrivals."""
    own: bool = False
    """Whether the model's answers become the history, as the parser reads them; else the recorded ones."""
    ignore_eos: bool = True
    """Whether answers are as long as the trace says."""


class Replay:
    """One replay of a trace on one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        trace: Trace,
        options: ReplayOptions,
        on_turn: Callable[[Row], None] = lambda row: None,
        events: CacheEvents | None = None,
    ) -> None:
        """events: a router reads these, and predicts what each request will find."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._trace = trace
        self._template = template
        self._options = options
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
            arrivals.append(arrivals[-1] + (rng.expovariate(1 / self._options.gap_s) if self._options.gap_s else 0.0))
        system = self._trace.system()
        clerk = Clerk(self._template, self._trace.tools(), self._trace.max_tokens)
        self._begin = time.perf_counter()
        n_started = 0
        try:
            while n_started < n_sessions or self._live:
                here = time.perf_counter() - self._begin
                while (
                    n_started < n_sessions
                    and len(self._live) < self._options.n_parallel
                    and arrivals[n_started] <= here
                ):
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
        session.choice = Choice(0, self._tokenizer, Shown(), parser=parser)
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
            session.row["predicted_tokens"] = len(self._index.path(SERVER, MODEL, ids)) * PAGE_SIZE
        self._events.append(("asked", session.row, ids))
        params = SamplingParams(
            max_tokens=turn.n_answer, temperature=1.0, seed=turn.seed, ignore_eos=self._options.ignore_eos
        )
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
        if self._options.ignore_eos and (fault := fault_of(output.finish_reason, n, asked)):
            raise RuntimeError(f"{output.id}, turn {prepared.turn.number}: {fault}")
        # The last token drawn has not been through the model.
        self._events.append(("answered", row, prepared.prompt.ids + session.answer_ids[:-1]))
        row |= {"answer_tokens": len(session.answer_ids), "total_s": here - prepared.at}
        self.rows.append(row)
        self._on_turn(row)
        session.request = None
        session.conversation.answered(_own_message(session.message) if self._options.own else None)
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
