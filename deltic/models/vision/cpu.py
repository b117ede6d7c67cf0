"""The vision tower on a CPU, in pieces: patches of pictures to tokens of the language model.

    x = patch(p) + positions;  x += proj(Attn(norm1(x)));  x += fc2(gelu_tanh(fc1(norm2(x))))
    tokens = merge2(gelu(merge1(the patches of a token, side by side, of norm(x))))

The residual stream, norms, softmax and tokens are float32; the inputs of every product, q, k and v are
bfloat16.

A forward is a list of stages, each a program that is recorded once and run over a piece of at most so many
rows, until all patches have passed: the embedding; for each block its keys and values, then all that follows
them; the merger. So a large picture can be encoded between the steps of a language model. Scratch is as large
as a piece. What stays between pieces (the residual stream, queries, keys and values of one block) as all
patches. Neither pieces nor other pictures touch the bits of a picture.

Source: the published Qwen3.5 model code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deltic.models.fields import multiple, refuse_limits
from deltic.models.rotary import rotary_tables
from deltic.models.vision.pixels import Patches
from deltic.models.vision.shape import LAYER_NORM_EPS, MERGE, PATCH_WIDTH, VisionShape
from deltic.models.vision.weights import Linear, Norm, VisionBlock, VisionWeights
from deltic.ops.arrays import Array, bfloat16, copy, front
from deltic.ops.cpu.dense import linear
from deltic.ops.cpu.program import Program
from deltic.ops.cpu.vision import (
    Frames,
    PatchKeys,
    bias_gelu,
    bias_rows,
    key_starts,
    layer_norm,
    patch_attention,
    patch_keys,
    patch_rows,
)
from deltic.ops.geometry import MAX_VISION_DIM, VISION_KEYS, Allocate, up_to
from deltic.ops.matrix import row_bytes

TOKEN = MERGE**2
"""Patches of a token."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of a picture or video."""


def check_vision_kernels(shape: VisionShape) -> None:
    """Raises UnsupportedModelError for a geometry that the kernels cannot run.

    Called before anything is loaded.
    """
    refuse_limits(
        multiple("hidden_size", shape.hidden_size, 32),
        multiple("intermediate_size", shape.intermediate_size, 16),
        multiple("out_hidden_size", shape.out_hidden_size, 16),
        multiple("hidden_size / num_heads", shape.head_dim, 8, MAX_VISION_DIM),
        prefix="vision_config.",
    )


@dataclass(frozen=True)
class VisionBuffers:
    """Memory of a tower but its weights, for T patches in F frames, and pieces of R rows."""

    frames: Frames  # int32; n, start [F + 1], grid [F, 2], key_start [F + 1]
    begin: Array  # int32 scalar: the first patch of the piece
    n_rows: Array  # int32 scalar: its patches
    first_token: Array  # int32 scalar: of the piece, in the merger
    n_tokens: Array  # int32 scalar
    pixels: Array  # bfloat16 [R, PATCH_WIDTH]
    normed: Array  # bfloat16 [R, h]
    mixed: Array  # bfloat16, flat: what attention, or an activation, gives
    wide: Array  # float32, flat: what a linear gives
    packed: Array  # uint8: the rows of a linear's input as its kernel reads them
    residual: Array  # float32 [T, h]
    keys: PatchKeys  # of T patches and F frames
    tokens: Array  # float32 [T / 4, out_hidden_size]


