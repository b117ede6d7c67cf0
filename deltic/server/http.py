"""The HTTP application: routes, and what is the same for all of them.

A request is read and checked here, becomes a Generation, and its pieces become JSON. Bodies are parsed by
`protocol.py`, not by the framework: what a token passes through is bytes and small structs only.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltic import __version__
from deltic.config import ServerConfig
from deltic.engine import request as engine
from deltic.engine.client import EngineClient
from deltic.server import answer, protocol
from deltic.server.access import Access
from deltic.server.chat import ChatTemplate, Prompt, render
from deltic.server.errors import ApiError, bad_request
from deltic.server.generation import Generation
from deltic.server.parser import Delta, OutputParser
from deltic.server.service import Service
from deltic.server.transport import (
    SERVER_SEND,
    EventStream,
    error_response,
    json_response,
    read_body,
    unless_disconnected,
)
from deltic.text import Tokenizer

log = logging.getLogger("deltic.server")

CLIENT_GONE = 499
"""The status noted for a client that left before its answer; nobody receives it."""

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

QUIET = ("/health", "/ready", "/metrics")
"""Routes that are polled: not worth a line in the log each time."""

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Route = Callable[[Service, Request], Awaitable[ASGIApp]]


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    model_name: str,
    config: ServerConfig,
    defaults: protocol.SamplingDefaults | None = None,
) -> FastAPI:
    """The application. `app.state.service` is its Service."""
    service = Service(
        client, tokenizer, template, model_name, config, defaults or protocol.SamplingDefaults()
    )
    # No generated documentation: the bodies are not the framework's, so it would be empty.
    app = Application(title="Deltic", version=__version__, openapi_url=None)
    app.state.service = service
    access = Access(config)

    def route(method: str, path: str, endpoint: Route, *, open_: bool) -> None:
        async def bound(request: Request) -> ASGIApp:
            request.scope["deltic.route"] = path
            access.check(request, open_=open_)
            return await endpoint(service, request)

        app.add_route(path, _answering(bound), methods=[method])

    route("POST", "/v1/chat/completions", chat_completions, open_=False)
    route("POST", "/v1/completions", completions, open_=False)
    route("GET", "/v1/models", list_models, open_=False)
    route("GET", "/v1/models/{model:path}", get_model, open_=False)
    route("POST", "/tokenize", tokenize, open_=False)
    route("POST", "/detokenize", detokenize, open_=False)
    route("GET", "/metrics", metrics, open_=False)
    route("GET", "/cache", inspect_cache, open_=False)
    route("POST", "/cache/reset", reset_cache, open_=False)
    route("GET", "/health", health, open_=True)
    route("GET", "/ready", ready, open_=True)
    route("GET", "/version", version, open_=True)
    app.add_exception_handler(HTTPException, _framework_error)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Envelope, service=service)
    return app


class Application(FastAPI):
    """FastAPI that tells an EventStream the server's own `send`, so that later chunks go past the middleware, which looks at
    no body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def _answering(endpoint: Endpoint) -> Callable[[Request], Coroutine[Any, Any, Any]]:
    """An endpoint whose errors become error bodies."""

    async def answering(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ApiError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)

    return answering


async def _framework_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the form of all other errors."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    said = {404: f"no such path: {where}", 405: f"{where}: method not allowed"}.get(
        error.status_code, error.detail
    )
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return error_response(ApiError(error.status_code, said, code=code, headers=dict(error.headers or {})))


