"""Clients that send too much, too slowly, nothing, or read nothing: what each takes is bounded, and others are served."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from deltic.server import connections
from deltic.server.connections import MAX_HEAD_BYTES, Connections, HttpServer
from deltic.server.speech.socket import PATH
from deltic.server.transport import SERVER_SEND, EventStream, unless_disconnected
from tests.fake_engine import END, FakeEngineClient, make_app, served
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SHORT_S = 0.4
"""The client's timeout where it is to end."""


HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""A new connection for each request."""


class Raw:
    """A connection of which every byte is ours."""

    def __init__(self, url: str, is_slow: bool = False) -> None:
        host, _, port = url.rpartition("//")[2].partition(":")
        self.socket = socket.socket()
        if is_slow:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(20)
        self.socket.connect((host, int(port)))

    def send(self, data: bytes) -> bool:
        """Whether the server still took it."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def one_error(self) -> bytes:
        """One answer with an error's body, which may come in several reads."""
        data = b""
        while not data.endswith(b"}}") and (piece := self.socket.recv(65536)):
            data += piece
        return data

    def answer(self) -> bytes:
        """All until the server closes."""
        data = b""
        try:
            while piece := self.socket.recv(65536):
                data += piece
        except ConnectionError:
            pass
        return data


def n_closed(url: str, why: str) -> int:
    text = HTTP.get(f"{url}/metrics").text
    found = re.search(rf'^deltic_http_connections_closed_total{{reason="{why}"}} (\S+)', text, re.MULTILINE)
    return int(float(found.group(1))) if found else 0


START = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "headers": (b"GET / HTTP/1.1\r\n", b"x: " + b"y" * 997 + b"\r\n"),
    "one header": (b"GET / HTTP/1.1\r\nx: ", b"y" * 1000),
    "one header's name": (b"GET / HTTP/1.1\r\n", b"y" * 1000),
    "request line": (b"GET /", b"y" * 1000),
    "method": (b"", b"G" * 1000),
    "empty lines": (b"", b"\r\n" * 500),
    "chunk's extension": (CHUNKED + b"1;", b"y" * 1000),
    "trailers": (CHUNKED + b"0\r\n", b"x: " + b"y" * 997 + b"\r\n"),
    "one trailer": (CHUNKED + b"0\r\nx: ", b"y" * 1000),
    "handshake": (b"GET %s HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n" % PATH.encode(), b"x: " + b"y" * 997 + b"\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_refused(live: str, what: str) -> None:
    client = Raw(live)
    start, more = ENDLESS[what]
    client.send(start)
    n_sent = 0
    while n_sent < 30_000_000 and client.send(more * 16):
        n_sent += 16 * len(more)
    assert n_sent < 30_000_000
    assert n_closed(live, "head") + n_closed(live, "malformed") == 1


@pytest.mark.parametrize("what", ["headers", "request line"])
def test_a_head_that_is_too_large_is_answered(live: str, what: str) -> None:
    start, more = ENDLESS[what]
    client = Raw(live)
    client.send(start + more * (MAX_HEAD_BYTES // len(more) + 2))
    head, _, body = client.answer().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "head_too_large"


def test_a_head_below_the_limit_is_read(live: str) -> None:
    assert HTTP.get(f"{live}/health", headers={"x": "y" * 60_000}).status_code == 200
    client = Raw(live)  # whose head begins where a body ends
    body = b'{"prompt": "' + b"a" * 100_000 + b'"}'
    client.send(
        START + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /health HTTP/1.1\r\nx: " + b"y" * 60_000
    )
    client.send(b"\r\nconnection: close\r\n\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", client.answer()) == [b"400", b"200"]  # the prompt is too long


def test_what_is_not_http_is_answered_as_other_errors(live: str) -> None:
    client = Raw(live)
    client.send(b"\x16\x03\x01 hello\r\n\r\n")
    answer = client.answer()
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"GET /health HTTP/1.1\r\nx: y", b"408"),
        (START + b"content-length: 100\r\n\r\n{", b"408"),
        (CHUNKED + b"5\r\n{", b"408"),
    ],
    ids=["nothing", "half a head", "half a body", "half a chunk"],
)
def test_silence_ends(engine: FakeEngineClient, sent: bytes, status: bytes | None) -> None:
    with served(make_app(engine), client_timeout_s=SHORT_S) as url:
        client = Raw(url)
        client.send(sent)
        answer = client.answer()
        assert (answer[9:12] or None) == status
        assert n_closed(url, "timeout") == 1


