"""Ollama's API, for programs that know no other: /api/chat, /api/generate, and what says which models there
are.

A body becomes a Chat (ollama_protocol.py), or with `raw` a Completion, and goes the way of all;
the answer's updates become lines of JSON here. A line is whole: a tool call is told when its arguments have
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import math
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.config import BUILT_IN
from deltic.engine.messages import EngineInfo
from deltic.host.client import EngineClient, EngineFailed
from deltic.server.api import completions
from deltic.server.api import ollama_protocol as wire
from deltic.server.api.embeddings import check_number, numbers, vector_requests, vectors_of
from deltic.server.chat import answer
from deltic.server.chat.answer import Update
from deltic.server.chat.arguments import given_arguments
from deltic.server.chat.calls import CallDelta
from deltic.server.chat.gap import Filler
from deltic.server.chat.generation import Generation
from deltic.server.chat.parser import Item
from deltic.server.chat.request import context_limit
from deltic.server.errors import ApiError
from deltic.server.limits import TICKET, Ticket, Usage
from deltic.server.local_models import ModelFiles, model_files
from deltic.server.preparation import Preparation, parsed
from deltic.server.service import Server, Service
from deltic.server.transport import BODY, LargeResponse, json_pieces, json_response, read_body, unless_disconnected

LINES = "application/x-ndjson"

LOADING_S = 300.0
"""Seconds that a request waits for a model that loads, as Ollama has it."""

NS = 1e6
"""Nanoseconds of a millisecond."""

_encode = msgspec.json.Encoder().encode

E = TypeVar("E", wire.EmbedRequest, wire.EmbedOneRequest)


async def chat(service: Service, request: Request) -> ASGIApp:
    """POST /api/chat: an answer to a chat, in Ollama's form."""
    return await _answer(service, request, wire.OllamaChatRequest)


async def generate(service: Service, request: Request) -> ASGIApp:
    """POST /api/generate: an answer to a prompt, in Ollama's form."""
    return await _answer(service, request, wire.GenerateRequest)


async def embed(service: Service, request: Request) -> ASGIApp:
    """POST /api/embed: vectors of texts, in Ollama's form."""
    asked, vectors, usage, seconds = await _embedded(service, request, wire.EmbedRequest)
    took = {
        "total_duration": max(1, round(seconds * 1e9)),
        "load_duration": 1,
        "prompt_eval_count": usage.prompt_tokens,
    }
    return LargeResponse({"model": asked.model, "embeddings": map(numbers, vectors)} | took)


async def embed_one(service: Service, request: Request) -> ASGIApp:
    """POST /api/embeddings: the vector of one text, in Ollama's older form."""
    _, (vector,), _, _ = await _embedded(service, request, wire.EmbedOneRequest)
    return json_response(_encode({"embedding": numbers(vector)}))


async def _embedded(service: Service, request: Request, kind: type[E]) -> tuple[E, list[bytes], Usage, float]:
    """The body, the vectors that it asks for, what they took, and how many seconds. Raises ApiError."""
    begun_s = time.monotonic()
    await _loaded(service, request)
    info = service.admit(vectors=True)
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(kind)
        service.check_model(asked.model)
        _keep(service, asked.model, asked.keep_alive)
        if isinstance(asked, wire.EmbedOneRequest):
            given, dimensions, is_cut = [asked.prompt], None, True
        else:
            given = [asked.input] if isinstance(asked.input, str) else asked.input
            check_number(len(given))
            dimensions, is_cut = asked.dimensions, asked.truncate is not False
        requests = await preparation.run(vector_requests, service.tokenizer, info, given, dimensions, is_cut=is_cut)
    vectors, usage = await vectors_of(service, request, requests, info)
    return asked, vectors, usage, time.monotonic() - begun_s


def _keep(service: Service, name: str, keep_alive: str | float | None) -> None:
    """Has a model that comes and goes stay loaded for as long as a request says."""
    on_demand = service.server.on_demand
    if on_demand is not None and keep_alive is not None and (offered := on_demand.called(name)):
        on_demand.keep(offered, wire.seconds_of(keep_alive))


