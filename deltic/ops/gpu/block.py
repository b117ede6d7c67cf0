"""Operators of a block drafter (models/dflash) on a GPU: which rows a block has, attention of rows that see
each other, and convolutions within a block.

A block follows a sequence's rows of a decode: what was accepted of a draft is found here, on the device, from
what was drawn. So it runs behind the draws without the host.

A row of a block attends to the keys in the pages up to a position that is given with it, its own or a later
one's: `keys_decode` has written those of the block's rows before. A program takes one row and key head and
one of `SPLITS` parts of the row's tiles of 64 keys, and leaves a record; another kernel merges them in order.
How a row is cut follows from its own keys alone.

Spec: `attend` and `convolve` of tests/reference/dflash.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import PAGE_SIZE, Allocate, AttentionHeads, AttentionWeights
from deltic.ops.gpu import kv
from deltic.ops.gpu.attention_decode import attended, finish, merged, record, rotated, turn
from deltic.ops.gpu.blocks import Rows
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.gpu.norm import LANES
from deltic.ops.gpu.sample import Draws
from deltic.ops.kv_formats import BF16, KvPages

MOST_ROWS = 32
"""Lanes that compare drafts. A sequence has fewer drafts in a step."""
SPLITS = 8
"""Parts of a row's keys, at most; the arithmetic's."""


@dataclass(frozen=True)
class GuessBlocks:
    """Rows of blocks, int32 [N]. The host writes the first four, `begin_block` the others."""

    first: Tensor  # the first row in the step of the sequence that it follows; -1: not in use
    nth: Tensor  # its number in the block
    length: Tensor  # rows of the block
    room: Tensor  # tokens that the pages of its sequence have room for: rows behind them are not in use
    token: Tensor  # its id: the last one that counts, or a mask
    end: Tensor  # the last position of its block
    rows: Rows
    draws: Draws  # of the guesses

    def front(self, n: int) -> GuessBlocks:
        """The first n."""
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        rows, draws = parts.pop("rows").front(n), parts.pop("draws")
        draws = Draws(*(part[:n] for part in (draws.row, draws.batch_slot, draws.position)))
        return replace(self, **{name: part[:n] for name, part in parts.items()}, rows=rows, draws=draws)


def guess_blocks(of_host: tuple[Tensor, Tensor, Tensor, Tensor], allocate: Allocate) -> GuessBlocks:
    """Allocates what the device writes of rows of blocks, for as many as the host's parts have. The caller
    writes 0, 1, ... to `draws.row`. allocate(name, size, dtype) gives zeroed tensors.
    """
    names = ("token", "end", "batch slot", "state slot", "position", "draw row", "draw batch slot", "draw position")
    token, end, *parts = (allocate(f"block {name}", (len(of_host[0]),), torch.int32) for name in names)
    return GuessBlocks(*of_host, token, end, Rows(*parts[:3]), Draws(*parts[3:]))


@triton.jit
def _begin_block_kernel(
    p_first, p_nth, p_length, p_room, p_row_batch_slot, p_row_state_slot, p_row_position, p_row_length, p_draft,
    p_drawn, p_token, p_end, p_batch_slot, p_state_slot, p_position, p_draw_batch_slot, p_draw_position, mask,
    BESIDE: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):
    """A row of a block behind the step's draws."""
    i = tl.program_id(0)
    if PDL:  # and nobody is let start early: later kernels read the row arrays before they wait
        tl.extra.cuda.gdc_wait()
    first, nth, length = tl.load(p_first + i), tl.load(p_nth + i), tl.load(p_length + i)
    used, room = first >= 0, tl.load(p_room + i)
    first = tl.maximum(first, 0)
    o = tl.arange(0, MOST)
    before = o + 1 < tl.load(p_row_length + first)
    b_draft = tl.load(p_draft + first + o + 1, mask=before, other=0)
    b_right = before & (tl.load(p_drawn + first + o, mask=before, other=-1) == b_draft)
    b_right = b_right & (tl.load(p_drawn + first + o + 1, mask=before, other=-1) >= 0)
    last = first + tl.min(tl.where(b_right, MOST - 1, o), 0)
    drawn, anchor = tl.load(p_drawn + last), tl.load(p_row_position + last) + 1
    batch_slot, state_slot = tl.load(p_row_batch_slot + last), tl.load(p_row_state_slot + last)
    position = anchor + nth
    used = used & (drawn >= 0) & (state_slot >= 0) & (position < room)
    guesses = used & (nth >= BESIDE)
    tl.store(p_token + i, tl.where(nth == 0, drawn, mask))
    tl.store(p_end + i, tl.minimum(anchor + length, room) - 1)
    tl.store(p_batch_slot + i, batch_slot)
    tl.store(p_state_slot + i, tl.where(used, state_slot, -1))
    tl.store(p_position + i, tl.where(used, position, 0))
    tl.store(p_draw_batch_slot + i, tl.where(guesses, batch_slot, -1))
    tl.store(p_draw_position + i, position + 1 - BESIDE)


