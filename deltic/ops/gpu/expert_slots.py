"""Experts outside the GPU: all of a layer's routed experts are in the host's memory, which the GPU reads over
its link, and S slots of the layer hold those that were used last.

A decode has two kernels more in a layer, between its routes and its products:

    keep     one program: which experts of the step are in no slot, and which slots they get: those that were
             used longest ago, of equals the lower one; the lower experts come first
    fetch    their weights over the link into these slots

A product finds an expert by its address (`where`): in its slot, or, where a step uses more experts than there
are slots, in the host's memory, which it reads by itself. The same kernel reads the same bytes in the same
order in each place, so no bit depends on what is in the slots. The host decides nothing, and waits for
nothing.

Slots are never empty: they begin with the first S experts.

A prefill uses nearly all experts of a layer. `Stage.fill` copies those that are in no slot into a buffer, and
writes where each expert is: in its slot or in the buffer. It leaves the slots as they are. What runs between
it and the products of the layer must not, and no decode does: it is behind them on the stream.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.chip import chip, wait_for_front
from deltic.ops.gpu.launch import launch, next_power_of_2
from deltic.ops.matrix import Matrix

UNIT = 256
"""Bytes: places of experts are counted in these. Each matrix begins at a multiple of them."""
_WORDS = tl.constexpr(UNIT // 8)
_PIECE = tl.constexpr(64)
"""Units that a program copies at a time: enough on the way to hide the latency of the link."""
STAGE_PROGRAMS = 32
"""Programs of `Stage.fill`: enough for the link, and few beside the kernels of a prefill."""


@dataclass(frozen=True)
class Counts:
    """Numbers of all layers together, int64 [4]: of what decodes have used the experts in slots, the others,
    and the units that these have; and units that stages got. seen: the same in memory that the host reads.
    """

    found: Tensor
    seen: Tensor


@dataclass(frozen=True)
class ExpertSlots:
    """A layer's E experts and its S slots."""

    home: tuple[Matrix, Matrix]  # gate_up and down of all experts, in the host's memory
    gate_up: Matrix  # of the slots, on the GPU
    down: Matrix
    places: Tensor  # int64 [parts, 2]: units from the slots to the first expert at home, and of one expert
    where: Tensor  # int64 [parts, E]: units from the slots to each expert
    slot: Tensor  # int32 [E]: the expert's slot, or -1
    held: Tensor  # int32 [S]: the slot's expert, or -1
    used: Tensor  # int64 [S]: the step that used the slot last
    clock: Tensor  # int64 [1]: steps
    fetches: Tensor  # int32 [1 + E]: how many; expert + 65536 * place of each fetch
    counts: Counts

    @property
    def n_slots(self) -> int:
        return len(self.held)

    @property
    def parts(self) -> list[Tensor]:
        """The slots' memory, uint8 [S, bytes of one expert]: segments of gate_up, then down."""
        return parts_of(self.gate_up, self.down)


def parts_of(gate_up: Matrix, down: Matrix) -> list[Tensor]:
    """The memory of both: segments of gate_up, then down."""
    return [segment.data for segment in (*gate_up.segments, *down.segments)]


def with_memory(w: Matrix, memory: Sequence[Tensor]) -> Matrix:
    """The matrices with other memory, that of each segment."""
    segments = (replace(segment, data=data) for segment, data in zip(w.segments, memory, strict=True))
    return replace(w, segments=tuple(segments))


def _whole_units(name: str, n: int, size: int, allocate: Allocate) -> Tensor:
    """Allocates uint8 [n, size] that begins at a multiple of UNIT."""
    memory = allocate(name, (n * size + UNIT,), torch.uint8)
    begin = -memory.data_ptr() % UNIT
    found: Tensor = memory[begin : begin + n * size].view(n, size)
    return found


