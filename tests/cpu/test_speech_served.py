"""Speech end to end: `deltic serve` with tiny checkpoints, from the socket to the samples and back."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from websockets.asyncio.client import connect

from deltic.server.speech.socket import PATH
from tests.served import Served
from tests.tiny_speech import tiny_audio, tiny_speech
from tests.waiting import wait_for

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
SAY: dict[str, Any] = {
    "input": "hello world, the speech", "voice": "vivian", "seed": 7, "max_new_tokens": 12, "response_format": "pcm",
}  # fmt: skip
FRAME_BYTES = 2 * 1920


def recording(seconds: float = 2.5) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tiny_audio(int(24000 * seconds)).numpy(), 24000, format="WAV", subtype="PCM_16")
    return file.getvalue()


def speaking(variant: str, *arguments: str) -> Served:
    return Served(str(tiny_speech(variant)), *arguments)


@pytest.fixture(scope="module")
def custom() -> Iterator[Served]:
    running = speaking("custom_voice")
    yield running
    running.close()


def said(server: Served, body: dict[str, Any]) -> bytes:
    reply = server.http.post(SPEECH, json=body)
    assert reply.status_code == 200, reply.text
    return reply.content


def is_empty(server: Served) -> bool:
    return server.is_empty() and not server.metric("speech_streams_used")


def test_any_way_out_gives_the_same_samples(custom: Served) -> None:
    whole = said(custom, SAY)
    n_frames = len(whole) // FRAME_BYTES
    assert 2 <= n_frames <= 11 and len(whole) == n_frames * FRAME_BYTES
    assert np.abs(np.frombuffer(whole, "<i2")).max() > 0
    for first in (0, 1, 3):
        raw = SAY | {"stream_format": "audio", "initial_codec_chunk_frames": first}
        assert said(custom, raw) == whole
    events = [
        json.loads(line[6:])
        for line in said(custom, SAY | {"stream": True}).decode().splitlines()
        if line.startswith("data: ")
    ]
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == whole
    assert events[-1]["usage"]["output_tokens"] in (n_frames, n_frames + 1)
    with custom.openai.audio.speech.with_streaming_response.create(
        model=custom.model, voice="Vivian", input=SAY["input"], response_format="wav",
        extra_body={"seed": 7, "max_new_tokens": 12},
    ) as stream:  # fmt: skip
        assert stream.read()[44:] == whole
    assert said(custom, SAY | {"seed": 8}) != whole
    greedy = SAY | {"temperature": 0, "subtalker_temperature": 0}
    assert said(custom, greedy) == said(custom, greedy | {"seed": 9})


def test_a_request_does_not_hear_the_others(custom: Served) -> None:
    bodies = [SAY | {"seed": seed, "voice": voice} for seed in range(4) for voice in ("vivian", "eric")]
    bodies = [body | ({"stream_format": "audio"} if i % 3 else {}) for i, body in enumerate(bodies)]
    alone = [said(custom, body) for body in bodies]

    async def together() -> list[bytes]:
        headers = dict(custom.http.headers)
        async with httpx.AsyncClient(base_url=custom.process.url, headers=headers, timeout=60) as client:
            replies = await asyncio.gather(*(client.post(SPEECH, json=body) for body in bodies))
        return [reply.content for reply in replies]

    assert asyncio.run(together()) == alone
    batch = custom.http.post(f"{SPEECH}/batch", json={"items": [{"input": SAY["input"], "seed": s} for s in range(4)]} | {
        name: SAY[name] for name in ("voice", "max_new_tokens", "response_format")
    }).json()  # fmt: skip
    assert [base64.b64decode(result["audio_data"]) for result in batch["results"]] == alone[::2]


def test_who_leaves_frees_everything(custom: Served) -> None:
    body = SAY | {"max_new_tokens": 2000, "stream_format": "audio", "input": "the speech " * 20}
    for _ in range(3):
        with custom.http.stream("POST", SPEECH, json=body) as reply:
            next(reply.iter_raw())
    wait_for(lambda: is_empty(custom))
    assert said(custom, SAY)


def test_a_text_is_spoken_as_it_is_written(custom: Served) -> None:
    url = custom.process.url.replace("http", "ws") + PATH
    headers = {"authorization": f"Bearer {custom.process.api_key}"}
    config = {name: SAY[name] for name in ("voice", "seed", "max_new_tokens")}

    async def go() -> dict[str, bytes]:
        heard: dict[str, bytes] = {}
        async with connect(url, additional_headers=headers) as socket:
            more = {"type": "session.config", "stream_audio": True, "split_granularity": "sentence"}
            await socket.send(json.dumps(config | more))
            for piece in ("hello wor", "ld. the spe", "ech"):
                await socket.send(json.dumps({"type": "input.text", "text": piece}))
            await socket.send(json.dumps({"type": "input.done"}))
            await socket.send(json.dumps({"type": "session.close"}))
            text = ""
            async for message in socket:
                if isinstance(message, bytes):
                    heard[text] = heard.get(text, b"") + message
                    continue
                told = json.loads(message)
                assert told["type"] != "error", told
                text = told.get("sentence_text", text)
        return heard

    heard = asyncio.run(go())
    assert list(heard) == ["hello world.", "the speech"]
    assert all(audio == said(custom, SAY | {"input": text}) for text, audio in heard.items())


def test_a_text_is_spoken_while_it_is_written(custom: Served) -> None:
    """Word by word, two at once, beside one that leaves in the middle of a word: the samples of the text at once."""
    url = custom.process.url.replace("http", "ws") + PATH
    headers = {"authorization": f"Bearer {custom.process.api_key}"}
    config = {"voice": "vivian", "max_new_tokens": 60, "non_streaming_mode": False}
    words = ["hello", " world,", " the", " speech", " is", " writ", "ten", " now."]

    def at_once(seed: int) -> bytes:
        return said(custom, config | {"input": "".join(words), "seed": seed, "response_format": "pcm"})

    expected = {seed: audio for seed in range(8) if len(audio := at_once(seed)) > 35 * FRAME_BYTES}
    first, second = list(expected)[:2]

    async def speak(seed: int, n_words: int) -> bytes:
        audio, n_early = b"", 0
        async with connect(url, additional_headers=headers) as socket:

            async def write() -> None:
                nonlocal n_early
                for word in words[:n_words]:
                    await socket.send(json.dumps({"type": "input.text", "text": word}))
                    await asyncio.sleep(0.05)
                n_early = len(audio)
                if n_words == len(words):
                    await socket.send(json.dumps({"type": "input.done"}))
                    await socket.send(json.dumps({"type": "session.close"}))
                else:
                    await socket.close()

            more = {"type": "session.config", "stream_audio": True, "seed": seed}
            await socket.send(json.dumps(config | more))
            writing = asyncio.create_task(write())
            async for message in socket:
                if isinstance(message, bytes):
                    audio += message
                else:
                    assert json.loads(message)["type"] != "error", message
            await writing
        assert n_words < len(words) or 0 < n_early < len(audio)
        return audio

    async def together() -> list[bytes]:
        return await asyncio.gather(
            speak(first, len(words)), speak(second, len(words)), speak(first, 6)
        )  # fmt: skip

    assert asyncio.run(together())[:2] == [expected[first], expected[second]]
    wait_for(lambda: is_empty(custom))


def test_a_cloned_voice_survives_a_restart(tmp_path: Path) -> None:
    keep = ("--voices-dir", str(tmp_path))
    body = {**SAY, "voice": "ada"}
    first = speaking("base", *keep)
    try:
        form = {"name": "ada", "consent": "yes", "ref_text": "a speech"}
        added = first.http.post(VOICES, data=form, files={"audio_sample": ("a.wav", recording())})
        assert added.status_code == 200, added.text
        in_context = said(first, body)
        vector = said(first, body | {"x_vector_only_mode": True})
        assert in_context != vector
        inline = {name: SAY[name] for name in ("input", "seed", "max_new_tokens", "response_format")}
        inline["ref_audio"] = "data:audio/wav;base64," + base64.b64encode(recording()).decode()
        assert said(first, inline | {"ref_text": "a speech"}) == in_context
        assert said(first, inline | {"x_vector_only_mode": True}) == vector
        with pytest.raises(openai.BadRequestError, match="no stored voice"):
            first.openai.audio.speech.create(model=first.model, voice="bob", input="hello")
        wait_for(lambda: is_empty(first))
    finally:
        first.close()
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()  # what the engine made of it; the server has the recording
    second = speaking("base", *keep)
    try:
        assert second.http.get(VOICES).json()["voices"] == ["ada"]
        assert said(second, body) == in_context
        assert second.http.delete(f"{VOICES}/ada").status_code == 200
        assert second.http.post(SPEECH, json=body).status_code == 400
        wait_for(lambda: is_empty(second))
    finally:
        second.close()
    assert {path.suffix for path in tmp_path.rglob("*.*")} <= {".json"}  # the fingerprint's own
