"""Indexed attention: which keys a query of a long context reads.

A key of the index stands for RATIO tokens. It is the mean of their raw keys in float32, rounded to bfloat16,
then normed and rotated by the angle of the first. A token's query has a few heads; a group of tokens scores

    sum over heads h, in order, of relu(q_h . k)        float32, of bfloat16 q and k

The best groups that are whole, and the tokens behind the last whole group, are what attention reads. Among
equal scores the earlier group wins. While no more groups are whole than may be chosen, nothing is chosen and
attention reads all of them, as it does elsewhere.

Pages hold both kinds of keys: the raw ones of 64 tokens, then the groups' (`IndexHeads.page_rows`). So a
group whose last token comes in a later step finds the others there. A draft writes over what a wrong one
left.

The groups are found digit by digit: the largest score that as many others reach, eight bits at a time, then
all above it, and of its equals the first (`_choose_kernel`). What is found depends on a row's scores alone.

Source: transformers 5.24, `Qwen4ExpTextQSAIndexer`. Its factor of dim^-0.5 changes no order and is left out.
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
from deltic.ops.geometry import PAGE_SIZE, Allocate, AttentionWeights, IndexHeads
from deltic.ops.gpu.attention_parts import summed
from deltic.ops.gpu.attention_prefill import TEXT, Axes
from deltic.ops.gpu.blocks import BLOCK, Blocks, Rows
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.launch import launch

_SCORED_PAGES = 16  # of a program that scores one row
_SCORED_GROUPS = 128  # of one that scores a block
_SORTED = 2048  # scores that a program looks at together when it chooses
CHOICE_BLOCKS = 16
"""Blocks of a prefill that are scored and choose at a time: their scores need room."""


@dataclass(frozen=True)
class IndexPages:
    """Keys of the index of one layer, in pages at any stride, and the pages of each sequence."""

    data: Tensor  # bfloat16 [pages, heads.page_rows, dim]
    table: Tensor  # int32 [batch slots, pages]


@dataclass(frozen=True)
class IndexScratch:
    """Workspaces of a step, which its layers share."""

    query: Tensor  # bfloat16 [T, n_q * dim]
    scores: Tensor  # float32 [rows, groups]: of a decode's rows, or of CHOICE_BLOCKS blocks
    # int32 [T, n], n_groups or less where no context has so many, ascending; of a row that reads all its keys
    chosen: Tensor  # nothing is written


def index_scratch(
    heads: IndexHeads, n_rows: int, max_len: int, allocate: Allocate, *, name: str, is_prefill: bool
) -> IndexScratch:
    """Workspaces for n_rows rows of at most max_len tokens. allocate(name, size, dtype) gives a tensor."""
    n_scored = min(n_rows, CHOICE_BLOCKS * BLOCK) if is_prefill else n_rows
    n_groups = -(-max_len // PAGE_SIZE) * (PAGE_SIZE // heads.ratio)
    return IndexScratch(
        query=allocate(f"{name} queries", (n_rows, heads.n_q * heads.dim), torch.bfloat16),
        scores=allocate(f"{name} scores", (n_scored, n_groups), torch.float32),
        chosen=allocate(f"{name} chosen", (n_rows, max(1, min(heads.n_groups, max_len // heads.ratio))), torch.int32),
    )


@triton.jit
def _pair(D: tl.constexpr, HALF: tl.constexpr):
    """[1, D]: the other dim of each pair (i, i + HALF)."""
    o_d = tl.arange(0, D)[None, :]
    return tl.where(o_d < HALF, o_d + HALF, tl.where(o_d < 2 * HALF, o_d - HALF, o_d))


@triton.jit
def _rotated(b_x, b_pair, p_norm, p_cos, p_sin, b_angle, eps, D: tl.constexpr, HALF: tl.constexpr):
    """Heads [R, D], normed and rotated -> bfloat16. b_pair: at each dim the other one of its pair; b_angle
    [R, 1] or [R, D]: rows of cos and sin.
    """
    o_d = tl.arange(0, D)[None, :]
    o_pair = _pair(D, HALF)
    is_rotary = (o_d < 2 * HALF) & (b_angle >= 0)
    o_angle = b_angle * HALF + tl.minimum(o_d, o_pair)
    b_cos = tl.load(p_cos + o_angle, mask=is_rotary, other=1.0)
    b_sin = tl.load(p_sin + o_angle, mask=is_rotary, other=0.0)
    b_w, b_w_pair = 1.0 + tl.load(p_norm + o_d), 1.0 + tl.load(p_norm + o_pair)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    b_turned = b_x * b_w * b_cos + b_pair * b_w_pair * tl.where(o_d < HALF, -b_sin, b_sin)
    return (b_turned * b_scale).to(tl.bfloat16)


@triton.jit
def _axis(D: tl.constexpr, HALF: tl.constexpr, ROWS_END: tl.constexpr, COLUMNS_END: tl.constexpr):
    """[1, D]: the axis of M-RoPE by which each dim rotates."""
    o_r = tl.minimum(tl.arange(0, D)[None, :], _pair(D, HALF))
    o_axis = tl.where((o_r % 3 == 1) & (o_r < ROWS_END), 1, 0)
    return tl.where((o_r % 3 == 2) & (o_r < COLUMNS_END), 2, o_axis)


@triton.jit
def _group_mean(
    p_raw, p_new, position, ahead, o_d, stride_s, stride_row, D: tl.constexpr, S: tl.constexpr, RATIO: tl.constexpr,
    PAGE: tl.constexpr,
):
    """float32: the mean of the raw keys of a group whose last token is at `position`, oldest first, at dims
    o_d; rounded to bfloat16. Those of rows in front of this one in the step are read where they come from.
    """
    b_sum = tl.zeros(o_d.shape, tl.float32)
    for j in tl.static_range(RATIO):
        back = RATIO - 1 - j
        is_new = back <= ahead
        b_old = tl.load(p_raw + (position - back) % PAGE * D + o_d, mask=(o_d >= 0) & (is_new == 0), other=0.0)
        b_new = summed(p_new - back * stride_row, o_d, (o_d >= 0) & is_new, stride_s, S).to(tl.bfloat16)
        b_sum += tl.where(is_new, b_new, b_old).to(tl.float32)
    return (b_sum * (1.0 / RATIO)).to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["stride_table"])
def _rows_kernel(
    p_proj, p_q_norm, p_k_norm, p_cos, p_sin, p_state_slot, p_batch_slot, p_position, p_shift, p_ahead, p_table,
    p_begun, p_index, p_query, eps, stride_s, stride_row, stride_table, stride_page, NQ: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr,
    ROWS_END: tl.constexpr, COLUMNS_END: tl.constexpr, PDL: tl.constexpr,
):
    """Queries and keys of a row of a decode."""
    wait_for_front(PDL)
    i_row = tl.program_id(0)
    if tl.load(p_state_slot + i_row) >= 0:
        position = tl.load(p_position + i_row)
        angle, ahead = position, position * 0
        if p_shift is not None:
            angle += tl.load(p_shift + i_row)
        if p_ahead is not None:
            ahead = tl.load(p_ahead + i_row)
        p_row = p_proj + i_row.to(tl.int64) * stride_row
        o_d, o_pair = tl.arange(0, D)[None, :], _pair(D, HALF)
        o_head = tl.arange(0, NQ)[:, None] * D
        b_x = summed(p_row, o_head + o_d, o_d >= 0, stride_s, S)
        b_pair = summed(p_row, o_head + o_pair, o_d >= 0, stride_s, S)
        b_q = _rotated(b_x, b_pair, p_q_norm, p_cos, p_sin, tl.full((1, 1), 0, tl.int32) + angle, eps, D, HALF)
        tl.store(p_query + i_row.to(tl.int64) * (NQ * D) + o_head + o_d, b_q)
        batch_slot = tl.load(p_batch_slot + i_row).to(tl.int64)
        page = tl.load(p_table + batch_slot * stride_table + position // PAGE)
        p_page = p_index + page.to(tl.int64) * stride_page
        p_key = p_row + NQ * D
        b_raw = summed(p_key, o_d, o_d >= 0, stride_s, S).to(tl.bfloat16)
        tl.store(p_page + position % PAGE * D + o_d, b_raw)
        if (position + 1) % RATIO == 0:
            b_k = _group_mean(p_page, p_key, position, ahead, o_d, stride_s, stride_row, D, S, RATIO, PAGE)
            b_k_pair = _group_mean(p_page, p_key, position, ahead, o_pair, stride_s, stride_row, D, S, RATIO, PAGE)
            b_angle = tl.full((1, D), 1 - RATIO, tl.int32) + angle
            if p_begun is not None:
                p_own = p_begun + batch_slot * 4
                b_own = tl.load(p_own + 1 + _axis(D, HALF, ROWS_END, COLUMNS_END))
                b_angle = tl.where(tl.load(p_own) == position + 1 - RATIO, b_own, b_angle)
            b_k = _rotated(b_k, b_k_pair, p_k_norm, p_cos, p_sin, b_angle, eps, D, HALF)
            tl.store(p_page + (PAGE + position % PAGE // RATIO) * D + o_d, b_k)


@triton.jit
def _angles(
    p_position, p_angles, i_b, o_t, D: tl.constexpr, HALF: tl.constexpr, ROWS_END: tl.constexpr,
    COLUMNS_END: tl.constexpr,
):
    """Rows of cos and sin of tokens o_t [R, 1] of a block: [R, 1], or [R, D] by axis of M-RoPE."""
    if p_angles is None:
        b_angle = tl.load(p_position + i_b) + o_t
    else:
        o_axis = _axis(D, HALF, ROWS_END, COLUMNS_END)
        b_angle = tl.load(p_angles + i_b * 64 + o_t + o_axis * (tl.num_programs(1) * 64))
    return b_angle


@triton.jit
def _blocks_kernel(
    p_proj, p_q_norm, p_k_norm, p_cos, p_sin, p_n, p_position, p_page, p_angles, p_index, p_query, eps, stride_page,
    NQ: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, RATIO: tl.constexpr, ROWS_END: tl.constexpr,
    COLUMNS_END: tl.constexpr, PDL: tl.constexpr,
):
    """A head of the tokens of a block a program; the last has the keys."""
    wait_for_front(PDL)
    i_b, i_h = tl.program_id(1), tl.program_id(0)
    n = tl.load(p_n + i_b)
    if n == 0:
        return
    ROW: tl.constexpr = (NQ + 1) * D
    o_d, o_pair = tl.arange(0, D)[None, :], _pair(D, HALF)
    p_in = p_proj + i_b.to(tl.int64) * (64 * ROW) + i_h * D
    o_t = tl.arange(0, 64)[:, None]
    b_x = tl.load(p_in + o_t * ROW + o_d, mask=o_t < n, other=0.0)
    if i_h < NQ:
        b_pair = tl.load(p_in + o_t * ROW + o_pair, mask=o_t < n, other=0.0).to(tl.float32)
        b_angle = _angles(p_position, p_angles, i_b, o_t, D, HALF, ROWS_END, COLUMNS_END)
        b_q = _rotated(b_x.to(tl.float32), b_pair, p_q_norm, p_cos, p_sin, b_angle, eps, D, HALF)
        tl.store(p_query + (i_b.to(tl.int64) * 64 + o_t) * (NQ * D) + i_h * D + o_d, b_q)
    else:
        p_keys = p_index + tl.load(p_page + i_b).to(tl.int64) * stride_page
        tl.store(p_keys + o_t * D + o_d, b_x, mask=o_t < n)
        o_g = tl.arange(0, 64 // RATIO)[:, None]
        is_whole = (o_g + 1) * RATIO <= n
        b_k = tl.zeros((64 // RATIO, D), tl.float32)
        b_k_pair = tl.zeros((64 // RATIO, D), tl.float32)
        for j in tl.static_range(RATIO):
            p_token = p_in + (o_g * RATIO + j) * ROW
            b_k += tl.load(p_token + o_d, mask=is_whole, other=0.0).to(tl.float32)
            b_k_pair += tl.load(p_token + o_pair, mask=is_whole, other=0.0).to(tl.float32)
        b_k = (b_k * (1.0 / RATIO)).to(tl.bfloat16).to(tl.float32)
        b_k_pair = (b_k_pair * (1.0 / RATIO)).to(tl.bfloat16).to(tl.float32)
        b_first = _angles(p_position, p_angles, i_b, o_g * RATIO, D, HALF, ROWS_END, COLUMNS_END)
        b_k = _rotated(b_k, b_k_pair, p_k_norm, p_cos, p_sin, b_first, eps, D, HALF)
        tl.store(p_keys + (64 + o_g) * D + o_d, b_k, mask=is_whole)


@triton.jit
def _group_keys(p_index, p_table, o_g, n_groups, stride_page, D: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr):
    """bfloat16 [G, D]: keys of these groups, zeros from n_groups on. p_table: of the sequence."""
    is_there = o_g < n_groups
    page = tl.load(p_table + o_g // (PAGE // RATIO), mask=is_there, other=0).to(tl.int64)
    p_key = p_index + page * stride_page + (PAGE + o_g % (PAGE // RATIO)) * D
    return tl.load(p_key[:, None] + tl.arange(0, D)[None, :], mask=is_there[:, None], other=0.0)


@triton.jit(do_not_specialize=["stride_table", "stride_scores"])
def _row_scores_kernel(
    p_query, p_state_slot, p_batch_slot, p_position, p_table, p_index, p_scores, stride_table, stride_page,
    stride_scores, NQ: tl.constexpr, D: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    """GROUPS groups of one row a program."""
    wait_for_front(PDL)
    i_row, first = tl.program_id(0), tl.program_id(1) * GROUPS
    n_groups = (tl.load(p_position + i_row) + 1) // RATIO
    if (tl.load(p_state_slot + i_row) >= 0) & (n_groups > CHOSEN) & (first < n_groups):
        p_row = p_table + tl.load(p_batch_slot + i_row).to(tl.int64) * stride_table
        o_g = first + tl.arange(0, GROUPS)
        b_k = _group_keys(p_index, p_row, o_g, n_groups, stride_page, D, PAGE, RATIO)
        o_h = tl.arange(0, 16)
        p_q = p_query + i_row.to(tl.int64) * (NQ * D) + o_h[:, None] * D + tl.arange(0, D)[None, :]
        b_q = tl.load(p_q, mask=(o_h < NQ)[:, None], other=0.0)
        b_s = tl.maximum(tl.dot(b_k, tl.trans(b_q)), 0.0)
        b_score = tl.zeros((GROUPS,), tl.float32)
        for h in tl.static_range(NQ):  # a sum of one term and zeros has no order
            b_score += tl.sum(tl.where(o_h[None, :] == h, b_s, 0.0), 1)
        tl.store(p_scores + i_row.to(tl.int64) * stride_scores + o_g, b_score, mask=o_g < n_groups)


@triton.jit(do_not_specialize=["first_block", "stride_table", "stride_scores"])
def _block_scores_kernel(
    p_query, p_n, p_position, p_batch_slot, p_table, p_index, p_scores, first_block, stride_table, stride_page,
    stride_scores, NQ: tl.constexpr, D: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    """GROUPS groups times the 64 tokens of a block a program."""
    wait_for_front(PDL)
    i_b, first = first_block + tl.program_id(1), tl.program_id(0) * GROUPS
    n = tl.load(p_n + i_b)
    n_groups = (tl.load(p_position + i_b) + n) // RATIO
    if (n > 0) & (n_groups > CHOSEN) & (first < n_groups):
        p_row = p_table + tl.load(p_batch_slot + i_b).to(tl.int64) * stride_table
        o_g, o_t = first + tl.arange(0, GROUPS), tl.arange(0, 64)
        b_k = tl.trans(_group_keys(p_index, p_row, o_g, n_groups, stride_page, D, PAGE, RATIO))
        p_q = p_query + (i_b.to(tl.int64) * 64 + o_t)[:, None] * (NQ * D) + tl.arange(0, D)[None, :]
        b_score = tl.zeros((64, GROUPS), tl.float32)
        for h in tl.static_range(NQ):
            b_q = tl.load(p_q + h * D, mask=(o_t < n)[:, None], other=0.0)
            b_score += tl.maximum(tl.dot(b_q, b_k), 0.0)
        p_to = p_scores + (tl.program_id(1) * 64 + o_t).to(tl.int64)[:, None] * stride_scores + o_g[None, :]
        tl.store(p_to, b_score, mask=(o_t < n)[:, None] & (o_g < n_groups)[None, :])


@triton.jit
def _of_block(i_row, p_n, p_position):
    """True if a row of a prefill's blocks is in use; and the position of its token."""
    o_t = i_row % 64
    return o_t < tl.load(p_n + i_row // 64), tl.load(p_position + i_row // 64) + o_t


@triton.jit(do_not_specialize=["first_row", "stride_scores"])
def _choose_kernel(
    p_scores, p_used, p_position, p_chosen, first_row, stride_scores, RATIO: tl.constexpr, CHOSEN: tl.constexpr,
    IN_BLOCKS: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):
    """A row a program. p_used: state slots of a decode's rows, or tokens of blocks.

    Scores are 0 or more, so that their bits are in their order.
    """
    wait_for_front(PDL)
    i_row = first_row + tl.program_id(0)
    if IN_BLOCKS:
        is_used, position = _of_block(i_row, p_used, p_position)
    else:
        is_used, position = tl.load(p_used + i_row) >= 0, tl.load(p_position + i_row)
    n_groups = (position + 1) // RATIO
    if is_used & (n_groups > CHOSEN):
        p_row = p_scores + tl.program_id(0).to(tl.int64) * stride_scores
        o_n, o_digit = tl.arange(0, N), tl.arange(0, 256)
        least = 0  # the leading digits of the least score that is chosen
        wanted = CHOSEN  # groups to be chosen among those with these digits
        for i_digit in tl.static_range(4):
            b_counts = tl.zeros((256,), tl.int32)
            for first in range(0, n_groups, N):
                b_bits = tl.load(p_row + first + o_n, mask=first + o_n < n_groups, other=0.0).to(tl.int32, bitcast=True)
                is_here = first + o_n < n_groups
                if i_digit > 0:
                    is_here = is_here & (b_bits >> (32 - 8 * i_digit) == least)
                b_counts += tl.histogram((b_bits >> (24 - 8 * i_digit)) & 255, 256, mask=is_here)
            # how many have this digit or a larger one
            b_reach = tl.sum(b_counts, 0) - tl.cumsum(b_counts, 0) + b_counts
            digit = tl.max(tl.where(b_reach >= wanted, o_digit, 0), 0)
            wanted -= tl.sum(tl.where(o_digit == digit, b_reach - b_counts, 0), 0)
            least = least * 256 + digit
        n_equal, n_chosen = 0, 0
        p_to = p_chosen + i_row.to(tl.int64) * CHOSEN
        for first in range(0, n_groups, N):
            o_g = first + o_n
            b_bits = tl.load(p_row + o_g, mask=o_g < n_groups, other=0.0).to(tl.int32, bitcast=True)
            is_equal = (b_bits == least) & (o_g < n_groups)
            b_equal = n_equal + tl.cumsum(is_equal.to(tl.int32), 0)
            is_chosen = ((b_bits > least) & (o_g < n_groups)) | (is_equal & (b_equal <= wanted))
            b_at = n_chosen + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
            tl.store(p_to + b_at, o_g, mask=is_chosen)
            n_equal += tl.sum(is_equal.to(tl.int32), 0)
            n_chosen += tl.sum(is_chosen.to(tl.int32), 0)


def _check(
    operator: str, proj: Tensor, heads: IndexHeads, weights: AttentionWeights, pages: IndexPages, scratch: IndexScratch
) -> None:
    expect = partial(check, operator)
    expect(proj.shape[-1] == heads.row and proj.stride(-1) == 1, f"proj of {heads.row} columns")
    expect(heads.dim in (16, 32, 64, 128) and heads.n_q in (1, 2, 4, 8, 16), "dim 16 to 128, 1 to 16 query heads")
    expect(PAGE_SIZE % heads.ratio == 0 and heads.budget % heads.ratio == 0, "groups that fill pages and the budget")
    expect(2 * weights.cos.shape[1] <= heads.dim, "rotary dims inside a head")
    index = pages.data
    fits = index.dtype == torch.bfloat16 and index.shape[1:] == (heads.page_rows, heads.dim)
    expect(fits and index[0].is_contiguous(), f"bfloat16 index [pages, {heads.page_rows}, {heads.dim}]")
    expect(scratch.query.shape[1] == heads.n_q * heads.dim and scratch.chosen.shape[1] <= heads.n_groups, "its scratch")


def index_decode(
    proj: Tensor, heads: IndexHeads, weights: AttentionWeights, *, rows: Rows, pages: IndexPages,
    scratch: IndexScratch, max_len: int, begun: Axes = TEXT,
) -> Tensor:
    """The groups that each row of a decode reads, int32 [N, n]; keys of its tokens go into the index.
    Three launches.

    proj: float32 [S, N, heads.row], partial sums, a row the query heads | the key. weights: norms of queries
    and of groups' keys, float32 [dim], and the rotary tables. Of a row with fewer whole groups than may be
    chosen nothing is written; nor of one that is not in use. Angles are those of a row's position,
    plus rows.angle_shift where there is one. begun: of each batch slot, int32 [P, 4], the position at which a
    group begins in a picture that a decode completes, or -1, and the angles there on each axis. Rows see each
    other only where rows.drafts puts them in front, and neither N nor max_len changes a bit. Raises
    KernelError where shapes or types do not fit.
    """
    (n_splits, n_rows, _), index, table = proj.shape, pages.data, pages.table
    _check("index_decode", proj, heads, weights, pages, scratch)
    check("index_decode", proj.dtype == torch.float32, "float32 proj [S, N, row]")
    sizes = dict(NQ=heads.n_q, D=heads.dim, RATIO=heads.ratio, PAGE=PAGE_SIZE)
    launch(
        _rows_kernel, (n_rows,), proj, weights.q_norm, weights.k_norm, weights.cos, weights.sin, rows.state_slot,
        rows.batch_slot, rows.position, rows.angle_shift, None if rows.drafts is None else rows.drafts.ahead, table,
        begun.angles, index, scratch.query, weights.eps, proj.stride(0), proj.stride(1), table.stride(0),
        index.stride(0), HALF=weights.cos.shape[1], S=n_splits, **begun.ends("index_decode", len(table), 4), **sizes,
        num_warps=4,
    )
    n_chosen, most = scratch.chosen.shape[1], max_len // heads.ratio
    chosen = scratch.chosen[:n_rows]
    if most > n_chosen:
        groups = _SCORED_PAGES * PAGE_SIZE // heads.ratio
        check("index_decode", len(scratch.scores) >= n_rows and scratch.scores.shape[1] >= most, "scores of all groups")
        launch(
            _row_scores_kernel, (n_rows, -(-most // groups)), scratch.query, rows.state_slot, rows.batch_slot,
            rows.position, table, index, scratch.scores, table.stride(0), index.stride(0), scratch.scores.stride(0),
            CHOSEN=n_chosen, GROUPS=groups, **sizes, num_warps=4,
        )
        launch(
            _choose_kernel, (n_rows,), scratch.scores, rows.state_slot, rows.position, chosen, 0,
            scratch.scores.stride(0), RATIO=heads.ratio, CHOSEN=n_chosen, IN_BLOCKS=False, N=_SORTED, num_warps=8,
        )
    return chosen


def index_prefill(
    proj: Tensor, heads: IndexHeads, weights: AttentionWeights, *, blocks: Blocks, pages: IndexPages,
    scratch: IndexScratch, max_len: int, axes: Axes = TEXT,
) -> Tensor:
    """The same of the tokens of `blocks`, int32 [T, n]: proj bfloat16 [T, heads.row], T = 64 blocks.

    A block's groups are its own: blocks begin at multiples of 64. Those whose last tokens are not there yet
    are completed by `index_decode`. axes: by which dims rotate.
    """
    n_tokens, n_blocks, index, table = len(proj), len(blocks.n), pages.data, pages.table
    _check("index_prefill", proj, heads, weights, pages, scratch)
    fits = proj.dtype == torch.bfloat16 and n_tokens == BLOCK * n_blocks and proj.is_contiguous()
    check("index_prefill", fits, f"bfloat16 proj [{BLOCK * n_blocks}, row]")
    sizes = dict(NQ=heads.n_q, D=heads.dim, RATIO=heads.ratio)
    launch(
        _blocks_kernel, (heads.n_q + 1, n_blocks), proj, weights.q_norm, weights.k_norm, weights.cos, weights.sin,
        blocks.n, blocks.position, blocks.page, axes.angles, index, scratch.query, weights.eps, index.stride(0),
        HALF=weights.cos.shape[1], **axes.ends("index_prefill", 3, n_tokens), **sizes, num_warps=8,
    )
    n_chosen, most = scratch.chosen.shape[1], max_len // heads.ratio
    if most > n_chosen:
        for first in range(0, n_blocks, CHOICE_BLOCKS):
            n = min(CHOICE_BLOCKS, n_blocks - first)
            launch(
                _block_scores_kernel, (-(-most // _SCORED_GROUPS), n), scratch.query, blocks.n, blocks.position,
                blocks.batch_slot, table, index, scratch.scores, first, table.stride(0), index.stride(0),
                scratch.scores.stride(0), CHOSEN=n_chosen, GROUPS=_SCORED_GROUPS, PAGE=PAGE_SIZE, **sizes, num_warps=8,
            )
            launch(
                _choose_kernel, (BLOCK * n,), scratch.scores, blocks.n, blocks.position, scratch.chosen, BLOCK * first,
                scratch.scores.stride(0), RATIO=heads.ratio, CHOSEN=n_chosen, IN_BLOCKS=True, N=_SORTED, num_warps=8,
            )
    return scratch.chosen[:n_tokens]
