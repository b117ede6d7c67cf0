"""attention_prefill: full attention, gated or not, of a prefill over 64-token pages.

Two kernels. The first (prepare) norms and rotates q and k and writes k and v to their pages. The second
(flash) attends. A tile is the 64 tokens of a block times one or two query heads of the same key head. It
walks the pages of its sequence from the first to its own with a running maximum and sum (Dao 2023,
"FlashAttention-2", arXiv:2307.08691, algorithm 1) and ends with the output gate. Which keys meet in one
product, and in what order, follows from the absolute position of the tokens alone, and the rows of a tile do
not mix, so the bits of a token do not depend on where its prompt was cut nor on what else is in the step.

Of quantised pages (kv.py) the flash kernel reads what prepare has just rounded, as it will be read later. The
queries are float16 then.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import AttentionHeads, AttentionWeights
from deltic.ops.gpu import kv
from deltic.ops.gpu.attention_chosen import attention_chosen, first_choice
from deltic.ops.gpu.blocks import BLOCK, Blocks
from deltic.ops.gpu.chip import chip, load_tile, tiles_of, wait_for_front
from deltic.ops.gpu.kv import FP8, K8V4, PLAIN
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.kv_formats import KvPages

LOG2_E = tl.constexpr(1.4426950408889634)
PREPARE_WARPS = 8


@dataclass(frozen=True)
class FlashTile:
    """Cut of the flash kernel, and how it is compiled. No field changes what is computed for a token.

    heads: query heads of a tile (1, or 2 where the group is even). kv_outer: the programs of one key head
    follow each other, so its keys and values stay in the L2 cache; else the longest tiles of all heads come
    first.

    Left out: warps that specialise (one group copies, two compute). Triton 3.6 makes it 13 % faster on
    Hopper, but what it makes gives NaN now and then where the GPU is shared with other processes, whenever
    one of them has its turn in the midst of it (a test on the GPU asserts that the bits stay).
    """

    heads: int
    num_warps: int
    num_stages: int
    kv_outer: bool = True


@triton.jit
def _prepare_kernel(
    proj, q_norm, k_norm, eps, n_tokens, position, page, cos, sin, stride_cos, angles, query, pages, stride_page,
    NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, GATED: tl.constexpr,
    FIRST: tl.constexpr, ROWS_END: tl.constexpr, COLUMNS_END: tl.constexpr, KV: tl.constexpr, PDL: tl.constexpr,
):
    """Prepares the tokens of a block times one head of q | k | v, from head FIRST on, a program."""
    wait_for_front(PDL)
    i_b = tl.program_id(1)
    i_h = tl.program_id(0) + FIRST
    n = tl.load(n_tokens + i_b)
    if n == 0:
        return
    ROW: tl.constexpr = ((2 if GATED else 1) * NQ + 2 * NK) * D
    o_t = tl.arange(0, 64)
    o_d = tl.arange(0, D)
    o_out = o_t[:, None] * D + o_d[None, :]
    used = (o_t < n)[:, None]
    is_q = i_h < NQ
    # the columns of head i_h: k and v come behind the gates, if there are any
    GATES: tl.constexpr = NQ if GATED else 0
    p_in = proj + i_b.to(tl.int64) * (64 * ROW) + tl.where(is_q, i_h, i_h + GATES) * D + o_t[:, None] * ROW
    # padding is read as zero, so that whatever it holds stays finite below
    b_in = tl.load(p_in + o_d[None, :], mask=used, other=0.0)
    p_page = pages + tl.load(page + i_b).to(tl.int64) * stride_page
    p_kv = p_page + (i_h - NQ) * (64 * D)
    if i_h >= NQ + NK:
        # all 64 rows: a masked key has weight 0, and 0 * (what was left in the page) must be 0
        if KV == PLAIN:
            tl.store(p_kv + o_out, b_in)
        else:
            kv.store_values(p_page, i_h - (NQ + NK), o_t, b_in.to(tl.float32), KV, NK, D)
    else:
        b_x = b_in.to(tl.float32)
        p_w = tl.where(is_q, q_norm, k_norm)
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
        b_y = (b_x * b_scale * (1.0 + tl.load(p_w + o_d)[None, :])).to(tl.bfloat16)
        # the rotated part once more, in pairs (i, i + HALF)
        o_r = tl.arange(0, HALF_P2)
        m_r = (o_r < HALF)[None, :] & used
        b_1 = tl.load(p_in + o_r[None, :], mask=m_r, other=0.0).to(tl.float32)
        b_2 = tl.load(p_in + HALF + o_r[None, :], mask=m_r, other=0.0).to(tl.float32)
        w_1 = 1.0 + tl.load(p_w + o_r, mask=o_r < HALF, other=0.0)[None, :]
        w_2 = 1.0 + tl.load(p_w + HALF + o_r, mask=o_r < HALF, other=0.0)[None, :]
        b_1 = b_1 * b_scale * w_1
        b_2 = b_2 * b_scale * w_2
        if angles is None:
            b_angle = (tl.load(position + i_b) + o_t)[:, None]
        else:
            # axes take turns, and what rows and columns do not reach is time's (models/rotary.axis_of_angle)
            o_axis = tl.where((o_r % 3 == 1) & (o_r < ROWS_END), 1, 0)
            o_axis = tl.where((o_r % 3 == 2) & (o_r < COLUMNS_END), 2, o_axis)
            p_angle = angles + (i_b * 64 + o_t)[:, None] + o_axis[None, :] * (tl.num_programs(1) * 64)
            b_angle = tl.load(p_angle, mask=m_r, other=0)
        o_cos = b_angle * stride_cos + o_r[None, :]
        b_cos = tl.load(cos + o_cos, mask=m_r, other=0.0)
        b_sin = tl.load(sin + o_cos, mask=m_r, other=0.0)
        r_1 = (b_1 * b_cos - b_2 * b_sin).to(tl.bfloat16)
        r_2 = (b_2 * b_cos + b_1 * b_sin).to(tl.bfloat16)
        o_rot = o_t[:, None] * D + o_r[None, :]
        behind = (o_d >= 2 * HALF)[None, :]
        if is_q:
            # padding too: zeros
            p_q = query + (i_b.to(tl.int64) * NQ + i_h) * (64 * D)
            tl.store(p_q + o_out, b_y.to(query.dtype.element_ty), mask=behind)
            tl.store(p_q + o_rot, r_1.to(query.dtype.element_ty), mask=(o_r < HALF)[None, :])
            tl.store(p_q + HALF + o_rot, r_2.to(query.dtype.element_ty), mask=(o_r < HALF)[None, :])
        elif KV == PLAIN:
            tl.store(p_kv + o_out, b_y, mask=behind & used)
            tl.store(p_kv + o_rot, r_1, mask=m_r)
            tl.store(p_kv + HALF + o_rot, r_2, mask=m_r)
        else:
            b_key = tl.where(behind, b_y.to(tl.float32), 0.0)  # the others are 0 where they are not
            b_key_1, b_key_2 = r_1.to(tl.float32), r_2.to(tl.float32)
            b_size = tl.maximum(kv.largest(b_key), tl.maximum(kv.largest(b_key_1), kv.largest(b_key_2)))
            b_key_scale = kv.key_scale(b_size, KV)
            kv.store_key_scale(p_page, i_h - NQ, o_t, b_key_scale, o_t < n, KV, NK, D)
            p_codes = kv.keys_at(p_page, i_h - NQ, KV, NK, D)
            tl.store(p_codes + o_out, kv.key_codes(b_key, b_key_scale, KV), mask=behind & used)
            tl.store(p_codes + o_rot, kv.key_codes(b_key_1, b_key_scale, KV), mask=m_r)
            tl.store(p_codes + HALF + o_rot, kv.key_codes(b_key_2, b_key_scale, KV), mask=m_r)


@triton.jit(do_not_specialize=["stride_table"])
def _flash_kernel(
    queries, tiles, value_tiles, pages, proj, out, n_tokens, position, batch_slot, page_table, stride_table, rows_page,
    scale, NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, GATED: tl.constexpr,
    KV: tl.constexpr, END: tl.constexpr,
):
    """Attends with the tokens of a block (grid axis 1) times HEADS query heads (axis 2, then axis 0), a
    program.

    queries: q as [blocks * NQ * 64, D] (`tiles_of`), tile [HEADS * 64, D]; tiles: the pages as rows of D,
    tile [64, D]; rows_page: rows from a page to the next; scale: d^-0.5 log2 e. Row r of the tile
    is head r // 64, token r % 64. Of quantised pages both are rows of bytes, and there are value_tiles, whose
    rows are as wide as the codes of a value, and pages, by address. Blocks from position END on, unless that
    is 0, are another kernel's.
    """
    # the last blocks have the most keys: they start first
    i_b = tl.num_programs(1) - 1 - tl.program_id(1)
    i_h = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * HEADS
    i_kv = i_h // (NQ // NK)
    n = tl.load(n_tokens + i_b)
    if END > 0:
        n = tl.where(tl.load(position + i_b) < END, n, 0)
    if n == 0:
        return
    n_tiles = tl.load(position + i_b) // 64 + 1
    p_table = page_table + tl.load(batch_slot + i_b).to(tl.int64) * stride_table
    ROWS: tl.constexpr = HEADS * 64
    o_m = tl.arange(0, ROWS)
    o_t = o_m % 64
    o_n = tl.arange(0, 64)
    b_q = load_tile(queries, (i_b * NQ + i_h) * 64, 0, ROWS, D)
    o_last = tl.minimum(o_t, n - 1)  # the last key of a row in the last tile
    b_max = tl.full([ROWS], -float("inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, D], tl.float32)
    b_least = tl.zeros([ROWS], tl.float32)
    WIDTH: tl.constexpr = kv.value_width(KV, D)
    for j in range(n_tiles):
        i_page = tl.load(p_table + j)
        row = i_page * rows_page + i_kv * 64
        b_k = load_tile(tiles, row, 0, 64, D)
        if KV == PLAIN:
            b_s = tl.dot(b_q, b_k.T)
        else:
            p_page = pages + i_page.to(tl.int64) * (rows_page * D)
            b_key_scale, b_value_scale, b_value_least = kv.load_floats(p_page, i_kv, o_n, o_n >= 0, KV, NK, D)
            b_s = tl.dot(b_q, kv.key_operand(b_k).T)
            if KV == FP8:
                b_s = b_s * b_key_scale[None, :]
        # only the last tile has keys behind the row. Key 0 is never masked, so b_max is finite after the
        # first tile
        if j == n_tiles - 1:
            b_s = tl.where(o_n[None, :] <= o_last[:, None], b_s, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = b_new * scale
        b_p = tl.exp2(b_s * scale - b_shift[:, None])
        b_alpha = tl.exp2(b_max * scale - b_shift)
        b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None]
        # here, so that the scores do not wait for it
        if KV == PLAIN:
            b_v = load_tile(tiles, row + NK * 64, 0, 64, D)
            b_acc = tl.dot(b_p.to(tl.bfloat16), b_v, b_acc)
        else:
            first = i_page * (rows_page * (D // WIDTH)) + (kv.section("values", KV, NK, D) // WIDTH + i_kv * 64)
            b_v = kv.value_operand(load_tile(value_tiles, first, 0, 64, WIDTH), KV)
            if KV == K8V4:
                b_least = b_least * b_alpha + tl.sum(b_p * b_value_least[None, :], 1)
            b_acc = tl.dot((b_p * b_value_scale[None, :]).to(tl.bfloat16), b_v, b_acc)
        b_max = b_new
    if KV == K8V4:
        b_acc += b_least[:, None]
    ROW: tl.constexpr = ((2 if GATED else 1) * NQ + 2 * NK) * D
    p_gate = proj + i_b.to(tl.int64) * (64 * ROW) + (NQ + i_h) * D
    p_out = out + i_b.to(tl.int64) * (64 * NQ * D) + i_h * D
    o_gate = (o_t * ROW + o_m // 64 * D)[:, None]
    o_out = (o_t * (NQ * D) + o_m // 64 * D)[:, None]
    b_weight = (1.0 / b_sum)[:, None]
    # one half of the columns after the other: the gate does not fit in the registers beside the whole of
    # b_acc
    b_halves = tl.split(tl.permute(tl.reshape(b_acc, [ROWS, 2, D // 2]), (0, 2, 1)))
    for half in tl.static_range(2):
        o_d = half * (D // 2) + tl.arange(0, D // 2)[None, :]
        b_out = b_halves[half] * b_weight
        if GATED:
            b_gate = tl.load(p_gate + o_gate + o_d, mask=(o_t < n)[:, None], other=0.0).to(tl.float32)
            b_out = b_out / (1.0 + tl.exp2(b_gate * -LOG2_E))
        tl.store(p_out + o_out + o_d, b_out.to(tl.bfloat16))


def flash_tile(heads: AttentionHeads) -> FlashTile:
    """The tile of a head layout on this chip; frozen, so that a token's bits are the same in every step."""
    if chip().multiplies_from_shared:
        pair = 2 if heads.n_q // heads.n_kv % 2 == 0 else 1
        return FlashTile(heads=pair, num_warps=4 * pair, num_stages=2)
    # the sums and what is multiplied share the registers; q, the weights and one of k and v the shared memory
    stages = chip().stages(2 * BLOCK * heads.dim, 2, beside=2 * BLOCK * (2 * heads.dim + BLOCK))
    return FlashTile(heads=1, num_warps=8 if heads.dim > 128 else 4, num_stages=stages)


