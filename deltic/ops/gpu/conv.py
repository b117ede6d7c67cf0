"""Convolutions of streams: y[t, m] = sum over taps j and channels c of w[m, j, c]
x[t - (taps - 1 - j) dilation, c], channels last.

A linear is one tap. A transposed convolution of kernel 2r and stride r is two taps and r C outputs a row.
What lies before a chunk comes from the stream's ring (`Ring`), so that a chunk of any length costs its own
rows only and gives the bits of one pass.

Operands are pairs: a float32 as the sum of two bfloat16 (16 bits of its mantissa), multiplied as high
high + high low + low high with float32 sums: about 2**-17 a product, on the tensor cores, for the bytes of a
float32. Whoever writes an activation splits it, behind the activation function, so that it is computed once
and a product's operands go straight to shared memory.

The sum of an output is cut along K into S slices by the layer's shape alone: the slices' sums are added in
order, by the program that walks them one after the other, or, where there are few rows, by the last of S
programs to arrive. The bits do not tell which. In a slice K is walked in order, BLOCK_K at a time. Tiles do
not touch the bits (ops/gpu/linear.py).
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
from deltic.ops.gpu.chip import either
from deltic.ops.gpu.launch import INTERPRETED, launch

MAX_PARTS = 1024
"""Tiles of partial sums that there is room for: slices are walked by programs of their own only where that is
enough.
"""
PART_SIZE = 64 * 64


@dataclass(frozen=True)
class Ring:
    """The last `rows` inputs of each stream, for an operator that reaches back that far.

    A ring of 2 `rows` rows: what a chunk writes (its own last ones, at most `rows`) is never what it reads.
    Its state is the word `index` of the stream's head (`Streams`): the row of the oldest. data:
    [state_slots, 2 rows, C] float32, or [state_slots, 2, 2 rows, C] bfloat16 (pairs); any stride of state
    slots.
    """

    data: Tensor
    rows: int
    index: int
    rate: int
    """Rows a frame."""


@dataclass(frozen=True)
class Streams:
    """The streams of a chunk: B of them, with the same number of frames each.

    state_slot: int32 [B], -1: not in use. head: int32 [state_slots, words], any stride; word 0: frames so
    far, the next: of each ring.
    """

    state_slot: Tensor
    head: Tensor
    n_frames: int

    @property
    def n(self) -> int:
        return self.state_slot.shape[0]


@dataclass(frozen=True)
class ConvScratch:
    """Partial sums, and counters that are 0 between launches; shared by the layers of a chunk."""

    parts: Tensor  # float32 [MAX_PARTS, PART_SIZE]
    arrived: Tensor  # int32 [MAX_PARTS]


@dataclass(frozen=True)
class ConvWeight:
    """A packed kernel: bfloat16 [2, M, taps * padded C], its float32 bias [M], and what makes its bits."""

    w: Tensor
    bias: Tensor
    m: int
    c: int
    taps: int
    dilation: int
    phases: int
    """Output rows of an input row: M = phases * channels."""
    swiglu: bool
    slices: int
    block_k: int


@dataclass(frozen=True)
class Snake:
    """x + sin^2(alpha x) scale, by channel, float32 [C]."""

    alpha: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Tile:
    """Tile of a product. No field changes a bit."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parallel: bool
    """A program for each slice."""


def split_pair(x: Tensor) -> Tensor:
    """bfloat16 [2, ...]: x rounded, and what that leaves, rounded."""
    high = x.float().bfloat16()
    return torch.stack([high, (x.float() - high.float()).bfloat16()])


def k_block(c: int) -> int:
    """Channels that one product of the matrix unit takes; part of what defines the bits."""
    return 64 if c % 64 == 0 else 32 if c > 16 else 16


