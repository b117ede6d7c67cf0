"""Files that a request names by a URL: one of `data:` is decoded, one of http(s) fetched from a host that the
operator allows.

A host's name is resolved once. Each of its addresses must be public, or one that the operator named, and the
connection is made to an address that was looked at. A redirect is looked at in the same way.
"""

from __future__ import annotations

import asyncio
import binascii
import functools
import ipaddress
import re
import socket
import ssl
import threading
import urllib.parse
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future

from httptools import HttpParserError, HttpResponseParser

from deltic.config import ConfigError
from deltic.server.limits import asking

FETCH_S = 15.0
"""Seconds of a fetch, redirects included."""
MAX_REDIRECTS = 3
LOOKUP_S = 10.0
"""Seconds of a fetch that the look-up of a host's addresses may take."""
N_LOOKUPS = 8
"""Names that are looked up at once for one key: those that no server answers for hold up only its own."""
MAX_HEAD_BYTES = 65_536
"""Bytes in a row of what is no body: headers, and trailers."""
PIECE_CHARACTERS = 1 << 20
"""Characters of base64 decoded at once: the interpreter stands still meanwhile. A multiple of 4."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\*")
_PLAIN = re.compile(r"[\x21-\x7e]+")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST, _DOCUMENTATION = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("3fff::/20")
"""Networks of IPv6's public addresses, and of those in them that Python does not know as private."""


class UrlError(ValueError):
    """A URL without a file that can be used; the message says why, for whoever sent it."""


