"""Schedule to batch tensors: the only place where Python values become the forward's inputs.

All buffers are allocated once and keep their addresses, so that a recorded step can read them. What belongs
to a sequence for its whole life (its pages) is kept by place and only extended; what changes is rewritten
each step.
"""

from __future__ import annotations

import numpy as np
import torch

from deltic.engine.step import Chunk, Sequence, Step
from deltic.models.qwen.cpu import ForwardInputs
from deltic.ops.geometry import PAGE_SIZE, Allocate


class Batch:
    """The forward's inputs for steps of up to n_tokens tokens, n_places sequences and n_logit_rows rows of
    logits.
    """

    def __init__(
        self, n_tokens: int, n_places: int, n_pages_per_seq: int, n_logit_rows: int, allocate: Allocate
    ) -> None:
        def buffer(name: str, *size: int) -> torch.Tensor:
            return allocate(name, size, torch.int32)

        counts, n_snapshots = buffer("counts", 3), n_tokens // PAGE_SIZE
        self.inputs = ForwardInputs(
            n_tokens=counts[0],
            n_seqs=counts[1],
            n_logit_rows=counts[2],
            token_ids=buffer("token ids", n_tokens),
            positions=buffer("positions", n_tokens),
            token_place=buffer("token place", n_tokens),
            seq_start=buffer("sequence start", n_places + 1),
            seq_context=buffer("sequence context", n_places),
            place=buffer("sequence place", n_places),
            start_slot=buffer("start slot", n_places),
            slot=buffer("sequence slot", n_places),
            snapshot_begin=buffer("snapshot begin", n_places + 1),
            snapshot_n=buffer("snapshot n", n_snapshots),
            snapshot_slot=buffer("snapshot slot", n_snapshots),
            page_table=buffer("page table", n_places, n_pages_per_seq),
            logit_token=buffer("logit token", n_logit_rows),
        )
        i = self.inputs
        self._counts = counts.numpy()
        self._token_ids, self._positions = i.token_ids.numpy(), i.positions.numpy()
        self._token_place, self._place = i.token_place.numpy(), i.place.numpy()
        self._seq_start, self._seq_context = i.seq_start.numpy(), i.seq_context.numpy()
        self._start_slot, self._slot = i.start_slot.numpy(), i.slot.numpy()
        self._snapshot_begin = i.snapshot_begin.numpy()
        self._snapshot_n, self._snapshot_slot = i.snapshot_n.numpy(), i.snapshot_slot.numpy()
        self._page_table, self._logit_token = i.page_table.numpy(), i.logit_token.numpy()
        self._holder: list[tuple[Sequence, int] | None] = [None] * n_places
        self._n_pages_known = [0] * n_places
        self._has_snapshots = False

    def fill(self, step: Step) -> list[int]:
        """Writes the step's inputs. Returns each chunk's first row of logits, -1 where it has none."""
        draws = {draw.chunk for draw in step.draws}
        starts, contexts, places, start_slots, slots = [0], [], [], [], []
        has_snapshots = False
        logit_tokens: list[int] = []
        first_row: list[int] = []
        at = 0
        for i, chunk in enumerate(step.chunks):
            sequence, end = chunk.sequence, at + chunk.length
            place, slot, start_slot = sequence.place, sequence.slot, sequence.start_slot
            assert place is not None and slot is not None
            self._extend_pages(sequence, place)
            if chunk.length == 1:
                self._token_ids[at] = sequence.tokens[chunk.start]
                self._positions[at] = chunk.start
                self._token_place[at] = place
            else:
                self._token_ids[at:end] = sequence.tokens[chunk.start : chunk.start + chunk.length]
                self._positions[at:end] = np.arange(chunk.start, chunk.start + chunk.length)
                self._token_place[at:end] = place
            first_row.append(len(logit_tokens) if chunk.prompt_logprobs or i in draws else -1)
            if chunk.prompt_logprobs:
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
        self._seq_start[: n_seqs + 1] = starts
        self._seq_context[:n_seqs] = contexts
        self._place[:n_seqs] = places
        self._start_slot[:n_seqs] = start_slots
        self._slot[:n_seqs] = slots
        if has_snapshots or self._has_snapshots:
            self._fill_snapshots(step.chunks, has_snapshots)
        self._logit_token[:n_rows] = logit_tokens
        self._counts[:] = at, n_seqs, n_rows
        return first_row

    def _fill_snapshots(self, chunks: list[Chunk], has_snapshots: bool) -> None:
        """Without snapshots, leaves empty lists behind for every later number of sequences."""
        self._has_snapshots = has_snapshots
        if not has_snapshots:
            self._snapshot_begin[:] = 0
            return
        begin = np.cumsum([len(chunk.snapshots) for chunk in chunks])
        snapshots = [snapshot for chunk in chunks for snapshot in chunk.snapshots]
        self._snapshot_begin[1 : len(chunks) + 1] = begin
        self._snapshot_n[: len(snapshots)] = [n for n, _ in snapshots]
        self._snapshot_slot[: len(snapshots)] = [slot for _, slot in snapshots]

    def _extend_pages(self, sequence: Sequence, place: int) -> None:
        """Brings the place's row of the page table up to date: whole when another sequence took it, or its
        pages changed.
        """
        holder = (sequence, sequence.pages_version)
        if self._holder[place] != holder:
            self._holder[place] = holder
            self._n_pages_known[place] = 0
        known, n_pages = self._n_pages_known[place], len(sequence.pages)
        if known < n_pages:
            self._page_table[place, known:n_pages] = sequence.pages[known:]
            self._n_pages_known[place] = n_pages
