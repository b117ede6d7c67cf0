"""E4: is a row of a matrix instruction's result free of the other rows, whatever they hold?

One token in a tile of 16, 64 or 128 with others that are zero, masked, random, infinite or NaN; the token on
the narrow (N) and on the wide (M) side; and a tile whose other *weight* rows are NaN. Decides whether rows
that are not in use may hold garbage, and whether one token may ride in a chunk's tile.
`python -m bench.gpu.e4_rows`
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from bench.gpu.e3_tiles import multiply
from bench.gpu.experiment import DEVICE, run, same_bits

M, K = 512, 1024


@triton.jit
def wide(p_x, p_w, p_out, M, K, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same product with the tokens as the M side of the instruction: out[t, m]."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_t = tl.arange(0, BLOCK_T)
    o_k = tl.arange(0, BLOCK_K)
    b_sum = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    for begin in range(0, K, BLOCK_K):
        b_x = tl.load(p_x + o_t[:, None] * K + begin + o_k[None, :])
        b_w = tl.load(p_w + o_m[None, :] * K + begin + o_k[:, None])
        b_sum = tl.dot(b_x, b_w, b_sum)
    tl.store(p_out + o_t[:, None] * M + o_m[None, :], b_sum)


def others(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the rows but one hold."""
    return {
        "zero": torch.zeros_like(x),
        "random": torch.randn(x.shape, device=x.device).to(x.dtype),
        "large": torch.full_like(x, 3e38),
        "inf": torch.full_like(x, torch.inf),
        "nan": torch.full_like(x, torch.nan),
    }


def narrow_side(row: Callable[..., None]) -> None:
    x = torch.randn(1, K, device=DEVICE).bfloat16()
    w = torch.randn(M, K, device=DEVICE).bfloat16()
    expected = multiply(x, w, 64, 16, 64)[0]  # the other 15 columns are masked
    for block_t in (16, 64, 128):
        for at in (0, 3, block_t - 1):
            cells = {}
            for name, rest in others(x.expand(block_t, K).contiguous()).items():
                rest[at] = x[0]
                cells[name] = same_bits(multiply(rest, w, 64, block_t, 64)[at], expected)
            row(block_t=block_t, at=at, **cells)


def wide_side(row: Callable[..., None]) -> None:
    x = torch.randn(1, K, device=DEVICE).bfloat16()
    w = torch.randn(M, K, device=DEVICE).bfloat16()
    expected = multiply(x, w, 64, 16, 64)[0]
    for block_t in (16, 64, 128):
        for at in (0, block_t - 1):
            cells = {}
            for name, rest in others(x.expand(block_t, K).contiguous()).items():
                rest[at] = x[0]
                out = torch.empty(block_t, M, device=DEVICE)
                wide[(M // 64,)](rest, w, out, M, K, 64, block_t, 64, num_warps=4)
                cells[name] = same_bits(out[at], expected)  # also: are both sides of the instruction alike?
                if name == "zero":
                    zero = out[at].clone()
                cells[name + "_as_zero"] = same_bits(out[at], zero)
            row(block_t=block_t, at=at, **cells)


def weight_rows(row: Callable[..., None]) -> None:
    x = torch.randn(16, K, device=DEVICE).bfloat16()
    w = torch.randn(M, K, device=DEVICE).bfloat16()
    expected = multiply(x, w, 64, 16, 64)[:, 0]
    for name, rest in others(w).items():
        rest[0] = w[0]
        row(other_weight_rows=name, equal=same_bits(multiply(x, rest, 64, 16, 64)[:, 0], expected))


def main() -> None:
    run("e4_rows", {"narrow side": narrow_side, "wide side": wide_side, "weight rows": weight_rows})


if __name__ == "__main__":
    main()
