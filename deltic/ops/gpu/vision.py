"""The vision tower's operators on a GPU: patches of pixels, positions, norms, and attention within a frame.

A call is over some rows of the T patches of one frame, so that a forward can be run in pieces. Patches stand
block by block: of each MERGE x MERGE block, in raster order, its patches in raster order. Rows behind the
last patch, up to a whole piece, are computed like the others, and nobody reads them: keys behind the end are
masked. No row's bits depend on the piece. What follows the picture is not specialised, so that all pictures
have the same kernels.

Spec: tests/reference/vision.py. Attention is a running maximum and sum over tiles of 64 keys in order (Dao
2023, "FlashAttention-2", arXiv:2307.08691, algorithm 1). A head that is no power of two wide is two operands
side by side, the second padded with zeros: of 72 columns 64 and 16.
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
from deltic.ops.geometry import MAX_VISION_DIM
from deltic.ops.gpu.chip import chip, load_tile, tiles_of
from deltic.ops.gpu.launch import launch, next_power_of_2

KEYS = tl.constexpr(64)
"""Keys of a tile; part of what defines the bits."""
MERGE = tl.constexpr(2)
SIDE = tl.constexpr(16)
"""Pixels of a patch's side."""
CHANNELS = tl.constexpr(3)
FRAMES = tl.constexpr(2)