@pytest.mark.parametrize(
    ("start", "drop"), [(b"GET /health HTTP/1.1\r\nx: ", b"y"), (START + b"content-length: 1000\r\n\r\n", b" ")]
)
def test_drops_do_not_keep_a_connection(engine: FakeEngineClient, start: bytes, drop: bytes) -> None:
    with served(make_app(engine), client_timeout_s=SHORT_S) as url:
        client = Raw(url)
        client.send(start)
        began_s = time.monotonic()
        while client.send(drop) and time.monotonic() - began_s < 10:
            time.sleep(0.05)
        assert time.monotonic() - began_s < 10 and n_closed(url, "timeout") == 1


def test_a_second_head_must_be_whole_too(engine: FakeEngineClient) -> None:
    with served(make_app(engine), client_timeout_s=SHORT_S) as url:
        client = Raw(url)
        client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        client.socket.recv(4096)
        time.sleep(2 * SHORT_S)  # idle between two requests it may be longer
        client.send(b"GET /health HTTP/1.1\r\n")
        assert client.answer().startswith(b"HTTP/1.1 408 ")


def test_who_waits_for_an_answer_is_not_silent(engine: FakeEngineClient) -> None:
    engine.token_s = SHORT_S
    with served(make_app(engine), client_timeout_s=SHORT_S) as url:
        answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=30)
        assert answer.status_code == 200


@pytest.mark.parametrize("rest", [b"0123456789", b""], ids=["then the body ends", "the body never ends"])
def test_an_answer_before_the_end_of_its_body_is_the_only_one(engine: FakeEngineClient, rest: bytes) -> None:
    with served(make_app(engine, api_key=("a=k",)), client_timeout_s=SHORT_S) as url:
        client = Raw(url)
        client.send(START + b"content-length: 10\r\n\r\n")
        assert client.one_error().startswith(b"HTTP/1.1 401 ")
        client.send(rest)
        if not rest:
            assert client.answer() == b""
            return
        time.sleep(2 * SHORT_S)  # it is idle then, as after any other answer
        client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert client.answer().startswith(b"HTTP/1.1 200 ")


