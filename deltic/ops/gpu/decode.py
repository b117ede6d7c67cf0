"""Weights in any format as a GPU's memory holds them: where the parts stand, how a kernel reads a block of
them, and the values they stand for. operands.py multiplies them.

A weight is `scale * code + least` in float32, to the bit as `Quantised.values` (ops/formats.py) has it.

Rows in memory: the parts stand where `planes` (ops/matrix.py) says. Codes stand in elements of 8, those that
one thread holds in a tile of the tensor cores: code j of element t is of its 32 columns
2 t + j % 2 + 8 (j / 2 % 2) + 16 (j / 4). An element of b bits a code has 8 b bits:

    codesB        [n, K / 32, 4]: codes 0, 2, 4, 6 from bit 0 on, codes 1, 3, 5, 7 from bit 4 b on; so two
                  neighbours of a row are the halves of a word, once it is shifted and masked
    codes8        bytes 0, 2, 1, 3, 4, 6, 5, 7 with the sign bit flipped; e4m3 in the order of columns
    index, high   of codebooks, [n, K / 32]: the bytes of a word's entries, and their higher bits side by side
    codes1        of codebooks the signs
    book          of each matrix: the levels of a pair of columns in a byte, [entries, width / 2]. From index
                  and book an element of 4-bit codes is made, which stand for values of TABLES
    scale, least  [groups, n]
    outer         of k [K / 256, 1 or 2, n]; of e4m3 [2, n], divided by the power of 2 that
                  makes the first 0.5 .. 1

so that a tile's scales are neighbours.

A kernel takes the address of the first matrix (`address`: of bf16 a pointer to bfloat16, else to bytes; the
next begins `matrix_elements` behind it), its rows n and width k, and the constants of its format
(`constants`). Then

    w = rows_from(p_w, o_row, first_k, n, k, BLOCK_K, CODES, SCALES, GROUP)       before the loop over K
    block = load_block(w, i_k, BLOCK_K, CODES, SCALES, GROUP)                     in it: i_k = 0, BLOCK_K, ...

where `load_block` is `load_codes` + `load_scales`, so that a kernel can fetch the scales of some blocks ahead
(`load_more_scales`): Triton puts the loads of codes into its pipeline, but few of the smaller ones, and what
is fetched for the next turn of a loop is waited for at the end of this one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops import formats
from deltic.ops.formats import WeightFormat
from deltic.ops.gpu.chip import converts_e4m3
from deltic.ops.gpu.launch import INTERPRETED
from deltic.ops.matrix import Segment

_INTERPRETED = tl.constexpr(INTERPRETED)

# Numbers, not names: Triton takes a constant "int8" for a type when it reads a kernel's arguments again.
BF16, E4M3, INT8 = (tl.constexpr(formats.CODES.index(name)) for name in ("bf16", "e4m3", "int8"))
E8M0, E4M3_SCALE, K_EIGHTH = (tl.constexpr(formats.SCALES.index(name)) for name in ("e8m0", "e4m3", "k.eighth"))


def constants(format: WeightFormat) -> dict[str, int]:
    """CODES, SCALES and GROUP of a kernel that reads weights in this format."""
    codes, scales = formats.CODES.index(format.codes), formats.SCALES.index(format.scales)
    return {"CODES": codes, "SCALES": scales, "GROUP": format.group}


def address(segment: Segment, data: Tensor | None = None) -> Tensor:
    """Returns the memory that a kernel takes as p_w."""
    memory: Tensor = segment.data if data is None else data
    return memory.view(torch.bfloat16) if segment.format.codes == "bf16" else memory


@triton.constexpr_function
def k_block(k: int, most: int = 128) -> int:
    """The largest BLOCK_K up to `most`, a power of two, for k columns, a multiple of 32."""
    return next(block for block in (256, 128, 64, 32) if block <= most and k % block == 0)


# Functions of the constants, when a kernel is compiled.


@triton.constexpr_function
def low_bits(codes):
    """Bits of a code in the first plane."""
    return {"int8": 8, "e4m3": 8, "uint2": 2, "uint3": 2}.get(formats.CODES[codes], 4)


@triton.constexpr_function
def high_bits(codes):
    """Bits of a code in the second plane. 0 if there is none."""
    return {"uint3": 1, "uint5": 1, "uint6": 2}.get(formats.CODES[codes], 0)


@triton.constexpr_function
def is_book(codes):
    return formats.CODES[codes] in formats.CODEBOOKS


@triton.constexpr_function
def _book(codes):
    """Bits of an index, of its high part, weights of an entry; and types of 32 columns' indices, low and
    high.
    """
    book = formats.CODEBOOKS[formats.CODES[codes]]
    index, high, *_ = book.planes
    return book.bits, book.high_bits, book.width, _word(index), _word(high)


@triton.constexpr_function
def _word(n_bytes):
    return tl.dtype({8: "int64", 4: "int32", 2: "uint16"}.get(n_bytes, "uint8"))


@triton.constexpr_function
def _book_bytes(codes, part):
    return formats.CODEBOOKS[formats.CODES[codes]].planes[part]


@triton.constexpr_function
def has_table(codes):
    return formats.CODES[codes] in formats.TABLES


@triton.constexpr_function
def has_least(scales):
    """Returns whether there are least values or zeros."""
    return formats.SCALES[scales].endswith((".least", ".zero"))


@triton.constexpr_function
def has_zero(scales):
    return formats.SCALES[scales].endswith(".zero")


@triton.constexpr_function
def _is_k(scales):
    return formats.SCALES[scales].startswith("k")


@triton.constexpr_function
def _n_outer(scales):
    """Outer scales of a row, or of 256 weights of it."""
    return {"k": 1, "k.eighth": 1, "k.least": 2, "e4m3": 2}.get(formats.SCALES[scales], 0)


@triton.constexpr_function
def zero_of(codes, scales):
    """Value that is subtracted from every code, int8's as it stands in memory."""
    name = formats.CODES[codes]
    if name == "int8":
        return 128
    return 0 if has_least(scales) or not name.startswith("uint") else 1 << (int(name[-1]) - 1)


