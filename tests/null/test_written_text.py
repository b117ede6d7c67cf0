"""A text that is spoken while it is written, from the WebSocket to what the engine is sent."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect

from deltic.engine.messages import Request
from deltic.server.limits import INLINE_BYTES
from deltic.server.speech import socket as speech_socket
from deltic.server.speech.prompt import OpenText
from deltic.server.speech.socket import PATH
from deltic.text import IncrementalEncoder
from tests.fake_engine import byte_tokenizer, served
from tests.fake_speech import FakeSpeechClient, make_speech_app, wave
from tests.null.test_speech_http import INLINE
from tests.null.test_speech_socket import CLOSE, CONFIG, DONE, kinds, received, send, text
from tests.waiting import until

OPEN = CONFIG | {"non_streaming_mode": False}
PART = ["audio.start", "audio", "audio.done", "session.done"]


@pytest.fixture
def engine() -> FakeSpeechClient:
    return FakeSpeechClient()


@pytest.fixture
def live(engine: FakeSpeechClient) -> Iterator[str]:
    with served(make_speech_app(engine), ws="websockets-sansio") as url:
        yield url.replace("http", "ws") + PATH


async def heard(socket: ClientConnection, n_bytes: int) -> bytes:
    audio = b""
    while len(audio) < n_bytes:
        message = await asyncio.wait_for(socket.recv(), 10)
        assert isinstance(message, bytes), message
        audio += message
    return audio


def trailing(request: Request) -> bytes:
    """Of a byte tokenizer, without the end."""
    assert request.speech is not None and not request.speech.is_open
    assert request.speech.trailing_ids[-1] == 302
    return bytes(request.speech.trailing_ids[:-1])


def test_it_speaks_as_far_as_the_text_goes(
    engine: FakeSpeechClient, live: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deltic.server")
    engine.n_frames = 12

    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, OPEN, text(" \n "), text("  Hel"))
            await asyncio.sleep(0.05)
            assert not engine.requests
            await send(socket, text("lo wor"))
            (start,) = await received(socket, "audio.start")
            assert start["sentence_text"] == "Hello wor" and start["format"] == "pcm"
            assert await heard(socket, len(wave(4))) == wave(12)[: len(wave(4))]
            (request,) = engine.requests
            assert request.speech is not None and request.speech.is_open and request.speech.is_streamed
            assert bytes(request.speech.trailing_ids) == b"ello"
            await send(socket, text("ld"), DONE)
            got = await received(socket, "session.done")
            assert kinds(got) == PART[1:] and got[0] == wave(12)[len(wave(4)) :]
            assert got[1]["total_bytes"] == len(wave(12)) and not got[1]["error"]
            assert got[2]["total_sentences"] == 1
            assert trailing(request) == b"ello world"
            # The next is one of its own, and may be said in another way.
            await send(socket, CONFIG, text("Whole."), DONE, OPEN, text("Op"), text("en."), DONE, CLOSE)
            got = await received(socket)
            assert kinds(got) == PART * 2 and got[4]["utterance_index"] == 2
        assert [r.speech.is_open for r in engine.requests if r.speech] == [False] * 3
        assert trailing(engine.requests[2]) == b"pen."

    asyncio.run(go())
    parts = [record.getMessage() for record in caplog.records if record.getMessage().startswith("PART")]
    assert len(parts) == 3 and f" {PATH} 200 " in parts[0] and engine.requests[0].id in parts[0]
    assert "Hello" not in caplog.text and not engine.aborts


def test_what_the_engine_gets_is_what_it_gets_at_once() -> None:
    """The prompt, the text behind it and the bound, for any cut: with a voice whose reference is longer than the text, and shorter."""
    engine = FakeSpeechClient("base")
    engine.n_frames = 2
    said = "  Dr. Smith said: “it's 3.5 %”, or so…  Well — 你好，世界。 <think>no</think>\n\n \n  The end of it all. "
    app = make_speech_app(engine)
    vector = {"speaker_embedding": [0.5] * engine.shape.talker.hidden_size, "seed": 7}

    def sent(request: Request) -> tuple[Any, ...]:
        assert request.speech is not None
        speech = msgspec.structs.replace(request.speech, is_streamed=True)
        return request.prompt_ids, speech, request.params, request.prefix_scope

    with served(app, ws="websockets-sansio") as url:
        at_once = httpx.post(f"{url}/v1/audio/speech", json=vector | {"input": said}).raise_for_status()
        assert at_once.content
        expected = sent(engine.requests.pop())
        assert expected[2].max_tokens == 12 * 100

        async def go(seed: int) -> None:
            rng, rest = Random(seed), said
            async with connect(url.replace("http", "ws") + PATH) as socket:
                await send(socket, {"type": "session.config", "stream_audio": seed % 2 == 0, **vector})
                engine.n_frames = 2 if seed % 3 == 2 else 100  # in the end it stops before its text is there
                while rest:
                    n = rng.choice((1, 2, 3, 10))
                    await send(socket, text(rest[:n]))
                    rest = rest[n:]
                    if rng.random() < 0.2:
                        await asyncio.sleep(0.005)
                if seed % 3 == 2:
                    await until(lambda: engine.requests and not engine.n_open)
                await send(socket, DONE, CLOSE)
                got = await received(socket)
                assert kinds(got) == PART and not got[2]["error"]
            request = engine.requests.pop()
            if seed % 3 != 2:
                assert sent(request) == expected
            else:
                assert request.prompt_ids == expected[0]

        for seed in range(9):
            asyncio.run(go(seed))


@pytest.mark.parametrize("reference", ["ref", "a reference that has more tokens than frames"])
def test_a_prompt_waits_for_as_many_words_as_its_reference_has_frames(reference: str) -> None:
    """20 frames, beside which stand the transcript and then the text."""
    engine = FakeSpeechClient("base")
    said = "One two three four five"
    config = {"stream_audio": True, "ref_audio": INLINE, "ref_text": reference, "seed": 1}
    with served(make_speech_app(engine), ws="websockets-sansio") as url:
        body = config | {"input": said, "stream": True}
        del body["stream_audio"]
        assert httpx.post(f"{url}/v1/audio/speech", json=body).status_code == 200

        async def go() -> None:
            async with connect(url.replace("http", "ws") + PATH) as socket:
                await send(socket, {"type": "session.config"} | config, text(said[:10]))
                await received(socket, "audio.start")
                if len(reference) > 20:
                    await until(lambda: len(engine.requests) == 2)
                else:
                    await asyncio.sleep(0.1)
                    assert len(engine.requests) == 1
                await send(socket, text(said[10:]), DONE)
                assert kinds(await received(socket, "session.done")) == PART[1:]

        asyncio.run(go())
    at_once, written = engine.requests
    assert written.prompt_ids == at_once.prompt_ids
    assert written.speech is not None and at_once.speech is not None and written.speech.is_primed
    assert written.speech.trailing_ids == at_once.speech.trailing_ids[: len(written.speech.trailing_ids)]


def test_a_voice_that_is_lost_while_its_prompt_waits_is_made_again() -> None:
    """As when the engine's process is started again."""
    engine = FakeSpeechClient("base")
    config = {"type": "session.config", "stream_audio": True, "ref_audio": INLINE, "ref_text": "ref"}

    async def go(url: str) -> None:
        async with connect(url.replace("http", "ws") + PATH) as socket:
            await send(socket, config, text("One two "))
            await until(lambda: engine.voices)
            await asyncio.sleep(0.05)
            engine.voices.clear()
            await send(socket, text("three four five six"), DONE)
            got = await received(socket, "session.done")
            assert kinds(got) == PART and not got[2]["error"]

    with served(make_speech_app(engine), ws="websockets-sansio") as url:
        asyncio.run(go(url))
    assert len(engine.requests) == 1 and len(engine.encoded) == 2


