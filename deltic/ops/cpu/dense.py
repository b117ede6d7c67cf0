"""The dense operators of a forward: embed, gather, linear, rms_norm, silu_mul; draft_rows of the draft head.

linear is y = x W^T, float32 sum and result, for any number of rows by the same arithmetic. Every output
element is one sum along K in one order (csrc/matrix.h), so prefill, decode and any batch give the same bits.
Leaves out: bias (`add_bias` in ops/cpu/speech.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.formats import FLOATS
from deltic.ops.matrix import Matrix, row_bytes


def embed(
    program: Program, table: Matrix, token_ids: Array, out: Array, n_tokens: Array, rows: Array | None = None
) -> None:
    """out[t] = float32(table[token_ids[t]]), or float32(rows[-1 - token_ids[t]]) for an id below 0.

    table: [V, H]; token_ids: int32 [T]; out: float32 [T, H], H a multiple of 16; n_tokens: int32 scalar, rows
    in use; rows: bfloat16 [N, H], None where no id is below 0. Leaves out: a check of the ids. The scheduler
    only passes ids of the vocabulary.
    """
    expect = partial(check, "embed")
    expect(out.dtype == np.float32 and table.k == out.shape[1], f"float32 out of width {table.k}")
    if rows is not None:
        expect(rows.dtype == bfloat16 and rows.shape[1:] == (table.k,) and rows.flags.c_contiguous, "bfloat16 rows")
        expect(table.k % 16 == 0, "width % 16 == 0")
    program.call("deltic_embed", *table.whole.arguments, token_ids, out, n_tokens, rows)


def gather(program: Program, table: Array, ids: Array, out: Array, n_rows: Array) -> None:
    """out[m] = table[ids[m]]. table: bfloat16 [V, H]; ids: int32 [M]; out: bfloat16 [M, H], H % 16 == 0."""
    width = out.shape[1]
    check("gather", table.dtype == out.dtype == bfloat16 and table.flags.c_contiguous, "contiguous bfloat16 rows")
    check("gather", table.shape[1] == width and width % 16 == 0, f"a table of width {width}, a multiple of 16")
    program.call("deltic_gather", ids, table, out, n_rows, width)


def linear(
    program: Program, x: Array, w: Matrix, out: Array, room: Array, n_rows: Array, *, add: bool = False, first: int = 0
) -> None:
    """out[m] = x[m] W^T, or out[m] += x[m] W^T when `add` (out is then the residual stream).

    x: bfloat16 [T, K]; w: [N, K]; out: float32 [T, N], or wider: its columns [first, first + N); room: uint8,
    at least T * row_bytes(K); n_rows: int32 scalar, rows in use.
    """
    expect = partial(check, "linear")
    expect(x.dtype == bfloat16 and out.dtype == np.float32, "bfloat16 x, float32 out")
    is_whole = first == 0 and out.shape[1] == w.n
    expect(x.shape[1] == w.k and (is_whole or 0 < first <= out.shape[1] - w.n), f"x [T, {w.k}] and out [T, {w.n}]")
    expect(x.flags.c_contiguous and out.flags.c_contiguous, "contiguous tensors")
    expect(room.nbytes >= x.shape[0] * row_bytes(w.k), f"a workspace for {x.shape[0]} rows")
    begin, packed = first, None
    for segment in w.segments:
        # What the room holds of x: bfloat16, or int8 by groups and their sums as the codes need them.
        f = segment.format
        needed = ("bf16",) if f.codes in FLOATS else (f.codes, f.has_least, f.group)
        to = (out[:, begin:], out.shape[1], room, n_rows, int(add), int(needed == packed))
        program.call("deltic_linear", x, *segment.arguments, *to)
        begin, packed = begin + segment.n, needed


def rms_norm(
    program: Program, x: Array, w: Array, eps: float, out: Array, n_rows: Array, rows: Array | None = None
) -> None:
    """Zero-centred RMSNorm with one rounding at its end:
    out[m] = bfloat16(x[r] * rsqrt(mean(x[r]^2) + eps) * (1 + w)) with r = rows[m], or m when rows is None.

    x: float32 [T, H]; w: float32 [H]; out: bfloat16 [M, H]; rows: int32 [M]; n_rows: int32 scalar, rows of
    out in use.
    """
    check("rms_norm", x.dtype == w.dtype == np.float32 and out.dtype == bfloat16, "float32 x, w; bfloat16 out")
    check("rms_norm", x.shape[1] == w.shape[0] == out.shape[1] and w.shape[0] % 16 == 0, "one width, a multiple of 16")
    program.call("deltic_rms_norm", x, w, out, rows, n_rows, x.shape[1], eps)


@dataclass(frozen=True)
class DraftNorms:
    """Norms of a draft head's inputs: float32 [H] of an embedding, [S H] of a hidden state of S streams."""

    embedding: Array
    hidden: Array
    eps: float


def draft_rows(
    program: Program,
    table: Matrix,
    token_ids: Array,
    hidden: Array,
    norms: DraftNorms,
    out: Array,
    n_tokens: Array,
    scratch: Array,
) -> None:
    """out[t, s] = bfloat16 of rms_norm(float32(table[token_ids[t]])), then of rms_norm(hidden[t])[s].

    table: [V, H]; token_ids: int32 [T]; hidden: bfloat16 [T, S H], S streams in one norm; out: bfloat16 [T S,
    2H]; n_tokens: int32 scalar, tokens in use; scratch: float32 [T, S H].
    """
    h, whole = table.k, hidden.shape[1]
    check("draft_rows", hidden.dtype == out.dtype == bfloat16, "bfloat16 hidden, out")
    of_embedding, of_hidden = norms.embedding, norms.hidden
    check("draft_rows", of_embedding.dtype == of_hidden.dtype == scratch.dtype == np.float32, "float32 norms, scratch")
    check("draft_rows", whole % h == 0 and h % 16 == 0, "streams of the embedding's width, a multiple of 16")
    check("draft_rows", of_embedding.shape == (h,) and of_hidden.shape == (whole,), f"norms of width {h} and {whole}")
    n, n_streams = token_ids.shape[0], whole // h
    fits = hidden.shape == scratch.shape == (n, whole) and out.shape == (n * n_streams, 2 * h)
    check("draft_rows", fits, f"{n} rows")
    rows = token_ids, hidden, of_embedding, of_hidden, out, n_tokens, scratch, n_streams
    program.call("deltic_draft_rows", *table.whole.arguments, *rows, norms.eps)


def silu_mul(program: Program, gate_up: Array, out: Array, n_rows: Array) -> None:
    """out[m] = bfloat16(SiLU(gate_up[m, :F]) * gate_up[m, F:]).

    gate_up: float32 [T, 2F]; out: bfloat16 [T, F]; n_rows: int32 scalar, rows in use.
    """
    width = out.shape[1]
    check("silu_mul", gate_up.dtype == np.float32 and out.dtype == bfloat16, "float32 in, bfloat16 out")
    check("silu_mul", gate_up.shape[1] == 2 * width and width % 16 == 0, "gate_up twice as wide as out, out % 16 == 0")
    program.call("deltic_silu_mul", gate_up, out, n_rows, width)
