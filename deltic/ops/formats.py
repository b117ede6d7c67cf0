"""The formats of a matrix's weights, and rows in such a format as a file holds them.

A weight is `scale * code + least` in float32: a code of few bits, and a scale (and least value) that a group
of weights along K shares. Every format that is published is one choice of codes and one of scales:

    codes    uint2 .. uint6   unsigned; without a least value 2^(bits - 1), half their range, is subtracted
             int8             signed
             iq4, e2m1        an index of 4 bits into a table of signed integers (of e2m1: twice its values)
             e4m3             an 8-bit float
             bf16             the weight itself, no scale
    scales   float32, float16, bfloat16: the scale itself; with ".least": and the least value;
             with ".zero": and the code that stands for 0 (uint8, of int8 codes int8 as its bits)
             k                scale = outer * an int8; outer is float16, one for 256 weights
             k.least          scale = outer * a uint8, least = -outer' * a uint8
             e8m0             2^(byte - 128): half of what the byte says, since e2m1 counts in halves
             e4m3             an 8-bit float * outer / outer', float32, of the row, halved likewise

In float32 each scale, least value and weight above is rounded at most once, as the published packages do, so
that `values` equals their dequantisation to the bit (tests/null/test_gguf.py and test_quantised_files.py say
which and how).

Sources: ggml's quantised blocks (llama.cpp, ggml-common.h), the OCP Microscaling specification (MXFP4), the
compressed-tensors, AutoAWQ, GPTQ and ModelOpt checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check

Codes = Literal["bf16", "int8", "uint4", "uint5", "uint6", "uint2", "uint3", "iq4", "e2m1", "e4m3"]
Scales = Literal[
    "none", "float32", "bfloat16.least", "float16", "float16.least", "float16.zero", "bfloat16", "bfloat16.zero",
    "k", "k.least", "e8m0", "e4m3",
]  # fmt: skip

CODES: tuple[Codes, ...] = ("bf16", "int8", "uint4", "uint5", "uint6", "uint2", "uint3", "iq4", "e2m1", "e4m3")
SCALES: tuple[Scales, ...] = (
    "none", "float32", "bfloat16.least", "float16", "float16.least", "float16.zero", "bfloat16", "bfloat16.zero",
    "k", "k.least", "e8m0", "e4m3",
)  # fmt: skip
"""Kinds of scales, in the order of the numbers that csrc/matrix.h gives them."""

TABLES = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""Values that an index stands for. iq4: ggml's kvalues_iq4nl. e2m1: twice the values of the OCP FP4 format.
"""

FLOATS = ("bf16", "e4m3")
"""Codes that are floats themselves: they are multiplied as they are, with rows of floats."""

OUTER = 256
"""Weights along K that share an outer scale of k."""

BLOCK_ROWS = 128
"""Rows that share their scales in e4m3, as published and as --quantize makes it."""

