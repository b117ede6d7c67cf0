"""An engine's client without an engine, a byte tokenizer, and the server on a loopback port: for tests of `server/`.

The fake answers with token ids that the test chose, a token a tick, so that what a client sees is known in advance.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import json
import logging
import socket
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from deltic.config import EngineConfig, ServerConfig
from deltic.engine.events import AdapterLoaded, CacheLocated, CacheReport, Loading, Stats
from deltic.engine.messages import EngineInfo, Output, PromptLogprobs, Request, TokenLogprob
from deltic.host.client import Deliver, EngineUnavailable, QueueFull, RequestStream, State
from deltic.server.app import create_app
from deltic.server.chat.template import ChatTemplate
from deltic.server.connections import Connections, HttpServer
from deltic.server.service import Server, Service
from deltic.text import PRE_TOKENIZERS, Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""The shape of the family's templates, small. Settings: enable_thinking, off unless true."""


PICTURES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_PAD, VIDEO_PAD = 267, 268
PICTURE_TEMPLATE = """
{%- macro shown(content) %}
    {%- if content is string %}{{ content }}{% else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}""" + TEMPLATE.replace("'\\n' + message.content", "'\\n' + shown(message.content)")
"""As the family's models that see have it."""


GAPS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def byte_tokenizer(sees: bool = False, fills: bool = False) -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 to 258 the special tokens, 259 to 264 the added ones, with `sees` 265 to 268
    those around pictures, and with `fills` 265 to 270 those around gaps. Text is cut as the family's is."""
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZERS[False]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in ADDED])
    if sees:
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in PICTURES])
    if fills:  # not special: then a text that has one in letters must be cut
        backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in GAPS])
    return Tokenizer(backend)


