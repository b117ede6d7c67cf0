"""The vision tower of Qwen3.5 and 3.6, slow and obviously right, for one picture or video.

    x = patches W + b + positions;  x += proj(Attn(LN(x)));  x += fc2(gelu_tanh(fc1(LN(x))))
    tokens = fc2(gelu(fc1(four neighbours of LN(x))))

Tensors are float32. `precision` as in layers.py: with "bfloat16" the inputs of every product are rounded:
those of the linears, and q, k, v and the weights of attention. Products accumulate in float32.

A grid is (frames, rows, columns) of patches. Patches come block by block, as the merger takes them: for each
2 x 2 block in raster order its patches in raster order. The weights are those of a checkpoint, without the
beginning of their names (`model.visual.`).

Source: the published Qwen3.5 model code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.layers import Precision, linear, rounded

EPS = 1e-6
THETA = 10000.0

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Tower:
    """Sizes that the weights do not tell."""

    depth: int
    n_heads: int
    merge: int = 2


def coordinates(rows: int, columns: int, merge: int) -> Tensor:
    """Row and column of each patch of a frame, in the order of patches: int64 [rows * columns, 2]."""
    places = []
    for block_row in range(rows // merge):
        for block_column in range(columns // merge):
            for y in range(merge):
                for x in range(merge):
                    places.append((block_row * merge + y, block_column * merge + x))
    return torch.tensor(places)


def position_embedding(table: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """The table [side * side, h], stretched to the grid with its corners at the grid's, between its entries
    linearly; in the order of patches: [rows * columns, h].
    """
    side = round(len(table) ** 0.5)
    square = table.view(side, side, -1)

    def neighbours(index: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        at = index.float() * (side - 1) / max(size - 1, 1)
        low = at.floor().long()
        return low, (low + 1).clamp(max=side - 1), at - low

    place = coordinates(rows, columns, merge)
    top, bottom, y = neighbours(place[:, 0], rows)
    left, right, x = neighbours(place[:, 1], columns)
    x, y = x[:, None], y[:, None]
    upper = square[top, left] * (1 - x) + square[top, right] * x
    lower = square[bottom, left] * (1 - x) + square[bottom, right] * x
    return upper * (1 - y) + lower * y


def rotate(x: Tensor, place: Tensor) -> Tensor:
    """Rotary embedding of heads x [T, heads, d] at place [T, 2]: pairs (i, i + d / 2), the first half of them
    by the row, the other by the column.
    """
    d = x.shape[-1]
    inv_freq = THETA ** (-torch.arange(0, d // 2, 2).float() / (d // 2))
    angle = torch.cat([place[:, :1] * inv_freq, place[:, 1:] * inv_freq], 1)[:, None]  # [T, 1, d / 2]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, precision: Precision) -> Tensor:
    """Softmax attention of every patch of a frame to every other. q, k, v: [T, heads, d]."""
    q, k, v = (rounded(x, precision).transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    weights = rounded((scores - scores.amax(-1, keepdim=True)).exp(), precision)
    return (weights @ v / weights.sum(-1, keepdim=True)).transpose(0, 1)


def with_bias(x: Tensor, weights: Weights, name: str, precision: Precision) -> Tensor:
    """A linear with its bias: x [T, K] -> [T, N]."""
    weight = weights[f"{name}.weight"]
    return linear(x, weight.reshape(len(weight), -1), precision) + weights[f"{name}.bias"].float()


def norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    """LayerNorm with a bias."""
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"].float(), weights[f"{name}.bias"].float(), EPS)


def tower(
    patches: Tensor, grid: tuple[int, int, int], weights: Weights, shape: Tower, precision: Precision = "float32"
) -> Tensor:
    """Tokens of a picture, float32 [frames * rows * columns / merge^2, H], of its patches [frames * rows *
    columns, K].
    """
    frames, rows, columns = grid
    place = coordinates(rows, columns, shape.merge).repeat(frames, 1)
    x = with_bias(patches, weights, "patch_embed.proj", precision)
    positions = position_embedding(weights["pos_embed.weight"].float(), rows, columns, shape.merge)
    x = x + positions.repeat(frames, 1)
    for i in range(shape.depth):
        p = f"blocks.{i}."
        qkv = with_bias(norm(x, weights, f"{p}norm1"), weights, f"{p}attn.qkv", precision)
        q, k, v = qkv.view(len(x), 3, shape.n_heads, -1).unbind(1)
        q, k = rotate(q, place), rotate(k, place)
        n = rows * columns
        seen = [attention(q[a : a + n], k[a : a + n], v[a : a + n], precision) for a in range(0, len(x), n)]
        x = x + with_bias(torch.cat(seen).flatten(1), weights, f"{p}attn.proj", precision)
        inner = with_bias(norm(x, weights, f"{p}norm2"), weights, f"{p}mlp.linear_fc1", precision)
        inner = F.gelu(inner, approximate="tanh")
        x = x + with_bias(inner, weights, f"{p}mlp.linear_fc2", precision)
    merged = norm(x, weights, "merger.norm").reshape(len(x) // shape.merge**2, -1)
    inner = F.gelu(with_bias(merged, weights, "merger.linear_fc1", precision))
    return with_bias(inner, weights, "merger.linear_fc2", precision)
