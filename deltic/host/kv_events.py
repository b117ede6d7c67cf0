"""Cache events on the wire: a socket that publishes them, and one that tells again what a reader missed.

The form is vLLM's (module vllm.distributed.kv_events since its #42892 and #45177), which llm-d, NVIDIA Dynamo
and others read. A message is [topic, sequence number in 8 bytes, msgpack], its payload
[time, [event, ...], 0]; an event is a map with its name under "type". Numbers count the messages of all
topics of a process. They begin with the microseconds since 1970: readers drop a message with a lower number
than they know, and a process that comes back must have higher ones. Who asks the second socket with a number
gets [topic, number, payload] of each that is kept from there on, then [b"", -1, b""].

A thread encodes and sends. Who publishes leaves a batch and goes on; a slow reader loses messages, and
sees it by their numbers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain

import msgspec
import zmq

from deltic.config import ConfigError
from deltic.engine.cache.events import BlocksStored, CacheEvent, ExtraKey, Removed
from deltic.host.launch import EventSockets
from deltic.ops.geometry import PAGE_SIZE

log = logging.getLogger("deltic.host.kv_events")

KEPT_BATCHES, KEPT_BYTES = 10_000, 64 << 20
"""Messages that can be told again, and bytes of theirs."""

HIGH_WATER = 10_000
"""Messages that wait for a slow reader; then it loses them. vLLM's 100,000 may be a gigabyte for each."""

MAX_ASKED_BYTES = 1024
"""Bytes of a frame that a reader sends, a topic or a number: who sends a larger one is disconnected, before
it is held.
"""

MAX_TOPICS = 10_000
"""Topics that readers subscribe to, together. With more, all of them are disconnected, and may come again."""

END = (-1).to_bytes(8, signed=True)
"""The number behind the last message that is told again."""

CLOSE_S = 1.0
REOPEN_S = 10.0

_STOP = b"stop"


class BlockStored(msgspec.Struct, tag=True):
    """Blocks of a path, one behind the other, have come into a medium."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None]


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks are no longer in a medium."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Event: every medium is empty."""


class EventBatch(msgspec.Struct, array_like=True):
    """The payload of a message."""

    ts: float
    """Seconds since 1970."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


def payload(ts: float, events: Sequence[CacheEvent]) -> bytes:
    """Events as their message has them. ts: when they were collected."""
    return _encode(EventBatch(ts, [_on_the_wire(event) for event in events]))


_encode = msgspec.msgpack.Encoder().encode


def _on_the_wire(event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, BlocksStored):
        blocks = event.blocks
        return BlockStored(
            [block.hash for block in blocks],
            blocks[0].parent,
            list(chain.from_iterable(block.tokens for block in blocks)),
            PAGE_SIZE,
            None,
            event.medium,
            blocks[0].lora,
            [block.extra for block in blocks],
        )
    return BlockRemoved(event.hashes, event.medium) if isinstance(event, Removed) else AllBlocksCleared()


class EventPublisher:
    """The sockets, and the thread that they belong to."""

    def __init__(self, sockets: EventSockets) -> None:
        """Raises ConfigError when an address cannot be bound."""
        self._context = zmq.Context()
        self._batches: deque[tuple[bytes, float, list[CacheEvent]]] = deque()
        self._kept: deque[tuple[bytes, bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._n_topics = 0
        self._next = time.time_ns() // 1000
        try:
            self._address = sockets.publish
            self._publishing = self._bound(zmq.XPUB, HIGH_WATER, "--kv-events", self._address)
            # All that is kept finds room on its way to one reader, who may ask again once it has it.
            replay = sockets.replay
            self._replaying = replay and self._bound(zmq.ROUTER, KEPT_BATCHES + 1, "--kv-events-replay", replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._waking, self._woken = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket in (self._waking, self._woken):
            socket.set_hwm(0)
        self._woken.bind("inproc://batches")
        self._waking.connect("inproc://batches")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, high_water: int, flag: str, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(
                f"{flag} {address}: {zmq.strerror(error.errno or 0)}. Give a free address of this machine."
            ) from None
        return socket

    def publish(self, topic: bytes, events: list[CacheEvent]) -> None:
        """Leaves events to be sent as one message. From one thread only."""
        self._batches.append((topic, time.time(), events))
        self._waking.send(b"")

    def close(self) -> None:
        """Sends what was left, for at most CLOSE_S."""
        self._waking.send(_STOP)
        self._thread.join(CLOSE_S)
        self._waking.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._publishing, zmq.POLLIN)
        if self._replaying:
            poller.register(self._replaying, zmq.POLLIN)
        is_open = True
        while is_open:
            came = dict(poller.poll())
            try:
                if self._woken in came:
                    is_open = self._woken.recv() != _STOP
                    self._send()
                if self._replaying and self._replaying in came:
                    self._replay(self._replaying)
                if self._publishing in came and self._count_topics() > MAX_TOPICS:
                    poller.unregister(self._publishing)
                    self._forget_topics()
                    poller.register(self._publishing, zmq.POLLIN)
            except Exception:  # readers see by the numbers that they missed something
                log.exception("cache events were lost")
        self._woken.close(linger=0)
        self._publishing.close(linger=int(CLOSE_S * 1000))
        if self._replaying:
            self._replaying.close(linger=0)

    def _count_topics(self) -> int:
        with contextlib.suppress(zmq.Again):
            while self._n_topics <= MAX_TOPICS:
                frame = self._publishing.recv(zmq.NOBLOCK)
                self._n_topics += {1: 1, 0: -1}.get(frame[0], 0) if frame else 0
        return self._n_topics

    def _forget_topics(self) -> None:
        """Opens another socket at the same address: the library keeps topics for as long as it has their
        socket.
        """
        log.warning("readers of --kv-events have more than %d topics: all were disconnected", MAX_TOPICS)
        self._publishing.close(linger=0)
        self._n_topics, until_s = 0, time.monotonic() + REOPEN_S
        while True:
            try:
                self._publishing = self._bound(zmq.XPUB, HIGH_WATER, "--kv-events", self._address)
                return
            except ConfigError:  # it is closed by another thread, a little later
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.01)

    def _send(self) -> None:
        while self._batches:
            topic, ts, events = self._batches.popleft()
            number = self._next.to_bytes(8)
            self._next += 1
            message = topic, number, payload(ts, events)
            self._publishing.send_multipart(message)
            if self._replaying:
                self._keep(message)

    def _keep(self, message: tuple[bytes, bytes, bytes]) -> None:
        self._kept.append(message)
        self._kept_bytes += len(message[2])
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[2])

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answers one question."""
        *route, asked = socket.recv_multipart()
        if len(route) != 2 or len(asked) != 8:
            log.warning("a question to --kv-events-replay has %d frames; it is one number of 8 bytes", len(route) + 1)
            return
        for message in self._kept:
            if message[1] >= asked:  # big-endian
                socket.send_multipart((*route, *message))
        socket.send_multipart((*route, b"", END, b""))
