"""Cache events: what routers are told of the prefix cache is what it holds, and what a request can start behind.

The reader is `bench.cache_reader`, which decodes with vLLM's published classes and believes as llm-d does. More random traces:
`python tests/null/test_kv_events.py FIRST LAST`.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import pytest
import zmq

from bench.cache_reader import Index, Score, first_key, next_key
from deltic.config import ConfigError, EngineConfig, ServerConfig
from deltic.engine.cache.events import HASH_MASK, BlocksStored, CacheEvent, CacheEvents, Cleared, Removed
from deltic.engine.cache.tree import Node, root_key
from deltic.engine.cache.tree import next_key as tree_key
from deltic.engine.events import Ready
from deltic.engine.messages import InspectCache, Picture, Request, SamplingParams, Shutdown
from deltic.host import kv_events
from deltic.host.kv_events import END, EventPublisher, payload
from deltic.host.launch import EventSockets
from deltic.ops.geometry import PAGE_SIZE
from deltic.server.address import event_sockets, topics
from tests.conversations import Conversations, Turn, chat, follow_up, some_ids
from tests.fakes import FakeRunner, FakeTiers
from tests.null.test_prefix import random_runner
from tests.null.test_process import Process
from tests.null.test_stateless_cache import StatelessRunner
from tests.sessions import Disk, Session, spoil_something

SERVER, MODEL = "10.0.0.1:8000", "m"
TOPIC = f"kv@{SERVER}@{MODEL}"


class Told:
    """A session whose cache a router hears of, after every step."""

    def __init__(self, runner: FakeRunner, is_alone: bool = True) -> None:
        self.session = session = Session(runner)
        self.store = session.store
        self.events = CacheEvents(runner.info, MODEL, is_alone)
        self.store.listen(self.events)
        self.index = Index()
        self.heard: list[CacheEvent] = []
        self.requests: dict[str, Request] = {}
        self.listen()

    def listen(self) -> list[CacheEvent]:
        """What was told since the last time."""
        told = self.events.collect()
        if told:
            self.index.take(TOPIC, payload(1.5, told))
            check_form(told)
        self.heard += told
        assert not self.index.n_dropped
        self.check()
        return told

    def check(self) -> None:
        """The reader holds exactly what follows from the tree."""
        resumable: set[Node] = set()
        for node in self.store.tree.nodes.values():
            is_end = node.has_state or not self.session.engine.info.has_state
            at: Node | None = node if is_end and node.block is not None else None
            while at is not None and at.parent is not None:
                resumable.add(at)
                at = at.parent
        tiers = ("gpu", "cpu", "disk")
        expected = Counter()
        for node in resumable:
            if node.block is not None and not is_hidden(node):
                expected.update({tier for tier, where in zip(tiers, node.page, strict=True) if where is not None})
        assert Counter(tier for places in self.index.places.values() for _, tier in places) == expected

    def add(self, turn: Turn | list[int], **fields: Any) -> Request:
        """Queues a request, and keeps what the router predicts for it and what the engine could do."""
        turn = turn if isinstance(turn, Turn) else Turn(turn, [])
        params = SamplingParams(max_tokens=fields.pop("max_tokens", 1), seed=1, ignore_eos=True)
        request = Request(
            id=str(len(self.requests)), prompt_ids=turn.prompt_ids, boundaries=turn.boundaries, params=params, **fields
        )
        self.requests[request.id] = request
        self.session.requests[request.id] = request
        self.session.engine.add(request)
        return request

    def run(self) -> None:
        while self.session.engine.has_work():
            self.session.step()
            self.listen()
        self.listen()

    def complete(self, turn: Turn | list[int], **fields: Any) -> list[int]:
        request = self.add(turn, **fields)
        self.run()
        return self.session.answer(request.id)

    def predicted(self, ids: list[int], *salts: str, model: str = MODEL) -> int:
        """What the router believes; salts: in its request's first block."""
        return PAGE_SIZE * len(self.index.path(SERVER, model, ids, {0: salts} if salts else None))

    def resumable(self, ids: list[int], **fields: Any) -> int:
        """What the engine could start behind at this moment, from any tier."""
        request = Request(id="", prompt_ids=ids, params=SamplingParams(), **fields)
        key, found = root_key(request), 0
        for i in range((len(ids) - 1) // PAGE_SIZE):
            key = tree_key(key, array("i", ids[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]))
            node = self.store.tree.nodes.get(key)
            if node is None or not node.has_page:
                break
            if node.has_state or not self.session.engine.info.has_state:
                found = node.depth
        return found

    def is_end(self, ids: list[int], n: int, *salts: str) -> bool:
        """Whether no block that was announced lies beyond the first n tokens."""
        path = self.index.path(SERVER, MODEL, ids[:n], {0: salts} if salts else None)
        return bool(path) and path[-1] not in self.index.before.values()


def is_hidden(node: Node) -> bool:
    at: Node | None = node
    while at is not None and at.parent is not None:
        if at.block is not None and at.block.is_hidden:
            return True
        at = at.parent
    return False


def check_form(told: list[CacheEvent]) -> None:
    for event in told:
        hashes = [block.hash for block in event.blocks] if isinstance(event, BlocksStored) else []
        hashes += event.hashes if isinstance(event, Removed) else []
        assert all(0 < hash_ <= HASH_MASK for hash_ in hashes) and len(set(hashes)) == len(hashes)


def told_with(n_units: int | None = None, disk: Disk | None = None, **sizes: Any) -> Told:
    runner = FakeRunner(**{"n_slots": 40} | sizes)
    if n_units is not None or disk is not None:
        runner.tiers = FakeTiers(runner, n_units or 0, disk)
    return Told(runner)


# Random traces.


def run_trace(seed: int, score: Score) -> None:
    """A life or two with everything that can happen; after every step the reader knows what is there, and its
    predictions are right where a prompt follows a path to its end.
    """
    rng = Random(seed)
    disk: Disk | None = {} if rng.random() < 0.5 else None
    conversations = Conversations(rng, PAGE_SIZE)
    for life in range(2 if disk is not None else 1):
        runner = StatelessRunner(n_pages=40, max_model_len=8 * PAGE_SIZE) if seed % 7 == 6 else random_runner(rng, disk)
        told = Told(runner, is_alone=rng.random() < 0.5)
        turns: dict[str, Turn] = {}
        conversations.max_tokens = runner.max_model_len
        for _ in range(15):
            for _ in range(rng.randrange(4)):
                turn = next(conversations)
                salt = rng.choice(["", "", "another"])
                fields = {"namespace": rng.choice(["", "", "bob"]), "cache_salt": salt, "use_cache": rng.random() < 0.9}
                predict(told, turn, fields, score, is_first_life=life == 0)
                n_most = max(0, min(runner.max_model_len - len(turn.prompt_ids), rng.choice([0, 1, 40, 130])))
                turns[told.add(turn, max_tokens=n_most, **fields).id] = turn
            if rng.random() < 0.1 and turns:
                told.session.abort(rng.choice(list(turns)))
            if rng.random() < 0.03:
                told.session.engine.reset_cache()
                told.listen()
                assert not told.index.places
            running = [*told.session.engine.scheduler._decodes, *told.session.engine.scheduler._prefills]
            if rng.random() < 0.05 and running:
                told.session.engine.scheduler._preempt(rng.choice(running))
            if rng.random() < 0.1:
                spoil_something(told.session.engine, runner, rng)
            for _ in range(rng.randrange(1, 12)):
                for output in told.session.step():
                    if output.finish_reason in ("stop", "length") and output.index == 0:
                        conversations.answered(turns[output.id], told.session.answer(output.id))
                told.listen()
        told.run()
        told.session.settle()
        told.listen()


def predict(told: Told, turn: Turn, fields: dict[str, Any], score: Score, is_first_life: bool) -> None:
    """fields: the request's. is_first_life: no page has tokens that are not known."""
    ids, namespace, salt = turn.prompt_ids, fields["namespace"], fields["cache_salt"]
    keys = [f"{namespace}\n{salt}"] if namespace else [salt] if salt else []
    could = told.resumable(ids, namespace=namespace, cache_salt=salt)
    n_most = (len(ids) - 1) // PAGE_SIZE * PAGE_SIZE  # a token is always computed
    predicted = min(n_most, told.predicted(ids, *keys))
    if predicted and told.is_end(ids, predicted, *keys):
        assert could >= predicted if not is_first_life else could == predicted
    if is_first_life:
        assert predicted >= could
    score.add(predicted, could)


def test_a_reader_knows_what_is_there() -> None:
    score = Score()
    for seed in range(10):
        run_trace(seed, score)
    assert score.n_exact > score.n / 2 and score.n_hits and score.n_over


def test_the_reader_finds_what_the_next_turn_starts_behind() -> None:
    rng, told = Random(4), told_with()
    turn = chat(rng, 200)
    for _ in range(4):
        predicted, n = told.predicted(turn.prompt_ids), len(told.requests)
        answer = told.complete(turn, max_tokens=150)
        assert told.session.outputs[str(n), 0][0].cached_tokens == predicted
        assert predicted or not n
        turn = follow_up(turn, answer, rng, 50)


def test_who_leaves_between_two_checkpoints_is_overestimated() -> None:
    rng, told = Random(5), told_with()
    prompt = some_ids(rng, 1000)
    told.complete(prompt)
    other = [*prompt[:500], *some_ids(rng, 100)]
    assert (told.predicted(other), told.resumable(other)) == (448, 0)
    told.complete(other)  # leaves a checkpoint at the junction
    third = [*prompt[:500], *some_ids(rng, 100)]
    assert told.predicted(third) == told.resumable(third) == 448


# What is told.


def of_kind(events: list[CacheEvent], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_prompt_is_one_event_up_to_its_last_checkpoint() -> None:
    told, prompt = told_with(), some_ids(Random(1), 1000)
    told.complete(prompt)
    assert told.heard[0] == Cleared()
    (stored,) = of_kind(told.heard, BlocksStored)
    assert [len(block.tokens) for block in stored.blocks] == [PAGE_SIZE] * 15 and stored.medium == "GPU"
    assert [t for block in stored.blocks for t in block.tokens] == prompt[:960]
    assert [block.parent for block in stored.blocks] == [None, *(block.hash for block in stored.blocks[:-1])]
    wire = msgspec.msgpack.decode(payload(1.5, [stored]))
    assert wire[0] == 1.5 and wire[2] == 0
    (event,) = wire[1]
    assert list(event) == ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                           "lora_name", "extra_keys"]  # fmt: skip
    assert event["type"] == "BlockStored" and event["block_size"] == 64 and event["lora_id"] is None
    assert event["extra_keys"] == [None] * 15 and event["token_ids"] == prompt[:960]
    assert msgspec.msgpack.decode(payload(0.0, [Removed([1], "DISK"), Cleared()]))[1] == [
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "DISK"},
        {"type": "AllBlocksCleared"},
    ]


