"""linear: y = x W^T, bfloat16 operands, float32 sum and result.

Every output element is summed along K in one order (16 lanes of two elements, blocks of 2048, csrc/linear.h), whatever
the number of rows, so that prefill, decode and any batch give the same bits. Weights are read as stored: [N, K] rows.
Leaves out: bias (the family has none) and quantised weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.table import Program, check


def linear(program: Program, x: Tensor, w: Tensor, out: Tensor, n_rows: Tensor, *, add: bool = False) -> None:
    """out[m] = x[m] W^T, or out[m] += x[m] W^T when `add` (out is then the residual stream).

    x: bfloat16 [T, K]; w: bfloat16 [N, K]; out: float32 [T, N]; n_rows: int32 scalar, rows in use. K % 32 == 0.
    """
    n, k = w.shape
    check(
        "linear",
        x.dtype == w.dtype == torch.bfloat16 and out.dtype == torch.float32,
        "bfloat16 x, w; float32 out",
    )
    check("linear", x.shape[1] == k and out.shape[1] == n, f"x [T, {k}] and out [T, {n}]")
    check("linear", k % 32 == 0, f"K a multiple of 32, found {k}")
    check("linear", x.is_contiguous() and w.is_contiguous() and out.is_contiguous(), "contiguous tensors")
    program.call("deltic_linear", x, w, out, n_rows, n, k, int(add))
