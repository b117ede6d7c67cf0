"""gdn_decode: the gated DeltaNet mixer of a decode step, between its two projections.

    u_t = SiLU(conv4(bf16(q|k|v)))            q, k l2-normalised per head, q scaled by dk^-1/2
    beta = sigmoid(b), alpha = exp(-exp(A_log) softplus(a + dt_bias))
    e_t = beta (v_t - alpha S^T k_t);  S = alpha S + k_t e_t^T;  o_t = S^T q_t
    out = bf16(w * rms(o) * SiLU(z))          or sigmoid(z), as the heads say

Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), eq. 10, with the prediction read from the
decayed state.

A program owns one head of one row, with the state in registers: it is read and written once, in place. What
the kernel in front does not write (state, ring of the convolution, weights) is fetched before the wait of
programmatic dependent launch.

**Drafts.** A sequence may have several rows: its last token, and tokens that may follow. Then a program owns
one head of all of them, and steps through them one by one. It leaves the state as it was before them, and
their raw inputs in the sequence's window, since they may be wrong. Those that were right are redone from
there by the sequence's next step, in front of its own rows; then the state is stored. It is read and written
at most once a step, whatever was right. One loop runs every token, redone or new: one piece of compiled code,
so that a token's bits do not tell how it came.

**A state in bfloat16** is rounded behind every token (ops/gpu/rounding.py), redone, drafted or stored: what
a token reads does not tell how many were before it in the same program.

Two rearrangements shorten the way from the projections to the output; both are exact in real numbers:
the norms of q and k are scalars applied after the products with the state, and
o = S^T q = alpha S_old^T q + (k.q) e, so that both products read the old state and run side by side.

Purity: a program sees one sequence. Tile, layout and number of warps, and with them the order of every sum,
follow from the widths of a head only. Nor may the number of rows change what the compiler makes of the
kernel, for the layout of a load is that of the sums behind it: the number is not specialised, and pointers
must be aligned.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import MAX_GDN_DIM, GdnHeads, GdnWeights
from deltic.ops.gpu.blocks import Drafts, Rows, StateSlots, Windows, window_rows
from deltic.ops.gpu.decode import codes_at
from deltic.ops.gpu.fp8 import Operand, round_made, rounded_block, stored_by
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.gpu.rounding import cut, noisy, rounding_seed

EARLY_ROWS = 16
"""Rows up to which it starts before the kernel in front has ended, and lets the next one do so.

With more, its programs would keep the registers that a product wants.
"""


class _Layout(NamedTuple):
    """Layout of a head in the threads of its program. Each field touches the order of sums.

    part: key columns that lie side by side in a warp; the dk / part parts of a row lie in the same thread.
    More parts: fewer shuffles, more registers for q and k. rows: value rows that are in registers at a time.
    """

    part: int
    rows: int
    num_warps: int


def _layout(heads: GdnHeads, dtype: torch.dtype) -> _Layout:
    """Frozen. 64 floats of the state a thread for 128 x 128; in bfloat16, whose loads are half as wide, twice
    as many: two programs fit a multiprocessor of Hopper.
    """
    dk, dv = next_power_of_2(heads.k_dim), next_power_of_2(heads.v_dim)
    rows, of_warp = min(dv, 128 * 128 // dk), 4096 if dtype == torch.bfloat16 else 2048
    return _Layout(part=min(32, dk), rows=rows, num_warps=max(1, min(8, dk * rows // of_warp)))


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _once(x):
    """x [A] or [A, B], computed by one thread an element.

    Without a sum (of one term), the compiler would compute x again in every thread that reads it, from memory
    on, rather than pass it through shared memory.
    """
    if len(x.shape) == 1:
        return tl.sum(x[None, :], 0)
    else:
        return tl.sum(x[:, None, :], 1)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to a few ulp also where it is small.

    A logarithm near 1 alone would be right to 1e-7 only.
    """
    small = tl.exp(tl.minimum(x, 20.0))
    series = small * (1.0 - small * (0.5 - small * (0.33333334 - small * 0.25)))
    return tl.where(x > 20.0, x, tl.where(small < 0.03, series, tl.log(1.0 + small)))


