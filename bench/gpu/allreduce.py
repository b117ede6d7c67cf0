"""What lies between two layers on several GPUs, by how it is done: `python -m bench.gpu.allreduce`.

The sum over ranks, the residual stream and the norm, of rows as wide as a model: in one kernel, in one or two
shots or through the host's memory (ops/gpu/all_reduce.py); as a kernel each; and with NCCL's all-reduce. With
--e4m3 the normed rows are rounded, too. Each alone and in a recording of CALLS, which is how a step runs it.
Beside them the time that the bytes of one way take at the link's speed, which a large copy measures. Rows and
codes must be those of a kernel each, but NCCL's, whose order of more than two is its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.cuda import nccl

from bench.gpu.experiment import parser
from deltic.__main__ import finished
from deltic.bench.gpu import need_gpu
from deltic.bench.provenance import writer
from deltic.bench.sweep import numbers
from deltic.config import ConfigError
from deltic.ops.contract import KernelError
from deltic.ops.gpu.all_reduce import Rank, all_reduce, all_reduce_norm, apart, let_reach, rank_of, shared_buffers
from deltic.ops.gpu.fp8 import fp8_rows, round_rows
from deltic.ops.gpu.launch import Levers, allocate_in_host, allocate_on, launches
from deltic.ops.gpu.norm import add_norm
from deltic.ops.gpu.roofs import link_speed

CALLS = 40
EPS = 1e-6


def make_ranks(
    n_rows: int, width: int, devices: Sequence[torch.device | str], *, is_in_host: bool = False
) -> list[Rank]:
    """Makes a rank on each device, in one process. Raises KernelError as `let_reach` does, but where they
    meet in the host's memory.
    """
    if not is_in_host:
        let_reach(devices)
    places = [allocate_in_host] if is_in_host else [allocate_on(device) for device in devices]
    meetings = [shared_buffers(len(devices), n_rows, width, allocate) for allocate in places] * (
        len(devices) // len(places)
    )
    outs = [torch.zeros(n_rows, width, dtype=torch.bfloat16, device=device) for device in devices]
    shared = [(*meeting, out) for meeting, out in zip(meetings, outs, strict=True)]
    return [rank_of(i, shared, is_in_host=is_in_host) for i in range(len(devices))]


class Ranks:
    """Buffers of all GPUs for up to n_rows rows, and the ways to add them up; each starts one call on all.
    block_k: columns of a block of rows that are rounded to e4m3, too; or 0.
    """

    def __init__(self, devices: Sequence[str], n_rows: int, width: int, block_k: int) -> None:
        self.devices, self.block_k = devices, block_k
        self.ranks = make_ranks(n_rows, width, devices)
        self.in_host = make_ranks(n_rows, width, devices, is_in_host=True)
        self.in_host = [replace(own, out=of.out) for own, of in zip(self.in_host, self.ranks, strict=True)]
        self.partials = [torch.randn(1, n_rows, width, device=device) * 0.1 for device in devices]
        self.sums = [torch.empty(n_rows, width, device=device) for device in devices]
        self.residuals = [torch.zeros(n_rows, width, device=device) for device in devices]
        self.weights = [torch.zeros(width, device=device) for device in devices]
        self.codes = [fp8_rows("rows", n_rows, width, allocate_on(device)).rounded_by(block_k) for device in devices]

    def _each(self, n: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """What a call of n rows has, rank by rank, with its GPU the current one."""
        shards = (self.partials, self.sums, self.residuals, self.weights)
        for i, (partials, total, residual, w) in enumerate(zip(*shards, strict=True)):
            with torch.cuda.device(self.devices[i]):
                yield i, partials.view(-1)[: n * len(w)].view(1, n, -1), total[:n], residual[:n], w

    def fused(self, ranks: list[Rank], shots: int, n: int) -> None:
        for i, partials, _, residual, w in self._each(n):
            codes = self.codes[i]
            all_reduce_norm(residual, partials, w, EPS, ranks=ranks[i], codes=codes, shots=shots)

    def separate(self, n: int, *, is_rounding_apart: bool = False) -> None:
        for i, partials, total, _, _ in self._each(n):
            all_reduce(partials, total, ranks=self.ranks[i])
        self._norm(n, is_rounding_apart)

    def by_nccl(self, n: int) -> None:
        inputs = [partials[0] for _, partials, _, _, _ in self._each(n)]
        nccl.all_reduce(inputs, outputs=[total[:n] for total in self.sums])
        launches.n += len(inputs)
        self._norm(n)

    def _norm(self, n: int, is_rounding_apart: bool = False) -> None:
        for i, _, total, residual, w in self._each(n):
            out, codes = self.ranks[i].out[:n], self.codes[i]
            add_norm(residual, total[None], w, EPS, out, codes=None if is_rounding_apart else codes)
            if is_rounding_apart:
                round_rows(out, codes.rounded_by(0), self.block_k)

    def ways(self) -> dict[str, Callable[[int], None]]:
        """By name, the fastest to be expected first, but for the one whose bits the others must have."""
        apart = {"three kernels": partial(self.separate, is_rounding_apart=True)} if self.block_k else {}
        return {
            **apart,
            "two kernels": self.separate,
            "one kernel": partial(self.fused, self.ranks, 1),
            "one kernel, two shots": partial(self.fused, self.ranks, 2),
            "host's memory": partial(self.fused, self.in_host, 1),
            "NCCL": self.by_nccl,
        }

    def made(self, start: Callable[[int], None], n: int) -> list[Tensor]:
        """Rows that a call makes, and their codes and scales, of all GPUs."""
        for i, residual in enumerate(self.residuals):
            residual.zero_()
            self.ranks[i].out.fill_(torch.nan)
            self.codes[i].codes.fill_(85)
        wait(self.devices)
        start(n)
        wait(self.devices)
        found = [ranks.out[:n].cpu() for ranks in self.ranks]
        if self.block_k:
            found += [of.codes[: n * self.ranks[0].width].cpu() for of in self.codes]
            found += [of.scale[: n * self.ranks[0].width // self.block_k].cpu() for of in self.codes]
        return found


def wait(devices: Sequence[str]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def recorded(devices: Sequence[str], run: Callable[[], None]) -> Callable[[], None]:
    """What replays a run, a recording on each GPU."""
    streams = [torch.cuda.Stream(device) for device in devices]
    graphs = [torch.cuda.CUDAGraph() for _ in devices]
    before = [torch.cuda.current_stream(device) for device in devices]
    wait(devices)
    for stream in streams:
        torch.cuda.set_stream(stream)
    try:
        for device, graph in zip(devices, graphs, strict=True):
            with torch.cuda.device(device):
                graph.capture_begin(capture_error_mode="relaxed")
        run()
        for device, graph in zip(devices, graphs, strict=True):
            with torch.cuda.device(device):
                graph.capture_end()
    finally:
        for stream in before:
            torch.cuda.set_stream(stream)

    def replay() -> None:
        for device, graph in zip(devices, graphs, strict=True):
            with torch.cuda.device(device):
                graph.replay()

    return replay


def seconds_of(devices: Sequence[str], run: Callable[[], object], rounds: int) -> list[float]:
    """Of a run on all GPUs, behind two that are not counted."""
    times = []
    for _ in range(2 + rounds):
        wait(devices)
        begin = time.perf_counter()
        run()
        wait(devices)
        times.append(time.perf_counter() - begin)
    return times[2:]


def repeated(start: Callable[[int], None], n: int) -> None:
    """CALLS calls of n rows."""
    for _ in range(CALLS):
        start(n)


def bench(arguments: argparse.Namespace) -> int:
    """Prints a table and writes a JSON file; 0. Raises ConfigError where there are not as many GPUs, or none
    that reach each other.
    """
    need_gpu()
    rows, n_gpus, block_k = sorted(numbers(arguments.rows, "--rows", int)), arguments.gpus, 128 * arguments.e4m3
    if torch.cuda.device_count() < n_gpus:
        raise ConfigError(f"--gpus {n_gpus}: torch sees {torch.cuda.device_count()}")
    devices = [f"cuda:{i}" for i in range(n_gpus)]
    try:
        ranks = Ranks(devices, max(rows), arguments.width, block_k)
    except KernelError as error:
        raise ConfigError(f"--gpus {n_gpus}: {error}") from None
    link, found = link_speed(0, 1), list[dict[str, Any]]()
    more = {"gpus": n_gpus, "width": arguments.width, "rounds": arguments.rounds, "link": link}
    kind, device = "allreduce-e4m3" if block_k else "allreduce", torch.cuda.get_device_name()
    write = writer(kind, f"{n_gpus}x{arguments.width}", device, arguments.out, **more)
    with Console(stderr=True).status("") as status:
        for n in rows:
            expected = list[Tensor]()
            for name, start in ranks.ways().items():
                status.update(f"{n} rows, {name}")
                run = partial(repeated, start, n)
                with apart([*ranks.ranks, *ranks.in_host]):
                    launches.n = 0
                    start(n)
                    n_kernels = launches.n // n_gpus
                    replay = recorded(devices, run)
                    replay()
                made = ranks.made(start, n)
                expected = expected or made
                is_same = all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
                if not is_same and name != "NCCL":
                    raise ConfigError(f"{n} rows, {name}: other bits than those of a kernel each; report it")
                times = {"us": seconds_of(devices, replay, arguments.rounds)}
                times["alone_us"] = seconds_of(devices, run, arguments.rounds)
                us = {what: [1e6 * one / CALLS for one in all_s] for what, all_s in times.items()}
                found.append({"rows": n, "way": name, "kernels": n_kernels, "same_bits": is_same, **us})
                write(rows=found)
    table = Table(
        "rows", "way", "kernels", "us in a recording", "of the rounds", "us alone", "us of one way at the link's speed"
    )
    for row in found:
        one_way = row["rows"] * arguments.width * 4 / link * 1e6
        times = row["us"]
        shown = f"{min(times):.2f} .. {max(times):.2f}"
        of_alone = f"{statistics.median(row['alone_us']):.1f}"
        table.add_row(
            str(row["rows"]),
            row["way"],
            str(row["kernels"]),
            f"{statistics.median(times):.2f}",
            shown,
            of_alone,
            f"{one_way:.2f}",
        )
    Console().print(table)
    print(f"{n_gpus} GPUs, rows of {arguments.width}; a link copies {link / 1e9:.0f} GB/s one way")
    write(is_whole=True, rows=found)
    return 0


@Levers().bound()
def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--gpus", type=int, default=2, metavar="N", help="how many, a power of two (default: 2)")
    rows = "1,4,16,64,128,512"
    flags.add_argument("--rows", default=rows, metavar="N,N,...", help=f"default: {rows}")
    flags.add_argument("--width", type=int, default=5120, metavar="H", help="of a row (default: 5120)")
    flags.add_argument("--e4m3", action="store_true", help="round the rows, by blocks of 128")
    flags.add_argument("--rounds", type=int, default=9, metavar="R", help="default: 9")
    arguments = flags.parse_args()
    sys.exit(finished(lambda: bench(arguments)))


if __name__ == "__main__":
    main()
