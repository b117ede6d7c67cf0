"""Tables of rotary embeddings, for every model and device."""

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
