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
from typing import NamedTuple

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
from deltic.ops.gpu.fp8 import Fp8Rows, fp8_rows, round_rows
from deltic.ops.gpu.launch import INTERPRETED, Levers, allocate_in_host, allocate_on, bound_levers
from deltic.ops.gpu.norm import add_norm

LEVERS = Levers()
ROWS = (1, 5, 3, 5, 1, 2)
"""Of calls one after another: places are used again by other numbers of rows."""
EPS = 1e-6
AT_A_TIME = 3
"""Rows of a launch."""


class Case(NamedTuple):
    n_ranks: int
    width: int
    n_slices: int  # of each rank
    epoch: int = 0  # at which all begin
    dtype: torch.dtype = torch.float32  # of what is sent
    block_k: int = 0  # columns of a block, where rows are rounded to e4m3
    is_in_host: bool = False  # ranks do not reach each other's memory


def given(case: Case) -> tuple[list[list[Tensor]], list[Tensor], Tensor]:
    """Partial sums by call and rank, the residual of each call, and the norm's weights."""
    generator = torch.Generator().manual_seed(case.n_ranks * case.width)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    size = case.n_slices, case.width
    partials = [[random(size[0], n, size[1]).to(case.dtype) for _ in range(case.n_ranks)] for n in ROWS]
    return partials, [random(n, case.width) for n in ROWS], random(case.width) * 0.1


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
"""By call: the sum; and residual, normed rows, their codes and scales in one shot, and in two."""


def run(ranks: Rank, case: Case, found: Found) -> None:
    """All calls of one rank, one after another."""
    partials, residuals, w = given(case)
    device = ranks.out.device
    ranks.epochs.fill_(case.epoch)
    for call, (total, *normed) in enumerate(found):
        own = partials[call][ranks.rank].to(device)
        all_reduce(own, total, ranks=ranks)
        for shots in (1,) if case.is_in_host else (1, 2):
            residual, out, *rounded = normed[4 * shots - 4 : 4 * shots]
            residual.copy_(residuals[call])
            codes = rows_of(rounded, case) if case.block_k else None
            made = all_reduce_norm(residual, own, w.to(device), EPS, ranks=ranks, shots=shots, codes=codes)
            out.copy_(made)


def rows_of(rounded: list[Tensor], case: Case) -> Fp8Rows:
    codes, scale = rounded
    return Fp8Rows(codes.view(-1), scale.view(-1), scale.view(-1)[:0], case.block_k)


def room(case: Case, device: str) -> Found:
    types = torch.float32, torch.bfloat16, torch.uint8, torch.float32

    def poisoned(n: int, dtype: torch.dtype) -> Tensor:
        return torch.full((n, case.width), 85 if dtype == torch.uint8 else torch.nan, dtype=dtype, device=device)

    return [tuple(poisoned(n, dtype) for dtype in (torch.float32, *types, *types)) for n in ROWS]


def all_shared(case: Case, allocate: Callable[[int], Allocate]) -> list[Shared]:
    """By rank; allocate: for a rank, -1 in the host's memory."""

    def met(i: int) -> tuple[Tensor, Tensor]:
        return shared_buffers(case.n_ranks, AT_A_TIME, case.width, allocate(i), dtype=case.dtype)

    ranks = range(case.n_ranks)
    meetings = [met(-1)] * case.n_ranks if case.is_in_host else [met(i) for i in ranks]
    return [(*meetings[i], allocate(i)("out", (max(ROWS), case.width), torch.bfloat16)) for i in ranks]


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
    shared = all_shared(case, lambda i: lambda name, size, dtype: torch.zeros(size, dtype=dtype).share_memory_())
    found = [room(case, "cpu") for _ in range(case.n_ranks)]
    for each in (call for of_rank in found for call in of_rank):
        for one in each:
            one.share_memory_()
    for _, flags, _ in shared:
        flags.fill_(case.epoch)
    join(lambda i: run(rank_of(i, shared, is_in_host=case.is_in_host), case, found[i]), case.n_ranks)
    return found