def byte_alphabet() -> dict[str, int]:
    """Character to byte, as the library's byte-level form has it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


END = 258
"""`<|im_end|>`, which ends an answer."""


def saying(text: str, end: bool = True) -> Callable[[Request, int], list[int]]:
    """An `answer` of the fake below."""
    return lambda request, index: byte_tokenizer().encode(text) + [END] * end


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that has names; each must be well-formed to the letter, and say its name in its data, too."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


class FakeEngineClient:
    """EngineClient's surface. `answer` says what a request's sequence i generates; the last id should be END.

    With `hold` set nothing is generated until it is cleared.
    """

    def __init__(self, answer: Callable[[Request, int], Sequence[int]] | None = None, **info: Any) -> None:
        self.answer = answer or (lambda request, index: [*b"Hello", END])
        self.score: Callable[[list[int], int], float] = lambda ids, id: -1.0
        """The log-probability of an id behind others."""
        self.config = EngineConfig()
        self.state: State = "ready"
        self.info: EngineInfo | None = EngineInfo(
            **{
                "model_name": "fake", "vocab_size": 272, "eos_token_ids": [END], "max_model_len": 1024,
                "max_num_seqs": 16, "max_step_tokens": 512, "n_pages": 64, "n_slots": 16, "device": "none",
                "kernels": "none",
            } | info
        )  # fmt: skip
        self.stats = Stats(n_pages=64, n_slots=16)
        self.recent_steps: list[tuple[float, float, int, int, int]] = []
        self.loading: Loading | None = None
        self.failure: str | None = None
        self.n_restarts = 0
        self.requests: list[Request] = []
        self.aborts: list[tuple[str, int | None]] = []
        self.token_s = 0.0
        self.batch = 1
        """Tokens in one output."""
        self.max_open: int | None = None
        """Requests beyond it are refused as they are submitted."""
        self.max_queue = 256
        self.hold = False
        self.cached_tokens = 0
        """Of each prompt."""
        checkpoint = {
            "id": 0,
            "above": None,
            "tokens": 64,
            "kind": "end",
            "tiers": ["device"],
            "hits": 2,
            "priority": 0.0,
        }
        self.cache: dict[str, Any] = {
            "enabled": True,
            "tiers": {"device": {"pages": 1, "checkpoints": 1}, "host": {"bytes_total": 0}, "disk": {"bytes_total": 0}},
            "counters": {"n_checkpoints_evicted": 3},
            "checkpoints": [checkpoint],
        }
        """What it tells of its prefix cache until that is reset."""
        self.located = CacheLocated("")
        """What it has of any prompt, in files."""
        self.cache_s = 0.0
        """How long it takes to tell."""
        self.die_after: int | None = None
        """Tokens of a sequence after which the engine dies."""
        self.on_ready: Callable[[EngineInfo], None] | None = None
        self.contents: dict[str, bytes] = {}
        """Keys of the adapters there are on its disk, by path."""
        self.adapters: Counter[bytes] = Counter(self.info.adapters.values())  # type: ignore[union-attr]
        """How often each key was loaded, and not dropped."""
        self.streams: dict[str, RequestStream] = {}
        self.n_asked: dict[str, int] = {}
        """Sequences of each request, by its id."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def n_open(self) -> int:
        return sum(stream.n_open for stream in self.streams.values())

    async def start(self) -> None: ...

    async def ready(self) -> EngineInfo:
        assert self.info
        return self.info

    async def stop(self, drain_s: float = 0.0) -> None:
        self.state = "stopped"
        for stream in list(self.streams.values()):
            stream.end("abort", "the server is shutting down")

    def check_room(self, n: int, owner: str = "", spare: int = 0) -> EngineInfo:
        if self.state != "ready" or self.info is None:
            raise EngineUnavailable(self.why_unavailable())
        if self.n_open + n > self.info.max_num_seqs + self.max_queue - spare:
            raise QueueFull(self.n_open, 1)
        if self.max_open is not None and self.n_open >= self.max_open:
            raise QueueFull(self.n_open, 7)
        return self.info

    def submit(self, request: Request, deliver: Deliver) -> None:
        self.check_room(request.params.n)
        assert not request.adapter or self.adapters[request.adapter], "it has no such adapter"
        if request.pictures:  # they are let go when they were sent
            request = msgspec.structs.replace(request, pictures=[*request.pictures])
        self.requests.append(request)
        stream = self.streams[request.id] = RequestStream(request, deliver)
        self.n_asked[request.id] = request.params.n
        for index in range(request.params.n):
            task = asyncio.get_running_loop().create_task(self._run(request, index, stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def inspect_cache(self, reset: bool = False) -> CacheReport:
        if self.state != "ready":
            raise EngineUnavailable(self.why_unavailable())
        await asyncio.sleep(self.cache_s)
        if reset:
            self.cache = self.cache | {"checkpoints": []}
        return CacheReport(self.cache)

    async def locate_cache(self, request: Request) -> CacheLocated:
        if self.state != "ready":
            raise EngineUnavailable(self.why_unavailable())
        self.requests.append(request)
        return msgspec.structs.replace(self.located, id=request.id)

    async def load_adapter(self, path: str) -> AdapterLoaded:
        if self.state != "ready":
            raise EngineUnavailable(self.why_unavailable())
        while self.hold:
            await asyncio.sleep(0.002)
        if path not in self.contents:
            return AdapterLoaded(path, error=f"{path}: no such adapter")
        most = self.info.max_loras if self.info else 0
        if self.contents[path] not in self.adapters and len(self.adapters) >= most:
            return AdapterLoaded(path, error=f"{path}: {most} adapters are loaded; start with more --max-loras")
        self.adapters[self.contents[path]] += 1
        return AdapterLoaded(path, self.contents[path], rank=8, n_bytes=1000)

    def drop_adapter(self, key: bytes) -> None:
        assert self.adapters[key], "dropped more often than it was loaded"
        self.adapters -= Counter([key])

    def restart(self) -> None:
        """Another process is ready, which has the adapters of its info."""
        assert self.info and self.on_ready
        self.adapters = Counter(self.info.adapters.values())
        self.state = "ready"
        self.n_restarts += 1
        self.on_ready(self.info)

    def why_unavailable(self) -> str:
        return "the server is shutting down" if self.state == "stopped" else f"the engine is {self.state}"

    def abort(self, request_id: str, index: int | None = None, if_waiting: bool = False) -> None:
        if if_waiting and not self.hold:
            return  # all have their place
        self.aborts.append((request_id, index))
        if stream := self.streams.get(request_id):
            for i in range(self.n_asked[request_id]) if index is None else [index]:
                stream.push(Output(request_id, i, finish_reason="abort"))
            stream.flush()

    async def _run(self, request: Request, index: int, stream: RequestStream) -> None:
        params = request.params
        if request.reads_hidden:
            await asyncio.sleep(self.token_s)
            vector = array("f", [float(i) for question in request.questions for i, _ in enumerate(question.options)])
            if request.pooling is not None:
                vector = array("f", [len(request.prompt_ids), *request.prompt_ids[:1]] * 4)[
                    : request.pooling.n_dimensions
                ]
            stream.push(Output(request.id, index, finish_reason="length", vector=vector.tobytes()))
            stream.flush()
            return
        if request.branches:
            while self.hold:
                await asyncio.sleep(0.002)
            branch = request.branches[index]
            output = Output(request.id, index, finish_reason="length", prompt_logprobs=PromptLogprobs())
            output.cached_tokens = self.cached_tokens if not index else len(request.prompt_ids) - 1
            before = [[*request.prompt_ids, *branch.ids[:n]] for n, _ in branch.scored]
            values = [self.score(ids, id) for ids, (_, id) in zip(before, branch.scored, strict=True)]
            entries = [TokenLogprob(id, value) for (_, id), value in zip(branch.scored, values, strict=True)]
            output.prompt_logprobs.extend(entries)
            stream.push(output)
            stream.flush()
            return
        ids = list(self.answer(request, index))
        ends = self.info.eos_token_ids if self.info else [END]
        ended_by_token = len(ids) <= params.max_tokens and ids[-1] in (*ends, *params.stop_token_ids)
        ids = ids[: params.max_tokens]
        await asyncio.sleep(self.token_s)
        for n_read in (0, len(request.prompt_ids) // 2, len(request.prompt_ids)) if request.wants_progress else ():
            n_cached = self.cached_tokens
            stream.push(Output(request.id, index, cached_tokens=n_cached, n_read=max(n_cached, n_read)))
            stream.flush()
        for start in range(0, len(ids), self.batch):
            while self.hold:
                await asyncio.sleep(0.002)
            if self.die_after is not None and start >= self.die_after:
                self.state = "restarting"
                stream.end("error", "the engine process ended (killed by SIGKILL). Send the request again.")
                return
            new = ids[start : start + self.batch]
            last = start + self.batch >= len(ids)
            output = Output(request.id, index, new)
            if start == 0 and index == 0:
                output.cached_tokens = self.cached_tokens
            if params.logprobs is not None:
                output.logprobs = [self._logprob(i, params.logprobs) for i in new]
            if start == 0 and index == 0 and params.prompt_logprobs is not None:
                rest = [self._logprob(i, params.prompt_logprobs) for i in request.prompt_ids[1:]]
                output.prompt_logprobs = PromptLogprobs()
                output.prompt_logprobs.extend([None, *rest])
            if last:
                output.finish_reason = "stop" if ended_by_token else "length"
                output.stop_token_id = ids[-1] if ended_by_token else None
            stream.push(output)
            stream.flush()
            await asyncio.sleep(self.token_s)

    @staticmethod
    def _logprob(token_id: int, k: int) -> TokenLogprob:
        return TokenLogprob(token_id, -0.5, [(token_id, -0.5), (65, -2.0), (66, float("-inf"))][:k])


@contextmanager
def server_log(formatter: logging.Formatter | None) -> Iterator[io.StringIO]:
    """What the server's log says meanwhile."""
    written = io.StringIO()
    destination = logging.StreamHandler(written)
    destination.setFormatter(formatter)
    log = logging.getLogger("deltic.server")
    log.addHandler(destination)
    level = log.level
    log.setLevel("INFO")
    yield written
    log.removeHandler(destination)
    log.setLevel(level)


def make_app(client: FakeEngineClient, template: str | None = TEMPLATE, **config: Any) -> Any:
    """The application over a fake engine and the byte tokenizer, as model "fake"."""
    server = Server(ServerConfig(**config))
    server.add(service_of(server, client, "fake", template))
    return create_app(server)


def service_of(
    server: Server, client: FakeEngineClient, name: str, template: str | None = TEMPLATE, **more: Any
) -> Service:
    """A model that writes, over a fake engine. more: fields of its Service."""
    if (tokenizer := more.pop("tokenizer", None)) is not None:
        assert template is not None
        return Service.of(server, client, tokenizer, ChatTemplate({"default": template}, tokenizer), name, **more)  # type: ignore[arg-type]
    sees = client.info is not None and client.info.pictures is not None
    chat = None if template is None else copy.copy(_template(template, sees))  # each has its own defaults
    return Service.of(server, client, byte_tokenizer(sees), chat, name, **more)  # type: ignore[arg-type]


def n_held(app: Any) -> int:
    """How many large bodies the application holds while something else is waited for."""
    return sum(map(len, app.state.server.worker._bodies.values()))


@functools.cache
def _template(source: str, sees: bool) -> ChatTemplate:
    """Compiled and tried once, as at a start: that takes as long as a test."""
    template = ChatTemplate({"default": source}, byte_tokenizer(sees))
    template.taken  # noqa: B018
    return template


@contextmanager
def served(app: Any, ws: Any = "none", client_timeout_s: float = 20.0, **settings: Any) -> Iterator[str]:
    """Runs the application in a thread, behind the server's own HTTP connections; gives its URL. settings: of uvicorn.Config."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # who connects before the server runs waits
    closed = app.state.server.metrics.closed if hasattr(app, "state") else Counter()  # of any other application
    connections = Connections(client_timeout_s, closed)
    server = HttpServer(app, connections, ws=ws, **settings)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
