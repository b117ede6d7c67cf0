"""Keys and values in fewer bits: which codes, scales and least values they are, in NumPy, to the bit.

A row is the d elements of one token and head, in bfloat16. All steps are float32, each rounded once, to
nearest even. A row with an element that is not finite has a scale that is no number, so that nothing of it
looks like one.

    int8            scale = amax / 127              code = round(x / scale) in [-127, 127]
    uint4           least = min                     code = round((x - least) / scale) in [0, 15]
                    scale = (max - least) / 15
    uint4, float16  the same, least and scale rounded to float16
    e4m3            scale = float16(amax / 448)     code = e4m3(x / scale), at most 448
    e4m3, plain     no scale                        code = e4m3(x), at most 448

A code stands for code * scale, or least + code * scale, or itself. A scale is at least 2^-100 in float32,
2^-14 in float16 (their normal numbers begin below, or there), so that a row of zeros has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
LEAST_SCALE = {F32: np.float32(2.0**-100), F16: np.float32(2.0**-14)}


@dataclass
class Rows:
    """codes [..., d]: int8, uint8 (4 bits, one a byte), or float8_e4m3fn; scale, least: [...], None where the
    format has none.
    """

    codes: Array
    scale: Array | None = None
    least: Array | None = None

    def values(self) -> Array:
        """float32 [..., d]."""
        found = self.codes.astype(np.float32)
        if self.scale is not None:
            found = found * self.scale.astype(np.float32)[..., None]
        return found if self.least is None else self.least.astype(np.float32)[..., None] + found


def _scale(size: Array, most: float, x: Array, dtype: Any) -> Array:
    """size / most, of rows x. It is rounded to float16 before the least scale counts, and what that cannot
    hold is no number.
    """
    scale = np.maximum((size / np.float32(most)).astype(dtype), LEAST_SCALE[np.dtype(dtype)].astype(dtype))
    return np.where(np.isfinite(x).all(-1) & np.isfinite(scale), scale, np.array(np.nan, dtype)).astype(dtype)


def int8_rows(x: Array) -> Rows:
    """x: bfloat16 [..., d]."""
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        scale = _scale(np.abs(x).max(-1), 127, x, F32)
        codes = np.clip(np.rint(x / scale[..., None]), -127, 127)
    return Rows(np.nan_to_num(codes).astype(np.int8), scale)


def uint4_rows(x: Array, dtype: Any = F32) -> Rows:
    """x: bfloat16 [..., d]. dtype: of least values and scales, float32 or float16."""
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        least = x.min(-1).astype(dtype)
        scale = _scale(x.max(-1) - least.astype(np.float32), 15, x, dtype)
        codes = (x - least.astype(np.float32)[..., None]) / scale.astype(np.float32)[..., None]
        codes = np.clip(np.rint(codes), 0, 15)
    return Rows(np.nan_to_num(codes).astype(np.uint8), scale, least)


def e4m3_rows(x: Array, *, scaled: bool = True) -> Rows:
    """x: bfloat16 [..., d]. What is not finite is no number in the codes, too."""
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        scale = _scale(np.abs(x).max(-1), 448, x, F16) if scaled else None
        y = x if scale is None else x / scale.astype(np.float32)[..., None]
        y = np.where(np.isfinite(x), np.clip(y, -448, 448), np.nan)
    return Rows(y.astype(ml_dtypes.float8_e4m3fn), scale)


FORMATS = {
    "fp8": (e4m3_rows, e4m3_rows),
    "turboquant_k8v4": (lambda x: e4m3_rows(x, scaled=False), lambda x: uint4_rows(x, F16)),
    "int8": (int8_rows, int8_rows),
    "k8v4": (int8_rows, uint4_rows),
}
"""Of keys and of values."""
