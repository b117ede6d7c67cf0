"""linear: y = x W^T, float32 sum and result, for any number of rows by the same arithmetic.

Every output element is one sum along K in one order (csrc/matrix.h), whatever the number of rows, so that prefill,
decode and any batch give the same bits. Leaves out: bias (`add_bias` in ops/speech.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.matrix import Matrix, row_bytes
from deltic.ops.table import Program, check


def linear(
    program: Program,
    x: Tensor,
    w: Matrix,
    out: Tensor,
    workspace: Tensor,
    n_rows: Tensor,
    *,
    add: bool = False,
) -> None:
    """out[m] = x[m] W^T, or out[m] += x[m] W^T when `add` (out is then the residual stream).

    x: bfloat16 [T, K]; w: [N, K]; out: float32 [T, N]; workspace: uint8, at least T * row_bytes(K); n_rows: int32
    scalar, rows in use.
    """
    check("linear", x.dtype == torch.bfloat16 and out.dtype == torch.float32, "bfloat16 x, float32 out")
    check("linear", x.shape[1] == w.k and out.shape[1] == w.n, f"x [T, {w.k}] and out [T, {w.n}]")
    check("linear", x.is_contiguous() and out.is_contiguous(), "contiguous tensors")
    check("linear", workspace.nbytes >= x.shape[0] * row_bytes(w.k), f"a workspace for {x.shape[0]} rows")
    program.call("deltic_linear", x, *w.arguments, out, workspace, n_rows, int(add))
