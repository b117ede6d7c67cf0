"""What every API into a chat sends, to the byte, whole and streamed: `python -m tests.wire` writes tests/golden/wire.txt.

tests/null/test_wire.py compares. An answer that is to change is written again, and the difference read. A fake engine says what a
conversation's model said; ids and times stand as names that do not change. Kept are hashes of all, streamed some tokens at a time (BATCHES), and
to be read a whole answer and one stream, without what stands at the head of every chunk.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fake_engine import FakeEngineClient, make_app, saying

GOLDEN = Path(__file__).parent / "golden" / "wire.txt"

BATCHES = (9, 1, 2, 3, 5, 14, 1000)
"""Tokens that come at once: bytes, but for tags. The first is that of the stream that is kept."""

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "weather", "parameters": CITY}


def call(city: str, junk: str = "") -> str:
    return f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n{junk}</function>\n</tool_call>"


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


@dataclass(frozen=True)
class Said:
    """What a model says when it is asked for this much."""

    text: str
    ends: bool = True
    """The model ends it, not a limit."""
    thinks: bool = False
    tools: bool = False
    forced: bool = False
    """A call must be made. Ollama's API cannot ask for that."""
    most: int = 300
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    n: int = 1
    """Where the API has several answers to one request."""
    die_after: int | None = None
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further fields, by API."""


SAID = {
    "text": Said("Hello, world."),
    "nothing": Said(""),
    "thought and text": Said("Hm.\n</think>\n\nHello.", thinks=True),
    "thought only": Said("Hm.\n</think>\n\n", thinks=True),
    "thought without an end": Said("Hm, well.", thinks=True, most=6),
    "thought, text, two calls": Said(f"Hm.\n</think>\n\nI look.\n\n{call('Paris')}\n{call('Oslo')}", thinks=True, tools=True),
    "call only": Said(call("Paris"), tools=True),
    "calls in JSON": Said(f"{HERMES}\n{HERMES}", tools=True),
    "text behind a call": Said(f"{call('Paris')}\n\nSo we wait.", tools=True),
    "text between calls": Said(f"{call('Paris')}\n\nand there\n\n{call('Oslo')} done", tools=True, logprobs=True),
    "text inside a call": Said(call("Paris", "odd words\n<parameter=days>\n2\n</parameter>\n"), tools=True),
    "text inside a call, then another": Said(call("Paris", "odd words, too\n") + call("Oslo"), tools=True),
    "call in a thought": Said(f"Hm.\n{call('Paris')}", thinks=True, tools=True),
    "draft in a thought": Said(f"Hm.\n{call('Paris')}\n</think>\n\nNo.", thinks=True, tools=True),
    "call of an unknown tool": Said(call("Paris").replace("weather", "forecast"), tools=True),
    "broken calls": Said("a <tool_call>\n<function=>\n</tool_call> b <tool_call>{]</tool_call> c", tools=True),
    "call cut by the limit": Said(call("Paris"), tools=True, most=55),
    "call cut behind its end": Said(call("Paris") + " and", ends=False, tools=True, most=96),
    "text in a call that is cut": Said(call("Paris", "odd words\n<parameter=days>\n2"), tools=True, most=90),
    "call cut by a stop string": Said(call("Paris"), tools=True, stop=("ris",)),
    "forced call": Said(call("Paris"), tools=True, forced=True),
    "forced call after a thought": Said(f"Hm.\n</think>\n\n{call('Paris')}", thinks=True, tools=True, forced=True),
    "stop string": Said("Hello, world.", stop=("x", "wor")),
    "limit": Said("Hello, world.", most=5),
    "context": Said("a" * 40, ends=False, most=5000, more={"ollama": {"options": {"num_ctx": 50}}}),
    "log-probabilities": Said("Hm.\n</think>\n\na<b>é", thinks=True, logprobs=True),
    "log-probabilities of a call": Said(f"I look. {call('Paris')}", tools=True, logprobs=True),
    "three": Said("Hi.", n=3),
    "engine dies": Said("Hello, world.", die_after=10),
    "engine dies in a call": Said(call("Paris"), tools=True, die_after=50),
    "options of a chat": Said(
        f"Hm.\n</think>\n\nI look. {call('Paris')}", thinks=True, tools=True,
        more={
            "chat": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True,
                     "include_reasoning": False, "timings_per_token": True, "service_tier": "auto", "rid": "mine"},
            "responses": {"include": ["reasoning.encrypted_content"], "store": False},
            "anthropic": {"thinking": {"type": "adaptive", "display": "omitted"}},
        },
    ),
    "padding and the older form": Said(
        f"I look. {call('Paris')}", tools=True,
        more={
            "chat": {"tools": None, "functions": [FUNCTION]},
            "responses": {"tools": [{"type": "namespace", "name": "sky", "tools": [{"type": "function"} | FUNCTION]}]},
            "anthropic": {"max_tokens": 0},
        },
    ),
}  # fmt: skip
STREAMED = {"padding and the older form": {"stream_options": {"include_obfuscation": True}}}
"""Fields that only a stream has."""


def bodies(said: Said) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(API, path, body) of each API that can ask for this."""
    history = [{"role": "user", "content": "hello"}]
    tool = {"type": "function", "function": FUNCTION}
    scores = {"logprobs": True, "top_logprobs": 2} if said.logprobs else {}
    stop = {"stop": list(said.stop)} if said.stop else {}
    forced = {"tool_choice": "required"} if said.forced else {}
    several = {"n": said.n} if said.n > 1 else {}
    thinks = {"enable_thinking": said.thinks}
    shared: dict[str, Any] = {"model": "fake"}
    chat = shared | thinks | scores | stop | forced | several | {"messages": history, "max_tokens": said.most}
    yield "chat", "/v1/chat/completions", chat | ({"tools": [tool]} if said.tools else {})
    if not (said.tools or said.thinks):
        prompt = {"prompt": "hello", "max_tokens": min(said.most, 1000), "echo": said.n > 1}
        scores = {"logprobs": 2} if said.logprobs else {}
        yield "completion", "/v1/completions", shared | stop | several | scores | prompt
        options = {"num_predict": said.most} | stop
        yield ("generate", "/api/generate", shared | {"prompt": "hello", "raw": said.most == 5, "options": options})
    if several:
        return
    scores = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if said.logprobs else {}
    tools: dict[str, Any] = {"tools": [{"type": "function"} | FUNCTION]} if said.tools else {}
    asked = {"input": "hello", "max_output_tokens": said.most} | tools | scores
    yield "responses", "/v1/responses", shared | thinks | stop | forced | asked
    tools = {"tools": [{"name": "weather", "input_schema": CITY}]} if said.tools else {}
    stop = {"stop_sequences": list(said.stop)} if said.stop else {}
    forced = {"tool_choice": {"type": "any"}} if said.forced else {}
    thinking = {"type": "adaptive" if said.thinks else "disabled"}
    asked = {"messages": history, "max_tokens": said.most, "thinking": thinking} | tools | stop | forced
    yield "anthropic", "/v1/messages", shared | asked
    if not said.forced:
        options = {"num_predict": said.most} | ({"stop": list(said.stop)} if said.stop else {})
        asked = {"messages": history, "think": said.thinks, "options": options}
        scores = {"logprobs": True, "top_logprobs": 2} if said.logprobs else {}
        yield "ollama", "/api/chat", shared | asked | scores | ({"tools": [tool]} if said.tools else {})


