"""Weights in any format as operands of a product: bfloat16 tiles of what decode.py reads, made in a few
instructions a weight.

In front of a product scales and least values are rounded to bfloat16, and so is

    w = code * scale                   or     code * scale + least     or     (code - zero) * scale

once: codes of up to 8 bits are exact in bfloat16. Products with e4m3 are in fp8.py.

The codes of two neighbouring columns are cut out of a word as they stand, by a mask. Eight bits of a
bfloat16 from the lowest on are a multiple of 2^-133, also where it is subnormal. So one fused multiply-add
with scale * 2^133 makes two weights; what is subtracted from all codes is in what it adds. Scale and operand
are 2^32 times smaller (`lowered`), as bfloat16 ends at 2^128, and the sum is made larger at its end. Both are
exact where scales come of float16: an int8 * float16 is 2^-27 to 2^23. Only sums below 2^-94 lose bits.

Other scales may be anything. There 4 bits are the low bits of a bfloat16 between 128 and 256, of which a
fused multiply-add takes off the 128, and one more multiplies. The bits of e2m1 are those of a bfloat16 that
is a power of two too small. 8-bit integers become float32 by a byte permutation.

W is the left side, [M, K] x [K, N]: tensor cores take it from registers, where it is made.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import re

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from deltic.ops import formats
from deltic.ops.contract import check
from deltic.ops.gpu.decode import (
    BF16,
    E4M3,
    INT8,
    address,
    code,
    constants,
    first_bit,
    has_least,
    has_table,
    has_zero,
    high_bits,
    joined,
    k_block,
    least_of,
    load_block,
    load_codes,
    load_more_scales,
    low_bits,
    rows_from,
    scale_of,
    spread,
    table_words,
    values,
    zero_of,
)
from deltic.ops.gpu.fp8 import add_fp8_block, load_more_scales_once, rounded
from deltic.ops.gpu.launch import INTERPRETED, launch
from deltic.ops.matrix import Segment

_INTERPRETED = tl.constexpr(INTERPRETED)
_WORTH = tl.constexpr(2.0**133)  # the lowest bit of a bfloat16 is one such part

LOWERED = 32
"""Power of 2 by which operands are smaller than weights, where scales come of float16."""


@triton.constexpr_function
def lowered(codes, scales):
    """Returns whether operands are 2^LOWERED times smaller than weights."""
    is_integer = formats.CODES[codes] not in ("e2m1", "e4m3", "bf16")
    return is_integer and formats.SCALES[scales].startswith(("k", "float16")) and not has_zero(scales)


@triton.constexpr_function
def unit(codes, scales):
    """Value that stands for 1 in operands, and in their sums."""
    return 2.0**-LOWERED if lowered(codes, scales) else 1.0


# The assembly of an NVIDIA GPU that makes 8 bfloat16, $0 .. $7, of an element: $8, $9 its codes in two words,
# or in one and their high bits; $10, $11 scale and least value (`_packed`) of the first and of the last four.


@triton.constexpr_function
def _assembly(codes, scales, group):
    pairs = " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, v{i};" for i in range(4))
    return f"{{ {' '.join(_lines(codes, scales, group))} {pairs} }}"


@triton.constexpr_function
def _lines(codes, scales, group):
    if lowered(codes, scales):
        lines = _of_lowered(codes, scales, int(group == 16))
    elif formats.CODES[codes] == "e2m1":
        lines = _of_e2m1()
    else:
        lines = _of_nibbles(codes, scales) if low_bits(codes) == 4 else _of_bytes(scales)
    return [".reg .b32 t, u, x, y, i, one, none, s<2>, m<2>, f<2>, v<4>;", *lines]


def packed_twice(format: formats.WeightFormat) -> bool:
    """Returns whether the last two operands of `assembly_of_pairs` have 64 bits, as `_packed` has them."""
    scales = formats.SCALES.index(format.scales)
    return bool(lowered(formats.CODES.index(format.codes), scales) and (has_least(scales) or format.group == 16))


def assembly_of_pairs(format: formats.WeightFormat) -> str:
    """Assembly for CUDA C++: %0 .. %3 are pairs of bfloat16, %4 .. %7 what $8 .. $11 are."""
    text = " ".join(_lines(formats.CODES.index(format.codes), formats.SCALES.index(format.scales), format.group))
    for i in range(8, 12):
        text = re.sub(rf"\${i}\b", f"%{i - 4}", text)
    pairs = " ".join(f"mov.b32 %{i}, v{i};" for i in range(4))
    return f"{{ {text} {pairs} }}"


@triton.constexpr_function
def _shift(to, word, left):
    return f"shl.b32 {to}, {word}, {left};" if left >= 0 else f"shr.u32 {to}, {word}, {-left};"


@triton.constexpr_function
def _constants():
    """Pairs of bfloat16: 1 and -0; and of the scales."""
    return ["mov.b32 one, 0x3F803F80;", "mov.b32 none, 0x80008000;"] + [
        f"prmt.b32 s{half}, ${10 + half}, 0, 0x1010;" for half in (0, 1)
    ]


@triton.constexpr_function
def _of_lowered(codes, scales, second):
    """Integers of up to 8 bits, whose first is bit p of a half. second: which scale the last four have."""
    low, high, lines = low_bits(codes), high_bits(codes), ["mov.b32 none, 0x80008000;"]
    if has_least(scales):
        lines += [f"mov.b64 {{s{half}, m{half}}}, ${10 + half};" for half in range(1 + second)]
    else:  # less a code of such bits
        zero = 128 if has_table(codes) else zero_of(codes, scales)
        lines.append("mov.b64 {s0, s1}, $10;" if second else "mov.b32 s0, $10;")
        lines.append(f"mov.b32 u, {(0x8000 | zero) * 0x10001};")
        lines += [f"fma.rn.bf16x2 m{half}, s{half}, u, none;" for half in range(1 + second)]
    if has_table(codes) or low == 8:
        # bytes 0 and 2 are a pair, and 1 and 3
        lines += _looked_up(codes) if has_table(codes) else ["mov.b32 x, $8; mov.b32 y, $9;"]
        for i in range(4):
            cut = "and.b32 t, {}, 0x00FF00FF;" if i % 2 == 0 else "prmt.b32 t, {}, 0, 0x4341;"
            lines.append(f"{cut.format('xy'[i // 2])} fma.rn.bf16x2 v{i}, t, s{i // 2 * second}, m{i // 2 * second};")
        return lines
    lines.append("prmt.b32 x, $8, 0, 0x4140;" if low == 2 else "mov.b32 x, $8;")
    if high == 1:  # of pair i bit `low` + i
        lines.append(f"mul.lo.u32 y, $9, {(1 << low) + (1 << low + 12)};")
    elif high:  # bit 2 i
        lines.append("prmt.b32 y, $9, 0, 0x4140;")
    for i in range(4):
        p = i if high == 1 else i % 2 * high if high else i * low % 8
        mask, above = (((1 << bits) - 1 << at) * 0x10001 for bits, at in ((low, p), (high, p + low)))
        lines.append(f"{_shift('t', 'x', p - low * i)} and.b32 t, t, {mask};")
        if high:
            lines.append(f"{_shift('u', 'y', p + low - 2 * i if high == 2 else 0)} lop3.b32 t, u, {above}, t, 0xEA;")
        half = i // 2 * second
        if p:
            lines.append(f"mov.b32 u, {(127 - p << 7) * 0x10001}; fma.rn.bf16x2 u, s{half}, u, none;")
        lines.append(f"fma.rn.bf16x2 v{i}, t, {'u' if p else f's{half}'}, m{half};")
    return lines


@triton.constexpr_function
def _looked_up(codes):
    """Bytes of a table in words x and y, of the indices of four codes each in the order of codes8."""
    a, b, c, d = table_words(codes)
    lines = ["prmt.b32 i, $8, 0, 0x3120; and.b32 t, i, 0x88888888; and.b32 i, i, 0x77777777;"]
    lines.append("shr.u32 t, t, 1; or.b32 t, t, 0x32103210;")
    for word in "xy":
        lines.append(f"prmt.b32 f0, {a}, {b}, i; prmt.b32 f1, {c}, {d}, i; prmt.b32 {word}, f0, f1, t;")
        lines.append("shr.u32 i, i, 16; shr.u32 t, t, 16;")
    return lines


@triton.constexpr_function
def _of_nibbles(codes, scales):
    """Unsigned integers of 4 bits."""
    lines = _constants() + [f"prmt.b32 m{half}, ${10 + half}, 0, 0x3232;" for half in (0, 1)]
    for i in range(4):
        lines.append(f"{_shift('t', '$8', -4 * i)} lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;")
        if has_zero(scales):
            lines.append(f"fma.rn.bf16x2 t, t, one, m{i // 2}; fma.rn.bf16x2 v{i}, t, s{i // 2}, none;")
        else:
            added = f"m{i // 2}" if has_least(scales) else "none"
            lines.append(f"mov.b32 u, {(0xC300 | zero_of(codes, scales)) * 0x10001};")
            lines.append(f"fma.rn.bf16x2 t, t, one, u; fma.rn.bf16x2 v{i}, t, s{i // 2}, {added};")
    return lines


@triton.constexpr_function
def _of_e2m1():
    """2^127 makes twice its value of the bits."""
    lines = [*_constants(), "mov.b32 m0, 0x7F007F00;"]
    for i in range(4):
        lines.append(f"{_shift('t', '$8', 12 - 4 * i)} and.b32 t, t, 0x80008000;")
        lines.append(f"{_shift('u', '$8', 6 - 4 * i)} lop3.b32 t, u, 0x01C001C0, t, 0xEA;")
        lines.append(f"fma.rn.bf16x2 t, t, m0, none; fma.rn.bf16x2 v{i}, t, s{i // 2}, none;")
    return lines


@triton.constexpr_function
def _of_bytes(scales):
    """Integers of 8 bits. A float has the byte in its mantissa: 2^15 and the byte. What is subtracted of its
    product is exact.
    """
    lines = []
    for half in (0, 1):
        lines.append(f"shl.b32 s{half}, ${10 + half}, 16;")
        if has_zero(scales):
            lines.append(f"and.b32 m{half}, ${10 + half}, 0xFFFF0000; add.rn.f32 m{half}, m{half}, 0f47008000;")
            lines.append(f"neg.f32 t, s{half}; mul.rn.f32 m{half}, m{half}, t;")
        else:
            lines.append(f"mul.rn.f32 m{half}, s{half}, 0fC7008000;")
    for j in range(8):
        bit = first_bit(j, 8)
        lines.append(f"prmt.b32 f{j % 2}, ${8 + bit // 32}, 0x47000000, 0x76{bit % 32 // 8}4;")
        lines.append(f"fma.rn.f32 f{j % 2}, f{j % 2}, s{j // 4}, m{j // 4};")
        if j % 2:
            lines.append(f"cvt.rn.bf16x2.f32 v{j // 2}, f1, f0;")
    return lines


@triton.jit
def _packed(block, HALF: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """[M, groups]: int32, the bits of two bfloat16, the scale and above it the least value; of unsigned codes
    with a zero -(128 + zero). Of what is `lowered` each is there twice, the scale times 2^133: in an int64,
    where there are least values, or of groups of 16 the second scale, else an int32.
    """
    if lowered(CODES, SCALES):
        UNIT: tl.constexpr = unit(CODES, SCALES)
        b_word = scale_of(block, HALF, SCALES, UNIT * _WORTH)
        if has_least(SCALES):
            b_word = _pair(b_word, least_of(block, HALF, SCALES, UNIT))
        elif GROUP == 16:
            b_word = _pair(b_word, scale_of(block, 1, SCALES, UNIT * _WORTH))
        else:
            b_word = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [b_word], tl.int32, True, 1)
    else:
        b_word = scale_of(block, HALF, SCALES).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        if has_least(SCALES):
            b_least = least_of(block, HALF, SCALES)
            if has_zero(SCALES) and CODES != INT8:
                b_least = -128.0 - b_least
            b_word |= b_least.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return b_word


@triton.jit
def _pair(b_low, b_high):
    """int64: two bfloat16 of each, below and above."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 s, m; cvt.rn.bf16x2.f32 s, $1, $1; cvt.rn.bf16x2.f32 m, $2, $2; mov.b64 $0, {s, m}; }",
        "=l,f,f", [b_low, b_high], tl.int64, True, 1,
    )  # fmt: skip


