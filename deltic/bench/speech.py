"""`deltic bench speech`: what a client hears of a /v1/audio/speech endpoint, by streams at once or by arrival
rate.

Each point is warmed up and then measured: time to first audio, real-time factor, seconds of audio a second,
and by how much a player that begins with the first bytes would have run dry. Audio is PCM, streamed as raw
bytes (or as events, if --extra asks for them). Prints a table, writes JSON with every request's raw row and a
PNG, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

import msgspec
from rich.console import Console
from rich.table import Table

from deltic.bench.gauges import QUIET_S, in_use, settled
from deltic.bench.load import WORDS, percentile
from deltic.bench.provenance import code, machine, now
from deltic.bench.sweep import Work, measure_all, name_of, numbers, plot, points, report, run
from deltic.commands.endpoint import Endpoint, EndpointError, HttpReply, asked_model, error_message
from deltic.commands.say import PATH, fields, refusal, with_voice
from deltic.config import ConfigError
from deltic.json_types import JsonObject

RATE = 24000
"""Samples a second, two bytes each, unless the request says otherwise."""

FRAME_S = 0.08
DUMMY_FRAMES = 100
"""Frames of an utterance of random weights, unless --max-new-tokens says otherwise: they hardly ever end by
themselves.
"""

CONTINUOUS_S = 0.1
"""A stream that was never later than this was continuous."""

NOTE = (
    "times are the client's, from the sending of the request. TTFA: first bytes of audio; RTF: whole time / audio; underrun: the most "
    f"that a piece came too late for a player which began with the first; not late: streams with at most {CONTINUOUS_S:g} s of it"
)


@dataclass
class Heard:
    """Sample of a request as it was heard from outside. Times in seconds; `start_s` since the measurement
    began.
    """

    start_s: float
    n_characters: int = 0
    ttfa_s: float | None = None
    e2e_s: float = 0.0
    audio_s: float = 0.0
    underrun_s: float = 0.0
    n_pieces: int = 0
    is_cancelled: bool = False
    """The client left on purpose before the end."""
    error: str | None = None

    def hear(self, at_s: float, n_bytes: int, rate: int) -> None:
        """Takes a piece that came at_s after the request was sent."""
        if self.ttfa_s is None:
            self.ttfa_s = at_s
        self.underrun_s = max(self.underrun_s, at_s - self.ttfa_s - self.audio_s)
        self.audio_s += n_bytes / (2 * rate)
        self.n_pieces += 1


async def audio(reply: HttpReply) -> AsyncGenerator[tuple[float, bytes], None]:
    """(arrival, PCM bytes) of a raw body or of events.

    Raises EndpointError for an error event and for a missing end.
    """
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        async with contextlib.aclosing(reply.pieces()) as pieces:
            async for arrival, data in pieces:
                yield arrival, data
        return
    is_done = False
    async with contextlib.aclosing(reply.events()) as events:
        async for arrival, payload in events:
            event = msgspec.json.decode(payload)
            if event.get("error"):
                raise EndpointError(error_message(event, 200))
            is_done = event.get("type") == "speech.audio.done"
            if event.get("audio"):
                yield arrival, base64.b64decode(event["audio"])
    if not is_done:
        raise EndpointError("the stream ended without speech.audio.done")


async def measure(
    endpoint: Endpoint, body: JsonObject, zero: float, leave_s: float | None = None, frames: int = 0
) -> Heard:
    """Sends one request and times its audio. Failures end up in `Heard.error`. leave_s: goes away then.
    frames: how long it is to be, where that is known.
    """
    begin = time.perf_counter()
    heard = Heard(begin - zero, len(body["input"]))
    rate = body.get("sample_rate", RATE)
    try:
        async with asyncio.timeout(leave_s):
            reply = await endpoint.open("POST", PATH, body)
            if reply.status != 200:
                heard.error = await refusal(reply)
                return heard
            async with contextlib.aclosing(audio(reply)) as pieces:
                async for arrival, data in pieces:
                    heard.hear(arrival - begin, len(data), rate)
        if not heard.n_pieces:
            heard.error = "the answer has no audio"
        elif frames and abs(heard.audio_s / FRAME_S - frames) > 0.01:
            heard.error = f"{frames} frames were to come, and {heard.audio_s / FRAME_S:g} did"
    except TimeoutError:
        heard.is_cancelled = True
    except (EndpointError, ValueError) as error:
        heard.error = str(error)
    heard.e2e_s = time.perf_counter() - begin
    return heard


class Texts:
    """Random sentences of `lengths` words each, a length drawn for each; the same for the same seed."""

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        self._lengths = lengths
        self._random = random.Random(seed)

    def text(self) -> str:
        """The next text."""
        words = self._random.choices(WORDS, k=self._random.choice(self._lengths))
        return " ".join(words).capitalize() + "."


class Leaver:
    """Sends requests, of which a part is left at a random moment before its likely end."""

    def __init__(self, endpoint: Endpoint, part: float, seed: int, frames: int = 0) -> None:
        self._endpoint, self._frames = endpoint, frames
        self._part = part
        self._random = random.Random(seed + 2)
        self._e2e_s: list[float] = []

    async def send(self, body: JsonObject, zero: float) -> Heard:
        """A sweep's `send`."""
        leave_s = None
        if self._e2e_s and self._random.random() < self._part:
            leave_s = self._random.uniform(0.0, mean(self._e2e_s[-50:]))
        heard = await measure(self._endpoint, body, zero, leave_s, self._frames)
        if heard.error is None and not heard.is_cancelled:
            self._e2e_s.append(heard.e2e_s)
        return heard


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> dict[str, float | None]:
    """Mean and percentiles."""
    statistics = {"mean": mean(values) if values else None} | {f"p{q}": percentile(values, q) for q in (50, 95, 99)}
    return {name: None if value is None else round(value * scale, digits) for name, value in statistics.items()}