@triton.constexpr_function
def _element(bits):
    """Type of an element that holds 8 codes of so many bits."""
    return tl.dtype({8: "int64", 4: "int32", 2: "uint16", 1: "uint8"}[bits])


@triton.constexpr_function
def first_bit(j, bits):
    """Position of the first bit of code j in an element of 8."""
    if bits == 8:
        return 32 * (j // 4) + 8 * (0, 2, 1, 3)[j % 4]
    return bits * (j // 2 + j % 2 * 4)


@triton.constexpr_function
def _scale_type(scales):
    """Type of the scales in memory, in the order of formats.SCALES."""
    names = "int8 fp32 bf16 fp16 fp16 fp16 bf16 bf16 int8 uint8 uint8 uint8 int8"
    return tl.dtype(names.split()[scales])


@triton.constexpr_function
def _least_type(codes, scales):
    zero = "int8" if formats.CODES[codes] == "int8" else "uint8"
    return tl.dtype(zero) if has_zero(scales) else _scale_type(scales)


@triton.constexpr_function
def table_words(codes):
    """The bytes of a table, 128 more than its integers, four to an int32."""
    integers = formats.TABLES[formats.CODES[codes]]
    return tuple(
        int.from_bytes(bytes(x + 128 for x in integers[i : i + 4]), "little", signed=True) for i in (0, 4, 8, 12)
    )


# Where the parts are, and what memory holds.


@triton.jit
def _plane(n_bytes):
    """Bytes with what is free behind them."""
    return (n_bytes + 255) // 256 * 256


@triton.jit
def _planes_of_book(n, k, CODES: tl.constexpr):
    """int64: where the high bits of indices, the signs and the book begin, and the end."""
    units = tl.cast(n, tl.int64) * (k // 32)
    high = _plane(units * _book_bytes(CODES, 0))
    signs = high + _plane(units * _book_bytes(CODES, 1))
    book = signs + _plane(units * _book_bytes(CODES, 2))
    return high, signs, book, book + _plane(_book_bytes(CODES, 3))


@triton.jit
def _planes(n, k, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """int64: where the high bits of codes, the scales, the least values and the outer scales begin, and the
    end.
    """
    n = tl.cast(n, tl.int64)
    n_groups = n * (tl.cdiv(k, GROUP) if GROUP else 1)
    high = _plane(n * k * low_bits(CODES) // 8)
    scale = high + _plane(n * k * high_bits(CODES) // 8)
    if is_book(CODES):
        high, _, _, scale = _planes_of_book(n, k, CODES)
    least = scale + _plane(n_groups * (_scale_type(SCALES).primitive_bitwidth // 8))
    outer = least
    if has_least(SCALES):
        outer += _plane(n_groups * (_least_type(CODES, SCALES).primitive_bitwidth // 8))
    end = outer
    if _is_k(SCALES):
        end += _plane(n * tl.cdiv(k, 256) * 2 * _n_outer(SCALES))
    elif SCALES == E4M3_SCALE:
        end += _plane(n * 8)
    return high, scale, least, outer, end


@triton.jit
def matrix_elements(n, k, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """int64: elements of p_w from one matrix [n, k] to the next."""
    if CODES == BF16:
        return tl.cast(n, tl.int64) * k
    return _planes(n, k, CODES, SCALES, GROUP)[4]


@triton.jit
def _at(p, n_bytes, dtype: tl.constexpr):
    return (p + n_bytes).to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def codes_at(p_codes):
    """The address of e4m3 codes: as tensor cores take them (from Ada on), else of bytes."""
    p_typed = p_codes
    if not _INTERPRETED and converts_e4m3():
        p_typed = p_codes.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return p_typed


@triton.jit
def scale_plane(p_w, n, k, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """Returns the address at which the scales of the matrix at p_w begin."""
    return _at(p_w, _planes(n, k, CODES, SCALES, GROUP)[1], _scale_type(SCALES))


@triton.jit
def rows_from(
    p_w, o_row, first_k, n, k, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr
):
    """Makes what `load_block` needs to read rows o_row [M] of the matrix at p_w from column first_k on.

    BLOCK_K: 32, 64, 128 or 256, which divides k, first_k, and a group or is divided by it.
    """
    if CODES == BF16:
        w = (p_w + o_row.to(tl.int64)[:, None] * k + first_k + tl.arange(0, BLOCK_K)[None, :],)
    else:
        high, scale, least, outer, _ = _planes(n, k, CODES, SCALES, GROUP)
        if CODES == E4M3:
            p_low = codes_at(p_w) + o_row.to(tl.int64)[:, None] * k + first_k + tl.arange(0, BLOCK_K)[None, :]
            p_high = p_low
        elif is_book(CODES):
            high, signs, book, _ = _planes_of_book(n, k, CODES)
            o_code = o_row.to(tl.int64)[:, None] * (k // 8) + first_k // 8 + tl.arange(0, BLOCK_K // 8)[None, :]
            p_high = _at(p_w, signs, tl.uint8) + o_code
            p_low = (
                _at(p_w, 0, _book(CODES)[3]) + o_code // 4, _at(p_w, high, _book(CODES)[4]) + o_code // 4,
                _at(p_w, book, tl.uint8), (o_code % 4).to(tl.int32),
            )
        else:
            # k is a multiple of 32
            o_code = tl.multiple_of(o_row.to(tl.int64)[:, None] * (k // 8), (4, 4))
            o_code += tl.multiple_of(first_k // 8, 4) + tl.arange(0, BLOCK_K // 8)[None, :]
            p_low = _at(p_w, 0, _element(low_bits(CODES))) + o_code
            p_high = p_low
            if high_bits(CODES):
                p_high = _at(p_w, high, _element(high_bits(CODES))) + o_code
        p_scale = _at(p_w, scale, _scale_type(SCALES)) + o_row
        p_least = p_scale
        if has_least(SCALES):
            p_least = _at(p_w, least, _least_type(CODES, SCALES)) + o_row
        if SCALES == E4M3_SCALE:
            p_pair = _at(p_w, outer, tl.float32) + o_row
            b_divisor = tl.load(p_pair + n)
            # 2^119: half of what `e4m3_bits` lacks
            b_outer = tl.load(p_pair) * 664613997892457936451903530140172288.0
            p_outer = (b_outer, b_divisor, tl.div_rn(tl.zeros_like(b_divisor) + 1.0, b_divisor))
        else:
            p_outer = _at(p_w, outer, tl.float16) + o_row
        w = (p_low, p_high, p_scale, p_least, p_outer, first_k, n)  # type: ignore[assignment]
    return w


@triton.jit
def _groups(p, first, n, HALF: tl.constexpr, BLOCK_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr):
    """[M, groups] of the block at column `first`; of groups of 16 the first or the second of each two.

    A group alone is there twice, but of e4m3: so Triton has a reason to bring it, and not the decoded tile,
    into another layout.
    """
    if GROUP == 0:
        p_groups = p[:, None]
    elif GROUP >= BLOCK_K:
        p_groups = (p + tl.cast(first // GROUP, tl.int64) * n)[:, None]
        if CODES != E4M3:
            p_groups += tl.arange(0, 2)[None, :] * 0
    else:
        EACH: tl.constexpr = 2 if GROUP == 16 else 1
        o_group = first // GROUP + HALF + EACH * tl.arange(0, BLOCK_K // GROUP // EACH)
        p_groups = p[:, None] + o_group.to(tl.int64)[None, :] * n
    return tl.load(p_groups)


@triton.jit
def _nibbles(b_bits):
    """int32: each of 8 bits in its nibble."""
    b_bits = (b_bits | (b_bits << 12)) & 0x000F000F
    b_bits = (b_bits | (b_bits << 6)) & 0x03030303
    return (b_bits | (b_bits << 3)) & 0x11111111


@triton.jit
def _looked_up(w, i_k, CODES: tl.constexpr):
    """int32 [M, BLOCK_K / 8]: elements of codes of 4 bits: levels, of iq1 the offset above them."""
    p_index, p_high, p_book, o_element = w
    BITS: tl.constexpr = _book(CODES)[0]
    HIGH: tl.constexpr = _book(CODES)[1]
    WIDTH: tl.constexpr = _book(CODES)[2]
    b_element = o_element * 0
    if BITS:
        b_index = tl.load(p_index + i_k // 32)
        for i in tl.static_range(4):
            if WIDTH == 8:
                b_shift = o_element * 0 + i
            else:
                b_shift = o_element // 2 + 2 * i
            b_entry = ((b_index >> (8 * b_shift).to(b_index.dtype)) & 255).to(tl.int32)
            if HIGH:
                b_high = (tl.load(p_high + i_k // 32).to(tl.int32) >> (HIGH * b_shift)) & ((1 << HIGH) - 1)
                b_entry |= (b_high << 8) & ((1 << BITS) - 1)
                if HIGH > BITS - 8:
                    b_element |= (b_high >> (BITS - 8)) * (0x00040004 << (4 * i))
            b_pair = tl.load(p_book + b_entry * (WIDTH // 2) + o_element % (WIDTH // 2)).to(tl.int32)
            b_element |= ((b_pair & 15) | ((b_pair >> 4) << 16)) << (4 * i)
    return b_element


@triton.jit
def load_codes(w, i_k, CODES: tl.constexpr):
    """The codes of BLOCK_K columns (`rows_from`) from first_k + i_k on, i_k a multiple of BLOCK_K, and their
    high bits.
    """
    if CODES == BF16:
        block = (tl.load(w[0] + i_k),)
    elif CODES == E4M3:
        b_codes = tl.load(w[0] + i_k)
        block = (b_codes, b_codes)  # type: ignore[assignment]
    elif is_book(CODES):
        b_low = _looked_up(w[0], i_k, CODES)
        if _book_bytes(CODES, 2):
            b_low |= _nibbles(tl.load(w[1] + i_k // 8).to(tl.int32)) << 3
        block = (b_low, b_low)  # type: ignore[assignment]
    else:
        i_code = tl.multiple_of(i_k // 8, 4)
        b_low = tl.load(w[0] + i_code)
        b_high = b_low
        if high_bits(CODES):
            b_high = tl.load(w[1] + i_code)
        block = (b_low, b_high)  # type: ignore[assignment]
    return block


@triton.jit
def _of_groups(p, first, n, BLOCK_K: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr):
    """[M, groups] of the block at column `first`, of groups of 16 those of the first and of the second of
    each two; else one of them twice.
    """
    b_first = _groups(p, first, n, 0, BLOCK_K, CODES, GROUP)
    b_second = b_first
    if GROUP == 16:
        b_second = _groups(p, first, n, 1, BLOCK_K, CODES, GROUP)
    return b_first, b_second


@triton.jit
def load_scales(w, i_k, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """Loads what `values` wants behind the codes: scales and least values [M, groups] (in groups of 16: the
    first and the second of each two), and outer scales [M], two.
    """
    if CODES == BF16:
        block: tl.tuple = ()
    else:
        _, _, p_scale, p_least, p_outer, first_k, n = w
        first = first_k + i_k
        b_scale, b_scale_2 = _of_groups(p_scale, first, n, BLOCK_K, CODES, GROUP)
        b_least, b_least_2 = b_scale, b_scale_2
        if has_least(SCALES):
            b_least, b_least_2 = _of_groups(p_least, first, n, BLOCK_K, CODES, GROUP)
        b_outer = b_scale
        b_outer_2 = b_scale
        if _is_k(SCALES):
            p_outer += tl.cast(first // 256, tl.int64) * n * _n_outer(SCALES)
            b_outer = tl.load(p_outer)
            if _n_outer(SCALES) == 2:
                b_outer_2 = tl.load(p_outer + n)
        elif SCALES == E4M3_SCALE:
            b_outer, b_outer_2 = p_outer[0], (p_outer[1], p_outer[2])
        block = (b_scale, b_scale_2, b_least, b_least_2, b_outer, b_outer_2)
    return block


@triton.jit
def load_more_scales(
    w, i_k, N: tl.constexpr, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr
):
    """`load_scales` of N blocks from i_k on."""
    blocks: tl.tuple = ()
    for i in tl.static_range(N):
        blocks += (load_scales(w, i_k + i * BLOCK_K, BLOCK_K, CODES, SCALES, GROUP),)
    return blocks


@triton.jit
def load_block(w, i_k, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """Loads the codes of a block, then its scales."""
    return load_codes(w, i_k, CODES) + load_scales(w, i_k, BLOCK_K, CODES, SCALES, GROUP)


# Values that codes stand for.


@triton.jit
def e4m3_bits(b_code):
    """float32: 2^-120 of an e4m3 code in an int32 (not of NaN, which no reader lets through)."""
    return (((b_code << 24) >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(b_codes):
    """float32: what `codes_at` gives."""
    if b_codes.dtype == tl.uint8:
        b_float = e4m3_bits(b_codes.to(tl.int32)) * 1329227995784915872903807060280344576.0  # 2^120
    else:
        b_float = b_codes.to(tl.float32)
    return b_float


@triton.jit
def code(block, J: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr):
    """float32: integer J of each element, less what is subtracted from all."""
    LOW: tl.constexpr = low_bits(CODES)
    HIGH: tl.constexpr = high_bits(CODES)
    b_code = (block[0] >> first_bit(J, LOW)).to(tl.int32) & ((1 << LOW) - 1)
    if HIGH:
        b_code |= (((block[1].to(tl.int32) >> first_bit(J, HIGH)) & ((1 << HIGH) - 1)) << LOW)
    if has_table(CODES):
        b_byte = b_code * 0
        for word in tl.static_range(4):
            b_byte += tl.where(b_code // 4 == word, (table_words(CODES)[word] >> (b_code % 4 * 8)) & 255, 0)
        b_float = (b_byte - 128).to(tl.float32)
    else:
        b_float = (b_code - zero_of(CODES, SCALES)).to(tl.float32)
    return b_float


@triton.jit
def scale_of(block, HALF: tl.constexpr, SCALES: tl.constexpr, UNIT: tl.constexpr = 1.0):
    """float32 [M, groups]: the scales; of groups of 16 those of the first or second of each two. UNIT: a
    power of 2 that those which come of float16 are multiplied with, as in `least_of`.
    """
    b_scale, b_outer, b_divisor = block[2 + HALF], block[6], block[7]
    if SCALES == E8M0:
        b_e = b_scale.to(tl.int32)
        b_float = tl.where(b_e < 2, 0x00200000 << b_e, (b_e - 1) << 23).to(tl.float32, bitcast=True)
    elif SCALES == E4M3_SCALE:
        # divided by way of the divisor's inverse, and rounded as a division is
        b_divisor, b_inverse = b_divisor
        b_product = e4m3_bits(b_scale.to(tl.int32)) * b_outer[:, None]
        b_quotient = b_product * b_inverse[:, None]
        b_rest = tl.fma(b_quotient, -b_divisor[:, None] + tl.zeros_like(b_product), b_product)
        b_float = tl.fma(b_rest, b_inverse[:, None] + tl.zeros_like(b_rest), b_quotient)
    else:
        b_float = b_scale.to(tl.float32)
        if _is_k(SCALES):
            b_float = (b_outer.to(tl.float32) * (UNIT * (0.125 if SCALES == K_EIGHTH else 1.0)))[:, None] * b_float
        elif UNIT != 1.0:
            b_float *= UNIT
    return b_float


@triton.jit
def least_of(block, HALF: tl.constexpr, SCALES: tl.constexpr, UNIT: tl.constexpr = 1.0):
    """float32 [M, groups]: the least values, or the codes that stand for 0."""
    b_least = block[4 + HALF].to(tl.float32)
    if _is_k(SCALES):
        b_least = (block[7].to(tl.float32) * -UNIT)[:, None] * b_least
    elif UNIT != 1.0:
        b_least *= UNIT
    return b_least


@triton.jit
def spread(b_groups, BLOCK_K: tl.constexpr):
    """[M, groups] -> [M, BLOCK_K / 8], each to the elements of its codes."""
    M: tl.constexpr = b_groups.shape[0]
    N: tl.constexpr = b_groups.shape[1]
    return tl.reshape(tl.broadcast_to(b_groups[:, :, None], (M, N, BLOCK_K // 8 // N)), (M, BLOCK_K // 8))


@triton.jit
def joined(codes, BLOCK_K: tl.constexpr):
    """[M, BLOCK_K], the columns in their order, of the 8 codes [M, BLOCK_K / 8] of each element."""
    M: tl.constexpr = codes[0].shape[0]
    b_even = tl.join(tl.join(codes[0], codes[4]), tl.join(codes[2], codes[6]))
    b_odd = tl.join(tl.join(codes[1], codes[5]), tl.join(codes[3], codes[7]))
    # 32 columns, t, j / 4, j / 2 % 2, j % 2
    b_all = tl.reshape(tl.join(b_even, b_odd), (M, BLOCK_K // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_all, (0, 1, 3, 4, 2, 5)), (M, BLOCK_K))


@triton.jit
def values(block, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """float32 [M, BLOCK_K]: what a block stands for, as `Quantised.values`, but for the sign of a zero."""
    if CODES == BF16:
        b_values = block[0].to(tl.float32)
    elif CODES == E4M3:
        M: tl.constexpr = block[0].shape[0]
        N: tl.constexpr = block[2].shape[1]
        b_scale = tl.broadcast_to(block[2][:, :, None], (M, N, BLOCK_K // N))
        b_values = e4m3(block[0]) * tl.reshape(b_scale, (M, BLOCK_K))
    else:
        HALVES: tl.constexpr = 2 if GROUP == 16 else 1
        all: tl.tuple = ()
        for j in tl.static_range(8):
            b_value = code(block, j, CODES, SCALES)
            b_scale = spread(scale_of(block, j * HALVES // 8, SCALES), BLOCK_K)
            if has_zero(SCALES):
                b_value = (b_value - spread(least_of(block, j * HALVES // 8, SCALES), BLOCK_K)) * b_scale
            elif has_least(SCALES):
                b_value = tl.fma(b_value, b_scale, spread(least_of(block, j * HALVES // 8, SCALES), BLOCK_K))
            else:
                b_value = b_value * b_scale
            all += (b_value,)
        b_values = joined(all, BLOCK_K)
    return b_values
