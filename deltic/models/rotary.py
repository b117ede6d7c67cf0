"""Rotary embeddings, for every model and device: tables of angles, and the positions of a prompt with
pictures (M-RoPE).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def rotary_tables(
    inv_freq: Sequence[float], n: int, factor: float = 1.0, *, n_beside: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [n, len(inv_freq)], of the angles of positions 0 to n - 1, times factor. Behind
    them are n_beside rows of zeros.

    The angles are float32 products, as in training: at far positions a more exact angle is a different one.
    Their cosines are computed in float64 and rounded once, so that every machine has the same.
    """
    angles = np.arange(n, dtype=np.float32)[:, None] * np.array(inv_freq, np.float32)
    exact = angles.astype(np.float64)
    scale = np.float32(factor)
    rows = np.zeros((2, n + n_beside, len(inv_freq)), np.float32)
    rows[0, :n], rows[1, :n] = np.cos(exact).astype(np.float32) * scale, np.sin(exact).astype(np.float32) * scale
    return rows[0], rows[1]


class PromptPositions:
    """Positions of a prompt's tokens on the three axes of M-RoPE (time, row, column).

    Text counts on, all axes alike. A picture's tokens, in raster order, stand at one time, at their row and
    column from there; text goes on behind the longer side.

    Source: get_rope_index of the published Qwen3.5 model code.
    """

    def __init__(self, pictures: Sequence[tuple[int, int, int]]) -> None:
        """pictures: (first token, rows, columns) of each, in order, of tokens after merging; of a video, of
        each pair of its frames.

        Raises ValueError for pictures that overlap or are empty.
        """
        self._first, self._end, self._columns, self._begin, self._later = [], [], [], [], []
        end = shift = 0
        for first, rows, columns in pictures:
            if first < end or min(rows, columns) < 1:
                raise ValueError(f"a picture of {rows} x {columns} tokens from {first} on, behind one up to {end}")
            end = first + rows * columns
            self._begin.append(first + shift)
            shift += max(rows, columns) - rows * columns
            self._first.append(first)
            self._end.append(end)
            self._columns.append(columns)
            self._later.append(shift)

    @property
    def shift(self) -> int:
        """Distance from the number of a token behind all pictures to its position."""
        return self._later[-1] if self._later else 0

    def of(self, start: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the positions of tokens [start, end), prompt or answer: int32 [3, n], and whether each is a
        picture's.
        """
        numbers = np.arange(start, end, dtype=np.int32)
        if not self._first:
            return np.tile(numbers, (3, 1)), np.zeros(len(numbers), bool)
        i = np.searchsorted(np.array(self._first), numbers, side="right") - 1  # the picture at or before it
        inside = (i >= 0) & (numbers < np.array(self._end)[i])
        number = numbers - np.array(self._first, np.int32)[i]
        columns, begin = np.array(self._columns, np.int32)[i], np.array(self._begin, np.int32)[i]
        text = numbers + np.where(i >= 0, np.array(self._later, np.int32)[i], 0)
        in_picture = np.stack([begin, begin + number // columns, begin + number % columns])
        return np.where(inside, in_picture, text).astype(np.int32), inside


def axis_of_angle(n: int, sections: Sequence[int]) -> NDArray[np.int32]:
    """Returns which axis of M-RoPE each of n angles of a head belongs to, int32 [n]. The axes take turns, and
    what rows and columns do not reach is time's.

    sections: how many angles each axis has. Source: apply_interleaved_mrope of the published Qwen3.5 code.
    """
    axes = np.zeros(n, np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
