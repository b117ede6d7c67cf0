"""moe: routed experts and the shared expert, added to the residual stream (csrc/moe.cpp, spec 2.6).

The router's logits and the shared expert's output come from `linear`; this operator routes, groups the tokens by
expert, runs the two grouped GEMMs and combines in slot order. Softmax is over all experts before the top k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.table import Program, check


@dataclass(frozen=True)
class MoeScratch:
    """Workspaces for T tokens, k slots each, E experts of width M: see the fields."""

    expert: Tensor  # int32 [T, k]
    weight: Tensor  # float32 [T, k]
    order: Tensor  # int32 [T k]
    begin: Tensor  # int32 [E + 1]
    probabilities: Tensor  # float32 [T, E + 16]
    up: Tensor  # float32 [T k, 2M]
    act: Tensor  # bfloat16 [T k, M]
    y: Tensor  # float32 [T k, H]


def moe(
    program: Program,
    h: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate: Tensor,
    shared: Tensor,
    residual: Tensor,
    *,
    n_per_token: int,
    normalise: bool,
    n_tokens: Tensor,
    scratch: MoeScratch,
) -> None:
    """residual[t] += sum_slot p_slot Expert_slot(h[t]) + sigmoid(h[t] . shared_gate) shared[t].

    h: bfloat16 [T, H]; logits: float32 [T, E]; gate_up: bfloat16 [E, 2M, H] (gate rows first); down: bfloat16
    [E, H, M]; shared_gate: bfloat16 [H]; shared, residual: float32 [T, H]; p: softmax of all logits, the n_per_token
    largest (ties: lower expert), renormalised when `normalise`; n_tokens: int32 scalar.
    """
    n_experts, width, inner = down.shape
    check(
        "moe", gate_up.shape == (n_experts, 2 * inner, width), f"gate_up [{n_experts}, {2 * inner}, {width}]"
    )
    check("moe", h.dtype == gate_up.dtype == down.dtype == torch.bfloat16, "bfloat16 h, gate_up, down")
    check("moe", logits.shape[1] == n_experts and n_per_token <= n_experts, "logits [T, E], k <= E")
    check("moe", width % 32 == 0 and inner % 32 == 0, "widths that are multiples of 32")
    s = scratch
    program.call(
        "deltic_moe", h, logits, residual, n_tokens, width, n_experts, n_per_token, inner, int(normalise),
        gate_up, down, shared_gate, shared, s.expert, s.weight, s.order, s.begin, s.probabilities, s.up, s.act, s.y,
    )  # fmt: skip