class Envelope:
    """What every response has: a request id, a line in the log, a count; and a 500 for what was not foreseen.

    The line has the client's id of the request (x-request-id, made here when it sent none) beside the id in the answer's
    body, by which the engine knows it.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), ""
        )
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        status = 0
        started_s = time.monotonic()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        self._service.n_open += 1
        try:
            await self._app(scope, receive, send_marked)
        except Exception:
            log.exception("%s %r %s", scope["method"], scope["path"], request_id)
            if not status:
                error = ApiError(500, f"an error inside the server; its log has more under {request_id}")
                await error_response(error)(scope, receive, send_marked)
        finally:
            self._service.n_open -= 1
            route = scope.get("deltic.route", "other")
            status = status or CLIENT_GONE
            self._service.metrics.responses[route, status] += 1
            if route not in QUIET:
                elapsed_s = time.monotonic() - started_s
                answer_id = scope.get("deltic.answer_id", "-")
                log.info(
                    "%s %s %d %.3f s %s %s", scope["method"], route, status, elapsed_s, request_id, answer_id
                )


async def chat_completions(service: Service, request: Request) -> ASGIApp:
    info = service.admit()
    body = await read_body(request, service.config.max_body_mb)

    def prepare() -> tuple[protocol.ChatRequest, Prompt, engine.SamplingParams, Any]:
        chat = protocol.parse(body, protocol.ChatRequest)
        check(service, chat)
        prompt, tools = render(service.template, chat, protocol.context_limit(info))
        max_tokens = protocol.answer_length(chat, len(prompt.ids), info, service.config)
        params = protocol.sampling_params(chat, max_tokens, info, service.defaults, service.config)
        return chat, prompt, params, tools

    chat, prompt, params, tools = await service.prepare(len(body), prepare, request.receive)
    request_id = request.scope["deltic.answer_id"] = f"chatcmpl-{secrets.token_hex(16)}"
    choices = [
        answer.Choice(
            index,
            service.tokenizer,
            stops=protocol.stop_strings(chat),
            stop_token_ids=params.stop_token_ids,
            skip_special_tokens=chat.skip_special_tokens is not False,
            parser=OutputParser(thinking=prompt.thinking, tools=tools),
            logprobs=params.logprobs is not None,
        )
        for index in range(params.n)
    ]
    sent = engine_request(request_id, prompt.ids, params, chat, prompt.boundaries)
    generation = Generation(service.client, service.metrics, [sent], choices)
    usage = wants_usage(chat)
    said = answer.ChatAnswer(request_id, service.model_name, service.tokenizer, usage)
    if chat.stream:
        first = b"".join(map(said.role_chunk, range(params.n)))
        return AnswerStream(generation, said, None, first, usage)
    messages = await unless_disconnected(request.receive, collect(generation, None))
    extra = {}
    if generation.prompt_logprobs[0] is not None:
        extra["prompt_logprobs"] = answer.prompt_logprobs(generation.prompt_logprobs[0], service.tokenizer)
    return json_response(said.body(messages, generation.usage(), extra))


def check(service: Service, request: protocol.ChatRequest | protocol.CompletionRequest) -> None:
    """What both APIs refuse. Raises ApiError (400, 404)."""
    service.check_model(request.model)
    protocol.check_neutral(request)
    protocol.stop_strings(request)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "only for a stream; set stream to true")


def engine_request(
    request_id: str,
    prompt_ids: list[int],
    params: engine.SamplingParams,
    asked: protocol.Sampling,
    boundaries: list[int],
) -> engine.Request:
    """What the engine gets for one prompt. boundaries: token offsets at which its messages end."""
    return engine.Request(
        id=request_id,
        prompt_ids=prompt_ids,
        params=params,
        priority=asked.priority or 0,
        boundaries=boundaries,
        cache_salt=asked.cache_salt or "",
        use_cache=asked.cache_prompt is not False,
    )


def wants_usage(request: protocol.Sampling) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


class Echo:
    """The prompts of a completion that is to repeat them, as the first piece of each choice."""

    def __init__(
        self, texts: list[str], ids: list[list[int]], n: int, scores: bool, tokenizer: Tokenizer, n_top: int
    ) -> None:
        self.texts = texts
        self._ids = ids
        self._n = n
        self._scores = scores
        self._tokenizer = tokenizer
        self._waiting = set(range(len(texts) * n))

    def add(self, pieces: list[answer.Piece], generation: Generation) -> list[answer.Piece]:
        """`pieces`, with the prompt before the first of each choice."""
        with_prompts = []
        for piece in pieces:
            if piece.index in self._waiting:
                self._waiting.remove(piece.index)
                with_prompts.append(self._piece(piece.index, generation))
            with_prompts.append(piece)
        return with_prompts

    def _piece(self, index: int, generation: Generation) -> answer.Piece:
        p = index // self._n
        piece = answer.Piece(index, Delta(content=self.texts[p]))
        if self._scores:
            piece.scores = answer.prompt_scores(self._ids[p], generation.prompt_logprobs[p], self._tokenizer)
        return piece


async def completions(service: Service, request: Request) -> ASGIApp:
    info = service.admit()
    body = await read_body(request, service.config.max_body_mb)

    def prepare() -> tuple[protocol.CompletionRequest, list[str | list[int]], list[engine.Request]]:
        asked = protocol.parse(body, protocol.CompletionRequest)
        check(service, asked)
        prompts = protocol.prompts(asked, info)
        return asked, prompts, requests_of(service, asked, prompts, info)

    asked, prompts, requests = await service.prepare(len(body), prepare, request.receive)
    n = requests[0].params.n
    n_top = asked.logprobs or 0
    tokenizer = service.tokenizer
    echo = None
    if asked.echo:
        texts = [
            prompt
            if isinstance(prompt, str) and asked.logprobs is None
            else tokenizer.decode(sent.prompt_ids, False)
            for prompt, sent in zip(prompts, requests, strict=True)
        ]
        ids = [sent.prompt_ids for sent in requests]
        echo = Echo(texts, ids, n, asked.logprobs is not None, tokenizer, n_top)
    choices = [
        answer.Choice(
            index,
            tokenizer,
            stops=protocol.stop_strings(asked),
            skip_special_tokens=asked.skip_special_tokens is not False,
            logprobs=asked.logprobs is not None,
            silent=asked.max_tokens == 0,
            offset=len(echo.texts[index // n]) if echo else 0,
        )
        for index in range(len(requests) * n)
    ]
    generation = Generation(service.client, service.metrics, requests, choices)
    usage = wants_usage(asked)
    request_id = request.scope["deltic.answer_id"] = requests[0].id.rpartition("-")[0]
    said = answer.CompletionAnswer(request_id, service.model_name, tokenizer, usage, n_top)
    if asked.stream:
        return AnswerStream(generation, said, echo, b"", usage)
    messages = await unless_disconnected(request.receive, collect(generation, echo))
    if asked.prompt_logprobs is not None:
        for index, message in enumerate(messages):
            entries = generation.prompt_logprobs[index // n]
            if entries is not None:
                message.prompt_logprobs = answer.prompt_logprobs(entries, tokenizer)
    return json_response(said.body(messages, generation.usage()))


def requests_of(
    service: Service,
    asked: protocol.CompletionRequest,
    prompts: list[str | list[int]],
    info: engine.EngineInfo,
) -> list[engine.Request]:
    """One request of the engine for each prompt. Raises ApiError (400)."""
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise bad_request("best_of", "not supported unless it equals n", "unsupported_field")
    most = info.max_num_seqs + service.config.max_queue
    if len(prompts) * (asked.n or 1) > most:
        raise bad_request(
            "prompt", f"{len(prompts)} prompts are more than can wait here; send at most {most} sequences"
        )
    request_id = f"cmpl-{secrets.token_hex(16)}"
    requests = []
    limit = protocol.context_limit(info)
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) and (n := service.tokenizer.least_tokens(prompt, limit)) >= limit:
            raise protocol.prompt_too_long("prompt", f"at least {n}", limit)
        ids = service.tokenizer.encode(prompt, "parse") if isinstance(prompt, str) else prompt
        max_tokens = protocol.answer_length(asked, len(ids), info, service.config)
        params = protocol.sampling_params(asked, max_tokens, info, service.defaults, service.config)
        requests.append(engine_request(f"{request_id}-{i}", ids, params, asked, []))
    return requests


class AnswerStream(EventStream):
    """The chunks of an answer: `first` goes before the first piece, the usage after the last."""

    __slots__ = ("_echo", "_first", "_generation", "_include_usage", "_said")

    def __init__(
        self,
        generation: Generation,
        said: answer.ChatAnswer | answer.CompletionAnswer,
        echo: Echo | None,
        first: bytes,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._said = said
        self._echo = echo
        self._first = first
        self._include_usage = include_usage

    async def run(self) -> None:
        await self._generation.run(self._take)
        if self._include_usage:
            self.write(self._said.usage_chunk(self._generation.usage()))

    def _take(self, pieces: list[answer.Piece]) -> None:
        if self._echo is not None:
            pieces = self._echo.add(pieces, self._generation)
        chunk = b"".join(map(self._said.chunks, pieces))
        if self._first:
            chunk, self._first = self._first + chunk, b""
        if chunk:
            self.write(chunk)


async def collect(generation: Generation, echo: Echo | None) -> list[answer.Message]:
    """The whole answer: a message for each choice."""
    messages = [answer.Message() for _ in range(generation.n_choices)]

    def take(pieces: list[answer.Piece]) -> None:
        for piece in echo.add(pieces, generation) if echo else pieces:
            messages[piece.index].add(piece)

    await generation.run(take)
    return messages


async def list_models(service: Service, request: Request) -> ASGIApp:
    return json_response({"object": "list", "data": [model_card(service)]})


async def get_model(service: Service, request: Request) -> ASGIApp:
    service.check_model(request.path_params["model"])
    return json_response(model_card(service))


def model_card(service: Service) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "deltic",
        "max_model_len": info.max_model_len if info else None,
    }


async def tokenize(service: Service, request: Request) -> ASGIApp:
    body = await read_body(request, service.config.max_body_mb)

    def work() -> dict[str, Any]:
        asked = protocol.parse(body, protocol.TokenizeRequest)
        service.check_model(asked.model)
        protocol.check_tokenize(asked)
        if asked.prompt is not None:
            parsed = asked.parse_special_tokens is not False
            ids = service.tokenizer.encode(asked.prompt, "parse" if parsed else "text")
        else:
            ids = render(service.template, asked)[0].ids
        info = service.client.info
        told: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": info.max_model_len if info else None,
            "tokens": ids,
        }
        if asked.return_token_strs:
            told["token_strs"] = [service.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return told

    return json_response(await service.prepare(len(body), work, request.receive))


async def detokenize(service: Service, request: Request) -> ASGIApp:
    body = await read_body(request, service.config.max_body_mb)

    def work() -> dict[str, Any]:
        asked = protocol.parse(body, protocol.DetokenizeRequest)
        service.check_model(asked.model)
        info = service.client.info
        n_ids = max(service.tokenizer.n_tokens, info.vocab_size if info else 0)
        if asked.tokens and max(asked.tokens) >= n_ids:
            raise bad_request(
                "tokens", f"{max(asked.tokens)} is not a token id; they go from 0 to {n_ids - 1}"
            )
        return {"prompt": service.tokenizer.decode(asked.tokens, asked.skip_special_tokens)}

    return json_response(await service.prepare(len(body), work, request.receive))


async def metrics(service: Service, request: Request) -> ASGIApp:
    return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def inspect_cache(service: Service, request: Request) -> ASGIApp:
    """What the prefix cache holds."""
    return json_response(await service.inspect_cache(reset=False))


async def reset_cache(service: Service, request: Request) -> ASGIApp:
    """Empties the prefix cache; what it holds then."""
    if body := await read_body(request, service.config.max_body_mb):
        protocol.parse(body, protocol.EmptyRequest)
    return json_response(await service.inspect_cache(reset=True))


async def health(service: Service, request: Request) -> ASGIApp:
    """200 while requests are taken; a load balancer looks here."""
    status = service.status()
    return json_response(status, 200 if status["status"] == "ready" else 503)


async def ready(service: Service, request: Request) -> ASGIApp:
    """200 once the model is loaded; until then how far it is."""
    status = service.status()
    if status["status"] == "ready" and service.client.info is not None:
        return json_response(status | {"model": service.model_name, "start_s": service.client.info.start_s})
    return json_response(status, 503)


async def version(service: Service, request: Request) -> ASGIApp:
    return json_response({"version": __version__})
