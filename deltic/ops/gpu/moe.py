"""The weights of a mixture of experts, and how rows choose experts: for its decode (moe_decode.py) and its
prefill (moe_prefill.py), whose products are in experts.py.

Source: the published Qwen3-Next and Qwen3.5-MoE model code (softmax over all experts, then the k largest).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.gpu.launch import INTERPRETED, bound_levers
from deltic.ops.matrix import Matrix

_INTERPRETED = tl.constexpr(INTERPRETED)


class MoeWeights(Protocol):
    """E experts of width M and a shared one of width Ms, in rows."""

    router: Matrix  # [E + 1, H], the last row the shared expert's gate
    gate_up: Matrix  # E of [2M, H], gate rows first
    down: Matrix  # E of [H, M]
    shared_gate_up: Matrix  # [2Ms, H]
    shared_down: Matrix  # [H, Ms]
    first: int  # of the experts that gate_up and down are, which may be a run of them: others are elsewhere


def logit_stride(n_experts: int) -> int:
    """Floats from one row of logits to the next: E + 1 in whole lines of 64 bytes."""
    return (n_experts + 16) // 16 * 16


def router_splits(hidden: int) -> int:
    """Parts of the router's sum, added in order.

    A part has two K blocks at least: the compiler would fold a single product and the sum of the parts
    (in prefill) into one, which has other bits.
    """
    if bound_levers().split_k:
        for n in (8, 4, 2):
            if hidden % (n * 256) == 0:
                return n
    return 1


def largest_block(limit: int, *sizes: int) -> int:
    """The largest power of two up to `limit` that divides all sizes."""
    block = limit
    while any(size % block for size in sizes):
        block //= 2
    return block


def check_moe(x: Tensor, w: MoeWeights, k: int, *, are_adapted: bool = False) -> tuple[int, int, int, int]:
    """(H, E, M, Ms) of the weights, which may have gate_up and down of fewer experts, unless rows have
    adapters. Raises KernelError where shapes or dtypes do not belong together.
    """
    hidden, n_experts, width, shared = x.shape[-1], w.router.n - 1, w.down.k, w.shared_down.k
    expect = partial(check, "moe")
    sizes = [(m.n_matrices, m.n, m.k) for m in (w.gate_up, w.down, w.shared_gate_up, w.shared_down)]
    n_own = w.down.n_matrices
    expect(n_own == n_experts or not are_adapted, "all experts, where rows have adapters")
    expect(w.first >= 0 and w.first + n_own <= n_experts, f"{n_own} experts from {w.first} on, of {n_experts}")
    routed = [(n_own, 2 * width, hidden), (n_own, hidden, width)]
    expect(sizes[:2] == routed, f"gate_up and down {routed}, found {sizes[:2]}")
    expect(
        sizes[2:] == [(1, 2 * shared, hidden), (1, hidden, shared)], f"a shared expert of H {hidden}, found {sizes[2:]}"
    )
    expect(
        w.router.k == hidden and 0 < k <= n_experts <= 65535,
        f"{k} of {n_experts} experts a token, a router [E + 1, {hidden}]",
    )
    expect(
        hidden % 64 == width % 32 == shared % 32 == 0, f"H {hidden} a multiple of 64, widths {width} and {shared} of 32"
    )
    expect(x.dtype == torch.bfloat16 and x.is_contiguous(), "contiguous bfloat16 x")
    return hidden, n_experts, width, shared


@triton.jit
def dot(b_x, b_y, b_sum):
    """b_sum + x y of bfloat16 tiles. The interpreter would multiply their bit patterns."""
    if _INTERPRETED:
        return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_sum, input_precision="ieee")
    return tl.dot(b_x, b_y, b_sum)


@triton.jit
def order_bits(b_p, b_in):
    """The bits of p, which are in its order since p >= 0; below 0 where not b_in.

    NaN counts as 0, so that an index stays one.
    """
    return tl.where(b_in, tl.where(b_p >= 0.0, b_p, 0.0).to(tl.int32, bitcast=True), -1)


@triton.jit
def route_rows(p_logits, p_weight, p_counters, p_entries, p_lists, o_row, b_active, n_rows, first_own,
               E: tl.constexpr, OWN: tl.constexpr, E2: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr,
               SLOTS: tl.constexpr, SLOTS2: tl.constexpr, NORMALISE: tl.constexpr,
               TILE: tl.constexpr, APPEND: tl.constexpr):
    """Routes rows o_row: adds the S parts of their logits, takes the softmax over E and the SLOTS largest
    (on ties the lower expert), and puts the pairs of the active rows into the lists of their experts.

    No float is reduced in an order that a layout chooses: the softmax's sum is taken over integers, of
    exp(x - max) in steps of 2^-40 (its error is below float32's), and the largest are found over integers
    too. So bits do not depend on how many rows a program has. APPEND: the pair that opens a tile of TILE
    pairs also adds an entry.

    OWN: experts that are here, from first_own on; lists count from there. Pairs of the others have one list
    behind, OWN; without APPEND none, and the weight -1.
    """
    o_e, o_slot = tl.arange(0, E2), tl.arange(0, SLOTS2)
    b_in = (o_row < n_rows)[:, None] & (o_e < E)[None, :]
    b_logits = tl.zeros([o_row.shape[0], E2], tl.float32)
    b_gate = tl.zeros([o_row.shape[0]], tl.float32)
    for s in tl.static_range(S):
        o_line = (s * n_rows + o_row).to(tl.int64) * STRIDE
        b_logits += tl.load(p_logits + o_line[:, None] + o_e[None, :], mask=b_in, other=0.0, cache_modifier=".cg")
        b_gate += tl.load(p_logits + o_line + E, mask=o_row < n_rows, other=0.0, cache_modifier=".cg")
    b_gate = 1.0 / (1.0 + tl.exp(-b_gate))

    b_max = tl.max(tl.where(b_in, b_logits, -float("inf")), 1)
    b_exp = tl.where(b_in, tl.exp(b_logits - b_max[:, None]), 0.0)
    b_sum = tl.sum((b_exp * 1099511627776.0).to(tl.int64), 1).to(tl.float32) * (1.0 / 1099511627776.0)
    b_bits = order_bits(b_exp / b_sum[:, None], b_in)
    b_id = tl.zeros([o_row.shape[0], SLOTS2], tl.int32)
    b_weight = tl.zeros([o_row.shape[0], SLOTS2], tl.float32)
    b_total = tl.zeros([o_row.shape[0]], tl.float32)
    for s in tl.static_range(SLOTS):
        b_best = tl.max(b_bits, 1)
        b_expert = tl.min(tl.where(b_bits == b_best[:, None], o_e[None, :], E2), 1)
        b_value = b_best.to(tl.float32, bitcast=True)
        b_total += b_value
        b_id = tl.where((o_slot == s)[None, :], b_expert[:, None], b_id)
        b_weight = tl.where((o_slot == s)[None, :], b_value[:, None], b_weight)
        b_bits = tl.where(o_e[None, :] == b_expert[:, None], -1, b_bits)
    if NORMALISE:
        b_weight = b_weight / b_total[:, None]

    b_use = b_active[:, None] & (o_slot < SLOTS)[None, :]
    p_row = p_weight + o_row * (SLOTS + 1)
    b_known = b_use
    if OWN != E:
        b_id -= first_own
        b_own = (b_id >= 0) & (b_id < OWN)
        b_id = tl.where(b_own, b_id, OWN)
        if not APPEND:
            b_use &= b_own
            b_weight = tl.where(b_own, b_weight, -1.0)
    b_at = tl.atomic_add(p_counters + b_id, 1, mask=b_use, sem="relaxed")  # first: it is waited for
    tl.store(p_row[:, None] + o_slot[None, :], b_weight, mask=b_known)
    tl.store(p_row + SLOTS, b_gate, mask=o_row < n_rows)
    tl.store(p_lists + b_id * n_rows + b_at, o_row[:, None] * SLOTS + o_slot[None, :], mask=b_use)
    if APPEND:
        b_opens = b_use & (b_at % TILE == 0)
        b_entry = tl.atomic_add(p_counters + E + tl.zeros_like(b_id), 1, mask=b_opens, sem="relaxed")
        tl.store(p_entries + b_entry, b_id + b_at // TILE * 65536, mask=b_opens)