def test_an_answer_is_told_page_by_page_as_its_checkpoint_moves_on() -> None:
    told = told_with()
    told.complete(some_ids(Random(2), 100), max_tokens=300)
    stored = of_kind(told.heard, BlocksStored)
    assert [len(event.blocks) for event in stored] == [1] * 6 and not of_kind(told.heard, Removed)
    assert [event.blocks[0].parent for event in stored] == [None, *(e.blocks[0].hash for e in stored[:-1])]


def test_what_lies_behind_the_last_checkpoint_goes_with_the_next() -> None:
    told = told_with(max_model_len=20_480, n_pages=512)
    prompt = some_ids(Random(3), 3000)
    told.complete(prompt)
    nodes = {node.depth: node for node in told.store.tree.nodes.values()}
    assert sorted(depth for depth, node in nodes.items() if node.has_state) == [1024, 2048, 2944]
    deepest = nodes[2944]
    told.store._evict_state(deepest)
    (removed,) = told.listen()
    assert isinstance(removed, Removed) and len(removed.hashes) == (2944 - 2048) // 64
    assert removed.hashes[0] == deepest.block.hash
    told.store._evict_state(nodes[1024])  # another lies beyond it
    assert not told.listen() and told.predicted(prompt) == 2048
    told.store._evict_state(nodes[2048])
    assert len(told.listen()[0].hashes) == 32 and told.predicted(prompt) == 0
    assert len(told.store.tree.nodes) == 46  # the pages are there still
    told.complete([*prompt[:2944], 7, 8])
    assert told.predicted(prompt) == 2944


