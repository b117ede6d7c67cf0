"""What makes runners of several GPUs one: threads, errors, and copies of pages and states."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from deltic.config import EngineConfig
from deltic.engine.events import ExpertStats
from deltic.engine.step import RunnerLostError
from deltic.host.client import EngineClient
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.gpu import parallel
from deltic.runtime.gpu.copies import DeviceCopies
from deltic.runtime.gpu.parallel import GpuThread, JointCopies, ParallelRunner, SharedTower, together
from tests.fakes import expected_tokens
from tests.null.test_client import collect, hosted, reasons, request, submit, tokens
from tests.null.test_host import program

THREADS = [GpuThread(torch.device("cpu")) for _ in range(2)]


def fail() -> int:
    raise MemoryError


def refuse() -> int:
    raise ValueError("no such place")


def test_each_call_has_its_thread() -> None:
    names = together(THREADS, [lambda: threading.current_thread().ident] * 2)
    assert len({*names, threading.current_thread().ident}) == 3
    assert together(THREADS, [lambda: 1, lambda: 2]) == [1, 2]


def test_what_all_refuse_loses_nothing() -> None:
    with pytest.raises(ValueError, match="no such place"):
        together(THREADS, [refuse, refuse])
    assert together(THREADS, [lambda: 1, lambda: 2]) == [1, 2]


def test_what_fails_in_two_ways_is_lost() -> None:
    with pytest.raises(RunnerLostError, match="GPU 0, 1 of 2 failed: MemoryError"):
        together(THREADS, [fail, refuse])


def test_a_runner_that_was_lost_stays_so() -> None:
    runner = object.__new__(ParallelRunner)
    runner._threads, runner.runners, runner._lost = THREADS, [1, 2], None
    with pytest.raises(RunnerLostError, match="GPU 1 of 2"):
        runner.on_all(lambda number: number if number == 1 else refuse())
    with pytest.raises(RunnerLostError, match="GPU 1 of 2"):
        runner.on_all(lambda number: number)


def test_experts_are_counted_once_and_bytes_of_every_link() -> None:
    runner = object.__new__(ParallelRunner)
    runner.runners = [SimpleNamespace(outside=SimpleNamespace(seen=[5, 3, 300 + i, 20])) for i in range(2)]
    assert runner.experts == ExpertStats(5, 3, 601, 40)
    runner.runners = [SimpleNamespace(outside=None)] * 2
    assert runner.experts is None


def test_a_thread_holds_nothing_of_its_last_call() -> None:
    class Held:
        def use(self) -> int:
            return 1

    held = Held()
    gone = weakref.ref(held)
    assert together(THREADS, [held.use, held.use]) == [1, 1]
    del held
    together(THREADS, [lambda: 1, lambda: 2])  # the threads have come around
    gc.collect()
    assert gone() is None


class Tower:
    """Of two blocks, in two turns."""

    n_blocks = 4

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.turns = rows, 0

    def begin(self, picture: object, blocks: list[int]) -> None:
        self.blocks = blocks

    def run(self, seconds: float) -> bool:
        block = self.blocks[self.turns]
        self.rows[block * PAGE_SIZE : (block + 1) * PAGE_SIZE] = 10 + block
        self.turns += 1
        return self.turns == len(self.blocks)


def test_all_gpus_get_what_the_tower_of_the_first_made() -> None:
    rows = [torch.zeros(4 * PAGE_SIZE, 8, dtype=torch.bfloat16) for _ in range(2)]
    runners = [SimpleNamespace(stream=None, workspace=SimpleNamespace(picture_rows=r)) for r in rows]
    tower = SharedTower(Tower(rows[0]), runners, THREADS[0])
    tower.begin(None, [3, 1])
    assert not tower.run(0.1) and not rows[1].any()
    assert tower.run(0.1) and torch.equal(rows[0], rows[1])
    assert rows[1][3 * PAGE_SIZE].tolist() == [13] * 8 and not rows[1][:PAGE_SIZE].any()


@pytest.mark.parametrize("other", ["ends", "hangs"])
def test_where_one_fails_alone_the_runner_is_lost(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "GRACE_S", 0.1)
    release = threading.Event()
    threads = [*THREADS[:1], GpuThread(torch.device("cpu"))]
    beside = (lambda: 1) if other == "ends" else lambda: int(release.wait(30))
    try:
        with pytest.raises(RunnerLostError, match="GPU 1 of 2 failed: ValueError: no such place"):
            together(threads, [beside, refuse])
    finally:
        release.set()


def test_a_page_on_the_host_is_that_of_every_gpu() -> None:
    pages = [torch.arange(12).view(3, 4) + 100 * i for i in range(2)]
    states = [torch.arange(6, dtype=torch.float32).view(3, 2) - 10 * i for i in range(2)]
    joint = JointCopies([DeviceCopies([p], [s], None) for p, s in zip(pages, states, strict=True)])
    assert joint.state_bytes == 16
    joint.fetch("page", 1, joint.mark())
    held = np.concatenate(joint.page(1)).view(np.int64)
    assert held.tolist() == [4, 5, 6, 7, 104, 105, 106, 107]
    joint.store("page", 2, joint.mark())
    assert pages[0][2].tolist() == [4, 5, 6, 7] and pages[1][2].tolist() == [104, 105, 106, 107]
    joint.fetch("state", 0, joint.mark())
    assert np.concatenate(joint.state(0)).view(np.float32).tolist() == [0, 1, -10, -9]


RANKS = """
import threading
from functools import partial
from pathlib import Path
import torch
from deltic.runtime.gpu import parallel
parallel.GRACE_S, step, marker = 0.2, fakes.FakeRunner.step, Path({marker!r})
joint = object.__new__(parallel.ParallelRunner)
joint._threads, joint._lost = [parallel.GpuThread(torch.device("cpu")) for _ in range(4)], None
joint.runners = range(4)
def of_rank(runner, given, n_steps, rank):
    if rank in {ranks} and n_steps == 5 and marker.exists():
        if rank == max({ranks}):
            time.sleep(0.05)
            marker.unlink()
        {fate}
    return step(runner, given) if rank == 0 else None
