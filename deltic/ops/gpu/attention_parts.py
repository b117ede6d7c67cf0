"""Pieces of which kernels of attention are made: heads that are normed and rotated, the keys of new tokens,
running sums over tiles of keys, and the records of splits. attention_decode.py says how they fit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from deltic.ops.gpu import kv
from deltic.ops.gpu.fp8 import rounded
from deltic.ops.gpu.kv import PLAIN


@triton.jit
def summed(p_proj, b_offset, b_mask, stride_s, S: tl.constexpr):
    b_x = tl.load(p_proj + b_offset, mask=b_mask, other=0.0)
    for s in tl.static_range(1, S):
        b_x += tl.load(p_proj + s * stride_s + b_offset, mask=b_mask, other=0.0)
    return b_x


@triton.jit
def _other(b_d, HALF: tl.constexpr):
    """The other dim of each pair (i, i + HALF).

    In runs of 4, which is for the width of the loads: HALF % 4 == 0.
    """
    b_other = tl.where(b_d < HALF, b_d + HALF, b_d - HALF)
    return tl.multiple_of(tl.max_contiguous(b_other, [1, 4]), [1, 4])


@triton.jit
def turn(p_norm, p_cos, p_sin, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Factors of x and of the other dim of its pair, [R, D] each: (1 + w) cos and (1 + w') (-+ sin).

    The same in every row: as a whole tile, nothing has to be handed from thread to thread.
    """
    b_d = tl.zeros((R, 1), tl.int32) + tl.arange(0, D)[None, :]
    b_rotary = b_d < 2 * HALF
    b_angle = tl.where(b_d < HALF, b_d, b_d - HALF)
    b_angle = tl.multiple_of(tl.max_contiguous(b_angle, [1, 4]), [1, 4])
    b_cos = tl.load(p_cos + b_angle, mask=b_rotary, other=1.0)
    b_sin = tl.load(p_sin + b_angle, mask=b_rotary, other=0.0)
    b_w = 1.0 + tl.load(p_norm + b_d)
    b_w_other = 1.0 + tl.load(p_norm + _other(b_d, HALF), mask=b_rotary, other=0.0)
    return b_w * b_cos, b_w_other * tl.where(b_d < HALF, -b_sin, b_sin)


@triton.jit
def rotated(
    p_proj, b_head, b_mask, b_turn, b_turn_other, eps, stride_s, D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr
):
    """The heads at the offsets b_head [R, 1] where b_mask, normed and rotated -> bfloat16 [R, D]; 0
    elsewhere."""
    b_d = tl.arange(0, D)[None, :]
    b_x = summed(p_proj, b_head + b_d, b_mask, stride_s, S)
    b_y = summed(p_proj, b_head + _other(b_d, HALF), b_mask & (b_d < 2 * HALF), stride_s, S)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    return ((b_x * b_turn + b_y * b_turn_other) * b_scale).to(tl.bfloat16)


@triton.jit
def attended(b_k, b_v, b_qt, b_max, b_sum, b_o, b_old, scale):
    """Takes one tile of keys into the running maximum, sum and output. b_v [D, PAGE]; b_old [PAGE, 1]: which
    keys are there.
    """
    b_s = tl.where(b_old, tl.dot(b_k, b_qt) * scale, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 0))
    b_p = tl.exp2(b_s - b_new_max[None, :])
    b_keep = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_keep + tl.sum(b_p, 0)
    b_o = tl.dot(b_v, b_p.to(tl.bfloat16), b_o * b_keep[None, :])
    return b_new_max, b_sum, b_o


