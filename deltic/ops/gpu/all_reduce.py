"""The sum of what several GPUs have each of, between two layers: one GPU is a rank, and has partial sums of
every row.

Ranks write to each other's memory. A rank has an inbox with a place for each other rank, twice, used in
turns; a flag for each rank and row; and an epoch for each row, which counts the sums. A program has one row:
it adds this rank's slices, writes them to the others' inboxes, sets its flags there to the epoch, waits until
its own flags have it, and adds all ranks in a fixed tree over neighbours, in float32: ((0 + 1) + (2 + 3)) ...
So every rank has the same bits. What is still read from an inbox is never written: a rank sets the flags of
an epoch when it has read all of the one before, and the place is used again in the one after.

Every rank makes the same calls in the same order, with as many rows. Of `all_reduce_norm` the norm behind the
sum is part of the kernel. `all_reduce` and `add_norm` (norm.py) have the same bits.

That is one shot: each rank writes its rows to all others, which for few rows is one way over the link and no
more. In two shots (reduce-scatter, norm, all-gather) row i belongs to rank i % ranks: it alone gets the
others' sums, has the row's residual, and writes the normed row to all. Fewer bytes go over the link, twice
one way. Where others than the norm read the residual (a block drafter does, behind a few layers), the owner
writes that to all as well.

Ranks that do not reach each other's memory meet in the host's: all have one inbox there and one list of
flags. A rank writes its rows once, into its own place, and sets its own flag. The others read both over their
own links. These are one shot, with the bits of the others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.chip import wait_for_front
from deltic.ops.gpu.decode import codes_at
from deltic.ops.gpu.fp8 import Fp8Rows, check_room, rounded
from deltic.ops.gpu.launch import INTERPRETED, launch, next_power_of_2
from deltic.ops.gpu.norm import (
    LANES,
    load_pieces,
    norm_warps,
    pieces,
    store_norm,
    store_pieces,
    sum_of_neighbours,
    sum_of_shards,
)

ONE_SHOT_BYTES = 1 << 20
"""Bytes that a rank writes to all others together, up to which one shot is faster
(`python -m bench.gpu.allreduce`).
"""
FEW_ROWS = 64
"""Rows of a launch up to which 8 warps a row are faster than 4 (the same bench)."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class Rank:
    """Buffers and addresses with which one rank sums rows, n_rows of them in a launch."""

    rank: int
    inbox: Tensor  # float32 or bfloat16 [2, ranks, n_rows, width]
    flags: Tensor  # int32 [ranks, n_rows]: the epoch that a rank has written
    epochs: Tensor  # int32 [n_rows]
    out: Tensor  # bfloat16 [rows, width]: normed rows, for the others to write to in two shots
    inboxes: Tensor  # int64 [ranks]: addresses of all inboxes; [1]: of the one in the host's memory
    flag_lists: Tensor  # int64, alike: of all flags
    outs: Tensor  # int64, alike: of all out
    n_shards: int = 1
    """Shards of a model that each rank has: a sum is that of as many ranks, each with one of these."""
    features: Tensor | None = None
    """int64 [ranks]: addresses of all features, bfloat16, where some of the residual's rows are kept."""

    @property
    def n_ranks(self) -> int:
        return len(self.flags)

    @property
    def n_rows(self) -> int:
        return self.flags.shape[1]

    @property
    def width(self) -> int:
        return self.inbox.shape[3]

    @property
    def is_in_host(self) -> bool:
        """True if ranks meet in the host's memory."""
        return len(self.inboxes) == 1

    def shots(self, n: int) -> int:
        """Number of shots (1 or 2) in which sums of n rows are made."""
        if self.is_in_host:
            return 1
        n_bytes = n * self.width * self.inbox.element_size() * (self.n_ranks - 1)
        return 1 if n_bytes <= ONE_SHOT_BYTES else 2


Shared = tuple[Tensor, Tensor, Tensor]
"""Inbox, flags and out of a rank, which the others write to. In the host's memory there is one inbox, and one
list of flags.
"""


