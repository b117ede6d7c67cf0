"""The vision tower's operators: norms and biases, positions of patches, attention within a frame
(csrc/vision.cpp).

A call is over rows [begin, begin + n_rows) of all T patches, R at most, so that a forward can be run in
pieces. What one layer of a piece needs is counted from its own first row ([R, ...]), what all patches keep
from the first patch ([T, ...]). begin, n_rows: int32 scalars. No row's bits depend on the piece, on other
frames or on threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import MAX_VISION_DIM, VISION_KEYS, up_to


@dataclass(frozen=True)
class Frames:
    """Pictures of a call, and the frames of videos: frame f is patches [start[f], start[f + 1]), as many as
    grid[f], its rows times its columns, has.

    Patches stand block by block: of each merge x merge block of a frame, in raster order, its patches in
    raster order. Its keys begin at key_start[f], each frame's at a multiple of 32 (`key_starts`). n: int32
    scalar, frames in use; start, key_start: int32 [F + 1]; grid: int32 [F, 2]. Rows and columns are multiples
    of merge.
    """

    n: Array
    start: Array
    grid: Array
    key_start: Array
    merge: int

    @property
    def arguments(self) -> tuple[Array | int, ...]:
        return self.n, self.start, self.grid, self.key_start, self.merge


@dataclass(frozen=True)
class PatchKeys:
    """Memory for the queries, keys and values of one block of the tower. Its inner order is the kernels'.

    query: bfloat16 [T, heads, padded d]; keys: bfloat16 [heads, K, padded d]; values: bfloat16 [heads, K, d],
    K a multiple of 32. d: a multiple of 8, at most MAX_VISION_DIM; padded: up to a multiple of 32.
    """

    query: Array
    keys: Array
    values: Array

    @property
    def heads(self) -> int:
        return int(self.values.shape[0])

    @property
    def dim(self) -> int:
        return int(self.values.shape[2])

    def check(self, operator: str) -> None:
        padded, n = up_to(self.dim, 32), self.values.shape[1]
        check(operator, self.dim % 8 == 0 and 8 <= self.dim <= MAX_VISION_DIM, f"heads % 8 == 0, <= {MAX_VISION_DIM}")
        check(operator, self.query.shape[1:] == (self.heads, padded), f"queries [T, {self.heads}, {padded}]")
        check(operator, self.keys.shape == (self.heads, n, padded) and n % 32 == 0, "keys [heads, K, padded d]")
        check(operator, all(a.dtype == bfloat16 for a in (self.query, self.keys, self.values)), "bfloat16 memory")
        check(operator, all(a.flags.c_contiguous for a in (self.query, self.keys, self.values)), "contiguous memory")

    @property
    def arguments(self) -> tuple[Array | int, ...]:
        return self.keys, self.values, self.values.shape[1], self.heads, self.dim


def key_starts(sizes: Array) -> Array:
    """First keys of frames of these sizes, and the end of the last frame's: int32 [F + 1]."""
    return np.concatenate(([0], np.cumsum(up_to(sizes, VISION_KEYS)))).astype(np.int32)


def layer_norm(
    program: Program, x: Array, w: Array, b: Array, eps: float, out: Array, *, begin: Array, n_rows: Array
) -> None:
    """LayerNorm: out[m] = bfloat16((x[t] - mean) / sqrt(variance + eps) * w + b), t = begin + m.

    x: float32 [T, H]; w, b: float32 [H]; out: bfloat16 [R, H]; H a multiple of 16.
    """
    expect = partial(check, "layer_norm")
    width = x.shape[1]
    expect(x.dtype == w.dtype == b.dtype == np.float32 and out.dtype == bfloat16, "float32 in, bfloat16 out")
    expect(w.shape == b.shape == (width,) and out.shape[1] == width and width % 16 == 0, "one width, % 16")
    program.call("deltic_layer_norm", x, w, b, out, begin, n_rows, width, eps)


