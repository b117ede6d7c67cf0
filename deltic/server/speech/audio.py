"""Samples to files and back: formats, rates, tempo, and reference audio, which nobody vouches for.

Audio of the engine is 16-bit little-endian mono at 24 kHz. Files are libsndfile's (soundfile) or
FFmpeg's (PyAV), rates are soxr's; all are imported where they are used, since a server of text needs none of
them. Reference audio is decoded by a process of its own (server/isolated.py).
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Generator, Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltic.server.isolated import Refused, answer, ask

RATE = 24_000
MEDIA_TYPES = {form: f"audio/{form}" for form in ("wav", "pcm", "flac", "mp3", "opus", "aac")}
MEDIA_TYPES |= {"mp3": "audio/mpeg", "opus": "audio/ogg"}
_FILES = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}
STREAMED_FILES = ("mp3", "opus")
"""Formats that are whole files at any length."""
WHOLE_FILES = ("flac", "aac")
"""Formats that come at the end: FLAC tells its length at its beginning, and libsndfile cannot read one
without.
"""
OPUS_RATES = (8_000, 16_000, 24_000, 48_000)
MP3_COMPRESSION = 0.5
"""libsndfile's scale, 0 to 1, of the constant rates there are: about 80 kbit/s at 24 kHz."""
SET_OGG_PAGE_LATENCY_MS = 0x1302
"""Command of libsndfile's sf_command: how much audio a page of Ogg gathers before it is written.

A second, unless told.
"""

MAX_REFERENCE_BYTES = 10_000_000
MIN_REFERENCE_S, MAX_REFERENCE_S = 1.0, 30.0
MAX_CHANNELS = 8
RATES = range(8_000, 192_001)
"""Sample rates of reference audio, in Hz."""
READABLE = ("WAV", "WAVEX", "FLAC", "MP3", "OGG", "AIFF")
"""Formats that libsndfile reads; what is in an MP4, WebM or ADTS, FFmpeg reads, of PyAV."""
CODECS = ("aac", "alac", "opus", "libopus", "vorbis", "mp3", "mp3float", "flac")
_SOUND_FILES = "wav, flac, mp3, ogg or aiff"
_SEND = f"{_SOUND_FILES}, or m4a, aac or webm"
BLOCK_FRAMES = 65_536
SILENT_BELOW = 1e-3
"""Largest sample of what is taken for silence: -60 dB."""

PROGRAM = ("deltic.server.speech.audio",)
DECODE_S = 15.0
DECODE_MEMORY = 2 << 30
"""Address space of the process that decodes; numpy maps most of it without using it."""


def wav_header(rate: int, n_bytes: int | None = None) -> bytes:
    """44 bytes before 16-bit mono samples; n_bytes None: a stream, whose sizes nobody knows yet."""
    size = 0xFFFFFFFF if n_bytes is None else n_bytes
    whole = min(size + 36, 0xFFFFFFFF)
    form = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    return b"RIFF" + struct.pack("<I", whole) + b"WAVEfmt " + form + b"data" + struct.pack("<I", size)


def encode(pcm: bytes, form: str, rate: int, speed: float = 1.0) -> bytes:
    """A whole file of the engine's samples, in one of MEDIA_TYPES, at another tempo if asked for.

    Takes a while for long ones.
    """
    if speed != 1.0:
        pcm = _to_pcm(stretch(_from_pcm(pcm), speed))
    if rate != RATE:
        resampler = Resampler(rate)
        pcm = resampler.push(pcm) + resampler.push(b"", last=True)
    if form == "pcm":
        return pcm
    if form == "wav":
        return wav_header(rate, len(pcm)) + pcm
    if form == "aac":
        return _aac(pcm, rate)
    import soundfile

    container, subtype = _FILES[form]
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(pcm, "<i2"), rate, format=container, subtype=subtype)
    return file.getvalue()


