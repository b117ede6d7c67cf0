"""The soak's traffic: random requests of every kind, each with what its answer must look like
(speech: speech.py).

An answer that breaks a promise raises Violation. What a request asks depends on the random generator only, so
a seed gives the same traffic again (its timing is the machine's).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltic.bench.load import WORDS
from deltic.commands.endpoint import DONE, Endpoint, EndpointError, HttpReply

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

FINISH_REASONS = {"stop", "length", "tool_calls"}

N_WORDS = 50
"""Of a prompt at most."""
TOKENS = "tokens, or frames, in checked answers"
"""Name of a count."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {"type": "object", "properties": {key: {"enum": some}}, "required": [key]},
        },
    }
    for name, what, key, some in (
        ("weather", "Weather of a city", "city", ["Bern", "Rio"]),
        ("calculator", "Computes", "expression", ["1 + 1", "7 * 6"]),
    )
]


class Violation(Exception):
    """A promise of the server that did not hold; the message says what came instead."""


class Lost(Exception):
    """What is right only while the engine is being killed: 5xx, an error event, a broken connection."""


@dataclass
class Traffic:
    """Where requests go, what the server was started with, and what has been seen."""

    endpoint: Endpoint
    model: str
    max_model_len: int
    n_queue_and_running: int
    """Sequences that the server takes before it answers 429."""
    counts: dict[str, int] = field(default_factory=dict)
    golden: dict[str, str] = field(default_factory=dict)
    """Answers of seeded requests, by request: the same must come again whatever else runs."""
    against: Endpoint | None = None
    """Another server of the model, which must give the same answers."""
    sees: bool = False
    """The model takes pictures."""
    adapters: tuple[str, ...] = ()
    """Names that requests may have for the model's: directories of `adapter_directory`."""
    adapter_directory: Path = Path()
    others: tuple[str, ...] = ()
    """Names of further models of the server, which take no pictures."""
    grammars: bool = False
    """Some answers are to have a form."""
    is_guest: bool = False
    """The key is no administrator's."""
    stranger: Endpoint | None = None
    """The server with another key, which may see nothing of this one's."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an adapter is loaded for a while."""

    @property
    def n_tokens(self) -> int:
        """Tokens, or frames, in checked answers."""
        return self.counts.get(TOKENS, 0)

    def a_model(self, rng: random.Random) -> str:
        """The model's name, that of an adapter, or that of another model."""
        if self.adapters and rng.random() < 0.35:
            self.count("with an adapter")
            return rng.choice(self.adapters)
        if self.others and rng.random() < 0.35:
            self.count("of another model")
            return rng.choice(self.others)
        return self.model

    def count(self, what: str, n: int = 1) -> None:
        """Adds to a line of the summary."""
        self.counts[what] = self.counts.get(what, 0) + n


