"""Blocks: how the tokens of a prefill are laid out for the GPU kernels.

A block is 64 rows of the activations. It belongs to one sequence and starts at an absolute multiple of 64
tokens, so it is one page, one chunk of the DeltaNet form, and one tile of attention, wherever the prompt was
cut (P2). A segment is a run of blocks: what one step computes of one sequence. Only its last block may be
partial; the rows that follow are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

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
