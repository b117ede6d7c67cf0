"""The client with a real engine process behind it, whose runner is the fake one.

Cost of the queue, for one token: `python tests/null/test_client.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import uvloop
import zmq

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deltic.config import EngineConfig, ServerConfig
from deltic.engine.events import AdapterLoaded, CacheReport, CacheStats, EngineReply, Event, Loading, SpeechStats, Stats
from deltic.engine.messages import Command, EncodeVoice, Output, Request, SamplingParams
from deltic.host.client import EngineClient, EngineUnavailable, QueueFull
from deltic.host.process import ServedModel
from deltic.host.supervisor import EngineHost
from tests.fakes import expected_tokens
from tests.waiting import until

FAKES = str(Path(__file__).resolve().parents[1] / "fakes.py")


def request(id: str = "a", n_prompt: int = 10, **params: Any) -> Request:
    return Request(
        id=id,
        prompt_ids=[20 + i % 900 for i in range(n_prompt)],
        params=SamplingParams(**{"seed": 1, "ignore_eos": True} | params),
    )


class Outputs:
    """What is delivered for one request, one by one, until each sequence has had its last."""

    def __init__(self, request: Request) -> None:
        self._n_open = request.params.n
        self._queue: asyncio.Queue[Output] = asyncio.Queue()

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._queue.put_nowait(output)

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> Output:
        if not self._n_open:
            raise StopAsyncIteration
        output = await self._queue.get()
        self._n_open -= output.finish_reason is not None
        return output


def submit(client: EngineClient, request: Request) -> Outputs:
    outputs = Outputs(request)
    client.submit(request, outputs.take)
    return outputs


async def collect(stream: Outputs) -> list[Output]:
    return [output async for output in stream]


def tokens(outputs: list[Output], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


def reasons(outputs: list[Output]) -> list[str | None]:
    return [output.finish_reason for output in outputs if output.finish_reason]


@asynccontextmanager
async def engine(
    max_queue: int = 100, step_ms: float = 0.0, on_event: Callable[[Event], None] | None = None, **config: Any
) -> AsyncIterator[EngineClient]:
    """A client whose engine is ready."""
    client = EngineClient(EngineConfig(**config), max_queue, on_event)
    async with hosted(client, step_ms=step_ms):
        yield client


@asynccontextmanager
async def hosted(
    *clients: EngineClient,
    step_ms: float = 0.0,
    timeout_s: float = 0.0,
    program: tuple[str, ...] = (sys.executable, FAKES),
) -> AsyncIterator[EngineHost]:
    """The host of these clients, which are ready."""
    if step_ms:
        program = (*program, "--step-ms", str(step_ms))
    host = EngineHost(clients, ServerConfig(engine_timeout_s=timeout_s), program=program)
    await host.start()
    try:
        for client in clients:
            await client.ready()
        yield host
    finally:
        await host.stop()


def in_loop(
    test: Callable[[], Coroutine[Any, Any, None]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Callable[[], None]:
    """Runs a test in an event loop of its own, as the server has one, for at most half a minute."""

    def run() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(asyncio.wait_for(test(), 30))

    run.__name__ = test.__name__
    return run


def in_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """In asyncio's, too."""

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def run(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        in_loop(test, new_loop)()

    run.__name__ = test.__name__
    return run


@in_loop
async def test_a_bad_request_fails_alone() -> None:
    async with engine(max_num_seqs=4) as client:
        good = submit(client, request("good", max_tokens=40))
        bad = submit(client, request("bad", n=5, max_tokens=4))
        assert reasons(await collect(bad)) == ["error"] * 5
        outputs = await collect(good)
        assert len(tokens(outputs)) == 40 and reasons(outputs) == ["length"]
        with pytest.raises(ValueError, match="n = 0"):
            submit(client, request("zero", n=0))


@in_loop
async def test_queue_full_is_refused_at_once_and_opens_again() -> None:
    async with engine(max_queue=3, max_num_seqs=2, step_ms=2.0) as client:
        streams = [submit(client, request(str(i), max_tokens=20)) for i in range(5)]
        with pytest.raises(QueueFull) as refusal:
            submit(client, request("full"))
        assert 1 <= refusal.value.retry_after_s <= 60 and "3 sequences waiting" in str(refusal.value)
        await collect(streams[0])
        await collect(submit(client, request("now", max_tokens=2)))
        for stream in streams[1:]:
            await collect(stream)
        assert client.n_open == 0


@in_loop
async def test_a_full_queue_leaves_each_owner_its_share() -> None:
    async with engine(max_queue=6, max_num_seqs=2, step_ms=2.0) as client:
        client.n_tenants = 3

        def asked(id: str, tenant: str, **params: Any) -> Any:
            return msgspec.structs.replace(request(id, max_tokens=20, **params), tenant=tenant)

        streams = [submit(client, asked(f"a{i}", "a")) for i in range(8)]
        with pytest.raises(QueueFull):
            submit(client, asked("a8", "a"))
        streams.append(submit(client, asked("b", "b", n=2)))
        for tenant, spare in (("b", 0), ("c", 3)):  # b's share is used up; what leaves room to others has none
            with pytest.raises(QueueFull):
                client.check_room(1, tenant, spare)
        client.check_room(2, "c")
        for stream in streams:
            await collect(stream)
        assert client.n_open == 0 and not client._n_open_of.total()


@in_loop
async def test_abort_of_a_request_and_of_one_sequence() -> None:
    async with engine(step_ms=2.0) as client:
        stream = submit(client, request("one", max_tokens=50, n=3))
        await anext(stream)
        client.abort("one", 1)
        outputs = await collect(stream)
        assert sorted((o.index, o.finish_reason) for o in outputs if o.finish_reason) == [
            (0, "length"), (1, "abort"), (2, "length"),
        ]  # fmt: skip
        stream = submit(client, request("all", max_tokens=3000, n=2))
        await anext(stream)
        client.abort("all")
        assert reasons(await collect(stream)) == ["abort", "abort"]  # and so not at their ends
        await until(lambda: client.stats.n_slots_used == 0 and client.stats.n_pages_used == 0)
        client.abort("all")
        client.abort("unknown")


@in_loop
async def test_abort_of_what_waits_spares_what_has_begun() -> None:
    async with engine(step_ms=2.0, max_num_seqs=2) as client:
        running, waiting = (submit(client, request("runs", max_tokens=60, n=2)), submit(client, request("waits", n=2)))
        await anext(running)
        for id in ("runs", "waits", "runs"):
            client.abort(id, if_waiting=True)
        assert reasons(await collect(waiting)) == ["abort", "abort"]
        assert reasons(await collect(running)) == ["length", "length"]
        assert client.n_open == 0


@in_both_loops
async def test_abort_storm() -> None:
    """Hundreds of requests, most of them aborted at any moment; each ends once, and nothing stays in use."""
    rng = random.Random(5)
    async with engine(max_queue=1200, max_num_seqs=8, n_pages=40, max_model_len=2048, max_step_tokens=128) as client:

        async def one(i: int) -> None:
            await asyncio.sleep(rng.random() * 0.5)
            n = rng.choice([1, 1, 1, 2, 4])
            r = request(str(i), rng.randint(1, 300), max_tokens=rng.randint(1, 60), n=n)
            stream = submit(client, r)
            kind = rng.random()
            if kind < 0.3:
                client.abort(r.id)
            elif kind < 0.6:
                asyncio.get_running_loop().call_later(rng.random() * 0.1, client.abort, r.id, rng.randrange(n))
            outputs = await collect(stream)
            assert len(reasons(outputs)) == n
            if "length" in [o.finish_reason for o in outputs if o.index == 0]:
                assert tokens(outputs) == expected_tokens(r.prompt_ids, r.params)

        await asyncio.gather(*(one(i) for i in range(300)))
        await until(lambda: client.stats.n_slots_used == client.stats.n_pages_used == 0)
        assert client.n_open == 0 and client.n_restarts == 0 and client.stats.n_running == 0


@in_loop
async def test_questions_about_the_cache_are_answered_in_their_order() -> None:
    events: list[Event] = []
    client = EngineClient(EngineConfig(), 100, events.append)
    async with hosted(client) as host:
        assert host.pid is not None
        os.kill(host.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.inspect_cache(), 0.05)
        asked = [asyncio.create_task(client.inspect_cache(reset=bool(i % 2))) for i in range(4)]
        await asyncio.sleep(0.05)
        os.kill(host.pid, signal.SIGCONT)
        reports = await asyncio.gather(*asked)
        told = [event for event in events if isinstance(event, CacheReport)]
        assert len(told) == 5 and all(a is b for a, b in zip(reports, told[1:], strict=True))
        assert "enabled" in (await client.inspect_cache()).summary


@in_loop
async def test_an_answer_finds_who_asked_whatever_came_before_it() -> None:
    client = EngineClient(EngineConfig(), 1)
    client.set_state("ready")
    sent: list[Any] = []
    client._send = sent.append  # type: ignore[method-assign]
    asked = [asyncio.create_task(client.load_adapter("/a")) for _ in range(3)]
    asked += [asyncio.create_task(client.inspect_cache())]  # type: ignore[list-item]
    await asyncio.sleep(0)
    numbers = [question.number for question in sent]
    assert len(set(numbers)) == 4 and client.is_asked
    asked[1].cancel()
    await asyncio.sleep(0)
    client._take(CacheReport({"n": 1}, number=numbers[3]), [])
    for i in (2, 1, 0):
        client._take(AdapterLoaded("/a", rank=i, number=numbers[i]), [])
    client._take(AdapterLoaded("/a", number=max(numbers) + 1), [])  # nobody asked
    assert [(await asked[i]).rank for i in (0, 2)] == [0, 2] and not client.is_asked
    assert (await asked[3]).summary == {"n": 1}  # type: ignore[attr-defined]


@in_loop
async def test_an_engine_that_dies_does_not_tell_of_its_cache() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client) as host:
        assert host.pid is not None
        os.kill(host.pid, signal.SIGSTOP)
        asked = [asyncio.create_task(client.inspect_cache()) for _ in range(2)]
        await asyncio.sleep(0.05)
        os.kill(host.pid, signal.SIGKILL)
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, EngineUnavailable) and "SIGKILL" in str(error)
        with pytest.raises(EngineUnavailable, match="restarted"):
            await client.inspect_cache()
        await client.ready()
        await client.inspect_cache()


