"""moe, decode: the router, the routed experts and the shared expert for a few rows, as streams of the
experts' weights.

Three launches for one row, four for more, and one that rounds rows beside e4m3:

    router    logits = x W^T in float32: weight rows are the tall side, rows of x the narrow one, K cut in a
              fixed number of parts
    (route)   softmax, the k largest, work lists. One row has no lists: each program of the next two routes it
              for itself
    gate_up   for each (expert, tile of its rows): silu(gate) * up, rounded to bfloat16, one row a (row, slot)
    down      out[slot, row] = p_slot Expert(x); out[k, row] = sigmoid(gate) Shared(x)

Where a GPU has some of the experts, pairs of all others stand in one list more, for which down writes zeros.

A pair is row * k + slot. Lists of pairs are built with integer counters, so their order may differ from run
to run. Each row of a product has its own sum, so no bit depends on it. The sum of the softmax is taken over
integers (see `route_rows`), so it has no order either. The next `add_norm` adds the k + 1 parts of `out` in
order to the residual: there is no kernel that combines.

What may be read before a kernel's `gdc_wait`: weights, and in `down` what the router and the route kernel
wrote, because `gate_up` lets it start only behind its own wait, so those have ended by then. Such reads go
past the L1 cache. So `down` fetches its weights while `gate_up` still runs. Router, route and `down` let the
next kernel start at once where there are few rows (EARLY).

Source: the published Qwen3-Next and Qwen3.5-MoE model code (softmax over all experts, then the k largest).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate, Routing
from deltic.ops.gpu.blocks import AdapterRows
from deltic.ops.gpu.chip import chip, prefetch_l2, wait_for_front
from deltic.ops.gpu.decode import k_block
from deltic.ops.gpu.expert_slots import ExpertSlots, bring, moved
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
from deltic.ops.gpu.fp8 import Fp8Rows, round_rows
from deltic.ops.gpu.launch import INTERPRETED, launch, next_power_of_2
from deltic.ops.gpu.lora import ExpertTargets, Routed, expand, expand_experts, shrink, shrink_experts
from deltic.ops.gpu.moe import (
    MoeWeights,
    check_moe,
    dot,
    largest_block,
    logit_stride,
    order_bits,
    route_rows,
    router_splits,
)
from deltic.ops.gpu.weight import is_bf16, rows_of
from deltic.ops.matrix import Matrix, planes

_INTERPRETED = tl.constexpr(INTERPRETED)
_PLAIN, _NONE = tl.constexpr(PLAIN), tl.constexpr(NONE)

MAX_SPLITS = 8
FEW_ROWS = 16
"""Rows up to which a step waits for memory's latency more than for its bandwidth."""


@dataclass(frozen=True)
class MoeScratch:
    """Workspaces of up to N rows, k slots each, E experts. A call with fewer rows uses the front of each."""

    logits: Tensor  # float32 [MAX_SPLITS * N * logit_stride(E)]: partial sums of the router
    weight: Tensor  # float32 [N * (k + 1)]: p by slot, then the gate of the shared expert
    counters: Tensor  # int32 [E + 1]: pairs of each expert, entries; the router sets them to 0
    entries: Tensor  # int32 [N * k]: expert + 65536 * tile: what the grouped products work through
    lists: Tensor  # int32 [E * N]: pairs of each expert, N (of the call) apart
    act: Tensor  # bfloat16 [N * (k + 1) * max(M, Ms)]: a row a pair, then a row a row of the shared expert
    x8: Fp8Rows | None = None  # of x
    expert_slots: ExpertSlots | None = None  # where the routed experts are outside the GPU


def moe_scratch(
    n_rows: int, n_experts: int, n_per_token: int, width: int, shared_width: int, allocate: Allocate
) -> MoeScratch:
    """Workspaces for up to n_rows rows. allocate(name, size, dtype) gives a zeroed tensor."""
    f32, i32 = torch.float32, torch.int32
    inner = max(width, shared_width)
    return MoeScratch(
        logits=allocate("router logits", (MAX_SPLITS * n_rows * logit_stride(n_experts),), f32),
        weight=allocate("router weights", (n_rows * (n_per_token + 1),), f32),
        counters=allocate("expert counters", (n_experts + 1,), i32),
        entries=allocate("expert entries", (n_rows * n_per_token,), i32),
        lists=allocate("expert lists", (n_experts * n_rows,), i32),
        act=allocate("expert activations", (n_rows * (n_per_token + 1) * inner,), torch.bfloat16),
    )


