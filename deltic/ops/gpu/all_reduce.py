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
one way.
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
from deltic.ops.gpu.launch import Levers, launch
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


@dataclass(frozen=True)
class Rank:
    """Buffers and addresses with which one rank sums rows, n_rows of them in a launch."""

    rank: int
    inbox: Tensor  # float32 or bfloat16 [2, ranks, n_rows, width]
    flags: Tensor  # int32 [ranks, n_rows]: the epoch that a rank has written
    epochs: Tensor  # int32 [n_rows]
    out: Tensor  # bfloat16 [rows, width]: normed rows, for the others to write to in two shots
    inboxes: Tensor  # int64 [ranks]: addresses of all inboxes
    flag_lists: Tensor  # int64 [ranks]: of all flags
    outs: Tensor  # int64 [ranks]: of all out

    @property
    def n_ranks(self) -> int:
        return len(self.flags)

    @property
    def n_rows(self) -> int:
        return self.flags.shape[1]

    @property
    def width(self) -> int:
        return self.inbox.shape[3]

    def shots(self, n: int) -> int:
        """Number of shots (1 or 2) in which sums of n rows are made."""
        n_bytes = n * self.width * self.inbox.element_size() * (self.n_ranks - 1)
        return 1 if n_bytes <= ONE_SHOT_BYTES else 2


Shared = tuple[Tensor, Tensor, Tensor]
"""Inbox, flags and out of a rank, which the others write to."""


