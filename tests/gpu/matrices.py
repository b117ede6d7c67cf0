"""Weights of the tests as the operators take them."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu.decode import k_block
from deltic.ops.matrix import Matrix, Segment


def in_rows(w: Tensor) -> Matrix:
    """The contiguous bfloat16 weight [n, k] or weights [n_matrices, n, k] as a matrix in rows, over the same memory."""
    assert w.dtype == torch.bfloat16 and w.is_contiguous()
    n_matrices = len(w) if w.ndim == 3 else 1
    data = w.view(-1).view(torch.uint8).view(n_matrices, -1)
    n, k = w.shape[-2:]
    return Matrix(n, k, (Segment(n, k, WEIGHT_FORMATS["bf16"], "rows", data),))


def e4m3_rows(x: Tensor, block_k: int = 0) -> Tensor:
    """float64: rows as they are multiplied with e4m3 (ops/gpu/fp8.py), by blocks of so many columns."""
    blocks = x.float().reshape(len(x), -1, block_k or k_block(x.shape[1]))
    scale = torch.exp2(
        torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).double() / 448)).clamp(min=-119)
    ).float()
    return ((blocks / scale).to(torch.float8_e4m3fn).double() * scale.double()).view(x.shape)
