"""What routers ask of a server, what they call requests, and how they notice that a server is about to stop."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltic import __version__, logs
from deltic.config import BUILT_IN, EngineConfig, ServerConfig
from deltic.engine.messages import PictureInfo
from deltic.server.app import create_app
from deltic.server.connections import Connections, HttpServer
from deltic.server.serve import _origin
from deltic.server.service import Server
from tests.fake_engine import PICTURE_TEMPLATE, FakeEngineClient, make_app, served, server_log, service_of
from tests.fake_speech import FakeSpeechClient, speech_service_of

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT, COMPLETION = "/v1/chat/completions/render", "/v1/completions/render"


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


def ask(app: Any, method: str, path: str, headers: dict[str, str] | None = None, **sent: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20) as client:
            return await client.request(method, path, headers=headers, **sent)

    return asyncio.run(go())


def several() -> Any:
    server = Server(ServerConfig())
    server.add(speech_service_of(server, FakeSpeechClient(), "speaker"))
    server.add(service_of(server, FakeEngineClient(n_pages=10), "writer"))
    server.add(service_of(server, FakeEngineClient(max_num_seqs=3), "other"))
    return create_app(server)


# What it is.


def test_what_a_gateway_asks_is_told(engine: FakeEngineClient) -> None:
    app = make_app(engine)
    told = ask(app, "GET", "/server_info").json()
    assert told == told | {
        "version": __version__, "status": "ready", "model_id": "fake", "served_model_name": "fake", "dp_size": 1,
        "tp_size": 1, "max_total_tokens": 64 * 64, "max_prefill_tokens": 512, "max_running_requests": 16,
        "max_num_reqs": 16, "max_model_len": 1024, "context_length": 1024, "page_size": 64, "max_queued_requests": 256,
        "kernels": "none", "device": "none",
    }  # fmt: skip
    said = ask(app, "POST", "/v1/chat/completions", json={"messages": HELLO}).json()
    assert told["system_fingerprint"] == said["system_fingerprint"]
    model = ask(app, "GET", "/model_info").json()
    assert model == {"served_model_name": "fake", "is_generation": True, "has_image_understanding": False}
    assert ask(app, "GET", "/is_sleeping").json() == {"is_sleeping": False}


def test_of_several_models_one_is_named() -> None:
    app = several()
    names = [ask(app, "GET", "/server_info", params=query).json()["model_id"] for query in ({}, {"model": "speaker"})]
    assert names == ["writer", "speaker"], "the first that writes, unless another is named"
    assert ask(app, "GET", "/server_info", params={"model": "other"}).json()["max_running_requests"] == 3
    for path in ("/server_info", "/model_info"):
        wrong = ask(app, "GET", path, params={"model": "none"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")


def test_sizes_are_told_once_they_are_known(engine: FakeEngineClient) -> None:
    engine.state, engine.info = "starting", None
    told = ask(make_app(engine), "GET", "/server_info").json()
    assert told["status"] == "starting" and "max_total_tokens" not in told


@pytest.mark.parametrize(("method", "path", "is_open"), [
    ("GET", "/server_info", False), ("GET", "/model_info", False), ("GET", "/is_sleeping", True),
    ("POST", CHAT, False), ("POST", COMPLETION, False),
])  # fmt: skip
def test_which_of_them_need_a_key(engine: FakeEngineClient, method: str, path: str, is_open: bool) -> None:
    app = make_app(engine, api_key=("a=first", "b=second"))
    body = {"json": {"messages": HELLO} if "chat" in path else {"prompt": "x"}} if method == "POST" else {}
    assert ask(app, method, path, **body).status_code == (200 if is_open else 401)
    key = {"authorization": "Bearer second"}
    assert ask(app, method, path, key, **body).status_code == 200, "a key of any name"


def test_a_place_on_this_machine_is_not_told(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]}
    snapshot = tmp_path / "models--Qwen--Tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    here = _origin(EngineConfig(model=str(tmp_path / "models--Qwen--Tiny")), snapshot)
    assert here == {"model_path": None, "tokenizer_path": None} | config
    of_hub = _origin(EngineConfig(model=str(snapshot)), snapshot)
    assert of_hub == {"model_path": "Qwen/Tiny", "tokenizer_path": "Qwen/Tiny"} | config
    other = replace(EngineConfig(model=str(tmp_path)), tokenizer="Qwen/Other")
    assert _origin(other, snapshot) == {"model_path": None, "tokenizer_path": "Qwen/Other"} | config
    dummy = _origin(EngineConfig(model=BUILT_IN, dummy="qwen3.5-0.8b"), snapshot)
    assert set(dummy.values()) == {None}, "what it borrows is not its own"


# The ids of a prompt.

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("fields", [
    {}, {"tools": [TOOL], "tool_choice": "auto"}, {"chat_template_kwargs": {"enable_thinking": True}},
    {"add_generation_prompt": False}, {"truncate_prompt_tokens": 7}, {"stream": True, "n": 2, "max_tokens": 5},
    {"messages": [*HELLO, {"role": "assistant", "content": "so"}], "continue_final_message": True, "add_generation_prompt": False},
    {"functions": [TOOL["function"]]}, {"messages": [{"role": "user", "content": "x" * 9000}], "truncate_prompt_tokens": 900},
])  # fmt: skip
def test_a_rendered_chat_has_the_ids_that_the_engine_gets(engine: FakeEngineClient, fields: dict[str, Any]) -> None:
    app, body = make_app(engine), {"model": "fake", "messages": HELLO} | fields
    rendered = ask(app, "POST", CHAT, json=body)
    assert rendered.status_code == 200 and not engine.requests, rendered.text
    assert ask(app, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert rendered.json() == {"model": "fake", "token_ids": engine.requests[0].prompt_ids, "features": None}


@pytest.mark.parametrize("prompt", ["one", ["one", "two<|im_end|>"], [1, 2, 3], [[1, 2], [3]], None])
def test_rendered_completions_are_a_list(engine: FakeEngineClient, prompt: Any) -> None:
    app, body = make_app(engine), {"prompt": prompt, "max_tokens": 3}
    rendered = ask(app, "POST", COMPLETION, json=body)
    assert rendered.status_code == 200 and not engine.requests, rendered.text
    assert ask(app, "POST", "/v1/completions", json=body).status_code == 200
    assert [one["token_ids"] for one in rendered.json()] == [sent.prompt_ids for sent in engine.requests]


def test_pictures_are_told_by_their_hashes_and_places() -> None:
    pytest.importorskip("PIL")
    from tests.pictures import file_of, rgb

    info = PictureInfo(min_pixels=4096, max_pixels=409_600, max_tokens=400)
    engine = FakeEngineClient(pictures=info)
    app = make_app(engine, PICTURE_TEMPLATE)
    urls = [
        f"data:image/png;base64,{base64.b64encode(file_of(rgb(*sides), 'PNG')).decode()}"
        for sides in ((64, 64), (160, 64))
    ]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}
    told = ask(app, "POST", CHAT, json=body).json()
    pictures: list[Any] = []
    submit = engine.submit

    def noted(request: Any, deliver: Any) -> None:
        pictures.extend(request.pictures)
        submit(request, deliver)

    engine.submit = noted  # type: ignore[method-assign]
    assert ask(app, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert told["token_ids"] == engine.requests[0].prompt_ids
    assert told["features"] == {
        "mm_hashes": {"image": [picture.identifier for picture in pictures]},
        "mm_placeholders": {"image": [{"offset": one.first, "length": one.n_tokens} for one in pictures]},
    }
    assert [one["length"] for one in told["features"]["mm_placeholders"]["image"]] == [4, 10]


def test_nothing_has_to_run_for_it(engine: FakeEngineClient) -> None:
    app = make_app(engine)
    ids = ask(app, "POST", CHAT, json={"messages": HELLO}).json()["token_ids"]
    for state, draining in (("ready", True), ("restarting", False)):
        engine.state, app.state.server.draining = state, draining  # type: ignore[assignment]
        assert ask(app, "POST", CHAT, json={"messages": HELLO}).json()["token_ids"] == ids
        for path in ("/server_info", "/model_info", "/is_sleeping", "/v1/models", "/metrics", "/version"):
            assert ask(app, "GET", path).status_code == 200, path
    engine.state, engine.info = "starting", None
    early = ask(app, "POST", COMPLETION, json={"prompt": "x"})
    assert early.status_code == 503 and "retry-after" in early.headers


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_what_cannot_be_rendered_is_refused(engine: FakeEngineClient, path: str) -> None:
    app, body = make_app(engine), {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    long = {"messages": [{"role": "user", "content": "x" * 3000}]} if path == CHAT else {"prompt": "x" * 3000}
    for sent, status, said in (
        ({"json": body | {"model": "none"}}, 404, "no model 'none'"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "JSON"),
        ({"json": body | {"wrong": 1}}, 400, "wrong"),
        ({"json": body | {"chat_template": "x"}}, 400, "chat_template"),
        ({"json": long}, 400, "1024"),
        ({"json": body | {"max_tokens": "many"}}, 400, "max_tokens"),
        ({"json": body | {"guided_json": "{"}}, 400, "guided_json"),  # as the answer would be
    ):
        answer = ask(app, "POST", path, **sent)  # type: ignore[arg-type]
        assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text
    assert ask(app, "POST", path, json=body).status_code == 200, "and nothing is lost"
    speaks = ask(several(), "POST", path, json=body | {"model": "speaker"})
    assert (speaks.status_code, speaks.json()["error"]["code"]) == (404, "unsupported_model")
    assert not engine.requests


# What it is called.

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(params=["text", "json"])
def lines(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    with server_log(logs.JsonFormatter() if request.param == "json" else None) as written:
        yield written


@pytest.mark.parametrize(
    "header", ["x-session-id", "x-session-affinity", "X-Claude-Code-Session-Id", "x-smg-routing-key"]
)
def test_the_log_names_session_and_trace(engine: FakeEngineClient, lines: io.StringIO, header: str) -> None:
    given = {header: "s-1", "traceparent": PARENT, "x-request-id": "r-1", "x-session-token": "secret"}
    assert ask(make_app(engine), "POST", "/v1/completions", given, json={"prompt": "x"}).status_code == 200
    (line,) = lines.getvalue().splitlines()
    assert "secret" not in line
    trace_id = PARENT.split("-")[1]
    if line.startswith("{"):
        assert json.loads(line).items() >= {"request_id": "r-1", "session": "s-1", "trace_id": trace_id}.items()
    assert f" session=s-1 trace_id={trace_id} r-1 " in line


@pytest.mark.parametrize("given", [
    {"x-session-id": "a b"}, {"x-session-id": "x" * 129}, {"x-session-id": ""}, {"x-session-id": "\x1b[2K"},
    {"traceparent": "00-" + "0" * 32 + "-00f067aa0ba902b7-01"}, {"traceparent": "ff" + PARENT[2:]}, {"traceparent": PARENT.upper()},
    {"traceparent": "4bf9"}, {},
])  # fmt: skip
def test_a_name_that_is_none_is_left_out(engine: FakeEngineClient, lines: io.StringIO, given: dict[str, str]) -> None:
    assert ask(make_app(engine), "POST", "/v1/completions", given, json={"prompt": "x"}).status_code == 200
    (line,) = lines.getvalue().splitlines()
    assert "session" not in line and "trace_id" not in line


def test_the_engine_is_told_the_names_for_its_trace_alone(engine: FakeEngineClient) -> None:
    given = {"x-session-id": "s-1", "traceparent": PARENT, "x-request-id": "r-1"}
    for trace in (None, Path("trace.json")):
        engine.config = replace(engine.config, trace=trace)
        assert ask(make_app(engine), "POST", "/v1/completions", given, json={"prompt": "x"}).status_code == 200
    labels = {"request_id": "r-1", "session": "s-1", "trace_id": PARENT.split("-")[1]}
    assert [sent.labels for sent in engine.requests] == [{}, labels]


# That it is about to stop.


class Raw:
    """A connection that is kept."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self.file = self.socket.makefile("rb")

    def send(self, text: str) -> None:
        self.socket.sendall(text.encode())

    def ask(self, path: str = "/v1/completions", body: str = '{"prompt": "x"}') -> None:
        self.send(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        self.send(f"content-length: {len(body)}\r\n\r\n{body}")

    def read(self) -> tuple[int, dict[str, str], bytes]:
        """An answer with a length. Raises IndexError where there is none."""
        status = int(self.file.readline().split()[1])
        headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(self.file.readline, b"\r\n"))
        return status, headers, self.file.read(int(headers["content-length"]))

    def is_at_end(self) -> bool:
        return self.file.read(1) == b""


