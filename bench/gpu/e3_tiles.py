"""E3: does a column of a matrix product have the same bits in every tile shape?

Weights are the M side, tokens the N side, K walked in order without a split, float32 accumulator. One column
alone and among others through token tiles 16 to 128, weight tiles 64 and 128, K blocks 64 and 128; bfloat16
and e4m3. Decides whether tile shapes may follow the batch. `python -m bench.gpu.e3_tiles`
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from bench.gpu.experiment import DEVICE, run, same_bits

M, K = 2048, 2048


@triton.jit
def product(p_x, p_w, p_out, n_tokens, M, K, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """out[t, m] = sum_k w[m, k] x[t, k]; K is a multiple of BLOCK_K, M of BLOCK_M."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_k = tl.arange(0, BLOCK_K)
    p_w += o_m[:, None].to(tl.int64) * K + o_k[None, :]
    p_x += o_t[None, :] * K + o_k[:, None]
    b_sum = tl.zeros((BLOCK_M, BLOCK_T), tl.float32)
    for _ in range(0, K, BLOCK_K):
        b_w = tl.load(p_w)
        b_x = tl.load(p_x, mask=o_t[None, :] < n_tokens, other=0.0)
        b_sum = tl.dot(b_w, b_x, b_sum)
        p_w += BLOCK_K
        p_x += BLOCK_K
    p_out += o_t[None, :].to(tl.int64) * M + o_m[:, None]
    tl.store(p_out, b_sum, mask=o_t[None, :] < n_tokens)


def multiply(
    x: torch.Tensor, w: torch.Tensor, block_m: int, block_t: int, block_k: int, **options: Any
) -> torch.Tensor:
    out = torch.full((x.shape[0], w.shape[0]), torch.nan, device=x.device)
    grid = (w.shape[0] // block_m, triton.cdiv(x.shape[0], block_t))
    options = {"num_warps": 8 if block_m == 128 and block_t == 128 else 4, "num_stages": 3} | options
    product[grid](x, w, out, x.shape[0], w.shape[0], w.shape[1], block_m, block_t, block_k, **options)
    return out


def tiles(row: Callable[..., None], dtype: torch.dtype) -> None:
    x = torch.randn(128, K, device=DEVICE).to(dtype)
    w = (torch.randn(M, K, device=DEVICE) * K**-0.5 * 8).to(dtype)
    expected = multiply(x, w, 64, 128, 64)
    exact = (x.double() @ w.double().t()).float()
    error = float((expected - exact).norm() / exact.norm())
    row(dtype=str(dtype), relative_error_of_the_first=error)
    for block_k in (64, 128):
        for block_m in (64, 128):
            for block_t in (16, 32, 64, 128):
                if dtype != torch.bfloat16 and block_t in (32, 64):
                    continue
                try:
                    all_ = multiply(x, w, block_m, block_t, block_k, num_stages=2 if block_k == 128 else 3)
                    one = multiply(
                        x[5:6].contiguous(), w, block_m, block_t, block_k, num_stages=2 if block_k == 128 else 3
                    )
                except Exception as error:
                    row(block_m=block_m, block_t=block_t, block_k=block_k, failed=str(error).splitlines()[-1][:100])
                    continue
                row(
                    block_m=block_m,
                    block_t=block_t,
                    block_k=block_k,
                    all_equal=same_bits(all_, expected),
                    differ=int((all_ != expected).sum()),
                    alone_equal=same_bits(one[0], expected[5]),
                )


def main() -> None:
    run(
        "e3_tiles",
        {"bfloat16": lambda row: tiles(row, torch.bfloat16), "e4m3": lambda row: tiles(row, torch.float8_e4m3fn)},
    )


if __name__ == "__main__":
    main()
