"""index_prepare and index_select: which keys an indexed attention layer reads (csrc/index.cpp has the
equations).

A page of the index holds, for each attention layer, the raw keys of 64 tokens, [64, d], and the keys of its
16 groups of 4 tokens, [d/2, 16, 2], so that the scores of neighbouring groups are neighbouring lanes; all
bfloat16. The choice of a token depends on its context alone: a score is one sum, and among equals the earlier
group wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.ops.arrays import Array, bfloat16, stride
from deltic.ops.contract import check
from deltic.ops.cpu.attention import AttentionInputs
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import MAX_HEAD_DIM, Allocate, AttentionWeights, IndexHeads, up_to

GROUP = 4
"""Tokens that share a key of the index: a page's groups are the lanes of a sum."""
SCORE_ROWS = 64
"""Tokens whose scores are kept at once, at most."""


@dataclass(frozen=True)
class IndexBuffers:
    """Buffers of one index at a time."""

    proj: Array  # float32 [T, row]
    query: Array  # bfloat16 [T, n_q d]
    scores: Array  # float32 [n, groups of the longest context, up to a multiple of 16]
    chosen: Array  # int32 [T, n]: n_groups, or less where no context has so many


def index_buffers(heads: IndexHeads, n_tokens: int, max_len: int, allocate: Allocate) -> IndexBuffers:
    """Allocates the buffers of steps of up to n_tokens tokens, in contexts of up to max_len."""
    rows = min(n_tokens, SCORE_ROWS)
    return IndexBuffers(
        allocate("index projections", (n_tokens, heads.row), np.float32),
        allocate("index queries", (n_tokens, heads.n_q * heads.dim), bfloat16),
        allocate("index scores", (rows, up_to(max_len // GROUP, 16)), np.float32),
        allocate("index choices", (n_tokens, max(1, min(heads.n_groups, max_len // GROUP))), np.int32),
    )


def check_index(heads: IndexHeads, rotary: int) -> None:
    """Raises KernelError for sizes that the kernels do not have."""
    check("index", heads.ratio == GROUP, f"groups of {GROUP} tokens")
    check("index", heads.dim % 32 == 0 and heads.dim <= MAX_HEAD_DIM, f"a width % 32 == 0, <= {MAX_HEAD_DIM}")
    check("index", rotary % 32 == 0 and rotary <= heads.dim, f"rotary dims a multiple of 32, found {rotary}")


def _memory(heads: IndexHeads, pages: Array, inputs: AttentionInputs) -> tuple[Array | int, ...]:
    table = inputs.page_table
    check("index", pages.shape[1:] == (heads.page_rows, heads.dim), f"pages [n, {heads.page_rows}, {heads.dim}]")
    check("index", pages.dtype == bfloat16, "bfloat16 pages")
    at = inputs.n_tokens, inputs.positions, inputs.token_batch_slot
    return heads.n_q, heads.dim, pages, stride(pages), *at, table, stride(table)


def index_prepare(
    program: Program,
    proj: Array,
    heads: IndexHeads,
    weights: AttentionWeights,
    inputs: AttentionInputs,
    pages: Array,
    out: Array,
) -> None:
    """Norms and rotates the queries, bfloat16 to out [T, n_q d]; writes each token's raw key, and the key of
    each group that it completes, to the token's page.

    proj: float32 [T, row]; pages: bfloat16 [n_pages, page_rows, d], this layer's part; inputs.group_angles:
    int32 [T] rows of the tables of cos and sin of the first token of the token's group, None: those of its
    position. The raw keys of a group's other tokens must be in the page, or come with this call.
    """
    w, rotary = weights, 2 * weights.cos.shape[1]
    check_index(heads, rotary)
    check("index_prepare", proj.dtype == np.float32 and proj.shape[1] == heads.row, f"float32 proj [T, {heads.row}]")
    check("index_prepare", out.dtype == bfloat16 and out.shape[1] == heads.n_q * heads.dim, "bfloat16 out [T, n_q d]")
    angles = inputs.angles, inputs.group_angles
    check("index_prepare", all(rows is not None for rows in angles), "angles of tokens and of groups")
    memory = _memory(heads, pages, inputs)
    tables = w.q_norm, w.k_norm, w.eps, w.cos, w.sin, rotary
    program.call("deltic_index_prepare", proj, *memory, *angles, *tables, out)


def index_select(
    program: Program, heads: IndexHeads, inputs: AttentionInputs, pages: Array, buffers: IndexBuffers
) -> None:
    """buffers.chosen[t] = the n groups of the token's context whose keys score best, in
    ascending order. Among equals the earlier group is chosen. The row is not written where the context has no
    more whole groups.

    The score of a group is the sum over query heads, in their order, of relu(query . key). Groups are those
    that are whole where the token itself is counted: (position + 1) // 4. What index_prepare makes must be
    there.
    """
    b = buffers
    check("index_select", b.chosen.shape[1] <= heads.n_groups and b.chosen.dtype == np.int32, "int32 chosen")
    check("index_select", b.scores.shape[1] % 16 == 0 and b.scores.dtype == np.float32, "float32 scores, % 16 == 0")
    memory = _memory(heads, pages, inputs)
    program.call("deltic_index_select", b.query, *memory, b.scores, *b.scores.shape, b.chosen.shape[1], b.chosen)
