"""The formats of a matrix's weights, and rows in such a format as a file holds them.

A weight is `scale * code + least` in float32: a code of few bits, and a scale (and least value) that a group
of weights along K shares. Every format that is published is one choice of codes and one of scales:

    codes    uint2 .. uint6   unsigned; without a least value 2^(bits - 1), half their range, is subtracted
             int8             signed
             iq4, e2m1        an index of 4 bits into a table of signed integers (of e2m1: twice its values)
             iq1, iq2, iq3    an index into a codebook: 8 or 4 weights, which have signs (`Codebook`)
             sign             a sign alone: 1 or -1
             e4m3             an 8-bit float
             bf16             the weight itself, no scale
    scales   float32, float16, bfloat16: the scale itself; with ".least": and the least value;
             with ".zero": and the code that stands for 0 (uint8, of int8 codes int8 as its bits)
             k                scale = outer * an int8; outer is float16, one for 256 weights
             k.least          scale = outer * a uint8, least = -outer' * a uint8
             k.eighth         an eighth of k: codebooks count in eighths
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
from pathlib import Path
from typing import Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check

Codes = Literal[
    "bf16", "int8", "uint4", "uint5", "uint6", "uint2", "uint3", "iq4", "e2m1", "e4m3", "iq1", "iq2_xxs", "iq2_xs",
    "iq2_s", "iq3_xxs", "iq3_s", "sign",
]  # fmt: skip
Scales = Literal[
    "none", "float32", "bfloat16.least", "float16", "float16.least", "float16.zero", "bfloat16", "bfloat16.zero",
    "k", "k.least", "e8m0", "e4m3", "k.eighth",
]  # fmt: skip

CODES: tuple[Codes, ...] = get_args(Codes)
SCALES: tuple[Scales, ...] = get_args(Scales)
"""Kinds of codes and of scales, in the order of the numbers that csrc/format.h gives them."""


@dataclass(frozen=True)
class Codebook:
    """2^bits entries of `width` weights each, as levels. An index of iq1 has one bit more: its offset. In
    panels it takes another, as one of iq2_s does: their entries are pairs of factors there (csrc/codebook.h).
    """

    bits: int
    width: int
    has_signs: bool = True

    @property
    def high_bits(self) -> int:
        """Bits of an index above the lower 8, with the offset."""
        return max(self.bits - 8, 0) + (not self.has_signs)

    @property
    def planes(self) -> tuple[int, int, int, int]:
        """Bytes of 32 weights in rows, on a GPU: of the lower 8 bits of indices, of the bits above, and of
        signs; and of the whole book, in pairs of levels.
        """
        entries = 32 // self.width if self.bits else 0
        return entries, -(-entries * self.high_bits // 8), 4 * self.has_signs, entries and self.width // 2 << self.bits


CODEBOOKS = {
    "iq1": Codebook(11, 8, has_signs=False), "iq2_xxs": Codebook(8, 8), "iq2_xs": Codebook(9, 8),
    "iq2_s": Codebook(10, 8), "iq3_xxs": Codebook(8, 4), "iq3_s": Codebook(9, 4), "sign": Codebook(0, 8),
}  # fmt: skip
"""ggml's, and the book of one entry. A code a byte is here: of the first weights of an entry the lower and
the upper byte of the index, and the signs, one bit a weight (`entries_of`).
"""

_BOOKS = np.fromfile(Path(__file__).with_name("codebooks.bin"), "<u2")
"""The entries of all books in the order of CODES: 8 levels of 2 bits, or 4 of 4. Source: ggml-common.h.
Behind them the factors of iq1's and iq2_s's, 16 and 8 products of 16 by 16 bytes that cover them.
"""


def _with_signs(*levels: int) -> tuple[int, ...]:
    padded = levels + (0,) * (8 - len(levels))
    return padded + tuple(-level for level in padded)


TABLES = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq1": (-7, 1, 9, 0, -9, -1, 7, 0) * 2,
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s"), _with_signs(8, 25, 43)),
    "iq3_xxs": _with_signs(8, 24, 40, 56, 72, 88, 104, 124),
    "iq3_s": _with_signs(8, 24, 40, 56, 72, 88, 104, 120),
    "sign": _with_signs(1),
}
"""Values that an index of 4 bits stands for. iq4: ggml's kvalues_iq4nl. e2m1: twice the values of the OCP FP4
format. Of a codebook the index is a level, and above it the sign, in iq1 the offset.
"""

FLOATS = ("bf16", "e4m3")
"""Codes that are floats themselves: they are multiplied as they are, with rows of floats."""

OUTER = 256
"""Weights along K that share an outer scale of k."""

BLOCK_ROWS = 128
"""Rows that share their scales in e4m3, as published and as --quantize makes it."""

_BITS: dict[str, float] = (
    {"bf16": 16, "int8": 8, "e4m3": 8, "iq4": 4, "e2m1": 4}
    | {f"uint{n}": n for n in range(2, 7)}
    | {
        name: ((8 if b.bits else 0) + b.high_bits + (name in ("iq1", "iq2_s"))) / b.width + b.has_signs
        for name, b in CODEBOOKS.items()
    }
)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class WeightFormat:
    """Codes, scales, and how many weights along K share a scale (group; 0: the whole row does). rows: of a
    matrix, from its first on, so many share their scales; each has these itself in memory.
    """

    name: str
    codes: Codes
    scales: Scales
    group: int
    rows: int = 1

    @cached_property
    def bits(self) -> float:
        """Bits of a code: of a codebook a share of its index, and the sign."""
        return _BITS[self.codes]

    @property
    def has_least(self) -> bool:
        """True if weights are a multiple of the scale above something else than 0."""
        return self.scales.endswith((".least", ".zero"))

    @property
    def zero(self) -> int:
        """Value that is subtracted from codes."""
        return 0 if self.has_least or not self.codes.startswith("uint") else 1 << (int(self.codes[-1]) - 1)

    @property
    def dtypes(self) -> tuple[DTypeLike, DTypeLike | None, DTypeLike | None]:
        """Types of the scales, the least values or zeros, and the outer scales."""
        kind, _, with_ = self.scales.partition(".")
        if kind == "k":
            return (np.uint8, np.uint8, np.float16) if with_ == "least" else (np.int8, None, np.float16)
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
        by_k = (2,) if self.scales == "e4m3" else (-(-k // OUTER), 2 if self.has_least else 1)
        return groups, None if least is None else groups, None if outer is None else by_k


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
            scale = outer[..., 0] * scale * f32(0.125 if f.scales == "k.eighth" else 1)
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
            indices = _indices(f.codes, self.codes) if f.codes in CODEBOOKS else self.codes
            codes = np.array(TABLES[f.codes], f32)[indices]
        else:
            codes = self.codes.astype(f32) - f32(f.zero)
        scale, least = self.scales()
        product: Array = np.repeat(scale, f.group or k, axis=1)[:, :k] * codes
        return product if least is None else product + np.repeat(least, f.group or k, axis=1)[:, :k]


def book_of(codes: str) -> Array:
    """uint8 [2^bits, width]: the levels of a codebook's entries."""
    book = CODEBOOKS[codes]
    first = sum(1 << other.bits for name, other in CODEBOOKS.items() if CODES.index(name) < CODES.index(codes))
    if not book.bits:
        return np.zeros((1, book.width), np.uint8)
    bits = 16 // book.width
    levels = _BOOKS[first : first + (1 << book.bits), None] >> np.arange(0, 16, bits).astype(np.uint16) & (
        (1 << bits) - 1
    )
    return levels.astype(np.uint8)


