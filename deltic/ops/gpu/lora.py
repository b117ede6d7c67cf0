"""LoRA adapters: out += scale * up (down x), of rows that each have an adapter of their own, or none.

Two kernels around the product of a matrix:

    shrink    u = down x: sums over fixed chunks of K, written apart
    expand    v = bfloat16(scale * u), the chunks added in order; out += up v, over the ranks in order

Source: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1; many adapters in one batch: Chen et al., "Punica"
(arXiv:2310.18547).

Where an adapter's terms lie is in a table on the device. So a recorded step finds what was loaded after it.
A fused matrix has up to SEGMENTS terms, each of a range of its rows; their downs lie one below the
other. Ranks are padded with zeros to blocks of RANKS.

A program has rows of one adapter: a group of up to 16 rows of a decode, which the host has put together, or a
block of a prefill. Routed pairs of experts come as the experts' lists have them: a program goes through the
adapters of its pairs, one by one. Rows without an adapter are neither read nor written. A row's sums have one
order, of chunks and blocks that follow the matrix alone, so its bits do not tell who is beside it.

What is read before a kernel's `gdc_wait` are groups, table and adapters, which nobody writes in a step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltic.ops.contract import check
from deltic.ops.gpu.blocks import BLOCK, GROUP_ROWS, AdapterRows
from deltic.ops.gpu.chip import chip, prefetch_l2, wait_for_front
from deltic.ops.gpu.launch import launch, next_power_of_2

RANKS = 16
"""Ranks of a block: what ranks are padded to."""
SEGMENTS = 4
"""Terms of one matrix."""

WORDS = 32
"""int64 words of an adapter's entry for a matrix: where down begins in the arena, in elements, and its ranks;
then of each term those of SEGMENT_WORDS. No ranks: no term.
"""
SEGMENT_WORDS = 6
"""Words of a segment: where up begins, first row of the matrix, rows, ranks, where these begin among all,
bits of the scale.
"""
ALIGNED = 64
"""Elements to which all of them are aligned in the arena."""

MOST_PARTS = 20
"""Chunks of K, at most; with the two least sizes part of what defines the bits."""
_LEAST_CHUNK, _LEAST_LONG_CHUNK = 1024, 2048
_RANKS, _SEGMENT_WORDS = tl.constexpr(RANKS), tl.constexpr(SEGMENT_WORDS)
_OF_ROWS, _OF_LINES, _OF_TILES = (tl.constexpr(i) for i in range(3))
"""Kinds of x for a line of experts: its row of the step, a line of its own, or one in tiles, as entries are.
"""


@dataclass(frozen=True)
class Target:
    """A matrix [n, k] (or one of several) to which adapters may add."""

    table: Tensor  # int64 [slots, WORDS], of all matrices' table
    arena: Tensor  # bfloat16, flat: adapters
    sums: Tensor  # float32, flat: a workspace
    n: int
    k: int
    n_segments: int
    max_rank: int

    @property
    def width(self) -> int:
        """Floats of a row of sums."""
        return self.n_segments * padded(self.max_rank)


def padded(rank: int) -> int:
    """Whole blocks of ranks."""
    return -(-rank // RANKS) * RANKS


def chunk_of(k: int, are_blocks: bool) -> int:
    """Columns of a chunk of a sum over k; are_blocks: in a prefill."""
    chunk = _LEAST_LONG_CHUNK if are_blocks else _LEAST_CHUNK
    while -(-k // chunk) > MOST_PARTS:
        chunk *= 2
    return chunk


def n_parts(k: int, are_blocks: bool) -> int:
    """Chunks of a sum over k."""
    return -(-k // chunk_of(k, are_blocks))


def n_sums(n_lines: int, k: int, n_segments: int, max_rank: int, are_blocks: bool) -> int:
    """Floats of the workspace for so many rows."""
    return n_parts(k, are_blocks) * n_lines * n_segments * padded(max_rank)


@triton.jit
def _sum_ranks(p_x_row, b_used, p_down, i_r, total, first_k, k, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
               BLOCK_R: tl.constexpr):
    """float32 [BT, BLOCK_R]: down x over one chunk of K; p_x_row [BT]: where the rows of x begin."""
    o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
    b_sum = tl.zeros((p_x_row.shape[0], BLOCK_R), tl.float32)
    for i_k in range(first_k, tl.minimum(first_k + CHUNK, k), BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        b_x = tl.load(p_x_row[:, None] + o_k[None, :], mask=b_used[:, None] & (o_k < k)[None, :], other=0.0)
        p_w = p_down + o_r.to(tl.int64)[:, None] * k + o_k[None, :]
        b_w = tl.load(p_w, mask=(o_r < total)[:, None] & (o_k < k)[None, :], other=0.0)
        b_sum = tl.dot(b_x, tl.trans(b_w), b_sum)
    return b_sum


@triton.jit
def _delta(p_entry, p_arena, p_u, b_line, b_used, i_matrix, i_m, u_part, u_row, S: tl.constexpr,
           SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """float32 [BT, BLOCK_M], up v of the columns of a tile, and whether any term has some of them."""
    o_m, o_r = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, _RANKS)
    b_delta = tl.zeros((b_line.shape[0], BLOCK_M), tl.float32)
    found = 0
    p_line = p_u + b_line.to(tl.int64) * u_row
    ranges: tl.tuple = ()
    for i in tl.static_range(SEGMENTS):  # all are asked for at once
        p_range = p_entry + 3 + i * _SEGMENT_WORDS
        ranges += (
            (tl.load(p_range).to(tl.int32), tl.load(p_range + 1).to(tl.int32), tl.load(p_range + 2).to(tl.int32)),
        )
    for i in tl.static_range(SEGMENTS):
        p_segment = p_entry + 2 + i * _SEGMENT_WORDS
        first, n, rank = ranges[i][0], ranges[i][1], tl.multiple_of(ranges[i][2], 16)
        if (rank > 0) & (first < (i_m + 1) * BLOCK_M) & (first + n > i_m * BLOCK_M):
            found = 1
            at = tl.multiple_of(tl.load(p_segment + 4).to(tl.int32), 16)
            scale = tl.load(p_segment + 5).to(tl.int32).to(tl.float32, bitcast=True)
            p_up = p_arena + tl.multiple_of(tl.load(p_segment), 16)
            p_up += tl.cast(i_matrix, tl.int64) * n * rank
            b_in = (o_m >= first) & (o_m < first + n)
            p_row = p_up + (o_m - first).to(tl.int64) * rank
            for i_r in range(0, rank, _RANKS):
                p_part = p_line[:, None] + (at + i_r + o_r)[None, :]
                b_u = tl.zeros((b_line.shape[0], _RANKS), tl.float32)
                for s in tl.static_range(S):
                    b_u += tl.load(p_part + s * u_part, mask=b_used[:, None], other=0.0)
                b_w = tl.load(p_row[:, None] + (i_r + o_r)[None, :], mask=b_in[:, None], other=0.0)
                b_delta = tl.dot((b_u * scale).to(tl.bfloat16), tl.trans(b_w), b_delta)
    return b_delta, found


@triton.jit
def _add_to(p_out, b_mask, b_delta):
    b_sum = tl.load(p_out, mask=b_mask, other=0.0).to(tl.float32) + b_delta
    tl.store(p_out, b_sum.to(p_out.dtype.element_ty), mask=b_mask)


@triton.jit
def _rows_of(p_row, i_item, BT: tl.constexpr):
    """Rows of an item, and which are in use."""
    o_t = tl.arange(0, BT)
    if p_row is None:
        b_row = i_item * BT + o_t
    else:
        b_row = tl.load(p_row + i_item * BT + o_t)
    return tl.maximum(b_row, 0), b_row >= 0


@triton.jit(do_not_specialize=["n_items"])
def _shrink_kernel(p_x, p_arena, p_table, p_adapter, p_row, p_u, n_items, k, slot_stride, u_part, u_row,
                   BT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
                   LINES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """Grid (chunks, blocks of ranks, items). A program goes through every so-manieth block and item. Groups
    that are not in use stand behind all others, blocks do not.
    """
    i_s, i_item = tl.program_id(0), tl.program_id(2)
    first_k = i_s * CHUNK
    if PDL and EARLY:
        gdc_launch_dependents()
    adapter = tl.load(p_adapter + i_item)
    if PDL:
        if p_row is not None:  # noqa: SIM102 (a constant, then a value)
            if adapter >= 0:
                p_entry = p_table + adapter.to(tl.int64) * slot_stride
                o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
                o_r = tl.minimum(o_r, tl.maximum(tl.load(p_entry + 1).to(tl.int32) - 1, 0))
                o_k = tl.minimum(first_k + tl.arange(0, LINES) * 64, k - 1)
                prefetch_l2(p_arena + tl.load(p_entry) + o_r.to(tl.int64)[:, None] * k + o_k[None, :])
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    while adapter >= 0:
        p_entry = p_table + adapter.to(tl.int64) * slot_stride
        total = tl.load(p_entry + 1).to(tl.int32)
        p_down = p_arena + tl.multiple_of(tl.load(p_entry), 16)
        b_row, b_used = _rows_of(p_row, i_item, BT)
        p_x_row = p_x + b_row.to(tl.int64) * k
        i_r = tl.program_id(1)
        while i_r * BLOCK_R < total:
            b_sum = _sum_ranks(p_x_row, b_used, p_down, i_r, total, first_k, k, CHUNK, BLOCK_K, BLOCK_R)
            o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
            p_to = p_u + i_s.to(tl.int64) * u_part + b_row.to(tl.int64)[:, None] * u_row + o_r[None, :]
            tl.store(p_to, b_sum, mask=b_used[:, None] & (o_r < total)[None, :])
            i_r += tl.num_programs(1)
        i_item += tl.num_programs(2)
        adapter = tl.load(p_adapter + i_item, mask=i_item < n_items, other=-1)


@triton.jit(do_not_specialize=["n_items"])
def _expand_kernel(p_out, p_arena, p_table, p_adapter, p_row, p_u, n_items, m, out_row, slot_stride, u_part, u_row,
                   S: tl.constexpr, SEGMENTS: tl.constexpr, BT: tl.constexpr, BLOCK_M: tl.constexpr,
                   EARLY: tl.constexpr, PDL: tl.constexpr):
    """Grid (tiles of columns, items)."""
    i_m, i_item = tl.program_id(0), tl.program_id(1)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL and EARLY:
        gdc_launch_dependents()
    adapter = tl.load(p_adapter + i_item)
    if PDL:
        if p_row is not None:  # noqa: SIM102 (a constant, then a value)
            if adapter >= 0:
                p_entry = p_table + adapter.to(tl.int64) * slot_stride + 2
                for i in tl.static_range(SEGMENTS):
                    p_segment = p_entry + i * _SEGMENT_WORDS
                    first, n, rank = tl.load(p_segment + 1), tl.load(p_segment + 2), tl.load(p_segment + 3)
                    if (rank > 0) & (first < (i_m + 1) * BLOCK_M) & (first + n > i_m * BLOCK_M):
                        b_at = tl.minimum(tl.maximum(o_m - first, 0), n - 1)
                        prefetch_l2(p_arena + tl.load(p_segment) + b_at * rank)
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    while adapter >= 0:
        p_entry = p_table + adapter.to(tl.int64) * slot_stride
        b_row, b_used = _rows_of(p_row, i_item, BT)
        b_delta, found = _delta(
            p_entry, p_arena, p_u, b_row, b_used, 0, i_m, u_part, u_row, S, SEGMENTS, BLOCK_M
        )
        if found > 0:
            p_to = p_out + b_row.to(tl.int64)[:, None] * out_row + o_m[None, :]
            _add_to(p_to, b_used[:, None] & (o_m < m)[None, :], b_delta)
        i_item += tl.num_programs(1)
        adapter = tl.load(p_adapter + i_item, mask=i_item < n_items, other=-1)


@triton.jit
def _gather_kernel(p_token, p_batch_slot, p_ahead, p_draft, p_arena, p_table, p_adapter, p_row, p_u, slot_stride, u_row,
                   BT: tl.constexpr, PDL: tl.constexpr):
    """The columns of down of tokens: of rows; or of batch slots, where p_batch_slot says that of a row, and
    drafts may be ahead.
    """
    i_item = tl.program_id(0)
    adapter = tl.load(p_adapter + i_item)
    wait_for_front(PDL)
    if adapter < 0:
        return
    p_entry = p_table + adapter.to(tl.int64) * slot_stride
    total = tl.multiple_of(tl.load(p_entry + 1).to(tl.int32), 16)
    p_down = p_arena + tl.multiple_of(tl.load(p_entry), 16)
    b_row, b_used = _rows_of(p_row, i_item, BT)
    if p_batch_slot is None:
        b_token = tl.load(p_token + b_row, mask=b_used, other=0)
    else:
        b_batch_slot = tl.maximum(tl.load(p_batch_slot + b_row, mask=b_used, other=0), 0)
        b_token = tl.load(p_token + b_batch_slot)
        if p_ahead is not None:
            b_drafted = b_used & (tl.load(p_ahead + b_row, mask=b_used, other=0) > 0)
            b_token = tl.where(b_drafted, tl.load(p_draft + b_row, mask=b_drafted, other=0), b_token)
    for i_r in range(0, total, _RANKS):
        o_r = i_r + tl.arange(0, _RANKS)
        p_from = p_down + tl.maximum(b_token, 0).to(tl.int64)[:, None] * total + o_r[None, :]
        b_u = tl.load(p_from, mask=(b_used & (b_token >= 0))[:, None], other=0.0).to(tl.float32)
        tl.store(p_u + b_row.to(tl.int64)[:, None] * u_row + o_r[None, :], b_u, mask=b_used[:, None])


@triton.jit
def _item_of(p_adapter, p_row, p_of_row, p_counters, p_entries, p_lists, i_item, n_items, n_rows, act_base,
             E: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr):
    """Item i_item of a mixture: the first n_items are those of the shared expert, then come parts of BT pairs
    of the entries, which have TILE.

    Returns the expert (-1: the shared one), and of its rows adapter (-1: none), row, slot, line and row of
    act.
    """
    o_t = tl.arange(0, BT)
    if i_item < n_items:
        b_row, b_used = _rows_of(p_row, i_item, BT)
        b_adapter = tl.where(b_used, tl.load(p_adapter + i_item), -1)
        expert = i_item * 0 - 1
        b_slot = o_t * 0 + SLOTS
        b_line = n_rows * SLOTS + b_row
        b_act = act_base + b_row
    else:
        PARTS: tl.constexpr = TILE // BT
        i_entry, i_part = (i_item - n_items) // PARTS, (i_item - n_items) % PARTS
        is_used = i_entry < tl.load(p_counters + E)
        entry = tl.where(is_used, tl.load(p_entries + i_entry, mask=is_used, other=0), 0)
        expert = entry & 65535
        first = (entry >> 16) * TILE + i_part * BT
        n = tl.where(is_used, tl.load(p_counters + expert) - first, 0)
        b_line = tl.load(p_lists + expert * n_rows + first + o_t, mask=o_t < n, other=0)
        b_row, b_slot = b_line // SLOTS, b_line % SLOTS
        if p_of_row is None:
            b_adapter = tl.load(p_adapter + b_row // BT, mask=o_t < n, other=-1)
        else:
            b_adapter = tl.load(p_of_row + b_row, mask=o_t < n, other=-1)
        b_act = i_entry * TILE + i_part * BT + o_t
    return expert, b_adapter, b_row, b_slot, b_line, b_act


@triton.jit(do_not_specialize=["n_items", "n_rows", "act_base"])
def _shrink_experts_kernel(p_x, p_arena, p_table, p_shared_table, p_adapter, p_row, p_of_row, p_counters, p_entries,
                           p_lists, p_u, n_items, n_rows, act_base, k, k_shared, x_row, slot_stride, u_part, u_row,
                           X: tl.constexpr, E: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
                           BT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
                           PDL: tl.constexpr):
    """Grid (chunks, blocks of ranks, items of the shared expert and of entries)."""
    i_s = tl.program_id(0)
    wait_for_front(PDL)
    expert, b_adapter, b_row, _, b_line, b_act = _item_of(
        p_adapter, p_row, p_of_row, p_counters, p_entries, p_lists, tl.program_id(2), n_items, n_rows, act_base, E,
        SLOTS, TILE, BT,
    )
    b_from = b_row
    if X == _OF_LINES:
        b_from = b_line
    if X == _OF_TILES:
        b_from = b_act
    p_x_row = p_x + b_from.to(tl.int64) * x_row
    width = k
    if expert < 0:
        width = k_shared
    width = tl.multiple_of(width, 16)
    adapter = tl.max(b_adapter, 0)
    while adapter >= 0:
        b_mine = b_adapter == adapter
        p_entry = p_table + adapter.to(tl.int64) * slot_stride
        if expert < 0:
            p_entry = p_shared_table + adapter.to(tl.int64) * slot_stride
        total = tl.multiple_of(tl.load(p_entry + 1).to(tl.int32), 16)
        p_down = p_arena + tl.multiple_of(tl.load(p_entry), 16)
        p_down += tl.maximum(expert, 0).to(tl.int64) * total * width
        i_r = tl.program_id(1)
        while i_r * BLOCK_R < total:
            b_sum = _sum_ranks(p_x_row, b_mine, p_down, i_r, total, i_s * CHUNK, width, CHUNK, BLOCK_K, BLOCK_R)
            o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
            p_to = p_u + i_s.to(tl.int64) * u_part + b_line.to(tl.int64)[:, None] * u_row + o_r[None, :]
            tl.store(p_to, b_sum, mask=b_mine[:, None] & (o_r < total)[None, :])
            i_r += tl.num_programs(1)
        b_adapter = tl.where(b_mine, -1, b_adapter)
        adapter = tl.max(b_adapter, 0)


@triton.jit(do_not_specialize=["n_items", "n_rows"])
def _expand_experts_kernel(p_out, p_arena, p_table, p_shared_table, p_adapter, p_row, p_of_row, p_counters, p_entries,
                           p_lists, p_weight, p_u, n_items, n_rows, m, m_shared, out_row, slot_stride, u_part, u_row,
                           BY_SLOT: tl.constexpr, S: tl.constexpr, SEGMENTS: tl.constexpr, E: tl.constexpr,
                           SLOTS: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr, BLOCK_M: tl.constexpr,
                           PDL: tl.constexpr):
    """Grid (tiles of columns, items of the shared expert and of entries)."""
    i_m = tl.program_id(0)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_for_front(PDL)
    expert, b_adapter, b_row, b_slot, b_line, _ = _item_of(
        p_adapter, p_row, p_of_row, p_counters, p_entries, p_lists, tl.program_id(1), n_items, n_rows, 0, E, SLOTS,
        TILE, BT,
    )
    width = m
    if expert < 0:
        width = m_shared
    adapter = tl.max(b_adapter, 0)
    while adapter >= 0:
        b_mine = b_adapter == adapter
        p_entry = p_table + adapter.to(tl.int64) * slot_stride
        if expert < 0:
            p_entry = p_shared_table + adapter.to(tl.int64) * slot_stride
        b_delta, found = _delta(
            p_entry, p_arena, p_u, b_line, b_mine, tl.maximum(expert, 0), i_m, u_part, u_row, S, SEGMENTS, BLOCK_M
        )
        if found > 0:
            b_mask = b_mine[:, None] & (o_m < width)[None, :]
            if BY_SLOT:
                b_weight = tl.load(p_weight + b_row * (SLOTS + 1) + b_slot, mask=b_mine, other=0.0)
                p_to = p_out + (b_slot * n_rows + b_row).to(tl.int64)[:, None] * out_row + o_m[None, :]
                b_old = tl.load(p_to, mask=b_mask, other=0.0)
                tl.store(p_to, tl.fma(b_delta, b_weight[:, None] + tl.zeros_like(b_delta), b_old), mask=b_mask)
            else:
                _add_to(p_out + b_line.to(tl.int64)[:, None] * out_row + o_m[None, :], b_mask, b_delta)
        b_adapter = tl.where(b_mine, -1, b_adapter)
        adapter = tl.max(b_adapter, 0)


ITEMS = 16
"""Programs beside each other for the groups of a decode, at most: each does further ones, too."""
FEW_ROWS = 64
"""Rows of a decode up to which the next kernel may start at once."""
RANK_PROGRAMS = 8


def _who(rows: AdapterRows, n: int) -> tuple[int, int, bool]:
    """Items, programs for them, and whether there are few rows. n: rows of the step."""
    n_items = len(rows.adapter)
    if rows.row is None:
        check("lora", n == n_items * BLOCK, f"{n} rows in {n_items} blocks")
        return n_items, n_items, False
    check("lora", rows.row.shape == (n_items, GROUP_ROWS), f"groups of {GROUP_ROWS} rows")
    return n_items, min(n_items, ITEMS), n <= FEW_ROWS


def _cut(target: Target, k: int, are_blocks: bool) -> dict[str, int]:
    """Cuts a sum over k into chunks and tiles: the constants of its kernel."""
    chunk, block_k = chunk_of(k, are_blocks), 128 if are_blocks else 256
    block_r, block_t = (64, BLOCK) if are_blocks else (RANKS, GROUP_ROWS)
    block_r = min(block_r, max(RANKS, next_power_of_2(target.width)))
    stages = chip().stages(2 * block_k * (block_t + block_r), min(4, chunk // block_k), beside=4096)
    return {"BT": block_t, "CHUNK": chunk, "BLOCK_K": block_k, "BLOCK_R": block_r, "num_warps": 4, "num_stages": stages}


def _rank_programs(target: Target, cut: dict[str, int]) -> int:
    return min(-(-target.width // int(cut["BLOCK_R"])), RANK_PROGRAMS)


def shrink(x: Tensor, target: Target, rows: AdapterRows) -> None:
    """target.sums = down x, of the rows that have an adapter with a term for this matrix. x: bfloat16 [N, K].

    Sums: float32 [n_parts(K), N, width], ranks of the terms in order. Raises KernelError where they do not
    fit.
    """
    n, k = x.shape
    n_items, programs, few = _who(rows, n)
    are_blocks = rows.row is None
    check("lora", x.dtype == torch.bfloat16 and x.is_contiguous() and k == target.k, f"bfloat16 x [N, {target.k}]")
    cut, parts = _cut(target, k, are_blocks), n_parts(k, are_blocks)
    check("lora", parts * n * target.width <= target.sums.numel(), f"room for sums of {n} rows")
    launch(
        _shrink_kernel, (parts, _rank_programs(target, cut), programs), x, target.arena, target.table, rows.adapter,
        rows.row, target.sums, n_items, k, target.table.stride(0), n * target.width, target.width,
        LINES=cut["CHUNK"] // 64, EARLY=few, **cut,
    )


def expand(out: Tensor, target: Target, rows: AdapterRows, *, parts: int | None = None) -> None:
    """out[n] += up bfloat16(scale * target.sums[n]) of the same rows, behind `shrink`, or `gather` (parts=1).

    out: float32 or bfloat16 [N, M], rounded once; its rows may lie apart; other rows are not touched.
    """
    n, m = out.shape
    n_items, programs, few = _who(rows, n)
    are_blocks = rows.row is None
    fits = m == target.n and out.stride(1) == 1 and out.dtype in (torch.float32, torch.bfloat16)
    check("lora", fits, f"float32 or bfloat16 out [N, {target.n}]")
    block_m = 256 if m >= 8192 and not are_blocks else 128
    launch(
        _expand_kernel, (-(-m // block_m), programs), out, target.arena, target.table, rows.adapter, rows.row,
        target.sums, n_items, m, out.stride(0), target.table.stride(0), n * target.width, target.width,
        S=n_parts(target.k, are_blocks) if parts is None else parts, SEGMENTS=target.n_segments, BT=rows.n_rows,
        BLOCK_M=block_m, EARLY=few, num_warps=4, num_stages=2,
    )


def gather(
    tokens: Tensor, target: Target, rows: AdapterRows, n: int, *, batch_slots: Tensor | None = None,
    drafts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """target.sums [1, n, width] = the columns of down of tokens: of an embedding, whose down lies turned,
    [V, r].

    tokens: int32 [n]; those below 0 get zeros. batch_slots: int32 [n]: tokens are by batch slot, and these
    the rows'. drafts: how many rows are ahead of a row, and where some are, its token.
    """
    n_items, _, _ = _who(rows, n)
    check("lora", n * target.width <= target.sums.numel(), f"room for {n} rows")
    launch(
        _gather_kernel, (n_items,), tokens, batch_slots, *(drafts or (None, None)), target.arena, target.table,
        rows.adapter, rows.row, target.sums, target.table.stride(0), target.width, BT=rows.n_rows, num_warps=4,
    )


@dataclass(frozen=True)
class Routed:
    """The pairs of a mixture as its work lists have them (moe_decode.py, moe_prefill.py)."""

    counters: Tensor
    entries: Tensor
    lists: Tensor
    weight: Tensor
    n_rows: int
    n_entries: int  # at most
    tile: int  # pairs of an entry
    n_experts: int
    n_per_token: int
    act_base: int = 0  # of a prefill: the first row of act of the shared expert


@dataclass(frozen=True)
class ExpertTargets:
    """The matrices of a mixture to which adapters may add."""

    router: Target
    gate_up: Target
    down: Target
    shared_gate_up: Target
    shared_down: Target
    sums: Tensor  # float32, flat, a line a pair and a row of the shared expert: gate and up before SwiGLU


def _items(routed: Routed, rows: AdapterRows) -> tuple[int, int]:
    """Numbers of work items: those of the shared expert, and all."""
    n_items, _, _ = _who(rows, routed.n_rows)
    check("lora", routed.tile % rows.n_rows == 0, f"entries of whole parts of {rows.n_rows} pairs")
    return n_items, n_items + routed.n_entries * (routed.tile // rows.n_rows)


def shrink_experts(
    x: Tensor, target: Target, shared: Target, routed: Routed, rows: AdapterRows, *, x_row: int, is_act: bool,
) -> None:
    """target.sums = down x of the routed pairs and of the shared expert's rows, a line each.

    x: bfloat16, rows x_row apart: those of the step; is_act: act, as the experts' kernels leave it.
    """
    are_blocks, (n_items, n_all) = rows.row is None, _items(routed, rows)
    kind = (_OF_TILES if are_blocks else _OF_LINES) if is_act else _OF_ROWS
    k, lines = max(target.k, shared.k), routed.n_rows * (routed.n_per_token + 1)
    cut, parts = _cut(target, k, are_blocks), n_parts(k, are_blocks)
    check(
        "lora", target.width == shared.width and parts * lines * target.width <= target.sums.numel(),
        f"room for {lines} lines",
    )
    launch(
        _shrink_experts_kernel, (parts, _rank_programs(target, cut), n_all), x, target.arena, target.table,
        shared.table, rows.adapter, rows.row, rows.of_row, routed.counters, routed.entries, routed.lists, target.sums,
        n_items, routed.n_rows, routed.act_base, target.k, shared.k, x_row, target.table.stride(0),
        lines * target.width, target.width, X=kind.value, E=routed.n_experts, SLOTS=routed.n_per_token,
        TILE=routed.tile, **cut,
    )


def expand_experts(
    out: Tensor, target: Target, shared: Target, routed: Routed, rows: AdapterRows, *, out_row: int,
    by_slot: bool = False,
) -> None:
    """out += up v of the same lines, behind `shrink_experts`. out: float32 or bfloat16, flat, a line a pair,
    and then one a row of the shared expert, out_row apart; by_slot: float32 [slots + 1, N, M], weighted.
    """
    are_blocks, (n_items, n_all) = rows.row is None, _items(routed, rows)
    block_m = 128
    lines, k = routed.n_rows * (routed.n_per_token + 1), max(target.k, shared.k)
    launch(
        _expand_experts_kernel, (-(-max(target.n, shared.n) // block_m), n_all), out, target.arena, target.table,
        shared.table, rows.adapter, rows.row, rows.of_row, routed.counters, routed.entries, routed.lists, routed.weight,
        target.sums, n_items, routed.n_rows, target.n, shared.n, out_row, target.table.stride(0), lines * target.width,
        target.width, BY_SLOT=by_slot, S=n_parts(k, are_blocks), SEGMENTS=target.n_segments, E=routed.n_experts,
        SLOTS=routed.n_per_token, TILE=routed.tile, BT=rows.n_rows, BLOCK_M=block_m, num_warps=4, num_stages=2,
    )
