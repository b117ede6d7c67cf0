"""connection_norm, connection_gate, connection_mix and inject: residual streams (csrc/streams.cpp has the
equations).

A block reads one row that is mixed of S streams, and writes to each of them as much as its inject says.
Between connection_norm and connection_mix stand two linears. The sums of a row know nothing of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program


@dataclass(frozen=True)
class StreamRows:
    """Residual streams of rows. row m is rows[m] of x, or m where rows is None."""

    x: Array  # float32 [T, S H], H a multiple of 16
    count: int  # S
    n_rows: Array  # int32 scalar, rows in use
    rows: Array | None = None  # int32 [M]

    @property
    def width(self) -> int:
        return int(self.x.shape[1]) // self.count


@dataclass(frozen=True)
class BlockOutput:
    """Output of a block, to be added to the streams.

    output: float32 [T, H]; low: float32 [T, R + S], whose last S columns are inject's.
    """

    output: Array
    low: Array

    def arguments(self, count: int) -> tuple[Array | int, ...]:
        """Returns the kernels' arguments, for this number of streams."""
        return self.output, self.low[:, self.low.shape[1] - count :], self.low.shape[1]


def inject(program: Program, streams: StreamRows, added: BlockOutput) -> None:
    """x[t, s] += 2 sigmoid(inject[t, s] / S) output[t]."""
    _check("inject", streams)
    check("inject", added.output.shape[1] == streams.width, f"output [T, {streams.width}]")
    size = streams.n_rows, streams.count, streams.width
    program.call("deltic_inject", streams.x, *added.arguments(streams.count), *size, 0)


def spread(program: Program, streams: StreamRows, row: Array) -> None:
    """x[t, s] = row[t], row float32 [T, H]."""
    _check("spread", streams)
    check("spread", row.shape[1] == streams.width and row.dtype == np.float32, f"row [T, {streams.width}]")
    program.call("deltic_inject", streams.x, row, None, 0, streams.n_rows, streams.count, streams.width, 1)


def connection_norm(
    program: Program, streams: StreamRows, w: Array, eps: float, out: Array, added: BlockOutput | None = None
) -> None:
    """out[m, s] = bfloat16(x[m, s] * rsqrt(mean(x[m, s]^2) + eps) * (1 + w[s])). added: of the block before,
    injected into x first; then streams has no rows.

    w: float32 [S H]; out: bfloat16 [M, S H].
    """
    _check("connection_norm", streams)
    check("connection_norm", streams.x.shape[1:] == w.shape == out.shape[1:], "x, w and out of one width")
    check("connection_norm", w.dtype == np.float32 and out.dtype == bfloat16, "float32 w, bfloat16 out")
    check("connection_norm", added is None or streams.rows is None, "all rows, where something is added")
    before = (None, None, 0) if added is None else added.arguments(streams.count)
    size = streams.n_rows, streams.count, streams.width
    program.call("deltic_connection_norm", streams.x, *before, w, out, streams.rows, *size, eps)


def connection_gate(program: Program, low: Array, out: Array, n_rows: Array, n_streams: int) -> None:
    """out[t] = bfloat16(SiLU(low[t, :R] / S)).

    low: float32 [T, R or more]; out: bfloat16 [T, R], R a multiple of 16; n_rows: int32 scalar, rows in use.
    """
    rank = out.shape[1]
    check("connection_gate", low.dtype == np.float32 and out.dtype == bfloat16, "float32 low, bfloat16 out")
    check("connection_gate", rank % 16 == 0 and low.shape[1] >= rank, "R a multiple of 16, columns of low")
    program.call("deltic_connection_gate", low, low.shape[1], out, n_rows, rank, n_streams)


def connection_mix(program: Program, up: Array, normed: Array, out: Array, n_rows: Array, block: Array) -> None:
    """out[t] = bfloat16(mean over streams of sigmoid(up[t, s]) normed[t, s]); block[t] = 0.

    up: float32 [T, S H]; normed: bfloat16 [T, S H]; out: bfloat16 [T, H]; block: float32 [T, H], to which the
    block that reads `out` adds its output; n_rows: int32 scalar, rows in use.
    """
    width = out.shape[1]
    check("connection_mix", up.shape == normed.shape and up.shape[1] % width == 0, f"up, normed of streams of {width}")
    check("connection_mix", normed.dtype == out.dtype == bfloat16, "bfloat16 normed, out")
    check(
        "connection_mix", block.shape[1] == width and up.dtype == block.dtype == np.float32, "float32 up, block [T, H]"
    )
    program.call("deltic_connection_mix", up, normed, out, block, n_rows, up.shape[1] // width, width)


def round_rows(program: Program, streams: StreamRows, out: Array) -> None:
    """out[m] = bfloat16(x[m]), out bfloat16 [M, S H]."""
    _check("round_rows", streams)
    check("round_rows", out.shape[1] == streams.x.shape[1] and out.dtype == bfloat16, "bfloat16 out of x's width")
    program.call("deltic_round_rows", streams.x, out, streams.rows, streams.n_rows, streams.x.shape[1])


def _check(operator: str, streams: StreamRows) -> None:
    is_whole = streams.x.shape[1] == streams.count * streams.width and streams.width % 16 == 0
    check(operator, streams.x.dtype == np.float32 and is_whole, "float32 streams of a multiple of 16")