def _aac(pcm: bytes, rate: int) -> bytes:
    """A file of ADTS. libsndfile writes none, so it is FFmpeg's, of PyAV."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="adts") as out:
        stream = out.add_stream("aac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate = rate
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


class StreamedFile:
    """A file in one of STREAMED_FILES that leaves while it is written: each byte is final as it is given out.

    The table of contents that an mp3 has in its first frame stays empty, as in any stream of mp3. Takes 0.5
    ms (mp3) to 1.5 ms (opus) for each frame of 80 ms.
    """

    def __init__(self, form: str, rate: int) -> None:
        import soundfile

        container, subtype = _FILES[form]
        self._written = _Appended()
        settings: dict[str, Any] = {"samplerate": rate, "channels": 1, "format": container, "subtype": subtype}
        if form == "mp3":
            # At a constant rate, players tell the length and find a place without the table.
            settings |= {"bitrate_mode": "CONSTANT", "compression_level": MP3_COMPRESSION}
        self._file = soundfile.SoundFile(self._written, "w", **settings)
        self._resampler = Resampler(rate) if rate != RATE else None
        if form == "opus":
            # The package has no method for this command. Without it a listener waits for a second of audio.
            latency_ms = soundfile._ffi.new("double *", 80.0)
            soundfile._snd.sf_command(self._file._file, SET_OGG_PAGE_LATENCY_MS, latency_ms, 8)

    def push(self, pcm: bytes, last: bool = False) -> bytes:
        """The engine's samples in; the bytes of the file that became final with them out."""
        if self._resampler is not None:
            pcm = self._resampler.push(pcm, last)
        self._file.write(np.frombuffer(pcm, "<i2"))
        if last:
            self._file.close()
        return self._written.taken()


class _Appended:
    """A file for libsndfile to write: keeps what is appended, and passes over what would change bytes written
    before.
    """

    def __init__(self) -> None:
        self._place = self._size = 0
        self._new = bytearray()

    def write(self, data: bytes) -> int:
        if self._place == self._size:
            self._new += data
            self._size += len(data)
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def taken(self) -> bytes:
        data = bytes(self._new)
        self._new.clear()
        return data


class Resampler:
    """The engine's samples at another rate, piece by piece: the same samples however they are cut."""

    def __init__(self, rate: int) -> None:
        import soxr

        self._stream = soxr.ResampleStream(RATE, rate, 1, dtype="float32", quality="HQ")

    def push(self, pcm: bytes, last: bool = False) -> bytes:
        # In float32: with 16 bits the library dithers, which depends on the cuts.
        return _to_pcm(self._stream.resample_chunk(_from_pcm(pcm), last))


def _from_pcm(pcm: bytes) -> NDArray[np.float32]:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)


