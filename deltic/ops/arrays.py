"""Memory of the CPU: numpy's arrays, with bfloat16 among their types.

numpy has no bfloat16 of its own. The one here is ml_dtypes'. Its copies and conversions go through one value
at a time, so that bytes are moved as `raw` integers where the types are equal.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Flat = TypeVar("Flat")
"""A flat array, or a tensor of torch's."""

bfloat16 = np.dtype(ml_dtypes.bfloat16)

_LINE = 64
_VALUE = bytes(16)
"""The memory of all arrays that have none."""


def zeros(size: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros on a cache line, taken from the system when they are written first.

    Raises MemoryError when there is not even address space for it.
    """
    dtype = np.dtype(dtype)
    n_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(n_bytes + _LINE, np.uint8)  # calloc: untouched pages cost nothing yet
    begin = -memory.ctypes.data % _LINE
    return memory[begin : begin + n_bytes].view(dtype).reshape(size)


def copy(target: Array, source: Array) -> None:
    """target[...] = source, rounded to nearest even where its type is narrower."""
    if target.dtype == source.dtype:
        target, source = raw(target), raw(source)
    target[...] = source


def nothing(size: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array of this size without memory, of which only the size is asked."""
    return np.ndarray(size, dtype, _VALUE, strides=(0,) * len(size))


def stride(array: Array) -> int:
    """Values from one row to the next."""
    return array.strides[0] // array.itemsize


def raw(array: Array) -> Array:
    """The same memory as unsigned integers of the same width, which numpy copies and compares quickly."""
    return array.view(f"u{array.itemsize}")


def front(flat: Flat, *size: int) -> Flat:
    """The front of a flat array as one of this size, over the same memory."""
    memory: Any = flat
    shaped: Flat = memory[: math.prod(size)].reshape(size)
    return shaped