def text(rng: random.Random, most: int) -> str:
    """One to `most` words: few, mostly."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, rng.choice([4, 20, most]))))


def picture(rng: random.Random) -> dict[str, Any]:
    """One of a few small pictures, so that they come again: a part of a message."""
    from PIL import Image

    own = random.Random(rng.randrange(24))
    small = own.randint(1, 9), own.randint(1, 9)
    image = Image.frombytes("RGB", small, own.randbytes(3 * small[0] * small[1]))
    file = io.BytesIO()
    image.resize((own.randint(20, 400), own.randint(20, 400))).save(file, own.choice(["PNG", "JPEG", "WEBP"]))
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": own.choice(["auto", "low"])}}


def options(rng: random.Random, chat: bool) -> dict[str, Any]:
    """Sampling and other fields, each with some probability; always valid together."""
    some: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 20, 40, 90] if rng.random() < 0.97 else [400])}
    choices: list[tuple[float, Callable[[], dict[str, Any]]]] = [
        (0.6, lambda: {"temperature": rng.choice([0.0, 0.3, 1.0, 1.8])}),
        (0.2, lambda: {"top_p": rng.uniform(0.1, 1.0)}),
        (0.2, lambda: {"top_k": rng.choice([1, 5, 50])}),
        (0.1, lambda: {"min_p": rng.uniform(0.0, 0.5)}),
        (0.2, lambda: {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}),
        (0.1, lambda: {"repetition_penalty": rng.uniform(0.8, 1.5)}),
        (0.3, lambda: {"seed": rng.randint(-(2**63), 2**63 - 1)}),
        (0.2, lambda: {"stop": rng.choice(["e", ["the", "and"], [".", "\n", "story"]])}),
        (0.1, lambda: {"logit_bias": {str(rng.randint(0, 200)): rng.uniform(-100, 100)}}),
        (0.2, lambda: {"n": rng.randint(2, 5)}),
        (0.2, lambda: {"priority": rng.randint(-3, 3)}),
        (0.1, lambda: {"ignore_eos": True}),
        (0.1, lambda: {"min_tokens": 1}),
        (0.2, lambda: {"logprobs": True, "top_logprobs": rng.randint(0, 5)} if chat else {"logprobs": 3}),
        (0.2, lambda: {"tools": TOOLS} if chat else {"echo": True}),
        (0.2, lambda: {"enable_thinking": rng.random() < 0.5} if chat else {}),
    ]
    for probability, make in choices:
        if rng.random() < probability:
            some |= make()
    return some


def body(traffic: Traffic, rng: random.Random, stream: bool) -> tuple[str, dict[str, Any]]:
    """A path and a valid request for it."""
    chat = rng.random() < 0.5
    request: dict[str, Any] = {"model": traffic.a_model(rng), "stream": stream} | options(rng, chat)
    if traffic.grammars and rng.random() < 0.4:
        # Beside these the form is another.
        for name in ("stop", "tools", "echo", "ignore_eos", "min_tokens", "logit_bias"):
            request.pop(name, None)
        request |= rng.choice([*FORMS, *CALLS] if chat else FORMS)
        traffic.count("with a grammar")
    if chat:
        messages = [{"role": "system", "content": text(rng, 10)}] if rng.random() < 0.3 else []
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            messages += [{"role": "user", "content": text(rng, 10)}, {"role": "assistant", "content": text(rng, 10)}]
        content: Any = text(rng, N_WORDS)
        if traffic.sees and request["model"] not in traffic.others and rng.random() < 0.4:
            content = [*(picture(rng) for _ in range(rng.randint(1, 2))), {"type": "text", "text": content}]
            traffic.count("with pictures")
        request["messages"] = [*messages, {"role": "user", "content": content}]
    else:
        request["prompt"] = text(rng, N_WORDS)
    if stream and rng.random() < 0.7:
        request["stream_options"] = {"include_usage": True}
    return (CHAT if chat else COMPLETIONS), request


SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["river", "stone"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["word", "n"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"guided_choice": ["river", "stone", "a long answer that takes some tokens"]},
    {"guided_regex": "[a-c]{1,9}x"},
]
CALLS: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
]
"""Forms of chats only."""


def check_calls(request: dict[str, Any], calls: dict[int, str]) -> None:
    """Raises Violation unless each call, its name before its arguments, is one of a tool that was given.

    A model that need not call one may call others.
    """
    for call in calls.values():
        name, _, arguments = call.partition("{")
        given = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.get("tools", ())}
        said = json.loads("{" + arguments)
        if "tool_choice" not in request:
            continue
        if name not in given or any(said[key] not in its["enum"] for key, its in given[name]["properties"].items()):
            raise Violation(f"{call!r} is no call that {request} may bring")


def has_form(request: dict[str, Any], said: str) -> bool:
    """Whether a whole answer is what the request's form allows."""
    if "guided_choice" in request:
        return said in request["guided_choice"]
    if "guided_regex" in request:
        return re.fullmatch(request["guided_regex"], said) is not None
    if "response_format" in request:
        found = json.loads(said)
        return found.keys() == {"word", "n"} and found["word"] in ("river", "stone") and 0 <= found["n"] <= 99
    return True


