"""The draft head at work: it follows what steps compute, and guesses what comes next (MTP).

A row of the head is a token's hidden state and the id of the token behind it. Its keys and values stand in
the pages beside those of the model's layers, at the token's position, so a prefix hit brings them along.
The last token of a page is a row with the token that came first behind it. Another continuation reads that
one's. A guess is only a guess: nothing else reads these keys and values.

Hidden states wait, by batch slot, until guesses are wanted or their page ends: a sequence for which nothing
is guessed costs next to nothing. Those of a sequence that loses its batch slot meanwhile are lost.

Guesses come from the head's first ids (models/qwen/shape.N_DRAFTED), by the draw that the model's own token
will come by: the same parameters, seed and position. Each is the next row, with the head's own hidden state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deltic.engine.drafts import n_guessable
from deltic.engine.step import Chunk, Sequence, Step
from deltic.models.qwen.cpu import Angles, Qwen
from deltic.models.qwen.cpu_buffers import Activations, Memory, RowInputs, allocate_drafts
from deltic.models.qwen.shape import ModelShape
from deltic.ops.arrays import Array, bfloat16
from deltic.ops.cpu.index import GROUP
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.runtime.cpu.batch import Batch
from deltic.runtime.cpu.sampler import Draws, Guess, Sampler


@dataclass(eq=False)
class _Rows:
    """Rows that the head is to run: of a sequence's tokens from `start` on."""

    sequence: Sequence
    start: int
    hidden: Array
    """The bits of bfloat16 [n, S H]."""
    ids: list[int]
    """Ids of the tokens behind the rows."""
    guess: Guess | None = None


