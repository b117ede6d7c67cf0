"""The soak's requests to the other APIs: responses that are stored and continued, messages, Ollama's chats, a
batch of a file, and adapters that come and go (`--with apis`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

from bench.soak.hostile import connected, head
from bench.soak.traffic import (
    COMPLETIONS,
    SCHEMA,
    TOKENS,
    Kinds,
    Lost,
    Traffic,
    Violation,
    picture,
    refused,
    text,
    was_full,
)
from deltic.commands.endpoint import Endpoint, HttpReply

RESPONSES, MESSAGES, FILES, BATCHES = "/v1/responses", "/v1/messages", "/v1/files", "/v1/batches"
MAX_STORED = 64
"""What the server is started with as --max-stored-responses, so that the oldest are dropped all the time."""
FULL = {MESSAGES: 529}
"""Statuses beside 429 of a full queue."""
FOR_A_WHILE = "for-a-while"
"""Name of an adapter."""
ENDS = {"end_turn", "max_tokens", "stop_sequence", "tool_use"}


async def got(endpoint: Endpoint, method: str, path: str, status: int = 200, body: Any = None) -> Any:
    """The answer's JSON. Raises Violation for another status, Lost for a 5xx."""
    reply = await endpoint.open(method, path, body)
    data = await reply.read()
    if reply.status >= 500:
        raise Lost(f"HTTP {reply.status}: {data[:200]!r}")
    if reply.status != status:
        raise Violation(f"{method} {path} got HTTP {reply.status}, and not {status}: {data[:300]!r}")
    return json.loads(data) if "json" in reply.headers.get("content-type", "") else data


async def accepted(traffic: Traffic, path: str, request: dict[str, Any]) -> HttpReply | None:
    """The reply to a valid request; None when the queue was full."""
    reply = await traffic.endpoint.open("POST", path, request)
    if reply.status == 200:
        return reply
    if reply.status in (429, FULL.get(path)):
        was_full(traffic, reply)
        reply.close()
        return None
    raise Violation(f"a valid request got HTTP {reply.status}: {await refused(reply)}; it was {request}")


