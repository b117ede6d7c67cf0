"""The load: prompts of a stated length, one measured request, and the numbers drawn from many.

Knows the OpenAI API and nothing of any engine. What a server does not accept (`ignore_eos`, `stream_options`,
`max_tokens`) is found out before the measurement, so that peers are measured by the same command.
"""

from __future__ import annotations

import base64
import io
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import msgspec
import numpy as np

from deltic.bench.provenance import fault_of
from deltic.commands.endpoint import DONE, Endpoint, EndpointError, error_message
from deltic.json_types import JsonObject

_TEXT = """
river stone window garden yellow market winter letter bridge silver morning forest candle orange thunder
paper island mirror summer copper kitchen shadow planet ribbon castle meadow engine violin harbor pepper
button valley marble rocket blanket lantern feather circle basket anchor curtain pocket dragon saddle walnut
carpet hammer pencil tunnel velvet wagon spider turtle pigeon rabbit monkey tiger salmon badger falcon otter
walks carries finds opens paints follows gathers measures answers borrows climbs counts dances draws drinks
quick gentle hollow broken silent narrow heavy simple bright early bitter clever distant eager famous golden
under beside across before after between around toward without because although perhaps rarely always never
north south seven eleven twenty hundred second third doctor farmer sailor teacher singer baker painter
captain
"""
WORDS = _TEXT.split()

ITL = (
    "ITL is the time between events that brought text: several tokens may come in one event, "
    "and a token that is only part of a character makes none"
)
"""Definition of the gaps, for whoever reads the table or the file."""

Limit = Literal["max_tokens", "max_completion_tokens"]
LIMITS: tuple[Limit, ...] = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Workload:
    """Load that is put on the server. Lengths in tokens of the server's tokenizer."""

    model: str
    prompt_tokens: int = 128
    output_tokens: int = 128
    shared_prefix_tokens: int = 0
    temperature: float = 1.0
    kind: Literal["completions", "chat"] = "completions"
    seed: int = 0
    images: int = 0
    """Pictures before the text of each prompt (chat); their tokens are not among prompt_tokens."""
    image_size: str = "1024x1024"
    """Width and height in pixels."""
    same_images: bool = False
    """True if all prompts show the same images."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"


@dataclass(frozen=True)
class Dialect:
    """Request fields that not every server has, as far as the server understood them."""

    ignore_eos: bool = True
    include_usage: bool = True
    limit: Limit = "max_tokens"

    def body(self, load: Workload, text: str, n_output: int, images: Sequence[str] = ()) -> JsonObject:
        """A streamed request. images: URLs."""
        body: JsonObject = {"model": load.model, "stream": True, "temperature": load.temperature}
        body[self.limit] = n_output
        if load.kind == "chat":
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
            content = [*parts, {"type": "text", "text": text}] if images else text
            body["messages"] = [{"role": "user", "content": content}]
        else:
            body["prompt"] = text
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass
class Sample:
    """Sample of a request as it was seen from outside. Times in seconds; `start_s` since the measurement
    began.

    `e2e_s` ends with the stream's last event, `[DONE]`, or with the failure.
    """

    start_s: float
    e2e_s: float = 0.0
    ttft_s: float | None = None
    itl_ms: list[float] = field(default_factory=list)
    """Gaps between events that brought text (see ITL)."""
    n_prompt: int = 0
    n_output: int = 0
    n_cached: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first one."""
        if self.ttft_s is None or self.n_output < 2 or self.e2e_s <= self.ttft_s:
            return None
        return (self.n_output - 1) / (self.e2e_s - self.ttft_s)


async def measure(endpoint: Endpoint, load: Workload, body: JsonObject, zero: float) -> Sample:
    """Sends one streamed request and times its events. Failures end up in `Sample.error`."""
    begin = time.perf_counter()
    sample = Sample(start_s=begin - zero)
    last = begin
    end: float | None = None
    n_events = 0
    try:
        reply = await endpoint.open("POST", load.path, body)
        if reply.status != 200:
            data = await reply.read()
            try:
                sample.error = error_message(msgspec.json.decode(data), reply.status)
            except msgspec.DecodeError:
                sample.error = f"HTTP {reply.status}"
            return sample
        async for arrival, payload in reply.events():
            if payload == DONE:
                end = arrival
                continue
            event = msgspec.json.decode(payload)
            if event.get("error"):
                sample.error = error_message(event, 200)
            if usage := event.get("usage"):
                sample.n_prompt = usage.get("prompt_tokens") or 0
                sample.n_output = usage.get("completion_tokens") or 0
                sample.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in event.get("choices") or ():
                sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
                if _has_text(choice) or (choice.get("finish_reason") and n_events == 0):
                    n_events += 1
                    if sample.ttft_s is None:
                        sample.ttft_s = arrival - begin
                    else:
                        sample.itl_ms.append(round((arrival - last) * 1e3, 2))
                    last = arrival
        if end is None and sample.error is None:
            sample.error = "the stream ended without [DONE]"
        if body.get("ignore_eos") and sample.error is None:
            asked = next(body[limit] for limit in LIMITS if limit in body)
            sample.error = fault_of(sample.finish_reason, sample.n_output, asked) or None
    except (EndpointError, msgspec.DecodeError) as error:
        sample.error = str(error)
    sample.e2e_s = (end or time.perf_counter()) - begin
    sample.n_output = sample.n_output or n_events
    return sample


def _has_text(choice: JsonObject) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


