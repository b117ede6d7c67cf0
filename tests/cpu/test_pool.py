"""The thread pool: bound threads, more threads than CPUs, threads that cannot be had, and how they round."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltic.ops.arrays import Array
from deltic.ops.contract import KernelError
from deltic.ops.cpu.program import Program, usable_instruction_sets

CPUS = tuple(sorted(os.sched_getaffinity(0)))
N_TASKS = 64


def program(n_threads: int, n_jobs: int = 1, cpus: tuple[int, ...] = ()) -> tuple[Program, Array]:
    """Jobs of 64 tasks, each of which sums a MiB of ones into its place."""
    data, out = np.ones(N_TASKS << 18, np.float32), np.zeros(N_TASKS, np.float32)
    jobs = Program(n_threads, cpus=cpus)
    for _ in range(n_jobs):
        jobs.call("deltic_read_memory", data, N_TASKS << 20, out)
    return jobs, out


@pytest.fixture
def unbound() -> Iterator[None]:
    """Whatever a test binds is free again after it."""
    yield
    program(1)[0].run()
    os.sched_setaffinity(0, CPUS)


def masks() -> dict[int, frozenset[int]]:
    """The CPUs that each thread of this process may use."""
    return {int(task): frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}


def script(*lines: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    head = "from tests.cpu.test_pool import *; import resource, time"
    code = "\n".join((head, *lines))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=timeout
    )  # fmt: skip


@pytest.mark.usefixtures("unbound")
def test_each_thread_is_bound_to_its_cpu_and_let_go() -> None:
    program(1)[0].run()
    before = masks()
    bound, out = program(len(CPUS), cpus=CPUS[::-1])
    bound.run()
    assert (out == 1 << 18).all()
    workers = {task: mask for task, mask in masks().items() if task not in before}
    assert sorted(workers.values(), key=min) == [{cpu} for cpu in CPUS[:-1]]
    assert os.sched_getaffinity(0) == {CPUS[-1]}, "the caller is the first thread"

    found: list[set[int]] = []
    other = threading.Thread(target=lambda: (bound.run(), found.append(os.sched_getaffinity(0))))
    other.start()
    other.join()
    assert found == [{CPUS[-1]}], "whoever runs the program is the caller"

    free, _ = program(2)
    free.run()
    assert masks().keys() - before.keys(), "there is a worker"
    assert all(mask == set(CPUS) for mask in masks().values()), "threads do not inherit the caller's binding"


@pytest.mark.usefixtures("unbound")
def test_a_cpu_that_is_not_there_is_refused() -> None:
    nowhere, _ = program(2, cpus=(CPUS[0], 1023))
    with pytest.raises(KernelError, match="cannot be bound to CPUs here; leave --pin-threads out"):
        nowhere.run()
    with pytest.raises(KernelError, match="a CPU for each of 3 threads"):
        Program(3, cpus=CPUS[:1])


@pytest.mark.parametrize("library", usable_instruction_sets())
def test_a_caller_that_flushes_denormal_numbers_has_the_same_bits(library: str) -> None:
    """And so have the workers that it starts. It keeps its own way of rounding."""
    torch = pytest.importorskip("torch")
    data, small = np.zeros(N_TASKS << 18, np.float32), np.float32(1e-40)
    data[:: 1 << 18] = small
    flushed = torch.set_flush_denormal(True)
    try:
        for n_threads in (1, 3):
            out = np.zeros(N_TASKS, np.float32)
            jobs = Program(n_threads, library)
            jobs.call("deltic_read_memory", data, N_TASKS << 20, out)
            jobs.run()
            assert (out.view(np.int32) == small.view(np.int32)).all()
            assert not flushed or not (torch.full((16,), 1e-40) * 1).any(), "the caller's setting is left as it was"
    finally:
        torch.set_flush_denormal(False)


def test_threads_that_cannot_be_started_are_an_error_of_one_line() -> None:
    """It used to end the process."""
    done = script(
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()",
        "many, out = program(64)",
        "resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20),) * 2)",
        "try: many.run()",
        "except KernelError as error: print(error)",
        "few, out = Program(2), np.zeros(1, np.float32)",
        "few.run(); print('alive')",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("64 threads cannot be started") and done.stdout.endswith("alive\n")


def test_more_threads_than_the_pool_has_places_are_refused() -> None:
    with pytest.raises(KernelError, match="257 threads cannot be started"):
        program(257)[0].run()


def test_threads_that_wait_leave_the_cpu_to_those_that_work() -> None:
    """Sixteen threads on one CPU used to spend half as much time again on waiting for each other."""
    done = script(
        "os.sched_setaffinity(0, CPUS[:1])",
        "data, out = np.ones(8 << 18, np.float32), np.zeros(8, np.float32)",
        "def seconds(n_threads):",
        "    jobs = Program(n_threads)",
        "    for _ in range(1000): jobs.call('deltic_read_memory', data, 8 << 20, out)",
        "    start = time.process_time(); jobs.run(); return time.process_time() - start",
        "print(min(seconds(16) / seconds(1) for _ in range(3)))",
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.2