@dataclass(frozen=True)
class Axes:
    """Axes of M-RoPE, by which queries and keys rotate where prompts may have pictures."""

    angles: Tensor | None = None
    """int32 [3, T]: of each token the row of cos and sin on each axis. None: that of its position."""
    sections: Sequence[int] = ()
    """Angles of each axis (models/rotary.axis_of_angle)."""

    def ends(self, operator: str, *shape: int) -> dict[str, int]:
        """Constants of kernels that rotate: where the angles of rows and columns end. shape: of `angles`."""
        angles, sections = self.angles, self.sections
        if angles is None:
            return {"ROWS_END": 0, "COLUMNS_END": 0}
        fits = angles.shape == shape and angles.dtype == torch.int32 and len(sections) == 3
        fits &= angles.is_contiguous()
        check(operator, fits, f"int32 angles {list(shape)}, and three sections")
        return {"ROWS_END": 3 * sections[1], "COLUMNS_END": 3 * sections[2]}


TEXT = Axes()
"""Rotation by position alone."""


def attention_prefill(
    proj: Tensor, heads: AttentionHeads, weights: AttentionWeights, *, blocks: Blocks, cache: KvPages, query: Tensor,
    out: Tensor, axes: Axes = TEXT,
) -> None:
    """Full attention of the tokens of `blocks`, whose earlier keys and values are in the pages; writes
    theirs. Two launches.

    proj: bfloat16 [T, heads.row], T = 64 blocks, a row q heads | gates (if heads.is_gated) | k heads | v
    heads; cache: bfloat16 [n, 2, nk, 64, d] (keys, then values), or uint8 [n, bytes], and the pages' table;
    axes: by which dims rotate, the token's position or the axes of M-RoPE; query: bfloat16, T nq d elements
    of workspace; out: bfloat16 [T, nq d].
    out = softmax(q k^T d^-0.5) v * sigmoid(gate), query head j reads key head j // (nq/nk). Scores, softmax
    and sums are float32, q, k, v and the softmax weights that meet v are rounded to bfloat16. In a block's
    unused rows out is finite and means nothing. Blocks not in use are left as they are. v's rows of padding
    in the block's own page become zero.
    cache.chosen: of tokens with more whole groups, what they read (attention_chosen.py); others have the bits
    that they have without.
    In between q lies in `query` as [blocks, nq, 64, d], so that a tile of the flash kernel is one run of
    memory.
    Leaves out: sliding windows, biases, soft caps. Raises KernelError for shapes and types it does not serve.
    """
    cos, sin, pages, format = weights.cos, weights.sin, cache.data, cache.format
    d, n_blocks, half = heads.dim, blocks.n.shape[0], cos.shape[1]
    n_tokens = BLOCK * n_blocks
    expect = partial(check, "attention_prefill")
    expect(d >= 32 and d == next_power_of_2(d) and d <= 256, f"head_dim 32, 64, 128 or 256, found {d}")
    expect(heads.n_q % heads.n_kv == 0, "query heads a multiple of key heads")
    expect(
        2 * half <= d and sin.shape == cos.shape and sin.stride() == cos.stride(),
        f"at most {d} rotary dims, found {2 * half}",
    )
    expect(proj.shape == (n_tokens, heads.row) and proj.is_contiguous(), f"contiguous proj [{n_tokens}, {heads.row}]")
    expect(out.shape == (n_tokens, heads.n_q * d) and out.is_contiguous(), f"contiguous out [{n_tokens}, nq d]")
    expect(query.numel() == n_tokens * heads.n_q * d and query.is_contiguous(), "query of T nq d elements")
    expect({proj.dtype, out.dtype, query.dtype} == {torch.bfloat16}, "bfloat16 proj, query and out")
    expect(kv.fits(pages, heads.n_kv, d, format), kv.expected(heads.n_kv, d, format))
    width = d * format.value_bits // format.key_bits
    expect(
        pages.stride(0) % d == 0 and pages.shape[0] * pages.stride(0) // width < 2**31, "page stride in rows of int32"
    )
    sizes: dict[str, int] = {"NQ": heads.n_q, "NK": heads.n_kv, "D": d, "GATED": heads.is_gated}
    sizes["KV"] = kv.constant(format)
    if not format.is_plain:
        query = query.view(torch.float16)
    ends = axes.ends("attention_prefill", 3, n_tokens)
    launch(
        _prepare_kernel, (heads.n_q + 2 * heads.n_kv, n_blocks), proj, weights.q_norm, weights.k_norm, weights.eps,
        blocks.n, blocks.position, blocks.page, cos, sin, cos.stride(0), axes.angles, query, pages, pages.stride(0),
        HALF=half, HALF_P2=next_power_of_2(half), FIRST=0, **ends, **sizes, num_warps=PREPARE_WARPS,
    )
    tile, rows_page = flash_tile(heads), pages.stride(0) // d
    queries = tiles_of(query, query.numel() // d, d, d, (BLOCK * tile.heads, d))
    n_rows = (pages.shape[0] - 1) * rows_page + pages[0].numel() // d
    tiles, value_tiles = tiles_of(pages, n_rows, d, d, (BLOCK, d)), None
    if not format.is_plain:
        value_tiles = tiles_of(pages, n_rows * (d // width), width, width, (BLOCK, width))
    n_outer = heads.n_kv if tile.kv_outer else 1
    launch(
        _flash_kernel, (heads.n_q // tile.heads // n_outer, n_blocks, n_outer), queries, tiles, value_tiles,
        None if format.is_plain else pages, proj, out, blocks.n,
        blocks.position, blocks.batch_slot, cache.table, cache.table.stride(0), rows_page, d**-0.5 * LOG2_E.value,
        HEADS=tile.heads, **sizes, END=0 if cache.chosen is None else first_choice(cache.chosen.shape[1], cache.ratio),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )
    if cache.chosen is not None:
        attention_chosen(proj, query, heads, blocks=blocks, cache=cache, out=out)


def keys_prefill(
    proj: Tensor, heads: AttentionHeads, weights: AttentionWeights, *, blocks: Blocks, cache: KvPages,
    axes: Axes = TEXT,
) -> None:
    """Writes the keys and values of the tokens of `blocks`, and nothing else: the bits of attention_prefill.

    Arguments as there; q and gates of proj are not read. Raises KernelError for shapes and types it does not
    serve.
    """
    cos, sin, pages, format = weights.cos, weights.sin, cache.data, cache.format
    d, n_tokens, half = heads.dim, BLOCK * blocks.n.shape[0], cos.shape[1]
    check(
        "keys_prefill", proj.shape == (n_tokens, heads.row) and proj.is_contiguous(),
        f"contiguous proj [{n_tokens}, {heads.row}]",
    )
    fits = proj.dtype == torch.bfloat16 and kv.fits(pages, heads.n_kv, d, format)
    check("keys_prefill", fits, f"bfloat16 proj, and {kv.expected(heads.n_kv, d, format)}")
    launch(
        _prepare_kernel, (2 * heads.n_kv, blocks.n.shape[0]), proj, weights.k_norm, weights.k_norm, weights.eps,
        blocks.n, blocks.position, blocks.page, cos, sin, cos.stride(0), axes.angles, proj, pages, pages.stride(0),
        HALF=half, HALF_P2=next_power_of_2(half), FIRST=heads.n_q, NQ=heads.n_q, NK=heads.n_kv, D=d,
        **axes.ends("keys_prefill", 3, n_tokens), GATED=heads.is_gated, KV=kv.constant(format), num_warps=PREPARE_WARPS,
    )
