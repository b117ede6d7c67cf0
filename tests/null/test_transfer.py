"""Prefixes that move between servers: what arrives is what was sent, or nothing at all."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import random
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from deltic.__main__ import main
from deltic.config import ConfigError, EngineConfig, ServerConfig
from deltic.config_sources import resolve
from deltic.engine.cache.directory import HEADER_BYTES, Directory, Object, pack_header, unpack_header
from deltic.engine.events import CacheLocated
from deltic.host.client import QueueFull
from deltic.server.address import check_transfer
from deltic.server.api import transfer
from tests.fake_engine import FakeEngineClient, make_app, served
from tests.waiting import wait_for

PAGE_BYTES, STATE_BYTES, N_PAGES = 3000, 5000, 4
HERE, THERE = "a" * 32, "b" * 32
PROMPT = {"prompt": "a text " * 60}
CHAT = {"messages": [{"role": "user", "content": "a text " * 60}], "max_tokens": 9, "temperature": 0, "cache_salt": "s"}


def key_of(i: int) -> bytes:
    return hashlib.blake2b(str(i).encode(), digest_size=16).digest()


def fill(root: Path, model: str = HERE) -> list[str]:
    """A path of pages and its state, as an engine has written them."""
    directory, files = Directory(root, model), []
    for kind, i in [*(("page", i) for i in range(1, N_PAGES + 1)), ("state", N_PAGES)]:
        content = random.Random(i).randbytes(PAGE_BYTES if kind == "page" else STATE_BYTES)
        what = kind, key_of(i), key_of(i - 1), 64 * i
        path = Path(directory.file(Object(*what)))
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        path.write_bytes(pack_header(directory.model, Object(*what), len(content), zlib.crc32(content)) + content)
        files.append(str(path))
    return files


def client_of(root: Path, model: str = HERE, **config: Any) -> FakeEngineClient:
    client = FakeEngineClient(page_bytes=PAGE_BYTES, state_bytes=STATE_BYTES, cache_files=str(root / model))
    given = {"allow_cache_transfer": True, "cache_dir": root} | config
    client.config = dataclasses.replace(client.config, **given)
    return client


@pytest.fixture
def sender(tmp_path: Path) -> FakeEngineClient:
    client = client_of(tmp_path / "from")
    client.located = CacheLocated("", 64 * N_PAGES, fill(tmp_path / "from"))
    return client


@pytest.fixture
def stream(sender: FakeEngineClient) -> bytes:
    with served(make_app(sender)) as url:
        reply = httpx.post(f"{url}/cache/export", json=CHAT)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/octet-stream"
    return reply.content


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[str]:
    with served(make_app(client_of(tmp_path / "to"))) as url:
        yield url


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def send(url: str, data: bytes, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/cache/import", content=data, headers={"content-type": "application/octet-stream"}, **more)


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_what_arrives_is_what_was_sent(sender: FakeEngineClient, stream: bytes, receiver: str, tmp_path: Path) -> None:
    head, _, rest = stream.partition(b"\n")
    told = msgspec.json.decode(head)
    assert told["tokens"] == 256 and told["fingerprint"] == HERE and told["model"] == "fake"
    assert len(rest) == N_PAGES * (PAGE_BYTES + HEADER_BYTES) + STATE_BYTES + HEADER_BYTES
    (asked,) = sender.requests
    assert asked.cache_salt == "s" and asked.use_cache and len(asked.prompt_ids) > 256 and asked.boundaries
    reply = send(receiver, stream)
    assert reply.status_code == 200, reply.text
    assert reply.json()["tokens"] == 256 and reply.json()["bytes"] == len(stream)
    assert contents(tmp_path / "to") == contents(tmp_path / "from")
    assert send(receiver, stream).status_code == 200, "once more"
    assert contents(tmp_path / "to") == contents(tmp_path / "from")


def test_the_body_is_that_of_a_completion_too(sender: FakeEngineClient) -> None:
    with served(make_app(sender)) as url:
        assert httpx.post(f"{url}/cache/export", json=PROMPT | {"stream": True, "max_tokens": 1}).status_code == 200
        assert sender.requests[0].prompt_ids == list(PROMPT["prompt"].encode())
        for body, status in [
            (PROMPT | {"messages": []}, 400),
            ({}, 400),
            ({"prompt": ["a", "b"]}, 400),
            (PROMPT | {"cache_prompt": False}, 400),
            (PROMPT | {"temperatur": 1}, 400),
            (PROMPT | {"model": "another"}, 404),
            (PROMPT | {"stream_options": {}}, 400),
            (PROMPT | {"stop": [""]}, 400),
            ({"prompt": ["a"] * 10_000}, 400),
            (CHAT | {"chat_template": "{{ 1 }}"}, 400),
        ]:
            assert httpx.post(f"{url}/cache/export", json=body).status_code == status, body


def test_nothing_is_cached_or_cannot_be_written(sender: FakeEngineClient, tmp_path: Path) -> None:
    files = sender.located.files
    with served(make_app(sender)) as url:
        for located, expected in [
            (CacheLocated(""), (404, "nothing_cached")),
            (CacheLocated("", error="the disk has no room for it"), (409, "cache_not_exported")),
            (CacheLocated("", error="an id", is_refused=True), (400, None)),
            (CacheLocated("", 256, [*files[:-1], str(tmp_path / "gone")]), (409, "cache_not_exported")),
        ]:
            sender.located = located
            assert code(httpx.post(f"{url}/cache/export", json=PROMPT)) == expected


def test_a_file_that_goes_meanwhile_cuts_the_stream_off(
    sender: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.FileStream, "measure", lambda self: setattr(self, "_n_bytes", 10**6))
    Path(sender.located.files[2]).unlink()
    with served(make_app(sender)) as url, pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{url}/cache/export", json=PROMPT)


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    with served(make_app(client_of(tmp_path, allow_cache_transfer=False))) as url:
        assert code(httpx.post(f"{url}/cache/export", json=PROMPT)) == (403, "cache_transfer_off")
        assert code(send(url, b"x")) == (403, "cache_transfer_off")
    for given in ({}, {"cache_dir": tmp_path, "prefix_cache": False}, {"cache_dir": tmp_path, "cache_disk_gb": 0.0}):
        with pytest.raises(ConfigError, match=r"--allow-cache-transfer: .* Give --cache-dir"):
            resolve(EngineConfig, {"allow_cache_transfer": True} | given, {})


def test_a_server_that_others_reach_needs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [EngineConfig(), EngineConfig(allow_cache_transfer=True, cache_dir=tmp_path)]
    for given in (
        {"host": "127.0.0.2"},
        {"host": "::1"},
        {"host": "localhost"},
        {"uds": tmp_path / "s", "host": "0.0.0.0"},
    ):
        check_transfer(ServerConfig(**given), models)
    for given in ({"api_key": ("k",)}, {"api_key_file": tmp_path}):
        check_transfer(ServerConfig(host="0.0.0.0", **given), models)
    check_transfer(ServerConfig(host="0.0.0.0"), models[:1])
    asked = ["serve", "--host", "0.0.0.0", "--port", "0", "--cache-dir", str(tmp_path), "--allow-cache-transfer"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert "Give --api-key" in said and said.count("\n") == 1


def test_it_is_for_administrators(sender: FakeEngineClient, tmp_path: Path) -> None:
    with served(make_app(sender, api_key=("guest=1", "root"))) as url:
        for path in ("export", "import"):
            reply = httpx.post(f"{url}/cache/{path}", json=PROMPT, headers={"authorization": "Bearer 1"})
            assert code(reply) == (403, "not_an_admin")
        assert (
            httpx.post(f"{url}/cache/export", json=PROMPT, headers={"authorization": "Bearer root"}).status_code == 200
        )
    with served(make_app(client_of(tmp_path))) as url:  # a page may send any type anywhere
        reply = send(url, b"x", params={})
        assert reply.status_code == 400
        reply = httpx.post(f"{url}/cache/import", content=b"x", headers={"origin": "http://evil.example"})
        assert reply.status_code == 403


def spoilt(stream: bytes) -> Iterator[tuple[str, bytes]]:
    begin = stream.index(b"\n") + 1
    for at in [*range(begin, begin + 100, 7), *range(begin, len(stream), 1511), len(stream) - 1]:
        yield f"byte {at}", stream[:at] + bytes([stream[at] ^ 8]) + stream[at + 1 :]
    for n in [0, 1, begin - 1, begin, begin + 127, begin + 128, *range(begin, len(stream), 2999), len(stream) - 1]:
        yield f"cut to {n}", stream[:n]
    size = HEADER_BYTES + PAGE_BYTES
    yield "longer", stream + b"x"
    yield "twice", stream + stream
    yield "a page is missing", stream[:begin] + stream[begin + size :]
    yield "in another order", stream[:begin] + stream[begin + size : begin + 2 * size] + stream[begin : begin + size]
    yield "no line", b"x" * 10_000
    yield "tokens", stream.replace(b'"tokens":256', b'"tokens":255', 1)
    yield "more tokens", stream.replace(b'"tokens":256', b'"tokens":320', 1)
    yield "fewer", stream.replace(b'"tokens":256', b'"tokens":192', 1)


def test_nothing_is_left_of_what_is_damaged(stream: bytes, receiver: str, tmp_path: Path) -> None:
    for what, data in spoilt(stream):
        reply = send(receiver, data)
        assert code(reply) == (400, "damaged_stream"), what
        assert not contents(tmp_path / "to"), what
    assert send(receiver, stream).status_code == 200


def signed(stream: bytes, i: int, payload: bytes | None = None, **changes: Any) -> bytes:
    """The stream with other fields in the header of its i-th file, whose checksums are right."""
    at = stream.index(b"\n") + 1 + i * (HEADER_BYTES + PAGE_BYTES)
    model, entry, size, crc = unpack_header(stream[at : at + HEADER_BYTES])
    end = at + HEADER_BYTES + size
    if payload is not None:
        size, crc = len(payload), zlib.crc32(payload)
    said = {"kind": entry.kind, "key": entry.key, "parent": entry.parent, "depth": entry.depth} | changes
    size, crc = said.pop("size", size), said.pop("crc", crc)
    header = pack_header(model, Object(**said), size, crc)
    return stream[:at] + header + (stream[at + HEADER_BYTES : end] if payload is None else payload) + stream[end:]


COUNTS = 0, 1, 63, 65, 2**31, 2**32 - 1, 2**63, 2**64 - 1


def test_right_checksums_do_not_make_wrong_counts_right(stream: bytes, receiver: str, tmp_path: Path) -> None:
    """Every field of every header, as who knows the format would write it."""
    streams = {
        **{f"{name} {n} of {i}": (i, {name: n}) for i in (0, 1, N_PAGES) for name in ("depth", "size") for n in COUNTS},
        **{f"kind of {i}": (i, {"kind": kind}) for i, kind in ((0, "state"), (1, "state"), (N_PAGES, "page"))},
        **{f"parent of {i}": (i, {"parent": key_of(9)}) for i in (1, N_PAGES)},
        **{f"key of {i}": (i, {"key": key_of(9)}) for i in (1, N_PAGES)},
        "a shorter page": (1, {"payload": b"x" * (PAGE_BYTES - 1)}),
        "a longer page": (1, {"payload": b"x" * (PAGE_BYTES + 1)}),
        "a longer state": (N_PAGES, {"payload": b"x" * (STATE_BYTES + 64)}),
        "an empty state": (N_PAGES, {"payload": b""}),
    }
    for what, (i, changes) in streams.items():
        reply = send(receiver, signed(stream, i, **changes))
        assert code(reply) == (400, "damaged_stream"), what
        assert not contents(tmp_path / "to"), what
    for number in ("-64", "0", "1e3", "64.0", "9" * 30, "null", '"256"', "true", "NaN", str(2**63)):
        reply = send(receiver, stream.replace(b'"tokens":256', f'"tokens":{number}'.encode(), 1))
        assert reply.status_code in (400, 413) and not contents(tmp_path / "to"), number
    assert send(receiver, signed(stream, 0)).status_code == 200, "the same fields"


def test_who_leaves_leaves_nothing(
    stream: bytes, receiver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 1000)
    parts = urlsplit(receiver)
    with socket.create_connection((parts.hostname, parts.port)) as raw:
        raw.sendall(
            b"POST /cache/import HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n" + stream[:9000]
        )
        wait_for(lambda: contents(tmp_path / "to"))
    wait_for(lambda: not contents(tmp_path / "to"))
    assert send(receiver, stream).status_code == 200, "the next one is not kept waiting"


def test_who_waits_for_another_import_is_sent_away_in_a_drain(stream: bytes, tmp_path: Path) -> None:
    app = make_app(client_of(tmp_path / "to"))
    with served(app) as url, concurrent.futures.ThreadPoolExecutor() as pool:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port)) as raw:
            raw.sendall(b"POST /cache/import HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n")
            wait_for(lambda: app.state.server.n_open == 1)
            waiting = pool.submit(send, url, stream)
            wait_for(lambda: app.state.server.n_open == 2)
            app.state.server.draining = True
        assert code(waiting.result(10)) == (503, "engine_unavailable")
    assert not contents(tmp_path / "to")


def test_an_export_that_is_not_taken_ends_with_its_server(sender: FakeEngineClient) -> None:
    assert sender.located is not None
    with open(sender.located.files[0], "ab") as file:
        file.truncate(64_000_000)  # more than sockets hold
    body = msgspec.json.encode(CHAT)
    with socket.socket() as raw:
        with served(make_app(sender), client_timeout_s=0) as url:
            raw.connect((urlsplit(url).hostname, urlsplit(url).port))
            raw.sendall(
                b"POST /cache/export HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            assert raw.recv(100).startswith(b"HTTP/1.1 200 OK")
            left_s = time.monotonic()
        assert time.monotonic() - left_s < 9, "it is given 10 s to end"


def test_a_stream_of_an_hour_is_not_abandoned(stream: bytes, tmp_path: Path) -> None:
    coming = transfer.Import(client_of(tmp_path / "to").info, 10**9)
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as file, concurrent.futures.ThreadPoolExecutor() as pool:
        taking = pool.submit(coming.take, file)
        ours.sendall(stream[:9000])
        wait_for(lambda: len(list(tmp_path.glob("to/**/*.part"))) > 1)
        parts = list(tmp_path.glob("to/**/*.part"))
        for part in parts:
            os.utime(part, (0, 0))
        coming._renew_at = 0.0
        ours.sendall(stream[9000:])
        ours.shutdown(socket.SHUT_WR)
        taking.result(60)
    assert len(parts) > 1 and all(time.time() - part.stat().st_mtime < 600 for part in parts)
    coming.end()


def test_a_full_queue_refuses_no_transfer(sender: FakeEngineClient, stream: bytes) -> None:
    def full(n: int, owner: str = "") -> Any:
        raise QueueFull(1, 1)

    sender.check_room = full  # type: ignore[method-assign]
    with served(make_app(sender)) as url:
        assert httpx.post(f"{url}/cache/export", json=CHAT).status_code == 200
        assert send(url, stream).status_code == 200


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ((HERE.encode(), THERE.encode()), (409, "other_model")),
        ((b'"page_bytes":3000', b'"page_bytes":3001'), (409, "other_model")),
        ((b'"deltic_cache":1', b'"deltic_cache":2'), (409, "other_model")),
        ((b'"tokens":256', b'"tokens":640000000'), (413, "body_too_large")),
    ],
)
def test_what_differs_is_named(
    stream: bytes, receiver: str, tmp_path: Path, change: tuple[bytes, bytes], expected: tuple[int, str]
) -> None:
    reply = send(receiver, stream.replace(*change, 1))
    assert code(reply) == expected and not contents(tmp_path / "to")
    if expected[0] == 409:
        assert "same weights, formats" in reply.json()["error"]["message"]


def test_a_file_under_another_models_name_is_refused(stream: bytes, tmp_path: Path) -> None:
    with served(make_app(client_of(tmp_path / "to", THERE))) as url:
        reply = send(url, stream.replace(HERE.encode(), THERE.encode(), 1))
        assert code(reply) == (400, "damaged_stream") and "of another model" in reply.text
    assert not contents(tmp_path / "to")