@pytest.mark.parametrize("gpu", [False, True])
def test_tiers_are_media(gpu: bool) -> None:
    disk: Disk = {}
    runner = FakeRunner(n_slots=12, n_pages=16, max_model_len=640, gpu=gpu)
    runner.tiers = FakeTiers(runner, 60, disk)
    told, prompt = Told(runner), some_ids(Random(6), 500)
    told.complete(prompt)
    told.session.settle()
    told.listen()
    assert [event.medium for event in of_kind(told.heard, BlocksStored)] == ["GPU", "DISK"]
    for seed in range(3):
        told.complete(some_ids(Random(seed), 500))
    kinds = [(type(event), event.medium) for event in of_kind(told.heard, BlocksStored) + of_kind(told.heard, Removed)]
    assert (BlocksStored, "CPU") in kinds and (Removed, "GPU") in kinds and (Removed, "CPU") not in kinds
    assert told.predicted(prompt) == 448
    # A new process finds the disk's, and tells of it once a request has passed.
    again = FakeRunner(n_slots=12, n_pages=16, max_model_len=640, gpu=gpu)
    again.tiers = FakeTiers(again, 60, disk)
    restarted = Told(again)
    assert restarted.heard == [Cleared()] and restarted.resumable(prompt) == 448
    restarted.complete([*prompt[:200], 3])
    assert restarted.predicted(prompt) == 192 and restarted.resumable(prompt) == 448  # of the rest it knows no tokens
    restarted.complete(prompt)
    assert restarted.predicted(prompt) == 448


