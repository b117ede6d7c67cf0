"""attn_prepare and attention: full attention, gated or not, over 64-token pages (csrc/attention.cpp).

A page holds, for each attention layer, k and v of 64 tokens in bfloat16: k as [nk, d/2, 64, 2], so that the
scores of neighbouring keys are neighbouring lanes, and v as [nk, 64, d]; or both in fewer bits
(ops/kv_formats.py, csrc/kv.h). The pages of the sequence in batch slot i are page_table[i]. Softmax weights
are float32 and relative to a running maximum over pages in order, and start anew every SPLIT_KEYS keys. The
splits are merged in order. So a long context can be many tasks, and how many does not touch the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from deltic.ops.arrays import Array, bfloat16, stride
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import MAX_GROUP, MAX_HEAD_DIM, PAGE_SIZE, AttentionHeads, AttentionWeights
from deltic.ops.kv_formats import BF16, KvFormat, KvPages

_FORMATS = ("bf16", "int8", "k8v4")
"""KV formats, in the order of csrc/kv.h."""


def kv_pages(n_pages: int, n_layers: int, heads: AttentionHeads, kv: KvFormat) -> tuple[tuple[int, ...], DTypeLike]:
    """Shape and type of the pages of so many layers."""
    if kv.is_plain:
        return (n_pages, n_layers, 2, heads.n_kv, PAGE_SIZE, heads.dim), bfloat16
    return (n_pages, n_layers, kv.layer_bytes(heads.n_kv, heads.dim)), np.uint8


def _check_pages(operator: str, heads: AttentionHeads, cache: KvPages) -> None:
    pages, kv = cache.data, cache.format
    check(operator, kv.name in _FORMATS, f"keys and values in one of {', '.join(_FORMATS)}")
    (_, _, *size), dtype = kv_pages(0, 0, heads, kv)
    check(operator, pages.shape[1:] == tuple(size) and pages.dtype == dtype, f"{dtype} pages [n, *{size}]")


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Tokens of sequences, in buffers that keep their addresses. int32; S sequences, T tokens.

    A batch slot is a row of the page table, of which each running sequence has one.
    """

    n_tokens: Array
    n_seqs: Array
    positions: Array  # [T]: the token's number in its sequence
    angles: Array | None = None  # [T] rows of the tables of cos and sin; None: those of the positions
    group_angles: Array | None = None  # [T] of the first token of the group that an index counts the token to
    token_batch_slot: Array  # [T]
    seq_start: Array  # [S + 1]
    seq_context: Array  # [S]: tokens before the chunk's
    batch_slot: Array  # [S]
    page_table: Array  # [batch_slots, max_pages]


def attn_prepare(
    program: Program,
    proj: Array,
    heads: AttentionHeads,
    weights: AttentionWeights,
    inputs: AttentionInputs,
    cache: KvPages,
    q_out: Array,
) -> None:
    """Norms and rotates q and k; writes bfloat16 q to q_out [T, nq, d], k and v, rounded to bfloat16 and then
    as their format says, to the token's place in its page.

    proj: float32 [T, row]; cache: this layer's part of pages of `kv_pages`.
    """
    pages = cache.data
    w, rotary, table = weights, 2 * weights.cos.shape[1], inputs.page_table
    check("attn_prepare", proj.shape[1] == heads.row, f"proj [T, {heads.row}]")
    _check_pages("attn_prepare", heads, cache)
    check("attn_prepare", q_out.dtype == bfloat16, "bfloat16 q")
    check("attn_prepare", heads.dim % 32 == 0 and heads.dim <= MAX_HEAD_DIM, f"head_dim % 32 == 0, <= {MAX_HEAD_DIM}")
    check("attn_prepare", rotary % 32 == 0 and rotary <= heads.dim, f"rotary dims a multiple of 32, found {rotary}")
    program.call(
        "deltic_attn_prepare",
        *(proj, heads.n_q, heads.n_kv, heads.dim, heads.is_gated),
        *(inputs.n_tokens, inputs.positions, inputs.positions if inputs.angles is None else inputs.angles),
        *(inputs.token_batch_slot, table, stride(table)),
        *(w.q_norm, w.k_norm, w.eps, w.cos, w.sin, rotary),
        *(q_out, pages, stride(pages), _FORMATS.index(cache.format.name)),
    )


