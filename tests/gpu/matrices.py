"""Weights of the tests as the operators take them."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu.decode import k_block
from deltic.ops.gpu.fp8 import Operand, fp8_rows
from deltic.ops.matrix import Matrix, Segment


def in_rows(w: Tensor) -> Matrix:
    """The contiguous bfloat16 weight [n, k] or weights [n_matrices, n, k] as a matrix in rows, over the same memory."""
    assert w.dtype == torch.bfloat16 and w.is_contiguous()
    n_matrices = len(w) if w.ndim == 3 else 1
    data = w.view(-1).view(torch.uint8).view(n_matrices, -1)
    n, k = w.shape[-2:]
    return Matrix(n, k, (Segment(n, k, WEIGHT_FORMATS["bf16"], "rows", data),))


def e4m3_scales(blocks: Tensor) -> Tensor:
    """The least powers of two, at least 2^-119, that leave 448 or less of each block of float32, [..., block].
    They are made of bits: a GPU's log2 of a power of two is not always a whole number.
    """
    most, exponent = torch.frexp(blocks.abs().amax(-1))
    exponent = (exponent - 9 + (most > 448 / 512)).masked_fill(most == 0, -119).clamp(min=-119)
    return (exponent.int() + 127 << 23).view(torch.float32)


def e4m3_rows(x: Tensor, block_k: int = 0) -> Tensor:
    """float64: rows as they are multiplied with e4m3 (ops/gpu/fp8.py), by blocks of so many columns."""
    blocks = x.float().reshape(len(x), -1, block_k or k_block(x.shape[1]))
    scale = e4m3_scales(blocks)[..., None]
    return ((blocks / scale).to(torch.float8_e4m3fn).double() * scale.double()).view(x.shape)


def poisoned(rows: Tensor, block_k: int) -> Operand:
    """Rows to be made, and to be rounded by blocks of so many columns; of codes and scales there is nothing yet."""
    (n, k), device = rows.shape, rows.device  # of blocks of 16, too, which no product has
    codes = fp8_rows("rows", 2 * n, k, lambda _, size, dtype: torch.zeros(size, dtype=dtype, device=device))
    codes.codes.fill_(0x7F)
    codes.scale.fill_(torch.nan)
    return Operand(rows, codes.rounded_by(block_k))


def assert_rounded(made: Operand) -> None:
    """What was made of rows is in e4m3, too: the scale of a block is the least power of two that leaves 448 or less. A row that is
    NaN was not made, and has no codes.
    """
    assert made.codes is not None
    (n, k), block_k = made.rows.shape, made.codes.block_k
    codes, scales = made.codes.codes[: n * k].view(n, k), made.codes.scale[: n * (k // block_k)].view(-1, n).t()
    used = ~made.rows.isnan().any(1)
    blocks = made.rows[used].float().unflatten(1, (-1, block_k))
    assert torch.equal(scales[used], e4m3_scales(blocks))
    expected = (blocks / scales[used][:, :, None]).to(torch.float8_e4m3fn).flatten(1).view(torch.uint8)
    is_normal = (blocks.abs() >= 2.0**-126).flatten(1) | (expected & 0x7F == 0)  # others are the interpreter's own
    assert torch.equal(codes[used][is_normal], expected[is_normal])
    assert (codes[~used] == 0x7F).all() and scales[~used].isnan().all()
