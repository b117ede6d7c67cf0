"""E2: how near to the memory's rate can a DeltaNet decode kernel come, and with which tile?

A skeleton of the update: float32 [dv, dk] states, read and written in place in tiles of 16 to 128 value rows, with the two
products by k and q that the real kernel needs, nothing else. 32 heads (35B-A3B), N = 1 to 128 sequences, states rotated past L2.
No clusters: Triton has none. Decides the tile and warps of gdn_decode. `python -m bench.gpu.e2_state`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from bench.gpu.experiment import DEVICE, graph_us, run

HEADS, DV, DK = 32, 128, 128


@triton.jit
def update(
    p_state, p_k, p_q, p_out, ROWS: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, HINT: tl.constexpr
):
    i_head, i_tile = tl.program_id(1), tl.program_id(0)
    o_row = i_tile * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, DK)
    p_tile = p_state + i_head.to(tl.int64) * (DV * DK) + o_row[:, None] * DK + o_k[None, :]
    if HINT:  # noqa: SIM108 (read once and written once: neither need stay in the caches)
        b_s = tl.load(p_tile, eviction_policy="evict_first")
    else:
        b_s = tl.load(p_tile)
    b_k = tl.load(p_k + i_head * DK + o_k)
    b_q = tl.load(p_q + i_head * DK + o_k)
    b_s = b_s * 0.99
    b_u = 0.5 - tl.sum(b_s * b_k[None, :], 1)
    b_s += b_u[:, None] * b_k[None, :]
    tl.store(p_out + i_head * DV + o_row, tl.sum(b_s * b_q[None, :], 1))
    if HINT:
        tl.store(p_tile, b_s, cache_modifier=".cs")
    else:
        tl.store(p_tile, b_s)


def sweep(row: Callable[..., None], hint: bool) -> None:
    state_bytes = HEADS * DV * DK * 4
    pool = torch.zeros(512, HEADS, DV, DK, device=DEVICE)  # 1 GiB
    k, q = (torch.randn(128 * HEADS, DK, device=DEVICE) * 0.1 for _ in range(2))
    out = torch.empty(128 * HEADS, DV, device=DEVICE)
    for n in (1, 4, 16, 64, 128):
        views = [pool[i * n : (i + 1) * n] for i in range(min(512 // n, 48))]
        for rows in (16, 32, 64, 128):
            cells = {}
            for warps in (1, 2, 4, 8):
                if rows * DK // (warps * 32) > 128:  # spills
                    continue

                def step(
                    rows: int = rows, warps: int = warps, n: int = n, views: list[torch.Tensor] = views
                ) -> None:
                    for view in views:
                        update[(DV // rows, n * HEADS)](
                            view, k, q, out, ROWS=rows, DV=DV, DK=DK, HINT=hint, num_warps=warps
                        )  # fmt: skip

                us = graph_us(step, len(views), 5)
                cells[f"{warps}w_GBps"] = round(2 * n * state_bytes / us / 1e3)
                cells[f"{warps}w_us"] = round(us, 2)
            row(n=n, rows=rows, **cells)


def copy(row: Callable[..., None]) -> None:
    """The roof: torch's copy of as many bytes."""
    a, b = (torch.zeros(1 << 28, device=DEVICE) for _ in range(2))
    us = graph_us(lambda: b.copy_(a), 1, 5)
    row(GBps=round(2 * a.numel() * 4 / us / 1e3))


def main() -> None:
    run(
        "e2_state",
        {"copy": copy, "plain": lambda row: sweep(row, False), "hints": lambda row: sweep(row, True)},
    )


if __name__ == "__main__":
    main()
