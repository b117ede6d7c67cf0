"""Makes batch tensors of a schedule: the only place where Python values become the forward's inputs.

All buffers are allocated once and keep their addresses, so that a recorded step can read them. Pages, which
belong to a sequence for its whole life, are kept by batch slot and only extended. Everything else is
rewritten each step.
"""

from __future__ import annotations

import numpy as np

from deltic.engine.pictures import row_ids
from deltic.engine.step import Chunk, Sequence, Step
from deltic.models.qwen.cpu import Angles
from deltic.models.qwen.cpu_buffers import AdapterBuffers, ForwardInputs
from deltic.models.qwen.ngrams import NgramShape
from deltic.models.qwen.shape import ModelShape
from deltic.models.rotary import PromptPositions
from deltic.ops.arrays import Array
from deltic.ops.cpu.index import GROUP
from deltic.ops.geometry import PAGE_SIZE, Allocate


class Batch:
    """The forward's inputs for steps of up to n_tokens tokens, n_batch_slots sequences and n_logit_rows rows
    of logits.
    """

    def __init__(
        self,
        shape: ModelShape,
        n_tokens: int,
        n_batch_slots: int,
        n_pages_per_seq: int,
        n_logit_rows: int,
        allocate: Allocate,
        adapters: AdapterBuffers | None = None,
    ) -> None:
        """adapters: where rows may have some."""

        def buffer(name: str, *size: int) -> Array:
            return np.asarray(allocate(name, size, np.int32))

        counts, n_snapshots = buffer("counts", 4), n_tokens // PAGE_SIZE
        self.inputs = ForwardInputs(
            n_tokens=counts[0, ...],
            n_seqs=counts[1, ...],
            n_logit_rows=counts[2, ...],
            n_hidden=counts[3, ...],
            token_ids=buffer("token ids", n_tokens),
            positions=buffer("positions", n_tokens),
            angles=buffer("angles", n_tokens),
            group_angles=buffer("group angles", n_tokens) if shape.index else None,
            hash_ids=buffer("n-gram ids", n_tokens) if shape.ngrams else None,
            previous_ids=buffer("n-gram ids before", n_tokens, shape.ngrams.size - 1) if shape.ngrams else None,
            token_batch_slot=buffer("token batch slot", n_tokens),
            seq_start=buffer("sequence start", n_batch_slots + 1),
            seq_context=buffer("sequence context", n_batch_slots),
            batch_slot=buffer("sequence batch slot", n_batch_slots),
            start_slot=buffer("start state slot", n_batch_slots),
            state_slot=buffer("sequence state slot", n_batch_slots),
            snapshot_begin=buffer("snapshot begin", n_batch_slots + 1),
            snapshot_n=buffer("snapshot n", n_snapshots),
            snapshot_slot=buffer("snapshot state slot", n_snapshots),
            n_redo=buffer("redone tokens", n_batch_slots),
            is_lazy=buffer("lazy", n_batch_slots),
            page_table=buffer("page table", n_batch_slots, n_pages_per_seq),
            logit_token=buffer("logit token", n_logit_rows),
        )
        self._counts, self._adapters, self._ngrams = counts, adapters, shape.ngrams
        self._holder: list[tuple[Sequence, int] | None] = [None] * n_batch_slots
        self._n_pages_known = [0] * n_batch_slots
        self._has_snapshots = False
        self.angles: Angles | None = None
        """Set where prompts may have pictures."""
        self._prompts: list[PromptPositions | None] = [None] * n_batch_slots

    def fill(self, step: Step) -> list[int]:
        """Writes the step's inputs. Returns each chunk's first row of logits; of those that it has, as
        `Chunk.logit_offsets` says.
        """
        inputs, draws = self.inputs, {draw.chunk for draw in step.draws}
        starts, contexts, batch_slots, start_slots, state_slots = [0], [], [], [], []
        has_snapshots = has_prompt = False
        logit_tokens: list[int] = []
        first_row: list[int] = []
        at = 0
        if self.angles is not None:
            self.angles.begin()
        for i, chunk in enumerate(step.chunks):
            sequence, end = chunk.sequence, at + chunk.length
            batch_slot, state_slot, start_slot = sequence.batch_slot, sequence.state_slot, sequence.start_slot
            assert batch_slot is not None and state_slot is not None
            self._extend_pages(sequence, batch_slot)
            if chunk.length == 1:
                inputs.token_ids[at] = sequence.tokens[chunk.start]
                inputs.positions[at] = inputs.angles[at] = chunk.start
                inputs.token_batch_slot[at] = batch_slot
            else:
                ids = sequence.tokens[chunk.start : chunk.start + chunk.length]
                ids.extend(chunk.drafts)
                has_prompt = has_prompt or not chunk.drafts
                inputs.token_ids[at:end] = ids
                inputs.positions[at:end] = inputs.angles[at:end] = np.arange(chunk.start, chunk.start + chunk.length)
                inputs.token_batch_slot[at:end] = batch_slot
            if inputs.group_angles is not None:
                first = inputs.positions[at:end]
                inputs.group_angles[at:end] = first - first % GROUP
            if self._ngrams is not None:
                self._fill_ngrams(chunk, at, end, self._ngrams)
            has_prompt = has_prompt or sequence.request.reads_hidden
            if (prompt := self._prompts[batch_slot]) is not None:
                self._fill_pictures(chunk, prompt, at, end)
            first_row.append(len(logit_tokens))
            logit_tokens += [at + offset for offset in chunk.logit_offsets(i in draws)]
            starts.append(end)
            contexts.append(chunk.start)
            batch_slots.append(batch_slot)
            start_slots.append(state_slot if start_slot is None else start_slot)
            state_slots.append(state_slot)
            if chunk.snapshots:
                has_snapshots = True
            at = end
        n_seqs, n_rows = len(state_slots), len(logit_tokens)
        inputs.seq_start[: n_seqs + 1] = starts
        inputs.seq_context[:n_seqs] = contexts
        inputs.batch_slot[:n_seqs] = batch_slots
        inputs.start_slot[:n_seqs] = start_slots
        inputs.state_slot[:n_seqs] = state_slots
        inputs.n_redo[:n_seqs] = [chunk.n_redo for chunk in step.chunks]
        inputs.is_lazy[:n_seqs] = [bool(chunk.drafts) for chunk in step.chunks]
        if has_snapshots or self._has_snapshots:
            self._fill_snapshots(step.chunks, has_snapshots)
        inputs.logit_token[:n_rows] = logit_tokens
        if self._adapters is not None:
            of_chunk = np.array([chunk.sequence.adapter_slot for chunk in step.chunks], np.int32)
            of_token = np.repeat(of_chunk, [chunk.length for chunk in step.chunks])
            self._adapters.rows.fill(of_token)
            self._adapters.logit_rows.fill(of_token[np.array(logit_tokens, np.int64)])
        self._counts[:] = at, n_seqs, n_rows, at if has_prompt else 0
        return first_row

    def _fill_pictures(self, chunk: Chunk, prompt: PromptPositions, at: int, end: int) -> None:
        """Angles of a chunk in or behind pictures, and for ids of their tokens the tower's rows."""
        assert self.angles is not None
        inputs, start = self.inputs, chunk.start
        self.angles.fill(inputs.angles[at:end], prompt, start, start + chunk.length)
        if inputs.group_angles is not None:
            self.angles.fill_groups(inputs.group_angles[at:end], inputs.angles[at:end], prompt, start)
        for begin, ids in row_ids(chunk):
            self.inputs.token_ids[at + begin : at + begin + len(ids)] = ids

    def _fill_ngrams(self, chunk: Chunk, at: int, end: int, ngrams: NgramShape) -> None:
        """Ids of a chunk's tokens, and of those before each: behind an end of text, and before the first,
        only ends.
        """
        inputs, n_before, eos = self.inputs, ngrams.size - 1, ngrams.eos_id
        assert inputs.hash_ids is not None and inputs.previous_ids is not None
        known = chunk.sequence.tokens[max(0, chunk.start - n_before) : chunk.start + chunk.length]
        known.extend(chunk.drafts)
        ids = np.full(n_before + chunk.length, eos, np.int32)
        ids[len(ids) - len(known) :] = known
        inputs.hash_ids[at:end] = ids[n_before:]
        is_over = np.zeros(chunk.length, bool)
        for i in range(1, n_before + 1):
            each = ids[n_before - i : len(ids) - i]
            is_over |= each == eos
            inputs.previous_ids[at:end, i - 1] = np.where(is_over, eos, each)

    def positions_in(self, batch_slot: int) -> PromptPositions | None:
        """Positions of the sequence in a batch slot. None: its prompt has no pictures."""
        return self._prompts[batch_slot]

    def _fill_snapshots(self, chunks: list[Chunk], has_snapshots: bool) -> None:
        """Fills the lists of snapshots. Without snapshots, leaves empty lists behind for every later number
        of sequences.
        """
        inputs, self._has_snapshots = self.inputs, has_snapshots
        if not has_snapshots:
            inputs.snapshot_begin[:] = 0
            return
        begin = np.cumsum([len(chunk.snapshots) for chunk in chunks])
        snapshots = [snapshot for chunk in chunks for snapshot in chunk.snapshots]
        inputs.snapshot_begin[1 : len(chunks) + 1] = begin
        inputs.snapshot_n[: len(snapshots)] = [n for n, _ in snapshots]
        inputs.snapshot_slot[: len(snapshots)] = [state_slot for _, state_slot in snapshots]

    def _extend_pages(self, sequence: Sequence, batch_slot: int) -> None:
        """Updates the batch slot's row of the page table: all of it when another sequence took it, or its
        pages changed.
        """
        holder = (sequence, sequence.pages_version)
        if self._holder[batch_slot] != holder:
            self._holder[batch_slot] = holder
            self._n_pages_known[batch_slot] = 0
            pictures = [(p.first, p.rows, p.columns) for p in sequence.request.pictures]
            self._prompts[batch_slot] = PromptPositions(pictures) if pictures else None
        known, n_pages = self._n_pages_known[batch_slot], len(sequence.pages)
        if known < n_pages:
            self.inputs.page_table[batch_slot, known:n_pages] = sequence.pages[known:]
            self._n_pages_known[batch_slot] = n_pages
