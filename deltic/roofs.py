"""What the machine can do at best: the two roofs beside which every figure is printed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from deltic.ops.cpu.program import Program
from deltic.ops.matrix import FORMATS, Matrix, row_bytes


def read_bandwidth(n_threads: int, n_bytes: int = 1 << 29) -> float:
    """Bytes per second of reading memory once, best of five passes over `n_bytes` (more than the caches
    hold).
    """
    data = torch.ones(n_bytes // 4, dtype=torch.float32)
    program = Program(n_threads)
    program.call("deltic_read_memory", data, n_bytes, torch.empty(n_bytes >> 20))
    return n_bytes / _best_s(program)


def multiply_peak(n_threads: int, format: str = "bf16") -> float:
    """Operations per second (a multiply-add is two) of the kernels' inner tile on operands in the first-level
    cache: bfloat16, or int8 for a quantised format.
    """
    n_tasks, n_repeats, k = 4 * n_threads, 4000, 256
    w = Matrix.empty(32, k, FORMATS[format])
    w.data.zero_()
    n_rows = 32  # the most a tile has
    rows, out = torch.zeros(n_rows * row_bytes(k), dtype=torch.uint8), torch.empty(n_tasks, n_rows, 32)
    n_operations = torch.empty(1)
    program = Program(n_threads)
    program.call("deltic_multiply_peak", *w.arguments, rows, n_tasks, n_repeats, out, n_operations)
    seconds = _best_s(program)
    return float(n_operations) / seconds


def _best_s(program: Program, n_runs: int = 5) -> float:
    times = []
    for _ in range(n_runs):
        start = time.perf_counter()
        program.run()
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True)
class GpuRoofs:
    """A GPU's: bytes read per second, operations per second of a bfloat16 product."""

    read: float
    multiply: float

    @classmethod
    def measured(cls) -> GpuRoofs:
        data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
        read_s = _best_gpu_s(lambda: torch.sum(data))
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        multiply_s = _best_gpu_s(lambda: torch.mm(a, b, out=out))
        return cls(data.nbytes / read_s, 2 * 8192**3 / multiply_s)


def _best_gpu_s(run: Any, n: int = 10) -> float:
    run()
    times = []
    for _ in range(n):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(min(times))
