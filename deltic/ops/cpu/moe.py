"""moe: routed experts and the shared expert, added to the residual stream (csrc/moe.cpp).

The router's logits and the shared expert's output come from `linear`. This operator routes, groups the tokens
by expert, runs the two grouped GEMMs and combines in slot order. Softmax is over all experts before the top
k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.ops.arrays import Array, bfloat16
from deltic.ops.contract import check
from deltic.ops.cpu.lora import AdapterRows, Entries, LoraScratch
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import Routing
from deltic.ops.matrix import Matrix, row_bytes

_NOTHING = (0, 0, 0, 0, 0)
"""The arguments of no matrix."""

_NO_ADAPTERS: tuple[Array | int | None, ...] = (np.zeros((), np.int32), *(None,) * 5, 0, None, *(None,) * 3, 0, None)
"""The arguments of no adapters."""


@dataclass(frozen=True)
class ExpertAdapters:
    """Terms that adapters add to the experts' two products. scratch: of T k rows."""

    rows: AdapterRows
    gate_up: Entries
    down: Entries
    scratch: LoraScratch


@dataclass(frozen=True)
class MoeScratch:
    """Workspaces for T tokens, k slots each, E experts of width M: see the fields."""

    expert: Array  # int32 [T, k]
    weight: Array  # float32 [T, k]
    order: Array  # int32 [T k]
    begin: Array  # int32 [E + 1]
    probabilities: Array  # float32 [T, E + 16]
    rows: Array  # uint8 [T k, row_bytes(max(H, M))]
    up: Array  # float32 [T k, 2M]
    act: Array  # bfloat16 [T k, M]
    y: Array  # float32 [T k, H]


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer, and how tokens choose them."""

    gate_up: Matrix  # E matrices [2M, H], gate rows first
    down: Matrix  # E matrices [H, M]
    routing: Routing
    adapters: ExpertAdapters | None = None
    on_disk: bool = False  # the matrices are mapped, and not all in memory: what a step needs is read ahead


def moe(
    program: Program,
    h: Array,
    logits: Array,
    experts: Experts,
    shared: Array,
    residual: Array,
    n_tokens: Array,
    scratch: MoeScratch,
) -> None:
    """residual[t] += sum_slot p_slot Expert_slot(h[t]) + sigmoid(logits[t, E]) shared[t].

    h: bfloat16 [T, H]; logits: float32 [T, E + 1], the last for the shared expert; shared, residual: float32
    [T, H]; p: softmax of the first E logits, the n_per_token largest (ties: lower expert), renormalised when
    `normalise`; n_tokens: int32 scalar.
    """
    gate_up, down, n_per_token = experts.gate_up, experts.down, experts.routing.n_per_token
    n_experts, width, inner = down.n_matrices, down.n, down.k
    check("moe", (gate_up.n, gate_up.k) == (2 * inner, width), f"gate_up [{2 * inner}, {width}]")
    check("moe", gate_up.n_matrices == n_experts, f"gate_up of {n_experts} experts")
    check("moe", len(gate_up.segments) <= 2, "gate and up in one format each")
    check("moe", h.dtype == bfloat16 and h.shape[1] == width, f"bfloat16 h [T, {width}]")
    check("moe", logits.shape[1] == n_experts + 1 and n_per_token <= n_experts, "logits [T, E + 1], k <= E")
    s, of_adapters = scratch, _NO_ADAPTERS
    if (a := experts.adapters) is not None:
        check("moe", a.gate_up.step == a.down.step, "entries of one table")
        of_adapters = (*a.rows.arguments, *a.gate_up.arguments, a.down.at, *a.scratch.arguments, a.scratch.groups)
    check("moe", s.rows.nbytes >= s.order.size * row_bytes(max(width, inner)), "rows for T k slots")
    program.call(
        "deltic_moe",
        *(h, logits, residual, n_tokens, n_experts, n_per_token, int(experts.routing.normalise)),
        *gate_up.segments[0].arguments,
        *(gate_up.segments[1].arguments if len(gate_up.segments) > 1 else _NOTHING),
        *down.whole.arguments,
        *(shared, s.expert, s.weight, s.order, s.begin, s.probabilities, s.rows, s.up, s.act, s.y),
        *of_adapters,
        int(experts.on_disk),
    )