async def _answer(service: Service, request: Request, kind: type[wire.AnswerRequest]) -> ASGIApp:
    on_demand = service.server.on_demand
    if on_demand is not None and asks_to_unload(request.scope[BODY]):
        asked = await parsed(service, request, kind)
        on_demand.keep(await on_demand.find(asked.model), 0.0)
        unloaded = LinesAnswer(asked.model, is_chat=kind is wire.OllamaChatRequest, scored=None)
        return json_response(unloaded.loaded("unload"))
    await _loaded(service, request)
    info = service.admit()
    request_id = request.scope["deltic.answer_id"] = f"ollama-{secrets.token_hex(16)}"
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(kind)
        wire.check(asked)
        service.check_model(asked.model)
        _keep(service, asked.model, asked.keep_alive)
        n_ctx, ticket = (asked.options or wire.Options()).num_ctx, request.scope[TICKET]
        if n_ctx:
            info = msgspec.structs.replace(info, max_model_len=min(info.max_model_len, n_ctx))
        if wire.is_empty(asked):
            generation = None
        elif isinstance(asked, wire.GenerateRequest) and (asked.raw or asked.suffix):
            generation = await preparation.run(_completion, service, asked, info, ticket)
        else:
            chat, pictures = await preparation.read_chat(wire.chat_of, asked, service.defaults)
            prepared = await preparation.run(completions.prepare_chat, service, chat, info, pictures)
            del pictures  # they are the engine's from now on, and large
            generation = completions.chat_generation(service, prepared, request_id, ticket)
    scored = answer.ChatAnswer(request_id, service.model_name, service.tokenizer)
    reply = LinesAnswer(asked.model, is_chat=kind is wire.OllamaChatRequest, scored=scored)
    if generation is None:
        return json_response(reply.loaded())
    if asked.stream is not False:
        return LinesStream(generation, reply)
    (message,) = await unless_disconnected(request.receive, completions.collect(generation, scored))
    return LargeResponse(reply.body(message, generation.usage()))


MAX_UNLOAD_BYTES = 1000
"""Bytes of the largest body that may ask for nothing but to unload a model."""


class _Unload(msgspec.Struct):
    """Body that has no prompt."""

    keep_alive: str | float | None = None
    prompt: str | None = None
    messages: list[msgspec.Raw] | None = None
    images: list[msgspec.Raw] | None = None


def asks_to_unload(body: bytes) -> bool:
    """Returns whether a body of /api/chat or /api/generate asks to unload its model, and for no answer."""
    if len(body) > MAX_UNLOAD_BYTES:
        return False
    try:
        asked = msgspec.json.decode(body, type=_Unload)
    except msgspec.DecodeError:
        return False
    return asked.keep_alive in wire.NO_TIME and not (asked.prompt or asked.messages or asked.images)


async def _loaded(service: Service, request: Request) -> None:
    """Waits while the engine loads the model, as Ollama has requests wait, if there is room for the body."""
    server = service.server
    if service.client.state not in ("starting", "restarting") or server.draining:
        return
    body = request.scope[BODY] = await read_body(request, server.max_body_mb)
    if server.waiting_bytes + len(body) > server.max_body_mb * 1_000_000:
        return
    server.waiting_bytes += len(body) + 1000  # and what holds it
    try:
        with contextlib.suppress(EngineFailed, TimeoutError):  # admit says why
            async with asyncio.timeout(LOADING_S):
                await unless_disconnected(request.receive, service.client.ready())
    finally:
        server.waiting_bytes -= len(body) + 1000


def _completion(service: Service, asked: wire.GenerateRequest, info: EngineInfo, ticket: Ticket) -> Generation:
    """The completion of a prompt that no template sees, or of a gap. Raises ApiError."""
    longest = service.default_length or info.max_model_len
    completion = wire.completion_of(asked, longest, service.defaults)
    return completions.completion_generation(service, completions.prepare_completion(service, completion, info), ticket)


