"""The blocks of ggml's quantised types, as codes and scales (ops/formats.py).

Sources: llama.cpp's ggml-common.h and ggml-quants.c; of Q1_0 and Q2_0, which the gguf package does not
dequantise, nothing else. `decoded` reads any number of rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deltic.models.fields import CheckpointError
from deltic.ops.arrays import Array
from deltic.ops.formats import CODEBOOKS, WEIGHT_FORMATS, Quantised, entries_of

BLOCKS: dict[str, list[tuple[str, str, int]]] = {
    "Q8_0": [("d", "<f2", 1), ("qs", "i1", 32)],
    "Q4_0": [("d", "<f2", 1), ("qs", "u1", 16)],
    "Q4_1": [("d", "<f2", 1), ("m", "<f2", 1), ("qs", "u1", 16)],
    "Q5_0": [("d", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)],
    "Q5_1": [("d", "<f2", 1), ("m", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)],
    "Q2_K": [("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2", 2)],
    "Q3_K": [("qh", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2", 1)],
    "Q4_K": [("d", "<f2", 2), ("scales", "u1", 12), ("qs", "u1", 128)],
    "Q5_K": [("d", "<f2", 2), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
    "Q6_K": [("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2", 1)],
    "IQ4_NL": [("d", "<f2", 1), ("qs", "u1", 16)],
    "IQ4_XS": [("d", "<f2", 1), ("scales_h", "<u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128)],
    "MXFP4": [("e", "u1", 1), ("qs", "u1", 16)],
    "NVFP4": [("e", "u1", 4), ("qs", "u1", 32)],
    "Q1_0": [("d", "<f2", 1), ("signs", "u1", 16)],
    "Q2_0": [("d", "<f2", 1), ("qs", "u1", 16)],
    "TQ1_0": [("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2", 1)],
    "TQ2_0": [("qs", "u1", 64), ("d", "<f2", 1)],
    "IQ1_S": [("d", "<f2", 1), ("qs", "u1", 32), ("qh", "<u2", 8)],
    "IQ1_M": [("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)],
    "IQ2_XXS": [("d", "<f2", 1), ("qs", "<u4", 16)],
    "IQ2_XS": [("d", "<f2", 1), ("qs", "<u2", 32), ("scales", "u1", 8)],
    "IQ2_S": [("d", "<f2", 1), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)],
    "IQ3_XXS": [("d", "<f2", 1), ("qs", "u1", 64), ("signs", "<u4", 8)],
    "IQ3_S": [("d", "<f2", 1), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
}
"""The parts of a block in their order: name, type, how many."""

_RUN = {"Q2_K": 32, "Q3_K": 32, "Q4_K": 32, "Q5_K": 32, "Q6_K": 64, "TQ2_0": 32, "Q2_0": 1, "NVFP4": 8}
"""Bytes of codes whose lowest bits are consecutive weights, before those of the next bits come; else 16."""

_TWO_BITS = ("Q2_K", "Q3_K", "TQ2_0", "Q2_0")

_TERNARY = ("TQ1_0", "TQ2_0", "Q2_0")
"""Types whose weights are d (code - 1). uint2 means code - 2: 3 - code with -d is the same."""


def decoded(type: str, data: Array, where: str, factor: float = 1.0) -> Quantised:
    """Codes and scales of rows of blocks, uint8 [n, bytes of a row]. factor: float32 that NVFP4's scales are
    multiplied by.

    Raises CheckpointError, with `where`, for scales that are not finite and codes that no such type has.
    """
    blocks = np.ascontiguousarray(data).view([(name, kind, (n,)) for name, kind, n in BLOCKS[type]])
    format, parts = WEIGHT_FORMATS[type], {name for name, *_ in BLOCKS[type]}
    floats = [_outer_of_iq1_m(blocks)] if type == "IQ1_M" else [blocks[name] for name in ("d", "m") if name in parts]
    exponents = [blocks["e"]] if "e" in parts else []
    most = 0x7E if type == "NVFP4" else 0xFE
    if not all(np.isfinite(each).all() for each in floats) or any((each > most).any() for each in exponents):
        raise CheckpointError(f"{where} has scales that are not finite; the file is damaged, get it anew")
    is_k = format.scales.startswith("k")
    inner = _inner_scales(type, blocks) if is_k else floats + exponents
    if type in _TERNARY:
        inner = [-floats[0]]
    codes = _entries(type, blocks) if format.codes in CODEBOOKS else _codes(type, blocks)
    if type == "TQ2_0" and not codes.all():
        raise CheckpointError(f"{where} has codes that TQ2_0 has not; the file is damaged, get it anew")
    flat = [np.ascontiguousarray(part.reshape(len(data), math.prod(part.shape[1:]))) for part in (codes, *inner)]
    outer = np.ascontiguousarray(floats[0]) if is_k else None
    if type == "NVFP4":
        outer = np.tile(np.array([factor, 1], np.float32), (len(data), 1))
    return Quantised(format, flat[0], flat[1], flat[2] if len(flat) > 2 else None, outer)


def _codes(type: str, blocks: Array) -> Array:
    """uint8 [n, blocks, weights of a block]."""
    low = blocks["qs"]
    if type == "Q8_0":
        return np.ascontiguousarray(low).view(np.uint8)
    if type == "TQ1_0":
        runs = (low[..., :32], 5), (low[..., 32:], 5), (blocks["qh"], 4)
        digits = [run * np.uint8(3**i) for run, n in runs for i in range(n)]
        return 3 - (np.concatenate(digits, axis=-1).astype(np.uint16) * 3 >> 8).astype(np.uint8)
    n_low = 2 if type in _TWO_BITS else 4
    codes = _planes(low, _RUN.get(type, 16), n_low)
    if type in ("Q5_0", "Q5_1"):
        codes |= np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4
    elif type in ("Q3_K", "Q5_K", "Q6_K"):
        codes |= _planes(blocks["qh"], 32, 2 if type == "Q6_K" else 1, up=n_low)
    return 3 - codes if type in _TERNARY else codes


def _entries(type: str, blocks: Array) -> Array:
    """uint8 [n, blocks, weights of a block]: indices into the type's codebook and signs, as `entries_of` puts
    them together.
    """
    signs: Array | None = None
    if type == "Q1_0":
        return entries_of("sign", None, ~blocks["signs"])
    index: Array = blocks["qs"].astype(np.uint16)
    if type == "IQ1_S":
        high = blocks["qh"]
        index |= _spread(high, (0, 3, 6, 9), 7) << 8 | np.repeat(high >> 15, 4, axis=-1) << 11
    elif type == "IQ1_M":
        high = _spread(blocks["qh"], (0, 4), 15)
        index |= (high & 7) << 8 | high >> 3 << 11
    elif type == "IQ2_XXS":
        index = np.ascontiguousarray(blocks["qs"][..., ::2]).view(np.uint8).astype(np.uint16)
        signs = _seven_signs(_spread(blocks["qs"][..., 1::2], (0, 7, 14, 21), 127))
    elif type == "IQ2_XS":
        index, signs = blocks["qs"] & np.uint16(511), _seven_signs(blocks["qs"] >> 9)
    elif type == "IQ2_S":
        index |= _spread(blocks["qh"], (0, 2, 4, 6), 3) << 8
        signs = blocks["signs"]
    elif type == "IQ3_XXS":
        signs = _seven_signs(_spread(blocks["signs"], (0, 7, 14, 21), 127))
    else:
        index |= _spread(blocks["qh"], range(8), 1) << 8
        signs = blocks["signs"]
    return entries_of(WEIGHT_FORMATS[type].codes, index, signs)


def _spread(words: Array, shifts: Sequence[int], mask: int) -> Array:
    """uint16 [..., n * shifts]: some bits of each word from each shift on."""
    found: Array = words[..., None] >> np.array(shifts, words.dtype) & words.dtype.type(mask)
    return found.reshape((*words.shape[:-1], words.shape[-1] * len(shifts))).astype(np.uint16)


def _seven_signs(signs: Array) -> Array:
    """uint8: the signs of 8 weights, of those of 7. The eighth makes the number of negative ones even."""
    parity: Array = signs ^ signs >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    all_signs: Array = (signs | (parity & 1) << 7).astype(np.uint8)
    return all_signs


def _outer_of_iq1_m(blocks: Array) -> Array:
    """float16 [n, blocks, 1]: four bits in each of the words with the scales."""
    nibbles = blocks["scales"] >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    return np.bitwise_or.reduce(nibbles, axis=-1, keepdims=True).view(np.float16)


def _planes(packed: Array, run: int, n_bits: int, up: int = 0) -> Array:
    """Values of n_bits out of bytes, shifted up by some bits: of each `run` of bytes first all lowest bits,
    then all next ones, and so on.
    """
    n, n_blocks, size = packed.shape
    width = 8 if run % 8 == 0 else run  # bytes that are shifted at once
    words = np.ascontiguousarray(packed).view(f"u{width}").reshape(-1, run // width)
    wide, mask = words.dtype.type, int.from_bytes(bytes([(1 << n_bits) - 1]) * width, "little")
    values = np.empty((len(words), 8 // n_bits, run // width), wide)
    for i in range(8 // n_bits):
        plane = words >> wide(i * n_bits)
        plane &= wide(mask)
        np.left_shift(plane, wide(up), out=values[:, i])
    return values.view(np.uint8).reshape(n, n_blocks, size * (8 // n_bits))


def _inner_scales(type: str, blocks: Array) -> list[Array]:
    """The integer scales of k formats and, where they have them, least values, [n, blocks, groups of a
    block] each.
    """
    if type == "IQ4_XS":
        high = blocks["scales_h"] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
        scale = _planes(blocks["scales_l"], 1, 4) | high.astype(np.uint8) << 4
        return [scale.view(np.int8) - np.int8(32)]
    if type in ("IQ2_XXS", "IQ3_XXS"):
        four = blocks["qs"][..., 1::2] if type == "IQ2_XXS" else blocks["signs"]
        return [_odd(four >> 28)]
    if type == "IQ1_S":
        return [_odd(blocks["qh"] >> 12 & 7)]
    packed = blocks["scales"]
    if type == "IQ1_M":
        return [_odd(_spread(packed, (0, 3, 6, 9), 7))]
    if type in ("IQ2_XS", "IQ2_S", "IQ3_S"):
        return [_odd(_spread(packed, (0, 4), 15))]
    if type == "Q6_K":
        return [packed]
    if type == "Q2_K":
        return [packed & np.uint8(15), packed >> np.uint8(4)]
    if type == "Q3_K":
        scale = _planes(packed[..., :8], 8, 4) | _planes(packed[..., 8:], 4, 2, up=4)
        return [scale.view(np.int8) - np.int8(32)]
    # Q4_K and Q5_K: 6 bits each. Bytes 0 to 3 are scales 0 to 3, bytes 4 to 7 least values 0 to 3; the others
    # have their lower bits in bytes 8 to 11, and their upper two above those of the first.
    first, rest = packed[..., :8], packed[..., 8:]
    last = np.concatenate([rest & np.uint8(15), rest >> np.uint8(4)], axis=-1) | first >> np.uint8(2) & np.uint8(48)
    first = first & np.uint8(63)
    return [np.concatenate([first[..., i : i + 4], last[..., i : i + 4]], axis=-1) for i in (0, 4)]


def _odd(scales: Array) -> Array:
    """int8: 2 s + 1."""
    return (2 * scales + 1).astype(np.int8)
