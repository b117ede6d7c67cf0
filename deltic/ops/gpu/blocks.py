"""Layout of a step's tokens for the GPU kernels: the blocks of a prefill, the rows of a decode.

A block is 64 rows of the activations. It belongs to one sequence and starts at an absolute multiple of 64
tokens, so it is one page, one chunk of the DeltaNet form, and one tile of attention, wherever the prompt was
cut (P2). A segment is a run of blocks: what one step computes of one sequence. Only its last block may be
partial. The rows that follow are padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from torch import Tensor

from deltic.ops.geometry import PAGE_SIZE

BLOCK = PAGE_SIZE


@dataclass(frozen=True)
class Blocks:
    """int32; B blocks and G segments, those in use first. Empty segments begin where the last one ends."""

    n: Tensor  # [B] tokens of the block, 1 .. 64; 0: not in use
    position: Tensor  # [B] absolute position of its first token
    batch_slot: Tensor  # [B] row of the page table
    page: Tensor  # [B] the page of its tokens
    snapshot: Tensor  # [B] state slot that gets the state after this block, or -1
    segment_begin: Tensor  # [G + 1] first block of each segment
    start_slot: Tensor  # [G] where a segment's state is read; at position 0 it counts as zeros
    state_slot: Tensor  # [G] where its final state is left
    block_segment: Tensor  # [B] the segment of each block


GROUP_ROWS = 16
"""Rows of a group of those with one adapter."""


@dataclass(frozen=True)
class AdapterRows:
    """Slots of adapters (or -1) that the rows of a step use. int32, written between steps."""

    adapter: Tensor  # [G] of each group, those in use in front; or of each block
    row: Tensor | None = None  # [G, GROUP_ROWS] rows of a group, or -1; None: they are those of the block
    of_row: Tensor | None = None  # [N] of each row, where `row` is there

    @property
    def n_rows(self) -> int:
        """Rows of a group, or of a block."""
        return BLOCK if self.row is None else GROUP_ROWS

    def front(self, n: int) -> Self:
        """Returns those of the first n rows, or blocks."""
        row, of_row = (None if part is None else part[:n] for part in (self.row, self.of_row))
        return replace(self, adapter=self.adapter[:n], row=row, of_row=of_row)


@dataclass(frozen=True)
class PrefillInputs:
    """int32 views of the words that the host sends with a prefill of B blocks."""

    token_ids: Tensor  # [64 B]; below 0, where there are pictures: rows of the tower's, from -1 on
    blocks: Blocks
    logit_row: Tensor  # [G] rows whose logits are wanted
    next_ids: Tensor | None = None  # [64 B] for a draft head: the ids behind; -1 - d: what draw d gives
    angles: Tensor | None = None  # [3, 64 B] rows of cos and sin, by axis of M-RoPE; None: those of positions
    adapters: AdapterRows | None = None  # of the blocks; None: no row has any
    logit_adapters: AdapterRows | None = None  # of the rows whose logits are wanted
    # [longest n-gram, 64 B] the tokens, those before them, ...: an end of text for those of no n-gram
    ngram_ids: Tensor | None = None


@dataclass(frozen=True)
class BatchState:
    """int32, by batch slot: the values that a decode reads of its sequence, and that the sampler advances."""

    last_token: Tensor  # [P]
    position: Tensor  # [P] of that token
    state_slot: Tensor  # [P]
    done: Tensor  # [P] not 0: the sequence has ended on the device; the host will see it one step later
    page_table: Tensor  # [P, max_pages]
    angle_shift: Tensor | None = None  # [P] from a position to the token's row of cos and sin; None: 0
    group_begun: Tensor | None = None  # [P, 4] a group that begins in a picture (ops/gpu/index.index_decode)
    # [P, positions] tokens up to and with the last one; those of the prompt where the model reads them
    history: Tensor | None = None


@dataclass(frozen=True)
class Drafts:
    """Positions of the rows of a decode among the drafts of their sequences, int32 [N]. Rows of one sequence
    follow one another, its last token first. Their positions follow one another, too, and are of one page.
    """

    ahead: Tensor  # rows of its sequence in front of this one
    token: Tensor  # what is drafted here, where rows are ahead
    length: Tensor  # rows of its sequence, in the first; 0 in the others. Of several the state sees none
    n_redo: Tensor  # in the first: tokens before it that are in the sequence's window, not yet in its state

    def front(self, n: int) -> Self:
        """The first n."""
        return replace(self, **{field.name: getattr(self, field.name)[:n] for field in fields(self)})


@dataclass(frozen=True)
class Rows:
    """The rows of a decode, int32 [N]: one token each."""

    batch_slot: Tensor  # row of the page table
    state_slot: Tensor  # the state slot; -1: the row is not in use
    position: Tensor  # tokens before this one
    angle_shift: Tensor | None = field(default=None, kw_only=True)  # of its batch slot
    drafts: Drafts | None = field(default=None, kw_only=True)

    def front(self, n: int) -> Self:
        """The first n."""
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        drafts = parts.pop("drafts")
        parts = {name: None if part is None else part[:n] for name, part in parts.items()}
        return replace(self, **parts, drafts=None if drafts is None else drafts.front(n))


@dataclass(frozen=True)
class Windows:
    """Inputs that drafted tokens bring to the states, kept by batch slot until it is known that the
    tokens were right. The token of position p is in row p % W: a step reads rows in front of those that it
    writes (`window_rows`).
    """

    columns: Tensor  # bfloat16 [batch_slots, W, C]: raw inputs of the convolution
    gates: Tensor  # float32 [batch_slots, W, 2 Hv]: b | a

    def of_layer(self, i: int) -> Windows:
        """Returns the windows of one layer, where the tensors are [batch_slots, layers, W, ...]."""
        return Windows(self.columns[:, i], self.gates[:, i])


@dataclass(frozen=True)
class StateSlots:
    """States of one layer, with any stride of state slots, and the windows of drafts."""

    columns: Tensor  # bfloat16 [state_slots, 4, C]: raw q | k | v of position p in row p % 4
    states: Tensor  # float32 or bfloat16 [state_slots, Hv, dv, dk]
    layer: int  # its number among those that have a state
    windows: Windows | None = None


def window_rows(most: int) -> int:
    """W of windows for decodes of up to so many rows of a sequence. While one program still reads what a step
    redoes, and the three inputs in front of that, another may write what it runs.
    """
    return 2 * most + 3