class LinesAnswer:
    """An answer, its updates as lines (`lines`, `end`) or all at once (`body`)."""

    def __init__(self, model: str, *, is_chat: bool, scored: answer.ChatAnswer | None) -> None:
        """model: the name that was asked for. scored: writes log-probabilities; None: nothing is said."""
        self._model = model
        self._is_chat = is_chat
        self._scored = scored
        self._open: list[Item] = []
        """The call whose arguments still come."""
        self._reason: str | None = None

    def lines(self, update: Update) -> bytes:
        """The next line, or nothing if there is nothing to tell."""
        delta = update.delta
        for call in delta.calls:
            if call.id is not None:
                self._open.append(Item("call", call))
            self._open[-1].parts.append(call.arguments)
        n_ended = -1 if update.finish_reason is None else len(self._open)
        ended, self._open = self._open[:n_ended], self._open[n_ended:]
        calls = [_plain_call(item.call, item.text) for item in ended if item.call]
        self._reason = update.finish_reason
        scores = self._scored.encoded(update.scores) if update.scores and self._scored else []
        parts = delta.content, delta.reasoning, calls, scores
        return self._line(self._fields(*parts) | {"done": False}) if any(parts) else b""

    def end(self, usage: Usage) -> bytes:
        """The last line."""
        return self._line(self._fields("", "", [], []) | self._counts(usage, self._reason))

    def body(self, message: answer.Message, usage: Usage) -> bytes:
        """The whole answer."""
        calls = [_plain_call(call, call.arguments) for call in message.calls]
        scores = message.logprobs.get("content")
        logprobs = msgspec.Raw(b"".join(json_pieces(scores))) if scores else None
        fields = self._fields("".join(message.content), "".join(message.reasoning), calls, logprobs)
        return self._line(fields | self._counts(usage, message.finish_reason))

    def loaded(self, reason: str = "load") -> bytes:
        """The answer where nothing was to be said."""
        return self._line(self._fields("", "", [], []) | {"done": True, "done_reason": reason})

    def _fields(
        self, content: str, thinking: str, calls: list[dict[str, object]], logprobs: object
    ) -> dict[str, object]:
        thought = {"thinking": thinking} if thinking else {}
        scores = {"logprobs": logprobs} if logprobs else {}
        if not self._is_chat:
            return {"response": content} | thought | scores
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": content} | thought | called} | scores

    def _counts(self, usage: Usage, reason: str | None) -> dict[str, object]:
        """Durations in nanoseconds; programs divide by them, so none is 0.

        The wait for a place stands where Ollama loads.
        """
        # An answer of one token has no time between tokens: it took as long as the step that it came out of.
        timing = usage.timing | {"decode_ms": usage.timing["decode_ms"] or usage.timing["prefill_ms"]}
        times = {name: max(1, round(ms * NS)) for name, ms in timing.items()}
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": times["total_ms"],
            "load_duration": times["queue_ms"],
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": times["prefill_ms"],
            "eval_count": usage.completion_tokens,
            "eval_duration": times["decode_ms"],
        }

    def _line(self, fields: dict[str, object]) -> bytes:
        return _encode({"model": self._model, "created_at": _time()} | fields) + b"\n"


def _plain_call(call: CallDelta, arguments: str) -> dict[str, object]:
    # Of a call that was cut off, what can be read; the reason tells of it.
    given = given_arguments(arguments) or {}
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": given}}


