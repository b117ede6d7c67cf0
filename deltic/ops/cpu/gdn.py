"""gdn: the gated DeltaNet mixer between its two projections, for decodes and prefill chunks in one call.

Convolution update, gates, l2-norm, recurrence from one state slot to another or in place, gated norm
(csrc/gdn.cpp has the equations and their source). A chunk is stepped token by token with the arithmetic of a
decode: prefill and decode agree in bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from deltic.ops.arrays import Array, bfloat16, stride
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import MAX_GDN_DIM, MAX_WINDOW, GdnHeads, GdnWeights

expect = partial(check, "gdn")


@dataclass(frozen=True, kw_only=True)
class GdnInputs:
    """Sequences of a step, in buffers that keep their addresses. int32; S sequences. See `gdn`."""

    n_seqs: Array
    seq_start: Array  # [S + 1]
    seq_context: Array  # [S]: tokens before the chunk's
    batch_slot: Array  # [S]: which window is the sequence's
    start_slot: Array  # [S] where the chunk's state is read
    state_slot: Array  # [S] and where it is left
    snapshot_begin: Array  # [S + 1] into the next two
    snapshot_n: Array  # [one for each 64 tokens] after so many tokens of its chunk the state goes
    snapshot_slot: Array  # to this state slot, too
    n_redo: Array  # [S] tokens of the batch slot's window that come before the chunk's
    is_lazy: Array  # [S] 1: the chunk's tokens go to the window, not into the state

    @property
    def chunks(self) -> tuple[Array, ...]:
        """Arguments of a kernel: tokens, and the state slots that are read and written."""
        sequences = self.n_seqs, self.seq_start, self.seq_context, self.start_slot, self.state_slot
        return *sequences, self.snapshot_begin, self.snapshot_n, self.snapshot_slot

    @property
    def windows(self) -> tuple[Array, ...]:
        """Arguments of a kernel: what of the windows is read and written."""
        return self.n_redo, self.is_lazy, self.batch_slot


@dataclass(frozen=True)
class GdnMemory:
    """State slots and windows of one layer, with any stride of slots. See `gdn`."""

    columns: Array  # bfloat16 [state_slots, 3, C]
    states: Array  # float32 or bfloat16 [state_slots, Hv, dk, dv]
    window_columns: Array  # bfloat16 [batch_slots, W, C]
    window_gates: Array  # float32 [batch_slots, W, 2 Hv]
    layer: int
    """The layer's number among those with a state."""


