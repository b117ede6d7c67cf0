"""Keys and values in pages that are quantised (ops/kv_formats.py): how kernels write and read them.

A page of a layer is bytes, in the sections of `KvFormat.sections`. Codes lie by head and token. e4m3 is in
the order of dims. Values of 4 bits share a byte with those d / 2 dims behind: dim j has the low bits of byte
j, dim j + d / 2 the high ones.

Written is what tests/reference/kv.py says, to the bit: every division is rounded once. Read are operands of
a product, all exact: e4m3 keys as float16, which Hopper converts by one instruction for two, beside queries
of float16. Scales stay outside:

    score  = (sum of q code) * (key scale * d^-0.5)                      float32
    output = sum of rounded(p * value scale) * code + sum of p * least   float32, the last for each head

Values of a prefill are bfloat16, and so are their weights: exponents hold any weight of softmax times a
scale. e4m3 is moved to its place and multiplied by 2^120, 4 bits are a bfloat16 between 128 and 144, less
128.
Values and weights of a decode are float16: p is then relative to the largest score + log2(value scale), times
2^15, and weights are rounded to 11 bits from 2^15 down to 2^-14, to steps of 2^-24 below.

q is rounded to bfloat16 as for plain pages; float16 holds that where it is from 2^-17 to 65,504, and steps of
2^-24 below. In the place of p, p * scale is rounded; nothing else is that is not in plain pages.

The new token of a decode meets no tensor core: it is in the sums with code * scale, or least + code * scale,
in float32. As q is not e4m3, there is no product of 8 bits. How these agree with the
reference: 1 % and 0.01 of outputs of order 1 (tests/gpu/test_gpu_attention_decode.py), as with plain pages.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.chip import converts_e4m3
from deltic.ops.gpu.decode import e4m3
from deltic.ops.gpu.fp8 import magnitudes, nearest
from deltic.ops.gpu.launch import INTERPRETED
from deltic.ops.kv_formats import KV_FORMATS, KvFormat

_INTERPRETED = tl.constexpr(INTERPRETED)

_FORMATS = tuple(KV_FORMATS.values())
# Numbers, as of the formats of weights (decode.py).
PLAIN, FP8, K8V4 = (tl.constexpr(list(KV_FORMATS).index(name)) for name in ("bf16", "fp8", "turboquant_k8v4"))


def constant(format: KvFormat) -> int:
    """KV of a kernel whose pages have this format."""
    return _FORMATS.index(format)


def fits(pages: Tensor, n_heads: int, dim: int, format: KvFormat) -> bool:
    """Returns whether these are pages of a layer: bfloat16 [n, 2, nk, 64, d], or uint8 [n, bytes]. A page is
    contiguous, a quantised one at a multiple of 64 bytes.
    """
    if format.is_plain:
        is_right = pages.dtype == torch.bfloat16 and pages.shape[1:] == (2, n_heads, PAGE_SIZE, dim)
        return is_right and pages[0].is_contiguous()
    is_right = pages.dtype == torch.uint8 and pages.shape[1:] == (format.layer_bytes(n_heads, dim),)
    return is_right and pages.stride(1) == 1 and pages.stride(0) % PAGE_SIZE == 0


def expected(n_heads: int, dim: int, format: KvFormat) -> str:
    """The same in words."""
    if format.is_plain:
        return f"bfloat16 pages [n, 2, {n_heads}, 64, {dim}], a page's part contiguous"
    return f"uint8 pages [n, {format.layer_bytes(n_heads, dim)}] in {format.name}, a page's part contiguous"


@triton.constexpr_function
def section(name, KV, NK, D):
    """First byte of a section in a page."""
    return _FORMATS[KV].sections(NK, D)[name][0]


@triton.constexpr_function
def value_width(KV, D):
    """Bytes of the codes of a value."""
    return D * _FORMATS[KV].value_bits // 8


@triton.jit
def floats_at(p_page, name: tl.constexpr, i_kv, KV: tl.constexpr, NK: tl.constexpr, D: tl.constexpr):
    """The address of a head's scales or least values in a page."""
    return (p_page + section(name, KV, NK, D) + i_kv * 128).to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def keys_at(p_page, i_kv, KV: tl.constexpr, NK: tl.constexpr, D: tl.constexpr):
    """The address of a head's codes of keys in a page, bytes."""
    return p_page + section("keys", KV, NK, D) + i_kv * (64 * D)


