"""The host of the engine process: starts, deaths, restarts and stops, of one model and of several."""

from __future__ import annotations

import asyncio
import logging.handlers
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltic.config import EngineConfig
from deltic.engine.events import Event, Loading, Ready, StepOutputs
from deltic.engine.messages import Request, SamplingParams
from deltic.host.client import EngineClient, EngineFailed, EngineUnavailable
from deltic.host.socket_directory import SocketDirectory
from deltic.host.supervisor import EngineHost
from tests.fakes import POISON, expected_tokens
from tests.null.test_client import FAKES, collect, hosted, in_both_loops, in_loop, reasons, request, submit, tokens
from tests.waiting import until


@in_both_loops
async def test_from_start_to_stop() -> None:
    events: list[Event] = []
    client = EngineClient(EngineConfig(n_pages=64), 20, events.append)
    host = EngineHost([client], program=(sys.executable, FAKES))
    with pytest.raises(EngineUnavailable, match="loading"):
        submit(client, request())
    await host.start()
    assert client.state == "starting" and client.info is None
    info = await client.ready()
    assert client.state == "ready" and client.info is info and info.n_pages == 64
    assert isinstance(events[0], Loading) and any(isinstance(event, Ready) for event in events)

    requests = [request(str(i), 100 + i, max_tokens=10 + i, n=1 + i % 3) for i in range(10)]
    streams = [submit(client, r) for r in requests]
    with pytest.raises(ValueError, match="in use"):
        submit(client, request("3"))
    for r, outputs in zip(requests, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens(outputs) == expected_tokens(r.prompt_ids, r.params)
        assert reasons(outputs) == ["length"] * r.params.n
    assert client.n_open == 0 and client.stats.n_generated_tokens > 0
    assert any(isinstance(event, StepOutputs) for event in events)

    pid = host.pid
    assert pid is not None
    await host.stop()
    assert client.state == "stopped" and host.pid is None and not Path(f"/proc/{pid}").exists()
    assert host._directory is not None and not host._directory.path.exists()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        submit(client, request())
    with pytest.raises(EngineFailed, match="stopped"):
        await client.ready()
    await host.stop()


@in_both_loops
async def test_killed_under_load_and_back() -> None:
    client = EngineClient(EngineConfig(max_num_seqs=4), 100)
    async with hosted(client, step_ms=2.0) as host:
        await collect(submit(client, request("before", max_tokens=5)))
        streams = [submit(client, request(str(i), 100, max_tokens=3000, n=1 + i % 2)) for i in range(8)]
        await anext(streams[0])
        assert host.pid is not None
        pid, n_steps = host.pid, client.stats.n_steps
        os.kill(pid, signal.SIGKILL)
        for i, stream in enumerate(streams):
            outputs = await collect(stream)
            assert reasons(outputs) == ["error"] * (1 + i % 2)
            assert "SIGKILL" in (outputs[-1].error or "")
        assert client.state == "restarting" and client.n_open == 0 and client.stats.n_running == 0
        with pytest.raises(EngineUnavailable, match="restarted"):
            submit(client, request())
        await client.ready()
        assert host.pid not in (None, pid) and client.n_restarts == 1
        r = request("0", max_tokens=20)  # an id of the old process's, free again
        assert tokens(await collect(submit(client, r))) == expected_tokens(r.prompt_ids, r.params)
        assert client.stats.n_steps >= n_steps + 20  # counters go on


@in_loop
async def test_steps_that_fail_restart_the_process_in_the_end() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client):
        for i in range(3):
            bad = Request(id=str(i), prompt_ids=[POISON], params=SamplingParams())
            (output,) = await collect(submit(client, bad))
            assert output.finish_reason == "error"
        await until(lambda: client.state != "ready")
        await client.ready()
        assert client.n_restarts == 1
        assert reasons(await collect(submit(client, request()))) == ["length"]


