"""Connections between machines that share a model: who may speak, and how messages are framed.

A message is msgpack behind its length, of one of the structs below, and nothing else is ever decoded; rows of
the residual follow their message as raw bytes. Both ends prove that they have the same secret before anything
else is read, without sending it. Nothing is encrypted: the network must be private.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import select
import socket
import threading
import time
from functools import cache
from pathlib import Path

import msgspec

from deltic import __version__
from deltic.config import ConfigError
from deltic.engine.mirror import Answer, DroppedAdapter, SentResult, SentStep, Task
from deltic.runtime.fingerprint import code_digest

GREETING_S = 5.0
"""Seconds that an end may take for each message before it is trusted."""
MAX_GREETING = 4096
MAX_MESSAGE = 256 << 20
"""Bytes of a message, at most: before its sender is trusted, and then."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNHEARD_MS = 25_000
"""A machine that has gone without a word is noticed after 25 s, if nothing is sent and if something is."""


class LostError(Exception):
    """The other end has gone, shows no sign of life, or says what it should not."""


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """The first message, of the end that listens: nothing that a stranger could use."""

    nonce: bytes


class Proof(msgspec.Struct, tag="proof", frozen=True):
    """Shows that its sender has the secret. nonce: what the other one has to sign. build: of an end that
    knows whom it speaks to; "" before.
    """

    build: str
    nonce: bytes
    signature: bytes


class Limits(msgspec.Struct, tag="limits", frozen=True):
    """Sizes that all machines of a model have in common: the least that any of them has room for."""

    sizes: dict[str, int]
    """Sizes by the names of their settings (`plan.shared_sizes`)."""
    n_host_units: int

    def least(self, other: Limits) -> Limits:
        sizes = {name: min(size, other.sizes[name]) for name, size in self.sizes.items()}
        return Limits(sizes, min(self.n_host_units, other.n_host_units))


class Join(msgspec.Struct, tag="join", frozen=True):
    """Tells a stage to run some layers: the engine's settings as JSON, the number of the stage, and what the
    model and the device must be.
    """

    config: bytes
    number: int
    content: str
    device: str


class StageLoading(msgspec.Struct, tag="loading", frozen=True):
    """A part of a start, and how much of it is done."""

    what: str
    done: float


class ReadyStage(msgspec.Struct, frozen=True):
    """Machine that is ready: what runs where, with which kernels."""

    what: str
    kernels: str
    content: str
    """Name of what decides the bits of its part of a page and a state; "": it has no --cache-dir."""
    page_bytes: int
    state_bytes: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """A stage is ready, and those behind it."""

    said: list[ReadyStage]


class StageRefusal(msgspec.Struct, tag="refused", frozen=True):
    """Says why it goes no further. may_pass: later it might."""

    why: str
    may_pass: bool = False


