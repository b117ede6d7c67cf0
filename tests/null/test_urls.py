"""Files that a request names by a URL: from which hosts and addresses they come, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deltic.config import ConfigError
from deltic.server import urls
from deltic.server.limits import ASKING, Account, Ticket
from deltic.server.urls import Hosts, UrlError, fetch, is_public, of_base64, of_data_url

FLAG = "--fetch-images-from"
FILE = b"a file" * 100


def hosts(*entries: str) -> Hosts:
    return Hosts(entries, FLAG)


@pytest.mark.parametrize(
    ("entries", "host", "allowed"),
    [
        (("a.example",), "a.example", True),
        (("a.example",), "A.Example", True),
        (("a.example",), "a.example.", True),
        (("a.example",), "b.a.example", False),
        (("a.example",), "xa.example", False),
        (("a.example,b.example",), "b.example", True),
        (("*.a.example",), "b.a.example", True),
        (("*.a.example",), "c.b.a.example", True),
        (("*.a.example",), "a.example", False),
        (("*.a.example",), "ba.example", False),
        (("*",), "anything", True),
        (("*",), "1.2.3.4", True),
        (("a.example",), "1.2.3.4", False),
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("::1",), "::1", True),
        ((), "a.example", False),
    ],
)
def test_hosts(entries: tuple[str, ...], host: str, allowed: bool) -> None:
    assert hosts(*entries).allow(host.lower()) == allowed


@pytest.mark.parametrize("entry", ["http://a.example", "a.example:80", "a.*.example", "**", "", "a b", "10.0.0.1/8"])
def test_hosts_that_cannot_be_meant(entry: str) -> None:
    with pytest.raises(ConfigError, match=FLAG):
        hosts(entry)


PRIVATE = (
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::",
    "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1", "fec0::1", "feff::1", "3fff::1", "3fff:fff:ffff::1", "5f00::1", "100::1",
    "64:ff9b:1::a00:1", "::127.0.0.1", "::ffff:0:127.0.0.1", "::ffff:169.254.169.254", "4000::1",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert not hosts("*", "a.example").reach(ipaddress.ip_address(address))
    assert hosts(address).reach(ipaddress.ip_address(address)), "the operator named it"


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


Answer = Callable[[str], bytes]


@contextmanager
def server_of(answer: Answer, seen: list[str]) -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Runs what it is given beside a server on 127.0.0.1:80's stand-in; `seen`: the heads of its requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            seen.append(head)
            writer.write(answer(head.split()[1]))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def run(work: Awaitable[Any]) -> Any:
        async def go() -> Any:
            server = await asyncio.start_server(serve, "127.0.0.1", PORT)
            async with server:
                return await work

        return asyncio.run(go())

    yield run


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nfile\r\n0\r\n"
"""Up to its trailers."""


def plain(body: bytes = FILE, status: str = "200 OK", *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in (f"content-length: {len(body)}", *headers))
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def moved(where: str, status: str = "302 Found") -> bytes:
    return plain(b"", status, f"location: {where}")


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and their addresses; those of 127.0.0.1 can be reached. It also counts, under `asked`."""
    names: dict[str, list[str]] = {"asked": []}

    async def resolve(host: str, port: int) -> list[Any]:
        names["asked"].append(host)
        if host not in names:
            raise OSError("no such name")
        return [ipaddress.ip_address(address) for address in names[host]]

    monkeypatch.setattr(urls, "resolve", resolve)
    return names


def got(answer: Answer, url: str, *entries: str, most: int = 10_000) -> bytes | str:
    """The file, or why there is none."""
    seen: list[str] = []
    with server_of(answer, seen) as run:
        try:
            return bytes(run(fetch(url, hosts(*entries), most)))
        except UrlError as error:
            return str(error)


