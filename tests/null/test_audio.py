"""Files of samples: tempo, rates and cuts; and reference audio that means no good."""

from __future__ import annotations

import asyncio
import io
import struct
import time

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from deltic.server.isolated import ForkServer, Refused
from deltic.server.speech import audio
from deltic.server.speech.audio import Resampler, decode_reference, encode, stretch, wav_header
from tests import videos
from tests.decoders import DECODER


def tone(seconds: float, hertz: float = 220.0, rate: int = 24000, loudness: float = 0.4) -> np.ndarray:
    t = np.arange(int(seconds * rate)) / rate
    return (loudness * np.sin(2 * np.pi * hertz * t)).astype(np.float32)


def pcm(samples: np.ndarray) -> bytes:
    return (samples * 32767).astype("<i2").tobytes()


def decoded(data: bytes) -> np.ndarray:
    return np.frombuffer(asyncio.run(decode_reference(data)), "<f4")


def file_of(samples: np.ndarray, rate: int, **form: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **({"format": "WAV", "subtype": "FLOAT"} | form))
    return file.getvalue()


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.1, 2.0, 4.0])
def test_tempo(speed: float) -> None:
    """The pitch stays, the loudness stays, no samples are lost at the ends."""
    said = stretch(tone(2), speed)
    assert len(said) == round(48000 / speed)
    inner = said[800:-800]
    assert abs(np.sqrt(np.mean(inner**2)) * np.sqrt(2) - 0.4) < 0.02
    spectrum = np.abs(np.fft.rfft(said * np.hanning(len(said)))) ** 2
    hertz = np.arange(len(spectrum)) * 24000 / len(said)
    assert spectrum[abs(hertz - 220) < 12].sum() > 0.99 * spectrum.sum()


@pytest.mark.parametrize("n", [0, 1, 359, 721, 5000])
def test_tempo_of_very_short_audio(n: int) -> None:
    for speed in (0.25, 1.5, 4.0):
        assert len(stretch(np.ones(n, np.float32), speed)) == round(n / speed)
    assert encode(bytes(2 * n), "pcm", 8000, 2.0) == bytes(2 * round(round(n / 2) / 3)) or n == 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9000), max_size=12))
def test_a_rate_does_not_show_the_cuts(cuts: list[int]) -> None:
    data = np.random.default_rng(1).integers(-32768, 32767, 24000).astype("<i2").tobytes()
    resampler, out, at = Resampler(8000), b"", 0
    for n in cuts:
        out += resampler.push(data[at : at + 2 * n])
        at += 2 * n
    out += resampler.push(data[at:]) + resampler.push(b"", last=True)
    assert out == encode(data, "pcm", 8000) and len(out) == 16000


def test_headers_are_what_a_reader_expects() -> None:
    data = pcm(tone(0.1))
    samples, rate = soundfile.read(io.BytesIO(wav_header(24000, len(data)) + data), dtype="int16")
    assert rate == 24000 and samples.tobytes() == data
    assert struct.unpack("<I", wav_header(8000)[4:8]) == struct.unpack("<I", wav_header(8000)[40:]) == (2**32 - 1,)


@pytest.mark.parametrize(
    ("rate", "channels", "form"),
    [
        (24000, 1, {}),
        (44100, 2, {"subtype": "PCM_24"}),
        (8000, 1, {"subtype": "ULAW"}),
        (48000, 1, {"format": "OGG", "subtype": "OPUS"}),
        (44100, 1, {"format": "OGG", "subtype": "VORBIS"}),
        (22050, 1, {"format": "MP3", "subtype": "MPEG_LAYER_III"}),
        (96000, 1, {"format": "FLAC", "subtype": "PCM_16"}),
    ],
)
def test_references_become_24_khz_mono(rate: int, channels: int, form: dict[str, str]) -> None:
    said = decoded(file_of(np.stack([tone(2, rate=rate)] * channels, 1), rate, **form))
    assert abs(len(said) - 48000) < 1200
    spectrum = np.abs(np.fft.rfft(said * np.hanning(len(said))))
    assert abs(spectrum.argmax() * 24000 / len(said) - 220) < 2 and 0.35 < np.abs(said).max() < 0.45


