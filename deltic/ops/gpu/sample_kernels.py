"""The kernels of sample.py. A candidate is one int64 (`order_of`): its value, then its id, so that all differ
and each filter of the sampler keeps what is at or above one of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_ID_BITS = tl.constexpr(20)
_ID_MASK = tl.constexpr((1 << 20) - 1)
_ONE = tl.constexpr(2.0**38)  # the weight of the likeliest, in fixed point
# A packed weight counts itself in its low bits; a register list is shorter than 2**12.
_COUNT_BITS = tl.constexpr(12)
_COUNT_MASK = tl.constexpr((1 << 12) - 1)
LEAST_T = tl.constexpr(1e-30)  # below it a temperature could be a denormal, which division takes for 0
LOWEST = tl.constexpr(-2139095041 << 20)  # below every finite value: that of -inf, id bits 0


@triton.jit
def order_of(v, id):
    """Sorts as value, then lower id first: the value's bits, made to sort as integers, above the id's
    complement."""
    v = tl.where(v == 0, 0.0, v)  # -0 and 0 are equal
    bits = v.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (key.to(tl.int64) << _ID_BITS) | (id ^ _ID_MASK).to(tl.int64)


@triton.jit
def id_of(c):
    return ((c & _ID_MASK) ^ _ID_MASK).to(tl.int32)


@triton.jit
def value_of(c):
    key = (c >> _ID_BITS).to(tl.int32)
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(v, top, t):
    """exp((v - top) / t): the difference first, so that no temperature overflows."""
    return tl.exp((v - top) / t)


@triton.jit
def fixed_point(w, min_p):
    """A weight in fixed point; 0 where min-p drops it."""
    return tl.where(w >= min_p, (w * _ONE).to(tl.int64), 0)


@triton.jit
def _draw_of(i, p_row, p_batch_slot, p_state_slot, p_position, DECODE: tl.constexpr):
    """Row of the logits, batch slot (-1: nothing to draw) and position of the token to be drawn."""
    batch_slot = tl.load(p_batch_slot + i)
    position = tl.load(p_position + i)
    if DECODE:
        row = i
        batch_slot = tl.where(tl.load(p_state_slot + i) < 0, -1, batch_slot)
        position += 1
    else:
        row = tl.load(p_row + i)
    return row, batch_slot, position


@triton.jit
def _tile_best(v, begin, p_best):
    """Leaves the likeliest of a tile, of equal ones the first. Returns its value."""
    high, at = tl.max(v, 0, return_indices=True)
    tl.store(p_best, order_of(high, begin + at))
    return high


@triton.jit
def _tile_total(v, high, t):
    """Sum of a tile's weights relative to its likeliest."""
    return tl.sum(weight_of(v, tl.where(high == float("-inf"), 0.0, high), t), 0)


@triton.jit
def _penalise(v, count, repetition, frequency, presence):
    """count: how often the answer has it, above a bit that says whether the prompt has it."""
    v = tl.where(count > 0, tl.where(v > 0, tl.div_rn(v, repetition + tl.zeros_like(v)), v * repetition), v)
    n = (count >> 1).to(tl.float32)
    return tl.where(n > 0, v - (frequency * n + presence), v)


