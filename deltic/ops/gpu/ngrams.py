"""The n-gram embedding of a layer (PLE): rows of a table in the host's memory, by a hash of the last tokens.

    id(n, h) = (xor over p < n of token[t - p] multipliers[p]) mod primes[h] + offsets[h]      int64, exact
    e        = the rows of all heads, side by side;     k | v = W e
    gate_s   = sigmoid(sign(g) sqrt(max(|g|, 1e-6)));   g = rms_norm(k_s) . rms_norm(x_s) / sqrt(H)
    x_s     += gate_s v + silu(conv(c))_s;              c_s = bfloat16(rms_norm(gate_s v))

Heads of n-grams of 2 tokens come first, then those of 3, and so on. Where a token does not exist, or an end
of text lies between, the end of text stands for it. The convolution is depthwise; its taps are `dilation`
tokens apart. The GPU reads the table where it lies: of a token a few rows of a few hundred bytes.

c of the last tokens is kept in the state: a ring by position, with room for those that a draft brings. So
nothing that a wrong draft leaves is ever read. A decode's rows of one sequence read each other's c: it is one
kernel that writes it, and another that reads it.

Source: transformers 5.24, `Qwen4ExpTextPLELayer`.
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
from deltic.ops.gpu.blocks import BLOCK, Blocks, Rows
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.kv import e4m3_values
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.gpu.norm import (
    LANES,
    load_pieces,
    norm_warps,
    pieces,
    store_norm,
    store_pieces,
    sum_of_shards,
    tree_sum,
)
from deltic.ops.gpu.streams import block_sizes

STORED = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "fp8": torch.uint8}
"""Types of a table's rows."""
_KINDS = tuple(STORED)
_F16, _F32, _FP8 = (tl.constexpr(_KINDS.index(name)) for name in ("f16", "f32", "fp8"))


@dataclass(frozen=True)
class HashedTable:
    """A table as a GPU reads it, and the integers of the hash. int64 tensors on the device."""

    parts: Tensor  # [parts] addresses that the device can read
    part_rows: int
    width: int  # of a row
    kind: str  # of STORED
    scale: float  # of all rows
    eos_id: int
    multipliers: Tensor  # [longest n-gram]
    primes: Tensor  # [heads]
    offsets: Tensor  # [heads]


@dataclass(frozen=True)
class NgramVectors:
    """float32 vectors. Norms are zero-centred, of every stream by itself."""

    key_norm: Tensor  # [S * H]
    query_norm: Tensor  # [S * H]
    conv_norm: Tensor  # [S * H]
    conv: Tensor  # [taps, S * H], the last tap meets the token
    dilation: int
    eps: float


@dataclass(frozen=True)
class NgramScratch:
    """Workspaces of a prefill of T tokens."""

    gate: Tensor  # float32 [T, S]
    columns: Tensor  # bfloat16 [T, S * H]