def test_during_the_notice_requests_are_taken_and_connections_given_up(engine: FakeEngineClient) -> None:
    app = make_app(engine)
    with served(app) as url:
        kept, idle = Raw(url), Raw(url)
        for one in (kept, idle):
            one.ask()
            status, headers, _ = one.read()
            assert (status, headers.get("connection")) == (200, None)
        app.state.server.is_leaving = True
        for path in ("/health", "/ready", "/ping"):
            told = httpx.get(url + path)
            assert (told.status_code, told.json()["status"]) == (503, "draining")
        assert httpx.get(f"{url}/version").status_code == 200, "for an orchestrator that asks whether it lives"
        kept.ask()
        status, headers, _ = kept.read()
        assert (status, headers["connection"]) == (200, "close") and kept.is_at_end()
        stream = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n") and stream.headers["connection"] == "close"
        app.state.server.draining = True
        idle.ask()
        status, headers, _ = idle.read()
        assert (status, headers["connection"]) == (503, "close") and "retry-after" in headers and idle.is_at_end()
        assert httpx.get(f"{url}/health").json()["status"] == "stopping"


def test_a_request_that_was_just_sent_is_answered(engine: FakeEngineClient) -> None:
    """The server ends while a request is on its way: no connection is cut under it."""
    app = make_app(engine)
    with served(app) as url:
        idle, late = Raw(url), Raw(url)
        for one in (idle, late):
            one.ask()
            assert one.read()[0] == 200
        late.send("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        assert httpx.get(f"{url}/health").status_code == 200, "and so it has read the begin of that head"
        app.state.server.is_leaving = app.state.server.draining = True

        def finish() -> None:
            time.sleep(0.15)
            late.send('content-type: application/json\r\ncontent-length: 15\r\n\r\n{"prompt": "x"}')

        finishing = threading.Thread(target=finish)
        finishing.start()
    finishing.join()
    assert idle.is_at_end()
    status, headers, _ = late.read()
    assert (status, headers["connection"]) == (503, "close") and late.is_at_end()


def test_who_waits_to_be_taken_is_answered_too(engine: FakeEngineClient) -> None:
    app = make_app(engine)
    app.state.server.is_leaving = app.state.server.draining = True

    async def end() -> Raw:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(app, Connections(20.0))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])
        for task in server._accepting:  # so that it waits
            task.cancel()
        client = Raw(f"http://127.0.0.1:{listener.getsockname()[1]}")
        client.ask()
        await server.shutdown([listener])
        return client

    client = asyncio.run(end())
    status, headers, _ = client.read()
    assert (status, headers["connection"]) == (503, "close") and client.is_at_end()
