"""The draft head at work: it follows what steps compute, and guesses what comes next (MTP).

A row of the head is a token's hidden state and the id of the token behind it. Its keys and values stand in
the pages beside those of the model's layers, at the token's place, so a prefix hit brings them along. The
last token of a page is a row with the token that came first behind it; another continuation reads that one's.
A guess is only a guess: nothing else reads these keys and values.

Rows wait, on the host, until guesses are wanted or their page ends: a sequence for which nothing is guessed
costs next to nothing. Those of a sequence that loses its place meanwhile are lost.

Guesses come from the head's first ids (models/qwen/cpu.N_DRAFTED), by the draw that the model's own token
will come by: the same parameters, seed and position. Each is the next row, with the head's own hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from deltic.engine.step import Sequence, Step
from deltic.models.qwen.cpu import Activations, DraftBuffers, Memory, Qwen, RowInputs, allocate_drafts
from deltic.models.qwen.shape import ModelShape
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.runtime.cpu.sampler import Draws, Sampler


@dataclass(eq=False)
class _Rows:
    """Rows of a sequence that the head has not seen: of its tokens from `start` on."""

    sequence: Sequence
    start: int
    hidden: list[Array] = field(default_factory=list)
    """bfloat16 [n, H] each."""
    ids: list[int] = field(default_factory=list)
    """Of the tokens behind them."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(eq=False)
class _Guess:
    """Tokens that may follow a sequence's."""

    draw: int
    """Index into Step.draws."""
    sequence: Sequence
    drawn: list[int]
    """What the step drew: they are not among the sequence's tokens yet."""
    n_wanted: int
    tokens: list[int] = field(default_factory=list)


