"""`deltic say`: a text to a sound file, or to a player through a pipe, over `/v1/audio/speech`.

wav and pcm are written as they come, so Ctrl-C leaves what was heard until then; other formats come whole.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import mimetypes
import sys
import time
import urllib.parse
from pathlib import Path
from typing import BinaryIO

from deltic.commands.endpoint import Endpoint, EndpointError, HttpReply, asked_model, error_message, own_server, reached
from deltic.config import ConfigError
from deltic.json_types import JsonObject

PATH = "/v1/audio/speech"

FORMATS = ("wav", "pcm", "flac", "mp3", "opus", "aac")
SUFFIXES = {f".{name}": name for name in FORMATS} | {".ogg": "opus", ".raw": "pcm"}

WAV_HEADER = 44
"""Bytes; the size of the file less 8 stands at 4, that of the samples at 40."""


def fields(arguments: argparse.Namespace, may_have: tuple[str, ...] = ()) -> JsonObject:
    """The body's fields from the flags that `say` and `bench speech` share. Raises ConfigError.

    may_have: fields of --extra that a command would set itself, and that may yet be set there.
    """
    body: JsonObject = {}
    for name in ("voice", "language", "instructions", "ref_text", "max_new_tokens"):
        if (value := getattr(arguments, name)) is not None:
            body[name] = value
    if arguments.ref_audio:
        body["ref_audio"] = _audio_url(arguments.ref_audio)
        if not arguments.ref_text:
            body["x_vector_only_mode"] = True  # without a transcript there is only the speaker's vector
    text = arguments.extra
    try:
        extra = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"--extra {text}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--extra {text[:80]!r}: not JSON ({error})") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra {text[:80]!r}: expected a JSON object")
    for name in ("model", "input", "response_format", "stream_format", "stream"):
        if name in extra and name not in may_have:
            raise ConfigError(f"--extra: {name} is set by the command")
    return body | extra


def _audio_url(place: str) -> str:
    """A URL as it is; a file's content as a data: URL."""
    if place.startswith(("http://", "https://", "data:")):
        return place
    try:
        data = Path(place).read_bytes()
    except OSError as error:
        raise ConfigError(f"--ref-audio {place}: {error.strerror}") from None
    kind = mimetypes.guess_type(place)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def with_voice(endpoint: Endpoint, body: JsonObject) -> JsonObject:
    """The body, with the first voice that the server lists for its model if it names none and brings none."""
    if {"voice", "speaker", "ref_audio", "speaker_embedding"} & body.keys():
        return body
    query = urllib.parse.urlencode({"model": body["model"]})
    status, answer = await endpoint.json("GET", f"/v1/audio/voices?{query}")
    voices = answer.get("voices") if status == 200 and isinstance(answer, dict) else None
    if not isinstance(voices, list) or not voices:
        return body
    first = voices[0]
    return body | {"voice": (first.get("name") or first.get("id")) if isinstance(first, dict) else first}


async def refusal(reply: HttpReply) -> str:
    """The message of an answer that is not 200."""
    data = await reply.read()
    with contextlib.suppress(ValueError):
        return error_message(json.loads(data), reply.status)
    return f"HTTP {reply.status}"


class Sink:
    """File for the audio, which is made with the first bytes, or stdout."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._file: BinaryIO | None = None
        self.head = b""
        """The first bytes: a wav's header."""
        self.n_bytes = 0

    def write(self, data: bytes) -> None:
        """Raises OSError."""
        if self._file is None:
            self._file = sys.stdout.buffer if self._out == "-" else Path(self._out).open("wb")  # noqa: SIM115
        self.head += data[: WAV_HEADER - len(self.head)]
        self._file.write(data)
        self._file.flush()
        self.n_bytes += len(data)

    def audio_s(self) -> float | None:
        """Seconds of a wav; None for what only a decoder can tell."""
        n_samples = self.n_bytes - WAV_HEADER
        if self.head[:4] != b"RIFF" or n_samples < 0:
            return None
        return n_samples / max(1, int.from_bytes(self.head[28:32], "little"))

    def close(self) -> None:
        """The header of a stream does not know its sizes: that of a file is set right.

        May be called again. Raises OSError.
        """
        if self._file is None or self._file.closed or self._out == "-":
            return
        if self._file.seekable() and self.head[:4] == b"RIFF" and self.head[36:40] == b"data":
            for at in (4, 40):
                self._file.seek(at)
                self._file.write((self.n_bytes - at - 4).to_bytes(4, "little"))
        self._file.close()


async def speak(endpoint: Endpoint, body: JsonObject, sink: Sink) -> str:
    """Asks and writes; returns the line under it. Raises EndpointError, OSError."""
    begin = time.perf_counter()
    reply = await endpoint.open("POST", PATH, body)
    if reply.status != 200:
        raise EndpointError(await refusal(reply))
    first_s = None
    async with contextlib.aclosing(reply.pieces()) as pieces:
        async for arrival, data in pieces:
            sink.write(data)
            if first_s is None and sink.n_bytes > WAV_HEADER:
                first_s = arrival - begin
    if sink.n_bytes <= (WAV_HEADER if sink.head[:4] == b"RIFF" else 0):
        raise EndpointError("the answer has no audio")
    seconds, audio_s = time.perf_counter() - begin, sink.audio_s()
    parts = [f"in {seconds:.2f} s"]
    if "stream_format" in body and first_s is not None:
        parts.append(f"first after {first_s:.2f} s")
    if audio_s:
        parts = [f"{audio_s:.2f} s of audio", *parts, f"RTF {seconds / audio_s:.2f}"]
    return " · ".join(parts)


async def _say(arguments: argparse.Namespace, server_arguments: list[str], body: JsonObject, sink: Sink) -> str:
    with own_server(arguments, server_arguments) as server:
        endpoint = await reached(arguments, server)
        body = {"model": await asked_model(arguments, endpoint, speaks=True)} | body
        return await speak(endpoint, await with_voice(endpoint, body), sink)


def _format(arguments: argparse.Namespace) -> str:
    """Returns the format by --format, else by the name of the file; what goes into a pipe is wav."""
    if arguments.format:
        return str(arguments.format)
    if arguments.out == "-":
        return "wav"
    suffix = Path(arguments.out).suffix.lower()
    if suffix not in SUFFIXES:
        known = " ".join(SUFFIXES)
        raise ConfigError(f"--out {arguments.out}: no known format. Use one of {known}, or --format.")
    return SUFFIXES[suffix]


def say(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command. 130: Ctrl-C, what came is kept. Raises ConfigError, EndpointError, ServerFailed."""
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    if not text.strip():
        raise ConfigError("there is nothing to say")
    if arguments.out == "-" and sys.stdout.isatty():
        raise ConfigError("--out -: pipe it into a player, such as: deltic say TEXT --out - | aplay")
    format = _format(arguments)
    body = {"input": text, "response_format": format} | fields(arguments)
    if format in ("wav", "pcm") and "speed" not in body:
        body["stream_format"] = "audio"
    sink = Sink(arguments.out)
    try:
        summary = asyncio.run(_say(arguments, server_arguments, body, sink))
        sink.close()
    except KeyboardInterrupt:
        if sink.n_bytes:
            print(f"deltic: stopped; {arguments.out} has what came until then", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone
        raise
    except OSError as error:
        print(f"deltic: cannot write {arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(OSError):  # it is said
            sink.close()
    print(summary if arguments.out == "-" else f"{arguments.out}: {summary}", file=sys.stderr)
    return 0
