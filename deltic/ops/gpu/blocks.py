"""How the tokens of a step are laid out for the GPU kernels: the blocks of a prefill, the rows of a decode.

A block is 64 rows of the activations. It belongs to one sequence and starts at an absolute multiple of 64
tokens, so it is one page, one chunk of the DeltaNet form, and one tile of attention, wherever the prompt was
cut (P2). A segment is a run of blocks: what one step computes of one sequence. Only its last block may be
partial; the rows that follow are padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from torch import Tensor

from deltic.ops.geometry import PAGE_SIZE

BLOCK = PAGE_SIZE


@dataclass(frozen=True)
class Blocks:
    """int32; B blocks and G segments, those in use first. Empty segments begin where the last one ends."""

    n: Tensor  # [B] tokens of the block, 1 .. 64; 0: not in use
    position: Tensor  # [B] absolute position of its first token
    place: Tensor  # [B] row of the page table
    page: Tensor  # [B] the page of its tokens
    snapshot: Tensor  # [B] slot that gets the state after this block, or -1
    segment_begin: Tensor  # [G + 1] first block of each segment
    start_slot: Tensor  # [G] where a segment's state is read; at position 0 it counts as zeros
    slot: Tensor  # [G] where its final state is left
    block_segment: Tensor  # [B] the segment of each block


@dataclass(frozen=True)
class PrefillInputs:
    """int32 views of the words that the host sends with a prefill of B blocks."""

    token_ids: Tensor  # [64 B]
    blocks: Blocks
    logit_row: Tensor  # [G] rows whose logits are wanted


@dataclass(frozen=True)
class PlaceState:
    """int32, by place: the values that a decode reads of its sequence, and that the sampler advances."""

    last_token: Tensor  # [P]
    position: Tensor  # [P] of that token
    slot: Tensor  # [P]
    done: Tensor  # [P] not 0: the sequence has ended on the device; the host will see it one step later
    page_table: Tensor  # [P, max_pages]


@dataclass(frozen=True)
class Rows:
    """The rows of a decode, int32 [N]: one token each."""

    place: Tensor  # row of the page table
    slot: Tensor  # the state slot; -1: the row is not in use
    position: Tensor  # tokens before this one

    def front(self, n: int) -> Self:
        """The first n."""
        return replace(self, **{field.name: getattr(self, field.name)[:n] for field in fields(self)})
