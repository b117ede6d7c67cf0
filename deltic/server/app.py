"""The HTTP application: its routes, and everything that all of them share.

Bodies are parsed by the structs of each API (`api/protocol.py` and its like), not by the framework: what a
token passes through is bytes and small structs only. The routes that generate are in `api/completions.py`,
`api/responses.py`, `api/anthropic.py`, `api/ollama.py` and `speech/routes.py`; those about models in
`api/models.py`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from deltic import __version__
from deltic.json_types import JsonObject
from deltic.server import transport
from deltic.server.access import Access
from deltic.server.api import (
    anthropic,
    anthropic_protocol,
    decisions,
    models,
    ollama,
    ollama_protocol,
    protocol,
    pull,
    responses,
    scores,
)
from deltic.server.api.completions import CompletionRequest, chat_completions, completions
from deltic.server.api.decode import REFUSED, parse
from deltic.server.api.embeddings import EmbeddingRequest, embeddings
from deltic.server.api.infill import InfillRequest, infill
from deltic.server.api.responses_protocol import ResponsesRequest
from deltic.server.api.transfer import STREAM, ExportRequest, export_cache, import_cache
from deltic.server.asked import EarlyStream, asked_model, read_asked
from deltic.server.batch import batches
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import ASKING, BATCH, LARGE_BYTES, RATE_HEADERS, TICKET, Ticket
from deltic.server.listing import ListQuery
from deltic.server.openapi import Route, document
from deltic.server.page.files import ASSETS, docs, live, page, page_file
from deltic.server.page.markdown import DrawRequest, draw
from deltic.server.pdf import pdf_text
from deltic.server.service import Server, Service
from deltic.server.speech import routes as speech
from deltic.server.speech.socket import PATH, converse
from deltic.server.transport import error_response, json_response
from deltic.text import UnreadableText

log = logging.getLogger("deltic.server")

CLIENT_GONE = 499
"""The status noted for a client that left before its answer; nobody receives it."""

CLOSE = {"connection": "close", "x-should-retry": "false"}

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""A client's id that a log can show: one word, of bounded length."""

TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""W3C Trace Context. In it is the id of the trace."""


def create_app(server: Server) -> Starlette:
    """The application. `app.state.server` is its Server."""
    app = Application()
    app.state.server = server
    config = server.config
    access = Access(config, server.accounts)

    def add(route: Route) -> None:
        async def bound(request: Request) -> ASGIApp:
            request.scope["deltic.route"] = route.path
            ticket: Ticket = request.scope[TICKET]
            if ticket.is_batch:
                ticket.account = request.scope[BATCH]
            else:
                ticket.account = access.check(
                    request, open_=route.open_, any_type=route.form or route.any_type, is_shared=route.is_shared
                )
            if route.generates or route.prepares:
                ticket.enter(generates=route.generates)
            asked = await read_asked(server, route, request)

            async def answer(request: Request) -> ASGIApp:
                service = await asked_model(server, route, request, asked.model)
                ticket.model = service.model_name if server.has_choice else ""
                return await route.endpoint(service, request)

            on_demand, is_ollama = server.on_demand, route.path in OLLAMA_PATHS
            if on_demand is not None and is_ollama and ollama.asks_to_unload(request.scope[transport.BODY]):
                return await route.endpoint(server.first(route.kind), request)
            has_events = route.generates and route.kind == "text" and asked.stream is True and not is_ollama
            if on_demand is None or not has_events:
                return await answer(request)
            return EarlyStream(_answering(answer), request, lambda: on_demand.told_of(asked.model))

        app.add_route(route.path, _answering(bound), methods=[route.method])

    for route in ROUTES:
        add(route)
    if server.may_speak:

        async def bound_socket(socket: WebSocket) -> None:
            await converse(server, access, socket, log_request)

        app.router.routes.append(WebSocketRoute(PATH, bound_socket))
    app.add_exception_handler(HTTPException, _framework_error)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", *RATE_HEADERS],
        )
    app.add_middleware(Envelope, server=server)
    if server.batches is not None:
        server.batches.app = app
    return app


class Application(Starlette):
    """Hands an EventStream the server's own `send`.

    So later chunks go past the middleware, which looks at no body.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[transport.SERVER_SEND] = send
        root = self.state.server.config.root_path
        if "path" in scope:
            # A proxy may have taken the prefix away, or not; here it is there.
            path = scope["path"]
            if root and (path == root or path.startswith(root + "/")):
                path = path.removeprefix(root)
            scope["root_path"], scope["path"] = root, root + _usual_path(path)
        await super().__call__(scope, receive, send)