fakes.FakeRunner.step = lambda runner, given: joint.on_all(partial(of_rank, runner, given, runner.n_steps))[0]
"""


@pytest.mark.parametrize(
    ("ranks", "fate", "said"),
    [
        ((2,), "raise MemoryError('no room')", "the engine process ended"),
        ((0, 3), "raise MemoryError(str(rank))", "the engine process ended"),
        ((1,), "threading.Event().wait()", "has not answered"),
        ((0,), "threading.Event().wait()", "has not answered"),
        ((2,), "import os; os.abort()", "SIGABRT"),
    ],
    ids=["one fails", "two fail apart", "one hangs", "the first hangs", "one takes the process along"],
)
def test_ranks_that_die_or_hang_come_back_together(tmp_path: Path, ranks: Any, fate: str, said: str) -> None:
    """Of four, played by threads behind a whole engine process: open requests get an error, and the next ones the same tokens."""
    (tmp_path / "marker").touch()
    change = RANKS.format(marker=str(tmp_path / "marker"), ranks=ranks, fate=fate)

    async def ask() -> None:
        client = EngineClient(EngineConfig(), 100)
        async with hosted(client, timeout_s=2.0, program=program(change)) as host:
            pid = host.pid
            streams = [submit(client, request(f"{i}", 40, max_tokens=20)) for i in range(3)]
            for stream in streams:
                outputs = await collect(stream)
                assert reasons(outputs) == ["error"] and said in (outputs[-1].error or "")
            await client.ready()
            assert client.n_restarts == 1 and host.pid != pid
            for i in range(3):
                one = request(f"{i}", 40, max_tokens=20)
                assert tokens(await collect(submit(client, one))) == expected_tokens(one.prompt_ids, one.params)

    asyncio.run(asyncio.wait_for(ask(), 120))