def slices_of(m: int, k: int, rate: int) -> int:
    """Slices of K: until one frame's product fills the chip, or a slice is short.

    A function of the layer alone.
    """
    tiles, slices = -(-m // 64) * -(-rate // 64), 1
    while slices < 8 and tiles * slices < 100 and k // (slices * 2) >= 256:
        slices *= 2
    return slices


def pack_conv(
    w: Tensor, bias: Tensor | None, *, rate: int, dilation: int = 1, phases: int = 1, swiglu: bool = False
) -> ConvWeight:
    """w: float32 [M, C, taps], the last tap being the row itself. phases: row phase * (M / phases) + channel
    is output row `phase` of `phases`. swiglu: gate rows, then up rows, a multiple of 8 each. rate: input rows
    a frame.
    """
    m, c, taps = w.shape
    if swiglu:  # 8 gate rows and their 8 up rows in turn, which the accumulator keeps in one thread
        w = w.view(2, m // 16, 8, c, taps).transpose(0, 1).reshape(m, c, taps)
    block_k = k_block(c)
    padded = -(-c // block_k) * block_k
    rows = torch.nn.functional.pad(w.permute(0, 2, 1), (0, padded - c)).reshape(m, taps * padded).contiguous()
    slices = slices_of(m, taps * padded, rate)
    return ConvWeight(
        split_pair(rows), rows.new_zeros(m) if bias is None else bias.float().contiguous(), m, c, taps, dilation,
        phases, swiglu, slices, block_k,
    )


@triton.jit
def fma(a, b, c):
    """Multiplies and adds with one rounding, whatever the compiler would do. b and c may be scalars."""
    return tl.fma(a, tl.zeros_like(a) + b, tl.zeros_like(a) + c)


@triton.jit
def snake(x, alpha, scale):
    """x + sin(alpha x)^2 scale. sin^2 has period pi: the angle within half of it, then the series of the
    sine, to 1e-9.
    """
    y = x * alpha
    q = tl.floor(fma(y, 0.3183098861837907, 0.5))
    r = fma(q, -3.140625, y)
    r = fma(q, -0.0009670257568359375, r)
    r = fma(q, -6.277114152908325e-07, r)
    r = fma(q, -1.2154201256553420e-10, r)
    z = r * r
    p = fma(z, 1.6059043836821613e-10, -2.5052108385441720e-08)
    p = fma(p, z, 2.7557319223985893e-06)
    p = fma(p, z, -1.9841269841269841e-04)
    p = fma(p, z, 8.3333333333333333e-03)
    p = fma(p, z, -1.6666666666666667e-01)
    s = fma(p * z, r, r)
    return tl.fma(s * s, scale + tl.zeros_like(x), x)


@triton.jit
def store_pair(p, plane, b_x, mask):
    b_high = b_x.to(tl.bfloat16)
    tl.store(p, b_high, mask=mask)
    tl.store(p + plane, (b_x - b_high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def history_row(src, oldest, rows):
    """The ring's row of a row before the chunk, -rows <= src < 0."""
    row = oldest + rows + src
    return tl.where(row >= 2 * rows, row - 2 * rows, row)


@triton.jit
def ring_row(row, n_rows, oldest, rows):
    """The ring's row that row `row` of n_rows is kept in; negative: it is not kept."""
    kept = row - tl.maximum(n_rows - rows, 0)
    return tl.where(kept >= 0, (oldest + rows + kept) % (2 * rows), -1)


@triton.jit
def _loaded(p_row, p_here, o_c, first, c, EVEN: tl.constexpr):
    """A tile [rows, channels] of one plane; rows before the stream began are 0."""
    p = p_row[:, None] + (first + o_c)[None, :]
    if EVEN:
        return tl.load(p, mask=p_here[:, None], other=0.0)
    return tl.load(p, mask=p_here[:, None] & ((first + o_c) < c)[None, :], other=0.0)


@triton.jit
def _summed(
    p_x, x_plane, p_from, from_plane, p_w, w_plane, o_m, o_n, t, used, before, slot_from, oldest, k_from, k_to,
    dilation, c, padded, taps, REACHES: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum of a slice of K, [BLOCK_M, BLOCK_N]."""
    o_k = tl.arange(0, BLOCK_K)
    row = o_n % t
    p_w_row = p_w + o_m.to(tl.int64)[:, None] * (taps * padded) + o_k[None, :]
    p_x_row = p_x + o_n.to(tl.int64) * c
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(k_from, k_to, BLOCK_K):
        if REACHES:
            tap = k // padded
            first = k - tap * padded
            back = (taps - 1 - tap) * dilation
            src = row - back
            inside = src >= 0
            p_old = p_from + slot_from + history_row(src, oldest, (taps - 1) * dilation).to(tl.int64) * c
            p_row = either(inside, p_x_row - back * c, p_old)
            here = used & (inside | (src + before >= 0))
            plane = tl.where(inside, x_plane, from_plane)
        else:
            first = k
            p_row = p_x_row
            here = used
            plane = x_plane + tl.zeros_like(o_n)
        b_high = _loaded(p_row, here, o_k, first, c, EVEN)
        b_low = _loaded(p_row + plane, here, o_k, first, c, EVEN)
        b_w = tl.load(p_w_row + k)
        b_acc = tl.dot(b_w, tl.trans(b_high), b_acc)
        b_acc = tl.dot(b_w, tl.trans(b_low), b_acc)
        b_acc = tl.dot(tl.load(p_w_row + w_plane + k), tl.trans(b_high), b_acc)
    return b_acc


# what differs between layers, or between chunks, is an argument: few kernels serve all
_SIZES = ["n", "t", "n_frames", "dilation", "from_index", "to_index", "to_rows", "taps", "phases", "slices"]


@triton.jit(do_not_specialize=_SIZES)
def _conv_kernel(
    p_x, x_plane, p_w, w_plane, p_bias, p_residual, p_raw, p_pair, pair_plane, p_alpha, p_scale, p_parts, p_arrived,
    p_state_slot, p_head, head_stride, p_from, from_stride, from_plane, p_to, to_stride, to_plane, n, t, m, n_frames,
    c, padded, taps, dilation, phases, slices, from_index, to_index, to_rows, to_first,
    REACHES: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, RAW: tl.constexpr,
    PAIR: tl.constexpr, RING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one tile of outputs, or one slice of it, where axis 1 has as many programs as there are
    slices.

    REACHES: there is more than one tap. RING: nothing ("none"), the raw outputs from column to_first on, or
    the pairs are kept, too.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_tiles_n = tl.cdiv(n, BLOCK_N)
    i_tile = tl.program_id(0)
    i_m = i_tile // n_tiles_n
    i_n = i_tile % n_tiles_n
    o_m = tl.minimum(i_m * BLOCK_M + tl.arange(0, BLOCK_M), m - 1)  # read twice instead of masked; not stored
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    used = o_n < n
    if PDL:
        tl.extra.cuda.gdc_wait()

    i_stream = o_n // t
    state_slot = tl.load(p_state_slot + i_stream, mask=used, other=-1)
    has_state_slot = state_slot >= 0
    state_slot = tl.maximum(state_slot, 0)
    before = state_slot * 0
    oldest = state_slot * 0
    slot_from = state_slot.to(tl.int64)
    if REACHES:
        p_word = p_head + state_slot.to(tl.int64) * head_stride
        before = tl.load(p_word, mask=has_state_slot, other=0) * (t // n_frames)
        oldest = tl.load(p_word + from_index, mask=has_state_slot, other=0)
        slot_from = slot_from * from_stride
    k = taps * padded
    each = tl.cdiv(k // BLOCK_K, slices) * BLOCK_K
    is_parallel = tl.num_programs(1) > 1
    i_slice = tl.program_id(1)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(i_slice, tl.where(is_parallel, i_slice + 1, slices)):
        b_acc += _summed(
            p_x, x_plane, p_from, from_plane, p_w, w_plane, o_m, o_n, t, used, before, slot_from, oldest, s * each,
            tl.minimum(s * each + each, k), dilation, c, padded, taps, REACHES, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )
    is_last = True
    if is_parallel:
        o_part = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        p_tile = p_parts + i_tile.to(tl.int64) * (slices * BLOCK_M * BLOCK_N) + o_part
        tl.store(p_tile + i_slice * (BLOCK_M * BLOCK_N), b_acc)
        tl.debug_barrier()  # the part is whole before the counter says so
        is_last = tl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel") == slices - 1
        if is_last:
            tl.store(p_arrived + i_tile, 0)
            # others wrote them: past the first-level cache
            b_acc = tl.load(p_tile, cache_modifier=".cg")
            for s in range(1, slices):
                b_acc += tl.load(p_tile + s * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if is_last:
        ROWS: tl.constexpr = BLOCK_M // 2 if ACT == "swiglu" else BLOCK_M
        width = m // 2 if ACT == "swiglu" else m
        o_y = i_m * ROWS + tl.arange(0, ROWS)
        if ACT == "swiglu":
            b_gate, b_up = tl.split(tl.permute(tl.reshape(b_acc, (BLOCK_M // 16, 2, 8, BLOCK_N)), (0, 2, 3, 1)))
            b_y = tl.reshape(b_gate / (1.0 + tl.exp(-b_gate)) * b_up, (ROWS, BLOCK_N))
        else:
            b_y = b_acc
        channels = width // phases
        o_channel = o_y % channels
        is_out = o_y < width
        b_y += tl.load(p_bias + o_y, mask=is_out, other=0.0)[:, None]
        if ACT == "gelu":
            b_y = 0.5 * b_y * (1.0 + tl.erf(b_y * 0.7071067811865476))
        o_out = o_n[None, :] * width + o_y[:, None]
        mask = used[None, :] & is_out[:, None]
        if RESIDUAL:
            b_y += tl.load(p_residual + o_out, mask=mask, other=0.0)
        if RAW:
            tl.store(p_raw + o_out, b_y, mask=mask)
        if PAIR:
            if ACT == "snake":
                b_alpha = tl.load(p_alpha + o_channel, mask=is_out, other=0.0)[:, None]
                b_u = snake(b_y, b_alpha, tl.load(p_scale + o_channel, mask=is_out, other=0.0)[:, None])
            else:
                b_u = b_y
            store_pair(p_pair + o_out, pair_plane, b_u, mask)
        if RING != "none":
            p_word = p_head + state_slot.to(tl.int64) * head_stride + to_index
            to = tl.load(p_word, mask=has_state_slot, other=0)
            o_row = ring_row((o_n % t)[None, :] * phases + (o_y // channels)[:, None], t * phases, to[None, :], to_rows)
            kept = mask & has_state_slot[None, :] & (o_row >= 0) & (o_channel >= to_first)[:, None]
            p_kept = p_to + (state_slot.to(tl.int64) * to_stride)[None, :]
            p_kept += o_row * (channels - to_first) + (o_channel - to_first)[:, None]
            if RING == "raw":
                tl.store(p_kept, b_y, mask=kept)
            else:
                store_pair(p_kept, to_plane, b_u, kept)


def conv_tile(n: int, w: ConvWeight) -> Tile:
    """Chooses one of two tiles. With few rows each slice has a program."""
    if INTERPRETED:  # few large operations, and both ways to add slices
        return Tile(64, 64 if n <= 64 else 256, 4, 1, n <= 64 and w.slices > 1)
    block_n = 16 if n <= 16 else 64
    tiles = -(-w.m // 64) * -(-n // block_n)
    parallel = w.slices > 1 and tiles < 132 and tiles * w.slices <= MAX_PARTS
    return Tile(64, block_n, 4, 4 if block_n == 16 else 3, parallel)  # two programs on a multiprocessor


@dataclass(frozen=True)
class ConvOut:
    """Results of a convolution: y = conv(x) + bias, gelu or gated, + residual; raw = y; pair = y, or its
    snake.
    """

    raw: Tensor | None = None  # float32 [N, M]
    pair: Tensor | None = None  # bfloat16 [2, N, M] (swiglu: M / 2 wide)
    act: Snake | str | None = None  # "gelu", or a Snake for what goes into `pair`
    residual: Tensor | None = None  # float32 [N, M]
    ring: Ring | None = None
    """Keeps the last rows of `pair`, or (a float32 ring) of raw's columns from ring_from on, for the next
    chunk; rows of M / phases.
    """
    ring_from: int = 0


def conv(
    x: Tensor, w: ConvWeight, streams: Streams, scratch: ConvScratch, end: ConvOut, *, history: Ring | None = None,
    tile: Tile | None = None,
) -> None:
    """Writes conv(x) as `end` says.

    x: bfloat16 pairs [2, N, C], N = B t, a stream's t rows together; history: where its (taps - 1) dilation
    rows before lie. Raises KernelError where shapes do not fit.
    """
    residual, raw, pair, act, ring, ring_from = end.residual, end.raw, end.pair, end.act, end.ring, end.ring_from
    n, state_slots = x.shape[1], streams.head.shape[0]
    width = w.m // 2 if w.swiglu else w.m
    t = n // streams.n
    padded = w.w.shape[2] // w.taps
    reach = (w.taps - 1) * w.dilation
    expect = partial(check, "conv")
    expect(x.dtype == torch.bfloat16 and x.shape == (2, n, w.c) and x[0].is_contiguous(), f"bfloat16 x [2, N, {w.c}]")
    expect(n == streams.n * t and t % streams.n_frames == 0, "whole rows of each frame and stream")
    expect((history is None) == (reach == 0) and (history is None or history.rows == reach), f"a ring of {reach} rows")
    expect(history is None or history.data.shape == (state_slots, 2, 2 * reach, w.c), "a ring of pairs")
    outs = [out for out in (residual, raw, None if pair is None else pair[0]) if out is not None]
    expect(all(out.shape == (n, width) and out.is_contiguous() for out in outs), f"outputs [{n}, {width}]")
    expect(raw is not None or pair is not None, "an output")
    expect(n * width < 1 << 31, "fewer than 2^31 outputs")
    is_raw = ring is not None and ring.data.dtype == torch.float32
    if ring is not None:
        size = (2 * ring.rows, width // w.phases - ring_from)
        expect(ring.data.shape == ((state_slots, *size) if is_raw else (state_slots, 2, *size)), f"a ring of {size}")
        expect((raw if is_raw else pair) is not None and (is_raw or ring_from == 0), "an output to keep")
    c = tile or conv_tile(n, w)
    tiles = -(-w.m // c.block_m) * -(-n // c.block_n)
    expect(
        not c.parallel or (tiles * w.slices <= MAX_PARTS and c.block_m * c.block_n <= PART_SIZE), "room for the parts"
    )
    snaked = act if isinstance(act, Snake) else None
    launch(
        _conv_kernel, (tiles, w.slices if c.parallel else 1),
        x, x.stride(0), w.w, w.w.stride(0), w.bias, residual, raw, pair, 0 if pair is None else pair.stride(0),
        snaked and snaked.alpha, snaked and snaked.scale, scratch.parts, scratch.arrived, streams.state_slot,
        streams.head, streams.head.stride(0), history and history.data, history.data.stride(0) if history else 0,
        history.data.stride(1) if history else 0, ring and ring.data, ring.data.stride(0) if ring else 0,
        ring.data.stride(1) if ring else 0, n, t, w.m, streams.n_frames, w.c, padded, w.taps, w.dilation, w.phases,
        w.slices, history.index if history else 0, ring.index if ring else 0, ring.rows if ring else 1, ring_from,
        REACHES=w.taps > 1, EVEN=padded == w.c, ACT="swiglu" if w.swiglu else "snake" if snaked else act or "none",
        RESIDUAL=residual is not None, RAW=raw is not None, PAIR=pair is not None,
        RING="none" if ring is None else "raw" if is_raw else "pair", BLOCK_M=c.block_m, BLOCK_N=c.block_n,
        BLOCK_K=w.block_k, num_warps=c.num_warps, num_stages=c.num_stages,
    )