def summary(samples: Sequence[Heard], seconds: float) -> JsonObject:
    """The row of a table: times of the requests that came to their end, rates over the whole time.

    Audio that was heard before a client left counts for the rate.
    """
    good = [s for s in samples if s.error is None and not s.is_cancelled]
    audio_s = sum(s.audio_s for s in samples if s.error is None)
    return {
        "requests": len(samples),
        "errors": sum(s.error is not None for s in samples),
        "cancelled": sum(s.is_cancelled for s in samples),
        "seconds": round(seconds, 3),
        "ttfa_ms": spread([s.ttfa_s for s in good if s.ttfa_s is not None], 1e3, 1),
        "e2e_s": spread([s.e2e_s for s in good]),
        "rtf": spread([s.e2e_s / s.audio_s for s in good if s.audio_s]),
        "underrun_ms": spread([s.underrun_s for s in good], 1e3, 1),
        "continuous": round(mean(s.underrun_s <= CONTINUOUS_S for s in good), 4) if good else None,
        "audio_s_per_s": round(audio_s / seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "mean_audio_s": round(mean(s.audio_s for s in good), 3) if good else None,
        "mean_characters": round(mean(s.n_characters for s in good), 1) if good else None,
    }


def raw(heard: Heard) -> JsonObject:
    """A request's row in the result file."""
    return {name: round(v, 5) if isinstance(v, float) else v for name, v in asdict(heard).items()}


def short(value: float) -> str:
    """Three digits, or those before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def table(rows: list[JsonObject], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    columns = (
        "",
        "TTFA ms\nmean p50 p95 p99",
        "E2E s\nmean p50 p95 p99",
        "RTF\nmean p50 p95 p99",
        "underrun ms\nmean p50 p95 p99",
        "not\nlate",
        "audio\ns/s",
        "s\neach",
        "sent,\nerrors,\nleft",
    )
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            " ".join("-" if v is None else short(v) for v in row[name].values())
            for name in ("ttfa_ms", "e2e_s", "rtf", "underrun_ms")
        ]
        ones = [
            "-" if v is None else form.format(v)
            for v, form in (
                (row["continuous"], "{:.0%}"),
                (row["audio_s_per_s"], "{:.2f}"),
                (row["mean_audio_s"], "{:.2f}"),
            )
        ]
        out.add_row(
            name_of(row["mode"], row["value"]), *cells, *ones, f"{row['requests']} {row['errors']} {row['cancelled']}"
        )
    return out


async def left_behind(endpoint: Endpoint) -> dict[str, float]:
    """Returns what a Deltic server has not given back after the last request; another does not tell."""
    values = await settled(endpoint, QUIET_S)
    return in_use(values) if "sequences_running" in values else {}


async def sweep(endpoint: Endpoint, arguments: argparse.Namespace, console: Console) -> JsonObject:
    """Measures every point. Raises EndpointError when a first small request fails."""
    model = await asked_model(arguments, endpoint, speaks=True)
    body: JsonObject = {"model": model, "response_format": "pcm"}
    if not arguments.whole:
        body["stream_format"] = "audio"
    body = await with_voice(endpoint, body | fields(arguments, ("stream", "stream_format")))
    first = await measure(endpoint, body | {"input": "Hello."}, 0.0)
    if first.error:
        raise EndpointError(f"{endpoint.url}: a first small request failed: {first.error}")
    frames = arguments.max_new_tokens - 1 if "dummy" in arguments else 0
    texts = Texts(numbers(arguments.words, "--words", int), arguments.load_seed)
    status, version = await endpoint.json("GET", "/version")
    work = Work(
        send=Leaver(endpoint, arguments.cancel, arguments.load_seed, frames).send,
        body=lambda: body | {"input": texts.text()},
        warm_body=lambda: body | {"input": texts.text()},
        summary=summary,
        raw=raw,
        seed=arguments.load_seed,
    )
    rows = await measure_all(work, arguments, console)
    return {
        "load": {name: v if len(str(v)) < 200 else f"{str(v)[:40]}..." for name, v in body.items()}
        | {"words": arguments.words, "seed": arguments.load_seed, "cancel": arguments.cancel},
        "warmup": arguments.warmup,
        "server": version if status == 200 else None,
        "in_use": await left_behind(endpoint) if arguments.cancel else {},
        "rows": rows,
    }


def bench(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command.

    Exit status 1 when the server failed, a request did, or memory of a cancelled one was not given back.
    """
    points(arguments)  # refuses malformed settings before anything starts
    numbers(arguments.words, "--words", int)
    fields(arguments, ("stream", "stream_format"))
    if not 0.0 <= arguments.cancel < 1.0:
        raise ConfigError(f"--cancel {arguments.cancel:g}: must be a part of the requests, from 0 to below 1")
    if "dummy" in arguments and arguments.max_new_tokens is None:
        arguments.max_new_tokens = DUMMY_FRAMES + 1
    result = run(arguments, server_arguments, sweep)
    if result is None:
        return 1
    load = result["load"]
    label = arguments.label or load["model"]
    head = {"bench": "speech", "label": label, "date": now().isoformat(), "machine": machine(), "client": code()}
    texts = f"texts of {load['words']} words, {'whole' if arguments.whole else 'streamed'}"
    title = ", ".join([f"{label}: {texts}", *(str(load[name]) for name in ("voice", "language") if name in load)])
    rows = table(result["rows"], title)
    draw = plot if arguments.plot else None
    report(head | {"title": title} | result, rows, arguments.out, draw, note=NOTE)
    if result["in_use"]:
        print(f"not given back after {QUIET_S:.0f} s: {result['in_use']}")
    return 1 if result["in_use"] or any(row["errors"] for row in result["rows"]) else 0
