"""Sums over ranks. Off a GPU each rank is a process with an interpreter of its own, over shared memory; on one, or more, ranks are
threads of this process."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu.allreduce import bench, make_ranks
from deltic.config import ConfigError
from deltic.ops.contract import KernelError
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.all_reduce import (
    Rank,
    Shared,
    all_gather,
    all_reduce,
    all_reduce_norm,
    apart,
    column_blocks,
    columns_of,
    let_reach,
    rank_of,
    shared_buffers,
)
from deltic.ops.gpu.launch import INTERPRETED, Levers, allocate_on
from deltic.ops.gpu.norm import add_norm

LEVERS = Levers()
ROWS = (1, 5, 3, 5, 1, 2)
"""Of calls one after another: places are used again by other numbers of rows."""
EPS = 1e-6
AT_A_TIME = 3
"""Rows of a launch."""
Case = tuple[int, int, int, int, torch.dtype]
"""Ranks, width, slices of each, the epoch at which all begin, and the type of what is sent."""


def given(
    n_ranks: int, width: int, n_slices: int, _: int, dtype: torch.dtype
) -> tuple[list[list[Tensor]], list[Tensor], Tensor]:
    """Partial sums by call and rank, the residual of each call, and the norm's weights."""
    generator = torch.Generator().manual_seed(n_ranks * width)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    partials = [[random(n_slices, n, width).to(dtype) for _ in range(n_ranks)] for n in ROWS]
    return partials, [random(n, width) for n in ROWS], random(width) * 0.1


def tree(shards: list[Tensor]) -> Tensor:
    while len(shards) > 1:
        shards = [a + b for a, b in zip(shards[::2], shards[1::2], strict=True)]
    return shards[0]


def sums(partials: list[Tensor]) -> Tensor:
    """What every rank is to have: slices of each in order, ranks in their tree."""
    own = []
    for slices in partials:
        total = slices[0].float()
        for one in slices[1:]:
            total += one
        own.append(total)
    return tree(own)


Found = list[tuple[Tensor, ...]]
"""By call: the sum, and residual and normed rows in one shot, and in two."""


def run(ranks: Rank, case: Case, found: Found) -> None:
    """All calls of one rank, one after another."""
    partials, residuals, w = given(*case)
    device = ranks.inbox.device
    ranks.epochs.fill_(case[3])
    for call, (total, *normed) in enumerate(found):
        own = partials[call][ranks.rank].to(device)
        all_reduce(own, total, ranks=ranks, levers=LEVERS)
        for shots in (1, 2):
            residual, out = normed[2 * shots - 2 : 2 * shots]
            residual.copy_(residuals[call])
            out.copy_(all_reduce_norm(residual, own, w.to(device), EPS, ranks=ranks, levers=LEVERS, shots=shots))


