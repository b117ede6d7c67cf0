"""Hyper-connections: a residual of S streams, what a block reads of it, and what a block adds to each stream.

    n    = rms_norm(x), stream by stream
    low  = silu(W_down n / S);    inject_s = 2 sigmoid(w_s n / S)
    read = mean over s of sigmoid(W_up low)_s n_s
    x_s += inject_s block(read)

Four launches stand between two blocks: the norm, which first adds the block in front to the streams; the
product with W_down and the w_s, one matrix (linear.py); the sums of its slices (`gates`); and `read`, the
product with W_up together with all that follows, so that its S * H sums never reach memory. The sum over the
streams takes neighbours first, level by level. Nothing else adds more than a product or a norm does.

Source: Zhu et al. 2024, "Hyper-Connections" (arXiv:2409.19606), with the gates of transformers 5.24,
`Qwen4ExpTextGatedResidual`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.gpu.chip import prefetch_l2, wait_for_front
from deltic.ops.gpu.decode import BF16, address, constants, k_block, load_more_scales, rows_from
from deltic.ops.gpu.launch import copy_rows, launch, next_power_of_2
from deltic.ops.gpu.norm import LANES, load_pieces, norm_warps, pieces, store_norm, store_pieces, sum_of_shards
from deltic.ops.gpu.operands import add_blocks
from deltic.ops.matrix import Matrix

_GATES = 128  # columns of a program of `gates`
_MOST_TOKENS = 128  # of a program of `read`


@triton.jit
def _norm_kernel(
    p_streams, p_block, p_inject, p_w, p_out, p_rows, width, slice_stride, inverse_width, eps, LANES: tl.constexpr,
    PIECES: tl.constexpr, SHARDS: tl.constexpr, SLICES: tl.constexpr, GATHER: tl.constexpr, PDL: tl.constexpr,
):
    """A stream of a row a program."""
    i_row, i_stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_streams = tl.num_programs(1)
    o_lane = tl.arange(0, LANES)
    weights = load_pieces(p_w + i_stream * width, width, LANES, PIECES)  # nobody in the step writes weights
    wait_for_front(PDL)
    row = i_row
    if GATHER:
        row = tl.maximum(tl.load(p_rows + i_row), 0).to(tl.int64)
    p_row = p_streams + (row * n_streams + i_stream) * width
    found: tl.tuple = ()
    if SLICES > 0:
        inject = tl.load(p_inject + row * n_streams + i_stream)
    for j in tl.static_range(PIECES):
        o_col = j * LANES + o_lane
        b_x = tl.load(p_row + o_col, mask=o_col < width, other=0.0).to(tl.float32)
        if SLICES > 0:
            b_y = sum_of_shards(p_block + row * width + o_col, slice_stride, o_col < width, SHARDS, SLICES)
            b_x = tl.fma(b_y, tl.zeros_like(b_y) + inject, b_x)
        found += (b_x,)
    if SLICES > 0 and not GATHER:
        store_pieces(p_row, found, width, LANES, PIECES)
    p_to = p_out + (i_row * n_streams + i_stream) * width
    store_norm(p_to, None, None, 0, found, weights, width, inverse_width, eps, LANES, PIECES, 128)


@triton.jit(do_not_specialize=["n"])
def _gates_kernel(
    p_sums, p_low, p_inject, n, slice_stride, row_stride, rank, scale, S: tl.constexpr, SLICES: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_front(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_low = o_col < rank
    is_there = is_low
    if p_inject is not None:
        is_there = o_col < rank + S
    p_row = p_sums + row * row_stride + o_col
    b_sum = tl.load(p_row, mask=is_there, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SLICES):
        b_sum += tl.load(p_row + s * slice_stride, mask=is_there, other=0.0).to(tl.float32)
    b_sum *= scale
    b_gate = tl.sigmoid(b_sum)
    tl.store(p_low + row * rank + o_col, (b_sum * b_gate).to(tl.bfloat16), mask=is_low)
    if p_inject is not None:
        tl.store(p_inject + row * S + o_col - rank, 2.0 * b_gate, mask=is_there & (o_col >= rank))


@triton.jit
def _over_streams(b_x, S: tl.constexpr):
    """[S * R, N] -> [R, N]: the sum over streams, neighbours first, level by level."""
    R: tl.constexpr = b_x.shape[0] // S
    N: tl.constexpr = b_x.shape[1]
    for level in tl.static_range(4):
        if S >> level > 1:
            b_pairs = tl.reshape(b_x, ((S >> (level + 1)), 2, R, N))
            b_even, b_odd = tl.split(tl.permute(b_pairs, (0, 2, 3, 1)))
            b_x = tl.reshape(b_even + b_odd, ((S >> (level + 1)) * R, N))
    return b_x


@triton.jit(do_not_specialize=["n"])
def _read_kernel(
    p_low, p_w, p_normed, p_out, n, width, k, scale, S: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """COLUMNS columns of every stream times BLOCK_N tokens a program: rows of W_up stream after stream."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_blocks = tl.cdiv(n, BLOCK_N)
    first = tl.program_id(0) // n_blocks * COLUMNS
    o_m = tl.arange(0, S * COLUMNS)
    o_row = o_m // COLUMNS * width + first + o_m % COLUMNS
    w = rows_from(p_w, o_row, 0, S * width, k, BLOCK_K, CODES, SCALES, GROUP)
    if PDL:
        if CODES == BF16:  # all the weights of a program, on their way while the kernels in front run
            for i_k in tl.static_range(8):
                prefetch_l2(p_w + o_row.to(tl.int64) * k + tl.minimum(i_k * 64, k - 1))
        tl.extra.cuda.gdc_wait()
    o_n = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b_used = o_n < n
    p_x = p_low + o_n[:, None] * k + tl.arange(0, BLOCK_K)[None, :]
    b_acc = tl.zeros((S * COLUMNS, BLOCK_N), tl.float32)
    scales = load_more_scales(w, 0, 1, BLOCK_K, CODES, SCALES, GROUP)
    b_acc = add_blocks(b_acc, w, scales, p_x, None, n, b_used, 0, k, 1, BLOCK_K, CODES, SCALES, GROUP)
    p_n = p_normed + o_n.to(tl.int64)[None, :] * (S * width) + o_row[:, None]
    b_n = tl.load(p_n, mask=b_used[None, :], other=0.0).to(tl.float32)
    b_sum = _over_streams(tl.sigmoid(b_acc) * b_n, S) * scale
    o_col = first + tl.arange(0, COLUMNS)
    p_to = p_out + o_n.to(tl.int64)[None, :] * width + o_col[:, None]
    tl.store(p_to, b_sum.to(tl.bfloat16), mask=b_used[None, :])


