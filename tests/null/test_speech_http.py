"""The speech API as clients see it: the real `openai` client, plain HTTP, and what is kept of voices, over an engine that is not there."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from deltic.config import ConfigError
from deltic.engine.events import VoiceEncoded
from deltic.engine.messages import EncodeVoice
from deltic.models.tts.shape import FRAME, SPEAKER, split_row
from deltic.models.vocoder.shape import FRAME_SAMPLES
from deltic.server.chat.answer import WayOut
from deltic.server.speech import protocol as speech_protocol
from deltic.server.speech import routes
from deltic.server.speech import voices as voices_module
from deltic.server.speech.audio import MEDIA_TYPES, STREAMED_FILES, StreamedFile, encode, wav_header
from deltic.server.speech.voices import SpeechParts
from tests.fake_engine import FakeEngineClient, make_app, served
from tests.fake_speech import FakeSpeechClient, make_speech_app, wave
from tests.waiting import until

SPEECH = "/v1/audio/speech"
VOICES = "/v1/audio/voices"
SAY: dict[str, Any] = {"input": "Hello there.", "voice": "Vivian"}
TONE = encode(wave(20), "wav", 24000)  # 1.6 s
INLINE = "data:audio/wav;base64," + base64.b64encode(TONE).decode()


@asynccontextmanager
async def client_of(
    engine: FakeSpeechClient, voices: Path | None = None, **config: Any
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_speech_app(engine, voices, **config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20) as client:
        yield client


def ask(
    engine: FakeSpeechClient,
    method: str,
    path: str,
    voices: Path | None = None,
    config: dict[str, Any] | None = None,
    **given: Any,
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(engine, voices, **(config or {})) as client:
            return await client.request(method, path, **given)

    return asyncio.run(go())


def say(engine: FakeSpeechClient, body: dict[str, Any], **config: Any) -> httpx.Response:
    return ask(engine, "POST", SPEECH, json=body, config=config)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    *chunks, rest = response.text.split("\n\n")
    assert rest == ""
    told = []
    for chunk in chunks:
        kind, data = chunk.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {told[-1]['type']}"
    return told


@pytest.fixture
def engine() -> FakeSpeechClient:
    return FakeSpeechClient()


@pytest.fixture
def live(engine: FakeSpeechClient) -> Iterator[str]:
    with served(make_speech_app(engine)) as url:
        yield url


# One text.


def test_openai_client(engine: FakeSpeechClient, live: str) -> None:
    client = openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)
    answer = client.audio.speech.create(model="fake", voice="vivian", input="Hello.", response_format="wav")
    assert answer.content == wav_header(24000, len(wave(4))) + wave(4)
    with client.audio.speech.with_streaming_response.create(
        model="fake", voice="ryan", input="Hello.", response_format="pcm", stream_format="audio"
    ) as stream:
        assert stream.headers["content-type"] == "audio/pcm"
        assert b"".join(stream.iter_bytes()) == wave(4)
    with client.audio.speech.with_streaming_response.create(
        model="fake", voice="ryan", input="Hello.", response_format="pcm", stream_format="sse"
    ) as stream:
        lines = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert b"".join(base64.b64decode(line["audio"]) for line in lines[:-1]) == wave(4)
    assert lines[-1]["usage"]["output_tokens"] == 5
    with pytest.raises(openai.NotFoundError, match="no model 'tts-1'"):
        client.audio.speech.create(model="tts-1", voice="vivian", input="Hello.")
    assert client.models.retrieve("fake").speech["sample_rate"] == 24000  # type: ignore[attr-defined]


def samples_of_aac(data: bytes) -> Any:
    import av

    with av.open(io.BytesIO(data)) as file:
        parts = [frame.to_ndarray()[0] for frame in file.decode(audio=0)]
        return np.concatenate(parts), file.streams.audio[0].rate


def test_without_a_format_it_is_openai_s(engine: FakeSpeechClient) -> None:
    assert say(engine, SAY).headers["content-type"] == "audio/mpeg"
    assert say(engine, SAY | {"stream_format": "audio"}).headers["content-type"] == "audio/mpeg"
    assert say(engine, SAY | {"response_format": "wav"}).content[:4] == b"RIFF" != say(engine, SAY).content[:4]


def test_aac_without_its_library(engine: FakeSpeechClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_protocol, "find_spec", lambda name: None)
    refused = say(engine, SAY | {"response_format": "aac"})
    assert refused.status_code == 400 and "deltic[video]" in error_of(refused)["message"]


@pytest.mark.parametrize("form", MEDIA_TYPES)
@pytest.mark.parametrize("rate", [24000, 8000, 16000, 48000])
def test_forms_and_rates(engine: FakeSpeechClient, form: str, rate: int) -> None:
    if form == "aac":
        pytest.importorskip("av")
    engine.n_frames = 25
    response = say(engine, SAY | {"response_format": form, "sample_rate": rate})
    assert response.status_code == 200 and response.headers["content-type"] == MEDIA_TYPES[form]
    assert response.headers["x-finish-reason"] == "stop"
    if form == "pcm":
        assert len(response.content) == 2 * 2 * rate
        return
    if form == "aac":
        samples, found = samples_of_aac(response.content)
    else:
        samples, found = soundfile.read(io.BytesIO(response.content))
    assert abs(len(samples) / found - 2) < (0.2 if form == "aac" else 0.1) and found == rate
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    assert abs(spectrum.argmax() * found / len(samples) - 200) < 2


def test_speed_changes_the_tempo_and_not_the_pitch(engine: FakeSpeechClient) -> None:
    engine.n_frames = 25
    for speed in (0.5, 2.0):
        samples, rate = soundfile.read(
            io.BytesIO(say(engine, SAY | {"speed": speed, "response_format": "wav"}).content)
        )
        assert abs(len(samples) / rate - 2 / speed) < 0.01
        spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
        assert abs(spectrum.argmax() * rate / len(samples) - 200) < 2


@pytest.mark.parametrize("form", ["pcm", "wav"])
@pytest.mark.parametrize("rate", [24000, 8000])
def test_streams_have_the_bytes_of_the_whole(engine: FakeSpeechClient, form: str, rate: int) -> None:
    body = SAY | {"response_format": form, "sample_rate": rate}
    whole = say(engine, body).content
    if form == "wav":
        whole = wav_header(rate) + whole[44:]
        assert whole[4:8] == whole[40:44] == b"\xff" * 4
    raw = say(engine, body | {"stream_format": "audio"})
    assert raw.content == whole and raw.headers["content-type"] == MEDIA_TYPES[form]
    told = events(say(engine, body | {"stream": True}))
    assert b"".join(base64.b64decode(line["audio"]) for line in told[:-1]) == whole
    assert {line["response_format"] for line in told[:-1]} == {form}
    assert told[-1]["finish_reason"] == "stop" and told[-1]["usage"]["total_tokens"] == (
        len(engine.requests[-1].prompt_ids) + 5
    )
    assert [request.speech.is_streamed for request in engine.requests if request.speech] == [False, True, True]


@pytest.mark.parametrize("form", STREAMED_FILES)
@pytest.mark.parametrize("rate", [24000, 48000])
def test_compressed_streams_are_files_that_leave_while_they_are_written(
    engine: FakeSpeechClient, form: str, rate: int
) -> None:
    engine.n_frames = 25
    body = SAY | {"response_format": form, "sample_rate": rate}
    raw = say(engine, body | {"stream_format": "audio"})
    assert raw.status_code == 200 and raw.headers["content-type"] == MEDIA_TYPES[form]
    told = events(say(engine, body | {"stream_format": "sse"}))
    assert {line["response_format"] for line in told[:-1]} == {form}
    for data in (raw.content, b"".join(base64.b64decode(line["audio"]) for line in told[:-1])):
        samples, found = soundfile.read(io.BytesIO(data))
        assert abs(len(samples) / found - 2) < 0.1 and found == rate
        spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
        assert abs(spectrum.argmax() * found / len(samples) - 200) < 2
    nothing = say(engine, body | {"stream_format": "audio", "max_new_tokens": 1})
    assert nothing.status_code == 200


@pytest.mark.parametrize("form", STREAMED_FILES)
def test_a_streamed_file_has_the_same_sound_however_it_is_cut(form: str) -> None:
    pcm = wave(50)
    whole = StreamedFile(form, 24000).push(pcm, last=True)
    file, parts = StreamedFile(form, 24000), []
    for start in range(0, len(pcm), 2 * 1000):
        parts.append(file.push(pcm[start : start + 2 * 1000]))
    parts.append(file.push(b"", last=True))
    heard, expected = (soundfile.read(io.BytesIO(data))[0] for data in (b"".join(parts), whole))
    assert np.array_equal(heard, expected)  # an Ogg stream has a random number in its bytes
    assert sum(map(bool, parts)) > len(parts) // 3  # bytes came while it was written


def test_a_compressed_stream_that_fails_is_cut_off(engine: FakeSpeechClient, live: str) -> None:
    engine.n_frames, engine.fail_after, engine.token_s = 25, 20, 0.01
    body = SAY | {"response_format": "mp3", "stream_format": "audio"}
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(live + SPEECH, json=body)
    told = events(say(engine, SAY | {"response_format": "mp3", "stream_format": "sse"}))
    assert told[-1]["type"] == "speech.audio.error"


def test_another_tempo_and_flac_come_in_one_piece(engine: FakeSpeechClient) -> None:
    engine.n_frames = 25
    for body in (SAY | {"speed": 2.0, "response_format": "mp3"}, SAY | {"response_format": "flac"}):
        whole = say(engine, body).content
        assert say(engine, body | {"stream_format": "audio"}).content == whole
        told = events(say(engine, body | {"stream": True}))
        assert [line["type"] for line in told] == ["speech.audio.delta", "speech.audio.done"]
        assert base64.b64decode(told[0]["audio"]) == whole


def test_voices_have_other_names(engine: FakeSpeechClient) -> None:
    config = {"voice_alias": ("alloy=ryan", "Nova = Vivian")}
    for voice, speaker in (("alloy", "ryan"), ("NOVA", "vivian"), ({"id": "Alloy"}, "ryan")):
        assert say(engine, SAY | {"voice": voice}, **config).content == say(engine, SAY | {"voice": speaker}).content
        assert engine.requests[-1].prompt_ids == engine.requests[-2].prompt_ids
    told = ask(engine, "GET", VOICES, config=config).json()
    assert {"alloy", "nova", "ryan"} <= set(told["voices"])
    for wrong in ("alloy", "=ryan", "alloy=nobody", "vivian=ryan"):
        with pytest.raises(ConfigError, match="--voice-alias"):
            make_speech_app(engine, voice_alias=(wrong,))


def test_audio_leaves_as_it_is_made(engine: FakeSpeechClient, live: str) -> None:
    engine.token_s = 0.15
    with httpx.stream("POST", live + SPEECH, json=SAY | {"response_format": "pcm", "stream_format": "audio"}) as answer:
        at = [(time.monotonic(), len(part)) for part in answer.iter_raw()]
    assert sum(n for _, n in at) == len(wave(4)) and at[-1][0] - at[0][0] > 0.3


def test_defaults_are_the_checkpoints(engine: FakeSpeechClient) -> None:
    say(engine, SAY)
    sent = engine.requests[0]
    params, speech = sent.params, sent.speech
    assert speech and (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (
        0.9,
        50,
        1.0,
        1.05,
    )
    assert (speech.temperature, speech.top_k, speech.top_p, params.min_tokens) == (0.9, 50, 1.0, 2)
    assert params.max_tokens == 192 and sent.prefix_scope == "\n" and params.seed is None
    given = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.0, "repetition_penalty": 1.2, "subtalker_temperature": 0.0,
        "subtalker_top_k": 3, "subtalker_top_p": 0.5, "seed": 5, "max_new_tokens": 9, "initial_codec_chunk_frames": 3,
    }  # fmt: skip
    say(engine, SAY | given | {"stream_format": "audio", "response_format": "pcm"})
    params, speech = engine.requests[1].params, engine.requests[1].speech
    assert speech and (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.5, 1, 1.0, 1.2)
    assert (speech.temperature, speech.top_k, speech.top_p) == (0.0, 3, 0.5)
    assert (params.seed, params.max_tokens, speech.first_chunk_frames) == (5, 9, 3)


def test_a_length_bound_is_told(engine: FakeSpeechClient) -> None:
    response = say(engine, SAY | {"max_new_tokens": 3, "response_format": "wav"})
    assert response.headers["x-finish-reason"] == "length" and len(response.content) == 44 + len(wave(2))
    nothing = say(engine, SAY | {"max_new_tokens": 1, "response_format": "pcm", "stream_format": "audio"})
    assert (nothing.status_code, nothing.content) == (200, b"")
    assert events(say(engine, SAY | {"max_new_tokens": 1, "stream": True, "response_format": "pcm"}))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": " \n"}, "input"),
        ({"input": None}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"voice": None}, "voice"),
        ({"voice": {"id": ""}}, "voice"),
        ({"speaker": "ryan"}, "speaker"),
        ({"instructions": "a" * 501}, "instructions"),
        ({"response_format": "aiff"}, "response_format"),
        ({"sample_rate": 96000}, "sample_rate"),
        ({"sample_rate": 44100, "response_format": "opus"}, "sample_rate"),
        ({"speed": 0.1}, "speed"),
        ({"stream": False, "stream_format": "sse"}, "stream_format"),
        ({"task_type": "Base"}, "task_type"),
        ({"language": "Klingon"}, "language"),
        ({"ref_audio": INLINE}, "ref_audio"),
        ({"ref_text": "x"}, "ref_text"),
        ({"x_vector_only_mode": True}, "x_vector_only_mode"),
        ({"speaker_embedding": [0.0]}, "speaker_embedding"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 5000}, "max_new_tokens"),
        ({"initial_codec_chunk_frames": 2}, "initial_codec_chunk_frames"),
        ({"initial_codec_chunk_frames": 33, "stream": True}, "initial_codec_chunk_frames"),
        ({"top_p": 1.5}, "top_p"),
        ({"lang": "en"}, "lang"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    engine: FakeSpeechClient, change: dict[str, Any], param: str
) -> None:
    response = say(engine, SAY | change)
    assert response.status_code == 400 and error_of(response)["param"] == param and not engine.requests


def test_languages_dialects_and_prompt_modes(engine: FakeSpeechClient) -> None:
    def languages(**fields: Any) -> list[int]:
        say(engine, SAY | fields)
        rows = [split_row(row) for row in engine.requests[-1].prompt_ids]
        return [side - 1 for text, side in rows if text == 300 and 2050 <= side - 1 < 2100]

    assert languages() == [] and languages(language="AUTO") == []
    assert languages(language="English") == [2050]
    assert languages(voice="Eric") == [2062] and languages(voice="Eric", language="chinese") == [2062]
    assert languages(voice="Eric", language="english") == [2050]
    whole = engine.requests[-1]
    say(engine, SAY | {"non_streaming_mode": False})
    streaming = engine.requests[-1]
    assert whole.speech and streaming.speech and whole.speech.trailing_ids == ()
    assert len(streaming.speech.trailing_ids) == len("Hello there.") and streaming.speech.trailing_ids[-1] == 302


def test_a_model_has_its_own_doors(engine: FakeSpeechClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path, body in (
        ("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"}),
    ):  # fmt: skip
        response = ask(engine, "POST", path, json=body)
        assert (response.status_code, error_of(response)["code"]) == (404, "unsupported_model")
    assert ask(engine, "POST", "/v1/messages", json=chat).status_code == 404
    assert ask(engine, "GET", "/").status_code == 200, "it has a page"

    async def text_model() -> None:
        transport = httpx.ASGITransport(make_app(FakeEngineClient()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for method, path in (
                ("POST", SPEECH),
                ("POST", f"{SPEECH}/batch"),
                ("GET", VOICES),
                ("DELETE", f"{VOICES}/x"),
            ):
                response = await client.request(method, path, **({"json": SAY} if method == "POST" else {}))
                assert (response.status_code, error_of(response)["code"]) == (404, "unsupported_model")
            assert "speech" not in (await client.get("/v1/models")).json()["data"][0]
            refused = await client.post("/v1/audio/transcriptions", json={})
            assert refused.status_code == 404 and "does not hear" in error_of(refused)["message"]

    asyncio.run(text_model())
    card = ask(engine, "GET", "/v1/models").json()["data"][0]["speech"]
    assert card["task_type"] == "CustomVoice" and "vivian" in card["voices"] and "english" in card["languages"]


def test_voice_design_needs_a_description() -> None:
    engine = FakeSpeechClient("voice_design")
    with served(make_speech_app(engine)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        omit: Any = openai.omit  # the client's way to send no voice
        assert client.audio.speech.create(model="fake", voice=omit, input="Hi.", instructions="low").content
    engine.requests.clear()
    assert error_of(say(engine, {"input": "Hello."}))["param"] == "instructions"
    assert error_of(say(engine, {"input": "Hello.", "voice": "ryan", "instructions": "low"}))["param"] == "voice"
    assert say(engine, {"input": "Hello.", "instructions": "A low voice."}).status_code == 200
    rows = [split_row(row) for row in engine.requests[0].prompt_ids]
    assert bytes(text for text, side in rows if side == 0 and text < 256).startswith(b"user\nA low voice.\nassistant")


# Ends.


def test_errors_before_and_behind_the_first_byte(engine: FakeSpeechClient, live: str) -> None:
    engine.fail_after = 0
    for fields in ({}, {"stream": True}, {"stream_format": "audio"}):
        response = say(engine, SAY | fields)
        assert response.status_code == 500 and error_of(response)["message"] == "the step failed"
    engine.fail_after = 2
    assert say(engine, SAY).status_code == 500
    told = events(say(engine, SAY | {"stream": True, "response_format": "wav"}))
    assert [line["type"] for line in told] == ["speech.audio.delta"] * 2 + ["speech.audio.error"]
    assert told[-1]["partial_audio"] and told[-1]["action"] == "discard"
    assert told[-1]["error"]["message"] == "the step failed"
    with pytest.raises(httpx.RemoteProtocolError):  # a raw stream cannot say so: it is cut off
        httpx.post(live + SPEECH, json=SAY | {"stream_format": "audio", "response_format": "wav"})
    assert engine.n_open == 0


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream_format": "audio"}])
def test_who_leaves_ends_the_request(engine: FakeSpeechClient, live: str, fields: dict[str, Any]) -> None:
    engine.n_frames, engine.token_s = 200, 0.02
    try:
        with httpx.stream("POST", live + SPEECH, json=SAY | fields, timeout=0.5) as answer:
            for _ in answer.iter_raw():
                break
    except httpx.ReadTimeout:
        assert not fields
    for _ in range(200):
        if engine.aborts and not engine.n_open:
            return
        time.sleep(0.01)
    raise AssertionError("still running")


def test_limits_keys_and_the_queue(engine: FakeSpeechClient) -> None:
    engine.max_open = 0
    full = say(engine, SAY)
    assert full.status_code == 429 and full.headers["retry-after"] == "7"
    engine.max_open = None
    engine.token_s = 1.0
    late = say(engine, SAY, request_timeout_s=0.1)
    assert late.status_code == 504 and error_of(late)["code"] == "request_timeout"
    engine.token_s = 0.0
    config = {"api_key": ("alice=k1",), "tokens_per_minute_per_key": 20}
    assert ask(engine, "POST", SPEECH, json=SAY, config=config).status_code == 401

    async def go() -> list[httpx.Response]:
        async with client_of(engine, **config) as client:
            headers = {"authorization": "Bearer k1"}
            return [await client.post(SPEECH, json=SAY, headers=headers) for _ in range(2)]

    first, second = asyncio.run(go())
    assert first.status_code == 200 and engine.requests[-1].tenant == "alice"
    assert second.status_code == 429 and error_of(second)["code"] == "rate_limit_exceeded"


WHOSE = {
    "base": {"ref_audio": INLINE, "x_vector_only_mode": True},
    "custom_voice": {"voice": "vivian"},
    "voice_design": {"instructions": "Calm."},
}


@pytest.mark.parametrize("variant", WHOSE)
def test_speech_that_does_not_end_is_an_error(variant: str) -> None:
    engine = FakeSpeechClient(variant)
    engine.n_frames = 5000
    body = {"input": "Hello.", "response_format": "wav"} | WHOSE[variant]
    response = say(engine, body)
    assert response.status_code == 500 and error_of(response)["code"] == "speech_did_not_end"
    assert engine.requests[0].params.max_tokens == 192
    assert events(say(engine, body | {"stream": True}))[-1]["error"]["code"] == "speech_did_not_end"
    assert say(engine, body | {"max_new_tokens": 50}).headers["x-finish-reason"] == "length"
    say(engine, body | {"input": "a" * 100})
    assert engine.requests[-1].params.max_tokens == 1200
    # Cut by the context, before it could be said to have lost its end.
    cut = say(engine, body | {"input": "a" * 380})
    assert engine.requests[-1].params.max_tokens < 12 * 380 and cut.headers["x-finish-reason"] == "length"


def test_metrics_and_the_log(engine: FakeSpeechClient, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> str:
        async with client_of(engine) as client:
            await client.post(SPEECH, json=SAY | {"stream": True})
            await client.post(SPEECH, json=SAY)
            return (await client.get("/metrics")).text

    with caplog.at_level(logging.INFO, "deltic.server"):
        told = asyncio.run(go())
    assert (
        'deltic_speech_samples_total{model="fake"} 15360.0' in told
        and 'deltic_speech_continuous_total{model="fake"} 1.0' in told
    )
    assert 'deltic_speech_ended_total{model="fake",reason="stop"} 2.0' in told
    assert (
        'deltic_speech_first_audio_seconds_count{model="fake"} 2.0' in told
        and 'deltic_speech_underrun_seconds_count{model="fake"} 1.0' in told
    )
    assert "generated_tokens=5" in caplog.text and "Hello" not in caplog.text


# A batch.


def test_batch(engine: FakeSpeechClient) -> None:
    items = [
        {"input": "One.", "response_format": "wav"},
        {"input": " "},
        {"input": "Three.", "voice": "ryan", "response_format": "pcm"},
    ]
    answer = ask(engine, "POST", f"{SPEECH}/batch", json={"items": items, "voice": "vivian", "seed": 3}).json()
    assert (answer["total"], answer["succeeded"], answer["failed"]) == (3, 2, 1)
    first, second, third = answer["results"]
    assert base64.b64decode(first["audio_data"])[44:] == base64.b64decode(third["audio_data"]) == wave(4)
    assert (first["media_type"], third["media_type"]) == ("audio/wav", "audio/pcm")
    assert (second["status"], second["status_code"], second["error"]["param"]) == ("error", 400, "input")
    assert [request.params.seed for request in engine.requests] == [3, 3]
    for body in ({"items": []}, {"items": [{"input": "x"}] * 33}, {"items": [{"input": "x", "stream": True}]}):
        assert ask(engine, "POST", f"{SPEECH}/batch", json=body).status_code == 400


# Voices.


class SlowSpeechClient(FakeSpeechClient):
    """Encodes voices when it may."""

    def __init__(self, variant: str) -> None:
        super().__init__(variant)
        self.may_encode = asyncio.Event()
        self.n_encoding = 0

    async def encode_voice(self, command: EncodeVoice) -> VoiceEncoded:
        if command.samples:
            self.n_encoding += 1
            await self.may_encode.wait()
        return await super().encode_voice(command)


def app_of(client: httpx.AsyncClient) -> SpeechParts:
    """What the application behind a client has of its model."""
    (service,) = client._transport.app.state.server.models.values()  # type: ignore[attr-defined]
    assert service.speech is not None
    return service.speech  # type: ignore[no-any-return]


def upload(client: httpx.AsyncClient, name: str = "alice", **fields: Any) -> Any:
    file = fields.pop("file", TONE)
    data = {"name": name, "consent": "yes", "ref_text": "One two."} | fields
    given = {key: value for key, value in data.items() if value is not None}
    return client.post(VOICES, data=given, files={"audio_sample": ("a.wav", file)} if file else {"x": b""})


def test_a_voice_is_deleted_by_its_key_or_an_administrator(tmp_path: Path) -> None:
    keys = ("alice=a", "alice=a2", "bob=b", "operator")

    async def go() -> None:
        for key, by, status in (("a", "b", 403), ("a", "a2", 200), ("a", "operator", 200), ("operator", "b", 403)):
            async with client_of(FakeSpeechClient("base"), tmp_path, api_key=keys) as client:
                await client.delete(f"{VOICES}/tom", headers={"x-api-key": "operator"})
                client.headers["x-api-key"] = key
                assert (await upload(client, "tom")).status_code == 200
            async with client_of(FakeSpeechClient("base"), tmp_path, api_key=keys) as client:  # a restart
                client.headers["x-api-key"] = by
                refused = await client.delete(f"{VOICES}/Tom")
                assert refused.status_code == status
                assert status == 200 or error_of(refused)["code"] == "not_your_voice"
                listed = (await client.get(VOICES)).json()["voices"]
                assert listed == ([] if status == 200 else ["tom"])

    asyncio.run(go())


def test_a_voice_is_kept_used_and_deleted(tmp_path: Path) -> None:
    engine = FakeSpeechClient("base")

    async def go() -> None:
        async with client_of(engine, tmp_path) as client:
            added = await upload(client)
            assert added.status_code == 200 and added.json()["voice"]["name"] == "alice"
            assert (await upload(client, "Alice")).status_code == 409
            assert (await client.post(SPEECH, json={"input": "Hello.", "voice": "ALICE"})).status_code == 200
        engine.voices.clear()  # another model, or a cache that was emptied
        async with client_of(engine, tmp_path) as client:
            listed = (await client.get(VOICES)).json()
            assert listed["voices"] == ["alice"] and listed["uploaded_voices"][0]["consent"] == "yes"
            assert (await client.post(SPEECH, json={"input": "Hello.", "voice": "alice"})).status_code == 200
            vector = {"input": "Hello.", "voice": "alice", "x_vector_only_mode": True}
            assert (await client.post(SPEECH, json=vector)).status_code == 200
            refused = await client.post(SPEECH, json={"input": "Hello.", "voice": "alice", "ref_audio": INLINE})
            assert error_of(refused)["param"] == "ref_audio"
            assert (await client.delete(f"{VOICES}/alice")).json()["deleted"]
            assert (await client.delete(f"{VOICES}/alice")).status_code == 404
            gone = await client.post(SPEECH, json={"input": "Hello.", "voice": "alice"})
            assert error_of(gone)["code"] == "voice_not_found"

    asyncio.run(go())
    assert not list(tmp_path.rglob("*.voice")) and engine.dropped == [engine.requests[0].speech.voice]
    assert len(engine.encoded) == 2 and engine.encoded[0] == engine.encoded[1]
    samples = np.frombuffer(engine.encoded[0].samples, "<f4")
    assert len(samples) == 20 * 1920 and abs(samples).max() < 0.4 and engine.encoded[0].is_kept
    first, second, vector = engine.requests
    assert first.prompt_ids == second.prompt_ids and first.prefix_scope == f"\n{engine.encoded[0].key}"
    sides = [split_row(row)[1] for row in first.prompt_ids]
    assert [side for side in sides if side >= SPEAKER] == [SPEAKER, *range(FRAME, FRAME + 20)]
    assert first.speech and first.speech.is_primed and vector.speech and not vector.speech.is_primed
    assert [s for row in vector.prompt_ids if (s := split_row(row)[1]) >= SPEAKER] == [SPEAKER]


def test_damaged_voice_files_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeSpeechClient("base")

    async def go() -> None:
        async with client_of(engine, tmp_path) as client:
            await upload(client)
            await upload(client, "bob", ref_text=None)
        path = tmp_path / "names" / "alice.voice"
        path.write_bytes(path.read_bytes()[:-100])
        path = tmp_path / "names" / "bob.voice"
        data = bytearray(path.read_bytes())
        data[-7] ^= 1
        path.write_bytes(data)
        engine.voices.clear()
        async with client_of(engine, tmp_path) as client:
            assert (await client.get(VOICES)).json()["voices"] == ["bob"]
            told = error_of(await client.post(SPEECH, json={"input": "Hello.", "voice": "bob"}))
            assert told["code"] == "voice_not_readable" and "Delete it" in told["message"]

    asyncio.run(go())
    assert "cannot be used" in caplog.text


def test_uploads_that_are_refused(tmp_path: Path) -> None:
    engine = FakeSpeechClient("base")
    embedding = json.dumps([0.5] * 1024)

    async def go() -> None:
        async with client_of(engine, tmp_path) as client:
            for fields, param in (
                ({"name": "../x"}, "name"), ({"name": None}, "name"), ({"consent": None}, "consent"),
                ({"other": "1"}, "other"), ({"file": b"RIFF" + bytes(100)}, "audio_sample"),
                ({"file": TONE[:20000]}, "audio_sample"), ({"file": encode(bytes(96000), "flac", 24000)}, "audio_sample"),
                ({"file": bytes(10_000_001)}, "audio_sample"), ({"speaker_embedding": embedding}, "audio_sample"),
                ({"speaker_embedding": "[1]"}, "speaker_embedding"), ({"speaker_embedding": "x"}, "speaker_embedding"),
            ):  # fmt: skip
                response = await upload(client, **fields)
                assert (response.status_code, error_of(response)["param"]) == (400, param), fields
            huge = await upload(client, file=bytes(17_000_000))
            assert huge.status_code == 413
            broken = {"content-type": "multipart/form-data; boundary=x"}
            assert (await client.post(VOICES, content=b"--y", headers=broken)).status_code == 400
            assert (await client.post(VOICES, json={})).status_code == 415
            for codec in ("punycode", "unicode_escape"):
                odd = {"content-type": f"multipart/form-data; boundary=x; charset={codec}"}
                refused = await client.post(VOICES, content=b"--x--\r\n", headers=odd)
                assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_form")
            brackets = await upload(client, file=b"[" * 300_000)  # not JSON
            assert error_of(brackets)["code"] == "invalid_audio"
            page = {"origin": "http://evil.example"}
            form = {"data": {"name": "a", "consent": "b"}, "files": {"audio_sample": ("a", TONE)}}
            assert (await client.post(VOICES, headers=page, **form)).status_code == 403  # type: ignore[arg-type]
            given = {"data": {"name": "v", "consent": "c", "speaker_embedding": embedding}, "files": {}}
            kind = {"content-type": "multipart/form-data; boundary=x"}
            parts = "".join(
                f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
                for name, value in given["data"].items()
            )
            added = await client.post(VOICES, content=f"{parts}--x--\r\n", headers=kind)
            assert added.status_code == 200 and added.json()["voice"]["kind"] == "embedding"

    asyncio.run(go())
    assert [len(command.speaker) for command in engine.encoded] == [4096]
    assert not list(tmp_path.rglob("*.part"))
    custom = FakeSpeechClient()

    async def other() -> None:
        async with client_of(custom) as client:
            assert error_of(await upload(client))["code"] == "unsupported_model"

    asyncio.run(other())


def test_a_disk_that_refuses_costs_the_voice_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeSpeechClient("base")

    def full(path: Path, voice: Any) -> None:
        raise OSError(28, "No space left on device")

    async def go() -> None:
        async with client_of(engine, tmp_path) as client:
            with monkeypatch.context() as patch:
                patch.setattr(voices_module, "_write", full)
                refused = await upload(client)
                assert refused.status_code == 500 and "No space left" in error_of(refused)["message"]
            assert (await client.get(VOICES)).json()["voices"] == [] and len(engine.dropped) == 1
            both = await asyncio.gather(upload(client), upload(client))
            assert sorted(reply.status_code for reply in both) == [200, 409]

    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "x.part").write_bytes(b"cut off")
    asyncio.run(go())
    assert [path.name for path in (tmp_path / "names").iterdir()] == ["alice.voice"]


def test_voices_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices_module, "MAX_IN_MEMORY", 1)
    engine = FakeSpeechClient("base")

    async def go() -> None:
        async with client_of(engine) as client:
            assert (await upload(client)).status_code == 200
            full = await upload(client, "bob")
            assert full.status_code == 409 and "--voices-dir" in error_of(full)["message"]
            assert (await client.post(SPEECH, json={"input": "Hi.", "voice": "alice"})).status_code == 200

    asyncio.run(go())
    assert not engine.encoded[0].is_kept


def test_inline_references() -> None:
    engine = FakeSpeechClient("base")
    body: dict[str, Any] = {"input": "Hello.", "ref_audio": INLINE, "ref_text": "One two."}

    async def go() -> None:
        async with client_of(engine) as client:
            assert (await client.post(SPEECH, json=body)).status_code == 200
            assert (await client.post(SPEECH, json=body)).status_code == 200
            assert len(engine.encoded) == 1 and engine.encoded[0].needs_codes and not engine.encoded[0].is_kept
            vector = {"input": "Hello.", "speaker_embedding": [0.25] * 1024}
            assert (await client.post(SPEECH, json=vector)).status_code == 200
            for change, param in (
                ({"ref_text": None}, "ref_text"), ({"ref_audio": None}, "voice"), ({"voice": "bob"}, "voice"),
                ({"ref_audio": "data:audio/wav;base64,@@"}, "ref_audio"), ({"ref_audio": "data:x;base64,\xe9"}, "ref_audio"), ({"ref_audio": "data:x,abc"}, "ref_audio"),
                ({"ref_audio": "http://localhost:1/a.wav"}, "ref_audio"), ({"ref_audio": "file:///etc/passwd"}, "ref_audio"),
                ({"ref_audio": "/etc/passwd"}, "ref_audio"), ({"speaker_embedding": [0.0] * 1024}, "speaker_embedding"),
                ({"ref_audio": None, "speaker_embedding": [0.0] * 3, "ref_text": None}, "speaker_embedding"),
                ({"instructions": "low"}, "instructions"),
            ):  # fmt: skip
                response = await client.post(SPEECH, json=body | change)
                assert (response.status_code, error_of(response)["param"]) == (400, param), change

    asyncio.run(go())


def test_voices_are_made_in_turn_though_who_asked_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices_module, "MAX_WAITING", 1)
    engine = SlowSpeechClient("base")

    async def go() -> None:
        async with client_of(engine) as client:

            def clone(n_frames: int) -> asyncio.Task[httpx.Response]:
                audio = base64.b64encode(encode(wave(n_frames), "wav", 24000)).decode()
                body = {"input": "Hi.", "ref_audio": f"data:x;base64,{audio}", "x_vector_only_mode": True}
                return asyncio.create_task(client.post(SPEECH, json=body))

            tasks = [clone(13), clone(14)]
            while engine.n_encoding < 2:
                await asyncio.sleep(0.01)
            for task in tasks:  # the engine has begun
                task.cancel()
            await asyncio.wait(tasks)
            waits = clone(15)
            await until(lambda: sum(app_of(client).voices._n_waiting.values()) == 1)
            assert engine.n_encoding == 2
            full = await clone(16)
            assert (full.status_code, error_of(full)["code"]) == (429, "too_many_encodings")
            engine.may_encode.set()
            assert (await waits).status_code == 200 and (await clone(16)).status_code == 200

    asyncio.run(go())
    assert len(engine.encoded) == 4


KEYS = ("alice=a", "bob=b")


def test_keys_take_turns_at_voices(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither learns which recordings the other has sent, by the time that one takes that is known."""
    monkeypatch.setattr(voices_module, "MAX_WAITING", 8)
    engine = SlowSpeechClient("base")

    async def go() -> None:
        async with client_of(engine, api_key=KEYS) as client:

            def clone(key: str, n_frames: int) -> asyncio.Task[httpx.Response]:
                audio = base64.b64encode(encode(wave(n_frames), "wav", 24000)).decode()
                body = {"input": "Hi.", "ref_audio": f"data:x;base64,{audio}", "x_vector_only_mode": True}
                return asyncio.create_task(client.post(SPEECH, json=body, headers={"x-api-key": key}))

            tasks = [clone("a", 13 + i) for i in range(6)]
            while engine.n_encoding < 2 or sum(app_of(client).voices._n_waiting.values()) < 4:
                await asyncio.sleep(0.01)
            assert (await clone("a", 30)).status_code == 429
            tasks.append(clone("b", 40))
            while app_of(client).voices._n_waiting["bob"] < 1:
                await asyncio.sleep(0.01)
            engine.may_encode.set()
            assert {task.result().status_code for task in (await asyncio.wait(tasks))[0]} == {200}
            assert [len(command.samples) for command in engine.encoded].index(40 * FRAME_SAMPLES * 4) <= 4
            n = len(engine.encoded)
            assert (await clone("b", 13)).status_code == 200 and len(engine.encoded) == n + 1
            assert (await clone("a", 13)).status_code == 200 and len(engine.encoded) == n + 1

    asyncio.run(go())