class Hosts:
    """Hosts that files may be fetched from: names, `*.example.com`, `*` for all, addresses and networks.

    Only an address that is named so may be one that is not public.
    """

    def __init__(self, entries: Sequence[str], flag: str) -> None:
        """flag: the setting they come from. Raises ConfigError."""
        self._lookups: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(N_LOOKUPS))
        self._names: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in (part.strip().lower() for text in entries for part in text.split(",")):
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if not _NAME.fullmatch(entry):
                    message = "expected a host's name, *.example.com, an address or a network"
                    raise ConfigError(f"{flag} {entry!r}: {message}") from None
                self._names.append(entry)

    def __bool__(self) -> bool:
        return bool(self._names or self._networks)

    def __str__(self) -> str:
        return ", ".join([*self._names, *map(str, self._networks)])

    def allow(self, host: str) -> bool:
        """Returns whether a URL may name this host; what addresses it has is another question."""
        if address := _address(host):
            return self.is_named(address) or "*" in self._names
        host = host.removesuffix(".")
        return any(host.endswith(name[1:]) if name.startswith("*.") else name in (host, "*") for name in self._names)

    def is_named(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def reach(self, address: Address) -> bool:
        return self.is_named(address) or is_public(address)

    async def find(self, host: str, port: int) -> list[Address]:
        """The addresses of a name, in the turns of the key that asks. Raises UrlError, OSError."""
        turn = self._lookups[asking().tenant]
        try:
            async with asyncio.timeout(LOOKUP_S):
                await turn.acquire()
                looking = asyncio.create_task(resolve(host, port))
                looking.add_done_callback(lambda _: turn.release())  # nothing ends it sooner
                return await asyncio.shield(looking)
        except TimeoutError:
            message = f"could not be fetched (no address of {host!r} was found within {LOOKUP_S:g} s)"
            raise UrlError(message) from None


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Returns whether an address is of the internet, also where it stands for one of IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped or address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _UNICAST or address in _DOCUMENTATION:
            return False
        if not all(map(is_public, filter(None, (address.sixtofour, *(address.teredo or ()))))):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def resolve(host: str, port: int) -> list[Address]:
    """Resolves a host in a thread of its own: what the event loop has for this are four, for all. Raises
    OSError.
    """
    found = Future[list[Address]]()
    found.set_running_or_notify_cancel()  # whoever waits may leave

    def look() -> None:
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            found.set_result([ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in places])
        except OSError as error:
            found.set_exception(OSError(*error.args))
        except UnicodeError:  # a part of the name is empty, or too long
            found.set_exception(OSError("no such name"))

    threading.Thread(target=look, name="lookup", daemon=True).start()
    return await asyncio.wrap_future(found)


async def fetch(url: str, hosts: Hosts, most_bytes: int) -> bytes:
    """The file at an http(s) URL. Raises UrlError, also where it is larger than most_bytes."""
    try:
        async with asyncio.timeout(FETCH_S):
            for _ in range(MAX_REDIRECTS + 1):
                status, location, data = await _get(url, hosts, most_bytes)
                if location is None:
                    break
                url = urllib.parse.urljoin(url, location)
            else:
                raise UrlError(f"could not be fetched (more than {MAX_REDIRECTS} redirects)")
    except TimeoutError:
        raise UrlError(f"could not be fetched within {FETCH_S:g} s") from None
    except (OSError, HttpParserError) as error:  # ssl.SSLError is an OSError
        raise UrlError(f"could not be fetched ({' '.join(str(error).split())[:200]})") from None
    if status != 200:
        raise UrlError(f"could not be fetched (its server answered with status {status})")
    return data


class _Answer:
    """Answer of a server, filled by the callbacks of the HTTP parser."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.has_head = self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # what comes later is a trailer
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True


async def _get(url: str, hosts: Hosts, most_bytes: int) -> tuple[int, str | None, bytes]:
    """Status, where it redirects to, and body. Raises UrlError, OSError, HttpParserError."""
    parts, port = _split(url)
    host = parts.hostname or ""
    if not hosts.allow(host):
        raise UrlError(f"this server fetches from {hosts} only, and not from {host!r}")
    literal = _address(host)
    addresses = [literal] if literal else await hosts.find(host, port)
    if not addresses or not all(map(hosts.reach, addresses)):
        raise UrlError(f"could not be fetched ({host!r} has an address that is not public)")
    is_secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        str(addresses[0]), port, ssl=_trust() if is_secure else None, server_hostname=host if is_secure else None
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        named = parts.netloc.rpartition("@")[2]
        head = f"GET {target} HTTP/1.1\r\nhost: {named}\r\naccept: */*\r\naccept-encoding: identity\r\n"
        writer.write(f"{head}user-agent: deltic\r\nconnection: close\r\n\r\n".encode("ascii"))
        answer, n_other = _Answer(), 0
        parser = HttpResponseParser(answer)
        while not answer.is_whole and (part := await reader.read(65_536)):
            n_body = len(answer.body)
            parser.feed_data(part)
            n_other = n_other + len(part) if len(answer.body) == n_body else 0
            if n_other > MAX_HEAD_BYTES:
                raise UrlError(f"could not be fetched (more than {MAX_HEAD_BYTES} bytes of headers or trailers)")
            if len(answer.body) > most_bytes:
                raise UrlError(f"is larger than {most_bytes // 1_000_000} MB")
        if not answer.has_head:
            raise UrlError("could not be fetched (its server closed the connection)")
        if not answer.is_whole and {b"content-length", b"transfer-encoding"} & answer.headers.keys():
            raise UrlError("could not be fetched (it ended before it was whole)")
    finally:
        writer.transport.abort()
    status, location = parser.get_status_code(), answer.headers.get(b"location")
    is_elsewhere = status in (301, 302, 303, 307, 308) and location is not None
    return status, location.decode("latin-1") if is_elsewhere and location else None, bytes(answer.body)


def _split(url: str) -> tuple[urllib.parse.SplitResult, int]:
    """A URL's parts and its port. Raises UrlError."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlError(f"is no URL that can be read ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UrlError("expected an http or https URL")
    if not _PLAIN.fullmatch(url):
        raise UrlError("has characters that a URL may not have. Write them as %XX.")
    if "@" in parts.netloc:
        raise UrlError("a URL with a user's name is not fetched")
    return parts, port or (443 if parts.scheme == "https" else 80)


@functools.cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def of_data_url(url: str, kind: str) -> str:
    """The base64 in a `data:` URL; what it says of the content's type is passed over. kind: what it has to
    hold, as `image`. Raises UrlError.
    """
    head, comma, encoded = url.partition(",")
    if not comma or not head[:5].lower() == "data:" or not head.lower().endswith(";base64"):
        raise UrlError(f"expected data:{kind}/...;base64,...")
    return encoded


def of_base64(encoded: str, most_bytes: int) -> bytes:
    """Line ends are no part of it, as programs write one every 76 characters. Slow for long ones. Raises
    UrlError for what is not base64 to the letter, or larger than most_bytes.
    """
    if "\n" in encoded or "\r" in encoded:
        encoded = encoded.replace("\r", "").replace("\n", "")
    if len(encoded) > (most_bytes + 2) // 3 * 4:
        raise UrlError(f"is larger than {most_bytes // 1_000_000} MB")
    if len(encoded) % 4 or "=" in encoded[:-2]:
        raise UrlError("is not valid base64")
    try:
        return b"".join(
            binascii.a2b_base64(encoded[at : at + PIECE_CHARACTERS], strict_mode=True)
            for at in range(0, len(encoded), PIECE_CHARACTERS)
        )
    except ValueError:  # binascii.Error, and another for what is not ASCII
        raise UrlError("is not valid base64") from None
