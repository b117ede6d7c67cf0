"""The start of a step (embedding, row arrays) and the norm between layers: residual + partial sums, RMSNorm,
one rounding.

The sum of squares of a row has one order, whatever runs it: `LANES` running sums, lane l adding the squares
of columns l, l + LANES, ... in order with fused multiply-adds, then a tree over neighbouring lanes. Every
level of the tree is a sum of two, so its bits depend neither on how the compiler spreads the lanes over
threads nor on the number of warps.

Spec: out = x rsqrt(mean(x^2) + eps) (1 + w), as `tests.reference.layers.rms_norm`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu.blocks import BatchState, Rows
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.decode import BF16, address, codes_at, constants, k_block, load_block, rows_from, values
from deltic.ops.gpu.fp8 import Fp8Rows, Operand, rounded, stored_by
from deltic.ops.gpu.launch import launch
from deltic.ops.matrix import Matrix

LANES = 512
"""Running sums of a row's squares; part of what defines the bits."""

EARLY_ROWS, EARLY_WIDTH = 16, 5120
"""Rows up to which, and columns from which, a norm in front of e4m3 lets that product start before its own
wait, as measured: of 2,048 columns it loses.
"""

@triton.jit
def tree_sum(b_x, LANES: tl.constexpr):
    """[LANES] -> [1]: neighbours first, level by level. LANES from 4 to 1024.

    The last four are split: they come to each thread at once, where two sums would wait for all warps twice
    each, and give what is made with the result their layout.
    """
    b = tl.reshape(b_x, (1, LANES))
    for level in tl.static_range(10):
        if LANES >> level > 4:
            b = tl.sum(tl.reshape(b, (1, LANES >> (level + 1), 2)), 2)
    b_even, b_odd = tl.split(tl.reshape(b, (2, 2)))
    b_even, b_odd = tl.split(tl.reshape(b_even + b_odd, (1, 2)))
    return b_even + b_odd


@triton.jit
def sum_of_neighbours(shards, N: tl.constexpr):
    """The sum of N shards, neighbours first, level by level. N: a power of two up to 16."""
    for level in tl.static_range(4):
        if N >> level > 1:
            sums: tl.tuple = ()
            for i in tl.static_range(N >> (level + 1)):
                sums += (shards[2 * i] + shards[2 * i + 1],)
            shards = sums
    return shards[0]


@triton.jit
def sum_of_shards(p_part, stride, b_mask, SHARDS: tl.constexpr, SLICES: tl.constexpr):
    """The sum of what each part of a model has, SLICES in order; of shards neighbours first."""
    sums: tl.tuple = ()
    for p in tl.static_range(SHARDS):
        b_sum = tl.load(p_part + p * SLICES * stride, mask=b_mask, other=0.0).to(tl.float32)
        for s in tl.static_range(1, SLICES):
            b_sum += tl.load(p_part + (p * SLICES + s) * stride, mask=b_mask, other=0.0).to(tl.float32)
        sums += (b_sum,)
    return sum_of_neighbours(sums, SHARDS)


@triton.jit
def copy_row(p_from, p_to, width, LANES: tl.constexpr, PIECES: tl.constexpr):
    for j in tl.static_range(PIECES):
        o = j * LANES + tl.arange(0, LANES)
        tl.store(p_to + o, tl.load(p_from + o, mask=o < width, other=0.0).to(p_to.dtype.element_ty), mask=o < width)


@triton.jit
def _read_row(
    p_table, token, p_to, n, width, LANES: tl.constexpr, PIECES: tl.constexpr, BLOCK_K: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
):
    """Row `token` of a table, in bf16 all of it, else the block of program_id(1)."""
    if CODES == BF16:
        copy_row(p_table + token * width, p_to, width, LANES, PIECES)
    else:
        first = tl.program_id(1) * BLOCK_K
        # And the row behind it: Triton fails on one alone, of which it is told what it is a multiple of.
        o_two = tl.arange(0, 2)
        o_row = tl.minimum(token + o_two, n - 1)
        w = rows_from(p_table, o_row, first, n, width, BLOCK_K, CODES, SCALES, GROUP)
        b_row = values(
            load_block(w, tl.full((), 0, tl.int32), BLOCK_K, CODES, SCALES, GROUP), BLOCK_K, CODES, SCALES, GROUP
        )
        p_at = p_to + first + o_two[:, None] * 0 + tl.arange(0, BLOCK_K)[None, :]
        tl.store(p_at, b_row, mask=(o_two == 0)[:, None])