@in_loop
async def test_a_configuration_that_cannot_work_is_not_tried_again() -> None:
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("deltic.host").addHandler(said)
    client = EngineClient(EngineConfig(model="missing"), 1)
    host = EngineHost([client], program=(sys.executable, FAKES))
    await host.start()
    with pytest.raises(EngineFailed, match="no checkpoint at 'missing'"):
        await client.ready()
    assert client.state == "failed" and client.n_restarts == 0
    logging.getLogger("deltic.host").removeHandler(said)
    assert not said.buffer, "whoever waits for the start says why, once"
    with pytest.raises(EngineUnavailable, match="no checkpoint"):
        submit(client, request())
    await host.stop()


@in_loop
async def test_a_process_that_dies_at_once_is_given_up() -> None:
    client = EngineClient(EngineConfig(), 1)
    host = EngineHost([client], program=(sys.executable, "-c", "raise SystemExit(7)"))
    await host.start()
    with pytest.raises(EngineFailed, match="exit status 7"):
        await client.ready()
    assert client.state == "failed" and client.n_restarts == 2
    await host.stop()


@in_loop
async def test_killed_by_a_signal_without_a_name() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client, step_ms=2.0) as host:
        stream = submit(client, request(max_tokens=3000))
        await anext(stream)
        assert host.pid is not None
        os.kill(host.pid, signal.SIGRTMIN + 6)
        outputs = await collect(stream)
        assert f"killed by signal {signal.SIGRTMIN + 6}" in (outputs[-1].error or "")
        await client.ready()
        assert reasons(await collect(submit(client, request()))) == ["length"]


@in_loop
async def test_a_process_that_cannot_be_started_again_is_a_failure() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client) as host:
        assert host._directory is not None and host.pid is not None
        shutil.rmtree(host._directory.path)  # no place for the next process's sockets
        os.kill(host.pid, signal.SIGKILL)
        await until(lambda: client.state == "failed")
        with pytest.raises(EngineFailed, match=r"cannot be started again: .*no socket"):
            await client.ready()


@in_loop
async def test_a_supervisor_that_fails_ends_the_requests_and_the_process() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client, step_ms=2.0) as host:
        stream = submit(client, request(max_tokens=3000, n=2))
        await anext(stream)
        assert host.pid is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deltic.host.supervisor._describe", lambda *_: 1 // 0)
            os.kill(host.pid, signal.SIGKILL)
            outputs = await collect(stream)
        assert reasons(outputs) == ["error"] * 2 and "ZeroDivisionError" in (outputs[-1].error or "")
        assert client.state == "failed" and client.n_open == 0
        with pytest.raises(EngineUnavailable, match="lost control"):
            submit(client, request())


@in_loop
async def test_the_pool_of_torch_does_not_spin_and_numpy_has_one_thread() -> None:
    expected = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
    code = f"import os; raise SystemExit(5 if {expected}.items() <= os.environ.items() else 6)"
    client = EngineClient(EngineConfig(), 1)
    host = EngineHost([client], program=(sys.executable, "-c", code))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "2")
        await host.start()
    with pytest.raises(EngineFailed, match="exit status 5"):
        await client.ready()
    await host.stop()


@in_loop
async def test_stop_drains_then_aborts() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client, step_ms=2.0) as host:
        short = submit(client, request("short", max_tokens=20))
        long = submit(client, request("long", max_tokens=3000))
        left = submit(client, request("left", max_tokens=3000))
        stopping = asyncio.create_task(host.stop(drain_s=0.4))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable):
            submit(client, request("late"))
        assert reasons(await collect(short)) == ["length"]
        client.abort("left")  # while it drains
        assert reasons(await collect(left)) == ["abort"] and not stopping.done()
        outputs = await collect(long)
        assert reasons(outputs) == ["abort"] and len(tokens(outputs)) > 20
        await stopping


@in_loop
async def test_stop_just_after_the_process_died() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client, step_ms=2.0) as host:
        stream = submit(client, request(max_tokens=3000))
        await anext(stream)
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        await until(lambda: client.state == "restarting")
        assert client.n_open == 1
        await host.stop()
        assert reasons(await collect(stream)) == ["abort"]