_BITS = {"bf16": 16, "int8": 8, "e4m3": 8, "iq4": 4, "e2m1": 4} | {f"uint{n}": n for n in range(2, 7)}
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class WeightFormat:
    """Codes, scales, and how many weights along K share a scale (group; 0: the whole row does)."""

    name: str
    codes: Codes
    scales: Scales
    group: int

    @cached_property
    def bits(self) -> int:
        """Bits of a code."""
        return _BITS[self.codes]

    @property
    def has_least(self) -> bool:
        """True if weights are a multiple of the scale above something else than 0."""
        return self.scales.endswith((".least", ".zero"))

    @property
    def zero(self) -> int:
        """Value that is subtracted from codes."""
        return 0 if self.has_least or not self.codes.startswith("uint") else 1 << (self.bits - 1)

    @property
    def dtypes(self) -> tuple[DTypeLike, DTypeLike | None, DTypeLike | None]:
        """Types of the scales, the least values or zeros, and the outer scales."""
        kind, _, with_ = self.scales.partition(".")
        if kind == "k":
            return (np.uint8, np.uint8, np.float16) if with_ else (np.int8, None, np.float16)
        if kind in ("e8m0", "e4m3"):
            return np.uint8, None, np.float32 if kind == "e4m3" else None
        number = bfloat16 if kind == "bfloat16" else np.dtype(kind)
        return number, {"": None, "least": number, "zero": np.uint8}[with_], None

    def n_groups(self, k: int) -> int:
        return -(-k // self.group) if self.group else 1

    def sizes(self, k: int) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
        """Sizes of one row's scales, least values and outer scales."""
        _, least, outer = self.dtypes
        groups = (self.n_groups(k),)
        by_k = {"k": (-(-k // OUTER), 1), "k.least": (-(-k // OUTER), 2), "e4m3": (2,)}
        return groups, None if least is None else groups, None if outer is None else by_k[self.scales]


@dataclass(frozen=True)
class Quantised:
    """n rows of k weights as a file holds them, one code a byte.

    codes: uint8 [n, k] (int8 and e4m3: their bits); scale [n, groups], least or None, of the same size;
    outer: k: float16 [n, k / 256, 1 or 2] (of scale and of least), e4m3: float32 [n, 2] (multiplied with,
    then divided by). dtypes: those of the format.
    """

    format: WeightFormat
    codes: Array
    scale: Array
    least: Array | None = None
    outer: Array | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Array | slice) -> Quantised:
        """Returns the rows asked for, in the order given."""
        least, outer = (None if part is None else part[rows] for part in (self.least, self.outer))
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], least=least, outer=outer)

    def columns(self, runs: Sequence[tuple[int, int]]) -> Quantised:
        """Returns ranges of columns, one behind another, of whole groups. Raises KernelError for ranges of
        others.
        """
        group, k = self.format.group, self.codes.shape[1]
        outer = OUTER if self.format.scales.startswith("k") else 0
        for at in {at for run in runs for at in run} - {k}:
            check(
                "weights", at % (outer or group or 1) == 0, f"columns cut at multiples of {outer or group}, not at {at}"
            )

        def cut(part: Array | None, width: int) -> Array | None:
            if part is None or not width:
                return part
            return np.concatenate([part[:, first // width : -(-last // width)] for first, last in runs], axis=1)

        scales = (cut(self.scale, group), cut(self.least, group), cut(self.outer, outer))
        codes = cut(self.codes, 1)
        assert codes is not None and scales[0] is not None
        return replace(self, codes=codes, scale=scales[0], least=scales[1], outer=scales[2])

    def zeroed(self) -> Quantised:
        """Returns as many weights, all of them 0."""
        codes, least = np.full_like(self.codes, self.format.zero), self.least
        outer = np.zeros_like(self.outer) if self.format.scales.startswith("k") else self.outer
        zeros = None if least is None else np.zeros_like(least)
        return replace(self, codes=codes, scale=np.zeros_like(self.scale), least=zeros, outer=outer)

    @staticmethod
    def joined(runs: Sequence[Quantised]) -> Quantised:
        """Rows of one format, one run below the other."""
        if len(runs) == 1:
            return runs[0]
        first = runs[0]
        parts = {name: [getattr(rows, name) for rows in runs] for name in ("codes", "scale", "least", "outer")}
        return Quantised(first.format, **{n: np.concatenate(p) for n, p in parts.items() if p[0] is not None})

    def scales(self) -> tuple[Array, Array | None]:
        """float32 [n, groups]: the scale and, where the format has one, the least value of each group."""
        f32, f = np.float32, self.format
        if f.scales == "e8m0":
            # 2^(byte - 128) by its bits; 2^-127 and 2^-128 have no exponent of their own
            e = self.scale.astype(np.int32)
            bits = np.where(e < 2, 0x00200000 << e, np.maximum(e - 1, 0) << 23)
            return bits.astype(np.int32).view(f32), None
        if f.scales == "e4m3":
            assert self.outer is not None
            scale = self.scale.view(_E4M3).astype(f32) * self.outer[:, :1] / self.outer[:, 1:]
            return scale * f32(0.5), None
        scale = self.scale.astype(f32)
        least = None if self.least is None else self.least.astype(f32)
        if f.scales.startswith("k"):
            assert self.outer is not None
            outer = np.repeat(self.outer.astype(f32), OUTER // f.group, axis=1)[:, : scale.shape[1]]
            scale = outer[..., 0] * scale
            return scale, None if least is None else -(outer[..., 1] * least)
        if f.scales.endswith(".zero"):
            assert self.least is not None
            zero = self.least.view(np.int8) if f.codes == "int8" else self.least
            least = -(scale * zero.astype(f32))
        return scale, least

    def values(self) -> Array:
        """float32 [n, k]: what the rows stand for."""
        k = self.codes.shape[1]
        f, f32 = self.format, np.float32
        if f.codes == "int8":
            codes = self.codes.view(np.int8).astype(f32)
        elif f.codes == "e4m3":
            codes = self.codes.view(_E4M3).astype(f32)
        elif f.codes in TABLES:
            codes = np.array(TABLES[f.codes], f32)[self.codes]
        else:
            codes = self.codes.astype(f32) - f32(f.zero)
        scale, least = self.scales()
        product: Array = np.repeat(scale, f.group or k, axis=1)[:, :k] * codes
        return product if least is None else product + np.repeat(least, f.group or k, axis=1)[:, :k]


def _formats() -> dict[str, WeightFormat]:
    named: list[tuple[str, Codes, Scales, int]] = [
        ("bf16", "bf16", "none", 0),
        # What --quantize makes of bfloat16.
        ("int8", "int8", "float32", 128),
        ("int4", "uint4", "bfloat16.least", 64),
        ("int4-symmetric", "uint4", "bfloat16.least", 64),
        ("fp8", "e4m3", "float32", 128),
        # ggml's, by its names.
        ("Q8_0", "int8", "float16", 32),
        ("Q4_0", "uint4", "float16", 32),
        ("Q4_1", "uint4", "float16.least", 32),
        ("Q5_0", "uint5", "float16", 32),
        ("Q5_1", "uint5", "float16.least", 32),
        ("Q2_K", "uint2", "k.least", 16),
        ("Q3_K", "uint3", "k", 16),
        ("Q4_K", "uint4", "k.least", 32),
        ("Q5_K", "uint5", "k.least", 32),
        ("Q6_K", "uint6", "k", 16),
        ("IQ4_NL", "iq4", "float16", 32),
        ("IQ4_XS", "iq4", "k", 32),
        ("MXFP4", "e2m1", "e8m0", 32),
        ("NVFP4", "e2m1", "e4m3", 16),
        # e4m3 with one scale a row (or a tensor: the same for every row).
        ("fp8-row", "e4m3", "float32", 0),
    ]
    # Groups of integers, of compressed-tensors, AWQ and GPTQ: int4-g128, or int4-g128-bfloat16.zero, ...
    for bits, codes in ((4, "uint4"), (8, "int8")):
        for group in (32, 64, 128):
            for scales in ("float16", "bfloat16", "float16.zero", "bfloat16.zero"):
                named.append((f"int{bits}-g{group}-{scales}", codes, scales, group))  # type: ignore[arg-type]
    return {name: WeightFormat(name, codes, scales, group) for name, codes, scales, group in named}


WEIGHT_FORMATS = _formats()
"""Weight formats by name."""
