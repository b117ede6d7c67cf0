"""The WebSocket that speaks a text while it is still being written: through the `websockets` client, over an engine that is not there."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from deltic.engine.messages import EngineInfo
from deltic.host.client import QueueFull
from deltic.server.speech import socket as speech_socket
from deltic.server.speech.audio import wav_header
from deltic.server.speech.socket import MAX_PART, MIN_PART, PATH, Splitter
from tests.fake_engine import served
from tests.fake_speech import FakeSpeechClient, make_speech_app, wave

CONFIG = {"type": "session.config", "voice": "vivian", "stream_audio": True}


@pytest.fixture
def engine() -> FakeSpeechClient:
    return FakeSpeechClient()


@pytest.fixture
def live(engine: FakeSpeechClient) -> Iterator[str]:
    with served(make_speech_app(engine), ws="websockets-sansio") as url:
        yield url.replace("http", "ws") + PATH


async def send(socket: ClientConnection, *messages: dict[str, Any]) -> None:
    for message in messages:
        await socket.send(json.dumps(message))


def text(said: str) -> dict[str, Any]:
    return {"type": "input.text", "text": said}


DONE, CLOSE = {"type": "input.done"}, {"type": "session.close"}


async def received(socket: ClientConnection, until: str = "") -> list[Any]:
    """Messages up to the first of a type, or to the end; bytes in a row as one."""
    got: list[Any] = []
    try:
        while True:
            message = await asyncio.wait_for(socket.recv(), 10)
            if isinstance(message, bytes):
                if got and isinstance(got[-1], bytes):
                    message = got.pop() + message
                got.append(message)
                continue
            got.append(json.loads(message))
            if got[-1]["type"] == until:
                return got
    except ConnectionClosed:
        return got


def kinds(messages: list[Any]) -> list[str]:
    return ["audio" if isinstance(message, bytes) else message["type"] for message in messages]


def test_utterances_one_after_another(engine: FakeSpeechClient, live: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltic.server")

    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, CONFIG, text("One "), text("two."), DONE, text("Three."), DONE, CLOSE)
            got = await received(socket)
            assert socket.close_code == 1000
        part = ["audio.start", "audio", "audio.done", "session.done"]
        assert kinds(got) == part * 2
        assert [got[0][name] for name in ("sentence_text", "format", "sample_rate")] == ["One two.", "pcm", 24000]
        assert got[1] == wave(4) and got[2]["total_bytes"] == len(wave(4)) and not got[2]["error"]
        assert got[3] == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}
        assert got[4]["utterance_index"] == got[7]["utterance_index"] == 1

    asyncio.run(go())
    assert [request.speech.is_streamed for request in engine.requests if request.speech] == [True, True]
    parts = [record.getMessage() for record in caplog.records if record.getMessage().startswith("PART")]
    assert len(parts) == 2 and f" {PATH} 200 " in parts[0] and engine.requests[0].id in parts[0]
    assert "generated_tokens=5" in parts[0] and "One" not in caplog.text


def test_it_speaks_before_the_text_is_whole(engine: FakeSpeechClient, live: str) -> None:
    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, CONFIG | {"split_granularity": "sentence"})
            await send(socket, *map(text, ("The first", " sentence", ".", " And")))
            got = await received(socket, "audio.done")
            assert got[0]["sentence_text"] == "The first sentence." and got[1] == wave(4)
            await send(socket, text(" the second."), DONE)
            got = await received(socket, "session.done")
            assert got[0]["sentence_text"] == "And the second." and got[0]["sentence_index"] == 1
            assert got[-1]["total_sentences"] == 2

    asyncio.run(go())


def test_whole_parts_in_any_form(engine: FakeSpeechClient, live: str) -> None:
    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, CONFIG | {"stream_audio": False, "sample_rate": 8000}, text("Hello."), DONE)
            got = await received(socket, "session.done")
            assert got[1][:44] == wav_header(8000, len(got[1]) - 44) and got[0]["sample_rate"] == 8000
            await send(socket, CONFIG | {"stream_audio": False, "response_format": "flac"}, text("Hello."), DONE)
            assert (await received(socket, "session.done"))[1][:4] == b"fLaC"

    asyncio.run(go())


def test_errors_are_told_and_the_socket_goes_on(engine: FakeSpeechClient, live: str) -> None:
    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, CONFIG)
            for message in (
                {"type": "input.speech"}, {"type": "input.text"}, text("x") | {"other": 1}, [], {"x": 1},
                CONFIG | {"voice": "nobody"}, CONFIG | {"response_format": "mp3"}, CONFIG | {"word_timestamps": True},
                text("a" * 100_001),
            ):  # fmt: skip
                await send(socket, message)  # type: ignore[arg-type]
                (told,) = await received(socket, "error")
                assert told["message"] and told["kind"] == "invalid_request_error", message
            for raw in ("{", b"abc", "[" * 300_000):
                await socket.send(raw)
                assert (await received(socket, "error"))[0]["message"]
            engine.fail_after = 1
            await send(socket, text("Hello."), CONFIG, DONE)
            got = await received(socket, "session.done")
            assert sorted(kinds(got)) == ["audio", "audio.done", "audio.start", "error", "error", "session.done"]
            assert {m["message"] for m in got if kinds([m]) == ["error"]} >= {"the step failed"}
            assert [m["error"] for m in got if kinds([m]) == ["audio.done"]] == [True]
            engine.fail_after = None
            await send(socket, text(" \n "), DONE, text("Hello."), DONE)
            assert (await received(socket, "session.done"))[0]["total_sentences"] == 0
            assert kinds(await received(socket, "session.done")) == [
                "audio.start",
                "audio",
                "audio.done",
                "session.done",
            ]

    asyncio.run(go())


def test_a_bad_first_message_closes(live: str) -> None:
    async def go() -> None:
        for message in (text("x"), CONFIG | {"model": "other"}, {"type": "session.config"}):
            async with connect(live) as socket:
                await send(socket, message)
                got = await received(socket)
                assert kinds(got) == ["error"] and socket.close_code == 1008

    asyncio.run(go())


def test_a_closed_socket_ends_what_is_said(engine: FakeSpeechClient, live: str) -> None:
    engine.n_frames, engine.token_s = 500, 0.02

    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, CONFIG, text("Hello."), DONE, text("Never said."), DONE)
            assert kinds([json.loads(await socket.recv()), await socket.recv()]) == ["audio.start", "audio"]
        for _ in range(100):
            if engine.aborts and not engine.n_open:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("still speaking")

    asyncio.run(go())
    assert len(engine.requests) == 1


def test_who_does_not_read_or_writes_too_much_waits(
    engine: FakeSpeechClient, live: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech_socket, "MAX_WAITING", 100)
    ends: list[Any] = []
    end = speech_socket._End
    monkeypatch.setattr(speech_socket, "_End", lambda *given: ends.append(given) or end(*given))
    engine.hold = True

    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, CONFIG)
            await send(socket, *[item for _ in range(12) for item in (text("x" * 40 + "."), DONE)])
            await asyncio.sleep(0.3)
            assert len(engine.requests) == 1
            engine.hold = False
            got = await received(socket, "session.done")
            for _ in range(11):
                got += await received(socket, "session.done")
            assert kinds(got).count("audio.done") == 12
            ends.clear()
            engine.hold = True
            await send(socket, text("Hello."), *[DONE] * 300)
            await asyncio.sleep(0.3)
            assert len(ends) < 100
            engine.hold = False
            for _ in range(300):
                assert (await received(socket, "session.done"))[-1]["type"] == "session.done"

    asyncio.run(go())


def test_a_part_that_finds_no_place_waits_for_it(
    engine: FakeSpeechClient, live: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = QueueFull(1, 0)
    full.retry_after_s = 0.05  # type: ignore[assignment]
    refusals: list[QueueFull] = []

    def check_room(n: int, owner: str = "") -> EngineInfo:
        if len(refusals) < 3 and engine.hold:
            refusals.append(full)
            raise full
        return FakeSpeechClient.check_room(engine, n, owner)

    monkeypatch.setattr(engine, "check_room", check_room)

    async def go() -> None:
        async with connect(live) as socket:
            engine.hold = True
            await send(socket, CONFIG, text("Hello."), DONE)
            async with asyncio.timeout(10):
                while len(refusals) < 3:
                    await asyncio.sleep(0.01)
            engine.hold = False
            got = await received(socket, "session.done")
            assert kinds(got) == ["audio.start", "audio", "audio.done", "session.done"]
            assert got[1] == wave(4) and not got[2]["error"]

    asyncio.run(go())
    assert len(engine.requests) == 1
    app = make_speech_app(engine, api_key=("a=k",), max_concurrent_per_key=1, queue_timeout_s=0.5)
    with served(app, ws="websockets-sansio") as url:

        async def limited() -> None:
            place = url.replace("http", "ws") + PATH
            key = {"authorization": "Bearer k"}
            engine.n_frames, engine.token_s, engine.hold = 400, 0.01, False
            async with httpx.AsyncClient() as client, connect(place, additional_headers=key) as socket:
                body = {"input": "Hello.", "voice": "ryan", "stream_format": "audio"}
                async with client.stream("POST", f"{url}/v1/audio/speech", json=body, headers=key):
                    await send(socket, CONFIG, text("Hello."), DONE)
                    got = await received(socket, "session.done")
            assert kinds(got) == ["audio.start", "error", "audio.done", "session.done"]
            assert got[1]["code"] == "rate_limit_exceeded"

        asyncio.run(limited())


BROWSER_KEY = Subprotocol("openai-insecure-api-key.k")


def test_a_key_s_sockets_leave_room_for_another_s(engine: FakeSpeechClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_socket, "MAX_SOCKETS", 4)

    async def go(place: str) -> None:
        async with AsyncExitStack() as opened:
            for key in "aabb":
                await opened.enter_async_context(connect(place, additional_headers={"x-api-key": key}))
            with pytest.raises(InvalidStatus) as caught:
                await opened.enter_async_context(connect(place, additional_headers={"x-api-key": "a"}))
            assert caught.value.response.status_code == 429
        async with connect(place, additional_headers={"x-api-key": "a"}):
            pass

    with served(make_speech_app(engine, api_key=("alice=a", "bob=b")), ws="websockets-sansio") as url:
        asyncio.run(go(url.replace("http", "ws") + PATH))


def test_who_may_connect(engine: FakeSpeechClient, live: str, caplog: pytest.LogCaptureFixture) -> None:
    async def refused(url: str, **given: Any) -> int:
        with pytest.raises(InvalidStatus) as caught:
            async with connect(url, **given):
                pass
        assert json.loads(caught.value.response.body or b"")["error"]["message"]
        return caught.value.response.status_code

    async def go() -> None:
        assert await refused(live, origin="http://evil.example") == 403
        engine.state = "restarting"
        assert await refused(live) == 503
        engine.state = "ready"
        app = make_speech_app(engine, api_key=("alice=k",), max_concurrent_per_key=1)
        with served(app, ws="websockets-sansio") as url:
            place = url.replace("http", "ws") + PATH
            assert await refused(place) == 401
            assert await refused(place, subprotocols=["openai-insecure-api-key.wrong"]) == 401
            for offered, taken in ((["realtime", BROWSER_KEY], "realtime"), ([BROWSER_KEY], BROWSER_KEY)):
                async with connect(place, subprotocols=offered) as socket:
                    assert socket.subprotocol == taken
            async with connect(place, additional_headers={"authorization": "Bearer k"}) as socket:
                await send(socket, CONFIG, text("Hello."), DONE)
                assert kinds(await received(socket, "session.done"))[1] == "audio"
            with pytest.raises(InvalidStatus, match="403"):
                async with connect(url.replace("http", "ws") + "/v1/realtime"):
                    pass
            told = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer k"}).text
            for path, status in ((PATH, "101"), (PATH, "401"), ("other", "403")):
                assert f'deltic_http_responses_total{{code="{status}",route="{path}"}}' in told
            assert 'deltic_key_tokens_total{key="alice",kind="generated"} 5.0' in told
        assert engine.requests[-1].tenant == "alice"

    asyncio.run(go())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and "uvicorn" in record.name]


def test_an_idle_socket_is_closed(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_socket, "IDLE_S", 0.2)

    async def go() -> None:
        async with connect(live) as socket:
            await send(socket, CONFIG, text("Hello."), DONE)
            before_s = time.monotonic()
            got = await received(socket)
            assert kinds(got)[-1] == "error" and time.monotonic() - before_s < 5

    asyncio.run(go())


# Where texts are cut.


def split(said: str, granularity: Any, size: int) -> list[str]:
    splitter = Splitter(granularity)
    found = [part for i in range(0, len(said), size) for part in splitter.push(said[i : i + size])]
    return found + ([rest] if (rest := splitter.flush()) else [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("said", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Pi is 3.14, about. Dr. Smith met J. Doe. Yes.", ["Pi is 3.14, about.", "Dr. Smith met J. Doe.", "Yes."]),
        ('He said "No way." Then he left...  Really?!', ['He said "No way."', "Then he left...", "Really?!"]),
        ("你好，世界今天。“天气很好！”我们走吧？好", ["你好，世界今天。", "“天气很好！”", "我们走吧？好"]),
        ("1. Take one.\n2. Take two.\n", ["1. Take one.", "2. Take two."]),
        ("Ok. Fine. So be it.", ["Ok. Fine.", "So be it."]),
        ("नमस्ते दोस्त। कैसे हो?", ["नमस्ते दोस्त।", "कैसे हो?"]),
    ],
)
def test_sentences(said: str, sentences: list[str], size: int) -> None:
    assert split(said, "sentence", size) == sentences
    assert split(said, "none", size) == [said.strip()]


@pytest.mark.parametrize("size", [1, 1000])
def test_clauses(size: int) -> None:
    said = "Well, when the rain had stopped at last, we went out; nobody was there. 今天天气很好所以我们决定一起出去走走，然后回家。"
    assert split(said, "clause", size) == [
        "Well, when the rain had stopped at last,", "we went out; nobody was there.", "今天天气很好所以我们决定一起出去走走，", "然后回家。",
    ]  # fmt: skip


@given(st.text(alphabet='ab .!?,\n"。，x1', max_size=200), st.integers(1, 20))
def test_no_text_is_lost_and_no_cut_of_the_input_shows(said: str, size: int) -> None:
    for granularity in ("none", "sentence", "clause"):
        whole = split(said, granularity, max(1, len(said)))
        assert split(said, granularity, size) == whole
        assert "".join("".join(whole).split()) == "".join(said.split())


def test_long_texts_are_cut() -> None:
    said = "word " * 1000
    found = split(said, "sentence", 7)
    assert max(map(len, found)) <= MAX_PART and "".join(found).replace(" ", "") == "word" * 1000
    assert all(part.endswith("word") and len(part) > MIN_PART for part in found)
    assert [len(part) for part in split("x" * 1500, "clause", 1500)] == [600, 600, 300]
