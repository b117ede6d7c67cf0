"""Operators of a block drafter (models/dflash) on a GPU: which rows a block has, attention of rows that see
each other, convolutions within a block, and scores that follow from the token before.

A block follows a sequence's rows of a decode: what was accepted of a draft is found here, on the device, from
what was drawn. So it runs behind the draws without the host.

A row of a block attends to the keys in the pages up to a position that is given with it, its own or a later
one's: `keys_decode` has written those of the block's rows before. A program takes one row and key head and
one of `SPLITS` parts of the row's tiles of 64 keys, and leaves a record; another kernel merges them in order.
How a row is cut follows from its own keys alone.

Where a guess depends on the one before, the guesses of a block are drawn one after the other, and those of
all blocks at once: `next_guess` says which rows draw now.

Spec: `attend`, `convolve`, `logits_of`, `step_scores` and `confidence` of tests/reference/dflash.py.
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
from deltic.ops.gpu.attention_parts import attended, finish, merged, new_key, record, rotated, turn
from deltic.ops.gpu.blocks import Rows
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.gpu.norm import LANES
from deltic.ops.gpu.sample import MAX_VOCAB, TILE, Draws
from deltic.ops.gpu.sample_kernels import LOWEST, id_of, order_of, value_of
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
    turn: Tensor  # guesses of its block in front of its own, less those that were made; below 0: it has none
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
    of_rows, of_draws = ("batch slot", "state slot", "position"), ("draw row", "draw batch slot", "draw position")
    names = ("token", "end", "turn", *of_rows, *of_draws)
    token, end, turn, *parts = (allocate(f"block {name}", (len(of_host[0]),), torch.int32) for name in names)
    return GuessBlocks(*of_host, token, end, turn, Rows(*parts[:3]), Draws(*parts[3:]))


@triton.jit
def _begin_block_kernel(
    p_first, p_nth, p_length, p_room, p_row_batch_slot, p_row_state_slot, p_row_position, p_row_length, p_draft,
    p_drawn, p_token, p_end, p_turn, p_batch_slot, p_state_slot, p_position, p_draw_batch_slot, p_draw_position,
    p_history, max_len, mask, BESIDE: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
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
    tl.store(p_turn + i, tl.where(guesses, nth - BESIDE, -1))
    tl.store(p_batch_slot + i, batch_slot)
    tl.store(p_state_slot + i, tl.where(used, state_slot, -1))
    tl.store(p_position + i, tl.where(used, position, 0))
    tl.store(p_draw_batch_slot + i, tl.where(guesses, batch_slot, -1))
    tl.store(p_draw_position + i, position + 1 - BESIDE)
    tl.store(p_history + batch_slot.to(tl.int64) * max_len + position + 1 - BESIDE, -1, mask=guesses)


def begin_block(step: Rows, drawn: Tensor, g: GuessBlocks, history: Tensor, mask: int, *, at_anchor: bool) -> None:
    """Writes the device's parts of g, for blocks behind a step's draws.

    step: all rows of a decode, int32 [M], with drafts; drawn: int32 [M], of each row, -1 where nothing could
    be drawn. A row of a sequence counts if each token before it was drawn as it was drafted. A block begins
    with what the last one drew, at the position behind it; masks follow. at_anchor: whether a row guesses the
    token behind it; else a mask stands for the token that it guesses, and the first row guesses nothing.
    history: int32 [batch slots, positions], of the draws: it has no token where one is to be guessed, so
    penalties do not count what was guessed there before. Raises KernelError where types do not fit.
    """
    assert step.drafts is not None
    check("block", drawn.dtype == g.first.dtype == history.dtype == torch.int32, "int32 tokens, rows, history")
    launch(
        _begin_block_kernel, (len(g.first),), g.first, g.nth, g.length, g.room, step.batch_slot, step.state_slot,
        step.position, step.drafts.length, step.drafts.token, drawn, g.token, g.end, g.turn, g.rows.batch_slot,
        g.rows.state_slot, g.rows.position, g.draws.batch_slot, g.draws.position, history, history.stride(0), mask,
        BESIDE=0 if at_anchor else 1, MOST=MOST_ROWS, num_warps=1,
    )


@triton.jit(do_not_specialize=["stride_table"])
def _keys_of_layers_kernel(
    p_proj, p_k_norm, p_cos, p_sin, p_state_slot, p_batch_slot, p_position, p_table, p_pages, eps, stride_s, stride_row,
    stride_table, stride_page, stride_layer, NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    S: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, KV: tl.constexpr, PDL: tl.constexpr,
):
    """A key head of a row, in a layer."""
    wait_for_front(PDL)
    i_row, i_kv, i_layer = tl.program_id(0) // NK, tl.program_id(0) % NK, tl.program_id(1)
    if tl.load(p_state_slot + i_row) >= 0:
        position = tl.load(p_position + i_row)
        p_row = p_table + tl.load(p_batch_slot + i_row).to(tl.int64) * stride_table
        p_page = p_pages + tl.load(p_row + position // PAGE).to(tl.int64) * stride_page
        p_of_row = p_proj + i_row.to(tl.int64) * stride_row + i_layer * ((NQ + 2 * NK) * D)
        new_key(
            p_of_row, p_k_norm + i_layer * D, p_cos, p_sin, p_page + i_layer * stride_layer + i_kv * (PAGE * D),
            position, i_kv, eps, stride_s, NQ, NK, D, HALF, S, GROUP, PAGE, False, KV,
        )


def keys_of_layers(
    proj: Tensor, heads: AttentionHeads, weights: AttentionWeights, *, rows: Rows, cache: KvPages
) -> None:
    """Writes the keys and values of the rows' tokens in L layers, which read the same rows, as `keys_decode`
    does in one.

    proj: float32 [S, N, L row], layer by layer; weights: k_norm is float32 [L, d]; cache: bfloat16 [n_pages,
    L, 2, nk, 64, d]. Raises KernelError where shapes or types do not fit.
    """
    (n_parts, n_rows, width), pages, cos = proj.shape, cache.data, weights.cos
    n_layers, expect = len(weights.k_norm), partial(check, "keys_of_layers")
    fits = proj.dtype == torch.float32 and width == n_layers * heads.row and proj.stride(2) == 1
    expect(fits, f"float32 proj [S, N, {n_layers} {heads.row}], contiguous rows")
    expect(cos.is_contiguous() and weights.k_norm.is_contiguous(), "contiguous cos, norms")
    is_cache = pages.shape[1] == n_layers and kv.fits(pages[:, 0], heads.n_kv, heads.dim, BF16) and not heads.is_gated
    expect(is_cache, f"{n_layers} layers of {kv.expected(heads.n_kv, heads.dim, BF16)}, heads without a gate")
    launch(
        _keys_of_layers_kernel, (n_rows * heads.n_kv, n_layers), proj, weights.k_norm, cos, weights.sin,
        rows.state_slot, rows.batch_slot, rows.position, cache.table, pages, weights.eps, proj.stride(0),
        proj.stride(1), cache.table.stride(0), pages.stride(0), pages.stride(1), NQ=heads.n_q, NK=heads.n_kv,
        D=heads.dim, HALF=cos.shape[1], S=n_parts, GROUP=8 if heads.n_q <= 8 * heads.n_kv else 16, PAGE=PAGE_SIZE,
        KV=kv.constant(BF16), num_warps=4,
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


@triton.jit(do_not_specialize=["n_rows"])
def _block_conv_kernel(
    p_x, p_nth, p_own, p_base, p_out, n_rows, width, n_own, first, n_groups, GROUP: tl.constexpr, TAPS: tl.constexpr,
    X_PARTS: tl.constexpr, OWN_PARTS: tl.constexpr, ADD: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
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
        b_x, b_own = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
        for s in tl.static_range(X_PARTS):
            p_part = p_x + (s * n_rows + i_row - tap) * width
            b_x += tl.load(p_part + o_col, mask=b_here, other=0.0).to(tl.float32)
        for s in tl.static_range(OWN_PARTS):
            p_part = p_own + (s * n_rows + i_row) * n_own + first + tap * n_groups
            b_own += tl.load(p_part + o_col // GROUP, mask=b_here, other=0.0)
        b_y += (tl.load(p_base + tap * width + o_col, mask=b_here, other=0.0) + b_own) * b_x
    p_to = p_out + i_row * width + o_col
    if ADD:
        b_y += tl.load(p_to, mask=b_mask, other=0.0)
    tl.store(p_to, b_y.to(p_out.dtype.element_ty), mask=b_mask)


def block_conv(x: Tensor, base: Tensor, own: Tensor, group: int, *, nth: Tensor, out: Tensor) -> None:
    """y[m] = sum over taps j of (base[j] + own[m, j], one value a group of channels) * x[m - j], with no row
    before row 0 of a block.

    x bfloat16 [N, H], of the side before a mixer or feed-forward: out, bfloat16, too, = y. x float32 [S, N,
    H], partial sums, of the side behind: out, float32 [N, H], += y. base: float32 [2 * taps, H], of the side
    before, then behind; own: float32 [S, N, 2 * taps * H / group], partial sums; nth: int32 [N], a row's
    number in its block. Raises KernelError where shapes or types do not fit.
    """
    (n, width), taps, is_before = out.shape, len(base) // 2, x.dtype == torch.bfloat16
    n_groups = width // group
    check("block_conv", x.dtype == out.dtype and x.shape[x.ndim - 2 :] == out.shape, "out as x")
    check("block_conv", x.ndim == 2 if is_before else x.dtype == torch.float32 and x.ndim == 3, "bfloat16 x, or parts")
    check("block_conv", base.shape == (2 * taps, width) and width % group == 0, f"kernels of width {width}")
    fits = own.ndim == 3 and own.shape[1:] == (n, 2 * taps * n_groups) and own.dtype == torch.float32
    check("block_conv", fits, "parts of a value a tap and group")
    check("block_conv", all(t.is_contiguous() for t in (x, base, own, out)), "contiguous tensors")
    check("block_conv", nth.shape == (n,) and nth.dtype == torch.int32, f"{n} int32 numbers")
    launch(
        _block_conv_kernel, (n, -(-width // LANES)), x, nth, own, base if is_before else base[taps:], out, n, width,
        own.shape[2], 0 if is_before else taps * n_groups, n_groups, GROUP=group, TAPS=taps,
        X_PARTS=1 if is_before else len(x), OWN_PARTS=len(own), ADD=not is_before, LANES=LANES, num_warps=4,
    )


@triton.jit
def _bound_kernel(
    p_logits, p_best, n_vocab, n_real, n_tiles, factor, cap, TILE: tl.constexpr, BOUNDS: tl.constexpr,
    CAPPED: tl.constexpr, PDL: tl.constexpr,
):
    """A tile of a row's logits."""
    wait_for_front(PDL)
    i_row, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = i_tile * TILE + tl.arange(0, TILE)
    p_x = p_logits + i_row * n_vocab + o
    b_x = tl.load(p_x, mask=o < n_real, other=float("-inf"))
    if BOUNDS:
        b_x *= factor
        if CAPPED:
            b_x = cap * (2 * tl.sigmoid(2 * b_x / cap) - 1)
        tl.store(p_x, b_x, mask=o < n_real)
    if p_best is not None:
        tl.store(p_best + i_row * n_tiles + i_tile, tl.max(tl.where(o < n_real, order_of(b_x, o), LOWEST), 0))