def shared_buffers(
    n_ranks: int, n_rows: int, width: int, allocate: Allocate, name: str = "sums", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Inbox and flags of a rank, for sums of n_rows rows in a launch. dtype: of what is sent."""
    return (
        allocate(f"{name} of others", (2, n_ranks, n_rows, width), dtype),
        allocate(f"flags of {name}", (n_ranks, n_rows), torch.int32),
    )


def rank_of(rank: int, shared: Sequence[Shared]) -> Rank:
    """Makes a rank of the buffers of all ranks, which this one can reach."""
    inbox, flags, out = shared[rank]
    out = out.view(-1, inbox.shape[3])
    epochs = torch.zeros(flags.shape[1], dtype=torch.int32, device=inbox.device)
    return Rank(rank, inbox, flags, epochs, out, *_addresses(zip(*shared, strict=True), inbox.device))


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
    p_partials, row, width, stride, SHARDS: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr
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


@triton.jit
def _raise_flag(p_flag_lists, to, rank, row, n_rows, epoch):
    """Tells rank `to` that what this one has written there is whole. All threads have written before."""
    p_flag = tl.load(p_flag_lists + to).to(tl.pointer_type(tl.int32)) + rank * n_rows + row
    tl.atomic_xchg(p_flag, epoch, sem="release", scope="sys")


@triton.jit
def _wait_for(p_flags, of, row, n_rows, epoch):
    """Waits until rank `of` has set its flag of this epoch. Epochs wrap around, after a day or two of
    decodes.
    """
    p_flag = p_flags + of * n_rows + row
    seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")
    while seen - epoch < 0:
        seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")


@triton.jit
def _meet(p_flags, p_flag_lists, p_epochs, rank, slot, n_slots, epoch, RANKS: tl.constexpr):
    """Waits until all ranks are here, and what they have written to each other for this slot is whole."""
    tl.debug_barrier()  # all threads have written
    for q in tl.static_range(RANKS):
        if q != rank:
            _raise_flag(p_flag_lists, q, rank, slot, n_slots, epoch)
    tl.store(p_epochs + slot, epoch)
    for q in tl.static_range(RANKS):
        if q != rank:
            _wait_for(p_flags, q, slot, n_slots, epoch)


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


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    p_partials, p_inbox, p_flags, p_epochs, p_inboxes, p_flag_lists, p_residual, p_w, p_out, rank, n_rows, width, stride,
    inverse_width, eps, RANKS: tl.constexpr, SHARDS: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr,
    PIECES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if NORM:
        weights = load_pieces(p_w, width, LANES, PIECES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    epoch = tl.load(p_epochs + row) + 1
    turn = (epoch & 1) * RANKS
    own = _sum_of_slices(p_partials, row, width, stride, SHARDS, SLICES, LANES, PIECES)
    for q in tl.static_range(RANKS):
        if q != rank:
            _send(p_inboxes, p_inbox, q, rank, own, turn, row, n_rows, width, LANES, PIECES)
    _meet(p_flags, p_flag_lists, p_epochs, rank, row, n_rows, epoch, RANKS)
    tl.debug_barrier()
    total = _sum_of_ranks(p_inbox, rank, own, turn, row, n_rows, width, RANKS, LANES, PIECES)
    o_row = row.to(tl.int64) * width
    if NORM:
        added = _add_to_row(p_residual + o_row, total, width, LANES, PIECES)
        store_norm(p_out + o_row, None, None, 0, added, weights, width, inverse_width, eps, LANES, PIECES, 1)
    else:
        store_pieces(p_out + o_row, total, width, LANES, PIECES)


@triton.jit(do_not_specialize=["rank", "first"])
def _two_shot_kernel(
    p_partials, p_inbox, p_flags, p_epochs, p_inboxes, p_flag_lists, p_residual, p_w, p_outs, rank, n_rows, width, stride,
    inverse_width, eps, first, RANKS: tl.constexpr, SHARDS: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):
    """Sums rows in two shots. A row's owner waits for the others. They wait for what it makes of the row."""
    row = tl.program_id(0)
    weights = load_pieces(p_w, width, LANES, PIECES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    epoch, owner = tl.load(p_epochs + row) + 1, row % RANKS
    turn, o_row = (epoch & 1) * RANKS, row.to(tl.int64) * width
    own = _sum_of_slices(p_partials, row, width, stride, SHARDS, SLICES, LANES, PIECES)
    if owner == rank:
        for q in tl.static_range(RANKS):
            if q != rank:
                _wait_for(p_flags, q, row, n_rows, epoch)
        tl.debug_barrier()
        total = _sum_of_ranks(p_inbox, rank, own, turn, row, n_rows, width, RANKS, LANES, PIECES)
        added = _add_to_row(p_residual + o_row, total, width, LANES, PIECES)
        for q in tl.static_range(RANKS):
            p_to = tl.multiple_of(tl.load(p_outs + q).to(tl.pointer_type(tl.bfloat16)), 16)
            p_to += first.to(tl.int64) * width + o_row
            store_norm(p_to, None, None, 0, added, weights, width, inverse_width, eps, LANES, PIECES, 1)
        tl.debug_barrier()
        for q in tl.static_range(RANKS):
            if q != rank:
                _raise_flag(p_flag_lists, q, rank, row, n_rows, epoch)
    else:
        _send(p_inboxes, p_inbox, owner, rank, own, turn, row, n_rows, width, LANES, PIECES)
        tl.debug_barrier()
        _raise_flag(p_flag_lists, owner, rank, row, n_rows, epoch)
        _wait_for(p_flags, owner, row, n_rows, epoch)
    tl.store(p_epochs + row, epoch)  # behind a barrier: until then threads may still read it


def _launch(
    kernel: object, partials: Tensor, ranks: Rank, first: int, residual: Tensor | None, w: Tensor | None, eps: float,
    out: Tensor, levers: Levers, shards: int, *more: int, **constants: bool,
) -> None:
    """Launches a kernel for the rows of one launch, from row `first` on."""
    n_partials, n, width = partials.shape
    last = min(n, first + ranks.n_rows)
    launch(
        kernel, (last - first,), partials[:, first:], ranks.inbox, ranks.flags, ranks.epochs, ranks.inboxes, ranks.flag_lists,
        None if residual is None else residual[first:], w, out, ranks.rank, ranks.n_rows, width, n * width, 1.0 / width, eps,
        *more, RANKS=ranks.n_ranks, SHARDS=shards, SLICES=n_partials // shards, LANES=LANES, PIECES=pieces(width), pdl=levers.pdl,
        num_warps=8 if last - first <= FEW_ROWS else norm_warps(last - first, width), **constants,
    )


def _check(partials: Tensor, ranks: Rank, shards: int) -> None:
    fits = partials.is_contiguous() and partials.shape[2] == ranks.width and len(partials) % shards == 0
    check("all_reduce", fits, f"contiguous partials [{shards} * S, N, {ranks.width}]")
    is_sent_whole = ranks.inbox.dtype == torch.float32 or (partials.dtype == ranks.inbox.dtype and len(partials) == 1)
    check("all_reduce", is_sent_whole, f"partials that {ranks.inbox.dtype} holds")


def all_reduce(partials: Tensor, out: Tensor, *, ranks: Rank, levers: Levers, shards: int = 1) -> None:
    """out = the sum over ranks, in their tree, of partials[0] + partials[1] + ... of each. partials: float32
    or bfloat16 [S, N, H]; out: float32 [N, H]. shards: of a model, that each rank has, S / shards each: the
    sum of as many ranks, each with one of these.
    """
    _check(partials, ranks, shards)
    fits = out.dtype == torch.float32 and out.shape == partials.shape[1:] and out.is_contiguous()
    check("all_reduce", fits, "contiguous float32 out [N, H]")
    for first in range(0, len(out), ranks.n_rows):
        _launch(_one_shot_kernel, partials, ranks, first, None, None, 0.0, out[first:], levers, shards, NORM=False)


def all_reduce_norm(
    residual: Tensor, partials: Tensor, w: Tensor, eps: float, *, ranks: Rank, levers: Levers, shots: int | None = None,
    shards: int = 1,
) -> Tensor:
    """residual += the sum over ranks (`all_reduce`); gives bfloat16(residual / rms * (1 + w)), [N, H], in
    ranks.out. One launch for each ranks.n_rows rows.

    residual: float32 [N, H]; w: float32 [H], zero-centred. The bits of `all_reduce` with `add_norm` behind
    it. shots: 1 or 2, None for `ranks.shots`. Behind two shots only each rank's own rows of residual, i %
    ranks of each launch, are right. So of one residual all sums are made with as many shots.
    """
    _check(partials, ranks, shards)
    n = len(residual)
    check("all_reduce", residual.dtype == w.dtype == torch.float32, "float32 residual and w")
    check("all_reduce", residual.shape == partials.shape[1:] and residual.is_contiguous(), "contiguous residual [N, H]")
    check("all_reduce", n <= len(ranks.out), f"N up to {len(ranks.out)}")
    out = ranks.out[:n]
    for first in range(0, n, ranks.n_rows):
        if (shots or ranks.shots(n)) == 1:
            _launch(_one_shot_kernel, partials, ranks, first, residual, w, eps, out[first:], levers, shards, NORM=True)
        else:
            _launch(_two_shot_kernel, partials, ranks, first, residual, w, eps, ranks.outs, levers, shards, first)
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
    flags: Tensor  # int32 [ranks, programs]
    epochs: Tensor  # int32 [programs]
    wholes: Tensor  # int64 [ranks]: addresses
    flag_lists: Tensor  # int64 [ranks]

    @property
    def n_ranks(self) -> int:
        return len(self.flags)


_COLUMNS = 4096


def columns_of(
    rank: int, n_columns: int, first: int, n_blocks: int, wholes: Sequence[Tensor], flags: Sequence[Tensor]
) -> Columns:
    """Makes the columns of a rank of buffers that all ranks can reach. n_blocks: `column_blocks` of the rank
    that has most. flags: zeros at first, n_blocks for each row.
    """
    own, mine = wholes[rank], flags[rank]
    epochs = torch.zeros(mine.shape[1], dtype=torch.int32, device=own.device)
    return Columns(rank, n_columns, first, n_blocks, own, mine, epochs, *_addresses((wholes, flags), own.device))


def column_blocks(n_columns: int) -> int:
    """Programs of a row, of a rank that makes so many columns."""
    return -(-n_columns // _COLUMNS)


@triton.jit(do_not_specialize=["rank", "first"])
def _all_gather_kernel(
    p_part, p_flags, p_epochs, p_wholes, p_flag_lists, rank, n_part, n_whole, first, n_slots, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    row, slot = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    epoch = tl.load(p_epochs + slot) + 1
    # what the others had before may still be read there, until they come here
    _meet(p_flags, p_flag_lists, p_epochs, rank, slot, n_slots, epoch, RANKS)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_part = tl.load(p_part + row.to(tl.int64) * n_part + o_col, mask=o_col < n_part, other=0.0)
    for q in tl.static_range(RANKS):
        p_to = tl.multiple_of(tl.load(p_wholes + q).to(tl.pointer_type(tl.float32)), 16) + row.to(tl.int64) * n_whole + first
        tl.store(p_to + o_col, b_part, mask=o_col < n_part)
    _meet(p_flags, p_flag_lists, p_epochs, rank, slot, n_slots, epoch + 1, RANKS)


def all_gather(part: Tensor, columns: Columns, *, levers: Levers) -> Tensor:
    """float32 [N, n_columns] of all ranks, in columns.whole. part: float32 [N, columns of this rank], which
    may be none.
    """
    (n, n_part), n_columns = part.shape, columns.n_columns
    blocks, n_slots = columns.n_blocks, columns.flags.shape[1]
    fits = n * blocks <= n_slots and n * n_columns <= columns.whole.numel() and n_part <= blocks * _COLUMNS
    check("all_gather", part.dtype == torch.float32 and part.is_contiguous(), "contiguous float32 columns")
    check("all_gather", fits, f"room for {n} rows of {n_columns}")
    launch(
        _all_gather_kernel, (n, blocks), part, columns.flags, columns.epochs, columns.wholes, columns.flag_lists, columns.rank,
        n_part, n_columns, columns.first, n_slots, RANKS=columns.n_ranks, BLOCK=_COLUMNS, pdl=levers.pdl, num_warps=8,
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
        nowhere.append(torch.empty_like(ranks.flags))
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
        if ranks.flags.device.type == "cuda":
            torch.cuda.synchronize(ranks.flags.device)