def streams_norm(
    streams: Tensor, block: Tensor | None, inject: Tensor | None, w: Tensor, eps: float, out: Tensor, *,
    rows: Tensor | None = None,
) -> None:
    """streams[t, s] += inject[t, s] (block[0, t] + block[1, t] + ...); out = bfloat16(streams / rms *
    (1 + w)), each stream by its own rms.

    streams: float32 [T, S, H], without a block bfloat16, too, and then they may be `out`; block: float32 or
    bfloat16 [slices, T, H], or [shards, slices, T, H], which are added as `add_norm` adds them, or None;
    inject: float32 [T, S], where there is a block; w: float32 [S * H], zero-centred; out: bfloat16
    [T, S * H]. With rows, int32 [R], out is of those rows, [R, S * H], and streams stay as they are. A row's
    bits depend on this row only.
    Raises KernelError where shapes or types do not fit.
    """
    n, n_streams, width = streams.shape
    n_out = n if rows is None else len(rows)
    expect = partial(check, "streams_norm")
    fits = streams.dtype == torch.float32 or (block is None and streams.dtype == torch.bfloat16)
    expect(fits and w.dtype == torch.float32 and streams.is_contiguous(), "contiguous float32 streams and w")
    expect(w.shape == (n_streams * width,), f"w [{n_streams * width}]")
    expect(out.dtype == torch.bfloat16 and out.is_contiguous(), "contiguous bfloat16 out")
    expect(out.shape == (n_out, n_streams * width), f"out [{n_out}, {n_streams * width}]")
    launch(
        _norm_kernel, (n_out, n_streams), streams, block, inject, w, out, rows, width, n * width, 1.0 / width, eps,
        LANES=LANES, PIECES=pieces(width), **block_sizes("streams_norm", streams, block, inject),
        GATHER=rows is not None, num_warps=norm_warps(n_out, width),
    )