def allocate_vision(
    shape: VisionShape, n_patches: int, n_frames: int, n_rows: int, allocate: Allocate
) -> VisionBuffers:
    """Every buffer for pictures of n_patches in n_frames at once, in pieces of n_rows (a multiple of 4)."""
    f32, bf16, i32 = np.float32, bfloat16, np.int32
    h, heads, dim, r = shape.hidden_size, shape.n_heads, shape.head_dim, n_rows
    padded, n_keys = up_to(dim, 32), up_to(n_patches, VISION_KEYS) + n_frames * VISION_KEYS

    def scalar(name: str) -> Array:
        found: Array = allocate(f"vision {name}", (), i32)
        return found

    widest_in = max(PATCH_WIDTH, shape.inner_size, h)
    return VisionBuffers(
        frames=Frames(
            n=scalar("frames"),
            start=allocate("vision frame starts", (n_frames + 1,), i32),
            grid=allocate("vision grids", (n_frames, 2), i32),
            key_start=allocate("vision key starts", (n_frames + 1,), i32),
            merge=MERGE,
        ),
        begin=scalar("piece"),
        n_rows=scalar("rows"),
        first_token=scalar("first token"),
        n_tokens=scalar("piece's tokens"),
        pixels=allocate("vision pixels", (r, PATCH_WIDTH), bf16),
        normed=allocate("vision normed", (r, h), bf16),
        mixed=allocate("vision mixed", (r * max(h, shape.inner_size),), bf16),
        wide=allocate(
            "vision products", (r * max(3 * h, shape.intermediate_size, shape.out_hidden_size // TOKEN),), f32
        ),
        packed=allocate("vision packed rows", (r * row_bytes(widest_in),), np.uint8),
        residual=allocate("vision residual", (n_patches, h), f32),
        keys=PatchKeys(
            query=allocate("vision queries", (n_patches, heads, padded), bf16),
            keys=allocate("vision keys", (heads, n_keys, padded), bf16),
            values=allocate("vision values", (heads, n_keys, dim), bf16),
        ),
        tokens=allocate("vision tokens", (n_patches // TOKEN, shape.out_hidden_size), f32),
    )


class VisionTower:
    """A tower's weights, and the recording of its stages over given buffers."""

    def __init__(self, shape: VisionShape, weights: VisionWeights, buffers: VisionBuffers) -> None:
        self.shape, self.weights, self.buffers = shape, weights, buffers
        self._piece = {"begin": buffers.begin, "n_rows": buffers.n_rows}
        n_places = max(1, len(buffers.residual) // MERGE)  # of a picture as narrow as a token
        self.cos, self.sin = rotary_tables(shape.inv_freq(), n_places)

    def record_embedding(self, program: Program) -> None:
        """Appends pixels of the piece -> its residual."""
        b, w = self.buffers, self.weights
        out = self._product(program, b.pixels, w.patch)
        patch_rows(program, out, w.patch.bias, w.positions, b.frames, b.residual, **self._piece)

    def record_keys(self, program: Program, block: VisionBlock) -> None:
        """Appends the first stage of a block: queries, keys and values of the piece."""
        b = self.buffers
        self._norm(program, block.norm1)
        qkv = self._product(program, b.normed, block.qkv)
        patch_keys(program, qkv, block.qkv.bias, b.frames, (self.cos, self.sin), b.keys, **self._piece)

    def record_rest(self, program: Program, block: VisionBlock) -> None:
        """Appends the second stage of a block, when the keys and values of all patches are there."""
        b, piece = self.buffers, self._piece
        mixed = front(b.mixed, len(b.normed), self.shape.hidden_size)
        patch_attention(program, b.keys, b.frames, mixed, **piece)
        bias_rows(program, self._product(program, mixed, block.proj), block.proj.bias, b.residual, add=True, **piece)
        self._norm(program, block.norm2)
        up = self._product(program, b.normed, block.fc1)
        inner = front(b.mixed, len(b.normed), self.shape.inner_size)
        bias_gelu(program, up, block.fc1.bias, inner, n_rows=b.n_rows, exact=False)
        bias_rows(program, self._product(program, inner, block.fc2), block.fc2.bias, b.residual, add=True, **piece)

    def record_merger(self, program: Program) -> None:
        """Appends residual of the piece -> its tokens."""
        b, w, n = self.buffers, self.weights, len(self.buffers.normed) // TOKEN
        self._norm(program, w.norm)
        merged, inner = b.normed.reshape(n, -1), front(b.mixed, n, self.shape.merged_size)
        up = self._product(program, merged, w.merge1, b.n_tokens)
        bias_gelu(program, up, w.merge1.bias, inner, n_rows=b.n_tokens, exact=True)
        out = self._product(program, inner, w.merge2, b.n_tokens)
        bias_rows(program, out, w.merge2.bias, b.tokens, begin=b.first_token, n_rows=b.n_tokens)

    def _norm(self, program: Program, norm: Norm) -> None:
        b = self.buffers
        layer_norm(program, b.residual, norm.weight, norm.bias, LAYER_NORM_EPS, b.normed, **self._piece)

    def _product(self, program: Program, x: Array, w: Linear, n_rows: Array | None = None) -> Array:
        """The linear without its bias, float32 [R, N], where the next one puts its own."""
        out = front(self.buffers.wide, len(x), w.weight.n)
        linear(program, x, w.weight, out, self.buffers.packed, self.buffers.n_rows if n_rows is None else n_rows)
        return out


class VisionForward:
    """The stages of a tower, recorded, and their way over pictures: `run` does a piece at a time."""

    def __init__(
        self, tower: VisionTower, n_threads: int, library: str | None = None, cpus: tuple[int, ...] = ()
    ) -> None:
        """library, cpus: as of a Program."""
        self.buffers = tower.buffers
        self.stages: list[Program] = []

        def stage() -> Program:
            self.stages.append(Program(n_threads, library, cpus))
            return self.stages[-1]

        tower.record_embedding(stage())
        for block in tower.weights.blocks:
            tower.record_keys(stage(), block)
            tower.record_rest(stage(), block)
        tower.record_merger(stage())

    def run(
        self, patches: Sequence[Array | Patches], grids: Sequence[Grid], n_rows: Callable[[int, int], int] | None = None
    ) -> Iterator[None]:
        """Encodes pictures, to buffers.tokens, one after another; yields after each piece.

        patches: float32 or bfloat16 [frames * rows * columns, PATCH_WIDTH] of each grid, block by block (see
        `Frames`). n_rows: says before each piece, by the number of its stage and the patches that it has to
        go, how many it may have (None: as many as there is room for). Raises ValueError for what does not fit
        the buffers, at the first step.
        """
        b = self.buffers
        n = self._place(patches, grids)
        starts = np.cumsum([0, *map(len, patches)])
        for i, stage in enumerate(self.stages):
            begin = 0
            while begin < n:
                most = len(b.normed) if n_rows is None else min(n_rows(i, n - begin), len(b.normed))
                if most < TOKEN:
                    raise ValueError(f"a piece of {most} patches: a token has {TOKEN}")
                count = min(most // TOKEN * TOKEN, n - begin)
                b.begin[()], b.n_rows[()] = begin, count
                b.first_token[()], b.n_tokens[()] = begin // TOKEN, count // TOKEN
                if stage is self.stages[0]:
                    for first, some in zip(starts, patches, strict=False):
                        low, high = max(begin, first), min(begin + count, first + len(some))
                        if low < high:
                            copy(b.pixels[low - begin : high - begin], some[low - first : high - first])
                stage.run()
                begin += count
                yield

    def _place(self, patches: Sequence[Array | Patches], grids: Sequence[Grid]) -> int:
        """Writes where the frames are. Returns the number of patches."""
        b, shapes = self.buffers, [(rows, columns) for frames, rows, columns in grids for _ in range(frames)]
        for some, (frames, rows, columns) in zip(patches, grids, strict=True):
            if rows % MERGE or columns % MERGE or min(frames, rows, columns) < 1:
                raise ValueError(f"a grid of {frames} x {rows} x {columns} patches: sides must be multiples of {MERGE}")
            if some.shape != (frames * rows * columns, PATCH_WIDTH):
                raise ValueError(f"patches {some.shape} of a grid of {frames} x {rows} x {columns}")
        sizes = np.array([rows * columns for rows, columns in shapes], np.int64)
        n, n_frames = int(sizes.sum()), len(shapes)
        if n > len(b.residual) or n_frames > len(b.frames.grid):
            raise ValueError(
                f"{n} patches in {n_frames} frames: there is room for {len(b.residual)} in {len(b.frames.grid)}"
            )
        b.frames.n[()] = n_frames
        b.frames.start[: n_frames + 1] = np.concatenate(([0], np.cumsum(sizes)))
        b.frames.key_start[: n_frames + 1] = key_starts(sizes)
        b.frames.grid[:n_frames] = np.reshape(shapes, (n_frames, 2))
        return n
