"""The speech soak's traffic: what `traffic.py` is for text. For a CustomVoice model."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import random
from typing import Any

from bench.soak.traffic import (
    BROKEN,
    TOKENS,
    Kinds,
    Lost,
    Traffic,
    Violation,
    must_be_refused,
    refused,
    text,
    was_full,
    wrong_key,
)
from deltic.commands.endpoint import EndpointError, HttpReply

PATH = "/v1/audio/speech"

MAGIC = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "mp3": b""}
"""How a file of a format begins; mp3 in several ways."""

FRAME_BYTES = 2 * 1920

TOO_LARGE = b'{"input": "' + b"x" * 1_500_000 + b'"}'


async def voices(traffic: Traffic) -> list[str]:
    """The server's voices, asked once. Raises Lost."""
    if "voices" not in traffic.golden:
        status, body = await traffic.endpoint.json("GET", "/v1/audio/voices")
        if status >= 500:
            raise Lost(f"HTTP {status}")
        traffic.golden["voices"] = json.dumps(body["voices"])
    listed: list[Any] = json.loads(traffic.golden["voices"])
    return [voice["name"] if isinstance(voice, dict) else voice for voice in listed]


async def body(traffic: Traffic, rng: random.Random) -> dict[str, Any]:
    """A valid request, not yet streamed."""
    request: dict[str, Any] = {
        "model": traffic.model,
        "input": text(rng, 20),
        "voice": rng.choice(await voices(traffic)),
        "max_new_tokens": rng.choice([2, 3, 5, 10, 30, 60]),
        "response_format": "pcm",
    }
    for probability, name, values in (
        (0.3, "language", ["English", "chinese", "AUTO", "Japanese"]),
        (0.3, "temperature", [0.0, 0.5, 1.5]),
        (0.2, "subtalker_temperature", [0.0, 1.0]),
        (0.2, "top_k", [1, 10]),
        (0.2, "top_p", [0.3, 0.9]),
        (0.2, "seed", [0, 7, 2**63 - 1]),
        (0.2, "repetition_penalty", [1.0, 1.3]),
        (0.2, "sample_rate", [8000, 24000, 48000]),
        (0.3, "non_streaming_mode", [True, False]),
    ):
        if rng.random() < probability:
            request[name] = rng.choice(values)
    return request


def check_length(request: dict[str, Any], n_bytes: int) -> int:
    """Frames in so much PCM.

    Raises Violation when it is none, or not whole ones, or more than were asked for.
    """
    per_frame = FRAME_BYTES * int(request.get("sample_rate", 24000)) // 24000
    n_frames, rest = divmod(n_bytes, per_frame)
    if rest or not 1 <= n_frames < request["max_new_tokens"]:
        raise Violation(f"{n_bytes} bytes of audio for {request}")
    return n_frames


async def accepted(traffic: Traffic, request: dict[str, Any]) -> HttpReply | None:
    """The reply to a valid request; None when the queue was full."""
    reply = await traffic.endpoint.open("POST", PATH, request)
    if reply.status == 200:
        return reply
    message = await refused(reply)
    if reply.status != 429:
        raise Violation(f"a valid request got HTTP {reply.status}: {message}; it was {request}")
    was_full(traffic, reply)
    return None


async def events(reply: HttpReply) -> bytes:
    """The audio of an event stream. Raises Violation unless it ends as it should, Lost for an error event."""
    audio, is_done = b"", False
    async with contextlib.aclosing(reply.events()) as told:
        async for _, payload in told:
            event = json.loads(payload)
            if is_done:
                raise Violation("an event after speech.audio.done")
            if event["type"] == "speech.audio.error":
                raise Lost(f"error event: {event}")
            is_done = event["type"] == "speech.audio.done"
            if is_done and event["usage"]["output_tokens"] < 1:
                raise Violation(f"no tokens in {event}")
            audio += base64.b64decode(event.get("audio", ""))
    if not is_done:
        raise Violation("the stream ended without speech.audio.done")
    return audio


async def ask(traffic: Traffic, request: dict[str, Any]) -> bytes | None:
    """PCM of a valid request for it, whole, streamed or in events; None when the queue was full."""
    reply = await accepted(traffic, request)
    if reply is None:
        return None
    audio = await (events(reply) if request.get("stream_format") == "sse" else reply.read())
    traffic.count(TOKENS, check_length(request, len(audio)))
    return audio


# The kinds of requests. Each is counted under its name.


async def streamed(traffic: Traffic, rng: random.Random) -> None:
    await ask(traffic, await body(traffic, rng) | {"stream_format": rng.choice(["audio", "audio", "sse"])})


async def slow_reader(traffic: Traffic, rng: random.Random) -> None:
    """Reads slower than audio is made."""
    request = await body(traffic, rng) | {"stream_format": "audio"}
    reply, n_bytes = await accepted(traffic, request), 0
    if reply is None:
        return
    async with contextlib.aclosing(reply.pieces()) as pieces:
        async for _, data in pieces:
            n_bytes += len(data)
            await asyncio.sleep(0.05)
    traffic.count(TOKENS, check_length(request, n_bytes))


