"""Makes batch tensors of a schedule: the only place where Python values become the forward's inputs.

All buffers are allocated once and keep their addresses, so that a recorded step can read them. Pages, which
belong to a sequence for its whole life, are kept by place and only extended. Everything else is rewritten
each step.
"""

from __future__ import annotations

import numpy as np

from deltic.engine.pictures import row_ids
from deltic.engine.step import Chunk, Sequence, Step
from deltic.models.qwen.cpu import AdapterBuffers, Angles, ForwardInputs
from deltic.models.rotary import PromptPositions
from deltic.ops.arrays import Array
from deltic.ops.geometry import PAGE_SIZE, Allocate


class Batch:
    """The forward's inputs for steps of up to n_tokens tokens, n_places sequences and n_logit_rows rows of
    logits.
    """

    def __init__(
        self,
        n_tokens: int,
        n_places: int,
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
            token_place=buffer("token place", n_tokens),
            seq_start=buffer("sequence start", n_places + 1),
            seq_context=buffer("sequence context", n_places),
            place=buffer("sequence place", n_places),
            start_slot=buffer("start slot", n_places),
            slot=buffer("sequence slot", n_places),
            snapshot_begin=buffer("snapshot begin", n_places + 1),
            snapshot_n=buffer("snapshot n", n_snapshots),
            snapshot_slot=buffer("snapshot slot", n_snapshots),
            n_redo=buffer("redone tokens", n_places),
            is_lazy=buffer("lazy", n_places),
            page_table=buffer("page table", n_places, n_pages_per_seq),
            logit_token=buffer("logit token", n_logit_rows),
        )
        self._counts, self._adapters = counts, adapters
        self._holder: list[tuple[Sequence, int] | None] = [None] * n_places
        self._n_pages_known = [0] * n_places
        self._has_snapshots = False
        self.angles: Angles | None = None
        """Set where prompts may have pictures."""
        self._prompts: list[PromptPositions | None] = [None] * n_places

    def fill(self, step: Step) -> list[int]:
        """Writes the step's inputs. Returns each chunk's first row of logits, -1 where it has none."""
        inputs, draws = self.inputs, {draw.chunk for draw in step.draws}
        starts, contexts, places, start_slots, slots = [0], [], [], [], []
        has_snapshots = has_prompt = False
        logit_tokens: list[int] = []
        first_row: list[int] = []
        at = 0
        if self.angles is not None:
            self.angles.begin()
        for i, chunk in enumerate(step.chunks):
            sequence, end = chunk.sequence, at + chunk.length
            place, slot, start_slot = sequence.place, sequence.slot, sequence.start_slot
            assert place is not None and slot is not None
            self._extend_pages(sequence, place)
            if chunk.length == 1:
                inputs.token_ids[at] = sequence.tokens[chunk.start]
                inputs.positions[at] = inputs.angles[at] = chunk.start
                inputs.token_place[at] = place
            else:
                ids = sequence.tokens[chunk.start : chunk.start + chunk.length]
                ids.extend(chunk.drafts)
                has_prompt = has_prompt or not chunk.drafts
                inputs.token_ids[at:end] = ids
                inputs.positions[at:end] = inputs.angles[at:end] = np.arange(chunk.start, chunk.start + chunk.length)
                inputs.token_place[at:end] = place
            if (prompt := self._prompts[place]) is not None:
                self._fill_pictures(chunk, prompt, at, end)
            first_row.append(len(logit_tokens) if chunk.prompt_logprobs or i in draws else -1)
            if chunk.prompt_logprobs or chunk.drafts:
                logit_tokens.extend(range(at, end))
            elif i in draws:
                logit_tokens.append(end - 1)
            starts.append(end)
            contexts.append(chunk.start)
            places.append(place)
            start_slots.append(slot if start_slot is None else start_slot)
            slots.append(slot)
            if chunk.snapshots:
                has_snapshots = True
            at = end
        n_seqs, n_rows = len(slots), len(logit_tokens)
        inputs.seq_start[: n_seqs + 1] = starts
        inputs.seq_context[:n_seqs] = contexts
        inputs.place[:n_seqs] = places
        inputs.start_slot[:n_seqs] = start_slots
        inputs.slot[:n_seqs] = slots
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
        self.angles.fill(self.inputs.angles[at:end], prompt, chunk.start, chunk.start + chunk.length)
        for begin, ids in row_ids(chunk):
            self.inputs.token_ids[at + begin : at + begin + len(ids)] = ids

    def positions_in(self, place: int) -> PromptPositions | None:
        """Positions of the sequence in a place. None: its prompt has no pictures."""
        return self._prompts[place]

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
        inputs.snapshot_slot[: len(snapshots)] = [slot for _, slot in snapshots]

    def _extend_pages(self, sequence: Sequence, place: int) -> None:
        """Updates the place's row of the page table: all of it when another sequence took it, or its pages
        changed.
        """
        holder = (sequence, sequence.pages_version)
        if self._holder[place] != holder:
            self._holder[place] = holder
            self._n_pages_known[place] = 0
            pictures = [(p.first, p.rows, p.columns) for p in sequence.request.pictures]
            self._prompts[place] = PromptPositions(pictures) if pictures else None
        known, n_pages = self._n_pages_known[place], len(sequence.pages)
        if known < n_pages:
            self.inputs.page_table[place, known:n_pages] = sequence.pages[known:]
            self._n_pages_known[place] = n_pages