@in_loop
async def test_an_answer_about_the_cache_that_comes_while_it_stops() -> None:
    events: list[Event] = []
    for _ in range(5):  # on a busy machine the end of the process may be seen before its last message
        client = EngineClient(EngineConfig(), 100, events.append)
        async with hosted(client) as host:
            assert host.pid is not None
            pid = host.pid
            os.kill(pid, signal.SIGSTOP)
            asked = asyncio.create_task(client.inspect_cache())
            await asyncio.sleep(0.05)
            stopping = asyncio.create_task(host.stop())
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await asked
            os.kill(pid, signal.SIGCONT)
            await stopping
        if any(isinstance(event, CacheReport) for event in events):
            break
    # Listeners hear of an event only once the client has taken it without an error.
    assert any(isinstance(event, CacheReport) for event in events)


@in_loop
async def test_questions_about_voices_are_answered_or_end_with_the_process() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client) as host:
        assert host.pid is not None
        client.drop_voice("a")
        answers = await asyncio.gather(*(client.encode_voice(EncodeVoice(key=key)) for key in "aba"))
        assert [answer.key for answer in answers] == ["a", "b", "a"]
        assert all(answer.error == "this model does not speak" for answer in answers)
        os.kill(host.pid, signal.SIGSTOP)
        asked = [asyncio.create_task(client.encode_voice(EncodeVoice(key="a"))) for _ in range(2)]
        await asyncio.sleep(0.05)
        os.kill(host.pid, signal.SIGKILL)
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, EngineUnavailable) and "SIGKILL" in str(error)
        with pytest.raises(EngineUnavailable, match="restarted"):
            await client.encode_voice(EncodeVoice(key="a"))
        client.drop_voice("a")
        client.drop_voice("b")
        sent: list[Any] = []
        was, client._send = client._send, sent.append  # type: ignore[method-assign]
        await client.ready()
        assert sorted(drop.key for drop in sent) == ["a", "b"]
        client._send = was  # type: ignore[method-assign]


