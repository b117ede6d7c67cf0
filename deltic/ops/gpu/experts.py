"""Experts' weights in any format as operands: the products that the decode (moe_decode.py) and the prefill
(moe_prefill.py) of a mixture have in common.

A format is one number of a kernel, `number`. Gate and up rows may be two segments of different formats, whose
sums are walked one after the other. Weight rows are the tall side of a product, rows of x the narrow one
(operands.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deltic.ops import formats
from deltic.ops.contract import check
from deltic.ops.formats import WeightFormat
from deltic.ops.gpu.decode import address, codes_at, load_codes, load_more_scales, matrix_elements, rows_from
from deltic.ops.gpu.operands import add_block, add_blocks
from deltic.ops.matrix import Matrix, Segment

NONE, PLAIN = -1, 0
"""Numbers in a format's place: NONE if there is no second segment, PLAIN for bf16."""
_NONE = tl.constexpr(NONE)


def number(format: WeightFormat) -> int:
    """The format as a kernel takes it."""
    return formats.CODES.index(format.codes) + 32 * formats.SCALES.index(format.scales) + 512 * format.group


def segments_of(w: Matrix) -> tuple[Tensor, Tensor | None, int, int]:
    """Returns what a kernel takes of gate_up: addresses of the first and the second segment, which may be
    none, and their formats.

    Raises KernelError for weights in panels, and for segments that are not gate and up.
    """
    for segment in w.segments:
        check(
            "moe", segment.layout == "rows", f"weights in rows; there is no kernel for {segment.format.name} in panels"
        )
    first = w.segments[0]
    if len(w.segments) == 1:
        return address(first), None, number(first.format), NONE
    check("moe", [segment.n for segment in w.segments] == [w.n // 2] * 2, "gate and up, each in one format")
    return address(first), address(w.segments[1]), number(first.format), number(w.segments[1].format)


def segment_of(w: Matrix) -> tuple[Tensor, int]:
    """Returns the address and format of down. Raises KernelError for several segments, or panels."""
    memory, _, format, _ = segments_of(Matrix(w.n, w.k, (w.whole,)))
    return memory, format


def is_e4m3(*matrices: Matrix) -> bool:
    """Returns whether rows in codes are multiplied with each matrix. With two segments rows are rounded on
    their way.
    """
    return all(len(w.segments) == 1 and w.whole.format.codes == "e4m3" for w in matrices)


@triton.constexpr_function
def block_of(k: int, format: int, most: int) -> int:
    """Columns of a block of K. Only of e4m3 does it change bits, and follows k alone."""
    codes = formats.CODES[format % 32]
    most = 128 if codes == "e4m3" else min(most, 64) if codes == "bf16" else most
    return next(block for block in (256, 128, 64, 32) if block <= most and k % block == 0)


@triton.constexpr_function
def together(k: int, format: int, most: int, n_columns: int) -> int:
    """Blocks of K whose scales are fetched together, of a product with so many rows of x."""
    codes, n_blocks = formats.CODES[format % 32], k // block_of(k, format, most)
    if codes == "bf16" or (codes == "e4m3" and n_columns > 32):  # sums of a block take the registers
        return 1
    return next(n for n in (4 if n_columns <= 32 else 2, 2, 1) if n_blocks % n == 0)


def stage_bytes(n_rows: int, k: int, format: WeightFormat, most: int, n_columns: int) -> int:
    """Shared memory of the blocks that are fetched together, of n_rows weight rows with all that is stored of
    them, and of x.
    """
    block = block_of(k, number(format), most)
    one = n_rows * (Segment.n_bytes_of(256, block, format, "rows") // 256) + 2 * block * n_columns
    return int(one * together(k, number(format), most, n_columns))


@triton.jit
def matrix_at(p_w, i_matrix, n, k, FORMAT: tl.constexpr):
    """Returns the address at which matrix i_matrix [n, k] begins."""
    return p_w + tl.cast(i_matrix, tl.int64) * matrix_elements(n, k, FORMAT % 32, FORMAT // 32 % 16, FORMAT // 512)


@triton.jit
def product_of_rows(
    p_x_row, b_used, p_w, o_row, n, K: tl.constexpr, MOST_K: tl.constexpr, FORMAT: tl.constexpr,
    AHEAD: tl.constexpr = False, WAIT: tl.constexpr = False, p_x_scale=None, scale_step=None,
):
    """float32 [M, N]: rows o_row [M] of the matrix [n, K] at p_w times the rows of x at p_x_row [N], those in
    use.

    AHEAD: the first blocks of weights are read first of all. WAIT: then the kernel waits for the one in
    front, before x is read. p_x_scale [N]: where x is e4m3 codes (fp8.py) its scales, those of the next block
    scale_step behind; not with AHEAD.
    """
    tl.static_assert(not AHEAD or p_x_scale is None)
    CODES: tl.constexpr = FORMAT % 32
    SCALES: tl.constexpr = FORMAT // 32 % 16
    GROUP: tl.constexpr = FORMAT // 512
    BLOCK_K: tl.constexpr = block_of(K, FORMAT, MOST_K)
    N: tl.constexpr = together(K, FORMAT, MOST_K, p_x_row.shape[0])
    STEP: tl.constexpr = N * BLOCK_K
    w = rows_from(p_w, o_row, tl.full((), 0, tl.int32), n, K, BLOCK_K, CODES, SCALES, GROUP)
    p_x_tile = p_x_row[:, None] + tl.arange(0, BLOCK_K)[None, :]
    if p_x_scale is not None:
        p_x_tile = codes_at(p_x_row)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    b_acc = tl.zeros((o_row.shape[0], p_x_row.shape[0]), tl.float32)
    scales = load_more_scales(w, tl.full((), 0, tl.int32), N, BLOCK_K, CODES, SCALES, GROUP)
    codes: tl.tuple = ()
    if AHEAD:
        for i in tl.static_range(N):
            codes += (load_codes(w, tl.full((), i * BLOCK_K, tl.int32), CODES),)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if AHEAD:
        ahead = load_more_scales(w, tl.full((), STEP if STEP < K else 0, tl.int32), N, BLOCK_K, CODES, SCALES, GROUP)
        for i in tl.static_range(N):
            b_acc = add_block(
                b_acc, codes[i] + scales[i], p_x_tile + i * BLOCK_K, 0, b_used, BLOCK_K, CODES, SCALES, GROUP
            )
        scales = ahead
    return add_blocks(
        b_acc, w, scales, p_x_tile, p_x_scale, scale_step, b_used, STEP if AHEAD else 0, K, N, BLOCK_K, CODES, SCALES,
        GROUP
    )


@triton.jit
def gate_and_up(
    p_x_row, b_used, p_w, p_up, i_matrix, i_tile, H: tl.constexpr, M: tl.constexpr, BLOCK_F: tl.constexpr,
    MOST_K: tl.constexpr, FORMAT: tl.constexpr, UP: tl.constexpr, p_x_scale=None, scale_step=None,
):
    """float32 [BLOCK_F, N]: gate and up of features i_tile * BLOCK_F on, of matrix i_matrix. p_x_scale,
    scale_step: where x is codes; not of two segments.

    In one segment: eight gate rows and eight up rows take turns, so that one thread gets both of a feature.
    """
    if UP == _NONE:
        o_w = tl.arange(0, 2 * BLOCK_F)
        o_w = i_tile * BLOCK_F + o_w // 16 * 8 + o_w % 8 + o_w // 8 % 2 * M
        p_matrix = matrix_at(p_w, i_matrix, 2 * M, H, FORMAT)
        b_acc = product_of_rows(
            p_x_row, b_used, p_matrix, o_w, 2 * M, H, MOST_K, FORMAT, p_x_scale=p_x_scale, scale_step=scale_step
        )
        b_acc = tl.permute(tl.reshape(b_acc, (BLOCK_F // 8, 2, 8, p_x_row.shape[0])), (0, 2, 3, 1))
        b_gate, b_up = tl.split(b_acc)
        b_gate = tl.reshape(b_gate, (BLOCK_F, p_x_row.shape[0]))
        b_up = tl.reshape(b_up, (BLOCK_F, p_x_row.shape[0]))
    else:
        o_w = i_tile * BLOCK_F + tl.arange(0, BLOCK_F)
        b_gate = product_of_rows(p_x_row, b_used, matrix_at(p_w, i_matrix, M, H, FORMAT), o_w, M, H, MOST_K, FORMAT)
        b_up = product_of_rows(p_x_row, b_used, matrix_at(p_up, i_matrix, M, H, UP), o_w, M, H, MOST_K, UP)
    return b_gate, b_up
