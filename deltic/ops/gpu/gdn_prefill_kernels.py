"""The kernels of gdn_prefill: its docstring has the equations, the order and what is rounded where."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from deltic.ops.gpu.chip import either, wait_for_front
from deltic.ops.gpu.rounding import cut, noisy, rounding_seed

# Of these only scalars are loaded: one compiled kernel will do, wherever they lie in a step's inputs.
_INDICES = ["p_n", "p_position", "p_segment", "p_begin", "p_start_slot", "p_state_slot", "p_snapshot"]
_BOUNDS = ["chunk_begin", "chunk_end"]


@triton.jit
def _key_head(i_head, HK: tl.constexpr, HV: tl.constexpr, TILED: tl.constexpr):
    """The key head that a value head reads."""
    return i_head % HK if TILED else i_head // (HV // HK)


@triton.jit
def _inputs(
    p_block, stride, p_ring, from_ring, first, n, o_channel, in_head, AHEAD: tl.constexpr, C: tl.constexpr
):
    """Raw inputs of tokens 4 g + AHEAD, g = 0 .. 15, at these channels: float32 [16, D]; 0 behind the end and
    before the start.

    The three inputs before the block are the last rows of the block in front, or those of the start state
    slot's ring where a segment begins: a block starts at a multiple of 64, so position -3 .. -1 relative to
    it is in row 1 .. 3.
    """
    o_row = tl.arange(0, 16) * 4 + AHEAD
    p_row = p_block + o_row * stride
    inside = o_row < n
    if AHEAD < 0:
        p_row = either((o_row < 0) & from_ring, p_ring + (o_row + 4) * C, p_row)
        inside = inside & ((o_row >= 0) | (first == 0) | from_ring)
    b_x = tl.load(p_row[:, None] + o_channel[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
    return b_x.to(tl.float32)


@triton.jit
def _silu(b_x):
    """x / (1 + e^-x), to a few units in the last place: two special instructions, where a division would take
    a dozen more.
    """
    b_r = tl.rsqrt(1.0 + tl.exp2(b_x * -1.4426950408889634))
    return b_x * b_r * b_r


@triton.jit
def _convolve(
    p_proj, stride, p_conv, p_columns, slot_stride, p_position, p_segment, p_begin, p_start_slot,
    i_block, n, o_channel, in_head, C: tl.constexpr,
):
    """silu of the convolution at these channels: for t = 0 .. 3 float32 [16, D], tokens 4 g + t.

    Four neighbours at once read seven inputs and not sixteen. Tokens behind the end of the block are finite,
    no more.
    """
    segment = tl.load(p_segment + i_block)
    first = i_block == tl.load(p_begin + segment)
    ring = first & (tl.load(p_position + i_block) > 0)
    p_ring = p_columns + tl.load(p_start_slot + segment).to(tl.int64) * slot_stride
    p_block = p_proj + i_block.to(tl.int64) * 64 * stride
    b_0 = _inputs(p_block, stride, p_ring, ring, first, n, o_channel, in_head, -3, C)
    b_1 = _inputs(p_block, stride, p_ring, ring, first, n, o_channel, in_head, -2, C)
    b_2 = _inputs(p_block, stride, p_ring, ring, first, n, o_channel, in_head, -1, C)
    b_3 = _inputs(p_block, stride, p_ring, ring, first, n, o_channel, in_head, 0, C)
    b_4 = _inputs(p_block, stride, p_ring, ring, first, n, o_channel, in_head, 1, C)
    b_5 = _inputs(p_block, stride, p_ring, ring, first, n, o_channel, in_head, 2, C)
    b_6 = _inputs(p_block, stride, p_ring, ring, first, n, o_channel, in_head, 3, C)
    b_w0 = tl.load(p_conv + o_channel, mask=in_head, other=0.0)[None, :]
    b_w1 = tl.load(p_conv + C + o_channel, mask=in_head, other=0.0)[None, :]
    b_w2 = tl.load(p_conv + 2 * C + o_channel, mask=in_head, other=0.0)[None, :]
    b_w3 = tl.load(p_conv + 3 * C + o_channel, mask=in_head, other=0.0)[None, :]
    return (
        _silu(b_w0 * b_0 + b_w1 * b_1 + b_w2 * b_2 + b_w3 * b_3),
        _silu(b_w0 * b_1 + b_w1 * b_2 + b_w2 * b_3 + b_w3 * b_4),
        _silu(b_w0 * b_2 + b_w1 * b_3 + b_w2 * b_4 + b_w3 * b_5),
        _silu(b_w0 * b_3 + b_w1 * b_4 + b_w2 * b_5 + b_w3 * b_6),
    )


@triton.jit
def _store_unit(p_to, o_k, b_x, scale, T: tl.constexpr, BK: tl.constexpr):
    """b_x [16, BK] of tokens 4 g + T, its rows made unit vectors."""
    b_x *= (tl.rsqrt(tl.sum(b_x * b_x, axis=1) + 1e-6) * scale)[:, None]
    tl.store(p_to + (tl.arange(0, 16) * 4 + T)[:, None] * BK + o_k[None, :], b_x.to(tl.bfloat16))


@triton.jit
def _log1p_exp(x):
    """log(1 + e^x), to float32's precision also where it is small: 2 artanh(y / (2 + y)) as a series,
    y = e^-|x|.
    """
    b_y = tl.exp(-tl.abs(x))
    b_s = b_y / (2.0 + b_y)
    b_2 = b_s * b_s
    b_t = 1.0 / 9 + b_2 * (1.0 / 11 + b_2 * (1.0 / 13 + b_2 * (1.0 / 15)))
    b_t = 1.0 + b_2 * (1.0 / 3 + b_2 * (1.0 / 5 + b_2 * (1.0 / 7 + b_2 * b_t)))
    return tl.maximum(x, 0.0) + 2.0 * b_s * b_t


@triton.jit
def _gates(
    p_gate, stride, n, p_a_log, p_dt_bias, p_decay, p_fade, p_beta, p_reach, HV: tl.constexpr, HEADS: tl.constexpr
):
    """Computes from the gates of a block's tokens what the kernels need, for all value heads.

    Decays are powers of 2: that is the instruction there is.
    """
    o_token = tl.arange(0, 64)[:, None]
    o_head = tl.arange(0, HEADS)[None, :]
    inside = (o_token < n) & (o_head < HV)
    p_gate += o_token * stride + o_head
    b_beta = tl.load(p_gate, mask=inside, other=0.0).to(tl.float32)
    b_a = tl.load(p_gate + HV, mask=inside, other=0.0).to(tl.float32)
    b_rate = tl.exp(tl.load(p_a_log + o_head, mask=o_head < HV, other=0.0)) * -1.4426950408889634
    b_g = b_rate * _log1p_exp(b_a + tl.load(p_dt_bias + o_head, mask=o_head < HV, other=0.0))
    b_g = tl.cumsum(tl.where(inside, b_g, 0.0), axis=0)
    b_last = tl.sum(tl.where(o_token == 63, b_g, 0.0), axis=0)[None, :]
    b_beta = tl.where(inside, tl.sigmoid(b_beta), 0.0)
    o_to = o_head * 64 + o_token
    tl.store(p_decay + o_to, b_g, mask=o_head < HV)
    tl.store(p_fade + o_to, tl.exp2(b_last - b_g), mask=o_head < HV)
    tl.store(p_beta + o_to, b_beta, mask=o_head < HV)
    tl.store(p_reach + o_to, b_beta * tl.exp2(b_g), mask=o_head < HV)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def gdn_keys(
    p_proj, stride, p_conv, p_columns, slot_stride, p_n, p_position, p_segment, p_begin, p_start_slot,
    p_a_log, p_dt_bias, p_qk, p_decay, p_fade, p_beta, p_reach,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TILED: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    i_head = tl.program_id(0)  # q heads, then k heads, then the gates
    i_block = tl.program_id(1)
    wait_for_front(PDL)
    n = tl.load(p_n + i_block)
    if n == 0:
        return
    if i_head == 2 * HK:
        p_gate = p_proj + i_block.to(tl.int64) * 64 * stride + (C + HV * DV)
        o_tile = i_block.to(tl.int64) * (HV * 64)
        _gates(
            p_gate, stride, n, p_a_log, p_dt_bias,
            p_decay + o_tile, p_fade + o_tile, p_beta + o_tile, p_reach + o_tile, HV, HEADS,
        )
        return
    o_k = tl.arange(0, BK)
    b_0, b_1, b_2, b_3 = _convolve(
        p_proj, stride, p_conv, p_columns, slot_stride, p_position, p_segment, p_begin, p_start_slot,
        i_block, n, i_head * DK + o_k, o_k < DK, C,
    )
    scale = tl.where(i_head < HK, SCALE, 1.0)
    p_to = p_qk + (i_block.to(tl.int64) * (2 * HK) + i_head) * (64 * BK)
    _store_unit(p_to, o_k, b_0, scale, 0, BK)
    _store_unit(p_to, o_k, b_1, scale, 1, BK)
    _store_unit(p_to, o_k, b_2, scale, 2, BK)
    _store_unit(p_to, o_k, b_3, scale, 3, BK)


@triton.jit
def _merge(b_x, b_a, o_i, o_j, HALF: tl.constexpr):
    """The inverses of diagonal blocks of size HALF in b_x become those of size 2 HALF.

    [[L, 0], [M, N]]^-1 = [[L^-1, 0], [-N^-1 M L^-1, N^-1]]: with M where it lies in the whole matrix, X - X M
    X.
    """
    b_m = tl.where((o_i // (2 * HALF) == o_j // (2 * HALF)) & (o_i // HALF != o_j // HALF), b_a, 0.0)
    b_16 = b_x.to(tl.float16)
    return b_x - tl.dot(tl.dot(b_16, b_m.to(tl.float16)).to(tl.float16), b_16)


@triton.jit
def _invert(b_a):
    """(I + A)^-1 of a strictly lower triangular A [64, 64], float32: first of its diagonal blocks, of 2, 4, 8
    and 16.

    Those are [4, 16, 16]. Then with X of the four blocks and B what is below them, N = X B is nilpotent of
    order 4 in blocks: (I + A)^-1 = (I + N)^-1 X = (I + N^2) (X - N X). Unlike the product of (I + A^2^i) no
    high power is formed, whose entries would grow like binomial coefficients where keys are alike.

    Operands are float16: entries of A, X, N and the result are products of unit vectors with contractions
    between them, at most 1, so that 11 bits are those of TF32, and rounded where the latter cuts off.
    """
    o_64 = tl.arange(0, 64)
    b_below = tl.where(o_64[:, None] // 16 != o_64[None, :] // 16, b_a, 0.0).to(tl.float16)
    o_c = tl.arange(0, 4)
    on_diagonal = o_c[:, None, None, None] == o_c[None, None, :, None]
    b_d = tl.sum(tl.where(on_diagonal, tl.reshape(b_a, [4, 16, 4, 16]), 0.0), axis=2)
    o_16 = tl.arange(0, 16)
    o_i, o_j = o_16[None, :, None], o_16[None, None, :]
    b_x = tl.where(o_i // 2 == o_j // 2, -b_d, 0.0) + tl.where(o_i == o_j, 1.0, 0.0)
    b_x = _merge(b_x, b_d, o_i, o_j, 2)
    b_x = _merge(b_x, b_d, o_i, o_j, 4)
    b_x = _merge(b_x, b_d, o_i, o_j, 8)
    b_x = tl.where(on_diagonal, tl.broadcast_to(b_x[:, :, None, :], [4, 16, 4, 16]), 0.0)
    b_x = tl.reshape(b_x, [64, 64])
    b_16 = b_x.to(tl.float16)
    b_n = tl.dot(b_16, b_below).to(tl.float16)
    b_n2 = tl.dot(b_n, b_n).to(tl.float16)
    b_x -= tl.dot(b_n, b_16)
    return b_x + tl.dot(b_n2, b_x.to(tl.float16))


@triton.jit(do_not_specialize=_BOUNDS, do_not_specialize_on_alignment=_INDICES)
def gdn_solve(
    chunk_begin, p_proj, stride, p_conv, p_columns, slot_stride,
    p_n, p_position, p_segment, p_begin, p_start_slot, p_qk, p_decay, p_beta, p_reach, p_w, p_u,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TILED: tl.constexpr, PDL: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_block = chunk_begin + tl.program_id(1)
    wait_for_front(PDL)
    n = tl.load(p_n + i_block)
    if n == 0:
        return
    o_token = tl.arange(0, 64)
    o_k = tl.arange(0, BK)
    o_tile = i_block.to(tl.int64) * HV + i_head

    p_key = p_qk + (i_block.to(tl.int64) * (2 * HK) + HK + _key_head(i_head, HK, HV, TILED)) * (64 * BK)
    b_k = tl.load(p_key + o_token[:, None] * BK + o_k[None, :])
    b_g = tl.load(p_decay + o_tile * 64 + o_token)
    b_beta = tl.load(p_beta + o_tile * 64 + o_token)
    b_reach = tl.load(p_reach + o_tile * 64 + o_token)
    lower = o_token[:, None] > o_token[None, :]
    b_d = tl.exp2(tl.where(lower, b_g[:, None] - b_g[None, :], 0.0))  # exp2 of the others would overflow
    b_x = _invert(tl.where(lower, b_beta[:, None] * tl.dot(b_k, tl.trans(b_k)) * b_d, 0.0))

    # beta and e^G of the token that is read go into T's columns: one rounding, and K and V stay as they are
    b_t = tl.trans((b_x * b_beta[None, :]).to(tl.bfloat16))
    b_x16 = (b_x * b_reach[None, :]).to(tl.bfloat16)
    KEYS: tl.constexpr = BK if BK < 64 else 64  # in pieces, for the sake of registers
    VALUES: tl.constexpr = BV if BV < 64 else 64
    for k_begin in tl.range(0, BK, KEYS):
        o_part = o_token[:, None] * BK + k_begin + tl.arange(0, KEYS)[None, :]
        b_w = tl.dot(b_x16, tl.load(p_key + o_part))
        tl.store(p_w + o_tile * (64 * BK) + o_part, b_w.to(tl.bfloat16))
    for v_begin in tl.range(0, BV, VALUES):
        o_v = v_begin + tl.arange(0, VALUES)
        b_0, b_1, b_2, b_3 = _convolve(
            p_proj, stride, p_conv, p_columns, slot_stride, p_position, p_segment, p_begin, p_start_slot,
            i_block, n, 2 * HK * DK + i_head * DV + o_v, o_v < DV, C,
        )
        # the last bit of the token is the second index joined
        b_v = tl.join(
            tl.join(b_0.to(tl.bfloat16), b_2.to(tl.bfloat16)), tl.join(b_1.to(tl.bfloat16), b_3.to(tl.bfloat16))
        )
        b_v = tl.reshape(tl.permute(b_v, (0, 2, 3, 1)), [64, VALUES])
        b_u = tl.dot(tl.trans(b_v), b_t)
        tl.store(p_u + o_tile * (64 * BV) + o_v[:, None] * 64 + o_token[None, :], b_u.to(tl.bfloat16))


@triton.jit(do_not_specialize=[*_BOUNDS, "layer"], do_not_specialize_on_alignment=_INDICES)
def gdn_scan(
    layer, p_n, p_position, p_snapshot, p_begin, p_start_slot, p_state_slot, chunk_begin, chunk_end,
    p_qk, p_w, p_u, p_new, p_decay, p_fade, p_state, p_states, slot_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TILED: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    i_head = tl.program_id(0) // (BV // ROWS)
    i_segment = tl.program_id(1)
    o_v = tl.program_id(0) % (BV // ROWS) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    o_token = tl.arange(0, 64)
    wait_for_front(PDL)
    segment_begin = tl.load(p_begin + i_segment)
    begin = tl.maximum(segment_begin, chunk_begin)
    end = tl.minimum(tl.load(p_begin + i_segment + 1), chunk_end)
    if begin >= end:
        return
    # scalar bases and offsets of 32 bits: 64-bit pointers to every element would not fit into registers
    # beside S
    in_state = (o_v < DV)[:, None] & (o_k < DK)[None, :]
    o_state = o_v[:, None] * DK + o_k[None, :]
    o_wide = o_token[:, None] * BK + o_k[None, :]
    o_u = o_v[:, None] * 64 + o_token[None, :]
    p_states += i_head * (DV * DK)
    # a chunk before this one has left the state where the last one will
    p_from = tl.where(segment_begin == begin, p_start_slot, p_state_slot)
    p_start = p_states + tl.load(p_from + i_segment).to(tl.int64) * slot_stride
    position = tl.load(p_position + begin)
    b_s = tl.load(p_start + o_state, mask=in_state & (position > 0), other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = p_states.dtype.element_ty
    if tl.bfloat16 == DTYPE:
        final = tl.load(p_begin + i_segment + 1) - 1
        last_position = tl.load(p_position + final) + tl.load(p_n + final) - 1
    # Runs of blocks end at snapshots: no test for one inside, whose value the loads in flight would have to
    # wait for.
    o_run = tl.arange(0, 256)
    while begin < end:
        b_snapshot = tl.load(p_snapshot + begin + o_run, mask=begin + o_run < end, other=-1)
        stop = tl.minimum(tl.min(tl.where(b_snapshot >= 0, begin + o_run + 1, begin + 256), axis=0), end)
        # a scalar of the next block is fetched a block ahead: nothing else would hide its way from memory
        last_next = tl.load(p_decay + (begin.to(tl.int64) * HV + i_head) * 64 + 63)
        for i_block in tl.range(begin, stop):
            last = last_next
            i_tile = tl.cast(i_block, tl.int64) * HV + i_head
            i_key = tl.cast(i_block, tl.int64) * (2 * HK) + HK + _key_head(i_head, HK, HV, TILED)
            last_next = tl.load(p_decay + (i_tile + HV) * 64 + 63, mask=i_block + 1 < stop, other=0.0)
            b_w = tl.load(p_w + i_tile * (64 * BK) + o_wide)
            b_u = tl.load(p_u + i_tile * (64 * BV) + o_u)
            b_k = tl.load(p_qk + i_key * (64 * BK) + o_wide)
            b_fade = tl.load(p_fade + i_tile * 64 + o_token)
            b_16 = b_s.to(tl.bfloat16)
            b_s *= tl.exp2(last)
            tl.store(p_state + i_tile * (BV * BK) + o_v[:, None] * BK + o_k[None, :], b_16)
            b_new = b_u.to(tl.float32) - tl.dot(b_16, tl.trans(b_w))
            b_s = tl.dot((b_new * b_fade[None, :]).to(tl.bfloat16), b_k, acc=b_s)
            tl.store(p_new + i_tile * (64 * BV) + o_u, b_new.to(tl.bfloat16))
            if tl.bfloat16 == DTYPE:
                seed = rounding_seed(tl.minimum(position + 63, last_position), layer, i_head)
                b_rounded = cut(noisy(b_s, 0xFFFFFFFF, o_k[None, :], o_v[:, None] * DK, seed))
                b_s = tl.where(b_s - b_s == 0.0, b_rounded, b_s)
                position += 64
        begin = stop
        snapshot = tl.load(p_snapshot + stop - 1)
        if snapshot >= 0:
            tl.store(p_states + snapshot.to(tl.int64) * slot_stride + o_state, b_s.to(DTYPE), mask=in_state)
    p_final = p_states + tl.load(p_state_slot + i_segment).to(tl.int64) * slot_stride
    tl.store(p_final + o_state, b_s.to(DTYPE), mask=in_state)


@triton.jit
def _write_ring(p_block, stride, p_start, has_start, p_ring, n, first, o_channel, in_head, C: tl.constexpr):
    """Leaves the last four inputs up to token n of the block in a ring.

    What is older than the segment comes from p_start's.
    """
    o_ring = tl.arange(0, 4)
    o_row = n - 1 - ((n + 3 - o_ring) & 3)  # the last token before n whose position % 4 is the ring's row
    is_old = (o_row < 0) & first
    o_from = o_row[:, None] * stride + o_channel[None, :]
    o_to = o_ring[:, None] * C + o_channel[None, :]
    mask = in_head[None, :]
    b_new = tl.load(p_block + o_from, mask=mask & (is_old == 0)[:, None], other=0.0)
    b_old = tl.load(p_start + o_to, mask=mask & is_old[:, None] & has_start, other=0.0)
    tl.store(p_ring + o_to, tl.where(is_old[:, None], b_old, b_new), mask=mask)


@triton.jit(do_not_specialize=_BOUNDS, do_not_specialize_on_alignment=_INDICES)
def gdn_output(
    chunk_begin, p_proj, stride, p_columns, slot_stride,
    p_n, p_position, p_segment, p_begin, p_start_slot, p_snapshot, p_state_slot,
    p_qk, p_new, p_decay, p_state, p_norm, eps, p_out, out_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TILED: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_block = chunk_begin + tl.program_id(1)
    o_token = tl.arange(0, 64)
    o_v = tl.arange(0, BV)
    wait_for_front(PDL)
    row = i_block.to(tl.int64) * 64
    in_out = (o_v < DV)[None, :]
    p_to = p_out + (row + o_token[:, None]) * out_stride + i_head * DV + o_v[None, :]
    n = tl.load(p_n + i_block)
    if n == 0:
        tl.store(p_to, tl.zeros([64, BV], dtype=tl.bfloat16), mask=in_out)
        return
    o_tile = i_block.to(tl.int64) * HV + i_head
    p_query = p_qk + (i_block.to(tl.int64) * (2 * HK) + _key_head(i_head, HK, HV, TILED)) * (64 * BK)
    p_key = p_query + HK * (64 * BK)
    inside = (o_token < n)[:, None] & in_out
    p_z = p_proj + (row + o_token[:, None]) * stride + (C + i_head * DV) + o_v[None, :]
    p_value = p_new + o_tile * (64 * BV) + o_v[:, None] * 64 + o_token[None, :]
    # registers for time: both are on their way while the first products are made
    b_new = tl.load(p_value)
    b_z = tl.load(p_z, mask=inside, other=0.0)
    b_p = tl.zeros([64, 64], dtype=tl.float32)
    b_o = tl.zeros([64, BV], dtype=tl.float32)
    KEYS: tl.constexpr = BK if BK < 64 else 64
    for k_begin in tl.range(0, BK, KEYS):
        o_part = k_begin + tl.arange(0, KEYS)
        o_key = o_token[:, None] * BK + o_part[None, :]
        b_q = tl.load(p_query + o_key)
        b_k = tl.load(p_key + o_key)
        b_s = tl.load(p_state + o_tile * (BV * BK) + o_v[:, None] * BK + o_part[None, :])
        b_p = tl.dot(b_q, tl.trans(b_k), acc=b_p)
        b_o = tl.dot(b_q, tl.trans(b_s), acc=b_o)
    b_g = tl.load(p_decay + o_tile * 64 + o_token)
    lower = o_token[:, None] >= o_token[None, :]
    b_d = tl.exp2(tl.where(lower, b_g[:, None] - b_g[None, :], 0.0))
    b_p = tl.where(lower, b_p * b_d, 0.0).to(tl.bfloat16)
    b_o = tl.dot(b_p, tl.trans(b_new), acc=b_o * tl.exp2(b_g)[:, None])

    b_z = b_z.to(tl.float32)
    b_norm = tl.load(p_norm + o_v, mask=o_v < DV, other=0.0)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=1) / DV + eps)[:, None]
    b_o = b_norm[None, :] * b_o * (tl.sigmoid(b_z) if SIGMOID else _silu(b_z))
    tl.store(p_to, tl.where(inside, b_o, 0.0).to(tl.bfloat16), mask=in_out)

    # the first kernels of this layer have read the start state slots: their columns may be replaced now
    segment = tl.load(p_segment + i_block)
    first = i_block == tl.load(p_begin + segment)
    last = i_block + 1 == tl.load(p_begin + segment + 1)
    snapshot = tl.load(p_snapshot + i_block)
    p_block = p_proj + row * stride
    has_start = tl.load(p_position + i_block) > 0  # only asked of a segment's first block
    p_start = p_columns + tl.load(p_start_slot + segment).to(tl.int64) * slot_stride
    for i_target in tl.static_range(2):
        target = snapshot
        if i_target == 1:
            target = tl.where(last, tl.load(p_state_slot + segment), -1)
        if target >= 0:
            p_ring = p_columns + target.to(tl.int64) * slot_stride
            o_channel = 2 * HK * DK + i_head * DV + o_v
            _write_ring(p_block, stride, p_start, has_start, p_ring, n, first, o_channel, o_v < DV, C)
            if i_head < HK if TILED else i_head % (HV // HK) == 0:
                o_k = tl.arange(0, BK)
                o_q = _key_head(i_head, HK, HV, TILED) * DK + o_k
                _write_ring(p_block, stride, p_start, has_start, p_ring, n, first, o_q, o_k < DK, C)
                _write_ring(p_block, stride, p_start, has_start, p_ring, n, first, HK * DK + o_q, o_k < DK, C)