@triton.jit
def _window(p_columns, p_conv, o_channel, mask, position, N_CHANNELS: tl.constexpr):
    """The part of the convolution that reads the ring: its taps for positions p-3, p-2, p-1; zeros before
    position 0.
    """
    total = tl.zeros(o_channel.shape, tl.float32)
    for i_tap in tl.static_range(3):
        row = (position + (i_tap + 1)) % 4  # = (position - (3 - tap)) mod 4
        seen = mask & (position >= 3 - i_tap)
        b_x = tl.load(p_columns + row * N_CHANNELS + o_channel, mask=seen, other=0.0).to(tl.float32)
        b_w = tl.load(p_conv + i_tap * N_CHANNELS + o_channel, mask=mask, other=0.0)
        total = tl.fma(b_x, b_w, total)
    return total


@triton.jit
def _projection(p_proj, o_column, mask, partial_stride, SPLITS: tl.constexpr):
    """Columns of the row's projection: its partial sums, added in the order of the split."""
    total = tl.load(p_proj + o_column, mask=mask, other=0.0)
    for i_split in tl.static_range(1, SPLITS):
        total += tl.load(p_proj + i_split * partial_stride + o_column, mask=mask, other=0.0)
    return total


@triton.jit
def _row_sums(b_x, DTYPE: tl.constexpr):
    """Sums [ROWS, PARTS, PART] to rows, in the layout of a state of this type. In bfloat16 what lies in a
    thread is added first, which takes fewer shuffles. The order of float32 is frozen.
    """
    if tl.bfloat16 == DTYPE:
        return tl.sum(tl.sum(b_x, 2), 1)
    else:
        return tl.sum(tl.sum(b_x, 1), 1)


