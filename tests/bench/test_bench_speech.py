"""The load generator for speech against a fake endpoint: what it sends, what it computes, how it fails."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.soak import speech as soak_speech
from bench.soak.traffic import Traffic, Violation
from deltic.__main__ import main
from deltic.bench.speech import Heard, Leaver, Texts, measure, summary
from deltic.commands.endpoint import Endpoint
from tests.fake_engine import served
from tests.fake_openai import FakeOpenAI
from tests.fake_speech import FakeSpeechClient, make_speech_app

FRAME = 2 * 1920
BODY = {"input": "Hello.", "response_format": "pcm", "stream_format": "audio"}


def bench(flags: str, tmp_path: Path) -> int:
    return main(["bench", "speech", *flags.split(), "--warmup", "0", "--out", str(tmp_path)])


def test_a_late_piece_is_an_underrun_and_an_early_one_is_not():
    """Played from 1.0 s on: 0.1 s of audio, then 0.2 s. The second piece is 0.4 s late, the third early."""
    heard = Heard(0.0)
    for at_s, n_bytes in ((1.0, 4800), (1.5, 9600), (1.55, 4800)):
        heard.hear(at_s, n_bytes, 24000)
    assert heard.ttfa_s == 1.0
    assert heard.underrun_s == pytest.approx(0.4)
    assert heard.audio_s == pytest.approx(0.4)
    half = Heard(0.0)
    half.hear(0.5, 4800, 8000)
    assert (half.underrun_s, half.audio_s) == (0.0, 0.3)


def test_summary_leaves_out_the_times_of_requests_that_did_not_end():
    good = Heard(0.0, 10, ttfa_s=0.1, e2e_s=1.0, audio_s=2.0, n_pieces=3)
    late = Heard(0.0, 30, ttfa_s=0.3, e2e_s=3.0, audio_s=2.0, underrun_s=0.5, n_pieces=3)
    left = Heard(0.0, 10, ttfa_s=9.0, e2e_s=9.0, audio_s=1.0, n_pieces=1, is_cancelled=True)
    row = summary([good, late, left, Heard(0.0, e2e_s=9.0, error="HTTP 500")], seconds=2.0)
    assert (row["requests"], row["errors"], row["cancelled"]) == (4, 1, 1)
    assert row["rtf"] == {"mean": 1.0, "p50": 1.0, "p95": pytest.approx(1.45), "p99": pytest.approx(1.49)}
    assert (row["ttfa_ms"]["mean"], row["underrun_ms"]["mean"], row["continuous"]) == (200.0, 250.0, 0.5)
    assert (row["audio_s_per_s"], row["requests_per_s"]) == (2.5, 1.0), "what was heard before it left counts"
    assert (row["mean_audio_s"], row["mean_characters"]) == (2.0, 20.0)
    assert summary([], 1.0)["rtf"]["p99"] is None


def test_texts_have_the_stated_lengths_and_the_same_seed_says_the_same():
    one, again, other = (Texts([3, 9], seed) for seed in (1, 1, 2))
    said = [one.text() for _ in range(50)]
    assert said == [again.text() for _ in range(50)] != [other.text() for _ in range(50)]
    assert {len(text.split()) for text in said} == {3, 9}
    assert all(text[0].isupper() and text[-1] == "." for text in said)


def test_sweep_keeps_n_streams_and_writes_what_it_heard(tmp_path: Path, capsys):
    with FakeOpenAI(token_s=0.01) as server:
        flags = f"--url {server.url}/v1 --n 1,4 --requests-per-n 8 --max-new-tokens 5 --language English"
        assert bench(flags + ' --extra {"temperature":0.5} --label a', tmp_path) == 0
    assert server.max_open == 4
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    result = json.loads(Path(last["file"]).read_text())
    assert "underrun: the most" in out and "texts of 16 words, streamed, vivian, English" in out
    assert [row["value"] for row in result["rows"]] == [1, 4]
    for row in result["rows"]:
        assert (row["requests"], row["errors"], row["mean_audio_s"], row["continuous"]) == (8, 0, 0.32, 1.0)
        assert row["ttfa_ms"]["p50"] >= 9
        assert row["e2e_s"]["p50"] >= 0.039
        assert 0.12 < row["rtf"]["mean"] < 3.0
    assert Path(last["plot"]).stat().st_size > 10_000
    first, *others = server.bodies
    assert first["input"] == "Hello."
    assert first.items() >= {"model": "fake", "voice": "vivian", "language": "English", "temperature": 0.5}.items()
    assert all(body["stream_format"] == "audio" and body["response_format"] == "pcm" for body in others)
    assert len({body["input"] for body in others}) == 16


@pytest.mark.parametrize("flags", ["--whole", '--extra {"stream_format":"sse"}'])
def test_whole_answers_and_events_are_the_same_audio(flags, tmp_path: Path, capsys):
    with FakeOpenAI(token_s=0.01) as server:
        asked = f"--url {server.url} --n 1 --requests-per-n 2 --max-new-tokens 6 --voice ryan --no-plot"
        assert bench(f"{asked} {flags}", tmp_path) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]
    assert (row["mean_audio_s"], row["errors"]) == (0.4, 0)
    assert (row["ttfa_ms"]["p50"] >= 45) == (flags == "--whole")
    assert all(body["voice"] == "ryan" for body in server.bodies)


def test_a_last_piece_that_is_late_is_measured():
    async def run() -> Heard:
        return await measure(Endpoint(server.url), BODY | {"max_new_tokens": 3}, 0.0)

    with FakeOpenAI(token_s=0.005, late_factor=60.0) as server:
        heard = asyncio.run(run())
    assert heard.n_pieces == 2
    assert 0.2 < heard.underrun_s < 1.0, "0.3 s for 0.08 s of audio"


def test_failures_are_rows_not_crashes(tmp_path: Path, capsys):
    with FakeOpenAI() as server:
        server.statuses = [200, 500, 429]
        flags = f"--url {server.url} --n 1 --requests-per-n 4 --no-plot --max-new-tokens 3"
        assert bench(flags, tmp_path) == 1
        row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]
        assert (row["requests"], row["errors"]) == (4, 2)
        for broken in ("audio", "sse"):
            server.breaks_at = 1
            heard = asyncio.run(measure(Endpoint(server.url), BODY | {"stream_format": broken}, 0.0))
            assert "broke" in (heard.error or "")
        server.breaks_at = -1
        heard = asyncio.run(measure(Endpoint(server.url), BODY | {"max_new_tokens": 1}, 0.0))
        assert heard.error == "the answer has no audio"
        server.statuses = [400]
        assert bench(flags, tmp_path) == 1
    assert "a first small request failed: asked to fail (HTTP 400)" in capsys.readouterr().err


def test_a_part_of_the_requests_is_left_midway():
    async def run() -> list[Heard]:
        leaver = Leaver(Endpoint(server.url), 0.5, seed=0)
        heard = [await leaver.send(BODY | {"max_new_tokens": 11}, 0.0) for _ in range(30)]
        await asyncio.sleep(0.1)
        return heard

    with FakeOpenAI(token_s=0.005) as server:
        heard = asyncio.run(run())
    n_left = sum(h.is_cancelled for h in heard)
    assert 5 < n_left < 25
    assert not any(h.error for h in heard)
    assert not heard[0].is_cancelled, "how long a request takes is learned from one that ends"
    assert server.n_disconnects > 0, "the server sees the client gone"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--words 0", "--words '0'"),
        ("--cancel 1", "--cancel 1"),
        ("--n 2,x", "--n '2,x'"),
        ("--extra [1]", "expected a JSON object"),
        ("--extra {", "not JSON"),
        ("--extra @/nowhere/x", "--extra @/nowhere/x"),
        ('--extra {"response_format":"mp3"}', "response_format is set by the command"),
        ("--ref-audio /nowhere/x.wav", "--ref-audio /nowhere/x.wav"),
    ],
)
def test_wrong_settings_are_one_line(flags, complaint, capsys):
    assert main(["bench", "speech", "--url", "http://127.0.0.1:1", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_the_soaks_traffic_finds_our_server_right_and_a_wrong_one_wrong():
    """Every kind of request, over a fake engine."""
    golden: dict[str, str] = {}

    async def run(kinds: list[Any], n: int) -> Traffic:
        traffic = Traffic(Endpoint(url, "key"), "fake", 4096, 8, golden=golden)
        for seed, kind in enumerate(kinds * n):
            await kind(traffic, random.Random(seed))
        traffic.endpoint.close()
        return traffic

    engine = FakeSpeechClient()
    with served(make_speech_app(engine, api_key=("key",), max_body_mb=1.0)) as url:
        traffic = asyncio.run(run([kind for kind in soak_speech.KINDS if kind is not soak_speech.burst], 12))
        assert traffic.n_tokens > 20
        assert len(golden) > 3
        asyncio.run(run([soak_speech.burst], 1))
        engine.n_frames = 5
        with pytest.raises(Violation, match="other samples"):
            asyncio.run(run([soak_speech.again], 12))
        engine.n_frames = 0
        with pytest.raises(Violation, match="0 bytes of audio"):
            asyncio.run(run([soak_speech.streamed], 5))