_VARIES = (
    (re.compile(r'"(created|created_at|completed_at)":(\d+|"[^"]*Z")'), r'"\1":0'),
    (re.compile(r'"(\w+_ms|\w+_per_second|\w+_duration)":[\d.e+-]+'), r'"\1":0'),
    (re.compile(r'"obfuscation":"([0-9a-f]*)"'), lambda found: f'"obfuscation":{len(found[1])}'),
    (re.compile(r',"system_fingerprint":"fp_[0-9a-f]{12}"'), ""),
)
_ID = re.compile(r"[0-9a-f]{24,}")
_TOKEN = r'{"token":("(?:[^"\\]|\\.)*"),"logprob":[-\d.]+,"bytes":\[[\d,]*\]'
_SHORT = (
    (
        re.compile(
            r'"background":false,|"instructions":null,.*?(?="output":)|"parallel_tool_calls":.*?"truncation":"\w+",'
        ),
        "",
    ),
    (re.compile(r'"(object|created|created_at|completed_at|model|\w+_duration)":("[a-z._]+"|0|null),?'), ""),
    (
        re.compile(
            r'"type":"(response|content_block_)[a-z._]+",|"(error|incomplete_details|user|stop_sequence)":null,'
        ),
        "",
    ),
    (
        re.compile(
            r'"item_id":"\w+#\d+",|"content_index":0,|,"(logprobs|finish_reason|usage)":null|"(index|output_index)":0,'
        ),
        "",
    ),
    (re.compile(r'"timing":{.*?}|"\w+_tokens_details":{[^}]*},?|"annotations":\[],|,"logprobs":\[](?=})'), ""),
    (re.compile(_TOKEN + "}"), r"\1"),
    (re.compile(_TOKEN + r',"top_logprobs":\[[^]]*\]}'), r"\1"),
    (re.compile(r"(?<=\n)\n+"), ""),
)