async def whole(traffic: Traffic, rng: random.Random) -> None:
    request = await body(traffic, rng)
    if rng.random() < 0.3:
        await ask(traffic, request)
        return
    request["response_format"] = form = rng.choice(list(MAGIC))
    if rng.random() < 0.3:
        request["speed"] = rng.choice([0.25, 0.9, 4.0])
    if reply := await accepted(traffic, request):
        data = await reply.read()
        if not data or not data.startswith(MAGIC[form]):
            raise Violation(f"{data[:8]!r} begins no {form}")


async def gone_stream(traffic: Traffic, rng: random.Random) -> None:
    """The client goes away after some pieces, or before the first."""
    request = await body(traffic, rng) | {"stream_format": "audio", "max_new_tokens": 150}
    reply = await accepted(traffic, request)
    if reply is None:
        return
    n_pieces = rng.choice([0, 1, 1, 2, 5])
    async with contextlib.aclosing(reply.pieces()) as pieces:
        while n_pieces and await anext(pieces, None) is not None:
            n_pieces -= 1
    reply.close()


async def gone_waiting(traffic: Traffic, rng: random.Random) -> None:
    """The client goes away while it waits for the head of an answer."""
    request = await body(traffic, rng) | {"max_new_tokens": 150}
    if rng.random() < 0.3:
        request["stream_format"] = "audio"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.choice([0.001, 0.02, 0.1, 0.5])):
            reply = await traffic.endpoint.open("POST", PATH, request)
            reply.close()


async def burst(traffic: Traffic, rng: random.Random) -> None:
    """More at once than the queue takes: each is answered or gets 429."""
    requests = [await body(traffic, rng) for _ in range(traffic.n_queue_and_running + 8)]
    tasks = [ask(traffic, request | {"max_new_tokens": 4}) for request in requests]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    for failure in sorted(failures, key=lambda f: isinstance(f, Lost | EndpointError)):
        raise failure


async def again(traffic: Traffic, rng: random.Random) -> None:
    """A seeded request that was asked before: the same samples, whatever runs beside it and however they are
    sent.
    """
    which = rng.randrange(6)
    own = random.Random(which)
    request = {
        "model": traffic.model,
        "input": text(own, 20),
        "voice": (await voices(traffic))[0],
        "seed": which,
        "max_new_tokens": 30,
        "response_format": "pcm",
    }
    form = rng.choice([None, "audio", "sse"])
    audio = await ask(traffic, request | ({"stream_format": form} if form else {}))
    if audio is not None:
        digest = hashlib.sha256(audio).hexdigest()
        if traffic.golden.setdefault(str(which), digest) != digest:
            raise Violation(f"the same seeded request gave other samples: {request}, {form}")


async def look(traffic: Traffic, rng: random.Random) -> None:
    """The routes beside the one."""
    for path in ("/v1/models", "/v1/audio/voices", "/metrics", "/version", "/health"):
        reply = await traffic.endpoint.open("GET", path)
        if reply.status != 200:
            await refused(reply)
            raise Violation(f"GET {path} got HTTP {reply.status}")
        await reply.read()


async def bad(traffic: Traffic, rng: random.Random) -> None:
    """A request that cannot be right: a 4xx with OpenAI's error body."""
    wrong: list[dict[str, Any]] = [
        {"input": ""},
        {"input": " \n"},
        {"input": 5},
        {"input": None},
        {"voice": "nobody"},
        {"voice": 3},
        {"voice": {"name": "x"}},
        {"model": "no-such-model"},
        {"language": "klingon"},
        {"response_format": "aiff"},
        {"sample_rate": 96000},
        {"speed": 9},
        {"speed": 2, "initial_codec_chunk_frames": 1},
        {"stream_format": "video"},
        {"max_new_tokens": 0},
        {"max_new_tokens": 10**6},
        {"max_new_tokens": "x"},
        {"temperature": -1},
        {"top_p": 2},
        {"top_k": -1},
        {"seed": "x"},
        {"ref_audio": "data:audio/wav;base64,AAAA"},
        {"ref_text": "x"},
        {"speaker_embedding": [1.0]},
        {"task_type": "Base"},
        {"no_such_field": 1},
        {"repetition_penalty": 0},
        {"input": "word " * 20_000},
        {"initial_codec_chunk_frames": -1},
    ]
    kind = rng.randrange(4)
    if kind < 2:
        reply = await traffic.endpoint.open("POST", PATH, await body(traffic, rng) | rng.choice(wrong))
    elif kind == 2:
        reply = await traffic.endpoint.open("POST", PATH, rng.choice([*BROKEN, TOO_LARGE]))
    else:
        method, path = rng.choice(
            [("GET", PATH), ("POST", "/v1/chat/completions"), ("DELETE", "/v1/audio/voices/nobody")]
        )
        reply = await traffic.endpoint.open(method, path, {} if method == "POST" else None)
    await must_be_refused(reply, kind)


KINDS: Kinds = {
    streamed: 30,
    whole: 12,
    gone_stream: 16,
    gone_waiting: 10,
    slow_reader: 3,
    again: 8,
    bad: 12,
    look: 3,
    wrong_key: 2,
    burst: 0.1,
}