def test_salts_and_namespaces_are_extra_keys_of_the_first_block() -> None:
    told, prompt = told_with(), some_ids(Random(7), 300)
    told.complete(prompt, cache_salt="s")
    told.complete(prompt, namespace="bob")
    told.complete(prompt, namespace="bob", cache_salt="s")
    assert told.predicted(prompt) == 0 and told.predicted(prompt, "s") == 256
    assert told.predicted(prompt, "bob\n") == told.predicted(prompt, "bob\ns") == 256
    firsts = [event.blocks for event in of_kind(told.heard, BlocksStored)]
    assert [blocks[0].extra for blocks in firsts] == [("s",), ("bob\n",), ("bob\ns",)]
    assert all(block.extra is None for blocks in firsts for block in blocks[1:])
    told.complete(prompt)
    assert told.predicted(prompt) == 256


def test_an_adapter_is_a_model_of_its_own() -> None:
    told, prompt = told_with(), some_ids(Random(8), 300)
    held = type("Held", (), {"state_slot": 0, "n_sequences": 0})()
    told.session.engine.adapters = type("All", (), {"find": staticmethod(lambda key: held)})()
    told.complete(prompt, adapter=b"a" * 16, adapter_name="sql", cache_salt="s")
    blocks = of_kind(told.heard, BlocksStored)[0].blocks
    assert [block.extra for block in blocks[:2]] == [("sql", "s"), ("sql",)] and blocks[0].lora == "sql"
    assert told.predicted(prompt, "s") == 0 and told.predicted(prompt, "s", model="sql") == 256
    plain = told_with()
    plain.complete(prompt, cache_salt="s")
    assert {block.hash for block in blocks}.isdisjoint(
        block.hash for event in of_kind(plain.heard, BlocksStored) for block in event.blocks
    )


def test_pictures_are_in_every_block_that_they_touch() -> None:
    told, prompt = told_with(), some_ids(Random(9), 300)
    pictures = [
        Picture(key=bytes([i]) * 16, rows=6, columns=10, pixels=b"", first=first) for i, first in [(1, 100), (2, 200)]
    ]
    request = Request(id="x", prompt_ids=prompt, params=SamplingParams(max_tokens=1), pictures=pictures)
    told.session.engine.scheduler.add(request, None, None)
    told.session.requests["x"] = request
    told.run()
    blocks = of_kind(told.heard, BlocksStored)[0].blocks
    one, two = "01" * 32, "02" * 32
    assert [block.extra for block in blocks] == [None, ((one, 36),), ((one, -28),), ((two, 8),)]


