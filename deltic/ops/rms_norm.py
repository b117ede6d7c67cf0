"""rms_norm: zero-centred RMSNorm, float32 in, one rounding to bfloat16 out (spec: x rsqrt(mean x^2 + eps) (1 + w))."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.table import Program, check


def rms_norm(
    program: Program,
    x: Tensor,
    w: Tensor,
    eps: float,
    out: Tensor,
    n_rows: Tensor,
    rows: Tensor | None = None,
) -> None:
    """out[m] = bfloat16(x[r] * rsqrt(mean(x[r]^2) + eps) * (1 + w)) with r = rows[m], or m when rows is None.

    x: float32 [T, H]; w: float32 [H]; out: bfloat16 [M, H]; rows: int32 [M]; n_rows: int32 scalar, rows of out in use.
    """
    check(
        "rms_norm",
        x.dtype == w.dtype == torch.float32 and out.dtype == torch.bfloat16,
        "float32 x, w; bfloat16 out",
    )
    check(
        "rms_norm",
        x.shape[1] == w.shape[0] == out.shape[1] and w.shape[0] % 16 == 0,
        "one width, a multiple of 16",
    )
    program.call("deltic_rms_norm", x, w, out, rows, n_rows, x.shape[1], eps)