@in_loop
async def test_a_process_that_dies_as_it_gets_ready() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client) as host:
        assert host._process is not None
        ready = Ready(client.info or pytest.fail())
        os.kill(host._process.pid, signal.SIGKILL)
        await until(lambda: client.state == "restarting")
        client._take(ready, [])
        assert client.state == "ready"  # as it believes, until it hangs up
        await until(lambda: client.state == "restarting")
        await client.ready()
        assert reasons(await collect(submit(client, request()))) == ["length"]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (3, 4, "killed by SIGKILL: memory ran out, says the kernel; lower --memory-gb"),
        (3, 3, "killed by SIGKILL, usually by the kernel because memory ran out"),
        (None, None, "killed by SIGKILL, usually by the kernel because memory ran out"),
    ],
)
def test_a_process_that_was_killed_names_memory(
    before: int | None, after: int | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([before, after, after])
    monkeypatch.setattr("deltic.host.supervisor.n_oom_kills", lambda: next(counts))

    async def killed() -> str | None:
        client = EngineClient(EngineConfig(), 100)
        async with hosted(client, step_ms=2.0) as host:
            stream = submit(client, request(max_tokens=3000))
            os.kill(host.pid or pytest.fail(), signal.SIGKILL)
            said = (await collect(stream))[-1].error
            assert f"the engine is being restarted ({client.failure})" in client.why_unavailable()
            return said

    assert says in (asyncio.run(killed()) or "")


# Processes that hang.


@in_loop
async def test_a_process_that_hangs_is_started_again() -> None:
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client, step_ms=2.0, timeout_s=0.5) as host:
        pid = host.pid or pytest.fail()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.8)
        assert client.state == "ready" and host.pid == pid, "nobody waits for anything"
        stream, report = submit(client, request(max_tokens=3000)), asyncio.create_task(client.inspect_cache())
        outputs = await collect(stream)
        said = "the engine process has not answered for 0.5 s (--engine-timeout-s) and was ended"
        assert reasons(outputs) == ["error"] and outputs[-1].error == f"{said}. Send the request again."
        assert client.state == "restarting" and said in client.why_unavailable()
        with pytest.raises(EngineUnavailable, match="has not answered"):
            await report
        await client.ready()
        assert host.pid != pid and client.n_restarts == 1 and not Path(f"/proc/{pid}").exists()
        assert reasons(await collect(submit(client, request()))) == ["length"]


def program(change: str) -> tuple[str, ...]:
    """The fake engine after some statements."""
    code = f"import sys, time\nsys.path.insert(0, {str(Path(FAKES).parent.parent)!r})\n"
    code += "from deltic.host import process\nfrom tests import fakes\n"
    run = "process.main(fakes.build_runner)"
    return (sys.executable, "-c", f"{code}{change}\nsys.exit({run})")


SLOW = """
step = fakes.FakeRunner.step
def slow(self, given):
    {wait}
    return step(self, given)
fakes.FakeRunner.step = slow
"""
COMPUTE = "end = time.process_time() + 1.0\n    while time.process_time() < end: time.sleep(0)"
KERNEL = (
    "from deltic.ops.cpu.program import Program\n"
    + """
def run(self):
    COMPUTE
Program.run = run
""".replace("COMPUTE", COMPUTE)
)
HEAD = (
    "from deltic.runtime.pools import Judge\n"
    + """
def head():
    COMPUTE
def logits(self):
    head()
Judge.logits = logits
""".replace("COMPUTE", COMPUTE)
)
HELD = "import re, threading; threading.Thread(target=re.match, args=('(a|aa)+$', 'a' * 99 + 'b')).start()"


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        (KERNEL + SLOW.format(wait="Program.run(None)"), True),
        (HEAD + SLOW.format(wait="Judge.logits(None)"), True),
        (SLOW.format(wait="while True: pass"), False),
        (SLOW.format(wait="time.sleep(60)"), False),
        (SLOW.format(wait="re.match('(a|aa)+$', 'a' * 99 + 'b')").replace("step =", "import re\nstep =", 1), False),
        (SLOW.format(wait=HELD), False),
    ],
    ids=[
        "a kernel",
        "a joint head",
        "computes beside kernels",
        "waits",
        "an expression without end",
        "another thread has the lock",
    ],
)
def test_a_step_may_take_long_where_kernels_run(change: str, lives: bool) -> None:
    async def ask() -> str:
        client = EngineClient(EngineConfig(), 100)
        async with hosted(client, timeout_s=0.4, program=program(change)):
            return (await collect(submit(client, request(max_tokens=2))))[-1].error or ""

    assert ("has not answered" in asyncio.run(ask())) is not lives