def test_idle_connections_end_after_a_late_body_too(engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", SHORT_S)
    with served(make_app(engine, api_key=("a=k",)), client_timeout_s=100) as url:
        client = Raw(url)
        client.send(START + b"content-length: 10\r\n\r\n")
        assert client.one_error().startswith(b"HTTP/1.1 401 ")
        client.send(b"0123456789")
        assert client.answer() == b""


PIPELINED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def begun(url: str, is_stream: bool) -> Raw:
    """A client that has asked for a long answer."""
    body = json.dumps({"prompt": "a", "max_tokens": 3000, "stream": is_stream}).encode()
    client = Raw(url)
    client.send(START + b"content-length: %d\r\n\r\n" % len(body) + body)
    if is_stream:
        client.socket.recv(100)
    return client


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_pipelined_request_does_not_hide_that_the_client_left(is_stream: bool) -> None:
    engine = FakeEngineClient(answer=lambda request, index: [65] * 3000 + [END], max_model_len=100_000)
    engine.token_s = 0.01
    with served(make_app(engine)) as url:
        client = begun(url, is_stream)
        client.send(PIPELINED)
        time.sleep(0.1)
        client.socket.close()
        wait_for(lambda: engine.aborts)


def test_a_malformed_request_writes_nothing_into_the_answer_before_it() -> None:
    engine = FakeEngineClient(answer=lambda request, index: [65] * 3000 + [END], max_model_len=100_000)
    engine.token_s = 0.01
    with served(make_app(engine)) as url:
        client = begun(url, is_stream=True)
        client.send(PIPELINED + b"GARBAGE\r\n\r\n")
        assert b"HTTP/1.1 400" not in client.answer()
        wait_for(lambda: engine.aborts)


@pytest.mark.parametrize("kept", [b"", b"connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(live: str, kept: bytes) -> None:
    ids = json.dumps({"tokens": [97] * 200_000}).encode()
    asked = {
        b"/v1/completions": b'{"prompt": "hello", "max_tokens": 5, "stream": true}',
        b"/detokenize": ids,  # an answer that is made while it is sent
        b"/tokenize": b'{"prompt": "hello"}',
    }
    for path, body in asked.items():
        raw = Raw(live)
        head = b"POST %b HTTP/1.0\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
        raw.send(head % (path, kept, len(body)) + body)
        if path == b"/tokenize" and kept:
            raw.socket.shutdown(socket.SHUT_WR)
        head, _, said = raw.answer().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head, head
        if path == b"/v1/completions":
            assert said.startswith(b"data: {") and said.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(said)
            assert (b"content-length" in head) == (path == b"/tokenize")


def test_a_body_that_comes_slowly_is_read(engine: FakeEngineClient) -> None:
    body = b'{"prompt": "a"}' + b" " * 100_000

    def drops() -> Iterator[bytes]:
        for at in range(0, len(body), 10_000):
            time.sleep(SHORT_S / 4)
            yield body[at : at + 10_000]

    with served(make_app(engine), client_timeout_s=SHORT_S) as url:
        headers = {"content-type": "application/json"}
        assert HTTP.post(f"{url}/v1/completions", content=drops(), headers=headers, timeout=30).status_code == 200


def test_who_reads_nothing_of_a_stream_is_cut(engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.transport.EventStream.max_unsent_bytes", 100_000)
    engine.answer, engine.batch = lambda request, index: [*b"a" * 200_000, END], 100
    assert engine.info
    engine.info.max_model_len, engine.info.n_pages = 300_000, 5_000
    with served(make_app(engine)) as url:
        client = Raw(url, is_slow=True)
        body = json.dumps({"prompt": "a", "max_tokens": 250_000, "stream": True, "logprobs": 3}).encode()
        client.send(START + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: engine.aborts, 30)
        assert b"[DONE]" not in client.answer()
        assert HTTP.get(f"{url}/health").status_code == 200


def test_a_stream_with_a_gap_has_no_proper_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "max_unsent_bytes", 1000)
    sent: list[bytes] = []

    async def run() -> None:
        reads = asyncio.Event()

        class Stream(EventStream):
            async def run(self) -> None:
                for chunk in range(50):
                    self.write(b"%03d " % chunk * 60)
                    await asyncio.sleep(0)
                reads.set()
                await asyncio.sleep(0.01)
                self.write(b"999 ")

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await reads.wait()
                sent.append(message["body"])

        async def receive() -> Any:
            await asyncio.Event().wait()

        await Stream()({"type": "http", SERVER_SEND: send, "headers": [], "path": "/"}, receive, send)

    asyncio.run(run())
    *told, last = sent
    numbers = sorted(map(int, {*b"".join(told).split()}))
    assert numbers == [*range(len(numbers))] and 0 < len(numbers) < 50
    assert b"stream_not_read" in last and b"[DONE]" not in last


def test_who_takes_nothing_of_an_answer_is_cut(engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", SHORT_S)
    app = make_app(engine)
    app.add_route("/large", lambda request: Response(bytes(20_000_000)))
    with served(app, client_timeout_s=SHORT_S, timeout_keep_alive=1) as url:
        client = Raw(url, is_slow=True)
        client.send(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_for(lambda: n_closed(url, "stalled") == 1, 30)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_tls_handshake_that_never_ends_is_ended(engine: FakeEngineClient, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    with served(make_app(engine), client_timeout_s=1.0, ssl_keyfile=key, ssl_certfile=certificate) as url:
        client = Raw(url)
        began_s = time.monotonic()
        assert client.answer() == b"" and time.monotonic() - began_s < 15
        silent = Raw(url)
        silent.socket = ssl._create_unverified_context().wrap_socket(silent.socket)
        silent.send(b"GET /health HTTP/1.1\r\n")
        assert silent.answer().startswith(b"HTTP/1.1 408 ")
        silent.socket.close()
        assert HTTP.get(f"{url.replace('http', 'https')}/health").status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_text_that_the_library_gives_up_on_is_refused(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """As more than ten million spaces are: the library panics, with what is no Exception."""

    class Panic(BaseException):
        pass

    def panics(*args: object, **named: object) -> None:
        raise Panic("called `Result::unwrap()` on an `Err` value: Onig: retry-limit-in-match over")

    app = make_app(engine)
    backend = MagicMock()
    backend.encode_batch_fast = panics
    monkeypatch.setattr(app.state.server.models["fake"].tokenizer, "_backend", backend)
    with served(app) as url:
        answer = HTTP.post(f"{url}{path}", json={"prompt": "   "})
        assert answer.status_code == 400 and "cannot read this text" in answer.json()["error"]["message"]


def test_an_error_of_any_kind_has_a_body_and_is_counted(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics() -> None:
        raise BaseException("panicked")

    app = make_app(engine)
    monkeypatch.setattr(app.state.server, "status", panics)
    with served(app) as url:
        answer = HTTP.get(f"{url}/health")
        assert answer.status_code == 500 and answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert app.state.server.metrics.responses["/health", 500] == 1  # once it has ended: it counts behind the answer


FEW = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, ({n}, {n}))
from tests.fake_engine import FakeEngineClient, make_app, served
with served(make_app(FakeEngineClient())) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_silent_connections_lock_nobody_out() -> None:
    """More of them than there are descriptors."""
    process = subprocess.Popen(
        [sys.executable, "-c", FEW.format(n=128)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout and process.stderr
    url = process.stdout.readline().strip()
    silent = [Raw(url) for _ in range(160)]
    try:
        for _ in range(20):
            silent.append(Raw(url))
            assert HTTP.get(f"{url}/health").status_code == 200
        assert n_closed(url, "descriptors") >= 60
    finally:
        _, log = process.communicate(timeout=20)
    assert log.count("few descriptors are left of 128") == 1
    assert silent[0].answer() == b""


def test_the_server_may_have_as_many_descriptors_as_there_are() -> None:
    code = (
        "import resource; from deltic.server.serve import raise_descriptors; raise_descriptors();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    shell = f"ulimit -Sn 64; exec {sys.executable} -c '{code}'"
    soft, hard = subprocess.run(
        ["sh", "-c", shell], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    assert int(soft) == min(int(hard) if int(hard) > 0 else 1 << 20, 1 << 20)


@pytest.mark.skipif(not os.environ.get("MANY_CONNECTIONS"), reason="ten thousand connections; set MANY_CONNECTIONS=1")
def test_ten_thousand_idle_connections() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FEW.format(n=12_000)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    url = process.stdout.readline().strip()

    def used() -> tuple[float, int]:
        text = HTTP.get(f"{url}/metrics").text
        seconds, memory = (
            re.search(rf"^process_{name} (\S+)", text, re.MULTILINE)
            for name in ("cpu_seconds_total", "resident_memory_bytes")
        )
        assert seconds and memory
        return float(seconds.group(1)), int(float(memory.group(1)))

    _, before_bytes = used()
    idle = []
    for _ in range(10_000):
        client = Raw(url)
        client.send(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.socket.recv(4096).startswith(b"HTTP/1.1 200")
        idle.append(client)
    cpu_s, after_bytes = used()
    waits = []
    for _ in range(100):
        began_s = time.monotonic()
        assert HTTP.get(f"{url}/health").status_code == 200
        waits.append(time.monotonic() - began_s)
        time.sleep(0.1)
    print(
        f"{len(idle)} idle connections: {(after_bytes - before_bytes) / 1e4 / 1e3:.1f} kB each, "
        f"{(used()[0] - cpu_s) / 10:.3f} CPU seconds a second with 10 requests in it, "
        f"/health in {sorted(waits)[50] * 1e3:.1f} ms, at most {max(waits) * 1e3:.1f} ms"
    )
    process.communicate(timeout=60)


def test_descriptors_without_a_limit_are_never_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    connections = Connections(1.0)
    connections.silent[object()] = None  # type: ignore[index]
    connections.make_room(50)
    assert connections.silent


def test_a_server_leaves_signals_to_its_process() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with HttpServer(lambda: None, Connections(1.0)).capture_signals():  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_body_behind_its_answer_is_not_read_for_ever() -> None:
    """A 404 comes before the body, which may be of any length; a small rest is let pass, and the connection serves on."""
    with served(make_app(FakeEngineClient())) as url:
        for n_bytes, is_kept in ((500_000, True), (1_000_000_000, False)):
            with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20) as client:
                head = f"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: {n_bytes}\r\n\r\n"
                client.sendall(head.encode())
                answer = client.recv(65_536)
                while not answer.endswith(b"}}"):  # its body may come by itself
                    answer += client.recv(65_536)
                assert answer.startswith(b"HTTP/1.1 404")
                try:
                    for _ in range(n_bytes // 100_000):
                        client.sendall(bytes(100_000))
                    client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    again = client.recv(65_536)
                except OSError:
                    again = b""
                assert again.startswith(b"HTTP/1.1 200") == is_kept


class Watched:
    """Work that a client waits for, who may leave; the turns of the event loop are counted."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.work, self.gone, self.n_turns = loop.create_future(), loop.create_future(), 0
        self.waiting = asyncio.create_task(unless_disconnected(self.receive, self.work))

    async def receive(self) -> dict[str, str]:
        await self.gone
        return {"type": "http.disconnect"}

    async def count(self) -> None:
        while not self.waiting.done():
            self.n_turns += 1
            await asyncio.sleep(0)


def test_what_is_done_is_seen_a_turn_of_the_loop_later() -> None:
    """Where another key's requests make a turn last 0.1 s, each one counts."""

    async def turns() -> int:
        watched = Watched()
        await asyncio.sleep(0.01)
        watched.work.set_result("done")
        await watched.count()
        assert await watched.waiting == "done"
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        return watched.n_turns

    assert asyncio.run(turns()) <= 2


def test_a_coroutine_that_a_client_waits_for_takes_no_turn_of_the_loop_by_itself() -> None:
    """As a task of its own it began a turn later, behind all other requests."""

    async def step() -> str:
        return "done"

    async def never() -> dict[str, str]:
        return await asyncio.get_running_loop().create_future()

    async def go() -> None:
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        assert await unless_disconnected(never, step()) == "done" and not turns
        await asyncio.sleep(0)
        assert turns and len(asyncio.all_tasks()) == 1

    asyncio.run(go())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_leaves_as_its_work_ends_cancels_nothing_else(at_once: bool) -> None:
    async def go() -> str:
        watched = Watched()
        await asyncio.sleep(0.01)
        if at_once:
            watched.gone.set_result(None)
        watched.work.set_result("done")
        watched.gone.done() or watched.gone.set_result(None)
        try:
            said = await watched.waiting
        except ClientDisconnect:
            said = "left"
        await asyncio.sleep(0.01)
        return said

    assert asyncio.run(go()) in ("done", "left")


@pytest.mark.parametrize("leaves", [True, False])
def test_work_ends_when_its_client_leaves_or_who_waits_is_cancelled(leaves: bool) -> None:
    async def end() -> None:
        watched = Watched()
        await asyncio.sleep(0.01)
        if leaves:
            watched.gone.set_result(None)
        else:
            watched.waiting.cancel()
        with pytest.raises(ClientDisconnect if leaves else asyncio.CancelledError):
            await watched.waiting
        assert watched.work.cancelled()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(end())
