"""The CPU's two roofs, the best it can do; every figure is printed beside them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from deltic.ops.arrays import zeros
from deltic.ops.cpu.program import Program
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.matrix import Matrix, row_bytes

_MOST_BYTES, _LEAST_BYTES = 1 << 29, 1 << 27


def beyond_caches(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of which the caches hold a quarter at most, so that reading them is reading memory: 128 MiB; 512
    MiB where the machine does not tell its caches of the third level, or has larger ones.

    To touch memory first takes a virtual machine longer than to read it.
    """
    sizes = cpus.glob("cpu*/cache/index3/size")
    caches = {(at.with_name("shared_cpu_list").read_text(), at.read_text()) for at in sizes}
    n_bytes = 4096 * sum(int(size.strip().removesuffix("K")) for _, size in caches)
    return max(_LEAST_BYTES, n_bytes >> 20 << 20) if 0 < n_bytes < _MOST_BYTES else _MOST_BYTES


def read_bandwidth(n_threads: int, n_bytes: int = _MOST_BYTES) -> float:
    """Bytes per second of reading memory once, best of five passes over `n_bytes` (more than the caches
    hold).
    """
    data = zeros((n_bytes // 4,), np.float32)
    data.fill(1.0)
    program = Program(n_threads)
    program.call("deltic_read_memory", data, n_bytes, np.empty(n_bytes >> 20, np.float32))
    return n_bytes / _best_s(program)


def multiply_peak(n_threads: int, format: str = "bf16") -> float:
    """Operations per second (a multiply-add is two) of the kernels' inner tile on operands in the first-level
    cache: bfloat16, or int8 for a quantised format.
    """
    n_tasks, n_repeats, k = 4 * n_threads, 4000, 256
    w = Matrix.empty(32, k, WEIGHT_FORMATS[format])
    n_rows = 32  # the most a tile has
    rows, out = zeros((n_rows * row_bytes(k),), np.uint8), zeros((n_tasks, n_rows, 32), np.float32)
    n_operations = np.empty(1, np.float32)
    program = Program(n_threads)
    program.call("deltic_multiply_peak", *w.whole.arguments, rows, n_tasks, n_repeats, out, n_operations)
    seconds = _best_s(program)
    return float(n_operations[0]) / seconds


def _best_s(program: Program) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        program.run()
        times.append(time.perf_counter() - start)
    return min(times)