def test_a_reset_clears_where_a_model_is_alone() -> None:
    for is_alone in (True, False):
        told = Told(FakeRunner(n_slots=40), is_alone)
        told.complete(some_ids(Random(10), 300))
        told.session.engine.reset_cache()
        (event,) = told.listen()
        assert event == Cleared() if is_alone else len(event.hashes) == 4
        assert not told.index.places
        told.complete(some_ids(Random(10), 300))
        assert len(told.index.places) == 4


def test_what_comes_and_goes_between_two_looks_is_not_told() -> None:
    told, prompt = told_with(), some_ids(Random(11), 300)
    told.session.complete(prompt)
    told.session.engine.reset_cache()
    told.events._log = []
    assert not told.listen()


def test_no_event_hides_another_server() -> None:
    """The reader's table is one for all servers: what one withdraws, another may have."""
    rng = Random(12)
    prompt = some_ids(rng, 300)
    index = Index()
    told = [told_with(), told_with()]
    for i, of in enumerate(told):
        of.complete(prompt)
        index.take(f"kv@s{i}@m", payload(0.0, of.heard))
    told[0].session.engine.reset_cache()
    index.take("kv@s0@m", payload(0.0, told[0].events.collect()))
    assert [len(index.path(f"s{i}", "m", prompt)) for i in range(2)] == [0, 4]
    key = next_key(first_key("m"), prompt[:64])
    assert index.places[key] == {("s1", "gpu")}


# Sockets.


