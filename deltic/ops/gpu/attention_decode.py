"""attention_decode: full attention, gated or not, of one new token a row over 64-key pages, in one launch.

The keys of a row are cut into splits, by the row's own length alone. A split goes through its tiles of 64
keys from the last to the first with a running maximum, and leaves a record: the unscaled output, the maximum
and the sum, float32. Records are merged in the order of the splits, `FAN` at a time, then the merged ones.
Who arrives last at an integer counter does it.

A program norms and rotates the query heads of one key head and takes a split, or several one behind the other
where enough programs are left: 4 sequences of 128k have 1,000, as have 128 of 1k with 4 splits each. How many
changes no bit, since each leaves its record. The program with the row's last key also norms, rotates and
writes the new token's k and v. It is the only one that reads them.

Of a draft, a row sees keys of rows that run beside it. They are in its own last page (blocks.py), so only its
last split reads them: that one writes the k and v of all rows up to its own, itself, before it reads the
page. Several programs write the same bits, and none waits for another. A row's splits are those of its own
length, and so are its sums.

Both products put keys (or value columns) on the long side of the tensor core's tile and the query heads on
the narrow one: S^T = K q^T, then o^T += V^T P^T. So 4 to 8 query heads waste little. The new token is the
first key of the running sums and meets no tensor core: no tile has to be patched on its way to shared memory.

Shared memory holds one tile, 64 KB of plain pages. The next one is asked for as soon as registers have this
one, before its weights are multiplied; several programs of a multiprocessor hide what is left. Values are
read with their dims first, as the product takes them: a tile that is turned behind its load would go through
registers. Of quantised pages shared memory has the codes, and a warp makes operands of those that it
multiplies (kv.py). Their sums are kept for each key of a tile and are added when the split is through. The
new token is put in there.

The first tile is asked for in the second-level cache before the kernel in front has ended (devices with PDL).
More would be gone again before they are read: 4 tiles of all programs are larger than that cache.

Spec: `rms_norm`, `rope` and `attention` of tests/reference/layers.py. The split form is that of Dao, Haziza,
Massa, Sizov 2023, "Flash-Decoding for long-context inference"; the running maximum is of Milakov, Gimelshein
2018 (arXiv:1805.02867), algorithm 3.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import PAGE_SIZE, Allocate, AttentionHeads, AttentionWeights
from deltic.ops.gpu import kv
from deltic.ops.gpu.attention_parts import attended, finish, merged, new_key, record, rotated, summed, turn
from deltic.ops.gpu.blocks import Rows
from deltic.ops.gpu.chip import chip, wait_for_front
from deltic.ops.gpu.decode import codes_at
from deltic.ops.gpu.fp8 import Operand, round_made, stored_by
from deltic.ops.gpu.kv import FP8, PLAIN
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.kv_formats import KvFormat, KvPages

FAN = 8
"""Records merged at once: with 64 splits, two rounds of 8. And the most splits of a program."""
LONG = 16
"""Tiles of a long program: its beginning and end, which cost as much as several, are little beside them."""

_MAX_GROUP = 16  # query heads of a key head


@dataclass(frozen=True)
class Splits:
    """Cuts of a row's keys, in tiles of 64, and the programs, warps and stages that run them.

    `few`, `few_tiles` and `most` define the bits: a function of the heads. Up to `few` tiles a split is one
    tile (latency); beyond, `few_tiles` of them (less to merge), and as many as it takes to have at most
    `most` splits. The others change no bit.
    """

    few: int = 8
    few_tiles: int = 2
    most: int = 64
    num_warps: int = 4
    num_stages: int = 2  # one tile is on its way while another is multiplied
    programs: int = 1024  # so many are left, at least, where one takes several splits; fewer of short ones

    def tiles(self, n_tiles: int) -> int:
        """Tiles of a split of a row with n_tiles, as the kernel computes it."""
        return max(-(-n_tiles // self.most), 1 if n_tiles <= self.few else self.few_tiles)

    def capacity(self, max_len: int) -> int:
        """The most splits of any row with at most max_len keys."""
        n_tiles = -(-max_len // PAGE_SIZE)
        return max(min(self.few, n_tiles), min(self.most, -(-n_tiles // self.few_tiles)))

    def chunks(self, n_pairs: int, max_len: int) -> int:
        """The most programs of a row with at most max_len keys and one of its key heads, of n_pairs."""
        capacity = self.capacity(max_len)
        return min(capacity, max(-(-capacity // FAN), 2 * ((self.programs - 1) // n_pairs)))


SPLITS = Splits()
"""The one choice, whatever the batch."""


@dataclass(frozen=True)
class AttentionScratch:
    """Workspace of attention_decode, for `n_rows` rows; may be shared by the layers of a step. splits: how it
    cuts rows.
    """

    output: Tensor  # float32 [rows, nk, records, group, d]: of the splits, not yet divided by their sums
    weight: Tensor  # float32 [rows, nk, records + merged, 2, group]: maximum (base 2) and sum
    arrived: Tensor  # int32 [rows, nk, 1 + merged]: 0 between launches
    splits: Splits


def attention_scratch(
    heads: AttentionHeads, n_rows: int, max_len: int, allocate: Allocate, splits: Splits = SPLITS
) -> AttentionScratch:
    """Room for n_rows rows of at most max_len keys. allocate(name, size, dtype) gives zeroed tensors. splits:
    for measurements.
    """
    records = splits.capacity(max_len)
    merged, group = -(-records // FAN), heads.n_q // heads.n_kv
    shape = n_rows, heads.n_kv
    return AttentionScratch(
        output=allocate("attention splits", (*shape, records, group, heads.dim), torch.float32),
        weight=allocate("attention weights", (*shape, records + merged, 2, group), torch.float32),
        arrived=allocate("attention arrivals", (*shape, 1 + merged), torch.int32),
        splits=splits,
    )


@triton.jit
def _prefetch(p_tile, BYTES: tl.constexpr):
    """Asks for BYTES from p_tile on in the second-level cache. One thread of the program does."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred %p; .reg .b32 %t;
        mov.u32 %t, %tid.x;
        setp.eq.u32 %p, %t, 0;
        @%p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [p_tile, BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def _ask_for(p_page, i_kv, KV: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Asks for what a tile will read."""
    if KV == PLAIN:
        _prefetch(p_page, PAGE * D * 2)
        _prefetch(p_page + NK * PAGE * D, PAGE * D * 2)
    else:
        _prefetch(kv.keys_at(p_page, i_kv, KV, NK, D), PAGE * D)
        _prefetch(kv.values_at(p_page, i_kv, KV, NK, D), PAGE * kv.value_width(KV, D))
        _prefetch(kv.floats_at(p_page, "value_scales", i_kv, KV, NK, D), PAGE * 2)
        _prefetch(kv.floats_at(p_page, "key_scales" if KV == FP8 else "least_values", i_kv, KV, NK, D), PAGE * 2)


@triton.jit
def _attended_codes(b_k, b_v, floats, b_q, b_q_2, b_max, b_sum, b_least, outputs, b_old, scale, KV: tl.constexpr):
    """Does what `attended` does, of quantised keys, two dims a place. b_sum, b_least [PAGE, GROUP]: of each
    key of all tiles.

    floats: scales of keys and of values, and least values, [PAGE, 1]. Weights are float16, of at most 2^15:
    what is called the maximum is that of score + log2(value scale), less 15.
    """
    b_first, b_second = kv.key_halves(b_k)
    if KV == FP8:
        scale = floats[0] * scale
    # each times the scale: two chains of products, not one that is twice as long
    b_s = tl.dot(b_first, b_q) * scale + tl.dot(b_second, b_q_2) * scale
    b_s = tl.where(b_old, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s + tl.log2(tl.maximum(floats[1], 2**-24)), 0) - 15.0)
    b_p = tl.exp2(b_s - b_new_max[None, :])
    b_keep = tl.exp2(b_max - b_new_max)[None, :]
    b_sum = b_sum * b_keep + b_p
    b_weight = (b_p * floats[1]).to(tl.float16)
    if KV == FP8:
        b_first, b_second = kv.e4m3_pairs(b_v)
        b_o = tl.dot(b_first, b_weight, outputs[0] * b_keep)
        b_o_2 = tl.dot(b_second, b_weight, outputs[1] * b_keep)
        new = (b_o, b_o_2)
    else:
        b_least = b_least * b_keep + b_p * floats[2]
        b_low, b_low_2, b_high, b_high_2 = kv.four_pairs(b_v)
        b_o = tl.dot(b_low, b_weight, outputs[0] * b_keep)
        b_o_2 = tl.dot(b_low_2, b_weight, outputs[1] * b_keep)
        b_o_3 = tl.dot(b_high, b_weight, outputs[2] * b_keep)
        b_o_4 = tl.dot(b_high_2, b_weight, outputs[3] * b_keep)
        new = (b_o, b_o_2, b_o_3, b_o_4)  # type: ignore[assignment]
    return b_new_max, b_sum, b_least, new


@triton.jit
def _closed(b_max, b_sum, b_least, outputs, b_new_max, b_new_v, KV: tl.constexpr):
    """Sum and output of a split of quantised pages, with the new token's."""
    b_weight = tl.exp2(b_new_max - b_max)
    if KV == FP8:
        b_o = kv.in_turn(outputs[0], outputs[1])
    else:
        b_low, b_high = kv.in_turn(outputs[0], outputs[1]), kv.in_turn(outputs[2], outputs[3])
        unit = kv.four_unit()
        b_o = kv.below(b_low * (1.0 / unit), b_high * (0.0625 / unit)) + tl.sum(b_least, 0)[None, :]
    return tl.sum(b_sum, 0) + b_weight, b_o + b_new_v[:, None] * b_weight[None, :]


@triton.jit
def _nothing(ROWS: tl.constexpr, GROUP: tl.constexpr, KV: tl.constexpr):
    b_none = tl.zeros((ROWS, GROUP), tl.float32)
    if KV == FP8:
        outputs = (b_none, b_none)
    else:
        outputs = (b_none, b_none, b_none, b_none)  # type: ignore[assignment]
    return outputs


@triton.jit
def all_attended(
    p_chosen, p_table, p_pages, stride_page, page, first, last, position, n_old, i_kv, b_q, b_new_max, b_new_v, scale,
    split_tiles, n_splits, p_output, p_weight, G: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    PAGE: tl.constexpr, KV: tl.constexpr, STAGES: tl.constexpr, CHOSEN: tl.constexpr, RATIO: tl.constexpr,
):
    """Splits of quantised pages -> maximum, sum and output of a row's only one; of several, records.
    n_old: keys beside the new token's. page: of the last tile, where nothing is chosen.
    b_new_max [GROUP], b_new_v [D]: the new token's score and value; in splits without it -inf and 0.
    """
    WIDTH: tl.constexpr = kv.value_width(KV, D)
    o_t, o_k = tl.arange(0, PAGE)[:, None], tl.arange(0, D // 2)[None, :]
    o_vt, o_v = tl.arange(0, PAGE)[None, :], tl.arange(0, WIDTH // 2)[:, None]
    b_q, b_q_2 = kv.halves_of_fours(b_q.to(tl.float16))
    b_q, b_q_2 = tl.trans(b_q), tl.trans(b_q_2)
    # a bound from below alone: were it the score, weights of values with small scales would be too small for
    # float16. Where the new token's weight is 2^64, nothing else matters
    b_max = b_new_max - 64.0
    b_sum = tl.zeros((PAGE, GROUP), tl.float32)
    b_least = tl.zeros((PAGE, GROUP), tl.float32)
    outputs = _nothing(WIDTH // 2, GROUP, KV)
    # scales in whole pages are asked for a tile ahead. Of the first tile alone keys may not be there
    if p_chosen is None:
        p_page = p_pages + page.to(tl.int64) * stride_page
        floats = kv.load_floats(p_page, i_kv, o_t, last * PAGE + o_t < n_old, KV, NK, D)
    for i in tl.range(0, last - first + 1, num_stages=STAGES):
        b_old = (last - i) * PAGE + o_t < n_old
        if p_chosen is None:
            p_page, o_at = p_pages + page.to(tl.int64) * stride_page, o_t
            p_value_page, o_value_at = p_page, o_vt
        else:
            o_key = (last - i) * PAGE + tl.arange(0, PAGE)
            b_page, b_at = kv.key_places(p_chosen, p_table, o_key, position, PAGE, CHOSEN, RATIO)
            p_page, o_at = p_pages + b_page[:, None] * stride_page, b_at[:, None]
            p_value_page, o_value_at = p_pages + b_page[None, :] * stride_page, b_at[None, :]
            floats = kv.load_floats(p_page, i_kv, o_at, b_old, KV, NK, D)
        # what is no key's may be anything: its score is not looked at, and its value times 0 is 0 but for NaN
        b_k = tl.load(kv.pairs_at(kv.keys_at(p_page, i_kv, KV, NK, D), o_at, o_k, D))
        p_values = kv.pairs_at(kv.values_at(p_value_page, i_kv, KV, NK, D), o_value_at, o_v, WIDTH)
        if KV == FP8:
            b_v = tl.load(p_values, mask=(last - i) * PAGE + o_vt < n_old, other=0)
        else:
            b_v = tl.load(p_values)
        if p_chosen is None:
            page = tl.load(p_table + tl.maximum(last - i - 1, first))
            next_floats = kv.load_floats(p_pages + page.to(tl.int64) * stride_page, i_kv, o_t, o_t >= 0, KV, NK, D)
        b_max, b_sum, b_least, outputs = _attended_codes(
            b_k, b_v, floats, b_q, b_q_2, b_max, b_sum, b_least, outputs, b_old, scale, KV
        )
        if p_chosen is None:
            floats = next_floats
        if p_output is not None:  # noqa: SIM102
            if (n_splits > 1) & ((last - i) % split_tiles == 0):
                b_whole, b_o = _closed(b_max, b_sum, b_least, outputs, b_new_max, b_new_v, KV)
                record(p_output, p_weight, (last - i) // split_tiles, b_max, b_whole, b_o, G, GROUP, D)
                b_new_max = tl.full((GROUP,), float("-inf"), tl.float32)
                b_new_v = tl.zeros((D,), tl.float32)
                b_max, b_sum = b_new_max, tl.zeros((PAGE, GROUP), tl.float32)
                b_least, outputs = tl.zeros((PAGE, GROUP), tl.float32), _nothing(WIDTH // 2, GROUP, KV)
    b_whole, b_o = _closed(b_max, b_sum, b_least, outputs, b_new_max, b_new_v, KV)
    return b_max, b_whole, b_o


@triton.jit
def _gate(p_gate, stride_s, GATED: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, S: tl.constexpr):
    """sigmoid(gate) of the group, [R, D]; without gates 1."""
    if not GATED:
        return tl.full((R, D), 1.0, tl.float32)
    o_g = tl.arange(0, R)
    return tl.sigmoid(summed(p_gate, o_g[:, None] * D + tl.arange(0, D)[None, :], (o_g < G)[:, None], stride_s, S))


@triton.jit(do_not_specialize=["stride_table"])
def _keys_decode_kernel(
    p_proj, p_k_norm, p_cos, p_sin, p_state_slot, p_batch_slot, p_position, p_shift, p_table, p_pages, eps,
    stride_s, stride_row, stride_table, stride_page,
    NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr,
    PAGE: tl.constexpr, GATED: tl.constexpr, KV: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_front(PDL)
    i_row, i_kv = tl.program_id(0) // NK, tl.program_id(0) % NK
    if tl.load(p_state_slot + i_row) >= 0:
        position = tl.load(p_position + i_row)
        if p_shift is not None:
            shift = tl.load(p_shift + i_row) * HALF
            p_cos += shift
            p_sin += shift
        p_row = p_table + tl.load(p_batch_slot + i_row).to(tl.int64) * stride_table
        if KV == PLAIN:
            p_pages += i_kv * (PAGE * D)
        p_page = p_pages + tl.load(p_row + position // PAGE).to(tl.int64) * stride_page
        new_key(
            p_proj + i_row.to(tl.int64) * stride_row, p_k_norm, p_cos, p_sin, p_page, position, i_kv, eps, stride_s,
            NQ, NK, D, HALF, S, GROUP, PAGE, GATED, KV,
        )


# what follows the batch's size or its longest row is not specialised: the kernel is one and the same
@triton.jit(do_not_specialize=["stride_table", "records", "n_counters"])
def _attention_decode_kernel(
    p_proj, p_q_norm, p_k_norm, p_cos, p_sin, p_state_slot, p_batch_slot, p_position, p_shift, p_ahead, p_table,
    p_chosen, p_pages, p_output, p_weight, p_arrived, p_out, p_codes, p_scale, eps, scale,
    stride_s, stride_row, stride_table, stride_page, records, n_counters,
    NQ: tl.constexpr, NK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr,
    GP: tl.constexpr, PAGE: tl.constexpr, FEW: tl.constexpr, FEW_TILES: tl.constexpr, MOST: tl.constexpr,
    FAN: tl.constexpr, LOG_FAN: tl.constexpr, PROGRAMS: tl.constexpr, LONG: tl.constexpr, GATED: tl.constexpr,
    DRAFTS: tl.constexpr, KV: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    RATIO: tl.constexpr, PDL: tl.constexpr,
):
    """Attends with one split of a row, for one key head, a program."""
    G: tl.constexpr = NQ // NK
    i_row = tl.program_id(0) // NK
    i_kv = tl.program_id(0) % NK

    # how the row is cut: of its length alone
    position = tl.load(p_position + i_row)
    n_old = position
    n_tiles = position // PAGE + 1
    has_own = 1
    if p_chosen is not None:  # by the kernel in front
        wait_for_front(PDL)
        p_chosen += i_row.to(tl.int64) * CHOSEN
        n_keys, has_own = kv.read_keys(p_chosen, position, CHOSEN, RATIO)
        n_old, n_tiles = n_keys - has_own, (n_keys - 1) // PAGE + 1
    n_tiles = tl.where(tl.load(p_state_slot + i_row) >= 0, n_tiles, 0)
    split_tiles = tl.maximum((n_tiles + MOST - 1) // MOST, tl.where(n_tiles <= FEW, 1, FEW_TILES))
    n_splits = (n_tiles + split_tiles - 1) // split_tiles
    # splits of a program: 1, 2, 4 or 8
    chunk = 1
    for _ in tl.static_range(LOG_FAN):
        programs = tl.num_programs(0) * ((n_splits + 2 * chunk - 1) // (2 * chunk))
        chunk = tl.where(programs >= PROGRAMS // LONG * tl.minimum(2 * chunk * split_tiles, LONG), 2 * chunk, chunk)
    n_chunks = (n_splits + chunk - 1) // chunk
    i_chunk = n_chunks - 1 - tl.program_id(1)  # the one with the new token begins, as it has most to do
    # without work: still one that waits, so that the end of this kernel implies the end of the one in front
    if PDL:  # noqa: SIM102
        if (tl.program_id(1) == 0) & (n_splits == 0):
            tl.extra.cuda.gdc_wait()

    pair = (i_row * NK + i_kv).to(tl.int64)
    row = i_row.to(tl.int64)
    p_table += tl.load(p_batch_slot + i_row).to(tl.int64) * stride_table
    if p_shift is not None:  # behind pictures angles are not those of positions
        shift = tl.load(p_shift + i_row) * HALF
        p_cos += shift
        p_sin += shift
    if KV == PLAIN:
        p_pages += i_kv * (PAGE * D)
    p_proj += row * stride_row
    p_gate = p_proj + (NQ + i_kv * G) * D
    p_out += row * (NQ * D) + i_kv * (G * D)
    n_rows = tl.num_programs(0) // NK
    if p_codes is not None:
        p_codes = codes_at(p_codes) + row * (NQ * D) + i_kv * (G * D)
        p_scale += i_kv * (G * D // BLOCK) * n_rows + i_row
    p_output += pair * records * (G * D)
    p_weight += pair * (records + n_counters - 1) * (2 * G)
    p_arrived += pair * n_counters

    o_d = tl.arange(0, D)
    o_t = tl.arange(0, PAGE)
    o_g = tl.arange(0, GROUP)

    if i_chunk >= 0:
        # pages were written in earlier steps, but for the new token: they may be asked for before the wait
        first = i_chunk * chunk * split_tiles
        last = tl.minimum(first + chunk * split_tiles, n_tiles) - 1
        page = tl.load(p_table + (position // PAGE if p_chosen is not None else last))
        p_page = p_pages + page.to(tl.int64) * stride_page
        if PDL and p_chosen is None:
            _ask_for(p_page, i_kv, KV, NK, D, PAGE)
        b_turn, b_turn_other = turn(p_q_norm, p_cos + position * HALF, p_sin + position * HALF, GROUP, D, HALF)
        wait_for_front(PDL)
        b_q = rotated(
            p_proj, ((i_kv * G + o_g) * D)[:, None], (o_g < G)[:, None], b_turn, b_turn_other, eps, stride_s, D, HALF, S
        )
        b_qt = tl.trans(b_q)
        b_max = tl.full((GROUP,), float("-inf"), tl.float32)
        b_sum = tl.zeros((GROUP,), tl.float32)
        b_new_v = tl.zeros((D,), tl.bfloat16 if KV == PLAIN else tl.float32)
        b_o = tl.zeros((D, GROUP), tl.float32)
        if i_chunk == n_chunks - 1:
            # the new token: into its page, and as the first key of the running sums, as the page has it
            if DRAFTS:
                NEW: tl.constexpr = tl.bfloat16 if KV == PLAIN else tl.float32
                b_new_k, b_new_v = tl.zeros((GROUP, D), NEW), tl.zeros((D,), NEW)
                ahead = tl.load(p_ahead + i_row)
                for i_new in range(ahead + 1):
                    b_new_k, b_new_v = new_key(
                        p_proj + (i_new - ahead) * stride_row, p_k_norm, p_cos, p_sin, p_page,
                        position + (i_new - ahead), i_kv, eps, stride_s, NQ, NK, D, HALF, S, GROUP, PAGE, GATED, KV,
                    )
                tl.debug_barrier()  # they are whole before the page is read
            else:
                b_new_k, b_new_v = new_key(
                    p_proj, p_k_norm, p_cos, p_sin, p_page, position, i_kv, eps, stride_s, NQ, NK, D, HALF, S, GROUP,
                    PAGE, GATED, KV,
                )
            b_max = tl.sum(b_q.to(tl.float32) * b_new_k.to(tl.float32), 1) * scale
            b_sum = tl.full((GROUP,), 1.0, tl.float32)
            if p_chosen is not None:
                b_max = tl.where(has_own > 0, b_max, float("-inf"))
                b_sum = tl.where(has_own > 0, b_sum, 0.0)
                b_new_v = tl.where(has_own > 0, b_new_v, tl.zeros_like(b_new_v))
            if KV == PLAIN:
                b_o += b_new_v.to(tl.float32)[:, None]

        if KV == PLAIN:
            for i in tl.range(0, last - first + 1, num_stages=STAGES):
                i_tile = last - i  # from the last on: it is the one asked for before the wait
                b_old = (i_tile * PAGE + o_t < n_old)[:, None]
                b_old_v = (i_tile * PAGE + o_t < n_old)[None, :]
                if p_chosen is None:
                    p_page = p_pages + page.to(tl.int64) * stride_page
                    page = tl.load(p_table + tl.maximum(i_tile - 1, first))
                    b_k = tl.load(p_page + o_t[:, None] * D + o_d[None, :], mask=b_old, other=0.0)
                    b_v = tl.load(p_page + NK * PAGE * D + o_t[None, :] * D + o_d[:, None], mask=b_old_v, other=0.0)
                else:
                    b_page, b_at = kv.key_places(p_chosen, p_table, i_tile * PAGE + o_t, position, PAGE, CHOSEN, RATIO)
                    b_place = b_page * stride_page + b_at * D
                    b_k = tl.load(p_pages + b_place[:, None] + o_d[None, :], mask=b_old, other=0.0)
                    p_values = p_pages + NK * PAGE * D + b_place[None, :]
                    b_v = tl.load(p_values + o_d[:, None], mask=b_old_v, other=0.0)
                b_max, b_sum, b_o = attended(b_k, b_v, b_qt, b_max, b_sum, b_o, b_old, scale)
                if (n_splits > 1) & (i_tile % split_tiles == 0):
                    record(p_output, p_weight, i_tile // split_tiles, b_max, b_sum, b_o, G, GROUP, D)
                    b_max = tl.full((GROUP,), float("-inf"), tl.float32)
                    b_sum, b_o = tl.zeros((GROUP,), tl.float32), tl.zeros((D, GROUP), tl.float32)
        else:
            b_max, b_sum, b_o = all_attended(
                p_chosen, p_table, p_pages, stride_page, page, first, last, position, n_old, i_kv, b_q, b_max, b_new_v,
                scale, split_tiles, n_splits, p_output, p_weight, G, NK, D, GROUP, PAGE, KV, STAGES, CHOSEN, RATIO,
            )

        if n_splits == 1:
            b_gate = _gate(p_gate, stride_s, GATED, G, GROUP, D, S)
            finish(tl.trans(b_o), b_sum, b_gate, p_out, p_codes, p_scale, n_rows, G, GROUP, D, BLOCK)
        else:
            i_merge = i_chunk * chunk // FAN
            n_merges = (n_splits + FAN - 1) // FAN
            n_records = tl.minimum(n_splits - i_merge * FAN, FAN)
            n_done = tl.minimum(chunk, n_splits - i_chunk * chunk)
            tl.debug_barrier()  # the records are whole before the counter says so
            if tl.atomic_add(p_arrived + 1 + i_merge, n_done, sem="acq_rel") == n_records - n_done:
                tl.store(p_arrived + 1 + i_merge, 0)
                o_m = tl.arange(0, GP)
                o_md = o_m[:, None] * D + o_d[None, :]
                b_merged_gate = _gate(p_gate, stride_s, GATED, G, GP, D, S)
                b_part, b_part_max, b_part_sum = merged(
                    p_output, p_weight, i_merge * FAN, n_records, 1, i_merge * FAN, G, GP, D, FAN
                )
                if n_merges == 1:
                    finish(b_part, b_part_sum, b_merged_gate, p_out, p_codes, p_scale, n_rows, G, GP, D, BLOCK)
                else:
                    # into the place of the first of them, which all threads have read
                    tl.debug_barrier()
                    tl.store(p_output + i_merge * FAN * (G * D) + o_md, b_part, mask=(o_m < G)[:, None])
                    p_to = p_weight + (records + i_merge) * (2 * G) + o_m
                    tl.store(p_to, b_part_max, mask=o_m < G)
                    tl.store(p_to + G, b_part_sum, mask=o_m < G)
                    tl.debug_barrier()
                    if tl.atomic_add(p_arrived, 1, sem="acq_rel") == n_merges - 1:
                        tl.store(p_arrived, 0)
                        b_part, b_part_max, b_part_sum = merged(
                            p_output, p_weight, 0, n_merges, FAN, records, G, GP, D, FAN
                        )
                        finish(b_part, b_part_sum, b_merged_gate, p_out, p_codes, p_scale, n_rows, G, GP, D, BLOCK)


def _stages(splits: Splits, heads: AttentionHeads, format: KvFormat) -> int:
    """num_stages of the loop over tiles, as far as the chip has shared memory."""
    return chip().stages(PAGE_SIZE * format.head_bytes(heads.dim), splits.num_stages, beside=13 << 10)


def _limit(format: KvFormat, group: int) -> dict[str, int]:
    """Registers of a thread, so that three programs with quantised pages fit into a multiprocessor, as
    measured on Hopper; more than 8 query heads of a key head would leave some over. With plain ones two do,
    by shared memory, too.
    """
    return {} if format.is_plain or group > 8 or not chip().is_hopper else {"maxnreg": 168}


def attention_decode(
    proj: Tensor, heads: AttentionHeads, weights: AttentionWeights, *, rows: Rows, cache: KvPages,
    scratch: AttentionScratch, max_len: int, out: Operand,
) -> None:
    """out[r, h] = bfloat16(softmax(q k^T / sqrt(d)) v * sigmoid(gate)) over the keys 0 .. position of the
    row's batch slot.

    proj: float32 [S, N, row], partial sums in order; a row is q heads | gates | k heads | v heads, or without
    gates (heads.is_gated). A row with state slot -1 is left alone. Its angles are those of its position, plus
    rows.angle_shift where there is one. cache: this layer's part of the pages, bfloat16 [n_pages, 2, nk, 64,
    d] or uint8 [n_pages, bytes], where the token's own k and v are written, and their table. out: bfloat16
    [N, nq d], and as `round_rows` rounds it, where that is asked for. max_len: no row has more keys. Query
    head j reads key head j // (nq/nk).

    cache.chosen: what rows with more whole groups read (ops/gpu/index.py); all others have the bits that they
    have without.

    Rounded to bfloat16: q, k, v, the softmax weights where they meet v (not in their sum), the output; of
    quantised pages weights are rounded to float16. No row
    sees another, but for those of its sequence that rows.drafts puts in front of it, of the same page; and
    neither N nor max_len touches the bits. How quantised pages are written and read: kv.py. Left out:
    windows, sinks.
    Raises KernelError where shapes, types or the scratch's size do not fit.
    """
    cos, sin, pages, format, splits = weights.cos, weights.sin, cache.data, cache.format, scratch.splits
    n_splits, n_rows, n_row = proj.shape
    group, half = heads.n_q // heads.n_kv, cos.shape[1]
    n_pairs = n_rows * heads.n_kv
    capacity = splits.capacity(max_len)
    records, counters = scratch.output.shape[2], scratch.arrived.shape[2]
    expect = partial(check, "attention_decode")
    expect(proj.dtype == torch.float32 and n_row == heads.row, f"float32 proj [S, N, {heads.row}]")
    expect(proj.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous(), "contiguous proj rows, cos, sin")
    expect(heads.n_q % heads.n_kv == 0 and group <= _MAX_GROUP, f"at most {_MAX_GROUP} query heads a key head")
    expect(heads.dim == next_power_of_2(heads.dim) and 32 <= heads.dim <= 256, "head_dim 32, 64, 128 or 256")
    expect(half % 4 == 0 and 2 * half <= heads.dim, "rotary dims inside a head, a multiple of 8")
    expect(kv.fits(pages, heads.n_kv, heads.dim, format), kv.expected(heads.n_kv, heads.dim, format))
    expect(
        out.rows.dtype == torch.bfloat16 and out.rows.shape == (n_rows, heads.n_q * heads.dim), "bfloat16 out [N, nq d]"
    )
    expect(out.rows.is_contiguous(), "contiguous out")
    expect(splits.most <= FAN * FAN and splits.few <= splits.most, f"at most {FAN * FAN} splits")
    expect(scratch.output.shape[0] >= n_rows and records >= capacity, "a scratch for this many rows and keys")
    expect(scratch.output.shape[1] == heads.n_kv and scratch.output.shape[3:] == (group, heads.dim), "its scratch")
    chosen, drafts = cache.chosen, rows.drafts
    if chosen is not None:
        expect(chosen.dtype == torch.int32 and chosen.is_contiguous(), "int32 chosen")
        if drafts is not None:  # a row may read keys of those in front of it in any of its splits
            keys_decode(proj, heads, weights, rows=rows, cache=cache)
            drafts = None
    to = out.rows, *stored_by("attention_decode", out, heads.dim % (out.block_k or 1) == 0)
    launch(
        _attention_decode_kernel, (n_pairs, splits.chunks(n_pairs, max_len)),
        proj, weights.q_norm, weights.k_norm, cos, sin, rows.state_slot, rows.batch_slot, rows.position,
        rows.angle_shift, None if drafts is None else drafts.ahead, cache.table, chosen, pages, scratch.output,
        scratch.weight, scratch.arrived, *to, weights.eps, heads.dim**-0.5 * 1.4426950408889634,
        proj.stride(0), proj.stride(1), cache.table.stride(0), pages.stride(0), records, counters,
        NQ=heads.n_q, NK=heads.n_kv, D=heads.dim, HALF=half, S=n_splits, GROUP=8 if group <= 8 else 16,
        GP=next_power_of_2(group), PAGE=PAGE_SIZE, FEW=splits.few, FEW_TILES=splits.few_tiles, MOST=splits.most,
        FAN=FAN, LOG_FAN=FAN.bit_length() - 1, PROGRAMS=splits.programs, LONG=LONG, GATED=heads.is_gated,
        DRAFTS=drafts is not None, KV=kv.constant(format), STAGES=_stages(splits, heads, format), BLOCK=out.block_k,
        CHOSEN=0 if chosen is None else chosen.shape[1], RATIO=cache.ratio, num_warps=splits.num_warps, num_stages=1,
        **_limit(format, group),
    )
    if to[1] is None:
        round_made(out)


def keys_decode(
    proj: Tensor, heads: AttentionHeads, weights: AttentionWeights, *, rows: Rows, cache: KvPages
) -> None:
    """Writes the keys and values of the rows' tokens, and nothing else: each row its own, by one kernel, so
    that they are the same whether it attends or not.

    Arguments as of `attention_decode`; q and gates of proj are not read. A row with state slot -1 is left
    alone. Raises KernelError where shapes or types do not fit.
    """
    cos, sin, pages, format = weights.cos, weights.sin, cache.data, cache.format
    n_splits, n_rows, n_row = proj.shape
    group, half = heads.n_q // heads.n_kv, cos.shape[1]
    check("keys_decode", proj.dtype == torch.float32 and n_row == heads.row, f"float32 proj [S, N, {heads.row}]")
    check(
        "keys_decode", proj.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous(), "contiguous proj, cos, sin"
    )
    check("keys_decode", kv.fits(pages, heads.n_kv, heads.dim, format), kv.expected(heads.n_kv, heads.dim, format))
    launch(
        _keys_decode_kernel, (n_rows * heads.n_kv,), proj, weights.k_norm, cos, sin, rows.state_slot, rows.batch_slot,
        rows.position, rows.angle_shift, cache.table, pages, weights.eps, proj.stride(0), proj.stride(1),
        cache.table.stride(0), pages.stride(0), NQ=heads.n_q, NK=heads.n_kv, D=heads.dim, HALF=half, S=n_splits,
        GROUP=8 if group <= 8 else 16, PAGE=PAGE_SIZE, GATED=heads.is_gated, KV=kv.constant(format),
        num_warps=SPLITS.num_warps,
    )