@triton.jit
def values_at(p_page, i_kv, KV: tl.constexpr, NK: tl.constexpr, D: tl.constexpr):
    """The same of values."""
    return p_page + section("values", KV, NK, D) + i_kv * (64 * value_width(KV, D))


# Writing.


@triton.jit
def _scale(b_size, MOST: tl.constexpr, b_bits):
    """float32 that float16 holds: size / MOST, at least 2^-14; NaN where one of b_bits is not finite."""
    b_scale = tl.div_rn(b_size, tl.full(b_size.shape, MOST, tl.float32)).to(tl.float16).to(tl.float32)
    b_scale = tl.maximum(b_scale, 0.00006103515625)
    return tl.where((b_bits < 0x7F800000) & (magnitudes(b_scale) < 0x7F800000), b_scale, float("nan"))


@triton.jit
def e4m3_codes(b_x):
    """uint8: codes nearest to float32, ties to even, of at most 448; of what is not finite NaN."""
    b_most = tl.where(magnitudes(b_x) < 0x7F800000, tl.minimum(tl.maximum(b_x, -448.0), 448.0), float("nan"))
    return nearest(b_most).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_values(b_codes):
    """float32: what they are."""
    if not _INTERPRETED and converts_e4m3():
        b_values = b_codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        b_values = e4m3(b_codes)
    return b_values


@triton.jit
def key_scale(b_size, KV: tl.constexpr):
    """float32 [R]: of rows whose largest magnitude has the bits b_size; 1 where keys have none."""
    b_scale = tl.full(b_size.shape, 1.0, tl.float32)
    if KV == FP8:
        b_scale = _scale(b_size.to(tl.float32, bitcast=True), 448.0, b_size)
    return b_scale


@triton.jit
def key_codes(b_x, b_scale, KV: tl.constexpr):
    """Codes of keys, float32 [R, N], of scales [R]."""
    if KV == FP8:
        b_x = tl.div_rn(b_x, b_scale[:, None] + tl.zeros_like(b_x))
    return e4m3_codes(b_x)


@triton.jit
def largest(b_x):
    """int32 [R]: the bits of a row's largest magnitude, of float32 [R, N]. Of what is not finite they are the
    largest.
    """
    return tl.max(magnitudes(b_x), 1)


@triton.jit
def store_key_scale(p_page, i_kv, o_t, b_scale, b_mask, KV: tl.constexpr, NK: tl.constexpr, D: tl.constexpr):
    if KV == FP8:
        tl.store(floats_at(p_page, "key_scales", i_kv, KV, NK, D) + o_t, b_scale.to(tl.float16), mask=b_mask)


@triton.jit
def _fours(b_x, b_least, b_scale):
    """uint8: codes of 4 bits."""
    b_y = tl.div_rn(b_x - b_least[:, None], b_scale[:, None] + tl.zeros_like(b_x))
    # what is added rounds to integers
    b_y = tl.minimum(tl.maximum(b_y, 0.0), 15.0) + 8388608.0
    return (b_y.to(tl.int32, bitcast=True) & 15).to(tl.uint8)


@triton.jit
def behind(b_low, b_high):
    """[R, 2 N]: the columns of the first, then those of the second."""
    R: tl.constexpr = b_low.shape[0]
    N: tl.constexpr = b_low.shape[1]
    return tl.reshape(tl.permute(tl.join(b_low, b_high), (0, 2, 1)), (R, 2 * N))


