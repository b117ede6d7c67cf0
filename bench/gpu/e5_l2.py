"""E5: does fetching the next weights into L2 early shorten a chain of small products at N = 1?

The linears of 0.8B (24 layers: in_proj, out_proj, gate_up, down; 43 MB a layer, own weights each) as one token's chain, each
needing the one in front. Modes: plain; PDL; PDL with each kernel fetching its own first bytes before it waits; each kernel
fetching the first bytes of the next one; a second stream with a few programs that fetch ahead. Decides whether decode kernels
prefetch, and how much. `python -m bench.gpu.e5_l2`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from bench.gpu.experiment import DEVICE, graph_us, run

LAYERS = 24
SHAPES = ((8224, 1024), (1024, 2048), (7168, 1024), (1024, 3584))  # rows, K
ROWS = 8  # of the weights, for each program
UNIT = 16384  # bytes that a program asks for at once


@triton.jit
def fetch(p_w, begin, n_bytes):
    """Asks for [begin, begin + n_bytes) of p_w's bytes, a line of 128 at a time, in L2; n_bytes a multiple of 16,384."""
    o_line = tl.arange(0, 128) * 128
    for i in range(0, n_bytes, 16384):
        p_line = p_w.to(tl.int64) + begin + i + o_line
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def product(
    p_x, p_w, p_y, p_next, K, n_early, n_next, n_total,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, OWN: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """y[m] = w[m] . x for ROWS rows. OWN: this program's own first bytes before the wait; NEXT: the next weights' share."""
    i = tl.program_id(0)
    o_m = i * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BLOCK_K)
    p_rows = p_w + o_m[:, None].to(tl.int64) * K + o_k[None, :]
    if (
        OWN
    ):  # every row's first n_early / ROWS bytes would be scattered: this program's rows are one run of bytes
        fetch(p_w, i.to(tl.int64) * ROWS * K * 2, n_early)
    if NEXT:  # noqa: SIM102 (the first is known when compiling)
        if (i + 1) * n_next <= n_total:
            fetch(p_next, i.to(tl.int64) * n_next, n_next)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_sum = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for begin in range(0, K, BLOCK_K):
        b_x = tl.load(p_x + begin + o_k).to(tl.float32)
        b_sum += tl.load(p_rows + begin).to(tl.float32) * b_x[None, :]
    tl.store(p_y + o_m, tl.sum(b_sum, 1).to(tl.bfloat16))


@triton.jit
def fetcher(p_w, n_each):
    fetch(p_w, tl.program_id(0).to(tl.int64) * n_each, n_each)


def chain(row: Callable[..., None]) -> None:
    w = [
        [torch.randn(m, k, device=DEVICE).mul_(k**-0.5).bfloat16() for m, k in SHAPES] for _ in range(LAYERS)
    ]
    flat = [matrix for layer in w for matrix in layer]
    buffers = [torch.randn(8224, device=DEVICE).bfloat16() for _ in range(2)]
    total = sum(m.numel() for m in flat) * 2
    side = torch.cuda.Stream()

    def step(pdl: bool, own: bool = False, next_: bool = False, ahead: int = 0, share: float = 1.0) -> None:
        """own: a program's own rows before it waits; next_: `share` of the next matrix, divided among the programs; ahead: the
        same by so many programs on the side stream, while this kernel runs."""
        main = torch.cuda.current_stream()
        for j, matrix in enumerate(flat):
            m, k = matrix.shape
            following = flat[min(j + 1, len(flat) - 1)]
            n_total = int(following.numel() * 2 * share)
            n_next = -(-n_total // (m // ROWS) // UNIT) * UNIT if next_ else 0
            if ahead:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    fetcher[(ahead,)](following, n_total // ahead // UNIT * UNIT, num_warps=4)
            product[(m // ROWS,)](
                buffers[j % 2], matrix, buffers[1 - j % 2], following, k, ROWS * k * 2 // UNIT * UNIT, n_next, n_total,
                ROWS=ROWS, BLOCK_K=512, PDL=pdl, OWN=own, NEXT=next_, num_warps=4,
                **({"launch_pdl": True} if pdl else {}),
            )  # fmt: skip
        if ahead:
            main.wait_stream(side)

    modes: dict[str, Callable[[], None]] = {
        "plain": lambda: step(False),
        "pdl": lambda: step(True),
        "pdl, own rows first": lambda: step(True, own=True),
        "pdl, all of the next matrix": lambda: step(True, next_=True),
        "pdl, a quarter of the next matrix": lambda: step(True, next_=True, share=0.25),
        "pdl, own rows, a quarter of the next": lambda: step(True, own=True, next_=True, share=0.25),
        "second stream, 4 programs, all of the next": lambda: step(False, ahead=4),
        "second stream, 16 programs, all of the next": lambda: step(False, ahead=16),
        "second stream, 16 programs, a quarter": lambda: step(False, ahead=16, share=0.25),
    }
    first: torch.Tensor | None = None
    for name, mode in modes.items():
        try:
            for buffer in buffers:
                buffer.fill_(0.5)
            mode()
            y = buffers[len(flat) % 2].clone()
            first = y if first is None else first
            us = graph_us(mode, 1, 9)
            row(mode=name, us=round(us, 1), us_per_kernel=round(us / len(flat), 2), GBps=round(total / us / 1e3), same=torch.equal(y, first))  # fmt: skip
        except Exception as error:
            row(mode=name, failed=str(error).splitlines()[-1][:120])


def main() -> None:
    run("e5_l2", {"0.8B linears": chain})


if __name__ == "__main__":
    main()