@dataclass(frozen=True)
class PatchGrid:
    """A frame: rows and columns of patches, multiples of MERGE."""

    rows: int
    columns: int

    @property
    def n(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class HeadColumns:
    """Cut of a head's columns for products: `main`, and `tail` behind them, or none."""

    dim: int
    main: int
    tail: int

    @classmethod
    def of(cls, dim: int) -> HeadColumns:
        main = max(16, next_power_of_2(dim + 1) // 2)
        return cls(dim, main, max(16, next_power_of_2(dim - main)) if dim > main else 0)

    @property
    def width(self) -> int:
        """Columns in memory."""
        return self.main + self.tail


@triton.jit
def _place_of(t, columns):
    """Row and column of patch t."""
    block, within = t // (MERGE * MERGE), t % (MERGE * MERGE)
    a_row = columns // MERGE
    return block // a_row * MERGE + within // MERGE, block % a_row * MERGE + within % MERGE


@triton.jit(do_not_specialize=["begin", "n", "columns", "frame_bytes"])
def _patches_kernel(p_pixels, p_table, p_out, begin, n, columns, frame_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the values of one patch a program, in the order (channel, frame, y, x)."""
    i = tl.program_id(0)
    t = begin + i
    row, column = _place_of(tl.minimum(t, n - 1), columns)
    o = tl.arange(0, BLOCK)
    channel, frame = o // (FRAMES * SIDE * SIDE), o // (SIDE * SIDE) % FRAMES
    y, x = row * SIDE + o // SIDE % SIDE, column * SIDE + o % SIDE
    p_pixel = p_pixels + frame.to(tl.int64) * frame_bytes + (y * (columns * SIDE) + x).to(tl.int64) * CHANNELS + channel
    used = (o < WIDTH) & (t < n)
    b_level = tl.load(p_pixel, mask=used, other=0).to(tl.int32)
    b_value = tl.load(p_table + b_level * CHANNELS + channel, mask=used, other=0.0)
    tl.store(p_out + i.to(tl.int64) * WIDTH + o, b_value.to(tl.bfloat16), mask=o < WIDTH)


@triton.jit
def _neighbours(index, size, side):
    """Places among `side` that are beside a place of `size`: both, and the way from the first to the second.
    """
    at = tl.div_rn((index * (side - 1)).to(tl.float32), tl.maximum(size - 1, 1).to(tl.float32))
    low = tl.minimum(at.to(tl.int32), side - 1)
    return low, tl.minimum(low + 1, side - 1), at - low.to(tl.float32)


@triton.jit(do_not_specialize=["begin", "n", "rows", "columns"])
def _positions_kernel(p_table, p_out, begin, n, rows, columns, side, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row, column = _place_of(tl.minimum(begin + i, n - 1), columns)
    top, bottom, y = _neighbours(row, rows, side)
    left, right, x = _neighbours(column, columns, side)
    o = tl.arange(0, BLOCK)
    used = o < WIDTH
    b_11 = tl.load(p_table + (top * side + left) * WIDTH + o, mask=used, other=0.0).to(tl.float32)
    b_12 = tl.load(p_table + (top * side + right) * WIDTH + o, mask=used, other=0.0).to(tl.float32)
    b_21 = tl.load(p_table + (bottom * side + left) * WIDTH + o, mask=used, other=0.0).to(tl.float32)
    b_22 = tl.load(p_table + (bottom * side + right) * WIDTH + o, mask=used, other=0.0).to(tl.float32)
    b_upper = b_11 * (1.0 - x) + b_12 * x
    b_lower = b_21 * (1.0 - x) + b_22 * x
    tl.store(p_out + i.to(tl.int64) * WIDTH + o, b_upper * (1.0 - y) + b_lower * y, mask=used)


@triton.jit
def _layer_norm_kernel(p_x, p_w, p_b, p_out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    o_row = tl.program_id(0).to(tl.int64) * WIDTH
    o = tl.arange(0, BLOCK)
    used = o < WIDTH
    b_x = tl.load(p_x + o_row + o, mask=used, other=0.0)
    b_x = tl.where(used, b_x - tl.sum(b_x, 0) / WIDTH, 0.0)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / WIDTH + eps)
    b_w, b_b = tl.load(p_w + o, mask=used, other=0.0), tl.load(p_b + o, mask=used, other=0.0)
    tl.store(p_out + o_row + o, tl.fma(b_x * b_scale, b_w, b_b).to(tl.bfloat16), mask=used)


@triton.jit(do_not_specialize=["begin", "n", "columns"])
def _keys_kernel(
    p_qkv, p_cos, p_sin, p_memory, begin, n, columns, n_most,
    HEADS: tl.constexpr, D: tl.constexpr, HALF_P2: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):
    """Prepares ROWS patches times one head of q | k | v, a program."""
    i_h = tl.program_id(1)
    o_t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_r = tl.arange(0, HALF_P2)
    HALF: tl.constexpr = D // 2
    QUARTER: tl.constexpr = D // 4
    used = (o_r < HALF)[None, :]
    p_in = p_qkv + o_t.to(tl.int64)[:, None] * (3 * HEADS * D) + i_h * D + o_r[None, :]
    b_1, b_2 = tl.load(p_in, mask=used, other=0.0), tl.load(p_in + HALF, mask=used, other=0.0)
    if i_h < 2 * HEADS:
        row, column = _place_of(tl.minimum(begin + o_t, n - 1), columns)
        place = tl.where((o_r < QUARTER)[None, :], row[:, None], column[:, None])
        o_angle = place * QUARTER + (o_r % QUARTER)[None, :]
        b_cos, b_sin = tl.load(p_cos + o_angle, mask=used, other=0.0), tl.load(p_sin + o_angle, mask=used, other=0.0)
        b_turned = b_1 * b_cos - b_2 * b_sin
        b_2 = b_2 * b_cos + b_1 * b_sin
        b_1 = b_turned
    p_to = p_memory + (i_h.to(tl.int64) * n_most + begin + o_t)[:, None] * WIDTH + o_r[None, :]
    tl.store(p_to, b_1.to(tl.bfloat16), mask=used)
    tl.store(p_to + HALF, b_2.to(tl.bfloat16), mask=used)


@triton.jit(do_not_specialize=["begin", "n"])
def _attention_kernel(
    queries, queries_tail, tiles, tiles_tail, p_out, begin, n, n_most, scale,
    HEADS: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):
    """Attends with ROWS patches (grid axis 0) times one head, a program. queries, tiles: the memory as rows
    of a head's columns, tiles of [ROWS, MAIN] and [KEYS, MAIN]. queries_tail, tiles_tail: tiles of their last
    TAIL columns.
    """
    first, i_h = tl.program_id(0) * ROWS, tl.program_id(1)
    o_row, o_key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    row = i_h * n_most + begin + first
    b_q = load_tile(queries, row, 0, ROWS, MAIN)
    b_max = tl.full([ROWS], -float("inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, MAIN], tl.float32)
    if TAIL:
        b_q_tail = load_tile(queries_tail, row, MAIN, ROWS, TAIL)
        b_acc_tail = tl.zeros([ROWS, TAIL], tl.float32)
    n_tiles = tl.cdiv(n, KEYS)
    for j in range(n_tiles):
        key = (HEADS + i_h) * n_most + j * KEYS
        value = key + HEADS * n_most
        b_s = tl.dot(b_q, load_tile(tiles, key, 0, KEYS, MAIN).T)
        if TAIL:
            b_s = tl.dot(b_q_tail, load_tile(tiles_tail, key, MAIN, KEYS, TAIL).T, b_s)
        if j == n_tiles - 1:
            b_s = tl.where((o_key + j * KEYS < n)[None, :], b_s, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = b_new * scale
        b_p = tl.exp2(b_s * scale - b_shift[:, None]).to(tl.bfloat16)
        b_alpha = tl.exp2(b_max * scale - b_shift)
        b_sum = b_sum * b_alpha + tl.sum(b_p.to(tl.float32), 1)
        b_acc = tl.dot(b_p, load_tile(tiles, value, 0, KEYS, MAIN), b_acc * b_alpha[:, None])
        if TAIL:
            b_acc_tail = tl.dot(b_p, load_tile(tiles_tail, value, MAIN, KEYS, TAIL), b_acc_tail * b_alpha[:, None])
        b_max = b_new
    b_weight = (1.0 / b_sum)[:, None]
    p_to = p_out + (first + o_row).to(tl.int64)[:, None] * (HEADS * D) + i_h * D
    o_d = tl.arange(0, MAIN)[None, :]
    tl.store(p_to + o_d, (b_acc * b_weight).to(tl.bfloat16), mask=o_d < D)
    if TAIL:
        o_d = MAIN + tl.arange(0, TAIL)[None, :]
        tl.store(p_to + o_d, (b_acc_tail * b_weight).to(tl.bfloat16), mask=o_d < D)


def _check_grid(grid: PatchGrid, begin: int, n_rows: int) -> None:
    fits = grid.rows % MERGE.value == grid.columns % MERGE.value == 0 and min(grid.rows, grid.columns) > 0
    check("vision", fits, f"sides of a grid are multiples of {MERGE.value}, found {grid.rows} x {grid.columns}")
    check("vision", n_rows % KEYS.value == begin % KEYS.value == 0, f"pieces of {KEYS.value} rows")


def pixel_patches(pixels: Tensor, table: Tensor, grid: PatchGrid, out: Tensor, *, begin: int, n_frames: int) -> None:
    """out[m] = bfloat16 of the values of patch begin + m: of each channel, frame, y and x. Behind the last
    patch zeros.

    pixels: uint8, flat: [n_frames, height, width, 3], 1 or 2 frames, a frame alone standing twice; table:
    float32 [256, 3], the value of each level; out: bfloat16 [R, 1536].
    """
    expect = partial(check, "pixel_patches")
    n_rows, width = out.shape
    _check_grid(grid, begin, n_rows)
    frame_bytes = grid.n * SIDE.value**2 * CHANNELS.value
    expect(n_frames in (1, 2) and len(pixels) >= n_frames * frame_bytes, "all pixels of 1 or 2 frames")
    expect(pixels.dtype == torch.uint8 and table.dtype == torch.float32, "uint8 pixels, a float32 table")
    expect(width == CHANNELS.value * FRAMES.value * SIDE.value**2 and out.is_contiguous(), "out [R, 1536]")
    launch(
        _patches_kernel, (n_rows,), pixels, table, out, begin, grid.n, grid.columns, frame_bytes * (n_frames - 1),
        WIDTH=width, BLOCK=next_power_of_2(width), num_warps=4,
    )


def patch_positions(table: Tensor, grid: PatchGrid, out: Tensor, *, begin: int) -> None:
    """out[m] = the position of patch begin + m: the table's entries as a square, stretched to the grid with
    its corners on the grid's, linear in between. table: bfloat16 [side * side, H]; out: float32 [R, H].
    """
    (n_rows, width), side = out.shape, round(len(table) ** 0.5)
    _check_grid(grid, begin, n_rows)
    check("patch_positions", table.dtype == torch.bfloat16 and table.shape == (side * side, width), "a square table")
    check("patch_positions", out.dtype == torch.float32 and out.is_contiguous(), "float32 out")
    launch(
        _positions_kernel, (n_rows,), table, out, begin, grid.n, grid.rows, grid.columns, side, WIDTH=width,
        BLOCK=next_power_of_2(width), num_warps=4,
    )


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float, out: Tensor) -> None:
    """out = bfloat16((x - mean) / sqrt(variance + eps) * w + b). x: float32 [R, H]; w, b: float32 [H]; out:
    bfloat16 [R, H].
    """
    n_rows, width = x.shape
    check("layer_norm", x.dtype == w.dtype == b.dtype == torch.float32 and out.dtype == torch.bfloat16, "float32 in")
    check("layer_norm", w.shape == b.shape == (width,) and out.shape == x.shape, "one width")
    check("layer_norm", x.is_contiguous() and out.is_contiguous(), "contiguous tensors")
    launch(_layer_norm_kernel, (n_rows,), x, w, b, out, eps, WIDTH=width, BLOCK=next_power_of_2(width), num_warps=4)


def _check_memory(memory: Tensor, dim: int) -> HeadColumns:
    expect = partial(check, "vision")
    columns = HeadColumns.of(dim)
    expect(dim % 8 == 0 and 16 <= dim <= MAX_VISION_DIM, f"heads of 16 to {MAX_VISION_DIM}, multiples of 8")
    expect(memory.ndim == 4 and len(memory) == 3 and memory.shape[3] == columns.width, "memory [3, heads, T, width]")
    expect(memory.dtype == torch.bfloat16 and memory.is_contiguous(), "contiguous bfloat16 memory")
    expect(memory.shape[2] % (2 * KEYS.value) == 0, f"room for a multiple of {2 * KEYS.value} patches")
    return columns


def patch_keys(qkv: Tensor, grid: PatchGrid, cos: Tensor, sin: Tensor, memory: Tensor, *, begin: int, dim: int) -> None:
    """Queries, keys and values of a piece, rounded to bfloat16, into the memory.

    qkv: float32 [R, 3 heads d], q | k | v; q and k are rotated in pairs (i, i + d / 2): pair i < d / 4 by the
    patch's row, pair d / 4 + i by its column, with the angle whose cos and sin are float32 [places, d / 4].
    memory: bfloat16 [3, heads, T, width], width of HeadColumns. Columns behind d are left, and must be zeros.
    """
    expect = partial(check, "patch_keys")
    columns, heads = _check_memory(memory, dim), memory.shape[1]
    _check_grid(grid, begin, len(qkv))
    expect(qkv.dtype == torch.float32 and qkv.shape[1] == 3 * heads * dim and qkv.is_contiguous(), "float32 qkv")
    expect(begin + len(qkv) <= memory.shape[2], "room for the piece")
    expect(cos.shape == sin.shape and cos.shape[1] == dim // 4, f"{dim // 4} angles a place")
    expect(max(grid.rows, grid.columns) <= len(cos), "angles of all places")
    launch(
        _keys_kernel, (len(qkv) // 16, 3 * heads), qkv, cos, sin, memory, begin, grid.n, grid.columns, memory.shape[2],
        HEADS=heads, D=dim, HALF_P2=next_power_of_2(dim // 2), WIDTH=columns.width, ROWS=16, num_warps=4,
    )


def patch_attention(memory: Tensor, grid: PatchGrid, out: Tensor, *, begin: int, dim: int) -> None:
    """out[m] = bfloat16(softmax(q k^T / sqrt(d)) v) of patch begin + m over all patches of the grid, whose
    keys and values must all be there, up to a whole tile. out: bfloat16 [R, heads d]; memory: as of
    `patch_keys`.

    Weights are rounded to bfloat16, relative to a running maximum. Their sum is that of the rounded ones.
    """
    expect = partial(check, "patch_attention")
    columns, heads = _check_memory(memory, dim), memory.shape[1]
    n_rows = len(out)
    _check_grid(grid, begin, n_rows)
    expect(out.dtype == torch.bfloat16 and out.shape[1] == heads * dim and out.is_contiguous(), "out [R, heads d]")
    expect(max(begin + n_rows, grid.n) <= memory.shape[2], "room for all patches")
    main, tail, width, n = columns.main, columns.tail, columns.width, memory.numel() // columns.width
    rows = 128 if chip().multiplies_from_shared and n_rows % 128 == 0 else 64
    stages = chip().stages(2 * KEYS.value * 2 * width, 3, beside=2 * rows * (width + KEYS.value))

    def tiles(height: int, n_columns: int) -> object:
        return tiles_of(memory, n, width, width, (height, n_columns)) if n_columns else None

    launch(
        _attention_kernel, (n_rows // rows, heads), tiles(rows, main), tiles(rows, tail), tiles(KEYS.value, main),
        tiles(KEYS.value, tail), out, begin, grid.n, memory.shape[2], dim**-0.5 * 1.4426950408889634, HEADS=heads,
        D=dim, MAIN=main, TAIL=tail, ROWS=rows, num_warps=4, num_stages=stages,
    )
