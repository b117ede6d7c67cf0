"""A GPU's two roofs, the best it can do. Every figure is printed beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuRoofs:
    """Bytes read per second, operations per second of a bfloat16 product."""

    read: float
    multiply: float

    @classmethod
    def measured(cls) -> GpuRoofs:
        """Raises torch.OutOfMemoryError."""
        data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
        read_s = _best_s(lambda: torch.sum(data))
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        multiply_s = _best_s(lambda: torch.mm(a, b, out=out))
        return cls(data.nbytes / read_s, 2 * 8192**3 / multiply_s)


def link_speed(source: int, target: int) -> float:
    """Bytes a second that one GPU copies to another. Raises torch.OutOfMemoryError."""
    data = torch.empty(1 << 28, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty_like(data, device=f"cuda:{target}")
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        there.copy_(data)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        times.append(time.perf_counter() - begin)
    return data.nbytes / min(times[1:])


def host_link(n_bytes: int = 1 << 28) -> float:
    """Bytes a second that the GPU copies from the host's memory. Raises torch.OutOfMemoryError."""
    data = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(data, device="cuda", pin_memory=False)
    return n_bytes / _best_s(lambda: there.copy_(data, non_blocking=True))


def _best_s(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(min(times))
