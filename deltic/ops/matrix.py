"""Packed matrices: what the linears, the experts and the embedding read as their weights.

A matrix is one segment or several: runs of its rows, each in one format of ops/formats.py. A checkpoint mixes
formats within what the forward multiplies at once, such as a Q6_K v below a Q4_K q and k. The CPU's kernels
read panels of 16 rows (the strips of csrc/format.h, which says how), the GPU's read rows (ops/gpu/weight.py).

--quantize makes two formats of bfloat16 weights:

    int8   8.25 bits a weight: groups of 128 along K with a float32 scale, symmetric
    int4   4.5 bits a weight: groups of 64 along K with a bfloat16 scale and least value, fitted by least
           squares; int4-symmetric has only the scale, its least is -8 scale

Rows multiplied with integers are themselves rounded to int8 on a CPU, with a scale per row and group. The
sums within a group are exact integers. The layout does not depend on the machine, so a packed file can be
kept and moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from deltic.ops.arrays import Array, bfloat16, zeros
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.formats import CODEBOOKS, CODES, SCALES, Quantised, WeightFormat
from deltic.ops.geometry import DeviceArray

PANEL = 16
"""Rows of a panel. A panel of a convolution has 32 (ops/cpu/vocoder.py)."""

Layout = Literal["panels", "rows"]
"""The order of a matrix in memory: as the CPU's kernels read it, or as the GPU's do."""

_GROUP_BYTES = {
    "float32": 64, "bfloat16.least": 64, "float16": 32, "bfloat16": 32, "float16.least": 64, "float16.zero": 48,
    "bfloat16.zero": 48, "k": 16, "k.least": 32, "e8m0": 16, "e4m3": 16, "k.eighth": 16,
}  # fmt: skip
_BLOCK_BYTES = {"k": 32, "k.least": 64, "k.eighth": 32}
_BLOCK, _TAIL_BYTES = 256, 128
_PLANE = 256
"""Bytes: where the parts of a matrix in rows begin, at a multiple of them."""


@dataclass(frozen=True)
class Segment:
    """n_matrices of n rows (the same rows of a layer's experts, or of one matrix) of width k in one format.

    data: uint8 [n_matrices, bytes of one], an array of numpy's in panels, a tensor of torch's in rows. No
    segment of a prefill (ops/gpu/blocks.py).
    """

    n: int
    k: int
    format: WeightFormat
    layout: Layout
    data: DeviceArray

    @staticmethod
    def n_bytes_of(n: int, k: int, format: WeightFormat, layout: Layout) -> int:
        """Bytes of one matrix."""
        if layout == "rows":
            last, size = list(planes(n, k, format).values())[-1]
            return last + (size if format.codes == "bf16" else -(-size // _PLANE) * _PLANE)
        panel = int(k * PANEL * format.bits) // 8
        if format.scales != "none":
            block = format.group or k if format.scales in ("float32", "bfloat16.least") or not format.group else _BLOCK
            panel += format.n_groups(k) * _GROUP_BYTES[format.scales]
            panel += -(-k // block) * _BLOCK_BYTES.get(format.scales, 0) + _TAIL_BYTES * (format.scales == "e4m3")
        return -(-n // PANEL) * panel

    @property
    def arguments(self) -> tuple[Array, int, int, int, int]:
        """The arguments that a kernel reads (Matrix in csrc/format.h). Raises KernelError for one in rows."""
        check("matrix", self.layout == "panels", "a packed matrix; the CPU's kernels do not read rows")
        codes = CODES.index(self.format.codes)
        code = codes % 16 + 16 * SCALES.index(self.format.scales) + 256 * (codes // 16)
        return self.data, code, self.n, self.k, self.format.group or self.k

    @property
    def n_matrices(self) -> int:
        return len(self.data)

    def one(self, i: int) -> Segment:
        """Matrix i alone."""
        return dataclasses.replace(self, data=self.data[i : i + 1])

    def rows(self, begin: int, end: int) -> Segment:
        """Rows [begin, end) of one matrix in panels, alone: whole panels, but for the last."""
        panel = self.n_bytes_of(PANEL, self.k, self.format, self.layout)
        data = self.data[:, begin // PANEL * panel : -(-end // PANEL) * panel]
        return dataclasses.replace(self, n=end - begin, data=data)

    def pack(self, values: Array | Quantised, n_threads: int = 1) -> None:
        """Stores the rows of one matrix, in panels: bfloat16 [n, k], which are quantised as the format says,
        or rows in this format. For several matrices: `one`.
        """
        expect = partial(check, "pack")
        program = Program(n_threads)
        if isinstance(values, Quantised):
            expect(values.format == self.format and values.codes.shape == (self.n, self.k), f"{self.format.name} rows")
            parts = (values.codes, values.scale, values.least, values.outer)
            program.call(
                "deltic_pack_codes", *(p if p is None else np.ascontiguousarray(p) for p in parts), *self.arguments
            )
        else:
            expect(
                values.dtype == bfloat16 and values.flags.c_contiguous and values.size == self.n * self.k,
                f"contiguous bfloat16 values [{self.n}, {self.k}]",
            )
            program.call("deltic_pack", values, *self.arguments, int(self.format.name == "int4-symmetric"))
        program.run()

    def unpack(self) -> Array:
        """float32 [n_matrices, n, k]: the values that stand for the rows, to see what a format loses."""
        out = np.empty((self.n_matrices, self.n, self.k), np.float32)
        rows, count = np.arange(self.n, dtype=np.int32), np.array(self.n, np.int32)
        program = Program(1)
        for i, part in enumerate(out):
            program.call("deltic_embed", *self.one(i).arguments, rows, part, count, None)
        program.run()
        return out


def planes(n: int, k: int, format: WeightFormat) -> dict[str, tuple[int, int]]:
    """Parts of n rows in the rows layout, (first byte, bytes) by name, in their order: the codes by the bits
    that stand together (codes16, codes8, codes4, codes2, codes1), of a codebook index, high, codes1 (the
    signs) and book (`Codebook.planes`); then scale, least, outer.
    """
    if format.codes in CODEBOOKS:
        *of_rows, book = CODEBOOKS[format.codes].planes
        sizes = {name: n * k // 32 * size for name, size in zip(("index", "high", "codes1"), of_rows, strict=True)}
        sizes = {name: size for name, size in (sizes | {"book": book}).items() if size}
    else:
        names = {16: (16,), 8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}[int(format.bits)]
        sizes = {f"codes{bits}": n * k * bits // 8 for bits in names}
    if format.scales != "none":
        for name, size, dtype in zip(("scale", "least", "outer"), format.sizes(k), format.dtypes, strict=True):
            if size is not None and dtype is not None:
                sizes[name] = n * int(np.prod(size)) * np.dtype(dtype).itemsize
    at, found = 0, dict[str, tuple[int, int]]()
    for name, n_bytes in sizes.items():
        found[name] = at, n_bytes
        at += -(-n_bytes // _PLANE) * _PLANE
    return found


@dataclass(frozen=True)
class Matrix:
    """n_matrices of [n, k] (the experts of a layer, or one), packed: segments, one below the other; none of a
    matrix without rows, which another machine has.
    """

    n: int
    k: int
    segments: tuple[Segment, ...]

    @classmethod
    def empty(
        cls,
        n: int,
        k: int,
        format: WeightFormat | Sequence[tuple[int, WeightFormat]],
        layout: Layout = "panels",
        n_matrices: int = 1,
        make: Callable[[tuple[int, ...], DTypeLike], object] = zeros,
    ) -> Matrix:
        """Room for the matrices, of `make`. `pack` fills it. format: of all rows, or of each run of rows.

        Raises KernelError unless k is a multiple of 32.
        """
        check("matrix", k % 32 == 0, f"K a multiple of 32, found {k}")
        runs = [(n, format)] if isinstance(format, WeightFormat) else format
        check("matrix", sum(rows for rows, _ in runs) == n, f"runs of {n} rows in all")
        segments = (
            Segment(rows, k, f, layout, make((n_matrices, Segment.n_bytes_of(rows, k, f, layout)), np.uint8))
            for rows, f in runs
        )
        return cls(n, k, tuple(segments))

    @property
    def n_matrices(self) -> int:
        return self.segments[0].n_matrices if self.segments else 1

    @property
    def n_bytes(self) -> int:
        return sum(segment.data.nbytes for segment in self.segments)

    @property
    def whole(self) -> Segment:
        """The only segment, for an operator that reads one. Raises KernelError where there are several."""
        expect = partial(check, "matrix")
        expect(len(self.segments) == 1, f"rows in one format, found {', '.join(p.format.name for p in self.segments)}")
        return self.segments[0]

    def rows(self, begin: int, end: int) -> Matrix:
        """Rows [begin, end) of one matrix in panels, in the same memory. In its segment, begin is at a whole
        panel, and so is end, or it is the segment's.
        """
        segments, top = list[Segment](), 0
        for segment in self.segments:
            first, last = max(begin - top, 0), min(end - top, segment.n)
            if first < last:
                segments.append(segment.rows(first, last))
            top += segment.n
        return Matrix(end - begin, self.k, tuple(segments))

    def pack(self, values: Array, n_threads: int = 1) -> Matrix:
        """Stores bfloat16 values [n_matrices * n, k], in panels, each segment as its format says.

        Gives itself.
        """
        check(
            "pack",
            values.dtype == bfloat16 and values.size == self.n_matrices * self.n * self.k,
            f"contiguous bfloat16 values of {self.n_matrices} x [{self.n}, {self.k}]",
        )
        begin = 0
        for segment in self.segments:
            for i, rows in enumerate(values.reshape(self.n_matrices, self.n, self.k)):
                segment.one(i).pack(np.ascontiguousarray(rows[begin : begin + segment.n]), n_threads)
            begin += segment.n
        return self

    def unpack(self) -> Array:
        """float32 [n_matrices, n, k], as of a segment."""
        return np.concatenate([segment.unpack() for segment in self.segments], axis=1)


def row_bytes(k: int) -> int:
    """Bytes that one row of x takes when packed for a product, in whatever format (row_bytes in
    csrc/matrix.h).
    """
    return 2 * k
