"""Access control: API keys; and on a server without keys, protection from web pages.

A browser lets any page send requests to a server on its user's machine. Without a key, what the page cannot
do tells it from a program: it may not POST `application/json` elsewhere without asking first (which CORS, off
by default, denies), and a name of its own that it has pointed at 127.0.0.1 (DNS rebinding) stands in the Host
header. So, without keys:

- a POST must have `Content-Type: application/json`, else 415. A form (an upload), a WebSocket and a body of
  another type (as curl sends to Ollama's routes) are what a page may send anywhere; but then the browser says
  whose page it is: an Origin that is neither this server nor `--cors-origin` gets 403;
- a server that listens on a loopback address answers only to `localhost`, a name under it, or any IP address
  (rebinding needs a name), with any port, else 403. A request without a Host header is none of a browser's.

No page reaches a Unix socket, but through a proxy, whose names are its own. A server that listens on all
addresses is meant for others and answers to any name: give it a key.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.requests import HTTPConnection, Request

from deltic.config import ServerConfig
from deltic.server.address import listens_on_loopback
from deltic.server.errors import ApiError
from deltic.server.limits import Account, Accounts

KEY_PROTOCOL = "openai-insecure-api-key."
"""Prefix that a browser, which can give a WebSocket no header, puts in front of the key as one of its
subprotocols.
"""

_HOST = re.compile(r"(\[[0-9a-f:.]*\]|[^:\[\]]*)(?::\d*)?")


class Access:
    """The rules of one server."""

    def __init__(self, config: ServerConfig, accounts: Accounts) -> None:
        self._accounts = accounts
        self._is_local = config.uds is None and listens_on_loopback(config.host)
        self._origins = config.cors_origin

    def check(
        self, request: Request, *, open_: bool, any_type: bool = False, is_shared: bool = False
    ) -> Account | None:
        """The account of its key; None where none is needed (open_). any_type: its body need not be declared
        as JSON. is_shared: it asks for data that all keys share, which only administrators may. Raises
        ApiError (401, 403, 415).
        """
        if self._accounts:
            if open_:
                return None
            account = self._check_key(request)
            if is_shared and not account.is_admin:
                message = (
                    f"key {account.name!r} may not see or change what all keys share. Use a key without a name, or one whose "
                    "table in --api-key-file has 'admin = true'."
                )
                raise ApiError(403, message, code="not_an_admin")
            return account
        self._check_host(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            if any_type:
                self._check_origin(request)
                return None
            message = f"the body is {kind or 'of no declared type'}. Send JSON with 'Content-Type: application/json'."
            raise ApiError(415, message, code="unsupported_media_type")
        return None

    def check_socket(self, connection: HTTPConnection) -> Account | None:
        """Checks a WebSocket's handshake (see `check`)."""
        if self._accounts:
            return self._check_key(connection)
        self._check_host(connection)
        self._check_origin(connection)
        return None

    def _check_host(self, request: HTTPConnection) -> None:
        host = _without_port(request.headers.get("host", ""))
        if self._is_local and host and not _is_harmless(host):
            message = (
                f"the Host header names {host!r}, but this server is for this machine only. Use http://localhost or "
                "http://127.0.0.1, or start it with --api-key."
            )
            raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, request: HTTPConnection) -> None:
        origin = request.headers.get("origin")
        own = origin and origin.partition("://")[2] == request.headers.get("host")
        if origin and not own and origin not in self._origins and "*" not in self._origins:
            message = f"a page of {origin!r} may not send this. Start the server with --cors-origin or --api-key."
            raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, request: HTTPConnection) -> Account:
        own = request.headers.get("x-api-key", "") or key_offered(request)  # Anthropic's header
        scheme, _, given = request.headers.get("authorization", f"Bearer {own}").partition(" ")
        account = self._accounts.find(given.strip().encode("latin-1"))  # the bytes as they were sent
        if account is None or scheme.lower() != "bearer":
            message = "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return account


def key_offered(connection: HTTPConnection) -> str:
    """The key among a WebSocket's subprotocols; "" for none."""
    offered = connection.scope.get("subprotocols", ())
    return next((name.removeprefix(KEY_PROTOCOL) for name in offered if name.startswith(KEY_PROTOCOL)), "")


def _without_port(host: str) -> str:
    """The name or address in a Host header: `localhost:8000`, `[::1]:8000`. All of one that has another
    form.
    """
    host = host.strip().lower()
    match = _HOST.fullmatch(host)
    return match[1].strip("[]") if match else host


def _is_harmless(host: str) -> bool:
    """Returns whether no page's name can be behind a Host header."""
    name = host.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
