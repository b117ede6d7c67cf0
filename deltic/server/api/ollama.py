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
import secrets
import time
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deltic.config import BUILT_IN
from deltic.engine.messages import EngineInfo
from deltic.host.client import EngineFailed
from deltic.server.api import completions
from deltic.server.api import ollama_protocol as wire
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
from deltic.server.service import Service
from deltic.server.transport import BODY, LargeResponse, json_pieces, json_response, read_body, unless_disconnected

LINES = "application/x-ndjson"

LOADING_S = 300.0
"""Seconds that a request waits for a model that loads, as Ollama has it."""

NS = 1e6
"""Nanoseconds of a millisecond."""

_encode = msgspec.json.Encoder().encode


async def chat(service: Service, request: Request) -> ASGIApp:
    """POST /api/chat: an answer to a chat, in Ollama's form."""
    return await _answer(service, request, wire.OllamaChatRequest)


async def generate(service: Service, request: Request) -> ASGIApp:
    """POST /api/generate: an answer to a prompt, in Ollama's form."""
    return await _answer(service, request, wire.GenerateRequest)


async def _answer(service: Service, request: Request, kind: type[wire.AnswerRequest]) -> ASGIApp:
    await _loaded(service, request)
    info = service.admit()
    request_id = request.scope["deltic.answer_id"] = f"ollama-{secrets.token_hex(16)}"
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(kind)
        wire.check(asked)
        service.check_model(asked.model)
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


async def _loaded(service: Service, request: Request) -> None:
    """Waits while the engine loads the model, as Ollama has requests wait, if there is room for the body."""
    server = service.server
    if service.client.state not in ("starting", "restarting") or server.draining:
        return
    service.check_writes()
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

    def __init__(self, model: str, *, is_chat: bool, scored: answer.ChatAnswer) -> None:
        """model: the name that was asked for. scored: writes log-probabilities."""
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
        scores = self._scored.encoded(update.scores) if update.scores else []
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

    def loaded(self) -> bytes:
        """The answer where nothing was to be said."""
        return self._line(self._fields("", "", [], []) | {"done": True, "done_reason": "load"})

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
    cards = [_card(other, name) for other in service.server.of("text") for name in other.names]
    return json_response({"models": cards + [_card(other, other.model_name) for other in service.server.adapted()]})


async def running(service: Service, request: Request) -> ASGIApp:
    """GET /api/ps: the same models, which are all loaded, and stay."""
    return json_response(
        {
            "models": [
                (card := _card(other, other.model_name))
                | {"expires_at": _time(_NEVER_S), "context_length": _context(other)}
                | {"size_vram": card["size"] if other.client.info.on_gpu else 0}
                for other in (*service.server.of("text"), *service.server.adapted())
                if other.client.info is not None
            ]
        }
    )


_NEVER_S = 10_000_000_000.0
"""A time that is far off, in seconds of the epoch."""


async def show(service: Service, request: Request) -> ASGIApp:
    """POST /api/show: what a model is and can do."""
    asked = await parsed(service, request, wire.ShowRequest)
    service = service.server.find(asked.model or asked.name)
    template = service.template
    abilities = {
        "completion": service.kind == "text",
        "tools": template is not None and template.call_form is not None,
        "thinking": template is not None and "enable_thinking" in template.variables,
        "vision": service.sees,
        "insert": service.kind == "text" and Filler.of(service.tokenizer) is not None,
    }
    card, stored = _card(service, service.model_name), _stored(service)
    parent = _usual(service.adapter.parent) if service.adapter else card["name"]
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


async def pull(service: Service, request: Request) -> ASGIApp:
    """POST /api/pull: of a model that is served, that it is there; no other one is fetched."""
    asked = await parsed(service, request, wire.PullRequest)
    try:
        service.server.find(asked.model or asked.name)
    except ApiError as error:
        if error.status != 404:
            raise
        message = f"{error}. This server serves what it was started with: deltic serve MODEL fetches a model."
        raise ApiError(404, message, code="model_not_found") from None
    if asked.stream is False:
        return json_response({"status": "success"})
    statuses = [{"status": "pulling manifest"}, {"status": "verifying sha256 digest"}, {"status": "success"}]
    return Response(b"".join(_encode(line) + b"\n" for line in statuses), media_type=LINES)


async def version(service: Service, request: Request) -> ASGIApp:
    """GET /api/version: of Ollama's API."""
    return json_response({"version": wire.API_VERSION})


def _context(service: Service) -> int:
    info = service.client.info
    return context_limit(info) if info else 0


def _usual(name: str) -> str:
    """A name as Ollama's programs have it."""
    return name if ":" in name else f"{name}:latest"


def _stored(service: Service) -> ModelFiles:
    config = service.client.config
    return model_files(config.model, config.dummy)


def _source(service: Service) -> str:
    """Says where a model is from: `built-in`, a hub's name, or the name of a file or directory."""
    config = service.client.config
    if config.dummy is not None:
        return "random weights"
    path = Path(config.model)
    return path.name if config.model != BUILT_IN and path.exists() else config.model


def _human(n: int) -> str:
    """Writes a count of parameters as Ollama does."""
    return "" if not n else f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


def _card(service: Service, name: str) -> dict[str, object]:
    """name: one of the model's."""
    name, info, stored = _usual(name), service.client.info, _stored(service)
    return {
        "name": name,
        "model": name,
        "modified_at": _time(service.server.started_s),
        "size": stored.n_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {
            "parent_model": _usual(service.adapter.parent) if service.adapter else "",
            "format": stored.format,
            "family": stored.family,
            "families": [stored.family],
            "parameter_size": _human(stored.n_params),
            "quantization_level": stored.level or (info.precision.upper() if info else ""),
            "source": _source(service),
        },
    }