def block_sizes(operator: str, streams: Tensor, block: Tensor | None, inject: Tensor | None) -> dict[str, int]:
    """Constants of a kernel that adds a block to streams, both as `streams_norm` takes them."""
    n, n_streams, width = streams.shape
    if block is None:
        return {"SHARDS": 1, "SLICES": 0}
    check(operator, block.shape[-2:] == (n, width) and block.is_contiguous(), f"a block [slices, {n}, {width}]")
    check(operator, inject is not None and inject.shape == (n, n_streams) and inject.is_contiguous(), "inject [T, S]")
    n_shards, n_slices = (1, *block.shape)[-4:-2]
    return {"SHARDS": n_shards, "SLICES": n_slices}


def spread(row: Tensor, streams: Tensor) -> None:
    """streams[t, s] = row[t]: float32 [T, H] and [T, S, H]."""
    copy_rows(row[:, None].expand_as(streams), streams)


def gates(sums: Tensor, low: Tensor, inject: Tensor | None, n_streams: int) -> None:
    """low = bfloat16(silu(x / S)), inject = 2 sigmoid(x' / S); x | x' is the sum of the slices in order.

    sums: float32 or bfloat16 [slices, T, R + S], or [slices, T, R] without inject; low: bfloat16 [T, R];
    inject: float32 [T, S] or None. Raises KernelError where shapes or types do not fit.
    """
    n_slices, n, n_columns = sums.shape
    rank = low.shape[1]
    fits = n_columns == rank + (0 if inject is None else n_streams) and sums.is_contiguous()
    check("gates", fits and low.shape == (n, rank) and low.is_contiguous(), "sums of R columns, and one a stream")
    check("gates", low.dtype == torch.bfloat16, "bfloat16 low")
    if inject is not None:
        fits = inject.dtype == torch.float32 and inject.shape == (n, n_streams) and inject.is_contiguous()
        check("gates", fits, f"float32 inject [{n}, {n_streams}]")
    launch(
        _gates_kernel, (n, -(-n_columns // _GATES)), sums, low, inject, n, n * n_columns, n_columns, rank,
        1.0 / n_streams, S=n_streams, SLICES=n_slices, BLOCK=_GATES, num_warps=4,
    )


def read(low: Tensor, up: Matrix, normed: Tensor, out: Tensor) -> None:
    """out = bfloat16(mean over s of sigmoid(low W^T)[s] normed[s]): what a block reads.

    low: bfloat16 [T, R]; up: [S * H, R] in rows, in any format, R a multiple of 32; normed: bfloat16
    [T, S * H]; out: bfloat16 [T, H]. S is 2, 4 or 8, H a multiple of 128 / S. The products sum along R in
    order; T changes no bit. Raises KernelError where shapes or types do not fit.
    """
    (n, k), width, segment = low.shape, out.shape[1], up.whole
    n_streams = up.n // width
    expect = partial(check, "read")
    expect(low.dtype == normed.dtype == out.dtype == torch.bfloat16, "bfloat16 low, normed and out")
    expect(all(x.is_contiguous() for x in (low, normed, out)), "contiguous low, normed and out")
    expect(up.k == k and k % 32 == 0 and segment.layout == "rows", f"weights [S * H, {k}] in rows, R % 32 == 0")
    expect(n_streams in (2, 4, 8) and up.n == n_streams * width, "2, 4 or 8 streams")
    expect(normed.shape == (n, up.n) and len(out) == n, f"normed [{n}, {up.n}]")
    is_many = n > 64
    columns = (128 if is_many else 64) // n_streams
    expect(width % columns == 0, f"H a multiple of {columns}")
    tokens = min(max(next_power_of_2(n), 16), 64 if not is_many else _MOST_TOKENS)
    launch(
        _read_kernel, (width // columns * -(-n // tokens),), low, address(segment), normed, out, n, width, k,
        1.0 / n_streams, S=n_streams, COLUMNS=columns, BLOCK_N=tokens, BLOCK_K=k_block(k), **constants(segment.format),
        num_warps=8 if is_many else 4, num_stages=3,
    )