def plain(response: httpx.Response) -> str:
    """A response as text, without what is another each time; random ids are numbered as they come."""
    text = f"{response.status_code} {response.headers['content-type']}\n{response.text}"
    for pattern, instead in _VARIES:
        text = pattern.sub(instead, text)
    ids: dict[str, str] = {}
    return _ID.sub(lambda found: ids.setdefault(found[0], f"#{len(ids)}"), text)


def short(text: str) -> str:
    """What `plain` gives, to be read."""
    for pattern, instead in _SHORT:
        text = pattern.sub(instead, text)
    return text.strip("\n")


def _sums(*texts: str) -> str:
    return " ".join(hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts)


async def answers_of(name: str, said: Said) -> dict[str, str]:
    engine = FakeEngineClient(saying(said.text, said.ends))
    transport = httpx.ASGITransport(make_app(engine))
    told: dict[str, str] = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:

        async def post(path: str, body: dict[str, Any], batch: int) -> httpx.Response:
            engine.batch, engine.die_after, engine.state, engine.cached_tokens = (batch, said.die_after, "ready", 8)
            return await client.post(path, json=body)

        for api, path, body in bodies(said):
            body |= said.more.get(api, {}) | {"stream": False}
            streamed = body | {"stream": True} | (STREAMED.get(name, {}) if api in ("chat", "responses") else {})
            whole = plain(await post(path, body, 1))
            replies = [await post(path, streamed, n) for n in BATCHES]
            streams = [plain(reply) for reply in replies]
            told[f"{name}: {api}"] = f"{_sums(whole)}\n{short(whole)}"
            told[f"{name}: {api}, streamed"] = f"{_sums(*streams)}\n{short(streams[0])}"
            if api == "responses" and said.die_after is None and body.get("store") is not False:
                response_id = re.search(r"resp_[0-9a-f]+", replies[0].text)
                assert response_id
                again = f"/v1/responses/{response_id[0]}?stream=true&starting_after="
                replayed = [plain(await client.get(f"{again}{n}")) for n in range(30)]
                told[f"{name}: {api}, streamed again"] = _sums("\n".join(replayed))
    return told


def answers() -> dict[str, str]:
    """What each API sends in each conversation: hashes, and lines."""
    return {title: text for name, said in SAID.items() for title, text in asyncio.run(answers_of(name, said)).items()}


def written() -> dict[str, str]:
    """What tests/golden/wire.txt has, as of `answers`."""
    parts = GOLDEN.read_text().removesuffix("\n").removeprefix("# ").split("\n# ")
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"# {title}\n{text}\n" for title, text in answers().items()))