def _usual_path(path: str) -> str:
    """A path as ROUTES has it: without a slash at its end, and with the `/v1` that some clients leave out."""
    # Nothing stays nothing: a prefix is sent on to its page, whose links are relative.
    path = path.rstrip("/") or path[:1]
    return f"/v1{path}" if path[1:].partition("/")[0] in _V1 else path


def _answering(endpoint: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[[Request], Coroutine[object, None, Any]]:
    """An endpoint whose errors become error bodies."""

    async def answering(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ApiError as error:
            return error_response(error, request.scope)
        except UnreadableText as error:
            transport.forget_frames(error)
            return error_response(bad_request(None, str(error)), request.scope)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)

    return answering


DECLINED = {
    path: f"the models here write or speak. This server {why}."
    for why, paths in REFUSED["endpoints"].items()
    for path in paths
}
"""Endpoints of OpenAI and Ollama that this server does not have, by path prefix."""


async def _framework_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the form of all other errors."""
    assert isinstance(error, HTTPException)
    path, status, headers = transport.own_path(request.scope), error.status_code, dict(error.headers or {})
    where = f"{request.method} {path}"
    message = {404: f"no such path: {where}", 405: f"{where}: method not allowed"}.get(status, error.detail)
    declined = next((why for start, why in DECLINED.items() if path.startswith(start)), None)
    if declined is not None:  # also where the path fits a route of another method
        status, message, headers = 404, f"{where}: {declined}", {}
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    return error_response(ApiError(status, message, code=code, headers=headers), request.scope)


class Envelope:
    """Gives every response a request id, a line in the log and a count; and a 500 for an unforeseen error.

    The line has the client's id of the request (x-request-id, made here when it sent none) beside the id in
    the answer's body, by which the engine knows it.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._converse(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        labels = _labels(scope)
        request_id = scope["deltic.request_id"] = labels["request_id"]
        status = n_bytes = 0
        ticket = scope[TICKET] = Ticket(
            self._server.config, is_batch=BATCH in scope, labels=labels, worker=self._server.worker
        )
        ASKING.set(ticket)

        async def send_marked(message: Message) -> None:
            nonlocal status, n_bytes
            n_bytes += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                limits = ticket.account.headers() if ticket.account else []
                ids = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
                given = message["headers"]
                is_told = not self._server.is_leaving or any(name == b"connection" for name, _ in given)
                message["headers"] = [*given, *ids, *limits, *([] if is_told else [(b"connection", b"close")])]
            await send(message)

        is_whole = False

        async def receive_body() -> Message:
            """`receive` within the time that the request has, as long as its body is to come."""
            nonlocal is_whole, n_bytes
            try:
                async with asyncio.timeout(None if is_whole else ticket.left_s()):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the body did not come in time", code="request_timeout", headers=CLOSE) from None
            is_whole = not message.get("more_body", False)
            n_bytes += len(message.get("body", b""))
            if self._server.config.log_prompts and scope.get("deltic.route") not in (FILES, IMPORT, PDF, DRAWING):
                ticket.body += message.get("body", b"")
            return message

        self._server.n_open += 1
        try:
            await self._app(scope, receive_body, send_marked)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of a library in Rust is no Exception
            log.exception("%s %r %s", scope["method"], scope["path"], request_id)
            if not status:
                error = ApiError(500, f"an error inside the server. Its log has more under {request_id}.")
                await error_response(error, scope)(scope, receive, send_marked)
        finally:
            self._server.n_open -= 1
            route = scope.get("deltic.route", "other")
            status = status or CLIENT_GONE
            self._server.metrics.responses[route, status] += 1
            ticket.end(status)
            if n_bytes > LARGE_BYTES:
                self._server.trim_soon()
            if route not in POLLED:
                log_request(scope["method"], route, status, ticket, scope.get("deltic.answer_id", "-"))

    async def _converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Logs and counts a WebSocket when it has ended.

        Limits apply to the requests made through it.
        """
        labels = _labels(scope)
        request_id = scope["deltic.request_id"] = labels["request_id"]
        ticket = scope[TICKET] = Ticket(labels=labels, worker=self._server.worker)
        status = 403  # of one that nothing accepts

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] in ("websocket.accept", "websocket.http.response.start"):
                status = message.get("status", 101)
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            log.exception("%r %s", scope["path"], request_id)
            status = 500
        finally:
            route = PATH if transport.own_path(scope) == PATH else "other"
            self._server.metrics.responses[route, status] += 1
            log_request("WEBSOCKET", route, status, ticket, "-")


def _labels(scope: Scope) -> dict[str, str]:
    """Returns a request's labels: `request_id`, by its client or made here; `session` and `trace_id` of those
    that have one.
    """
    headers = dict(reversed(scope["headers"]))  # the first of a name
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    labels = {"request_id": given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)}
    session = next((headers[name] for name in transport.SESSION_HEADERS if name in headers), b"").decode("latin-1")
    if REQUEST_ID.fullmatch(session):
        labels["session"] = session
    if trace := TRACE_PARENT.fullmatch(headers.get(b"traceparent", b"").decode("latin-1")):
        labels["trace_id"] = trace[1]
    return labels


def log_request(method: str, route: str, status: int, ticket: Ticket, answer_id: str) -> None:
    """The line of a request that has ended."""
    fields: JsonObject = {"method": method, "route": route, "status": status}
    fields["seconds"] = round(time.monotonic() - ticket.started_s, 3)
    text = f"{method} {route} {status} {fields['seconds']:.3f} s"
    more: JsonObject = {"key": ticket.account.name} if ticket.account else {}
    if ticket.model:
        more["model"] = ticket.model
    if ticket.first_s is not None:
        more["first_token_seconds"] = round(ticket.first_s - ticket.started_s, 3)
    if usage := ticket.usage:
        more |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        more["generated_tokens"] = usage.completion_tokens
    more |= {name: label for name, label in ticket.labels.items() if name != "request_id"} | ticket.notes
    if ticket.body:
        more["body"] = ticket.body.decode("utf-8", "replace")
    text += "".join(
        f" {name}={json.dumps(value) if name == 'body' or name in ticket.notes else value}"
        for name, value in more.items()
    )
    request_id = ticket.labels["request_id"]
    ids = {"request_id": request_id, "answer_id": answer_id}
    level = logging.DEBUG if ticket.is_batch else logging.INFO  # of a batch its end is told
    log.log(level, "%s %s %s", text, request_id, answer_id, extra={"fields": fields | more | ids})


async def metrics(service: Service, request: Request) -> ASGIApp:
    """GET /metrics: numbers for Prometheus."""
    return Response(service.server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def inspect_cache(service: Service, request: Request) -> ASGIApp:
    """GET /cache: what the prefix cache holds."""
    return json_response(await service.inspect_cache(reset=False))


async def reset_cache(service: Service, request: Request) -> ASGIApp:
    """POST /cache/reset: empties the prefix cache; what it holds then."""
    if body := await transport.read_body(request, service.server.max_body_mb):
        parse(body, protocol.EmptyRequest)
    return json_response(await service.inspect_cache(reset=True))


async def health(service: Service, request: Request) -> ASGIApp:
    """GET /health: 200 while all models take requests; a load balancer looks here."""
    status = service.server.status()
    return json_response(status, 200 if status["status"] == "ready" else 503)


async def ping(service: Service, request: Request) -> ASGIApp:
    """GET /ping: the same as /health, under the name that SageMaker knows."""
    return await health(service, request)


async def load(service: Service, request: Request) -> ASGIApp:
    """GET /load: how many sequences run or wait; vLLM's balancers know it."""
    return json_response({"server_load": sum(model.client.n_open for model in service.server.models.values())})


async def ready(service: Service, request: Request) -> ASGIApp:
    """GET /ready: 200 once all models are loaded; until then how far they are."""
    status, info = service.server.status() | {"kind": service.kind}, service.client.info
    if status["status"] != "ready":
        return json_response(status, 503)
    return json_response(status | ({"model": service.model_name, "start_s": info.start_s} if info else {}))


async def version(service: Service, request: Request) -> ASGIApp:
    """GET /version: this package's."""
    return json_response({"version": __version__})


async def openapi(service: Service, request: Request) -> ASGIApp:
    """GET /openapi.json: this document."""
    return json_response(await asyncio.to_thread(_document, service.config.root_path))


@functools.cache
def _document(root_path: str) -> bytes:
    """Made once: anybody may ask for it, and making it takes longer than many steps."""
    return msgspec.json.encode(document(ROUTES, root_path))


FILES = "/v1/files"
IMPORT = "/cache/import"
PDF = "/pdf/text"
DRAWING = "/page/markdown"

OLLAMA_PATHS = ("/api/chat", "/api/generate")

# fmt: off
ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, protocol.ChatRequest, generates=True,
          answer="ChatCompletion", event="ChatCompletionChunk"),
    Route("POST", "/v1/completions", completions, CompletionRequest, generates=True,
          answer="TextCompletion", event="CompletionChunk"),
    Route("POST", "/infill", infill, InfillRequest, generates=True,
          answer="GapTexts", event="GapText"),
    Route("POST", "/v1/embeddings", embeddings, EmbeddingRequest, generates=True, answer="EmbeddingList"),
    Route("POST", "/v1/chat/completions/render", models.render_chat, protocol.ChatRequest, prepares=True,
          answer="RenderedPrompt"),
    Route("POST", "/v1/completions/render", models.render_completion, CompletionRequest, prepares=True,
          answer="RenderedPrompts"),
    Route("POST", "/v1/messages", anthropic.messages, anthropic_protocol.MessagesRequest, generates=True,
          answer="AnthropicMessage", event="MessageEvent"),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, anthropic_protocol.CountTokensRequest,
          prepares=True, answer="CountedTokens"),
    Route("POST", "/v1/responses", responses.create_response, ResponsesRequest, generates=True,
          answer="ResponseAnswerBody", event="ResponseEvent"),
    Route("POST", "/v1/responses/input_tokens", responses.count_input_tokens, ResponsesRequest, prepares=True,
          answer="CountedInput"),
    Route("GET", "/v1/responses/{response_id}", responses.get_response, query=responses.ReplayQuery,
          answer="ResponseAnswerBody", event="ResponseEvent"),
    Route("DELETE", "/v1/responses/{response_id}", responses.delete_response, answer="ResponseDeleted"),
    Route("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response),
    Route("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items, query=ListQuery,
          answer="InputItemList"),
    Route("POST", "/v1/decisions", decisions.decide, decisions.DecisionRequest, generates=True,
          answer=decisions.Decision),
    Route("POST", "/v1/systemone", decisions.system_one, decisions.SystemOneRequest, generates=True,
          answer=decisions.SystemOneResult),
    Route("POST", "/v1/score", scores.score, scores.ScoreRequest, generates=True, answer=scores.ScoreList),
    Route("POST", "/v1/rerank", scores.rerank, scores.RerankRequest, generates=True, answer=scores.Ranking),
    Route("POST", "/v2/rerank", scores.cohere_rerank, scores.RerankRequest, generates=True, answer=scores.Ranking),
    *speech.ROUTES,
    Route("POST", FILES, batches.upload, batches.FileForm, form=True, answer="FileEntry"),
    Route("GET", FILES, batches.list_files, query=batches.FilesQuery, answer="FileList"),
    Route("GET", "/v1/files/{file_id}", batches.get_file, answer="FileEntry"),
    Route("GET", "/v1/files/{file_id}/content", batches.get_content, gives=("application/octet-stream",)),
    Route("DELETE", "/v1/files/{file_id}", batches.delete_file, answer="FileDeleted"),
    Route("POST", "/v1/batches", batches.create_batch, batches.BatchRequest, answer="BatchEntry"),
    Route("GET", "/v1/batches", batches.list_batches, query=ListQuery, answer="BatchList"),
    Route("GET", "/v1/batches/{batch_id}", batches.get_batch, answer="BatchEntry"),
    Route("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, answer="BatchEntry"),
    Route("POST", "/api/chat", ollama.chat, ollama_protocol.OllamaChatRequest, generates=True, any_type=True,
          answer="OllamaChatAnswer", event="OllamaChatAnswer"),
    Route("POST", "/api/generate", ollama.generate, ollama_protocol.GenerateRequest, generates=True, any_type=True,
          answer="OllamaText", event="OllamaText"),
    Route("POST", "/api/embed", ollama.embed, ollama_protocol.EmbedRequest, generates=True, any_type=True,
          answer="OllamaVectors"),
    Route("POST", "/api/embeddings", ollama.embed_one, ollama_protocol.EmbedOneRequest, generates=True, any_type=True,
          answer="OllamaVector"),
    Route("GET", "/api/tags", ollama.tags, answer="OllamaModels", is_polled=True),
    Route("GET", "/api/ps", ollama.running, answer="OllamaModels"),
    Route("POST", "/api/show", ollama.show, ollama_protocol.ShowRequest, any_type=True,
          answer="OllamaShown"),
    Route("POST", "/api/pull", pull.pull, ollama_protocol.PullRequest, any_type=True, names_later=True,
          answer="OllamaStatus", event="OllamaStatus"),
    Route("DELETE", "/api/delete", pull.delete, ollama_protocol.DeleteRequest, names_later=True, gives=()),
    Route("GET", "/api/version", ollama.version, open_=True, answer="ServerVersion"),
    Route("GET", "/v1/models", models.list_models, answer="ModelList", is_polled=True),
    Route("POST", "/v1/models/load", pull.load_model, pull.LoadRequest, is_shared=True, names_later=True,
          answer="Done"),
    Route("POST", "/v1/models/unload", pull.unload_model, pull.LoadRequest, is_shared=True, names_later=True,
          answer="Done"),
    Route("GET", "/v1/models/{model:path}", models.get_model, answer="ModelEntry"),
    Route("POST", "/v1/load_lora_adapter", models.load_adapter, models.LoadAdapterRequest, is_shared=True,
          takes_model=True, gives=("text/plain",)),
    Route("POST", "/v1/unload_lora_adapter", models.unload_adapter, models.UnloadAdapterRequest, is_shared=True,
          gives=("text/plain",)),
    Route("POST", "/tokenize", models.tokenize, models.TokenizeRequest, prepares=True, answer="Tokenized"),
    Route("POST", "/detokenize", models.detokenize, models.DetokenizeRequest, prepares=True,
          answer="Detokenized"),
    Route("POST", PDF, pdf_text, prepares=True, any_type=True, answer="PdfText"),
    Route("GET", "/server_info", models.server_info, takes_model=True, answer="ServerInfo"),
    Route("GET", "/model_info", models.model_info, takes_model=True, answer="ModelFacts"),
    Route("GET", "/is_sleeping", models.is_sleeping, open_=True, answer="Sleeping", is_polled=True),
    Route("GET", "/metrics", metrics, is_shared=True, gives=("text/plain",), is_polled=True),
    Route("GET", "/load", load, is_shared=True, answer="ServerLoad", is_polled=True),
    Route("GET", "/cache", inspect_cache, is_shared=True, takes_model=True, answer="CacheContents",
          is_polled=True),
    Route("POST", "/cache/reset", reset_cache, protocol.EmptyRequest, is_shared=True, takes_model=True,
          answer="CacheContents"),
    Route("POST", "/cache/export", export_cache, ExportRequest, is_shared=True, gives=(STREAM,)),
    Route("POST", IMPORT, import_cache, any_type=True, is_shared=True, takes_model=True, answer="CacheImported"),
    Route("GET", "/live", live, is_shared=True, takes_model=True, answer="LiveNumbers", is_polled=True),
    Route("GET", "/", page, open_=True, gives=("text/html",)),
    Route("POST", DRAWING, draw, DrawRequest, answer="DrawnTexts", is_polled=True),
    Route("GET", ASSETS, page_file, open_=True, gives=("text/javascript", "text/css"), is_polled=True),
    Route("GET", "/health", health, open_=True, answer="ServerStatus", is_polled=True),
    Route("GET", "/ping", ping, open_=True, answer="ServerStatus", is_polled=True),
    Route("GET", "/ready", ready, open_=True, answer="ServerStatus", is_polled=True),
    Route("GET", "/version", version, open_=True, answer="ServerVersion", is_polled=True),
    Route("GET", "/openapi.json", openapi, open_=True),
    Route("GET", "/docs", docs, open_=True, gives=("text/html",)),
)
# fmt: on
"""Every route there is: the application and its document in server/openapi.py are made from it."""

POLLED = frozenset(route.path for route in ROUTES if route.is_polled)

_V1 = {path.split("/")[2] for path in [*(route.path for route in ROUTES), *DECLINED] if path.startswith("/v1/")}
"""First parts of the paths behind `/v1`."""
