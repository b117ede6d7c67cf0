"""Rows of a speech model: sums of text and codec vectors, and what passes between the steps of a frame
(csrc/speech.cpp).

Tables are bfloat16 rows as stored [V, H], H a multiple of 16; sums are float32, in the order of the calls.
n_*: int32 scalars, rows in use.
"""

from __future__ import annotations

import numpy as np

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program

SIDE_NONE, SIDE_KEPT, SIDE_VOICE = -1, -2, -3
"""`side` of talker_rows where it is not an id of the table: nothing; what is in the row already;
SIDE_VOICE - i: row i of `voice`.
"""


def _check_table(operator: str, table: Array, width: int) -> None:
    check(operator, table.dtype == bfloat16 and table.flags.c_contiguous, "a contiguous bfloat16 table")
    check(operator, table.shape[1] == width and width % 16 == 0, f"a table of width {width}, a multiple of 16")


def add_bias(program: Program, x: Array, bias: Array, n_rows: Array, silu_out: Array | None = None) -> None:
    """x[m] += bias; or, with silu_out, silu_out[m] = bfloat16(SiLU(x[m] + bias)). x: float32 [M, W];
    silu_out: bfloat16 [M, W].
    """
    width = x.shape[1]
    check("bias", x.dtype == bias.dtype == np.float32 and width % 16 == 0, "float32, width % 16 == 0")
    check("bias", silu_out is None or silu_out.shape[1] == width, f"silu_out [M, {width}]")
    program.call("deltic_bias", x, bias, silu_out, n_rows, width)


def code_rows(
    program: Program,
    codes: Array,
    table: Array,
    sums: Array,
    n_frames: Array,
    rows: Array | None = None,
    past: Array | None = None,
    state_slot: Array | None = None,
) -> None:
    """Adds one code of each frame: sums[m] += table[codes[m]], and that row goes into rows[m], if there are
    any.

    With past, the frame's first code: sums[m] = table[codes[m]], rows[2m] = past[state_slot[m]],
    rows[2m + 1] = table[codes[m]].
    A code below 0 makes sums[m] NaN. codes, state_slot: int32 [M]; sums: float32 [M, H]; rows: float32 or
    bfloat16; past: bfloat16 [state_slots, H].
    """
    width = sums.shape[1]
    _check_table("code_rows", table, width)
    check("code_rows", (past is None) == (state_slot is None), "past and state slot together")
    check("code_rows", sums.dtype == np.float32, "float32 sums")
    is_bf16 = rows is not None and rows.dtype == bfloat16
    program.call("deltic_code_rows", codes, table, state_slot, past, rows, int(is_bf16), sums, n_frames, width)


def talker_rows(
    program: Program, side: Array, text_row: Array, table: Array, voice: Array, text: Array, out: Array, n_rows: Array
) -> None:
    """out[m] = codec vector (side[m]: an id of the table, or SIDE_*) + text[text_row[m]], without text where
    that is -1.

    side, text_row: int32 [M]; voice, text: float32 [n, H]; out: float32 [M, H].
    """
    _check_table("talker_rows", table, out.shape[1])
    check("talker_rows", voice.dtype == text.dtype == out.dtype == np.float32, "float32 voice, text, out")
    program.call("deltic_talker_rows", side, text_row, table, voice, text, out, n_rows, out.shape[1])


def keep_rows(program: Program, x: Array, state_slot: Array, out: Array, n_rows: Array) -> None:
    """out[state_slot[m]] = x[m]. x: bfloat16 [M, H]; out: bfloat16 [state_slots, H]."""
    check("keep_rows", x.dtype == out.dtype == bfloat16 and x.shape[1] == out.shape[1], "bfloat16 of one width")
    program.call("deltic_keep_rows", x, state_slot, out, n_rows, x.shape[1])
