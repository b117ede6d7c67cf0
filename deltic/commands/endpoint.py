"""An OpenAI endpoint seen from the client's side, and a server child of our own to talk to.

`Endpoint` is a small asyncio HTTP/1.1 client on httptools' parser with server-sent events. It exists beside
the well-known client libraries because the load generator shares its cores with the engine it measures: an
event must cost little (14 us here, 53 us through httpx), and its arrival time must be the socket's, not
that of whoever reads it later. It leaves out redirects, proxies, compression and HTTP/2.

Used by `deltic chat`, `run`, `say` and `bench`, and the soak; an `Endpoint` knows no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import dataclasses
import functools
import json
import mimetypes
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import httptools

from deltic.config import ENV_PREFIX, FOR_A_CHILD, Config, ConfigError, MayPass, ServerConfig
from deltic.json_types import JsonObject

PROGRAM = (sys.executable, "-m", "deltic")
"""Command that starts a LocalServer."""

DONE = b"[DONE]"
"""Payload of the last event of an OpenAI stream."""


class EndpointError(MayPass):
    """The endpoint could not be reached, or broke the connection; the message names the URL."""


class EventSplitter:
    """Bytes of a `text/event-stream` body, cut anywhere, to the payloads of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The `data:` payloads of the events that `data` completes. Comments and other fields are dropped."""
        # A payload is JSON or [DONE], which never hold a raw carriage return: dropping them leaves one line
        # ending.
        *blocks, self._rest = (self._rest + data.replace(b"\r", b"")).split(b"\n\n")
        payloads = []
        for block in blocks:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                payloads.append(b"\n".join(lines))
        return payloads


class Connection(asyncio.Protocol):
    """TCP or TLS connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.begin()

    def begin(self) -> None:
        """Forgets the last exchange."""
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.pieces: collections.deque[tuple[float, bytes]] = collections.deque()
        self.status = 0
        self.head_done = False
        self.complete = False
        self.reusable = False
        self._waiter: asyncio.Future[None] | None = None
        self._arrival = 0.0

    async def changed(self) -> None:
        """Waits until the next bytes, or the end of the connection."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # those of other event loops are not of its class

    def data_received(self, data: bytes) -> None:
        self._arrival = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        # Without a length or chunks, the end of the connection is the end of the body.
        if self.head_done and not {"content-length", "transfer-encoding"} & self.headers.keys():
            self.complete = True
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.head_done = self.status >= 200

    def on_body(self, data: bytes) -> None:
        self.pieces.append((self._arrival, data))

    def on_message_complete(self) -> None:
        if self.head_done:
            self.complete = True
            self.reusable = self.parser.should_keep_alive()

    def abort(self) -> None:
        """Drops the connection at once: the server sees the client gone."""
        self.closed = True
        if self.transport is not None:
            self.transport.abort()


class HttpReply:
    """An answer whose head has arrived. Read it whole, or event by event, once."""

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self._endpoint = endpoint
        self._connection: Connection | None = connection
        self.status = connection.status
        self.headers = connection.headers

    async def pieces(self) -> AsyncGenerator[tuple[float, bytes], None]:
        """(arrival on time.perf_counter's clock in seconds, bytes) as the body comes.

        Raises EndpointError when it breaks off.
        """
        connection = self._connection
        if connection is None:
            return
        try:
            while True:
                while connection.pieces:
                    yield connection.pieces.popleft()
                if connection.complete:
                    break
                if connection.closed:
                    raise EndpointError(f"{self._endpoint.url}: the connection broke in the middle of an answer")
                await connection.changed()
        finally:
            self.close()

    async def read(self) -> bytes:
        """The whole body. Raises EndpointError when the connection breaks before its end."""
        return b"".join([data async for _, data in self.pieces()])

    async def events(self) -> AsyncGenerator[tuple[float, bytes], None]:
        """(arrival, payload) of each event, `[DONE]` included."""
        splitter = EventSplitter()
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for arrival, data in pieces:
                for payload in splitter.feed(data):
                    yield arrival, payload

    def close(self) -> None:
        """Gives the connection back, or drops it when the body has not come to its end."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.complete and connection.reusable and not connection.closed:
            self._endpoint.keep(connection)
        else:
            connection.abort()


class Endpoint:
    """An OpenAI-compatible server: its address, key and idle connections. For use within one event loop."""

    def __init__(self, url: str, api_key: str | None = None, cacert: str | None = None) -> None:
        """`url` may end in `/v1` or not. cacert: a file of the certificates that vouch for its own.

        Raises ConfigError when it is no http(s) URL, the key no header's value, or the file of no use.
        """
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else "http://" + url)
            is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port above 65535, an open bracket
            is_server = False
        if not is_server or not parts.hostname or not url.isascii():
            raise ConfigError(f"{url!r} is not a URL of a server. Give one such as http://127.0.0.1:8000")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("--api-key: a key is made of printable ASCII characters")
        self.url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, "", "", ""))
        self.api_key = api_key
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        if cacert is not None and parts.scheme != "https":
            raise ConfigError(f"--cacert {cacert} is for an https:// URL, not {url}")
        try:
            self._tls = ssl.create_default_context(cafile=cacert) if parts.scheme == "https" else None
        except OSError as error:
            raise ConfigError(
                f"--cacert {cacert} cannot be used ({error.strerror or error}). Give a PEM file."
            ) from None
        if self._tls is not None and cacert is not None:  # the server's own certificate is enough
            self._tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self._idle: list[Connection] = []
        self._head = f"Host: {parts.netloc}\r\nAccept-Encoding: identity\r\nUser-Agent: deltic\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    def keep(self, connection: Connection) -> None:
        """Takes back a connection that can carry another exchange."""
        connection.begin()
        self._idle.append(connection)

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connection(self) -> tuple[Connection, bool]:
        """A connection, and whether it is fresh."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except ssl.SSLCertVerificationError as error:
            raise EndpointError(
                f"{self.url}: its certificate is not trusted ({error.verify_message}). Give what vouches for it with --cacert FILE: its "
                "authority's certificate, or its own where it is self-signed."
            ) from None
        except ssl.SSLError as error:
            raise EndpointError(f"{self.url}: no TLS there ({error.reason or error}). Try http://") from None
        except OSError as error:
            raise EndpointError(
                f"{self.url}: cannot connect ({error.strerror or error}). Start a server with deltic serve."
            ) from None
        return connection, True

    async def open(self, method: str, path: str, body: object = None, headers: str = "") -> HttpReply:
        """Sends a request and waits for the head of its answer, whatever its status.

        `path` starts at the server's root (`/v1/completions`); `body` is bytes as they are, or encoded as
        JSON; `headers` are whole lines. Raises EndpointError. A cancelled wait closes the connection.
        """
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}{headers}Content-Length: {len(data)}\r\n"
        if body is not None:
            lines += "Content-Type: application/json\r\n"
        while True:
            connection, fresh = await self._connection()
            assert connection.transport is not None
            connection.transport.write(lines.encode("latin-1") + b"\r\n" + data)
            try:
                while not (connection.head_done or connection.closed):
                    await connection.changed()
            except BaseException:
                connection.abort()
                raise
            if connection.head_done:
                return HttpReply(self, connection)
            if fresh:
                raise EndpointError(f"{self.url}: the server closed the connection without an answer")
            # A kept connection that the server had closed meanwhile: not the request's fault, try a fresh
            # one.

    async def json(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and decoded body (None when it is not JSON)."""
        reply = await self.open(method, path, body)
        data = await reply.read()
        try:
            return reply.status, json.loads(data)
        except ValueError:
            return reply.status, None


