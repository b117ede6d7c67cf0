"""Who may ask, in which header, and that no request makes this server ask anybody else."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import httpx
import pytest

from deltic.server.app import ROUTES
from tests.fake_engine import FakeEngineClient, make_app, served


def statuses(headers: dict[str, str], path: str = "/v1/models", **config: Any) -> int:
    async def go() -> int:
        transport = httpx.ASGITransport(make_app(FakeEngineClient(), **config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path, headers=headers)).status_code

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer a"}, 200),
        ({"authorization": "bearer a"}, 200),
        ({"x-api-key": "a"}, 200),
        ({"authorization": "Bearer alice=a"}, 401),
        ({"authorization": "Bearer alice"}, 401),
        ({"authorization": "Basic a"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": "a"}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"api-key": "a"}, 401),
        ({}, 401),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    assert statuses(headers, api_key=("alice=a",)) == status
    assert statuses(headers, "/health", api_key=("alice=a",)) == 200


@pytest.fixture
def elsewhere() -> Any:
    """An address that must not be asked."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        yield listener


def test_no_url_is_fetched(elsewhere: socket.socket) -> None:
    url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/x"
    image: Any = {"type": "image_url", "image_url": {"url": url}}
    schema: Any = {"type": "json_schema", "name": "x", "schema": {"$ref": url}}
    tool: Any = {"name": "x", "parameters": {"$ref": url}}

    def user(*content: Any) -> list[Any]:
        return [{"role": "user", "content": list(content)}]

    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": user(image)}, "image_url"),
        ("/v1/chat/completions", {"messages": user({"type": "input_audio", "input_audio": {}})}, "input_audio"),
        ("/v1/chat/completions", {"messages": user({"type": "file", "file": {"file_id": "x"}})}, "file"),
        ("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": user(
            {"type": "image", "source": {"type": "url", "url": url}})}, "image"),
        ("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": user(
            {"type": "document", "source": {"type": "url", "url": url}})}, "document"),
        ("/v1/responses", {"input": user({"type": "input_image", "image_url": url})}, "input_image"),
        ("/v1/responses", {"input": user({"type": "input_file", "file_url": url})}, "input_file"),
        ("/v1/responses", {"input": "x", "text": {"format": schema}}, "$ref"),
        ("/v1/chat/completions", {"messages": user({"type": "text", "text": "x"}),
            "response_format": {"type": "json_schema", "json_schema": schema | {"type": "json_schema"}}}, ""),
        ("/v1/chat/completions", {"messages": user({"type": "text", "text": "x"}), "tool_choice": "required",
            "tools": [{"type": "function", "function": tool}]}, ""),
    ]  # fmt: skip
    with served(make_app(FakeEngineClient())) as base:
        for path, body, named in asked:
            response = httpx.post(base + path, json=body)
            # A tool's schema that cannot be followed may be left to the model.
            assert response.status_code == (200 if "tools" in body else 400), (path, body, response.text)
            assert "tools" in body or named in response.json()["error"]["message"]
    with pytest.raises(TimeoutError):
        elsewhere.accept()


FOREIGN = ["evil.example", "evil.example:8000", "[::1].evil.example", "[::1].evil.example:8000", "localhost.evil.example",
    "127.0.0.1.evil.example", "localhost:80@evil.example", "[evil.example]", "[::1", "0x7f.1", "localhost:x"]  # fmt: skip
OWN = [
    "localhost",
    "localhost:8000",
    "LOCALHOST.",
    "a.localhost:1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "[::1]",
    "[::ffff:127.0.0.1]:8",
]


def test_no_name_of_a_page_s_own_reaches_a_server_of_this_machine() -> None:
    """DNS rebinding: every route, Ollama's and those that are open, too; and no foreign page posts anything."""

    async def go() -> None:
        transport = httpx.ASGITransport(make_app(FakeEngineClient()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for route in ROUTES:
                path = re.sub(r"\{[^}]*\}", "x", route.path)
                for host in FOREIGN if path in ("/api/tags", "/api/chat", "/v1/models", "/") else FOREIGN[:1]:
                    refused = await client.request(route.method, path, headers={"host": host})
                    assert refused.status_code == 403 and "the Host header names" in refused.text, (path, host)
                if route.method == "POST":
                    foreign = {"origin": "http://evil.example", "content-type": "text/plain"}
                    refused = await client.post(path, content=b"{}", headers=foreign)
                    assert refused.status_code == (403 if route.any_type or route.form else 415), path
            for host in OWN:
                assert (await client.get("/api/tags", headers={"host": host})).status_code == 200, host

    asyncio.run(go())


def test_a_body_that_does_not_come_holds_nothing_for_ever() -> None:
    app = make_app(FakeEngineClient(), api_key=("alice=a",), max_concurrent_per_key=1, request_timeout_s=2)
    with served(app) as base, socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as client:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\ncontent-length: 20\r\n\r\n{"
        client.sendall(head.encode())
        client.settimeout(60)
        said = b"".join(iter(lambda: client.recv(4096), b""))
        assert said.startswith(b"HTTP/1.1 408") and b"did not come in time" in said
        body, headers = {"prompt": "x"}, {"authorization": "Bearer a"}
        # A slow machine may need more than the two seconds; what counts is that the key's one place is free.
        assert httpx.post(f"{base}/v1/completions", json=body, headers=headers, timeout=60).status_code != 429