class DraftHead:
    """The head's program and buffers, for up to n_rows rows at once. Not thread-safe."""

    def __init__(self, shape: ModelShape, n_rows: int, n_batch_slots: int, n_real: int, allocate: Allocate) -> None:
        """n_real: ids that may be drawn."""
        self.n_rows = n_rows
        self.buffers = allocate_drafts(shape, n_rows, n_batch_slots, allocate)

        def buffer(name: str, *size: int) -> Array:
            return np.asarray(allocate(f"draft {name}", size, np.int32))

        self._counts = buffer("counts", 2)
        names = ["token_ids", "positions", "angles", "token_batch_slot", *(["group_angles"] if shape.index else [])]
        self._rows, self._n_streams = {name: buffer(name, n_rows) for name in names}, shape.n_streams
        self._seqs = {name: buffer(name, n_batch_slots) for name in ("seq_context", "batch_slot")}
        self._seq_start = buffer("seq_start", n_batch_slots + 1)
        self._shifts = np.zeros(n_batch_slots, np.int32)
        """Shifts from positions to angles behind the pictures of the prompts of guesses."""
        n_ids = min(n_real, self.buffers.logits.shape[1])
        self._draws = Draws(n_batch_slots, n_ids, shape.eos_token_ids, allocate, "guess")
        self._guessed = buffer("guesses", n_batch_slots)
        waiting = allocate("waiting hidden states", (n_batch_slots, PAGE_SIZE, shape.stream_size), bfloat16)
        self._waiting = waiting.view(np.uint16)  # as its bits, which numpy copies many times as fast
        """Hidden states that wait, by batch slot, and by the token's place in its page."""
        self.angles: Angles | None = None
        """Set where prompts may have pictures. Guesses read for a picture's token the embedding of its id."""
        self._owner: list[Sequence | None] = [None] * n_batch_slots
        self._start, self._end = [0] * n_batch_slots, [0] * n_batch_slots
        """Ranges of the tokens whose hidden states wait, by batch slot: within one page."""

    def record(
        self,
        model: Qwen,
        batch: Batch,
        memory: Memory,
        act: Activations,
        sampler: Sampler,
        n_threads: int,
        cpus: tuple[int, ...],
    ) -> None:
        """Records the head over the model's memory and activations. batch: of the model's steps."""
        inputs = batch.inputs
        self._batch, self._last_angle = batch, len(model.cos) - 1
        assert act.hidden is not None
        self._inputs, self._hidden = inputs, act.hidden.view(np.uint16)
        self._final = act.final_hidden.view(np.uint16)
        self._sampler = sampler
        own = RowInputs(
            n_tokens=self._counts[0, ...],
            n_seqs=self._counts[1, ...],
            **self._rows,
            **self._seqs,
            seq_start=self._seq_start,
            page_table=inputs.page_table,
        )
        self._keys, self._program = (Program(n_threads, cpus=cpus) for _ in range(2))
        model.record_draft(self._keys, own, memory, act, self.buffers, keys_only=True)
        model.record_draft(self._program, own, memory, act, self.buffers, keys_only=False)
        sampler.record_guesses(self._program, self.buffers.logits, self._draws, self._guessed)

    def follow(self, step: Step, drawn: list[list[int]]) -> tuple[list[list[int]], float]:
        """Takes the hidden states that a step has computed, and guesses behind its draws as many tokens as
        they want. Gives these, and the seconds that they took.

        drawn: of each draw. Before the step's sequences have them, and before its pages are copied.
        """
        begin = time.perf_counter()
        own = {draw.chunk: i for i, draw in enumerate(step.draws) if draw.sequence is step.chunks[draw.chunk].sequence}
        guesses: list[list[int]] = [[] for _ in step.draws]
        ready: list[_Rows] = []
        n, is_decode = int(self._inputs.n_tokens), not self._inputs.n_hidden
        if is_decode:  # every row has logits; those that were not accepted are overwritten
            at = self._inputs.token_batch_slot[:n], self._inputs.positions[:n] % PAGE_SIZE
            self._waiting[at] = self._final[:n]
        first = 0
        for c, chunk in enumerate(step.chunks):
            i = own.get(c)
            tokens = drawn[i] if i is not None else []
            guess = None
            if i is not None and step.draws[i].n_guesses:
                n_wanted = min(step.draws[i].n_guesses, n_guessable(chunk.sequence, len(tokens)))
                guess = Guess(chunk.sequence, tokens, n_wanted, guesses[i]) if n_wanted else None
            hidden = None if is_decode else self._hidden[first : first + chunk.length]
            if (rows := self._take(chunk, tokens, guess, hidden)) is not None:
                ready.append(rows)
            first += chunk.length
        if not ready:
            return guesses, 0.0
        for group in _grouped(ready, self.n_rows):
            self._run(group)
        return guesses, time.perf_counter() - begin

    def _take(self, chunk: Chunk, drawn: list[int], guess: Guess | None, hidden: Array | None) -> _Rows | None:
        """Takes a chunk's rows. Gives what is to be run now: all if there is a guess, else whole pages.

        hidden: of the chunk, where it is not waiting yet.
        """
        sequence, batch_slot = chunk.sequence, chunk.sequence.batch_slot
        assert batch_slot is not None
        if drawn[:1] == [-1]:  # its hidden states are no numbers
            self._owner[batch_slot] = None
            return None
        if self._owner[batch_slot] is not sequence or self._end[batch_slot] != chunk.start:
            self._owner[batch_slot], self._start[batch_slot] = sequence, chunk.start
        start, end = self._start[batch_slot], chunk.start + (len(drawn) if chunk.drafts else chunk.length)
        until = end if guess is not None else end // PAGE_SIZE * PAGE_SIZE
        self._end[batch_slot] = end
        waiting, page = self._waiting[batch_slot], start - start % PAGE_SIZE
        if hidden is not None:
            if start < chunk.start:
                hidden = np.concatenate([waiting[start - page : chunk.start - page], hidden])
            if until < end:
                waiting[max(start, until) % PAGE_SIZE :][: end - max(start, until)] = hidden[max(0, until - start) :]
        if until <= start:
            return None
        found = waiting[start - page :] if hidden is None else hidden
        ids = [*sequence.tokens[start + 1 : until + 1], *drawn][: until - start]
        self._start[batch_slot] = until
        return _Rows(sequence, start, found[: until - start], ids, guess)

    def _run(self, group: list[_Rows]) -> None:
        """Runs rows: of those that end in a guess the last one by itself, of the others only what attention
        reads. Then guesses behind guesses.
        """
        hidden = self.buffers.hidden.view(np.uint16)
        guesses = [(rows.guess, rows) for rows in group if rows.guess is not None]
        before = [(rows, len(rows.ids) - (rows.guess is not None)) for rows in group]
        if before := [(rows, n) for rows, n in before if n]:
            hidden[: sum(n for _, n in before)] = np.concatenate([rows.hidden[:n] for rows, n in before])
            self._fill([(rows.sequence, rows.start, rows.ids[:n]) for rows, n in before])
            self._keys.run()
        if not guesses:
            return
        hidden[: len(guesses)] = [rows.hidden[-1] for _, rows in guesses]
        self._fill([(rows.sequence, rows.start + len(rows.ids) - 1, rows.ids[-1:]) for _, rows in guesses])
        asked = [guess for guess, _ in guesses]
        self._sampler.fill_guesses(self._draws, [(guess.sequence, guess.drawn) for guess in asked])
        while True:
            self._program.run()
            for guess, token in zip(asked, self._guessed[: len(asked)].tolist(), strict=True):
                if token < 0:  # nothing can be drawn of the head's ids
                    guess.n_wanted = 0
                else:
                    guess.tokens.append(token)
            left = [i for i, guess in enumerate(asked) if len(guess.tokens) < guess.n_wanted]
            if not left:
                return
            self._go_on(left)
            if len(left) < len(asked):
                asked = [asked[i] for i in left]
            self._sampler.go_on(self._draws, [(guess.sequence, [*guess.drawn, *guess.tokens]) for guess in asked])

    def _go_on(self, left: list[int]) -> None:
        """The next rows: behind the last ones that are left, with what was guessed and the head's own hidden
        states.
        """
        n = len(left)
        if n < self._counts[0]:
            hidden = self.buffers.hidden.view(np.uint16)
            for each in (*self._rows.values(), *self._seqs.values(), self._guessed, self._shifts, hidden):
                each[:n] = each[left]
            self._count(n, n)
        self._rows["token_ids"][:n] = self._guessed[:n]
        self._rows["positions"][:n] += 1
        positions = self._rows["positions"][:n]
        self._rows["angles"][:n] = angles = np.minimum(positions + self._shifts[:n], self._last_angle)
        if (groups := self._rows.get("group_angles")) is not None:
            groups[:n] = np.where(positions % GROUP == 0, angles, groups[:n])
        self._seqs["seq_context"][:n] += 1

    def _fill(self, chunks: list[tuple[Sequence, int, list[int]]]) -> None:
        """Writes what the head runs: of a sequence, from a position on, the ids behind. The hidden states are
        in the buffer.
        """
        ends = np.cumsum([len(ids) for _, _, ids in chunks])
        n, n_seqs = int(ends[-1]), len(chunks)
        self._rows["token_ids"][:n] = [id for _, _, ids in chunks for id in ids]
        self._rows["positions"][:n] = [start + i for _, start, ids in chunks for i in range(len(ids))]
        positions, angles, groups = (self._rows.get(name) for name in ("positions", "angles", "group_angles"))
        assert positions is not None and angles is not None
        angles[:n] = positions[:n]
        if groups is not None:
            groups[:n] = positions[:n] - positions[:n] % GROUP
        self._shifts[:n_seqs] = 0
        if self.angles is not None:
            self.angles.begin()
            for i, ((sequence, start, ids), end) in enumerate(zip(chunks, ends, strict=True)):
                assert sequence.batch_slot is not None
                if (prompt := self._batch.positions_in(sequence.batch_slot)) is not None:
                    some = slice(end - len(ids), end)
                    self._shifts[i] = prompt.shift
                    self.angles.fill(angles[some], prompt, start, start + len(ids))
                    if groups is not None:
                        self.angles.fill_groups(groups[some], angles[some], prompt, start)
        self._rows["token_batch_slot"][:n] = [sequence.batch_slot for sequence, _, ids in chunks for _ in ids]
        self._seq_start[1 : n_seqs + 1] = ends
        self._seqs["seq_context"][:n_seqs] = [start for _, start, _ in chunks]
        self._seqs["batch_slot"][:n_seqs] = [sequence.batch_slot for sequence, _, _ in chunks]
        self._count(n, n_seqs)

    def _count(self, n: int, n_seqs: int) -> None:
        self._counts[:] = n, n_seqs
        self.buffers.n_pairs[...] = n * self._n_streams


def _grouped(ready: list[_Rows], n_rows: int) -> Iterator[list[_Rows]]:
    """Yields groups of as many rows as fit at once. A sequence's rows that do not fit alone come in parts.
    The last part guesses.
    """
    group: list[_Rows] = []
    n = 0
    for rows in ready:
        for i in range(0, len(rows.ids), n_rows):
            ids = rows.ids[i : i + n_rows]
            is_last = i + n_rows >= len(rows.ids)
            part = _Rows(
                rows.sequence, rows.start + i, rows.hidden[i : i + n_rows], ids, rows.guess if is_last else None
            )
            if n + len(ids) > n_rows:
                yield group
                group, n = [], 0
            group.append(part)
            n += len(ids)
    if group:
        yield group