def test_only_white_space_is_nothing(engine: FakeSpeechClient, live: str) -> None:
    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, OPEN, text(" \n"), text(""), OPEN, text("\t "), DONE, DONE)
            got = await received(socket, "session.done")
            assert kinds(got) == ["error", "session.done"] and "not inside" in got[0]["message"]
            assert got[1]["total_sentences"] == 0
            assert (await received(socket, "session.done"))[-1]["utterance_index"] == 1
            await send(socket, text(" "), CLOSE)
            assert kinds(await received(socket)) == ["session.done"]

    asyncio.run(go())
    assert not engine.requests


def test_what_fails_ends_one_utterance(engine: FakeSpeechClient, live: str) -> None:
    engine.n_frames = 4000

    async def go() -> None:
        async with connect(live) as socket:
            # Too long, once it has begun.
            await send(socket, OPEN, text("Begun "))
            await received(socket, "audio.start")
            await heard(socket, 1)
            await send(socket, text("a " * 3000), text("and on"), OPEN, DONE)
            got = await received(socket, "session.done")
            assert [k for k in kinds(got) if k != "audio"] == ["error", "audio.done", "error", "session.done"] or [
                k for k in kinds(got) if k != "audio"
            ] == ["error", "error", "audio.done", "session.done"]
            codes = {m["code"] for m in got if kinds([m]) == ["error"]}
            assert "context_length_exceeded" in codes
            await until(lambda: not engine.n_open)
            assert len(engine.aborts) == 1
            # Too long before.
            await send(socket, text("a " * 3000), DONE)
            got = await received(socket, "session.done")
            assert kinds(got) == ["audio.start", "error", "audio.done", "session.done"]
            assert len(engine.requests) == 1
            # More than may wait.
            await send(socket, text("x" * 60_000), text("y" * 60_000), DONE)
            got = await received(socket, "session.done")
            assert got[0]["param"] == "text" and "input.done" in got[0]["message"]
            # The engine fails.
            engine.fail_after = 2
            await send(socket, text("Hello there."), text(" More."), DONE)
            got = await received(socket, "session.done")
            assert [m["message"] for m in got if kinds([m]) == ["error"]] == ["the step failed"]
            (done,) = (m for m in got if kinds([m]) == ["audio.done"])
            n_heard = sum(len(message) for message in got if isinstance(message, bytes))
            assert done["error"] and done["total_bytes"] == n_heard > 0
            engine.fail_after, engine.n_frames = None, 4
            await send(socket, text("Hel"), text("lo."), DONE)
            got = await received(socket, "session.done")
            assert kinds(got) == PART and got[1] == wave(4)

    asyncio.run(go())


