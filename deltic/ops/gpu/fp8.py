"""Products of e4m3 weights with rows that are rounded to e4m3 as well, as the published FP8 checkpoints mean
it (`weight_block_size`, dynamic activations): tensor cores multiply 8 bits twice as fast as 16.

A row is rounded by BLOCK_K columns, `k_block` of the columns that are walked: 128, or what divides them.
Their scale is the largest magnitude / 448, rounded up to a power of two: that takes no division, and costs
e4m3 one of its 17 powers of two, below. A product's sums of BLOCK_K are added in float32, multiplied with
both scales, in order of K: the tensor cores' own sums of 8-bit products keep 14 bits or so. So BLOCK_K is
part of what defines the bits.

Rows are rounded once, before a product: mostly by the kernel that makes them (`Operand`), else by one of
their own. On their way, to the same codes, they are rounded in a decode for the experts' down, and for a
gate_up that is not e4m3 in one segment in all of them. A product of many rows runs in the vendor's library
where it has one (Hopper), else here.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.chip import chip, converts_e4m3, group_of, wait_for_front
from deltic.ops.gpu.decode import address, codes_at, constants, e4m3, k_block, scale_plane
from deltic.ops.gpu.launch import INTERPRETED, launch, scaled_matmul, spread_rows
from deltic.ops.matrix import Segment, planes

_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of x in e4m3. A call with fewer uses the front of each."""

    codes: Tensor  # uint8, flat [T, K]
    scale: Tensor  # float32, flat [K / BLOCK_K, T]
    weight_scale: Tensor  # float32, flat [K / 128, M]: where a row has one, for the vendor's library
    block_k: int = 0
    """Columns of a block, where who makes the rows of the next product has rounded them, too; else 0."""

    def rounded_by(self, block_k: int) -> Fp8Rows:
        """The same, with the rows of the next product in it."""
        return replace(self, block_k=block_k)


class Operand(NamedTuple):
    """Rows of x, as who makes them leaves them for a product."""

    rows: Tensor  # bfloat16 [T, K]
    codes: Fp8Rows | None = None  # room for them in e4m3

    @property
    def block_k(self) -> int:
        """Columns of a block, where they are made in e4m3, too; else 0."""
        return 0 if self.codes is None else self.codes.block_k


