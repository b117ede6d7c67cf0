"""Packed matrices: what the linears, the experts and the embedding read as their weights.

A format is a precision in a layout. The CPU's kernels read strips of 16 rows (csrc/matrix.h says how):

    bf16   as stored in the checkpoint
    int8   8.25 bits a weight: groups of 128 along K with a float32 scale, symmetric
    int4   4.5 bits a weight: groups of 64 along K with a bfloat16 scale and least value, fitted by least
           squares; int4-symmetric has only the scale, its least is -8 scale

Rows multiplied with a quantised matrix are themselves rounded to int8, with a scale per row and group; the
sums within a group are exact integers. The layout does not depend on the machine, so a packed file can be
kept and moved.

The GPU's kernels read rows, one after another as stored in the checkpoint, so far in bf16 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from deltic.ops.arrays import Array, bfloat16, zeros
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program

STRIP = 16


Layout = Literal["strips", "rows"]
"""The order of a matrix in memory: as the CPU's kernels read it, or as the GPU's do."""


@dataclass(frozen=True)
class MatrixFormat:
    """A precision in a layout.

    bits: of one weight, scales left out; group: weights along K that share a scale; code: the precision's
    number in csrc/matrix.h, -1 where the CPU's kernels do not read the layout.
    """

    layout: Layout
    precision: str
    bits: int
    group: int
    code: int = -1
    symmetric: bool = True


FORMATS = {
    f.precision: f
    for f in (
        MatrixFormat("strips", "bf16", 16, 32, 0),
        MatrixFormat("strips", "int8", 8, 128, 1),
        MatrixFormat("strips", "int4", 4, 64, 2, symmetric=False),
        MatrixFormat("strips", "int4-symmetric", 4, 64, 2),
    )
}
"""Strips, by precision."""

ROWS = MatrixFormat("rows", "bf16", 16, 1)
"""Rows, in the one precision that they have."""


@dataclass(frozen=True)
class Matrix:
    """n_matrices matrices of [n, k] (the experts of a layer, or one), packed. data: uint8
    [n_matrices, bytes of one], an array of numpy's in strips, a tensor of torch's in rows.
    """

    n: int
    k: int
    format: MatrixFormat
    data: Any

    @staticmethod
    def n_bytes_of(n: int, k: int, format: MatrixFormat) -> int:
        if format.layout == "rows":
            return n * k * format.bits // 8
        scales = 0 if format.bits == 16 else math.ceil(k / format.group) * 4
        return math.ceil(n / STRIP) * STRIP * (k * format.bits // 8 + scales)

    @classmethod
    def empty(
        cls,
        n: int,
        k: int,
        format: MatrixFormat,
        n_matrices: int = 1,
        make: Callable[[tuple[int, ...], DTypeLike], Any] = zeros,
    ) -> Matrix:
        """Room for the matrices, of `make`; `pack` fills it. Raises KernelError unless k is a multiple of
        32.
        """
        check("matrix", k % 32 == 0, f"K a multiple of 32, found {k}")
        return cls(n, k, format, make((n_matrices, cls.n_bytes_of(n, k, format)), np.uint8))

    @property
    def n_bytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def arguments(self) -> tuple[Array, int, int, int, int]:
        """The arguments that a kernel reads (read_matrix in csrc/matrix.h). Raises KernelError for one in
        rows.
        """
        check("matrix", self.format.code >= 0, "a packed matrix; the CPU's kernels do not read rows")
        return self.data, self.format.code, self.n, self.k, self.format.group

    def pack(self, values: Array, n_threads: int = 1) -> Matrix:
        """Stores values, bfloat16 [n_matrices * n, k] in rows, in strips; gives itself."""
        n_matrices = self.data.shape[0]
        check(
            "pack",
            values.dtype == bfloat16 and values.flags.c_contiguous and values.size == n_matrices * self.n * self.k,
            f"contiguous bfloat16 values of {n_matrices} x [{self.n}, {self.k}]",
        )
        program = Program(n_threads)
        for data, part in zip(self.data, values.reshape(n_matrices, self.n, self.k), strict=True):
            one = Matrix(self.n, self.k, self.format, data)
            program.call("deltic_pack", part, *one.arguments, int(self.format.symmetric))
        program.run()
        return self

    def unpack(self) -> Array:
        """float32 [n_matrices, n, k]: the values that stand for the matrices.

        For tests and to see what a format loses.
        """
        out = np.empty((self.data.shape[0], self.n, self.k), np.float32)
        rows, count = np.arange(self.n, dtype=np.int32), np.array(self.n, np.int32)
        program = Program(1)
        for data, part in zip(self.data, out, strict=True):
            one = Matrix(self.n, self.k, self.format, data)
            program.call("deltic_embed", *one.arguments, rows, part, count)
        program.run()
        return out


def row_bytes(k: int) -> int:
    """Bytes that one row of x takes when packed for a product, in whatever format (row_bytes in
    csrc/matrix.h).
    """
    return 2 * k