class Rows(msgspec.Struct, tag="rows", frozen=True):
    """Announces so many bytes of rows."""

    n_bytes: int


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A sign of life. has_moved: of something between tiers, of which an Answer tells once all is done."""

    has_moved: bool = False


Start = Challenge | Proof | Join | Limits | StageLoading | Loaded | StageRefusal
Message = Start | SentStep | Rows | Beat | SentResult | Task | DroppedAdapter | Answer


@cache
def build() -> str:
    """Names what must be the same at both ends: the code that this process has begun with, read once."""
    return f"{__version__} {code_digest()}"


class PeerConnection:
    """Connection to another machine. Several threads may send, one receives."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        """name: of the other end, for messages."""
        self.socket, self.name = connected, name
        self.n_sent = 0
        """Bytes that were sent."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self._sending = threading.Lock()
        self._room = select.poll()
        self._room.register(connected, select.POLLOUT)
        self._reported, self._reported_s = "", 0.0
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (*_KEEP_ALIVE, (socket.TCP_USER_TIMEOUT, _UNHEARD_MS)):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message, rows: memoryview | None = None, timeout_s: float | None = None) -> None:
        """Sends a message, and rows behind it. timeout_s: seconds in which the other end must take some of
        it. Raises LostError.
        """
        body = self._encoder.encode(message)
        try:
            with self._sending:
                for part in (memoryview(len(body).to_bytes(4, "little") + body), rows):
                    while part:
                        # Each call has its timeout: a slow network is no fault.
                        if not self._room.poll(None if timeout_s is None else timeout_s * 1000):
                            raise TimeoutError
                        n = self.socket.send(part, socket.MSG_DONTWAIT)
                        self.n_sent, part = self.n_sent + n, part[n:]
        except OSError as error:
            raise self.lost(error) from None

    def receive(self, timeout_s: float | None = None, *, is_greeting: bool = False) -> Message:
        """The next message. timeout_s: seconds in which some of it must come. is_greeting: of an end that is
        not trusted yet: a short one, and all of it must come within GREETING_S. Raises LostError.
        """
        until = time.monotonic() + GREETING_S if is_greeting else None
        head = bytearray(4)
        self._fill(memoryview(head), timeout_s, until)
        body = bytearray(self.n_bytes(head, MAX_GREETING if is_greeting else MAX_MESSAGE))
        self._fill(memoryview(body), timeout_s, until)
        return self.decoded(body)

    def n_bytes(self, head: bytes | bytearray, most: int) -> int:
        """Bytes of the message behind its first four. Raises LostError for more than `most`."""
        if (n := int.from_bytes(head, "little")) > most:
            raise LostError(f"{self.name} sent a message of {n} bytes, where {most} are the most")
        return n

    def decoded(self, body: bytes | bytearray) -> Message:
        """The message of some bytes. Raises LostError for what is none."""
        try:
            return self._decoder.decode(body)
        except (ValueError, RecursionError) as error:  # of text that is no UTF-8, and what is nested too deep
            raise LostError(f"{self.name} sent what is no message ({error})") from None

    def read_some(self, n: int) -> bytes:
        """Reads up to n bytes of those that have come; none where none have. Raises LostError."""
        try:
            found = self.socket.recv(n, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise self.lost(error) from None
        if not found:
            raise LostError(f"{self.name} closed the connection")
        return found

    def receive_rows(self, out: memoryview) -> None:
        """Fills bytes with the rows that are next. Raises LostError where others come."""
        message = self.receive()
        if message != Rows(out.nbytes):
            raise LostError(f"{self.name} sent {message}, where {out.nbytes} bytes of rows were due")
        self._fill(out, None)

    def report(self, what: str, done: float) -> None:
        """Tells of a start, a few times a second. Raises LostError."""
        if what != self._reported or time.monotonic() > self._reported_s + 0.2:
            self._reported, self._reported_s = what, time.monotonic()
            self.send(StageLoading(what, done))

    def agreed(self, own: Limits, timeout_s: float) -> Limits:
        """Sends what there is room for here. Returns what all have room for, which comes within timeout_s
        seconds. Raises LostError.
        """
        self.send(own)
        limits = self.receive(timeout_s)
        if not isinstance(limits, Limits):
            raise LostError(f"{self.name} sent {limits}, where sizes were due")
        return limits

    @property
    def own_name(self) -> str:
        """Address of this end."""
        host, port, *_ = self.socket.getsockname()
        return f"{host}:{port}"

    def is_gone(self) -> bool:
        """Returns whether the other end has closed, without reading what it sent before."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.socket.close()

    def _fill(self, out: memoryview, timeout_s: float | None, until: float | None = None) -> None:
        try:
            while out:
                self.socket.settimeout(timeout_s if until is None else max(until - time.monotonic(), 0.001))
                if not (n := self.socket.recv_into(out)):
                    raise LostError(f"{self.name} closed the connection")
                out = out[n:]
        except OSError as error:
            raise self.lost(error) from None

    def lost(self, error: OSError) -> LostError:
        """Error to raise for one of this connection; of a TimeoutError it says that nothing came."""
        why = "it shows no sign of life" if isinstance(error, TimeoutError) else str(error)
        return LostError(f"{self.name} is lost ({why})")


def _signature(secret: bytes, who: bytes, asked: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, who + asked + own, hashlib.sha256)


class Welcome:
    """Lets in who has the secret, and shows that this end has it, whenever something has come: others need
    not wait for one who is slow.
    """

    def __init__(self, connection: PeerConnection, secret: bytes) -> None:
        """Raises LostError."""
        self.connection, self.until_s = connection, time.monotonic() + GREETING_S
        self._secret, self._nonce, self._come = secret, secrets.token_bytes(32), b""
        connection.send(Challenge(self._nonce))

    def read(self) -> bool:
        """Reads what has come. Returns whether the other end is let in by now. Raises LostError for anybody
        who has no secret, is no stage's front, or takes too long.
        """
        connection = self.connection
        self._come += connection.read_some(MAX_GREETING + 4 - len(self._come))
        head, body = self._come[:4], self._come[4:]
        if len(head) < 4 or len(body) < (n := connection.n_bytes(head, MAX_GREETING)):
            if time.monotonic() > self.until_s:
                raise connection.lost(TimeoutError())
            return False
        proof = connection.decoded(body)
        if not isinstance(proof, Proof) or len(body) > n:
            raise LostError(f"{connection.name} did not say who it is")
        if not hmac.compare_digest(proof.signature, _signature(self._secret, b"front", self._nonce, proof.nonce)):
            connection.send(StageRefusal("the secret is another one; give both machines the same --stages-secret"))
            raise LostError(f"{connection.name} has another secret")
        connection.send(Proof(build(), b"", _signature(self._secret, b"stage", proof.nonce, self._nonce)))
        return True


def greet(connection: PeerConnection, secret: bytes) -> None:
    """Shows the end that listens that this one has the secret, and asks it for the same.

    Raises ConfigError where it is another one, or another build of Deltic; LostError.
    """
    challenge = connection.receive(is_greeting=True)
    if isinstance(challenge, StageRefusal):
        raise LostError(challenge.why)
    if not isinstance(challenge, Challenge):
        raise LostError(f"{connection.name} is no stage")
    nonce = secrets.token_bytes(32)
    connection.send(Proof("", nonce, _signature(secret, b"front", challenge.nonce, nonce)))
    answer = connection.receive(is_greeting=True)
    if isinstance(answer, StageRefusal):
        raise ConfigError(f"stage {connection.name}: {answer.why}")
    expected = _signature(secret, b"stage", nonce, challenge.nonce)
    if not isinstance(answer, Proof) or not hmac.compare_digest(answer.signature, expected):
        raise ConfigError(f"stage {connection.name} does not have the secret; is it another program?")
    if answer.build != build():
        raise ConfigError(
            f"stage {connection.name} runs Deltic {answer.build}, and this is {build()}; install the same on all machines"
        )


def read_secret(file: Path | None) -> bytes:
    """The secret in a file; empty without one. Raises ConfigError."""
    if file is None:
        return b""
    try:
        found = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--stages-secret {file}: cannot be read ({error.strerror})") from None
    if len(found) < 16:
        raise ConfigError(
            f"--stages-secret {file}: has {len(found)} bytes; give 16 or more, e.g. of openssl rand -hex 32"
        )
    return found


def parse_address(given: str, flag: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag} {given}: give HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_private(address: str, secret: bytes, flag: str) -> None:
    """Raises ConfigError for a numeric address that prompts may not be sent to or come from: one of the
    internet; without a secret all but those of this machine.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_global:
        raise ConfigError(
            f"{flag}: {ip} is an address of the internet, and nothing is encrypted; take a private network"
        )
    if not secret and not ip.is_loopback:
        raise ConfigError(f"{flag}: {ip} is reached by other machines; give all of them the same --stages-secret FILE")