def bias_gelu(program: Program, x: Array, bias: Array, out: Array, *, n_rows: Array, exact: bool) -> None:
    """out[m, :W] = bfloat16(GELU(x[m] + bias)), behind it 0: GELU by erf (to 1.5e-7) if exact, else by tanh.

    x: float32 [R, W], W a multiple of 16; bias: float32 [W]; out: bfloat16 [R, W or more].
    """
    expect = partial(check, "bias_gelu")
    width, stride = x.shape[1], out.shape[1]
    expect(x.dtype == bias.dtype == np.float32 and out.dtype == bfloat16, "float32 in, bfloat16 out")
    expect(bias.shape == (width,) and width % 16 == 0 and stride >= width, "one width, % 16, out no narrower")
    program.call("deltic_bias_gelu", x, bias, out, n_rows, width, stride, int(exact))


def bias_rows(
    program: Program, x: Array, bias: Array, out: Array, *, begin: Array, n_rows: Array, add: bool = False
) -> None:
    """out[begin + m] = x[m] + bias, or += when `add`. x: float32 [R, W]; bias: float32 [W]; out: float32 [T,
    W]; W a multiple of 16.
    """
    width = x.shape[1]
    check("bias_rows", x.dtype == bias.dtype == out.dtype == np.float32, "float32")
    check("bias_rows", bias.shape == (width,) and out.shape[1] == width and width % 16 == 0, "one width, % 16")
    program.call("deltic_bias_rows", x, bias, out, begin, n_rows, width, int(add))


def patch_rows(
    program: Program, x: Array, bias: Array, table: Array, frames: Frames, out: Array, *, begin: Array, n_rows: Array
) -> None:
    """out[t] = x[m] + bias + the position of patch t = begin + m: the table's entries as a square [side,
    side], stretched to the grid of the patch's frame with its corners on the grid's, linear in between
    (bilinear).

    x: float32 [R, H]; bias: float32 [H]; table: bfloat16 [side * side, H]; out: float32 [T, H]; H a multiple
    of 16.
    """
    expect = partial(check, "patch_rows")
    width, side = x.shape[1], round(len(table) ** 0.5)
    expect(x.dtype == bias.dtype == out.dtype == np.float32 and table.dtype == bfloat16, "a bfloat16 table")
    expect(table.shape == (side * side, width) and width % 16 == 0, "a square table, width % 16 == 0")
    expect(bias.shape == (width,) and out.shape[1] == width, "one width")
    program.call("deltic_patch_rows", x, bias, table, side, *frames.arguments, begin, n_rows, width, out)


def patch_keys(
    program: Program,
    qkv: Array,
    bias: Array,
    frames: Frames,
    angles: tuple[Array, Array],
    memory: PatchKeys,
    *,
    begin: Array,
    n_rows: Array,
) -> None:
    """Queries, keys and values of a piece, rounded to bfloat16, into the memory.

    qkv: float32 [R, 3 heads d], q | k | v, to which bias [3 heads d] is added; q and k are rotated in pairs
    (i, i + d / 2): pair i < d / 4 by the patch's row, pair d / 4 + i by its column, with the angle whose cos
    and sin are `angles`, float32 [places, d / 4].
    """
    width, (cos, sin) = 3 * memory.heads * memory.dim, angles
    memory.check("patch_keys")
    check("patch_keys", qkv.dtype == bias.dtype == np.float32 and qkv.shape[1] == width, f"qkv [R, {width}]")
    check("patch_keys", bias.shape == (width,), f"a bias of {width}")
    check("patch_keys", cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape, "float32 angles")
    check("patch_keys", cos.shape[1] == memory.dim // 4, f"{memory.dim // 4} angles a place")
    program.call(
        "deltic_patch_keys", qkv, bias, *frames.arguments, cos, sin, begin, n_rows, memory.query, *memory.arguments
    )


def patch_attention(
    program: Program, memory: PatchKeys, frames: Frames, out: Array, *, begin: Array, n_rows: Array
) -> None:
    """out[m] = bfloat16(softmax(q k^T / sqrt(d)) v) of patch begin + m, over all patches of its frame, whose
    keys and values must all be there. out: bfloat16 [R, heads d].

    Weights are rounded to bfloat16, relative to a running maximum over tiles of keys in order. Their sum is
    that of the rounded ones. Memory of the call does not grow with the frame.
    """
    expect = partial(check, "patch_attention")
    memory.check("patch_attention")
    expect(out.dtype == bfloat16 and out.shape[1] == memory.heads * memory.dim, "bfloat16 [R, heads d]")
    arguments = (*frames.arguments, *memory.arguments, begin, n_rows)
    program.call("deltic_patch_attention", memory.query, *arguments, out)
