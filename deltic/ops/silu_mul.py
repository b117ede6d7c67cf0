"""silu_mul: the gate of a SwiGLU, computed in float32 and rounded once to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.table import Program, check


def silu_mul(program: Program, gate_up: Tensor, out: Tensor, n_rows: Tensor) -> None:
    """out[m] = bfloat16(SiLU(gate_up[m, :F]) * gate_up[m, F:]).

    gate_up: float32 [T, 2F]; out: bfloat16 [T, F]; n_rows: int32 scalar, rows in use.
    """
    width = out.shape[1]
    check(
        "silu_mul", gate_up.dtype == torch.float32 and out.dtype == torch.bfloat16, "float32 in, bfloat16 out"
    )
    check(
        "silu_mul",
        gate_up.shape[1] == 2 * width and width % 16 == 0,
        "gate_up twice as wide as out, out % 16 == 0",
    )
    program.call("deltic_silu_mul", gate_up, out, n_rows, width)
