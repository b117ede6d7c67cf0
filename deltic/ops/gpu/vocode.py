"""Operators of the vocoder beside convolutions: codes to vectors, norms, attention over a window, the
depthwise norm, the last samples.

All read float32 or pairs (ops/gpu/conv.py) and compute in float32. Each row is one program or one row of a
tile whose sums have one fixed layout, so no bit depends on the chunk or on the streams beside. The
mathematics is that of reference/vocoder.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.gpu.chip import either
from deltic.ops.gpu.conv import Ring, Streams, history_row, ring_row, store_pair
from deltic.ops.gpu.launch import launch, next_power_of_2

MAX_WIDTH = 1024
"""Columns of the widest row that one program norms."""
WAVE_BLOCK = 32


@triton.jit
def _wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _stream_of(i_row, t, p_state_slot, p_head, head_stride, index):
    """Row in the stream, state slot, where its head lies, frames so far, oldest row of its ring."""
    state_slot = tl.load(p_state_slot + i_row // t)
    p_word = p_head + tl.maximum(state_slot, 0).to(tl.int64) * head_stride
    frames = tl.where(state_slot >= 0, tl.load(p_word), 0)
    return i_row % t, state_slot, p_word, frames, tl.load(p_word + index)


@triton.jit(do_not_specialize=["t", "index", "rows"])
def _codes_kernel(
    p_codes, p_table, n_codes, p_pair, plane, p_state_slot, p_head, head_stride, p_to, to_stride, to_plane, t, index,
    rows, C: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    _wait(PDL)
    i_row = tl.program_id(0)
    row, state_slot, _, _, oldest = _stream_of(i_row, t, p_state_slot, p_head, head_stride, index)
    o_c = tl.arange(0, WIDTH)
    b_x = tl.zeros((WIDTH,), tl.float32)
    for g in tl.static_range(GROUPS):
        code = tl.minimum(tl.maximum(tl.load(p_codes + i_row * GROUPS + g), 0), n_codes - 1)
        b_x += tl.load(p_table + (g * n_codes + code).to(tl.int64) * C + o_c, mask=o_c < C, other=0.0)
    store_pair(p_pair + i_row.to(tl.int64) * C + o_c, plane, b_x, o_c < C)
    kept = ring_row(row, t, oldest, rows)
    p_kept = p_to + tl.maximum(state_slot, 0).to(tl.int64) * to_stride + kept * C + o_c
    store_pair(p_kept, to_plane, b_x, (o_c < C) & (kept >= 0) & (state_slot >= 0))


@triton.jit
def _norm_kernel(p_x, p_pair, plane, eps, inverse_width, C: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    _wait(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, WIDTH)
    b_x = tl.load(p_x + i_row * C + o_c, mask=o_c < C, other=0.0)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) * inverse_width + eps)
    store_pair(p_pair + i_row * C + o_c, plane, b_y, o_c < C)


@triton.jit(do_not_specialize=["t", "index"])
def _window_kernel(
    p_qkv, p_cos, p_sin, p_pair, plane, p_state_slot, p_head, head_stride, p_from, from_stride, t, index, scale,
    HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):
    """Attends with one head of one row. Key j is the one j rows before it."""
    _wait(PDL)
    A: tl.constexpr = HEADS * D
    HALF: tl.constexpr = D // 2
    H: tl.constexpr = WINDOW - 1
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    row, state_slot, _, frames, oldest = _stream_of(i_row, t, p_state_slot, p_head, head_stride, index)
    o_j, o_h, o_d = tl.arange(0, KEYS), tl.arange(0, HALF), tl.arange(0, D)
    p_q = p_qkv + i_row.to(tl.int64) * (3 * A) + i_head * D
    b_q, b_q2 = tl.load(p_q + o_h)[None, :], tl.load(p_q + HALF + o_h)[None, :]
    # only the distance of two rows counts: the query is turned by it, and the keys are kept as they are
    o_turn = o_j[:, None] * HALF + o_h[None, :]
    in_window = o_j < WINDOW
    b_cos = tl.load(p_cos + o_turn, mask=in_window[:, None], other=0.0)
    b_sin = tl.load(p_sin + o_turn, mask=in_window[:, None], other=0.0)
    src = row - o_j
    here = in_window & (src + frames >= 0)
    p_old = p_from + tl.maximum(state_slot, 0).to(tl.int64) * from_stride + history_row(src, oldest, H) * (2 * A)
    p_k = either(src >= 0, p_q + A - o_j * (3 * A), p_old + i_head * D)[:, None]
    b_k = tl.load(p_k + o_h[None, :], mask=here[:, None], other=0.0)
    b_k2 = tl.load(p_k + HALF + o_h[None, :], mask=here[:, None], other=0.0)
    b_s = tl.sum((b_q * b_cos - b_q2 * b_sin) * b_k + (b_q2 * b_cos + b_q * b_sin) * b_k2, 1) * scale
    b_s = tl.where(here, b_s, float("-inf"))
    b_p = tl.exp(b_s - tl.max(b_s, 0))
    b_v = tl.load(p_k + A + o_d[None, :], mask=here[:, None], other=0.0)
    b_o = tl.sum(b_p[:, None] * b_v, 0) / tl.sum(b_p, 0)
    store_pair(p_pair + i_row.to(tl.int64) * A + i_head * D + o_d, plane, b_o, o_d < D)


@triton.jit(do_not_specialize=["t", "n_frames", "index"])
def _depthwise_kernel(
    p_x, p_w, p_bias, p_pair, plane, p_state_slot, p_head, head_stride, p_from, from_stride, t, n_frames, index, eps,
    inverse_width, C: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, PDL: tl.constexpr,
):
    _wait(PDL)
    H: tl.constexpr = TAPS - 1
    i_row = tl.program_id(0)
    row, state_slot, _, frames, oldest = _stream_of(i_row, t, p_state_slot, p_head, head_stride, index)
    before = frames * (t // n_frames)
    o_c = tl.arange(0, WIDTH)
    mask = o_c < C
    p_row = p_x + i_row.to(tl.int64) * C
    p_old = p_from + tl.maximum(state_slot, 0).to(tl.int64) * from_stride
    b_y = tl.load(p_bias + o_c, mask=mask, other=0.0)
    for j in tl.static_range(TAPS):
        src = row - (H - j)
        p = either(src >= 0, p_row - (H - j) * C, p_old + history_row(src, oldest, H) * C)
        b_x = tl.load(p + o_c, mask=mask & (src + before >= 0), other=0.0)
        b_y = tl.fma(tl.load(p_w + j * C + o_c, mask=mask, other=0.0), b_x, b_y)
    b_y -= tl.sum(b_y, 0) * inverse_width
    b_y = tl.where(mask, b_y, 0.0)
    b_y *= tl.rsqrt(tl.sum(b_y * b_y, 0) * inverse_width + eps)
    store_pair(p_pair + i_row.to(tl.int64) * C + o_c, plane, b_y, mask)


@triton.jit(do_not_specialize=["t", "n", "n_frames", "index"])
def _wave_kernel(
    p_x, plane, p_w, p_bias, p_out, p_state_slot, p_head, head_stride, p_from, from_stride, from_plane, n, t, n_frames,
    index, C: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    _wait(PDL)
    H: tl.constexpr = TAPS - 1
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = o_n < n
    state_slot = tl.load(p_state_slot + o_n // t, mask=used, other=-1)
    p_word = p_head + tl.maximum(state_slot, 0).to(tl.int64) * head_stride
    before = tl.load(p_word, mask=state_slot >= 0, other=0) * (t // n_frames)
    oldest = tl.load(p_word + index, mask=state_slot >= 0, other=0)
    p_old = p_from + tl.maximum(state_slot, 0).to(tl.int64) * from_stride
    o_c = tl.arange(0, WIDTH)
    b_sum = tl.zeros((BLOCK, WIDTH), tl.float32)
    for j in tl.static_range(TAPS):
        src = o_n % t - (H - j)
        inside = src >= 0
        p_row = p_x + (o_n.to(tl.int64) - (H - j)) * C
        p = either(inside, p_row, p_old + history_row(src, oldest, H) * C)[:, None] + o_c[None, :]
        mask = (used & (inside | (src + before >= 0)))[:, None] & (o_c < C)[None, :]
        b_x = tl.load(p, mask=mask, other=0.0).to(tl.float32)
        b_x += tl.load(p + tl.where(inside, plane, from_plane)[:, None], mask=mask, other=0.0).to(tl.float32)
        b_w = tl.load(p_w + j * C + o_c, mask=o_c < C, other=0.0)[None, :]
        b_sum = tl.fma(b_x, tl.broadcast_to(b_w, (BLOCK, WIDTH)), b_sum)
    b_y = tl.sum(b_sum, 1) + tl.load(p_bias)
    tl.store(p_out + o_n, tl.minimum(tl.maximum(b_y, -1.0), 1.0), mask=used)


@triton.jit(do_not_specialize=["n_frames"])
def _advance_kernel(
    p_state_slot, p_head, head_stride, p_rows, p_rate, n_rings, n_frames, RINGS: tl.constexpr, PDL: tl.constexpr
):
    _wait(PDL)
    state_slot = tl.load(p_state_slot + tl.program_id(0))
    o = tl.arange(0, RINGS)
    mask = (o < n_rings) & (state_slot >= 0)
    p_word = p_head + tl.maximum(state_slot, 0).to(tl.int64) * head_stride
    rows = tl.load(p_rows + o, mask=mask, other=1)
    new = tl.minimum(tl.load(p_rate + o, mask=mask, other=0) * n_frames, rows)
    tl.store(p_word + 1 + o, (tl.load(p_word + 1 + o, mask=mask, other=0) + new) % (2 * rows), mask=mask)
    frames = tl.load(p_word)
    tl.store(p_word, frames + n_frames, mask=state_slot >= 0)


def _rows(streams: Streams, n: int) -> int:
    check("vocode", n % (streams.n * streams.n_frames) == 0, "whole rows of each frame and stream")
    return n // streams.n


def codes_embed(codes: Tensor, table: Tensor, out: Tensor, streams: Streams, ring: Ring) -> None:
    """out[n] = table[0, codes[n, 0]] + table[1, codes[n, 1]] + ...: codes int32 [N, G], clamped; table
    float32 [G, V, C]; out pairs [2, N, C].
    """
    groups, n_codes, c = table.shape
    check(
        "vocode", codes.shape == (out.shape[1], groups) and out.shape[2] == c, f"codes [N, {groups}], pairs [2, N, {c}]"
    )
    launch(
        _codes_kernel, (codes.shape[0],), codes, table, n_codes, out, out.stride(0), streams.state_slot, streams.head,
        streams.head.stride(0), ring.data, ring.data.stride(0), ring.data.stride(1), _rows(streams, codes.shape[0]),
        ring.index, ring.rows, C=c, WIDTH=next_power_of_2(c), GROUPS=groups, num_warps=4,
    )


def rms_pair(x: Tensor, eps: float, out: Tensor) -> None:
    """out = pair(x / rms(x)): x float32 [N, C], out pairs [2, N, C].

    The norm's weight is in the linear behind it.
    """
    n, c = x.shape
    check("vocode", c <= MAX_WIDTH and out.shape == (2, n, c), f"pairs [2, {n}, {c}], at most {MAX_WIDTH} wide")
    launch(
        _norm_kernel, (n,), x, out, out.stride(0), eps, 1.0 / c, C=c, WIDTH=next_power_of_2(c), num_warps=4
    )


def window_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, out: Tensor, streams: Streams, ring: Ring, n_heads: int
) -> None:
    """out = pair(softmax(q k^T / sqrt(d)) v) over each row and the ring's rows before it, rotated by their
    distance.

    qkv: float32 [N, 3 A], q | k | v; cos, sin: float32 [window, d / 2], of distances; ring: float32, k | v of
    the last window - 1 rows; out: pairs [2, N, A]. The rotation is that of absolute positions: only
    differences count.
    """
    n, d, window = qkv.shape[0], qkv.shape[1] // 3 // n_heads, cos.shape[0]
    check("vocode", cos.shape == (window, d // 2) and ring.rows == window - 1, "a table and a ring of one window")
    check("vocode", d == next_power_of_2(d), f"a head of 16, 32, 64 ..., found {d}")
    launch(
        _window_kernel, (n, n_heads), qkv, cos, sin, out, out.stride(0), streams.state_slot, streams.head,
        streams.head.stride(0), ring.data, ring.data.stride(0), _rows(streams, n), ring.index, d**-0.5, HEADS=n_heads,
        D=d, WINDOW=window, KEYS=next_power_of_2(window), num_warps=4,
    )


def depthwise_norm(
    x: Tensor, w: Tensor, bias: Tensor, eps: float, out: Tensor, streams: Streams, ring: Ring
) -> None:
    """out = pair(LayerNorm(depthwise convolution of x)), without the norm's weight and bias.

    x: float32 [N, C]; w: float32 [taps, C]; bias: float32 [C]; ring: float32, the last taps - 1 rows of x;
    out: pairs [2, N, C].
    """
    n, c = x.shape
    check("vocode", c <= MAX_WIDTH and out.shape == (2, n, c), f"pairs [2, {n}, {c}], at most {MAX_WIDTH} wide")
    check("vocode", w.shape[1] == c and ring.rows == w.shape[0] - 1, f"w [taps, {c}] and a ring of taps - 1")
    launch(
        _depthwise_kernel, (n,), x, w, bias, out, out.stride(0), streams.state_slot, streams.head,
        streams.head.stride(0), ring.data, ring.data.stride(0), _rows(streams, n), streams.n_frames, ring.index, eps,
        1.0 / c, C=c, WIDTH=next_power_of_2(c), TAPS=w.shape[0], num_warps=4,
    )


def wave(x: Tensor, w: Tensor, bias: Tensor, out: Tensor, streams: Streams, ring: Ring) -> None:
    """out = clamp(conv(x) + bias, -1, 1), one channel: x pairs [2, N, C]; w float32 [taps, C]; bias float32
    [1]; out float32 [N].
    """
    _, n, c = x.shape
    check("vocode", out.shape == (n,) and w.shape[1] == c and ring.rows == w.shape[0] - 1, f"out [{n}], w [taps, {c}]")
    launch(
        _wave_kernel, (-(-n // WAVE_BLOCK),), x, x.stride(0), w, bias, out, streams.state_slot, streams.head,
        streams.head.stride(0), ring.data, ring.data.stride(0), ring.data.stride(1), n, _rows(streams, n),
        streams.n_frames, ring.index, C=c, WIDTH=next_power_of_2(c), TAPS=w.shape[0], BLOCK=WAVE_BLOCK, num_warps=4,
    )


def advance(streams: Streams, rows: Tensor, rate: Tensor) -> None:
    """Moves the heads behind a chunk: rows, rate: int32 [rings], of each ring."""
    n_rings = rows.shape[0]
    launch(
        _advance_kernel, (streams.n,), streams.state_slot, streams.head, streams.head.stride(0), rows, rate, n_rings,
        streams.n_frames, RINGS=next_power_of_2(n_rings), num_warps=1,
    )