def _to_pcm(samples: NDArray[np.float32]) -> bytes:
    """Within [-1, 1] -> 16 bits, rounded."""
    return bytes(np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2").tobytes())


WINDOW = 720
"""Samples of a piece that is moved whole: 30 ms, two periods of a low voice."""
SEARCH = 240
"""A piece is taken from so many samples around its place, where it goes on best."""


def stretch(samples: NDArray[np.float32], speed: float) -> NDArray[np.float32]:
    """float32 [n] at `speed` times the tempo and the same pitch: [n / speed], rounded.

    WSOLA (Verhelst and Roelands, 1993): windows that overlap by half are laid down at an even pace. Each is
    taken near its place, where it is most like what would have followed the one before, so that periods go on
    where they were.
    """
    hop = WINDOW // 2
    n_out = round(len(samples) / speed)
    n_windows = -(-n_out // hop) + 1
    window = np.hanning(WINDOW + 1)[:-1].astype(np.float32)  # shifted by half, it adds up to 1
    padding = (hop + SEARCH, 2 * (WINDOW + SEARCH) + int(hop * speed))
    source = np.pad(samples, padding)
    out = np.zeros((n_windows + 1) * hop, np.float32)
    at = SEARCH
    for i in range(n_windows):
        if i:
            first = min(int(i * hop * speed), len(source) - WINDOW - 2 * SEARCH - 1)
            follows = source[at + hop : at + hop + WINDOW]
            near = source[first : first + 2 * SEARCH + WINDOW]
            likeness = np.correlate(near, follows, "valid")
            energy = np.cumsum(np.concatenate(([0.0], near.astype(np.float64) ** 2)))
            at = first + int(np.argmax(likeness / np.sqrt(energy[WINDOW:] - energy[:-WINDOW] + 1e-6)))
        out[i * hop : i * hop + WINDOW] += window * source[at : at + WINDOW]
    return out[hop : hop + n_out]


async def decode_reference(data: bytes) -> bytes:
    """float32 mono samples at RATE, within [-1, 1], of a file in one of READABLE, or with one of CODECS.

    Raises Refused.

    In a process of its own, which is ended after DECODE_S, or when nobody waits any more.
    """
    return await ask(PROGRAM, data, DECODE_S, f"cannot be decoded. Send {_SEND}.")


def prepare() -> None:
    """Imports what every file needs."""
    import soxr  # noqa: F401


def main() -> int:
    """Reference audio in stdin, samples out of stdout."""
    return answer(
        lambda data: _decode(data).tobytes(), limit_s=DECODE_S, memory=DECODE_MEMORY, most_bytes=MAX_REFERENCE_BYTES
    )


def _decode(data: bytes) -> NDArray[np.float32]:
    """Decodes reference audio (see `decode_reference`). What a header says of the length is not relied on."""
    import soxr

    if len(data) > MAX_REFERENCE_BYTES:
        raise Refused(f"is larger than {MAX_REFERENCE_BYTES // 1_000_000} MB")
    form = _container_of(data)
    with contextlib.closing(_in_container(data, form) if form else _in_sound_file(data)) as parts:
        rate, mono = _mono(parts)
    if len(mono) < MIN_REFERENCE_S * rate:
        raise Refused(f"is shorter than {MIN_REFERENCE_S:g} s")
    if not np.isfinite(mono).all():
        raise Refused("has samples that are not numbers")
    if np.abs(mono).max() < SILENT_BELOW:
        raise Refused("is silent")
    mono = np.clip(mono, -1.0, 1.0)
    if rate != RATE:
        mono = np.clip(soxr.resample(mono, rate, RATE, quality="HQ"), -1.0, 1.0)
    return mono.astype("<f4")


def _container_of(data: bytes) -> str | None:
    """FFmpeg's reader of a file, by its first bytes: no other is asked. None: it is for libsndfile."""
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[4:8] == b"ftyp":
        return "mov"
    return "aac" if data[:1] == b"\xff" and data[1:2] and data[1] & 0xF6 == 0xF0 else None  # ADTS


def _in_sound_file(data: bytes) -> Generator[tuple[int, NDArray[np.float32]]]:
    """Rate and samples, [n, channels], a block at a time. Raises Refused."""
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError:
        raise Refused(f"is no audio file that can be read here. Send {_SEND}.") from None
    with file:
        if file.format not in READABLE:
            raise Refused(f"is {file.format.lower()}. Send {_SEND}.")
        yield file.samplerate, np.zeros((0, file.channels), np.float32)
        while len(part := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
            yield file.samplerate, part


def _in_container(data: bytes, form: str) -> Generator[tuple[int, NDArray[np.float32]]]:
    """Decodes what phones and browsers record (see `_in_sound_file`)."""
    if not find_spec("av"):
        raise Refused(f"needs a library: pip install 'deltic[video]'. Without it, send {_SOUND_FILES}.")
    import av

    with av.open(io.BytesIO(data), "r", format=form) as container:
        if not (streams := container.streams.audio):
            raise Refused("has no sound")
        context = streams[0].codec_context
        if context is None or context.name not in CODECS:
            raise Refused(f"is coded as {context.name if context else 'something unknown'}. Send {_SEND}.")
        context.thread_count = 1
        planes = av.AudioResampler(format="fltp")
        for frame in container.decode(streams[0]):
            for part in planes.resample(frame):
                yield part.sample_rate, part.to_ndarray().T.astype(np.float32, copy=False)


def _mono(parts: Iterable[tuple[int, NDArray[np.float32]]]) -> tuple[int, NDArray[np.float32]]:
    """The rate, and the mean of the channels. Reads no more than MAX_REFERENCE_S. Raises Refused."""
    blocks: list[NDArray[np.float32]] = []
    n_read = rate = 0
    for rate, part in parts:
        if rate not in RATES:
            raise Refused(f"has {rate} samples a second. From {RATES.start} to {RATES.stop - 1} can be used.")
        if part.shape[1] > MAX_CHANNELS:
            raise Refused(f"has {part.shape[1]} channels. At most {MAX_CHANNELS} can be used.")
        blocks.append(part.mean(axis=1, dtype=np.float32))
        n_read += len(part)
        if n_read > int(MAX_REFERENCE_S * rate):
            raise Refused(f"is longer than {MAX_REFERENCE_S:g} s")
    return rate, np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
