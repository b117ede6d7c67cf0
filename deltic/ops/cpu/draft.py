"""Operators of a block drafter (models/dflash; csrc/draft.cpp; oracle reference/dflash.py).

n_*: int32 scalars, rows in use. Widths are multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program

MAX_CANDIDATES = 64
"""The most `top_k` of a selector."""
RULED_OUT = -1e29
"""Scores below it are of ids that are no candidates."""


def keep_features(program: Program, x: Array, out: Array, first: int, n_rows: Array) -> None:
    """out[m, first : first + H] = bfloat16(x[m]). x: float32 [T, H]; out: bfloat16 [T, W]."""
    width = x.shape[1]
    check("keep_features", x.dtype == np.float32 and out.dtype == bfloat16, "float32 x, bfloat16 out")
    check("keep_features", first + width <= out.shape[1] and width % 16 == 0, f"room for {width} columns")
    program.call("deltic_keep_features", x, out, out.shape[1], first, n_rows, width)


def scale_rows(program: Program, x: Array, factor: float, n_rows: Array) -> None:
    """x *= factor. x: float32 [T, H]."""
    check("scale_rows", x.dtype == np.float32 and x.shape[1] % 16 == 0, "float32 x, width % 16 == 0")
    program.call("deltic_scale_rows", x, n_rows, x.shape[1], factor)


@dataclass(frozen=True)
class ConvKernels:
    """Kernels of the convolutions around a mixer or feed-forward: of tap j a row's coefficient is base[j]
    and, one value a group of channels, own[m, j].
    """

    base: Array  # float32 [2 * taps, H]: of the side before, then behind
    own: Array  # float32 [T, 2 * taps * H / group]
    group: int


def block_conv(program: Program, x: Array, kernels: ConvKernels, nth: Array, out: Array, n_rows: Array) -> None:
    """y[m] = sum over taps j of (base[j] + own[m, j]) * x[m - j], with no row before row 0 of a block.

    x bfloat16 [T, H], of the side before: out, bfloat16, too, = y. x float32, of the side behind: out,
    float32, += y. nth: int32 [T], a row's number in its block.
    """
    k, width = kernels, x.shape[1]
    taps, is_before = len(k.base) // 2, x.dtype == bfloat16
    check("block_conv", x.dtype == out.dtype and x.shape == out.shape, "out as x")
    check("block_conv", k.base.shape == (2 * taps, width) and k.group % 16 == 0, f"kernels of width {width}")
    check("block_conv", k.own.shape[1] == 2 * taps * (width // k.group), "a value a tap and group")
    first = 0 if is_before else taps * (width // k.group)
    base = k.base[:taps] if is_before else k.base[taps:]
    inputs = (x, None) if is_before else (None, x)
    outputs = (out, None) if is_before else (None, out)
    about = nth, k.own, k.own.shape[1], first, base, taps, k.group, n_rows, width
    program.call("deltic_block_conv", *inputs, *about, *outputs)


@dataclass(frozen=True)
class Candidates:
    """The selector of DFlash 2: what the token before adds to the likeliest top_k ids."""

    top_k: int
    predecessor: Array  # bfloat16 [V, rank]
    successor: Array  # bfloat16 [V, rank]
    projected: Array  # float32 [R, rank], of each row


@dataclass(frozen=True)
class BlockRows:
    """The row of each block's next token, int32 [S] each."""

    row: Array  # of the block rows' logits
    before: Array  # the id of the token before
    n: Array


def block_scores(
    program: Program,
    logits: Array,
    n_real: int,
    rows: BlockRows,
    bounds: tuple[float, float],
    selector: Candidates | None,
    out: Array,
) -> None:
    """out[s] = the logits of row[s], as scores of the next token: times a factor, and bounded by a tanh
    (bounds: both; 0 bounds nothing). With a selector those of the top_k likeliest ids have the selector's
    share on top, and the others are -1e30.

    logits: float32 [R, V], ids from n_real on are padding; out: float32 [S, V].
    """
    check("block_scores", logits.dtype == out.dtype == np.float32, "float32 logits, out")
    check("block_scores", logits.shape[1] == out.shape[1] >= n_real, f"{n_real} ids")
    s = selector
    if s is not None:
        check("block_scores", 0 < s.top_k <= MAX_CANDIDATES, f"at most {MAX_CANDIDATES} candidates")
        rank = s.projected.shape[1]
        check("block_scores", s.predecessor.shape == s.successor.shape == (logits.shape[1], rank), "codebooks")
    books = (None, None, None, 0) if s is None else (s.predecessor, s.successor, s.projected, s.projected.shape[1])
    about = (*bounds, 0 if s is None else s.top_k, rows.before)
    program.call("deltic_block_scores", logits, logits.shape[1], n_real, rows.row, rows.n, *about, *books, out)


def confidence(
    program: Program, state: Array, rows: BlockRows, embedded: Array | None, head: tuple[Array, Array], out: Array
) -> None:
    """out[s] = sigmoid(<weight, state[row[s]] | embedded[s]> + bias): the chance that a guess is right.

    state: bfloat16 [R, H]; embedded: bfloat16 [S, rank], None where the head does not read it; head: weight,
    float32 [H + rank], and bias, float32 [1]; out: float32 [S].
    """
    width, rank = state.shape[1], 0 if embedded is None else embedded.shape[1]
    check("confidence", head[0].shape == (width + rank,), f"a weight of {width + rank}")
    program.call("deltic_confidence", state, width, rows.row, rows.n, embedded, rank, *head, out)
