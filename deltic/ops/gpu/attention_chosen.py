"""attention_chosen: attention of a prefill's tokens that read chosen groups of keys (index.py), each its own.

A program has one token and the query heads of one key head, as a program of a decode does. It walks over the
keys that the token reads, in the order of their positions, 64 at a time: the chosen groups, then the tokens
behind the last whole group. Neighbours choose much alike, and run at the same time: the second-level cache
has what they share. Where a token's keys lie changes no sum, so neither do cuts and company. Quantised pages
are read from the last tile on, as one split of a decode.

Spec: `attention` of tests/reference/layers.py over the chosen keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import PAGE_SIZE, AttentionHeads
from deltic.ops.gpu import kv
from deltic.ops.gpu.attention_decode import all_attended
from deltic.ops.gpu.attention_parts import attended, finish
from deltic.ops.gpu.blocks import BLOCK, Blocks
from deltic.ops.gpu.chip import chip, wait_for_front
from deltic.ops.gpu.kv import PLAIN
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.kv_formats import KvPages


@triton.jit(do_not_specialize=["stride_table"])
def _chosen_kernel(
    p_query, p_pages, p_proj, p_out, p_n, p_position, p_batch_slot, p_table, p_chosen, stride_table, stride_page, scale,
    NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, GATED: tl.constexpr,
    CHOSEN: tl.constexpr, RATIO: tl.constexpr, KV: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_front(PDL)
    G: tl.constexpr = NQ // NK
    ROW: tl.constexpr = ((2 if GATED else 1) * NQ + 2 * NK) * D
    row, i_kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_t = tl.program_id(0) // PAGE, tl.program_id(0) % PAGE
    position = tl.load(p_position + i_b) + i_t
    if (i_t < tl.load(p_n + i_b)) & ((position + 1) // RATIO > CHOSEN):
        p_table += tl.load(p_batch_slot + i_b).to(tl.int64) * stride_table
        p_chosen += row * CHOSEN
        n_keys, _ = kv.read_keys(p_chosen, position, CHOSEN, RATIO)
        o_g, o_d, o_t = tl.arange(0, GROUP), tl.arange(0, D), tl.arange(0, PAGE)
        p_q = p_query + (i_b.to(tl.int64) * NQ + i_kv * G) * (PAGE * D) + i_t * D
        b_q = tl.load(p_q + o_g[:, None] * (PAGE * D) + o_d[None, :], mask=(o_g < G)[:, None], other=0.0)
        b_max = tl.full((GROUP,), float("-inf"), tl.float32)
        n_tiles = (n_keys + PAGE - 1) // PAGE
        if KV == PLAIN:
            p_pages += i_kv * (PAGE * D)
            b_qt = tl.trans(b_q)
            b_sum = tl.zeros((GROUP,), tl.float32)
            b_o = tl.zeros((D, GROUP), tl.float32)
            for i_tile in tl.range(0, n_tiles, num_stages=STAGES):
                o_key = i_tile * PAGE + o_t
                b_there = o_key < n_keys
                b_page, b_at = kv.key_places(p_chosen, p_table, o_key, position, PAGE, CHOSEN, RATIO)
                b_place = b_page * stride_page + b_at * D
                b_k = tl.load(p_pages + b_place[:, None] + o_d[None, :], mask=b_there[:, None], other=0.0)
                p_values = p_pages + NK * PAGE * D + b_place[None, :]
                b_v = tl.load(p_values + o_d[:, None], mask=b_there[None, :], other=0.0)
                b_max, b_sum, b_o = attended(b_k, b_v, b_qt, b_max, b_sum, b_o, b_there[:, None], scale)
        else:  # all keys are old ones, in one split
            b_none = tl.zeros((D,), tl.float32)
            b_max, b_sum, b_o = all_attended(
                p_chosen, p_table, p_pages, stride_page, None, 0, n_tiles - 1, position, n_keys, i_kv, b_q, b_max,
                b_none, scale, n_tiles, 1, None, None, G, NK, D, GROUP, PAGE, KV, STAGES, CHOSEN, RATIO,
            )
        b_gate = tl.full((GROUP, D), 1.0, tl.float32)
        if GATED:
            p_gate = p_proj + row * ROW + (NQ + i_kv * G) * D + o_g[:, None] * D + o_d[None, :]
            b_gate = tl.sigmoid(tl.load(p_gate, mask=(o_g < G)[:, None], other=0.0).to(tl.float32))
        p_to = p_out + row * (NQ * D) + i_kv * (G * D)
        finish(tl.trans(b_o), b_sum, b_gate, p_to, None, None, 0, G, GROUP, D, D)


def first_choice(n_chosen: int, ratio: int) -> int:
    """The first position whose token chooses: more groups are whole with it than may be chosen."""
    return (n_chosen + 1) * ratio - 1


def attention_chosen(
    proj: Tensor, query: Tensor, heads: AttentionHeads, *, blocks: Blocks, cache: KvPages, out: Tensor
) -> None:
    """out[t] of the tokens of `blocks` that choose, by cache.chosen; other rows of out are left as they are.

    proj: bfloat16 [T, heads.row], of which gates are read; query: bfloat16 [blocks, nq, 64, d], normed and
    rotated, float16 beside quantised pages; cache: pages, which hold the tokens' own keys and values, too;
    out: bfloat16 [T, nq d].
    Raises KernelError where these do not fit.
    """
    chosen, pages = cache.chosen, cache.data
    n_tokens, group = BLOCK * len(blocks.n), heads.n_q // heads.n_kv
    fits = cache.ratio > 0 and PAGE_SIZE % cache.ratio == 0 and len(chosen) >= n_tokens
    check("attention_chosen", fits, "chosen groups of each token")
    check("attention_chosen", group <= 16 and out.is_contiguous(), "at most 16 query heads a key head")
    launch(
        _chosen_kernel, (n_tokens, heads.n_kv), query, pages, proj, out, blocks.n, blocks.position, blocks.batch_slot,
        cache.table, chosen, cache.table.stride(0), pages.stride(0), heads.dim**-0.5 * 1.4426950408889634, NQ=heads.n_q,
        NK=heads.n_kv, D=heads.dim, GROUP=max(8, next_power_of_2(group)), PAGE=PAGE_SIZE, GATED=heads.is_gated,
        CHOSEN=chosen.shape[1], RATIO=cache.ratio, KV=kv.constant(cache.format), num_warps=4, num_stages=1,
        STAGES=chip().stages(PAGE_SIZE * cache.format.head_bytes(heads.dim), 2, beside=13 << 10),
    )
