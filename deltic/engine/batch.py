"""Schedule to batch tensors: the only place where Python values become the forward's inputs.

All buffers are allocated once and keep their addresses, so that a recorded step can read them. What belongs to a
sequence for its whole life (its pages) is kept by state slot and only extended; what changes is rewritten each step.
"""

from __future__ import annotations

import numpy as np
import torch

from deltic.engine.request import Sequence, Step
from deltic.models.qwen import Allocate, ForwardInputs


class Batch:
    """The forward's inputs for steps of up to n_tokens tokens, n_slots sequences and n_logit_rows rows of logits."""

    def __init__(
        self, n_tokens: int, n_slots: int, n_pages_per_seq: int, n_logit_rows: int, allocate: Allocate
    ) -> None:
        def buffer(name: str, *size: int) -> torch.Tensor:
            return allocate(name, size, torch.int32)

        counts = buffer("counts", 3)
        self.inputs = ForwardInputs(
            n_tokens=counts[0],
            n_seqs=counts[1],
            n_logit_rows=counts[2],
            token_ids=buffer("token ids", n_tokens),
            positions=buffer("positions", n_tokens),
            token_slot=buffer("token slot", n_tokens),
            seq_start=buffer("sequence start", n_slots + 1),
            seq_context=buffer("sequence context", n_slots),
            slot=buffer("sequence slot", n_slots),
            page_table=buffer("page table", n_slots, n_pages_per_seq),
            logit_token=buffer("logit token", n_logit_rows),
        )
        i = self.inputs
        self._counts = counts.numpy()
        self._token_ids, self._positions = i.token_ids.numpy(), i.positions.numpy()
        self._token_slot = i.token_slot.numpy()
        self._seq_start, self._seq_context, self._slot = (
            i.seq_start.numpy(),
            i.seq_context.numpy(),
            i.slot.numpy(),
        )
        self._page_table, self._logit_token = i.page_table.numpy(), i.logit_token.numpy()
        self._holder: list[tuple[Sequence, int] | None] = [None] * n_slots
        self._n_pages_known = [0] * n_slots

    def fill(self, step: Step) -> list[int]:
        """Writes the step's inputs; returns, for each chunk, its first row of logits (-1 where it has none)."""
        draws = {draw.chunk for draw in step.draws}
        starts, contexts, slots = [0], [], []
        logit_tokens: list[int] = []
        first_row: list[int] = []
        at = 0
        for i, chunk in enumerate(step.chunks):
            sequence, end = chunk.sequence, at + chunk.length
            slot = sequence.slot
            assert slot is not None
            self._extend_pages(sequence, slot)
            if chunk.length == 1:
                self._token_ids[at] = sequence.tokens[chunk.start]
                self._positions[at] = chunk.start
                self._token_slot[at] = slot
            else:
                self._token_ids[at:end] = sequence.tokens[chunk.start : chunk.start + chunk.length]
                self._positions[at:end] = np.arange(chunk.start, chunk.start + chunk.length)
                self._token_slot[at:end] = slot
            first_row.append(len(logit_tokens) if chunk.prompt_logprobs or i in draws else -1)
            if chunk.prompt_logprobs:
                logit_tokens.extend(range(at, end))
            elif i in draws:
                logit_tokens.append(end - 1)
            starts.append(end)
            contexts.append(chunk.start)
            slots.append(slot)
            at = end
        n_seqs, n_rows = len(slots), len(logit_tokens)
        self._seq_start[: n_seqs + 1] = starts
        self._seq_context[:n_seqs] = contexts
        self._slot[:n_seqs] = slots
        self._logit_token[:n_rows] = logit_tokens
        self._counts[:] = at, n_seqs, n_rows
        return first_row

    def _extend_pages(self, sequence: Sequence, slot: int) -> None:
        """Brings the slot's row of the page table up to date: whole when the slot was taken anew."""
        # A preempted sequence may get its slot back, with other pages.
        holder = (sequence, sequence.n_preempted)
        if self._holder[slot] != holder:
            self._holder[slot] = holder
            self._n_pages_known[slot] = 0
        known, n_pages = self._n_pages_known[slot], len(sequence.pages)
        if known < n_pages:
            self._page_table[slot, known:n_pages] = sequence.pages[known:]
            self._n_pages_known[slot] = n_pages