def shared_buffers(
    n_ranks: int, n_rows: int, width: int, allocate: Allocate, name: str = "sums", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Inbox and flags of a rank, for sums of n_rows rows in a launch. dtype: of what is sent."""
    return (
        allocate(f"{name} of others", (2, n_ranks, n_rows, width), dtype),
        allocate(f"flags of {name}", (n_ranks, n_rows), torch.int32),
    )


def rank_of(
    rank: int, shared: Sequence[Shared], n_shards: int = 1, *, is_in_host: bool = False, features: Sequence[Tensor] = ()
) -> Rank:
    """Makes a rank of the buffers of all ranks, which this one can reach. is_in_host: but for out, which is
    its own. features: of all, if rows of the residual are kept.
    """
    inbox, flags, out = shared[rank]
    out = out.view(-1, inbox.shape[3])
    epochs = torch.zeros(flags.shape[1], dtype=torch.int32, device=out.device)
    reached = zip(*(shared[:1] if is_in_host else shared), strict=True)
    inboxes, flag_lists, outs = _addresses(reached, out.device)
    kept = next(_addresses([features], out.device)) if features else None
    return Rank(rank, inbox, flags, epochs, out, inboxes, flag_lists, outs, n_shards, kept)


def let_reach(devices: Sequence[torch.device | str]) -> None:
    """Lets these GPUs read and write each other's memory from here on. Raises KernelError for a number of
    them that is no power of two, and for GPUs without access to each other.
    """
    n = len(devices)
    check("all_reduce", n > 1 and n & (n - 1) == 0, "2, 4, 8 ... ranks")
    for one in devices:
        for other in devices:
            if torch.device(one).type == "cuda" and one != other:
                check("all_reduce", torch.cuda.can_device_access_peer(one, other), f"access from {one} to {other}")
                torch.zeros(1, device=one).to(other)  # torch lets one access the other with the first copy


def out_of_reach(n: int) -> tuple[int, int] | None:
    """Finds two of the first n GPUs of which one does not reach the other's memory. None if all reach all."""
    pairs = itertools.permutations(range(n), 2)
    return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)


def _addresses(shared: Iterable[Iterable[Tensor]], device: torch.device) -> Iterator[Tensor]:
    """int64 [ranks], of each kind of buffer that all ranks have."""
    for each in shared:
        yield torch.tensor([one.data_ptr() for one in each], dtype=torch.int64, device=device)


@triton.jit
def _sum_of_slices(
    p_partials, row, width, stride, SHARDS: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr,
    PIECES: tl.constexpr
):
    """Returns this rank's share of the row, in pieces."""
    own: tl.tuple = ()
    for j in tl.static_range(PIECES):
        o_col = j * LANES + tl.arange(0, LANES)
        p_part = p_partials + row.to(tl.int64) * width + o_col
        own += (sum_of_shards(p_part, stride, o_col < width, SHARDS, SLICES),)
    return own


@triton.jit
def _send(
    p_inboxes, p_inbox, to, rank, own, turn, row, n_rows, width, LANES: tl.constexpr, PIECES: tl.constexpr
):
    """Writes this rank's share to the inbox of rank `to`."""
    p_to = tl.multiple_of(tl.load(p_inboxes + to).to(p_inbox.dtype), 16)
    store_pieces(p_to + ((turn + rank) * n_rows + row).to(tl.int64) * width, own, width, LANES, PIECES)