def entries_of(codes: str, index: Array | None, signs: Array | None) -> Array:
    """uint8 [..., K]: a codebook's codes as Quantised has them, of indices uint16 [..., K / width] and signs
    uint8 [..., K / 8], 1 where a weight is negative.
    """
    book = CODEBOOKS[codes]
    if signs is not None and book.width == 4:
        signs = np.stack([signs & 15, signs >> 4], axis=-1).reshape(*signs.shape[:-1], 2 * signs.shape[-1])
    some = signs if index is None else index
    assert some is not None
    entries = np.zeros((*some.shape, book.width), np.uint8)
    if index is not None:
        entries[..., 0], entries[..., 1] = index & 0xFF, index >> 8
    if signs is not None:
        entries[..., 2] = signs
    return entries.reshape(*some.shape[:-1], some.shape[-1] * book.width)


def codes_in(codes: Codes, any: Array) -> Array:
    """uint8 [n, K]: the bytes without the bits that no code has."""
    if codes not in CODEBOOKS:
        return any & np.uint8((1 << min(int(_BITS[codes]), 8)) - 1)
    found = any.copy()
    found.reshape(len(any), -1, CODEBOOKS[codes].width)[..., 1] &= (1 << CODEBOOKS[codes].high_bits) - 1
    return found


def _indices(codes: str, entries: Array) -> Array:
    """uint8 [n, K]: indices into the table of a codebook, of its entries [n, K]."""
    book = CODEBOOKS[codes]
    each = entries.reshape(len(entries), entries.shape[1] // book.width, book.width)
    index = each[..., 0] | each[..., 1].astype(np.uint16) << 8
    levels = book_of(codes)[index & ((1 << book.bits) - 1)]
    if book.has_signs:
        above = (each[..., 2:3] >> np.arange(book.width, dtype=np.uint8) & 1) << 3
    else:
        above = (index >> book.bits << 2).astype(np.uint8)[..., None]
    found: Array = (levels | above).reshape(entries.shape)
    return found


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
        ("IQ1_S", "iq1", "k.eighth", 32),
        ("IQ1_M", "iq1", "k.eighth", 16),
        ("IQ2_XXS", "iq2_xxs", "k.eighth", 32),
        ("IQ2_XS", "iq2_xs", "k.eighth", 16),
        ("IQ2_S", "iq2_s", "k.eighth", 16),
        ("IQ3_XXS", "iq3_xxs", "k.eighth", 32),
        ("IQ3_S", "iq3_s", "k.eighth", 32),
        ("TQ1_0", "uint2", "float16", 256),
        ("TQ2_0", "uint2", "float16", 256),
        ("Q2_0", "uint2", "float16", 64),
        ("Q1_0", "sign", "float16", 128),
        # e4m3 with scales of each row: of 128 columns, or one (of a tensor: the same for every row).
        ("fp8-group", "e4m3", "float32", 128),
        ("fp8-row", "e4m3", "float32", 0),
    ]
    # Groups of integers, of compressed-tensors, AWQ and GPTQ: int4-g128, or int4-g128-bfloat16.zero, ...
    for bits, codes in ((4, "uint4"), (8, "int8")):
        for group in (32, 64, 128):
            for scales in ("float16", "bfloat16", "float16.zero", "bfloat16.zero"):
                named.append((f"int{bits}-g{group}-{scales}", codes, scales, group))  # type: ignore[arg-type]
    return {of[0]: WeightFormat(*of, rows=BLOCK_ROWS if of[0] == "fp8" else 1) for of in named}


WEIGHT_FORMATS = _formats()
"""Weight formats by name."""