@triton.jit
def _begin_decode_kernel(
    p_rows_batch_slot, p_ahead, p_draft, p_last_token, p_position, p_state_slot, p_done, p_shift, p_table,
    p_row_batch_slot, p_row_slot, p_row_position, p_row_shift, p_residual, n, width, DRAFTS: tl.constexpr,
    LANES: tl.constexpr, PIECES: tl.constexpr, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):
    i_row = tl.program_id(0)
    if PDL:  # and nobody is let start early: later kernels read the row arrays before they wait
        tl.extra.cuda.gdc_wait()
    batch_slot = tl.load(p_rows_batch_slot + i_row)
    used = batch_slot >= 0
    batch_slot = tl.maximum(batch_slot, 0)
    done = tl.load(p_done + batch_slot)
    state_slot = tl.load(p_state_slot + batch_slot)
    position = tl.load(p_position + batch_slot)
    token = tl.load(p_last_token + batch_slot)
    if DRAFTS:
        ahead = tl.load(p_ahead + i_row)
        position += ahead
        token = tl.where(ahead > 0, tl.load(p_draft + i_row), token)
    tl.store(p_row_batch_slot + i_row, batch_slot)
    tl.store(p_row_slot + i_row, tl.where(used & (done == 0), state_slot, -1))
    tl.store(p_row_position + i_row, tl.where(used, position, 0))
    if p_shift is not None:
        tl.store(p_row_shift + i_row, tl.where(used, tl.load(p_shift + batch_slot), 0))
    if p_table is not None:
        # a row that ended keeps its last token, whatever it is; the clamp keeps the read inside the table
        token = tl.where(used, tl.maximum(token, 0), 0).to(tl.int64)
        p_to = p_residual + i_row.to(tl.int64) * width
        _read_row(p_table, token, p_to, n, width, LANES, PIECES, BLOCK_K, CODES, SCALES, GROUP)


@triton.jit
def _embed_kernel(
    p_token, p_table, p_pictures, p_residual, n, width, LANES: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
):
    i_row = tl.program_id(0)
    token = tl.load(p_token + i_row).to(tl.int64)
    p_to = p_residual + i_row.to(tl.int64) * width
    if p_pictures is not None:
        if token >= 0:
            _read_row(p_table, token, p_to, n, width, LANES, PIECES, BLOCK_K, CODES, SCALES, GROUP)
        elif tl.program_id(1) == 0:
            copy_row(p_pictures + (-1 - token) * width, p_to, width, LANES, PIECES)
    else:
        token = tl.maximum(token, 0)
        _read_row(p_table, token, p_to, n, width, LANES, PIECES, BLOCK_K, CODES, SCALES, GROUP)


@triton.jit
def load_pieces(p_row, width, LANES: tl.constexpr, PIECES: tl.constexpr):
    """A row in runs of LANES columns, zeros behind its end."""
    pieces: tl.tuple = ()
    for j in tl.static_range(PIECES):
        o_col = j * LANES + tl.arange(0, LANES)
        pieces += (tl.load(p_row + o_col, mask=o_col < width, other=0.0),)
    return pieces


@triton.jit
def store_pieces(p_row, pieces, width, LANES: tl.constexpr, PIECES: tl.constexpr):
    for j in tl.static_range(PIECES):
        o_col = j * LANES + tl.arange(0, LANES)
        tl.store(p_row + o_col, pieces[j], mask=o_col < width)