_SET = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.b32 [$1], $2;
    mov.b32 $0, 0;
}""")
_AWAIT = tl.constexpr("""{
    .reg .pred other, early;
    .reg .b32 seen;
    mov.u32 seen, %tid.x;
    setp.ne.u32 other, seen, 0;
    @other bra done;
again:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.lt.s32 early, seen, 0;
    @early bra again;
done:
    mov.b32 $0, 0;
}""")
"""PTX with which the first thread sets a flag in the host's memory, and waits for one. A GPU's atomics may be
none there: an addition of zero could write an older flag over a newer one.
"""


@triton.jit
def _raise_flag(p_flag_lists, to, rank, row, n_rows, epoch, HOST: tl.constexpr):
    """Tells rank `to` that what this one has written there is whole. All threads have written before."""
    p_flag = tl.load(p_flag_lists + to).to(tl.pointer_type(tl.int32)) + rank * n_rows + row
    if HOST and not _INTERPRETED:
        tl.inline_asm_elementwise(_SET, "=r,l,r", [p_flag.to(tl.int64), epoch], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_xchg(p_flag, epoch, sem="release", scope="sys")


@triton.jit
def _wait_for(p_flags, of, row, n_rows, epoch, HOST: tl.constexpr):
    """Waits until rank `of` has set its flag of this epoch. Epochs wrap around, after a day or two of
    decodes. All threads wait at the next barrier.
    """
    p_flag = p_flags + of * n_rows + row
    if HOST and not _INTERPRETED:
        tl.inline_asm_elementwise(_AWAIT, "=r,l,r", [p_flag.to(tl.int64), epoch], dtype=tl.int32, is_pure=False, pack=1)
    else:
        seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")
        while seen - epoch < 0:
            seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")


@triton.jit
def _meet(p_flags, p_flag_lists, p_epochs, rank, slot, n_slots, epoch, RANKS: tl.constexpr, HOST: tl.constexpr):
    """Waits until all ranks are here, and what they have written to each other for this slot is whole."""
    tl.debug_barrier()  # all threads have written
    if HOST:
        _raise_flag(p_flag_lists, 0, rank, slot, n_slots, epoch, True)
    else:
        for q in tl.static_range(RANKS):
            if q != rank:
                _raise_flag(p_flag_lists, q, rank, slot, n_slots, epoch, False)
    tl.store(p_epochs + slot, epoch)
    for q in tl.static_range(RANKS):
        if q != rank:
            _wait_for(p_flags, q, slot, n_slots, epoch, HOST)
    tl.debug_barrier()


@triton.jit
def _sum_of_ranks(
    p_inbox, rank, own, turn, row, n_rows, width, RANKS: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr
):
    """The row of all ranks, in pieces. The others' have come."""
    found: tl.tuple = ()
    for j in tl.static_range(PIECES):
        o_col = j * LANES + tl.arange(0, LANES)
        shards: tl.tuple = ()
        for q in tl.static_range(RANKS):
            p_from = p_inbox + ((turn + q) * n_rows + row).to(tl.int64) * width + o_col
            b_part = tl.load(p_from, mask=(o_col < width) & (q != rank), other=0.0, volatile=True).to(tl.float32)
            shards += (tl.where(q == rank, own[j], b_part),)
        found += (sum_of_neighbours(shards, RANKS),)
    return found


@triton.jit
def _add_to_row(p_row, total, width, LANES: tl.constexpr, PIECES: tl.constexpr):
    """The row += total, in pieces."""
    residual = load_pieces(p_row, width, LANES, PIECES)
    added: tl.tuple = ()
    for j in tl.static_range(PIECES):
        added += (residual[j] + total[j],)
    store_pieces(p_row, added, width, LANES, PIECES)
    return added