@triton.jit
def fetch(p_tile, b_mask):
    """A bfloat16 tile as int16, for `fetched`: between the two it stays in registers.

    (What is loaded as bfloat16 is put into shared memory at once, a few registers at a time, each waiting for
    its data.)
    """
    if _INTERPRETED:
        return tl.load(p_tile, mask=b_mask, other=0.0)
    return tl.load(p_tile.to(tl.pointer_type(tl.int16), bitcast=True), mask=b_mask, other=0)


@triton.jit
def fetched(b_tile):
    if _INTERPRETED:
        return b_tile
    return b_tile.to(tl.bfloat16, bitcast=True)


@triton.jit
def route_alone(p_logits, slot, first_own, E: tl.constexpr, OWN: tl.constexpr, E2: tl.constexpr,
                STRIDE: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, NORMALISE: tl.constexpr):
    """(expert, weight) of one slot of the only row, or (0, gate) of the shared expert (slot SLOTS): the bits
    of `route_rows`, and the expert as it counts: of those that are elsewhere OWN.

    Experts are held in pieces of 32, which every warp has whole, so that no reduction leaves a warp. The
    slots are a loop, not unrolled here: the compiler's time grows with the square of the code (23 s for 512
    experts and 10 slots, unrolled).
    """
    LANES: tl.constexpr = 32
    PIECES: tl.constexpr = (E2 + 31) // 32
    o_lane = tl.arange(0, LANES)
    expert = slot * 0
    weight = expert.to(tl.float32)
    if slot == SLOTS:
        gate = 0.0
        for s in tl.static_range(S):
            gate += tl.load(p_logits + s * STRIDE + E, cache_modifier=".cg")
        weight = 1.0 / (1.0 + tl.exp(-gate))
    else:
        logits: tl.tuple = ()
        b_max = tl.full([LANES], -float("inf"), tl.float32)
        for i in tl.static_range(PIECES):
            p_piece = p_logits + i * LANES + o_lane
            b_logit = tl.zeros([LANES], tl.float32)
            if i * LANES + LANES <= E:
                for s in tl.static_range(S):
                    b_logit += tl.load(p_piece + s * STRIDE, cache_modifier=".cg")
            else:
                b_in = i * LANES + o_lane < E
                for s in tl.static_range(S):
                    b_logit += tl.load(p_piece + s * STRIDE, mask=b_in, other=0.0, cache_modifier=".cg")
                b_logit = tl.where(b_in, b_logit, -float("inf"))
            b_max = tl.maximum(b_max, b_logit)
            logits += (b_logit,)
        top = tl.max(b_max, 0)
        exps: tl.tuple = ()
        b_sum = tl.zeros([LANES], tl.int64)
        for i in tl.static_range(PIECES):
            b_exp = tl.exp(logits[i] - top)
            if i * LANES + LANES > E:
                b_exp = tl.where(i * LANES + o_lane < E, b_exp, 0.0)
            b_sum += (b_exp * 1099511627776.0).to(tl.int64)
            exps += (b_exp,)
        total = tl.sum(b_sum, 0).to(tl.float32) * (1.0 / 1099511627776.0)
        bits: tl.tuple = ()
        for i in tl.static_range(PIECES):
            bits += (order_bits(exps[i] / total, i * LANES + o_lane < E),)
        norm = 0.0
        for s in range(SLOTS):
            b_best = bits[0]
            for i in tl.static_range(1, PIECES):
                b_best = tl.maximum(b_best, bits[i])
            best = tl.max(b_best, 0)
            b_first = tl.full([LANES], E2, tl.int32)
            for i in tl.static_range(PIECES):
                b_first = tl.minimum(b_first, tl.where(bits[i] == best, i * LANES + o_lane, E2))
            first = tl.min(b_first, 0)
            left: tl.tuple = ()
            for i in tl.static_range(PIECES):
                left += (tl.where(i * LANES + o_lane == first, -1, bits[i]),)
            bits = left
            value = best.to(tl.float32, bitcast=True)
            norm += value
            expert = tl.where(slot == s, first, expert)
            weight = tl.where(slot == s, value, weight)
        if NORMALISE:
            weight = weight / norm
        if OWN != E:
            expert -= first_own
            expert = tl.where((expert >= 0) & (expert < OWN), expert, OWN)
    return expert, weight


