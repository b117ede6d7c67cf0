"""The roofs of the CPU, its memory and its disk, the best they can do; figures are printed beside them."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
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


def disk_bandwidth(file: Path, n_reads: int = 64) -> float:
    """Bytes per second of reading a file in pieces of 1 MiB all over it, several at once, after the system
    was asked to forget them; more than the disk gives where it has not.
    """
    size, piece = file.stat().st_size, 1 << 20
    places = [i * max(0, size - piece) // n_reads for i in range(n_reads)]
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            for place in places:
                os.posix_fadvise(descriptor, place, piece, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            n_bytes = sum(pool.map(lambda place: len(os.pread(descriptor, piece, place)), places))
        return n_bytes / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
