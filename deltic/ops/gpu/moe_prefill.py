"""moe, prefill: the router, the routed experts and the shared expert for many rows, as large products of
gathered rows.

Eight launches, beside e4m3 up to three more, all sizes on the device:

    router    logits = x W^T in float32, in the K parts and the order of the decode's router: the same bits
    route     softmax, the k largest, lists of pairs (row * k + slot) by expert; `route_rows` of moe.py
    plan      tiles of 128 rows in the order of the experts
    gate_up   act = silu(gate) * up, rounded to bfloat16; rows of x are gathered by the lists, tile i has rows
              128 i .. of act
    down      y[pair] = down act, rounded to bfloat16
    combine   out[row] = sum over slots, in order, of p y, then the shared expert's part; in float32,
              rounded once. Pairs of experts that are elsewhere have no list, and are left out

gate_up and down are launched once more each for the shared expert, whose list is all rows. Where weights are
e4m3, so are rows: x is rounded in front of gate_up, act in front of down (fp8.py). Integer counters
decide where a pair stands in its list, so that may differ from run to run. A row of a product has its own sum
over an unsplit K, so no bit depends on it, on the number of rows, or on whether a tile is 64 or 128 rows high
(measured on Hopper). Rows of padding route nowhere and get zeros. Every program waits for the kernel in front
before it reads or ends.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate, Routing
from deltic.ops.gpu.blocks import BLOCK, AdapterRows, Blocks
from deltic.ops.gpu.chip import chip, load_tile, tiles_of, wait_for_front
from deltic.ops.gpu.decode import k_block
from deltic.ops.gpu.expert_slots import ExpertSlots, Stage, moved
from deltic.ops.gpu.experts import (
    NONE,
    PLAIN,
    gate_and_up,
    is_e4m3,
    matrix_at,
    product_of_rows,
    segment_of,
    segments_of,
    stage_bytes,
)
from deltic.ops.gpu.fp8 import Fp8Rows, fp8_rows, room, round_rows
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.gpu.lora import ExpertTargets, Routed, expand, expand_experts, shrink, shrink_experts
from deltic.ops.gpu.moe import MoeWeights, check_moe, dot, largest_block, logit_stride, route_rows, router_splits
from deltic.ops.gpu.weight import is_bf16, rows_of
from deltic.ops.matrix import Matrix

TILE = 128
_TILE = tl.constexpr(TILE)
_UNROLLED = tl.constexpr(256)
_PLAIN, _NONE = tl.constexpr(PLAIN), tl.constexpr(NONE)


@dataclass(frozen=True)
class MoePrefillScratch:
    """Workspaces of up to T rows, k slots each, E experts of width M.

    A call with fewer rows uses the front of each.
    """

    logits: Tensor  # float32 [T * logit_stride(E)]
    weight: Tensor  # float32 [T * (k + 1)]: p by slot, then the gate of the shared expert
    counters: Tensor  # int32 [E + 1]: pairs of each expert, then entries
    entries: Tensor  # int32: expert + 65536 * tile
    lists: Tensor  # int32 [E * T]: pairs of each expert, T (of the call) apart
    act: Tensor  # bfloat16, rows of max(M, Ms): 128 an entry, then a row a row of the shared expert
    y: Tensor  # bfloat16 [T * (k + 1) * H]: a row a pair, then a row a row of the shared expert
    x8: Fp8Rows | None  # of x, and of act
    act8: Fp8Rows | None
    stage: Stage | None = None  # where the routed experts are outside the GPU


def moe_prefill_scratch(
    n_rows: int, hidden: int, n_experts: int, n_per_token: int, width: int, shared_width: int, allocate: Allocate,
    has_e4m3: bool = False,
) -> MoePrefillScratch:
    """Workspaces for up to n_rows rows. allocate(name, size, dtype) gives a zeroed tensor."""
    f32, i32, bf16 = torch.float32, torch.int32, torch.bfloat16
    lines, inner = n_rows * (n_per_token + 1), max(width, shared_width)
    act_rows = _act_rows(n_rows, n_experts, n_per_token)
    return MoePrefillScratch(
        logits=allocate("prefill router logits", (n_rows * logit_stride(n_experts),), f32),
        weight=allocate("prefill router weights", (lines,), f32),
        counters=allocate("prefill expert counters", (n_experts + 1,), i32),
        entries=allocate("prefill expert entries", (_n_entries(n_rows, n_experts, n_per_token),), i32),
        lists=allocate("prefill expert lists", (n_experts * n_rows,), i32),
        act=allocate("prefill expert activations", (act_rows * inner,), bf16),
        y=allocate("prefill expert outputs", (lines * hidden,), bf16),
        x8=fp8_rows("prefill expert inputs", n_rows, hidden, allocate) if has_e4m3 else None,
        act8=fp8_rows("prefill expert activations", act_rows, inner, allocate) if has_e4m3 else None,
    )


def _n_entries(n_rows: int, n_experts: int, n_per_token: int) -> int:
    """Entries at most: every expert has one tile that is not full at most, and no more experts are in use
    than pairs.
    """
    n_pairs = n_rows * n_per_token
    return min(n_experts, n_pairs) + n_pairs // TILE


def _act_rows(n_rows: int, n_experts: int, n_per_token: int) -> int:
    return (_n_entries(n_rows, n_experts, n_per_token) + -(-n_rows // TILE)) * TILE


@triton.jit
def router_tile(p_x, p_w, o_expert, o_row, n_rows, k_begin, H: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M experts, BLOCK_N rows] of x W^T over K columns from k_begin on.

    A short K is unrolled, so that the loop over the parts has the stages."""
    o_k = tl.arange(0, BLOCK_K)
    p_w_tile = p_w + o_expert[:, None] * H + (k_begin + o_k)[None, :]
    p_x_tile = p_x + o_row[None, :].to(tl.int64) * H + (k_begin + o_k)[:, None]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if K <= _UNROLLED:
        for k in tl.static_range(0, K, BLOCK_K):
            b_w = tl.load(p_w_tile + k, mask=o_expert[:, None] <= E, other=0.0)
            b_x = tl.load(p_x_tile + k, mask=o_row[None, :] < n_rows, other=0.0)
            b_acc = dot(b_w, b_x, b_acc)
    else:
        for k in range(0, K, BLOCK_K):
            b_w = tl.load(p_w_tile + k, mask=o_expert[:, None] <= E, other=0.0)
            b_x = tl.load(p_x_tile + k, mask=o_row[None, :] < n_rows, other=0.0)
            b_acc = dot(b_w, b_x, b_acc)
    return b_acc