def test_counters_are_sums_over_the_processes_and_gauges_are_the_last_one_s() -> None:
    client = EngineClient(EngineConfig(), 1)

    def stats() -> Stats:
        cache = CacheStats(
            n_lookups=3, n_hits=2, n_lookup_tokens=300, n_hit_tokens=128, checkpoints_taken={"end": 2, "tail": 1},
            n_pages_evicted=4, n_checkpoints_evicted=1, read_bytes={"disk": 10}, written_bytes={"host": 5}, n_damaged=1,
            n_pages=9, n_checkpoints=8,
        )  # fmt: skip
        speech = SpeechStats(n_streams_used=1, n_streams=4, n_frames=10, n_underruns=1, vocoder_s=0.5)
        return Stats(n_running=2, n_steps=5, n_prompt_tokens=300, last_step_ms=4.0, cache=cache, speech=speech)

    client._count(stats())
    assert client.stats == stats()
    for n_deaths in (1, 2):
        client._forget_gauges()
        client.n_restarts += 1
        kept = client.stats.cache
        assert (kept.n_lookups, kept.checkpoints_taken["end"]) == (3 * n_deaths, 2 * n_deaths)
        assert kept.n_pages == kept.n_checkpoints == client.stats.n_running == 0
        last = stats()
        last.cache.checkpoints_taken = {"end": 2, "ladder": 1}
        for _ in range(2):  # every message tells all since the start of its process
            client._count(msgspec.msgpack.decode(msgspec.msgpack.encode(last), type=Stats))
    assert (client.stats.n_steps, client.stats.n_running, client.stats.n_prompt_tokens) == (15, 2, 900)
    assert client.stats.speech == SpeechStats(1, 4, 30, 3, 1.5)
    assert client.stats.cache == CacheStats(
        n_lookups=9, n_hits=6, n_lookup_tokens=900, n_hit_tokens=384,
        checkpoints_taken={"end": 6, "tail": 1, "ladder": 2}, n_pages_evicted=12, n_checkpoints_evicted=3,
        read_bytes={"disk": 30}, written_bytes={"host": 15}, n_damaged=3, n_pages=9, n_checkpoints=8,
    )  # fmt: skip