@in_loop
async def test_a_process_that_waits_for_nothing_but_requests_lives() -> None:
    """Several times as long as it may hang, with a question open that it answers late."""
    client = EngineClient(EngineConfig(), 100)
    async with hosted(client, timeout_s=0.3, program=program("process.ServedModel.step = lambda self: False")) as host:
        pid = host.pid
        stream = submit(client, request())
        await asyncio.sleep(1.5)
        assert host.pid == pid and client.n_restarts == 0
        client.end_all("abort", "enough")
        await collect(stream)


# Their directory.


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR that is short enough for sockets, which pytest's may not be."""
    with tempfile.TemporaryDirectory(prefix="short-") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


def test_what_a_killed_server_left_is_removed_by_the_next(short: Path) -> None:
    code = (
        "from deltic.host.socket_directory import SocketDirectory; import os, socket\n"
        "socket.socket(socket.AF_UNIX).bind(f'{SocketDirectory().path}/0-0-events'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(short)})
    (left,) = short.iterdir()
    mine = short / "deltic-engine-full"
    mine.mkdir()
    (mine / "notes").touch()
    (short / "deltic-engine-link").symlink_to(mine)
    lives = SocketDirectory()
    another = SocketDirectory()
    assert not left.exists() and lives.path.exists() and another.path.stat().st_mode & 0o777 == 0o700
    for directory in (lives, another):
        directory.close()
    assert {path.name for path in short.iterdir()} == {"deltic-engine-full", "deltic-engine-link"}


def test_a_directory_too_long_for_sockets(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = short / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr("deltic.host.socket_directory.SHORT", short)
    directory = SocketDirectory()
    assert directory.path.parent == short
    directory.close()
    monkeypatch.setattr("deltic.host.socket_directory.SHORT", short / "none")
    with pytest.raises(OSError, match=r"TMPDIR .*x\) is too long .*set TMPDIR to a shorter one"):
        SocketDirectory()


@in_both_loops
async def test_stop_while_it_loads_or_restarts() -> None:
    client = EngineClient(EngineConfig(), 1)
    host = EngineHost([client], program=(sys.executable, "-c", "import time; time.sleep(60)"))
    await host.start()
    start = time.monotonic()
    await host.stop(drain_s=10)
    assert host.pid is None and time.monotonic() - start < 8, "nothing to drain"
    client = EngineClient(EngineConfig(), 1)
    host = EngineHost([client], program=(sys.executable, "-c", "raise SystemExit(7)"))
    await host.start()
    await until(lambda: client.state == "restarting")
    await host.stop()
    assert host.pid is None and client.state == "stopped"


# Several models in one process.


def clients_of(*configs: EngineConfig) -> list[EngineClient]:
    return [EngineClient(config, 100) for config in configs]


def two() -> list[EngineClient]:
    return clients_of(EngineConfig(), EngineConfig())


@in_loop
async def test_two_models_serve_the_same_ids_at_the_same_time() -> None:
    clients = clients_of(EngineConfig(n_pages=128), EngineConfig(n_pages=64))
    async with hosted(*clients):
        assert [client.info and client.info.n_pages for client in clients] == [128, 64]
        requests = [request(str(i), 100 + i, max_tokens=20 + i, n=1 + i % 3) for i in range(6)]
        sent = [(r, submit(client, r)) for r in requests for client in clients]
        for r, outputs in zip([r for r, _ in sent], await asyncio.gather(*(collect(s) for _, s in sent)), strict=True):
            assert tokens(outputs) == expected_tokens(r.prompt_ids, r.params)
            assert reasons(outputs) == ["length"] * r.params.n
        assert all(client.stats.n_steps > 0 and client.n_open == 0 for client in clients)


@in_loop
async def test_a_long_answer_of_one_does_not_hold_up_the_other() -> None:
    long, short = clients = two()
    async with hosted(*clients, step_ms=5.0):
        await anext(submit(long, request("long", max_tokens=3000)))
        for i in range(3):
            await collect(submit(short, request(str(i), max_tokens=20)))
        assert long.n_open == 1
        long.abort("long")


@in_loop
async def test_an_abort_reaches_its_own_model() -> None:
    stays, goes = clients = two()
    async with hosted(*clients, step_ms=2.0):
        streams = [submit(client, request("same", max_tokens=60)) for client in clients]
        await asyncio.gather(*(anext(stream) for stream in streams))
        goes.abort("same")
        assert reasons(await collect(streams[1])) == ["abort"]
        assert reasons(await collect(streams[0])) == ["length"]
        await until(lambda: goes.stats.n_slots_used == stays.stats.n_slots_used == 0)


@in_loop
async def test_a_death_ends_the_requests_of_all_and_all_come_back() -> None:
    clients = two()
    async with hosted(*clients, step_ms=2.0) as host:
        streams = [submit(client, request("a", max_tokens=3000)) for client in clients]
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        for stream in streams:
            outputs = await collect(stream)
            assert reasons(outputs) == ["error"] and "SIGKILL" in (outputs[-1].error or "")
        for client in clients:
            await client.ready()
            assert client.n_restarts == 1
            assert reasons(await collect(submit(client, request()))) == ["length"]


@in_loop
async def test_steps_of_one_model_that_fail_restart_all() -> None:
    good, bad = clients = two()
    async with hosted(*clients, step_ms=2.0):
        stream = submit(good, request(max_tokens=3000))
        for i in range(3):
            poisoned = Request(id=str(i), prompt_ids=[POISON], params=SamplingParams())
            assert reasons(await collect(submit(bad, poisoned))) == ["error"]
        assert reasons(await collect(stream)) == ["error"]
        await good.ready()
        await bad.ready()


@in_loop
async def test_a_model_that_cannot_be_served_is_named_to_all() -> None:
    for bad_name, said in ((None, "missing"), ("mine", "mine")):
        clients = [*clients_of(EngineConfig()), EngineClient(EngineConfig(model="missing"), 1, name=bad_name)]
        clients = clients if bad_name else clients[::-1]
        host = EngineHost(clients, program=(sys.executable, FAKES))
        await host.start()
        for client in clients:
            with pytest.raises(EngineFailed, match=rf"^{said}: no checkpoint at 'missing'"):
                await client.ready()
            assert client.state == "failed" and client.n_restarts == 0
        await host.stop()


@in_loop
async def test_two_models_with_one_trace_are_refused() -> None:
    clients = clients_of(*(EngineConfig(trace=Path(file)) for file in ("trace.json", "./trace.json")))
    host = EngineHost(clients, program=(sys.executable, FAKES))
    await host.start()
    with pytest.raises(EngineFailed, match=r"--trace .*/trace.json: each model needs a file of its own"):
        await clients[0].ready()
    await host.stop()
    assert not Path("trace.json").exists()


@in_loop
async def test_stop_drains_all_models() -> None:
    clients = two()
    async with hosted(*clients, step_ms=2.0) as host:
        pid = host.pid
        short = [submit(client, request("short", max_tokens=20)) for client in clients]
        long = [submit(client, request("long", max_tokens=3000)) for client in clients]
        await host.stop(drain_s=0.4)
        assert [reasons(await collect(stream)) for stream in short + long] == [["length"]] * 2 + [["abort"]] * 2
        assert host.pid is None and not Path(f"/proc/{pid}").exists()
        assert [client.state for client in clients] == ["stopped"] * 2
