"""The server's answers while a model is still being downloaded."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltic.config import ServerConfig
from deltic.json_types import JsonObject
from deltic.server.access import Access
from deltic.server.chat.generation import unavailable
from deltic.server.connections import Connections, HttpServer
from deltic.server.errors import ApiError
from deltic.server.limits import Accounts
from deltic.server.page.files import is_of_page, page_response
from deltic.server.transport import in_form, json_response

if TYPE_CHECKING:
    import ssl

TELLING = ("/health", "/ping", "/ready")
"""Paths that say how far it is; all others but the page only that there is no model yet."""


class Meanwhile:
    """A server on the same socket, until the real one takes it over."""

    def __init__(self, config: ServerConfig, listener: socket.socket, secured: ssl.SSLContext | None) -> None:
        """Starts to answer. Raises ConfigError."""
        self.stage, self.done = "", 0.0
        self._root = config.root_path
        self._access = Access(config, Accounts(config))
        self._http = HttpServer(self, Connections(config.client_timeout_s), ws="none", timeout_graceful_shutdown=1)
        self._http.config.load()
        self._http.config.ssl = secured
        self._running = asyncio.create_task(self._http.serve([listener.dup()]))

    async def stop(self) -> None:
        self._http.should_exit = True
        await asyncio.gather(self._running, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        message = f"{self.stage}: {100 * self.done:.0f} %"
        path, request = scope["path"].removeprefix(self._root), Request(scope)
        is_telling, is_page = path in TELLING, is_of_page(path) and scope["method"] in ("GET", "HEAD")
        try:
            self._access.check(request, open_=is_telling or is_page)
            if is_page:
                # It shows how far it is, and takes a chat when there is a model.
                return page_response(path, request)
            if not is_telling:
                raise unavailable(message)
        except ApiError as error:
            return in_form(error, path, scope)
        loading = {"stage": self.stage, "done": self.done}
        fields: JsonObject = {"status": "starting", "message": message, "loading": loading}
        return json_response(fields, 503)