@in_loop
async def test_answers_about_adapters_find_who_asked() -> None:
    client = EngineClient(EngineConfig(), 100)
    told: list[str] = []
    client.on_ready = lambda info: told.append(info.model_name)
    async with hosted(client) as host:
        assert host.pid is not None and told == ["fake"]
        answers = await asyncio.gather(*(client.load_adapter(path) for path in ("/a", "/b", "/a")))
        assert [answer.path for answer in answers] == ["/a", "/b", "/a"]
        assert all("no room for adapters" in str(answer.error) for answer in answers)
        client.drop_adapter(b"unknown")
        request_of_one = msgspec.structs.replace(request("one"), adapter=b"unknown")
        assert reasons(await collect(submit(client, request_of_one))) == ["error"]
        os.kill(host.pid, signal.SIGSTOP)
        asked = [asyncio.create_task(client.load_adapter("/a")) for _ in range(2)]
        await until(lambda: client.is_asked)
        os.kill(host.pid, signal.SIGKILL)
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, EngineUnavailable) and "SIGKILL" in str(error)
        with pytest.raises(EngineUnavailable, match="restarted"):
            await client.load_adapter("/a")
        client.drop_adapter(b"unknown")
        await client.ready()
        assert told == ["fake", "fake"] and not client.is_asked


@in_loop
async def test_a_message_that_is_no_event_does_not_hold_up_the_next() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client) as host:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context, context.socket(zmq.PUSH) as socket:
            socket.connect(f"ipc://{host._directory.path}/0-0-events")
            time.sleep(0.05)  # the loop stands still: it finds both messages at once
            for message in (b"\xff", msgspec.msgpack.encode(Loading("late", 0.5))):
                socket.send(message)
            time.sleep(0.05)
            await until(lambda: client.loading is not None, 2.0)


@in_loop
async def test_what_came_during_a_stall_is_delivered_at_once() -> None:
    async with engine() as client:
        r = request(max_tokens=300)
        deliveries: list[list[Output]] = []
        client.submit(r, deliveries.append)
        while client.n_open:
            time.sleep(0.05)  # the event loop is busy
            await asyncio.sleep(0)
        assert tokens([output for outputs in deliveries for output in outputs]) == expected_tokens(
            r.prompt_ids, r.params
        )
        assert len(deliveries) < 100


@in_loop
async def test_a_consumer_that_fails_does_not_stop_the_others() -> None:
    def fail(outputs: list[Output]) -> None:
        raise ValueError("no")

    async with engine(step_ms=2.0) as client:
        client.submit(request("fails", max_tokens=100), fail)
        assert len(tokens(await collect(submit(client, request("stays", max_tokens=30))))) == 30
        client.abort("fails")
        await until(lambda: client.n_open == 0)


async def time_queue(n: int, n_tokens: int) -> None:
    """Prints what a token costs in the client's process and altogether, for n streams at once."""
    async with engine(max_num_seqs=n, n_pages=n * 40) as client:
        requests = [request(str(i), 4, max_tokens=n_tokens) for i in range(n)]
        start, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(collect(submit(client, r)) for r in requests))
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(f"N = {n:3}: {cpu / n / n_tokens * 1e6:5.1f} us of the client, {wall / n_tokens * 1e6:6.0f} us a step")


@pytest.mark.parametrize("kind", get_args(Event))
def test_every_event_has_a_branch_of_its_own(kind: type[Event]) -> None:
    """One that has none would be taken for Ready: mypy says so, and so does this. Replies share one."""
    cases = {case.split("(")[0].rpartition(".")[2] for case in inspect.getsource(EngineClient._take).split("case ")[1:]}
    assert cases & {kind.__name__, *(["EngineReply"] if issubclass(kind, EngineReply) else [])}
    with pytest.raises(AssertionError):
        EngineClient(EngineConfig(), 100)._take(object(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", get_args(Command))
def test_every_command_has_a_branch_of_its_own(kind: type[Command]) -> None:
    cases = {case.split("(")[0].rpartition(".")[2] for case in inspect.getsource(ServedModel.obey).split("case ")[1:]}
    assert kind.__name__ in cases


if __name__ == "__main__":
    for n in (1, 8, 32, 128):
        asyncio.run(time_queue(n, 500))
