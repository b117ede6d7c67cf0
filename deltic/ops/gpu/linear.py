"""Linears: y = x W^T. Narrow for decode (any number of rows of x), wide for prefill (a multiple of 64 rows).

Narrow: the weight's rows are the M side of the tensor-core tile and the tokens its N side, padded to 16, 32,
64 or 128, so a single token reads the weights as fast as the memory gives them. K is walked in order in one
float32 accumulator, or in S equal slices side by side (`k_splits`), whose sums are written apart and added in
order by the reader. S follows the weight's shape only. Tile shapes follow the number of rows: on Hopper the
bits of `wgmma` along K in order were measured equal over weight tiles 64 / 128, token tiles 16 .. 128 and K
blocks 64 / 128, so an element has the same bits in any batch.

Wide: tokens are the M side. The vendor's library where there is enough work that it does not split K, else a
Triton kernel. Both have the bits of an unsplit narrow linear (a test on the GPU asserts it).

A weight is a Matrix, whose segments are multiplied one after another, of narrow products three beside each
other: a few rows alone, such as DeltaNet's b and a, would walk K with nearly all of the chip idle. In other
formats than bf16 the narrow kernel makes operands of a segment on their way to the tensor cores
(operands.py); a wide product of more than DECODED_ROWS decodes it once into a workspace, and goes on as with
bf16, to the same bits. e4m3 is not decoded: rows of x are rounded to e4m3, too (fp8.py). On Hopper, e4m3
in blocks, and tens to hundreds of rows of bf16, e4m3 and 4 bits are multiplied by hopper.py, to the same bits
again; and so are up to 16 rows of codes by few_codes.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.formats import FLOATS, WeightFormat
from deltic.ops.geometry import Allocate
from deltic.ops.gpu import few_codes, hopper
from deltic.ops.gpu.chip import chip, group_of, wait_for_front
from deltic.ops.gpu.decode import E4M3, address, codes_at, constants, k_block, load_more_scales, rows_from
from deltic.ops.gpu.fp8 import (
    Fp8Rows,
    Wide,
    check_room,
    fp8_linear,
    fp8_rows,
    room,
    round_rows,
    rounded,
    vendor_multiplies,
)
from deltic.ops.gpu.launch import INTERPRETED, bound_levers, launch, matmul, matmul_slices, next_power_of_2
from deltic.ops.gpu.operands import add_blocks, decode
from deltic.ops.gpu.weight import is_bf16, rows_of
from deltic.ops.matrix import Matrix, Segment


@dataclass(frozen=True)
class Narrow:
    """A configuration of the narrow kernel."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    unroll: int = 1
    """Blocks of K whose scales are fetched together, while those before are multiplied."""


@triton.jit
def silu_product(b_gate, b_up):
    """silu(gate) * up, float32."""
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up


NONE, BIAS, GELU_TANH, GELU_ERF, ADD = (tl.constexpr(i) for i in range(5))
"""Operations of the wide kernel on its sums. All but NONE add a bias. Two then apply a form of GELU, and ADD
adds what is in `out` already.
"""


@triton.jit
def _finished(b_acc, p_bias, p_y, b_mask, o_m, m, EPILOGUE: tl.constexpr):
    """Sums as they are stored. The one multiply-add is written out: the compiler has no choice."""
    if EPILOGUE != NONE:
        b_acc += tl.load(p_bias + tl.minimum(o_m, m - 1))[None, :]
    if EPILOGUE == GELU_TANH:  # x (1 + tanh u) / 2 = x / (1 + exp(-2 u))
        b_inner = tl.fma(
            b_acc * b_acc, tl.full(b_acc.shape, 0.044715, tl.float32), tl.full(b_acc.shape, 1.0, tl.float32)
        )
        b_acc = b_acc / (1.0 + tl.exp(b_acc * b_inner * -1.5957691216057308))
    if EPILOGUE == GELU_ERF:
        b_acc = b_acc * 0.5 * (1.0 + tl.erf(b_acc * 0.7071067811865476))
    if EPILOGUE == ADD:
        b_acc += tl.load(p_y, mask=b_mask, other=0.0)
    return b_acc


