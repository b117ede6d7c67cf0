"""The HTTP application: routes, and what is the same for all of them.

Bodies are parsed by `protocol.py`, not by the framework: what a token passes through is bytes and small structs only. The routes
that generate are in `completions.py`, `responses.py` and `anthropic.py`.
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
from deltic.engine.client import EngineClient
from deltic.server import protocol
from deltic.server.access import Access
from deltic.server.chat import ChatTemplate, render
from deltic.server.completions import chat_completions, completions
from deltic.server.errors import ApiError, bad_request
from deltic.server.service import Service
from deltic.server.transport import (
    SERVER_SEND,
    error_response,
    json_response,
    read_body,
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
