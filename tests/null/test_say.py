"""`deltic say`: what it asks, what it writes, how it fails."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import soundfile

from deltic.__main__ import main
from tests.fake_engine import served
from tests.fake_openai import FakeOpenAI
from tests.fake_speech import FakeSpeechClient, make_speech_app, wave
from tests.waiting import wait_for


def say(server: FakeOpenAI, *arguments: str) -> int:
    return main(["say", "Hello there.", "--url", server.url, *arguments])


def sizes(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    return struct.unpack("<I", data[4:8])[0], struct.unpack("<I", data[40:44])[0]


def test_a_streamed_wav_becomes_a_file_with_the_right_sizes(tmp_path: Path, capsys):
    out = tmp_path / "hello.wav"
    with FakeOpenAI(n_words=5) as server:
        assert say(server, "-o", str(out), "--language", "English", "--extra", '{"seed": 7}') == 0
    assert server.bodies == [
        {
            "model": "fake", "input": "Hello there.", "response_format": "wav", "language": "English", "seed": 7,
            "stream_format": "audio", "voice": "vivian",
        }
    ]  # fmt: skip
    assert sizes(out) == (36 + 5 * 3840, 5 * 3840)
    sound = soundfile.info(out)
    assert (sound.samplerate, sound.frames) == (24000, 5 * 1920)
    told = capsys.readouterr().err
    assert "hello.wav: 0.40 s of audio" in told and "first after" in told and "RTF" in told


def test_other_formats_and_speeds_come_whole(tmp_path: Path):
    with FakeOpenAI(n_words=2) as server:
        assert say(server, "-o", str(tmp_path / "x.OGG"), "--voice", "ryan") == 0
        assert say(server, "-o", str(tmp_path / "x"), "--format", "mp3") == 0
        assert (
            say(server, "-o", str(tmp_path / "x.aac")) == say(server, "-o", str(tmp_path / "x"), "--format", "aac") == 0
        )
        assert say(server, "-o", str(tmp_path / "x.wav"), "--extra", '{"speed": 2}') == 0
    assert [body["response_format"] for body in server.bodies] == ["opus", "mp3", "aac", "aac", "wav"]
    assert not any("stream_format" in body for body in server.bodies)
    assert server.bodies[0]["voice"] == "ryan"
    assert sizes(tmp_path / "x.wav") == (36 + 2 * 3840, 2 * 3840)


def test_a_reference_is_sent_along(tmp_path: Path):
    audio = tmp_path / "me.wav"
    audio.write_bytes(b"RIFF...")
    with FakeOpenAI() as server:
        out = ("-o", str(tmp_path / "x.pcm"), "--ref-audio", str(audio))
        assert say(server, *out) == 0
        assert say(server, *out, "--ref-text", "It is me.") == 0
    first, second = server.bodies
    assert base64.b64decode(first["ref_audio"].partition("base64,")[2]) == b"RIFF..."
    assert first["x_vector_only_mode"] is True
    assert "x_vector_only_mode" not in second and second["ref_text"] == "It is me."
    assert "voice" not in first, "the reference is the voice"


def test_a_pipe_gets_the_stream_as_it_comes():
    with FakeOpenAI(n_words=3) as server:
        command = [sys.executable, "-m", "deltic", "say", "-", "-o", "-", "--url", server.url]
        done = subprocess.run(command, input=b"From a pipe.", capture_output=True, check=True)
    assert server.bodies[0]["input"] == "From a pipe."
    assert len(done.stdout) == 44 + 3 * 3840
    assert done.stdout[4:8] == b"\xff" * 4, "nobody knows the length while it is made"


def test_a_pipe_with_a_name_and_a_full_disk(tmp_path: Path, capsys):
    pipe = tmp_path / "pipe.wav"
    os.mkfifo(pipe)
    with FakeOpenAI() as server, ThreadPoolExecutor(1) as reader:
        heard = reader.submit(pipe.read_bytes)
        assert main(["say", "Hello.", "--url", server.url, "-o", str(pipe)]) == 0
        assert heard.result(10)[:4] == b"RIFF" and b"\xff\xff\xff\xff" in heard.result()[:44]
        assert main(["say", "Hello.", "--url", server.url, "-o", "/dev/full", "--format", "wav"]) == 1
    assert "cannot write /dev/full: No space left" in capsys.readouterr().err


def test_our_own_server_is_understood(tmp_path: Path):
    engine = FakeSpeechClient()
    with served(make_speech_app(engine)) as url:
        for name in ("x.wav", "x.pcm", "x.flac"):
            assert main(["say", "Hello there.", "--url", url, "-o", str(tmp_path / name)]) == 0
    assert sizes(tmp_path / "x.wav")[1] == len(wave(4))
    assert (tmp_path / "x.wav").read_bytes()[44:] == (tmp_path / "x.pcm").read_bytes() == wave(4)
    assert (tmp_path / "x.flac").read_bytes()[:4] == b"fLaC"
    assert [sent.speech.is_streamed for sent in engine.requests if sent.speech] == [True, True, False]


def test_ctrl_c_keeps_what_came(tmp_path: Path, capsys, interruptible):
    out = tmp_path / "x.wav"
    with FakeOpenAI(n_words=1000, token_s=0.01) as server:

        def interrupt() -> None:
            wait_for(lambda: out.exists() and out.stat().st_size > 10_000)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        assert say(server, "-o", str(out)) == 130
        wait_for(lambda: server.n_disconnects)
    assert "has what came until then" in capsys.readouterr().err
    assert sizes(out)[1] == out.stat().st_size - 44 > 10_000 - 44
    assert server.n_disconnects == 1


def test_what_is_wrong_is_one_line_and_leaves_no_file(tmp_path: Path, capsys, monkeypatch):
    out = tmp_path / "x.wav"
    with FakeOpenAI(statuses=[400]) as server:
        assert say(server, "-o", str(out)) == 1
        assert capsys.readouterr().err == "deltic: asked to fail (HTTP 400)\n"
        assert not out.exists()
        assert say(server, "-o", str(tmp_path / "no" / "x.wav")) == 1
        assert "cannot write" in capsys.readouterr().err
        assert say(server, "-o", str(out), "--max-new-tokens", "1") == 1
        assert "the answer has no audio" in capsys.readouterr().err
        server.breaks_at = 3
        assert say(server, "-o", str(out)) == 1
        assert "broke in the middle" in capsys.readouterr().err
        assert sizes(out)[1] == 2 * 3840, "what came can be played"
        for arguments, complaint in (
            (["-o", "x.doc"], "--out x.doc: no known format"),
            (["--extra", '{"stream": true}'], "stream is set by the command"),
            (["--extra", '{"input": "x"}'], "input is set"),
        ):
            assert say(server, *arguments) == 2
            assert complaint in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
        assert main(["say", "-", "--url", server.url]) == 2
        assert "nothing to say" in capsys.readouterr().err


def test_the_guides_programs_run(capsys):
    guide = (Path(__file__).parents[2] / "docs" / "speech.md").read_text()
    with served(make_speech_app(FakeSpeechClient()), ws="auto") as url:
        for program in re.findall(r"```python\n(.*?)```", guide, re.S):
            here = program.replace("//127.0.0.1:8000", url.removeprefix("http:"))
            exec(compile(here, "speech.md", "exec"), {"__name__": "guide"})
    said = capsys.readouterr().out
    assert said.count("3840") == 12, "a piece a line: of the stream, and of both sentences"
    assert '"sentence_text":"The second is still coming."' in said
    assert "session.done" in said