def recorded(form: str, codec: str, samples: np.ndarray, rate: int, **options: str) -> bytes:
    """As phones and browsers record. samples: [channels, n]."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=rate, layout="stereo" if len(samples) == 2 else "mono", options=options)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=stream.layout.name)
        frame.sample_rate = rate
        for part in av.AudioResampler(stream.codec_context.format.name).resample(frame):
            out.mux(stream.encode(part))
        out.mux(stream.encode())
    return file.getvalue()


RECORDED = {
    "m4a": ("ipod", "aac", 44100, 2),
    "fragmented": ("mp4", "aac", 48000, 1),
    "alac": ("ipod", "alac", 44100, 1),
    "webm": ("webm", "libopus", 48000, 2),
    "vorbis": ("webm", "vorbis", 44100, 2),
    "adts": ("adts", "aac", 24000, 1),
}


def recording(name: str) -> bytes:
    form, codec, rate, channels = RECORDED[name]
    more = {"movflags": "frag_keyframe+empty_moov"} if name == "fragmented" else {}
    return recorded(form, codec, np.stack([tone(2, rate=rate)] * channels), rate, strict="-2", **more)


@pytest.mark.parametrize("name", RECORDED)
def test_recordings_of_phones_and_browsers(name: str) -> None:
    said = decoded(recording(name))
    assert abs(len(said) - 48000) < 2600
    spectrum = np.abs(np.fft.rfft(said * np.hanning(len(said))))
    assert abs(spectrum.argmax() * 24000 / len(said) - 220) < 2
    inner = said[4000:-4000]
    assert abs(np.sqrt(np.mean(inner**2)) * np.sqrt(2) - 0.4) < 0.02
    assert decoded(recording(name)).tobytes() == said.tobytes() or name == "vorbis"


def test_our_own_aac_is_a_recording() -> None:
    pytest.importorskip("av")
    assert abs(len(decoded(encode(pcm(tone(2)), "aac", 24000))) - 48000) < 2600


def test_recordings_that_are_refused() -> None:
    long = np.zeros((1, 31 * 48000), np.float32)
    for data, said in (
        (recorded("ipod", "aac", long, 48000), "longer than 30 s"),
        (recorded("ipod", "aac", long[:, :9000], 48000), "shorter than 1 s"),
        (recorded("webm", "libopus", long[:, :90000], 48000), "silent"),
        (recorded("matroska", "ac3", np.stack([tone(2, rate=48000)]), 48000), "is coded as ac3. Send wav"),
        (recording("m4a")[:9000], "cannot be decoded. Send wav, flac, mp3, ogg or aiff, or m4a, aac or webm"),
        (recording("m4a")[:8] + bytes(5000), "cannot be decoded"),
        (b"\x1aE\xdf\xa3" + np.random.default_rng(0).bytes(5000), "cannot be decoded"),
        (videos.video(5), "has no sound"),
    ):
        with pytest.raises(Refused, match=said):
            decoded(data)


def test_recordings_of_phones_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "find_spec", lambda _: None)
    for data in (b"\0\0\0\x18ftypM4A ", b"\x1aE\xdf\xa3", b"\xff\xf1"):
        with pytest.raises(Refused, match=r"needs a library: pip install 'deltic\[video\]'\. Without it, send wav"):
            audio._decode(data)


def test_the_same_file_is_the_same_samples() -> None:
    data = file_of(tone(1.5, rate=44100), 44100)
    assert decoded(data).tobytes() == decoded(data).tobytes()
    loud = decoded(file_of(tone(1.5, loudness=3.0), 24000))
    assert loud.max() == 1.0 and loud.min() == -1.0
    huge = decoded(file_of(tone(1.5, rate=44100, loudness=3e38), 44100))
    assert np.isfinite(huge).all() and np.abs(huge).max() == 1.0


BROKEN = tone(2)
BROKEN[7] = np.nan
LYING = bytearray(wav_header(24000, 2**31) + pcm(tone(2)))
LONG = file_of(np.zeros((3_000_000, 8), np.float32), 96000, format="FLAC", subtype="PCM_16")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no audio file"),
        (b"x" * 5000, "no audio file"),
        (file_of(tone(2), 24000)[:40], "."),
        (file_of(BROKEN, 24000), "not numbers"),
        (file_of(tone(2) * 1e-5, 24000), "silent"),
        (file_of(tone(0.9), 24000), "shorter than 1 s"),
        (file_of(tone(30.1), 24000), "longer than 30 s"),
        (LONG, "longer than 30 s"),
        (file_of(tone(2, rate=4000), 4000), "4000 samples a second"),
        (file_of(np.stack([tone(2)] * 9, 1), 24000), "9 channels"),
        (file_of(tone(2), 24000, format="W64", subtype="PCM_16"), "w64"),
    ],
    ids=range(11),
)
def test_references_that_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(Refused, match=said):
        decoded(data)


def test_a_header_that_lies_about_the_length_is_not_believed() -> None:
    assert len(decoded(bytes(LYING))) == 48000


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "cannot be decoded"),
        ("x = bytearray(1 << 40)", "cannot be decoded"),
        ("import time; time.sleep(60)", "within 1.5 s"),
        ("import sys; sys.stderr.write('[mp3.c:7] bad'); print(end='no'); status = 3", "^no"),
    ],
    ids=range(4),
)
def test_a_decoder_that_fails_takes_nobody_with_it(
    program: str, said: str, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio, "PROGRAM", (DECODER, program))
    monkeypatch.setattr(audio, "DECODE_S", 0.5)
    before_s = time.monotonic()
    with pytest.raises(Refused, match=said):
        decoded(file_of(tone(2), 24000))
    assert time.monotonic() - before_s < 5


@pytest.mark.parametrize("seed", range(3 + len(RECORDED)))
def test_damaged_files_are_refused_or_decoded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forms = [{"format": "FLAC", "subtype": "PCM_16"}, {"format": "OGG", "subtype": "OPUS"}, {}]
    data = bytearray(file_of(tone(2), 24000, **forms[seed]) if seed < 3 else recording(list(RECORDED)[seed - 3]))
    for at in rng.integers(0, len(data), 40):
        data[at] = rng.integers(256)
    try:
        assert np.isfinite(decoded(bytes(data))).all()
    except Refused as error:
        assert str(error)
