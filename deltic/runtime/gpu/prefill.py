"""A prefill on a GPU: chunks to blocks, and the one copy that brings them.

The tokens of each chunk are laid out in blocks of 64 rows (ops/gpu/blocks.py). Everything that a prefill
reads of the schedule lies in one buffer of words, for each number of blocks that is recorded: the host fills
a pinned copy of it and sends that.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deltic.engine.pictures import row_ids
from deltic.engine.step import Chunk, Draw, Step
from deltic.ops.geometry import PAGE_SIZE
from deltic.ops.gpu.blocks import GROUP_ROWS, AdapterRows, Blocks, PrefillInputs
from deltic.ops.gpu.sample import Draws
from deltic.runtime.gpu.batch_slots import BatchSlots, Ring, adapter_groups
from deltic.runtime.gpu.buffers import MAX_SEGMENTS

_ALIGNED = 4
"""Words to which each part of the buffer is aligned: 16 bytes."""


@dataclass(frozen=True)
class BlockBuffer:
    """The inputs of a prefill of n_blocks blocks and up to n_segments chunks, as the device reads them."""

    n_blocks: int
    n_segments: int
    words: Tensor  # int32: all of the others
    offsets: dict[str, int]
    inputs: PrefillInputs
    draws: Draws

    @classmethod
    def empty(
        cls,
        n_blocks: int,
        n_draws: int,
        device: torch.device,
        has_head: bool,
        has_pictures: bool,
        has_adapters: bool,
        n_gram: int,
    ) -> BlockBuffer:
        """Makes a buffer in which no block is in use and nothing is drawn. has_head: with what a draft head
        reads. has_pictures, has_adapters: with what prompts with pictures and with adapters need. n_gram:
        tokens of the longest n-gram that is embedded; 0: none is.
        """
        n_segments = min(n_blocks, MAX_SEGMENTS)
        sizes = {
            "token_ids": n_blocks * PAGE_SIZE,
            **dict.fromkeys(("n", "position", "batch_slot", "page", "snapshot", "block_segment"), n_blocks),
            "segment_begin": n_segments + 1,
            **dict.fromkeys(("start_slot", "state_slot", "logit_row"), n_segments),
            **dict.fromkeys(("draw_row", "draw_place", "draw_position"), n_draws),
            **({"next_ids": n_blocks * PAGE_SIZE} if has_head else {}),
            **({"angles": 3 * n_blocks * PAGE_SIZE} if has_pictures else {}),
            **({"ngram_ids": n_gram * n_blocks * PAGE_SIZE} if n_gram else {}),
        }
        if has_adapters:
            sizes |= {"adapter": n_blocks, "logit_adapter": n_segments, "logit_rows": n_segments * GROUP_ROWS}
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = at
            at += -(-size // _ALIGNED) * _ALIGNED
        words = torch.zeros(at, dtype=torch.int32, device=device)
        views = {name: words[offsets[name] : offsets[name] + size] for name, size in sizes.items()}
        draws = Draws(views["draw_row"], views["draw_place"].fill_(-1), views["draw_position"])
        blocks = Blocks(**{name: views[name] for name in Blocks.__dataclass_fields__})
        angles = views["angles"].view(3, -1) if has_pictures else None
        inputs = PrefillInputs(views["token_ids"], blocks, views["logit_row"], views.get("next_ids"), angles)
        if n_gram:
            inputs = replace(inputs, ngram_ids=views["ngram_ids"].view(n_gram, -1))
        if has_adapters:
            of_logits = views["logit_adapter"].fill_(-1), views["logit_rows"].view(-1, GROUP_ROWS)
            own = AdapterRows(views["adapter"].fill_(-1))
            inputs = replace(inputs, adapters=own, logit_adapters=AdapterRows(*of_logits))
        return cls(n_blocks, n_segments, words, offsets, inputs, draws)


class PrefillBatch:
    """The buffers of every recorded size, from the host's side."""

    def __init__(
        self,
        batch_slots: BatchSlots,
        sizes: Rows[int],
        n_draws: int,
        spare_page: int,
        device: torch.device,
        has_head: bool = False,
        has_pictures: bool = False,
        has_adapters: bool = False,
    ) -> None:
        """sizes: numbers of blocks, ascending. n_draws: most draws of a step. spare_page: one that no
        sequence owns. has_head: whether a draft head runs behind the draws. has_pictures, has_adapters:
        whether prompts may have some.
        """
        self._batch_slots, self._spare_page, self._ngrams = batch_slots, spare_page, batch_slots.ngrams
        n_gram = 0 if batch_slots.ngrams is None else batch_slots.ngrams.size
        given = n_draws, device, has_head, has_pictures, has_adapters, n_gram
        self._buffers = {n: BlockBuffer.empty(n, *given) for n in sizes}
        self._ring = Ring(len(self._buffers[sizes[-1]].words), 3, device)
        self._host: Tensor | None = None

    def of(self, n_blocks: int) -> BlockBuffer:
        """The buffer that a recording of so many blocks reads."""
        return self._buffers[n_blocks]

    def layout(self, step: Step, prefills: list[int]) -> tuple[dict[int, int], int]:
        """Lays out the step's chunks `prefills`. Returns the row of each one's last token, and the blocks of
        the recording they run in.
        """
        ends, n_blocks = {}, 0
        for i in prefills:
            length = step.chunks[i].length
            ends[i] = n_blocks * PAGE_SIZE + length - 1
            n_blocks += -(-length // PAGE_SIZE)
        return ends, next(n for n in self._buffers if n >= n_blocks)

    def fill(self, step: Step, prefills: list[int]) -> tuple[int, list[Draw]]:
        """Writes the host's copy. Returns the blocks of the recording, and the draws in the order in which it
        makes them.
        """
        ends, n_blocks = self.layout(step, prefills)
        buffer = self._buffers[n_blocks]
        self._host = self._ring.take()[: len(buffer.words)]
        words = self._host.numpy()
        at = {name: words[begin:] for name, begin in buffer.offsets.items()}
        self._fill_blocks(at, buffer, [step.chunks[i] for i in prefills])
        draws = [draw for draw in step.draws if draw.chunk in ends]
        chunks = sorted({draw.chunk for draw in draws})
        at["logit_row"][: buffer.n_segments] = 0
        at["logit_row"][: len(chunks)] = [ends[i] for i in chunks]
        if buffer.inputs.adapters is not None:
            adapters = [step.chunks[i].sequence.adapter_slot for i in chunks]
            groups, rows = adapter_groups(adapters, buffer.n_segments)
            at["logit_adapter"][: len(groups)], at["logit_rows"][: len(rows)] = groups, rows
        at["draw_place"][: len(buffer.draws.batch_slot)] = -1
        for d, draw in enumerate(draws):
            sequence = draw.sequence
            self._batch_slots.move_in(sequence)
            at["draw_row"][d] = chunks.index(draw.chunk)
            at["draw_place"][d], at["draw_position"][d] = sequence.batch_slot, len(sequence.tokens)
        if buffer.inputs.next_ids is not None:
            self._fill_next(at["next_ids"][: buffer.n_blocks * PAGE_SIZE], ends, step, draws)
        return n_blocks, draws

    def send(self, n_blocks: int) -> None:
        """Puts the copy of what was filled last on the current stream."""
        assert self._host is not None
        self._buffers[n_blocks].words.copy_(self._host, non_blocking=True)
        self._ring.used()

    def _fill_next(self, next_ids: np.ndarray, ends: dict[int, int], step: Step, draws: list[Draw]) -> None:
        """Writes the ids behind the tokens; of one that is about to be drawn, the draw."""
        own = {draw.chunk: d for d, draw in enumerate(draws) if draw.sequence is step.chunks[draw.chunk].sequence}
        next_ids[:] = 0
        for i, end in ends.items():
            chunk = step.chunks[i]
            first = end + 1 - chunk.length
            known = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.length + 1]
            next_ids[first : first + len(known)] = known
            if len(known) < chunk.length and i in own:
                next_ids[end] = -1 - own[i]

    def _fill_blocks(self, at: dict[str, np.ndarray], buffer: BlockBuffer, chunks: list[Chunk]) -> None:
        """Writes tokens, blocks and segments of the chunks."""
        for name, unused in (
            ("n", 0),
            ("snapshot", -1),
            ("page", self._spare_page),
            ("position", 0),
            ("batch_slot", 0),
            ("block_segment", 0),
        ):
            at[name][: buffer.n_blocks] = unused
        has_adapters = buffer.inputs.adapters is not None
        if has_adapters:
            at["adapter"][: buffer.n_blocks] = -1
        n_rows = buffer.n_blocks * PAGE_SIZE
        at["token_ids"][:n_rows] = 0
        angles = at["angles"][: 3 * n_rows].reshape(3, n_rows) if buffer.inputs.angles is not None else None
        if angles is not None:
            angles[:] = 0
        grams = None
        if self._ngrams is not None:
            grams = at["ngram_ids"][: self._ngrams.size * n_rows].reshape(self._ngrams.size, n_rows)
            grams[:] = self._ngrams.eos_id
        b = 0
        for g, chunk in enumerate(chunks):
            sequence, start, length = chunk.sequence, chunk.start, chunk.length
            batch_slot, state_slot = self._batch_slots.refresh(sequence), sequence.state_slot
            assert state_slot is not None and start % PAGE_SIZE == 0
            end = b - -length // PAGE_SIZE
            rows = slice(b * PAGE_SIZE, b * PAGE_SIZE + length)
            at["token_ids"][rows] = sequence.tokens[start : start + length]
            if grams is not None:
                self._fill_ngrams(chunk, grams[:, rows])
            if angles is not None:
                self._fill_pictures(chunk, batch_slot, at["token_ids"][rows], angles[:, rows])
            at["n"][b:end] = PAGE_SIZE
            at["n"][end - 1] = length - (end - 1 - b) * PAGE_SIZE
            at["position"][b:end] = np.arange(start, start + (end - b) * PAGE_SIZE, PAGE_SIZE)
            at["batch_slot"][b:end] = batch_slot
            if has_adapters:
                at["adapter"][b:end] = sequence.adapter_slot
            at["page"][b:end] = sequence.pages[start // PAGE_SIZE : start // PAGE_SIZE + end - b]
            at["block_segment"][b:end] = g
            for n_tokens, snapshot in chunk.snapshots:
                at["snapshot"][b + n_tokens // PAGE_SIZE - 1] = snapshot
            at["segment_begin"][g] = b
            at["start_slot"][g] = state_slot if sequence.start_slot is None else sequence.start_slot
            at["state_slot"][g] = state_slot
            b = end
        at["segment_begin"][len(chunks) : buffer.n_segments + 1] = b
        at["start_slot"][len(chunks) : buffer.n_segments] = 0
        at["state_slot"][len(chunks) : buffer.n_segments] = 0

    def _fill_ngrams(self, chunk: Chunk, grams: np.ndarray) -> None:
        """Writes a chunk's tokens, and those before each of them as far as its n-grams have them."""
        assert self._ngrams is not None
        eos, start, end = self._ngrams.eos_id, chunk.start, chunk.start + chunk.length
        first = max(0, start + 1 - len(grams))
        known = np.array(chunk.sequence.tokens[first:end], np.int32)
        ids = np.concatenate([np.full(len(grams) - 1 - (start - first), eos, np.int32), known])
        for back, gram in enumerate(grams):
            gram[:] = ids[len(grams) - 1 - back : len(ids) - back]
            if back > 1:
                gram[grams[back - 1] == eos] = eos

    def _fill_pictures(self, chunk: Chunk, batch_slot: int, ids: np.ndarray, angles: np.ndarray) -> None:
        """Writes the angles of a chunk's tokens, and for ids of pictures' tokens the tower's rows."""
        start, end = chunk.start, chunk.start + chunk.length
        prompt = self._batch_slots.positions_in(batch_slot)
        angles[:] = np.arange(start, end) if prompt is None else prompt.of(start, end)[0]
        for begin, rows in row_ids(chunk):
            ids[begin : begin + len(rows)] = rows