def test_a_file_is_fetched(resolver: dict[str, list[str]]) -> None:
    resolver["a.example"] = ["127.0.0.1"]
    seen: list[str] = []
    with server_of(lambda path: plain(), seen) as run:
        assert run(fetch(f"http://a.example:{PORT}/x/y?z=1", hosts("a.example", "127.0.0.1"), 10_000)) == FILE
    assert seen[0].startswith(f"GET /x/y?z=1 HTTP/1.1\r\nhost: a.example:{PORT}\r\n") and resolver["asked"] == [
        "a.example"
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + FILE,
        b"HTTP/1.0 200 OK\r\nconnection: close\r\n\r\n" + FILE,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(FILE), FILE),
    ],
)
def test_forms_of_an_answer(body: bytes) -> None:
    assert got(lambda path: body, f"http://127.0.0.1:{PORT}/", "127.0.0.1") == FILE


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"], []])
def test_a_name_with_an_address_that_is_not_public(resolver: dict[str, list[str]], addresses: list[str]) -> None:
    """Also beside a public one, so that it does not matter which is taken."""
    resolver["a.example"] = addresses
    said = got(lambda path: plain(), f"http://a.example:{PORT}/", "a.example", "*")
    assert said == "could not be fetched ('a.example' has an address that is not public)"


def test_a_name_is_resolved_once(resolver: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """So it cannot have another address when the connection is made."""
    resolver["a.example"] = ["127.0.0.1"]
    connected: list[Any] = []
    connect = asyncio.open_connection

    async def noted(host: str, *given: Any, **more: Any) -> Any:
        connected.append(host)
        return await connect(host, *given, **more)

    monkeypatch.setattr(asyncio, "open_connection", noted)
    assert got(lambda path: plain(), f"http://a.example:{PORT}/", "a.example", "127.0.0.0/8") == FILE
    assert connected == ["127.0.0.1"] and resolver["asked"] == ["a.example"]


def test_redirects(resolver: dict[str, list[str]]) -> None:
    resolver |= {"a.example": ["127.0.0.1"], "b.example": ["127.0.0.1"]}

    def answer(path: str) -> bytes:
        n = int(path[1:])
        where = f"/{n - 1}" if n % 2 else f"http://b.example:{PORT}/{n - 1}"
        return moved(where, "301 Moved") if n else plain()

    for n, entries, said in (
        (3, ("*", "127.0.0.1"), FILE),
        (4, ("*", "127.0.0.1"), "could not be fetched (more than 3 redirects)"),
        (1, ("a.example", "127.0.0.1"), FILE),
        (
            2,
            ("a.example", "127.0.0.1"),
            "this server fetches from a.example, 127.0.0.1/32 only, and not from 'b.example'",
        ),
    ):
        assert got(answer, f"http://a.example:{PORT}/{n}", *entries) == said


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("http://metadata.example/", "'metadata.example' has an address that is not public"),
        ("http://169.254.169.254/", "'169.254.169.254' has an address that is not public"),
        ("http://[::1]/", "'::1' has an address that is not public"),
        ("http://[::ffff:127.0.0.1]/", "'::ffff:127.0.0.1' has an address that is not public"),
        ("http://[64:ff9b::a9fe:a9fe]/", "'64:ff9b::a9fe:a9fe' has an address that is not public"),
        ("http://127.1/", "'127.1' has an address that is not public"),
        ("http://0x7f000001/", "'0x7f000001' has an address that is not public"),
        ("http://2130706433/", "'2130706433' has an address that is not public"),
        ("file:///etc/passwd", "expected an http or https URL"),
        ("gopher://a.example/", "expected an http or https URL"),
        ("//user:secret@a.example/", "a URL with a user's name is not fetched"),
        ("http://a.example:99999/", "is no URL that can be read"),
    ],
)
def test_redirects_are_looked_at_again(resolver: dict[str, list[str]], where: str, said: str) -> None:
    resolver |= {"a.example": ["127.0.0.1"], "metadata.example": ["169.254.169.254"]}
    resolver |= {name: ["127.0.0.2"] for name in ("2130706433", "127.1", "0x7f000001")}  # as inet_aton reads them
    told = got(lambda path: moved(where), f"http://a.example:{PORT}/", "*", "127.0.0.1")
    assert isinstance(told, str) and said in told


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (plain(status="404 Not Found"), "its server answered with status 404"),
        (plain(b"", "304 Not Modified"), "status 304"),
        (plain(b"x" * 10_001), "is larger than 0 MB"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_001, "is larger than 0 MB"),
        (b"", "its server closed the connection"),
        (b"HTTP/1.1 200", "its server closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 12_000, "could not be fetched"),
        (CHUNKED + b"a: b\r\n" * 35_000 + b"\r\n", "bytes of headers or trailers"),
        (CHUNKED + b"a: " + b"b" * 300_000, "bytes of headers or trailers"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\nshort", "ended before it was whole"),
    ],
)
def test_answers_that_are_refused(answer: bytes, said: str) -> None:
    told = got(lambda path: answer, f"http://127.0.0.1:{PORT}/", "127.0.0.1")
    assert isinstance(told, str) and said in told, told


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://b.example/", "this server fetches from a.example only, and not from 'b.example'"),
        ("http://a.example@b.example/", "a user's name"),
        ("http://a.example/ x", "characters that a URL may not have"),
        ("http://a.example/\r\nhost: b", "characters that a URL may not have"),
        ("http://a.exämple/", "characters that a URL may not have"),
        ("http:///x", "expected an http or https URL"),
        ("http://[", "is no URL that can be read"),
        ("http://a.example/", "could not be fetched (no such name)"),
        ("ftp://a.example/", "expected an http or https URL"),
    ],
)
def test_urls_that_are_refused(resolver: dict[str, list[str]], url: str, said: str) -> None:
    told = got(lambda path: plain(), url, "a.example")
    assert isinstance(told, str) and said in told, told


