"""A frame of a speech model on a GPU: what lies between the linears of a decode's predictor, and the rows of
a prompt.

The predictor runs 15 passes over at most 16 positions of its own, which live as long as the decode, by row. A
pass ends in a draw, one program a row, which also takes the code: its embedding becomes the next pass's row
and is added to the sum that the talker is fed.

Draws follow sample_kernels.py; programmatic launch as there: before its wait a kernel reads only row arrays
and what no kernel of the step writes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import N_CODES, AttentionHeads, AttentionWeights
from deltic.ops.gpu.attention_parts import rotated, summed, turn
from deltic.ops.gpu.blocks import BLOCK, BatchState, Blocks, Rows
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.gpu.norm import LANES, copy_row, pieces
from deltic.ops.gpu.sample_kernels import (
    LEAST_T,
    LOWEST,
    fixed_point,
    halve,
    id_of,
    order_of,
    pack,
    share_of,
    threshold_of,
    uniform24,
    value_of,
    weight_of,
)

MAX_CODES = 2048
"""Codes of a codebook: one program holds a row's logits."""


@dataclass(frozen=True)
class FrameParameters:
    """Settings for drawing codes 1 to 15, and the texts still to be said, by batch slot. int32 [P] unless
    said."""

    temperature: Tensor  # float32
    top_p: Tensor  # float32
    top_k: Tensor  # 0: all
    seed: Tensor  # int64, the bits of an unsigned one
    n_prompt: Tensor
    n_trailing: Tensor
    trailing: Tensor  # [P, any] text ids


@dataclass(frozen=True)
class FrameRows(Rows):
    """The rows of a decode: int32 [N] unless said."""

    frame: Tensor  # position - n_prompt of its batch slot
    codes: Tensor  # [N, 16]
    sums: Tensor  # float32 [N, h]: of the embeddings


@triton.jit
def _begin_kernel(
    p_rows_batch_slot, p_last_token, p_positions, p_state_slots, p_done, p_n_prompt, p_batch_slot, p_state_slot,
    p_position, p_frame, p_codes, p_sums, p_past, p_table, p_inner_table, p_into, p_rows, n_codes, width, inner_width,
    n, GROUPS: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr, INNER_PIECES: tl.constexpr, PDL: tl.constexpr,
):
    i = tl.program_id(0)
    if PDL:  # and nobody is let start early: later kernels read the row arrays before they wait
        tl.extra.cuda.gdc_wait()
    batch_slot = tl.load(p_rows_batch_slot + i)
    used = batch_slot >= 0
    batch_slot = tl.maximum(batch_slot, 0)
    state_slot = tl.load(p_state_slots + batch_slot)
    position = tl.load(p_positions + batch_slot)
    # a row that ended keeps its last token, whatever it is: the clamp keeps reads inside the tables
    code = tl.minimum(tl.maximum(tl.load(p_last_token + batch_slot), 0), n_codes - 1)
    tl.store(p_batch_slot + i, batch_slot)
    tl.store(p_state_slot + i, tl.where(used & (tl.load(p_done + batch_slot) == 0), state_slot, -1))
    tl.store(p_position + i, tl.where(used, position, 0))
    tl.store(p_frame + i, tl.where(used, position - tl.load(p_n_prompt + batch_slot), 0))
    tl.store(p_codes + i * GROUPS, code)
    row, code = i.to(tl.int64), code.to(tl.int64)
    state_slot = tl.where(used, tl.maximum(state_slot, 0), 0).to(tl.int64)
    copy_row(p_table + code * width, p_sums + row * width, width, LANES, PIECES)
    copy_row(p_past + state_slot * width, p_into + row * width, width, LANES, PIECES)
    copy_row(p_inner_table + code * inner_width, p_rows + (n + row) * inner_width, inner_width, LANES, INNER_PIECES)