@triton.jit
def _candidates_kernel(
    p_logits, p_best, p_id, p_value, n_vocab, n_real, n_tiles, K: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):
    """The K likeliest ids of a row: the best of the tiles' best, whose place that tile's next best takes."""
    wait_for_front(PDL)
    i_row, o_tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    best = tl.load(p_best + i_row * n_tiles + o_tile, mask=o_tile < n_tiles, other=LOWEST)
    for j in range(K):
        first = tl.max(best, 0)
        id = id_of(first)
        tl.store(p_id + i_row * K + j, id)
        tl.store(p_value + i_row * K + j, value_of(first))
        i_tile = id // TILE
        o = i_tile * TILE + tl.arange(0, TILE)
        c = order_of(tl.load(p_logits + i_row * n_vocab + o, mask=o < n_real, other=float("-inf")), o)
        best = tl.where(o_tile == i_tile, tl.max(tl.where((o < n_real) & (c < first), c, LOWEST), 0), best)


@triton.jit
def _rule_out_kernel(p_logits, n_vocab, n_real, TILE: tl.constexpr, PDL: tl.constexpr):
    """A tile of a row: no id of it may be drawn."""
    wait_for_front(PDL)
    o = tl.program_id(1) * TILE + tl.arange(0, TILE)
    p_x = p_logits + tl.program_id(0).to(tl.int64) * n_vocab + o
    tl.store(p_x, tl.full((TILE,), -1e30, tl.float32), mask=o < n_real)  # finite, as a sampler wants it