def expert_slots(gate_up: Matrix, down: Matrix, n_slots: int, counts: Counts, allocate: Allocate) -> ExpertSlots:
    """Makes the slots of a layer, with its first experts. gate_up, down: of all, in memory that the GPU
    reads. allocate(name, size, dtype) gives a zeroed tensor on the GPU.

    Raises KernelError for no slot, or more than there are experts.
    """
    n_experts, homes, i32 = down.n_matrices, parts_of(gate_up, down), torch.int32
    check("experts", 0 < n_slots <= n_experts, f"1 to {n_experts} slots, found {n_slots}")
    memory = [_whole_units("expert slots", n_slots, home.shape[1], allocate) for home in homes]
    n = len(gate_up.segments)
    made = ExpertSlots(
        home=(gate_up, down),
        gate_up=with_memory(gate_up, memory[:n]),
        down=with_memory(down, memory[n:]),
        places=allocate("expert places", (len(homes), 2), torch.int64),
        where=allocate("expert places", (len(homes), n_experts), torch.int64),
        slot=allocate("expert places", (n_experts,), i32),
        held=allocate("expert places", (n_slots,), i32),
        used=allocate("expert places", (n_slots,), torch.int64),
        clock=allocate("expert places", (1,), torch.int64),
        fetches=allocate("expert places", (1 + n_experts,), i32),
        counts=counts,
    )
    if made.slot.device.type != "meta":
        _begin(made, memory, homes)
    return made


def _begin(slots: ExpertSlots, memory: Sequence[Tensor], homes: Sequence[Tensor]) -> None:
    """Copies the first experts to the slots, and writes that the others are at home."""
    n, every = slots.n_slots, torch.arange(len(slots.slot))
    slots.slot.copy_(torch.where(every < n, every, -1))
    slots.held.copy_(every[:n])
    for i, (own, home) in enumerate(zip(memory, homes, strict=True)):
        apart, size = home.data_ptr() - own.data_ptr(), home.shape[1]
        check("experts", apart % UNIT == size % UNIT == 0, f"matrices at multiples of {UNIT} bytes")
        first, step = apart // UNIT, size // UNIT
        slots.places[i] = torch.tensor([first, step])
        slots.where[i] = (step * every + torch.where(every < n, 0, first)).to(slots.where.device)
        own.copy_(home[:n])


@triton.jit
def keep_kernel(p_counters, p_places, p_where, p_slot, p_held, p_used, p_clock, p_fetches, p_found, p_seen,
                E: tl.constexpr, E2: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, PARTS: tl.constexpr,
                PDL: tl.constexpr):
    """Gives the missing experts of a step, those whose counter is not 0, slots that it does not use, as far
    as there are such. One program.
    """
    COLUMNS: tl.constexpr = 32
    NEVER: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    wait_for_front(PDL)
    o_e, o_s = tl.arange(0, E2), tl.arange(0, S2)
    clock = tl.load(p_clock) + 1
    b_needed = tl.load(p_counters + o_e, mask=o_e < E, other=0) > 0
    b_slot = tl.load(p_slot + o_e, mask=o_e < E, other=-1)
    b_here = b_needed & (b_slot >= 0)
    b_missing = b_needed & (b_slot < 0)
    b_nth = tl.cumsum(b_missing.to(tl.int32), 0) - 1
    n_missing = tl.sum(b_missing.to(tl.int32), 0)
    tl.store(p_used + b_slot, clock + o_e * 0, mask=b_here)
    tl.store(p_fetches + 1 + b_nth, o_e, mask=b_missing)
    tl.debug_barrier()  # other threads read what these have written

    b_used = tl.load(p_used + o_s, mask=o_s < S, other=0)
    b_free = (o_s < S) & (b_used < clock)
    b_key = tl.where(b_free, b_used * S2 + o_s, NEVER)
    b_rank = tl.zeros([S2], tl.int32)
    for i in range(0, tl.where(n_missing > 0, S, 0), COLUMNS):  # mostly nothing is missing
        o_i = i + tl.arange(0, COLUMNS)
        b_other = tl.load(p_used + o_i, mask=o_i < S, other=0)
        b_before = tl.where((o_i < S) & (b_other < clock), b_other * S2 + o_i, NEVER)
        b_rank += tl.sum((b_before[None, :] < b_key[:, None]).to(tl.int32), 1)
    b_takes = b_free & (b_rank < n_missing)
    b_new = tl.load(p_fetches + 1 + b_rank, mask=b_takes, other=0)
    b_old = tl.load(p_held + o_s, mask=b_takes, other=0)
    tl.debug_barrier()  # `used` and the missing experts were read by all

    tl.store(p_slot + b_old, o_s * 0 - 1, mask=b_takes)
    tl.store(p_slot + b_new, o_s, mask=b_takes)
    tl.store(p_held + o_s, b_new, mask=b_takes)
    tl.store(p_used + o_s, clock + o_s * 0, mask=b_takes)
    n_units = tl.full((), 0, tl.int64)
    for i in tl.static_range(PARTS):
        first, step = tl.load(p_places + 2 * i), tl.load(p_places + 2 * i + 1)
        n_units += step
        tl.store(p_where + i * E + b_old, first + step * b_old, mask=b_takes)
        tl.store(p_where + i * E + b_new, step * o_s, mask=b_takes)
    tl.store(p_fetches + 1 + b_rank, b_new + o_s * 65536, mask=b_takes)
    tl.store(p_fetches, tl.sum(b_takes.to(tl.int32), 0))
    tl.store(p_clock, clock)
    n_here, n_units = tl.sum(b_here.to(tl.int32), 0).to(tl.int64), n_units * n_missing
    b_more = tl.where(tl.arange(0, 4) == 0, n_here, tl.where(tl.arange(0, 4) == 1, n_missing.to(tl.int64), n_units))
    b_found = tl.load(p_found + tl.arange(0, 4), mask=tl.arange(0, 4) < 3, other=0) + b_more
    tl.store(p_found + tl.arange(0, 4), b_found, mask=tl.arange(0, 4) < 3)
    tl.store(p_seen + tl.arange(0, 4), b_found, mask=tl.arange(0, 4) < 3)