@triton.jit
def _project_kernel(p_parts, p_bias, p_rows, width, stride_s, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_front(PDL)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width + o
    b_x = summed(p_parts, at, o < width, stride_s, S)
    tl.store(p_rows + at, b_x + tl.load(p_bias + o, mask=o < width, other=0.0), mask=o < width)


@triton.jit(do_not_specialize=["first", "n"])
def _code_attention_kernel(
    p_proj, p_q_norm, p_k_norm, p_cos, p_sin, p_state_slot, p_pages, p_out, eps, scale, stride_s, page_row, first, n,
    NEW: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, PDL: tl.constexpr,
):
    """Attends with one key head of one frame, NEW positions from `first` on. Position first + j is row j n +
    i of proj.
    """
    i, i_kv = tl.program_id(0), tl.program_id(1)
    state_slot = tl.load(p_state_slot + i)
    wait_for_front(PDL)
    if state_slot >= 0:
        o_g, o_d, o_t = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, KEYS)
        p_k = p_pages + i.to(tl.int64) * page_row + i_kv * (KEYS * D)
        p_v = p_k + NK * KEYS * D
        ROW: tl.constexpr = (NQ + 2 * NK) * D
        for j in tl.static_range(NEW):
            position = first + j
            p_row = p_proj + (j * n + i).to(tl.int64) * ROW
            o_k = (NQ + i_kv) * D
            b_turn, b_other = turn(p_k_norm, p_cos + position * (D // 2), p_sin + position * (D // 2), 1, D, D // 2)
            o_one = tl.arange(0, 1)[:, None]
            b_new = rotated(p_row, o_one + o_k, o_one >= 0, b_turn, b_other, eps, stride_s, D, D // 2, S)
            tl.store(p_k + position * D + o_one + o_d[None, :], b_new)
            b_new_v = summed(p_row, o_k + NK * D + o_d, o_d < D, stride_s, S)
            tl.store(p_v + position * D + o_d, b_new_v.to(tl.bfloat16))
        tl.debug_barrier()  # a program sees its own stores, behind a barrier
        b_here = (o_t < first + NEW)[:, None]
        b_k = tl.load(p_k + o_t[:, None] * D + o_d[None, :], mask=b_here, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + o_t[:, None] * D + o_d[None, :], mask=b_here, other=0.0).to(tl.float32)
        for j in tl.static_range(NEW):
            position = first + j
            p_row = p_proj + (j * n + i).to(tl.int64) * ROW
            b_turn, b_other = turn(p_q_norm, p_cos + position * (D // 2), p_sin + position * (D // 2), GP, D, D // 2)
            b_q = rotated(
                p_row, ((i_kv * G + o_g) * D)[:, None], (o_g < G)[:, None], b_turn, b_other, eps, stride_s, D, D // 2, S
            ).to(tl.float32)
            b_s = tl.sum(b_q[:, None, :] * b_k[None, :, :], 2) * scale
            b_s = tl.where((o_t <= position)[None, :], b_s, float("-inf"))
            b_p = tl.exp2(b_s - tl.max(b_s, 1)[:, None])
            b_o = tl.sum(b_p[:, :, None] * b_v[None, :, :], 1) / tl.sum(b_p, 1)[:, None]
            p_to = p_out + (j * n + i).to(tl.int64) * (NQ * D) + ((i_kv * G + o_g) * D)[:, None] + o_d[None, :]
            tl.store(p_to, b_o.to(tl.bfloat16), mask=(o_g < G)[:, None])


@triton.jit
def _drawn(v, there, id, n_codes, t, k, top_p, u24):
    """A code by the rule of sample.py, and whether all logits were finite."""
    c = tl.where(there, order_of(v, id), LOWEST)
    best = tl.max(c, 0)
    bad = tl.max(tl.where(there & (tl.abs(v) >= float("inf")) | (there & (v != v)), 1, 0), 0)
    token = id_of(best)
    if (t > 0) & (bad == 0):
        zero = tl.full((), 0, tl.int64)
        w = tl.where(there, fixed_point(weight_of(v, value_of(best), tl.maximum(t, LEAST_T)), 0.0), 0)
        lo, hi = tl.min(tl.where(there, c, best), 0), best + 1
        if (k > 0) & (k < n_codes):
            lo, _n = halve(c, pack(there.to(tl.int64)), lo, hi, zero, k.to(tl.int64))
        kept = tl.sum(tl.where(c >= lo, w, 0), 0)
        if top_p < 1:
            lo, kept = halve(c, pack(w), lo, hi, zero, share_of(kept, top_p))
        w = tl.where(c >= lo, w, 0)
        drawn = (tl.cumsum(w, 0) >= threshold_of(kept, u24)) & (w > 0)
        token = tl.min(tl.where(drawn, id, n_codes), 0)
    return token, bad


@triton.jit(do_not_specialize=["step"])
def _draw_kernel(
    p_logits, stride_s, p_batch_slot, p_state_slot, p_frame, p_temperature, p_top_p, p_top_k, p_seed, p_n_trailing,
    p_trailing, n_texts, pad, p_codes, p_sums, p_table, p_inner_table, p_rows, p_texts, step, n_codes, width,
    inner_width, IS_LAST: tl.constexpr, GROUPS: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    PIECES: tl.constexpr, INNER_PIECES: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0)
    batch_slot, state_slot, frame = tl.load(p_batch_slot + i), tl.load(p_state_slot + i), tl.load(p_frame + i)
    t, top_p = tl.load(p_temperature + batch_slot), tl.load(p_top_p + batch_slot)
    k, seed = tl.load(p_top_k + batch_slot), tl.load(p_seed + batch_slot)
    text = pad
    if IS_LAST:
        n_trailing = tl.load(p_n_trailing + batch_slot)
        at = batch_slot.to(tl.int64) * n_texts + frame
        text = tl.load(p_trailing + at, mask=(frame >= 0) & (frame < n_trailing), other=pad)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if state_slot >= 0:
        id = tl.arange(0, WIDTH)
        there = id < n_codes
        row = i.to(tl.int64)
        v = summed(p_logits + row * n_codes, id, there, stride_s, S)
        token, bad = _drawn(v, there, id, n_codes, t, k, top_p, uniform24(seed, frame * GROUPS + step))
        token = tl.minimum(token, n_codes - 1)  # whatever was not finite
        tl.store(p_codes + i * GROUPS + step, token)
        code = token.to(tl.int64)
        for j in tl.static_range(PIECES):
            o = j * LANES + tl.arange(0, LANES)
            mask = o < width
            b_sum = tl.load(p_sums + row * width + o, mask=mask, other=0.0)
            b_sum += tl.load(p_table + code * width + o, mask=mask, other=0.0).to(tl.float32)
            if IS_LAST:
                b_sum += tl.load(p_texts + text.to(tl.int64) * width + o, mask=mask, other=0.0)
            # what follows from logits that are not finite is not, and ends the sequence
            tl.store(p_sums + row * width + o, tl.where(bad > 0, float("nan"), b_sum), mask=mask)
        if not IS_LAST:
            copy_row(p_inner_table + code * inner_width, p_rows + row * inner_width, inner_width, LANES, INNER_PIECES)


@triton.jit
def _keep_kernel(
    p_x, p_state_slot, p_past, width, LANES: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_front(PDL)
    row = tl.program_id(0).to(tl.int64)
    state_slot = tl.load(p_state_slot + row)
    if state_slot >= 0:
        copy_row(p_x + row * width, p_past + state_slot.to(tl.int64) * width, width, LANES, PIECES)


@triton.jit
def _ends_kernel(p_segment_begin, p_n, p_state_slot, p_end, p_end_slot, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    begin, end = tl.load(p_segment_begin + i), tl.load(p_segment_begin + i + 1)
    used = end > begin
    last = tl.maximum(end - 1, 0)
    tl.store(p_end + i, tl.where(used, last * BLOCK + tl.load(p_n + last) - 1, 0))
    tl.store(p_end_slot + i, tl.where(used, tl.load(p_state_slot + i), -1))


@triton.jit
def _prompt_kernel(
    p_ids, p_texts, p_table, p_voice, p_rows, width,
    N_SIDE: tl.constexpr, VOICE: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    id = tl.load(p_ids + row)
    text, side = (id // N_SIDE - 1).to(tl.int64), (id % N_SIDE).to(tl.int64)
    is_voice = side >= VOICE
    for j in tl.static_range(PIECES):
        o = j * LANES + tl.arange(0, LANES)
        mask = o < width
        b_x = tl.load(p_table + (side - 1) * width + o, mask=mask & (side > 0) & (side < VOICE), other=0.0).to(
            tl.float32
        )
        b_x += tl.load(p_voice + row * width + o, mask=mask & is_voice, other=0.0)
        b_x += tl.load(p_texts + text * width + o, mask=mask & (text >= 0), other=0.0)
        tl.store(p_rows + row * width + o, b_x, mask=mask)


@dataclass(frozen=True)
class CodeTables:
    """Embeddings of one of a frame's codes."""

    table: Tensor  # bfloat16 [C, h]: what the talker's input adds up
    inner: Tensor | None  # bfloat16 or float32 [C, p]: of the predictor


def begin_frames(
    rows_batch_slot: Tensor, batch_slots: BatchState, parameters: FrameParameters, past: Tensor, tables: CodeTables,
    *, rows: FrameRows, into: Tensor, residual: Tensor,
) -> None:
    """Starts a decode: row arrays and code 0 as `begin_decode` (norm.py) makes them, sums[r] = table[code 0],
    into[r] = past[state_slot of r], residual[N + r] = inner[code 0].

    rows_batch_slot: int32 [N]; past: bfloat16 [state_slots, h]; into: float32 [>= N, h] (where h = p: the
    residual itself), or bfloat16; residual: float32 [2 N, p].
    """
    table, inner_table, (n, width) = tables.table, tables.inner, rows.sums.shape
    assert inner_table is not None
    n_codes, inner_width = inner_table.shape
    check("frames", residual.shape == (2 * n, inner_width) and into.shape[1] == width, "residual [2 N, p], into [N, h]")
    check("frames", table.is_contiguous() and inner_table.is_contiguous() and past.is_contiguous(), "contiguous tables")
    launch(
        _begin_kernel, (n,), rows_batch_slot, batch_slots.last_token, batch_slots.position, batch_slots.state_slot,
        batch_slots.done, parameters.n_prompt, rows.batch_slot, rows.state_slot, rows.position, rows.frame, rows.codes,
        rows.sums, past, table, inner_table, into, residual, n_codes, width, inner_width, n,
        GROUPS=N_CODES, LANES=LANES, PIECES=pieces(width), INNER_PIECES=pieces(inner_width), num_warps=4,
    )


def project_rows(parts: Tensor, bias: Tensor, out: Tensor) -> None:
    """out = the sum of parts, in order, + bias: parts float32 [S, N, p], out float32 [N, p]."""
    n_parts, n, width = parts.shape
    check("frames", out.shape == (n, width) and parts.is_contiguous() and out.is_contiguous(), f"out [{n}, {width}]")
    launch(
        _project_kernel, (n, -(-width // 512)), parts, bias, out, width, parts.stride(0), S=n_parts, BLOCK=512,
        num_warps=4,
    )


def code_attention(
    proj: Tensor, heads: AttentionHeads, weights: AttentionWeights, first: int, *, state_slot: Tensor, pages: Tensor,
    out: Tensor,
) -> None:
    """out = bfloat16(softmax(q k^T / sqrt(d)) v) of position `first` of each frame over those up to it.

    With 2 N rows, of positions 0 and 1: row r is position 0 of frame r, row N + r position 1. proj: float32
    [S, N or 2 N, row], q | k | v; state_slot: int32 [N], -1: left alone; angles of 16 positions;
    pages: bfloat16 [N, 2, nk, 16, d], this layer's part, any stride of frames; out: bfloat16 like proj, nq d
    wide. q, k, v are rounded to bfloat16.
    """
    expect = partial(check, "frames")
    n_splits, n_rows, width = proj.shape
    cos, sin, n, group = weights.cos, weights.sin, state_slot.shape[0], heads.n_q // heads.n_kv
    expect(width == heads.row and not heads.is_gated and proj.is_contiguous(), f"proj [S, rows, {heads.row}]")
    expect(n_rows == (n if first else 2 * n), "one row a frame, two in the first pass")
    expect(pages.shape[1:] == (2, heads.n_kv, N_CODES, heads.dim) and pages.shape[0] >= n, "pages of 16 positions")
    expect(2 * cos.shape[1] == heads.dim and cos.shape[0] >= N_CODES, "angles of 16 positions")
    launch(
        _code_attention_kernel, (n, heads.n_kv), proj, weights.q_norm, weights.k_norm, cos, sin, state_slot, pages, out,
        weights.eps, heads.dim**-0.5 * 1.4426950408889634, proj.stride(0), pages.stride(0), first, n,
        NEW=n_rows // n, NQ=heads.n_q, NK=heads.n_kv, D=heads.dim, S=n_splits, KEYS=N_CODES, G=group,
        GP=next_power_of_2(group), num_warps=4,
    )


def draw_code(
    logits: Tensor, step: int, p: FrameParameters, rows: FrameRows, tables: CodeTables, residual: Tensor,
    texts: Tensor, pad: int,
) -> None:
    """Draws code `step` (1 to 15) of each frame in use, with number frame * 16 + step of its seed:
    codes[r, step]. Adds its row of `table` to sums[r]. Its row of `inner` becomes residual[r].

    logits: float32 [S, N, C], parts in order. The last code has no inner table. Its sum also gets the frame's
    text, of texts (float32 [V, h]): trailing[frame], or `pad` behind the last. Logits that are not finite
    make the sum NaN.
    """
    n_splits, n, n_codes = logits.shape
    table, inner_table = tables.table, tables.inner
    width, is_last = rows.sums.shape[1], inner_table is None
    check("frames", n_codes <= MAX_CODES and logits.is_contiguous(), f"logits [S, N, C], C at most {MAX_CODES}")
    check("frames", is_last == (step == N_CODES - 1), "an inner table but for the last code")
    inner_width = residual.shape[1]
    launch(
        _draw_kernel, (n,), logits, logits.stride(0), rows.batch_slot, rows.state_slot, rows.frame, p.temperature,
        p.top_p, p.top_k, p.seed, p.n_trailing, p.trailing, p.trailing.shape[1], pad, rows.codes, rows.sums, table,
        inner_table, residual, texts, step, n_codes, width, inner_width, IS_LAST=is_last, GROUPS=N_CODES, S=n_splits,
        WIDTH=next_power_of_2(n_codes), LANES=LANES, PIECES=pieces(width), INNER_PIECES=pieces(inner_width),
        num_warps=4,
    )


def keep_past(x: Tensor, state_slot: Tensor, past: Tensor) -> None:
    """past[state_slot[r]] = x[r], where that is not negative: x bfloat16 [N, h], state slot int32 [N], past
    bfloat16 [state_slots, h].
    """
    expect = partial(check, "frames")
    n, width = x.shape
    expect(x.dtype == past.dtype == torch.bfloat16 and state_slot.shape == (n,), "bfloat16 rows, a state slot for each")
    expect(past.shape[1] == width and x.is_contiguous() and past.is_contiguous(), f"rows of width {width}")
    launch(
        _keep_kernel, (n,), x, state_slot, past, width, LANES=LANES, PIECES=pieces(width), num_warps=4,
    )


def segment_ends(blocks: Blocks, row: Tensor, state_slot: Tensor) -> None:
    """row[g] = the last row of segment g of a prefill, state_slot[g] = its state slot, -1 for an empty one:
    int32 [G]."""
    launch(
        _ends_kernel, (row.shape[0],), blocks.segment_begin, blocks.n, blocks.state_slot, row, state_slot, BLOCK=BLOCK,
        num_warps=1
    )


def prompt_rows(
    ids: Tensor, n_side: int, voice_side: int, texts: Tensor, table: Tensor, voice: Tensor, out: Tensor
) -> None:
    """out[t] = codec vector + text vector of row id (text + 1) n_side + side: side 0 none, from voice_side on
    voice[t], else table[side - 1].

    ids: int32 [T]; texts: float32 [V, h]; table: bfloat16 [any, h]; voice: float32 [>= T, h]; out: float32
    [T, h]. Text -1: none.
    """
    n, width = out.shape
    check("frames", texts.shape[1] == table.shape[1] == voice.shape[1] == width, f"tables of width {width}")
    launch(
        _prompt_kernel, (n,), ids, texts, table, voice, out, width,
        N_SIDE=n_side, VOICE=voice_side, LANES=LANES, PIECES=pieces(width), num_warps=4,
    )