async def events(reply: HttpReply) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream. Raises Lost for an error."""
    async with contextlib.aclosing(reply.events()) as told:
        async for _, payload in told:
            event: dict[str, Any] = json.loads(payload)
            if event["type"] in ("error", "response.failed"):
                raise Lost(f"error event: {event}")
            yield event


async def last_event(reply: HttpReply, kinds: tuple[str, ...]) -> dict[str, Any]:
    """The last event of a stream. Raises Violation where it is of no such kind."""
    seen = [event async for event in events(reply)]
    if not seen or seen[-1]["type"] not in kinds:
        raise Violation(f"a stream ended with {seen[-1:]}")
    return seen[-1]


async def _response(traffic: Traffic, request: dict[str, Any]) -> dict[str, Any] | None:
    """A response that was made and checked; None when the queue was full."""
    reply = await accepted(traffic, RESPONSES, request)
    if reply is None:
        return None
    if request["stream"]:
        made = (await last_event(reply, ("response.completed", "response.incomplete")))["response"]
    else:
        made = json.loads(await reply.read())
    n_tokens = made["usage"]["output_tokens"]
    if made["status"] not in ("completed", "incomplete") or n_tokens > request["max_output_tokens"]:
        raise Violation(f"{request} made {made}")
    traffic.count(TOKENS, n_tokens)
    return dict(made)


async def stored(traffic: Traffic, rng: random.Random) -> None:
    """A response that is read again, continued, and deleted or left to be dropped; no other key finds it."""
    request: dict[str, Any] = {"model": traffic.a_model(rng), "input": text(rng, 30), "stream": rng.random() < 0.5}
    request["max_output_tokens"] = rng.choice([1, 10, 60])
    if rng.random() < 0.3:
        request["text"] = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    made = await _response(traffic, request)
    if made is None:
        return
    path = f"{RESPONSES}/{made['id']}"
    if (kept := await got(traffic.endpoint, "GET", path)) != made:
        raise Violation(f"{made} was stored as {kept}")
    again = await last_event(
        await traffic.endpoint.open("GET", f"{path}?stream=true"), ("response.completed", "response.incomplete")
    )
    if again["response"] != made:
        raise Violation(f"{made} was told again as {again}")
    listed = await got(traffic.endpoint, "GET", f"{path}/input_items")
    if len(listed["data"]) != 1:
        raise Violation(f"{listed} was made from one item")
    if traffic.stranger is not None:
        await got(traffic.stranger, "GET", path, 404)
    more = {"input": "And then?", "previous_response_id": made["id"], "store": False, "max_output_tokens": 5}
    await _response(traffic, {"model": request["model"], "stream": rng.random() < 0.5} | more)
    if rng.random() < 0.5:
        await got(traffic.endpoint, "DELETE", path)
        await got(traffic.endpoint, "GET", path, 404)


async def messages(traffic: Traffic, rng: random.Random) -> None:
    """Anthropic's API: an answer, whole or streamed, and its prompt counted."""
    content: Any = text(rng, 30)
    name = traffic.a_model(rng)
    if traffic.sees and name not in traffic.others and rng.random() < 0.3:
        kind, _, data = picture(rng)["image_url"]["url"].removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": kind, "data": data}
        content = [{"type": "image", "source": source}, {"type": "text", "text": content}]
        traffic.count("with pictures")
    prompt = {"model": name, "messages": [{"role": "user", "content": content}]}
    request = prompt | {"max_tokens": rng.choice([1, 10, 90]), "stream": rng.random() < 0.5}
    reply = await accepted(traffic, MESSAGES, request)
    if reply is None:
        return
    if request["stream"]:
        seen = [event async for event in events(reply)]
        if seen[-1]["type"] != "message_stop":
            raise Violation(f"a stream of messages ended with {seen[-1]}")
        (end,) = (event for event in seen if event["type"] == "message_delta")
        reason, usage = end["delta"]["stop_reason"], seen[0]["message"]["usage"] | end["usage"]
    else:
        made = json.loads(await reply.read())
        reason, usage = made["stop_reason"], made["usage"]
    if reason not in ENDS or usage["output_tokens"] > request["max_tokens"]:
        raise Violation(f"{request} ended with {reason} and {usage}")
    traffic.count(TOKENS, usage["output_tokens"])
    counted = await accepted(traffic, f"{MESSAGES}/count_tokens", prompt)
    n_prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    if counted is not None and (said := json.loads(await counted.read())["input_tokens"]) != n_prompt:
        raise Violation(f"{said} tokens were counted, and {n_prompt} answered")


async def ollama(traffic: Traffic, rng: random.Random) -> None:
    """Ollama's API: a chat or a text, in lines or whole."""
    n = rng.choice([1, 10, 60])
    request = {"model": traffic.a_model(rng), "stream": rng.random() < 0.5, "options": {"num_predict": n}}
    if rng.random() < 0.5:
        path, request = "/api/chat", request | {"messages": [{"role": "user", "content": text(rng, 30)}]}
    else:
        path, request = "/api/generate", request | {"prompt": text(rng, 30)}
    reply = await traffic.endpoint.open("POST", path, request)
    data = await reply.read()
    if reply.status == 429:
        was_full(traffic, reply)
        return
    if reply.status >= 500:
        raise Lost(f"HTTP {reply.status}: {data[:200]!r}")
    lines = [json.loads(line) for line in data.splitlines()]
    if reply.status != 200 or lines[-1].get("done_reason") not in ("stop", "length"):
        if "error" in lines[-1] and reply.status == 200:
            raise Lost(f"error line: {lines[-1]}")
        raise Violation(f"HTTP {reply.status} and {lines[-1]} for {request}")
    if (len(lines) > 1 and not request["stream"]) or lines[-1]["eval_count"] > n:
        raise Violation(f"{len(lines)} lines and {lines[-1]} for {request}")
    traffic.count(TOKENS, lines[-1]["eval_count"])


