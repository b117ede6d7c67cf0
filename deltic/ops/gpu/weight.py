"""What the GPU's kernels read of a matrix: the one place that knows which formats they have."""

from __future__ import annotations

from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.matrix import ROWS, Matrix


def rows_of(operator: str, w: Matrix) -> Tensor:
    """The matrix itself, bfloat16 [n, k], of several matrices [n_matrices, n, k], for an operator whose
    kernels read rows.

    An operator that gets a kernel for another format asks for that format before it asks here. Raises
    KernelError, which names the operator and the format, for a matrix in any format but rows.
    """
    check(
        operator,
        w.format == ROWS,
        f"weights in rows of bfloat16; there is no kernel for {w.format.precision} in {w.format.layout}",
    )
    return w.rows