class Reader:
    """A subscriber, and one who asks again."""

    def __init__(self, publish: str, replay: str | None = None, topic: str = "") -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(publish)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.set_hwm(0)
        if replay:
            self.asking.connect(replay)

    def message(self, timeout_s: float = 20.0) -> tuple[str, int, list[Any]] | None:
        if not self.sub.poll(int(timeout_s * 1000)):
            return None
        topic, number, told = self.sub.recv_multipart()
        assert len(number) == 8
        return topic.decode(), int.from_bytes(number, "big"), msgspec.msgpack.decode(told)

    def ask(self, first: int) -> list[tuple[bytes, int, bytes]]:
        """What is told again, up to the end marker."""
        self.asking.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while self.asking.poll(20_000):
            empty, topic, number, told = self.asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, told) == (b"", b"")
                return found
            found.append((topic, int.from_bytes(number, "big"), told))
        raise AssertionError("no end")

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def addresses(tmp_path: Path) -> EventSockets:
    return EventSockets(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")


@pytest.fixture
def wired(addresses: EventSockets) -> Iterator[tuple[EventPublisher, Reader]]:
    publisher, reader = EventPublisher(addresses), Reader(addresses.publish, addresses.replay)
    until = time.monotonic() + 20
    while True:  # until the subscription has arrived
        publisher.publish(b"hello", [Cleared()])
        if reader.message(0.05) is not None or time.monotonic() > until:
            break
    while reader.message(0.2) is not None:
        pass
    yield publisher, reader
    reader.close()
    publisher.close()


def test_messages_have_topic_number_and_batch(wired: tuple[EventPublisher, Reader]) -> None:
    publisher, reader = wired
    first = publisher._next
    for i in range(3):
        publisher.publish(f"kv@a:1@m{i % 2}".encode(), [Removed([i], "CPU")])
    for i in range(3):
        found = reader.message()
        assert found is not None
        topic, number, (at, events, rank) = found
        assert (topic, number, rank) == (f"kv@a:1@m{i % 2}", first + i, 0) and abs(at - time.time()) < 60
        assert events == [{"type": "BlockRemoved", "block_hashes": [i], "medium": "CPU"}]


def test_what_was_missed_is_told_again(wired: tuple[EventPublisher, Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, reader = wired
    first = publisher._next
    for i in range(5):
        publisher.publish(b"kv@a:1@m", [Removed([i], "CPU")])
    assert [number for _, number, _ in reader.ask(first + 2)] == [first + 2, first + 3, first + 4]
    topic, _, told = reader.ask(first)[0]
    assert topic == b"kv@a:1@m" and msgspec.msgpack.decode(told)[1][0]["block_hashes"] == [0]
    assert reader.ask(first + 99) == [] and len(reader.ask(0)) == len(publisher._kept) > 5
    reader.asking.send_multipart([b"what", b"is", b"this"])
    reader.asking.send_multipart([b"", b"short"])
    assert len(reader.ask(first + 4)) == 1  # and nobody died of it


def test_what_is_kept_is_bounded_in_bytes_and_only_where_it_is_asked_for(
    addresses: EventSockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 2000)
    for replay, most in ((addresses.replay, 2000), (None, 0)):
        publisher = EventPublisher(EventSockets(f"ipc://{tmp_path}/bounded", replay))
        for i in range(300):
            publisher.publish(b"t", [Removed([i], "CPU")])
        publisher.close()
        sizes = [len(message[2]) for message in publisher._kept]
        assert sum(sizes) <= most and bool(sizes) == bool(most)


def test_the_ring_forgets_the_oldest(wired: tuple[EventPublisher, Reader]) -> None:
    publisher, reader = wired
    n = kv_events.KEPT_BATCHES + 100
    for i in range(n):
        publisher.publish(b"t", [Removed([i], "CPU")])
    while publisher._batches:
        time.sleep(0.01)
    found = reader.ask(0)
    assert len(found) == kv_events.KEPT_BATCHES
    numbers = [number for _, number, _ in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] > 0


@pytest.mark.usefixtures("no_collections")
def test_a_slow_reader_holds_nobody_up(wired: tuple[EventPublisher, Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, _ = wired
    monkeypatch.setattr(kv_events, "payload", lambda ts, events: bytes(100_000))
    begin, taken = time.process_time(), []
    for _ in range(3000):  # 300 MB to one who does not read
        before = time.thread_time()
        publisher.publish(b"t", [Cleared()])
        taken.append(time.thread_time() - before)
    assert sorted(taken)[-30] < 0.1, "one in a hundred may meet the kernel as it looks for memory"
    publisher._kept.clear()
    assert time.process_time() - begin < 20


def test_a_batch_that_fails_is_a_gap(wired: tuple[EventPublisher, Reader], caplog: pytest.LogCaptureFixture) -> None:
    publisher, reader = wired
    publisher.publish(b"t", [Removed([object()], "CPU")])  # type: ignore[list-item]
    publisher.publish(b"t", [Removed([1], "CPU")])
    found = reader.message()
    assert found is not None and found[1] == publisher._next - 1 and "cache events were lost" in caplog.text


def test_an_address_that_is_taken_is_refused(addresses: EventSockets) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    n_threads = threading.active_count()
    with pytest.raises(ConfigError, match=rf"--kv-events tcp://127.0.0.1:{port}: .*in use"):
        EventPublisher(EventSockets(f"tcp://127.0.0.1:{port}"))
    with pytest.raises(ConfigError, match=r"--kv-events-replay tcp://127.0.0.1:.*in use"):
        EventPublisher(EventSockets(addresses.publish, f"tcp://127.0.0.1:{port}"))
    assert threading.active_count() == n_threads
    context.destroy(linger=0)


def test_what_readers_send_is_bounded(
    wired: tuple[EventPublisher, Reader], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, reader = wired
    hostile = Reader(publisher._address, reader.asking.last_endpoint.decode())
    hostile.asking.send_multipart([b"", bytes(50_000)])  # it never arrives
    hostile.sub.setsockopt(zmq.SUBSCRIBE, bytes(50_000))  # nor does this, however often it connects
    assert len(reader.ask(publisher._next - 1)) == 1 and "a question to" not in caplog.text
    monkeypatch.setattr(kv_events, "MAX_TOPICS", 100)
    many = Reader(publisher._address)
    for i in range(300):
        many.sub.setsockopt(zmq.SUBSCRIBE, b"%d" % i)
    until = time.monotonic() + 20
    while "more than 100 topics" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    many.close()
    hostile.close()
    while (told := reader.message(0.05)) is None and time.monotonic() < until:  # it connects again by itself
        publisher.publish(b"t", [Cleared()])
    assert told is not None and "more than 100 topics" in caplog.text and publisher._n_topics <= 100


def test_a_process_tells_and_its_successor_begins_anew(tmp_path: Path, addresses: EventSockets) -> None:
    prompt = some_ids(Random(13), 300)
    last = 0
    for _ in range(2):
        process = Process(tmp_path, EngineConfig(n_pages=64, max_num_seqs=2), topic=TOPIC, kv_events=addresses)
        while not isinstance(process.receive(), Ready):
            pass
        assert addresses.replay is not None
        reader = Reader(addresses.publish, addresses.replay)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        process.send(Request(id="a", prompt_ids=prompt, params=params))
        process.receive_last(1)
        index = Index()
        until = time.monotonic() + 20
        while len(told := reader.ask(0)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        numbers = [number for _, number, _ in told]
        assert numbers == list(range(numbers[0], numbers[0] + len(told))) and numbers[0] > last, "none is passed over"
        last = numbers[-1]
        assert msgspec.msgpack.decode(told[0][2])[1] == [{"type": "AllBlocksCleared"}]
        for topic, _, batch in told:
            index.take(topic.decode(), batch)
        assert len(index.path(SERVER, MODEL, prompt)) == 4
        process.send(InspectCache(reset=True))
        while msgspec.msgpack.decode(reader.ask(0)[-1][2])[1] != [{"type": "AllBlocksCleared"}]:
            assert time.monotonic() < until
        process.send(Shutdown())
        assert process.child.wait(60) == 0
        reader.close()
        process.close()


# Settings.


class Listener:
    def __init__(self, host: str = "127.0.0.1", port: int = 8123) -> None:
        self.address = host, port

    def getsockname(self) -> tuple[str, int]:
        return self.address


def topics_of(names: list[str | None], listener: Any = None, **config: Any) -> list[str | None]:
    return topics(names, ServerConfig(kv_events="tcp://*:5557", **config), listener or Listener())


def test_topics() -> None:
    assert topics_of(["org/m"]) == ["kv@127.0.0.1:8123@org/m"]
    assert topics_of(["a", None, "b"]) == ["kv@127.0.0.1:8123@a", None, "kv@127.0.0.1:8123@b"]
    assert topics_of(["m"], kv_events_topic="") == [""]
    assert topics_of(["m"], kv_events_topic="kv@10.1.2.3:80@{model}") == ["kv@10.1.2.3:80@m"]
    assert topics_of(["m"], kv_events_topic="pod-1", uds=Path("/tmp/nowhere")) == ["pod-1"]
    (name,) = topics_of(["m"], Listener("0.0.0.0"), host="0.0.0.0")
    assert name is not None and name.startswith("kv@") and "0.0.0.0" not in name
    refused: list[tuple[list[str | None], str, dict[str, Any]]] = [
        (["a", "b"], "put {model} into it", {"kv_events_topic": "kv@x:1@y"}),
        (["a@b"], "--served-model-name", {}),
        (["m"], "--uds", {"uds": Path("/tmp/nowhere")}),
        ([None], "speaks", {}),
    ]
    for names, said, config in refused:
        with pytest.raises(ConfigError, match=said):
            topics_of(names, **config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_events": "5557"}, "give tcp://HOST:PORT"),
        ({"kv_events": "tcp://*"}, "give tcp://HOST:PORT"),
        ({"kv_events": "inproc://x"}, "give tcp://HOST:PORT"),
        ({"kv_events_replay": "tcp://*:5558"}, "--kv-events"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5557"}, "another address"),
        ({"kv_events_topic": "x"}, "needs --kv-events"),
        ({"kv_events": "tcp://*:5557", "kv_events_topic": "kv@{pod}@{model}"}, "{pod} is none of"),
    ],
)
def test_settings_that_cannot_work(given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        event_sockets(ServerConfig(**given), [EngineConfig()])


def test_a_cache_that_is_off_has_nothing_to_tell() -> None:
    config = ServerConfig(kv_events="tcp://*:5557")
    assert event_sockets(config, [EngineConfig()]) == EventSockets("tcp://*:5557")
    assert event_sockets(ServerConfig(), [EngineConfig(prefix_cache=False)]) is None
    with pytest.raises(ConfigError, match="--no-prefix-cache"):
        event_sockets(config, [EngineConfig(), EngineConfig(prefix_cache=False)])


if __name__ == "__main__":
    total = Score()
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        run_trace(number, total)
    print(total)