class DraftHead:
    """The head's program and buffers, for up to n_rows rows at once. Not thread-safe."""

    def __init__(self, shape: ModelShape, n_rows: int, n_places: int, n_real: int, allocate: Allocate) -> None:
        """n_real: ids that may be drawn."""
        self.n_rows = n_rows
        self.buffers: DraftBuffers = allocate_drafts(shape, n_rows, n_places, allocate)

        def buffer(name: str, *size: int) -> Array:
            return np.asarray(allocate(f"draft {name}", size, np.int32))

        self._counts = buffer("counts", 3)
        self._rows = {name: buffer(name, n_rows) for name in ("token_ids", "positions", "token_place")}
        self._seqs = {name: buffer(name, n_places) for name in ("seq_context", "place")}
        self._seq_start, self._logit_token = buffer("seq_start", n_places + 1), buffer("logit_token", n_places)
        n_ids = min(n_real, self.buffers.logits.shape[1])
        self._draws = Draws(n_places, n_ids, shape.eos_token_ids, allocate, "guess")
        self._guessed = buffer("guesses", n_places)
        self._waiting: list[_Rows | None] = [None] * n_places

    def record(
        self, model: Qwen, page_table: Array, memory: Memory, act: Activations, sampler: Sampler, program: Program
    ) -> None:
        """Records the head over the model's memory and activations. The tables are the step's."""
        assert act.hidden is not None
        self._computed, self._sampler, self._program = act.hidden, sampler, program
        inputs = RowInputs(
            n_tokens=self._counts[0, ...],
            n_seqs=self._counts[1, ...],
            n_logit_rows=self._counts[2, ...],
            **self._rows,
            **self._seqs,
            seq_start=self._seq_start,
            page_table=page_table,
            logit_token=self._logit_token,
        )
        model.record_draft(program, inputs, memory, act, self.buffers)
        sampler.record_guesses(program, self.buffers.logits, self._draws, self._guessed)

    def follow(self, step: Step, drawn: list[list[int]]) -> list[list[int]]:
        """Takes the rows that a step has computed, and guesses behind its draws as many tokens as they want.

        drawn: of each draw. Before the step's sequences have them, and before its pages are copied.
        """
        guesses = [_Guess(i, draw.sequence, drawn[i], draw.n_guesses) for i, draw in enumerate(step.draws)]
        own = {draw.chunk: i for i, draw in enumerate(step.draws) if draw.sequence is step.chunks[draw.chunk].sequence}
        ready: list[tuple[_Rows, _Guess | None]] = []
        at = 0
        for c, chunk in enumerate(step.chunks):
            guess = guesses[own[c]] if c in own else None
            sequence, tokens = chunk.sequence, guess.drawn if guess is not None else []
            place, first = sequence.place, at
            at += chunk.length
            assert place is not None
            if tokens[:1] == [-1]:
                self._waiting[place] = None
                continue
            ids = [*sequence.tokens[chunk.start + 1 : chunk.start + 1 + chunk.length], *tokens]
            ids = ids[: len(tokens) if chunk.drafts else chunk.length]
            rows = self._waiting[place]
            if rows is None or rows.sequence is not sequence or rows.end != chunk.start:
                rows = self._waiting[place] = _Rows(sequence, chunk.start)
            rows.hidden.append(self._computed[first : first + len(ids)].copy())
            rows.ids += ids
            is_wanted = guess is not None and guess.n_wanted > 0
            if is_wanted or rows.end // PAGE_SIZE > rows.start // PAGE_SIZE:
                ready.append((rows, guess if is_wanted else None))
                self._waiting[place] = None
        for group in _grouped(ready, self.n_rows):
            self._run(group)
        return [guess.tokens for guess in guesses]

    def _run(self, group: list[tuple[_Rows, _Guess | None]]) -> None:
        """Runs rows, then guesses behind guesses."""
        group = sorted(group, key=lambda each: each[1] is None)  # the first rows are those that guess
        guesses = [guess for _, guess in group if guess is not None]
        hidden, at = self.buffers.hidden, 0
        for rows, _ in group:
            for part in rows.hidden:
                hidden[at : at + len(part)] = part
                at += len(part)
        self._forward([(rows.sequence, rows.start, rows.ids) for rows, _ in group], guesses)
        while left := [i for i, guess in enumerate(guesses) if len(guess.tokens) < _room(guess)]:
            hidden[: len(left)] = hidden[left]
            guesses = [guesses[i] for i in left]
            behind = [
                (g.sequence, len(g.sequence.tokens) + len(g.drawn) + len(g.tokens) - 2, g.tokens[-1:]) for g in guesses
            ]
            self._forward(behind, guesses)

    def _forward(self, chunks: list[tuple[Sequence, int, list[int]]], guesses: list[_Guess]) -> None:
        """Runs the head over chunks, (sequence, first position, ids behind), whose hidden states are in the
        buffer. From the last rows of the first chunks the guesses are drawn.
        """
        ends = np.cumsum([len(ids) for _, _, ids in chunks])
        n, n_seqs, n_draws = int(ends[-1]), len(chunks), len(guesses)
        self._rows["token_ids"][:n] = [id for _, _, ids in chunks for id in ids]
        self._rows["positions"][:n] = [start + i for _, start, ids in chunks for i in range(len(ids))]
        self._rows["token_place"][:n] = [sequence.place for sequence, _, ids in chunks for _ in ids]
        self._seq_start[1 : n_seqs + 1] = ends
        self._seqs["seq_context"][:n_seqs] = [start for _, start, _ in chunks]
        self._seqs["place"][:n_seqs] = [sequence.place for sequence, _, _ in chunks]
        self._logit_token[:n_draws] = ends[:n_draws] - 1
        self._counts[:] = n, n_seqs, n_draws
        self._sampler.fill_guesses(self._draws, [(guess.sequence, [*guess.drawn, *guess.tokens]) for guess in guesses])
        self._program.run()
        for guess, token in zip(guesses, self._guessed[:n_draws].tolist(), strict=True):
            if token < 0:  # nothing can be drawn of the head's ids
                guess.n_wanted = 0
            else:
                guess.tokens.append(token)


def _room(guess: _Guess) -> int:
    """How many tokens it may have: the rows of all but the last need a place in the pages that there are."""
    last = len(guess.sequence.tokens) + len(guess.drawn) - 1
    n_places = PAGE_SIZE - last % PAGE_SIZE if last < len(guess.sequence.pages) * PAGE_SIZE else 0
    return min(guess.n_wanted, 1 + n_places)


def _grouped(ready: list[tuple[_Rows, _Guess | None]], n_rows: int) -> Iterator[list[tuple[_Rows, _Guess | None]]]:
    """As many as fit at once. One that does not fit alone comes in parts; the last one guesses."""
    group: list[tuple[_Rows, _Guess | None]] = []
    n = 0
    for rows, guess in ready:
        for part in _parts(rows, n_rows):
            if n + len(part.ids) > n_rows:
                yield group
                group, n = [], 0
            group.append((part, guess if part.end == rows.end else None))
            n += len(part.ids)
    if group:
        yield group


def _parts(rows: _Rows, n_rows: int) -> Iterator[_Rows]:
    if len(rows.ids) <= n_rows:
        yield rows
        return
    hidden = np.concatenate(rows.hidden)
    for i in range(0, len(rows.ids), n_rows):
        yield _Rows(rows.sequence, rows.start + i, [hidden[i : i + n_rows]], rows.ids[i : i + n_rows])
