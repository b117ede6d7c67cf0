"""Weights in a GPU's memory: how they get there, and the tensors that kernels read of a matrix.

The only file that knows which formats the GPU's kernels have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import KernelError, check
from deltic.ops.formats import Quantised
from deltic.ops.matrix import Layout, Matrix, Piece


def rows_of(operator: str, w: Matrix) -> Tensor:
    """The matrix itself, bfloat16 [n, k], of several matrices [n_matrices, n, k], for an operator whose
    kernels read rows.

    An operator that gets a kernel for another format asks for that format before it asks here. Raises
    KernelError, which names the operator and the format, for a matrix in any format but rows.
    """
    piece = w.whole
    check(
        operator,
        piece.layout == "rows" and piece.format.codes == "bf16",
        f"weights in rows of bfloat16; there is no kernel for {piece.format.name} in {piece.layout}",
    )
    size = (w.n, w.k) if w.n_matrices == 1 else (w.n_matrices, w.n, w.k)
    rows: Tensor = piece.data.view(torch.bfloat16).view(size)
    return rows


def to_device(array: Array, device: torch.device | str) -> Tensor:
    """The array as a tensor on the device, on "meta" only its size."""
    if torch.device(device).type == "meta":
        return torch.empty(array.shape, dtype=_dtype(array.dtype), device=device)
    if not array.flags.writeable:  # of a mapped file; torch has no such tensors
        array = array.copy()
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _dtype(dtype: DTypeLike) -> torch.dtype:
    found: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return found


class DeviceStore:
    """A device's memory as a `Store` of weights (models/loading.py), matrices in rows."""

    layout: Layout = "rows"

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self._tiled: tuple[Array, Tensor] | None = None  # the last block, and where it lies on the device

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        return torch.empty(size, dtype=_dtype(dtype), device=self.device)

    def put(self, part: Any | Piece, rows: Array | Quantised) -> None:
        if isinstance(rows, Quantised):
            raise KernelError("weights: bfloat16 only: there are no rows in other formats")
        _flat(part).copy_(to_device(rows, "cpu").view(-1))

    def tile(self, part: Any | Piece, block: Array, offset: int) -> None:
        flat = _flat(part)
        if self._tiled is None or self._tiled[0] is not block:
            self._tiled = block, to_device(block, self.device)
        values = self._tiled[1]
        n = min(flat.numel(), len(values) - offset)
        flat[:n].copy_(values[offset : offset + n])
        for rest in torch.split(flat[n:], len(values)):
            rest.copy_(values[: len(rest)])


def _flat(part: Any | Piece) -> Tensor:
    """The values of a part, one after another."""
    memory: Tensor = part.data.view(torch.bfloat16) if isinstance(part, Piece) else part
    return memory.view(-1)