@triton.jit(do_not_specialize=["n_rows"])
def router_kernel(p_x, p_w, p_logits, p_counters, n_rows,
                  H: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  AHEAD: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """Grid (tiles of experts, S, tiles of rows).

    AHEAD: the first K block of the weights is fetched before the wait.
    """
    i_m, i_s, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL and EARLY:
        gdc_launch_dependents()
    o_expert = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = i_s * (H // S) + tl.arange(0, BLOCK_K)
    p_w_tile = p_w + o_expert[:, None] * H + o_k[None, :]
    p_x_tile = p_x + o_row[None, :].to(tl.int64) * H + o_k[:, None]
    if AHEAD:
        b_ahead = fetch(p_w_tile, o_expert[:, None] <= E)
    if PDL:
        if not AHEAD:
            o_line = i_s * (H // S) + tl.arange(0, LINES) * 64
            prefetch_l2(p_w + tl.minimum(o_expert, E)[:, None] * H + o_line[None, :])
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    if (i_m == 0) & (i_s == 0) & (i_n == 0):
        o_e = tl.arange(0, E2)
        tl.store(p_counters + o_e, tl.zeros_like(o_e), mask=o_e < E)
        tl.store(p_counters + E, 0)
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if AHEAD:
        b_x = tl.load(p_x_tile, mask=o_row[None, :] < n_rows, other=0.0)
        b_acc = dot(fetched(b_ahead), b_x, b_acc)
    for k in range(BLOCK_K if AHEAD else 0, H // S, BLOCK_K):
        b_w = tl.load(p_w_tile + k, mask=o_expert[:, None] <= E, other=0.0)
        b_x = tl.load(p_x_tile + k, mask=o_row[None, :] < n_rows, other=0.0)
        b_acc = dot(b_w, b_x, b_acc)
    p_out = p_logits + (i_s * n_rows + o_row)[None, :] * STRIDE + o_expert[:, None]
    tl.store(p_out, b_acc, mask=(o_expert <= E)[:, None] & (o_row < n_rows)[None, :])


@triton.jit(do_not_specialize=["n_rows", "first_own"])
def route_kernel(p_logits, p_counters, p_weight, p_entries, p_lists, p_row_slot, n_rows, first_own,
                 E: tl.constexpr, OWN: tl.constexpr, E2: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr,
                 SLOTS: tl.constexpr, SLOTS2: tl.constexpr, NORMALISE: tl.constexpr, TILE: tl.constexpr,
                 EARLY: tl.constexpr, PDL: tl.constexpr):
    """Routes one row a program."""
    if PDL and EARLY:
        gdc_launch_dependents()
    o_row = tl.program_id(0) + tl.arange(0, 1)
    b_active = tl.load(p_row_slot + o_row) >= 0
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    route_rows(p_logits, p_weight, p_counters, p_entries, p_lists, o_row, b_active, n_rows, first_own,
               E, OWN, E2, STRIDE, S, SLOTS, SLOTS2, NORMALISE, TILE, True)


@triton.jit
def work_rows(p_counters, p_entries, p_lists, i_work, n_shared, n_rows,
              E: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Describes work item i_work: the first n_shared are tiles of the shared expert, then come the entries.

    Returns the expert, how many of BLOCK_N columns are in use (0 or less: no such item), their rows and slots
    (SLOTS: shared).
    """
    o_n = tl.arange(0, BLOCK_N)
    is_shared = i_work < n_shared
    n_entries = tl.load(p_counters + E, cache_modifier=".cg")
    # read before it is known to be one, so that both reads are on their way at once
    entry = tl.load(p_entries + (i_work - n_shared), mask=i_work >= n_shared, other=0, cache_modifier=".cg")
    is_work = i_work - n_shared < n_entries
    entry = tl.where(is_work, entry, 0)
    expert = entry & 65535
    first = tl.where(is_shared, i_work, entry >> 16) * BLOCK_N
    n = tl.where(is_shared, n_rows, tl.load(p_counters + expert, cache_modifier=".cg")) - first
    n = tl.where(is_work, n, 0)
    b_pair = tl.load(
        p_lists + expert * n_rows + first + o_n, mask=(o_n < n) & (i_work >= n_shared), other=0, cache_modifier=".cg"
    )
    b_row = tl.where(is_shared, first + o_n, b_pair // SLOTS)
    b_slot = tl.where(is_shared, SLOTS, b_pair % SLOTS)
    return expert, n, b_row, b_slot


@triton.jit(do_not_specialize=["n_rows", "first_own"])
def gate_up_kernel(p_x, p_x_scale, p_w, p_up, p_shared, p_shared_up, p_logits, p_counters, p_entries, p_lists,
                   p_row_slot, p_act, p_where, n_rows, first_own, FORMAT: tl.constexpr, UP: tl.constexpr,
                   SHARED: tl.constexpr, SHARED_UP: tl.constexpr, H: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
                   E: tl.constexpr, OWN: tl.constexpr, E2: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr,
                   SLOTS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   MOST_K: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
                   ALONE: tl.constexpr, PDL: tl.constexpr):
    """act = silu(gate) * up of one tile of features and one work item; the tile has 2 BLOCK_F weight rows.
    Into float32 p_act go gate and up as they are.

    p_where: the experts' places, where they are in slots, else None.
    FORMAT, UP, SHARED, SHARED_UP: the formats of the segments (experts.py). ROW, LINE: elements from one row
    of the shared expert's codes to the next, and of a line of the cache. p_x_scale: of x in codes, else None.

    ALONE: one row. Eight gate rows and eight up rows take turns in the tile: that is how one thread gets both
    values of a feature.
    """
    INNER: tl.constexpr = M if M > MS else MS
    TILES: tl.constexpr = INNER // BLOCK_F
    i_tile, i_work = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    n_shared = (n_rows + BLOCK_N - 1) // BLOCK_N
    is_shared = i_work < n_shared
    o_w = tl.arange(0, 2 * BLOCK_F)
    o_k, o_n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    width = tl.where(is_shared, MS, M)
    o_w = i_tile * BLOCK_F + o_w // 16 * 8 + o_w % 8 + o_w // 8 % 2 * width
    if M != MS:  # noqa: SIM102 (a constant, then a value)
        if i_tile * BLOCK_F >= width:
            return
    if PDL:
        if SHARED_UP == _NONE:  # noqa: SIM102
            if is_shared:
                prefetch_l2(p_shared + o_w[:, None] * ROW + (tl.arange(0, LINES) * LINE)[None, :])
        gdc_wait()
        gdc_launch_dependents()  # not earlier: `down_kernel` relies on what is behind this wait
    if ALONE:
        if (tl.load(p_row_slot) < 0) & (i_work > 0):
            return
        slot = (i_work + SLOTS) % (SLOTS + 1)  # the shared expert comes first
        expert, _ = route_alone(p_logits, slot, first_own, E, OWN, E2, STRIDE, S, SLOTS, False)
        n, b_row, b_slot = 1, o_n * 0, slot + o_n * 0
    else:
        expert, n, b_row, b_slot = work_rows(
            p_counters, p_entries, p_lists, i_work, n_shared, n_rows, E, SLOTS, BLOCK_N
        )
        if n <= 0:
            return
    if OWN != E:  # noqa: SIM102 (a constant, then a value)
        if expert == OWN:
            return
    if p_where is not None:
        p_w = moved(p_w, p_where, expert)
        if UP != _NONE:
            p_up = moved(p_up, p_where + E, expert)
        expert = expert * 0
    p_scale = p_x_scale
    if p_x_scale is not None:
        p_scale = p_x_scale + tl.minimum(b_row, n_rows - 1)  # rows behind the last are read, and not stored
    if FORMAT == _PLAIN and UP == _NONE and SHARED == _PLAIN and SHARED_UP == _NONE:
        p_matrix = tl.where(is_shared, p_shared, p_w + expert.to(tl.int64) * (2 * M * H))
        p_w_tile = p_matrix + o_w[:, None] * H + o_k[None, :]
        p_x_tile = p_x + b_row[None, :] * H + o_k[:, None]
        b_acc = tl.zeros([2 * BLOCK_F, BLOCK_N], tl.float32)
        for k in range(0, H, BLOCK_K):
            b_w = tl.load(p_w_tile + k)
            b_x = tl.load(p_x_tile + k, mask=(o_n < n)[None, :], other=0.0)
            b_acc = dot(b_w, b_x, b_acc)
        b_acc = tl.permute(tl.reshape(b_acc, [BLOCK_F // 8, 2, 8, BLOCK_N]), [0, 2, 3, 1])
        b_gate, b_up = tl.split(b_acc)
    elif FORMAT == SHARED and UP == SHARED_UP and M == MS:
        p_first, p_second = tl.where(is_shared, p_shared, p_w), p_up
        if UP != _NONE:
            p_second = tl.where(is_shared, p_shared_up, p_up)
        b_gate, b_up = gate_and_up(
            p_x + b_row * H, o_n < n, p_first, p_second, expert, i_tile, H, M, BLOCK_F, MOST_K, FORMAT, UP, p_scale,
            n_rows
        )
    elif is_shared:
        b_gate, b_up = gate_and_up(
            p_x + b_row * H, o_n < n, p_shared, p_shared_up, 0, i_tile, H, MS, BLOCK_F, MOST_K, SHARED, SHARED_UP,
            p_scale, n_rows,
        )
    else:
        b_gate, b_up = gate_and_up(
            p_x + b_row * H, o_n < n, p_w, p_up, expert, i_tile, H, M, BLOCK_F, MOST_K, FORMAT, UP, p_scale, n_rows
        )
    b_line = tl.where(is_shared, n_rows * SLOTS + b_row, b_row * SLOTS + b_slot)
    o_f = i_tile * BLOCK_F + tl.arange(0, BLOCK_F)
    if p_act.dtype.element_ty == tl.float32:  # sums: adapters add to them before SwiGLU
        p_line = p_act + b_line.to(tl.int64)[None, :] * (2 * INNER) + o_f[:, None]
        tl.store(p_line, tl.reshape(b_gate, [BLOCK_F, BLOCK_N]), mask=(o_n < n)[None, :])
        tl.store(p_line + width, tl.reshape(b_up, [BLOCK_F, BLOCK_N]), mask=(o_n < n)[None, :])
    else:
        b_act = tl.reshape(b_gate / (1.0 + tl.exp(-b_gate)) * b_up, [BLOCK_F, BLOCK_N])
        tl.store(p_act + b_line[None, :] * INNER + o_f[:, None], b_act.to(tl.bfloat16), mask=(o_n < n)[None, :])


@triton.jit(do_not_specialize=["n_pairs"])
def silu_lines_kernel(p_sums, p_act, n_pairs, M: tl.constexpr, MS: tl.constexpr, BLOCK_F: tl.constexpr,
                      PDL: tl.constexpr):
    """act = silu(gate) * up of the sums that `gate_up_kernel` left instead of it. Grid (lines, tiles of
    features). Lines that nobody routed to are garbage, and stay so.
    """
    INNER: tl.constexpr = M if M > MS else MS
    wait_for_front(PDL)
    line = tl.program_id(0).to(tl.int64)
    width = tl.where(line < n_pairs, M, MS)
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    b_gate = tl.load(p_sums + line * (2 * INNER) + o_f, mask=o_f < width, other=0.0)
    b_up = tl.load(p_sums + line * (2 * INNER) + width + o_f, mask=o_f < width, other=0.0)
    b_act = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(p_act + line * INNER + o_f, b_act.to(tl.bfloat16), mask=o_f < width)


@triton.jit(do_not_specialize=["n_rows", "first_own"])
def down_kernel(p_act, p_w, p_shared, p_logits, p_weight, p_counters, p_entries, p_lists, p_row_slot, p_out, p_where,
                n_rows, first_own, FORMAT: tl.constexpr, SHARED: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
                MS: tl.constexpr, E: tl.constexpr, OWN: tl.constexpr, E2: tl.constexpr, STRIDE: tl.constexpr,
                S: tl.constexpr, SLOTS: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MOST_K: tl.constexpr, ALONE: tl.constexpr,
                AHEAD: tl.constexpr, PDL: tl.constexpr):
    """out[slot, row] = weight[row, slot] * (down act) of BLOCK_M rows of one matrix and one work item.

    ALONE: one row. AHEAD: the first K block of the weights is fetched before the wait for `gate_up`, as is
    what the route kernels wrote. PDL: not with many rows, where what starts early would take room from it.
    """
    INNER: tl.constexpr = M if M > MS else MS
    if PDL:
        gdc_launch_dependents()
    i_tile, i_work = tl.program_id(0) % (H // BLOCK_M), tl.program_id(0) // (H // BLOCK_M)
    n_shared = (n_rows + BLOCK_N - 1) // BLOCK_N
    is_shared = i_work < n_shared
    width = tl.where(is_shared, MS, M)
    o_h = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k, o_n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    if ALONE:
        if (tl.load(p_row_slot) < 0) & (i_work > 0):
            return
        slot = (i_work + SLOTS) % (SLOTS + 1)  # the shared expert comes first
        expert, weight = route_alone(p_logits, slot, first_own, E, OWN, E2, STRIDE, S, SLOTS, NORMALISE)
        n, b_row, b_slot = 1, o_n * 0, slot + o_n * 0
        b_weight = weight + tl.zeros([BLOCK_N], tl.float32)
    else:
        expert, n, b_row, b_slot = work_rows(
            p_counters, p_entries, p_lists, i_work, n_shared, n_rows, E, SLOTS, BLOCK_N
        )
        if n <= 0:
            return
        b_weight = tl.load(p_weight + b_row * (SLOTS + 1) + b_slot, mask=o_n < n, other=0.0, cache_modifier=".cg")
    p_column = p_out + (b_slot * n_rows + b_row).to(tl.int64) * H
    if OWN != E:  # noqa: SIM102 (a constant, then a value)
        if expert == OWN:
            b_zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            tl.store(p_column[None, :] + o_h[:, None], b_zero, mask=(o_n < n)[None, :])
            return
    if p_where is not None:
        p_w, expert = moved(p_w, p_where, expert), expert * 0
    b_line = tl.where(is_shared, n_rows * SLOTS + b_row, b_row * SLOTS + b_slot)
    if FORMAT == _PLAIN and SHARED == _PLAIN:
        p_matrix = tl.where(is_shared, p_shared, p_w + expert.to(tl.int64) * (M * H))
        p_w_tile = p_matrix + o_h[:, None] * width + o_k[None, :]
        p_x_tile = p_act + b_line[None, :] * INNER + o_k[:, None]
        if AHEAD:
            b_ahead = fetch(p_w_tile, (o_k < width)[None, :])
        if PDL:
            gdc_wait()
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if AHEAD:
            b_x = tl.load(p_x_tile, mask=(o_n < n)[None, :] & (o_k < width)[:, None], other=0.0)
            b_acc = dot(fetched(b_ahead), b_x, b_acc)
        for k in range(BLOCK_K if AHEAD else 0, INNER, BLOCK_K):
            if M == MS:
                b_w = tl.load(p_w_tile + k)
            else:  # the narrower of the two ends with products of zeros
                b_w = tl.load(p_w_tile + k, mask=(k + o_k < width)[None, :], other=0.0)
            b_x = tl.load(p_x_tile + k, mask=(o_n < n)[None, :] & (k + o_k < width)[:, None], other=0.0)
            b_acc = dot(b_w, b_x, b_acc)
    else:
        p_x_row = p_act + b_line * INNER
        if FORMAT == SHARED and M == MS:
            p_matrix = matrix_at(tl.where(is_shared, p_shared, p_w), expert, H, M, FORMAT)
            b_acc = product_of_rows(p_x_row, o_n < n, p_matrix, o_h, H, M, MOST_K, FORMAT, AHEAD, PDL)
        elif is_shared:
            b_acc = product_of_rows(p_x_row, o_n < n, p_shared, o_h, H, MS, MOST_K, SHARED, AHEAD, PDL)
        else:
            p_matrix = matrix_at(p_w, expert, H, M, FORMAT)
            b_acc = product_of_rows(p_x_row, o_n < n, p_matrix, o_h, H, M, MOST_K, FORMAT, AHEAD, PDL)
    tl.store(p_column[None, :] + o_h[:, None], b_acc * b_weight[None, :], mask=(o_n < n)[None, :])


@dataclass(frozen=True)
class MoeTiles:
    """Tiles of the decode's kernels.

    None of it reaches a bit: sums run along K in order, whatever the tile (measured on Hopper over tiles of
    64 and 128 by 16 to 128, K blocks of 64 and 128). The router's K parts are not in here.
    """

    block_f: int = 32  # features a program of gate_up: twice as many weight rows
    block_m: int = 64  # rows a program of down
    block_n: int = 16  # rows of x
    up_k: int = 128
    up_stages: int = 3
    down_k: int = 64  # small programs, many an SM: the start of one hides behind the streams of others
    down_stages: int = 4
    down_ahead: bool = False  # a K block of the weights is fetched before the wait, best all of K
    router_k: int = 128
    router_ahead: bool = False
    early: bool = False  # let the next kernel start before one's own wait
    alone: bool = False  # one row: gate_up and down route it


def moe_tiles(n_rows: int, w: MoeWeights) -> MoeTiles:
    """The cut for a bucket of n_rows."""
    if not all(is_bf16(m) for m in (w.gate_up, w.down, w.shared_gate_up, w.shared_down)):
        return _decoded_tiles(n_rows, w)
    if n_rows == 1:
        return MoeTiles(down_k=512, down_ahead=True, router_k=256, router_ahead=True, early=True, alone=True)
    if n_rows <= FEW_ROWS:
        few = MoeTiles(up_stages=4, router_k=256, router_ahead=True, early=True)
        return few if n_rows > 4 else dataclasses.replace(few, down_k=512, down_ahead=True)
    return MoeTiles(block_n=16 if n_rows <= 64 else 32)
_ROOM = 48 * 1024
"""Shared memory of a program that decodes weights: decoding needs warps, so four of them fit on an SM."""


def _decoded_tiles(n_rows: int, w: MoeWeights) -> MoeTiles:
    few, block_n, formats = n_rows <= FEW_ROWS, 16, [s.format for m in (w.gate_up, w.down) for s in m.segments]
    # a card has timed these: one row waits for memory, more of them until a multiprocessor has room
    is_int4 = all(f.codes == "uint4" and f.scales.startswith("bfloat16") for f in formats)
    k = 256 if n_rows == 1 and is_int4 and chip().has_hopper_copies else 128

    def largest(block_m: int, *matrices: Matrix) -> int:
        return max(stage_bytes(block_m, m.k, segment.format, k, block_n) for m in matrices for segment in m.segments)

    def stages(n_bytes: int) -> int:
        return max(2, min(4, _ROOM // n_bytes))

    in_segments = len(w.gate_up.segments) + len(w.shared_gate_up.segments) > 2
    block_m = 128 if 2 * largest(128, w.down, w.shared_down) <= chip().shared_bytes else 64
    return MoeTiles(
        block_f=64 if in_segments or (is_int4 and not few) else 32, block_m=block_m, block_n=block_n, up_k=k,
        up_stages=stages(largest(64, w.gate_up, w.shared_gate_up)), down_k=64 if is_int4 and n_rows > 4 else k,
        down_stages=stages(largest(block_m, w.down, w.shared_down)), down_ahead=n_rows <= 4,
        router_k=256 if few else 128, router_ahead=few, early=few, alone=n_rows == 1,
    )  # fmt: skip


def _lines(w: Matrix) -> dict[str, int]:
    """ROW, LINE and LINES, those of a row of codes that are fetched ahead."""
    segment = w.segments[0]
    n_bytes = next(iter(planes(1, segment.k, segment.format).values()))[1]
    element = 2 if segment.format.codes == "bf16" else 1
    return {"ROW": n_bytes // element, "LINE": 128 // element, "LINES": largest_block(32, max(1, n_bytes // 128))}


def _near(w: MoeWeights, s: MoeScratch) -> tuple[MoeWeights | ExpertSlots, Tensor | None, Tensor | None]:
    """The routed experts as the products read them; in slots, the places of gate_up and of down, too."""
    if s.expert_slots is None:
        return w, None, None
    bring(s.expert_slots, s.counters)
    return s.expert_slots, s.expert_slots.where, s.expert_slots.where[-1]


def moe_decode(
    x: Tensor, w: MoeWeights, routing: Routing, *, row_slot: Tensor, scratch: MoeScratch, out: Tensor,
    tiles: MoeTiles | None = None, adapters: tuple[ExpertTargets, AdapterRows] | None = None,
) -> None:
    """out[s, r] = p_s Expert_s(x[r]) for the k experts of the largest p, in their order;
    out[k, r] = sigmoid(gate) Shared(x[r]).

    x: bfloat16 [N, H]; k = routing.n_per_token; p: softmax of the first E logits in float32, ties to the
    lower expert, renormalised over the k when routing.normalise; row_slot: int32 [N], below 0: the row routes
    nowhere and out[:k] of it is not written; out: float32 [k + 1, N, H]. H a multiple of 64, M and Ms of 32.
    scratch.x8: x in e4m3 (fp8.py), used where gate_up of routed and shared experts are; without it gate_up
    rounds on its way, to the same bits. adapters: of rows of which some have one. The others keep
    their bits: one row is routed as several are, and SwiGLU is a kernel of its own, behind what adapters add.
    scratch.expert_slots: where w's routed experts are in the host's memory; one row is routed as several are
    then, too.
    w may have some of the experts, from w.first on: parts of out that others make are zeros.
    Left out: groups of experts, biases of the router. Raises KernelError where shapes do not belong together,
    and for a format without a kernel.
    """
    n_per_token, normalise = routing.n_per_token, routing.normalise
    hidden, n_experts, width, shared = check_moe(x, w, n_per_token, are_adapted=adapters is not None)
    n, n_own = x.shape[0], w.down.n_matrices
    fits = out.dtype == torch.float32 and out.numel() == (n_per_token + 1) * n * hidden
    check("moe", fits, f"float32 out [{n_per_token + 1}, {n}, {hidden}]")
    room = scratch.entries.numel()
    check("moe", n * n_per_token <= room, f"{n} rows: workspaces are for {room // n_per_token} rows")
    t, s, codes = tiles or moe_tiles(n, w), scratch, scratch.x8
    if adapters is not None or scratch.expert_slots is not None:
        t = dataclasses.replace(t, alone=False)
    check("moe", n == 1 or not t.alone, f"one row without lists, found {n}")
    splits = router_splits(hidden)
    router = dict(E=n_experts, E2=next_power_of_2(n_experts), STRIDE=logit_stride(n_experts), S=splits)
    block_n, block_k = min(128, max(16, next_power_of_2(n))), largest_block(t.router_k, hidden // splits)
    rounded: tuple[Tensor, Tensor | None] = x, None
    if codes is not None and is_e4m3(w.gate_up, w.shared_gate_up):
        round_rows(x, codes, k_block(hidden))
        rounded = codes.codes, codes.scale
    if adapters is not None:
        shrink(x, adapters[0].router, adapters[1])
    launch(
        router_kernel, (triton.cdiv(n_experts + 1, 64), splits, triton.cdiv(n, block_n)), x, rows_of("moe", w.router),
        s.logits, s.counters, n, H=hidden, BLOCK_M=64, BLOCK_N=block_n, BLOCK_K=block_k,
        AHEAD=t.router_ahead, LINES=largest_block(32, hidden // splits // 64),
        EARLY=t.early, **router, num_warps=4, num_stages=chip().stages(2 * block_k * (64 + block_n), 3),
    )
    if adapters is not None:
        logits = s.logits[: n * logit_stride(n_experts)].view(n, -1)[:, : n_experts + 1]  # the first part
        expand(logits, adapters[0].router, adapters[1])
    if not t.alone:
        launch(
            route_kernel, (n,), s.logits, s.counters, s.weight, s.entries, s.lists, row_slot, n, w.first, OWN=n_own,
            SLOTS=n_per_token, SLOTS2=next_power_of_2(n_per_token), NORMALISE=normalise, TILE=t.block_n,
            EARLY=t.early, num_warps=1, num_stages=1, **router,
        )
    near, up_where, down_where = _near(w, s)
    inner, block_f = max(width, shared), largest_block(t.block_f, width, shared)
    # an expert has a tile for every block_n of its pairs and one that is not full
    n_lists = n_per_token if t.alone else n_own + (n_own < n_experts)  # alone each pair is one
    n_entries = min(n * n_per_token, n_lists + n * n_per_token // t.block_n)
    n_work = n_entries + triton.cdiv(n, t.block_n)
    experts = dict(H=hidden, M=width, MS=shared, SLOTS=n_per_token, BLOCK_N=t.block_n, ALONE=t.alone, num_warps=4,
        OWN=n_own, **router)
    rows, up, FORMAT, UP = segments_of(near.gate_up)
    shared_rows, shared_up, SHARED, SHARED_UP = segments_of(w.shared_gate_up)
    act = s.act if adapters is None else adapters[0].sums
    if adapters is not None:
        of, who = adapters
        routed = Routed(s.counters, s.entries, s.lists, s.weight, n, n_entries, t.block_n, n_experts, n_per_token)
        shrink_experts(x, of.gate_up, of.shared_gate_up, routed, who, x_row=hidden, is_act=False)
    launch(
        gate_up_kernel, (inner // block_f * n_work,), *rounded, rows, up, shared_rows, shared_up, s.logits, s.counters,
        s.entries, s.lists, row_slot, act, up_where, n, w.first, FORMAT=FORMAT, UP=UP, SHARED=SHARED,
        SHARED_UP=SHARED_UP, BLOCK_F=block_f, BLOCK_K=largest_block(t.up_k, hidden), MOST_K=t.up_k,
        **_lines(w.shared_gate_up), **experts, num_stages=t.up_stages,
    )
    if adapters is not None:
        expand_experts(of.sums, of.gate_up, of.shared_gate_up, routed, who, out_row=2 * inner)
        lines, tile = n * (n_per_token + 1), min(512, next_power_of_2(inner))
        launch(
            silu_lines_kernel, (lines, -(-inner // tile)), of.sums, s.act, n * n_per_token, M=width, MS=shared,
            BLOCK_F=tile, num_warps=4,
        )
        shrink_experts(s.act, of.down, of.shared_down, routed, who, x_row=inner, is_act=True)
    block_m, block_k = largest_block(t.block_m, hidden), largest_block(t.down_k, width, shared)
    if block_k > 128 and block_k < inner:  # only worth its room where it is all of K
        block_k = 128
    (rows, FORMAT), (shared_rows, SHARED) = segment_of(near.down), segment_of(w.shared_down)
    launch(
        down_kernel, (hidden // block_m * n_work,), s.act, rows, shared_rows, s.logits, s.weight, s.counters, s.entries,
        s.lists, row_slot, out, down_where, n, w.first, FORMAT=FORMAT, SHARED=SHARED, NORMALISE=normalise,
        BLOCK_M=block_m, BLOCK_K=block_k, MOST_K=t.down_k, AHEAD=t.down_ahead, **experts,
        num_stages=t.down_stages, pdl=t.early,
    )
    if adapters is not None:
        expand_experts(out, of.down, of.shared_down, routed, who, out_row=hidden, by_slot=True)