def test_a_key_leaves_voices_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices_module, "MAX_IN_MEMORY", 2)

    async def go() -> None:
        async with client_of(FakeSpeechClient("base"), api_key=KEYS) as client:
            for key, name, status in (("a", "one", 200), ("a", "two", 409), ("b", "two", 200), ("b", "three", 409)):
                client.headers["x-api-key"] = key
                assert (await upload(client, name)).status_code == status

    asyncio.run(go())


def test_a_voice_that_is_deleted_while_it_is_encoded_is_not_kept(tmp_path: Path) -> None:
    engine = SlowSpeechClient("base")

    async def go() -> None:
        async with client_of(engine, tmp_path) as client:
            engine.may_encode.set()
            assert (await upload(client)).status_code == 200
            engine.may_encode.clear()
            engine.voices.clear()
            body = {"input": "Hello.", "voice": "alice"}
            saying = asyncio.create_task(client.post(SPEECH, json=body))
            while engine.n_encoding < 2:
                await asyncio.sleep(0.01)
            assert (await client.delete(f"{VOICES}/alice")).status_code == 200
            engine.may_encode.set()
            assert error_of(await saying)["code"] == "voice_not_found"

    asyncio.run(go())
    assert not engine.voices


def test_references_by_url_only_where_they_are_allowed(tmp_path: Path) -> None:
    engine = FakeSpeechClient("base")
    inside, outside = tmp_path / "in", tmp_path / "out.wav"
    inside.mkdir()
    (inside / "a.wav").write_bytes(TONE)
    outside.write_bytes(TONE)
    (inside / "link.wav").symlink_to(outside)

    async def files(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        moved = scope["path"].startswith("/moved")
        there = b"http://localhost/a.wav" if scope["path"] == "/moved-away" else b"/a.wav"
        headers = [(b"location", there)] if moved else []
        await send({"type": "http.response.start", "status": 302 if moved else 200, "headers": headers})
        await send({"type": "http.response.body", "body": TONE})

    async def go(url: str) -> None:
        config = {"allow_audio_dir": inside, "allow_audio_host": ("127.0.0.1",)}
        async with client_of(engine, **config) as client:
            for reference, status in (
                (f"file://{inside}/a.wav", 200), (f"file://{inside}/../out.wav", 400), (f"file://{inside}/link.wav", 400),
                (f"file://{inside}/none.wav", 400), (f"{url}/a.wav", 200), (f"{url}/moved", 200), (f"{url}/moved-away", 400),
                (url.replace("127.0.0.1", "localhost") + "/a.wav", 400), ("http://[", 400),
            ):  # fmt: skip
                body = {"input": "Hello.", "ref_audio": reference, "x_vector_only_mode": True}
                response = await client.post(SPEECH, json=body)
                assert response.status_code == status, reference

    with served(files) as url:
        asyncio.run(go(url))


def test_an_utterance_has_all_that_is_counted_of_a_sequence() -> None:
    """What a sequence's way out gets one day, its audio has, too."""
    assert vars(WayOut(0)).items() <= vars(routes._Spoken()).items()
