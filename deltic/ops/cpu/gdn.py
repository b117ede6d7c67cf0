"""gdn: the gated DeltaNet mixer between its two projections, for decodes and prefill chunks in one call.

Convolution update, gates, l2-norm, recurrence from one state slot to another or in place, gated norm
(csrc/gdn.cpp has the equations and their source). A chunk is stepped token by token with the arithmetic of a
decode: prefill and decode agree in bits.
"""

from __future__ import annotations

import numpy as np

from deltic.ops.arrays import Array, bfloat16, stride
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import MAX_GDN_DIM, GdnHeads, GdnWeights


def gdn(
    program: Program,
    proj: Array,
    heads: GdnHeads,
    weights: GdnWeights,
    eps: float,
    *,
    n_seqs: Array,
    seq_start: Array,
    seq_context: Array,
    start_slot: Array,
    slot: Array,
    snapshot_begin: Array,
    snapshot_n: Array,
    snapshot_slot: Array,
    conv_state: Array,
    state: Array,
    out: Array,
) -> None:
    """proj float32 [T, 2Kd+2Vd+2Hv] (q|k|v|z|b|a) -> out bfloat16 [T, Hv dv]; states advance from slot to
    slot.

    Sequence s owns tokens seq_start[s] .. seq_start[s+1]-1 (int32 [S+1]); seq_context[s] tokens came before
    them. A slot is a row of conv_state (bfloat16 [slots, 3, C], any slot stride) and of state (float32
    [slots, Hv, dk, dv], any slot stride). The tokens start from the slot start_slot[s] (from the zero state
    where seq_context[s] is 0, whatever it says) and leave what follows them in slot[s], which may be the
    same: then the state advances in place.

    Snapshots: for i in snapshot_begin[s] .. snapshot_begin[s+1]-1 (int32 [S+1]), the slot snapshot_slot[i]
    gets what the first snapshot_n[i] tokens of s leave, as if its chunk had been cut there (both int32 [n];
    of one sequence ascending, 1 .. the number of its tokens). One that is asked for costs a write of the
    state, and where it is not a multiple of 64 from the chunk's start, a shorter block.

    In one call, a slot that is written (slot or snapshot_slot) is written by one sequence, and is the start
    of no other; a slot that is only read may be the start of several. These values change from step to step,
    and are not checked.
    """
    n_channels = heads.channels
    check("gdn", proj.dtype == np.float32 and out.dtype == bfloat16, "float32 proj, bfloat16 out")
    check("gdn", state.dtype == np.float32 and conv_state.dtype == bfloat16, "float32 state, bfloat16 columns")
    indices = (seq_start, seq_context, start_slot, slot, snapshot_begin, snapshot_n, snapshot_slot)
    check("gdn", all(index.dtype == np.int32 for index in indices), "int32 indices")
    check(
        "gdn",
        len(snapshot_begin) == len(seq_start) == len(slot) + 1 == len(start_slot) + 1,
        "one start and one final slot for each sequence, and the beginning of its snapshots",
    )
    check("gdn", len(snapshot_n) == len(snapshot_slot), "one slot for each snapshot")
    check("gdn", weights.conv.shape == (4, n_channels), f"conv [4, {n_channels}]")
    check("gdn", state.shape[1:] == (heads.n_v, heads.k_dim, heads.v_dim), "state [slots, Hv, dk, dv]")
    check("gdn", conv_state.shape[1:] == (3, n_channels), f"conv_state [slots, 3, {n_channels}]")
    check("gdn", state[0].flags.c_contiguous and conv_state[0].flags.c_contiguous, "contiguous slots")
    check(
        "gdn",
        heads.k_dim % 16 == heads.v_dim % 16 == 0 and max(heads.k_dim, heads.v_dim) <= MAX_GDN_DIM,
        f"dk, dv % 16 == 0 and at most {MAX_GDN_DIM}",
    )
    check("gdn", proj.shape[1] == n_channels + heads.n_v * heads.v_dim + 2 * heads.n_v, "six projections in a row")
    program.call(
        "deltic_gdn",
        proj,
        proj.shape[1],
        n_seqs,
        seq_start,
        seq_context,
        start_slot,
        slot,
        snapshot_begin,
        snapshot_n,
        snapshot_slot,
        weights.conv,
        conv_state,
        stride(conv_state),
        state,
        stride(state),
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        eps,
        heads.n_k,
        heads.n_v,
        heads.k_dim,
        heads.v_dim,
        heads.tiled,
        out,
    )
