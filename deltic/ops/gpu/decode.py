"""Weights in any format as operands of a product: one decoder, for every kernel that reads rows.

A weight is `scale * code + least` in float32, to the bit as `Quantised.values` (ops/formats.py) has it,
rounded once to bfloat16. An e4m3 code is a bfloat16 already: its tile holds the codes, and `add_block`
multiplies the sums of BLOCK_K products with their scale, in float32, so that no weight is rounded. There
BLOCK_K is part of what defines the bits: it is `k_block` of the columns that are walked, 128 or what divides
them.

Rows in memory: the parts stand where `planes` (ops/matrix.py) says. Codes stand in elements of 8, those that
one thread holds in a tile of the tensor cores; an element of b bits a code has 8 b bits:

    codesB        [n, K / 32, 4]: code j of element t is of its 32 columns
                  2 t + j % 2 + 8 (j / 2 % 2) + 16 (j / 4)
    codes8        code j in byte j; of int8 with the sign bit flipped
    codes4        code j at bit 8 (j % 4) + 4 (j / 4)
    codes2        codes 4, 6, 0, 2, then 5, 7, 1, 3
    codes1        code j at bit j
    scale, least  [groups, n]
    outer         of k [K / 256, 1 or 2, n]; of e4m3 [2, n], divided by the power of 2 that
                  makes the first 0.5 .. 1

so that a few operations on words make bytes of all codes, a byte permutation makes a float of each, and a
tile's scales are neighbours.

A kernel takes the address of the first matrix (`address`: of bf16 a pointer to bfloat16, else to bytes; the
next begins `matrix_elements` behind it), its rows n and width k, and the constants of its format
(`constants`). Then

    w = rows_from(p_w, o_row, first_k, n, k, BLOCK_K, CODES, SCALES, GROUP)       before the loop over K
    block = load_block(w, i_k, BLOCK_K, CODES, SCALES, GROUP)                     in it: i_k = 0, BLOCK_K, ...
    b_acc = add_block(b_acc, block, b_x, BLOCK_K, CODES, SCALES, GROUP)

where `load_block` is `load_codes` + `load_scales`, so that a kernel can fetch the scales a block ahead:
Triton puts the loads of codes into its pipeline, but few of the smaller ones. W is the left side, [M, K] x
[K, N]: tensor cores take it from registers, where it is decoded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops import formats
from deltic.ops.contract import check
from deltic.ops.formats import WeightFormat
from deltic.ops.gpu.launch import INTERPRETED, launch
from deltic.ops.matrix import Piece

_INTERPRETED = tl.constexpr(INTERPRETED)

# Numbers, not names: Triton takes a constant "int8" for a type when it reads a kernel's arguments again.
BF16, E4M3 = tl.constexpr(formats.CODES.index("bf16")), tl.constexpr(formats.CODES.index("e4m3"))
K_LEAST, E8M0, E4M3_SCALE = (tl.constexpr(formats.SCALES.index(name)) for name in ("k.least", "e8m0", "e4m3"))


def constants(format: WeightFormat) -> dict[str, Any]:
    """CODES, SCALES and GROUP of a kernel that reads weights in this format."""
    codes, scales = formats.CODES.index(format.codes), formats.SCALES.index(format.scales)
    return {"CODES": codes, "SCALES": scales, "GROUP": format.group}


# What follows from the constants, when a kernel is compiled.


@triton.constexpr_function
def _low_bits(codes):
    """Of a code, in the first plane."""
    return {"int8": 8, "e4m3": 8, "uint2": 2, "uint3": 2}.get(formats.CODES[codes], 4)


@triton.constexpr_function
def _high_bits(codes):
    """Of a code, in the second plane; 0: there is none."""
    return {"uint3": 1, "uint5": 1, "uint6": 2}.get(formats.CODES[codes], 0)


@triton.constexpr_function
def _has_least(scales):
    return formats.SCALES[scales].endswith((".least", ".zero"))


@triton.constexpr_function
def _has_bytes(codes):
    """Whether codes are bytes, or become such by a table."""
    return not formats.CODES[codes].startswith("uint")


@triton.constexpr_function
def _has_table(codes):
    return formats.CODES[codes] in formats.TABLES


@triton.constexpr_function
def _is_k(scales):
    return formats.SCALES[scales].startswith("k")


@triton.constexpr_function
def _n_outer(scales):
    """Outer scales of a row, or of 256 weights of it."""
    return {"k": 1, "k.least": 2, "e4m3": 2}.get(formats.SCALES[scales], 0)


@triton.constexpr_function
def _has_zero(scales):
    return formats.SCALES[scales].endswith(".zero")


@triton.constexpr_function
def _minus(codes, scales):
    """What is subtracted from a code; bytes are 128 more than the integers."""
    name = formats.CODES[codes]
    if not name.startswith("uint"):
        return 128.0
    return 0.0 if _has_least(scales) else 2.0 ** (int(name[-1]) - 1)


@triton.constexpr_function
def _bit(codes, scales):
    """Where a code stands in the float that it becomes: 16, or where it takes 8 bits 8 or 0."""
    if formats.CODES[codes].startswith("uint"):
        return 16
    return 8 if _is_exact(codes, scales) else 0


@triton.constexpr_function
def _is_exact(codes, scales):
    """Whether 2^(23 - bit) and what is subtracted from a code, times the scale, is exact in float32: of
    bfloat16 and float16, and of k with codes of few bits.
    """
    kind = formats.SCALES[scales]
    if formats.CODES[codes].startswith("uint"):
        return not kind.endswith(".least")
    return kind in ("float16", "bfloat16")


@triton.constexpr_function
def _less(codes, scales):
    """What is too much in the float of a code."""
    return 2.0 ** (23 - _bit(codes, scales)) + _minus(codes, scales)


@triton.constexpr_function
def _byte(j, codes):
    """Which of the bytes is code j; those of a table come as the indices stand in memory."""
    return j % 4 * 2 + j // 4 if _has_table(codes) else j


@triton.constexpr_function
def _element(bits):
    """What holds 8 codes of so many bits."""
    return tl.dtype({8: "int64", 4: "int32", 2: "uint16", 1: "uint8"}[bits])


@triton.constexpr_function
def _scale_type(scales):
    """Of the scales in memory, in the order of formats.SCALES."""
    names = "int8 fp32 bf16 fp16 fp16 fp16 bf16 bf16 int8 uint8 uint8 uint8"
    return tl.dtype(names.split()[scales])


@triton.constexpr_function
def _least_type(codes, scales):
    zero = "int8" if formats.CODES[codes] == "int8" else "uint8"
    return tl.dtype(zero) if _has_zero(scales) else _scale_type(scales)


@triton.constexpr_function
def _table(codes):
    """The bytes of a table, 128 more than its integers, four to an int32."""
    integers = formats.TABLES[formats.CODES[codes]]
    return tuple(
        int.from_bytes(bytes(x + 128 for x in integers[i : i + 4]), "little", signed=True) for i in (0, 4, 8, 12)
    )


@triton.constexpr_function
def _look_up(codes):
    """PTX: two words with the bytes for the 8 indices in a word; a byte permutation looks up 4 of 8 at a
    time.
    """
    a, b, c, d = _table(codes)
    half = f"prmt.b32 x, {a}, {b}, i; prmt.b32 y, {c}, {d}, i; prmt.b32 ${{}}, x, y, s;"
    begin = "{ .reg .b32 i, s, x, y; and.b32 i, $2, 0x77777777; and.b32 s, $2, 0x88888888; shr.u32 s, s, 1;"
    between = "shr.u32 i, i, 16; shr.u32 s, s, 16;"
    return f"{begin} or.b32 s, s, 0x32103210; {half.format(0)} {between} {half.format(1)} }}"


# Where the parts are, and what memory holds.


@triton.jit
def _plane(n_bytes):
    """Bytes with what is free behind them."""
    return (n_bytes + 255) // 256 * 256


@triton.jit
def _planes(n, k, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """int64: where the high bits of codes, the scales, the least values and the outer scales begin, and the
    end.
    """
    n = tl.cast(n, tl.int64)
    n_groups = n * (tl.cdiv(k, GROUP) if GROUP else 1)
    high = _plane(n * k * _low_bits(CODES) // 8)
    scale = high + _plane(n * k * _high_bits(CODES) // 8)
    least = scale + _plane(n_groups * (_scale_type(SCALES).primitive_bitwidth // 8))
    outer = least
    if _has_least(SCALES):
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
def rows_from(
    p_w, o_row, first_k, n, k, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr
):
    """What `load_block` needs to read rows o_row [M] of the matrix at p_w from column first_k on.

    BLOCK_K: 32, 64, 128 or 256, which divides k, first_k, and a group or is divided by it.
    """
    if CODES == BF16:
        w = (p_w + o_row.to(tl.int64)[:, None] * k + first_k + tl.arange(0, BLOCK_K)[None, :],)
    else:
        high, scale, least, outer, _ = _planes(n, k, CODES, SCALES, GROUP)
        # k is a multiple of 32
        o_code = tl.multiple_of(o_row.to(tl.int64)[:, None] * (k // 8), (4, 4))
        o_code += tl.multiple_of(first_k // 8, 4) + tl.arange(0, BLOCK_K // 8)[None, :]
        p_low = _at(p_w, 0, _element(_low_bits(CODES))) + o_code
        p_high = p_low
        if _high_bits(CODES):
            p_high = _at(p_w, high, _element(_high_bits(CODES))) + o_code
        p_scale = _at(p_w, scale, _scale_type(SCALES)) + o_row
        p_least = p_scale
        if _has_least(SCALES):
            p_least = _at(p_w, least, _least_type(CODES, SCALES)) + o_row
        if SCALES == E4M3_SCALE:
            p_pair = _at(p_w, outer, tl.float32) + o_row
            b_divisor = tl.load(p_pair + n)
            # 2^119: half of what `_e4m3_bits` lack
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
def load_codes(w, i_k, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """The codes of BLOCK_K columns from first_k + i_k on, i_k a multiple of BLOCK_K, and their high bits."""
    if CODES == BF16:
        block = (tl.load(w[0] + i_k),)
    else:
        i_code = tl.multiple_of(i_k // 8, 4)
        b_low = tl.load(w[0] + i_code)
        b_high = b_low
        if _high_bits(CODES):
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
    """What `add_block` and `values` want behind the codes: scales and least values [M, groups], of groups of
    16 those of the first and the second of each two; outer scales [M], two.
    """
    if CODES == BF16:
        block: tl.tuple = ()
    else:
        _, _, p_scale, p_least, p_outer, first_k, n = w
        first = first_k + i_k
        b_scale, b_scale_2 = _of_groups(p_scale, first, n, BLOCK_K, CODES, GROUP)
        b_least, b_least_2 = b_scale, b_scale_2
        if _has_least(SCALES):
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
def load_block(w, i_k, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """Both."""
    return load_codes(w, i_k, BLOCK_K, CODES, SCALES, GROUP) + load_scales(w, i_k, BLOCK_K, CODES, SCALES, GROUP)


# What it stands for.


@triton.jit
def _e4m3_bits(b_top):
    """float32: 2^-120 of the e4m3 code in the upper 8 bits of an int32 (not of NaN, which no reader lets
    through).
    """
    return ((b_top >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(b_top):
    """float32: the code, exact."""
    return _e4m3_bits(b_top) * 1329227995784915872903807060280344576.0  # 2^120


@triton.jit
def _looked_up(b_index, CODES: tl.constexpr):
    """The bytes that the lower and the upper 4 indices in an int32 stand for."""
    if _INTERPRETED:
        b_low = b_index * 0
        b_high = b_index * 0
        for j in tl.static_range(4):
            for word in tl.static_range(4):
                b_at = (b_index >> (4 * j)) & 15
                b_low |= tl.where(b_at // 4 == word, (_table(CODES)[word] >> (b_at % 4 * 8) & 255) << (8 * j), 0)
                b_at = (b_index >> (4 * j + 16)) & 15
                b_high |= tl.where(b_at // 4 == word, (_table(CODES)[word] >> (b_at % 4 * 8) & 255) << (8 * j), 0)
        words = (b_low, b_high)
    else:
        words = tl.inline_asm_elementwise(
            _look_up(CODES), "=r,=r,r", [b_index], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return words


@triton.jit
def _bytes(b_low, b_high, CODES: tl.constexpr):
    """int32, int32: the codes as bytes, 0 .. 3 and 4 .. 7 (of tables 0, 4, 1, 5 and 2, 6, 3, 7)."""
    LOW: tl.constexpr = _low_bits(CODES)
    HIGH: tl.constexpr = _high_bits(CODES)
    if _has_table(CODES):
        words = _looked_up(b_low, CODES)
    elif LOW == 8:
        words = (b_low.to(tl.int32), (b_low >> 32).to(tl.int32))
    else:
        if LOW == 4:
            b_first, b_second = b_low & 0x0F0F0F0F, (b_low >> 4) & 0x0F0F0F0F
        else:
            b_two = b_low.to(tl.int32)
            b_two |= b_two << 14
            b_first, b_second = (b_two >> 4) & 0x03030303, b_two & 0x03030303
        if HIGH == 2:
            b_two = b_high.to(tl.int32)
            b_two |= b_two << 14
            b_first |= b_two & 0x30303030
            b_second |= (b_two << 4) & 0x30303030
        elif HIGH == 1:
            # bit i comes to byte i
            b_one = b_high.to(tl.int32)
            b_first |= ((b_one & 15) * (0x204081 << LOW)) & (0x01010101 << LOW)
            b_second |= ((b_one >> 4) * (0x204081 << LOW)) & (0x01010101 << LOW)
        words = (b_first, b_second)
    return words


@triton.constexpr_function
def _permutation(byte, bit):
    """PTX: a byte of the first operand at this bit of the second, the other bytes as they are."""
    picked = [byte if i == bit // 8 else 4 + i for i in range(4)]
    return f"prmt.b32 $0, $1, $2, {sum(pick << (4 * i) for i, pick in enumerate(picked))};"


@triton.jit
def _with_byte(b_word, b_float, BYTE: tl.constexpr, BIT: tl.constexpr):
    """int32: the bits of a float that has another byte at BIT of its mantissa, one of a word's."""
    if _INTERPRETED:
        b_bits = (((b_word >> (8 * BYTE)) & 255) << BIT) | (b_float & ~(255 << BIT))
    else:
        b_bits = tl.inline_asm_elementwise(
            _permutation(BYTE, BIT), "=r,r,r", [b_word, b_float], dtype=tl.int32, is_pure=True, pack=1
        )
    return b_bits


