"""Rotary embeddings, for every model and device: tables of angles, and the positions of a prompt with
pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def rotary_tables(
    inv_freq: Sequence[float], n: int, factor: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [n, len(inv_freq)], of the angles of positions 0 to n - 1, times factor.

    The angles are float32 products, as in training: at far positions a more exact angle is a different one.
    Their cosines are computed in float64 and rounded once, so that every machine has the same.
    """
    angles = np.arange(n, dtype=np.float32)[:, None] * np.array(inv_freq, np.float32)
    exact = angles.astype(np.float64)
    scale = np.float32(factor)
    return np.cos(exact).astype(np.float32) * scale, np.sin(exact).astype(np.float32) * scale


def prompt_positions(n_tokens: int, pictures: Sequence[tuple[int, int, int]]) -> tuple[NDArray[np.int32], int]:
    """Positions of a prompt's tokens on the three axes of M-RoPE (time, row, column), int32 [3, n_tokens],
    and what is added to the number of a later token to get its position, the same on all axes.

    pictures: (first token, rows, columns) of each, in order, of tokens after merging; of a video, of each of
    its frames. Text counts on, all axes alike. A picture's tokens, in raster order, stand at one time, at
    their row and column from there; text goes on behind the longer side. Raises ValueError for pictures that
    overlap, are empty or reach beyond the prompt.

    Source: get_rope_index of the published Qwen3.5 model code.
    """
    positions = np.empty((3, n_tokens), np.int32)
    at = count = 0
    for first, rows, columns in (*pictures, (n_tokens, 0, 0)):
        end = first + rows * columns
        if first < at or end > n_tokens or (first < n_tokens and min(rows, columns) < 1):
            raise ValueError(f"a picture of {rows} x {columns} tokens from {first} on, in {n_tokens} from {at} on")
        positions[:, at:first] = np.arange(count, count + first - at)
        count += first - at
        positions[:, first:end] = count
        positions[1, first:end] += np.repeat(np.arange(rows), columns)
        positions[2, first:end] += np.tile(np.arange(columns), rows)
        count += max(rows, columns)
        at = end
    return positions, count - n_tokens