def begin_block(step: Rows, drawn: Tensor, g: GuessBlocks, mask_token: int, *, guesses_at_anchor: bool) -> None:
    """Writes the device's parts of g, for blocks behind a step's draws.

    step: all rows of a decode, int32 [M], with drafts; drawn: int32 [M], of each row, -1 where nothing could
    be drawn. A row of a sequence counts if each token before it was drawn as it was drafted. A block begins
    with what the last one drew, at the position behind it; masks follow. guesses_at_anchor: whether a row
    guesses the token behind it; else a mask stands for the token that it guesses, and the first row guesses
    nothing. Raises KernelError where types do not fit.
    """
    assert step.drafts is not None
    check("block", drawn.dtype == g.first.dtype == torch.int32, "int32 tokens and rows")
    launch(
        _begin_block_kernel, (len(g.first),), g.first, g.nth, g.length, g.room, step.batch_slot, step.state_slot,
        step.position, step.drafts.length, step.drafts.token, drawn, g.token, g.end, g.rows.batch_slot,
        g.rows.state_slot, g.rows.position, g.draws.batch_slot, g.draws.position, mask_token,
        BESIDE=0 if guesses_at_anchor else 1, MOST=MOST_ROWS, num_warps=1,
    )


@dataclass(frozen=True)
class Sight:
    """Keys that rows of blocks see: up to `last`, and less than `window` positions away (0: all)."""

    last: Tensor  # int32 [N]
    window: int


@dataclass(frozen=True)
class BlockScratch:
    """Workspace of block_attention for `n_rows` rows: what the parts of rows have come to."""

    output: Tensor  # float32 [rows, nk, SPLITS, group, d]: not yet divided by their sums
    weight: Tensor  # float32 [rows, nk, SPLITS, 2, group]: maximum (base 2) and sum


def block_scratch(heads: AttentionHeads, n_rows: int, allocate: Allocate) -> BlockScratch:
    """Room for n_rows rows. allocate(name, size, dtype) gives zeroed tensors."""
    group, of_rows = heads.n_q // heads.n_kv, (n_rows, heads.n_kv, SPLITS)
    return BlockScratch(
        output=allocate("block attention parts", (*of_rows, group, heads.dim), torch.float32),
        weight=allocate("block attention weights", (*of_rows, 2, group), torch.float32),
    )


