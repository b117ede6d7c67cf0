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

A prefill uses nearly all experts of a layer. `Stage.fill` copies them, from slots and from the host, into a
buffer that has them one behind the other, as a layer that is on the GPU has them. It leaves the slots as they
are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
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
_UNIT_BITS = tl.constexpr(8 * UNIT)
_PIECE = tl.constexpr(64)
"""Units that a program copies at a time: enough on the way to hide the latency of the link."""
STAGE_PROGRAMS = 32
"""Programs of `Stage.fill`: enough for the link, and few beside the kernels of a prefill."""


@dataclass(frozen=True)
class Counts:
    """Numbers of what decodes have found, of all layers together, int64 [3]: experts in slots, other experts,
    and the units that these have. seen: the same in memory that the host reads.
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
    fetches: Tensor  # int32 [1 + E + S]: how many; missing experts; expert + 65536 * slot of each fetch
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


def _whole_units(n: int, size: int, allocate: Allocate) -> Tensor:
    """Allocates uint8 [n, size] that begins at a multiple of UNIT."""
    memory = allocate("expert slots", (n * size + UNIT,), torch.uint8)
    begin = -memory.data_ptr() % UNIT
    found: Tensor = memory[begin : begin + n * size].view(n, size)
    return found


def expert_slots(gate_up: Matrix, down: Matrix, n_slots: int, counts: Counts, allocate: Allocate) -> ExpertSlots:
    """Makes the slots of a layer, which are empty. gate_up, down: of its experts, in memory that the GPU
    reads. allocate(name, size, dtype) gives a zeroed tensor on the GPU.

    Raises KernelError for no slot, or more than there are experts.
    """
    n_experts, homes, i32 = down.n_matrices, parts_of(gate_up, down), torch.int32
    check("experts", 0 < n_slots <= n_experts, f"1 to {n_experts} slots, found {n_slots}")
    memory = [_whole_units(n_slots, home.shape[1], allocate) for home in homes]
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
        fetches=allocate("expert places", (1 + n_experts + n_slots,), i32),
        counts=counts,
    )
    if made.slot.device.type != "meta":
        _empty(made, memory, homes)
    return made


def _empty(slots: ExpertSlots, memory: Sequence[Tensor], homes: Sequence[Tensor]) -> None:
    """Writes that every expert is at home."""
    slots.slot.fill_(-1)
    slots.held.fill_(-1)
    for i, (own, home) in enumerate(zip(memory, homes, strict=True)):
        apart, size = home.data_ptr() - own.data_ptr(), home.shape[1]
        check("experts", apart % UNIT == size % UNIT == 0, f"matrices at multiples of {UNIT} bytes")
        first, step = apart // UNIT, size // UNIT
        slots.places[i] = torch.tensor([first, step])
        slots.where[i] = first + step * torch.arange(slots.where.shape[1], device=slots.where.device)


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
    b_old = tl.load(p_held + o_s, mask=b_takes, other=-1)
    b_leaves = b_takes & (b_old >= 0)
    tl.debug_barrier()  # `used` was read by all

    tl.store(p_slot + b_old, o_s * 0 - 1, mask=b_leaves)
    tl.store(p_slot + b_new, o_s, mask=b_takes)
    tl.store(p_held + o_s, b_new, mask=b_takes)
    tl.store(p_used + o_s, clock + o_s * 0, mask=b_takes)
    n_units = tl.full((), 0, tl.int64)
    for i in tl.static_range(PARTS):
        first, step = tl.load(p_places + 2 * i), tl.load(p_places + 2 * i + 1)
        n_units += step
        tl.store(p_where + i * E + b_old, first + step * b_old, mask=b_leaves)
        tl.store(p_where + i * E + b_new, step * o_s, mask=b_takes)
    tl.store(p_fetches + 1 + E + b_rank, b_new + o_s * 65536, mask=b_takes)
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
    SIZE: tl.constexpr = _UNIT_BITS // p_slots.dtype.element_ty.primitive_bitwidth
    return p_slots + tl.load(p_where + expert, cache_modifier=".cg") * SIZE


@triton.jit
def _copy(p_from, p_to, n_units, i_piece):
    """Copies piece i_piece of n_units units between places of int64 words."""
    o_word = (i_piece * _PIECE).to(tl.int64) * _WORDS + tl.arange(0, _PIECE * _WORDS)
    b_mask = o_word < n_units * _WORDS
    tl.store(p_to + o_word, tl.load(p_from + o_word, mask=b_mask, other=0), mask=b_mask)


@triton.jit
def fetch_kernel(p_fetches, p_first, p_second, p_third, p_places, E: tl.constexpr, PARTS: tl.constexpr,
                 PDL: tl.constexpr):
    """Copies what `keep_kernel` has listed into its slots. p_first, p_second, p_third: the slots of each
    part, in words of 8 bytes.
    """
    wait_for_front(PDL)
    n_fetches = tl.load(p_fetches)
    for i_part in tl.static_range(PARTS):
        p_slots = p_first
        if i_part == 1:
            p_slots = p_second
        if i_part == 2:
            p_slots = p_third
        first, step = tl.load(p_places + 2 * i_part), tl.load(p_places + 2 * i_part + 1)
        n_pieces = ((step + _PIECE - 1) // _PIECE).to(tl.int32)
        for i in range(tl.program_id(0), n_fetches * n_pieces, tl.num_programs(0)):
            fetch = tl.load(p_fetches + 1 + E + i // n_pieces)
            p_from = p_slots + (first + step * (fetch & 65535)) * _WORDS
            _copy(p_from, p_slots + step * (fetch >> 16) * _WORDS, step, i % n_pieces)


@triton.jit
def stage_kernel(p_slots, p_where, p_places, p_counters, p_stage, E: tl.constexpr, PART: tl.constexpr):
    """Copies a part of the experts, of those in use where p_counters is given, from where they are to
    p_stage, one behind the other. It starts when all in front has ended.
    """
    step = tl.load(p_places + 2 * PART + 1)
    n_pieces = ((step + _PIECE - 1) // _PIECE).to(tl.int32)
    for i in range(tl.program_id(0), E * n_pieces, tl.num_programs(0)):
        expert, n_units = i // n_pieces, step
        if p_counters is not None:
            n_units = tl.where(tl.load(p_counters + expert) > 0, step, 0)
        p_from = p_slots + tl.load(p_where + PART * E + expert) * _WORDS
        _copy(p_from, p_stage + step * expert * _WORDS, n_units, i % n_pieces)


def _words(memory: Tensor) -> Tensor:
    return memory.view(-1).view(torch.int64)


def bring(slots: ExpertSlots, counters: Tensor) -> None:
    """Brings the experts whose counters (int32 [E]) are not 0 into slots, as far as these reach."""
    s, n_experts, parts = slots, len(slots.slot), [_words(part) for part in slots.parts]
    sizes = {"E": n_experts, "PARTS": len(parts)}
    launch(
        keep_kernel, (1,), counters, s.places, s.where, s.slot, s.held, s.used, s.clock, s.fetches, s.counts.found,
        s.counts.seen, E2=next_power_of_2(n_experts), S=s.n_slots, S2=next_power_of_2(s.n_slots), num_warps=8,
        num_stages=1, **sizes,
    )
    launch(
        fetch_kernel, (chip().n_sms,), s.fetches, *parts, *[parts[0]] * (3 - len(parts)), s.places, num_warps=8,
        num_stages=1, **sizes,
    )


@dataclass(frozen=True)
class Stage:
    """A buffer of all experts of a layer, and the slots of that layer."""

    slots: ExpertSlots
    gate_up: Matrix  # of all experts, on the GPU
    down: Matrix
    is_filled: bool = False  # all experts are here already

    def fill(self, counters: Tensor | None = None) -> None:
        """Copies all experts to the buffer, or those whose counters (int32 [E]) are not 0."""
        s, memory = self.slots, parts_of(self.gate_up, self.down)
        for i, (own, to) in enumerate(zip(s.parts, memory, strict=True)):
            launch(
                stage_kernel, (STAGE_PROGRAMS,), _words(own), s.where, s.places, counters, _words(to), E=len(s.slot),
                PART=i, num_warps=8, num_stages=1,
            )


def stage_in(memory: Tensor, slots: ExpertSlots) -> Stage:
    """The stage of a layer in the front of a buffer, uint8, of `stage_bytes` at least."""
    at, parts = 0, list[Tensor]()
    for home in parts_of(*slots.home):
        parts.append(memory[at : at + home.numel()].view(home.shape))
        at += home.numel()
    gate_up, down = slots.home
    n = len(gate_up.segments)
    return Stage(slots, with_memory(gate_up, parts[:n]), with_memory(down, parts[n:]))


def stage_bytes(gate_up: Matrix, down: Matrix) -> int:
    """Bytes of all experts of a layer."""
    return gate_up.n_bytes + down.n_bytes