def in_threads(case: Case) -> list[Found]:
    """A thread each: what one copies to its GPU waits for what was started before."""
    n_ranks, epoch = case.n_ranks, case.epoch
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(n_ranks)]
    if not case.is_in_host:
        let_reach(devices)
    shared = all_shared(case, lambda i: allocate_in_host if i < 0 else allocate_on(devices[i]))
    found = [room(case, device) for device in devices]
    ranks = [rank_of(i, shared, is_in_host=case.is_in_host) for i in range(n_ranks)]
    streams, levers = [torch.cuda.Stream(device) for device in devices], bound_levers()

    def of_rank(i: int, epoch: int = epoch) -> None:
        with levers.bound(), torch.cuda.device(devices[i]), torch.cuda.stream(streams[i]):
            run(ranks[i], case._replace(epoch=epoch), found[i])
            streams[i].synchronize()

    with apart(ranks):
        for i in range(n_ranks):
            of_rank(i, 0)
    for rank in ranks:
        rank.flags.fill_(epoch)
        torch.cuda.synchronize(rank.out.device)
    with ThreadPoolExecutor(n_ranks) as threads:
        list(threads.map(of_rank, range(n_ranks)))
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 96, 1),
        Case(2, 1024, 4),
        Case(2, 1024, 1, dtype=torch.bfloat16),
        Case(2, 1152, 1, block_k=128),
        Case(2, 96, 2, block_k=32),
        Case(4, 520, 2),
        Case(8, 64, 1),
        Case(2, 64, 1, epoch=2**31 - 4),
        Case(2, 1152, 2, block_k=128, is_in_host=True),
        Case(2, 1024, 1, dtype=torch.bfloat16, is_in_host=True),
        Case(4, 520, 1, is_in_host=True),
        Case(2, 64, 1, epoch=2**31 - 4, is_in_host=True),
    ],
    ids=str,
)
def test_every_rank_has_the_same_sum(device: str, case: Case) -> None:
    """And the same normed rows and codes, of one kernel as of one each."""
    partials, residuals, w = given(case)
    found = in_processes(case) if INTERPRETED else in_threads(case)
    for call in range(len(ROWS)):
        total, residual = sums(partials[call]).to(device), residuals[call].to(device, copy=True)
        normed = torch.empty_like(residual, dtype=torch.bfloat16)
        add_norm(residual, total[None], w.to(device), EPS, normed)
        n, width = residual.shape
        rounded = fp8_rows("rows", n, width, allocate_on(device))
        if case.block_k:
            round_rows(normed, rounded, case.block_k)
        for rank, of_rank in enumerate(found):
            of_call = [one.to(device) for one in of_rank[call]]
            for wanted, one in zip((total, residual, normed), of_call, strict=False):
                assert torch.equal(wanted, one)
            mine = torch.arange(len(residual)) % AT_A_TIME % len(found) == rank
            if not case.is_in_host:
                assert torch.equal(residual[mine], of_call[5][mine]) and torch.equal(normed, of_call[6])
            for codes, scale in [of_call[3:5]] + [of_call[7:9]] * (not case.is_in_host) if case.block_k else []:
                assert torch.equal(codes.view(-1), rounded.codes)
                n_scales = n * (width // case.block_k)
                assert torch.equal(scale.view(-1)[:n_scales], rounded.scale[:n_scales])
                assert scale.view(-1)[n_scales:].isnan().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize(("shots", "is_in_host"), [(1, False), (2, False), (1, True)])
def test_more_rows_than_run_at_once(shots: int, is_in_host: bool) -> None:
    """Again and again: a warp that is late, or a flag that comes before its row, would show."""
    n, width, devices, dtype = 2048, 5120, ["cuda:0", "cuda:1"], torch.bfloat16
    let_reach(devices)
    meetings = [shared_buffers(2, n, width, allocate_on(d), dtype=dtype) for d in devices]
    if is_in_host:
        meetings = [shared_buffers(2, n // 4, width, allocate_in_host, dtype=dtype)] * 2
    shared = [(*meetings[i], torch.zeros(n, width, dtype=dtype, device=d)) for i, d in enumerate(devices)]
    ranks = [rank_of(i, shared, is_in_host=is_in_host) for i in range(2)]
    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(1, n, width, generator=generator).bfloat16() for _ in devices]
    w, total = torch.zeros(width), shards[0].float() + shards[1].float()
    normed = torch.empty(n, width, dtype=torch.bfloat16, device="cuda:0")
    add_norm(torch.zeros(n, width, device="cuda:0"), total.to("cuda:0"), w.to("cuda:0"), EPS, normed)

    levers = bound_levers()

    def wrong_rows(i: int, n_calls: int) -> int:
        with levers.bound(), torch.cuda.device(devices[i]), torch.cuda.stream(torch.cuda.Stream()):
            part, weights, expected = (one.to(devices[i]) for one in (shards[i], w, normed))
            residual, wrong = (
                torch.empty(n, width, device=devices[i]),
                torch.zeros((), dtype=torch.int64, device=devices[i]),
            )
            torch.cuda.current_stream().synchronize()
            for _ in range(n_calls):
                residual.zero_()
                out = all_reduce_norm(residual, part, weights, EPS, ranks=ranks[i], shots=shots)
                wrong += (out != expected).any(1).sum()
            return int(wrong)

    with apart(ranks):
        for i in range(2):
            wrong_rows(i, 1)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda i: wrong_rows(i, 20 if is_in_host else 200), range(2))) == [0, 0]