def test_who_leaves_in_the_middle_of_a_word_ends_it(engine: FakeSpeechClient, live: str) -> None:
    engine.n_frames = 100

    async def go() -> None:
        async with connect(live) as first, connect(live) as second:
            for socket in (first, second):
                await send(socket, OPEN, text("Hello th"))
                await received(socket, "audio.start")
            await until(lambda: engine.n_open == 2)
            await first.close()
            await until(lambda: engine.n_open == 1 and engine.aborts)
            engine.n_frames = 6
            await send(second, text("ere"), DONE)
            assert kinds(await received(second, "session.done")) == PART[1:]

    asyncio.run(go())
    assert len(engine.aborts) == 1 and engine.aborts[0][0] == engine.requests[0].id


def test_one_that_is_left_open_is_ended(live: str, monkeypatch: pytest.MonkeyPatch, engine: FakeSpeechClient) -> None:
    monkeypatch.setattr(speech_socket, "IDLE_S", 0.2)
    engine.n_frames = 100

    async def go() -> None:
        for first in ("H", "Hello "):
            async with connect(live) as socket:
                before_s = time.monotonic()
                await send(socket, OPEN, text(first))
                got = await received(socket)
                assert kinds(got)[-1] == "error" and "no message" in got[-1]["message"]
                assert socket.close_code == 1000 and time.monotonic() - before_s < 5
        await until(lambda: not engine.n_open)
        assert len(engine.aborts) == 1
        # What waits behind others that are said is not idle.
        engine.n_frames, engine.token_s = 20, 0.02
        async with connect(live) as socket:
            await send(socket, OPEN, text("said"), DONE, text("H"))
            got = await received(socket)
            assert kinds(got)[:4] == PART and kinds(got)[-1] == "error"

    asyncio.run(go())


def test_much_text_waits(engine: FakeSpeechClient, live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind others; alone, a text is read whole."""
    monkeypatch.setattr(speech_socket, "MAX_WAITING", 100)
    pushed: list[str] = []
    push = IncrementalEncoder.push
    monkeypatch.setattr(IncrementalEncoder, "push", lambda self, text: pushed.append(text) or push(self, text))
    engine.hold = True

    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, OPEN)
            for _ in range(8):
                await send(socket, *[text("x" * 9 + " ")] * 4, DONE)
            await asyncio.sleep(0.3)
            assert len(engine.requests) == 1 and len(pushed) <= 11
            engine.hold = False
            got: list[Any] = []
            for _ in range(8):
                got += await received(socket, "session.done")
            assert kinds(got) == PART * 8
            engine.n_frames = 99
            await send(socket, *[text("x" * 9 + " ")] * 10, DONE)
            assert kinds(await received(socket, "session.done")) == PART
            await send(socket, *[text("x" * 9 + " ")] * 10, text("y"), DONE)
            assert "error" in kinds(await received(socket, "session.done"))

    asyncio.run(go())
    assert trailing(engine.requests[-2]) == (b"x" * 9 + b" ")[1:] + (b"x" * 9 + b" ") * 8 + b"x" * 9


def test_a_long_word_in_small_pieces_does_not_hold_up_others(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is encoded with its end is all of it."""
    threads: list[str] = []
    push = IncrementalEncoder.push

    def noted(self: IncrementalEncoder, text: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return push(self, text)

    monkeypatch.setattr(IncrementalEncoder, "push", noted)

    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, OPEN, text("x" * INLINE_BYTES), text(" "))
            await received(socket, "error")  # it is too long to be said

    asyncio.run(go())
    assert [name.startswith("prepare") for name in threads] == [False, True]


def test_sentences_are_parts_of_their_own(engine: FakeSpeechClient, live: str) -> None:
    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, OPEN | {"split_granularity": "sentence"}, text("One two"), text(". Three."), DONE)
            assert kinds(await received(socket, "session.done")) == PART[:3] * 2 + PART[3:]

    asyncio.run(go())
    assert [r.speech.is_open for r in engine.requests if r.speech] == [False, False]


def test_an_open_text_tells_who_waits() -> None:
    async def go() -> None:
        open_text = OpenText(IncrementalEncoder(byte_tokenizer()))
        waiting = asyncio.create_task(open_text.wait(2))
        open_text.add("a", [1])
        await asyncio.sleep(0)
        assert not waiting.done()
        open_text.add("b", [2])
        await asyncio.wait_for(waiting, 1)
        waiting = asyncio.create_task(open_text.wait(9))
        await asyncio.sleep(0)
        open_text.end([3])
        await asyncio.wait_for(waiting, 1)
        assert open_text.ids == [1, 2, 3] and open_text.n_characters == 2

    asyncio.run(go())