@triton.jit
def _cut(p_position, p_last, p_state_slot, i_row, WINDOW: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr):
    """A row's first key, its keys' end, its first tile, their number and those of a part; none of a row that
    is not in use.
    """
    position, end = tl.load(p_position + i_row), tl.load(p_last + i_row) + 1
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
        end = tl.minimum(end, position + WINDOW)
    begin = first // PAGE
    n_tiles = tl.where(tl.load(p_state_slot + i_row) >= 0, (end + PAGE - 1) // PAGE - begin, 0)
    return first, end, begin, n_tiles, (n_tiles + SPLITS - 1) // SPLITS


@triton.jit(do_not_specialize=["stride_table"])
def _block_attention_kernel(
    p_proj, p_q_norm, p_cos, p_sin, p_state_slot, p_batch_slot, p_position, p_last, p_table, p_pages, p_output,
    p_weight, eps, scale, stride_s, stride_row, stride_table, stride_page,
    NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    """Attends with one part of a row's keys, for one key head, a program."""
    wait_for_front(PDL)
    G: tl.constexpr = NQ // NK
    i_row, i_kv, i_split = tl.program_id(0) // NK, tl.program_id(0) % NK, tl.program_id(1)
    first, end, begin, n_tiles, each = _cut(p_position, p_last, p_state_slot, i_row, WINDOW, PAGE, SPLITS)
    if i_split * each < n_tiles:
        position = tl.load(p_position + i_row)
        p_table += tl.load(p_batch_slot + i_row).to(tl.int64) * stride_table
        p_pages += i_kv * (PAGE * D)
        o_d, o_t, o_g = tl.arange(0, D), tl.arange(0, PAGE), tl.arange(0, GROUP)
        b_turn, b_turn_other = turn(p_q_norm, p_cos + position * HALF, p_sin + position * HALF, GROUP, D, HALF)
        b_q = rotated(
            p_proj + i_row.to(tl.int64) * stride_row, ((i_kv * G + o_g) * D)[:, None], (o_g < G)[:, None], b_turn,
            b_turn_other, eps, stride_s, D, HALF, S,
        )
        b_qt = tl.trans(b_q)
        b_max = tl.full((GROUP,), float("-inf"), tl.float32)
        b_sum, b_o = tl.zeros((GROUP,), tl.float32), tl.zeros((D, GROUP), tl.float32)
        for i_tile in range(begin + i_split * each, begin + tl.minimum((i_split + 1) * each, n_tiles)):
            o_key = i_tile * PAGE + o_t
            b_seen = (o_key >= first) & (o_key < end)
            p_page = p_pages + tl.load(p_table + i_tile).to(tl.int64) * stride_page
            b_k = tl.load(p_page + o_t[:, None] * D + o_d[None, :], mask=b_seen[:, None], other=0.0)
            b_v = tl.load(p_page + NK * PAGE * D + o_t[None, :] * D + o_d[:, None], mask=b_seen[None, :], other=0.0)
            b_max, b_sum, b_o = attended(b_k, b_v, b_qt, b_max, b_sum, b_o, b_seen[:, None], scale)
        pair = (i_row * NK + i_kv).to(tl.int64)
        record(
            p_output + pair * (SPLITS * G * D), p_weight + pair * (SPLITS * 2 * G), i_split, b_max, b_sum, b_o, G,
            GROUP, D,
        )


@triton.jit
def _merge_kernel(
    p_state_slot, p_position, p_last, p_output, p_weight, p_out, NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr,
    GP: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    """Merges the parts of a row and key head, in order."""
    wait_for_front(PDL)
    G: tl.constexpr = NQ // NK
    i_row, i_kv = tl.program_id(0) // NK, tl.program_id(0) % NK
    _first, _end, _begin, n_tiles, each = _cut(p_position, p_last, p_state_slot, i_row, WINDOW, PAGE, SPLITS)
    if n_tiles > 0:
        pair = (i_row * NK + i_kv).to(tl.int64)
        b_o, _b_max, b_sum = merged(
            p_output + pair * (SPLITS * G * D), p_weight + pair * (SPLITS * 2 * G), 0, (n_tiles + each - 1) // each, 1,
            0, G, GP, D, SPLITS,
        )
        p_out += i_row.to(tl.int64) * (NQ * D) + i_kv * (G * D)
        finish(b_o, b_sum, tl.full((GP, D), 1.0, tl.float32), p_out, None, None, 0, G, GP, D, 0)


def block_attention(
    proj: Tensor, heads: AttentionHeads, weights: AttentionWeights, *, rows: Rows, sight: Sight,
    cache: KvPages, scratch: BlockScratch, out: Tensor,
) -> None:
    """out[r, h] = bfloat16(softmax(q k^T / sqrt(d)) v) over the keys of the row's batch slot that it sees.

    proj: float32 [S, N, row], partial sums in order, of heads without gates: q is normed and rotated here.
    cache: this layer's bfloat16 pages, in which the rows' own keys and values are already, and their table.
    out: bfloat16 [N, nq d]; of a row with state slot -1 it is left alone.
    Rounded to bfloat16: q, the softmax weights where they meet v, the output. Raises KernelError where shapes
    or types do not fit.
    """
    cos, sin, pages, last = weights.cos, weights.sin, cache.data, sight.last
    (n_parts, n_rows, n_row), group, half = proj.shape, heads.n_q // heads.n_kv, cos.shape[1]
    expect = partial(check, "block_attention")
    expect(proj.dtype == torch.float32 and n_row == heads.row, f"float32 proj [S, N, {heads.row}]")
    expect(not heads.is_gated, "heads without a gate")
    expect(proj.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous(), "contiguous proj rows, cos, sin")
    expect(heads.n_q % heads.n_kv == 0 and group <= 16, "at most 16 query heads a key head")
    expect(heads.dim == next_power_of_2(heads.dim) and 32 <= heads.dim <= 256, "head_dim 32, 64, 128 or 256")
    is_cache = cache.format is BF16 and kv.fits(pages, heads.n_kv, heads.dim, BF16)
    expect(is_cache, kv.expected(heads.n_kv, heads.dim, BF16))
    expect(last.shape == (n_rows,) and last.dtype == torch.int32, f"{n_rows} int32 positions")
    expect(out.dtype == torch.bfloat16 and out.shape == (n_rows, heads.n_q * heads.dim), "bfloat16 out [N, nq d]")
    expect(len(scratch.output) >= n_rows and scratch.output.shape[3:] == (group, heads.dim), "a scratch for these rows")
    sizes = {"NQ": heads.n_q, "NK": heads.n_kv, "D": heads.dim, "PAGE": PAGE_SIZE, "SPLITS": SPLITS}
    sizes["WINDOW"] = sight.window
    launch(
        _block_attention_kernel, (n_rows * heads.n_kv, SPLITS), proj, weights.q_norm, cos, sin, rows.state_slot,
        rows.batch_slot, rows.position, last, cache.table, pages, scratch.output, scratch.weight, weights.eps,
        heads.dim**-0.5 * 1.4426950408889634, proj.stride(0), proj.stride(1), cache.table.stride(0), pages.stride(0),
        HALF=half, S=n_parts, GROUP=8 if group <= 8 else 16, num_warps=4, **sizes,
    )
    launch(
        _merge_kernel, (n_rows * heads.n_kv,), rows.state_slot, rows.position, last, scratch.output, scratch.weight,
        out, GP=next_power_of_2(group), num_warps=4, **sizes,
    )


@triton.jit
def _block_conv_kernel(
    p_x, p_nth, p_own, p_base, p_out, width, n_own, first, n_groups, GROUP: tl.constexpr, TAPS: tl.constexpr,
    ADD: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    """A run of channels of a row."""
    wait_for_front(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * LANES + tl.arange(0, LANES)
    b_mask = o_col < width
    nth = tl.load(p_nth + i_row)
    b_y = tl.zeros((LANES,), tl.float32)
    for tap in tl.static_range(TAPS):
        b_here = b_mask & (nth >= tap)
        b_x = tl.load(p_x + (i_row - tap) * width + o_col, mask=b_here, other=0.0).to(tl.float32)
        b_own = tl.load(p_own + i_row * n_own + first + tap * n_groups + o_col // GROUP, mask=b_here, other=0.0)
        b_y += (tl.load(p_base + tap * width + o_col, mask=b_here, other=0.0) + b_own) * b_x
    p_to = p_out + i_row * width + o_col
    if ADD:
        b_y += tl.load(p_to, mask=b_mask, other=0.0)
    tl.store(p_to, b_y.to(p_out.dtype.element_ty), mask=b_mask)


def block_conv(x: Tensor, base: Tensor, own: Tensor, group: int, *, nth: Tensor, out: Tensor) -> None:
    """y[m] = sum over taps j of (base[j] + own[m, j], one value a group of channels) * x[m - j], with no row
    before row 0 of a block.

    x bfloat16 [N, H], of the side before a mixer or feed-forward: out, bfloat16, too, = y. x float32, of the
    side behind: out, float32, += y. base: float32 [2 * taps, H], of the side before, then behind; own:
    float32 [N, 2 * taps * H / group]; nth: int32 [N], a row's number in its block. Raises KernelError where
    shapes or types do not fit.
    """
    (n, width), taps, is_before = x.shape, len(base) // 2, x.dtype == torch.bfloat16
    n_groups = width // group
    check("block_conv", x.dtype == out.dtype and x.shape == out.shape, "out as x")
    check("block_conv", is_before or x.dtype == torch.float32, "bfloat16 or float32 x")
    check("block_conv", base.shape == (2 * taps, width) and width % group == 0, f"kernels of width {width}")
    check("block_conv", own.shape == (n, 2 * taps * n_groups) and own.dtype == torch.float32, "a value a tap and group")
    check("block_conv", all(t.is_contiguous() for t in (x, base, own, out)), "contiguous tensors")
    check("block_conv", nth.shape == (n,) and nth.dtype == torch.int32, f"{n} int32 numbers")
    launch(
        _block_conv_kernel, (n, -(-width // LANES)), x, nth, own, base if is_before else base[taps:], out, width,
        own.shape[1], 0 if is_before else taps * n_groups, n_groups, GROUP=group, TAPS=taps, ADD=not is_before,
        LANES=LANES, num_warps=4,
    )
