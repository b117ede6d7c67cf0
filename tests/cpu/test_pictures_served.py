"""`deltic serve` of a tiny model with a vision tower: the official clients show it pictures; bad ones harm nobody."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

pytest.importorskip("PIL")

from tests.pictures import file_of, refused, rgb
from tests.served import Served
from tests.tiny import tiny_checkpoint
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    running = Served(str(tiny_checkpoint("dense", has_tower=True, has_mtp=True)), "--max-picture-tokens", "576")
    yield running
    assert running.close() == 0


LARGE = ("png with 90 texts of 1 MB", "more than 20 MB")


def png(width: int, height: int, seed: int = 0) -> bytes:
    return file_of(rgb(width, height, seed=seed), "PNG")


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shown(*pictures: bytes, text: str = "What is it?") -> list[Any]:
    """Messages of the OpenAI API."""
    parts = [{"type": "image_url", "image_url": {"url": url_of(data)}} for data in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def test_a_chat(served: Served) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 12, "logprobs": True}
    first = served.chat(shown(png(256, 256)), **asked)
    again = served.chat(shown(png(256, 256)), **asked)
    other = served.chat(shown(png(256, 256, seed=5)), **asked)
    assert first.usage.prompt_tokens == again.usage.prompt_tokens > 64
    assert (first.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens_details.cached_tokens) == (0, 64)
    assert first.choices[0].logprobs == again.choices[0].logprobs != other.choices[0].logprobs
    assert served.metric("tower_pictures_total") == 2
    stream = served.chat(shown(png(256, 256), png(300, 500)), stream=True, max_tokens=20)
    assert [c for chunk in stream for c in chunk.choices][-1].finish_reason in ("length", "stop")
    wait_for(served.is_empty)


def test_a_response(served: Served) -> None:
    content = [
        {"type": "input_image", "image_url": url_of(png(256, 256)), "detail": "auto"},
        {"type": "input_text", "text": "?"},
    ]
    said = served.openai.responses.create(
        model=served.model,
        input=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
        max_output_tokens=16,
    )
    assert said.usage and said.usage.input_tokens > 64


def test_a_message_and_the_result_of_a_tool(served: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(256, 256)).decode()}
    block = {"type": "image", "source": source}
    client = anthropic.Anthropic(base_url=served.process.url, api_key=served.process.api_key, max_retries=0, timeout=60)
    with client:
        ask: Any = {"model": served.model, "max_tokens": 8}
        said = client.messages.create(
            messages=[{"role": "user", "content": [block, {"type": "text", "text": "?"}]}], **ask
        )
        assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) > 64
        use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
        messages: Any = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        said = client.messages.create(messages=messages, **ask)
        assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) > 64
        with pytest.raises(anthropic.BadRequestError, match="is no picture"):
            bad = block | {"source": source | {"data": base64.b64encode(b"GIF").decode()}}
            client.messages.create(messages=[{"role": "user", "content": [bad]}], **ask)  # type: ignore[list-item, misc]


def test_hostile_files_stop_no_stream(served: Served) -> None:
    """A stream goes on while files are refused, each in a second or so."""
    done = threading.Event()
    slowest, n_events = [0.0], 0

    def attack() -> None:
        for i, (name, data, _) in enumerate(refused()):
            if i % 8 and name not in LARGE:
                continue
            begin = time.monotonic()
            with pytest.raises(openai.BadRequestError):
                served.chat(shown(data), max_tokens=4)
            slowest[0] = max(slowest[0], time.monotonic() - begin)
        done.set()

    attacker = threading.Thread(target=attack)
    attacker.start()
    while not done.is_set():
        for chunk in served.chat(shown(png(64, 64)), stream=True, max_tokens=200, temperature=1.0):
            n_events += bool(chunk.choices)
        assert attacker.is_alive() or done.is_set(), "a file was not refused as it should be"
    attacker.join()
    assert n_events > 50 and slowest[0] < 10
    wait_for(served.is_empty)


def test_who_leaves_while_a_picture_is_encoded(served: Served) -> None:
    """Its pages come back, and the tower is free for the next one."""

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=served.process.url, headers=served.http.headers) as client:
            for seed, timeout in ((9, 0.35), (10, 0.2), (11, 0.1)):  # some machines are done before the first
                body = {"model": served.model, "messages": shown(png(1000, 1000, seed=seed))}
                with contextlib.suppress(httpx.TimeoutException):
                    await client.post("/v1/chat/completions", json=body, timeout=timeout)
                    continue
                return
            pytest.fail("every picture was encoded before its client left")

    asyncio.run(leave())
    assert served.chat(shown(png(64, 64)), max_tokens=2).usage.prompt_tokens
    wait_for(served.is_empty)


def test_a_picture_is_made_as_small_as_the_server_wants(served: Served) -> None:
    tokens = [
        served.chat(shown(png(width, height)), max_tokens=1, **more).usage.prompt_tokens
        for width, height, more in (
            (768, 768, {}),
            (2000, 2000, {}),
            (768, 768, {"extra_body": {"mm_processor_kwargs": {"max_pixels": 150_000}}}),
        )
    ]
    assert tokens[0] == tokens[1] > 576 > tokens[2] > 100
