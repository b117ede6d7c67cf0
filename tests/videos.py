"""Files of video: of the kinds that are read, and hostile ones. They need PyAV."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from tests.pictures import scene


def frames_of(n: int, width: int = 96, height: int = 64) -> list[np.ndarray]:
    """A bright square that moves over a still scene."""
    still = scene(width, height) // 2
    frames = []
    for i in range(n):
        frame = still.copy()
        at = i * 5 % (width - 24)
        frame[20:44, at : at + 24] = (255, 40 + i * 9 % 200, 30)
        frames.append(frame)
    return frames


def video(
    frames: Sequence[np.ndarray] | int = 30,
    rate: int | Fraction = 10,
    form: str = "mp4",
    codec: str = "libx264",
    times: Sequence[int] | None = None,
    sound: bool = False,
    **options: str,
) -> bytes:
    """times: in ticks of 1/1000 s, instead of the rate."""
    import av

    given = frames_of(frames) if isinstance(frames, int) else frames
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = given[0].shape[:2]
        stream.pix_fmt, stream.options = "yuv420p", options
        audio: Any = container.add_stream("aac", rate=8000) if sound else None
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i, pixels in enumerate(given):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            if times:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 8000
            container.mux(audio.encode(silence))
            container.mux(audio.encode())
    return file.getvalue()


def only_sound() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        audio: Any = container.add_stream("aac", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 8000
        container.mux(audio.encode(silence))
        container.mux(audio.encode())
    return file.getvalue()


FORMS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "mp4 without B-frames": {"bf": "0", "g": "6"},
    "mov": {"form": "mov"},
    "mkv": {"form": "matroska"},
    "webm": {"form": "webm", "codec": "libvpx-vp9", "deadline": "realtime", "cpu-used": "8"},
    "vp8": {"form": "webm", "codec": "libvpx", "deadline": "realtime"},
    "mpeg4": {"codec": "mpeg4"},
    "sound": {"sound": True},
    "fragments": {"sound": False, "g": "5"},
}


@cache
def whole(name: str) -> bytes:
    return video(**FORMS[name])


def box(data: bytes, *path: bytes) -> int:
    """Where the content of a box of an MP4 begins."""
    at = 0
    for name in path:
        at = data.index(name, at) + 4
    return at


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def turned(data: bytes, quarters: int) -> bytes:
    """An MP4 that says that it is to be seen so many quarters clockwise."""
    a, b, c, d = ((1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0))[quarters]
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return patched(data, box(data, b"moov", b"trak", b"tkhd") + 40, matrix)


def refused() -> Iterator[tuple[str, bytes, str]]:
    """Files that must be refused: a name, the bytes, and a part of what is said."""
    mp4, front = whole("mp4"), video(movflags="faststart")
    yield "nothing", b"", "no video that can be read here"
    yield "a text", b"a video of a cat" * 99, "no video that can be read here"
    yield "a list of files", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no video that can be read here"
    yield "a concat script", b"ffconcat version 1.0\nfile '/etc/passwd'\n", "no video that can be read here"
    yield "noise behind a mark", mp4[:12] + np.random.default_rng(0).bytes(5000), ""
    yield "mkv of noise", b"\x1aE\xdf\xa3" + np.random.default_rng(0).bytes(5000), ""
    yield "mp4 cut in half", mp4[: len(mp4) // 2], ""
    yield "mp4 cut in half behind its index", front[: len(front) * 2 // 3], "Is it whole?"
    yield "sound only", only_sound(), "has no video, only other streams"
    vp8 = whole("vp8")
    huge = patched(vp8, vp8.index(b"\x9d\x01\x2a") + 3, struct.pack("<HH", 16383, 16383))
    yield "a first frame of 16383 x 16383 pixels", huge, ""
    yield "another codec", video(3, form="mov", codec="mjpeg", strict="-1"), "is coded as mjpeg"
    stts = box(mp4, b"stts")
    yield "a frame of 2^31 ticks", patched(mp4, stts + 8, struct.pack(">II", 30, 2**31 - 1)), ""
    yield "two frames on two days", video(2, times=[0, 100_000_000]), "lasts 10"
    yield "more than 48 MB", mp4 + bytes(48_000_000), "larger than 48 MB"


def doubtful() -> Iterator[tuple[str, bytes]]:
    """Files that are refused or read, as their decoder can."""
    for name in ("mp4", "mkv", "webm", "vp8", "mpeg4"):
        data, generator = whole(name), np.random.default_rng(len(name))
        damaged = bytearray(data)
        for at in generator.integers(len(data) // 8, len(data), 12):
            damaged[at] = generator.integers(256)
        yield f"{name} with 12 wrong bytes", bytes(damaged)
        yield f"{name} without its end", data[:-400]
    mp4 = whole("mp4")
    stts, mvhd, tkhd = box(mp4, b"stts"), box(mp4, b"mvhd"), box(mp4, b"tkhd")
    yield "every frame at one time", patched(mp4, stts + 8, struct.pack(">II", 30, 0))
    yield "a header of 136 years", patched(patched(mp4, mvhd + 16, b"\xff" * 4), tkhd + 20, b"\xff" * 4)
    yield "4 billion entries", patched(mp4, stts + 4, b"\xff" * 4)
    avc1 = box(mp4, b"stsd", b"avc1")
    yield "65535 x 65535 pixels in its header", patched(mp4, avc1 + 24, struct.pack(">HH", 65535, 65535))
    yield "no time scale", patched(mp4, box(mp4, b"mdhd") + 12, bytes(4))
