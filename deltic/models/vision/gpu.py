"""The vision tower on a GPU, in pieces: the pixels of a picture to tokens of the language model.

The same forward as models/vision/cpu.py, with its roundings: the residual stream, norms and softmax are
float32. The inputs of every product, q, k and v are bfloat16. Biases, GELU and the sum with the residual
stream are part of the products.

One frame at a time. A piece is a multiple of PIECE patches, whose tokens are whole blocks of the pool. Behind
the last patch rows are padding, which nobody reads. Everything here starts kernels on the current stream and
neither waits nor allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.models.fields import multiple, refuse_limits
from deltic.models.rotary import rotary_tables
from deltic.models.vision.pixels import PictureRules, level_table
from deltic.models.vision.shape import BLOCK, CHANNELS, FRAMES_A_PATCH, LAYER_NORM_EPS, MERGE, PATCH_WIDTH, VisionShape
from deltic.models.vision.weights import Linear, Norm, VisionBlock, VisionWeights
from deltic.ops.arrays import front
from deltic.ops.geometry import MAX_VISION_DIM, PAGE_SIZE, Allocate
from deltic.ops.gpu.linear import ADD, BIAS, GELU_ERF, GELU_TANH, WideScratch, biased_linear
from deltic.ops.gpu.vision import (
    HeadColumns,
    PatchGrid,
    layer_norm,
    patch_attention,
    patch_keys,
    patch_positions,
    pixel_patches,
)
from deltic.ops.gpu.weight import to_device

TOKEN = MERGE**2
"""Patches of a token."""
PIECE = PAGE_SIZE * TOKEN
"""Pieces are multiples of so many patches."""


def check_vision_gpu(shape: VisionShape) -> None:
    """Raises UnsupportedModelError for a geometry that the kernels cannot run.

    Called before anything is loaded.
    """
    dim, supported = shape.head_dim, f"a multiple of 8, 16 to {MAX_VISION_DIM}"
    refuse_limits(
        multiple("hidden_size", shape.hidden_size, 32),
        ("hidden_size / num_heads", dim, dim % 8 == 0 and 16 <= dim <= MAX_VISION_DIM, supported),
        prefix="vision_config.",
    )


@dataclass(frozen=True)
class VisionBuffers:
    """Memory of a tower but its weights, for pictures of T patches and pieces of R rows."""

    pixels: Tensor  # uint8, flat: of a picture or a pair of frames
    patches: Tensor  # bfloat16 [R, PATCH_WIDTH]
    normed: Tensor  # bfloat16, flat
    mixed: Tensor  # bfloat16, flat: what attention, or the merger's first product gives
    inner: Tensor  # bfloat16 [R, inner_size]: columns behind the intermediate size stay zeros
    qkv: Tensor  # float32, flat
    residual: Tensor  # float32 [T, h]
    memory: Tensor  # bfloat16 [3, heads, T, width]: q, k and v of one block
    tokens: Tensor  # bfloat16 [R / 4, out_hidden_size]
    wide: WideScratch


def vision_buffers(shape: VisionShape, n_patches: int, n_rows: int, allocate: Allocate) -> VisionBuffers:
    """Every buffer for pictures of up to n_patches, in pieces of up to n_rows, both multiples of PIECE."""
    f32, bf16 = torch.float32, torch.bfloat16
    h, r, t = shape.hidden_size, n_rows, n_patches
    widths = ((3 * h, h), (h, PATCH_WIDTH), (shape.intermediate_size, h), (h, shape.inner_size))
    merged = shape.merged_size
    largest = max(n * k for n, k in (*widths, (merged, merged), (shape.out_hidden_size, merged)))
    return VisionBuffers(
        pixels=allocate("vision pixels", (t // TOKEN * BLOCK**2 * CHANNELS * FRAMES_A_PATCH,), torch.uint8),
        patches=allocate("vision patches", (r, PATCH_WIDTH), bf16),
        normed=allocate("vision normed", (r * h,), bf16),
        mixed=allocate("vision mixed", (r * h,), bf16),
        inner=allocate("vision inner", (r, shape.inner_size), bf16),
        qkv=allocate("vision products", (r * 3 * h,), f32),
        residual=allocate("vision residual", (t, h), f32),
        memory=allocate("vision keys", (3, shape.n_heads, t, HeadColumns.of(shape.head_dim).width), bf16),
        tokens=allocate("vision tokens", (r // TOKEN, shape.out_hidden_size), bf16),
        wide=WideScratch(allocate("vision weights", (largest,), bf16) if shape.formats else None, None),
    )


class VisionGpu:
    """A tower over given buffers, as stages: the embedding; for each block its keys and values, then all that
    follows them; the merger.
    """

    def __init__(self, shape: VisionShape, weights: VisionWeights, rules: PictureRules, buffers: VisionBuffers) -> None:
        self.shape, self.weights, self.buffers = shape, weights, buffers
        device = buffers.residual.device
        n_places = max(1, len(buffers.residual) // MERGE)  # of a picture as narrow as a token
        self.cos, self.sin = (to_device(table, device) for table in rotary_tables(shape.inv_freq(), n_places))
        self.levels = to_device(level_table(rules), device)

    @property
    def n_stages(self) -> int:
        return 2 + 2 * len(self.weights.blocks)

    def pieces(
        self, grid: PatchGrid, n_frames: int, n_rows: Callable[[int, int], int], put: Callable[[int, Tensor], None]
    ) -> Iterator[bool]:
        """Encodes the picture in buffers.pixels; yields after each piece, whose kernels are started, whether
        it is the last.

        n_rows: says before each piece, by the number of its stage and the patches that it has to go, how many
        it may have, PIECE at the least. put(first, tokens) is called with tokens of the picture, bfloat16 [n,
        out_hidden_size], from token `first` on, in order. The buffer is used again by what is started next.
        Raises ValueError for a picture that does not fit, at the first step.
        """
        b = self.buffers
        if grid.n > len(b.residual):
            raise ValueError(f"{grid.n} patches: there is room for {len(b.residual)}")
        end = -(-grid.n // PIECE) * PIECE
        for i in range(self.n_stages):
            begin = 0
            while begin < end:
                most = min(n_rows(i, end - begin), len(b.patches)) // PIECE * PIECE
                if not most:
                    raise ValueError(f"a piece has {PIECE} patches or more")
                n = min(most, end - begin)
                self.run(i, grid, n_frames, begin, n)
                if i == self.n_stages - 1:
                    first = begin // TOKEN
                    put(first, b.tokens[: min(n // TOKEN, grid.n // TOKEN - first)])
                begin += n
                yield i == self.n_stages - 1 and begin == end

    def run(self, stage: int, grid: PatchGrid, n_frames: int, begin: int, n: int) -> None:
        """Starts one stage of patches [begin, begin + n)."""
        residual = self.buffers.residual[begin : begin + n]
        if stage == 0:
            self._embedding(grid, n_frames, begin, residual)
        elif stage == self.n_stages - 1:
            self._merger(residual)
        else:
            block = self.weights.blocks[(stage - 1) // 2]
            (self._keys if stage % 2 else self._rest)(block, grid, begin, residual)

    def _embedding(self, grid: PatchGrid, n_frames: int, begin: int, residual: Tensor) -> None:
        b, w = self.buffers, self.weights
        patches = b.patches[: len(residual)]
        pixel_patches(b.pixels, self.levels, grid, patches, begin=begin, n_frames=n_frames)
        patch_positions(w.positions, grid, residual, begin=begin)
        self._linear(w.patch, patches, residual, ADD)

    def _keys(self, block: VisionBlock, grid: PatchGrid, begin: int, residual: Tensor) -> None:
        b = self.buffers
        qkv = front(b.qkv, len(residual), 3 * self.shape.hidden_size)
        self._linear(block.qkv, self._norm(block.norm1, residual), qkv)
        patch_keys(qkv, grid, self.cos, self.sin, b.memory, begin=begin, dim=self.shape.head_dim)

    def _rest(self, block: VisionBlock, grid: PatchGrid, begin: int, residual: Tensor) -> None:
        b, n = self.buffers, len(residual)
        mixed = front(b.mixed, n, self.shape.hidden_size)
        patch_attention(b.memory, grid, mixed, begin=begin, dim=self.shape.head_dim)
        self._linear(block.proj, mixed, residual, ADD)
        inner = b.inner[:n]
        up = inner[:, : self.shape.intermediate_size]
        self._linear(block.fc1, self._norm(block.norm2, residual), up, GELU_TANH)
        self._linear(block.fc2, inner, residual, ADD)

    def _merger(self, residual: Tensor) -> None:
        b, n = self.buffers, len(residual) // TOKEN
        merged, inner = self._norm(self.weights.norm, residual).view(n, -1), front(b.mixed, n, self.shape.merged_size)
        self._linear(self.weights.merge1, merged, inner, GELU_ERF)
        self._linear(self.weights.merge2, inner, b.tokens[:n])

    def _norm(self, norm: Norm, residual: Tensor) -> Tensor:
        out = front(self.buffers.normed, *residual.shape)
        layer_norm(residual, norm.weight, norm.bias, LAYER_NORM_EPS, out)
        return out

    def _linear(self, w: Linear, x: Tensor, out: Tensor, how: object = BIAS) -> None:
        biased_linear(x, w.weight, w.bias, out, how=how, scratch=self.buffers.wide)
