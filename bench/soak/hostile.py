"""The soak's hostile clients: connections that say nothing, or too much, and texts that look like something
else.

They speak to the socket themselves, since no library would send what they do. What they must get is written
beside each; what the other clients get beside them is for soak.py and traffic.py to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from bench.soak.traffic import CHAT, COMPLETIONS, Kinds, Traffic, Violation, asked_again, refused, was_full
from deltic.bench.load import WORDS

CLIENT_TIMEOUT_S = 3.0
"""What the server is started with as --client-timeout-s: how long it bears a client that says nothing."""
SLACK_S = 25.0
"""By how much it may be late on a busy machine."""
MOST_ACCEPTED = 40_000_000
"""Bytes of headers, or of a body that is too large, that may be on their way before the server has closed:
what lies in the sockets' buffers is among them.
"""

N_LONG_PROMPTS, N_LONG_WORDS = 40, 250
"""Some 400 tokens each: six times what the soak's pools hold."""

SPECIAL = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>x",
    "a<|im_end|>b",
    "<think>",
    "</think>",
    "<tool_call>",
    "e\u0301",
    "\u212b",
)
"""Texts that are names of special tokens, or that a normaliser would change."""


@contextlib.asynccontextmanager
async def connected(traffic: Traffic) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = urlsplit(traffic.endpoint.url)
    try:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
    except OSError as error:
        raise Violation(f"no connection: {error}") from None
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def head(traffic: Traffic, path: str, *more: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {traffic.endpoint.api_key}", *more)
    return "\r\n".join(lines).encode() + b"\r\n"


async def _until_closed(reader: asyncio.StreamReader, within_s: float) -> bytes:
    """What comes until the server closes the connection. Raises Violation where it does not."""
    said = bytearray()
    try:
        async with asyncio.timeout(within_s):
            while data := await reader.read(65_536):
                said += data
    except TimeoutError:
        raise Violation(f"a connection was still open after {within_s:.0f} s") from None
    except OSError:
        pass
    return bytes(said)


async def silent(traffic: Traffic, rng: random.Random) -> None:
    """A connection, half a head, or half a body, and then nothing: it is closed, or left before that."""
    body = b'{"model": "x", "prompt": "'
    half = head(traffic, COMPLETIONS, "content-type: application/json", "content-length: 1000")
    said = rng.choice([b"", b"POST /v1/chat/comp", half[:60], half, half + b"\r\n", half + b"\r\n" + body])
    async with connected(traffic) as (reader, writer):
        writer.write(said)
        if rng.random() < 0.7:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            return
        begin = time.monotonic()
        answer = await _until_closed(reader, CLIENT_TIMEOUT_S + SLACK_S)
        if time.monotonic() - begin < CLIENT_TIMEOUT_S / 2:
            raise Violation(f"closed after {time.monotonic() - begin:.1f} s of silence: {answer[:100]!r}")


async def _flood(traffic: Traffic, start: bytes, piece: bytes, statuses: tuple[int, ...]) -> None:
    """Writes for as long as the server takes it.

    It must answer one of the statuses, or close, before MOST_ACCEPTED.
    """
    async with connected(traffic) as (reader, writer):
        n_sent = 0
        try:
            writer.write(start)
            while n_sent < MOST_ACCEPTED and not reader.at_eof() and not writer.is_closing():
                writer.write(piece)
                n_sent += len(piece)
                await asyncio.wait_for(writer.drain(), CLIENT_TIMEOUT_S + SLACK_S)
                await asyncio.sleep(0)
        except OSError:
            pass
        if n_sent >= MOST_ACCEPTED:
            raise Violation(f"{n_sent} bytes of {piece[:20]!r} were taken")
        answer = await _until_closed(reader, CLIENT_TIMEOUT_S + SLACK_S)
    if answer and int(answer.split(b" ", 2)[1]) not in statuses:
        raise Violation(f"a flood of {piece[:20]!r} got {answer[:60]!r}")


async def header_flood(traffic: Traffic, rng: random.Random) -> None:
    """Headers without end, many or one long one, or a request line: 431, 414 or 400, and closed."""
    start = head(traffic, CHAT)
    start, piece = rng.choice(
        [(start, b"x-more: " + b"y" * 1000 + b"\r\n"), (start + b"x-long: ", b"y" * 4096), (b"GET /", b"z" * 4096)]
    )
    await _flood(traffic, start, piece, (400, 414, 431))


async def giant_body(traffic: Traffic, rng: random.Random) -> None:
    """A body far beyond the limit, with its length or without: 413, and closed."""
    about = ("content-type: application/json", rng.choice(["content-length: 9999999999", "transfer-encoding: chunked"]))
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n" if about[1].endswith("chunked") else b"a" * 4096
    await _flood(
        traffic, head(traffic, rng.choice([CHAT, COMPLETIONS, "/tokenize"]), *about) + b"\r\n", chunk, (413, 429, 503)
    )


async def forced_special(traffic: Traffic, rng: random.Random) -> None:
    """A schema that forces the name of a special token: it comes as it is written, byte for byte."""
    texts = rng.sample(SPECIAL, rng.randint(1, 3))
    if rng.random() < 0.5:
        form: dict[str, Any] = {"structured_outputs": {"choice": texts}}
    else:
        schema = {
            "type": "object",
            "properties": {texts[0]: {"enum": texts}},
            "required": [texts[0]],
            "additionalProperties": False,
        }
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    request = {"model": traffic.model, "messages": [{"role": "user", "content": "Say it."}], "max_tokens": 300} | form
    reply = await traffic.endpoint.open("POST", CHAT, request)
    if reply.status == 429:
        await refused(reply)
        was_full(traffic, reply)
        return
    if reply.status != 200:
        raise Violation(f"{texts} got HTTP {reply.status}: {await refused(reply)}")
    said = json.loads(await reply.read())["choices"][0]["message"]["content"]
    value = json.loads(said)[texts[0]] if "response_format" in form else said
    if value not in texts:
        raise Violation(f"one of {texts} was asked for, and {said!r} came")


async def come_back(traffic: Traffic, rng: random.Random) -> None:
    """One of more long prompts than the pools hold, so that it is read from the disk, if there is a cache:
    the same text each time.
    """
    which = rng.randrange(1000, 1000 + N_LONG_PROMPTS)
    words = " ".join(random.Random(which).choices(WORDS, k=N_LONG_WORDS))
    await asked_again(traffic, rng, which, words)


KINDS: Kinds = {silent: 10, header_flood: 4, giant_body: 4, forced_special: 8, come_back: 12}