@triton.jit
def _halves(b_x):
    R: tl.constexpr = b_x.shape[0]
    N: tl.constexpr = b_x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(b_x, (R, 2, N)), (0, 2, 1)))


@triton.jit
def store_values(p_page, i_kv, o_t, b_x, KV: tl.constexpr, NK: tl.constexpr, D: tl.constexpr):
    """Values, float32 [R, D], into the places o_t [R] of a page -> what is stored, float32 [R, D]."""
    p_codes = values_at(p_page, i_kv, KV, NK, D)
    b_bits = largest(b_x)
    if KV == FP8:
        b_scale = _scale(b_bits.to(tl.float32, bitcast=True), 448.0, b_bits)
        b_codes = key_codes(b_x, b_scale, KV)
        tl.store(p_codes + o_t[:, None] * D + tl.arange(0, D)[None, :], b_codes)
        b_value = e4m3_values(b_codes) * b_scale[:, None]
    else:
        b_least = tl.min(b_x, 1).to(tl.float16).to(tl.float32)
        b_scale = _scale(tl.max(b_x, 1) - b_least, 15.0, b_bits)
        b_codes = _fours(b_x, b_least, b_scale)
        b_low, b_high = _halves(b_codes)
        o_byte = tl.arange(0, D // 2)
        tl.store(p_codes + o_t[:, None] * (D // 2) + o_byte[None, :], b_low | (b_high << 4))
        tl.store(floats_at(p_page, "least_values", i_kv, KV, NK, D) + o_t, b_least.to(tl.float16))
        b_value = b_codes.to(tl.float32) * b_scale[:, None] + b_least[:, None]
    tl.store(floats_at(p_page, "value_scales", i_kv, KV, NK, D) + o_t, b_scale.to(tl.float16))
    return b_value


# Reading.


@triton.constexpr_function
def _e4m3_assembly(kind, has_conversion=False, of_pairs=False):
    """Four codes, $2, as two pairs of float16 or bfloat16: moved to their places, and to their exponents; or
    as the chip has it. of_pairs: the first and third are one pair, the second and fourth the other.
    """
    if has_conversion:
        order = "prmt.b32 t, $2, 0, 0x3120;" if of_pairs else "mov.b32 t, $2;"
        return (
            f"{{ .reg .b32 t; .reg .b16 l, h; {order} mov.b32 {{l, h}}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
        )
    shift, mask, factor = {"f16": (1, 0x3F803F80, 0x5C005C00), "bf16": (4, 0x07F007F0, 0x7B807B80)}[kind]
    lines = [f"mov.b32 f, {factor}; mov.b32 n, 0x80008000;"]
    for i, bytes in enumerate(("0x2404", "0x3414") if of_pairs else ("0x1404", "0x3424")):
        lines.append(f"prmt.b32 t, $2, 0, {bytes}; shr.u32 u, t, {shift}; and.b32 u, u, {mask};")
        lines.append(f"lop3.b32 t, t, 0x80008000, u, 0xEA; fma.rn.{kind}x2 ${i}, t, f, n;")
    return f"{{ .reg .b32 t, u, f, n; {' '.join(lines)} }}"


@triton.constexpr_function
def _fours_assembly():
    """Eight codes of four bytes, $4, as pairs of bfloat16: low bits in $0, $1, high bits in $2, $3."""
    lines = ["mov.b32 f, 0x3F803F80; mov.b32 n, 0xC300C300;"]
    for i, bytes in enumerate(("0x4140", "0x4342")):
        lines.append(f"prmt.b32 t, $4, 0, {bytes}; lop3.b32 u, t, 0x000F000F, 0x43004300, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${i}, u, f, n;")
        lines.append(f"shr.u32 t, t, 4; lop3.b32 u, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 ${i + 2}, u, f, n;")
    return f"{{ .reg .b32 t, u, f, n; {' '.join(lines)} }}"


@triton.jit
def key_operand(b_codes):
    """float16: what e4m3 codes in bytes are."""
    if _INTERPRETED or is_hip():
        b_keys = e4m3(b_codes).to(tl.float16)
    else:
        b_keys = tl.inline_asm_elementwise(
            _e4m3_assembly("f16", converts_e4m3()), "=r,=r,r", [b_codes], dtype=tl.float16, is_pure=True,
            pack=4,
        )
    return b_keys


@triton.jit
def value_operand(b_codes, KV: tl.constexpr):
    """bfloat16 [64, D]: what codes of values are, before their scale and least value."""
    if KV == FP8:
        if _INTERPRETED or is_hip():
            b_values = e4m3(b_codes).to(tl.bfloat16)
        else:
            b_values = tl.inline_asm_elementwise(
                _e4m3_assembly("bf16"), "=r,=r,r", [b_codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    elif _INTERPRETED or is_hip():
        b_values = behind((b_codes & 15).to(tl.float32).to(tl.bfloat16), (b_codes >> 4).to(tl.float32).to(tl.bfloat16))
    else:
        b_low, b_high = tl.inline_asm_elementwise(
            _fours_assembly(), "=r,=r,=r,=r,r", [b_codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        b_values = behind(b_low, b_high)
    return b_values


@triton.jit
def e4m3_pairs(b_pairs):
    """Decodes two codes in 16 bits -> float16 of the first ones, and of the second ones."""
    if _INTERPRETED or is_hip():
        b_first = e4m3((b_pairs & 255).to(tl.uint8)).to(tl.float16)
        b_second = e4m3((b_pairs >> 8).to(tl.uint8)).to(tl.float16)
    else:
        b_first, b_second = tl.inline_asm_elementwise(
            _e4m3_assembly("f16", converts_e4m3(), True), "=r,=r,r", [b_pairs],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )
    return b_first, b_second


@triton.jit
def halves_of_fours(b_x):
    """[R, N] -> [R, N / 2] twice: of each four columns the first two, and the others."""
    R: tl.constexpr = b_x.shape[0]
    N: tl.constexpr = b_x.shape[1]
    b_first, b_second = tl.split(tl.permute(tl.reshape(b_x, (R, N // 4, 2, 2)), (0, 1, 3, 2)))
    return tl.reshape(b_first, (R, N // 2)), tl.reshape(b_second, (R, N // 2))


@triton.jit
def key_halves(b_pairs):
    """Decodes two codes in 16 bits, [R, D / 2] -> `halves_of_fours` of the keys, float16: what a register of
    four codes gives in its order.
    """
    if _INTERPRETED or is_hip():
        b_first, b_second = e4m3_pairs(b_pairs)
        b_first, b_second = halves_of_fours(
            tl.reshape(tl.join(b_first, b_second), (b_pairs.shape[0], 2 * b_pairs.shape[1]))
        )
    else:
        b_first, b_second = tl.inline_asm_elementwise(
            _e4m3_assembly("f16", converts_e4m3()), "=r,=r,r", [b_pairs], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2,
        )
    return b_first, b_second


@triton.jit
def four_pairs(b_pairs):
    """Four codes of 4 bits in 16 -> float16: the first byte's low bits, the second's, the high bits of both.

    Times `four_unit`, and the high ones times 16 of it: where bits need only be cut out they are float16s
    below 2^-14, which tensor cores multiply like any other.
    """
    if _INTERPRETED or is_hip():
        b_low = (b_pairs & 15).to(tl.float32).to(tl.float16)
        b_low_2 = ((b_pairs >> 8) & 15).to(tl.float32).to(tl.float16)
        b_high = (b_pairs & 240).to(tl.float32).to(tl.float16)
        b_high_2 = ((b_pairs >> 8) & 240).to(tl.float32).to(tl.float16)
    else:
        b_low, b_low_2, b_high, b_high_2 = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $4, 8; and.b32 $0, $4, 0x000F000F; and.b32 $1, t, 0x000F000F;"
            "and.b32 $2, $4, 0x00F000F0; and.b32 $3, t, 0x00F000F0; }",
            "=r,=r,=r,=r,r", [b_pairs], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )
    return b_low, b_low_2, b_high, b_high_2


@triton.jit
def four_unit():
    """Factor with which `four_pairs` multiplies."""
    if _INTERPRETED or is_hip():
        unit = 1.0
    else:
        unit = 5.9604644775390625e-08
    return unit


@triton.jit
def in_turn(b_first, b_second):
    """[2 N, R]: rows of the two in turn."""
    N: tl.constexpr = b_first.shape[0]
    R: tl.constexpr = b_first.shape[1]
    return tl.reshape(tl.permute(tl.join(b_first, b_second), (0, 2, 1)), (2 * N, R))


@triton.jit
def below(b_first, b_second):
    """[2 N, R]: the rows of the first, then those of the second."""
    N: tl.constexpr = b_first.shape[0]
    R: tl.constexpr = b_first.shape[1]
    return tl.reshape(tl.permute(tl.join(b_first, b_second), (2, 0, 1)), (2 * N, R))


@triton.jit
def pairs_at(p_codes, o_t, o_pair, WIDTH: tl.constexpr):
    """Addresses of the bytes [tokens, WIDTH] from p_codes on, two and two."""
    return p_codes.to(tl.pointer_type(tl.uint16), bitcast=True) + o_t * (WIDTH // 2) + o_pair


@triton.jit
def load_floats(p_page, i_kv, o_t, b_mask, KV: tl.constexpr, NK: tl.constexpr, D: tl.constexpr):
    """float32, of tokens o_t: scales of keys and of values, and least values; 0 where not b_mask, and for
    those that the format has not.
    """
    b_key = tl.full(o_t.shape, 0.0, tl.float32)
    b_least = b_key
    b_value = tl.load(floats_at(p_page, "value_scales", i_kv, KV, NK, D) + o_t, mask=b_mask, other=0.0).to(tl.float32)
    if KV == FP8:
        b_key = tl.load(floats_at(p_page, "key_scales", i_kv, KV, NK, D) + o_t, mask=b_mask, other=0.0).to(tl.float32)
    else:
        p_least = floats_at(p_page, "least_values", i_kv, KV, NK, D) + o_t
        b_least = tl.load(p_least, mask=b_mask, other=0.0).to(tl.float32)
    return b_key, b_value, b_least


# Keys that are chosen (index.py), of pages in any format.


@triton.jit
def read_keys(p_chosen, position, CHOSEN: tl.constexpr, RATIO: tl.constexpr):
    """Keys that the token at `position` reads of a context whose groups may be chosen, and 1 if its own is
    the last of them, else 0: a group that is whole with it may be left out.
    """
    n_groups, n_behind = (position + 1) // RATIO, (position + 1) % RATIO
    chooses = n_groups > CHOSEN
    last = tl.load(p_chosen + CHOSEN - 1, mask=chooses, other=0)
    has_own = (n_behind > 0) | (last == position // RATIO) | (chooses == 0)
    return tl.where(chooses, CHOSEN * RATIO + n_behind, position + 1), has_own.to(tl.int32)


@triton.jit
def key_places(p_chosen, p_table, o_key, position, PAGE: tl.constexpr, CHOSEN: tl.constexpr, RATIO: tl.constexpr):
    """Pages of the o_key-th of these keys, int64, and their places there."""
    n_groups, i = (position + 1) // RATIO, o_key // RATIO
    is_chosen = (n_groups > CHOSEN) & (i < CHOSEN)
    b_group = tl.load(p_chosen + i, mask=is_chosen, other=0)
    b_group = tl.where(is_chosen, b_group, tl.where(n_groups > CHOSEN, n_groups, i))
    b_token = tl.minimum(b_group * RATIO + o_key % RATIO, position)
    return tl.load(p_table + b_token // PAGE).to(tl.int64), b_token % PAGE