async def _upload(traffic: Traffic, lines: bytes) -> str:
    """The id of a file. Raises Violation, or Lost."""
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + lines + b"\r\n--x--\r\n"
    about = ("content-type: multipart/form-data; boundary=x", f"content-length: {len(form)}", "connection: close")
    async with connected(traffic) as (reader, writer):
        writer.write(head(traffic, FILES, *about) + b"\r\n" + form)
        said = await reader.read()
    status, _, body = said.partition(b"\r\n\r\n")
    if b" 200 " not in status.splitlines()[0]:
        raise (Lost if b" 5" in status[:12] else Violation)(f"a file got {said[:300]!r}")
    return str(json.loads(body)["id"])


async def batch(traffic: Traffic, rng: random.Random) -> None:
    """A file of requests, answered behind all others, or left before that."""
    n = rng.randint(1, 4)
    body = {"model": traffic.model, "max_tokens": 4}
    asked = [
        {"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": body | {"prompt": text(rng, 10)}}
        for i in range(n)
    ]
    file = await _upload(traffic, "\n".join(map(json.dumps, asked)).encode())
    begun = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    made = await got(traffic.endpoint, "POST", BATCHES, body=begun)
    if traffic.stranger is not None:
        await got(traffic.stranger, "GET", f"{BATCHES}/{made['id']}", 404)
    if rng.random() < 0.2:
        await got(traffic.endpoint, "POST", f"{BATCHES}/{made['id']}/cancel")
    while made["status"] in ("validating", "in_progress", "finalizing", "cancelling"):
        await asyncio.sleep(0.1)
        made = await got(traffic.endpoint, "GET", f"{BATCHES}/{made['id']}")
    counts = made["request_counts"]
    if made["status"] not in ("completed", "cancelled") or counts["failed"]:
        raise Violation(f"a batch ended as {made}")
    if made["status"] == "completed":
        answers = await got(traffic.endpoint, "GET", f"{FILES}/{made['output_file_id']}/content")
        ids = sorted(json.loads(line)["custom_id"] for line in answers.splitlines())
        if ids != [str(i) for i in range(n)]:
            raise Violation(f"a batch of {n} lines has answers for {ids}")
    for name in (file, made.get("output_file_id")):
        if name:
            await got(traffic.endpoint, "DELETE", f"{FILES}/{name}")


async def load_adapter(traffic: Traffic, rng: random.Random) -> None:
    """An adapter that is loaded, asked beside requests that have others, and unloaded under them."""
    if not traffic.adapters or traffic.is_guest or traffic.loading.locked():
        return
    async with traffic.loading:
        given = {"lora_name": FOR_A_WHILE, "lora_path": str(traffic.adapter_directory / rng.choice(traffic.adapters))}
        request = {"model": FOR_A_WHILE, "prompt": text(rng, 10), "max_tokens": 40}
        await got(traffic.endpoint, "POST", "/v1/load_lora_adapter", body=given)
        asked = [asyncio.create_task(traffic.endpoint.open("POST", COMPLETIONS, request)) for _ in range(3)]
        await asyncio.sleep(rng.choice([0.0, 0.02, 0.5]))
        await got(traffic.endpoint, "POST", "/v1/unload_lora_adapter", body={"lora_name": FOR_A_WHILE})
        for reply in await asyncio.gather(*asked):
            if reply.status == 200:
                await reply.read()
            elif (said := await refused(reply)) and reply.status not in (404, 429):  # 404: it came too late
                raise Violation(f"a request with an adapter got HTTP {reply.status}: {said}")
        await got(traffic.endpoint, "POST", COMPLETIONS, 404, request)


KINDS: Kinds = {stored: 8, messages: 8, ollama: 6, batch: 0.6, load_adapter: 1}
