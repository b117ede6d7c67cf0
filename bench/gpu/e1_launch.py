"""E1: what does one more kernel in a recorded step cost, and what does a barrier inside a persistent kernel cost?

A graph of 200 kernels, each needing the one in front: plain; with programmatic dependent launch (PDL); with PDL and the
kernel's own weights fetched to L2 or to registers before it waits. Then a persistent kernel that meets at a grid barrier 200
times. Decides how many kernels a decode step may have, and whether a whole-model kernel could pay. `python -m bench.gpu.e1_launch`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from bench.gpu.experiment import DEVICE, graph_us, run

N_KERNELS = 200
N_X = 2048


@triton.jit
def small(
    p_x, p_y, p_w, n_w, PDL: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr, BLOCK_W: tl.constexpr
):
    """y = x + 1 and, with BLOCK_W, the sum of this program's n_w weights, which no kernel writes."""
    i = tl.program_id(0)
    N_X: tl.constexpr = 2048
    if EARLY:  # the next kernel may start at once: sound, as it waits for this one's end, which waits for the last one's
        tl.extra.cuda.gdc_launch_dependents()
    total = 0.0
    if BLOCK_W > 0:
        p_own = p_w + i.to(tl.int64) * n_w
        if PREFETCH == 1:
            o_line = tl.arange(0, BLOCK_W // 64) * 64  # one request for each 128 bytes
            for begin in range(0, n_w, BLOCK_W):
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(p_own + begin + o_line).to(tl.int64)],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
        if PREFETCH == 2:
            b_sum = tl.zeros((BLOCK_W,), tl.float32)
            for begin in range(0, n_w, BLOCK_W):
                b_sum += tl.load(p_own + begin + tl.arange(0, BLOCK_W)).to(tl.float32)
            total = tl.sum(b_sum, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    o = tl.arange(0, 64)
    b_x = tl.load(p_x + (i * 64 + o) % N_X)
    if BLOCK_W > 0 and PREFETCH != 2:
        p_own = p_w + i.to(tl.int64) * n_w
        b_sum = tl.zeros((BLOCK_W,), tl.float32)
        for begin in range(0, n_w, BLOCK_W):
            b_sum += tl.load(p_own + begin + tl.arange(0, BLOCK_W)).to(tl.float32)
        total = tl.sum(b_sum, 0)
    tl.store(p_y + i * 64 + o, b_x + 1.0 + total, mask=i * 64 + o < N_X)


@triton.jit
def barriers(p_count, p_x, n_rounds, n_programs, POLL_LOADS: tl.constexpr):
    """Each round writes 4 bytes, meets, and reads its neighbour's."""
    i = tl.program_id(0)
    value = i
    for r in range(n_rounds):
        tl.store(p_x + (r % 2) * n_programs + i, value)
        tl.debug_barrier()
        seen = tl.atomic_add(p_count, 1, sem="release", scope="gpu") + 1
        target = (r + 1) * n_programs
        while seen < target:
            if POLL_LOADS:
                seen = tl.load(p_count, volatile=True)
            else:
                seen = tl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
        if POLL_LOADS:
            seen = tl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
        value = tl.load(p_x + (r % 2) * n_programs + (i + 1) % n_programs, volatile=True)
    tl.store(p_x + i, value)


def chain(row: Callable[..., None], n_programs: int, n_w: int) -> None:
    """n_w: bf16 weights of each program; every kernel has its own, so that L2 does not hold them."""
    x = [torch.zeros(N_X, device=DEVICE) for _ in range(2)]
    n_copies = N_KERNELS if n_w else 1
    w = torch.zeros(n_copies, max(n_w, 1) * n_programs, dtype=torch.bfloat16, device=DEVICE)
    modes = {
        "plain": (False, False, 0), "pdl": (True, False, 0), "pdl, next at once": (True, True, 0),
        "pdl + L2 prefetch": (True, False, 1), "pdl + weights first": (True, False, 2),
        "pdl, next at once + L2 prefetch": (True, True, 1), "pdl, next at once + weights first": (True, True, 2),
    }  # fmt: skip
    for name, (pdl, early, prefetch) in modes.items():
        if prefetch and not n_w:
            continue
        meta = {"PDL": pdl, "EARLY": early, "PREFETCH": prefetch} | ({"launch_pdl": True} if pdl else {})

        def step(meta: dict[str, Any] = meta) -> None:
            for j in range(N_KERNELS):
                weights = w[j % n_copies]
                small[(n_programs,)](
                    x[j % 2], x[1 - j % 2], weights, n_w, BLOCK_W=2048 if n_w else 0, num_warps=4, **meta
                )

        x[0].zero_()
        us = graph_us(step, N_KERNELS)
        x[0].zero_()
        step()
        right = bool((x[N_KERNELS % 2][: n_programs * 64] == N_KERNELS).all())
        bytes_ = 2 * n_w * n_programs
        row(programs=n_programs, kB=bytes_ / 1e3, mode=name, us=us, GBps=bytes_ / us / 1e3, right=right)


def grid_barrier(row: Callable[..., None]) -> None:
    for n_programs in (32, 132):
        for poll_loads in (False, True):
            count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
            x = torch.zeros(2 * n_programs, dtype=torch.int32, device=DEVICE)

            def step(n: int = n_programs, p: bool = poll_loads, count: Any = count, x: Any = x) -> None:
                count.zero_()
                barriers[(n,)](count, x, N_KERNELS, n, POLL_LOADS=p, num_warps=4)

            us = graph_us(step, N_KERNELS)
            expected = (torch.arange(n_programs, device=DEVICE) + N_KERNELS) % n_programs
            row(programs=n_programs, poll="loads" if poll_loads else "atomics", us=us, right=torch.equal(x[:n_programs], expected.int()))  # fmt: skip


def main() -> None:
    run(
        "e1_launch",
        {
            "1 program": lambda row: chain(row, 1, 0),
            "132 programs": lambda row: chain(row, 132, 0),
            "2 MB of weights": lambda row: chain(row, 128, 8192),
            "8 MB of weights": lambda row: chain(row, 256, 16384),
            "grid barrier": grid_barrier,
        },
    )


if __name__ == "__main__":
    main()