def test_all_of_it_within_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "FETCH_S", 0.3)

    async def go() -> None:
        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.02)

        server = await asyncio.start_server(drip, "127.0.0.1", PORT)
        begun_s = time.monotonic()
        with pytest.raises(UrlError, match=r"within 0\.3 s"):
            await fetch(f"http://127.0.0.1:{PORT}/", hosts("127.0.0.1"), 10_000)
        assert time.monotonic() - begun_s < 5
        server.close()

    asyncio.run(go())


def of_key(name: str) -> Ticket:
    ticket = Ticket()
    ticket.account = Account(name, 0, 0)
    return ticket


def test_names_that_nobody_answers_for_hold_up_their_own_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, asked = threading.Event(), []

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if host.startswith("slow"):
            waiting.wait(20)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(urls, "LOOKUP_S", 0.5)
    allowed = hosts("*", "127.0.0.1")

    async def go() -> tuple[bytes, list[Any]]:
        ASKING.set(of_key("a"))
        slow = [fetch(f"http://slow{i}.example:{PORT}/", allowed, 10_000) for i in range(24)]
        tasks = [asyncio.create_task(one) for one in slow]
        await asyncio.sleep(0.05)
        ASKING.set(of_key("b"))
        found = await asyncio.wait_for(fetch(f"http://quick.example:{PORT}/", allowed, 10_000), 10)
        assert len(asked) == 1 + urls.N_LOOKUPS
        refused = await asyncio.gather(*tasks, return_exceptions=True)
        waiting.set()
        return found, refused

    with server_of(lambda path: plain(), []) as run:
        found, refused = run(go())
    assert found == FILE
    assert all(isinstance(error, UrlError) and "no address of 'slow" in str(error) for error in refused)


def test_a_name_that_is_none() -> None:
    for host in ("a..example", f"{'x' * 70}.example"):
        assert "could not be fetched (no such name)" in str(got(lambda path: plain(), f"http://{host}/", "*"))


def test_base64_to_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "PIECE_CHARACTERS", 8)
    for n in range(40):
        data = bytes(range(n))
        encoded = base64.b64encode(data).decode()
        assert of_base64(encoded, 40) == data
        for broken in (encoded + "=", "=" + encoded, encoded + "A", " " + encoded, encoded[:4] + "==" + encoded[4:]):
            with pytest.raises(UrlError, match="is not valid base64"):
                of_base64(broken, 80)
        with pytest.raises(UrlError, match="is larger"):
            of_base64(base64.b64encode(bytes(n + 4)).decode(), n)
    assert of_data_url("DATA:image/png;name=x;BASE64,QUJD", "image") == "QUJD"