def fp8_rows(name: str, n_rows: int, width: int, allocate: Allocate, largest: int = 0) -> Fp8Rows:
    """Room for up to n_rows rows of up to `width` columns, and for wide products with matrices of up to
    `largest` elements. allocate(name, size, dtype) gives a tensor.
    """
    return Fp8Rows(
        allocate(f"{name} codes", (n_rows * width,), torch.uint8),
        allocate(f"{name} scales", (n_rows * -(-width // 32),), torch.float32),  # 32: the smallest BLOCK_K
        allocate(f"{name} weight scales", (-(-largest // 128),), torch.float32),
    )


def room(rows: Fp8Rows | None) -> Fp8Rows:
    """The workspace. Raises KernelError where there is none."""
    check("e4m3", rows is not None, "a workspace for rows that are rounded")
    assert rows is not None
    return rows


@triton.jit
def nearest(b_x):
    """The codes nearest to floats of magnitudes up to 448, ties to even; of NaN NaN."""
    if not _INTERPRETED and converts_e4m3():
        b_codes = b_x.to(tl.float8e4nv)
    else:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_most = b_bits & 0x7FFFFFFF
        b_normal = tl.minimum(((b_most + 0x7FFFF + ((b_most >> 20) & 1)) >> 20) - 960, 0x7F)
        # below 2^-6 in steps of 2^-9: what is added rounds to those
        b_small = (b_most.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
        b_codes = (tl.where(b_most < 0x3C800000, b_small, b_normal) | ((b_bits >> 24) & 0x80)).to(tl.uint8)
    return b_codes


@triton.jit
def _powers(b_most):
    """1 / scale and scale of blocks whose largest magnitude has these bits, int32."""
    # the exponent of the largest, one more above 1.75 times a power of two; 2^-111 and less are as one
    b_exponent = tl.maximum((b_most + 0x1FFFFF) >> 23, 16)
    b_inverse, b_scale = (262 - b_exponent) << 23, (b_exponent - 8) << 23
    return b_inverse.to(tl.float32, bitcast=True), b_scale.to(tl.float32, bitcast=True)


@triton.jit
def magnitudes(b_float):
    """Bits of magnitudes. As integers they have the same order, and a warp has their maximum by one
    instruction.
    """
    return b_float.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rounded(b_x):
    """Codes [N, BLOCK_K] and scales [N] of rows of bfloat16. Infinities become large numbers, before Ada NaN
    as well.
    """
    b_float = b_x.to(tl.float32)
    b_inverse, b_scale = _powers(tl.max(magnitudes(b_float), 1))
    return nearest(b_float * b_inverse[:, None]), b_scale


@triton.jit
def rounded_block(b_x):
    """Codes [BLOCK_K] and scale of one block, in the layout that it has; else as `rounded`."""
    b_float = b_x.to(tl.float32)
    inverse, scale = _powers(tl.max(magnitudes(b_float), 0))
    return nearest(b_float * inverse), scale


@triton.jit
def _round_rows_kernel(
    p_x, p_codes, p_scale, p_used, t, k, stride, EACH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    if p_used is not None:  # noqa: SIM102 (a constant, then a value)
        if tl.program_id(0) * BLOCK_T >= tl.load(p_used) * EACH:
            return
    o_t, o_k = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    i_k, b_used = tl.program_id(1), o_t < t
    p_tile = p_x + o_t.to(tl.int64)[:, None] * stride + (i_k * BLOCK_K + o_k)[None, :]
    b_codes, b_scale = rounded(tl.load(p_tile, mask=b_used[:, None], other=0.0))
    p_at = codes_at(p_codes) + o_t.to(tl.int64)[:, None] * k + (i_k * BLOCK_K + o_k)[None, :]
    tl.store(p_at, b_codes, mask=b_used[:, None])
    tl.store(p_scale + i_k * t + o_t, b_scale, mask=b_used)


def check_room(name: str, rows: Fp8Rows, t: int, k: int, block_k: int) -> None:
    """Raises KernelError where t rows of k columns do not fit."""
    fits = t * k <= rows.codes.numel() and t * (k // block_k) <= rows.scale.numel()
    check(name, fits, f"room for {t} rows of {k}")


def stored_by(name: str, made: Operand, can: bool) -> tuple[Tensor | None, Tensor | None]:
    """Codes and scales of these rows for the kernel that makes them, or None twice. can: it has whole blocks.
    Raises KernelError where they do not fit.
    """
    if made.codes is None or not made.block_k or not can:
        return None, None
    n, k = made.rows.shape
    check_room(name, made.codes, n, k, made.block_k)
    return made.codes.codes, made.codes.scale


def round_made(made: Operand) -> None:
    """Rounds rows that their kernel could not."""
    if made.codes is not None and made.block_k:
        round_rows(made.rows, made.codes.rounded_by(0), made.block_k)


def round_rows(
    x: Tensor, rows: Fp8Rows, block_k: int, *, used: Tensor | None = None, each: int = 1
) -> None:
    """rows = x by block_k columns, if they are not yet. x: bfloat16 [T, K], K a multiple of block_k; its rows
    may lie apart. used: int32 [1], on the device; only so many times `each` rows are needed.
    """
    if rows.block_k == block_k:
        return
    t, k = x.shape
    check(
        "round_rows", x.dtype == torch.bfloat16 and x.stride(1) == 1 and k % block_k == 0,
        f"bfloat16 x, blocks of {block_k}",
    )
    check_room("round_rows", rows, t, k, block_k)
    is_small = t < 1024  # and waits for latency: the next kernel may start at once
    block_t, warps = (4, 1) if is_small else (32, 4)
    launch(
        _round_rows_kernel, (-(-t // block_t), k // block_k), x, rows.codes, rows.scale, used, t, k, x.stride(0),
        EACH=each, BLOCK_T=block_t, BLOCK_K=block_k, EARLY=is_small, num_warps=warps,
    )


@triton.jit
def _side(b_codes):
    """Codes as an operand; where tensor cores do not take them the same in bfloat16."""
    b_side = b_codes
    if b_codes.dtype == tl.uint8:
        b_side = e4m3(b_codes).to(tl.bfloat16)
    return b_side


@triton.jit
def load_scales_once(p_scale):
    """[N]. Each is loaded twice: of as many as there are threads Triton loads one a thread, and brings them
    to where they are multiplied by way of shared memory; of fewer each thread would load all that it
    multiplies.
    """
    b_scale, _ = tl.split(tl.load(p_scale[:, None] + tl.arange(0, 2)[None, :] * 0))
    return b_scale


@triton.jit
def load_more_scales_once(p_scale, step, N: tl.constexpr):
    """Loads the scales of N blocks, `step` apart. Returns zeros in their place where p_scale is None."""
    scales: tl.tuple = ()
    for i in tl.static_range(N):
        if p_scale is None:
            scales += (tl.full((), 0, tl.int32),)
        else:
            scales += (load_scales_once(p_scale + tl.cast(i * step, tl.int64)),)
    return scales


@triton.jit
def add_fp8_block(b_acc, b_left, b_left_scale, b_right, b_right_scale):
    """b_acc + the product of codes [M, BLOCK_K] and [N, BLOCK_K], with their scales [M, 1] and [N]."""
    b_part = tl.dot(_side(b_left), tl.trans(_side(b_right)))
    return b_acc + b_part * (b_left_scale * b_right_scale[None, :])


@triton.jit
def _fp8_kernel(
    p_x, p_x_scale, p_w, p_out, t, m, k, out_row, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_front(PDL)
    i_t, i_m = group_of(tl.program_id(0), tl.cdiv(t, BLOCK_T), tl.cdiv(m, BLOCK_M), TOGETHER)

    o_t, o_m = i_t * BLOCK_T + tl.arange(0, BLOCK_T), i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    # rows past the end are read again instead of masked, and not stored
    o_x, o_w = tl.minimum(o_t, t - 1), tl.minimum(o_m, m - 1)
    p_x_tile = codes_at(p_x) + o_x.to(tl.int64)[:, None] * k + o_k[None, :]
    p_w_tile = codes_at(p_w) + o_w.to(tl.int64)[:, None] * k + o_k[None, :]
    p_w_scale = scale_plane(p_w, m, k, CODES, SCALES, GROUP) + o_w
    p_x_scale += o_x
    b_acc = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    b_x_scale, b_w_scale = load_scales_once(p_x_scale), load_scales_once(p_w_scale)
    for i_k in range(0, k, BLOCK_K):
        next_k = tl.minimum(i_k + BLOCK_K, k - BLOCK_K)
        b_x_next = load_scales_once(p_x_scale + next_k // BLOCK_K * t)
        b_w_next = load_scales_once(p_w_scale + (next_k // GROUP * m if GROUP else 0))
        b_acc = add_fp8_block(b_acc, tl.load(p_x_tile + i_k), b_x_scale[:, None], tl.load(p_w_tile + i_k), b_w_scale)
        b_x_scale, b_w_scale = b_x_next, b_w_next
    p_y = p_out + o_t.to(tl.int64)[:, None] * out_row + o_m[None, :]
    tl.store(p_y, b_acc.to(p_out.dtype.element_ty), mask=(o_t < t)[:, None] & (o_m < m)[None, :])


@dataclass(frozen=True)
class Wide:
    """Tile of a product of many rows, in bf16 too (linear.py). No field changes a bit."""

    block_t: int
    block_m: int
    num_warps: int
    num_stages: int


def fp8_tile(t: int, m: int, block_k: int) -> Wide:
    """The largest tile that still gives every SM one. One whose sums leave registers to a second is as fast
    as one of twice the size.
    """
    block_m = next(b for b in (256, 128, 64) if b == 64 or -(-t // 64) * -(-m // b) >= chip().n_sms - 12)
    warps = max(4, block_m // (32 if chip().multiplies_from_shared else 16))
    return Wide(64, block_m, warps, max(2, chip().stages(block_k * (64 + block_m), 3, beside=8192)))


def vendor_multiplies(segment: Segment, out: Tensor) -> bool:
    """Returns whether the vendor's library has this product: on Hopper and from CUDA 12.9 on, by blocks of
    128, into rows that begin at multiples of 16 bytes. Rows are a multiple of 4, since the scales of x must
    begin at such, too.
    """
    # no version: kernels are only collected
    version = tuple(map(int, (torch.version.cuda or "13.0").split(".")[:2]))
    shaped = segment.k % 128 == 0 and segment.n % 16 == 0 and segment.format.group in (0, 128)
    each = 16 // out.element_size()
    aligned = out.stride(1) == 1 and all(v % each == 0 for v in (out.stride(0), out.storage_offset()))
    aligned &= out.shape[0] % 4 == 0
    has_it = chip().is_hopper and version >= (12, 9) and not INTERPRETED
    return has_it and shaped and aligned


def _row_scales(segment: Segment) -> Tensor:
    """float32 [groups, M]."""
    at, size = planes(segment.n, segment.k, segment.format)["scale"]
    scales: Tensor = segment.data.view(-1)[at : at + size].view(torch.float32).view(-1, segment.n)
    return scales


def block_scales(segment: Segment) -> Tensor | None:
    """float32 [M / 128, K / 128 rounded up to a multiple of 4]: the scales of blocks of 128 x 128, if this is
    e4m3 in such blocks, as most published ones are. The vendor's library multiplies a fifth faster by those
    than by a scale for each row (of some hundred rows or more), and to the same bits, since the scales of x
    are powers of two. Where kernels are only collected, the format's word is taken: rows of several tensors
    may stand in an order that breaks blocks, and then a kernel more is compiled when it is first started.
    """
    memory, (n, k) = segment.data, (segment.n, segment.k)
    if segment.format.rows != 128 or segment.n_matrices > 1 or n % 128 or k % 128 or memory.is_cpu:
        return None
    found = torch.zeros(n // 128, -(-k // 512) * 4, device=memory.device)
    if not memory.is_meta:
        blocks = _row_scales(segment).view(k // 128, n // 128, 128)
        first = blocks[..., 0]
        if not torch.equal(first[..., None].expand_as(blocks), blocks):
            return None
        found[:, : k // 128] = first.t()
    return found


def fp8_linear(
    rows: Fp8Rows, segment: Segment, out: Tensor, *, blocks: Tensor | None = None, tile: Wide | None = None
) -> None:
    """out[t, m] = the sum over k of x[t, k] w[m, k]. rows: x by `round_rows`, `k_block` of K columns;
    segment: e4m3 [M, K] in rows; out: bfloat16 or float32 [T, M], whose rows may lie apart. Rows are
    independent of each other, bit for bit. blocks: `block_scales` of the segment. tile: not by the vendor's
    library.
    """
    (t, m), k = out.shape, segment.k
    check("linear", segment.format.codes == "e4m3" and segment.layout == "rows" and segment.n == m, f"{m} e4m3 rows")
    check("linear", t * k <= rows.codes.numel(), f"{t} rounded rows of {k}")
    block_k, group = k_block(k), segment.format.group
    if tile is None and vendor_multiplies(segment, out):
        scale = blocks
        if scale is None:
            scale = _row_scales(segment)
            if not group:
                scale = spread_rows(scale, rows.weight_scale[: k // 128 * m].view(-1, m))
        codes, x_scale = rows.codes[: t * k].view(t, k), rows.scale[: t * (k // 128)].view(-1, t)
        weights = segment.data.view(-1)[: m * k].view(m, k)
        scaled_matmul(codes, x_scale, weights, scale, out, in_blocks=blocks is not None)
        return
    c = tile or fp8_tile(t, m, block_k)
    launch(
        _fp8_kernel, (-(-t // c.block_t) * -(-m // c.block_m),), rows.codes, rows.scale, address(segment), out, t, m, k,
        out.stride(0), BLOCK_T=c.block_t, BLOCK_M=c.block_m, BLOCK_K=block_k, TOGETHER=8, **constants(segment.format),
        num_warps=c.num_warps, num_stages=c.num_stages,
    )