def _time(seconds: float | None = None) -> str:
    """A time in Ollama's form. seconds: since the epoch; None: now."""
    at = datetime.datetime.fromtimestamp(time.time() if seconds is None else seconds, datetime.UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


class LinesStream(completions.UpdateStream):
    """The lines of an answer."""

    def __init__(self, generation: Generation, reply: LinesAnswer) -> None:
        super().__init__(generation, reply.lines, end=lambda: reply.end(generation.usage()))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", LINES.encode()), (b"cache-control", b"no-cache")]

    def last(self, error: ApiError | None) -> bytes:
        return b"" if error is None else error.ollama_body() + b"\n"


async def tags(service: Service, request: Request) -> ASGIApp:
    """GET /api/tags: the models that write, in Ollama's form."""
    server = service.server
    if server.on_demand is not None:
        await server.on_demand.look()
    return json_response({"models": [_card(server, *of) for of in _writers(server)]})


def _writers(server: Server) -> Iterator[tuple[EngineClient, str] | tuple[EngineClient, str, str]]:
    """Yields engine and name of each model that writes, under all its names; of an adapter its model, too."""
    if server.on_demand is None:
        yield from ((other.client, name) for other in server.of("text") for name in other.names)
    else:
        offered = [model for model in server.on_demand.models.values() if model.kind == "text"]
        yield from ((model.client, name) for model in offered for name in model.names)
    yield from ((other.client, other.model_name, _parent(other)) for other in server.adapted())


def _parent(service: Service) -> str:
    return service.adapter.parent if service.adapter else ""


async def running(service: Service, request: Request) -> ASGIApp:
    """GET /api/ps: those of the same models that are loaded, and how long they stay."""
    server, loaded = service.server, []
    on_demand = {} if server.on_demand is None else server.on_demand.models
    for other in (*server.of("text"), *server.adapted()):
        parent, info = _parent(other), other.client.info
        if info is None:
            continue
        offered, card = on_demand.get(parent or other.model_name), _card(server, other.client, other.model_name, parent)
        stays_s = math.inf if offered is None else offered.expires_s - time.monotonic()
        if offered is not None and offered.needs is not None:
            card["size"] = offered.needs.n_bytes
        card["expires_at"] = _time(_NEVER_S if math.isinf(stays_s) else time.time() + stays_s)
        loaded.append(card | {"context_length": _context(other), "size_vram": card["size"] if info.on_gpu else 0})
    return json_response({"models": loaded})


_NEVER_S = 10_000_000_000.0
"""A time that is far off, in seconds of the epoch."""


async def show(service: Service, request: Request) -> ASGIApp:
    """POST /api/show: what a model is and can do."""
    asked = await parsed(service, request, wire.ShowRequest)
    service = await service.server.opened(asked.model or asked.name)
    template = service.template
    abilities = {
        "completion": service.kind == "text" and not service.embeds,
        "embedding": service.embeds,
        "tools": template is not None and template.call_form is not None,
        "thinking": template is not None and "enable_thinking" in template.variables,
        "vision": service.sees,
        "insert": service.kind == "text" and Filler.of(service.tokenizer) is not None,
    }
    card = _card(service.server, service.client, service.model_name, _parent(service))
    parent, stored = _usual(_parent(service) or service.model_name), _stored(service.client)
    applied = f"ADAPTER {service.adapter.path}\n" if service.adapter else ""
    return json_response(
        {
            "modelfile": f"# served by Deltic\nFROM {parent}\n{applied}",
            "parameters": "",
            "template": "",
            "details": card["details"],
            "model_info": {
                "general.architecture": stored.family,
                "general.basename": service.model_name,
                "general.parameter_count": stored.n_params,
                f"{stored.family}.context_length": _context(service),
            },
            "capabilities": [name for name, there_is in abilities.items() if there_is],
            "modified_at": card["modified_at"],
        }
    )


async def version(service: Service, request: Request) -> ASGIApp:
    """GET /api/version: of Ollama's API."""
    return json_response({"version": wire.API_VERSION})


def _context(service: Service) -> int:
    info = service.client.info
    return context_limit(info) if info else 0


def _usual(name: str) -> str:
    """A name as Ollama's programs have it."""
    return name if ":" in name else f"{name}:latest"


def _stored(client: EngineClient) -> ModelFiles:
    return model_files(client.config.model, client.config.dummy)


def _source(client: EngineClient) -> str:
    """Says where a model is from: `built-in`, a hub's name, or the name of a file or directory."""
    config = client.config
    if config.dummy is not None:
        return "random weights"
    path = Path(config.model)
    return path.name if config.model != BUILT_IN and path.exists() else config.model


def _human(n: int) -> str:
    """Writes a count of parameters as Ollama does."""
    return "" if not n else f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


def _card(server: Server, client: EngineClient, name: str, parent: str = "") -> dict[str, object]:
    """name: one of the model's, or of an adapter of `parent`."""
    name, info, stored = _usual(name), client.info, _stored(client)
    return {
        "name": name,
        "model": name,
        "modified_at": _time(server.started_s),
        "size": stored.n_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {
            "parent_model": _usual(parent) if parent else "",
            "format": stored.format,
            "family": stored.family,
            "families": [stored.family],
            "parameter_size": _human(stored.n_params),
            "quantization_level": stored.level or (info.precision.upper() if info else ""),
            "source": _source(client),
        },
    }
