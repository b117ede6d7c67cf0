"""Weights of the tests as the operators take them."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.matrix import Matrix, Piece


def in_rows(w: Tensor) -> Matrix:
    """The contiguous bfloat16 weight [n, k] or weights [n_matrices, n, k] as a matrix in rows, over the same memory."""
    assert w.dtype == torch.bfloat16 and w.is_contiguous()
    n_matrices = len(w) if w.ndim == 3 else 1
    data = w.view(-1).view(torch.uint8).view(n_matrices, -1)
    n, k = w.shape[-2:]
    return Matrix(n, k, (Piece(n, k, WEIGHT_FORMATS["bf16"], "rows", data),))