@dataclass(frozen=True)
class LikeliestIds:
    """The likeliest ids of rows of logits."""

    best: Tensor  # int64 [N, tiles]: a workspace
    id: Tensor  # int32 [N, K], the likeliest first, of equal ones the lower id
    logit: Tensor  # float32 [N, K]

    def front(self, n: int) -> LikeliestIds:
        """The first n."""
        return LikeliestIds(self.best[:n], self.id[:n], self.logit[:n])


def candidates(n: int, n_vocab: int, top_k: int, allocate: Allocate) -> LikeliestIds:
    """Allocates those of n rows. allocate(name, size, dtype) gives zeroed tensors."""
    return LikeliestIds(
        best=allocate("block best", (n, -(-n_vocab // TILE)), torch.int64),
        id=allocate("block candidates", (n, top_k), torch.int32),
        logit=allocate("block candidates' logits", (n, top_k), torch.float32),
    )


def bound_scores(logits: Tensor, n_real: int, factor: float, cap: float, found: LikeliestIds | None = None) -> None:
    """logits *= factor, and bounded by a tanh to within cap (0: not bounded), for ids below n_real. With
    `found`, which is of as many rows, it gets the likeliest of these ids, and in the logits all become -1e30.

    logits: float32 [N, V], contiguous. Raises KernelError where shapes do not fit.
    """
    n, n_vocab = logits.shape
    n_tiles, has_bounds = -(-n_vocab // TILE), factor != 1.0 or cap != 0.0
    check("bound_scores", logits.dtype == torch.float32 and logits.is_contiguous(), "contiguous float32 logits")
    check("bound_scores", 0 < n_real <= n_vocab < MAX_VOCAB, f"1 to {n_vocab} real ids, found {n_real}")
    if has_bounds or found is not None:
        launch(
            _bound_kernel, (n, n_tiles), logits, None if found is None else found.best, n_vocab, n_real, n_tiles,
            factor, cap or 1.0, TILE=TILE, BOUNDS=has_bounds, CAPPED=cap != 0.0, num_warps=4,
        )
    if found is None:
        return
    top_k = found.id.shape[1]
    check("bound_scores", len(found.id) == len(found.logit) == len(found.best) == n, f"candidates of {n} rows")
    check("bound_scores", 0 < top_k <= n_real, f"1 to {n_real} candidates, found {top_k}")
    launch(
        _candidates_kernel, (n,), logits, found.best, found.id, found.logit, n_vocab, n_real, n_tiles, K=top_k,
        TILE=TILE, TILES=next_power_of_2(n_tiles), num_warps=4,
    )
    launch(_rule_out_kernel, (n, n_tiles), logits, n_vocab, n_real, TILE=TILE, num_warps=4)


@triton.jit(do_not_specialize=["n_rows"])
def _next_guess_kernel(
    p_turn, p_nth, p_token, p_row_batch_slot, p_draw_batch_slot, p_guess, p_state, p_weight, p_bias, width, least,
    p_before, p_embedded, p_successor, p_projected, p_id, p_value, p_logits, n_vocab, n_rows, BESIDE: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, SEES: tl.constexpr, K: tl.constexpr, KS: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    """A row of a block: whether it guesses now, behind which token."""
    i = tl.program_id(0)
    if PDL:  # and nobody is let start early: what draws reads which rows do before it waits
        tl.extra.cuda.gdc_wait()
    turn, is_first = tl.load(p_turn + i), tl.load(p_nth + i) == BESIDE
    is_now = turn == 0
    token = tl.load(p_token + i - BESIDE, mask=is_now & is_first, other=-1)
    guess = tl.load(p_guess + i - 1, mask=is_now & (is_first == 0), other=-1)
    if p_id is not None:  # nor does a block go on behind a token that was no candidate
        has_one = is_now & (is_first == 0) & (guess >= 0)
        p_score = p_logits + (i.to(tl.int64) - 1) * n_vocab + guess
        is_none = has_one & (tl.load(p_score, mask=has_one, other=0.0) < -1e29)
        tl.store(p_guess + i - 1, -1, mask=is_none)
        guess = tl.where(is_none, -1, guess)
    before = tl.where(is_first, token, guess)
    guesses = is_now & (before >= 0)
    row, i_row, o_rank = tl.maximum(before, 0).to(tl.int64), i.to(tl.int64), tl.arange(0, RANKS)
    if p_state is not None:
        b_sum = tl.zeros((LANES,), tl.float32)
        for first in range(0, width, LANES):
            o = first + tl.arange(0, LANES)
            b_mask = (o < width) & guesses
            b_x = tl.load(p_state + i_row * width + o, mask=b_mask, other=0.0).to(tl.float32)
            b_sum += b_x * tl.load(p_weight + o, mask=b_mask, other=0.0)
        logit = tl.sum(b_sum, 0) + tl.load(p_bias)
        if SEES:
            b_mask = (o_rank < RANK) & guesses
            b_x = tl.load(p_before + row * RANK + o_rank, mask=b_mask, other=0.0).to(tl.float32)
            logit += tl.sum(b_x * tl.load(p_weight + width + o_rank, mask=b_mask, other=0.0), 0)
        guesses = guesses & (tl.sigmoid(logit) >= least)
    tl.store(p_turn + i, turn - 1)
    tl.store(p_draw_batch_slot + i, tl.where(guesses, tl.load(p_row_batch_slot + i), -1))
    tl.store(p_guess + i, -1, mask=is_now & (guesses == 0))
    if p_embedded is not None:
        b_x = tl.load(p_before + row * RANK + o_rank, mask=(o_rank < RANK) & guesses, other=0.0)
        tl.store(p_embedded + i_row * RANK + o_rank, b_x, mask=o_rank < RANK)
    if p_id is not None:
        o = tl.arange(0, KS)
        b_mask = (o < K) & guesses
        b_id = tl.load(p_id + i_row * K + o, mask=b_mask, other=0).to(tl.int64)
        b_score = tl.load(p_value + i_row * K + o, mask=b_mask, other=0.0)
        for first in range(0, RANK, 32):
            o_r = first + tl.arange(0, 32)
            b_h = tl.zeros((32,), tl.float32)
            for s in tl.static_range(PARTS):
                b_h += tl.load(p_projected + (s * n_rows + i_row) * RANK + o_r)
            b_h *= tl.load(p_before + row * RANK + o_r).to(tl.float32)
            b_next = tl.load(p_successor + b_id[:, None] * RANK + o_r[None, :], mask=b_mask[:, None], other=0.0)
            b_score += tl.sum(b_next.to(tl.float32) * b_h[None, :], 1)
        tl.store(p_logits + i_row * n_vocab + b_id, b_score, mask=b_mask)


@dataclass(frozen=True)
class Chance:
    """The chance of each guess to be right, of states, bfloat16 [N, H]: sigmoid(<weight, state | row of the
    token before> + bias), without that row where the weight is not so long.
    """

    state: Tensor
    weight: Tensor  # float32 [H] or [H + rank]
    bias: Tensor  # float32 [1]
    least: float  # below which a block ends


@dataclass(frozen=True)
class PairScores:
    """The score of a candidate behind the token before: its logit + <before[token] * projected,
    successor[candidate]>.
    """

    successor: Tensor  # bfloat16 [V, rank]
    projected: Tensor  # float32 [S, N, rank]: partial sums of each row's
    of: LikeliestIds


def next_guess(
    g: GuessBlocks, guesses: Tensor, logits: Tensor, before: Tensor | None = None, embedded: Tensor | None = None,
    pairs: PairScores | None = None, chance: Chance | None = None, *, guesses_at_anchor: bool,
) -> None:
    """Has one guess of each block drawn next, the first where none is: writes which rows draw, to g.draws. A
    row draws behind the token that is drawn in front of it; where there is none, or the chance is too small,
    its guess is -1, and those behind it are, too.

    guesses: int32 [N], of each row, what was drawn so far; logits: float32 [N, V]. before: bfloat16 [V,
    rank], of the tokens in front; embedded: bfloat16 [N, rank], gets the rows of before that are of these
    tokens, 0 where nothing draws. With pairs, whose first factor is `before`, candidates get their scores in
    the logits, and a guess that was none of them, since none may be drawn, becomes -1 when the one behind it
    would be drawn.
    Raises KernelError where shapes or types do not fit.
    """
    n, rank = len(g.turn), 0 if before is None else before.shape[1]
    width, sees = (0, False) if chance is None else (chance.state.shape[1], len(chance.weight) > chance.state.shape[1])
    expect = partial(check, "next_guess")
    expect(guesses.dtype == torch.int32 and len(guesses) >= n and len(logits) == n, f"{n} rows of logits and guesses")
    expect(rank % 32 == 0, "a rank that is a multiple of 32")
    expect(embedded is None or (rank > 0 and embedded.shape == (n, rank)), f"embedded [{n}, rank]")
    of = None if pairs is None else pairs.of
    if pairs is not None:
        expect(before is not None and pairs.successor.shape == before.shape, "two tables of one shape")
        expect(pairs.projected.shape[1:] == (n, rank) and pairs.projected.is_contiguous(), f"projected [S, {n}, rank]")
    if chance is not None:
        expect(len(chance.state) == n and len(chance.weight) == width + rank * sees, "a weight for states")
    top_k = 1 if of is None else of.id.shape[1]
    launch(
        _next_guess_kernel, (n,), g.turn, g.nth, g.token, g.rows.batch_slot, g.draws.batch_slot, guesses,
        *((None, None, None, 0, 0.0) if chance is None else (
            chance.state, chance.weight, chance.bias, width, chance.least)),
        before, embedded, *((None, None) if pairs is None else (pairs.successor, pairs.projected)),
        *((None, None) if of is None else (of.id, of.logit)), logits, logits.shape[1], n,
        BESIDE=0 if guesses_at_anchor else 1, RANK=rank, RANKS=next_power_of_2(max(1, rank)), SEES=sees, K=top_k,
        KS=next_power_of_2(top_k), PARTS=1 if pairs is None else len(pairs.projected), LANES=LANES, num_warps=4,
    )


@triton.jit
def _add_scores_kernel(p_scores, p_draw_batch_slot, p_logits, n_vocab, n_real, TILE: tl.constexpr, PDL: tl.constexpr):
    """A tile of a row that draws."""
    wait_for_front(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    if tl.load(p_draw_batch_slot + i_row) >= 0:
        o = tl.program_id(1) * TILE + tl.arange(0, TILE)
        p_x = p_logits + i_row * n_vocab + o
        b_sum = tl.load(p_x, mask=o < n_real, other=0.0)
        b_sum += tl.load(p_scores + i_row * n_vocab + o, mask=o < n_real, other=0.0)
        tl.store(p_x, b_sum, mask=o < n_real)


def add_scores(scores: Tensor, draws: Draws, logits: Tensor, n_real: int) -> None:
    """logits[r] += scores[r] for ids below n_real in rows r that draw. Both float32 [N, V], contiguous.

    Raises KernelError where shapes do not fit.
    """
    n, n_vocab = logits.shape
    check("add_scores", scores.shape == logits.shape and len(draws.batch_slot) == n, f"{n} rows of {n_vocab} scores")
    check("add_scores", scores.is_contiguous() and logits.is_contiguous(), "contiguous tensors")
    launch(
        _add_scores_kernel, (n, -(-n_vocab // TILE)), scores, draws.batch_slot, logits, n_vocab, n_real, TILE=TILE,
        num_warps=4,
    )


@triton.jit
def _scale_rows_kernel(p_x, factor, width, LANES: tl.constexpr, PDL: tl.constexpr):
    wait_for_front(PDL)
    o = tl.program_id(1) * LANES + tl.arange(0, LANES)
    p_x += tl.program_id(0).to(tl.int64) * width + o
    tl.store(p_x, tl.load(p_x, mask=o < width, other=0.0) * factor, mask=o < width)


def scale_rows(x: Tensor, factor: float) -> None:
    """x *= factor. x: float32 [N, H], contiguous; KernelError where it is not."""
    check("scale_rows", x.dtype == torch.float32 and x.is_contiguous(), "contiguous float32 rows")
    launch(_scale_rows_kernel, (len(x), -(-x.shape[1] // LANES)), x, factor, x.shape[1], LANES=LANES, num_warps=4)