@triton.jit
def _tile_rows(i_m, m, BLOCK_M: tl.constexpr, SWIGLU: tl.constexpr, EVEN_M: tl.constexpr):
    """The weight rows of a tile.

    SwiGLU: 8 gate rows and their 8 up rows in turn, which the accumulator keeps in one thread.
    """
    o_m = tl.arange(0, BLOCK_M)
    if SWIGLU:
        o_row = i_m * (BLOCK_M // 2) + o_m // 16 * 8 + o_m % 8
        if not EVEN_M:
            o_row = tl.minimum(o_row, m // 2 - 1)
        o_row += o_m // 8 % 2 * (m // 2)
        return tl.max_contiguous(tl.multiple_of(o_row, 8), 8) if EVEN_M else o_row
    o_row = i_m * BLOCK_M + o_m
    if not EVEN_M:
        # read twice instead of masked; not stored
        o_row = tl.minimum(o_row, m - 1)
    return o_row


@triton.jit
def _narrow_tile(
    p_x, p_codes, p_x_scale, p_w, p_out, i_m, i_n, n, m, k, k_slice, out_split, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_M: tl.constexpr, SWIGLU: tl.constexpr,
    UNROLL: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """Tile (i_m, i_n) of the product with one segment. p_codes, p_x_scale: x rounded, for e4m3, or None."""
    i_split = tl.program_id(1)
    first_k = i_split * k_slice
    o_row = _tile_rows(i_m, m, BLOCK_M, SWIGLU, EVEN_M)
    w = rows_from(p_w, o_row, first_k, m, k, BLOCK_K, CODES, SCALES, GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()

    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_used = o_n < n
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    o_x = o_n[:, None] * k + (first_k + tl.arange(0, BLOCK_K))[None, :]
    if CODES == E4M3:
        p_x_tile = codes_at(p_codes) + o_x
        p_scale = p_x_scale + first_k // BLOCK_K * n + tl.minimum(o_n, n - 1)
    else:
        p_x_tile = p_x + o_x
        p_scale = None
    scales = load_more_scales(w, 0, UNROLL, BLOCK_K, CODES, SCALES, GROUP)
    b_acc = add_blocks(
        b_acc, w, scales, p_x_tile, p_scale, n, b_used, 0, k_slice, UNROLL, BLOCK_K, CODES, SCALES, GROUP
    )

    if SWIGLU:
        b_acc = tl.permute(tl.reshape(b_acc, (BLOCK_M // 16, 2, 8, BLOCK_N)), (0, 2, 3, 1))
        b_gate, b_up = tl.split(b_acc)
        b_out = tl.reshape(silu_product(b_gate, b_up), (BLOCK_M // 2, BLOCK_N))
        width = m // 2
        o_y = i_m * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
    else:
        b_out = b_acc
        width = m
        o_y = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    p_y = p_out + i_split.to(tl.int64) * out_split + o_n[None, :].to(tl.int64) * out_row + o_y[:, None]
    b_mask = b_used[None, :]
    if not EVEN_M:
        b_mask = b_mask & (o_y < width)[:, None]
    tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=b_mask)


@triton.jit(do_not_specialize=["n"])
def _narrow_kernel(
    p_x, p_codes, p_x_scale, p_w, p_out, p_w_2, p_out_2, p_w_3, p_out_3, n, m, m_2, m_3, k, k_slice, out_split, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_M: tl.constexpr, SWIGLU: tl.constexpr,
    UNROLL: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_K_2: tl.constexpr,
    EVEN_M_2: tl.constexpr, CODES_2: tl.constexpr, SCALES_2: tl.constexpr, GROUP_2: tl.constexpr,
    BLOCK_K_3: tl.constexpr, EVEN_M_3: tl.constexpr, CODES_3: tl.constexpr, SCALES_3: tl.constexpr,
    GROUP_3: tl.constexpr, PDL: tl.constexpr,
):
    """Multiplies by one segment, or by two or three beside each other: the first programs have the third,
    then come those of the second, each smaller than the one before.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_blocks = tl.cdiv(n, BLOCK_N)
    # the token tiles of one weight tile are neighbours: the second finds the weights in the L2 cache
    i_m = tl.program_id(0) // n_blocks
    i_n = tl.program_id(0) % n_blocks
    if p_w_2 is None:
        is_other: tl.constexpr = False
    else:
        i_m -= tl.cdiv(m_2, BLOCK_M) + (tl.cdiv(m_3, BLOCK_M) if p_w_3 is not None else 0)
        is_other = i_m < 0
    if is_other:
        i_m += tl.cdiv(m_2, BLOCK_M)
        if p_w_3 is None:
            is_third: tl.constexpr = False
        else:
            is_third = i_m < 0
        if is_third:
            _narrow_tile(
                p_x, p_codes, p_x_scale, p_w_3, p_out_3, i_m + tl.cdiv(m_3, BLOCK_M), i_n, n, m_3, k, k_slice,
                out_split, out_row, BLOCK_M, BLOCK_N, BLOCK_K_3, EVEN_M_3, False, UNROLL, CODES_3, SCALES_3, GROUP_3,
                PDL,
            )
        else:
            _narrow_tile(
                p_x, p_codes, p_x_scale, p_w_2, p_out_2, i_m, i_n, n, m_2, k, k_slice, out_split, out_row, BLOCK_M,
                BLOCK_N, BLOCK_K_2, EVEN_M_2, False, UNROLL, CODES_2, SCALES_2, GROUP_2, PDL,
            )
    else:
        _narrow_tile(
            p_x, p_codes, p_x_scale, p_w, p_out, i_m, i_n, n, m, k, k_slice, out_split, out_row, BLOCK_M, BLOCK_N,
            BLOCK_K, EVEN_M, SWIGLU, UNROLL, CODES, SCALES, GROUP, PDL,
        )


@triton.jit
def _wide_kernel(
    p_x, p_w, p_bias, p_out, t, m, k, out_row,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_front(PDL)
    i_t, i_m = group_of(tl.program_id(0), tl.cdiv(t, BLOCK_T), tl.cdiv(m, BLOCK_M), GROUP)

    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    # rows past the end are read again instead of masked, and not stored
    p_x_row = p_x + tl.minimum(o_t, t - 1).to(tl.int64)[:, None] * k + o_k[None, :]
    p_w_row = p_w + tl.minimum(o_m, m - 1).to(tl.int64)[:, None] * k + o_k[None, :]
    b_acc = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    for i_k in range(0, k, BLOCK_K):
        b_acc = tl.dot(tl.load(p_x_row + i_k), tl.trans(tl.load(p_w_row + i_k)), b_acc)
    p_y = p_out + o_t.to(tl.int64)[:, None] * out_row + o_m[None, :]
    b_mask = (o_t < t)[:, None] & (o_m < m)[None, :]
    b_out = _finished(b_acc, p_bias, p_y, b_mask, o_m, m, EPILOGUE)
    tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=b_mask)


@triton.jit(do_not_specialize=["n"])
def _silu_mul_kernel(p_gate_up, p_out, p_scale, n, width, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):
    wait_for_front(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    o_col = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_mask = o_col < width
    b_gate = tl.load(p_gate_up + row * 2 * width + o_col, mask=b_mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + row * 2 * width + width + o_col, mask=b_mask, other=0.0).to(tl.float32)
    b_out = silu_product(b_gate, b_up).to(tl.bfloat16)
    if p_scale is None:
        tl.store(p_out + row * width + o_col, b_out, mask=b_mask)
    else:
        b_codes, b_scale = rounded(b_out)
        tl.store(codes_at(p_out) + row * width + o_col, b_codes, mask=b_mask)
        tl.store(p_scale + o_group.to(tl.int64) * n + row, b_scale, mask=o_group < width // GROUP)


def _slices(m: int, k: int) -> int:
    """Slices of K for a weight [m, k]: a power of two, until there are programs enough to fill the chip, and
    more of them for a long K, which else leaves half of it idle at the end. A slice has 256 of K or more.
    """
    tiles = -(-m // 64)
    splits = 1
    while k % (splits * 2 * 64) == 0 and k // (splits * 2) >= 256:
        if tiles * splits >= 100 and (k // splits <= 4096 or tiles * splits * 2 > 400):
            break
        splits *= 2
    return splits


def k_splits(m: int, k: int) -> int:
    """Returns the slices of K of a step's product with a weight [m, k]: 1 without the lever split_k."""
    return _slices(m, k) if bound_levers().split_k else 1


BESIDE = 3
"""Segments of one launch: of a file that mixes types DeltaNet's qkv, z, and b and a."""
WHOLE_TILES = 128
"""Multiple of the rows of every tile of a weight."""
VENDOR_ROWS = 32
VENDOR_SLICES_ROWS = 64
VENDOR_SLICES_SIZE = 8_000_000
"""Rows from which the vendor's library multiplies by a whole weight; rows and elements from which by one that
is cut along K. It takes no part in programmatic launch, which costs small kernels more than it brings.
"""


def vendor_pays_narrow(n: int, m: int, k: int, splits: int) -> bool:
    """Returns whether the vendor's library multiplies n rows by a weight [m, k], cut along K as `k_splits`
    says. It is faster from some rows on, and does not split what was cut already, so the bits are the same (a
    GPU test asserts it for the models' shapes).
    """
    rows = VENDOR_ROWS if splits == 1 else VENDOR_SLICES_ROWS
    if splits > 1 and m * k < VENDOR_SLICES_SIZE:
        return False
    return n >= rows and m % 8 == 0 and splits == _slices(m, k) and not INTERPRETED


VENDOR_E4M3_ROWS = 32
VENDOR_E4M3_WORK = 1_000_000_000
"""The same of e4m3 in groups that is not cut along K: rows, and rows times the weight's elements."""
BLOCKS_ROWS = 97
"""Rows from which it is faster with scales of blocks than with one for each weight row."""


def vendor_pays_e4m3(segment: Segment, out: Tensor) -> bool:
    """Returns whether the vendor's library multiplies rounded rows by a segment, into out [N, M], unsplit.
    The bits are the same.
    """
    n, m = out.shape
    enough = n >= VENDOR_E4M3_ROWS and n * m * segment.k >= VENDOR_E4M3_WORK
    return enough and segment.format.codes == "e4m3" and segment.format.group > 0 and vendor_multiplies(segment, out)


def narrow_config(n: int, m: int, k_slice: int, splits: int) -> Narrow:
    """The configuration for n rows of x and a weight of m rows, walked in slices of k_slice.

    None changes a bit. Few rows: small tiles, and enough bytes on their way for each SM
    (40 to 64 KB at least), few enough that the next kernel's programs find room beside them. Many rows: the
    tokens' tile is read again by each program, so weight tiles grow as long as every SM has one.
    """
    sms, shared, tokens = chip().n_sms, chip().shared_bytes, _token_tile(n)
    n_blocks = -(-n // tokens)
    block_m = 128 if tokens > 32 and -(-m // 128) * splits * n_blocks >= sms - 12 else 64
    programs = -(-m // block_m) * splits * n_blocks
    per_sm, smallest = 2, 3 * 2 * min(64, k_slice) * (block_m + tokens)
    # programs that all run at once, or else a last wave with enough of them to keep the memory busy
    while programs > sms * per_sm and programs % (sms * per_sm) < 100 and smallest <= shared // (per_sm + 1) - 2048:
        per_sm += 1
    wanted = (128, 64, 32) if tokens <= 32 and per_sm == 2 else (64, 32)
    block_k = next(b for b in wanted if k_slice % b == 0)
    # one stage of those given is being multiplied, the others are on their way
    stages = (shared // per_sm - 2048) // (2 * block_k * (block_m + tokens))
    stages = max(min(stages, 8, k_slice // block_k + 1), 2)
    return Narrow(block_m, block_k, block_m // 16, stages)


def _token_tile(n: int) -> int:
    return min(max(next_power_of_2(n), 16), 128)


PROGRAMS_TOGETHER = {16: 4, 32: 3}
"""Programs for so many rows that share an SM: its registers hold no more."""
FEW_ROWS_STAGES = 6
"""Stages of their pipelines at the most: more bring nothing."""


def decoded_config(n: int, m: int, k_slice: int, splits: int, format: WeightFormat) -> Narrow:
    """Returns what `narrow_config` does, for a weight in another format than bf16. Only an e4m3's block of K
    changes bits (fp8.py), and it follows the weight's shape.

    Low tiles, and as many programs as an SM takes: their waits for memory and for each other overlap. Few
    rows want long blocks of K and long pipelines, of many the rows of x take the room.
    """
    sms, shared = chip().n_sms, chip().shared_bytes
    block_m, tokens = 64, _token_tile(n)
    few, most = tokens <= 32, 128
    if format.codes != "e4m3" and tokens > 64:
        programs, longer = -(-m // block_m) * splits * -(-n // tokens), k_block(k_slice)
        fits = 2 * 3 * decoded_block_bytes(block_m, longer, n, format) <= shared
        # where two programs an SM are all there are, and it has room for both, long blocks are faster
        most = 128 if format.bits <= 5 and format.group >= 64 and programs <= 2 * sms and fits else 64
    elif format.bits <= 5 and (few or format.group >= 64):
        most = 256
    block_k = k_block(k_slice, most)
    unroll = 2 if few and block_k == 128 and k_slice % 256 == 0 else 1
    block = unroll * decoded_block_bytes(block_m, block_k, n, format)
    stages = 4 if block_k <= 64 else 3
    if few:  # as many as there is room for beside the other programs of an SM
        programs = -(-m // block_m) * splits
        shared //= max(1, min(PROGRAMS_TOGETHER[tokens], -(-programs // sms)))
        stages = FEW_ROWS_STAGES
    if not chip().multiplies_from_shared:  # the decoded block passes through shared memory, too
        stages = min(stages, (chip().shared_bytes - 1024 - 2 * unroll * block_m * block_k) // block)
    return Narrow(block_m, block_k, 4, max(2, min((shared - 1024) // block, stages)), unroll)


def decoded_block_bytes(block_m: int, block_k: int, n: int, format: WeightFormat) -> int:
    """Shared memory of a block of weight rows, with all that is stored of them, and of n rows of x."""
    a_row = Segment.n_bytes_of(256, block_k, format, "rows") // 256
    return block_m * a_row + (1 if format.codes == "e4m3" else 2) * block_k * _token_tile(n)


def _multiply(
    x: Tensor, parts: Sequence[tuple[Segment, Tensor]], swiglu: bool, config: Narrow | None,
    rows: Fp8Rows | None = None, in_blocks: bool = False,
) -> None:
    """The narrow kernel. parts: one to three segments, each with its out: [S, N, M] float32, or [N, M] (of
    SwiGLU [N, M / 2]), S = 1, columns of one tensor. rows: x rounded, for e4m3, by blocks of a slice.
    in_blocks: the largest segment has `block_scales`.
    """
    parts = sorted(parts, key=lambda part: part[0].n, reverse=True)
    (segment, out), *others = parts
    (n, k), m, splits = x.shape, segment.n, out.shape[0] if out.ndim == 3 else 1
    m_used = m if swiglu else out.shape[-1]
    check("linear", x.dtype == torch.bfloat16 and x.is_contiguous(), "contiguous bfloat16 x")
    check("linear", segment.k == k and k % (32 * splits) == 0, f"w [M, {k}], K in {splits} slices of 32 i")
    if config is None and hopper.pays(n, parts, swiglu, in_blocks):
        hopper.multiply(x, parts, swiglu, rows, in_blocks)
        return
    if config is None and few_codes.pays(n, parts, swiglu):
        few_codes.multiply(x, parts, swiglu)
        return
    sizes = n, m_used, k // splits, splits
    c = config or (narrow_config(*sizes) if segment.format.codes == "bf16" else decoded_config(*sizes, segment.format))
    _check_segment(segment, out, k // splits, c.block_k)
    beside: list[Tensor | None] = [None] * 4
    heights, said = [0, 0], dict[str, int]()
    for i in (0, 1):
        block, format = c.block_k, segment.format
        if i < len(others):
            other, beside[2 * i + 1] = others[i]
            heights[i], format, beside[2 * i] = other.n, other.format, address(other)
            block = _block_beside(c, segment.format, format, n, k // splits)
            _check_segment(other, others[i][1], k // splits, block)
        of_other = {"BLOCK_K": block, "EVEN_M": heights[i] % c.block_m == 0} | constants(format)
        said |= {f"{name}_{i + 2}": value for name, value in of_other.items()}
    tokens, operand = _token_tile(n), (x, None, None) if rows is None else (x, rows.codes, rows.scale)
    n_tiles = sum(-(-height // c.block_m) for height in (m_used, *heights))
    launch(
        _narrow_kernel, (n_tiles * -(-n // tokens), splits), *operand, address(segment), out, *beside, n, m, *heights,
        k, k // splits, out.stride(0) if out.ndim == 3 else 0, out.stride(-2), BLOCK_M=c.block_m, BLOCK_N=tokens,
        BLOCK_K=c.block_k, EVEN_M=m % c.block_m == 0, SWIGLU=swiglu, UNROLL=c.unroll, **constants(segment.format),
        **said, num_warps=c.num_warps, num_stages=c.num_stages,
    )


def _check_segment(segment: Segment, out: Tensor, k_slice: int, block_k: int) -> None:
    expect = partial(check, "linear")
    expect(segment.layout == "rows", f"weights in rows; there is no kernel for {segment.format.name} in panels")
    expect(k_slice % block_k == 0, f"slices of K in whole blocks of {block_k}")
    expect(out.stride(-1) == 1, "an out whose last dim is contiguous")
    expect(
        segment.format.codes != "e4m3" or (block_k == k_block(k_slice) and segment.format.group % block_k == 0),
        f"blocks of {k_block(k_slice)} of e4m3, with one scale each",
    )


def _block_beside(c: Narrow, first: WeightFormat, second: WeightFormat, n: int, k_slice: int) -> int:
    """Columns of a block of a segment beside one with this configuration: so many that it needs no more
    shared memory, of which every program has as much. Those of e4m3 are part of its bits.
    """
    if second.codes == "e4m3":
        return int(k_block(k_slice))
    block, room = c.block_k, decoded_block_bytes(c.block_m, c.block_k, n, first)
    while block > 32 and decoded_block_bytes(c.block_m, block, n, second) > room:
        block //= 2
    return block


def e4m3_block(w: Matrix, splits: int) -> int:
    """Columns of a block of rows that are rounded for a product with w, in so many slices of K; 0 where w has
    no e4m3.
    """
    return k_block(w.k // splits) if any(segment.format.codes == "e4m3" for segment in w.segments) else 0


def _rounded(x: Tensor, w: Matrix, splits: int, rows: Fp8Rows | None) -> Fp8Rows | None:
    """x rounded into `rows`, once for all segments, where w has e4m3. What is there already stays."""
    block_k = e4m3_block(w, splits)
    if not block_k:
        return None
    round_rows(x, room(rows), block_k)
    return rows


def _columns(w: Matrix, out: Tensor) -> Iterator[tuple[Segment, Tensor]]:
    """Yields each segment with the columns of out [..., M] that belong to its rows."""
    return zip(w.segments, out.split([segment.n for segment in w.segments], -1), strict=True)


def narrow_linear(
    x: Tensor, w: Matrix, out: Tensor, *, rows: Fp8Rows | None = None, blocks: Tensor | None = None,
    config: Narrow | None = None,
) -> None:
    """out[s, n, m] = the sum of x[n, k] w[m, k] over slice s of K, in order of k: few rows, any M.

    x: bfloat16 [N, K]; w: [M, K] in rows, K % (32 S) == 0; out: float32 [S, N, M], S as the caller chose
    (`k_splits`), or bfloat16 [N, M], unsplit and rounded once; its rows may lie apart. Rows are independent
    of each other, bit for bit. rows: a workspace, where w has e4m3; blocks: `block_scales` of the first
    segment. config: for measurements. Raises KernelError for weights in panels.

    out may have fewer columns, a multiple of 128: only so many rows of w, from the first on, which are in one
    format.
    """
    n, m, whole = x.shape[0], out.shape[-1], out.dtype == torch.bfloat16
    check("linear", whole or out.dtype == torch.float32, "float32 or bfloat16 out")
    fits = m == w.n or (m < w.n and m % WHOLE_TILES == 0 and len(w.segments) == 1)
    check("linear", out.shape[-2] == n and fits, f"out [..., {n}, {w.n}]")
    check("linear", out.ndim == (2 if whole else 3), "out [S, N, M] float32 or [N, M] bfloat16")
    parts = list(_columns(w, out)) if m == w.n else [(w.whole, out)]
    ours = config is not None or (len(parts) == 1 and hopper.pays(n, parts, False, blocks is not None))
    if not (whole or ours) and is_bf16(w) and vendor_pays_narrow(n, m, w.k, out.shape[0]):
        matmul_slices(x, rows_of("linear", w)[:m], out)
        return
    splits = 1 if whole else len(out)
    codes = _rounded(x, w, splits, rows)
    unsplit = out if whole else out[0]
    is_whole = splits == len(parts) == 1 and m == w.n
    if codes is not None and not ours and is_whole and vendor_pays_e4m3(w.whole, unsplit):
        fp8_linear(codes, w.whole, unsplit, blocks=blocks if n >= BLOCKS_ROWS else None)
        return
    for i in range(0, len(parts), BESIDE):
        _multiply(x, parts[i : i + BESIDE], False, config, codes, in_blocks=i == 0 and blocks is not None)


def narrow_swiglu(
    x: Tensor, w: Matrix, out: Tensor, *, gate_up: Tensor | None = None, rows: Fp8Rows | None = None,
    blocks: Tensor | None = None, block_k: int = 0,
) -> Fp8Rows | None:
    """out = bfloat16(silu(gate) * up), gate and up the unsplit float32 sums of x W^T. Returns `rows` for the
    product with out. block_k: that one's in e4m3, 0 if it has none: a SwiGLU that is a kernel of its own
    rounds, and leaves out as it was.

    x: bfloat16 [N, K]; w: [2F, K] in rows, gate rows first; out: bfloat16 [N, F]. With the lever
    silu_epilogue off: narrow_linear into gate_up (float32 [1, N, 2F]), then silu_mul, the same bits; so, too,
    where the vendor's library multiplies, and where w has several segments. rows, blocks: as in
    narrow_linear. Raises KernelError for weights in panels.
    """
    several = len(w.segments) > 1
    shaped = out.dtype == torch.bfloat16 and 2 * out.shape[1] == w.n
    check("linear", shaped, "bfloat16 out, half as wide as w is high")
    ours = not several and hopper.pays(len(x), [(w.whole, out)], True, blocks is not None)
    vendor = not ours and is_bf16(w) and vendor_pays_narrow(len(x), w.n, w.k, 1)
    if not ours and gate_up is not None and not several and not is_bf16(w):
        vendor = vendor_pays_e4m3(w.whole, gate_up[0])
    if not bound_levers().silu_epilogue or vendor or several:
        check("linear", gate_up is not None, "a gate_up buffer where SwiGLU is a kernel of its own")
        assert gate_up is not None
        narrow_linear(x, w, gate_up, rows=rows, blocks=blocks)
        if block_k:
            return silu_mul_rounded(gate_up[0], room(rows), out.shape[1], block_k)
        silu_mul(gate_up[0], out)
    else:
        codes = _rounded(x, w, 1, rows)
        _multiply(x, [(w.whole, out)], True, None, codes, in_blocks=blocks is not None)
    return None if rows is None else rows.rounded_by(0)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = bfloat16(silu(gate) * up) in float32. gate_up: float32 or bfloat16 [T, 2F]; out: bfloat16 [T, F].
    """
    n, width = out.shape
    check("silu_mul", out.dtype == torch.bfloat16 and out.is_contiguous(), "bfloat16 out")
    _silu_mul(gate_up, out, None, n, width, _SILU_BLOCK)


def silu_mul_rounded(gate_up: Tensor, rows: Fp8Rows, width: int, block_k: int) -> Fp8Rows:
    """rows = silu_mul of gate_up [T, 2F] by `round_rows`, F = width: the same bits, and bfloat16 rows are
    never stored. Returns rows for the next product.
    """
    n = len(gate_up)
    check("silu_mul", width % block_k == 0, "a width of whole blocks")
    check_room("silu_mul", rows, n, width, block_k)
    _silu_mul(gate_up, rows.codes, rows.scale, n, width, block_k)
    return rows.rounded_by(block_k)


_SILU_BLOCK = 1024


def _silu_mul(gate_up: Tensor, out: Tensor, scale: Tensor | None, n: int, width: int, group: int) -> None:
    """scale: where out are codes, each `group` columns with one."""
    check("silu_mul", gate_up.shape == (n, 2 * width) and gate_up.is_contiguous(), f"gate_up [{n}, {2 * width}]")
    launch(
        _silu_mul_kernel, (n, -(-width // _SILU_BLOCK)), gate_up, out, scale, n, width, BLOCK=_SILU_BLOCK, GROUP=group,
        num_warps=4,
    )


def vendor_pays(t: int, m: int) -> bool:
    """Returns whether the vendor's library multiplies [t, k] by a weight of m rows: from one full wave of its
    tiles on. Below that it may split K, which changes bits, and is no faster.
    """
    return t >= 1024 and m % 8 == 0 and t * m >= chip().n_sms * 128 * 256


def wide_config(t: int, m: int) -> Wide:
    """The largest tile that still gives every SM one. None changes a bit."""
    sms, shared = chip().n_sms, chip().shared_bytes
    for block_t, block_m, warps, stages in ((128, 256, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4)):
        room = shared // (2 * 64 * (block_t + block_m))
        if room >= 2 and -(-t // block_t) * -(-m // block_m) >= sms:
            return Wide(block_t, block_m, warps, min(stages, room))
    return Wide(64, 64, 4, min(5, shared // (2 * 64 * 128)))


@dataclass(frozen=True)
class WideScratch:
    """Workspaces of wide products with quantised weights."""

    weights: Tensor | None  # bfloat16: the largest matrix that is not e4m3, decoded
    rows: Fp8Rows | None  # of products with e4m3


DECODED_ROWS = 256
"""Rows up to which a weight is decoded on its way to the product. For more rows it is decoded once."""


def wide_scratch(
    n_rows: int, largest: int, widest: int, codes: Collection[str], allocate: Allocate, *, each: int = 1
) -> WideScratch:
    """Workspaces for up to n_rows rows, or `each` times as many that are as many times narrower, matrices of
    up to `largest` elements and `widest` columns, and these codes. allocate(name, size, dtype) gives a
    tensor.
    """
    decodes = n_rows * each > DECODED_ROWS and bool(set(codes) - set(FLOATS))
    return WideScratch(
        allocate("decoded weights", (largest,), torch.bfloat16) if decodes else None,
        fp8_rows("prefill e4m3 rows", n_rows, widest, allocate, largest) if "e4m3" in codes else None,
    )


def wide_linear(
    x: Tensor, w: Matrix, out: Tensor, *, scratch: WideScratch | None = None,
    blocks: Sequence[Tensor | None] = (), config: Wide | None = None,
) -> None:
    """out[t, m] = sum over k of x[t, k] w[m, k], in order of k, rounded once: many rows.

    x: bfloat16 [T, K], T a multiple of 64, K of 32; w: [M, K] in rows; out: bfloat16 or float32 [T, M]. Rows
    are independent of each other, bit for bit. They have the bits of an unsplit narrow_linear, but for e4m3.
    scratch: where w is quantised. blocks: `block_scales` of each segment, or none at all. config: for
    measurements, of bf16. Raises KernelError for weights in panels.
    """
    (t, k), m = x.shape, w.n
    check("linear", x.dtype == torch.bfloat16, "bfloat16 x")
    check("linear", t % 64 == 0 and k % 32 == 0 and w.k == k, f"whole blocks of 64 rows, K % 32 == 0, w [M, {k}]")
    check("linear", out.shape == (t, m) and out.dtype in (torch.bfloat16, torch.float32), f"out [{t}, {m}]")
    check("linear", x.is_contiguous() and out.is_contiguous(), "contiguous tensors")
    codes = _rounded(x, w, 1, None if scratch is None else scratch.rows)
    for (segment, columns), scales in zip(_columns(w, out), blocks or [None] * len(w.segments), strict=True):
        if segment.format.codes == "e4m3":
            assert codes is not None
            fp8_linear(codes, segment, columns, blocks=scales)
        elif segment.format.codes != "bf16" and t <= DECODED_ROWS:
            _multiply(x, [(segment, columns if out.dtype == torch.bfloat16 else columns[None])], False, None)
        else:
            rows = _bf16_rows(segment, scratch)
            if config is None and out.dtype == torch.bfloat16 and vendor_pays(t, segment.n):
                matmul(x, rows, columns)
            else:
                _wide(x, rows, columns, config)


def _bf16_rows(segment: Segment, scratch: WideScratch | None) -> Tensor:
    """Returns the rows of a segment in bf16, decoded if they must be."""
    if segment.format.codes == "bf16":
        return rows_of("linear", segment)
    check("linear", scratch is not None and scratch.weights is not None, "a workspace for decoded weights")
    assert scratch is not None and scratch.weights is not None
    rows = scratch.weights[: segment.n * segment.k].view(1, segment.n, segment.k)
    decode(segment, rows)
    return rows[0]


def biased_linear(
    x: Tensor, w: Matrix, bias: Tensor, out: Tensor, *, how: tl.constexpr = BIAS,
    scratch: WideScratch | None = None,
) -> None:
    """out = x W^T + bias, GELU of that (GELU_TANH, GELU_ERF), or out += x W^T + bias (ADD, float32 out).

    x: bfloat16 [T, K], T a multiple of 16, K of 32; w: [M, K] in rows, in any format: operands are bfloat16;
    bias: float32 [M]; out: bfloat16 or float32 [T, M], whose rows may lie apart. Sums over k are in order,
    and rounded where out is bfloat16, at the end. Rows are independent of each other, bit for bit. scratch:
    where w is quantised. Raises KernelError for weights in panels.
    """
    (t, k), m = x.shape, w.n
    check("linear", x.dtype == torch.bfloat16 and x.is_contiguous(), "contiguous bfloat16 x")
    check("linear", t % 16 == 0 and k % 32 == 0 and w.k == k, f"T % 16 == 0, K % 32 == 0, w [M, {k}]")
    check("linear", out.shape == (t, m) and out.stride(1) == 1, f"out [{t}, {m}]")
    check("linear", out.dtype in ((torch.float32,) if how == ADD else (torch.bfloat16, torch.float32)), "a type of out")
    check("linear", bias.dtype == torch.float32 and bias.shape == (m,), f"a float32 bias of {m}")
    c = wide_config(t, m)
    if c.block_m == 256:  # the registers of its sums are all there are: nothing could follow them
        c = Wide(c.block_t, 128, c.num_warps, c.num_stages)
    _wide(x, _bf16_rows(w.whole, scratch), out, c, bias, how)


def _wide(
    x: Tensor, rows: Tensor, out: Tensor, config: Wide | None, bias: Tensor | None = None,
    how: tl.constexpr = NONE,
) -> None:
    """The wide kernel; out's rows may lie apart."""
    (t, k), m = x.shape, len(rows)
    c = config or wide_config(t, m)
    launch(
        _wide_kernel, (-(-t // c.block_t) * -(-m // c.block_m),), x, rows, bias, out, t, m, k, out.stride(0),
        BLOCK_T=c.block_t, BLOCK_M=c.block_m, BLOCK_K=64 if k % 64 == 0 else 32, GROUP=8, EPILOGUE=how.value,
        num_warps=c.num_warps, num_stages=c.num_stages,
    )


def product(x: Tensor, w: Matrix) -> Tensor:
    """x W^T, float32 [N, M], of bfloat16 x [N, K], by torch and into new memory: for what is multiplied once,
    at load. Weights are rounded to bfloat16, e4m3 too.

    Raises KernelError for weights in panels.
    """
    expect = partial(check, "linear")
    parts = []
    for segment in w.segments:
        expect(segment.layout == "rows", f"weights in rows; there is no kernel for {segment.format.name} in panels")
        if segment.format.codes == "bf16":
            rows = rows_of("linear", segment)
        else:
            rows = torch.empty((segment.n, segment.k), dtype=torch.bfloat16, device=x.device)
            decode(segment, rows[None])
        parts.append(torch.mm(x, rows.t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ rows.float().t())
    return torch.cat(parts, 1)