@triton.jit
def _floats(words, CODES: tl.constexpr, SCALES: tl.constexpr):
    """float32 x 8: 2^(23 - bit) and each code. All but the first have the bits of 2^(23 - bit) from the
    first: the assembler would move a constant before each permutation.
    """
    BIT: tl.constexpr = _bit(CODES, SCALES)
    b_first = _with_byte(words[0], tl.zeros_like(words[0]) + ((150 - BIT) << 23), 0, BIT)
    floats: tl.tuple = (b_first.to(tl.float32, bitcast=True),)
    for j in tl.static_range(1, 8):
        b_bits = _with_byte(words[_byte(j, CODES) // 4], b_first, _byte(j, CODES) % 4, BIT)
        floats += (b_bits.to(tl.float32, bitcast=True),)
    return floats


@triton.jit
def _scale(b_scale, b_outer, b_divisor, SCALES: tl.constexpr):
    """float32 [M, groups]: the scales."""
    if SCALES == E8M0:
        b_e = b_scale.to(tl.int32)
        b_float = tl.where(b_e < 2, 0x00200000 << b_e, (b_e - 1) << 23).to(tl.float32, bitcast=True)
    elif SCALES == E4M3_SCALE:
        # divided by way of the divisor's inverse, and rounded as a division is
        b_divisor, b_inverse = b_divisor
        b_product = _e4m3_bits(b_scale.to(tl.int32) << 24) * b_outer[:, None]
        b_quotient = b_product * b_inverse[:, None]
        b_rest = tl.fma(b_quotient, -b_divisor[:, None] + tl.zeros_like(b_product), b_product)
        b_float = tl.fma(b_rest, b_inverse[:, None] + tl.zeros_like(b_rest), b_quotient)
    else:
        b_float = b_scale.to(tl.float32)
        if _is_k(SCALES):
            b_float = b_outer[:, None].to(tl.float32) * b_float
    return b_float


@triton.jit
def _spread(b_groups, BLOCK_K: tl.constexpr):
    """[M, groups] -> [M, BLOCK_K / 8], each to the elements of its codes."""
    M: tl.constexpr = b_groups.shape[0]
    N: tl.constexpr = b_groups.shape[1]
    return tl.reshape(tl.broadcast_to(b_groups[:, :, None], (M, N, BLOCK_K // 8 // N)), (M, BLOCK_K // 8))


@triton.jit
def _joined(codes, BLOCK_K: tl.constexpr):
    """[M, BLOCK_K], the columns in their order, of the 8 codes [M, BLOCK_K / 8] of each element."""
    M: tl.constexpr = codes[0].shape[0]
    b_even = tl.join(tl.join(codes[0], codes[4]), tl.join(codes[2], codes[6]))
    b_odd = tl.join(tl.join(codes[1], codes[5]), tl.join(codes[3], codes[7]))
    # 32 columns, t, j / 4, j / 2 % 2, j % 2
    b_all = tl.reshape(tl.join(b_even, b_odd), (M, BLOCK_K // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_all, (0, 1, 3, 4, 2, 5)), (M, BLOCK_K))


@triton.jit
def _added(b_least, b_scale, b_outer, CODES: tl.constexpr, SCALES: tl.constexpr):
    """float32 [M, groups]: what `_value` adds."""
    b_added = b_least.to(tl.float32)
    if _is_k(SCALES):
        b_added = b_outer[:, None].to(tl.float32) * b_added * -1.0  # -x would be 0 - x
    if _has_zero(SCALES):
        b_added = -_less(CODES, SCALES) - b_added
    elif not _has_least(SCALES):
        b_added = b_scale * 0.0 - _less(CODES, SCALES)
    return b_added * b_scale if _is_exact(CODES, SCALES) else b_added


@triton.jit
def _value(b_float, b_scale, b_added, CODES: tl.constexpr, SCALES: tl.constexpr):
    """float32: what a code stands for, rounded once. b_float: of `_floats`, of e4m3 the code."""
    if CODES == E4M3:
        b_value = b_float * b_scale
    elif _is_exact(CODES, SCALES):
        b_value = tl.fma(b_float, b_scale, b_added)
    elif _has_zero(SCALES):
        b_value = (b_float + b_added) * b_scale
    elif _has_least(SCALES):
        b_value = tl.fma(b_float - _less(CODES, SCALES), b_scale, b_added)
    else:
        b_value = (b_float - _less(CODES, SCALES)) * b_scale
    return b_value


@triton.jit
def _e4m3_codes(words):
    """float32 x 8: the codes."""
    codes: tl.tuple = ()
    for j in tl.static_range(8):
        codes += (_e4m3(words[j // 4] << (24 - j % 4 * 8)),)
    return codes


@triton.jit
def values(block, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """float32 [M, BLOCK_K]: what a block stands for, as `Quantised.values`, but for the sign of a zero."""
    if CODES == BF16:
        b_values = block[0].to(tl.float32)
    else:
        words = _bytes(block[0], block[1], CODES)
        codes = _e4m3_codes(words) if CODES == E4M3 else _floats(words, CODES, SCALES)
        HALVES: tl.constexpr = 2 if GROUP == 16 else 1
        scales: tl.tuple = ()
        added: tl.tuple = ()
        for half in tl.static_range(HALVES):
            b_scale = _scale(block[2 + half], block[6], block[7], SCALES)
            scales += (_spread(b_scale, BLOCK_K),)
            added += (_spread(_added(block[4 + half], b_scale, block[7], CODES, SCALES), BLOCK_K),)
        all: tl.tuple = ()
        for j in tl.static_range(8):
            all += (_value(codes[j], scales[j * HALVES // 8], added[j * HALVES // 8], CODES, SCALES),)
        b_values = _joined(all, BLOCK_K)
    return b_values


@triton.jit
def _ended(b_sum):
    """The same, of a product that has ended. Left under way until the next, with its weights in registers,
    the assembler would run its instructions one at a time.
    """
    if not _INTERPRETED:
        b_sum = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_sum], dtype=tl.float32, is_pure=True, pack=1)
    return b_sum


@triton.jit
def add_block(
    b_acc, block, b_x, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr
):
    """b_acc + W x: float32 [M, N] and a block of W [M, BLOCK_K] with bfloat16 x [BLOCK_K, N]."""
    if CODES == BF16:
        b_sum = tl.dot(block[0], b_x, b_acc)
    else:
        if CODES == E4M3:
            b_part = tl.dot(_joined(_e4m3_codes(_bytes(block[0], block[1], CODES)), BLOCK_K).to(tl.bfloat16), b_x)
            b_sum = tl.fma(b_part, block[2] + tl.zeros_like(b_acc), b_acc)
        else:
            b_sum = _ended(tl.dot(values(block, BLOCK_K, CODES, SCALES, GROUP).to(tl.bfloat16), b_x, b_acc))
    return b_sum


@triton.jit
def _decode_kernel(
    p_w, p_out, n, k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    o_row = tl.minimum(tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), n - 1)
    first = tl.program_id(1) * BLOCK_K
    block = load_block(
        rows_from(p_w, o_row, first, n, k, BLOCK_K, CODES, SCALES, GROUP), tl.full((), 0, tl.int32), BLOCK_K, CODES, SCALES, GROUP
    )
    b_values = values(block, BLOCK_K, CODES, SCALES, GROUP)
    p_to = p_out + o_row.to(tl.int64)[:, None] * k + first + tl.arange(0, BLOCK_K)[None, :]
    tl.store(p_to, b_values.to(p_out.dtype.element_ty))


def decode(piece: Piece, out: Tensor) -> None:
    """out[i] = the values of matrix i: float32, or rounded once to bfloat16. out: [n_matrices, n, k]."""
    check("decode", out.shape == (piece.n_matrices, piece.n, piece.k) and out.is_contiguous(), "out as large")
    block_k = k_block(piece.k)
    for data, to in zip(piece.data, out, strict=True):
        launch(
            _decode_kernel, (-(-piece.n // 32), piece.k // block_k), address(piece, data), to, piece.n, piece.k,
            BLOCK_M=32, BLOCK_K=block_k, **constants(piece.format), num_warps=4,
        )


def address(piece: Piece, data: Tensor | None = None) -> Tensor:
    """What a kernel takes as p_w."""
    memory: Tensor = piece.data if data is None else data
    return memory.view(torch.bfloat16) if piece.format.codes == "bf16" else memory


@triton.constexpr_function
def k_block(k: int, most: int = 128) -> int:
    """The largest BLOCK_K up to `most`, a power of two, for k columns, a multiple of 32."""
    return next(block for block in (256, 128, 64, 32) if block <= most and k % block == 0)