@triton.jit
def record(p_output, p_weight, i_split, b_max, b_sum, b_o, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """Leaves what a split has come to. b_o [D, GROUP]."""
    o_g, o_d = tl.arange(0, GROUP), tl.arange(0, D)
    tl.store(p_output + i_split * (G * D) + o_g[None, :] * D + o_d[:, None], b_o, mask=(o_g < G)[None, :])
    p_record = p_weight + i_split * (2 * G) + o_g
    tl.store(p_record, b_max, mask=o_g < G)
    tl.store(p_record + G, b_sum, mask=o_g < G)


@triton.jit
def merged(
    p_output, p_weight, first, n, STEP: tl.constexpr, weight_first, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    FAN: tl.constexpr,
):
    """Records first, first + STEP, ... (n of them) as one -> output [GP, D], maximum and sum [GP], in their
    order.

    Other programs wrote them: past the first-level cache, which does not see that.
    """
    o_g = tl.arange(0, GP)
    o_gd = o_g[:, None] * D + tl.arange(0, D)[None, :]
    # Rows past the group take any weight: their output is 0.
    o_w = weight_first * (2 * G) + tl.minimum(o_g, G - 1)
    b_max = tl.full((GP,), float("-inf"), tl.float32)
    for i in tl.static_range(FAN):
        p = p_weight + i * (2 * G) + o_w
        b_max = tl.maximum(b_max, tl.load(p, mask=(o_w >= 0) & (i < n), other=float("-inf"), cache_modifier=".cg"))
    b_sum = tl.zeros((GP,), tl.float32)
    b_o = tl.zeros((GP, D), tl.float32)
    for i in tl.static_range(FAN):
        p = p_weight + i * (2 * G) + o_w
        b_mask = (o_w >= 0) & (i < n)
        b_m = tl.load(p, mask=b_mask, other=float("-inf"), cache_modifier=".cg")
        b_l = tl.load(p + G, mask=b_mask, other=0.0, cache_modifier=".cg")
        p = p_output + (first + i * STEP) * (G * D) + o_gd
        b_part = tl.load(p, mask=(b_mask & (o_g < G))[:, None], other=0.0, cache_modifier=".cg")
        b_scale = tl.exp2(b_m - b_max)
        b_sum += b_scale * b_l
        b_o += b_scale[:, None] * b_part
    return b_o, b_max, b_sum


@triton.jit
def finish(
    b_o, b_sum, b_gate, p_out, p_codes, p_scale, scale_step, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr
):
    """out = o / sum * gate, R >= G rows; with p_codes in e4m3, too, of BLOCK columns a scale."""
    o_g = tl.arange(0, R)
    o_gd = o_g[:, None] * D + tl.arange(0, D)[None, :]
    b_out = (b_o / b_sum[:, None] * b_gate).to(tl.bfloat16)
    tl.store(p_out + o_gd, b_out, mask=(o_g < G)[:, None])
    if p_codes is not None:
        # stored in blocks, not in heads: the compiler gives the sums of q and k the layout of stores of heads
        N: tl.constexpr = R * D // BLOCK
        o_block = tl.arange(0, N)
        b_codes, b_scale = rounded(tl.reshape(b_out, (N, BLOCK)))
        o_code = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(p_codes + o_code, b_codes, mask=(o_block < G * D // BLOCK)[:, None])
        tl.store(p_scale + o_block * scale_step, b_scale, mask=o_block < G * D // BLOCK)


@triton.jit
def new_key(
    p_proj, p_norm, p_cos, p_sin, p_page, position, i_kv, eps, stride_s, NQ: tl.constexpr, NK: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, GATED: tl.constexpr,
    KV: tl.constexpr,
):
    """A new token's k, [ROWS, D], and v, [D], of one key head, rounded as in its page: they are left there.

    k is computed in every row of a tile like that of q, which it meets element by element. p_page: of plain
    pages the head's. bfloat16, or what quantised pages hold, float32.
    """
    o_g, o_d = tl.arange(0, ROWS), tl.arange(0, D)
    o_k = ((2 if GATED else 1) * NQ + i_kv) * D
    b_turn, b_turn_other = turn(p_norm, p_cos + position * HALF, p_sin + position * HALF, ROWS, D, HALF)
    b_k = rotated(
        p_proj, (o_g * 0 + o_k)[:, None], (o_g >= 0)[:, None], b_turn, b_turn_other, eps, stride_s, D, HALF, S
    )
    b_v = summed(p_proj + NK * D, o_k + o_d, o_d < D, stride_s, S).to(tl.bfloat16)
    o_in_page = (position % PAGE) * D + o_d
    if KV == PLAIN:
        tl.store(p_page + o_in_page[None, :] + (o_g * 0)[:, None], b_k, mask=(o_g == 0)[:, None])
        tl.store(p_page + NK * PAGE * D + o_in_page, b_v)
    else:
        b_x = b_k.to(tl.float32)
        b_scale = kv.key_scale(kv.largest(b_x), KV)
        b_codes, p_codes = kv.key_codes(b_x, b_scale, KV), kv.keys_at(p_page, i_kv, KV, NK, D)
        p_codes += o_in_page[None, :] + (o_g * 0)[:, None]
        tl.store(p_codes, b_codes, mask=(o_g == 0)[:, None])
        kv.store_key_scale(p_page, i_kv, position % PAGE + o_g * 0, b_scale, o_g == 0, KV, NK, D)
        b_k = kv.e4m3_values(b_codes) * b_scale[:, None]
        o_v = position % PAGE + tl.arange(0, 1)
        b_v = tl.reshape(kv.store_values(p_page, i_kv, o_v, b_v.to(tl.float32)[None, :], KV, NK, D), (D,))
    return b_k, b_v