@triton.jit
def _near(b_x):
    return b_x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def operand(block, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr):
    """bfloat16 [M, BLOCK_K]: a block, but of e4m3, as the operand of a product: times `unit`."""
    HALVES: tl.constexpr = 2 if GROUP == 16 else 1
    UNIT: tl.constexpr = unit(CODES, SCALES)
    if CODES == BF16:
        b_w = block[0]
    elif _INTERPRETED or is_hip():
        all: tl.tuple = ()
        for j in tl.static_range(8):
            b_value = code(block, j, CODES, SCALES)
            b_scale = spread(_near(scale_of(block, j * HALVES // 8, SCALES, UNIT)), BLOCK_K)
            if has_zero(SCALES):
                b_value = (b_value - spread(least_of(block, j * HALVES // 8, SCALES), BLOCK_K)) * b_scale
            elif has_least(SCALES):
                b_least = spread(_near(least_of(block, j * HALVES // 8, SCALES, UNIT)), BLOCK_K)
                b_value = tl.fma(b_value, b_scale, b_least)
            else:
                b_value = b_value * b_scale
            all += (b_value.to(tl.bfloat16),)
        b_w = joined(all, BLOCK_K)
    else:
        b_first = block[0].to(tl.int32)
        b_second = b_first
        if low_bits(CODES) == 8:
            b_second = (block[0] >> 32).to(tl.int32)
        elif high_bits(CODES):
            b_second = block[1].to(tl.int32)
        b_scale = spread(_packed(block, 0, CODES, SCALES, GROUP), BLOCK_K)
        b_scale_2 = b_scale
        if GROUP == 16 and (has_least(SCALES) or not lowered(CODES, SCALES)):
            b_scale_2 = spread(_packed(block, 1, CODES, SCALES, GROUP), BLOCK_K)
        OPERANDS: tl.constexpr = "l,l" if b_scale.dtype == tl.int64 else "r,r"
        all = tl.inline_asm_elementwise(
            _assembly(CODES, SCALES, GROUP), "=h,=h,=h,=h,=h,=h,=h,=h,r,r," + OPERANDS,
            [b_first, b_second, b_scale, b_scale_2], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )
        b_w = joined(all, BLOCK_K)
    return b_w


@triton.jit
def _ended(b_sum):
    """The same, of a product that has ended. Left under way until the next, with its weights in registers,
    the assembler would run its instructions one at a time.
    """
    if not _INTERPRETED and not is_hip():
        b_sum = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_sum], dtype=tl.float32, is_pure=True, pack=1)
    return b_sum


@triton.jit
def add_block(
    b_acc, block, p_x_tile, b_x_scale, b_used, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """b_acc + W x^T (times `unit`): float32 [M, N], a block of W [M, BLOCK_K] and the rows of x at p_x_tile
    [N, BLOCK_K], those in use. x: bfloat16; or beside e4m3 codes, and b_x_scale [N] the scales of this block.
    """
    if CODES == E4M3:
        b_x = tl.load(p_x_tile, mask=b_used[:, None], other=0.0)
        if b_x.dtype == tl.bfloat16:
            b_x, b_x_scale = rounded(b_x)
        b_sum = add_fp8_block(b_acc, block[0], block[2], b_x, b_x_scale)
    else:
        b_x = tl.trans(tl.load(p_x_tile, mask=b_used[:, None], other=0.0))
        b_sum = tl.dot(operand(block, BLOCK_K, CODES, SCALES, GROUP), b_x, b_acc)
        if CODES != BF16:
            b_sum = _ended(b_sum)
    return b_sum


@triton.jit
def add_blocks(
    b_acc, w, scales, p_x_tile, p_x_scale, scale_step, b_used, first, k, N: tl.constexpr, BLOCK_K: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
):
    """W x^T: b_acc, which `add_block` has made of the columns in front, and columns [first, k) of
    `rows_from`'s w, N blocks a turn: their scales are fetched while those before are multiplied. scales:
    `load_more_scales` at `first`. p_x_tile: the rows of x, from column 0 on. p_x_scale [N]: where they are
    codes their scales, those of the next block scale_step behind, else None.
    """
    STEP: tl.constexpr = N * BLOCK_K
    x_scales = load_more_scales_once(p_x_scale, scale_step, N)
    for i_step in range(first, k, STEP):
        i_next = tl.minimum(i_step + STEP, k - STEP)
        ahead = load_more_scales(w, i_next, N, BLOCK_K, CODES, SCALES, GROUP)
        p_x_next = p_x_scale
        if p_x_scale is not None:
            p_x_next = p_x_scale + tl.cast(i_next // BLOCK_K, tl.int64) * scale_step
        x_ahead = load_more_scales_once(p_x_next, scale_step, N)
        for i in tl.static_range(N):
            i_k = i_step + i * BLOCK_K
            block = load_codes(w, i_k, CODES) + scales[i]
            b_acc = add_block(b_acc, block, p_x_tile + i_k, x_scales[i], b_used, BLOCK_K, CODES, SCALES, GROUP)
        scales, x_scales = ahead, x_ahead
    if lowered(CODES, SCALES):
        b_acc *= 1 / unit(CODES, SCALES)
    return b_acc


@triton.jit
def _decode_kernel(
    p_w, p_out, n, k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    o_row = tl.minimum(tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), n - 1)
    first = tl.program_id(1) * BLOCK_K
    w = rows_from(p_w, o_row, first, n, k, BLOCK_K, CODES, SCALES, GROUP)
    block = load_block(w, tl.full((), 0, tl.int32), BLOCK_K, CODES, SCALES, GROUP)
    if p_out.dtype.element_ty == tl.float32:
        b_values = values(block, BLOCK_K, CODES, SCALES, GROUP)
    elif CODES == E4M3:
        b_values = values(block, BLOCK_K, CODES, SCALES, GROUP).to(tl.bfloat16)
    else:
        b_values = operand(block, BLOCK_K, CODES, SCALES, GROUP).to(tl.float32) * (1 / unit(CODES, SCALES))
    tl.store(p_out + o_row.to(tl.int64)[:, None] * k + first + tl.arange(0, BLOCK_K)[None, :], b_values)


def decode(segment: Segment, out: Tensor) -> None:
    """out[i] = the values of matrix i: float32, or in bfloat16 what products multiply with, of e4m3 the
    values rounded once. out: [n_matrices, n, k].
    """
    check("decode", out.shape == (segment.n_matrices, segment.n, segment.k) and out.is_contiguous(), "out as large")
    block_k = k_block(segment.k)
    for data, to in zip(segment.data, out, strict=True):
        launch(
            _decode_kernel, (-(-segment.n // 32), segment.k // block_k), address(segment, data), to, segment.n,
            segment.k, BLOCK_M=32, BLOCK_K=block_k, **constants(segment.format), num_warps=4,
        )