@triton.jit
def _round_row(p_row, p_codes, p_scale, row, n, width, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Rounds a row of bfloat16 to e4m3, as `round_rows` does. It is read again, in groups that warps hold
    whole: of pieces, each group's largest would go through shared memory.
    """
    tl.debug_barrier()  # all threads have written it, or another GPU has
    o_group = tl.arange(0, GROUPS)
    o_col = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_codes, b_scale = rounded(tl.load(p_row + o_col, mask=o_col < width, other=0.0, volatile=True))
    tl.store(codes_at(p_codes) + row.to(tl.int64) * width + o_col, b_codes, mask=o_col < width)
    tl.store(p_scale + o_group * n + row, b_scale, mask=o_group * GROUP < width)


@triton.jit(do_not_specialize=["rank", "n"])
def _one_shot_kernel(
    p_partials, p_inbox, p_flags, p_epochs, p_inboxes, p_flag_lists, p_residual, p_w, p_out, p_codes, p_scale, rank,
    n_rows, n, width, stride, inverse_width, eps, RANKS: tl.constexpr, HOST: tl.constexpr, SHARDS: tl.constexpr,
    SLICES: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if NORM:
        weights = load_pieces(p_w, width, LANES, PIECES)
    wait_for_front(PDL)
    epoch = tl.load(p_epochs + row) + 1
    turn = (epoch & 1) * RANKS
    own = _sum_of_slices(p_partials, row, width, stride, SHARDS, SLICES, LANES, PIECES)
    if HOST:
        _send(p_inboxes, p_inbox, 0, rank, own, turn, row, n_rows, width, LANES, PIECES)
    else:
        for q in tl.static_range(RANKS):
            if q != rank:
                _send(p_inboxes, p_inbox, q, rank, own, turn, row, n_rows, width, LANES, PIECES)
    _meet(p_flags, p_flag_lists, p_epochs, rank, row, n_rows, epoch, RANKS, HOST)
    total = _sum_of_ranks(p_inbox, rank, own, turn, row, n_rows, width, RANKS, LANES, PIECES)
    o_row = row.to(tl.int64) * width
    if NORM:
        added = _add_to_row(p_residual + o_row, total, width, LANES, PIECES)
        store_norm(p_out + o_row, None, None, 0, added, weights, width, inverse_width, eps, LANES, PIECES, 1)
        if p_codes is not None:
            _round_row(p_out + o_row, p_codes, p_scale, row, n, width, GROUP, GROUPS)
    else:
        store_pieces(p_out + o_row, total, width, LANES, PIECES)


@triton.jit(do_not_specialize=["rank", "first", "n"])
def _two_shot_kernel(
    p_partials, p_inbox, p_flags, p_epochs, p_inboxes, p_flag_lists, p_residual, p_w, p_outs, p_codes, p_scale, rank,
    n_rows, n, width, stride, inverse_width, eps, first, p_features, o_feature, feature_row, RANKS: tl.constexpr,
    HOST: tl.constexpr, SHARDS: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    """Sums rows in two shots. A row's owner waits for the others. They wait for what it makes of the row.
    Each rounds the row for itself, which is faster than codes that are sent. p_features: where the row of the
    residual is kept, too, from column o_feature on of rows of feature_row columns; else None.
    """
    row = tl.program_id(0)
    weights = load_pieces(p_w, width, LANES, PIECES)
    wait_for_front(PDL)
    epoch, owner = tl.load(p_epochs + row) + 1, row % RANKS
    turn, o_row = (epoch & 1) * RANKS, row.to(tl.int64) * width
    own = _sum_of_slices(p_partials, row, width, stride, SHARDS, SLICES, LANES, PIECES)
    if owner == rank:
        for q in tl.static_range(RANKS):
            if q != rank:
                _wait_for(p_flags, q, row, n_rows, epoch, HOST)
        tl.debug_barrier()
        total = _sum_of_ranks(p_inbox, rank, own, turn, row, n_rows, width, RANKS, LANES, PIECES)
        added = _add_to_row(p_residual + o_row, total, width, LANES, PIECES)
        for q in tl.static_range(RANKS):
            p_to = tl.multiple_of(tl.load(p_outs + q).to(tl.pointer_type(tl.bfloat16)), 16)
            p_to += first.to(tl.int64) * width + o_row
            store_norm(p_to, None, None, 0, added, weights, width, inverse_width, eps, LANES, PIECES, 1)
            if p_features is not None:
                p_kept = tl.multiple_of(tl.load(p_features + q).to(tl.pointer_type(tl.bfloat16)), 16)
                store_pieces(p_kept + (first + row).to(tl.int64) * feature_row + o_feature, added, width, LANES, PIECES)
        tl.debug_barrier()
        for q in tl.static_range(RANKS):
            if q != rank:
                _raise_flag(p_flag_lists, q, rank, row, n_rows, epoch, HOST)
    else:
        _send(p_inboxes, p_inbox, owner, rank, own, turn, row, n_rows, width, LANES, PIECES)
        tl.debug_barrier()
        _raise_flag(p_flag_lists, owner, rank, row, n_rows, epoch, HOST)
        _wait_for(p_flags, owner, row, n_rows, epoch, HOST)
    tl.store(p_epochs + row, epoch)  # behind a barrier: until then threads may still read it
    if p_codes is not None:
        p_row = tl.multiple_of(tl.load(p_outs + rank).to(tl.pointer_type(tl.bfloat16)), 16)
        p_row += first.to(tl.int64) * width + o_row
        _round_row(p_row, p_codes, p_scale, row, n, width, GROUP, GROUPS)


@dataclass(frozen=True)
class _Norm:
    """Residual stream to which a sum is added, and how that is normed and rounded. Nothing: the sum alone."""

    residual: Tensor | None = None
    w: Tensor | None = None
    eps: float = 0.0
    codes: Fp8Rows | None = None


def _launch(
    kernel: object, partials: Tensor, ranks: Rank, first: int, out: Tensor, norm: _Norm, *more: int | Tensor | None,
    **constants: bool,
) -> None:
    """Launches a kernel for the rows of one launch, from row `first` on."""
    n_partials, n, width = partials.shape
    residual, codes = norm.residual, norm.codes
    last, shards, block_k = min(n, first + ranks.n_rows), ranks.n_shards, 0
    rounded_rows: tuple[Tensor | None, Tensor | None] = None, None
    if codes is not None and codes.block_k:
        block_k, rounded_rows = codes.block_k, (codes.codes[first * width :], codes.scale[first:])
    launch(
        kernel, (last - first,), partials[:, first:], ranks.inbox, ranks.flags, ranks.epochs, ranks.inboxes,
        ranks.flag_lists, None if residual is None else residual[first:], norm.w, out, *rounded_rows, ranks.rank,
        ranks.n_rows, n, width, n * width, 1.0 / width, norm.eps, *more, RANKS=ranks.n_ranks, HOST=ranks.is_in_host,
        SHARDS=shards, SLICES=n_partials // shards, LANES=LANES, PIECES=pieces(width), GROUP=block_k,
        GROUPS=next_power_of_2(-(-width // max(1, block_k))),
        num_warps=8 if last - first <= FEW_ROWS else norm_warps(last - first, width), **constants,
    )


def _check(partials: Tensor, ranks: Rank) -> None:
    shards = ranks.n_shards
    fits = partials.is_contiguous() and partials.shape[2] == ranks.width and len(partials) % shards == 0
    check("all_reduce", fits, f"contiguous partials [{shards} * S, N, {ranks.width}]")
    is_sent_whole = ranks.inbox.dtype == torch.float32 or (partials.dtype == ranks.inbox.dtype and len(partials) == 1)
    check("all_reduce", is_sent_whole, f"partials that {ranks.inbox.dtype} holds")


def all_reduce(partials: Tensor, out: Tensor, *, ranks: Rank) -> None:
    """out = the sum over ranks, in their tree, of partials[0] + partials[1] + ... of each. partials: float32
    or bfloat16 [S, N, H], of shards S / ranks.n_shards each; out: float32 [N, H].
    """
    _check(partials, ranks)
    fits = out.dtype == torch.float32 and out.shape == partials.shape[1:] and out.is_contiguous()
    check("all_reduce", fits, "contiguous float32 out [N, H]")
    for first in range(0, len(out), ranks.n_rows):
        _launch(_one_shot_kernel, partials, ranks, first, out[first:], _Norm(), NORM=False)


def all_reduce_norm(
    residual: Tensor, partials: Tensor, w: Tensor, eps: float, *, ranks: Rank, shots: int | None = None,
    codes: Fp8Rows | None = None, feature: tuple[int, int] | None = None,
) -> Tensor:
    """residual += the sum over ranks (`all_reduce`); gives bfloat16(residual / rms * (1 + w)), [N, H], in
    ranks.out. One launch for each ranks.n_rows rows.

    residual: float32 [N, H]; w: float32 [H], zero-centred. The bits of `all_reduce` with `add_norm` behind
    it. codes: these rows in e4m3 as well, as of `add_norm`. shots: 1 or 2, None for `ranks.shots`; in the
    host's memory 1. Behind two shots only each rank's own rows of residual, i % ranks of each launch, are
    right. So of one residual all sums are made with as many shots. feature: the column from which two shots
    keep the new residual in ranks.features, and the columns of a row there.
    """
    _check(partials, ranks)
    n, width = residual.shape
    check("all_reduce", residual.dtype == w.dtype == torch.float32, "float32 residual and w")
    check("all_reduce", residual.shape == partials.shape[1:] and residual.is_contiguous(), "contiguous residual [N, H]")
    check("all_reduce", n <= len(ranks.out), f"N up to {len(ranks.out)}")
    shots = shots or ranks.shots(n)
    check("all_reduce", shots == 1 or not ranks.is_in_host, "one shot in the host's memory")
    if codes is not None and codes.block_k:
        check_room("all_reduce", codes, n, width, codes.block_k)
    out, norm = ranks.out[:n], _Norm(residual, w, eps, codes)
    kept = (None, 0, 0) if feature is None else (ranks.features, *feature)
    for first in range(0, n, ranks.n_rows):
        if shots == 1:
            _launch(_one_shot_kernel, partials, ranks, first, out[first:], norm, NORM=True)
        else:
            _launch(_two_shot_kernel, partials, ranks, first, ranks.outs, norm, first, *kept)
    return out


@dataclass(frozen=True)
class Columns:
    """Rows of which each rank has made some columns, those of rank i behind those of rank i - 1, and gets the
    others'.
    """

    rank: int
    n_columns: int  # of all ranks
    first: int  # of this one
    n_blocks: int  # programs of a row
    whole: Tensor  # float32, flat: all columns
    staged: Tensor | None  # float32, flat: the same on their way, where ranks meet in the host's memory
    flags: Tensor  # int32 [ranks, programs]
    epochs: Tensor  # int32 [programs]
    ends: Tensor  # int32 [ranks + 1]: where each rank's columns begin, and the last one's end
    wholes: Tensor  # int64 [ranks]: addresses of all; [1]: of staged
    flag_lists: Tensor  # int64, alike

    @property
    def n_ranks(self) -> int:
        return len(self.flags)


_COLUMNS = 4096


def columns_of(
    rank: int, ends: Sequence[tuple[int, int]], wholes: Sequence[Tensor], flags: Sequence[Tensor],
    staged: Tensor | None = None
) -> Columns:
    """Makes the columns of a rank of buffers that all ranks can reach. ends: where each rank's begin and end.
    flags: zeros at first, for each row `column_blocks`. staged: in the host's memory, where the only flags
    are, for those who do not reach each other's.
    """
    own, mine, n_columns = wholes[rank], flags[rank], ends[-1][1]
    epochs = torch.zeros(mine.shape[1], dtype=torch.int32, device=own.device)
    begins = torch.tensor([*(begin for begin, _ in ends), n_columns], dtype=torch.int32, device=own.device)
    reached = (wholes, flags) if staged is None else ([staged], flags[:1])
    addresses = _addresses(reached, own.device)
    return Columns(
        rank, n_columns, ends[rank][0], column_blocks(ends), own, staged, mine, epochs, begins, *addresses
    )


def column_blocks(ends: Sequence[tuple[int, int]]) -> int:
    """Programs of a row, where ranks make columns from here to there."""
    return -(-max(end - begin for begin, end in ends) // _COLUMNS)


@triton.jit(do_not_specialize=["rank", "first"])
def _all_gather_kernel(
    p_part, p_whole, p_staged, p_flags, p_epochs, p_ends, p_wholes, p_flag_lists, rank, n_part, n_whole, first, n_slots,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    row, slot = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    HOST: tl.constexpr = p_staged is not None
    wait_for_front(PDL)
    epoch = tl.load(p_epochs + slot) + 1
    # what the others had before may still be read there, until they come here
    _meet(p_flags, p_flag_lists, p_epochs, rank, slot, n_slots, epoch, RANKS, HOST)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_row = row.to(tl.int64) * n_whole
    b_part = tl.load(p_part + row.to(tl.int64) * n_part + o_col, mask=o_col < n_part, other=0.0)
    for q in tl.static_range(1 if HOST else RANKS):
        p_to = tl.multiple_of(tl.load(p_wholes + q).to(tl.pointer_type(tl.float32)), 16) + o_row + first
        tl.store(p_to + o_col, b_part, mask=o_col < n_part)
    _meet(p_flags, p_flag_lists, p_epochs, rank, slot, n_slots, epoch + 1, RANKS, HOST)
    if HOST:
        for q in tl.static_range(RANKS):
            o_of = tl.load(p_ends + q) + o_col
            b_mask = o_of < tl.load(p_ends + q + 1)
            b_of = tl.load(p_staged + o_row + o_of, mask=b_mask & (q != rank), other=0.0, volatile=True)
            tl.store(p_whole + o_row + o_of, tl.where(q == rank, b_part, b_of), mask=b_mask)


def all_gather(part: Tensor, columns: Columns) -> Tensor:
    """float32 [N, n_columns] of all ranks, in columns.whole. part: float32 [N, columns of this rank], which
    may be none. In the host's memory it is a launch for as many rows as have room there.
    """
    (n, n_part), n_columns = part.shape, columns.n_columns
    blocks, n_slots, staged = columns.n_blocks, columns.flags.shape[1], columns.staged
    at_once = n if staged is None else min(n_slots // blocks, staged.numel() // n_columns)
    fits = at_once * blocks <= n_slots and n * n_columns <= columns.whole.numel() and n_part <= blocks * _COLUMNS
    check("all_gather", part.dtype == torch.float32 and part.is_contiguous(), "contiguous float32 columns")
    check("all_gather", fits and at_once > 0, f"room for {n} rows of {n_columns}")
    for begin in range(0, n, at_once):
        launch(
            _all_gather_kernel, (min(at_once, n - begin), blocks), part[begin:], columns.whole[begin * n_columns :],
            staged, columns.flags, columns.epochs, columns.ends, columns.wholes, columns.flag_lists, columns.rank,
            n_part, n_columns, columns.first, n_slots, RANKS=columns.n_ranks, BLOCK=_COLUMNS, num_warps=8,
        )
    return columns.whole[: n * n_columns].view(n, n_columns)


@contextmanager
def apart(all_ranks: Sequence[Rank | Columns]) -> Iterator[None]:
    """Within it no rank waits for another, and sums are wrong: for first starts. A GPU loads a kernel, or a
    recording, when that is first started, and the driver may then wait for all GPUs that reach each other's
    memory, one that waits for this rank included.

    all_ranks: of this process. Waits for their GPUs.
    """
    lists, nowhere = [ranks.flag_lists.clone() for ranks in all_ranks], list[Tensor]()
    _wait(all_ranks)
    for ranks in all_ranks:
        nowhere.append(torch.empty_like(ranks.flags, device=ranks.epochs.device))
        ranks.flag_lists.fill_(nowhere[-1].data_ptr())
        ranks.flags.fill_(1 << 30)
    _wait(all_ranks)
    try:
        yield
    finally:
        _wait(all_ranks)
        for ranks, flag_list in zip(all_ranks, lists, strict=True):
            ranks.flag_lists.copy_(flag_list)
            ranks.flags.zero_()
            ranks.epochs.zero_()
        _wait(all_ranks)


def _wait(all_ranks: Sequence[Rank | Columns]) -> None:
    for ranks in all_ranks:
        if ranks.epochs.device.type == "cuda":
            torch.cuda.synchronize(ranks.epochs.device)