@dataclass
class Answered:
    """What a request brought by index, and the usage."""

    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, dict[int, str]] = field(default_factory=dict)
    """Name and arguments of each call, one behind the other."""
    scores: dict[int, list[Any]] = field(default_factory=dict)
    """Log-probabilities."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """A choice of a chunk or of a whole answer."""
        index = choice["index"]
        if index in self.finish_reasons:
            raise Violation(f"index {index} went on after its finish_reason")
        said = choice.get("delta") or choice.get("message") or choice
        self.texts[index] = self.texts.get(index, "") + (said.get("content") or said.get("text") or "")
        self.thoughts[index] = self.thoughts.get(index, "") + (said.get("reasoning_content") or "")
        calls = self.calls.setdefault(index, {})
        for place, call in enumerate(said.get("tool_calls") or ()):
            place = call.get("index", place)
            calls[place] = calls.get(place, "") + (call["function"].get("name") or "") + call["function"]["arguments"]
        scores = choice.get("logprobs") or {}
        self.scores.setdefault(index, []).extend(
            [token["logprob"] for token in scores.get("content") or ()] or scores.get("token_logprobs") or ()
        )
        if choice.get("finish_reason"):
            self.finish_reasons[index] = choice["finish_reason"]

    def said(self) -> str:
        """All that must be the same again, as text."""
        return repr([sorted(its.items()) for its in (self.texts, self.thoughts, self.calls, self.finish_reasons)])

    def check(self, request: dict[str, Any]) -> None:
        """Raises Violation unless every sequence ended as the request says."""
        n = request.get("n", 1)
        if sorted(self.finish_reasons) != list(range(n)):
            raise Violation(f"n = {n}, but finish reasons came for {sorted(self.finish_reasons)}")
        if not set(self.finish_reasons.values()) <= FINISH_REASONS:
            raise Violation(f"finish reasons {self.finish_reasons}")
        if self.usage is None:
            if not request["stream"] or "stream_options" in request:
                raise Violation("no usage")
        elif not 0 <= self.usage["completion_tokens"] <= n * request["max_tokens"]:
            raise Violation(f"{self.usage['completion_tokens']} tokens for n = {n}, {request['max_tokens']} at most")
        for index, reason in self.finish_reasons.items():
            if reason == "stop" and not has_form(request, self.texts[index]):
                raise Violation(f"{self.texts[index]!r} is not what {request} may bring")
            if reason == "tool_calls":
                check_calls(request, self.calls[index])
            if (reason == "tool_calls" and not self.calls[index]) or (reason == "stop" and "tool_choice" in request):
                raise Violation(f"{reason} with the calls {self.calls[index]} for {request}")
        stops = request.get("stop", [])
        for stop in [stops] if isinstance(stops, str) else stops:
            if not request.get("echo") and any(stop in said for said in self.texts.values()):
                raise Violation(f"the stop string {stop!r} was emitted")


async def refused(reply: HttpReply) -> str:
    """The message of an answer that is not 200, after its error body has been looked at."""
    data = await reply.read()
    if reply.status >= 500:
        raise Lost(f"HTTP {reply.status}: {data[:200]!r}")
    try:
        message = json.loads(data)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        raise Violation(f"HTTP {reply.status} without OpenAI's error body: {data[:200]!r}") from None
    if not message:
        raise Violation(f"HTTP {reply.status} with an empty message")
    return str(message)


async def _stream(reply: HttpReply, answered: Answered, pause_s: float = 0.0) -> None:
    """Reads a stream to its end. Raises Lost for an error event, Violation for an end without [DONE]."""
    done = False
    async with contextlib.aclosing(reply.events()) as events:
        async for _, payload in events:
            if done:
                raise Violation("an event after [DONE]")
            if payload == DONE:
                done = True
                continue
            event = json.loads(payload)
            if "error" in event:
                raise Lost(f"error event: {event['error']}")
            answered.usage = event.get("usage") or answered.usage
            for choice in event["choices"]:
                answered.add(choice)
            if pause_s:
                await asyncio.sleep(pause_s)
    if not done:
        raise Violation("the stream ended without [DONE]")


def was_full(traffic: Traffic, reply: HttpReply) -> None:
    """Notes that the queue was full."""
    if "retry-after" not in reply.headers:
        raise Violation(f"{reply.status} without Retry-After")
    traffic.count("answered 429")


async def ask(traffic: Traffic, path: str, request: dict[str, Any], pause_s: float = 0.0) -> Answered | None:
    """Sends a valid request and checks its answer; None when the queue was full."""
    reply = await traffic.endpoint.open("POST", path, request)
    if reply.status != 200:
        message = await refused(reply)
        if reply.status != 429:
            raise Violation(f"a valid request got HTTP {reply.status}: {message}; it was {request}")
        was_full(traffic, reply)
        return None
    answered = Answered()
    if request["stream"]:
        await _stream(reply, answered, pause_s)
    else:
        answer = json.loads(await reply.read())
        answered.usage = answer["usage"]
        for choice in answer["choices"]:
            answered.add(choice)
    answered.check(request)
    usage: dict[str, Any] = answered.usage or {}
    traffic.count(TOKENS, usage.get("completion_tokens", 0))
    if usage.get("timing", {}).get("accepted_tokens"):
        traffic.count("answered with the help of drafts")
    return answered


async def compare(
    traffic: Traffic, rng: random.Random, path: str, request: dict[str, Any], pause_s: float = 0.0
) -> None:
    """Sends a valid request; and a quarter of them, seeded, to the other server, if there is one."""
    if traffic.against is None or rng.random() < 0.75:
        await ask(traffic, path, request, pause_s)
        return
    request.setdefault("seed", rng.randrange(2**31))
    found = await ask(traffic, path, request, pause_s)
    if found is None:
        return
    other = await ask(dataclasses.replace(traffic, endpoint=traffic.against), path, request)
    if other is not None:
        traffic.count("compared with the other server")
        if found.said() != other.said():
            raise Violation(f"{request} gave {found.said()}, and {other.said()} on the other server")


# The kinds of requests. Each is counted under its name.


async def streamed(traffic: Traffic, rng: random.Random) -> None:
    path, request = body(traffic, rng, stream=True)
    await compare(traffic, rng, path, request, pause_s=0.02 if rng.random() < 0.05 else 0.0)


async def whole(traffic: Traffic, rng: random.Random) -> None:
    path, request = body(traffic, rng, stream=False)
    await compare(traffic, rng, path, request)


async def gone_stream(traffic: Traffic, rng: random.Random) -> None:
    """The client goes away after some events, or before the first."""
    path, request = body(traffic, rng, stream=True)
    request["max_tokens"] = 200
    reply = await traffic.endpoint.open("POST", path, request)
    n_events = rng.choice([0, 0, 1, 2, 10, 40])
    async with contextlib.aclosing(reply.events()) as events:
        while n_events and reply.status == 200:
            n_events -= 1
            if await anext(events, None) is None:
                break
    reply.close()


async def gone_waiting(traffic: Traffic, rng: random.Random) -> None:
    """The client goes away while it waits for the head of an answer."""
    path, request = body(traffic, rng, stream=rng.random() < 0.3)
    request["max_tokens"] = 200
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.choice([0.001, 0.02, 0.1, 0.5])):
            reply = await traffic.endpoint.open("POST", path, request)
            reply.close()


async def too_long(traffic: Traffic, rng: random.Random) -> None:
    """A prompt beyond the context: 400 with limit and length, or 429 when the queue is full: it is not read
    then.
    """
    request = {"model": traffic.model, "prompt": text(rng, 1) + " word" * (traffic.max_model_len * rng.randint(2, 20))}
    reply = await traffic.endpoint.open("POST", COMPLETIONS, request)
    await refused(reply)
    if reply.status == 429:
        was_full(traffic, reply)
    elif reply.status != 400:
        raise Violation(f"a prompt too long got HTTP {reply.status}")


async def burst(traffic: Traffic, rng: random.Random) -> None:
    """More at once than the queue takes: each is answered or gets 429."""
    requests = [body(traffic, rng, stream=rng.random() < 0.5) for _ in range(traffic.n_queue_and_running + 8)]
    tasks = [ask(traffic, path, request | {"max_tokens": 8}) for path, request in requests]
    failures = [f for f in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(f, BaseException)]
    for failure in sorted(failures, key=lambda f: isinstance(f, Lost | EndpointError)):
        raise failure


N_AGAIN = 30
"""Seeded requests that are asked again and again."""


async def again(traffic: Traffic, rng: random.Random) -> None:
    """A seeded request that was asked before: the same answer and scores, whatever runs beside it."""
    which = rng.randrange(N_AGAIN)
    if which < 6:
        await asked_again(traffic, rng, which, text(random.Random(which), 60))
        return
    path, request = body(traffic, random.Random(which), stream=rng.random() < 0.5)
    request["seed"] = which
    if not request["stream"]:
        request.pop("stream_options", None)
    if (answered := await ask(traffic, path, request)) is not None:
        said = f"{answered.said()} {answered.scores}"
        if (first := traffic.golden.setdefault(f"body {which}", said)) != said:
            raise Violation(f"{request} gave {first}, then {said}")


async def asked_again(traffic: Traffic, rng: random.Random, which: int, prompt: str) -> None:
    """Asks the seeded request of that number. Raises Violation where its text is another than before."""
    name = [traffic.model, *traffic.adapters][which % (1 + len(traffic.adapters))]
    request: dict[str, Any] = {"model": name, "stream": rng.random() < 0.5, "prompt": prompt}
    request |= {"max_tokens": 24, "temperature": 0.9, "seed": which, "stream_options": {"include_usage": True}}
    if not request["stream"]:
        del request["stream_options"]
    answered = await ask(traffic, COMPLETIONS, request)
    if answered is not None:
        first = traffic.golden.setdefault(str(which), answered.texts[0])
        if answered.texts[0] != first:
            raise Violation(f"the same seeded request gave {first!r}, then {answered.texts[0]!r}")


async def look(traffic: Traffic, rng: random.Random) -> None:
    """The routes beside the two big ones."""
    request = {"model": traffic.model, "prompt": text(rng, 30)}
    for method, path, sent in [
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/health", None),
        ("POST", "/tokenize", request),
        ("POST", "/detokenize", {"model": traffic.model, "tokens": [65, 66]}),
    ]:
        reply = await traffic.endpoint.open(method, path, sent)
        if reply.status != 200:
            await refused(reply)
            raise Violation(f"{method} {path} got HTTP {reply.status}")
        await reply.read()
    reply = await traffic.endpoint.open("GET", "/metrics")
    await reply.read()
    if reply.status != (403 if traffic.is_guest else 200):
        raise Violation(f"/metrics got HTTP {reply.status}")


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"hi"',
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"a":' * 20_000,
    b'{"messages": NaN}',
    b'{"input": NaN}',
]
"""Bodies that no route takes."""


async def must_be_refused(reply: HttpReply, kind: int) -> None:
    """Raises Violation unless it is a 4xx with OpenAI's error body."""
    if reply.status < 400:
        reply.close()
        raise Violation(f"a bad request ({kind}) got HTTP {reply.status}")
    await refused(reply)