@triton.jit
def _keys(b_q, b_k, b_state, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """q and k of a token behind their convolution: as wide as the state, and the scalars of their norms.

    As wide, so that these sums too are taken in the state's layout: within a warp, no exchange between warps.
    """
    b_q3 = tl.broadcast_to(b_q[None, :, :], b_state.shape)
    b_k3 = tl.broadcast_to(b_k[None, :, :], b_state.shape)
    q_norm = tl.rsqrt(_row_sums(b_q3 * b_q3, DTYPE) + 1e-6) * SCALE  # [ROWS], all the same
    k_norm = tl.rsqrt(_row_sums(b_k3 * b_k3, DTYPE) + 1e-6)
    kq = _row_sums(b_k3 * b_q3, DTYPE)
    return b_q3, b_k3, q_norm, k_norm, kq


@triton.jit
def _advance(b_state, b_q3, b_k3, q_norm, k_norm, kq, b_v, alpha, beta, DTYPE: tl.constexpr):
    """A token's update of a tile of value rows: the state behind it, and S^T q, [ROWS]."""
    b_sk = _row_sums(b_state * b_k3, DTYPE)  # [ROWS]
    b_sq = _row_sums(b_state * b_q3, DTYPE)
    b_error = beta * k_norm * (b_v - alpha * k_norm * b_sk)
    b_state = tl.fma(b_k3, b_error[:, None, None], alpha * b_state)
    return b_state, q_norm * tl.fma(b_error, kq, alpha * b_sq)


@triton.jit
def _noisy(b_state, b_out, o_key, o_value, position, layer, i_head, DK: tl.constexpr):
    """Calls `noisy` on a tile of value rows behind the token of this position. b_out: S^T q of that token,
    finite only where a row is.
    """
    b_exponent = b_out.to(tl.int32, bitcast=True) & 0x7F800000
    # a select would be one for each element
    b_mask = ((b_exponent - 0x7F800000) >> 31).to(tl.uint32)[:, None, None]
    seed = rounding_seed(position, layer, i_head)
    return noisy(b_state, b_mask, o_key[None, :, :], (o_value * DK)[:, None, None], seed)


@triton.jit
def _gated(b_out, b_z, b_norm, eps, DV: tl.constexpr, SIGMOID: tl.constexpr):
    """The norm and the gate; rows of padding are 0: their v is."""
    b_out *= tl.rsqrt(tl.sum(b_out * b_out, 0) / DV + eps)
    return (b_norm * b_out * (tl.sigmoid(b_z) if SIGMOID else _silu(b_z))).to(tl.bfloat16)


@triton.jit
def _store_head(
    p_out, p_codes, p_scale, b_out, row, n_rows, i_head, o_value, mask, used, N_V: tl.constexpr, DV: tl.constexpr
):
    """Stores the head of a row that is used; with p_codes in e4m3, too, as one block."""
    o_head = row * (N_V * DV) + i_head * DV + o_value
    tl.store(p_out + o_head, b_out, mask=mask & used)
    if p_codes is not None:  # noqa: SIM102 (a constant, then a value)
        # a branch, even where all rows are used: the assembler mixes nothing in front of it with what is
        # behind, which takes 128 registers instead of 139
        if used:
            b_codes, scale = rounded_block(b_out)
            tl.store(codes_at(p_codes) + o_head, b_codes, mask=mask)
            tl.store(p_scale + i_head * n_rows + row, scale)


@triton.jit(do_not_specialize=["n_rows", "layer"])
def _gdn_decode_kernel(
    p_proj, n_rows, layer, p_row_slot, p_row_position, p_columns, column_stride, p_states, state_stride,
    p_conv, p_a_log, p_dt_bias, p_norm, p_out, p_codes, p_scale, eps,
    SPLITS: tl.constexpr, N_K: tl.constexpr, N_V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TILED: tl.constexpr, SIGMOID: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_row = tl.program_id(1)
    N_CHANNELS: tl.constexpr = 2 * N_K * DK + N_V * DV
    N_COLUMNS: tl.constexpr = N_CHANNELS + N_V * DV + 2 * N_V
    GROUP: tl.constexpr = N_V // N_K
    DTYPE: tl.constexpr = p_states.dtype.element_ty

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    state_slot = tl.load(p_row_slot + i_row)
    position = tl.load(p_row_position + i_row)
    if state_slot < 0:
        if PDL:  # who ends without waiting would let the next kernel run before the one in front has ended
            tl.extra.cuda.gdc_wait()
        return
    old = position > 0

    # three dimensions, so that a row's parts lie in the registers of one thread and PART columns side by side
    # in PART / 4 lanes
    o_key = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]  # [PARTS, PART]
    m_key = o_key < DK
    o_value = tl.arange(0, ROWS)  # [ROWS]
    m_value = o_value < DV
    p_state = p_states + state_slot.to(tl.int64) * state_stride + i_head * (DV * DK)
    o_state = o_value[:, None, None] * DK + o_key[None, :, :]  # [ROWS, PARTS, PART]
    m_state = m_value[:, None, None] & m_key[None, :, :]
    b_state = tl.load(p_state + o_state, mask=m_state & old, other=0.0).to(tl.float32)

    p_ring = p_columns + state_slot.to(tl.int64) * column_stride
    o_q = (i_head % N_K if TILED else i_head // GROUP) * DK + o_key
    o_k = N_K * DK + o_q
    o_v = 2 * N_K * DK + i_head * DV + o_value
    b_q = _window(p_ring, p_conv, o_q, m_key, position, N_CHANNELS)
    b_k = _window(p_ring, p_conv, o_k, m_key, position, N_CHANNELS)
    b_v = _window(p_ring, p_conv, o_v, m_value, position, N_CHANNELS)
    b_wq = tl.load(p_conv + 3 * N_CHANNELS + o_q, mask=m_key, other=0.0)
    b_wk = tl.load(p_conv + 3 * N_CHANNELS + o_k, mask=m_key, other=0.0)
    b_wv = tl.load(p_conv + 3 * N_CHANNELS + o_v, mask=m_value, other=0.0)
    rate = -tl.exp(tl.load(p_a_log + i_head))
    dt_bias = tl.load(p_dt_bias + i_head)
    o_out = tl.arange(0, TILES * ROWS)
    m_out = o_out < DV
    b_norm = tl.load(p_norm + o_out, mask=m_out, other=0.0)

    if PDL:
        tl.extra.cuda.gdc_wait()

    p_row = p_proj + i_row.to(tl.int64) * N_COLUMNS
    partial_stride = n_rows.to(tl.int64) * N_COLUMNS
    b = _projection(p_row, N_CHANNELS + N_V * DV + i_head, True, partial_stride, SPLITS)
    a = _projection(p_row, N_CHANNELS + N_V * DV + N_V + i_head, True, partial_stride, SPLITS)
    b_xq = _projection(p_row, o_q, m_key, partial_stride, SPLITS).to(tl.bfloat16)
    b_xk = _projection(p_row, o_k, m_key, partial_stride, SPLITS).to(tl.bfloat16)
    b_xv = _projection(p_row, o_v, m_value, partial_stride, SPLITS).to(tl.bfloat16)
    b_z = _projection(p_row, N_CHANNELS + i_head * DV + o_out, m_out, partial_stride, SPLITS)

    # the first value head of a key head keeps the inputs of q and k; nobody reads this row of the ring in
    # this step
    p_now = p_ring + (position % 4) * N_CHANNELS
    first = i_head < N_K if TILED else i_head % GROUP == 0
    tl.store(p_now + o_q, b_xq, mask=m_key & first)
    tl.store(p_now + o_k, b_xk, mask=m_key & first)
    tl.store(p_now + o_v, b_xv, mask=m_value)

    b_q = _once(_silu(tl.fma(b_xq.to(tl.float32), b_wq, b_q)))
    b_k = _once(_silu(tl.fma(b_xk.to(tl.float32), b_wk, b_k)))
    b_v = _once(_silu(tl.fma(b_xv.to(tl.float32), b_wv, b_v)))
    beta = tl.sigmoid(b)
    alpha = tl.exp(rate * _softplus(a + dt_bias))
    b_q3, b_k3, q_norm, k_norm, kq = _keys(b_q, b_k, b_state, SCALE, DTYPE)
    b_outs = tl.zeros([TILES, ROWS], tl.float32)
    for i_tile in tl.static_range(TILES):
        if i_tile > 0:
            m_value = i_tile * ROWS + o_value < DV
            m_state = m_value[:, None, None] & m_key[None, :, :]
            p_state += ROWS * DK
            o_v += ROWS
            b_state = tl.load(p_state + o_state, mask=m_state & old, other=0.0).to(tl.float32)
            b_v = _window(p_ring, p_conv, o_v, m_value, position, N_CHANNELS)
            b_xv = _projection(p_row, o_v, m_value, partial_stride, SPLITS).to(tl.bfloat16)
            b_wv = tl.load(p_conv + 3 * N_CHANNELS + o_v, mask=m_value, other=0.0)
            tl.store(p_now + o_v, b_xv, mask=m_value)
            b_v = _once(_silu(tl.fma(b_xv.to(tl.float32), b_wv, b_v)))
        b_state, b_out = _advance(b_state, b_q3, b_k3, q_norm, k_norm, kq, b_v, alpha, beta, DTYPE)
        if tl.bfloat16 == DTYPE:
            b_bits = _noisy(b_state, b_out, o_key, i_tile * ROWS + o_value, position, layer, i_head, DK)
            b_state = (b_bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(p_state + o_state, b_state, mask=m_state)
        if TILES == 1:
            b_outs = b_out
        else:
            b_outs = tl.where(tl.arange(0, TILES)[:, None] == i_tile, b_out[None, :], b_outs)

    b_out = _gated(tl.reshape(b_outs, [TILES * ROWS]), b_z, b_norm, eps, DV, SIGMOID)
    _store_head(p_out, p_codes, p_scale, b_out, i_row.to(tl.int64), n_rows, i_head, o_out, m_out, n_rows > 0, N_V, DV)


@triton.jit
def _before(p_ring, p_window, n_redo, first, o_channel, mask, N_CHANNELS: tl.constexpr, WINDOW: tl.constexpr):
    """The inputs of positions first-3, first-2, first-1: from the ring, or from the window where that has
    tokens to be redone; zeros before position 0.
    """
    inputs: tl.tuple = ()
    for i in tl.static_range(3):
        at = first - 3 + i
        seen = mask & (at >= 0)
        p_at = p_window + (at + WINDOW) % WINDOW * N_CHANNELS + o_channel
        b_ring = tl.load(p_ring + (at + 4) % 4 * N_CHANNELS + o_channel, mask=seen & (n_redo == 0), other=0.0)
        b_window = tl.load(p_at, mask=seen & (n_redo > 0), other=0.0)
        inputs += (tl.where(n_redo > 0, b_window, b_ring),)
    return inputs


@triton.jit
def _taps(p_conv, o_channel, mask, N_CHANNELS: tl.constexpr):
    taps: tl.tuple = ()
    for i_tap in tl.static_range(4):
        taps += (tl.load(p_conv + i_tap * N_CHANNELS + o_channel, mask=mask, other=0.0),)
    return taps


@triton.jit
def _convolved(b_x3, b_x2, b_x1, b_x, taps):
    """SiLU of the convolution at a token, of the three inputs before it and its own; in the order of
    `_window`.
    """
    total = tl.fma(b_x3.to(tl.float32), taps[0], tl.zeros(b_x3.shape, tl.float32))
    total = tl.fma(b_x2.to(tl.float32), taps[1], total)
    total = tl.fma(b_x1.to(tl.float32), taps[2], total)
    return _once(_silu(tl.fma(b_x.to(tl.float32), taps[3], total)))


@triton.jit
def _keep(p_to, o_q, o_k, o_v, b_q, b_k, b_v, m_key, m_value):
    """Stores a token's inputs in a row of the ring or the window."""
    tl.store(p_to + o_q, b_q, mask=m_key)
    tl.store(p_to + o_k, b_k, mask=m_key)
    tl.store(p_to + o_v, b_v, mask=m_value)


@triton.jit
def _inputs(p_proj, p_window, p_gates, i, i_row, first, n_redo, n_new, o_q, o_k, o_v, o_value, m_key, m_value, i_head,
            partial_stride, SPLITS: tl.constexpr, N_V: tl.constexpr, DV: tl.constexpr, N_CHANNELS: tl.constexpr,
            WINDOW: tl.constexpr):
    """Inputs b, a, q, k, v and z of the i-th token of a sequence's step, before its convolution: from the
    window where it is redone, else from its row. None are read behind the last.
    """
    is_new, is_old = (i >= n_redo) & (i < n_redo + n_new), i < n_redo
    new_key, new_value, old_key, old_value = m_key & is_new, m_value & is_new, m_key & is_old, m_value & is_old
    N_COLUMNS: tl.constexpr = N_CHANNELS + N_V * DV + 2 * N_V
    at = first + i
    p_row = p_proj + (i_row + i - n_redo).to(tl.int64) * N_COLUMNS
    p_kept = p_window + at % WINDOW * N_CHANNELS
    p_gates += at % WINDOW * (2 * N_V)
    b = _projection(p_row, N_CHANNELS + N_V * DV + i_head, is_new, partial_stride, SPLITS)
    a = _projection(p_row, N_CHANNELS + N_V * DV + N_V + i_head, is_new, partial_stride, SPLITS)
    b_q = _projection(p_row, o_q, new_key, partial_stride, SPLITS).to(tl.bfloat16)
    b_k = _projection(p_row, o_k, new_key, partial_stride, SPLITS).to(tl.bfloat16)
    b_v = _projection(p_row, o_v, new_value, partial_stride, SPLITS).to(tl.bfloat16)
    b_z = _projection(p_row, N_CHANNELS + i_head * DV + o_value, new_value, partial_stride, SPLITS)
    b = tl.where(is_new, b, tl.load(p_gates, mask=is_old, other=0.0))
    a = tl.where(is_new, a, tl.load(p_gates + N_V, mask=is_old, other=0.0))
    b_q = tl.where(is_new, b_q, tl.load(p_kept + o_q, mask=old_key, other=0.0))
    b_k = tl.where(is_new, b_k, tl.load(p_kept + o_k, mask=old_key, other=0.0))
    b_v = tl.where(is_new, b_v, tl.load(p_kept + o_v, mask=old_value, other=0.0))
    return b, a, b_q, b_k, b_v, b_z


@triton.jit(do_not_specialize=["n_rows", "layer"])
def _gdn_drafts_kernel(
    p_proj, n_rows, layer, p_row_slot, p_row_position, p_row_batch_slot, p_length, p_n_redo, p_columns, column_stride,
    p_states, state_stride, p_window_columns, window_column_stride, p_window_gates, window_gate_stride, p_conv, p_a_log,
    p_dt_bias, p_norm, p_out, p_codes, p_scale, eps,
    SPLITS: tl.constexpr, N_K: tl.constexpr, N_V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TILED: tl.constexpr, SIGMOID: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):
    """Does what `_gdn_decode_kernel` does for one head of all rows of a sequence, in the program of its first
    row.
    """
    i_head = tl.program_id(0)
    i_row = tl.program_id(1)
    N_CHANNELS: tl.constexpr = 2 * N_K * DK + N_V * DV
    N_COLUMNS: tl.constexpr = N_CHANNELS + N_V * DV + 2 * N_V
    GROUP: tl.constexpr = N_V // N_K
    DTYPE: tl.constexpr = p_states.dtype.element_ty

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    state_slot = tl.load(p_row_slot + i_row)
    n_new = tl.load(p_length + i_row)
    if (state_slot < 0) | (n_new == 0):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    n_redo = tl.load(p_n_redo + i_row)
    batch_slot = tl.load(p_row_batch_slot + i_row).to(tl.int64)
    first = tl.load(p_row_position + i_row) - n_redo  # the first token that the state has not seen
    is_lazy = n_new > 1
    n_stored = tl.where(is_lazy, n_redo, n_redo + 1)  # so many more has the state seen afterwards

    o_key = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]  # [PARTS, PART]
    m_key = o_key < DK
    o_value = tl.arange(0, ROWS)  # [ROWS]
    m_value = o_value < DV
    p_state = p_states + state_slot.to(tl.int64) * state_stride + i_head * (DV * DK)
    o_state = o_value[:, None, None] * DK + o_key[None, :, :]  # [ROWS, PARTS, PART]
    m_state = m_value[:, None, None] & m_key[None, :, :]
    b_state = tl.load(p_state + o_state, mask=m_state & (first > 0), other=0.0).to(tl.float32)

    p_ring = p_columns + state_slot.to(tl.int64) * column_stride
    p_window = p_window_columns + batch_slot * window_column_stride
    o_q = (i_head % N_K if TILED else i_head // GROUP) * DK + o_key
    o_k = N_K * DK + o_q
    o_v = 2 * N_K * DK + i_head * DV + o_value
    q_before = _before(p_ring, p_window, n_redo, first, o_q, m_key, N_CHANNELS, WINDOW)
    k_before = _before(p_ring, p_window, n_redo, first, o_k, m_key, N_CHANNELS, WINDOW)
    v_before = _before(p_ring, p_window, n_redo, first, o_v, m_value, N_CHANNELS, WINDOW)
    q_taps = _taps(p_conv, o_q, m_key, N_CHANNELS)
    k_taps = _taps(p_conv, o_k, m_key, N_CHANNELS)
    v_taps = _taps(p_conv, o_v, m_value, N_CHANNELS)
    rate = -tl.exp(tl.load(p_a_log + i_head))
    dt_bias = tl.load(p_dt_bias + i_head)
    b_norm = tl.load(p_norm + o_value, mask=m_value, other=0.0)

    if PDL:
        tl.extra.cuda.gdc_wait()

    # the first value head of a key head keeps the inputs of q and k, in rows that nobody reads in this step:
    # of the ring, where tokens are redone, none is read; of a window see `window_rows`
    m_own = m_key & (i_head < N_K if TILED else i_head % GROUP == 0)
    if is_lazy & (n_redo == 0):  # what the next step needs in front of the rows that it redoes
        for i in tl.static_range(3):
            at = first - 3 + i
            p_kept = p_window + (at + WINDOW) % WINDOW * N_CHANNELS
            _keep(p_kept, o_q, o_k, o_v, q_before[i], k_before[i], v_before[i], m_own & (at >= 0), m_value & (at >= 0))

    b_q3, b_q2, b_q1 = q_before
    b_k3, b_k2, b_k1 = k_before
    b_v3, b_v2, b_v1 = v_before
    partial_stride = n_rows.to(tl.int64) * N_COLUMNS
    p_all_gates = p_window_gates + batch_slot * window_gate_stride + i_head
    inputs = _inputs(p_proj, p_window, p_all_gates, 0, i_row, first, n_redo, n_new, o_q, o_k, o_v, o_value, m_key,
                     m_value, i_head, partial_stride, SPLITS, N_V, DV, N_CHANNELS, WINDOW)
    for i in range(n_redo + n_new):
        at = first + i
        is_new = i >= n_redo
        row = (i_row + i - n_redo).to(tl.int64)
        p_kept = p_window + at % WINDOW * N_CHANNELS
        p_gates = p_all_gates + at % WINDOW * (2 * N_V)
        b, a, b_q, b_k, b_v, b_z = inputs
        # those of the next token are on their way while this one is computed
        inputs = _inputs(p_proj, p_window, p_all_gates, i + 1, i_row, first, n_redo, n_new, o_q, o_k, o_v, o_value,
                         m_key, m_value, i_head, partial_stride, SPLITS, N_V, DV, N_CHANNELS, WINDOW)
        if is_new & is_lazy:
            _keep(p_kept, o_q, o_k, o_v, b_q, b_k, b_v, m_own, m_value)
            tl.store(p_gates, b)
            tl.store(p_gates + N_V, a)
        if (i < n_stored) & (i + 3 >= n_stored):
            _keep(p_ring + at % 4 * N_CHANNELS, o_q, o_k, o_v, b_q, b_k, b_v, m_own, m_value)

        alpha = tl.exp(rate * _softplus(a + dt_bias))
        b_q3d, b_k3d, q_norm, k_norm, kq = _keys(
            _convolved(b_q3, b_q2, b_q1, b_q, q_taps), _convolved(b_k3, b_k2, b_k1, b_k, k_taps), b_state, SCALE, DTYPE
        )
        b_u = _convolved(b_v3, b_v2, b_v1, b_v, v_taps)
        b_state, b_out = _advance(b_state, b_q3d, b_k3d, q_norm, k_norm, kq, b_u, alpha, tl.sigmoid(b), DTYPE)
        if tl.bfloat16 == DTYPE:
            b_state = cut(_noisy(b_state, b_out, o_key, o_value, at, layer, i_head, DK))
        if i + 1 == n_stored:
            tl.store(p_state + o_state, b_state.to(DTYPE), mask=m_state)
        b_out = _gated(b_out, b_z, b_norm, eps, DV, SIGMOID)
        _store_head(p_out, p_codes, p_scale, b_out, row, n_rows, i_head, o_value, m_value, is_new, N_V, DV)
        b_q3, b_q2, b_q1 = b_q2, b_q1, b_q
        b_k3, b_k2, b_k1 = b_k2, b_k1, b_k
        b_v3, b_v2, b_v1 = b_v2, b_v1, b_v


def gdn_decode(
    proj: Tensor, heads: GdnHeads, weights: GdnWeights, eps: float, *, rows: Rows, memory: StateSlots, out: Operand,
) -> None:
    """Advances each row by one token: proj float32 [S, N, 2Kd+2Vd+2Hv] (q|k|v|z|b|a, partial sums) ->
    out.rows bfloat16 [N, Hv dv], and out.codes, where these have a block.

    Nothing is read or written of a row with state slot -1; at position 0 the state and the ring count as
    zeros, whatever the state slot holds. The memory is advanced in place. weights.conv: float32 [4, C], tap 3
    for the current token; a_log, dt_bias float32 [Hv]; norm float32 [dv].

    No two rows in use share a state slot, unless rows.drafts says that they are one sequence's. Then windows
    are needed, by batch slot, with any stride of batch slots. State and ring are advanced by the n_redo
    tokens in front of a sequence's first row, from its window; and by its one row, or, where there are
    several, by none of them: they become its window. A row has the bits that it has alone, behind a state
    that has seen the tokens before it.

    Everything but proj is read before the kernel in front has ended: it must have been written by kernels
    before that one.
    Raises KernelError if a shape, a dtype or an alignment does not fit.
    Left out: drafts of heads of more than 128 x 128, and states that are read from one state slot and written
    to another.
    """
    n_splits, n_rows, _ = proj.shape
    dk, dv = heads.k_dim, heads.v_dim
    columns, states, layer, windows = memory.columns, memory.states, memory.layer, memory.windows
    _check(proj, heads, weights, rows, memory, out.rows)
    layout = _layout(heads, states.dtype)
    parts, tiles = next_power_of_2(dk) // layout.part, next_power_of_2(dv) // layout.rows
    of_weights = weights.conv, weights.a_log, weights.dt_bias, weights.norm
    constants: dict[str, Any] = dict(
        SPLITS=n_splits, N_K=heads.n_k, N_V=heads.n_v, DK=dk, DV=dv, TILED=heads.tiled,
        SIGMOID=heads.sigmoid_gate, SCALE=dk**-0.5, PARTS=parts, PART=layout.part, ROWS=layout.rows,
        pdl=n_rows <= EARLY_ROWS, num_warps=layout.num_warps,
    )
    held = columns, columns.stride(0), states, states.stride(0)
    to = out.rows, *stored_by("gdn_decode", out, out.block_k == dv)
    if rows.drafts is None:
        launch(
            _gdn_decode_kernel, (heads.n_v, n_rows), proj, n_rows, layer, rows.state_slot, rows.position, *held,
            *of_weights, *to, eps, TILES=tiles, **constants,
        )
    else:
        check("gdn_decode", windows is not None and tiles == 1, "windows and heads of at most 128 x 128 for drafts")
        assert windows is not None
        _check_windows(heads, rows.drafts, windows, n_rows)
        launch(
        _gdn_drafts_kernel, (heads.n_v, n_rows), proj, n_rows, layer, rows.state_slot, rows.position, rows.batch_slot,
        rows.drafts.length, rows.drafts.n_redo, *held, windows.columns, windows.columns.stride(0), windows.gates,
        windows.gates.stride(0), *of_weights, *to, eps, WINDOW=windows.columns.shape[1], **constants,
    )
    if to[1] is None:
        round_made(out)


def _check_windows(heads: GdnHeads, drafts: Drafts, windows: Windows, n_rows: int) -> None:
    columns, gates = windows.columns, windows.gates
    expect = partial(check, "gdn_decode")
    expect(columns.dtype == torch.bfloat16 and gates.dtype == torch.float32, "bfloat16 columns, float32 gates")
    n_batch_slots, n_window, n_channels = columns.shape
    expect(n_channels == heads.channels and n_window >= window_rows(2), f"windows [batch_slots, W, {heads.channels}]")
    expect(
        gates.shape == (n_batch_slots, n_window, 2 * heads.n_v), f"gates of windows [batch_slots, W, {2 * heads.n_v}]"
    )
    expect(columns[0].is_contiguous() and gates[0].is_contiguous(), "contiguous windows")
    expect(drafts.length.shape == drafts.n_redo.shape == (n_rows,), f"lengths and n_redo [{n_rows}]")
    expect(drafts.length.dtype == drafts.n_redo.dtype == torch.int32, "int32 lengths and n_redo")
    expect(columns.data_ptr() % 16 == 0, "windows at multiples of 16 bytes")


def _check(
    proj: Tensor, heads: GdnHeads, weights: GdnWeights, rows: Rows, memory: StateSlots, out: Tensor
) -> None:
    columns, states = memory.columns, memory.states
    n_rows, n_channels, n_out = proj.shape[1], heads.channels, heads.n_v * heads.v_dim
    expect = partial(check, "gdn_decode")
    floats = (proj, weights.conv, weights.a_log, weights.dt_bias, weights.norm)
    expect(all(x.dtype == torch.float32 for x in floats), "float32 proj and weights")
    expect(states.dtype in (torch.float32, torch.bfloat16), "float32 or bfloat16 states")
    expect(columns.dtype == out.dtype == torch.bfloat16, "bfloat16 columns, out")
    expect(rows.state_slot.dtype == rows.position.dtype == torch.int32, "int32 state slots and positions")
    expect(rows.state_slot.shape == rows.position.shape == (n_rows,), f"state slots and positions [{n_rows}]")
    expect(proj.shape[2] == n_channels + n_out + 2 * heads.n_v, "six projections in a row")
    expect(weights.conv.shape == (4, n_channels), f"conv [4, {n_channels}]")
    expect(columns.shape[1:] == (4, n_channels), f"columns [state_slots, 4, {n_channels}]")
    expect(states.shape[1:] == (heads.n_v, heads.v_dim, heads.k_dim), "states [state_slots, Hv, dv, dk]")
    expect(out.shape == (n_rows, n_out), f"out [{n_rows}, {n_out}]")
    expect(states[0].is_contiguous() and columns[0].is_contiguous(), "contiguous state slots")
    expect(proj.is_contiguous() and out.is_contiguous(), "contiguous proj and out")
    is_served = heads.k_dim % 16 == heads.v_dim % 16 == 0 and max(heads.k_dim, heads.v_dim) <= MAX_GDN_DIM
    expect(is_served, f"dk, dv % 16 == 0 and at most {MAX_GDN_DIM}")
    expect(heads.n_v % heads.n_k == 0, "value heads in equal groups")
    # alignment decides the width of loads and with it the order of sums: one alignment, one order
    aligned = all(x.data_ptr() % 16 == 0 for x in (proj, states, columns, weights.conv, weights.norm, out))
    expect(aligned, "buffers at multiples of 16 bytes")