def error_message(body: object, status: int) -> str:
    """The message of an OpenAI error body, or the status when it has none."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"{message} (HTTP {status})" if message else f"HTTP {status}"


async def model_name(endpoint: Endpoint, *, speaks: bool = False) -> str:
    """The first model the endpoint lists, of a Deltic server the first that speaks, or writes.

    Raises EndpointError.
    """
    status, body = await endpoint.json("GET", "/v1/models")
    try:
        cards = body["data"]
        return str(next((card for card in cards if ("speech" in card) == speaks), cards[0])["id"])
    except (TypeError, LookupError):
        message = error_message(body, status)
        if status in (401, 403):
            raise EndpointError(f"{endpoint.url}: {message}. Give its key with --api-key.") from None
        raise EndpointError(f"{endpoint.url} lists no model: {message}. Name one with --model.") from None


def picture_url(name: str) -> str:
    """The data: URL of a file; what is a URL already stays. Raises EndpointError."""
    if name.startswith(("http://", "https://", "data:")):
        return name
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise EndpointError(f"cannot read {name}: {error.strerror}") from None
    kind = mimetypes.guess_type(name)[0] or "image"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class ServerFailed(MayPass):
    """The server child did not get ready; the message holds the end of its log."""


def flags(config_class: type[Config], given: Mapping[str, object]) -> list[str]:
    """Command-line flags for the fields of `config_class` in `given` (as parsed by config.add_flags)."""
    arguments = []
    for field in dataclasses.fields(config_class):
        values = given.get(field.name)
        if isinstance(values, bool):
            arguments.append(("--" if values else "--no-") + field.name.replace("_", "-"))
            continue
        for value in values if isinstance(values, (list, tuple)) else [] if values is None else [values]:
            arguments += ["--" + field.name.replace("_", "-"), str(value)]
    return arguments


def own_environment() -> dict[str, str]:
    """The environment for a server of ours: without what belongs to the main server."""
    main = {field.name for field in dataclasses.fields(ServerConfig)} - FOR_A_CHILD | {"config", "trace"}
    left_out = {ENV_PREFIX + name.upper() for name in main}
    return {name: text for name, text in os.environ.items() if name not in left_out}


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalServer:
    """`deltic serve` as a child process on the loopback, behind a key of its own."""

    def __init__(self, arguments: list[str], port: int | None = None, api_key: str | None = None) -> None:
        """`arguments` are those of `deltic serve`, without address and key; port, api_key: a free one and a
        new one by default.
        """
        from deltic.host.process import die_with_parent  # here: others' servers need no engine

        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.api_key = api_key or secrets.token_urlsafe(16)
        self.log = tempfile.NamedTemporaryFile(prefix="deltic-serve-", suffix=".log")  # noqa: SIM115
        own = ["--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(
            [*PROGRAM, "serve", *own, *arguments],  # the server's own settings come before any --and
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is ours to handle
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),  # however this process goes
            env=own_environment() | {f"{ENV_PREFIX}API_KEY": self.api_key},  # a command line is public
        )

    def log_tail(self, n_lines: int = 12) -> str:
        """The last lines the server printed."""
        return "\n".join(Path(self.log.name).read_text(errors="replace").splitlines()[-n_lines:])

    async def wait_ready(
        self, progress: Callable[[str, float], None] | None = None, timeout_s: float = 900.0
    ) -> Endpoint:
        """Waits for `/ready`, reporting (stage, part done).

        Raises ServerFailed, also when nothing changes for `timeout_s`.
        """
        endpoint = Endpoint(self.url, self.api_key)
        deadline, last = time.monotonic() + timeout_s, ("", 0.0)
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with status {self.process.returncode}:\n{self.log_tail()}")
            with contextlib.suppress(EndpointError):
                status, body = await endpoint.json("GET", "/ready")
                if status == 200:
                    return endpoint
                if isinstance(body, dict):
                    now = loading(body)
                    if now != last:  # a download may take hours
                        deadline, last = time.monotonic() + timeout_s, now
                    if progress:
                        progress(*now)
            await asyncio.sleep(0.05)
        raise ServerFailed(f"the server got no further for {timeout_s:.0f} s:\n{self.log_tail()}")

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, then SIGKILL after `timeout_s`; returns the exit status. May be called again."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        return self.process.returncode


@contextlib.contextmanager
def own_server(arguments: argparse.Namespace, server_arguments: list[str]) -> Iterator[LocalServer | None]:
    """A server that is started, and stopped in the end; None where --url names one."""
    server = None if arguments.url else LocalServer(server_arguments)
    try:
        yield server
    finally:
        if server is not None:
            server.stop()


async def reached(arguments: argparse.Namespace, server: LocalServer | None) -> Endpoint:
    """The server at --url; or `server`, once it is ready, which a terminal shows. Raises ServerFailed."""
    if server is None:
        return Endpoint(arguments.url, arguments.api_key, arguments.cacert)
    from rich.console import Console

    with Console(stderr=True).status("starting the server") as status:
        return await server.wait_ready(lambda stage, done: status.update(f"{stage} {done:.0%}"))


async def asked_model(arguments: argparse.Namespace, endpoint: Endpoint, *, speaks: bool = False) -> str:
    """The model that was named for the server at --url, or the adapter that was given to one of ours if it is
    the only one, else that of `model_name`. Raises EndpointError.
    """
    lora = getattr(arguments, "lora", None) or []
    only = lora[0].partition("=")[0] if len(lora) == 1 else None
    given = getattr(arguments, "model", None) if arguments.url else only
    return given or await model_name(endpoint, speaks=speaks)


def loading(body: JsonObject) -> tuple[str, float]:
    """Stage and part done (0 to 1) from the body of `/ready`."""
    part = body.get("loading") if isinstance(body.get("loading"), dict) else body
    assert part is not None
    done = part.get("done", 0.0)
    return str(part.get("stage") or "starting"), float(done) if isinstance(done, (int, float)) else 0.0