async def bad(traffic: Traffic, rng: random.Random) -> None:
    """A request that cannot be right: a 4xx with OpenAI's error body."""
    hi = [{"role": "user", "content": "hi"}]
    ok_chat, ok_prompt = {"model": traffic.model, "messages": hi}, {"model": traffic.model, "prompt": "hi"}
    wrong_chat: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user"}]},
        {"messages": [None]},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": 1e999},
        {"top_p": 1.5},
        {"n": 0},
        {"n": 10**6},
        {"n": 10**30},
        {"max_tokens": -5},
        {"max_tokens": 1.5},
        {"seed": "x"},
        {"logit_bias": {"99999999": 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": [1]},
        {"stream": "perhaps"},
        {"no_such_field": 1},
        {"tools": "hammer"},
        {"tools": [{"type": "x"}]},
        {"tool_choice": "required"},
        {"top_logprobs": 3},
        {"top_logprobs": 10**4, "logprobs": True},
        {"stop": [1]},
        {"stop": {"a": 1}},
        {"response_format": {"type": "json_schema"}},
        {"model": "no-such-model"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"chat_template_kwargs": 3},
        {"priority": "high"},
        {"presence_penalty": 99},
    ]
    wrong_prompt: list[dict[str, Any]] = [
        {"prompt": 5},
        {"prompt": [10**9]},
        {"prompt": [-1]},
        {"prompt": [[]]},
        {"prompt": [1, "a"]},
        {"suffix": 5},
        {"logprobs": 10**4},
        {"best_of": 20},
        {"messages": hi},
        {"min_tokens": -1},
        {"top_k": "x"},
        {"stop_token_ids": [10**9]},
        {"min_p": 3},
        {"repetition_penalty": 0},
        {"prompt": {"a": 1}},
    ]
    kind = rng.randrange(5)
    reply: HttpReply
    if kind == 0:
        reply = await traffic.endpoint.open("POST", CHAT, ok_chat | rng.choice(wrong_chat))
    elif kind == 1:
        reply = await traffic.endpoint.open("POST", COMPLETIONS, ok_prompt | rng.choice(wrong_prompt))
    elif kind == 2:
        reply = await traffic.endpoint.open("POST", rng.choice([CHAT, COMPLETIONS, "/tokenize"]), rng.choice(BROKEN))
    elif kind == 3:
        method, path = rng.choice([("GET", CHAT), ("POST", "/nowhere"), ("DELETE", "/v1/models"), ("GET", "/v1")])
        reply = await traffic.endpoint.open(method, path)
    else:
        big = {"model": traffic.model, "prompt": "x" * 1_500_000}
        reply = await traffic.endpoint.open("POST", COMPLETIONS, big)
    await must_be_refused(reply, kind)


async def wrong_key(traffic: Traffic, rng: random.Random) -> None:
    stranger = Endpoint(traffic.endpoint.url, "guess" * rng.randint(1, 100))
    try:
        reply = await stranger.open("POST", CHAT, {"model": traffic.model, "messages": []})
        await refused(reply)
        if reply.status != 401:
            raise Violation(f"a wrong key got HTTP {reply.status}")
    finally:
        stranger.close()


Kinds = dict[Callable[[Traffic, random.Random], Awaitable[None]], float]
"""Kind of request: how often, relative to the others."""

KINDS: Kinds = {
    streamed: 30,
    whole: 20,
    gone_stream: 14,
    gone_waiting: 8,
    bad: 14,
    too_long: 3,
    again: 6,
    look: 3,
    wrong_key: 2,
    burst: 0.3,
}


async def one(traffic: Traffic, kinds: Kinds, rng: random.Random, timeout_s: float) -> None:
    """One random request of these kinds. Raises Violation, or Lost where the engine seems to have gone."""
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    traffic.count(kind.__name__.replace("_", " "))
    try:
        async with asyncio.timeout(timeout_s):
            await kind(traffic, rng)
    except TimeoutError:
        raise Violation(f"{kind.__name__}: no end within {timeout_s:.0f} s") from None
    except (EndpointError, Lost) as error:
        raise Lost(f"{kind.__name__}: {error}") from None
    except Violation as violation:
        raise Violation(f"{kind.__name__}: {violation}") from None
    except (LookupError, TypeError, ValueError) as error:
        raise Violation(f"{kind.__name__}: malformed answer: {type(error).__name__}: {error}") from None