def gdn(
    program: Program,
    proj: Array,
    heads: GdnHeads,
    weights: GdnWeights,
    eps: float,
    inputs: GdnInputs,
    memory: GdnMemory,
    out: Array,
) -> None:
    """proj float32 [T, 2Kd+2Vd+2Hv] (q|k|v|z|b|a) -> out bfloat16 [T, Hv dv]. States advance from state slot
    to state slot.

    Sequence s owns tokens seq_start[s] .. seq_start[s+1]-1 (int32 [S+1]); seq_context[s] tokens came before
    them. A state slot is a row of memory.columns and of memory.states. The tokens start from the
    state slot start_slot[s] (from zero where seq_context[s] is 0, whatever it says) and leave what follows
    them in state_slot[s], which may be the same: then the state advances in place.

    Snapshots: for i in snapshot_begin[s] .. snapshot_begin[s+1]-1 (int32 [S+1]), the state slot
    snapshot_slot[i] gets what the first snapshot_n[i] tokens of s leave, as if its chunk had been cut there
    (both int32 [n]; of one sequence ascending, 1 .. the number of its tokens). One that is asked for costs a
    write of the state, and where it is not a multiple of 64 from the chunk's start, a shorter block.

    A state in bfloat16 is rounded behind every token, at random by a hash of the token's position, the layer
    (its number among those with a state), the head and the element.

    Drafts: the window batch_slot[s] keeps the raw inputs of up to W tokens: a row of window_columns
    (q|k|v rounded) and of window_gates (b|a). The first n_redo[s] tokens of the window come before the
    chunk's, as if they stood in front of them: they are counted in seq_context[s], and the state slot
    start_slot[s] is that before them. They have no output. Where is_lazy[s] is 1, state_slot[s] gets what
    they leave, and the chunk's own tokens go on from there to their outputs only: their inputs replace the
    window (so there are at most W of them). Snapshots are for sequences with neither. With n_redo[s] and
    is_lazy[s] 0 (int32 [S], as batch_slot), the window is not touched.

    In one call, a batch slot belongs to one sequence. A state slot that is written (state_slot or
    snapshot_slot) is written by one sequence, and is the start of no other. A state slot that is only read
    may be the start of several. These values change from step to step, and are not checked.
    """
    n_channels, i, m = heads.channels, inputs, memory
    expect(proj.dtype == np.float32 and out.dtype == bfloat16, "float32 proj, bfloat16 out")
    expect(all(index.dtype == np.int32 for index in (*i.chunks, *i.windows)), "int32 indices")
    fit = len(i.snapshot_begin) == len(i.seq_start) == len(i.state_slot) + 1 == len(i.start_slot) + 1
    expect(fit, "one start and one final state slot for each sequence, and the beginning of its snapshots")
    expect(weights.conv.shape == (4, n_channels), f"conv [4, {n_channels}]")
    is_served = heads.k_dim % 16 == heads.v_dim % 16 == 0 and max(heads.k_dim, heads.v_dim) <= MAX_GDN_DIM
    expect(is_served, f"dk, dv % 16 == 0 and at most {MAX_GDN_DIM}")
    expect(proj.shape[1] == n_channels + heads.n_v * heads.v_dim + 2 * heads.n_v, "six projections in a row")
    _check_lists(inputs)
    _check_state_slots(heads, m.states, m.columns)
    _check_windows(heads, m.window_columns, m.window_gates)
    program.call(
        "deltic_gdn" if m.states.dtype == np.float32 else "deltic_gdn_bf16",
        *(proj, proj.shape[1]),
        *i.chunks,
        *(weights.conv, m.columns, stride(m.columns), m.states, stride(m.states)),
        *(weights.a_log, weights.dt_bias, weights.norm, eps),
        *(heads.n_k, heads.n_v, heads.k_dim, heads.v_dim, heads.tiled, heads.sigmoid_gate),
        *i.windows,
        *(m.window_columns, stride(m.window_columns), m.window_gates, stride(m.window_gates)),
        *(m.layer, out),
    )


def _check_lists(inputs: GdnInputs) -> None:
    expect(len(inputs.snapshot_n) == len(inputs.snapshot_slot), "one state slot for each snapshot")
    expect(all(len(index) == len(inputs.state_slot) for index in inputs.windows), "a window for each sequence")


def _check_state_slots(heads: GdnHeads, state: Array, columns: Array) -> None:
    expect(
        state.dtype in (np.float32, bfloat16) and columns.dtype == bfloat16,
        "float32 or bfloat16 state, bfloat16 columns",
    )
    expect(state.shape[1:] == (heads.n_v, heads.k_dim, heads.v_dim), "state [state_slots, Hv, dk, dv]")
    expect(columns.shape[1:] == (3, heads.channels), f"conv_state [state_slots, 3, {heads.channels}]")
    expect(state[0].flags.c_contiguous and columns[0].flags.c_contiguous, "contiguous state slots")


def _check_windows(heads: GdnHeads, columns: Array, gates: Array) -> None:
    expect(columns.dtype == bfloat16 and gates.dtype == np.float32, "bfloat16 columns, float32 gates of windows")
    n_batch_slots, n_tokens = columns.shape[:2]
    expect(1 <= n_tokens <= MAX_WINDOW, f"windows of 1 to {MAX_WINDOW} tokens")
    expect(columns.shape[2:] == (heads.channels,), f"window_columns [batch_slots, W, {heads.channels}]")
    expect(
        gates.shape == (n_batch_slots, n_tokens, 2 * heads.n_v),
        f"window_gates [batch_slots, W, {2 * heads.n_v}], of the same places and W",
    )
    expect(columns[0].flags.c_contiguous and gates[0].flags.c_contiguous, "contiguous windows")