def _attended(
    q: Array, proj: Array, heads: AttentionHeads, inputs: AttentionInputs, pages: Array
) -> tuple[Array | int, ...]:
    """Arguments of a kernel: queries, and the pages of the sequences."""
    i, sizes = inputs, (heads.n_q, heads.n_kv, heads.dim, heads.is_gated)
    sequences = i.n_seqs, i.seq_start, i.seq_context, i.batch_slot
    return q, proj, *sizes, pages, stride(pages), *sequences, i.page_table, stride(i.page_table)


def attention(
    program: Program,
    q: Array,
    proj: Array,
    heads: AttentionHeads,
    inputs: AttentionInputs,
    cache: KvPages,
    records: Array,
    out: Array,
) -> None:
    """out[t, h] = bfloat16(softmax(q k^T / sqrt(d)) v * sigmoid(gate)), or without a gate, causal. Query head
    j reads key head j // (nq/nk).

    q: bfloat16 [T, nq, d]; proj: float32 [T, row], read for the gates only; out: bfloat16 [T, nq d]. The keys
    of the tokens themselves must be in the pages already. records: float32 scratch of heads.records_size(),
    for the splits of blocks of rows that are given to several threads; any number of them will do. Where
    pages are not bfloat16, each query, and softmax's weights of a page times its scales, are rounded to
    multiples of 1/32512 of their largest (csrc/kv.h).

    cache.chosen: int32 [T, n], groups of 4 keys, ascending (ops/cpu/index.py). A token whose context has more
    whole groups reads these, and behind them what is in no whole group, as if they were its context.
    """
    chosen = cache.chosen
    _check_pages("attention", heads, cache)
    check("attention", heads.n_q % heads.n_kv == 0, "query heads a multiple of key heads")
    check("attention", heads.n_q // heads.n_kv <= MAX_GROUP, f"at most {MAX_GROUP} query heads a key head")
    check("attention", out.shape[1] == heads.n_q * heads.dim and out.dtype == bfloat16, "bfloat16 out [T, nq d]")
    check(
        "attention", records.shape[1] == heads.dim + 16 and records.dtype == np.float32, "float32 records [n, d + 16]"
    )
    program.call(
        "deltic_attention",
        _FORMATS.index(cache.format.name),
        *_attended(q, proj, heads, inputs, cache.data),
        *(out, records, records.shape[0]),
        *(chosen, 0 if chosen is None else chosen.shape[1]),
    )


def block_attention(
    program: Program,
    q: Array,
    heads: AttentionHeads,
    inputs: AttentionInputs,
    pages: Array,
    sees: tuple[bool, int],
    scratch: tuple[Array, Array],
    out: Array,
) -> None:
    """Does what `attention` does without gates, over bfloat16 pages, for rows that see more, or less. sees:
    whether a row sees no later one, and less than how many positions away; 0: all.

    scratch: proj, float32 [T, row], and records, as of `attention`.
    """
    proj, records = scratch
    _check_pages("block_attention", heads, KvPages(pages, BF16))
    check("block_attention", not heads.is_gated, "heads without gates")
    check("block_attention", heads.n_q // heads.n_kv <= MAX_GROUP, f"at most {MAX_GROUP} query heads a key head")
    check("block_attention", out.shape[1] == heads.n_q * heads.dim and out.dtype == bfloat16, "bfloat16 out [T, nq d]")
    program.call(
        "deltic_block_attention",
        *_attended(q, proj, heads, inputs, pages),
        *(out, records, records.shape[0], None, 0, *sees),
    )