ENDS = [(0, 24), (24, 40)]


def gather(rank: int, wholes: list[Tensor], flags: list[Tensor], staged: Tensor | None, found: Tensor) -> None:
    columns = columns_of(rank, ENDS, wholes, flags, staged)
    for call in range(len(found)):
        all_gather(torch.full((3, ENDS[rank][1] - ENDS[rank][0]), 10.0 * call + rank), columns)
        time.sleep(0.2 * rank)  # the other is at the next call
        found[call].copy_(columns.whole.view(3, 40))


@pytest.mark.skipif(not INTERPRETED, reason="ranks are processes of the interpreter here")
@pytest.mark.parametrize("n_staged", [0, 2], ids=["peers", "in the host's memory, two rows at a time"])
def test_columns_are_not_overwritten_while_they_are_read(n_staged: int) -> None:
    wholes = [torch.zeros(3 * 40).share_memory_() for _ in range(2)]
    staged = torch.zeros(n_staged * 40).share_memory_() if n_staged else None
    n_flags = (n_staged or 3) * column_blocks(ENDS)
    flags = [torch.zeros(2, n_flags, dtype=torch.int32).share_memory_() for _ in range(2)]
    found = [torch.zeros(3, 3, 40).share_memory_() for _ in range(2)]
    join(lambda i: gather(i, wholes, flags[:1] * 2 if n_staged else flags, staged, found[i]), 2)
    for of_rank in found:
        for call, whole in enumerate(of_rank):
            assert (whole[:, :24] == 10 * call).all() and (whole[:, 24:] == 10 * call + 1).all()


def test_what_does_not_fit_is_an_error(device: str) -> None:
    with pytest.raises(KernelError, match="2, 4, 8"):
        make_ranks(4, 64, [device] * 3)
    ranks = make_ranks(4, 64, [device] * 2)[0]
    out, w = torch.empty(5, 64, device=device), torch.empty(64, device=device)
    with pytest.raises(KernelError, match="N up to 4"):
        all_reduce_norm(out, torch.zeros(1, 5, 64, device=device), w, EPS, ranks=ranks)
    with pytest.raises(KernelError, match="float32 out"):
        all_reduce(torch.zeros(1, 4, 64, device=device), out, ranks=ranks)
    shared = all_shared(Case(2, 64, 1, dtype=torch.bfloat16), lambda i: allocate_on(device))
    with pytest.raises(KernelError, match="bfloat16 holds"):
        all_reduce(torch.zeros(1, 5, 64, device=device), out, ranks=rank_of(0, shared))
    in_host = rank_of(0, all_shared(Case(2, 64, 1), lambda i: allocate_on(device)), is_in_host=True)
    with pytest.raises(KernelError, match="one shot in the host's memory"):
        all_reduce_norm(out, torch.zeros(1, 5, 64, device=device), w, EPS, ranks=in_host, shots=2)


@pytest.mark.parametrize("e4m3", [False, True])
def test_the_bench_times_every_way(tmp_path: Path, e4m3: bool) -> None:
    given = argparse.Namespace(gpus=2, rows="4,1", width=256, rounds=2, out=str(tmp_path), e4m3=e4m3)
    if torch.cuda.device_count() < 2:
        with pytest.raises(ConfigError, match=r"GPU|torch sees"):
            bench(given)
        return
    assert bench(given) == 0
    (file,) = tmp_path.glob(f"allreduce{'-e4m3' * e4m3}-2x256-*.json")
    found = json.loads(file.read_text())
    ways = {"two kernels": 2, "one kernel": 1, "one kernel, two shots": 1, "host's memory": 1, "NCCL": 2}
    ways = ({"three kernels": 3} if e4m3 else {}) | ways
    kernels = [(row["rows"], row["way"], row["kernels"]) for row in found["rows"]]
    assert kernels == [(n, *way) for n in (1, 4) for way in ways.items()]
    assert all(row["same_bits"] for row in found["rows"])
    assert all(len(row["us"]) == len(row["alone_us"]) == 2 and min(row["us"]) > 0 for row in found["rows"])
    assert found["link"] > 1e9