@triton.jit(do_not_specialize=["n_rows"])
def prefill_router_kernel(p_x, p_w, p_logits, p_counters, p_n, n_rows,
                          H: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                          PDL: tl.constexpr):
    """Grid (tiles of experts, tiles of two blocks of rows). The first program sets the counters to 0."""
    i_m, i_n = tl.program_id(0), tl.program_id(1)
    o_expert = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_front(PDL)
    if (i_m == 0) & (i_n == 0):
        o_e = tl.arange(0, E2)
        tl.store(p_counters + o_e, tl.zeros_like(o_e), mask=o_e < E)
    if tl.load(p_n + i_n * (BLOCK_N // 64)) == 0:  # blocks in use are in front
        return
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for s in range(S):
        b_sum += router_tile(p_x, p_w, o_expert, o_row, n_rows, s * (H // S), H, E, H // S, BLOCK_M, BLOCK_N, BLOCK_K)
    p_out = p_logits + o_row.to(tl.int64)[None, :] * STRIDE + o_expert[:, None]
    tl.store(p_out, b_sum, mask=(o_expert <= E)[:, None] & (o_row < n_rows)[None, :])


@triton.jit(do_not_specialize=["n_rows", "first_own"])
def prefill_route_kernel(p_logits, p_counters, p_weight, p_lists, p_n, n_rows, first_own,
                         E: tl.constexpr, OWN: tl.constexpr, E2: tl.constexpr, STRIDE: tl.constexpr,
                         SLOTS: tl.constexpr, SLOTS2: tl.constexpr, NORMALISE: tl.constexpr,
                         ROWS: tl.constexpr, PDL: tl.constexpr):
    """ROWS rows a program."""
    wait_for_front(PDL)
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_active = o_row % 64 < tl.load(p_n + o_row // 64)
    if tl.max(b_active.to(tl.int32), 0) == 0:
        return
    route_rows(p_logits, p_weight, p_counters, p_counters, p_lists, o_row, b_active, n_rows, first_own,
               E, OWN, E2, STRIDE, 1, SLOTS, SLOTS2, NORMALISE, _TILE, False)


@triton.jit
def plan_kernel(p_counters, p_entries, E: tl.constexpr, E2: tl.constexpr, PDL: tl.constexpr):
    """Lists the entries, in one program.

    Entries in the order of experts, so that the tiles of one expert meet its weights in L2.
    """
    wait_for_front(PDL)
    o_e = tl.arange(0, E2)
    b_tiles = (tl.load(p_counters + o_e, mask=o_e < E, other=0) + _TILE - 1) // _TILE
    b_end = tl.cumsum(b_tiles, 0)
    n_most = tl.max(b_tiles, 0)
    i = 0
    while i < n_most:
        tl.store(p_entries + b_end - b_tiles + i, o_e + i * 65536, mask=i < b_tiles)
        i += 1
    tl.store(p_counters + E, tl.sum(b_tiles, 0))


@triton.jit
def tile_of(p_counters, p_entries, p_n, i_entry, n_rows, act_base, E: tl.constexpr, SHARED: tl.constexpr):
    """Entry i_entry: expert, first of its list, rows in use (0: no such entry), first row of act."""
    if SHARED:
        first = i_entry * _TILE
        used = tl.load(p_n + first // 64) > 0  # blocks in use are in front
        return i_entry * 0, first, tl.where(used, tl.minimum(n_rows - first, _TILE), 0), act_base + first
    is_used = i_entry < tl.load(p_counters + E)
    entry = tl.where(is_used, tl.load(p_entries + i_entry), 0)
    expert, first = entry & 65535, (entry >> 16) * _TILE
    n = tl.minimum(tl.load(p_counters + expert) - first, _TILE)
    return expert, first, tl.where(is_used, n, 0), i_entry * _TILE


@triton.jit
def tile_pairs(p_lists, expert, first, n, n_rows, SLOTS: tl.constexpr, SHARED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Lines of y and rows of x of BLOCK_M pairs from `first` on; row 0 behind the n in use, which is read and
    not stored.
    """
    o_m = tl.arange(0, BLOCK_M)
    if SHARED:
        b_row = tl.where(o_m < n, first + o_m, 0)
        return (n_rows * SLOTS + b_row).to(tl.int64), b_row.to(tl.int64)
    b_pair = tl.load(p_lists + expert * n_rows + first + o_m, mask=o_m < n, other=0)
    return b_pair.to(tl.int64), (b_pair // SLOTS).to(tl.int64)


@triton.jit
def gate_up_tile(p_x, p_x_scale, p_w, p_up, p_lists, p_act, expert, first, n, act_row, n_rows, i_tile,
                 H: tl.constexpr, M: tl.constexpr, INNER: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
                 FORMAT: tl.constexpr, UP: tl.constexpr):
    """BLOCK_M rows by BLOCK_F features.

    Gate and up rows take turns, so that a thread gets both of a feature.
    """
    o_m, o_k, o_w = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, 2 * BLOCK_F)
    b_line, b_row = tile_pairs(p_lists, expert, first, n, n_rows, SLOTS, SHARED, BLOCK_M)
    if FORMAT == _PLAIN and UP == _NONE:
        o_w = i_tile * BLOCK_F + o_w // 2 + o_w % 2 * M
        p_x_tile = p_x + b_row[:, None] * H + o_k[None, :]
        p_w_tile = p_w + expert.to(tl.int64) * (2 * M * H) + o_w[None, :] * H + o_k[:, None]
        b_acc = tl.zeros([BLOCK_M, 2 * BLOCK_F], tl.float32)
        for k in range(0, H, BLOCK_K):
            b_acc = dot(tl.load(p_x_tile + k), tl.load(p_w_tile + k), b_acc)
        b_gate, b_up = tl.split(tl.reshape(b_acc, [BLOCK_M, BLOCK_F, 2]))
    else:
        p_scale = p_x_scale
        if p_x_scale is not None:
            p_scale = p_x_scale + b_row
        b_gate, b_up = gate_and_up(
            p_x + b_row * H, o_m < n, p_w, p_up, expert, i_tile, H, M, BLOCK_F, BLOCK_K, FORMAT, UP, p_scale, n_rows
        )
        b_gate, b_up = tl.trans(b_gate), tl.trans(b_up)
    o_f = i_tile * BLOCK_F + tl.arange(0, BLOCK_F)
    if p_act.dtype.element_ty == tl.float32:  # sums, a line a pair: adapters add to them before SwiGLU
        p_line = p_act + b_line[:, None] * (2 * INNER) + o_f[None, :]
        tl.store(p_line, b_gate, mask=(o_m < n)[:, None])
        tl.store(p_line + M, b_up, mask=(o_m < n)[:, None])
    else:
        b_act = (b_gate / (1.0 + tl.exp(-b_gate)) * b_up).to(tl.bfloat16)
        p_line = p_act + (act_row + o_m).to(tl.int64)[:, None] * INNER
        tl.store(p_line + o_f[None, :], b_act, mask=(o_m < n)[:, None])


@triton.jit(do_not_specialize=["n_rows", "act_base"])
def prefill_gate_up_kernel(p_x, p_x_scale, p_w, p_up, p_counters, p_entries, p_lists, p_n, p_act, p_where, n_rows,
                           act_base, H: tl.constexpr, M: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr,
                           SLOTS: tl.constexpr, SHARED: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
                           FORMAT: tl.constexpr, UP: tl.constexpr, PDL: tl.constexpr):
    """Grid: entries by tiles of features. The last tile of an expert is 64 rows high where that is enough.

    FORMAT, UP: the formats of the segments (experts.py). p_x_scale: of x in codes, else None. p_where: the
    experts' places, where they are in slots, else None.
    """
    i_tile, i_entry = tl.program_id(0) % (M // BLOCK_F), tl.program_id(0) // (M // BLOCK_F)
    wait_for_front(PDL)
    expert, first, n, act_row = tile_of(p_counters, p_entries, p_n, i_entry, n_rows, act_base, E, SHARED)
    if n == 0:
        return
    if p_where is not None:
        p_w = moved(p_w, p_where, expert)
        if UP != _NONE:
            p_up = moved(p_up, p_where + E, expert)
        p_lists, expert = p_lists + expert * n_rows, expert * 0
    if p_x_scale is not None:  # of 8-bit products sums of a block stand beside all: there is room for 64 rows
        for i in range(0, n, 64):
            gate_up_tile(p_x, p_x_scale, p_w, p_up, p_lists, p_act, expert, first + i, n - i, act_row + i, n_rows,
                         i_tile, H, M, INNER, SLOTS, SHARED, 64, BLOCK_F, BLOCK_K, FORMAT, UP)
    elif n <= 64:
        gate_up_tile(p_x, p_x_scale, p_w, p_up, p_lists, p_act, expert, first, n, act_row, n_rows, i_tile,
                     H, M, INNER, SLOTS, SHARED, 64, BLOCK_F, BLOCK_K, FORMAT, UP)
    else:
        gate_up_tile(p_x, p_x_scale, p_w, p_up, p_lists, p_act, expert, first, n, act_row, n_rows, i_tile,
                     H, M, INNER, SLOTS, SHARED, _TILE, BLOCK_F, BLOCK_K, FORMAT, UP)


@triton.jit(do_not_specialize=["n_rows", "act_base"])
def prefill_silu_kernel(p_sums, p_counters, p_entries, p_lists, p_n, p_act, n_rows, act_base,
                        M: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, SLOTS: tl.constexpr,
                        SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr):
    """act = silu(gate) * up of the sums that `prefill_gate_up_kernel` left instead of it. Grid (entries by
    parts of BLOCK_M rows, tiles of features).
    """
    PARTS: tl.constexpr = _TILE // BLOCK_M
    i_entry, i_part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    wait_for_front(PDL)
    expert, first, n, act_row = tile_of(p_counters, p_entries, p_n, i_entry, n_rows, act_base, E, SHARED)
    n -= i_part * BLOCK_M
    if n <= 0:
        return
    b_line, _ = tile_pairs(p_lists, expert, first + i_part * BLOCK_M, n, n_rows, SLOTS, SHARED, BLOCK_M)
    o_m, o_f = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    b_mask = (o_m < n)[:, None] & (o_f < M)[None, :]
    p_line = p_sums + b_line[:, None] * (2 * INNER) + o_f[None, :]
    b_gate, b_up = tl.load(p_line, mask=b_mask, other=0.0), tl.load(p_line + M, mask=b_mask, other=0.0)
    b_act = (b_gate / (1.0 + tl.exp(-b_gate)) * b_up).to(tl.bfloat16)
    p_to = p_act + (act_row + i_part * BLOCK_M + o_m).to(tl.int64)[:, None] * INNER + o_f[None, :]
    tl.store(p_to, b_act, mask=b_mask)


@triton.jit
def down_tile(acts, weights, p_act, p_act_scale, p_w, p_lists, p_y, expert, first, n, act_row, n_act, n_rows, i_tile,
              H: tl.constexpr, M: tl.constexpr, INNER: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """BLOCK_M rows of act by BLOCK_N of H."""
    if FORMAT == _PLAIN:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, M, BLOCK_K):
            b_x = load_tile(acts, act_row, k, BLOCK_M, BLOCK_K)
            b_acc = dot(b_x, load_tile(weights, expert * H + i_tile * BLOCK_N, k, BLOCK_N, BLOCK_K).T, b_acc)
    else:
        o_m, o_h = tl.arange(0, BLOCK_M), i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        o_act, p_matrix = (act_row + o_m).to(tl.int64), matrix_at(p_w, expert, H, M, FORMAT)
        p_scale = p_act_scale
        if p_act_scale is not None:
            p_scale = p_act_scale + o_act
        STRIDE: tl.constexpr = INNER if p_act_scale is None else M
        b_acc = tl.trans(product_of_rows(
            p_act + o_act * STRIDE, o_m < n, p_matrix, o_h, H, M, BLOCK_K, FORMAT, p_x_scale=p_scale, scale_step=n_act
        ))
    b_line, _ = tile_pairs(p_lists, expert, first, n, n_rows, SLOTS, SHARED, BLOCK_M)
    o_m, o_h = tl.arange(0, BLOCK_M), i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(p_y + b_line[:, None] * H + o_h[None, :], b_acc.to(tl.bfloat16), mask=(o_m < n)[:, None])


@triton.jit(do_not_specialize=["n_rows", "act_base", "n_act"])
def prefill_down_kernel(acts, halves, weights, p_act, p_act_scale, p_w, p_counters, p_entries, p_lists, p_n, p_y,
                        p_where, n_rows, act_base, n_act, H: tl.constexpr, M: tl.constexpr, INNER: tl.constexpr,
                        E: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr):
    """Grid: entries by tiles of H. In bf16 acts, halves: act (`tiles_of`), tiles [128 or 64, BLOCK_K];
    weights: of [E H, M]. In other formats their addresses: p_act, p_w; of codes p_act_scale, n_act apart.
    p_where: the experts' places, where they are in slots, else None; weights are a pointer and stride then.
    """
    i_tile, i_entry = tl.program_id(0) % (H // BLOCK_N), tl.program_id(0) // (H // BLOCK_N)
    wait_for_front(PDL)
    expert, first, n, act_row = tile_of(p_counters, p_entries, p_n, i_entry, n_rows, act_base, E, SHARED)
    if n == 0:
        return
    if p_where is not None:
        if FORMAT == _PLAIN:
            weights = moved(weights[0], p_where, expert), weights[1]
        else:
            p_w = moved(p_w, p_where, expert)
        p_lists, expert = p_lists + expert * n_rows, expert * 0
    if p_act_scale is not None:
        for i in range(0, n, 64):
            down_tile(acts, weights, p_act, p_act_scale, p_w, p_lists, p_y, expert, first + i, n - i, act_row + i,
                      n_act, n_rows, i_tile, H, M, INNER, SLOTS, SHARED, 64, BLOCK_N, BLOCK_K, FORMAT)
    elif n <= 64:
        down_tile(halves, weights, p_act, p_act_scale, p_w, p_lists, p_y, expert, first, n, act_row, n_act, n_rows,
                  i_tile, H, M, INNER, SLOTS, SHARED, 64, BLOCK_N, BLOCK_K, FORMAT)
    else:
        down_tile(acts, weights, p_act, p_act_scale, p_w, p_lists, p_y, expert, first, n, act_row, n_act, n_rows,
                  i_tile, H, M, INNER, SLOTS, SHARED, _TILE, BLOCK_N, BLOCK_K, FORMAT)


@triton.jit(do_not_specialize=["n_rows"])
def combine_kernel(p_y, p_weight, p_n, p_out, n_rows,
                   H: tl.constexpr, SLOTS: tl.constexpr, BLOCK_H: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, pieces of H). ALL: no expert is elsewhere."""
    i_row = tl.program_id(0)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    wait_for_front(PDL)
    p_line = p_out + i_row.to(tl.int64) * H + o_h
    if i_row % 64 >= tl.load(p_n + i_row // 64):
        tl.store(p_line, tl.zeros([BLOCK_H], p_out.dtype.element_ty))
        return
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    for s in tl.static_range(SLOTS):
        weight, p_part = tl.load(p_weight + i_row * (SLOTS + 1) + s), p_y + (i_row * SLOTS + s).to(tl.int64) * H + o_h
        if ALL:
            b_sum += tl.load(p_part).to(tl.float32) * weight
        else:  # nobody wrote what is not ours
            b_sum += tl.load(p_part, mask=o_h * 0 + weight != -1.0, other=0.0).to(tl.float32) * weight
    b_y = tl.load(p_y + (n_rows * SLOTS + i_row).to(tl.int64) * H + o_h).to(tl.float32)
    b_sum += b_y * tl.load(p_weight + i_row * (SLOTS + 1) + SLOTS)
    tl.store(p_line, b_sum.to(p_out.dtype.element_ty))


@dataclass(frozen=True)
class MoePrefillTiles:
    """Tiles of the products: 128 rows (or 64) by these. No field reaches a bit."""

    block_f: int = 128  # features of gate_up: twice as many weight rows
    up_warps: int = 8
    up_stages: int = 4
    up_k: int = 64
    block_n: int = 128  # rows of down: two programs an SM, since K is short and one would wait for its ends
    down_warps: int = 4
    down_stages: int = 3
    down_k: int = 64
    router_m: int = 64
    router_n: int = 128
    router_k: int = 64
    router_warps: int = 4
    router_stages: int = 2
    route_rows: int = 2
    combine_h: int = 2048


def moe_prefill_tiles() -> MoePrefillTiles:
    """The cut on this chip: as many stages as fit; warps enough to hold sums and operands in registers."""
    c = MoePrefillTiles()
    if not chip().multiplies_from_shared:
        c = replace(c, down_warps=8, router_warps=8)
    up = chip().stages(2 * c.up_k * (TILE + 2 * c.block_f), c.up_stages)
    down = chip().stages(2 * c.down_k * (TILE + c.block_n), c.down_stages)
    return replace(c, up_stages=up, down_stages=down)


def _tiles(w: Matrix, tiles: MoePrefillTiles | None) -> MoePrefillTiles:
    """Returns the tiles asked for, or the cut for a matrix of gate_up or down."""
    if tiles is not None or is_bf16(w):
        return tiles or moe_prefill_tiles()
    if is_e4m3(w):  # 128 weight rows a program; 256 of gate and up, if three stages of those fit
        stages = chip().stages(128 * (128 + 64), 3, beside=8192)
        if chip().stages(128 * (256 + 64), 3, beside=8192) == 3:
            return MoePrefillTiles(block_f=128, up_warps=8, up_stages=3, down_warps=4, down_stages=stages)
        return MoePrefillTiles(block_f=64, up_warps=4, up_stages=stages, down_warps=4, down_stages=stages)
    # 128 weight rows a program, of two pieces of each
    k, room = 64, min(100 * 1024, chip().shared_bytes - 2048)
    largest = max(stage_bytes(128, w.k, segment.format, k, TILE) for segment in w.segments)
    stages = max(2, min(4, room // largest))
    return MoePrefillTiles(
        block_f=64 * len(w.segments), up_warps=8, up_stages=stages, up_k=k, down_warps=8, down_stages=stages, down_k=k
    )


def _route(
    x: Tensor, w: MoeWeights, routing: Routing, blocks: Blocks, s: MoePrefillScratch, c: MoePrefillTiles,
    adapters: tuple[ExpertTargets, AdapterRows] | None,
) -> tuple[MoeWeights | ExpertSlots, Tensor | None, Tensor | None]:
    """Fills lists and entries of s, and its weights. Returns the routed experts as the products read them; in
    slots, the places of gate_up and of down, too.
    """
    (t, hidden), n_experts = x.shape, w.router.n - 1
    splits, e2 = router_splits(hidden), next_power_of_2(n_experts)
    experts = dict(E=n_experts, E2=e2, STRIDE=logit_stride(n_experts))
    router_n, part = largest_block(c.router_n, t), hidden // splits
    router_k = largest_block(c.router_k, part)
    if adapters is not None:
        shrink(x, adapters[0].router, adapters[1])
    a_stage = 2 * (c.router_m + router_n) * (part if part <= _UNROLLED.value else router_k)
    launch(
        prefill_router_kernel, (triton.cdiv(n_experts + 1, c.router_m), t // router_n), x, rows_of("moe", w.router),
        s.logits, s.counters, blocks.n, t, H=hidden, S=splits, BLOCK_M=c.router_m, BLOCK_N=router_n,
        BLOCK_K=router_k, **experts, num_warps=c.router_warps,
        num_stages=chip().stages(a_stage, c.router_stages if part <= _UNROLLED.value else 4),
    )
    if adapters is not None:
        logits = s.logits[: t * logit_stride(n_experts)].view(t, -1)[:, : n_experts + 1]
        expand(logits, adapters[0].router, adapters[1])
    launch(
        prefill_route_kernel, (t // c.route_rows,), s.logits, s.counters, s.weight, s.lists, blocks.n, t, w.first,
        OWN=w.down.n_matrices, SLOTS=routing.n_per_token, SLOTS2=next_power_of_2(routing.n_per_token),
        NORMALISE=routing.normalise, ROWS=c.route_rows, **experts, num_warps=1, num_stages=1,
    )
    launch(plan_kernel, (1,), s.counters, s.entries, E=n_experts, E2=e2, num_warps=4, num_stages=1)
    if s.stage is None:
        return w, None, None
    if not s.stage.is_filled:
        s.stage.fill(s.counters)
    return s.stage.slots, s.stage.where, s.stage.where[-1]


def moe_prefill(
    x: Tensor, w: MoeWeights, routing: Routing, *, blocks: Blocks, scratch: MoePrefillScratch, out: Tensor,
    tiles: MoePrefillTiles | None = None, adapters: tuple[ExpertTargets, AdapterRows] | None = None,
) -> None:
    """out[r] = sum_s p_s Expert_s(x[r]) + sigmoid(gate) Shared(x[r]), added in the order of decreasing p, the
    shared one last.

    x: bfloat16 [T, H], T = 64 B; weights, p and routing as in `moe_decode`; blocks.n: int32
    [B], tokens of each block, those in use in front; out: bfloat16 or float32, T * H elements, zeros in rows
    of padding.
    The experts' outputs are rounded to bfloat16 before they are weighted. adapters: as in `moe_decode`; what
    they add to a rounded output is added in float32, and rounded. scratch.stage: where w's routed experts are
    in the host's memory. w may have some of the experts, from w.first on: what others add is left out. Raises
    KernelError where shapes do not belong together, and for a format without a kernel.
    """
    hidden, n_experts, width, shared = check_moe(x, w, routing.n_per_token, are_adapted=adapters is not None)
    t, c, s, n_per_token = x.shape[0], tiles or moe_prefill_tiles(), scratch, routing.n_per_token
    n_own = w.down.n_matrices
    fits = t % BLOCK == 0 and blocks.n.shape[0] >= t // BLOCK and out.numel() == t * hidden
    check("moe", fits, f"{t} rows in blocks of {BLOCK}, and as many of out")
    room_for = s.weight.numel() // (n_per_token + 1)
    check("moe", t <= room_for, f"{t} rows: workspaces are for {room_for} rows")
    near, up_where, down_where = _route(x, w, routing, blocks, s, c, adapters)
    n_entries, n_tiles, inner = _n_entries(t, n_own, n_per_token), triton.cdiv(t, TILE), max(width, shared)
    act_base = n_entries * TILE  # first row of act of the shared expert
    products: dict[str, int] = {"E": n_experts, "SLOTS": n_per_token, "INNER": inner}
    act, lists = s.act if adapters is None else adapters[0].sums, (s.counters, s.entries, s.lists, blocks.n)

    def up(matrix: Matrix, m: int, n: int, is_shared: bool, where: Tensor | None = None) -> None:
        rows, ups, FORMAT, UP = segments_of(matrix)
        d, codes, scale = _tiles(matrix, tiles), x, None
        if is_e4m3(matrix):
            codes, scale = room(s.x8).codes, room(s.x8).scale
        block_f = largest_block(d.block_f, m)
        launch(
            prefill_gate_up_kernel, (n * (m // block_f),), codes, scale, rows, ups, *lists, act, where, t, act_base,
            H=hidden, M=m, SHARED=is_shared, BLOCK_F=block_f, BLOCK_K=largest_block(d.up_k, hidden), FORMAT=FORMAT,
            UP=UP, num_warps=d.up_warps, num_stages=d.up_stages, **products,
        )

    def silu(m: int, n: int, is_shared: bool) -> None:
        block_f = min(512, next_power_of_2(m))
        launch(
            prefill_silu_kernel, (n * (TILE // 16), -(-m // block_f)), act, *lists, s.act, t, act_base, M=m,
            SHARED=is_shared, BLOCK_M=16, BLOCK_F=block_f, num_warps=4, **products,
        )

    def down(matrix: Matrix, m: int, n: int, is_shared: bool, where: Tensor | None = None) -> None:
        (rows, FORMAT), d = segment_of(matrix), _tiles(matrix, tiles)
        block_n, block_k = largest_block(d.block_n, hidden), largest_block(d.down_k, m)
        first, n_act = (act_base, n_tiles * TILE) if is_shared else (0, act_base)
        operands: tuple[object, ...] = (None, None, None, s.act, None, rows)
        if FORMAT == PLAIN:
            rows = rows.view(-1, m)
            n_rows = act_base + n_tiles * TILE
            acts, halves = (tiles_of(s.act, n_rows, m, inner, (high, block_k)) for high in (TILE, 64))
            weights = (rows, m) if where is not None else tiles_of(rows, len(rows), m, m, (block_n, block_k))
            operands = acts, halves, weights, None, None, None
        elif is_e4m3(matrix):
            act8, act = room(s.act8), s.act[first * inner : (first + n_act) * inner].view(n_act, inner)[:, :m]
            used = None if is_shared else s.counters[n_experts:]
            round_rows(act, act8, k_block(m), used=used, each=TILE)
            operands, first = (None, None, None, act8.codes, act8.scale, rows), 0
        launch(
            prefill_down_kernel, (n * (hidden // block_n),), *operands, *lists, s.y, where, t, first, n_act, H=hidden,
            M=m, SHARED=is_shared, BLOCK_N=block_n, BLOCK_K=block_k, FORMAT=FORMAT, num_warps=d.down_warps,
            num_stages=d.down_stages, **products,
        )

    if is_e4m3(w.gate_up) or is_e4m3(w.shared_gate_up):
        round_rows(x, room(s.x8), k_block(hidden))
    if adapters is not None:
        of, who = adapters
        routed = Routed(s.counters, s.entries, s.lists, s.weight, t, n_entries, TILE, n_experts, n_per_token, act_base)
        shrink_experts(x, of.gate_up, of.shared_gate_up, routed, who, x_row=hidden, is_act=False)
    up(near.gate_up, width, n_entries, False, up_where)
    up(w.shared_gate_up, shared, n_tiles, True)
    if adapters is not None:
        expand_experts(of.sums, of.gate_up, of.shared_gate_up, routed, who, out_row=2 * inner)
        silu(width, n_entries, False)
        silu(shared, n_tiles, True)
        shrink_experts(s.act, of.down, of.shared_down, routed, who, x_row=inner, is_act=True)
    down(near.down, width, n_entries, False, down_where)
    down(w.shared_down, shared, n_tiles, True)
    if adapters is not None:
        expand_experts(s.y, of.down, of.shared_down, routed, who, out_row=hidden)
    block_h = largest_block(c.combine_h, hidden)
    launch(
        combine_kernel, (t, hidden // block_h), s.y, s.weight, blocks.n, out, t, H=hidden, SLOTS=n_per_token,
        BLOCK_H=block_h, ALL=n_own == n_experts, num_warps=8 if block_h >= 2048 else 4, num_stages=1,
    )