@triton.jit
def inverse_rms(b_total, inverse_width, eps):
    """1 / the root of total * inverse_width + eps. The multiply-add is written out: the compiler has no
    choice.
    """
    return tl.rsqrt(tl.fma(b_total, tl.zeros_like(b_total) + inverse_width, tl.zeros_like(b_total) + eps))


@triton.jit
def store_norm(
    p_row, p_codes, p_scale, n, pieces, weights, width, inverse_width, eps, LANES: tl.constexpr, PIECES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """p_row = bfloat16(pieces / rms * (1 + weights)). With p_codes, these are p_row in e4m3, and p_scale, n
    apart, the scales of each GROUP columns, by `rounded`.

    Four warps have a group of 128 columns within one, so that its maximum is one instruction.
    """
    b_square = tl.zeros((LANES,), tl.float32)
    for j in tl.static_range(PIECES):
        b_square = tl.fma(pieces[j], pieces[j], b_square)
    b_inverse = inverse_rms(tree_sum(b_square, LANES), inverse_width, eps)
    if p_codes is not None:
        N_GROUPS: tl.constexpr = LANES // GROUP
        o_piece = tl.arange(0, triton.next_power_of_2(PIECES))[None, :]
        o_group = o_piece * N_GROUPS + tl.arange(0, N_GROUPS)[:, None]
        b_scales = tl.zeros(o_group.shape, tl.float32)
    for j in tl.static_range(PIECES):
        o_col = j * LANES + tl.arange(0, LANES)
        b_y = (pieces[j] * b_inverse * (1.0 + weights[j])).to(tl.bfloat16)
        # not p_row + o_col: Triton 3.6 would ask for half as many partials at once (docs/log/2026-11.md)
        tl.store(p_row + j * LANES + tl.arange(0, LANES), b_y, mask=o_col < width)
        if p_codes is not None:
            b_codes, b_scale = rounded(tl.reshape(b_y, (N_GROUPS, GROUP)))
            tl.store(p_codes + j * LANES + tl.arange(0, LANES), tl.reshape(b_codes, (LANES,)), mask=o_col < width)
            b_scales = tl.where(o_piece == j, b_scale[:, None], b_scales)
    if p_codes is not None:
        # together: of each piece by itself they would go through shared memory once a piece
        tl.store(p_scale + o_group * n, b_scales, mask=o_group * GROUP < width)


@triton.jit
def _add_norm_kernel(
    p_residual, p_partials, p_w, p_out, p_codes, p_scale, p_rows, width, partial_stride, inverse_width, eps,
    LANES: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, SHARDS: tl.constexpr, SLICES: tl.constexpr,
    TOGETHER: tl.constexpr, STORE: tl.constexpr, GATHER: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:  # noqa: SIM102
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    i_row = tl.program_id(0)
    o_lane = tl.arange(0, LANES)
    weights = load_pieces(p_w, width, LANES, PIECES)  # before the wait: nobody in the step writes weights
    wait_for_front(PDL)
    row = i_row.to(tl.int64)
    if GATHER:
        row = tl.maximum(tl.load(p_rows + i_row), 0).to(tl.int64)
    o_row = row * width
    o_out = i_row.to(tl.int64) * width
    p_row_codes = None
    p_row_scale = None
    if p_codes is not None:
        p_row_codes = codes_at(p_codes) + o_out
        p_row_scale = p_scale + i_row
    asked: tl.tuple = ()
    for j in tl.static_range(PIECES):
        o_col = j * LANES + o_lane
        of_piece: tl.tuple = (tl.load(p_residual + o_row + o_col, mask=o_col < width, other=0.0),)
        for s in tl.static_range(TOGETHER):
            p_part = p_partials + s * partial_stride + o_row + o_col
            of_piece += (tl.load(p_part, mask=o_col < width, other=0.0),)
        asked += (of_piece,)
    # Always true. The assembler brings no sum in front of a branch. Without one it waits for the first pieces
    # before it asks for the last, which saves registers that nobody else wants
    if width > 0:
        pieces: tl.tuple = ()
        for j in tl.static_range(PIECES):
            o_col = j * LANES + o_lane
            b_x = asked[j][0]
            for s in tl.static_range(TOGETHER):
                b_x += asked[j][1 + s].to(tl.float32)
            if SHARDS > 1:
                b_x += sum_of_shards(p_partials + o_row + o_col, partial_stride, o_col < width, SHARDS, SLICES)
            else:
                for s in tl.static_range(TOGETHER, SLICES):
                    p_part = p_partials + s * partial_stride + o_row + o_col
                    b_x += tl.load(p_part, mask=o_col < width, other=0.0).to(tl.float32)
            pieces += (b_x,)
        if STORE:
            # behind all loads: a store between them would make each piece wait for the one before
            store_pieces(p_residual + o_row, pieces, width, LANES, PIECES)
        n = tl.num_programs(0)
        store_norm(
            p_out + o_out, p_row_codes, p_row_scale, n, pieces, weights, width, inverse_width, eps, LANES, PIECES, GROUP
        )


def pieces(width: int) -> int:
    """Runs of LANES columns in a row of this width."""
    return -(-width // LANES)


def norm_warps(n: int, width: int) -> int:
    """Warps for a row. The bits do not see them (above)."""
    return 4 if n < 256 or width > 2048 else 2


MOST_TOGETHER = 40
"""Loads of 16 bytes that a thread has under way at once: they take four registers each, of 255."""


def _slices_together(n: int, width: int, slices: int) -> int:
    """Slices of partial sums that a row asks for at once, with the residual. Many rows fill a multiprocessor
    with several programs, whose loads overlap as it is.
    """
    return min(slices, max(0, MOST_TOGETHER // pieces(width) - 1)) if n < 256 else 0


def begin_decode(
    rows_batch_slot: Tensor, batch_slots: BatchState, table: Matrix | None, *, rows: Rows, residual: Tensor
) -> None:
    """Starts a decode step: the rows from their batch slots, and the embedding of each row's token.

    rows_batch_slot: int32 [N], the batch slot of each row, -1 for a row not in use; table: [V, H] in rows;
    None: residual stays. Writes rows and residual: float32 [N, H]. rows.drafts is read: a row behind others
    of its sequence has the token that is drafted there, and is so many positions further. rows.angle_shift:
    where the batch slots have one. A row not in use gets batch slot 0, state slot -1, position 0 and token 0.
    A row whose batch slot is done keeps batch slot and position and gets state slot -1. Leaves out: a check
    of token ids against the vocabulary. Raises KernelError for a table in panels, or in several formats.
    """
    n, width = residual.shape
    state = (batch_slots.last_token, batch_slots.position, batch_slots.state_slot, batch_slots.done)
    drafts = (None, None) if rows.drafts is None else (rows.drafts.ahead, rows.drafts.token)
    ids = (rows_batch_slot, *state, rows.batch_slot, rows.state_slot, rows.position)
    check(
        "embed", (batch_slots.angle_shift is None) == (rows.angle_shift is None),
        "angles of batch slots and rows, or of none",
    )
    check("embed", all(x.dtype == torch.int32 for x in ids), "int32 arrays")
    fits = rows_batch_slot.shape[0] == n and (table is None or table.k == width)
    check("embed", fits, f"{n} rows, a table of width {width}")
    check("embed", residual.dtype == torch.float32, "float32 residual")
    blocks, codes, n_ids, cut = _cut(table)
    launch(
        _begin_decode_kernel, (n, blocks), rows_batch_slot, *drafts, *state, batch_slots.angle_shift, codes,
        rows.batch_slot, rows.state_slot, rows.position, rows.angle_shift, residual, n_ids, width,
        DRAFTS=rows.drafts is not None, LANES=LANES, PIECES=pieces(width), **cut, num_warps=4,
    )


def _cut(table: Matrix | None) -> tuple[int, Tensor | None, int, dict[str, int]]:
    """Programs that a row of a table takes, its memory and rows, and the constants of the kernels."""
    if table is None:
        return 1, None, 0, {"BLOCK_K": LANES, **constants(WEIGHT_FORMATS["bf16"])}
    segment = table.whole
    check("embed", segment.layout == "rows", f"a table in rows; there is no kernel for {segment.format.name} in panels")
    block_k = k_block(segment.k, 256)
    programs = 1 if segment.format.codes == "bf16" else segment.k // block_k
    return programs, address(segment), segment.n, {"BLOCK_K": block_k, **constants(segment.format)}


def embed(token_ids: Tensor, table: Matrix, residual: Tensor, pictures: Tensor | None = None) -> None:
    """residual[t] = float32(table[token_ids[t]]), not rounded. token_ids: int32 [T]; table: [V, H] in rows;
    residual: float32 [T, H].

    A negative id reads row -1 - id of pictures, bfloat16 [N, H], and where there are none row 0 of the table
    (padding). Leaves out: a check of ids against the vocabulary. Raises KernelError for a table in panels, or
    in several formats.
    """
    n, width = residual.shape
    check("embed", token_ids.dtype == torch.int32 and token_ids.shape == (n,), f"{n} int32 ids")
    check("embed", residual.dtype == torch.float32 and table.k == width, f"table of width {width}, float32 residual")
    if pictures is not None:
        fits = pictures.dtype == torch.bfloat16 and pictures.shape[1] == width and pictures.is_contiguous()
        check("embed", fits, f"bfloat16 pictures [N, {width}]")
    blocks, codes, n_ids, cut = _cut(table)
    launch(
        _embed_kernel, (n, blocks), token_ids, codes, pictures, residual, n_ids, width,
        LANES=LANES, PIECES=pieces(width), **cut, num_warps=4,
    )


def add_norm(
    residual: Tensor, partials: Tensor | None, w: Tensor, eps: float, out: Tensor, *, rows: Tensor | None = None,
    codes: Fp8Rows | None = None,
) -> None:
    """residual += partials[0], then partials[1], ...; out = bfloat16(residual / rms * (1 + w)).

    residual: float32 [T, H]; partials: float32 or bfloat16 [S, T, H] or None; w: float32 [H], zero-centred;
    out: bfloat16 [T, H]. With rows, int32 [R], out is [R, H], out[r] belongs to row rows[r], and residual is
    not written. Partials [shards, S, T, H], of a model in shards, are added as `all_reduce` of as many ranks
    adds them, and the sum to residual. codes: out in e4m3 as well, with the bits of `round_rows`, where these
    have a block. The bits of a row depend on this row only. The mathematics is that of reference/layers.py,
    rms_norm.
    """
    n, width = residual.shape
    n_out = n if rows is None else rows.shape[0]
    check("rms_norm", residual.dtype == w.dtype == torch.float32, "float32 residual and w")
    check("rms_norm", out.dtype == torch.bfloat16 and out.shape == (n_out, width), f"bfloat16 out [{n_out}, {width}]")
    check("rms_norm", w.shape == (width,), "one width")
    check("rms_norm", residual.is_contiguous() and out.is_contiguous(), "contiguous tensors")
    shards, n_slices = 1, 0
    if partials is not None:
        shards, n_slices = (1, *partials.shape)[-4:-2]
        check("rms_norm", partials.shape[-2:] == residual.shape, f"partials [S, {n}, {width}]")
        check("rms_norm", partials.is_contiguous(), "contiguous partials")
    made = Operand(out, codes)
    together = _slices_together(n_out, width, n_slices) if shards == 1 else 0
    launch(
        _add_norm_kernel, (n_out,), residual, partials, w, out, *stored_by("rms_norm", made, True), rows, width,
        n * width, 1.0 / width, eps, LANES=LANES, PIECES=pieces(width), GROUP=made.block_k, SHARDS=shards,
        SLICES=n_slices, TOGETHER=together, STORE=rows is None and n_slices > 0, GATHER=rows is not None,
        EARLY=made.block_k > 0 and n_out <= EARLY_ROWS and width >= EARLY_WIDTH,
        num_warps=norm_warps(n_out, width),
    )