def room(width: int, device: str) -> Found:
    types = (torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    return [tuple(torch.full((n, width), torch.nan, dtype=type, device=device) for type in types) for n in ROWS]


def all_shared(case: Case, allocate: Callable[[int], Allocate]) -> list[Shared]:
    """By rank; allocate: for a rank."""
    n_ranks, width, _, _, dtype = case
    return [
        (
            *shared_buffers(n_ranks, AT_A_TIME, width, allocate(i), dtype=dtype),
            allocate(i)("out", (max(ROWS), width), torch.bfloat16),
        )
        for i in range(n_ranks)
    ]


def join(of_rank: Callable[[int], None], n_ranks: int) -> None:
    """Runs each rank in a process."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=of_rank, args=(i,)) for i in range(n_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
        assert process.exitcode == 0


def in_processes(case: Case) -> list[Found]:
    n_ranks, width, _, epoch, _ = case
    shared = all_shared(case, lambda i: lambda name, size, dtype: torch.zeros(size, dtype=dtype).share_memory_())
    found = [room(width, "cpu") for _ in range(n_ranks)]
    for each in (call for of_rank in found for call in of_rank):
        for one in each:
            one.share_memory_()
    for _, flags, _ in shared:
        flags.fill_(epoch)
    join(lambda i: run(rank_of(i, shared), case, found[i]), n_ranks)
    return found


def in_threads(case: Case) -> list[Found]:
    """A thread each: what one copies to its GPU waits for what was started before."""
    n_ranks, width, n_slices, epoch, dtype = case
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(n_ranks)]
    let_reach(devices)
    shared, found = all_shared(case, lambda i: allocate_on(devices[i])), [room(width, device) for device in devices]
    ranks = [rank_of(i, shared) for i in range(n_ranks)]
    streams = [torch.cuda.Stream(device) for device in devices]

    def of_rank(i: int, epoch: int = epoch) -> None:
        with torch.cuda.device(devices[i]), torch.cuda.stream(streams[i]):
            run(ranks[i], (n_ranks, width, n_slices, epoch, dtype), found[i])
            streams[i].synchronize()

    with apart(ranks):
        for i in range(n_ranks):
            of_rank(i, 0)
    for rank in ranks:
        rank.flags.fill_(epoch)
        torch.cuda.synchronize(rank.flags.device)
    with ThreadPoolExecutor(n_ranks) as threads:
        list(threads.map(of_rank, range(n_ranks)))
    return found


@pytest.mark.parametrize(
    "case",
    [
        (2, 96, 1, 0, torch.float32),
        (2, 1024, 4, 0, torch.float32),
        (2, 1024, 1, 0, torch.bfloat16),
        (4, 520, 2, 0, torch.float32),
        (8, 64, 1, 0, torch.float32),
        (2, 64, 1, 2**31 - 4, torch.float32),
    ],
    ids=str,
)
def test_every_rank_has_the_same_sum(device: str, case: Case) -> None:
    partials, residuals, w = given(*case)
    found = in_processes(case) if INTERPRETED else in_threads(case)
    for call in range(len(ROWS)):
        total, residual = sums(partials[call]).to(device), residuals[call].to(device, copy=True)
        normed = torch.empty_like(residual, dtype=torch.bfloat16)
        add_norm(residual, total[None], w.to(device), EPS, normed, levers=LEVERS)
        for rank, of_rank in enumerate(found):
            of_call = [one.to(device) for one in of_rank[call]]
            for wanted, one in zip((total, residual, normed), of_call, strict=False):
                assert torch.equal(wanted, one)
            mine = torch.arange(len(residual)) % AT_A_TIME % len(found) == rank
            assert torch.equal(residual[mine], of_call[3][mine]) and torch.equal(normed, of_call[4])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("shots", [1, 2])
def test_more_rows_than_run_at_once(shots: int) -> None:
    """Again and again: a warp that is late, or a flag that comes before its row, would show."""
    n, width, devices = 2048, 5120, ["cuda:0", "cuda:1"]
    let_reach(devices)
    shared = [
        (*shared_buffers(2, n, width, allocate_on(d), dtype=torch.bfloat16), torch.zeros(n, width, dtype=torch.bfloat16, device=d))
        for d in devices
    ]  # fmt: skip
    ranks = [rank_of(i, shared) for i in range(2)]
    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(1, n, width, generator=generator).bfloat16() for _ in devices]
    w, total = torch.zeros(width), shards[0].float() + shards[1].float()
    normed = torch.empty(n, width, dtype=torch.bfloat16, device="cuda:0")
    add_norm(torch.zeros(n, width, device="cuda:0"), total.to("cuda:0"), w.to("cuda:0"), EPS, normed, levers=LEVERS)

    def wrong_rows(i: int, n_calls: int) -> int:
        with torch.cuda.device(devices[i]), torch.cuda.stream(torch.cuda.Stream()):
            part, weights, expected = (one.to(devices[i]) for one in (shards[i], w, normed))
            residual, wrong = (
                torch.empty(n, width, device=devices[i]),
                torch.zeros((), dtype=torch.int64, device=devices[i]),
            )
            torch.cuda.current_stream().synchronize()
            for _ in range(n_calls):
                residual.zero_()
                out = all_reduce_norm(residual, part, weights, EPS, ranks=ranks[i], levers=LEVERS, shots=shots)
                wrong += (out != expected).any(1).sum()
            return int(wrong)

    with apart(ranks):
        for i in range(2):
            wrong_rows(i, 1)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda i: wrong_rows(i, 200), range(2))) == [0, 0]


def gather(rank: int, wholes: list[Tensor], flags: list[Tensor], found: Tensor) -> None:
    columns = columns_of(rank, 40, 20 * rank, 1, wholes, flags)
    for call in range(len(found)):
        all_gather(torch.full((3, 20), 10.0 * call + rank), columns, levers=LEVERS)
        time.sleep(0.2 * rank)  # the other is at the next call
        found[call].copy_(columns.whole.view(3, 40))


@pytest.mark.skipif(not INTERPRETED, reason="ranks are processes of the interpreter here")
def test_columns_are_not_overwritten_while_they_are_read() -> None:
    wholes = [torch.zeros(3 * 40).share_memory_() for _ in range(2)]
    flags = [torch.zeros(2, 3 * column_blocks(20), dtype=torch.int32).share_memory_() for _ in range(2)]
    found = [torch.zeros(3, 3, 40).share_memory_() for _ in range(2)]
    join(lambda i: gather(i, wholes, flags, found[i]), 2)
    for of_rank in found:
        for call, whole in enumerate(of_rank):
            assert (whole[:, :20] == 10 * call).all() and (whole[:, 20:] == 10 * call + 1).all()


def test_what_does_not_fit_is_an_error(device: str) -> None:
    with pytest.raises(KernelError, match="2, 4, 8"):
        make_ranks(4, 64, [device] * 3)
    ranks = make_ranks(4, 64, [device] * 2)[0]
    out, w = torch.empty(5, 64, device=device), torch.empty(64, device=device)
    with pytest.raises(KernelError, match="N up to 4"):
        all_reduce_norm(out, torch.zeros(1, 5, 64, device=device), w, EPS, ranks=ranks, levers=LEVERS)
    with pytest.raises(KernelError, match="float32 out"):
        all_reduce(torch.zeros(1, 4, 64, device=device), out, ranks=ranks, levers=LEVERS)
    shared = all_shared((2, 64, 1, 0, torch.bfloat16), lambda i: allocate_on(device))
    with pytest.raises(KernelError, match="bfloat16 holds"):
        all_reduce(torch.zeros(1, 5, 64, device=device), out, ranks=rank_of(0, shared), levers=LEVERS)


def test_the_bench_times_every_way(tmp_path: Path) -> None:
    given = argparse.Namespace(gpus=2, rows="4,1", width=256, rounds=2, out=str(tmp_path))
    if torch.cuda.device_count() < 2:
        with pytest.raises(ConfigError, match="GPU"):
            bench(given)
        return
    assert bench(given) == 0
    (file,) = tmp_path.glob("allreduce-2x256-*.json")
    found = json.loads(file.read_text())
    ways = ["one kernel", "one kernel, two shots", "two kernels", "NCCL"]
    assert [(row["rows"], row["way"]) for row in found["rows"]] == [(n, way) for n in (1, 4) for way in ways]
    assert all(len(row["us"]) == len(row["alone_us"]) == 2 and min(row["us"]) > 0 for row in found["rows"])
    assert found["link"] > 1e9