@triton.jit
def _row_of(p_parts, id, part_rows, o_d, mask, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """float32: a row of the table, at columns o_d."""
    address, o_at = tl.load(p_parts + id // part_rows), id % part_rows * WIDTH + o_d
    if KIND == _FP8:
        b_row = e4m3_values(tl.load(address.to(tl.pointer_type(tl.uint8)) + o_at, mask=mask, other=0))
    elif KIND == _F16:
        b_row = tl.load(address.to(tl.pointer_type(tl.float16)) + o_at, mask=mask, other=0.0).to(tl.float32)
    elif KIND == _F32:
        b_row = tl.load(address.to(tl.pointer_type(tl.float32)) + o_at, mask=mask, other=0.0)
    else:
        b_row = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + o_at, mask=mask, other=0.0).to(tl.float32)
    return b_row


@triton.jit(do_not_specialize=["stride_ids", "n"])
def _rows_kernel(
    p_ids, p_state_slot, p_batch_slot, p_position, p_multipliers, p_primes, p_offsets, p_parts, p_out, stride_ids, n,
    eos, part_rows, scale, HEADS: tl.constexpr, LONGEST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):
    """A head of a token a program. p_state_slot: of a decode, whose ids are the batch slots' histories."""
    wait_for_front(PDL)
    row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_tokens = i_head // (HEADS // (LONGEST - 1)) + 2
    is_used = True
    if p_state_slot is not None:
        is_used = tl.load(p_state_slot + row) >= 0
        position = tl.load(p_position + row)
        p_ids += tl.load(p_batch_slot + row).to(tl.int64) * stride_ids + position
    if is_used:
        last = eos + n * 0
        mixed = tl.cast(n, tl.int64) * 0
        for p in tl.static_range(LONGEST):
            if p_state_slot is not None:
                id = tl.load(p_ids - p, mask=position >= p, other=0)
                id = tl.where((position >= p) & ((p <= 1) | (last != eos)), id, eos)
            else:
                id = tl.load(p_ids + p * stride_ids + row)
            last = id
            product = id.to(tl.int64) * tl.load(p_multipliers + p)
            mixed = tl.where(p < n_tokens, mixed ^ product, mixed)
        id = mixed % tl.load(p_primes + i_head) + tl.load(p_offsets + i_head)
        o_d = tl.arange(0, BLOCK)
        b_row = _row_of(p_parts, id, part_rows, o_d, o_d < WIDTH, WIDTH, KIND) * scale
        tl.store(p_out + (row * HEADS + i_head) * WIDTH + o_d, b_row.to(tl.bfloat16), mask=o_d < WIDTH)


@triton.jit
def _inverse_rms(found, inverse_width, eps, LANES: tl.constexpr, PIECES: tl.constexpr):
    """[1]: of a row in pieces."""
    b_square = tl.zeros((LANES,), tl.float32)
    for j in tl.static_range(PIECES):
        b_square = tl.fma(found[j], found[j], b_square)
    b_total = tree_sum(b_square, LANES)
    return tl.rsqrt(tl.fma(b_total, tl.zeros_like(b_total) + inverse_width, tl.zeros_like(b_total) + eps))


@triton.jit
def _sums(p_row, stride, width, LANES: tl.constexpr, PIECES: tl.constexpr, SLICES: tl.constexpr):
    """A row in pieces, float32: the sum of its slices in order."""
    found: tl.tuple = ()
    for j in tl.static_range(PIECES):
        o_col = j * LANES + tl.arange(0, LANES)
        b_x = tl.load(p_row + o_col, mask=o_col < width, other=0.0).to(tl.float32)
        for s in tl.static_range(1, SLICES):
            b_x += tl.load(p_row + s * stride + o_col, mask=o_col < width, other=0.0).to(tl.float32)
        found += (b_x,)
    return found


@triton.jit(do_not_specialize=["kv_stride", "block_stride"])
def _gates_kernel(
    p_streams, p_block, p_inject, p_kv, p_key_norm, p_query_norm, p_conv_norm, p_gate, p_columns, p_state_slot,
    p_position, width, block_stride, kv_stride, slot_stride, inverse_width, eps, scale, RING: tl.constexpr,
    S: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr, SHARDS: tl.constexpr, SLICES: tl.constexpr,
    KV_SLICES: tl.constexpr, PDL: tl.constexpr,
):
    """A stream of one row a program: adds the block in front to the stream, and leaves its gate and c."""
    wait_for_front(PDL)
    row, i_stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_x = p_streams + (row * S + i_stream) * width
    p_c = p_columns + (row * S + i_stream) * width
    is_used = True
    if p_state_slot is not None:
        state_slot = tl.load(p_state_slot + row)
        is_used = state_slot >= 0
        place = tl.load(p_position + row) % RING * S + i_stream
        p_c = p_columns + state_slot.to(tl.int64) * slot_stride + place * width
    if is_used:
        found = load_pieces(p_x, width, LANES, PIECES)
        if SLICES > 0:
            inject = tl.load(p_inject + row * S + i_stream)
            streams: tl.tuple = ()
            for j in tl.static_range(PIECES):
                o_col = j * LANES + tl.arange(0, LANES)
                b_y = sum_of_shards(p_block + row * width + o_col, block_stride, o_col < width, SHARDS, SLICES)
                streams += (tl.fma(b_y, tl.zeros_like(b_y) + inject, found[j]),)
            found = streams
            store_pieces(p_x, found, width, LANES, PIECES)
        p_keys = p_kv + row * ((S + 1) * width)
        keys = _sums(p_keys + i_stream * width, kv_stride, width, LANES, PIECES, KV_SLICES)
        b_query = _inverse_rms(found, inverse_width, eps, LANES, PIECES)
        b_key = _inverse_rms(keys, inverse_width, eps, LANES, PIECES)
        b_product = tl.zeros((LANES,), tl.float32)
        for j in tl.static_range(PIECES):
            o_col = i_stream * width + j * LANES + tl.arange(0, LANES)
            mask = j * LANES + tl.arange(0, LANES) < width
            b_q = found[j] * b_query * (1.0 + tl.load(p_query_norm + o_col, mask=mask, other=0.0))
            b_k = keys[j] * b_key * (1.0 + tl.load(p_key_norm + o_col, mask=mask, other=0.0))
            b_product = tl.fma(b_q, b_k, b_product)
        b_g = tree_sum(b_product, LANES) * scale
        b_root = tl.sqrt_rn(tl.maximum(tl.abs(b_g), 1e-6))
        b_gate = tl.sigmoid(tl.where(b_g > 0, b_root, tl.where(b_g < 0, -b_root, 0.0)))
        tl.store(p_gate + row * S + i_stream + tl.arange(0, 1), b_gate)
        values = _sums(p_keys + S * width, kv_stride, width, LANES, PIECES, KV_SLICES)
        gated: tl.tuple = ()
        for j in tl.static_range(PIECES):
            gated += (values[j] * b_gate,)
        weights = load_pieces(p_conv_norm + i_stream * width, width, LANES, PIECES)
        store_norm(p_c, None, None, 0, gated, weights, width, inverse_width, eps, LANES, PIECES, 128)


@triton.jit
def _add(
    p_x, p_kv, p_gate, p_conv, taps, kv_stride, o_in_stream, o_col, mask, width, i_stream, S: tl.constexpr,
    KV_SLICES: tl.constexpr, TAPS: tl.constexpr,
):
    """x += gate v + silu(conv). taps: c that each tap meets, oldest first."""
    b_conv = tl.zeros(o_col.shape, tl.float32)
    for i in tl.static_range(TAPS):
        b_w = tl.load(p_conv + i * (S * width) + o_col, mask=mask, other=0.0)
        b_conv = tl.fma(taps[i].to(tl.float32), b_w, b_conv)
    p_v = p_kv + S * width + o_in_stream
    b_v = tl.load(p_v, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, KV_SLICES):
        b_v += tl.load(p_v + s * kv_stride, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + o_col, mask=mask, other=0.0)
    b_new = tl.fma(b_v, tl.zeros_like(b_v) + tl.load(p_gate + i_stream), b_conv * tl.sigmoid(b_conv))
    tl.store(p_x + o_col, b_x + b_new, mask=mask)


@triton.jit(do_not_specialize=["kv_stride"])
def _rows_conv_kernel(
    p_streams, p_kv, p_gate, p_conv, p_columns, p_state_slot, p_position, width, kv_stride, slot_stride,
    RING: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, KV_SLICES: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, PDL: tl.constexpr,
):
    """BLOCK columns of one stream of one row of a decode a program."""
    wait_for_front(PDL)
    row, i_stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state_slot = tl.load(p_state_slot + row)
    if state_slot >= 0:
        position = tl.load(p_position + row)
        o_in_stream = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        o_col, mask = i_stream * width + o_in_stream, o_in_stream < width
        p_ring = p_columns + state_slot.to(tl.int64) * slot_stride + o_col
        taps: tl.tuple = ()
        for i in tl.static_range(TAPS):
            at = position - (TAPS - 1 - i) * DILATION
            p_at = p_ring + (at + RING) % RING * (S * width)
            taps += (tl.load(p_at, mask=mask & (at >= 0), other=0.0),)
        _add(
            p_streams + row * (S * width), p_kv + row * ((S + 1) * width), p_gate + row * S, p_conv, taps, kv_stride,
            o_in_stream, o_col, mask, width, i_stream, S, KV_SLICES, TAPS,
        )


@triton.jit
def _first_position(p_position, p_segment, p_begin, i_b):
    """Number of a block's segment, and the position at which the segment begins."""
    segment = tl.load(p_segment + i_b)
    return segment, tl.load(p_position + tl.load(p_begin + segment))


@triton.jit
def _blocks_conv_kernel(
    p_streams, p_kv, p_gate, p_conv, p_made, p_columns, p_n, p_position, p_segment, p_begin, p_start_slot, width,
    slot_stride, RING: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same of a token of a prefill. p_made: c of the step's tokens."""
    wait_for_front(PDL)
    row, i_stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_t = tl.program_id(0) // 64, tl.program_id(0) % 64
    if i_t < tl.load(p_n + i_b):
        segment, first = _first_position(p_position, p_segment, p_begin, i_b)
        position = tl.load(p_position + i_b) + i_t
        o_in_stream = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        o_col, mask = i_stream * width + o_in_stream, o_in_stream < width
        p_ring = p_columns + tl.load(p_start_slot + segment).to(tl.int64) * slot_stride + o_col
        p_row = p_made + row * (S * width) + o_col
        taps: tl.tuple = ()
        for i in tl.static_range(TAPS):
            at = position - (TAPS - 1 - i) * DILATION
            b_made = tl.load(p_row - (TAPS - 1 - i) * DILATION * (S * width), mask=mask & (at >= first), other=0.0)
            p_at = p_ring + (at + RING) % RING * (S * width)
            b_kept = tl.load(p_at, mask=mask & (at < first) & (at >= 0), other=0.0)
            taps += (tl.where(at >= first, b_made, b_kept),)
        _add(
            p_streams + row * (S * width), p_kv + row * ((S + 1) * width), p_gate + row * S, p_conv, taps, 0,
            o_in_stream, o_col, mask, width, i_stream, S, 1, TAPS,
        )


@triton.jit
def _keep_kernel(
    p_made, p_columns, p_n, p_position, p_segment, p_begin, p_start_slot, p_snapshot, p_state_slot, width, slot_stride,
    RING: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """A token of the last WINDOW of a block a program: its c into the state slots that end there."""
    wait_for_front(PDL)
    i_b = tl.program_id(0)
    n = tl.load(p_n + i_b)
    if n > 0:
        segment, first = _first_position(p_position, p_segment, p_begin, i_b)
        at = tl.load(p_position + i_b) + n - WINDOW + tl.program_id(1)
        o_col = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        is_last = i_b + 1 == tl.load(p_begin + segment + 1)
        start = tl.load(p_start_slot + segment)
        o_ring = (at + RING) % RING * width + o_col
        for i_target in tl.static_range(2):
            target = tl.load(p_snapshot + i_b)
            if i_target == 1:
                target = tl.where(is_last, tl.load(p_state_slot + segment), -1)
            if (target >= 0) & (at >= 0):
                row = (i_b * 64 + n - WINDOW + tl.program_id(1)).to(tl.int64)
                mask = o_col < width
                b_made = tl.load(p_made + row * width + o_col, mask=mask & (at >= first), other=0.0)
                p_kept = p_columns + start.to(tl.int64) * slot_stride + o_ring
                b_kept = tl.load(p_kept, mask=mask & (at < first), other=0.0)
                p_to = p_columns + target.to(tl.int64) * slot_stride + o_ring
                tl.store(p_to, tl.where(at >= first, b_made, b_kept), mask=mask)


def _ngram_rows(table: HashedTable, ids: Tensor, stride: int, rows: Rows | None, out: Tensor) -> None:
    n_heads, integers = len(table.primes), (table.multipliers, table.primes, table.offsets, table.parts)
    check("ngram_rows", all(x.dtype == torch.int64 for x in integers) and ids.dtype == torch.int32, "integers")
    check("ngram_rows", out.dtype == torch.bfloat16 and out.is_contiguous(), "contiguous bfloat16 out")
    check("ngram_rows", out.shape[1] == n_heads * table.width, f"out [T, {n_heads * table.width}]")
    of_rows = (None, None, None) if rows is None else (rows.state_slot, rows.batch_slot, rows.position)
    launch(
        _rows_kernel, (len(out), n_heads), ids, *of_rows, *integers, out, stride, len(out), table.eos_id,
        table.part_rows, table.scale, HEADS=n_heads, LONGEST=len(table.multipliers), WIDTH=table.width,
        BLOCK=next_power_of_2(table.width), KIND=_KINDS.index(table.kind), num_warps=1,
    )


def ngram_rows_decode(table: HashedTable, history: Tensor, *, rows: Rows, out: Tensor) -> None:
    """out[r] = bfloat16(scale * the table's rows of the n-grams that end with row r's token), side by side.

    history: int32 [batch slots, positions], which has the ids up to and with a row's own. out: bfloat16 [N,
    heads * width]. Rows that are not in use are left alone. Raises KernelError where types or sizes do not
    fit.
    """
    _ngram_rows(table, history, history.stride(0), rows, out)


def ngram_rows_prefill(table: HashedTable, ids: Tensor, *, out: Tensor) -> None:
    """The same of T tokens. ids: int32 [longest, T], of each token, of the one before it, and so on, where an
    end of text stands for what is not of its n-grams.
    """
    check("ngram_rows", ids.shape == (len(table.multipliers), len(out)) and ids.is_contiguous(), "ids [longest, T]")
    _ngram_rows(table, ids, ids.stride(0), None, out)


def _gates(
    streams: Tensor, block: Tensor | None, inject: Tensor | None, kv: Tensor, weights: NgramVectors, gate: Tensor,
    columns: Tensor, rows: Rows | None,
) -> None:
    n, n_streams, width = streams.shape
    expect = partial(check, "ngram_add")
    expect(streams.dtype == torch.float32 and streams.is_contiguous(), "contiguous float32 streams [T, S, H]")
    expect(kv.shape[1:] == (n, (n_streams + 1) * width) and kv.is_contiguous(), f"kv [slices, {n}, (S + 1) H]")
    expect(weights.conv.shape[1] == n_streams * width and weights.conv.is_contiguous(), "conv [taps, S * H]")
    expect(columns.dtype == torch.bfloat16, "bfloat16 columns")
    expect(gate.dtype == torch.float32 and gate.shape == (n, n_streams), f"float32 gates [{n}, {n_streams}]")
    of_rows = (None, None) if rows is None else (rows.state_slot, rows.position)
    launch(
        _gates_kernel, (n, n_streams), streams, block, inject, kv, weights.key_norm, weights.query_norm,
        weights.conv_norm, gate, columns, *of_rows, width, n * width, kv.stride(0), columns.stride(0), 1.0 / width,
        weights.eps, width**-0.5, RING=columns.shape[1], S=n_streams, LANES=LANES, PIECES=pieces(width),
        **block_sizes("ngram_add", streams, block, inject), KV_SLICES=len(kv), num_warps=norm_warps(n, width),
    )


def ngram_add_decode(
    streams: Tensor, block: Tensor | None, inject: Tensor | None, kv: Tensor, weights: NgramVectors, *, rows: Rows,
    gate: Tensor, columns: Tensor,
) -> None:
    """streams[r, s] += inject[r, s] block[r], and then gate_s v + silu(conv(c))_s. Two launches.

    streams: float32 [N, S, H]; block, inject: as of `streams_norm`; kv: float32 [slices, N, (S + 1) H], keys
    of each stream and the value; gate: float32 [N, S], a workspace; columns: bfloat16 [state slots, ring,
    S * H], of which each row gets its c, at its position modulo ring, and reads those of tokens before it.
    The ring has as many rows as the taps span, and one for each further row of a sequence. Rows not in use
    are left alone.
    Raises KernelError where shapes or types do not fit.
    """
    n, n_streams, width = streams.shape
    n_taps = len(weights.conv)
    fits = columns.ndim == 3 and columns.shape[1] > (n_taps - 1) * weights.dilation and columns[0].is_contiguous()
    check("ngram_add", fits and columns.shape[2] == n_streams * width, "a ring longer than the taps span")
    _gates(streams, block, inject, kv, weights, gate, columns, rows)
    launch(
        _rows_conv_kernel, (n, n_streams, pieces(width)), streams, kv, gate, weights.conv, columns, rows.state_slot,
        rows.position, width, kv.stride(0), columns.stride(0), RING=columns.shape[1], S=n_streams, BLOCK=LANES,
        KV_SLICES=len(kv), TAPS=n_taps, DILATION=weights.dilation, num_warps=4,
    )


def ngram_add_prefill(
    streams: Tensor, block: Tensor | None, inject: Tensor | None, kv: Tensor, weights: NgramVectors, *, blocks: Blocks,
    made: NgramScratch, columns: Tensor,
) -> None:
    """The same of the tokens of `blocks`, in three launches: kv bfloat16 [1, T, (S + 1) H]. c of a segment's
    tokens before it is in its start slot; of its last ones it goes to its state slot, and to snapshots.
    """
    n, n_streams, width = streams.shape
    n_taps, c = len(weights.conv), made.columns[:n]
    check("ngram_add", n == BLOCK * len(blocks.n) and len(kv) == 1, "whole blocks, and one slice of kv")
    _gates(streams, block, inject, kv, weights, made.gate[:n], c.view(n, 1, -1), None)
    where = blocks.n, blocks.position, blocks.block_segment, blocks.segment_begin, blocks.start_slot
    ring = {"RING": columns.shape[1], "BLOCK": LANES}
    launch(
        _blocks_conv_kernel, (n, n_streams, pieces(width)), streams, kv, made.gate, weights.conv, c, columns, *where,
        width, columns.stride(0), S=n_streams, TAPS=n_taps, DILATION=weights.dilation, **ring, num_warps=4,
    )
    size, window = n_streams * width, (n_taps - 1) * weights.dilation
    check("ngram_add", window <= BLOCK, "a window of at most a block")
    launch(
        _keep_kernel, (len(blocks.n), window, pieces(size)), c, columns, *where, blocks.snapshot, blocks.state_slot,
        size, columns.stride(0), WINDOW=window, **ring, num_warps=4,
    )