async def find_dialect(endpoint: Endpoint, load: Workload) -> Dialect:
    """The richest dialect the server answers 200 to. Raises EndpointError with its last complaint."""
    complaint = ""
    for include_usage in (True, False):
        for ignore_eos in (True, False):
            for limit in LIMITS:
                dialect = Dialect(ignore_eos, include_usage, limit)
                sample = await measure(endpoint, load, dialect.body(load, "hello", 1), 0.0)
                if sample.error is None:
                    return dialect
                complaint = sample.error
                if "HTTP 400" not in complaint and "HTTP 422" not in complaint:
                    raise EndpointError(f"{endpoint.url}: a first small request failed: {complaint}")
    raise EndpointError(f"{endpoint.url}: a first small request failed: {complaint}")


class Prompts:
    """Random words that make prompts of the wanted number of tokens; no two alike after the shared prefix."""

    def __init__(self, load: Workload) -> None:
        self._load = load
        self._random = random.Random(load.seed)
        self._tokens_per_word = 1.3
        self._overhead = 0.0
        self._prefix = ""
        self._shown: list[str] = []

    async def calibrate(self, endpoint: Endpoint) -> None:
        """Learns tokens per word and the template's own tokens from the usage the server reports.

        Raises EndpointError when the server refuses a prompt of the wanted length.
        """
        load = self._load
        n_long = max(32, min(load.prompt_tokens // 2, 512))
        points = []
        for n_words in (8, 8, n_long, n_long):
            points.append((n_words, await self._count(endpoint, self._words(n_words))))
        if not all(n_tokens for _, n_tokens in points):
            return  # no usage in this server's answers: the guess stays
        short, long = (sum(n for _, n in pair) / 2 for pair in (points[:2], points[2:]))
        self._tokens_per_word = max(0.1, (long - short) / (n_long - 8))
        self._overhead = max(0.0, short - 8 * self._tokens_per_word)
        if load.shared_prefix_tokens:
            self._prefix = self._words(self._n_words(load.shared_prefix_tokens)) + " "
        # The fit is off by its few random words: three whole prompts correct it.
        own = load.prompt_tokens - self._overhead
        whole = sum([await self._count(endpoint, self.text()) for _ in range(3)]) / 3
        self._tokens_per_word *= max(0.5, (whole - self._overhead) / max(1.0, own))

    async def _count(self, endpoint: Endpoint, text: str) -> int:
        load = self._load
        body: JsonObject = {"model": load.model, "max_tokens": 1}
        body |= {"messages": [{"role": "user", "content": text}]} if load.kind == "chat" else {"prompt": text}
        status, answer = await endpoint.json("POST", load.path, body)
        if status != 200:
            raise EndpointError(
                f"{endpoint.url}: a prompt of the wanted length failed: {error_message(answer, status)}"
            )
        return int((answer.get("usage") or {}).get("prompt_tokens") or 0)

    def _n_words(self, n_tokens: float) -> int:
        return max(1, round(n_tokens / self._tokens_per_word))

    def _words(self, n_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=n_words))

    def text(self) -> str:
        """The next prompt."""
        own = self._load.prompt_tokens - self._load.shared_prefix_tokens - self._overhead
        return self._prefix + self._words(self._n_words(own))

    def images(self) -> list[str]:
        """The pictures of the next prompt, as data URLs: random patches of colour, no two alike."""
        if self._shown and self._load.same_images:
            return self._shown
        self._shown = [self._image() for _ in range(self._load.images)]
        return self._shown

    def _image(self) -> str:
        from PIL import Image

        width, height = sides_of(self._load.image_size)
        small = -(-width // 16), -(-height // 16)
        noise = Image.frombytes("RGB", small, self._random.randbytes(3 * small[0] * small[1]))
        file = io.BytesIO()
        noise.resize((width, height)).save(file, "JPEG", quality=90)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def sides_of(size: str) -> tuple[int, int]:
    """Width and height of WxH. Raises ValueError."""
    width, x, height = size.partition("x")
    if not x or not width.isdigit() or not height.isdigit() or not int(width) * int(height):
        raise ValueError(f"--image-size {size}: expected WxH in pixels, as 1024x768")
    return int(width), int(height)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, 0 to 100, linear between ranks; None without values."""
    return float(np.percentile(values, q)) if values else None


def _spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    points = {f"p{q}": percentile(values, q) for q in (50, 95, 99)}
    return {name: None if value is None else round(value * scale, 3) for name, value in points.items()}


def summary(samples: Sequence[Sample], seconds: float) -> JsonObject:
    """The row of a table: percentiles over the requests that succeeded, rates over the whole time."""
    good = [s for s in samples if s.error is None]
    decode = percentile([rate for s in good if (rate := s.decode_tok_s) is not None], 50)
    n_output, n_prompt = (sum(getattr(s, name) for s in good) for name in ("n_output", "n_prompt"))
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "seconds": round(seconds, 3),
        "ttft_ms": _spread([s.ttft_s for s in good if s.ttft_s is not None], 1e3),
        "itl_ms": _spread([gap for s in good for gap in s.itl_ms]),
        "e2e_s": _spread([s.e2e_s for s in good]),
        "decode_tok_s": None if decode is None else round(decode, 2),
        "output_tok_s": round(n_output / seconds, 2),
        "prompt_tok_s": round(n_prompt / seconds, 2),
        "mean_prompt_tokens": round(n_prompt / len(good), 1) if good else None,
        "mean_output_tokens": round(n_output / len(good), 1) if good else None,
        "cached_tokens": sum(s.n_cached for s in good),
    }


def raw(sample: Sample) -> JsonObject:
    """A request's row in the result file."""
    row = asdict(sample)
    for name in ("start_s", "e2e_s", "ttft_s"):
        row[name] = None if row[name] is None else round(row[name], 5)
    return row
