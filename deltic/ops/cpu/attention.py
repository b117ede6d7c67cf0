"""attn_prepare and attention: full attention, gated or not, over 64-token pages (csrc/attention.cpp).

A page holds, for each attention layer, k and v of 64 tokens in bfloat16: k as [nk, d/2, 64, 2], so that the
scores of neighbouring keys are neighbouring lanes, and v as [nk, 64, d]; or both in fewer bits
(ops/kv_formats.py, csrc/kv.h). The pages of the sequence in batch slot i are page_table[i]. Softmax weights
are float32 and relative to a running maximum over pages in order, and start anew every SPLIT_KEYS keys. The
splits are merged in order. So a long context can be many tasks, and how many does not touch the bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from deltic.ops.arrays import Array, bfloat16, stride
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import MAX_GROUP, MAX_HEAD_DIM, PAGE_SIZE, AttentionHeads
from deltic.ops.kv_formats import BF16, KvFormat

_FORMATS = ("bf16", "int8", "k8v4")
"""KV formats, in the order of csrc/kv.h."""


def kv_pages(n_pages: int, n_layers: int, heads: AttentionHeads, kv: KvFormat) -> tuple[tuple[int, ...], DTypeLike]:
    """Shape and type of the pages of so many layers."""
    if kv.is_plain:
        return (n_pages, n_layers, 2, heads.n_kv, PAGE_SIZE, heads.dim), bfloat16
    return (n_pages, n_layers, kv.layer_bytes(heads.n_kv, heads.dim)), np.uint8


def _check_pages(operator: str, pages: Array, heads: AttentionHeads, kv: KvFormat) -> None:
    check(operator, kv.name in _FORMATS, f"keys and values in one of {', '.join(_FORMATS)}")
    (_, _, *size), dtype = kv_pages(0, 0, heads, kv)
    check(operator, pages.shape[1:] == tuple(size) and pages.dtype == dtype, f"{dtype} pages [n, *{size}]")


def attn_prepare(
    program: Program,
    proj: Array,
    heads: AttentionHeads,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    *,
    n_tokens: Array,
    positions: Array,
    token_batch_slot: Array,
    page_table: Array,
    cos: Array,
    sin: Array,
    q_out: Array,
    pages: Array,
    angles: Array | None = None,
    kv: KvFormat = BF16,
) -> None:
    """Norms and rotates q and k; writes bfloat16 q to q_out [T, nq, d], k and v, rounded to bfloat16 and then
    as kv says, to the token's place in its page.

    proj: float32 [T, row]; q_norm, k_norm: float32 [d], zero-centred; positions,
    token_batch_slot, angles: int32 [T], of each token its number in the sequence, its sequence's batch slot,
    and its row of cos and sin (None: that of its number); page_table: int32 [batch_slots, max_pages]; cos,
    sin: float32 [n_angles, rotary/2]; pages: of `kv_pages`, this layer's part, with any page stride.
    Rotated are the first `rotary` dims of a head, in pairs (i, i + rotary/2).
    """
    rotary = 2 * cos.shape[1]
    check("attn_prepare", proj.shape[1] == heads.row, f"proj [T, {heads.row}]")
    _check_pages("attn_prepare", pages, heads, kv)
    check("attn_prepare", q_out.dtype == bfloat16, "bfloat16 q")
    check("attn_prepare", heads.dim % 32 == 0 and heads.dim <= MAX_HEAD_DIM, f"head_dim % 32 == 0, <= {MAX_HEAD_DIM}")
    check("attn_prepare", rotary % 32 == 0 and rotary <= heads.dim, f"rotary dims a multiple of 32, found {rotary}")
    program.call(
        "deltic_attn_prepare",
        proj,
        heads.n_q,
        heads.n_kv,
        heads.dim,
        heads.is_gated,
        n_tokens,
        positions,
        positions if angles is None else angles,
        token_batch_slot,
        page_table,
        stride(page_table),
        q_norm,
        k_norm,
        eps,
        cos,
        sin,
        rotary,
        q_out,
        pages,
        stride(pages),
        _FORMATS.index(kv.name),
    )


def attention(
    program: Program,
    q: Array,
    proj: Array,
    heads: AttentionHeads,
    pages: Array,
    *,
    n_seqs: Array,
    seq_start: Array,
    seq_context: Array,
    batch_slot: Array,
    page_table: Array,
    records: Array,
    out: Array,
    kv: KvFormat = BF16,
) -> None:
    """out[t, h] = bfloat16(softmax(q k^T / sqrt(d)) v * sigmoid(gate)), or without a gate, causal. Query head
    j reads key head j // (nq/nk).

    q: bfloat16 [T, nq, d]; proj: float32 [T, row], read for the gates only; out: bfloat16 [T, nq d]; the rest
    as in attn_prepare and gdn. The keys of the tokens themselves must be in the pages already. records:
    float32 scratch of heads.records_size(), for the splits of blocks of rows that are given to several
    threads; any number of them will do. kv: of the pages; where it is not bfloat16, each query, and softmax's
    weights of a page times its scales, are rounded to multiples of 1/32512 of their largest (csrc/kv.h).
    """
    _check_pages("attention", pages, heads, kv)
    check("attention", heads.n_q % heads.n_kv == 0, "query heads a multiple of key heads")
    check("attention", heads.n_q // heads.n_kv <= MAX_GROUP, f"at most {MAX_GROUP} query heads a key head")
    check("attention", out.shape[1] == heads.n_q * heads.dim and out.dtype == bfloat16, "bfloat16 out [T, nq d]")
    check(
        "attention", records.shape[1] == heads.dim + 16 and records.dtype == np.float32, "float32 records [n, d + 16]"
    )
    program.call(
        "deltic_attention",
        _FORMATS.index(kv.name),
        q,
        proj,
        heads.n_q,
        heads.n_kv,
        heads.dim,
        heads.is_gated,
        pages,
        stride(pages),
        n_seqs,
        seq_start,
        seq_context,
        batch_slot,
        page_table,
        stride(page_table),
        out,
        records,
        records.shape[0],
    )