@triton.jit
def _adjust(
    p_x, p_v, p_c, i_tile, n_real, batch_slot, position, n_banned, uses_history,
    p_repetition, p_frequency, p_presence, p_n_prompt, p_history, max_len, p_bias_ids, p_bias, p_n_bias, p_banned,
    n_ids, mask_row, p_masks, n_words, TILE: tl.constexpr, IDS: tl.constexpr, PART: tl.constexpr,
):
    """Leaves a tile in p_v after biases, penalties, bans and the mask, with counts in p_c; returns whether a
    logit was not finite.

    Lists of ids are spread over the tile through memory: a program sees its own stores, behind a barrier. In
    parts, so that rows without any of this do not pay for its registers.
    """
    begin, end = i_tile * TILE, tl.minimum(i_tile * TILE + TILE, n_real)
    o_part, o_id = tl.arange(0, PART), tl.arange(0, IDS)
    if uses_history:
        first = begin
        while first < end:
            tl.store(p_c + first + o_part, tl.zeros((PART,), tl.int32), mask=first + o_part < end)
            first += PART
        tl.debug_barrier()
        n_prompt = tl.load(p_n_prompt + batch_slot)
        p_tokens = p_history + batch_slot.to(tl.int64) * max_len
        first = 0
        while first < position:
            o_token = first + tl.arange(0, 4 * PART)
            token = tl.load(p_tokens + o_token, mask=o_token < position, other=-1)
            here = (token >= begin) & (token < end)
            tl.atomic_add(p_c + token, 2, mask=here & (o_token >= n_prompt))
            tl.atomic_or(p_c + token, 1, mask=here & (o_token < n_prompt))
            first += 4 * PART
        tl.debug_barrier()
    repetition, frequency = tl.load(p_repetition + batch_slot), tl.load(p_frequency + batch_slot)
    presence, n_bias = tl.load(p_presence + batch_slot), tl.load(p_n_bias + batch_slot)
    bad = False
    first = begin
    while first < end:
        o = first + o_part
        v = tl.load(p_x + o, mask=o < end, other=0.0)
        bad = bad | (tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), 0) > 0)
        count = tl.load(p_c + o, mask=(o < end) & uses_history, other=0)
        tl.store(p_v + o, _penalise(v, count, repetition, frequency, presence), mask=o < end)
        first += PART
    tl.debug_barrier()
    first = 0
    while first < n_bias:
        o = batch_slot * n_ids + first + o_id
        id = tl.load(p_bias_ids + o, mask=first + o_id < n_bias, other=-1)
        here = (id >= begin) & (id < end)
        v = tl.load(p_x + id, mask=here, other=0.0) + tl.load(p_bias + o, mask=here, other=0.0)
        count = tl.load(p_c + id, mask=here & uses_history, other=0)
        tl.store(p_v + id, _penalise(v, count, repetition, frequency, presence), mask=here)
        first += IDS
    tl.debug_barrier()
    first = 0
    while first < n_banned:
        id = tl.load(p_banned + batch_slot * n_ids + first + o_id, mask=first + o_id < n_banned, other=-1)
        tl.store(p_v + id, tl.full((IDS,), float("-inf"), tl.float32), mask=(id >= begin) & (id < end))
        first += IDS
    tl.debug_barrier()
    if mask_row >= 0:
        p_words = p_masks + mask_row.to(tl.int64) * n_words
        first = begin
        while first < end:
            o = first + o_part
            bit = tl.load(p_words + o // 32, mask=o < end, other=-1) >> (o % 32) & 1
            tl.store(p_v + o, tl.full((PART,), float("-inf"), tl.float32), mask=(o < end) & (bit == 0))
            first += PART
        tl.debug_barrier()
    return bad


@triton.jit
def scan(
    p_logits, n_vocab, n_real, p_row, p_batch_slot, p_state_slot, p_position,
    p_temperature, p_repetition, p_frequency, p_presence, p_n_prompt, p_history, max_len, p_uses_history,
    p_bias_ids, p_bias, p_n_bias, p_banned, p_n_banned, p_banned_until, p_mask_row, n_ids, p_n_logprobs, p_masks,
    n_words, p_best, p_total, p_raw_best, p_raw_total, p_bad, p_values, p_counts, p_n_listed, p_special, p_ahead,
    DECODE: tl.constexpr, DRAFTS: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scans one tile of one row. A program uses its own tile of p_values and p_counts only."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_tile, i = tl.program_id(0), tl.program_id(1)
    row, batch_slot, position = _draw_of(i, p_row, p_batch_slot, p_state_slot, p_position, DECODE)
    batch_slot_ = tl.maximum(batch_slot, 0)
    t, n_top = tl.load(p_temperature + batch_slot_), tl.load(p_n_logprobs + batch_slot_)
    uses_history = tl.load(p_uses_history + batch_slot_) != 0
    n_banned = tl.where(position < tl.load(p_banned_until + batch_slot_), tl.load(p_n_banned + batch_slot_), 0)
    mask_row = tl.load(p_mask_row + batch_slot_)
    if DRAFTS:  # masks of a sequence's rows follow one another
        mask_row = tl.where(mask_row < 0, mask_row, mask_row + tl.load(p_ahead + i))
    is_special = (tl.load(p_n_bias + batch_slot_) > 0) | uses_history | (n_banned > 0) | (mask_row >= 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if batch_slot >= 0:
        if i_tile == 0:
            tl.store(p_n_listed + i, 0)
            tl.store(p_special + i, is_special.to(tl.int32))
        at = i * tl.num_programs(0) + i_tile
        o = i_tile * TILE + tl.arange(0, TILE)
        p_x = p_logits + row.to(tl.int64) * n_vocab
        p_v = p_x
        bad = False
        if is_special:
            own = i.to(tl.int64) * n_vocab
            p_v = p_values + own
            bad = _adjust(
                p_x, p_v, p_counts + own, i_tile, n_real, batch_slot, position, n_banned, uses_history,
                p_repetition, p_frequency, p_presence, p_n_prompt, p_history, max_len, p_bias_ids, p_bias, p_n_bias,
                p_banned, n_ids, mask_row, p_masks, n_words, TILE, IDS, PART,
            )
        v = tl.load(p_v + o, mask=o < n_real, other=float("-inf"))
        # What is not finite becomes inf, so that the likeliest tells; a ban is -inf, too, and so is padding.
        fine = (tl.abs(v) < float("inf")) | (o >= n_real) | (is_special & (v < 0))
        v = tl.where(fine, v, float("inf"))
        high = _tile_best(v, i_tile * TILE, p_best + at)
        if t > 0:
            tl.store(p_total + at, _tile_total(v, high, tl.maximum(t, LEAST_T)))
        tl.store(p_bad + at, (bad | (high == float("inf"))).to(tl.int32))
        if n_top >= 0:
            v = tl.load(p_x + o, mask=o < n_real, other=float("-inf"))
            high = _tile_best(v, i_tile * TILE, p_raw_best + at)
            tl.store(p_raw_total + at, _tile_total(v, high, 1.0))


@triton.jit
def _row_total(best, total, top, t):
    """Weights of the tiles, float32, from what each is relative to its own likeliest."""
    high = value_of(best)
    return tl.where(high == float("-inf"), 0.0, total * weight_of(high, top, t))


@triton.jit
def collect(
    p_logits, n_vocab, n_real, p_row, p_batch_slot, p_state_slot, p_position,
    p_temperature, p_top_k, p_top_p, p_min_p, p_best, p_total, p_values, p_listed, p_n_listed, p_special, n_tiles,
    DECODE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):
    """Appends the ids of EACH tiles that filters may keep to the row's list, in any order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_part, i = tl.program_id(0), tl.program_id(1)
    row, batch_slot, _ = _draw_of(i, p_row, p_batch_slot, p_state_slot, p_position, DECODE)
    batch_slot_ = tl.maximum(batch_slot, 0)
    t, k = tl.load(p_temperature + batch_slot_), tl.load(p_top_k + batch_slot_)
    top_p, min_p = tl.load(p_top_p + batch_slot_), tl.load(p_min_p + batch_slot_)
    is_k = (k > 0) & (k < n_real)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (batch_slot >= 0) & (t > 0) & (is_k | (min_p > 0) | (top_p < 1)):
        t = tl.maximum(t, LEAST_T)
        o_tile = tl.arange(0, TILES)
        best = tl.load(p_best + i * n_tiles + o_tile, mask=o_tile < n_tiles, other=LOWEST)
        top = value_of(tl.max(best, 0))
        total = tl.load(p_total + i * n_tiles + o_tile, mask=o_tile < n_tiles, other=0.0)
        whole = tl.sum(_row_total(best, total, top, t), 0)
        low = top + float("-inf")
        least = min_p * 0.999  # a little below: the cut itself is made by `finish`
        if is_k & (k <= n_tiles):  # so many have one at or above the k-th best: nothing below can be kept
            highs, n_above = value_of(best), tl.zeros((TILES,), tl.int32)
            first = 0
            while first < n_tiles:
                o_other = first + tl.arange(0, 16)
                others = value_of(tl.load(p_best + i * n_tiles + o_other, mask=o_other < n_tiles, other=LOWEST))
                n_above += tl.sum((others[None, :] >= highs[:, None]).to(tl.int32), 1)
                first += 16
            low = tl.max(tl.where(n_above >= k, highs, float("-inf")), 0)
        if (top_p < 1) & (min_p <= 0) & (k <= 0):
            # All weights below (1 - top_p) / n of the whole add up to less than what top-p leaves out.
            least = 0.999 * (1 - top_p) * whole / n_real
        p_v = p_logits + row.to(tl.int64) * n_vocab
        if tl.load(p_special + i) != 0:
            p_v = p_values + i.to(tl.int64) * n_vocab
        for j in range(EACH):
            i_tile = i_part * EACH + j
            if i_tile < n_tiles:
                high = value_of(tl.load(p_best + i * n_tiles + i_tile))
                if (high >= low) & (weight_of(high, top, t) >= least):
                    o = i_tile * TILE + tl.arange(0, TILE)
                    v = tl.load(p_v + o, mask=o < n_real, other=float("-inf"))
                    w = weight_of(v, top, t)
                    kept = (v > float("-inf")) & (v >= low) & (w >= least)
                    at = tl.cumsum(kept.to(tl.int32), 0)
                    begin = tl.atomic_add(p_n_listed + i, tl.max(at, 0))
                    tl.store(p_listed + i.to(tl.int64) * n_vocab + begin + at - 1, o, mask=kept)


@triton.jit
def halve(b_c, b_packed, lo, hi, above, target):
    """The largest lo at which `above` and the weights of lo <= c < hi reach the target; lo itself where none
    does.

    Returns it and the sum there. Weights are packed with a count of 1: halving ends when one candidate is
    left.
    """
    n = tl.sum(tl.where((b_c >= lo) & (b_c < hi), b_packed, 0), 0) & _COUNT_MASK
    while (n > 1) & (hi > lo + 1):
        # Halfway by value, where floats between differ; else by bits.
        middle = order_of((value_of(lo) + value_of(hi)) * 0.5, (lo & 0).to(tl.int32))
        middle = tl.where((middle > lo) & (middle < hi), middle, lo + (hi - lo) // 2)
        s = tl.sum(tl.where((b_c >= middle) & (b_c < hi), b_packed, 0), 0)
        reached = above + (s >> _COUNT_BITS) >= target
        n = tl.where(reached, s & _COUNT_MASK, n - (s & _COUNT_MASK))
        above = tl.where(reached, above, above + (s >> _COUNT_BITS))
        lo = tl.where(reached, middle, lo)
        hi = tl.where(reached, hi, middle)
    s = tl.sum(tl.where((b_c >= lo) & (b_c < hi), b_packed, 0), 0)
    return lo, above + (s >> _COUNT_BITS)


@triton.jit
def pack(x):
    return tl.where(x > 0, (x << _COUNT_BITS) | 1, 0)


@triton.jit
def _load_list(p_list, p_v, begin, n, top, t, min_p, BLOCK: tl.constexpr):
    """A block of listed candidates: order, weight in fixed point, and whether it is there."""
    o = begin + tl.arange(0, BLOCK)
    there = o < n
    id = tl.load(p_list + o, mask=there, other=0)
    v = tl.load(p_v + id, mask=there, other=float("-inf"))
    c = order_of(v, id)
    return c, tl.where(there, fixed_point(weight_of(v, top, t), min_p), 0), there, id


@triton.jit
def _narrow(
    p_list, n_list, p_few, p_v, top, t, min_p, lo, hi, target,
    COUNT: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):
    """`halve` over a list longer than CAP: cut in WAYS by passes over memory until what is left fits. COUNT:
    target counts."""
    o_way = tl.arange(0, WAYS)
    n, above = n_list.to(tl.int64), tl.full((), 0, tl.int64)
    while (n > CAP) & (hi > lo + 1):
        low, high = value_of(lo), value_of(hi)
        border = order_of(low + (high - low) * (o_way.to(tl.float32) / WAYS), o_way * 0)
        border = tl.where(o_way == 0, lo, border)
        step = (hi - lo + WAYS - 1) // WAYS
        by_value = tl.sum(((border > lo) & (border < hi)).to(tl.int32), 0) == WAYS - 1
        border = tl.where(by_value, border, lo + o_way * step)
        b_sum, b_n = tl.zeros((WAYS,), tl.int64), tl.zeros((WAYS,), tl.int64)
        begin = 0
        while begin < n_list:
            c, w, there, _ = _load_list(p_list, p_v, begin, n_list, top, t, min_p, BLOCK)
            inside = (there & (c < hi))[:, None] & (c[:, None] >= border[None, :])
            if not COUNT:
                b_sum += tl.sum(tl.where(inside, w[:, None], 0), 0)
            b_n += tl.sum(inside.to(tl.int64), 0)
            begin += BLOCK
        if COUNT:
            b_sum = b_n
        # border 0 stands for "none reaches it"
        way = tl.max(tl.where((above + b_sum >= target) & (border < hi), o_way, 0), 0)
        after = o_way == way + 1
        n_after = tl.sum(tl.where(after, b_n, 0), 0)
        n = tl.sum(tl.where(o_way == way, b_n, 0), 0) - n_after
        above += tl.sum(tl.where(after, b_sum, 0), 0)
        hi = tl.minimum(tl.min(tl.where(after, border, hi), 0), hi)
        lo = tl.max(tl.where(o_way == way, border, lo), 0)
    begin, at = 0, 0
    while begin < n_list:
        c, w, there, id = _load_list(p_list, p_v, begin, n_list, top, t, min_p, BLOCK)
        inside = there & (c >= lo) & (c < hi)
        to = tl.cumsum(inside.to(tl.int32), 0)
        tl.store(p_few + at + to - 1, id, mask=inside & (at + to <= CAP))
        at += tl.max(to, 0)
        begin += BLOCK
    tl.debug_barrier()
    c, w, there, _ = _load_list(p_few, p_v, 0, tl.minimum(at, CAP), top, t, min_p, CAP)
    if COUNT:
        w = there.to(tl.int64)
    cut, reached = halve(c, pack(w), lo, hi, above, target)
    tl.debug_barrier()  # before `few` is written again
    return cut, reached


@triton.jit
def _survey(p_list, n_list, p_v, top, t, min_p, cut, best, BLOCK: tl.constexpr):
    """The lowest of a list, and the weight of what is at or above the cut."""
    lowest, whole = best, tl.full((), 0, tl.int64)
    begin = 0
    while begin < n_list:
        c, w, there, _ = _load_list(p_list, p_v, begin, n_list, top, t, min_p, BLOCK)
        whole += tl.sum(tl.where(there & (c >= cut), w, 0), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(there, c, best), 0))
        begin += BLOCK
    return lowest, whole


@triton.jit
def share_of(x, top_p):
    """Share of x that top-p must reach: at least 1."""
    return tl.maximum(tl.ceil(x.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def threshold_of(whole, u24):
    """floor(u * whole) + 1 with u = u24 / 2**24: the running sum that exceeds u of the whole."""
    return (whole >> 24) * u24 + (((whole & 0xFFFFFF) * u24) >> 24) + 1


@triton.jit
def uniform24(seed, position):
    """24 random bits: Philox4x32-10 with the counter (position, 0, 0, 0) and the key `seed`, first word."""
    low = 0xFFFFFFFF
    k0 = seed.to(tl.uint64) & low
    k1 = (seed.to(tl.uint64) >> 32) & low
    x0 = position.to(tl.uint64) & low
    x1, x2, x3 = x0 * 0, x0 * 0, x0 * 0
    for _ in tl.static_range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & low, (a >> 32) ^ x3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return (x0 >> 8).to(tl.int64)


@triton.jit
def _pick(p_v, i_tile, n_real, top, t, min_p, cut, before, threshold, TILE: tl.constexpr):
    """The first id of a tile at which the sum over ids reaches the threshold.

    Where none does, the last that weighs anything.
    """
    o = i_tile * TILE + tl.arange(0, TILE)
    v = tl.load(p_v + o, mask=o < n_real, other=float("-inf"))
    c = order_of(v, o)
    w = tl.where(c >= cut, fixed_point(weight_of(v, top, t), min_p), 0)
    reached = (before + tl.cumsum(w, 0) >= threshold) & (w > 0)
    first = tl.min(tl.where(reached, o, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(w > 0, o, -1), 0)
    token = tl.where(first < 0x7FFFFFFF, first, last)
    return tl.where(token >= 0, token, id_of(tl.max(c, 0)))


@triton.jit
def _draw_filtered(
    p_v, p_list, n_list, p_few, p_best, n_tiles, n_real, best, top, t, k, top_p, min_p, whole, u24,
    TILE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):
    """A token of those that top-k, min-p and top-p keep; whole: the weight of the row, float32."""
    is_k, hi, zero = (k > 0) & (k < n_real), best + 1, tl.full((), 0, tl.int64)
    # Top-p alone is of the whole row: what is not listed weighs, too.
    is_alone, of_all = (k <= 0) & (min_p <= 0), share_of((whole * _ONE).to(tl.int64), top_p)
    token = -1
    if n_list <= CAP:
        c, w, there, id = _load_list(p_list, p_v, 0, n_list, top, t, min_p, CAP)
        lo = tl.min(tl.where(there, c, best), 0)
        if is_k:
            lo, _n = halve(c, pack(there.to(tl.int64)), lo, hi, zero, k.to(tl.int64))
        kept = tl.sum(tl.where(c >= lo, w, 0), 0)
        if top_p < 1:
            target = tl.where(is_alone, of_all, share_of(kept, top_p))
            lo, kept = halve(c, pack(w), lo, hi, zero, target)
        w = tl.where(c >= lo, w, 0)
        first = (id ^ _ID_MASK).to(tl.int64)  # lower ids come first
        cut, _s = halve(first, pack(w), zero, zero + _ID_MASK + 1, zero, threshold_of(kept, u24))
        # One candidate is left in [cut, ...): the lowest of those that weigh anything and are at or above the
        # cut.
        token = id_of(tl.min(tl.where((first >= cut) & (w > 0), first, _ID_MASK), 0))
    else:
        lo, kept = _survey(p_list, n_list, p_v, top, t, min_p, LOWEST, best, BLOCK)
        if is_k:
            n = k.to(tl.int64)
            lo, _n = _narrow(p_list, n_list, p_few, p_v, top, t, min_p, lo, hi, n, True, CAP, BLOCK, WAYS)
            _l, kept = _survey(p_list, n_list, p_v, top, t, min_p, lo, best, BLOCK)
        if top_p < 1:
            aim = tl.where(is_alone, of_all, share_of(kept, top_p))
            lo, kept = _narrow(p_list, n_list, p_few, p_v, top, t, min_p, lo, hi, aim, False, CAP, BLOCK, WAYS)
        threshold = threshold_of(kept, u24)
        before = tl.full((), 0, tl.int64)
        i_tile, at = 0, -1
        while (i_tile < n_tiles) & (at < 0):
            if tl.load(p_best + i_tile) >= lo:
                o = i_tile * TILE + tl.arange(0, TILE)
                v = tl.load(p_v + o, mask=o < n_real, other=float("-inf"))
                s = tl.sum(tl.where(order_of(v, o) >= lo, fixed_point(weight_of(v, top, t), min_p), 0), 0)
                at = tl.where(before + s >= threshold, i_tile, at)
                before = tl.where(before + s >= threshold, before, before + s)
            i_tile += 1
        token = _pick(p_v, tl.maximum(at, 0), n_real, top, t, min_p, lo, before, threshold, TILE)
    return token


@triton.jit
def _top_logprobs(p_x, n_real, n_tiles, p_best, p_total, n, p_ids, p_logprobs, TILE: tl.constexpr, TILES: tl.constexpr):
    """Writes the n likeliest of a row of raw logits, likeliest first. Returns the log of the row's sum."""
    o_tile = tl.arange(0, TILES)
    best = tl.load(p_best + o_tile, mask=o_tile < n_tiles, other=LOWEST)
    total = tl.load(p_total + o_tile, mask=o_tile < n_tiles, other=0.0)
    top = value_of(tl.max(best, 0))
    log_total = top + tl.log(tl.sum(_row_total(best, total, top, 1.0), 0))
    j = 0
    while j < n:  # the best of the tiles' best; then that tile's next best takes its place
        first = tl.max(best, 0)
        id = id_of(first)
        tl.store(p_ids + j, id)
        tl.store(p_logprobs + j, value_of(first) - log_total)
        i_tile = id // TILE
        o = i_tile * TILE + tl.arange(0, TILE)
        x = tl.load(p_x + o, mask=o < n_real, other=float("-inf"))
        c = order_of(x, o)
        c = tl.where(c < first, c, LOWEST)
        best = tl.where(o_tile == i_tile, tl.max(c, 0), best)
        j += 1
    return log_total


@triton.jit
def finish(
    p_logits, n_vocab, n_real, p_row, p_batch_slot, p_state_slot, p_position,
    p_temperature, p_top_k, p_top_p, p_min_p, p_seed, p_stop, p_n_stop, n_ids, p_max_position, p_n_logprobs, p_history,
    max_len, p_last_token, p_positions, p_done, p_best, p_total, p_raw_best, p_raw_total, p_bad, p_values, p_listed,
    p_n_listed, p_special, p_few, n_tiles, p_out, p_out_logprob, p_top_ids, p_top_logprobs, n_most,
    DECODE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
    WAYS: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):
    """Draws the row's token from what the tiles left, and moves the sequence on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0)
    row, batch_slot, position = _draw_of(i, p_row, p_batch_slot, p_state_slot, p_position, DECODE)
    batch_slot_ = tl.maximum(batch_slot, 0)
    t, k = tl.load(p_temperature + batch_slot_), tl.load(p_top_k + batch_slot_)
    top_p, min_p = tl.load(p_top_p + batch_slot_), tl.load(p_min_p + batch_slot_)
    n_top, last = tl.load(p_n_logprobs + batch_slot_), tl.load(p_max_position + batch_slot_)
    o_id = tl.arange(0, IDS)
    stop = tl.load(p_stop + batch_slot_ * n_ids + o_id, mask=o_id < tl.load(p_n_stop + batch_slot_), other=-1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if batch_slot >= 0:
        o_tile = tl.arange(0, TILES)
        is_tile = o_tile < n_tiles
        bests = tl.load(p_best + i * n_tiles + o_tile, mask=is_tile, other=LOWEST)
        bad = tl.max(tl.load(p_bad + i * n_tiles + o_tile, mask=is_tile, other=0), 0)
        best = tl.max(bests, 0)
        top = value_of(best)
        token = id_of(best)
        p_x = p_logits + row.to(tl.int64) * n_vocab
        usable = (bad == 0) & (tl.abs(top) < float("inf"))
        if usable & (t > 0):
            t = tl.maximum(t, LEAST_T)
            u24 = uniform24(tl.load(p_seed + batch_slot), position)
            weights = _row_total(bests, tl.load(p_total + i * n_tiles + o_tile, mask=is_tile, other=0.0), top, t)
            own = i.to(tl.int64) * n_vocab
            p_v = p_x
            if tl.load(p_special + i) != 0:
                p_v = p_values + own
            if ((k > 0) & (k < n_real)) | (min_p > 0) | (top_p < 1):
                token = _draw_filtered(
                    p_v, p_listed + own, tl.load(p_n_listed + i), p_few + i.to(tl.int64) * CAP, p_best + i * n_tiles,
                    n_tiles, n_real, best, top, t, k, top_p, min_p, tl.sum(weights, 0), u24, TILE, CAP, BLOCK, WAYS,
                )
            else:
                fixed = fixed_point(weights, 0.0)
                ends = tl.cumsum(fixed, 0)
                threshold = threshold_of(tl.max(ends, 0), u24)
                i_tile = tl.min(tl.where((ends >= threshold) & (fixed > 0), o_tile, TILES), 0)
                before = tl.sum(tl.where(o_tile < i_tile, fixed, 0), 0)
                token = _pick(p_v, i_tile, n_real, top, t, 0.0, LOWEST, before, threshold, TILE)
        token = tl.where(usable, token, -1)
        tl.store(p_out + i, token)

        if (n_top >= 0) & (token >= 0):
            log_total = _top_logprobs(
                p_x, n_real, n_tiles, p_raw_best + i * n_tiles, p_raw_total + i * n_tiles,
                tl.minimum(tl.minimum(n_top, n_most), n_real), p_top_ids + i * n_most, p_top_logprobs + i * n_most,
                TILE, TILES,
            )
            tl.store(p_out_logprob + i, tl.load(p_x + token) - log_total)

        is_stop = tl.max((stop == token).to(tl.int32), 0) > 0
        is_done = is_stop | (position > last) | (token < 0)
        tl.store(p_last_token + batch_slot, token)
        tl.store(p_positions + batch_slot, position)
        tl.store(p_done + batch_slot, is_done.to(tl.int32))
        tl.store(
            p_history + batch_slot.to(tl.int64) * max_len + position, token, mask=(token >= 0) & (position < max_len)
        )


@triton.jit
def scan_raw(p_logits, n_vocab, n_real, p_row, p_n_top, p_n, p_best, p_total, TILE: tl.constexpr):
    """Likeliest and sum of one tile of an entry's raw logits."""
    i_tile, i = tl.program_id(0), tl.program_id(1)
    if (i < tl.load(p_n)) & (tl.load(p_n_top + i) >= 0):
        o = i_tile * TILE + tl.arange(0, TILE)
        row = tl.load(p_row + i).to(tl.int64)
        v = tl.load(p_logits + row * n_vocab + o, mask=o < n_real, other=float("-inf"))
        at = i * tl.num_programs(0) + i_tile
        high = _tile_best(v, i_tile * TILE, p_best + at)
        tl.store(p_total + at, _tile_total(v, high, 1.0))


@triton.jit
def finish_raw(
    p_logits, n_vocab, n_real, p_row, p_target, p_n_top, p_n, p_best, p_total, n_tiles,
    p_logprob, p_top_ids, p_top_logprobs, n_most, TILE: tl.constexpr, TILES: tl.constexpr,
):
    i = tl.program_id(0)
    target, n_top = tl.load(p_target + i), tl.load(p_n_top + i)
    if (i < tl.load(p_n)) & (n_top >= 0) & (target >= 0):
        p_x = p_logits + tl.load(p_row + i).to(tl.int64) * n_vocab
        log_total = _top_logprobs(
            p_x, n_real, n_tiles, p_best + i * n_tiles, p_total + i * n_tiles,
            tl.minimum(tl.minimum(n_top, n_most), n_real), p_top_ids + i * n_most, p_top_logprobs + i * n_most, TILE,
            TILES,
        )
        tl.store(p_logprob + i, tl.load(p_x + target) - log_total)