@triton.jit
def moved(p_slots, p_where, expert):
    """Returns the address of an expert, from that of the slots. p_where: places of this part."""
    SIZE: tl.constexpr = _WORDS * 64 // p_slots.dtype.element_ty.primitive_bitwidth
    return p_slots + tl.load(p_where + expert, cache_modifier=".cg") * SIZE


@triton.jit
def fetch_kernel(p_fetches, slots, to, p_places, PARTS: tl.constexpr, PDL: tl.constexpr):
    """Copies the experts that p_fetches lists from the host to their places. slots, to: the addresses of each
    part's slots, and of its places, in words of 8 bytes.
    """
    wait_for_front(PDL)
    n_fetches = tl.load(p_fetches)
    for i_part in tl.static_range(PARTS):
        first, step = tl.load(p_places + 2 * i_part), tl.load(p_places + 2 * i_part + 1)
        n_pieces = ((step + _PIECE - 1) // _PIECE).to(tl.int32)
        for i in range(tl.program_id(0), n_fetches * n_pieces, tl.num_programs(0)):
            fetch = tl.load(p_fetches + 1 + i // n_pieces)
            p_from = slots[i_part] + (first + step * (fetch & 65535)) * _WORDS
            o_word = (i % n_pieces * _PIECE).to(tl.int64) * _WORDS + tl.arange(0, _PIECE * _WORDS)
            b_mask, p_to = o_word < step * _WORDS, to[i_part] + step * (fetch >> 16) * _WORDS
            tl.store(p_to + o_word, tl.load(p_from + o_word, mask=b_mask, other=0), mask=b_mask)


@triton.jit
def lack_kernel(p_counters, p_places, p_where, p_slot, p_fetches, slots, to, p_now, p_found, p_seen,
                E: tl.constexpr, E2: tl.constexpr, PARTS: tl.constexpr):
    """Lists the experts that are in no slot, of those in use where p_counters is given. Writes to p_now
    [parts, E] where all are, as in p_where, once the others were copied to their places. One program; it
    starts when all in front has ended. slots, to: as of `fetch_kernel`.
    """
    o_e = tl.arange(0, E2)
    b_away = tl.load(p_slot + o_e, mask=o_e < E, other=0) < 0
    b_listed = b_away
    if p_counters is not None:
        b_listed = b_away & (tl.load(p_counters + o_e, mask=o_e < E, other=0) > 0)
    b_nth = tl.cumsum(b_listed.to(tl.int32), 0)
    tl.store(p_fetches + b_nth, o_e * 65537, mask=b_listed)
    tl.store(p_fetches, tl.max(b_nth, 0))
    n_units = tl.load(p_found + 3)
    for i in tl.static_range(PARTS):
        step = tl.load(p_places + 2 * i + 1)
        n_units += step * tl.max(b_nth, 0)
        apart = (to[i].to(tl.int64) - slots[i].to(tl.int64)) // (8 * _WORDS)
        b_where = tl.load(p_where + i * E + o_e, mask=o_e < E, other=0)
        tl.store(p_now + i * E + o_e, tl.where(b_away, apart + step * o_e, b_where), mask=o_e < E)
    tl.store(p_found + 3, n_units)
    tl.store(p_seen + 3, n_units)


def _words(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(memory.view(-1).view(torch.int64) for memory in parts)


def bring(slots: ExpertSlots, counters: Tensor) -> None:
    """Brings the experts whose counters (int32 [E]) are not 0 into slots, as far as these reach."""
    s, n_experts, own = slots, len(slots.slot), _words(slots.parts)
    launch(
        keep_kernel, (1,), counters, s.places, s.where, s.slot, s.held, s.used, s.clock, s.fetches, s.counts.found,
        s.counts.seen, E=n_experts, E2=next_power_of_2(n_experts), S=s.n_slots, S2=next_power_of_2(s.n_slots),
        PARTS=len(own), num_warps=8, num_stages=1,
    )
    launch(fetch_kernel, (chip().n_sms,), s.fetches, own, own, s.places, PARTS=len(own), num_warps=8, num_stages=1)


@dataclass(frozen=True)
class Stage:
    """The slots of a layer, and a buffer with a place for each of its experts."""

    slots: ExpertSlots
    parts: list[Tensor]  # uint8 [E, bytes of one expert]: as `ExpertSlots.parts`
    where: Tensor  # int64 [parts, E]: units from the slots to each expert, which is in its slot or here
    is_filled: bool = False  # all that are in no slot are here already

    def fill(self, counters: Tensor | None = None) -> None:
        """Copies all experts that are in no slot to the buffer, or those whose counters (int32 [E]) are not
        0.
        """
        s, n_experts = self.slots, len(self.slots.slot)
        own, to = _words(s.parts), _words(self.parts)
        launch(
            lack_kernel, (1,), counters, s.places, s.where, s.slot, s.fetches, own, to, self.where, s.counts.found,
            s.counts.seen, E=n_experts, E2=next_power_of_2(n_experts), PARTS=len(own), num_warps=4, num_stages=1,
        )
        launch(
            fetch_kernel, (STAGE_PROGRAMS,), s.fetches, own, to, s.places, PARTS=len(own), num_warps=8, num_stages=1,
            pdl=False,
        )


def stage_in(memory: Tensor, slots: ExpertSlots) -> Stage:
    """The stage of a layer in the front of a buffer that `stage_memory` made."""
    at, parts = _table_bytes(*slots.home), list[Tensor]()
    for home in parts_of(*slots.home):
        parts.append(memory[at : at + home.numel()].view(home.shape))
        at += home.numel()
    return Stage(slots, parts, memory[: slots.where.nbytes].view(torch.int64).view(slots.where.shape))


def _table_bytes(gate_up: Matrix, down: Matrix) -> int:
    """Bytes of the places of all experts, in whole units."""
    return -(-8 * len(parts_of(gate_up, down)) * down.n_matrices // UNIT) * UNIT


def stage_memory(homes: Iterable[tuple[Matrix, Matrix]], allocate: Allocate) -> Tensor:
    """Allocates a buffer, uint8, for the stage of any of these layers: places and memory of all its experts.
    homes: gate_up and down of each.
    """
    n_bytes = max(_table_bytes(*home) + sum(w.n_bytes for w in home) for home in homes)
    return _whole_units("expert stages", 1, n_bytes, allocate)[0]
